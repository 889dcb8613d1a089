"""torchtitan: `feed` puts a wrapped loader into a configuration, and torchtitan's checkpoints keep its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

try:
    from torchtitan.components.data.loader import BaseDataLoader
except ModuleNotFoundError:  # up to 0.3
    from torchtitan.components.dataloader import BaseDataLoader

from midepoch.errors import StateError
from midepoch.loader.lending import loader_of
from midepoch.loader.loader import Loader
from midepoch.state.format import State
from midepoch.state.parts import is_rank_independent
from midepoch.world import World

__all__ = ["feed"]


def feed(config: Any, make: Callable[..., Any]) -> None:
    """Make the Trainer of `config` read the loader that `make` returns, epoch after epoch, and save and resume it.

    Call it where you make the configuration: ``config = llama3_debugmodel(); feed(config, make); return config``.

    Args:
        config: torchtitan's ``Trainer.Config``. Its ``dataloader`` is replaced.
        make: called once in each process. It gets the keywords that torchtitan gives its own data loaders:
            ``tokenizer``, and ``seq_len`` and ``local_batch_size``, or after 0.3 ``max_context_length`` and
            ``num_tokens_per_batch``. ``world`` is the `World` of data ranks, which are fewer than all processes under
            tensor or model parallelism. It returns ``midepoch.wrap(..., world=world)``,
            a loader of pairs: a dict of inputs, and labels.
    """

    class Fed(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            dataset: str = "midepoch"

        def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **keywords: Any) -> None:
            self._loader = _made(make, World(dp_rank, dp_world_size), keywords)

        def __iter__(self) -> Iterator[Any]:
            # torchtitan counts steps, not epochs, and stops when a loader ends. One pass may be empty, if a source of
            # unknown length is resumed at its very end.
            empty = 0
            while empty < 2:
                empty += 1
                for batch in self._loader:
                    empty = 0
                    yield batch

        def state_dict(self) -> State:
            return self._loader.state_dict()

        def load_state_dict(self, state: State) -> None:
            if state:  # torchtitan passes an empty dict if the checkpoint has no state
                self._loader.load_state_dict(state)

    config.dataloader = Fed.Config()


def _made(make: Callable[..., Any], world: World, keywords: dict[str, Any]) -> Loader:
    made = make(world=world, **keywords)
    loader = loader_of(made)
    if loader is None:
        raise TypeError(
            f"feed's function must return a wrapped loader, but returned a {type(made).__name__}: "
            "return midepoch.wrap(loader, world=world)"
        )
    divides = loader.world
    if (divides.rank, divides.world_size) != (world.rank, world.world_size):
        raise ValueError(
            "the loader that feed's function returned does not divide its data over torchtitan's data ranks: "
            "return midepoch.wrap(loader, world=world)"
        )
    if not is_rank_independent(loader):
        raise StateError(
            "torchtitan's checkpoint keeps one state for all ranks, but each rank of this source has its own (see "
            "loader.capabilities): use a source whose state is the same on each rank, such as a map-style DataLoader"
        )
    return loader
