"""Floating-point numbers as exact rationals: the oracle for arithmetic tests. Pure Python integers, nothing of numpy or the emulator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Float:
    """An IEEE format. A number is its bits (int); `value` is its Fraction, or a Python float for infinities and NaN."""

    bits: int
    mantissa: int

    @property
    def bias(self) -> int:
        return (1 << (self.bits - self.mantissa - 2)) - 1

    @property
    def infinity(self) -> int:
        return ((1 << (self.bits - self.mantissa - 1)) - 1) << self.mantissa

    @property
    def nan(self) -> int:
        return self.infinity | 1 << (self.mantissa - 1)

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    def value(self, bits: int) -> Fraction | float:
        magnitude, negative = bits & ~self.sign, bool(bits & self.sign)
        if magnitude >= self.infinity:
            return math.nan if magnitude > self.infinity else -math.inf if negative else math.inf
        exponent, fraction = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        if exponent:
            fraction |= 1 << self.mantissa
        return Fraction(-fraction if negative else fraction) * Fraction(2) ** (max(exponent, 1) - self.bias - self.mantissa)

    def is_nan(self, bits: int) -> bool:
        return bits & ~self.sign > self.infinity

    def is_signalling(self, bits: int) -> bool:
        return self.is_nan(bits) and not bits >> (self.mantissa - 1) & 1

    def round(self, value: Fraction | float, *, negative_zero: bool = False) -> int:
        """The bits of the nearest number, ties to even; overflow to infinity."""
        if isinstance(value, float):
            if math.isnan(value):
                return self.nan
            if math.isinf(value):
                return self.infinity | (self.sign if value < 0 else 0)
            value = Fraction(value)
        if value == 0:
            return self.sign if negative_zero else 0
        sign, magnitude = (self.sign if value < 0 else 0), abs(value)
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if Fraction(2) ** exponent > magnitude:
            exponent -= 1
        spacing = max(exponent, 1 - self.bias) - self.mantissa
        units = round(magnitude / Fraction(2) ** spacing)  # Python rounds ties to even
        # `units` counts from the start of the binade below zero exponent; a carry lands on the next exponent by itself.
        bits = units + ((spacing + self.mantissa + self.bias - 1) << self.mantissa)
        return sign | min(bits, self.infinity)

    def fma(self, a: int, b: int, c: int) -> int:
        x, y, z = self.value(a), self.value(b), self.value(c)
        product = _times(x, y)
        if isinstance(product, float):
            return self.round(product + z if isinstance(z, float) else product)
        if isinstance(z, float):
            return self.round(z)
        exact = product + z
        both_negative = bool((a ^ b) & self.sign) and bool(c & self.sign)
        return self.round(exact, negative_zero=both_negative)

    def add(self, a: int, b: int) -> int:
        return self.fma(a, self.round(Fraction(1)), b)

    def multiply(self, a: int, b: int) -> int:
        x, y = self.value(a), self.value(b)
        product = _times(x, y)
        return self.round(product, negative_zero=bool((a ^ b) & self.sign))

    def divide(self, a: int, b: int) -> int:
        x, y = self.value(a), self.value(b)
        negative = bool((a ^ b) & self.sign)
        if isinstance(x, float) or isinstance(y, float) or y == 0:
            if any(isinstance(v, float) and math.isnan(v) for v in (x, y)) or (x == 0 and y == 0) or (_infinite(x) and _infinite(y)):
                return self.nan
            return (self.sign if negative else 0) | (0 if _infinite(y) else self.infinity)
        return self.round(x / y, negative_zero=negative)

    def same(self, got: int, expected: int) -> bool:
        """Equal bits, or both NaN."""
        return got == expected or (self.is_nan(got) and self.is_nan(expected))


def _infinite(value: Fraction | float) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _times(x: Fraction | float, y: Fraction | float) -> Fraction | float:
    if isinstance(x, float) or isinstance(y, float):
        signs = [-1.0 if v < 0 else 1.0 for v in (x, y)]
        if any(isinstance(v, float) and math.isnan(v) for v in (x, y)) or x == 0 or y == 0:
            return math.nan
        return math.inf * signs[0] * signs[1]
    return x * y


F16, F32, F64 = Float(16, 10), Float(32, 23), Float(64, 52)

# Every kind of number of a format: zeros, denormals and their neighbours, ones, halves, large, infinities, quiet and signalling NaN.
SPECIAL = {
    F16: [
        0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x3800, 0x3C01, 0x4200, 0xC500,
        0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7D01,
    ],
    F32: [
        0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000,
        0x3F800000, 0xBF800000, 0x3F000000, 0x3F800001, 0x3F7FFFFF, 0x40490FDB, 0xC2F6E979, 0x4B800001,
        0xCF000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x0D800003,
    ],
    F64: [
        0x0000000000000000, 0x8000000000000000, 0x0000000000000001, 0x800FFFFFFFFFFFFF, 0x0010000000000000, 0x3FF0000000000000, 0xBFF8000000000000,
        0x3FF0000000000001, 0x400921FB54442D18, 0xC1E0000000000001, 0x7FEFFFFFFFFFFFFF, 0xFFF0000000000000, 0x7FF8000000000000, 0x7FF0000000000001,
    ],
}  # fmt: skip
