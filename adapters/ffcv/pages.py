"""The pages of a file in memory, for Loaders with ``os_cache=False``.

FFCV's own threads ignore errors and short reads. Samples are then made of whatever the memory held before. If the
threads cannot open the file they end, and the consumer waits forever.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch.adapters.ffcv.private import parts
from midepoch.errors import SourceError

__all__ = ["Pages"]

_THREADS = 12  # as many as FFCV has


class Pages:
    """Replaces FFCV's memory context for its compiled code: reads the pages of each batch, and some ahead.

    Args:
        manager: FFCV's ProcessCacheManager.
        batches: the samples of each batch.
    """

    def __init__(self, manager: Any, batches: Sequence[npt.NDArray[np.uint64]]) -> None:
        reader = manager.reader
        self._path, self._page_size = reader.file_name, int(reader.page_size)
        pages = [set().union(*(manager.sample_to_pages[sample] for sample in batch)) for batch in batches]
        self._schedule = parts().compute_schedule(pages)
        slots = self._schedule.page_to_slot
        self._memory = np.zeros((self._schedule.num_slots, self._page_size), dtype="<u1")
        page_to_slot = np.zeros(int(max(slots, default=-1)) + 1, dtype=np.uint32)
        for page, slot in slots.items():
            page_to_slot[page] = slot
        self.state = (self._memory, manager.ptrs, manager.sizes, page_to_slot)
        self._coming: dict[Any, Future[None]] = {}

    def __enter__(self) -> Pages:
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{self._path} cannot be opened ({error.strerror}): put it back") from error
        self._size = os.fstat(self._file).st_size
        self._pool = ThreadPoolExecutor(_THREADS, "midepoch-ffcv-page")
        return self

    def start_batch(self, number: int) -> None:
        """Wait until the pages of a batch are in memory. Batches must come in their order.

        Raises:
            SourceError: one of them could not be read.
        """
        for page in self._schedule.can_prefetch_at[number]:
            self._coming[page] = self._pool.submit(self._read, int(page), self._schedule.page_to_slot[page])
        for page in self._schedule.entering_at[number]:
            self._coming.pop(page).result()

    def _read(self, page: int, slot: int) -> None:
        first = page * self._page_size
        memory = memoryview(self._memory[slot])[: max(0, min(self._page_size, self._size - first))]
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._file, [memory[done:]], first + done)
            except OSError as error:
                raise SourceError(
                    f"{self._path} could not be read at byte {first + done} ({error}): check the disk or network, then "
                    "continue: the next batch is this one again"
                ) from error
            if not count:
                raise SourceError(
                    f"{self._path} ends at byte {first + done}, but had {self._size} bytes before: it was cut off "
                    "while it was read; copy or write it again"
                )
            done += count

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self._file)
