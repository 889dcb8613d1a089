"""torchtitan: `feed` puts a wrapped loader into a configuration, and torchtitan's checkpoints keep its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader

from midepoch.errors import StateError
from midepoch.loader.lending import loader_of
from midepoch.loader.loader import Loader
from midepoch.loader.part import Part
from midepoch.state.format import State
from midepoch.state.parts import is_rank_independent
from midepoch.world import World

__all__ = ["feed"]


def feed(config: Any, make: Callable[..., Any]) -> None:
    """Let the Trainer that `config` describes read what `make` makes, epoch after epoch, and save and resume with it.

    Call it where the configuration is made: ``config = llama3_debugmodel(); feed(config, make); return config``.

    Args:
        config: torchtitan's ``Trainer.Config``, whose ``dataloader`` is exchanged.
        make: called once in each process with the keywords that torchtitan gives its own data loaders, such as
            ``tokenizer``, ``seq_len`` and ``local_batch_size``, and with ``world``, the `World` among whose ranks the
            data is divided: not all processes, where tensors or the model are divided too. Returns a wrapped loader,
            ``midepoch.wrap(..., world=world)``, of pairs of a dict of inputs and labels.
    """

    class Fed(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            dataset: str = "midepoch"

        def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **keywords: Any) -> None:
            self._loader = _made(make, World(dp_rank, dp_world_size), keywords)

        def __iter__(self) -> Iterator[Any]:
            # torchtitan counts steps, not epochs, and stops where a loader does. One pass may be empty: of a source
            # whose length is not known, resumed at its very end.
            empty = 0
            while empty < 2:
                empty += 1
                for batch in self._loader:
                    empty = 0
                    yield batch

        def state_dict(self) -> State:
            return self._loader.state_dict()

        def load_state_dict(self, state: State) -> None:
            if state:  # torchtitan's word for a checkpoint without one
                self._loader.load_state_dict(state)

    config.dataloader = Fed.Config()


def _made(make: Callable[..., Any], world: World, keywords: dict[str, Any]) -> Loader:
    made = make(world=world, **keywords)
    loader = loader_of(made)
    if loader is None:
        raise TypeError(
            f"feed's function must return a loader that was wrapped, and returned a {type(made).__name__}: "
            "return midepoch.wrap(loader, world=world)"
        )
    divides = Part("", loader).world
    if (divides.rank, divides.world_size) != (world.rank, world.world_size):
        raise ValueError(
            "the loader that feed's function returned does not divide its data as torchtitan does: "
            "return midepoch.wrap(loader, world=world)"
        )
    if not is_rank_independent(loader):
        raise StateError(
            "torchtitan's checkpoint keeps one state for all ranks, and each rank of this source has its own "
            "(loader.capabilities): choose a source of which any rank's state will do, such as a map-style DataLoader"
        )
    return loader
