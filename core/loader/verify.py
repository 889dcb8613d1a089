"""What follows when a sample is not what the witness of a loaded state says."""

from __future__ import annotations

from typing import Literal

from ..errors import StateMismatchError, warn
from ..state.witness import Witness
from .adapter import Seen

__all__ = ["Verify", "tell_of_another", "verify"]

Verify = Literal["sample", "strict", "warn", "off"]
"""`wrap`'s setting of this name."""

_GO_ON = "pass verify='warn' to midepoch.wrap to go on all the same"


def tell_of_another(which: str, strict: Verify) -> None:
    """What follows when the data that `which` names are not those that the state was saved with."""
    _tell(
        f"{which} has another content than before: the samples to come may be others; restore "
        f"it, or {_GO_ON}",
        strict in ("sample", "strict"),
    )


def verify(witness: Witness, seen: Seen, epoch: int, strict: Verify) -> None:
    """Compare a sample with a loaded state's witness.

    Args:
        witness: of the loaded state.
        seen: what a reader saw.
        epoch: that is being read.
        strict: as `wrap`'s `verify`.

    Raises:
        StateMismatchError: it is another sample; with "strict", also if its bits differ or it cannot be read.
    """
    if witness.index is None and witness.epoch != epoch and not seen.what:
        return  # only that epoch's order knows which sample it was
    index = seen.index if witness.index is None else witness.index
    at_boundary = witness.epoch != epoch
    # A dataset may shrink, or have other items, between epochs.
    renewed = at_boundary and (seen.renews or seen.missing)
    refuses = strict == "strict" or (strict == "sample" and not renewed)
    which = seen.what or f"sample {index!r:.80}, the first of epoch {witness.epoch},"
    if seen.expected is None:
        if seen.missing:
            _tell(f"{which} is not there now: the data has changed; restore it, or {_GO_ON}", refuses)
        else:
            what = seen.error or "it raises an error"
            _tell(f"{which} cannot be compared with the state's witness ({what})", strict == "strict")
        return
    difference = witness.compare(seen.expected, at_boundary)
    if difference is None:
        return
    parts = f" ({difference.names})" if difference.names else ""
    if difference.another:
        between = (
            ". The state is of an epoch's beginning, and tells of the epoch before: if your own code gives the dataset "
            "other samples in each epoch, without a set_epoch, nothing is wrong, and verify='warn' is right"
        )
        _tell(
            f"{which} is another one than when the state was saved{parts}: the files, their order, or what is made of "
            "them have changed, so every index may now be another sample; restore them (a list of files from glob or "
            f"os.listdir has to be sorted), or {_GO_ON}{between if at_boundary and not renewed else ''}",
            refuses,
        )
    elif difference.shapes and not difference.names:
        _tell(f"{which} had another shape when the state was saved", strict == "strict")
    else:
        _tell(
            f"{which} is the same as when the state was saved, but not bit for bit{parts}: the augmentation, a "
            "decoder, a library or the files have changed, and the samples to come differ as much",
            strict == "strict",
        )


def _tell(message: str, error: bool) -> None:
    if error:
        raise StateMismatchError(message)
    warn(message)
