"""A source's own state as text, without pickle."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import StateCorruptError, StateError

__all__ = ["decode", "encode"]

_TAG = "__midepoch__"
_LARGEST_TEXT = 256 << 20  # bytes after decompression: more than any loader's state, far less than a machine's memory
_MOST_ITEMS = 2_000_000  # in lists and dicts, which take fifty times the memory of their text: some 200 MiB
_SIGNS = b"[", b"{", b","
_SMALLER = "let its state_dict() return long lists as tensors or arrays, and leave out what a seed can make again"


def encode(value: object) -> str:
    """Built-in values, tensors on the CPU and numpy arrays as printable text: tagged JSON, zlib, base64.

    Raises:
        StateError: the value holds something of another type, and the message names where; or it could not be decoded.
    """
    try:
        data = json.dumps(_to_json(value, "state"), separators=(",", ":")).encode()
    except RecursionError as error:
        raise StateError(
            "the source's own state holds itself, or lists and dicts inside one another to a great depth: let its "
            "state_dict() return plain values"
        ) from error
    if why := _why_too_large(data):
        raise StateError(f"the source's own state {why}, so it could not be loaded: {_SMALLER}")
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def decode(text: str) -> Any:
    """The value that `encode` was given.

    Raises:
        StateCorruptError: `text` was not made by `encode`, or was damaged.
    """
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text.encode("ascii"), validate=True), _LARGEST_TEXT)
        if not inflater.eof:
            raise ValueError("truncated, or larger than any loader's state")
        if why := _why_too_large(data):
            raise ValueError(f"it {why}")
        return _from_json(json.loads(data))
    except Exception as error:  # numpy alone raises several types for an invalid dtype
        told = f"the source's own part of the state cannot be decoded ({error})"
        raise StateCorruptError(f"{told}: use an older state") from error


def _why_too_large(data: bytes) -> str:
    """Why the text of a state would take too much memory; empty if it would not."""
    if len(data) > _LARGEST_TEXT:
        return f"takes more than {_LARGEST_TEXT >> 20} MiB as text"
    # Signs within texts count too: it is a bound, far above what loaders have.
    if sum(map(data.count, _SIGNS)) > _MOST_ITEMS:
        return f"has more than {_MOST_ITEMS:,} parts, items of lists and dicts"
    return ""


def _array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
    """A tensor's values; None if numpy has no such type, or they lie elsewhere."""
    try:
        return tensor.detach().numpy()
    except (TypeError, RuntimeError):
        return None


def _bytes_of(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _to_json(value: Any, path: str) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        # subclasses of bool, int and float, such as enumerations, would come back as another type
        if type(value) in (str, bool, int, float, type(None)):
            return value
    elif type(value) is list:
        return [_to_json(item, f"{path}[{place}]") for place, item in enumerate(value)]
    elif type(value) in (tuple, set, frozenset):
        items = sorted(value, key=repr) if type(value) is not tuple else value
        return {_TAG: type(value).__name__, "items": [_to_json(item, f"{path}[...]") for item in items]}
    elif isinstance(value, Mapping):
        pairs = [[_to_json(k, f"{path} key"), _to_json(v, f"{path}[{k!r}]")] for k, v in value.items()]
        if all(type(k) is str and k != _TAG for k in value):
            return dict(pairs)
        return {_TAG: "dict", "items": pairs}
    elif isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "data": base64.b64encode(bytes(value)).decode("ascii")}
    elif isinstance(value, torch.Tensor) and (array := _array_of(value)) is not None:
        return {_TAG: "tensor", "dtype": array.dtype.str, "shape": list(array.shape), "data": _bytes_of(array)}
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": _bytes_of(value)}
    elif isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {_TAG: "scalar", "dtype": value.dtype.str, "shape": [], "data": _bytes_of(np.asarray(value))}
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        kind += f" ({value.dtype}, {value.layout}, {value.device})"
    raise StateError(
        f"the source's own {path} holds a {kind}, which cannot be saved without pickle: let its state_dict() return "
        "built-in types, arrays, or dense tensors on the CPU whose type numpy has"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: _from_json(item) for key, item in value.items()}
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](_from_json(item) for item in value["items"])
    if kind == "dict":
        return {_from_json(key): _from_json(item) for key, item in value["items"]}
    data = base64.b64decode(value["data"], validate=True)
    if kind == "bytes":
        return data
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in "biufc":
        raise ValueError(f"dtype {dtype}")
    array = np.frombuffer(data, dtype).reshape(value["shape"]).copy()
    if kind == "tensor":
        return torch.from_numpy(array)
    return array if kind == "array" else array[()]
