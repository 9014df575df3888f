"""The elements of the small formats as bits: E2M1 with its E8M0 block scale, and E4M3.

    E2M1  4 bits, magnitudes 0 0.5 1 1.5 2 3 4 6, no NaN, no infinity (OCP MX 1.0, 5.3.3).
    E8M0  8 bits, 2^(code - 127) for codes 0..254, 255 is NaN; no zero, no infinity (OCP MX 1.0, 5.4.1).
    E4M3  "e4m3fn": bias 7, largest value 448, NaN at 0x7F and 0xFF (OCP OFP8 1.0).
          "e4m3fnuz": bias 8, largest value 240, NaN at 0x80 only, no negative zero (AMD CDNA 3).

Codes are derived from the bits of float32 values, so that subnormal numbers and ties are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Words = npt.NDArray[np.uint32]

MX_BLOCK = 32
E8M0_BIAS = 127
E8M0_NAN = 255

INFINITY_BITS = np.uint32(0x7F800000)

_E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_MAX_EXPONENT = 2

# What is added to the bits of a block's largest magnitude before its exponent field is read:
# nothing; the carry of rounding the mantissa to E2M1's one bit, to nearest even; the carry of any non-zero mantissa bit.
SCALE_RULES = {"floor": np.uint32(0), "even": np.uint32(1 << 21), "ceil": np.uint32((1 << 23) - 1)}


def magnitude_bits(values: _Floats) -> _Words:
    """uint32 bits of |values|; their integer order is the order of the magnitudes, with infinity and then NaN at the top."""
    bits: _Words = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    return bits


def _e2m1_thresholds() -> _Words:
    """uint32 [7, 256]: the least magnitude bits that round to E2M1 code `i + 1` or more under scale code `j`.

    The midpoints between adjacent E2M1 values are exact in float32 under every scale, subnormals included, so rounding to nearest is
    comparison of bits with them. A tie belongs to the even code, which is the lower one at every other midpoint.
    """
    midpoints = (_E2M1_MAGNITUDES[:-1] + _E2M1_MAGNITUDES[1:]) / 2
    with np.errstate(over="ignore"):  # Midpoints beyond float32 become infinity, which no finite magnitude reaches.
        scaled = np.ldexp(midpoints[:, None], np.arange(256) - E8M0_BIAS).astype(np.float32)
    thresholds: _Words = scaled.view(np.uint32)
    thresholds[0::2] += 1
    thresholds[:, E8M0_NAN] = 0xFFFFFFFF
    return thresholds


def _mxfp4_values() -> _Floats:
    """float32 [256 * 16]: the value of element code `i % 16` under scale code `i // 16`; infinity where float32 ends."""
    signed = np.concatenate([_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES])
    with np.errstate(over="ignore"):
        values: _Floats = np.ldexp(signed, np.arange(256)[:, None] - E8M0_BIAS).astype(np.float32)
    values[E8M0_NAN] = np.nan
    return values.reshape(-1)


_E2M1_THRESHOLDS = _e2m1_thresholds()
MXFP4_VALUES = _mxfp4_values()


def quantize_blocks(blocks: npt.NDArray[Any], rounding: np.uint32) -> tuple[_Bytes, _Bytes]:
    """Packed codes uint8 [num_blocks, 16] and scales uint8 [num_blocks] of float blocks [num_blocks, 32]; rounding from SCALE_RULES."""
    # Element index first: what belongs to a block then broadcasts along the contiguous axis.
    values = np.ascontiguousarray(blocks.astype(np.float32, copy=False).T)
    magnitude = magnitude_bits(values)
    amax = magnitude.max(axis=0)
    # A subnormal amax needs no case of its own: its exponent field, at most 1 after rounding, lies below the range of E8M0.
    exponent = np.maximum((amax + rounding) >> 23, _E2M1_MAX_EXPONENT) - _E2M1_MAX_EXPONENT
    scales = np.where(amax < INFINITY_BITS, exponent, E8M0_NAN).astype(np.uint8)
    codes = (values.view(np.uint32) >> 28).astype(np.uint8)
    codes &= 8
    codes *= scales != E8M0_NAN
    for threshold in _E2M1_THRESHOLDS:
        codes += magnitude >= threshold[scales]
    return (codes[0::2] | codes[1::2] << 4).T, scales


@dataclass(frozen=True)
class E4M3:
    """The two E4M3 formats differ in bias, in their largest code, in where NaN is and in having a negative zero."""

    bias: int
    max_code: int
    nan_code: int
    has_negative_zero: bool

    @property
    def min_normal_exponent(self) -> int:
        return 1 - self.bias

    @cached_property
    def values(self) -> _Floats:
        """float32 [256]: the value of every code."""
        code = np.arange(256)
        exponent, mantissa = code >> 3 & 15, code & 7
        subnormal = np.ldexp(mantissa / 8, self.min_normal_exponent)
        magnitude = np.where(exponent == 0, subnormal, np.ldexp(1 + mantissa / 8, exponent - self.bias))
        values: _Floats = np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)
        values[(code & 0x7F) > self.max_code] = np.nan
        values[self.nan_code] = np.nan
        return values

    @property
    def max_value(self) -> np.float32:
        largest: np.float32 = self.values[self.max_code]
        return largest

    def encode(self, values: _Floats) -> _Bytes:
        """uint8 codes of float32 values: nearest, ties to even; beyond the largest value, infinities included, the largest; NaN kept."""
        magnitude = magnitude_bits(values)
        # Normal numbers: round the mantissa to three bits and move the exponent to this format's bias.
        code = magnitude + (magnitude >> 20 & 1)
        code += np.uint32(0x7FFFF)
        code -= np.uint32(127 - self.bias << 23)
        code >>= 20
        # Subnormals: adding a power of two whose last place is the subnormal step rounds |value| to whole steps.
        addend = np.float32(2.0 ** (self.min_normal_exponent - 3 + 23))
        steps = (magnitude.view(np.float32) + addend).view(np.uint32) - addend.view(np.uint32)
        np.copyto(code, steps, where=magnitude < np.uint32(self.min_normal_exponent + 127 << 23))
        np.minimum(code, np.uint32(self.max_code), out=code)
        sign = values.view(np.uint32) >> 24 & 0x80
        if not self.has_negative_zero:
            sign *= code != 0
        code |= sign
        code[magnitude > INFINITY_BITS] = self.nan_code
        return code.astype(np.uint8)


E4M3_FORMATS = {
    "e4m3fn": E4M3(bias=7, max_code=0x7E, nan_code=0x7F, has_negative_zero=True),
    "e4m3fnuz": E4M3(bias=8, max_code=0x7F, nan_code=0x80, has_negative_zero=False),
}
