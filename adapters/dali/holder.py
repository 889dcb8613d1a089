"""Objects and functions that read a DALI iterator, which nothing can read from its start again."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from midepoch.adapters.dali import private
from midepoch.errors import UnsupportedSourceError
from midepoch.loader.adapter import Adapter, Options
from midepoch.reading.around import loaders_in

__all__ = ["HolderAdapter"]


class HolderAdapter(Adapter):
    """Refuses them. One that passes the batches of its iterator on is declared, with ``inside=``."""

    name: ClassVar[str] = "dali-holder"

    @classmethod
    def recognises(cls, source: object) -> bool:
        """An object that holds DALI iterators, or a function that reads one."""
        if private.is_iterator(source):
            return False
        if any(map(private.is_iterator, private.named_in(source).values())) or loaders_in(source, private.is_iterator):
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
        raise UnsupportedSourceError(
            f"{name} reads a DALI iterator, which cannot be read from its start again. {cure}"
        )
