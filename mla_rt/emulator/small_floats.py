"""The narrow number formats of gfx950: decoding tables and encoders, from the OCP definitions by integer arithmetic.

Independent of the package's host-side formats, so that one mistake cannot cancel itself out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_F32_MANTISSA = 23
_F64_MAGNITUDE, _F64_INFINITY = np.uint64((1 << 63) - 1), np.uint64(0x7FF << 52)


@dataclass(frozen=True)
class SmallFloat:
    """A sign-magnitude format of at most 8 bits.

    max_code: magnitude code of the largest finite value; overflow_code: of what is produced beyond it (None: the format saturates);
    nan_code: of the NaN produced (None: the format has none).
    decode: float32 [2**bits], exact values by code.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    overflow_code: int | None = None
    nan_code: int | None = None
    infinity_code: int | None = None
    decode: np.ndarray = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "decode", self._table())

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    def _table(self) -> np.ndarray:
        codes = np.arange(1 << (self.bits - 1))
        exponent, mantissa = codes >> self.mantissa_bits, codes & ((1 << self.mantissa_bits) - 1)
        # A zero exponent field means no hidden bit and the exponent of field value 1.
        significand = np.where(exponent == 0, mantissa, mantissa + (1 << self.mantissa_bits)).astype(np.float64)
        magnitude = np.ldexp(significand, np.maximum(exponent, 1) - self.bias - self.mantissa_bits)
        magnitude[self.max_code + 1 :] = np.nan
        if self.infinity_code is not None:
            magnitude[self.infinity_code] = np.inf
        return np.concatenate([magnitude, -magnitude]).astype(np.float32)

    def encode(self, bits: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Codes (uint32) of float32 values given as uint32 bits, rounded to nearest even.

        noise: uint32 for stochastic rounding instead: it is added, from its top bit down, below the last place that is kept.
        """
        with np.errstate(invalid="ignore"):  # signalling NaNs
            value = bits.view(np.float32).astype(np.float64)
        return self.encode_scaled(value, noise)

    def encode_scaled(self, value: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """As `encode`, for float64 values: those that come of dividing float32 by a power of two, which float64 holds exactly."""
        pattern = value.view(np.uint64)
        magnitude = pattern & _F64_MAGNITUDE
        code = self._nearest_even(magnitude) if noise is None else self._with_noise(magnitude.view(np.float64), noise)
        beyond = self.max_code if self.overflow_code is None else self.overflow_code
        code = np.where(code > np.uint64(self.max_code), np.uint64(beyond), code)
        code = np.where(magnitude > _F64_INFINITY, np.uint64(self.max_code if self.nan_code is None else self.nan_code), code)
        return (code | pattern >> np.uint64(63) << np.uint64(self.bits - 1)).astype(np.uint32)

    def _nearest_even(self, magnitude: np.ndarray) -> np.ndarray:
        """Codes (uint64) of float64 bits without sign; above max_code where the value is too large, infinite or NaN."""
        drop = np.uint64(52 - self.mantissa_bits)
        # Rounding in the bit pattern carries into the exponent where it must; what is left is to exchange the exponent's bias.
        half = np.uint64((1 << (51 - self.mantissa_bits)) - 1)
        normal = (magnitude + (half + (magnitude >> drop & np.uint64(1))) >> drop) - np.uint64((1023 - self.bias) << self.mantissa_bits)
        # Next to this number the spacing of float64 is that of the subnormal codes, so that the addition rounds to them.
        anchor = np.float64(2.0 ** (53 - self.mantissa_bits - self.bias))
        with np.errstate(invalid="ignore"):
            subnormal = (magnitude.view(np.float64) + anchor).view(np.uint64) - anchor.view(np.uint64)
        return np.where(magnitude < np.uint64((1024 - self.bias) << 52), subnormal, normal)

    def _with_noise(self, magnitude: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """As `_nearest_even`, for float64 values, rounded down after adding noise * 2**-32 of the spacing of codes."""
        finite = np.where(np.isfinite(magnitude), magnitude, 2.0**127)
        _, exponent = np.frexp(finite)
        exponent = np.where(finite == 0, 2 - self.bias, exponent)  # frexp gives 0 an exponent of 0, that of a large number
        # Subnormal codes share the spacing of the smallest normal ones.
        spacing = np.maximum(exponent - 1, 1 - self.bias) - self.mantissa_bits
        whole = np.floor(np.ldexp(finite, -spacing) + np.ldexp(noise.astype(np.float64), -32))
        # whole counts units of the value's binade; a carry into the next binade lands on the right code by itself.
        return (whole + np.ldexp((spacing + self.mantissa_bits + self.bias - 1).astype(np.float64), self.mantissa_bits)).astype(np.uint64)


E4M3 = SmallFloat("fp8", 4, 3, 7, max_code=0x7E, overflow_code=0x7F, nan_code=0x7F)
E5M2 = SmallFloat("bf8", 5, 2, 15, max_code=0x7B, overflow_code=0x7C, nan_code=0x7F, infinity_code=0x7C)
E2M3 = SmallFloat("fp6", 2, 3, 1, max_code=0x1F)
E3M2 = SmallFloat("bf6", 3, 2, 3, max_code=0x1F)
E2M1 = SmallFloat("fp4", 2, 1, 1, max_code=0x7)

# E8M0: code c is 2**(c - 127), code 0 included; 255 is NaN. float64, because 2**127 times a value may pass float32's range.
E8M0_DECODE = np.ldexp(1.0, np.arange(256) - 127)
E8M0_DECODE[255] = np.nan


def scale_of_f32(bits: np.ndarray) -> np.ndarray:
    """The scale operand of v_cvt_scalef32_*: 2**(e - 127) of a float32's exponent field e, as float64; NaN for the field of inf and NaN."""
    return E8M0_DECODE[(bits >> np.uint32(_F32_MANTISSA)) & np.uint32(0xFF)]


def bf16_to_f32(halves: np.ndarray) -> np.ndarray:
    """float32 values of bf16 bit patterns (any unsigned integer array with the pattern in its low 16 bits)."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 patterns (uint32, 0..0xFFFF) of float32 bits (uint32), rounded to nearest even; NaNs stay NaNs and become quiet."""
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, bits >> np.uint32(16) | np.uint32(0x40), rounded)


def f16_to_f32(halves: np.ndarray) -> np.ndarray:
    """float32 values of f16 bit patterns in the low 16 bits of an unsigned integer array."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return halves.astype(np.uint16).view(np.float16).astype(np.float32)


def f32_to_f16(bits: np.ndarray) -> np.ndarray:
    """f16 patterns (uint32) of float32 bits (uint32), rounded to nearest even, overflow to infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bits.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)
