"""Every code and every rounding tie of E2M1, E8M0 and E4M3, against the standards' definitions in exact fractions."""

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mla_rt.formats import FP8, MXFP4, quantize_fp8, quantize_mxfp4

# OCP MX 1.0, table of E2M1; the sign is the fourth bit.
E2M1 = [0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6]

# bias, largest magnitude code
E4M3 = {"e4m3fn": (7, 0x7E), "e4m3fnuz": (8, 0x7F)}


def e4m3_magnitude(code, bias):
    """S.EEEE.MMM: 2^(E - bias) * (1 + M / 8), or 2^(1 - bias) * M / 8 for E = 0."""
    exponent, mantissa = divmod(code, 8)
    return Fraction(2) ** (exponent - bias) * (1 + Fraction(mantissa, 8)) if exponent else Fraction(2) ** (1 - bias) * Fraction(mantissa, 8)


def nearest_code(magnitude, values):
    """Index of the nearest of the ascending values, the even one at a tie, the last one beyond the end."""
    return min(range(len(values)), key=lambda code: (abs(values[code] - magnitude), code % 2))


def around(value):
    """The float32 `value` (which must be exact) with both neighbours."""
    exact = np.float32(float(value))
    assert Fraction(float(exact)) == value
    return [np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(np.inf))]


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32)


# ---- values of the codes ----


def test_every_e2m1_code_under_every_e8m0_scale():
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 2))
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    values = MXFP4(packed, np.arange(256, dtype=np.uint8)[:, None]).dequantize()
    assert values.shape == (256, 32)
    assert np.isnan(values[255]).all()
    for scale in range(255):
        for element in range(32):
            exact = E2M1[element % 8] * Fraction(2) ** (scale - 127)
            value = values[scale, element]
            assert np.signbit(value) == (element % 16 >= 8), (scale, element)
            if exact < 2**128:
                assert Fraction(float(abs(value))) == exact, (scale, element)
            else:
                assert np.isinf(value), (scale, element)


def test_e8m0_ends():
    one = np.full((1, 16), 0x22, np.uint8)  # E2M1 code 2 is 1.0
    ends = {0: 2.0**-127, 1: 2.0**-126, 127: 1.0, 128: 2.0, 254: 2.0**127}
    for code, value in ends.items():
        assert (MXFP4(one, np.array([[code]], np.uint8)).dequantize() == np.float32(value)).all(), code
    assert np.isnan(MXFP4(one, np.array([[255]], np.uint8)).dequantize()).all()


@pytest.mark.parametrize("dtype", E4M3)
def test_every_e4m3_code(dtype):
    bias, _ = E4M3[dtype]
    values = FP8(np.arange(256, dtype=np.uint8), 1.0, dtype).dequantize()
    nan_codes = {"e4m3fn": {0x7F, 0xFF}, "e4m3fnuz": {0x80}}[dtype]
    assert set(np.flatnonzero(np.isnan(values))) == nan_codes
    for code in set(range(256)) - nan_codes:
        assert Fraction(float(abs(values[code]))) == e4m3_magnitude(code & 0x7F, bias), hex(code)
        assert np.signbit(values[code]) == (code >= 0x80), hex(code)


def test_e4m3_codes_written_out():
    codes = [0x00, 0x01, 0x07, 0x08, 0x30, 0x38, 0x3C, 0x40, 0x77, 0x7E, 0xB8, 0xFE]
    e4m3fn = [0, 2**-9, 7 * 2**-9, 2**-6, 0.5, 1, 1.5, 2, 240, 448, -1, -448]
    e4m3fnuz = [0, 2**-10, 7 * 2**-10, 2**-7, 0.25, 0.5, 0.75, 1, 120, 224, -0.5, -224]
    assert FP8(np.array(codes, np.uint8), 1, "e4m3fn").dequantize().tolist() == e4m3fn
    assert FP8(np.array(codes, np.uint8), 1, "e4m3fnuz").dequantize().tolist() == e4m3fnuz
    assert FP8(np.array([0x7F, 0xFF], np.uint8), 1, "e4m3fnuz").dequantize().tolist() == [240, -240]


# ---- ties ----


def test_e2m1_ties_written_out():
    x = np.zeros((2, 32), np.float32)
    x[:, :8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x[1] *= -1
    values = quantize_mxfp4(x, "floor").dequantize()
    assert values[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    assert values[1, :8].tolist() == [0, -1, -1, -2, -2, -4, -4, -6]


def test_every_e2m1_tie_under_every_scale():
    """Each value, each midpoint and both float32 neighbours of each, both signs; the 4 * scale in front fixes the scale under "floor"."""
    for scale in range(253):
        unit = Fraction(2) ** (scale - 127)
        points = E2M1[1:] + [(low + high) / 2 for low, high in itertools.pairwise(E2M1)]
        inputs = [value for point in map(Fraction, points) for value in around(point * unit)]
        rows = np.zeros((4, 32), np.float32)
        rows[:, 0] = float(4 * unit)
        rows[0, 1:22], rows[1, 1:22] = inputs[:21], inputs[21:]
        rows[2:, 1:] = -rows[:2, 1:]
        quantized = quantize_mxfp4(rows, "floor")
        assert (quantized.scales == scale).all()
        nibbles = np.stack([quantized.codes & 15, quantized.codes >> 4], -1).reshape(4, 32)
        for row, value, code in zip(np.repeat(np.arange(4), 32), rows.ravel(), nibbles.ravel(), strict=True):
            expected = nearest_code(Fraction(float(abs(value))) / unit, E2M1) + 8 * bool(np.signbit(value))
            assert code == expected, (scale, row, value)


@pytest.mark.parametrize("dtype", E4M3)
def test_every_e4m3_value_and_tie(dtype):
    bias, max_code = E4M3[dtype]
    values = [e4m3_magnitude(code, bias) for code in range(max_code + 1)]
    points = values[1:] + [(low + high) / 2 for low, high in itertools.pairwise(values)]
    inputs = np.array([value for point in points for value in around(point)], np.float32)
    expected = np.array([nearest_code(Fraction(float(value)), values) for value in inputs], np.uint8)
    assert set(expected) == set(range(max_code + 1))
    positive = quantize_fp8(inputs, dtype, scale=1.0).codes
    negative = quantize_fp8(-inputs, dtype, scale=1.0).codes
    np.testing.assert_array_equal(positive, expected)
    np.testing.assert_array_equal(negative, np.where((expected == 0) & (dtype == "e4m3fnuz"), 0, expected | 0x80))


@pytest.mark.parametrize(("dtype", "max_code", "max_value"), [("e4m3fn", 0x7E, 448), ("e4m3fnuz", 0x7F, 240)])
def test_e4m3_saturates(dtype, max_code, max_value):
    step = max_value / 14 if dtype == "e4m3fn" else max_value / 15
    beyond = np.array([max_value, max_value + step / 2, max_value + step, 1e30, np.finfo(np.float32).max, np.inf], np.float32)
    assert (quantize_fp8(beyond, dtype, scale=1).codes == max_code).all()
    assert (quantize_fp8(-beyond, dtype, scale=1).codes == max_code | 0x80).all()


# ---- second oracle ----


def every_bfloat16():
    return np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def random_floats(rng, count):
    """float32 of uniformly distributed bits, NaN and infinities among them."""
    return rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize("dtype", E4M3)
def test_e4m3_agrees_with_ml_dtypes(dtype):
    """After the clamp that ml_dtypes leaves to its caller; NaN apart, whose sign it keeps and we do not."""
    oracle = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e4m3fnuz": ml_dtypes.float8_e4m3fnuz}[dtype]
    largest = np.float32(ml_dtypes.finfo(oracle).max)
    rng = np.random.default_rng(1)
    near = rng.standard_normal(100_000, np.float32) * np.exp2(rng.integers(-14, 10, 100_000)).astype(np.float32)
    x = np.concatenate([every_bfloat16().astype(np.float32), random_floats(rng, 100_000), near])
    codes = quantize_fp8(x, dtype, scale=1.0).codes
    is_nan = np.isnan(x)
    expected = np.clip(np.where(is_nan, 0, x), -largest, largest).astype(oracle).view(np.uint8)
    assert 0 < is_nan.sum() < 10_000
    np.testing.assert_array_equal(codes[~is_nan], expected[~is_nan])
    assert (codes[is_nan] == {"e4m3fn": 0x7F, "e4m3fnuz": 0x80}[dtype]).all()
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(FP8(every, 1.0, dtype).dequantize(), every.view(oracle).astype(np.float32))


def test_e2m1_and_e8m0_agree_with_ml_dtypes():
    rng = np.random.default_rng(2)
    blocks = rng.standard_normal((4096, 32), np.float32) * np.exp2(rng.integers(-100, 100, (4096, 1))).astype(np.float32)
    for rule in ("floor", "ceil", "even"):
        quantized = quantize_mxfp4(blocks, rule)
        scales = quantized.scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        expected = (blocks / scales).astype(ml_dtypes.float4_e2m1fn)
        nibbles = np.stack([quantized.codes & 15, quantized.codes >> 4], -1).reshape(blocks.shape)
        np.testing.assert_array_equal(nibbles, expected.view(np.uint8) & 15)
        np.testing.assert_array_equal(bits(quantized.dequantize()), bits(expected.astype(np.float32) * scales))
