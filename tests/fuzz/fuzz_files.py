"""Files for the fuzzing: snapshots, archives, caches of their indexes, FFCV's files; what became of a mutated one."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import random
import tarfile
import tempfile
import warnings
import zipfile
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import torch
from fuzz_states import Wrong, first_batches, rows, whole

import midepoch
from midepoch import MidepochError
from support import sources


class FileFuzzer:
    """One kind of file. `patience` and `together` are as in `fuzz_states.Target`."""

    patience, together = 20.0, 1 << 62
    whole: bytes
    others: tuple[bytes, ...] = ()

    def __init__(self) -> None:
        warnings.simplefilter("ignore")
        self.folder = Path(tempfile.mkdtemp(prefix="midepoch-fuzz-"))
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Make the files."""

    @abstractmethod
    def outcome(self, data: bytes, sealed: bool) -> str:
        """ "continued", or the name of the error. Wrong is raised, and every other error is wrong too."""

    def reseal(self, data: bytearray, generator: random.Random) -> bytes | None:
        """The same damage under checksums that fit; None where there is nothing to renew."""
        return None

    def mutation(self, seed: int, number: int) -> tuple[bytes, str]:
        generator = random.Random(f"{seed} {number}")
        data, done = mutations.mutated_bytes(generator, self.whole, self.others)
        sealed = self.reseal(data, generator) if number % 2 else None
        return (bytes(data), done) if sealed is None else (sealed, f"{done}, resealed")

    def check(self, seed: int, number: int) -> str:
        data, done = self.mutation(seed, number)
        try:
            return self.outcome(data, done.endswith("resealed"))
        except Wrong as error:
            raise Wrong(f"{done}: {error}"[:2000]) from error
        except Exception as error:
            raise Wrong(f"{done}: {type(error).__name__} instead of an error of midepoch's: {error}"[:2000]) from error


class Snapshots(FileFuzzer):
    """A training run's. Refused ones leave all parts as they were."""

    def prepare(self) -> None:
        self.path = self.folder / "snapshot.pt"
        torch.manual_seed(1)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.loader = midepoch.wrap(sources.noisy_loader(22), seed=5)
        batches, found = iter(self.loader), []
        with midepoch.Snapshot(self.path, keep=1, signals=(), **self.parts()) as snapshot:
            for _ in range(2):
                next(batches)
                self.model(torch.ones(1, 3)).sum().backward()
                self.optimizer.step()
                snapshot.save()
                found.append((self.path.read_bytes(), self.loader.state_dict(), self.weights()))
        self.whole, self.others = found[0][0], (found[1][0],)
        self.states: Any = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self.saved = {str(state): weights for _, state, weights in found}
        next(batches)
        self.elsewhere = self.loader.state_dict()
        with zipfile.ZipFile(io.BytesIO(self.whole)) as archive:
            self.records = {name: archive.read(name) for name in archive.namelist()}

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "data": self.loader}

    def weights(self) -> list[Any]:
        momenta = [each["momentum_buffer"] for each in self.optimizer.state.values()]
        return [each.detach().numpy().tobytes() for each in (*self.model.parameters(), *momenta)]

    def reseal(self, data: bytearray, generator: random.Random) -> bytes:
        """One record changed, in an archive that is whole."""
        changed = generator.choice([name for name in self.records if name.endswith(("data.pkl", "/0", "/3"))])
        record, _ = mutations.mutated_bytes(generator, self.records[changed])
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for name, content in self.records.items():
                archive.writestr(name, bytes(record) if name == changed else content)
        return buffer.getvalue()

    def outcome(self, data: bytes, sealed: bool) -> str:
        """Refused, or loaded as it was saved; what is in weights that were resealed, no checksum tells."""
        self.path.write_bytes(data)
        model, optimizer = copy.deepcopy(self.states)  # whatever the one before it has left
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        if self.loader.state_dict() != self.elsewhere:
            self.loader.load_state_dict(self.elsewhere)
        before = self.weights()
        with midepoch.Snapshot(self.path, keep=1, signals=(), **self.parts()) as snapshot:
            try:
                if not snapshot.load():
                    raise Wrong("the file is taken for none")
            except MidepochError as error:
                if self.loader.state_dict() != self.elsewhere or self.weights() != before:
                    raise Wrong(f"a refused snapshot has changed a part ({error})") from error
                return type(error).__name__
            if type(snapshot.steps) is not int:
                raise Wrong(f"steps is {snapshot.steps!r}")
        expected = self.saved.get(str(self.loader.state_dict()))
        if expected is None or (not sealed and self.weights() != expected):
            raise Wrong(f"loaded something else: {self.loader.state_dict()}, {self.weights()}")
        return "continued"


class Archives(FileFuzzer):
    """Tar archives: the damage is told with its place, or the index is the one that tarfile has."""

    def prepare(self) -> None:
        def made(count: int) -> bytes:
            buffer, generator = io.BytesIO(), np.random.default_rng(count)
            with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
                for number in range(count):
                    info = tarfile.TarInfo(f"{'d' * (120 if number % 4 == 3 else 3)}/{number:03}.bin")
                    info.size, info.mtime = int(generator.integers(0, 1500)), 1.5 if number % 3 else 1
                    archive.addfile(info, io.BytesIO(generator.bytes(info.size)))
            buffer.seek(0)
            with tarfile.open(fileobj=buffer, mode="a", format=tarfile.GNU_FORMAT) as archive:
                info = tarfile.TarInfo("e" * 200)
                info.size = 9
                archive.addfile(info, io.BytesIO(b"a" * 9))
            return buffer.getvalue()

        from midepoch.reading.tar import index_tar

        self.whole, self.others = made(12), (made(11), made(30))
        self.path = self.folder / "x.tar"
        self.path.write_bytes(self.whole)
        self.index = index_tar(self.path)
        blocks = range(0, len(self.whole), 512)
        self.headers = [place for place in blocks if self._is_header(self.whole[place : place + 512])]

    @staticmethod
    def _is_header(block: bytes | bytearray) -> bool:
        return block[257:262] == b"ustar"

    def reseal(self, data: bytearray, generator: random.Random) -> bytes:
        """With checksums of headers that fit."""
        if generator.random() < 0.5:  # most damage hits no header, so some is done to one
            place = generator.choice(self.headers)
            field, width = generator.choice(((0, 100), (124, 12), (124, 12), (156, 1), (257, 8), (345, 155), (512, 40)))
            large = b"\x80" + b"\0" * (width - 9) + (1 << generator.choice((31, 40, 62))).to_bytes(8, "big")
            value = generator.choice((
                large, b"\xff" * width, b"7" * width, b"-1 ".ljust(width), b"x" * width, b"",
                generator.randbytes(width), b"L", b"x", b"K", b"S", b"g",
                b"99999999999 size=99999999999\n", b"20 size=999999999999\n",
            ))[:width].ljust(width, b"\0")  # fmt: skip
            data[place + field : place + field + width] = value[: max(0, len(data) - place - field)]
        for place in self.headers:
            block = data[place : place + 512]
            if len(block) == 512 and self._is_header(block):
                block[148:156] = b" " * 8
                data[place + 148 : place + 156] = f"{sum(block):06o}\0 ".encode()
        return bytes(data)

    def outcome(self, data: bytes, sealed: bool) -> str:
        from midepoch.reading.tar import TarError, index_tar, parse_members

        self.path.write_bytes(data)
        index, walked = index_tar(self.path), index_tar(io.BytesIO(data), "x.tar")
        told = [(each.headers.tolist(), each.offsets.tolist(), each.sizes.tolist(), each.names.tolist(),
                 each.damage and each.damage.offset) for each in (index, walked)]  # fmt: skip
        if told[0] != told[1]:
            raise Wrong(f"by path {told[0]}, by file {told[1]}")
        both = zip(self.whole, data, strict=False)
        changed = next((at for at, (old, new) in enumerate(both) if old != new), len(data))
        sound = int((self.index.offsets + self.index.sizes <= changed).sum())
        if index.headers[:sound].tolist() != self.index.headers[:sound].tolist():
            raise Wrong(f"{sound} members lie before the damage, and the index has {told[0]}")
        for header, offset, size, name in zip(*told[0][:4], strict=True):
            if not 0 <= header < offset <= offset + size <= len(data):
                raise Wrong(f"{name} lies outside: {header}, {offset}, {size}")
            with contextlib.suppress(TarError):
                found = parse_members(data[header : offset + size], "x", header)
                if [content for _, content in found] != [data[offset : offset + size]]:
                    raise Wrong(f"{name} is read as {found}")
        if index.damage is not None:
            return type(index.damage).__name__
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                expected = [(info.offset_data, info.size, info.name.encode("utf-8", "surrogateescape"))
                            for info in archive if info.isreg()]  # fmt: skip
        except (tarfile.TarError, ValueError, IndexError, OverflowError):
            if sealed:
                return "continued"  # tarfile is stricter in what a header may hold
            raise
        indexed = list(zip(*told[0][1:4], strict=True))
        # Without a word tarfile ends where a header's owner or date is no number.
        if indexed[: len(expected) if sealed else None] != expected:
            raise Wrong(f"the index has {told[0]}, tarfile {expected}")
        return "continued"


class IndexCaches(FileFuzzer):
    """What is kept of a shard's index: used as it was written, or built again."""

    def prepare(self) -> None:
        from midepoch.adapters.webdataset import index
        from support import webdataset_sources

        self.urls = webdataset_sources.make_shards(self.folder / "shards", [40])
        self.build: Callable[[], Any] = lambda: index.build_index(
            self.urls, index.Keys(), {"opening": _raised, "reading": _raised}, self.folder, False
        )
        self.expected = self.told()
        self.path = next(self.folder.glob("webdataset-*/*.index"))
        self.whole = self.path.read_bytes()

    def told(self) -> Any:
        found = self.build()
        return found.counts, found.starts.tolist(), found.lengths.tolist(), found.checksum

    def outcome(self, data: bytes, sealed: bool) -> str:
        self.path.write_bytes(data)
        if self.told() != self.expected:
            raise Wrong(f"the index is {self.told()}, not {self.expected}")
        return "continued" if self.path.read_bytes() == data else "built again"


def _raised(error: Exception) -> bool:
    raise error


class Betons(FileFuzzer):
    """FFCV's files: named as damaged, refused for a state of the whole one, or read as they were but for pixels."""

    patience, together = 60.0, 800

    def prepare(self) -> None:
        self.sources: Any = importlib.import_module("support.ffcv_sources")
        self.whole, other = (Path(self.sources.file(kind)).read_bytes() for kind in ("raw", "other"))
        self.others = (other,)
        self.path = self.folder / "x.beton"
        self.path.write_bytes(self.whole)
        loader = midepoch.wrap(self.source(), seed=3)
        first_batches(loader, whole)
        self.state = loader.state_dict()
        loader.load_state_dict(self.state)
        self.expected = [row[1] for batch in loader for row in rows(batch)]

    def source(self) -> Any:
        return self.sources.make(path=str(self.path), batches_ahead=2)

    def outcome(self, data: bytes, sealed: bool) -> str:
        """As a training job would: look at the file, wrap it, load, read."""
        from midepoch.adapters.ffcv import check_file

        self.path.unlink()  # one that is mapped keeps its content
        self.path.write_bytes(data)
        try:
            check_file(self.path)
        except MidepochError as error:
            return type(error).__name__
        try:
            source = self.source()
        except Exception as error:  # noqa: BLE001  # whatever FFCV raises itself, before midepoch is asked
            return f"FFCV's own {type(error).__name__}"
        try:
            loader = midepoch.wrap(source, seed=3)
            for _ in loader:  # whatever it holds: the process must outlive it
                pass
            loader.load_state_dict(self.state)
            labels = [row[1] for batch in loader for row in rows(batch)]
        except MidepochError as error:
            return f"{type(error).__name__} after the check"
        if labels != self.expected:
            raise Wrong(f"other labels: {labels}, not {self.expected}")
        return "continued"


FUZZERS: dict[str, type[FileFuzzer]] = {
    "snapshot files": Snapshots, "tar archives": Archives, "webdataset index caches": IndexCaches,
    "beton files": Betons,
}  # fmt: skip
