"""The nesting of the tuples that a pickle would build, read from its opcodes without building anything.

Python hashes a tuple by recursion in C, without a limit. A pickle needs one byte for each level of nesting. A dict key
of deeply nested tuples therefore overflows the stack, and a signal ends the process.
"""

from __future__ import annotations

import pickletools

__all__ = ["check_pickle"]

_DEEPEST = 200
_MARK = -1
_HOLDING = frozenset(
    ["TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "FROZENSET", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST"]
)


def check_pickle(data: bytes) -> None:
    """Raise ValueError if `data` nests tuples deeper than any checkpoint does, or is not a pickle."""
    stack: list[int] = []  # for each object, how deep the tuples in it are nested
    memo: dict[int, int] = {}
    try:
        for opcode, argument, place in pickletools.genops(data):
            name = opcode.name
            if name == "MARK":
                stack.append(_MARK)
            elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                if stack[-1] == _MARK:
                    raise ValueError(f"at byte {place} it memoizes an empty stack")
                memo[len(memo) if argument is None else int(argument)] = stack[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[int(argument or 0)])
            elif name == "DUP":
                stack.append(stack[-1])
            else:
                depth = _deepest_of(opcode, stack)
                if name in _HOLDING:
                    depth += 1
                    if depth > _DEEPEST:
                        raise ValueError(f"at byte {place} it nests tuples deeper than any checkpoint does")
                stack += [depth if name in _HOLDING else 0] * len(opcode.stack_after)
    except (IndexError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not a pickle ({type(error).__name__}: {str(error)[:100]})") from error


def _deepest_of(opcode: pickletools.OpcodeInfo, stack: list[int]) -> int:
    """Remove what an opcode takes from the stack, and return its deepest nesting."""
    deepest, below = 0, opcode.stack_before
    if pickletools.markobject in below:
        while (top := stack.pop()) != _MARK:
            deepest = max(deepest, top)
        below = below[: below.index(pickletools.markobject)]
    for _ in below:
        deepest = max(deepest, stack.pop())
    return deepest
