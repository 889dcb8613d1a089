"""The base of adapters that read a source by the adapter of something inside it."""

from __future__ import annotations

from ..loader.adapter import Adapter, Samples
from ..loader.place import Place
from ..world import Share, World

__all__ = ["PassedOnAdapter"]


class PassedOnAdapter(Adapter):
    """Answers as another adapter does, the way in use."""

    _way: Adapter

    def _use(self, way: Adapter) -> None:
        """Read in this way from now on."""
        self._way = way
        self.unit, self.batch_size, self.drop_last = way.unit, way.batch_size, way.drop_last
        self.tail, self.seed, self.world = way.tail, way.seed, way.world
        if self.redescribed != way.redescribed:
            self.redescribed = way.redescribed
            self.learned()

    def _way_of(self, detail: str) -> Adapter:
        """The way of reading that a detail is of."""
        return self._way

    def size(self, seed: int, epoch: int, world: World, detail: str = "") -> int | None:
        """In units of the way in use."""
        return self._way_of(detail).size(seed, epoch, world, detail)

    def share(self, seed: int, epoch: int, position: int, world: World, detail: str) -> Share | None:
        """In units of the way in use."""
        return self._way_of(detail).share(seed, epoch, position, world, detail)

    @property
    def sized_by(self) -> str:
        """As of what is inside."""
        return self._way.sized_by

    @property
    def elsewhere(self) -> str:
        """As of what is inside."""
        return self._way.elsewhere

    @property
    def can_seek(self) -> bool:
        """As of what is inside."""
        return self._way.can_seek

    @property
    def begins_anew(self) -> bool:
        """As of what is inside."""
        return self._way.begins_anew

    def refresh(self) -> None:
        """Follow a dataset that has changed between epochs."""
        self._way.refresh()
        self._use(self._way)

    def prepare(self, seed: int, epoch: int) -> None:
        """Build the list of a listed order."""
        self._way.prepare(seed, epoch)
        self._use(self._way)

    def expect(self, seed: int, epoch: int) -> None:
        """List a copy of a sampler."""
        self._way.expect(seed, epoch)

    def moved(self, detail: str) -> None:
        """Let the next pass ask a sampler again."""
        self._way.moved(detail)

    def lead(self, here: Place, there: tuple[int, int], seed: int, world: World) -> str:
        """As the way in use says."""
        return self._way.lead(here, there, seed, world)

    def part(self, detail: str, saved_world_size: int, world: World) -> str:
        """As the way in use says."""
        return self._way.part(detail, saved_world_size, world)

    def check_detail(self, detail: str, seed: int, epoch: int, position: int, world: World) -> None:
        """As the way in use says."""
        self._way_of(detail).check_detail(detail, seed, epoch, position, world)

    def note_saved_with(self, fingerprint: str) -> None:
        """As of what is inside."""
        self._way.note_saved_with(fingerprint)

    def unreachable(self, epoch: int, position: int, detail: str) -> str:
        """As of what is inside."""
        return self._way.unreachable(epoch, position, detail)

    def samples(self, seed: int, epoch: int) -> Samples | None:
        """Those of what is inside."""
        return self._way.samples(seed, epoch)

    def close(self) -> None:
        """End what the way in use keeps."""
        self._way.close()
