"""What a probe is: one launch, what it shows, and what it must show.

What is assumed of the machine is computed in this folder from the documents, with nothing shared with the emulator or with the package's formats,
so that one mistake cannot cancel itself out. "Guide" is AMD's CDNA4 ISA guide; OCP FP8 and OCP MX are specifications of the Open Compute Project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LANES = 64

# OCP MX: E2M1, sign in bit 3.
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _e4m3_value(code: int) -> float:
    """OCP FP8: S.EEEE.MMM with bias 7; no infinities, all ones is NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return float("nan") if code & 0x7F == 0x7F else -magnitude if code & 0x80 else magnitude


E4M3_VALUES = np.array([_e4m3_value(code) for code in range(256)])


@dataclass(frozen=True)
class Experiment:
    """One launch and what it must show.

    arrays, values: the kernel's inputs by parameter name; result: shape of what it writes, 4-byte items; read(uint32 of that shape): what was
    observed; assumed: what it must be (NaNs count as one); axes: what the indices of both are; alternatives: what other machines would show.
    tolerance: greatest distance that is allowed, of the observed's shape (None: bit for bit).
    """

    kernel: str
    grid: int
    arrays: Mapping[str, np.ndarray]
    result: tuple[int, ...]
    read: Callable[[np.ndarray], np.ndarray]
    assumed: np.ndarray
    axes: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    alternatives: Mapping[str, np.ndarray] = field(default_factory=dict)
    tolerance: np.ndarray | None = None

    def differs(self, observed: np.ndarray, assumed: np.ndarray) -> np.ndarray:
        """Where the observed is not the assumed: bool. Zeros of different sign are different."""
        if observed.dtype.kind != "f":
            return observed != assumed
        both_nan = np.isnan(observed) & np.isnan(assumed)
        if self.tolerance is None:
            return ~both_nan & ((observed != assumed) | (np.signbit(observed) != np.signbit(assumed)))
        with np.errstate(invalid="ignore"):  # inf - inf
            near = np.abs(observed.astype(np.float64) - assumed) <= self.tolerance
        return ~both_nan & (observed != assumed) & ~near


@dataclass(frozen=True)
class Fact:
    """assumed: what the kernels take for granted, in words; source: where that is written."""

    name: str
    assumed: str
    source: str
    experiment: Callable[[], Experiment]


def pack(items: np.ndarray, bits: int, words: int) -> np.ndarray:
    """Items [.., n] of `bits` bits as one little-endian bit string a row: uint32 [.., words]. Guide, section 7.1.4: low items in low bits."""
    planes = np.asarray(items)[..., None] >> np.arange(bits) & 1
    string = np.zeros((*items.shape[:-1], words * 32), np.uint8)
    string[..., : items.shape[-1] * bits] = planes.reshape(*items.shape[:-1], -1)
    return np.packbits(string, axis=-1, bitorder="little").view("<u4")


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The inverse of `pack`: int64 [.., count]."""
    string = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")[..., : count * bits]
    return (string.reshape(*words.shape[:-1], count, bits).astype(np.int64) << np.arange(bits)).sum(axis=-1)
