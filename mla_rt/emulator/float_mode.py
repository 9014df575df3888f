"""The floating-point part of the MODE register, as a kernel's descriptor sets it: what it changes in how vector instructions compute.

Instructions are written for the compiler's default mode. What another mode changes is applied here, when an instruction is bound, so that the
default costs nothing. Modelled: f32 denormals kept or flushed (f16 and f64 denormals are always kept), IEEE mode, the NaN rule of clamp. Rounding
is to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import float_math as fm

if TYPE_CHECKING:
    from .operands import Kind, Reader
    from .state import Group

ROUND_NEAREST = 0x0  # bits 3:0 of the float mode
F32_DENORMALS, OTHER_DENORMALS = 0x30, 0xC0  # both bits set: kept on input and output

# What becomes of a function of IEEE mode outside it: a signalling NaN is then as good as a quiet one.
_WITHOUT_IEEE: dict[Callable[..., Any], Callable[..., Any]] = {
    fm.minimum: fm.minimum_number,
    fm.maximum: fm.maximum_number,
    fm.minimum3: fm.minimum3_number,
    fm.maximum3: fm.maximum3_number,
    fm.median: fm.median_number,
}


@dataclass(frozen=True, slots=True)
class FloatMode:
    """flush_f32: f32 denormals are zeros, of operands and of results; ieee: minimum and maximum heed signalling NaN; dx10_clamp: clamp turns NaN
    into 0."""

    flush_f32: bool = False
    ieee: bool = True
    dx10_clamp: bool = True

    @classmethod
    def parse(cls, float_mode: int, ieee: bool, dx10_clamp: bool) -> FloatMode:
        """From the fields of a kernel descriptor. ValueError for a mode that is not modelled."""
        if float_mode & ~F32_DENORMALS != ROUND_NEAREST | OTHER_DENORMALS or float_mode & F32_DENORMALS not in (0, F32_DENORMALS):
            raise ValueError(f"float mode {float_mode:#x}: 0xf0 and 0xc0 (f32 denormals flushed) are emulated")
        return cls(not float_mode & F32_DENORMALS, ieee, dx10_clamp)

    def settle(self, kind: Kind) -> Callable[[np.ndarray], np.ndarray]:
        """What happens to every value of this kind that an arithmetic instruction reads or writes."""
        return fm.flush if self._flushes(kind) else lambda value: value

    def source(self, read: Reader, kind: Kind) -> Reader:
        """The reader of an operand of an arithmetic instruction."""
        return (lambda group: fm.flush(read(group))) if self._flushes(kind) else read

    def result(self, write: Callable[[Group, np.ndarray], None], kind: Kind) -> Callable[[Group, np.ndarray], None]:
        """The writer of a result of an arithmetic instruction."""
        return (lambda group, value: write(group, fm.flush(value))) if self._flushes(kind) else write

    def _flushes(self, kind: Kind) -> bool:
        return self.flush_f32 and kind.dtype is np.float32

    def function(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """An instruction's function in this mode."""
        return compute if self.ieee else _WITHOUT_IEEE.get(compute, compute)

    def clamp(self, value: np.ndarray) -> np.ndarray:
        """To 0..1."""
        zero, one = value.dtype.type(0), value.dtype.type(1)
        clamped = np.where(value > zero, np.minimum(value, one), zero)
        return clamped if self.dx10_clamp else np.where(np.isnan(value), value, clamped)


DEFAULT_MODE = FloatMode()
