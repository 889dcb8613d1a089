"""Running a loader in a spawned process, and recording what it does in a form that can be sent back."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch

from ..state.parts import gather
from . import items, naming
from .report import LawError

__all__ = [
    "CAPABILITIES", "MOST_BATCHES", "OPTIONS", "Failure", "Pass", "Recording", "Seen", "Settings", "Trial",
    "capture_failure", "experiment", "in_group", "length_of", "open_loader", "read_capabilities",
    "read_views", "record", "record_many", "see", "see_rest", "state_of", "violation",
]  # fmt: skip

MOST_BATCHES = 100_000  # of a pass: no epoch that is examined should be longer

OPTIONS = {
    "rank": "the number of a process",
    "world_size": "the number of processes",
    "num_workers": "the number of worker processes",
    "batch_size": "the number of samples in a batch",
    "seed": "the seed of the order and of all random streams",
    "size": "the number of samples in the data set",
    "read_log": "a file to which the data set appends a line for each sample that it reads",
    "items": "a list of items for the source to deliver, one a batch",
}
"""The meaning of each parameter of make_loader."""


@dataclass(frozen=True)
class Settings:
    """All settings of an examination. `check_resumable` documents each.

    They are sent to the spawned processes, so all functions in them must be picklable.
    """

    make_loader: Callable[..., Any]
    world_sizes: Sequence[int] = (1, 2, 3)
    num_workers: Sequence[int] = (0, 2)
    epochs: int = 2
    cuts: Sequence[int] | None = None
    quick: bool = False
    shuffled: bool | None = None
    tail: Literal["pad", "drop", "uneven"] = "pad"
    drop_last: bool = False
    elastic_content: bool = True
    parts: int = 1
    identify: Callable[[Any], Sequence[Hashable]] | None = None
    draws: Callable[[Any], Sequence[Hashable]] | None = None
    gather: Callable[[Any], dict[str, Any]] | None = None
    reseal: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    state_bytes: int = 16384
    timeout: float = 120.0
    options: Sequence[str] | None = None
    plain: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not callable(self.make_loader):
            raise TypeError(f"make_loader must be a function that builds a fresh loader; got {self.make_loader!r}")
        for name, least in (("world_sizes", 1), ("num_workers", 0), ("cuts", 1)):
            values = getattr(self, name)
            if values is not None and any(type(value) is not int or value < least for value in values):
                raise ValueError(f"{name} must be integers of at least {least}; got {values!r}")
        for name in ("epochs", "parts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)!r}")
        if self.tail not in ("pad", "drop", "uneven"):
            raise ValueError(f"tail must be 'pad', 'drop' or 'uneven'; got {self.tail!r}")
        unknown = set(self.options or ()) - set(OPTIONS)
        if unknown:
            raise ValueError(f"options must be some of {', '.join(OPTIONS)}; got {sorted(unknown)}")
        if not self.timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds; got {self.timeout!r}")
        for name in ("world_sizes", "num_workers", "cuts", "options"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))  # lists of the caller's may change


@dataclass(frozen=True)
class Seen:
    """One batch, reduced to what other processes must know about it.

    ``ids`` names its samples. ``samples`` has the digest of each (None if the batch cannot be split). ``draws`` has
    the random numbers that the caller's ``draws`` found in it.
    """

    digest: str
    leaves: tuple[items.Leaf, ...]
    ids: tuple[Hashable, ...]
    samples: tuple[str, ...] | None
    draws: tuple[Hashable, ...] | None


@dataclass
class Pass:
    """One iteration over a loader: n batches, and n + 1 states if they were asked for."""

    batches: list[Seen] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ids(self) -> list[tuple[Hashable, ...]]:
        """The sample identities of each batch."""
        return [seen.ids for seen in self.batches]


@dataclass(frozen=True)
class Failure:
    """An exception in another process: the names of its classes, its message and its traceback."""

    kinds: tuple[str, ...]
    message: str
    trace: str
    during: str

    def __str__(self) -> str:
        return f"{self.kinds[0].rpartition('.')[2]} while {self.during}: {self.message}"

    @property
    def whole(self) -> str:
        """With the traceback."""
        return f"{self}\n{self.trace}".rstrip()


@dataclass
class Recording:
    """What one fresh loader did: its passes, and the failure that ended them, if any.

    ``loaded`` is the state that it returned right after loading one.
    """

    passes: list[Pass] = field(default_factory=list)
    loaded: dict[str, Any] | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Trial:
    """What to do with a fresh loader: load ``state`` unless it is None, then iterate ``passes`` times.

    ``options`` go to make_loader. With ``states``, a state is asked for before the first batch and after every batch.
    ``limit`` ends a pass that is longer than any epoch should be. ``later``: use the global seeds of a process that
    resumes, as every trial with a state does.
    """

    settings: Settings
    options: Mapping[str, Any]
    state: dict[str, Any] | None = None
    passes: int = 1
    states: bool = False
    limit: int = MOST_BATCHES
    later: bool = False


_SEED = 0
_LATER_SEED = 1_403_580_810  # far from the other seed, because loaders may add the epoch to their seed


@contextlib.contextmanager
def open_loader(settings: Settings, options: Mapping[str, Any], *, later: bool = False) -> Iterator[Any]:
    """A fresh loader, made as in a new process: always with the same global seeds, without warnings; closed at the end.

    Two runs of a job need not have the same global seeds. So a loader that loads a state is made ``later``, with other
    seeds. The ranks of one world have the same seeds.
    """
    seed = _LATER_SEED if later else _SEED
    random.seed(seed)
    np.random.seed(seed)
    # Without a device, torch.manual_seed would format the stack of each call for later, three times.
    seed_torch = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed_torch(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = settings.make_loader(**options)
        if getattr(loader, "global_batch", None) is not None:
            raise ValueError("several batches of this loader make one step: examine it without global_batch=")
        try:
            yield loader
        finally:
            close = getattr(loader, "close", None)
            if callable(close):
                close()


def see(settings: Settings, batch: Any) -> Seen:
    """Record everything about ``batch`` before the loader can reuse its memory."""
    parts = tuple(items.leaves(batch))
    identify = settings.identify or naming.Naming()
    ids = tuple(identify(batch))
    if isinstance(identify, naming.Naming) and identify.columns:
        split = identify.samples(batch)
    else:
        split = naming.split(batch, len(ids))
    return Seen(
        digest=items.combine(parts),
        leaves=parts[:32],
        ids=ids,
        samples=None if split is None else tuple(split),
        draws=None if settings.draws is None else tuple(settings.draws(batch)),
    )


def see_rest(settings: Settings, options: Mapping[str, Any], state: dict[str, Any]) -> Pass:
    """The first pass of a fresh loader that has loaded ``state``."""
    with open_loader(settings, options, later=True) as loader:
        loader.load_state_dict(copy.deepcopy(state))
        return Pass([see(settings, batch) for batch in itertools.islice(loader, MOST_BATCHES)])


def capture_failure(error: Exception, during: str, traced: bool = True) -> Failure:
    """``error`` in a form that can be sent, whatever its class; its traceback costs more than most calls."""
    kinds = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    return Failure(kinds, str(error), traceback.format_exc() if traced else "", during)


def record(trial: Trial) -> Recording:
    """Run a trial. A failure of the loader is part of the recording, never raised."""
    recording = Recording()
    during = "making the loader"
    try:
        with open_loader(trial.settings, trial.options, later=trial.later or trial.state is not None) as loader:
            if trial.state is not None:
                during = "loading a state"
                loader.load_state_dict(copy.deepcopy(trial.state))
                recording.loaded = copy.deepcopy(loader.state_dict())
            for number in range(trial.passes):
                during = f"iterating, pass {number}"
                recording.passes.append(Pass())
                _record_pass(trial, loader, recording.passes[-1])
            during = "closing the loader"
    except Exception as error:  # noqa: BLE001 - the calling law judges it
        recording.failure = capture_failure(error, during)
    return recording


def record_many(trials: Sequence[Trial]) -> list[Recording]:
    """`record` for several trials in one request."""
    return [record(trial) for trial in trials]


def _record_pass(trial: Trial, loader: Any, into: Pass) -> None:
    def ask() -> None:
        if trial.states:
            into.states.append(copy.deepcopy(state_of(trial.settings, loader)))

    ask()
    for batch in loader:
        into.batches.append(see(trial.settings, batch))
        ask()
        if len(into.batches) >= trial.limit:
            break


def state_of(settings: Settings, loader: Any) -> dict[str, Any]:
    """The state of all ranks: gathered if there is a process group and each rank knows only its part."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return dict(loader.state_dict())
    return dict((settings.gather or gather)(loader))


def read_views(
    settings: Settings, options: Mapping[str, Any], passes: int, paddings: Sequence[naming.Column]
) -> tuple[list[naming.View], list[naming.Column], list[str]]:
    """`naming.read_columns` of a fresh loader."""
    with open_loader(settings, options) as loader:
        return naming.read_columns(loader, passes, MOST_BATCHES, paddings)


def length_of(loader: Any) -> int | None:
    """``len(loader)``, or None if it raises a TypeError because the length is unknown."""
    try:
        return len(loader)
    except TypeError:
        return None


def in_group(file: str, rank: int, world_size: int, trials: Sequence[Trial]) -> list[Recording]:
    """`record_many` in a gloo process group that is initialised through ``file``; without a file, in none."""
    if not file:
        return record_many(trials)
    # All ranks are on this machine. Its host name may resolve to an address that they cannot reach.
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    try:
        recordings = record_many(trials)
        torch.distributed.barrier()  # nobody leaves while another is still connecting
        return recordings
    finally:
        torch.distributed.destroy_process_group()


def read_capabilities(settings: Settings, options: Mapping[str, Any]) -> dict[str, tuple[bool, str]] | None:
    """Capability -> (yes or no, reason) after the first batch and its state; None for a loader that declares none."""
    with open_loader(settings, options) as loader:
        if getattr(loader, "capabilities", None) is None:
            return None
        with contextlib.suppress(Exception):  # another law judges it
            next(iter(loader), None)
            loader.state_dict()
        declared = {name: getattr(loader.capabilities, name, None) for name in CAPABILITIES}
    return {name: (bool(each), str(getattr(each, "reason", "it is not declared"))) for name, each in declared.items()}


CAPABILITIES = (
    "exact_order", "exact_augmentations", "constant_time_resume", "elastic_world", "elastic_workers",
    "rank_independent", "skips",
)  # fmt: skip


def violation(
    expected: str, got: str, epoch: int | None = None, batch: int | None = None, cause: str = "", cure: str = ""
) -> LawError:
    """What an experiment raises if it finds the law broken. Where no cause and cure are given, the law's own are."""
    return LawError("", epoch, batch, expected, got, cause, cure)


def experiment(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The result of ``function(*arguments)``, or the `LawError` or the `Failure` in which it ended."""
    try:
        return function(*arguments)
    except LawError as found:
        return found
    except Exception as error:  # noqa: BLE001 - the calling law judges it
        return capture_failure(error, f"in the experiment '{function.__name__.strip('_').replace('_', ' ')}'")
