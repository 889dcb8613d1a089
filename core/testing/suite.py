"""The laws as tests: subclass `ResumableTests` and set how a loader is built."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from .examine import Examination
from .laws import examine_law
from .record import Settings

__all__ = ["ResumableTests"]


class ResumableTests:
    """One test for each law. pytest collects subclasses whose names begin with ``Test``.

        class TestMyLoader(ResumableTests):
            make_loader = staticmethod(build_loader)      # a module-level function
            shuffled = True

    ``make_loader`` and the other attributes are the arguments of `check_resumable`, which documents them. A law that
    is not applicable is a skipped test with the reason. ``not_applicable`` may list laws that are known not to apply.
    If one of them becomes applicable, its test fails, so that you remove it from the list.
    """

    # Functions are typed Any: type checkers would take them for methods.
    make_loader: ClassVar[Any]
    world_sizes: ClassVar[Sequence[int]] = (1, 2, 3)
    num_workers: ClassVar[Sequence[int]] = (0, 2)
    epochs: ClassVar[int] = 2
    cuts: ClassVar[Sequence[int] | None] = None
    quick: ClassVar[bool] = False
    shuffled: ClassVar[bool | None] = None
    tail: ClassVar[Literal["pad", "drop", "uneven"]] = "pad"
    drop_last: ClassVar[bool] = False
    elastic_content: ClassVar[bool] = True
    parts: ClassVar[int] = 1
    identify: ClassVar[Any] = None
    draws: ClassVar[Any] = None
    gather: ClassVar[Any] = None
    reseal: ClassVar[Any] = None
    state_bytes: ClassVar[int] = 16384
    timeout: ClassVar[float] = 120.0
    options: ClassVar[Sequence[str] | None] = None
    plain: ClassVar[Any] = None
    not_applicable: ClassVar[frozenset[str]] = frozenset()

    def test_transparent(self) -> None:
        """Undisturbed, it gives the plain loader's samples, batches, length and end, and leaves no other trace."""
        self._examine("transparent")

    def test_determinism(self) -> None:
        """Two fresh loaders agree, also in another process; if shuffled, two epochs differ; random columns vary."""
        self._examine("determinism")

    def test_tail(self) -> None:
        """Head and resumed tail together are the whole epoch, bit for bit, at every cut, on each rank, with workers."""
        self._examine("tail")

    def test_next_epoch(self) -> None:
        """After a resumed epoch, the next epoch is the one that would have followed, on every rank and with workers."""
        self._examine("next epoch")

    def test_boundary(self) -> None:
        """The state after the last batch starts the next epoch, or ends a body; that before the first equals fresh."""
        self._examine("boundary")

    def test_round_trip(self) -> None:
        """A loaded state is returned, equal, before anything else happens; a loader in use can load one too."""
        self._examine("round trip")

    def test_observer(self) -> None:
        """Asking for states, lengths or the next batch changes nothing."""
        self._examine("observer")

    def test_isolation(self) -> None:
        """A state never changes later, and loading leaves its argument unchanged."""
        self._examine("isolation")

    def test_transport(self) -> None:
        """A state passes through JSON (and torch.load with weights_only) into another process unchanged."""
        self._examine("transport")

    def test_chain(self) -> None:
        """A run that is interrupted twice continues like one that is interrupted once."""
        self._examine("chain")

    def test_partition(self) -> None:
        """The ranks together cover each epoch by the declared tail rule, in equal counts."""
        self._examine("partition")

    def test_topology(self) -> None:
        """With another world size, number of workers or batch size, the rest comes exactly once, or is refused."""
        self._examine("topology")

    def test_refusal(self) -> None:
        """What does not fit is refused with a typed error, and the loader continues as before."""
        self._examine("refusal")

    def test_delivery(self) -> None:
        """Prefetched batches do not count, nor do those that the caller still has in flight."""
        self._examine("delivery")

    def test_cost(self) -> None:
        """A resume reads no sample that it skips, except the witness's."""
        self._examine("cost")

    def test_guest(self) -> None:
        """The caller's random generators are left unchanged, and what the caller draws changes nothing."""
        self._examine("guest")

    def test_any_item(self) -> None:
        """None, empty containers and empty tensors pass through like anything else."""
        self._examine("any item")

    def test_witness(self) -> None:
        """A state of other data is refused before the first batch."""
        self._examine("witness")

    def test_honesty(self) -> None:
        """What a loader promises with its first state, after its first batch, it still promises after two epochs."""
        self._examine("honesty")

    def test_reshard(self) -> None:
        """Ranks that leave and join in mid-epoch share the rest of it, over any sequence of worlds."""
        self._examine("reshard")

    def test_rollback(self) -> None:
        """What was handed out since the last commit is given again, once, and a state says what is committed."""
        self._examine("rollback")

    def _examine(self, law: str) -> None:
        outcome = examine_law(self._examination(), law)
        expected = law in self.not_applicable
        if outcome.status == "not applicable":
            import pytest

            pytest.skip(f"{law}: {outcome.reason}")
        if expected:
            raise AssertionError(f"the law '{law}' is applicable and {outcome.status}; remove it from not_applicable")

    def _examination(self) -> Examination:
        """The only examination of this class, so that its laws share their runs."""
        kind = type(self)
        found = vars(kind).get("_kept")
        if not isinstance(found, Examination):
            found = Examination(self._settings())
            kind._kept = found  # type: ignore[attr-defined]
        return found

    def _settings(self) -> Settings:
        cuts = self.cuts
        return Settings(
            make_loader=self._function("make_loader"),
            world_sizes=tuple(self.world_sizes),
            num_workers=tuple(self.num_workers),
            epochs=self.epochs,
            cuts=None if cuts is None else tuple(cuts),
            quick=self.quick,
            shuffled=self.shuffled,
            tail=self.tail,
            drop_last=self.drop_last,
            elastic_content=self.elastic_content,
            parts=self.parts,
            identify=self._function("identify"),
            draws=self._function("draws"),
            gather=self._function("gather"),
            reseal=self._function("reseal"),
            state_bytes=self.state_bytes,
            timeout=self.timeout,
            options=None if self.options is None else tuple(self.options),
            plain=self._function("plain"),
        )

    def _function(self, name: str) -> Any:
        """The function in this attribute, which may be a method, a staticmethod or a plain module-level function."""
        value = getattr(self, name, None)
        if name == "make_loader" and value is None:
            raise TypeError(f"{type(self).__name__} must set make_loader to a function that builds a fresh loader")
        if isinstance(value, types.MethodType) and "." not in value.__func__.__qualname__:
            # A module-level function that was assigned without staticmethod() does not expect self.
            return value.__func__
        return value
