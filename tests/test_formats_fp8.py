"""FP8: the tensor's scale, special values, layouts, error bounds. Codes and ties are in test_formats_elements.py."""

import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from mla_rt.formats import FP8, quantize_fp8

MAX = {"e4m3fn": 448.0, "e4m3fnuz": 240.0}
MAX_CODE = {"e4m3fn": 0x7E, "e4m3fnuz": 0x7F}
NAN_CODE = {"e4m3fn": 0x7F, "e4m3fnuz": 0x80}
SUBNORMAL_STEP = {"e4m3fn": 2.0**-9, "e4m3fnuz": 2.0**-10}
dtypes = pytest.mark.parametrize("dtype", MAX)


# ---- scale ----


@dtypes
def test_default_scale_maps_the_largest_magnitude_to_the_largest_value(dtype):
    x = np.array([[1.0, -3.5, 0.0], [2.0, 0.5, 3.0]], np.float32)
    quantized = quantize_fp8(x, dtype)
    assert quantized.scale == np.float32(3.5) / np.float32(MAX[dtype])
    assert isinstance(quantized.scale, np.float32)
    assert quantized.codes[0, 1] == MAX_CODE[dtype] | 0x80
    assert quantized.dtype == dtype


def test_the_default_dtype_is_e4m3fn():
    assert quantize_fp8(np.ones(3, np.float32)).dtype == "e4m3fn"


@dtypes
def test_scale_is_the_dequantizing_multiplier(dtype):
    x = np.array([2.0, -4.0, 8.0], np.float32)
    for scale in (0.5, 2.0, np.float32(4.0), np.array([0.25], np.float32), 1):
        quantized = quantize_fp8(x, dtype, scale=scale)
        assert quantized.scale == np.float32(np.asarray(scale).item())
        np.testing.assert_array_equal(quantized.dequantize(), x)
    assert quantize_fp8(np.ones(1, np.float32), "e4m3fn", scale=2.0).codes.tolist() == [0x30]  # 0.5
    assert FP8(np.array([0x38], np.uint8), 3.0, "e4m3fn").dequantize().tolist() == [3.0]
    assert FP8(np.array([0x38], np.uint8), 3.0, "e4m3fnuz").dequantize().tolist() == [1.5]


@dtypes
def test_the_quotient_is_rounded_to_float32_before_the_code(dtype):
    """1.0625 is a tie of E4M3 whose even neighbour is 1. x is chosen so that x / scale is above the tie but rounds onto it in float32."""
    rng = np.random.default_rng(0)
    scales = rng.uniform(1, 2, 20_000).astype(np.float32)
    x = np.float32(1.0625) * scales
    exact = x.astype(np.float64) / scales.astype(np.float64)
    onto_the_tie = (x / scales == np.float32(1.0625)) & (exact > 1.0625)
    assert onto_the_tie.sum() > 100
    for value, scale in list(zip(x[onto_the_tie], scales[onto_the_tie], strict=True))[:100]:
        assert quantize_fp8(np.array([value]), dtype, scale).codes[0] == {"e4m3fn": 0x38, "e4m3fnuz": 0x40}[dtype]


@dtypes
def test_zero_tensor(dtype):
    for x in (np.zeros((2, 576), np.float32), -np.zeros((2, 576), np.float32), np.zeros((0, 576), np.float32)):
        quantized = quantize_fp8(x, dtype)
        assert quantized.scale == 1.0
        assert (quantized.dequantize() == 0).all()
        assert quantized.codes.shape == x.shape


@dtypes
def test_tiny_tensors_neither_vanish_nor_saturate(dtype):
    """amax / max in the subnormal range is rounded coarsely, or to zero; the scale is then taken a place higher."""
    for amax in (2.0**-149, 7 * 2.0**-149, 2.0**-135, 1.3 * 2.0**-127):
        x = np.array([amax, -amax / 2, 0], np.float32)
        quantized = quantize_fp8(x, dtype)
        assert quantized.scale * MAX[dtype] >= x[0]
        error = abs(quantized.dequantize().astype(np.float64) - x)
        assert (error <= np.maximum(abs(x) / 16, 2.0**-149)).all()
        assert quantized.dequantize()[0] > 0


@dtypes
def test_huge_tensors(dtype):
    largest = np.finfo(np.float32).max
    quantized = quantize_fp8(np.array([largest, -largest, 0], np.float32), dtype)
    assert quantized.codes.tolist() == [MAX_CODE[dtype], MAX_CODE[dtype] | 0x80, 0]
    assert (abs(quantized.dequantize()[:2]) >= np.float32(3.4e38)).all()


@dtypes
def test_a_quotient_beyond_float32_saturates(dtype):
    assert quantize_fp8(np.array([1e30, -1e30], np.float32), dtype, scale=1e-30).codes.tolist() == [MAX_CODE[dtype], MAX_CODE[dtype] | 0x80]


# ---- special values ----


@dtypes
def test_nan_stays_and_infinity_saturates(dtype):
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, 2.0, -1.0], np.float32)
    for scale in (None, 1.0):
        quantized = quantize_fp8(x, dtype, scale)
        nan, largest = NAN_CODE[dtype], MAX_CODE[dtype]
        assert quantized.codes[:4].tolist() == [nan, nan, largest, largest | 0x80]
        assert quantized.scale == (1.0 if scale else np.float32(2.0) / np.float32(MAX[dtype]))  # from the finite elements alone
        assert np.isnan(quantized.dequantize()[:2]).all()
    assert quantize_fp8(x[:4], dtype).scale == 1.0


@dtypes
def test_signalling_nans_of_every_dtype(dtype):
    """No floating-point flag either: warnings are errors in this suite."""
    for pattern, source in ((np.uint32(0x7F800001), np.float32), (np.uint16(0x7C01), np.float16), (np.uint16(0x7F81), ml_dtypes.bfloat16)):
        x = np.full(3, pattern).view(source)
        for scale in (None, 3.0):
            assert quantize_fp8(x, dtype, scale).codes.tolist() == [NAN_CODE[dtype]] * 3


def test_fnuz_has_no_negative_zero():
    """0x80 is -0 in e4m3fn and NaN in e4m3fnuz, which must not come from an underflow."""
    x = np.array([-0.0, -1e-30, -(2.0**-149), -(2.0**-11), -np.nextafter(np.float32(2.0**-11), np.float32(1))], np.float32)
    assert quantize_fp8(x, "e4m3fnuz", scale=1.0).codes.tolist() == [0, 0, 0, 0, 0x81]
    assert quantize_fp8(x * 2, "e4m3fn", scale=1.0).codes.tolist() == [0x80, 0x80, 0x80, 0x80, 0x81]
    values = quantize_fp8(x, "e4m3fnuz", scale=1.0).dequantize()
    assert not np.isnan(values).any()
    assert not np.signbit(values[:4]).any()


# ---- shapes and layouts ----


@dtypes
def test_input_dtypes_and_layouts_agree(dtype):
    x = np.random.default_rng(3).integers(-127, 128, (37, 130)).astype(np.float32) / 16  # exact in every dtype below
    expected = quantize_fp8(x, dtype)
    read_only = x.copy()
    read_only.flags.writeable = False
    wide = np.zeros((37, 200), np.float32)
    wide[:, 50:180] = x
    layouts = {
        "bfloat16": x.astype(ml_dtypes.bfloat16),
        "float16": x.astype(np.float16),
        "big-endian": x.astype(">f4"),
        "Fortran order": np.asfortranarray(x),
        "slice of columns": wide[:, 50:180],
        "reversed": x[::-1].copy()[::-1],
        "read-only": read_only,
    }
    for name, array in layouts.items():
        quantized = quantize_fp8(array, dtype)
        np.testing.assert_array_equal(quantized.codes, expected.codes, err_msg=name)
        assert quantized.scale == expected.scale, name


@dtypes
def test_shapes_and_nbytes(dtype):
    for shape in [(7,), (3, 576), (2, 3, 1, 5), (0,), (4, 0, 3), (100_000,)]:
        quantized = quantize_fp8(np.ones(shape, np.float32), dtype)
        assert quantized.codes.shape == quantized.shape == quantized.dequantize().shape == shape
        assert quantized.codes.dtype == np.uint8
        assert quantized.dequantize().dtype == np.float32
        assert quantized.nbytes == np.prod(shape) + 4


@dtypes
def test_more_than_one_chunk(dtype):
    x = np.random.default_rng(4).standard_normal(300_001, np.float32)
    x[299_999] = -50  # the largest, in the last chunk
    quantized = quantize_fp8(x, dtype)
    assert quantized.scale == np.float32(50) / np.float32(MAX[dtype])
    for part in (slice(0, 5), slice(65_530, 65_540), slice(299_990, 300_001)):
        np.testing.assert_array_equal(quantized.codes[part], quantize_fp8(x[part], dtype, quantized.scale).codes)


def test_bytes_are_wrapped_without_a_copy():
    codes = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert np.shares_memory(FP8(codes, 1.0, "e4m3fn").codes, codes)
    assert FP8(codes.T, 1.0, "e4m3fn").codes.flags.c_contiguous


# ---- errors ----


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, np.complex64, bool, object, ml_dtypes.float8_e4m3fn])
def test_other_input_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=f"{np.dtype(dtype)}.*float32, bfloat16, float16"):
        quantize_fp8(np.zeros((1, 32)).astype(dtype))


@pytest.mark.parametrize("dtype", ["e5m2", "fp8_e4m3fn", "E4M3FN", "", None, ml_dtypes.float8_e4m3fn, ["e4m3fn"]])
def test_other_formats_are_refused(dtype):
    for call in (lambda: quantize_fp8(np.zeros(3, np.float32), dtype), lambda: FP8(np.zeros(3, np.uint8), 1.0, dtype)):
        with pytest.raises(ValueError if isinstance(dtype, str) else TypeError, match=r"dtype is .*'e4m3fn', 'e4m3fnuz'"):
            call()


@pytest.mark.parametrize("scale", [0, 0.0, -0.0, -1.0, np.nan, np.inf, -np.inf, 1e39, 1e-46, 2**200, 2**2000, -(2**2000)])
def test_scales_out_of_range_are_refused(scale):
    for call in (lambda: quantize_fp8(np.zeros(3, np.float32), scale=scale), lambda: FP8(np.zeros(3, np.uint8), scale, "e4m3fn")):
        with pytest.raises(ValueError, match=r"scale is .*positive and finite"):
            call()


def test_a_scale_may_be_any_python_integer_of_float32():
    assert FP8(np.zeros(3, np.uint8), 2**70, "e4m3fn").scale == np.float32(2**70)


@pytest.mark.parametrize("scale", ["1", True, 1j, None, [None]])
def test_scales_that_are_not_numbers_are_refused(scale):
    with pytest.raises(TypeError, match=r"scale is .*real number"):
        FP8(np.zeros(3, np.uint8), scale, "e4m3fn")


@pytest.mark.parametrize("shape", [(2,), (0,), (3, 1)])
def test_more_than_one_scale_is_refused(shape):
    with pytest.raises(ValueError, match="one number"):
        quantize_fp8(np.zeros((3, 4), np.float32), scale=np.ones(shape, np.float32))


def test_codes_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="codes has dtype float8_e4m3fn"):
        FP8(np.zeros(3, ml_dtypes.float8_e4m3fn), 1.0, "e4m3fn")
    with pytest.raises(ValueError, match="no axis"):
        FP8(np.uint8(1), 1.0, "e4m3fn")
    with pytest.raises(ValueError, match="no axis"):
        quantize_fp8(np.float32(1))


# ---- error bounds ----

TENSORS = hypothesis_numpy.arrays(
    np.float32,
    st.tuples(st.integers(0, 3), st.integers(1, 40)),
    elements=st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(-8, 8, width=32)),
)


@dtypes
@given(x=TENSORS)
@settings(max_examples=200, deadline=None)
def test_error_bound(dtype, x):
    """Half a place of a 4-bit significand, relative 2^-4, or half a subnormal step; three roundings to float32 besides (scale, quotient, product)."""
    quantized = quantize_fp8(x, dtype)
    exact = x.astype(np.float64)
    error = abs(quantized.dequantize().astype(np.float64) - exact)
    bound = np.maximum(abs(exact) / 16, float(quantized.scale) * SUBNORMAL_STEP[dtype] / 2)
    assert (error <= bound * (1 + 2.0**-18) + 2.0**-149).all()
    assert quantized.codes.max(initial=0) <= 0xFF
    assert not np.isnan(quantized.dequantize()).any()


@dtypes
@given(
    codes=hypothesis_numpy.arrays(np.uint8, st.integers(1, 64), elements=st.integers(0, 255)),
    scale=st.floats(2.0**-100, 2.0**100, width=32),
)
@settings(max_examples=200, deadline=None)
def test_what_came_from_fp8_goes_back_unchanged(dtype, codes, scale):
    codes[np.isnan(FP8(codes, 1.0, dtype).dequantize())] = NAN_CODE[dtype]
    record = FP8(codes, scale, dtype)
    np.testing.assert_array_equal(quantize_fp8(record.dequantize(), dtype, scale).codes, codes)


# ---- speed and memory ----


@dtypes
def test_speed_of_16_million_elements(dtype):
    x = np.random.default_rng(6).standard_normal((1 << 15, 512), np.float32)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        quantize_fp8(x, dtype)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 2.0, seconds


@dtypes
def test_temporaries_stay_small(dtype):
    x = np.random.default_rng(7).standard_normal((1 << 13, 512), np.float32)
    tracemalloc.start()
    try:
        quantized = quantize_fp8(x, dtype)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        quantized.dequantize()
        _, peak_dequantize = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert x.size <= peak < x.size + (4 << 20)
    assert peak_dequantize < x.size + x.nbytes + (4 << 20)
