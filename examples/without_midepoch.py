"""What comes next after a midepoch state, sequential or shuffled: docs/format.md in Python alone, without midepoch.

python without_midepoch.py BATCH_SIZE RANK WORLD_SIZE N [drop|uneven] [drop_last] < STATE.json"""
import json  # noqa: I001
import sys
from itertools import accumulate, count, islice
from typing import Any
def extended(key: int, *words: int) -> int:
    for word in words:
        key = (key + (word + 1) * 0x9E3779B97F4A7C15) % 2**64
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
        key ^= key >> 31
    return key
def permuted(size: int, key: int, positions: list[int]) -> list[int]:
    table = sorted(range(size if size <= 65536 else 0), key=lambda i: extended(key, i) >> 16)
    return [table[p] if table else computed(size, key, p) for p in positions]
def hashed(key: int, i: int, word: int) -> int:
    word = (word * (extended(key, i) | 1) + extended(key, 8 + i)) % 2**64
    return (word ^ word >> 32) * 0xD6E8FEB86659FD93 % 2**64
def computed(size: int, key: int, p: int) -> int:
    bits = (size - 1).bit_length() // 2
    (high, low), rows = divmod(p, 2**bits), -(-size >> bits)
    for i in (0, 2, 4, 6):
        high = (high + ((hashed(key, i, low) >> 26) * rows >> 38)) % rows
        low ^= hashed(key, i + 1, high) >> 64 - bits
    p = high * 2**bits + low
    return p if p < size else computed(size, key, p)
def intervals(text: str) -> list[tuple[int, int]]:
    unit, *steps = (int(number, 36) for number in text.split("."))
    ends = accumulate(unit * step for step in steps)
    return [*zip(ends, ends, strict=True)]
def position_of(place: int, holes: list[tuple[int, int]]) -> int:
    for start, stop in holes:
        place += stop - start if start <= place else 0
    return place
def batches(state: Any, batch_size: int, rank: int, world: int, *options: str) -> Any:
    size, position, order = state["size"], state["position"], json.loads(state["fingerprint"])["order"]
    omit = dict(part.split(":") for part in state["omit"].split())
    for epoch in count(state["epoch"]):
        key = extended(0, int.from_bytes(b"shuffled", "big"), state["seed"], epoch, size)
        skipped, done = (intervals(omit.pop(name, "0")) for name in (str(epoch), "done"))
        kept = size - sum(stop - start for start, stop in skipped)
        size_left = kept - sum(stop - start for start, stop in done)
        first_place = position - sum(min(stop, position) - start for start, stop in skipped if start < position)
        for start in range(first_place, size_left, batch_size * world):
            rest = min(size_left - start, batch_size * world)
            share = rest // world if "drop" in options else -(-rest // world)
            places = range(start + rank * share, start + (rank + 1) * share)
            at = [position_of(position_of(i, done) if i < size_left else (i - size_left) % kept, skipped)
                  for i in places if i < size_left or "uneven" not in options]
            if at and (len(at) == batch_size or "drop_last" not in options):
                yield at if order == "sequential" else permuted(size, key, at)
        position = 0

if __name__ == "__main__":
    numbers: Any = [int(each) for each in sys.argv[1:5]]
    print(*islice(batches(json.load(sys.stdin), *numbers[:3], *sys.argv[5:]), numbers[3]), sep="\n")
