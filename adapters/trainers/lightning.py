"""Lightning: `ExactResume`, a callback that makes exact what Lightning's own checkpoints leave out.

Lightning saves the states of its train loaders by itself, and loads them when it resumes in mid-epoch. It does so after
its own prefetching, only for rank 0, not for validation, and counts batches as of the world that saved them; with
several loaders it forgets which of them had ended. The callback puts something of its own between Lightning and the
loaders, which knows how many batches were handed over and not trained on, and keeps what else is needed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_unflatten

from midepoch.adapters.trainers import lightning_private as private
from midepoch.combine.combine import combine
from midepoch.errors import MidepochWarning, StateError
from midepoch.loader.lending import loader_of
from midepoch.loader.loader import Loader
from midepoch.loader.part import Part
from midepoch.state.format import State
from midepoch.state.parts import gather_state

if TYPE_CHECKING or "lightning" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
else:  # the same under its older name, where that is what the program uses
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.combined_loader import CombinedLoader

__all__ = ["ExactResume"]

_KEY = "midepoch"  # in checkpoints
_VERSION = 1


class ExactResume(Callback):
    """Add it to the trainer, when a run starts and when it resumes: ``Trainer(callbacks=[ExactResume()])``.

    It needs train loaders that were wrapped, wherever they are made; validation loaders may be wrapped too. With it, a
    run goes on exactly from any checkpoint: with loaders of unknown length, several loaders in any mode of
    CombinedLoader, ``limit_train_batches``, ``max_steps``, a validation that was interrupted, an exception in the
    middle of a batch, and on another number of processes. Lightning's count of batches follows.

    Warns with MidepochWarning where a loader is not wrapped, and where a checkpoint is saved between two batches whose
    gradients are accumulated, since gradients are in no checkpoint.
    """

    def __init__(self) -> None:
        self._train: _Handed | None = None
        self._validation: list[_Handed] = []
        self._before_sanity_check: list[State] = []
        self._validated: tuple[int, int] | None = None  # loader and batch that a validation will ask for next
        self._saved: dict[str, Any] | None = None  # of the checkpoint that this run goes on from
        self._validation_states: list[State] = []  # of that checkpoint, until there are loaders to load them
        self._validation_to_finish: tuple[int, int] | None = None
        self._interrupted: list[State] = []
        self._give_back: list[Callable[[], None]] = []

    # --- between Lightning and the loaders ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ask to see the loaders before Lightning does."""
        if stage != "fit":
            return
        private.check(trainer)
        fit_loop = trainer.fit_loop
        self._train, self._validation, self._validated = None, [], None
        self._saved, self._validation_states, self._validation_to_finish = None, [], None
        self._give_back = [
            private.intercept(fit_loop, lambda loaders: self._take_train(loaders, trainer)),
            private.intercept(fit_loop.epoch_loop.val_loop, lambda loaders: self._take_validation(loaders, trainer)),
        ]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give Lightning its sources of loaders back."""
        while self._give_back:
            self._give_back.pop()()

    def _take_train(self, loaders: Any, trainer: Any) -> Any:
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
        parts = [loader_of(each) for each in combined.flattened]
        bare = [each for each, part in zip(combined.flattened, parts, strict=True) if part is None]
        if bare:
            _warn_of_bare("train", bare)
        if bare or private.mode_of(combined) == "sequential":  # which Lightning refuses for training
            return loaders
        wrapped = [each for each in parts if each is not None]
        for part in parts:
            _begin(part, trainer.current_epoch)
        shape: Callable[[Any], Any] | None = None
        if loaders is combined.flattened[0]:
            loader = wrapped[0]
        else:
            loader = combine(wrapped, private.mode_of(combined))
            shape = lambda batch: tree_unflatten(batch, private.spec_of(combined))  # noqa: E731
        self._train = _Handed(loader, shape, lambda: private.fetcher_of(trainer.fit_loop))
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
            result: Any = _Handed(combine(wrapped, private.mode_of(combined)), shape, fetcher)
            self._validation = [result]
        else:
            own = [None if part is None else _Handed(part, None, fetcher) for part in parts]
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
        if not _will_ask_anew(trainer, private.train_made_in(trainer)):
            train = self._train.state(0 if ended else self._train.handed - progress.current.processed, ended)
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = [] if train is None else [train]
        validating = _is_fitting(trainer) and trainer.validating and not trainer.sanity_checking
        next_place = self._validated if validating else None
        validation = []
        made = private.validation_made_in(trainer)
        validated = [] if _will_ask_anew(trainer, made) else self._validation
        # One that is not wrapped cannot be taken up in its middle, so all of them begin this validation again.
        again = next_place is not None and len(self._validation) < len(self._validation_loaders(trainer))
        for index, each in enumerate(validated):
            if next_place is None:
                validation.append(each.state(0, ended=True))
            elif again:
                validation.append(each.state(each.handed, ended=False))
            else:
                loader, batch = next_place
                in_flight = each.handed - batch if index == loader else each.handed if index > loader else 0
                # One that has not begun this validation may stand where the one before left it.
                begun = index == loader and batch > 0
                validation.append(each.state(in_flight, ended=index < loader or (not begun and not each.handed)))
        checkpoint[_KEY] = {
            "version": _VERSION,
            "train": train,
            "ended": ended,
            "batches": progress.current.processed,
            "validation": validation,
            "next_in_validation": None if again else next_place,
        }
        if next_place is not None:
            _stand_in_validation(checkpoint["loops"]["fit_loop"], 0 if again else None)

    def _validation_loaders(self, trainer: Any) -> list[Any]:
        combined = private.combined_of(trainer.fit_loop.epoch_loop.val_loop)
        return [] if combined is None else list(combined.flattened)

    def _warn_of_accumulation(self, trainer: Any) -> None:
        epoch_loop = trainer.fit_loop.epoch_loop
        if trainer.accumulate_grad_batches > 1 and epoch_loop.batch_progress.current.processed > 0:
            lost = epoch_loop.batch_progress.current.processed % trainer.accumulate_grad_batches
            if lost and not _has_ended(trainer):
                warnings.warn(
                    f"this checkpoint is saved after {lost} of {trainer.accumulate_grad_batches} batches whose "
                    "gradients are accumulated, and gradients are in no checkpoint: a run that resumes here goes on "
                    "without them; save after an optimizer step, as ModelCheckpoint(every_n_train_steps=...) does",
                    MidepochWarning,
                    stacklevel=2,
                )

    # --- loading ---

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Before Lightning restores its loops, so that it reads from the checkpoint what is right."""
        if not _is_fitting(trainer):
            return
        loops = checkpoint["loops"]["fit_loop"]
        by_lightning = loops["state_dict"].pop("combined_loader", None)
        saved = checkpoint.get(_KEY)
        if saved is None:
            if not by_lightning:
                return
            saved = self._of_lightning(by_lightning, loops)
        elif saved.get("version") != _VERSION:
            raise StateError(
                f"the checkpoint was saved by another version of midepoch's callback ({saved.get('version')}, this is "
                f"{_VERSION}): resume with the midepoch that saved it"
            )
        self._saved, self._validation_states = dict(saved), list(saved["validation"])
        place = saved["next_in_validation"]
        self._validation_to_finish = None if place is None else (place[0], place[1])
        epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
        if not saved["ended"] and epochs["current"]["processed"] == epochs["current"]["ready"]:
            # Stopped in mid-epoch by max_steps or an early stop, which Lightning counts as a whole epoch.
            for each in (epochs["current"], epochs["total"]):
                each["processed"] = each["completed"] = each["ready"] - 1
        if epochs["current"]["started"] < epochs["current"]["ready"]:
            # Saved by on_train_epoch_start, when Lightning has not yet forgotten the epoch before.
            batches["current"], batches["is_last_batch"] = dict.fromkeys(batches["current"], 0), False
        trained_on = batches["current"]["processed"] == batches["current"]["ready"]
        if trained_on and batches["current"]["completed"] < batches["current"]["processed"]:
            # Saved by on_train_batch_end: if a validation was to follow, it is still to come.
            _stand_in_validation(loops, 0)
        for each in (batches["current"], batches["total"]):
            # An exception in the middle of a batch: it comes again. The last batch: it is over, but not the epoch.
            if not trained_on or saved["ended"]:
                each["ready"] = each["started"] = each["completed"] = each["processed"]
        if not trained_on:
            batches["is_last_batch"] = False
        elif saved["ended"] and batches["current"]["ready"]:
            batches["is_last_batch"] = True  # Lightning may have expected more, by limit_train_batches

    def _of_lightning(self, states: list[State], loops: dict[str, Any]) -> dict[str, Any]:
        """What is known of a checkpoint that was saved without the callback."""
        if len(states) > 1:
            raise StateError(
                f"the checkpoint has the states of {len(states)} loaders and was saved without ExactResume, so it does "
                "not say which of them had ended: resume without it, or start from a checkpoint saved with it"
            )
        batches = loops["epoch_loop.batch_progress"]
        ended = bool(batches["is_last_batch"])
        return {
            "train": states[0],
            "ended": ended,
            "batches": batches["current"]["processed"],
            "validation": [],
            "next_in_validation": None,
        }

    def _load_train(self) -> None:
        if self._saved is not None and self._train is not None and self._saved.get("train") is not None:
            self._train.load(self._saved["train"], 0 if self._saved["ended"] else self._saved["batches"])

    def _load_validation(self, states: list[State]) -> None:
        if not states:
            return
        if len(states) != len(self._validation):
            raise StateError(
                f"the checkpoint has the states of {len(states)} validation loaders, there are {len(self._validation)} "
                "that are wrapped: make them as they were"
            )
        place, self._interrupted = self._validation_to_finish, states
        for index, (each, state) in enumerate(zip(self._validation, states, strict=True)):
            each.load(state, place[1] if place is not None and place[0] == index else 0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """All is restored, and nothing has begun."""
        saved, train = self._saved, self._train
        if saved is None or train is None:
            return
        if train.handed_in_pass or train.loaded is not saved["train"]:
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
                private.validated(trainer)  # or it would look for a batch in which to validate
        elif not fit_loop.restarted_on_epoch_start:
            # With max_steps Lightning takes this for the middle of an epoch, and would train on one batch more.
            if fit_loop.restarted_on_epoch_end:
                fit_loop.epoch_progress.increment_completed()
            private.no_longer_restarts(trainer)
            self._begin_epoch(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """An epoch of which nothing was left does not tell its loop that it is no restart any more."""
        self._begin_epoch(trainer)

    def _begin_epoch(self, trainer: Any) -> None:
        trainer.fit_loop.epoch_loop.restarting = False
        trainer.fit_loop.epoch_loop.reset_restart_stage()

    def _count_as_here(self, trainer: Any, saved: dict[str, Any]) -> None:
        """Lightning's count of this epoch's batches, on a world with another global batch."""
        train = self._train
        assert train is not None  # the caller has seen to it
        if saved["train"] is None:
            return
        batches = trainer.fit_loop.epoch_loop.batch_progress
        if train.is_split_like(saved["train"]):
            return
        number = trainer.num_training_batches
        if number == float("inf"):
            return  # of no consequence where nobody knows the number
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

    # --- an interrupted validation ---

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Put Lightning's iterator where the validation was left."""
        self._validated = (0, 0)
        place, self._validation_to_finish = self._validation_to_finish, None
        if place is None or trainer.sanity_checking or not self._validation:
            return
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        fetcher = private.fetcher_of(val_loop)
        if getattr(fetcher, "batches", None):
            # Read ahead, from the first loader: read it again when its turn comes.
            fetcher.batches.clear()
            fetcher.done = False
            for index, (each, state) in enumerate(zip(self._validation, self._interrupted, strict=True)):
                each.load(state, place[1] if place[0] == index else 0)
        private.put_validation_at(val_loop, *place)
        self._validated = place
        warnings.warn(
            f"the validation that was interrupted goes on at batch {place[1]} of loader {place[0]}: means that "
            "self.log had taken before are not in the checkpoint, metrics that save their own state are",
            MidepochWarning,
            stacklevel=2,
        )

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """The check leaves no trace, since Lightning leaves it out of some resumed runs and not of others."""
        for each, state in zip(self._validation, self._before_sanity_check, strict=True):
            each.load(state, 0)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Where the validation stands."""
        self._validated = dataloader_idx, batch_idx

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Where the validation stands."""
        val_loop = trainer.validate_loop if not _is_fitting(trainer) else trainer.fit_loop.epoch_loop.val_loop
        fetcher = private.fetcher_of(val_loop)
        ahead = getattr(fetcher, "batches", ())
        if ahead:
            self._validated = ahead[0][2], ahead[0][1]
        elif fetcher.done:
            self._validated = len(self._validation_loaders(trainer)), 0
        else:
            self._validated = dataloader_idx, batch_idx + 1

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """All batches have been seen."""
        self._validated = None
        for each in self._validation:
            each.handed, each.handed_in_pass, each._continues = 0, 0, False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """An interrupted validation that Lightning does not take up again is over."""
        if self._validation_to_finish is not None:
            self._validation_to_finish = None
            for each in self._validation:
                each.leave()


class _Handed:
    """What Lightning iterates: a loader, and how many batches were handed over.

    Attributes:
        handed: batches handed over in this epoch of Lightning's, before a resume too.
        handed_in_pass: by the pass that runs.
        loaded: the state that was loaded last.
    """

    # Lightning would set the epoch there, which follows from the passes.
    sampler = batch_sampler = None

    def __init__(self, loader: Loader, shape: Callable[[Any], Any] | None, fetcher: Callable[[], Any]) -> None:
        self._loader, self._shape, self._fetcher = loader, shape, fetcher
        self.handed = self.handed_in_pass = 0
        self.loaded: State | None = None
        self._continues = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._pass(len(getattr(self._fetcher(), "batches", ())))

    def _pass(self, ahead: int) -> Iterator[Any]:
        if ahead and ahead == self.handed_in_pass:
            # Lightning asks for a second iterator and drops what it has read ahead with the first.
            before = self.handed - ahead
            self._loader.load_state_dict(self._loader.state_dict(ahead))
        elif self._continues:
            before = self.handed
        else:
            before = 0
            self.leave()
        self.handed, self.handed_in_pass, self._continues = before, 0, False
        for batch in self._loader:
            self.handed += 1
            self.handed_in_pass += 1
            yield batch if self._shape is None else self._shape(batch)

    def is_exhausted(self) -> bool:
        """Whether nothing is left of a pass over a source whose length only reading can tell."""
        if not self.handed:
            return False
        try:
            len(self._loader)
        except TypeError:
            pass
        else:
            return False  # Lightning knows
        if not self._loader.position:
            return True
        try:
            self._loader.peek()
        except StopIteration:
            return True
        return False

    def is_split_like(self, state: State) -> bool:
        """Whether the batches are those of the world and of the batch size of a state."""
        part = Part("", self._loader)
        return (part.world.world_size, part.batch_size) == (state["world_size"], state["batch_size"])

    def state(self, in_flight: int, ended: bool) -> State:
        """A state that suits every rank; that of the next epoch's beginning where this one has ended."""
        state = self._loader.state_dict(in_flight)
        if ended and state["position"]:
            state = Part("", self._loader).state_at(state, state["epoch"] + 1)
        return gather_state(self._loader, state)

    def state_dict(self) -> State:
        """For Lightning, which calls it before the callback can gather."""
        return self._loader.state_dict()

    def load(self, state: State, batches: int) -> None:
        """Go on from a state, with so many batches of this epoch behind."""
        self._loader.load_state_dict(state)
        self.loaded, self.handed, self.handed_in_pass, self._continues = state, batches, 0, True

    def load_state_dict(self, state: State) -> None:
        """For Lightning."""
        self.load(state, 0)

    def leave(self) -> None:
        """Give up the rest of the epoch."""
        Part("", self._loader).leave_epoch()


def _begin(loader: Loader | None, epoch: int) -> None:
    """Begin with Lightning's epoch, where a loader was made again in the middle of a run."""
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


def _will_ask_anew(trainer: Any, made: float) -> bool:
    """Whether an epoch is over, and the next one asks for loaders again. `made`: the epoch in which it did so last."""
    epochs, every = trainer.fit_loop.epoch_progress.current, trainer.reload_dataloaders_every_n_epochs
    return bool(every) and epochs.processed == epochs.ready and epochs.processed - made >= every


def _stand_in_validation(loops: dict[str, Any], done: int | None = None) -> None:
    """Let Lightning find itself at the start of a batch of a validation, the only place where it takes one up again.

    `done`: batches of the validation that are behind; None for as many as it had counted.
    """
    progress = loops["epoch_loop.val_loop.batch_progress"]
    if done is not None:
        progress["current"]["processed"] = done
    for each in (progress["current"], progress["total"]):
        each["completed"] = each["processed"]
        each["ready"] = each["started"] = each["processed"] + 1


def _warn_of_bare(kind: str, bare: list[Any]) -> None:
    names = ", ".join(sorted({type(each).__name__ for each in bare}))
    warnings.warn(
        f"{kind} loaders of type {names} are not wrapped, so they begin again when a run resumes: pass "
        "midepoch.wrap(loader)",
        MidepochWarning,
        stacklevel=2,
    )


def warn_of_counts(loader: Loader, state: State) -> None:
    """Say that Lightning's count of batches does not fit, where Lightning itself loads a state of another topology."""
    part = Part("", loader)
    here = (part.world.world_size, part.batch_size)
    if state["position"] and here != (state["world_size"], state["batch_size"]):
        warnings.warn(
            f"the checkpoint is of {state['world_size']} processes with batches of {state['batch_size']}, these are "
            f"{here[0]} with {here[1]}. Lightning counts batches, and ends this epoch too early or too late: add "
            "midepoch.adapters.trainers.lightning.ExactResume() to the trainer's callbacks",
            MidepochWarning,
            stacklevel=4,
        )
