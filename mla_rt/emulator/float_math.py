"""Floating-point arithmetic as gfx950 does it, on numpy arrays: exact fused multiply-add, IEEE minimum and maximum, class tests, transcendentals.

Denormals are kept except by the transcendental functions of f32, which flush them in and out (`float_mode.py` has what other modes change). Those
are computed in float64 and rounded; hardware promises 1 ulp, so both agree within that. NaN payloads are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

Array = Any

_LAYOUT = {  # dtype -> (unsigned type, mantissa bits, exponent mask)
    np.dtype(np.float16): (np.uint16, 10, 0x1F),
    np.dtype(np.float32): (np.uint32, 23, 0xFF),
    np.dtype(np.float64): (np.uint64, 52, 0x7FF),
}


def _odd_sum(a: Array, b: Array, total: Array) -> Array:
    """a + b in float64 rounded to odd, where total is their sum rounded to nearest: rounding it again to a narrower format is then exact."""
    part = total - a
    error = (a - (total - part)) + (b - part)
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    return np.where(inexact, bits + step, bits).view(np.float64)


def _fma_narrow(a: Array, b: Array, c: Array, dtype: type) -> Array:
    """a * b + c rounded once to dtype (f16 or f32). The product is exact in float64, so only the sum can be rounded twice."""
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    result = total.astype(dtype)
    # Two roundings differ from one only where the first lands half-way between two values of the narrow format. The spacing of normal
    # results makes that a bit pattern; denormal results (rare) are always redone.
    dropped = 29 if dtype is np.float32 else 42
    doubtful = (total.view(np.uint64) & np.uint64((1 << dropped) - 1)) == np.uint64(1 << (dropped - 1))
    doubtful |= (np.abs(total) < np.finfo(dtype).tiny) & (total != 0)
    if doubtful.any():
        where = np.nonzero(doubtful)
        a2, c2 = np.broadcast_to(product, total.shape)[where], np.broadcast_to(c, total.shape)[where].astype(np.float64)
        result[where] = _odd_sum(a2, c2, total[where]).astype(dtype)
    return result


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    return _fma_narrow(a, b, c, np.float32)


def fma_f16(a: Array, b: Array, c: Array) -> Array:
    return _fma_narrow(a, b, c, np.float16)


def _split(value: Array) -> tuple[Array, Array]:
    """A float64 as the sum of two with at most 26 mantissa bits each."""
    scaled = value * 134217729.0
    high = scaled - (scaled - value)
    return high, value - high


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once (error-free product and sums, the last rounding to odd before it). Where exponents are extreme: by rationals."""
    a, b, c = np.broadcast_arrays(a, b, c)
    product = a * b
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    product_low = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    low = c + product_low
    part = low - c
    low_error = (c - (low - part)) + (product_low - part)
    high = product + low
    part = high - product
    high_error = (product - (high - part)) + (low - part)
    result = high + _odd_sum(low_error, high_error, low_error + high_error)
    magnitude = [np.abs(x) for x in (a, b, c, product)]
    safe = np.logical_and.reduce([(m == 0) | ((m > 1e-200) & (m < 1e150)) for m in magnitude]) & ((product != 0) | (a == 0) | (b == 0))
    simple = ~np.isfinite(a) | ~np.isfinite(b) | ~np.isfinite(c) | (a == 0) | (b == 0)
    # An infinite c decides, though the product of two finite numbers may overflow here.
    result = np.where(simple, np.where(np.isfinite(a) & np.isfinite(b) & np.isinf(c), c, product + c), result)
    for index in np.argwhere(~safe & ~simple):
        i = tuple(index)
        result[i] = _fraction_to_f64(Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i])), bool(np.signbit(product[i])))
    return result


def _fraction_to_f64(value: Fraction, negative_zero: bool) -> float:
    if value == 0:
        return -0.0 if negative_zero else 0.0
    try:
        return value.numerator / value.denominator  # int / int is correctly rounded
    except OverflowError:
        return float("-inf") if value < 0 else float("inf")


def is_signalling(value: Array) -> Array:
    unsigned, mantissa, _ = _LAYOUT[value.dtype]
    return np.isnan(value) & (value.view(unsigned) >> unsigned(mantissa - 1) & unsigned(1) == 0)


def _extremum(
    propagating: Callable[..., Array], ignoring: Callable[..., Array], join: Callable[..., Array], *, ieee: bool
) -> Callable[[Array, Array], Array]:
    """v_min/v_max: one NaN gives the other operand, in IEEE mode a signalling NaN gives NaN, -0 < +0."""

    def run(a: Array, b: Array) -> Array:
        result = propagating(a, b)
        if np.isnan(result).any():
            result = ignoring(a, b)
            if ieee:
                result = np.where(is_signalling(a) | is_signalling(b), a + b, result)  # the sum is a quiet NaN
        if not result.all():  # a zero: numpy may return either of +0 and -0
            unsigned = _LAYOUT[result.dtype][0]
            both_zero = (a == 0) & (b == 0)
            result = np.where(both_zero, join(a.view(unsigned), b.view(unsigned)).view(result.dtype), result)
        return result

    return run


def _of_three(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    return lambda a, b, c: function(function(a, b), c)


def _median(lower: Callable[[Array, Array], Array], upper: Callable[[Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    """The middle of three; with a NaN, the minimum of three."""

    def run(a: Array, b: Array, c: Array) -> Array:
        result = upper(lower(a, b), lower(upper(a, b), c))
        unordered = np.isnan(a) | np.isnan(b) | np.isnan(c)
        return np.where(unordered, lower(lower(a, b), c), result) if unordered.any() else result

    return run


# In IEEE mode, and (`_number`) outside it.
minimum = _extremum(np.minimum, np.fmin, np.bitwise_or, ieee=True)
maximum = _extremum(np.maximum, np.fmax, np.bitwise_and, ieee=True)
minimum_number = _extremum(np.minimum, np.fmin, np.bitwise_or, ieee=False)
maximum_number = _extremum(np.maximum, np.fmax, np.bitwise_and, ieee=False)
minimum3, maximum3 = _of_three(minimum), _of_three(maximum)
minimum3_number, maximum3_number = _of_three(minimum_number), _of_three(maximum_number)
median, median_number = _median(minimum, maximum), _median(minimum_number, maximum_number)


def propagating_minimum(a: Array, b: Array) -> Array:
    """minimum in which NaN wins (v_minimum3)."""
    return np.where(np.isnan(a) | np.isnan(b), a + b, minimum(a, b))


def propagating_maximum(a: Array, b: Array) -> Array:
    return np.where(np.isnan(a) | np.isnan(b), a + b, maximum(a, b))


def in_class(value: Array, classes: Array) -> Array:
    """v_cmp_class: bits of `classes`: 0 signalling NaN, 1 quiet NaN, 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, 7 +denormal, 8 +normal, 9 +inf."""
    unsigned, mantissa, exponent_mask = _LAYOUT[value.dtype]
    bits = value.view(unsigned)
    exponent = bits >> unsigned(mantissa) & unsigned(exponent_mask)
    negative = np.signbit(value)
    zero, largest = value == 0, exponent == exponent_mask
    magnitude = np.where(largest, 3, np.where(zero, 0, np.where(exponent == 0, 1, 2)))
    index = np.where(negative, 5 - magnitude, 6 + magnitude)
    index = np.where(np.isnan(value), np.where(is_signalling(value), 0, 1), index)
    return classes >> index.astype(np.uint32) & np.uint32(1) != 0


def frexp_mantissa(value: Array) -> Array:
    """The mantissa in ±[0.5, 1); infinities and NaN unchanged."""
    mantissa = np.frexp(value)[0]
    return np.where(np.isfinite(value), mantissa, value)


def frexp_exponent(value: Array) -> Array:
    """int32; 0 for zero, infinities and NaN."""
    return np.where(np.isfinite(value), np.frexp(value)[1], 0).astype(np.int32)


def ldexp(value: Array, exponent: Array) -> Array:
    """value * 2^exponent rounded once."""
    exponent = np.clip(exponent, -5000, 5000)
    if value.dtype == np.float64:
        return np.ldexp(value, exponent)
    return np.ldexp(value.astype(np.float64), np.clip(exponent, -700, 700)).astype(value.dtype)


def fract(value: Array) -> Array:
    """value - floor(value), kept below 1."""
    below_one = np.nextafter(value.dtype.type(1), value.dtype.type(0))
    return np.where(np.isinf(value), value.dtype.type(np.nan), np.minimum(value - np.floor(value), below_one))


def flush(value: Array) -> Array:
    """f32 denormals to zero of their sign."""
    tiny = np.abs(value) < np.float32(np.finfo(np.float32).tiny)
    return np.where(tiny, np.copysign(np.float32(0), value), value) if tiny.any() else value


def flushing(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """An f32 transcendental: computed in float64, rounded, denormals flushed in and out."""
    return lambda value: flush(function(flush(value).astype(np.float64)).astype(np.float32))


def rounding(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """An f16 or f32 function computed in float64 and rounded, denormals kept."""
    return lambda value: function(value.astype(np.float64)).astype(value.dtype)


def reciprocal(value: Array) -> Array:
    return 1.0 / value


def reciprocal_root(value: Array) -> Array:
    return 1.0 / np.sqrt(value)


def sine_of_turns(value: Array) -> Array:
    """sin(2 pi x): exact at multiples of a quarter turn."""
    turns = value - np.rint(value)
    return np.sin(2 * np.pi * turns)


def cosine_of_turns(value: Array) -> Array:
    turns = value - np.rint(value)
    return np.cos(2 * np.pi * turns)


def to_integer(dtype: type) -> Callable[[Array], Array]:
    """Float to integer: truncated, saturated, NaN becomes 0."""
    limits = np.iinfo(dtype)

    def run(value: Array) -> Array:
        wide = np.nan_to_num(np.trunc(value.astype(np.float64)), nan=0.0)
        return np.clip(wide, limits.min, limits.max).astype(np.int64).astype(dtype)

    return run


def to_f16_toward_zero(value: Array) -> Array:
    """f32 -> f16 rounded toward zero: overflow gives the largest finite value."""
    nearest = value.astype(np.float16)
    too_far = np.abs(nearest.astype(np.float32)) > np.abs(value)
    return np.where(too_far & np.isfinite(value), np.nextafter(nearest, np.float16(0)), nearest)
