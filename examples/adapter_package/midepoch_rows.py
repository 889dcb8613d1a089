"""A backend, and the adapter that makes it resume: ``midepoch.wrap(Rows("data.npy", 32), seed=0)``."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from midepoch import Capabilities
from midepoch.loader import promises
from midepoch.loader.adapter import Adapter, Facts, Options, Run, Session
from midepoch.order import Shuffled
from midepoch.reading.indexed import map_requests, unchanged
from midepoch.reading.sessions import IteratorSession


class Rows:
    """The backend: batches of rows of a .npy file, in a random order, from the beginning each time."""

    def __init__(self, path: str, batch_size: int) -> None:
        self.rows, self.batch_size = np.load(path, mmap_mode="r"), batch_size

    def __iter__(self) -> Any:
        order = np.random.permutation(len(self.rows))
        return (self.rows[part] for part in np.array_split(order, -(-len(order) // self.batch_size)))


class RowsAdapter(Adapter):
    """What only this backend knows. Iterating, loading and refusing are midepoch's."""

    name: ClassVar[str] = "rows"  # in saved states: never changes

    def __init__(self, source: Rows, options: Options) -> None:
        super().__init__(source, options)
        self.facts = Facts(batch_size=source.batch_size)

    @classmethod
    def recognises(cls, source: object) -> bool:
        return isinstance(source, Rows)

    def size(self, seed: int, epoch: int, world: Any, detail: str = "") -> int:
        return len(self.source.rows)

    def describe(self) -> dict[str, str]:  # states of other rows are refused
        return {"order": "shuffled", "rows": f"{self.source.rows.dtype}{self.source.rows.shape[1:]}"}

    def capabilities(self) -> Capabilities:
        return Capabilities(
            exact_order=promises.OUR_ORDER,
            exact_augmentations=promises.augmentations(self.options),
            constant_time_resume=promises.CONSTANT_TIME,
            elastic_world=promises.POSITIONS,
            elastic_workers=promises.NO_WORKERS,
            rank_independent=promises.ONE_STATE,
        )

    def open(self, run: Run) -> Session:
        rows = self.source.rows
        requests = map_requests(run, Shuffled(len(rows)).epoch(run.seed, run.epoch), unchanged(rows, len(rows)))
        return IteratorSession(rows[request.indices] for request in requests)
