"""NVIDIA's in-process restart: `feed` makes a loader go back with the weights, and refuse to go on without."""

from __future__ import annotations

import weakref
from typing import Any

from nvidia_resiliency_ext.inprocess import CallWrapper, FrozenState
from nvidia_resiliency_ext.inprocess.exception import RestartAbort
from nvidia_resiliency_ext.inprocess.finalize import Finalize

from midepoch.errors import MidepochError
from midepoch.loader.lending import loader_of
from midepoch.loader.loader import Loader
from midepoch.loader.part import Part
from midepoch.world import World

__all__ = ["feed"]


def feed(call: CallWrapper, loader: Loader, world: World | None = None) -> None:
    """Share a loader's data among the ranks of this start, and have it go back with the weights at each restart:

        loader = midepoch.wrap(DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2), seed=0)

        @Wrapper()
        def train(call: CallWrapper = None):
            feed(call, loader)
            ...                                         # a model, and torch.distributed
            if path.exists():
                model_state, loader_state = torch.load(path)
                model.load_state_dict(model_state)
                loader.load_state_dict(loader_state)
            else:
                loader.seek(epoch=0)                    # the weights begin anew, too
            for batch in loader:
                ...

    Call it at the beginning of the wrapped function, before a state is loaded. The loader may be made in that function
    or, to keep what it has opened, once in each process.

    When a start has failed, the loader's worker processes are ended. Forked ones hold the connections of the process
    group, and while these are open, gloo leaves the other ranks waiting in a collective.

    When the function has been started again, the weights went back. So load a state, or seek a place, before the next
    batch. Otherwise that batch raises `nvidia_resiliency_ext.inprocess.exception.RestartAbort`, which the Wrapper does
    not answer with another restart.

    Args:
        call: as the Wrapper gives it to the function.
        loader: the result of `midepoch.wrap`.
        world: the ranks that share data: by default all that the Wrapper has started. Under tensor or pipeline
            parallelism, ``World.from_mesh(mesh["dp"])`` of the mesh of this start.

    Raises:
        nvidia_resiliency_ext.inprocess.exception.RestartAbort: an argument has the wrong type; the loader was wrapped
            with another world; or the number of ranks has changed, and the source cannot be shared anew. The Wrapper
            would answer any other error with another restart, which fails in the same way.
    """
    try:
        _feed(call, loader, world)
    except (TypeError, MidepochError) as error:
        raise RestartAbort(str(error)) from error


def _feed(call: CallWrapper, loader: Loader, world: World | None) -> None:
    found = loader_of(loader)
    if not isinstance(call, CallWrapper) or found is None:
        raise TypeError(
            f"feed takes a CallWrapper and a wrapped loader, got a {type(call).__name__} and a "
            f"{type(loader).__name__}: write `def train(call: CallWrapper = None)`, and feed(call, midepoch.wrap(...))"
        )
    part, now = Part("of the wrapped function", found), World.current() if world is None else world
    stated = part.context.options.world
    if world is None and stated is not None and (stated.rank, stated.world_size) != (now.rank, now.world_size):
        raise MidepochError(
            f"the loader was wrapped with world= rank {stated.rank} of {stated.world_size}, and this process is rank "
            f"{now.rank} of the {now.world_size} that the Wrapper has started: leave world= out of midepoch.wrap, and "
            "where some ranks get the same batches, pass their world to feed at each start"
        )
    if call.iteration:
        part.progress.begin_again(
            RestartAbort,
            f"the wrapped function was started again (restart {call.iteration}), so the weights went back, but this "
            "loader did not: call loader.load_state_dict with the state that was saved with these weights, or "
            "loader.seek(epoch=0) if they begin anew",
        )
    if found.world != now:
        found.reshard(now)
    wrapper = call.wrapper
    if not isinstance(wrapper.finalize, _End):
        wrapper.finalize = _End(wrapper.finalize)
    wrapper.finalize.loaders.add(found)


class _End(Finalize):
    """Ends the worker processes of loaders after a start that failed, and then does what was there before."""

    def __init__(self, before: Any) -> None:
        self.before, self.loaders = before, weakref.WeakSet[Loader]()

    def __call__(self, state: FrozenState) -> FrozenState:
        for loader in self.loaders:
            loader.close()
        return state if self.before is None else self.before(state)
