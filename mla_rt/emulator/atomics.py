"""Read-modify-write operations on memory cells, shared by the global, buffer and LDS instructions.

Lanes that name one address take effect one after the other, in lane order: each returns what the one before it left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .small_floats import bf16_to_f32, f32_to_bf16

Combine = Callable[..., np.ndarray]


@dataclass(frozen=True, slots=True)
class Atomic:
    """combine(memory, data[, compare]) -> new memory, over arrays of `dtype`.

    operands: data values an instruction brings (2 for compare-and-swap: the new value and the one to compare with).
    """

    name: str
    dtype: np.dtype
    combine: Combine
    operands: int = 1


def _increment(memory: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(memory >= limit, memory.dtype.type(0), memory + memory.dtype.type(1))


def _decrement(memory: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((memory == 0) | (memory > limit), limit, memory - memory.dtype.type(1))


def _swap(memory: np.ndarray, data: np.ndarray) -> np.ndarray:
    return data


def _compare_swap(memory: np.ndarray, data: np.ndarray, compare: np.ndarray) -> np.ndarray:
    return np.where(memory == compare, data, memory)


def _reverse_subtract(memory: np.ndarray, data: np.ndarray) -> np.ndarray:
    return data - memory


def _add_halves_f16(memory: np.ndarray, data: np.ndarray) -> np.ndarray:
    return (memory.view(np.float16) + data.view(np.float16)).view(np.uint32)


def _add_halves_bf16(memory: np.ndarray, data: np.ndarray) -> np.ndarray:
    total = bf16_to_f32(memory.view(np.uint16)) + bf16_to_f32(data.view(np.uint16))
    return f32_to_bf16(total.view(np.uint32)).astype(np.uint16).view(np.uint32)


def integer_atomics(bits: int) -> dict[str, Atomic]:
    """The integer operations on 32- or 64-bit cells, by name."""
    unsigned, signed = np.dtype(f"u{bits // 8}"), np.dtype(f"i{bits // 8}")
    rows = [
        Atomic("add", unsigned, np.add),
        Atomic("sub", unsigned, np.subtract),
        Atomic("rsub", unsigned, _reverse_subtract),
        Atomic("smin", signed, np.minimum),
        Atomic("umin", unsigned, np.minimum),
        Atomic("smax", signed, np.maximum),
        Atomic("umax", unsigned, np.maximum),
        Atomic("and", unsigned, np.bitwise_and),
        Atomic("or", unsigned, np.bitwise_or),
        Atomic("xor", unsigned, np.bitwise_xor),
        Atomic("inc", unsigned, _increment),
        Atomic("dec", unsigned, _decrement),
        Atomic("swap", unsigned, _swap),
        Atomic("cmpswap", unsigned, _compare_swap, operands=2),
    ]
    return {row.name: row for row in rows}


INTEGER = {32: integer_atomics(32), 64: integer_atomics(64)}
ADD_F32 = Atomic("add_f32", np.dtype(np.float32), np.add)
MIN_F32 = Atomic("min_f32", np.dtype(np.float32), np.fmin)
MAX_F32 = Atomic("max_f32", np.dtype(np.float32), np.fmax)
PK_ADD_F16 = Atomic("pk_add_f16", np.dtype(np.uint32), _add_halves_f16)
PK_ADD_BF16 = Atomic("pk_add_bf16", np.dtype(np.uint32), _add_halves_bf16)
ADD_F64 = Atomic("add_f64", np.dtype(np.float64), np.add)
MIN_F64 = Atomic("min_f64", np.dtype(np.float64), np.fmin)
MAX_F64 = Atomic("max_f64", np.dtype(np.float64), np.fmax)


def apply(cells: np.ndarray, index: np.ndarray, atomic: Atomic, *data: np.ndarray) -> np.ndarray:
    """Apply `atomic` to cells[index] for each lane in order; returns the values found, [lanes] of atomic.dtype.

    cells: one-dimensional unsigned view of the memory in cells of the operation's size; index: int64 [lanes]; data: unsigned [lanes] each.
    """
    memory = cells.view(atomic.dtype)
    values = [np.ascontiguousarray(item).view(atomic.dtype) for item in data]
    found = np.empty(index.shape, atomic.dtype)
    for lanes in _rounds(index):
        where = index[lanes]
        found[lanes] = memory[where]
        with np.errstate(over="ignore", invalid="ignore"):
            memory[where] = atomic.combine(found[lanes], *(value[lanes] for value in values))
    return found


def _rounds(index: np.ndarray) -> list[np.ndarray]:
    """Lanes in sets that name no cell twice: the first users of each cell, then the second, and so on."""
    order = np.argsort(index, kind="stable")
    in_order = index[order]
    first = np.concatenate([[True], in_order[1:] != in_order[:-1]]) if len(index) else np.zeros(0, np.bool_)
    if first.all():
        return [np.arange(len(index))]
    position = np.arange(len(index))
    rank = position - np.maximum.accumulate(np.where(first, position, 0))
    by_rank = np.argsort(rank, kind="stable")
    return [order[lanes] for lanes in np.split(by_rank, np.cumsum(np.bincount(rank))[:-1])]
