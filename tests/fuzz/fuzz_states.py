"""Loaders for the fuzzing of states, what each of their places holds, and what became of one mutated state."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

import midepoch
from midepoch import MidepochError
from support import sources

CHECKED_REFUSALS = 40  # of every so many refusals, one is followed by a look at the next batches too


class Wrong(AssertionError):  # noqa: N818  # no error of the program's
    """What must not happen."""


def frozen(value: Any) -> Any:
    """A batch as built-in values that are equal only if all their bits are."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {name: frozen(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(each) for each in value]
    return value


def rows(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(zip(*map(rows, batch.values()), strict=True))
    if isinstance(batch, tuple) or (isinstance(batch, list) and batch and isinstance(batch[0], Mapping | torch.Tensor)):
        return list(zip(*map(rows, batch), strict=True))
    return [frozen(row) for row in batch]


def whole(batch: Any) -> list[Any]:
    """A batch that is the unit of its order."""
    return [frozen(batch)]


@dataclass(frozen=True)
class Target:
    make: Callable[[], Any]  # a fresh one
    units: Callable[[Any], list[Any]] = rows  # what of a batch are the units that positions count
    relatives: tuple[Callable[[], Any], ...] = ()  # of other data or another order, whose states are not this one's
    ranks: int = 1  # of so many: then only places that were read are known, and where a fresh loader is sent
    seeks: bool = True  # the epochs of a fresh loader that was sent there are those that iterating leads to
    patience: float = 20.0  # seconds that one mutation may take
    together: int = 1 << 62  # mutations that one process makes: some backends keep memory for each loader


def noisy(size: int = 22, **options: Any) -> Any:
    return midepoch.wrap(sources.noisy_loader(size), **{"seed": 5, **options})


class Strange(dict[int, float]):
    """Fails for what it has not, as datasets of other people do: each with an error of its own."""

    def __missing__(self, key: Any) -> Any:
        raise (IndexError, KeyError, TypeError, OverflowError, MemoryError, ZeroDivisionError)[hash(key) % 6](key)


def strange() -> Any:
    data: Any = Strange({number: float(number) for number in range(16)})
    return midepoch.wrap(DataLoader(data, batch_size=4, shuffle=True), seed=5)


def listed(size: int = 22) -> Any:
    sampler = WeightedRandomSampler([0.1 + index for index in range(size)], size)
    return midepoch.wrap(DataLoader(sources.Noisy(size), batch_size=4, sampler=sampler), seed=5)


def in_groups() -> Any:
    return midepoch.wrap(DataLoader(sources.Noisy(22), batch_sampler=sources.Buckets(22)), seed=5)


def driven(size: int = 22) -> Any:
    return midepoch.wrap(DataLoader(sources.Exposing(size), batch_size=4), seed=5)


def replayed(shard: bool | None = None) -> Any:
    return midepoch.wrap(DataLoader(sources.Stream(22), batch_size=4), seed=5, shard=shard)


def generated() -> Any:
    return midepoch.wrap(sources.numbers, seed=5)


def in_a_list(size: int = 9) -> Any:
    return midepoch.wrap([torch.tensor([number]) for number in range(size)], seed=5)


def sampled_indices(size: int = 22) -> Any:
    return midepoch.ResumableSampler(size, seed=5)  # a loader in all that is asked of it here


def counted(size: int = 6) -> Any:
    return midepoch.wrap(sources.Counter(size))


def of(module: str, name: str, **options: Any) -> Callable[[], Any]:
    """A factory of `support`, whose backend is imported when it is called."""
    return lambda: getattr(importlib.import_module(f"support.{module}"), name)(**options)


def mixed(mode: str = "weighted") -> Any:
    return midepoch.combine({"short": noisy(12), "long": noisy(21)}, mode, seed=5)  # type: ignore[arg-type]


def nested() -> Any:
    return midepoch.combine({"inner": mixed("max_size_cycle"), "other": noisy(9)}, "weighted", seed=5)


def of_own_state(name: str) -> Callable[[], Any]:
    return lambda: importlib.import_module("support.own_state_sources").WRAPPED[name]()


def webdataset_counted() -> Any:
    from support import webdataset_sources as shards

    urls = shards.law_shards("indexed", [4, 0, 5, 1, 3])
    dataset = shards.plain(urls, shardshuffle=10).shuffle(100).map(shards.Reading())
    return midepoch.wrap(dataset.batched(2, collation_fn=shards.stack).with_epoch(4), seed=5)


@functools.cache
def images() -> str:
    from support import dali_sources

    return str(dali_sources.write_images(Path(tempfile.mkdtemp(prefix="midepoch-fuzz-"))))


def dali(kind: str, **options: Any) -> Any:
    from support import dali_sources

    return getattr(dali_sources, kind)(root=images(), reader="numpy", seed=3, **options)


streamed = functools.partial(of, "streaming_sources", "make_loader")
carried, indexed = of("law_sources", "carried"), of("webdataset_sources", "indexed")
TARGETS: dict[str, Target] = {
    "dataloader": Target(noisy, relatives=(lambda: noisy(23), lambda: noisy(seed=6), in_groups)),
    "dataloader without a seed": Target(lambda: noisy(seed=None), relatives=(lambda: noisy(23), lambda: noisy(seed=6))),
    "dataloader of strange errors": Target(strange, relatives=(noisy,)),
    "dataloader listed": Target(listed, relatives=(lambda: listed(21),)),
    "dataloader by batches": Target(in_groups, whole, relatives=(noisy,)),
    "dataloader of a rank": Target(lambda: noisy(24, world=midepoch.World(1, 2)), relatives=(noisy,), ranks=2),
    "sampler": Target(sampled_indices, whole, relatives=(lambda: sampled_indices(23),)),
    "sequence": Target(in_a_list, whole, relatives=(lambda: in_a_list(8),)),
    "iterable-dataloader driven": Target(driven, relatives=(lambda: driven(23), replayed)),
    "iterable-dataloader replayed": Target(replayed, relatives=(driven, lambda: replayed(False))),
    "iterable-dataloader own streams": Target(lambda: replayed(False), whole, relatives=(replayed,)),
    "iterable driven": Target(lambda: midepoch.wrap(sources.Pairs(11), seed=5), whole, relatives=(driven, generated)),
    "iterable replayed": Target(generated, whole, relatives=(replayed,)),
    "stateful": Target(counted, whole, relatives=(lambda: counted(7), carried), seeks=False),
    "stateful of all epochs": Target(carried, whole, relatives=(counted,), seeks=False),
    "stateful-dataloader": Target(
        of_own_state("torchdata StatefulDataLoader"), whole, relatives=(carried,), seeks=False
    ),
    "datasets": Target(of_own_state("Hugging Face IterableDataset"), whole, relatives=(carried,), seeks=False),
    "grain": Target(of_own_state("Grain DataLoader"), whole, relatives=(carried,), seeks=False),
    "combined weighted": Target(mixed, whole, relatives=(nested,), seeks=False),
    "combined zipped": Target(lambda: mixed("max_size_cycle"), whole, relatives=(mixed,), seeks=False),
    "combined left alone": Target(of("law_sources", "combined"), whole, relatives=(carried, mixed), seeks=False),
    "webdataset": Target(indexed, relatives=(of("webdataset_sources", "indexed", size=14),)),
    "webdataset counted": Target(webdataset_counted, relatives=(indexed,)),
    "webdataset-streams": Target(of("webdataset_sources", "streamed"), whole, relatives=(indexed,), seeks=False),
    "streaming": Target(streamed(size=14), relatives=(streamed(size=15),)),
    "dali": Target(lambda: dali("native"), whole, relatives=(lambda: dali("sampled"),), seeks=False, patience=60.0),
    "dali-sampled": Target(lambda: dali("sampled"), relatives=(lambda: dali("sampled", size=20),), patience=60.0),
    "ffcv": Target(
        of("ffcv_sources", "plain_load"), relatives=(of("ffcv_sources", "load", pipelines="plain", kind="other"),),
        patience=60.0,
    ),
}


class Reference:
    """What an uninterrupted run gives at each place: as it was written down, or of a loader that was sent there."""

    def __init__(self, target: Target, epochs: int = 3) -> None:
        self._target = target
        self.bases: list[dict[str, Any]] = []
        self._after: dict[tuple[int, int, int], list[list[Any]]] = {}
        self._epochs: dict[tuple[int, int], list[Any]] = {}
        self._spare: Any = None
        loader = target.make()
        self._step = loader._adapter.facts.batch_size if isinstance(loader, midepoch.Loader) else 1
        for number in range(epochs + 1):  # one more than there are states of, since the last of them lead there
            states, batches = [loader.state_dict()], []
            for batch in loader:
                batches.append(target.units(batch))
                states.append(loader.state_dict())
            seed, epoch, position = (states[0][name] for name in ("seed", "epoch", "position"))
            if position:  # the end of the epoch before, whose length was not known
                self._after[seed, epoch, position] = []
                epoch += 1
            # The last of them is the beginning of the next epoch, or the end of this one.
            if number < epochs:
                self.bases += states[:-1] if states[-1]["epoch"] > epoch else states[1 if position else 0 :]
            for place, state in enumerate(states[:-1]):
                if state["epoch"] == epoch:
                    self._after[seed, epoch, state["position"]] = batches[place : place + 2]
            self._after[seed, epoch, 0] = batches[:2]
            self._epochs[seed, epoch] = [unit for batch in batches for unit in batch]
        loader.close() if hasattr(loader, "close") else None

    def of(self, state: Mapping[str, Any]) -> list[list[Any]]:
        """The next batches, at most two, of one epoch."""
        # Where nothing is left of the epoch, the next one begins.
        return self.left(state) or self.left({**state, "epoch": state["epoch"] + 1, "position": 0})

    def left(self, state: Mapping[str, Any]) -> list[list[Any]]:
        """The same, but none where the epoch is over."""
        seed, epoch, position = state["seed"], state["epoch"], state["position"]
        found = self._after.get((seed, epoch, position))
        if found is None and self._target.ranks > 1:
            loader = self._target.make()
            loader.seek(epoch, position)
            found = first_batches(loader, self._target.units) if loader.batches_left else []
        elif found is None:
            units = self._units(seed, epoch)
            found = [units[at : at + self._step] for at in range(position, len(units), self._step)[:2]]
        return found

    def _units(self, seed: int, epoch: int) -> list[Any]:
        key = seed, epoch
        if key not in self._epochs:
            if len(self._epochs) > 500:
                self._epochs.pop(next(reversed(self._epochs)))
            self._epochs[key] = self._read(seed, epoch)
        return self._epochs[key]

    def _read(self, seed: int, epoch: int) -> list[Any]:
        loader = self._target.make() if self._spare is None else self._spare
        if self._target.seeks and hasattr(loader, "seek"):
            self._spare = loader
            if seed != loader.state_dict()["seed"]:
                there = {**loader.state_dict(), "seed": seed, "epoch": 0, "position": 0, "detail": "", "witness": ""}
                loader.load_state_dict(midepoch.reseal(there))
            loader.seek(epoch)
        elif hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        else:
            loader.load_state_dict(midepoch.reseal({**loader.state_dict(), "epoch": epoch, "position": 0}))
        return [unit for batch in loader for unit in self._target.units(batch)]


def first_batches(loader: Any, units: Callable[[Any], list[Any]]) -> list[list[Any]]:
    return [units(batch) for batch in itertools.islice(iter(loader), 2)]


class Fuzzer:
    """One loader, which is given every mutated state."""

    def __init__(self, name: str) -> None:
        warnings.simplefilter("ignore")
        sys.setrecursionlimit(1000)  # as it is by itself: what parses must hold with it
        torch.manual_seed(1)  # which loaders without a seed take: a number must be the same mutation in each process
        self.target = TARGETS[name]
        self.reference = Reference(self.target)
        self.bases = self.reference.bases
        self.others = [*self.bases, *self._states_of_others()]
        self.loader = self.target.make()
        self._refusals = 0
        self._accept(self.bases[0])

    def _states_of_others(self) -> Iterator[dict[str, Any]]:
        makers: tuple[Callable[[], Any], ...] = (noisy, listed, driven, replayed, counted, mixed)
        for make in (*makers, *self.target.relatives):
            other = make()
            yield other.state_dict()
            first_batches(other, whole)
            yield other.state_dict()
            if hasattr(other, "close"):
                other.close()

    def _accept(self, state: Any) -> None:
        self.loader.load_state_dict(state)
        self._running, self._over = iter(self.loader), False

    def mutation(self, seed: int, number: int) -> tuple[Any, str]:
        generator = random.Random(f"{seed} {number}")
        state, done = mutations.mutated(generator, generator.choice(self.bases), self.others)
        if number % 2 and isinstance(state, Mapping):
            try:
                return midepoch.reseal(state), f"{done}, resealed"
            except MidepochError:
                pass  # what cannot be sealed comes with its old checksum
        return state, done

    def check(self, seed: int, number: int) -> str:
        return self.outcome(*self.mutation(seed, number))

    def outcome(self, state: Any, done: str) -> str:
        """What becomes of a state: "continued", or the name of the error.

        Raises:
            Wrong: it was accepted and goes on with something else, or was refused and has changed the loader.
        """
        before = self.loader.state_dict()
        try:
            self.loader.load_state_dict(state)
        except MidepochError as error:
            self._check_refusal(before, error)
            return type(error).__name__
        except Exception as error:
            raise Wrong(f"{done}: {type(error).__name__} instead of an error of midepoch's: {error}"[:2000]) from error
        return self._check_continuation(dict(state), done)

    def _check_refusal(self, before: dict[str, Any], error: MidepochError) -> None:
        if not any(mark in str(error) for mark in ":;"):
            raise Wrong(f"an error without what to do: {error}")
        if self.loader.state_dict() != before:
            raise Wrong(f"a refused state has changed the loader ({error})")
        self._refusals += 1
        if self._refusals % CHECKED_REFUSALS == 0:
            found = [self.target.units(batch) for batch in itertools.islice(self._running, 1)]
            expected = self.reference.of(before)[:1]
            # A pass that is over stays so, and the loader stands at the beginning of the next epoch, or at an end.
            over = not found and (self._over or not before["position"] or not self.reference.left(before))
            if found != expected and not over:
                raise Wrong(f"after a refused state ({error}) the loader goes on with {found}, not {expected}"[:2000])
            self._accept(self.bases[self._refusals // CHECKED_REFUSALS % len(self.bases)])

    def _check_continuation(self, state: dict[str, Any], done: str) -> str:
        if self.loader.state_dict() != state:
            raise Wrong(f"{done}: the loader says that it stands at {self.loader.state_dict()}, not {state}"[:2000])
        self._running = iter(self.loader)
        try:
            found = [self.target.units(batch) for batch in itertools.islice(self._running, 2)]
        except MidepochError as error:
            self._accept(self.bases[0])
            return f"{type(error).__name__} at the first batch"
        except Exception as error:
            raise Wrong(f"{done}: {type(error).__name__} at the first batch: {error}; {state}"[:2000]) from error
        self._over = len(found) < 2
        expected = self.reference.of(state)
        if found != expected:
            raise Wrong(f"{done}: {state} goes on with {found}, not {expected}"[:3000])
        return "continued"
