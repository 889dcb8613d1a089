"""Lightning: `ExactResume`, a callback that adds what Lightning's own checkpoints lack for an exact resume.

Lightning saves the states of its train loaders, and loads them when it resumes in mid-epoch. But it saves them after
its own prefetching, only for rank 0, and not for validation. It counts batches of the world that saved them, and with
several loaders it forgets which of them had ended. It does not save the global random generators, from which dropout
draws. The callback puts an object between Lightning and each loader, which counts the batches that were handed over but
not trained on, and saves the rest of what a resume needs.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_unflatten

from midepoch.checkpoint.generators import check_generators, save_generators, seed_generators, set_generators
from midepoch.combine.combine import combine
from midepoch.errors import StateError, UnsupportedSourceError, warn
from midepoch.loader.lending import loader_of
from midepoch.loader.loader import Loader
from midepoch.loader.part import Part
from midepoch.loader.saving import state_for_checkpoint
from midepoch.order.keys import derive_key
from midepoch.state.format import State
from midepoch.state.parts import gather_state
from midepoch.trainers import lightning_private as private

if TYPE_CHECKING or "lightning" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
else:  # the same under its older name, if the program uses that
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.combined_loader import CombinedLoader

__all__ = ["ExactResume"]

_logger = logging.getLogger("midepoch")
_KEY = "midepoch"  # in checkpoints
_VERSION = 2
_KEY_OF_GENERATORS = 0x4C495447  # no other keys begin with this word


class ExactResume(Callback):
    """Add it to the trainer, both when a run starts and when it resumes: ``Trainer(callbacks=[ExactResume()])``.

    It needs wrapped train loaders, wherever they are made. Validation loaders may be wrapped too. A run then resumes
    exactly from any checkpoint: with loaders of unknown length, several loaders in any mode of CombinedLoader,
    ``limit_train_batches``, ``max_steps``, an exception in the middle of a batch, and on another number of processes.
    Lightning's count of batches is adjusted. A validation that was interrupted is run from its start.

    Python's, numpy's and torch's global generators go on where they were, on each process, and those of its GPU if CUDA
    is in use. A process of a rank that the checkpoint does not know gets seeds of its own.

    Args:
        generators: whether to save these generators, 14 KB for each process, and to set them in a run that
            resumes. False leaves them alone.

    Raises UnsupportedSourceError if a train loader is not wrapped. Warns with MidepochWarning if a checkpoint is saved
    between two batches whose gradients are accumulated, because no checkpoint holds gradients.
    """

    def __init__(self, generators: bool = True) -> None:
        self._saves_generators = generators
        self._set_generators: Callable[[], None] | None = None  # to those of the checkpoint that this run resumes from
        self._train: _CountedLoader | None = None
        self._validation: list[_CountedLoader] = []
        self._before_sanity_check: list[State] = []
        self._is_validating = False
        self._saved: dict[str, Any] | None = None  # from the checkpoint that this run resumes from
        self._validation_states: list[State | None] = []  # from that checkpoint, until there are loaders to load them
        self._give_back: list[Callable[[], None]] = []

    # --- between Lightning and the loaders ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Intercept the loaders before Lightning gets them."""
        if stage != "fit":
            return
        private.check(trainer)
        fit_loop = trainer.fit_loop
        self._train, self._validation, self._is_validating = None, [], False
        self._saved, self._validation_states, self._set_generators = None, [], None
        self._give_back = [
            private.intercept(fit_loop, lambda loaders: self._take_train(loaders, trainer)),
            private.intercept(fit_loop.epoch_loop.val_loop, lambda loaders: self._take_validation(loaders, trainer)),
        ]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore Lightning's own sources of loaders."""
        while self._give_back:
            self._give_back.pop()()

    def _take_train(self, loaders: Any, trainer: Any) -> Any:
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
        parts = [loader_of(each) for each in combined.flattened]
        wrapped = [each for each in parts if each is not None]
        if len(wrapped) < len(parts):
            names = {type(each).__name__ for each, part in zip(combined.flattened, parts, strict=True) if part is None}
            raise UnsupportedSourceError(
                f"ExactResume needs wrapped train loaders, and those of type {', '.join(sorted(names))} are not: pass "
                "midepoch.wrap(loader)"
            )
        if private.mode_of(combined) == "sequential":  # Lightning refuses this mode for training
            return loaders
        for part in wrapped:
            _begin(part, trainer.current_epoch)
        shape: Callable[[Any], Any] | None = None
        if loaders is combined.flattened[0]:
            loader = wrapped[0]
        else:
            loader = combine(wrapped, private.mode_of(combined))
            shape = lambda batch: tree_unflatten(batch, private.spec_of(combined))  # noqa: E731
        self._train = _CountedLoader(loader, shape, lambda: private.fetcher_of(trainer.fit_loop))
        self._load_train()
        return self._train

    def _take_validation(self, loaders: Any, trainer: Any) -> Any:
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        fetcher = lambda: private.fetcher_of(val_loop)  # noqa: E731
        parts = [loader_of(each) for each in combined.flattened]
        for part in parts:
            _begin(part, trainer.current_epoch)
        self._validation = []
        if private.mode_of(combined) != "sequential":
            if any(part is None for part in parts):
                return loaders
            shape = lambda batch: tree_unflatten(batch, private.spec_of(combined))  # noqa: E731
            wrapped = [each for each in parts if each is not None]
            result: Any = _CountedLoader(combine(wrapped, private.mode_of(combined)), shape, fetcher)
            self._validation = [result]
        else:
            own = [None if part is None else _CountedLoader(part, None, fetcher) for part in parts]
            self._validation = [each for each in own if each is not None]
            flat = [bare if each is None else each for each, bare in zip(own, combined.flattened, strict=True)]
            result = CombinedLoader(tree_unflatten(flat, private.spec_of(combined)), "sequential")
        states, self._validation_states = self._validation_states, []
        self._load_validation(states)
        self._before_sanity_check = [each.state_dict() for each in self._validation]
        return result

    # --- saving ---

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Lightning calls this on every rank."""
        if self._train is None:
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress
        self._warn_of_accumulation(trainer)
        ended = _has_ended(trainer) or (
            progress.current.ready == progress.current.processed == self._train.handed and self._train.is_exhausted()
        )
        train: State | None = None
        left_out = 0
        reloads = _will_reload_loaders(trainer, private.train_made_in(trainer))
        if not reloads:
            train, left_out = self._train.state(0 if ended else self._train.handed - progress.current.processed, ended)
            ended = ended or (left_out > 0 and (private.has_read_all(trainer) or self._train.is_exhausted()))
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = [] if train is None else [train]
        validating = self._is_validating and _is_fitting(trainer) and trainer.validating and not trainer.sanity_checking
        validated = [] if _will_reload_loaders(trainer, private.validation_made_in(trainer)) else self._validation
        checkpoint[_KEY] = {
            "version": _VERSION,
            "train": train,
            "lost": train is None and not reloads,
            "ended": ended,
            "batches": progress.current.processed + left_out,
            "left_out": left_out,
            "validation": [each.state_of_validation(validating) for each in validated],
            "validating": validating,
            "generators": _from_every_rank(trainer, save_generators()) if self._saves_generators else [],
            "seed": torch.initial_seed(),
        }
        if validating:
            _move_into_validation(checkpoint["loops"]["fit_loop"])

    def _warn_of_accumulation(self, trainer: Any) -> None:
        epoch_loop = trainer.fit_loop.epoch_loop
        if trainer.accumulate_grad_batches > 1 and epoch_loop.batch_progress.current.processed > 0:
            lost = epoch_loop.batch_progress.current.processed % trainer.accumulate_grad_batches
            if lost and not _has_ended(trainer):
                warn(
                    f"this checkpoint is saved after {lost} of {trainer.accumulate_grad_batches} batches whose "
                    "gradients are accumulated, and no checkpoint holds gradients: a run that resumes here loses them; "
                    "save after an optimizer step, as ModelCheckpoint(every_n_train_steps=...) does",
                )

    # --- loading ---

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Correct the checkpoint before Lightning restores its loops from it."""
        if not _is_fitting(trainer):
            return
        loops = checkpoint["loops"]["fit_loop"]
        saved = checkpoint.get(_KEY)
        by_lightning = loops["state_dict"].pop("combined_loader", None)
        if saved is None:
            if not by_lightning:
                return
            saved = self._from_lightning(by_lightning, loops)
        elif saved.get("version") != _VERSION:
            raise StateError(
                f"the checkpoint was saved by another version of midepoch's callback ({saved.get('version')}, this is "
                f"{_VERSION}): resume with the midepoch that saved it"
            )
        if saved.get("lost"):
            raise StateError(
                "the checkpoint was saved after an exception that left the train loader's state unknown: resume from "
                "an earlier one"
            )
        self._set_generators = self._setting_of_generators(trainer, saved, checkpoint["global_step"])
        self._saved, self._validation_states = dict(saved), list(saved["validation"])
        if saved["validating"]:
            _logger.info("the validation that was interrupted is run from its start")
        epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
        if not saved["ended"] and 0 < epochs["current"]["processed"] == epochs["current"]["ready"]:
            # Stopped in mid-epoch by max_steps or early stopping, which Lightning counts as a whole epoch.
            for each in (epochs["current"], epochs["total"]):
                each["processed"] = each["completed"] = each["ready"] - 1
        if epochs["current"]["started"] < epochs["current"]["ready"]:
            # Saved by on_train_epoch_start, before Lightning has reset the previous epoch.
            batches["current"], batches["is_last_batch"] = dict.fromkeys(batches["current"], 0), False
        for each in (batches["current"], batches["total"]):
            if saved.get("left_out"):  # these batches will not be given again, so they count as trained on
                each["processed"] += saved["left_out"]
                each["ready"] = each["started"] = each["completed"] = each["processed"]
        trained_on = batches["current"]["processed"] == batches["current"]["ready"]
        if trained_on and batches["current"]["completed"] < batches["current"]["processed"]:
            # Saved by on_train_batch_end. If a validation was due, it is still due.
            _move_into_validation(loops)
        for each in (batches["current"], batches["total"]):
            # An exception in the middle of a batch: it is given again. After the last batch, the epoch still goes on.
            if not trained_on or saved["ended"]:
                each["ready"] = each["started"] = each["completed"] = each["processed"]
        if not trained_on:
            batches["is_last_batch"] = False
        elif saved["ended"] and batches["current"]["ready"]:
            batches["is_last_batch"] = True  # Lightning may have expected more, from limit_train_batches

    def _setting_of_generators(self, trainer: Any, saved: dict[str, Any], step: int) -> Callable[[], None] | None:
        """What sets this process's generators as they were saved, checked here; None if they stay as they are."""
        of_ranks, rank = saved.get("generators"), trainer.global_rank
        if not (of_ranks and self._saves_generators):
            return None
        if rank >= len(of_ranks):
            key = derive_key(_KEY_OF_GENERATORS, saved["seed"] % (1 << 64), rank, step)
            return lambda: seed_generators(key)
        try:
            state = check_generators(of_ranks[rank])
        except Exception as error:
            raise StateError(
                f"the checkpoint's random generators are damaged ({type(error).__name__}: {error}): resume from "
                "another one, or leave them out by ExactResume(generators=False)"
            ) from error
        return lambda: set_generators(state)

    def _from_lightning(self, states: list[State], loops: dict[str, Any]) -> dict[str, Any]:
        """The same information, as far as known, for a checkpoint saved without the callback."""
        if len(states) > 1:
            raise StateError(
                f"the checkpoint has the states of {len(states)} loaders and was saved without ExactResume, so it does "
                "not say which of them had ended: resume without it, or start from a checkpoint saved with it"
            )
        batches = loops["epoch_loop.batch_progress"]
        return {
            "train": states[0],
            "ended": bool(batches["is_last_batch"]),
            "batches": batches["current"]["processed"],
            "validation": [],
            "validating": False,
        }

    def _load_train(self) -> None:
        if self._saved is not None and self._train is not None and self._saved.get("train") is not None:
            self._train.load(self._saved["train"], 0 if self._saved["ended"] else self._saved["batches"])

    def _load_validation(self, states: list[State | None]) -> None:
        if not states:
            return
        if len(states) != len(self._validation):
            raise StateError(
                f"the checkpoint has the states of {len(states)} validation loaders, but {len(self._validation)} are "
                "wrapped now: make them as they were"
            )
        for each, state in zip(self._validation, states, strict=True):
            if state is not None:
                each.load(state, 0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called when all is restored and nothing has begun."""
        self._restore_place(trainer)
        if self._set_generators is not None:
            self._set_generators()
            self._set_generators = None

    def _restore_place(self, trainer: Any) -> None:
        saved, train = self._saved, self._train
        if saved is None or train is None:
            return
        if train.loaded is not saved["train"]:
            # The loaders were made before the checkpoint was read.
            self._load_train()
            iter(private.fetcher_of(trainer.fit_loop))
        self._count_as_here(trainer, saved)
        self._saved = {**saved, "train": None}
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        if not (saved["ended"] and epoch_loop.restarting):
            return
        if fit_loop.restarted_mid_epoch:
            if not private.will_validate(trainer):
                private.validated(trainer)  # otherwise it would look for a batch at which to validate
        elif not fit_loop.restarted_on_epoch_start:
            # With max_steps Lightning takes this for mid-epoch, and would train on one more batch.
            if fit_loop.restarted_on_epoch_end:
                fit_loop.epoch_progress.increment_completed()
            private.no_longer_restarts(trainer)
            self._begin_epoch(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the restart: after an epoch with no batches left, Lightning's loop still takes itself for restarting."""
        self._begin_epoch(trainer)

    def _begin_epoch(self, trainer: Any) -> None:
        trainer.fit_loop.epoch_loop.restarting = False
        trainer.fit_loop.epoch_loop.reset_restart_stage()

    def _count_as_here(self, trainer: Any, saved: dict[str, Any]) -> None:
        """Convert Lightning's count of this epoch's batches from a world with another global batch."""
        train = self._train
        assert train is not None  # checked by the caller
        if saved["train"] is None:
            return
        batches = trainer.fit_loop.epoch_loop.batch_progress
        if train.is_split_like(saved["train"]):
            return
        number = trainer.num_training_batches
        if number == float("inf"):
            return  # of no consequence if the number of batches is unknown
        if saved["ended"]:
            done = number
        else:
            done = min(train.batches_done, number)
            if train.batches_left == 0:
                done = number
        finishing = batches.current.ready - batches.current.completed
        batches.current.ready = batches.current.started = batches.current.processed = done
        batches.current.completed = done - finishing
        batches.is_last_batch = done == number
        train.handed = 0 if done == number else done

    # --- validations ---

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Until the validation has seen all batches, a checkpoint is of one that is run again from its start."""
        self._is_validating = True

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """Reset the loaders. Lightning runs the sanity check in some resumed runs only, so it must leave no trace."""
        for each, state in zip(self._validation, self._before_sanity_check, strict=True):
            each.load(state, 0)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """The validation has seen all batches."""
        self._is_validating = False
        for each in self._validation:
            each.handed, each.handed_in_pass, each._continues = 0, 0, False


class _CountedLoader:
    """What Lightning iterates: a loader, with a count of the batches that were handed over.

    Attributes:
        handed: batches handed over in this epoch of Lightning's, including those before a resume.
        handed_in_pass: batches handed over by the running pass.
        loaded: the state that was loaded last.
    """

    # Lightning would call set_epoch on it. The passes determine the epoch.
    sampler = batch_sampler = None

    def __init__(self, loader: Loader, shape: Callable[[Any], Any] | None, fetcher: Callable[[], Any]) -> None:
        self._loader, self._shape, self._fetcher = loader, shape, fetcher
        self.handed = self.handed_in_pass = 0
        self.loaded: State | None = None
        self._began: State | None = None  # where the running pass began
        self._continues = False
        self._batches: Iterator[Any] = iter(())  # of the running pass
        self._first: list[Any] = []  # the pass's first batch, until the second is handed over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._pass(len(getattr(self._fetcher(), "batches", ())))

    def _pass(self, ahead: int) -> Iterator[Any]:
        again: list[Any] = []
        if ahead and ahead == self.handed_in_pass == len(self._first):
            # Lightning makes a second iterator and drops what it has prefetched with the first. It gets that again.
            before, again = self.handed - ahead, self._first
        elif self._continues:
            before = self.handed
        else:
            before = 0
            self.leave()
        self.handed, self.handed_in_pass, self._continues = before, 0, False
        if not again:
            self._began, self._batches = self._loader.state_dict(), iter(self._loader)
        for batch in itertools.chain(again, self._batches):
            self.handed += 1
            self.handed_in_pass += 1
            self._first = [batch] if self.handed_in_pass == 1 else []
            yield batch if self._shape is None else self._shape(batch)

    def is_exhausted(self) -> bool:
        """Whether a pass over a source of unknown length has nothing left."""
        if not self.handed:
            return False
        try:
            len(self._loader)
        except TypeError:
            pass
        else:
            return False  # Lightning knows the length
        if not self._loader.position:
            return True
        try:
            self._loader.peek()
        except StopIteration:
            return True
        except Exception:  # noqa: BLE001  # the source has failed; who asks for the batch will learn it
            return False
        return False

    def is_split_like(self, state: State) -> bool:
        """Whether the world and the batch size are those of a state, so that the batches are the same."""
        facts = Part("", self._loader).adapter.facts
        return (self._loader.world.world_size, facts.batch_size) == (state["world_size"], state["batch_size"])

    def state(self, in_flight: int, ended: bool) -> tuple[State | None, int]:
        """A state for every rank; that of the next epoch's beginning if this epoch has ended.

        Also how many batches in flight it leaves out, as `state_for_checkpoint` does.
        """
        state, left_out = state_for_checkpoint(self._loader, in_flight)
        if state is None:
            return None, 0
        exhausted = bool(left_out) and self.is_exhausted()
        if exhausted:
            state = self._loader.state_dict()  # it has learned that this is its end
        if (ended or exhausted) and state["position"]:
            state = Part("", self._loader).state_at(state, state["epoch"] + 1)
        return gather_state(self._loader, state), left_out

    def state_of_validation(self, validating: bool) -> State | None:
        """A state from which the validation that is going on is run again, or the next one begins."""
        if validating and self.handed and self._began is not None:
            return gather_state(self._loader, self._began)
        return self.state(0, ended=True)[0]

    def state_dict(self) -> State:
        """For Lightning, which calls it before the callback can gather; the callback's state takes its place."""
        handled = sys.exception()
        try:
            return self._loader.state_dict()
        except StateError:
            if handled is None:
                raise
            return {}

    def load(self, state: State, batches: int) -> None:
        """Continue from a state, with `batches` of this epoch done."""
        self._loader.load_state_dict(state)
        self.loaded, self.handed, self.handed_in_pass, self._continues = state, batches, 0, True

    def load_state_dict(self, state: State) -> None:
        """For Lightning."""
        self.load(state, 0)

    def leave(self) -> None:
        """Give up the rest of the epoch."""
        Part("", self._loader).leave_epoch()


def _from_every_rank(trainer: Any, mine: str) -> list[str]:
    """This text of each rank. Lightning saves a checkpoint on all of them, and lets them wait for each other."""
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return [mine]
    found = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found


def _begin(loader: Loader | None, epoch: int) -> None:
    """Start with Lightning's epoch, for a loader that was made again in the middle of a run."""
    if loader is not None and loader.position == 0:
        loader.set_epoch(epoch)


def _is_fitting(trainer: Any) -> bool:
    return str(getattr(trainer.state.fn, "value", "")) == "fit"


def _has_ended(trainer: Any) -> bool:
    """Whether no batch of Lightning's epoch is left to train on."""
    return private.has_read_all(trainer) and (
        trainer.fit_loop.epoch_loop.batch_progress.current.ready
        == trainer.fit_loop.epoch_loop.batch_progress.current.processed
    )


def _will_reload_loaders(trainer: Any, made: float) -> bool:
    """Whether an epoch has ended and the next one makes new loaders. `made`: the epoch in which they were made last."""
    epochs, every = trainer.fit_loop.epoch_progress.current, trainer.reload_dataloaders_every_n_epochs
    return bool(every) and epochs.processed == epochs.ready and epochs.processed - made >= every


def _move_into_validation(loops: dict[str, Any]) -> None:
    """Put Lightning before the first batch of a validation, the only place from which it runs one after a resume."""
    progress = loops["epoch_loop.val_loop.batch_progress"]
    progress["current"]["processed"] = 0
    for each in (progress["current"], progress["total"]):
        each["completed"] = each["processed"]
        each["ready"] = each["started"] = each["processed"] + 1
