"""The narrow formats: values written out from the OCP definitions, every tie by exact arithmetic, and ml_dtypes as a second opinion."""

from __future__ import annotations

import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mla_rt.emulator.small_floats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0_DECODE,
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    scale_of_f32,
)

FORMATS = {
    "fp8": (E4M3, ml_dtypes.float8_e4m3fn),
    "bf8": (E5M2, ml_dtypes.float8_e5m2),
    "fp6": (E2M3, ml_dtypes.float6_e2m3fn),
    "bf6": (E3M2, ml_dtypes.float6_e3m2fn),
    "fp4": (E2M1, ml_dtypes.float4_e2m1fn),
}


def bits(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


@pytest.mark.parametrize(
    ("small", "values"),
    [
        (E4M3, {0x00: 0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x39: 1.125, 0x7E: 448.0, 0xFE: -448.0, 0xB8: -1.0}),
        (E5M2, {0x01: 2**-16, 0x03: 3 * 2**-16, 0x04: 2**-14, 0x3C: 1.0, 0x3D: 1.25, 0x7B: 57344.0, 0x7C: np.inf, 0xFC: -np.inf}),
        (E2M3, {0x01: 0.125, 0x07: 0.875, 0x08: 1.0, 0x09: 1.125, 0x1F: 7.5, 0x3F: -7.5}),
        (E3M2, {0x01: 0.0625, 0x03: 0.1875, 0x04: 0.25, 0x0C: 1.0, 0x1F: 28.0, 0x3F: -28.0}),
        (E2M1, {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0, 9: -0.5, 15: -6.0}),
    ],
)
def test_values_of_the_standards(small, values):
    for code, value in values.items():
        assert small.decode[code] == value
    assert np.signbit(small.decode[1 << (small.bits - 1)]) and small.decode[1 << (small.bits - 1)] == 0


def test_nan_codes():
    assert np.flatnonzero(np.isnan(E4M3.decode)).tolist() == [0x7F, 0xFF]
    assert np.flatnonzero(np.isnan(E5M2.decode)).tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    for small in (E2M3, E3M2, E2M1):
        assert np.isfinite(small.decode).all()


@pytest.mark.parametrize("name", FORMATS)
def test_every_midpoint_goes_to_the_even_code_and_its_neighbours_to_the_near_one(name):
    """Exact arithmetic on the format's own values: between codes c and c + 1, the even one takes the tie."""
    small, _ = FORMATS[name]
    codes = range(small.max_code)
    low = [Fraction(float(small.decode[code])) for code in codes]
    high = [Fraction(float(small.decode[code + 1])) for code in codes]
    middle = np.array([float((a + b) / 2) for a, b in zip(low, high, strict=True)], np.float32)
    for value, expected in (
        (middle, [code if code % 2 == 0 else code + 1 for code in codes]),
        (np.nextafter(middle, np.float32(0)), list(codes)),
        (np.nextafter(middle, np.float32(np.inf)), [code + 1 for code in codes]),
    ):
        assert small.encode(value.view(np.uint32)).tolist() == expected
        sign = 1 << (small.bits - 1)
        assert small.encode((-value).view(np.uint32)).tolist() == [code | sign for code in expected]


@pytest.mark.parametrize("name", FORMATS)
def test_against_ml_dtypes(name):
    small, dtype = FORMATS[name]
    patterns = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    near = (np.random.default_rng(1).standard_normal(1 << 16) * 4).astype(np.float32)
    for values in (patterns.view(np.float32), near):
        values = values[~np.isnan(values)]
        with np.errstate(over="ignore", invalid="ignore"):
            expected = values.astype(dtype).view(np.uint8)
        np.testing.assert_array_equal(small.encode(values.view(np.uint32)), expected)
    decoded = np.arange(1 << small.bits, dtype=np.uint8).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(small.decode, decoded)


@pytest.mark.parametrize("noise", [None, 0, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_comes_back_whatever_the_noise(name, noise):
    """Both zeros, subnormals and infinities included: what is exact is not rounded."""
    small, _ = FORMATS[name]
    codes = np.flatnonzero(~np.isnan(small.decode))
    noises = None if noise is None else np.full(len(codes), noise, np.uint32)
    assert small.encode(small.decode[codes].view(np.uint32), noise=noises).tolist() == codes.tolist()


def test_overflow_and_nan():
    """464 is the midpoint of 448 and what would be 480; 61440 that of 57344 and 65536."""
    assert E4M3.encode(bits(448, 463.9, 464, 464.1, -1e9, np.inf, np.nan)).tolist() == [0x7E, 0x7E, 0x7E, 0x7F, 0xFF, 0x7F, 0x7F]
    assert E5M2.encode(bits(57344, 61439, 61440, -1e9, np.inf, np.nan)).tolist() == [0x7B, 0x7B, 0x7C, 0xFC, 0x7C, 0x7F]
    signalling = np.array([0x7F800001, 0xFF800001], np.uint32)
    assert E4M3.encode(signalling).tolist() == [0x7F, 0xFF]
    assert E2M1.encode(bits(5, 7, -1e30, np.inf)).tolist() == [6, 7, 15, 7]
    assert E2M3.encode(bits(7.6, np.inf, -np.inf)).tolist() == [0x1F, 0x1F, 0x3F]


def test_stochastic_rounding_adds_the_noise_below_the_last_place():
    """1.03125 is a quarter of the way from code 0x38 to 0x39: it rounds up for the upper quarter of all noise values."""
    noise = np.array([0, 0xBFFFFFFF, 0xC0000000, 0xFFFFFFFF], np.uint32)
    value = np.broadcast_to(bits(1.03125), 4)
    assert E4M3.encode(value, noise=noise).tolist() == [0x38, 0x38, 0x39, 0x39]
    assert E4M3.encode(bits(1, 1.125, -2, 448), noise=np.full(4, 0xFFFFFFFF, np.uint32)).tolist() == [0x38, 0x39, 0xC0, 0x7E]
    assert E4M3.encode(bits(2**-11, 2**-11), noise=noise[1:3]).tolist() == [0, 1]


def test_e8m0():
    assert E8M0_DECODE[0] == 2.0**-127 and E8M0_DECODE[127] == 1 and E8M0_DECODE[254] == 2.0**127
    assert np.isnan(E8M0_DECODE[255])
    assert scale_of_f32(bits(1.0, 1.9, -4.0, 0.5)).tolist() == [1, 1, 4, 0.5]
    assert np.isnan(scale_of_f32(bits(np.inf, np.nan))).all()
    assert scale_of_f32(bits(0.0, 1e-45)).tolist() == [2.0**-127] * 2


def test_bf16():
    assert f32_to_bf16(bits(1.0, -2.0, 0.0, -0.0, np.inf)).tolist() == [0x3F80, 0xC000, 0, 0x8000, 0x7F80]
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x00008000, 0x00018000], np.uint32)
    assert f32_to_bf16(ties).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0, 2]
    assert f32_to_bf16(np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32)).tolist() == [0x7FC0, 0xFFFF, 0x7FC0]
    every = np.arange(1 << 16, dtype=np.uint32)
    numbers = ~np.isnan(bf16_to_f32(every))
    np.testing.assert_array_equal(f32_to_bf16(bf16_to_f32(every).view(np.uint32))[numbers], every[numbers])
    patterns = np.random.default_rng(2).integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    patterns = patterns[~np.isnan(patterns.view(np.float32))]
    with np.errstate(over="ignore"):
        expected = patterns.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(f32_to_bf16(patterns), expected)


def test_f16():
    for value in (0.0, 1.0, -1.5, 65504.0, 2**-24, 0.1):
        (pattern,) = struct.unpack("<H", struct.pack("<e", value))
        assert f32_to_f16(bits(value)).tolist() == [pattern]
        assert f16_to_f32(np.array([pattern], np.uint32)).tolist() == list(struct.unpack("<e", struct.pack("<H", pattern)))
    assert f32_to_f16(bits(65520, -1e9)).tolist() == [0x7C00, 0xFC00]
