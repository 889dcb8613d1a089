"""The laws that every resumable loader must satisfy, and `check_resumable`, which examines them all.

A loader's declared capabilities decide which laws it is held to: where it declares no, a law is 'refused clearly' or
'not promised'. A law that cannot be examined says why.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from .examine import Examination
from .laws_of_callers import cost, delivery, guest, honesty
from .laws_of_passes import any_item, boundary, determinism, next_epoch, tail
from .laws_of_states import chain, isolation, observer, round_trip, transport
from .live import holes, reshard, rollback
from .record import Settings
from .refusal import refusal, witness
from .report import Law, LawError, Outcome, Report, Verdict, reach
from .transparent import transparent
from .worlds import partition, topology

__all__ = ["LAWS", "Law", "check_resumable", "judge"]


def check_resumable(
    make_loader: Callable[..., Any],
    *,
    world_sizes: Sequence[int] = (1, 2, 3),
    num_workers: Sequence[int] = (0, 2),
    epochs: int = 2,
    cuts: Sequence[int] | None = None,
    laws: Iterable[str] | None = None,
    quick: bool = False,
    shuffled: bool | None = None,
    tail: Literal["pad", "drop", "uneven"] = "pad",
    drop_last: bool = False,
    elastic_content: bool = True,
    parts: int = 1,
    identify: Callable[[Any], Sequence[Hashable]] | None = None,
    draws: Callable[[Any], Sequence[Hashable]] | None = None,
    gather: Callable[[Any], dict[str, Any]] | None = None,
    reseal: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    state_bytes: int = 16384,
    timeout: float = 120.0,
    options: Sequence[str] | None = None,
    plain: Callable[..., Any] | None = None,
    raise_on_failure: bool = True,
) -> Report:
    """Examine the loaders that ``make_loader`` builds against the laws, resuming them in spawned processes.

    Args:
        make_loader: a picklable function (module-level, or a `functools.partial` of one) that builds a fresh loader
            each time. It may take ``rank`` and ``world_size``, and variations: ``num_workers``, ``batch_size``,
            ``seed``, ``size`` (of the dataset), ``read_log`` (a path to which the dataset appends a line for each
            sample it reads) and ``items`` (a list for the source to deliver, one item a batch). A law that needs a
            missing parameter is reported as not applicable.
        world_sizes: numbers of ranks to examine, each rank in its own process; 1 is always included.
        num_workers: numbers of workers to change between.
        epochs: the number of epochs, from the first, in which to cut.
        cuts: where to cut, in batches taken; None: everywhere.
        laws: names of the laws to examine; None: all of `LAWS`.
        quick: cut each epoch at three places only.
        shuffled: whether two epochs must differ in their order (True) or agree (False); None: not examined.
        tail: how the ranks share the last samples.
        drop_last: whether an incomplete last batch is left out.
        elastic_content: whether a sample's content must be the same on any topology; False if it depends on the batch
            it is in (mixup).
        parts: the number of loaders that make_loader combines. Each of them has its own last samples.
        identify: batch -> the identities of its samples (ids of a dataset without repetition are best). None: derived
            from the columns of the batch whose rows occur again in other batches. If there are none, laws that need
            names are not applicable.
        draws: batch -> for each sample the random numbers it drew, as one hashable value that two samples never
            share by chance. If given, they must differ between samples and between epochs.
        gather: loader -> the state of all ranks, called by all ranks in a gloo process group; None:
            ``midepoch.gather``. Used if the loader declares that its state is not rank-independent.
        reseal: state -> the state with a new checksum; None: ``midepoch.reseal``.
        state_bytes: the largest size of a state as JSON.
        timeout: seconds that one request to a spawned process may take.
        options: which of make_loader's parameters have the meaning above; None: all that have one of these names. Pass
            it if ``size``, for example, is the size of an image.
        plain: a picklable function with the parameters of make_loader that builds the plain loader, with which an
            undisturbed run is compared; None: the source of a loader that `midepoch.wrap` has made.
        raise_on_failure: raise if laws fail. Otherwise read `Report.failures`.

    Raises:
        LawError: the first law that failed, with ``report`` set and the other failures as notes.
        ValueError: for an unknown law, or a loader without a batch.
        TypeError: for a make_loader that cannot be pickled.
        RuntimeError: no process starts, as in a script without ``if __name__ == "__main__":``.
    """
    settings = Settings(
        make_loader=make_loader, world_sizes=world_sizes, num_workers=num_workers, epochs=epochs, cuts=cuts,
        quick=quick, shuffled=shuffled, tail=tail, drop_last=drop_last, elastic_content=elastic_content, parts=parts,
        identify=identify, draws=draws, gather=gather, reseal=reseal, state_bytes=state_bytes, timeout=timeout,
        options=options, plain=plain,
    )  # fmt: skip
    examination = Examination(settings)
    examination.start()
    report = Report(tuple(judge(examination, laws)))
    if raise_on_failure and report.failures:
        first, *others = report.failures
        first.report = report
        for other in others:
            first.add_note(str(other))
        raise first
    return report


def _examine(law: Law, examination: Examination) -> Outcome:
    examination.begin(law.name, law.cause, law.cure)
    try:
        return law.examine(examination)
    except LawError as error:
        if law is not transparent:  # the other laws compare the loader with itself
            examination.broken.append(law.name)
        raise examination.explained(error) from None


def judge(examination: Examination, laws: Iterable[str] | None = None) -> Iterator[Verdict]:
    """Yield the verdicts of the named laws, or of all, in the order of `LAWS`, as they are reached.

    Raises:
        ValueError: there is no such law, at once; or the loader has no batch.
    """
    names = list(LAWS) if laws is None else list(laws)
    unknown = [name for name in names if name not in LAWS]
    if unknown:
        raise ValueError(f"there is no law {unknown[0]!r}; the laws are {', '.join(LAWS)}")
    return (reach(name, partial(_examine, law, examination)) for name, law in LAWS.items() if name in names)


_ALL = (
    transparent, determinism, tail, next_epoch, boundary, round_trip, observer, isolation, transport, chain, partition,
    topology, refusal, delivery, cost, guest, any_item, witness, honesty, holes, reshard, rollback,
)  # fmt: skip
LAWS: dict[str, Law] = {each.name: each for each in _ALL}
"""All laws by name, in a good order to read them."""
