"""Training snapshots: model, optimizer, loader and random generators in one file, which is whole or not there.

For scripts under torchrun, whose processes may be killed, stopped by a signal and started again in another number at
any time. Rank 0 writes, all ranks read. A draft is written beside the snapshot, synced, and renamed over it, so that
whoever is killed in between leaves the old one.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
import uuid
import warnings
import weakref
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from midepoch.errors import MidepochError, MidepochWarning, SnapshotError, StateError
from midepoch.order.keys import derive_key
from midepoch.state.codec import decode, encode
from midepoch.state.parts import is_rank_independent, join_states
from midepoch.stateful_iterable import loader_of
from midepoch.world import World

from .pickles import check_pickle
from .signals import Signals

__all__ = ["Snapshot", "checksums", "damage_in"]

_FORMAT = 1
_FOLDER = 0x10  # among the attributes of a record in a zip archive
_SECONDS_BETWEEN_AGREEMENTS = 0.5
_MOST_STEPS_BETWEEN_AGREEMENTS = 128
_RARELY = 1 << 62  # a step that is never reached
_SECONDS_FOR_AN_AGENT_TO_SIGNAL = 30.0
_logger = logging.getLogger("midepoch")


class Snapshot:
    """Saves and restores a training run, on any number of processes, so that it goes on as if nothing had happened::

        snapshot = midepoch.Snapshot("run/snapshot.pt", every=1000, model=model, optimizer=optimizer, data=loader)
        snapshot.load()
        for batch in loader:
            ...
            snapshot.step()

    Every process makes one, and calls `load`, `step` and `save` at the same places: they talk to each other.

    On SIGTERM or SIGUSR1, be it to one process only, all of them save after the same batch and leave by SystemExit.
    While they train, that costs a small exchange twice a second; in one process nothing.

    The file is what ``torch.save`` writes: ``torch.load(path, weights_only=True)["parts"]["model"]`` is the model's
    state. One before it lies beside it, ``snapshot.pt.1``, and is taken where the newest is damaged.

    Attributes:
        path: of the newest snapshot.
        steps: how often `step` was called in this run, before restarts too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int = 2,
        signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        exit_status: int = 0,
        group: ProcessGroup | None = None,
        **parts: Any,
    ) -> None:
        """
        Args:
            path: of the file, on storage that all processes see.
            every: batches between saves by `step`; None for none but on a signal.
            keep: snapshots to keep, the newest included.
            signals: on which `step` saves and exits; empty to leave them alone.
            exit_status: of the SystemExit that follows. 0 tells torchrun that the work is done; a scheduler that starts
                the job again on another status can be given that.
            group: the processes that train together; None for all. It must be able to send what lies on the CPU; where
                the default group is not (NCCL alone), one that is able is made.
            parts: what to save, by name: anything with ``state_dict`` and ``load_state_dict``. A model in
                DistributedDataParallel or compiled is saved as the module inside, so it fits either way. Of a loader
                all ranks' parts are saved, of everything else what rank 0 has.

        Raises:
            TypeError, ValueError: an argument is something else.
            MidepochError: signals are wanted, but this is not the main thread.
        """
        self.path = Path.cwd() / path  # wherever this process goes later
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(f"every must be an int of at least 1 or None, got {every!r}")
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep must be an int of at least 1, got {keep!r}")
        if not parts:
            raise TypeError("a Snapshot of nothing: pass the parts by name, as in model=model, data=loader")
        for name, part in parts.items():
            if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
                raise TypeError(
                    f"{name} is a {type(part).__name__} without state_dict and load_state_dict: pass an object that "
                    "has them (midepoch.wrap gives them to loaders)"
                )
        self.steps = 0
        self._parts = {name: _inside(part) for name, part in parts.items()}
        self._every, self._keep, self._exit_status = every, keep, exit_status
        self._given_group, self._own_group = group, None
        self._on_disk: _Identity | None = None  # of the newest file, as this run knows it
        self._coming: _Identity | None = None  # of the one that is taking its place, or has just taken it
        self._newest_is_sound = True
        self._asked = False  # load or save has been called
        self._last_agreement = (0, 0.0)  # step and time
        self._next_agreement = _RARELY
        self._due = 0  # the step at which `step` has more to do than to count
        # Kept, since gloo's threads let go of it a little later than they say. Were theirs the last reference, they
        # would need the interpreter to free it, and if that is the moment at which it ends, the process is aborted.
        self._said = torch.zeros(2, dtype=torch.float64)
        self._signals = Signals(signals, self._signalled)
        weakref.finalize(self, self._signals.drop).atexit = False

    # --- signals ---

    def _signalled(self) -> None:
        if self._next_agreement == _RARELY:
            self._due = 0  # alone, or before the first step: the next one sees to it. Ranks do so all at once.

    def close(self) -> None:
        """Give the signals back to whom they belonged, as when nobody has this any more. May be called twice."""
        self._signals.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._signals.drop()

    # --- in the training loop ---

    def step(self, in_flight: int = 0) -> None:
        """Count a batch that has been trained on; save, and exit, if it is time.

        Args:
            in_flight: batches that were taken from the loaders but not trained on (a prefetcher holds them).

        Raises:
            SystemExit: a signal was received, by some process, and the snapshot was saved.
            SnapshotError: it could not be saved; the one before is as it was.
        """
        self.steps += 1
        if self.steps >= self._due:
            self._act(in_flight)

    def _act(self, in_flight: int) -> None:
        ranks = self._ranks()
        stop = bool(self._signals.received) if ranks.size == 1 else self._agree(ranks)
        if stop or (self._every is not None and self.steps % self._every == 0):
            self.save(in_flight)
        if stop:
            if ranks.rank == 0:
                _logger.warning("a signal was received: saved %s after step %d, leaving", self.path, self.steps)
            self._signals.kept = True  # who is told so a second time has nothing more to do: its signals stay with it
            for part in self._parts.values():
                if (loader := loader_of(part)) is not None:
                    with contextlib.suppress(Exception):  # whatever it is, the snapshot is there, and it is time to go
                        loader.close()  # else multiprocessing ends its workers, and torch calls that an error
            if ranks.size > 1:
                if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # several agents of torchrun
                    # Where a machine joins, each agent signals its own ranks once it knows. One whose ranks left before
                    # that, for another rank's signal, takes their work for done, and the job goes on without it.
                    self._signals.wait(_SECONDS_FOR_AN_AGENT_TO_SIGNAL)
                atexit.register(_end_here, self._exit_status)
            raise SystemExit(self._exit_status)
        next_save = _RARELY if self._every is None else self.steps - self.steps % self._every + self._every
        self._due = min(next_save, self._next_agreement)
        if ranks.size == 1 and self._signals.received:  # since it was looked at
            self._due = 0

    def _agree(self, ranks: _Ranks) -> bool:
        """Whether some rank has received a signal. All ask each other at the same steps, some two times a second."""
        if self._next_agreement != _RARELY and self.steps < self._next_agreement:
            return False
        step, before = self._last_agreement
        now = time.monotonic()
        seconds = (now - before) / (self.steps - step) if before and self.steps > step else 0.0
        signalled, seconds = self._largest(ranks, float(self._signals.received), seconds)
        self._last_agreement = self.steps, time.monotonic()
        # All ranks have the same numbers, so they choose the same step.
        apart = int(_SECONDS_BETWEEN_AGREEMENTS / seconds) if seconds > 0 else 1
        self._next_agreement = self.steps + min(max(apart, 1), _MOST_STEPS_BETWEEN_AGREEMENTS)
        return bool(signalled)

    def _largest(self, ranks: _Ranks, *numbers: float) -> list[float]:
        """The largest that any rank says, of each of two numbers."""
        said = self._said
        said[:] = torch.tensor(numbers, dtype=said.dtype)
        if ranks.size > 1:
            torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, ranks.group)
        largest: list[float] = said.tolist()
        return largest

    # --- saving ---

    def save(self, in_flight: int = 0) -> None:
        """Save now. Every process must call it, after the same batch.

        Args:
            in_flight: as in `step`.

        Raises:
            SnapshotError: it could not be saved, on every process and with the reason; the one before is as it was.
        """
        ranks = self._ranks()
        offer: _Offer = _Offer({}, "", "")
        states: dict[str, Any] = {}
        try:
            for name, part in self._parts.items():
                loader = loader_of(part)
                states[name] = part.state_dict() if loader is None else loader.state_dict(in_flight)
            loaders = {name: states[name] for name, part in self._parts.items() if loader_of(part) is not None}
            offer = _Offer(loaders, _generators(), "")
        except Exception as error:  # noqa: BLE001  # the others wait for this rank, and must hear of it
            offer = offer._replace(problem=f"{name} gave no state: {type(error).__name__}: {error}")
        offers = ranks.gather(offer)
        problem = ""
        if ranks.rank == 0:
            try:
                self._write(states, offers, ranks.size)
            except Exception as error:  # noqa: BLE001  # the same
                problem = str(error)
                if not isinstance(error, SnapshotError):
                    problem = f"{type(error).__name__}: {error}; {_cure(error, self.path.parent)}"
                _let_go(error)
                cause = error
        if self._largest(ranks, float(bool(problem)), 0.0)[0]:
            problem = ranks.broadcast(problem)
            raise SnapshotError(f"{self.path} was not saved, the snapshot before it is as it was: {problem}") from (
                cause if ranks.rank == 0 else None
            )
        self._asked = True

    def _write(self, states: dict[str, Any], offers: list[_Offer], world_size: int) -> None:
        for rank, offer in enumerate(offers):
            if offer.problem:
                raise SnapshotError(f"on rank {rank}, {offer.problem}")
        for name in offers[0].loaders:
            of_all = [offer.loaders[name] for offer in offers]
            loader = loader_of(self._parts[name])
            if not is_rank_independent(loader):
                states[name] = join_states(of_all) if world_size > 1 else of_all[0]
            elif len({(each["epoch"], each["position"]) for each in of_all}) > 1:
                places = [(each["epoch"], each["position"]) for each in of_all]
                raise SnapshotError(
                    f"the ranks do not stand at the same place of {name} (epoch, position): {places}; call step() or "
                    "save() on every rank after the same batch"
                )
        for name, state in states.items():
            sharded = _sharded(state, name)
            if sharded:
                raise SnapshotError(
                    f"{sharded} is sharded over the ranks, and rank 0 has only its part: save it with "
                    "torch.distributed.checkpoint, which takes loaders too (docs/trainers.md), or gather it first"
                )
        content = {
            "midepoch_snapshot": _FORMAT,
            "id": uuid.uuid4().hex,
            "time": time.time(),
            "steps": self.steps,
            "world_size": world_size,
            "seed": torch.initial_seed() % (1 << 64),
            "generators": [offer.generators for offer in offers],
            "parts": states,
            "kinds": {name: type(part).__qualname__ for name, part in self._parts.items() if _has_kind(part)},
        }
        self._check_owner()
        with _locked_draft(self.path) as (draft, descriptor):
            with checksums(), _synced_meanwhile(descriptor):
                torch.save(content, draft)
            os.fsync(descriptor)
            try:
                torch.load(draft, weights_only=True, mmap=True, map_location="cpu")
            except Exception as error:
                raise SnapshotError(
                    f"it could not be loaded with weights_only=True ({str(error)[:300]}): let state_dict() of the part "
                    "return tensors and built-in types only"
                ) from error
            self._check_owner()
            keep = self._keep if self._newest_is_sound else 1
            self._coming = _identity(draft)
            with _freed_later(_older(self.path, keep - 1)):
                _rotate(self.path, keep)
                draft.replace(self.path)
                self._on_disk, self._newest_is_sound = self._coming, True
        try:
            _sync_folder(self.path.parent)
        except OSError as error:
            warnings.warn(
                f"{self.path} was saved, but its folder could not be synced ({error.strerror}): the one before may be "
                "found after a loss of power",
                MidepochWarning,
                stacklevel=2,
            )

    def _check_owner(self) -> None:
        found = _identity(self.path)
        if found is None or found in (self._on_disk, self._coming):
            return
        if not self._asked:
            raise SnapshotError(
                "there is one already, of a run that this one does not go on with: call load() before the first "
                "batch, or move it away"
            )
        raise SnapshotError(
            "it is not the file that this run has written or loaded: some other process writes to the same path, "
            "perhaps one that was left over from before a restart; end it, or choose another path"
        )

    # --- loading ---

    def load(self) -> bool:
        """Load the newest snapshot that is sound. Every process must call it, with its parts as they were made.

        Returns:
            True if there was one; False, and nothing is changed, if this run begins.

        Raises:
            SnapshotError: all snapshots are damaged, or some process cannot read what rank 0 reads.
            StateError: a loader does not fit; the parts are as they were. So they are where a model or an optimizer
                does not fit.
        """
        ranks = self._ranks()
        chosen: _Found | None = None
        problem = ""
        if ranks.rank == 0:
            try:
                chosen = _find(self.path)
            except SnapshotError as found:
                problem = str(found)
        problem, chosen = ranks.broadcast((problem, chosen))
        if problem:
            raise SnapshotError(problem)
        if chosen is None:
            self._asked = True
            return False
        if ranks.rank == 0 and chosen.damaged:
            warnings.warn(
                f"{'; '.join(chosen.damaged)}: the snapshot before is loaded, {chosen.path}",
                MidepochWarning,
                stacklevel=2,
            )
        error: Exception | None = None
        content: dict[str, Any] = {}
        generators: dict[str, Any] | None = None
        try:
            content = self._read(chosen)
            if ranks.rank < len(content["generators"]):
                generators = _decoded(content["generators"][ranks.rank])
        except MidepochError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001  # the others must hear of it
            error = SnapshotError(
                f"{chosen.path} does not fit ({type(caught).__name__}: {caught}): make the parts as they were, or put "
                "back a copy that nobody edited"
            )
        problems = ranks.share(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, told in enumerate(problems):
            if told is not None:
                raise SnapshotError(f"rank {rank} could not load {chosen.path}: {told}")
        self._apply(content)
        if generators is not None:
            _set_generators(generators)
        else:
            # Of its own, and another than a process that left with this rank and comes back would have had.
            _seed_generators(derive_key(_SNAPSHOT, content["seed"], ranks.rank, content["steps"]))
        self.steps, self._next_agreement = content["steps"], _RARELY
        self._on_disk, self._newest_is_sound = _identity(self.path), not chosen.damaged
        self._asked = True
        self._due = 0
        return True

    def _read(self, chosen: _Found) -> dict[str, Any]:
        try:
            content = _content(chosen.path)
        except FileNotFoundError:
            raise SnapshotError(
                f"{chosen.path} is not there, but rank 0 sees it: put it on storage that all processes share"
            ) from None
        if content["id"] != chosen.id:
            raise SnapshotError(
                f"{chosen.path} is not the file that rank 0 sees: put it on storage that all processes share"
            )
        missing, extra = self._parts.keys() - content["parts"].keys(), content["parts"].keys() - self._parts.keys()
        if missing or extra:
            raise SnapshotError(
                f"the snapshot has {', '.join(sorted(content['parts']))}; this Snapshot was made with "
                f"{', '.join(sorted(self._parts))}: make it with the same parts, under the same names"
            )
        for name, part in self._parts.items():
            _check_fits(name, part, content["parts"][name])
            kind, saved = type(part).__qualname__, content.get("kinds", {}).get(name, "")
            if _has_kind(part) and saved not in ("", kind):
                raise SnapshotError(f"{name} is a {kind}, the snapshot has the state of a {saved}: make it as it was")
        return content

    def _apply(self, content: dict[str, Any]) -> None:
        for name, part in sorted(self._parts.items(), key=lambda item: _rank_of_kind(item[1])):
            try:
                part.load_state_dict(content["parts"][name])
            except StateError:
                raise
            except Exception as error:
                raise SnapshotError(
                    f"{name} did not take its state ({type(error).__name__}: {error}): make it as it was, and start "
                    "this process anew"
                ) from error

    # --- the processes ---

    def _ranks(self) -> _Ranks:
        world = World.current()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            if world.world_size > 1:
                raise MidepochError(
                    f"this is one of {world.world_size} processes, which all would write {self.path}: call "
                    "torch.distributed.init_process_group before load(), step() and save()"
                )
            return _Ranks(0, 1, None)
        group = self._given_group
        size = torch.distributed.get_world_size(group)
        if size > 1 and "cpu" not in _devices(group):
            if self._own_group is None:
                ranks = None if group is None else torch.distributed.get_process_group_ranks(group)
                self._own_group = torch.distributed.new_group(
                    ranks, timeout=_patience(group), backend="gloo", use_local_synchronization=group is not None
                )
            group = self._own_group
        return _Ranks(torch.distributed.get_rank(group), size, group)


_SNAPSHOT = 0x534E4150  # keys of snapshots are no others' keys


class _Offer(NamedTuple):
    """What one rank has to say when a snapshot is saved: its loaders' states, its generators, or what went wrong."""

    loaders: dict[str, Any]
    generators: str
    problem: str


class _Ranks(NamedTuple):
    """The processes that train together, and the one that this is."""

    rank: int
    size: int
    group: ProcessGroup | None

    @property
    def _first(self) -> int:
        """The number among all processes of the group's rank 0."""
        return 0 if self.group is None else torch.distributed.get_global_rank(self.group, 0)

    def gather(self, mine: Any) -> list[Any]:
        """What all have, on rank 0."""
        if self.size == 1:
            return [mine]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        torch.distributed.gather_object(mine, found, self._first, self.group)
        return found or []

    def share(self, mine: Any) -> list[Any]:
        """What all have, on all."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, mine, group=self.group)
        return found

    def broadcast(self, mine: Any) -> Any:
        """What rank 0 has, on all."""
        if self.size == 1:
            return mine
        found = [mine]
        torch.distributed.broadcast_object_list(found, self._first, self.group)
        return found[0]


def _patience(group: ProcessGroup | None) -> timedelta | None:
    """How long the group waits for a process that is silent; None, which is torch's own default, where it does not say.

    A new group does not take it over by itself, and would wait half an hour for a machine given up long before.
    """
    known: Any = torch.distributed.group.WORLD if group is None else group
    for device in getattr(known, "_device_types", ()):
        found = getattr(getattr(known._get_backend(device), "options", None), "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return None


def _devices(group: ProcessGroup | None) -> str:
    """Such as ``cpu:gloo,cuda:nccl``: for which devices a group has a backend."""
    return str(torch.distributed.get_backend_config(group))


# --- parts ----------------------------------------------------------------------------------------------------------


def _inside(part: Any) -> Any:
    """The module in DistributedDataParallel and torch.compile, whose wrappings change the names of its state."""
    while True:
        if isinstance(part, DistributedDataParallel):
            part = part.module
        elif isinstance(getattr(part, "_orig_mod", None), torch.nn.Module):
            part = part._orig_mod
        else:
            return part


def _rank_of_kind(part: Any) -> int:
    """Loaders first: they check all before they change anything."""
    return 0 if loader_of(part) is not None else 1


def _check_fits(name: str, part: Any, state: Any) -> None:
    """Raise, before anything has been changed, where `part` would not take `state`."""
    loader = loader_of(part)
    if loader is not None:
        loader._check_state(state)
    elif type(part).load_state_dict is torch.nn.Module.load_state_dict and not _takes_others(part):
        own = part.state_dict()
        for key in sorted(own.keys() | state.keys()):
            if (key in own) != (key in state) or not _takes(own[key], state[key]):
                raise SnapshotError(
                    f"{name} differs at {key!r}: the snapshot has {_described(state, key)}, this model "
                    f"{_described(own, key)}; make the model as it was"
                )
    elif isinstance(part, torch.optim.Optimizer):
        own = part.state_dict()
        mine, theirs = ([len(group["params"]) for group in each["param_groups"]] for each in (own, state))
        if mine != theirs:
            raise SnapshotError(
                f"{name} differs: the snapshot has groups of {theirs} parameters, this optimizer {mine}; make it as it "
                "was"
            )
        for group, saved in zip(own["param_groups"], state["param_groups"], strict=True):
            if lacking := group.keys() - saved.keys() - {"initial_lr"}:
                raise SnapshotError(
                    f"{name} differs: the snapshot's has no {', '.join(sorted(lacking))}, which this optimizer needs; "
                    "make it as it was"
                )
    elif not state and part.state_dict():
        raise SnapshotError(f"{name} differs: the snapshot's was empty, as when it is disabled; make it as it was")


def _takes(own: Any, saved: Any) -> bool:
    """Whether a tensor of a model can be filled with what was saved; what is no tensor is the model's own affair."""
    if not isinstance(own, torch.Tensor):
        return True
    fits = isinstance(saved, torch.Tensor) and saved.shape == own.shape and saved.layout == own.layout
    return fits and not saved.is_meta


def _has_kind(part: Any) -> bool:
    """Whether a state is of no use to another class: not a model's, whose names and shapes tell, nor a loader's."""
    return not isinstance(part, torch.nn.Module) and loader_of(part) is None


def _described(state: Mapping[str, Any], key: str) -> str:
    if key not in state:
        return "none"
    value = state[key]
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    kind = "" if value.layout == torch.strided and not value.is_meta else f", {value.layout} on {value.device}"
    return f"shape {tuple(value.shape)}{kind}"


def _takes_others(module: torch.nn.Module) -> bool:
    """Whether a module may take states whose names or shapes are not its own: it has a say in how they are loaded."""
    plain = torch.nn.Module._load_from_state_dict
    return any(
        each._load_state_dict_pre_hooks
        or (type(each)._load_from_state_dict is not plain and not type(each).__module__.startswith("torch."))
        for each in module.modules()
    )


def _sharded(state: Any, path: str) -> str:
    """Where a state holds a tensor of which each rank has a part; empty where it does not."""
    if isinstance(state, torch.Tensor):
        return path if type(state).__name__ in ("DTensor", "ShardedTensor") else ""
    if type(state).__name__ == "ShardedTensor":
        return path
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    return next(filter(None, (_sharded(each, f"{path}[{key!r}]") for key, each in items)), "")


def _end_here(status: int) -> None:
    """Run the other functions of atexit, and end without taking the interpreter apart.

    The model in DistributedDataParallel is still there, and the process group. Gloo's threads may not survive that
    C++ takes these down ("terminate called without an active exception"), and torchrun would report that
    the job has failed.
    """
    atexit.unregister(_end_here)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


# --- random generators of the training process ----------------------------------------------------------------------


def _generators() -> str:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return encode(state)


def _decoded(text: str) -> dict[str, Any]:
    """What `_generators` was, tried on generators that nobody uses."""
    state: dict[str, Any] = decode(text)
    random.Random().setstate(state["python"])
    twister = state["numpy"]["state"]
    # Numpy looks at no place, and would draw from whatever lies there in memory.
    if type(twister["pos"]) is not int or not 0 <= twister["pos"] <= 624 or np.shape(twister["key"]) != (624,):
        raise ValueError("numpy's generator stands where it has no numbers")
    np.random.RandomState().set_state(state["numpy"])
    torch.Generator().set_state(state["torch"])
    return state


def _set_generators(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _seed_generators(key: int) -> None:
    random.seed(key)
    np.random.seed(np.array([key & 0xFFFFFFFF, key >> 32], dtype=np.uint32))
    torch.manual_seed(key & ((1 << 63) - 1))  # the GPUs' too


# --- files ----------------------------------------------------------------------------------------------------------

_Identity = tuple[int, int, int]


def _cure(error: BaseException, folder: Path) -> str:
    """What to do where a snapshot could not be written. torch, which writes most, does not say why it could not."""
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"let this process write to {folder}, or choose another path"
    free = ""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        free = f" ({found.f_bavail * found.f_frsize >> 20} MiB are free)"
    return f"see that {folder} can be written and has room{free} for one snapshot more than it keeps"


def _let_go(error: BaseException) -> None:
    """Of the draft, which frames of torch.save hold open: a disk that was full has room again when it is removed."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__context__


class _Found(NamedTuple):
    """A sound snapshot, and what is wrong with newer ones."""

    path: Path
    id: str
    damaged: list[str]


def _older(path: Path, back: int) -> Path:
    return path if back == 0 else path.with_name(f"{path.name}.{back}")


def _find(path: Path) -> _Found | None:
    """The newest sound snapshot; None where there is none at all.

    Raises:
        SnapshotError: there are some, and all are damaged.
    """
    damaged: list[str] = []
    # A kill between two renames leaves a gap.
    names = [each.name.removeprefix(f"{path.name}.") for each in path.parent.glob(f"{_escaped(path.name)}.*")]
    older = sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)) != "0")
    for back in (0, *older):
        candidate = _older(path, back)
        try:
            return _Found(candidate, _content(candidate, check=True)["id"], damaged)
        except FileNotFoundError:
            if older:
                damaged.append(f"{candidate} is not there")
        except SnapshotError as error:
            damaged.append(str(error))
    if damaged:
        raise SnapshotError(
            f"no snapshot is sound: {'; '.join(damaged)}; put back a copy, or move them away to begin anew"
        )
    return None


def _content(path: Path, check: bool = False) -> dict[str, Any]:
    """What a snapshot holds. With `check`, every byte is compared with the checksums (CRC-32) that torch.save wrote.

    Raises:
        FileNotFoundError: there is none.
        SnapshotError: it is damaged, or no snapshot.
    """
    try:
        if check:
            with zipfile.ZipFile(path) as archive:
                problem = damage_in(archive)
            if problem:
                raise SnapshotError(f"{path} is damaged ({problem})")
        # The first look needs the names only; its tensors stay on the disk.
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=check)
    except (FileNotFoundError, SnapshotError):
        raise
    except Exception as error:
        raise SnapshotError(f"{path} is damaged or no snapshot ({type(error).__name__}: {str(error)[:200]})") from error
    if not (isinstance(content, dict) and type(content.get("midepoch_snapshot")) is int):
        raise SnapshotError(f"{path} is no snapshot of midepoch's: choose another path")
    if content["midepoch_snapshot"] != _FORMAT:
        raise SnapshotError(
            f"{path} has format {content['midepoch_snapshot']}, this midepoch reads {_FORMAT}: load it with the "
            "midepoch that wrote it"
        )
    _check_content(path, content)
    return content


def damage_in(archive: zipfile.ZipFile) -> str:
    """What is wrong with a record that torch.save wrote, or nothing; every byte is compared with its checksum."""
    # torch.save compresses nothing, so that a file cannot take more memory than it has bytes, nor for ever to look at.
    if packed := [record.filename for record in archive.infolist() if record.compress_type != zipfile.ZIP_STORED]:
        return f"the record {packed[0][:200]} is compressed"
    assert archive.fp is not None
    if sum(record.file_size for record in archive.infolist()) > archive.fp.seek(0, os.SEEK_END):
        return "its records have more bytes than the file"
    for record in archive.infolist():
        # For one that claims to be a folder torch looks at no checksum, and gives what happens to lie in memory.
        if record.external_attr & _FOLDER or record.is_dir():
            return f"the record {record.filename[:200]} is marked as a folder"
    if wrong := archive.testzip():
        return f"the checksum of {wrong[:200]} is wrong"
    for name in archive.namelist():
        if name.endswith("data.pkl"):
            try:
                check_pickle(archive.read(name))
            except ValueError as error:
                return f"the record {name[:200]} is not sound: {error}"
    return ""


def _check_content(path: Path, content: dict[str, Any]) -> None:
    kinds = {"id": str, "steps": int, "world_size": int, "seed": int, "generators": list, "parts": dict}
    for name, kind in kinds.items():
        value = content.get(name)
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 64):
            raise SnapshotError(f"{path} is damaged ({name} is missing or of another type)")
    if not content["generators"] or not all(isinstance(each, str) for each in content["generators"]):
        raise SnapshotError(f"{path} is damaged (generators)")


@contextlib.contextmanager
def checksums() -> Iterator[None]:
    """torch.save writes a CRC-32 of each record, also where it was told not to."""
    wanted = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(wanted)


def _identity(path: Path) -> _Identity | None:
    """What tells a file from the one that takes its place; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


@contextlib.contextmanager
def _synced_meanwhile(descriptor: int) -> Iterator[None]:
    """Lets the disk begin while torch is still writing. An error is told only once, so it is kept."""
    ended = threading.Event()
    errors: list[OSError] = []

    def sync() -> None:
        try:
            while not ended.wait(0.01):
                os.fsync(descriptor)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=sync, name="midepoch-sync", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _freed_later(path: Path) -> Iterator[None]:
    """Whatever replaces a file need not wait until its blocks are free: 20 ms for 100 MiB. A thread sees to that."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        threading.Thread(target=os.close, args=(descriptor,), name="midepoch-free", daemon=True).start()


def _rotate(path: Path, keep: int) -> None:
    """Make room for a new snapshot at `path`. Whenever it is interrupted, the newest sound one is found by `_find`."""
    if keep == 1 or not path.exists():
        return
    for back in range(keep - 1, 1, -1):
        with contextlib.suppress(FileNotFoundError):
            _older(path, back - 1).replace(_older(path, back))
    link = path.with_name(f"{path.name}.link")
    try:
        link.unlink(missing_ok=True)
        link.hardlink_to(path)
        link.replace(_older(path, 1))
    except OSError:  # a file system without links: for an instant there is none at `path`
        path.replace(_older(path, 1))


@contextlib.contextmanager
def _locked_draft(path: Path) -> Iterator[tuple[Path, int]]:
    """A new file beside `path`, and its descriptor. In the end it is gone or renamed; other drafts are gone too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_drafts(path)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{_DRAFT}")
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield draft, descriptor
    finally:
        draft.unlink(missing_ok=True)
        os.close(descriptor)


def _remove_drafts(path: Path) -> None:
    """Drafts of processes that were killed: nobody holds their locks."""
    for left in path.parent.glob(f"{_escaped(path.name)}.*{_DRAFT}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
            finally:
                os.close(descriptor)


_DRAFT = ".draft"


def _escaped(name: str) -> str:
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
