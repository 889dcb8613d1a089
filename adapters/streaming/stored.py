"""What tells a StreamingDataset's data from others, without a download.

The index that Streaming has in memory says how large each shard is, and what its hashes are if the writer was given
some. The content of a sample is added where the data set has no remote and is not compressed: there alone every process
of every node has it, without asking for it.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

from streaming import StreamingDataset

from midepoch.adapters.streaming import private
from midepoch.loader.adapter import WitnessReport
from midepoch.reading.sessions import WitnessRequest
from midepoch.reading.stored import MOST_STORED, seen_as_stored
from midepoch.state.witness import Witness, summary_of

__all__ = ["Stored"]

_SHARDS = "the list of the dataset's shards (index.json)"
_SAMPLE = "the dataset's first sample, or the list of its shards,"


class Stored:
    """Looks at a dataset. A copy in a worker process reads what the original would."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self._dataset = dataset
        self._index = b""  # what the index says, made when it is first needed

    def see(self) -> WitnessReport:
        """The index, with the first sample where it can be read: Streaming plans an epoch to know with which it begins.

        It is the same in each epoch.
        """
        if self._sample_is_here:
            return seen_as_stored(WitnessRequest(0, False, False, None), 1, self._read, lambda _: _SAMPLE)
        look = summary_of(self._of_index())
        return WitnessReport(None, look, look, look, what=_SHARDS)

    def compared(self, seen: WitnessReport, expects: Witness | None) -> WitnessReport:
        """`seen`, with what has to be compared with a loaded state's witness, which may be from another place."""
        if expects is None or expects.index == seen.index:
            return seen
        if expects.index is None:  # of the index alone
            return replace(seen, expected=summary_of(self._of_index()), what=_SHARDS)
        why = "it cannot be read without a download"
        return replace(seen, expected=None, error=why, missing=expects.index != 0, what=_SAMPLE)

    @property
    def _sample_is_here(self) -> bool:
        dataset = self._dataset
        shard, stream = dataset.shards[0], dataset.streams[int(dataset.stream_per_shard[0])]
        return (
            stream.remote in (None, stream.local)
            and not shard.compression
            and type(shard) not in private.own_formats()  # its code might draw
        )

    def _of_index(self) -> bytes:
        """The sizes and hashes of all shards as they are when decompressed; not their names."""
        if not self._index:
            crc = 0
            for shard in self._dataset.shards:
                files = [(raw.bytes, sorted(raw.hashes.items())) for raw, _ in shard.file_pairs]
                crc = zlib.crc32(f"{shard.samples} {files}".encode(), crc)
            self._index = b"%d:%08x" % (len(self._dataset.shards), crc)
        return self._index

    def _read(self, _: int) -> bytes:
        shard, sample = self._dataset.spanner[0]
        data: bytes = self._dataset.shards[shard].get_sample_data(sample)
        return self._of_index() + data[:MOST_STORED]
