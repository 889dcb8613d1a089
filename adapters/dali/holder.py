"""Objects and functions that read a DALI iterator, or a reader of its dynamic mode, from where that is."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NoReturn

from midepoch.adapters.dali import private
from midepoch.errors import UnsupportedSourceError
from midepoch.loader.adapter import Adapter, Options
from midepoch.reading.around import loaders_in

__all__ = ["HolderAdapter"]


class HolderAdapter(Adapter):
    """Refuses them. One that passes the batches of an iterator on is declared, with ``inside=``."""

    name: ClassVar[str] = "dali-holder"

    @classmethod
    def recognises(cls, source: object) -> bool:
        """An object that holds DALI iterators or dynamic readers, or a function that reads one."""
        if private.is_iterator(source):
            return False
        held = private.named_in(source).values()
        if any(map(private.is_iterator, held)) or loaders_in(source, private.is_iterator):
            return True
        if any(map(private.is_dynamic_reader, (source, _owner(source), *held))):
            return True
        keeps_a_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        return not keeps_a_state and any(map(private.is_iterator, private.in_containers(source)))

    @classmethod
    def choose(cls, source: Any, options: Options) -> NoReturn:
        """Says what to write."""
        name, paths = getattr(source, "__qualname__", type(source).__name__), loaders_in(source, private.is_iterator)
        cure = "Wrap the DALI iterator itself, and pass what is done with its batches as then="
        if len(paths) == 1:
            declared = f'midepoch.wrap(loader, inside="{next(iter(paths))}")'
            cure = f"Write {declared} if it passes the batches on one for one. Otherwise w{cure[1:]}"
        what = "a DALI iterator, which cannot be read from its start again"
        if any(map(private.is_dynamic_reader, (source, _owner(source), *private.named_in(source).values()))):
            what = "a reader of DALI's dynamic mode, and each pass goes on where the reader stands"
            cure = (
                "Wrap a function that makes the reader anew, which is read again from its start: def batches(): return "
                "ndd.readers.File(..., seed=random.getrandbits(31)).next_epoch(batch_size=...)"
            )
        raise UnsupportedSourceError(f"{name} reads {what}. {cure}")


def _owner(source: Any) -> Any:
    """The object whose method `source` is, or calls with more arguments; None if it is neither."""
    return getattr(source.func if isinstance(source, functools.partial) else source, "__self__", None)
