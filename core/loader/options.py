"""What a user states: the arguments of `midepoch.wrap`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import MidepochError
from ..world import Tail, World, check_tail

__all__ = ["MOST_IN_FLIGHT", "Options"]

MOST_IN_FLIGHT = 1024  # batches that were handed out and not trained on
_CHOICES = {
    "randomness": ("sample", "none"),
    "verify": ("sample", "strict", "warn", "off"),
    "on_error": ("next", "retry", None),
}


@dataclass(frozen=True)
class Options:
    """The arguments of `midepoch.wrap`. `settings` are keywords of one adapter, which checks their values itself.

    Raises:
        ValueError, TypeError: a value is out of range or of the wrong type.
    """

    seed: int | None = None
    world: World | None = None
    shard: bool | None = None
    randomness: Literal["sample", "none"] = "sample"
    tail: Tail | None = None
    fingerprint: str | None = None
    verify: Literal["sample", "strict", "warn", "off"] = "sample"
    then: Callable[[Any], Any] | None = None
    on_error: Literal["next", "retry"] | None = None
    remember: int = 0
    global_batch: int | None = None
    inside: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seed, fingerprint = self.seed, self.fingerprint
        if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 64):
            raise ValueError(f"seed must be an int in [0, 2**64) or None, got {seed!r}")
        if self.world is not None and not isinstance(self.world, World):
            raise TypeError(f"world must be a midepoch.World or None, got {self.world!r}")
        if self.shard is not None and not isinstance(self.shard, bool):
            raise TypeError(f"shard must be True, False or None, got {self.shard!r}")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                *some, last = map(repr, choices)
                raise ValueError(f"{name} must be {', '.join(some)} or {last}, got {value!r}")
        if self.then is not None and not callable(self.then):
            raise TypeError(f"then must be a function of a batch or None, got {self.then!r:.80}")
        if self.inside is not None and not isinstance(self.inside, str):
            raise TypeError(f"inside must be the name of an attribute or None, got {self.inside!r:.80}")
        if type(self.remember) is not int:
            raise TypeError(f"remember must be an int, got {self.remember!r}")
        if not 0 <= self.remember <= MOST_IN_FLIGHT:
            raise ValueError(f"remember must be in [0, {MOST_IN_FLIGHT}], got {self.remember}")
        check_tail(self.tail)
        if self.global_batch is not None:
            if type(self.global_batch) is not int:
                raise TypeError(f"global_batch must be an int or None, got {self.global_batch!r}")
            if self.global_batch < 1:
                raise ValueError(f"global_batch must be at least 1, got {self.global_batch}")
            if self.tail not in (None, "uneven"):
                raise ValueError(
                    f"tail={self.tail!r} with global_batch=: each global batch is shared as it is, so nothing is "
                    "repeated or left out; leave tail out"
                )
        if fingerprint is not None and (not isinstance(fingerprint, str) or len(fingerprint) > 64):
            raise ValueError(
                f"fingerprint must be a str of at most 64 characters or None, got {fingerprint!r}: pass a hash of "
                "longer ones"
            )

    @property
    def streams(self) -> bool:
        """Whether each sample has a random stream of its own."""
        return self.randomness == "sample"

    @property
    def known_ranks(self) -> int:
        """How many ranks share the data, as far as can be known before iteration starts; otherwise 1."""
        try:
            return (World.current() if self.world is None else self.world).world_size
        except MidepochError:
            return 1  # it is raised when iteration starts
