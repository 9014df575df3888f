"""Caches that others wrote: packed here byte by byte, as the layouts are described, and read back through the package."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest

from mla_rt.cache import PagedKVCache
from mla_rt.cache_layouts import LAYOUTS, TILE128_BYTES, dequantize_tile128, import_cache
from mla_rt.device import Device
from mla_rt.formats import FP8, MXFP4, quantize_fp8, quantize_mxfp4

BF16, E4M3FN = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
NUM_TOKENS = 12


@pytest.fixture
def rows() -> np.ndarray:
    rng = np.random.default_rng(7)
    return (rng.standard_normal((NUM_TOKENS, 576)) * np.exp2(rng.integers(-6, 7, (NUM_TOKENS, 576)))).astype(np.float32)


def pack_tile128(codes: np.ndarray, scales: np.ndarray, rope: np.ndarray) -> np.ndarray:
    """uint8 [tokens, 656] of E4M3 codes [tokens, 512], scales [tokens, 4] and rope [tokens, 64] bf16, one value at a time."""
    tokens = []
    for code, scale, tail in zip(codes, scales, rope, strict=True):
        tokens.append(bytes(code) + struct.pack("<4f", *scale) + b"".join(struct.pack("<H", bits) for bits in tail.view(np.uint16).tolist()))
    return np.frombuffer(b"".join(tokens), np.uint8).reshape(len(tokens), -1)


def assert_same_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(found.view(np.uint8), np.ascontiguousarray(wanted).view(np.uint8))


# ---- exact layouts ----


@pytest.mark.parametrize("shape", [(12,), (3, 4), (3, 4, 1), (12, 1)])
def test_bf16_packed(rows, shape):
    wanted = rows.astype(BF16)
    axes = shape[:-1] if shape[-1] == 1 else shape
    assert_same_bits(import_cache("bf16_packed", wanted.reshape(*shape, 576)), wanted.reshape(*axes, 576))
    as_bytes = np.frombuffer(b"".join(struct.pack("<H", bits) for bits in wanted.view(np.uint16).ravel().tolist()), np.uint8)
    assert_same_bits(import_cache("bf16_packed", as_bytes.reshape(*shape, 1152)), wanted.reshape(*axes, 576))


@pytest.mark.parametrize("dtype", [np.uint8, E4M3FN])
def test_fp8_packed(rows, dtype):
    wanted = quantize_fp8(rows, scale=0.25)
    found = import_cache("fp8_packed", wanted.codes.view(dtype).reshape(3, 4, 1, 576), scale=0.25)
    assert isinstance(found, FP8)
    assert (found.dtype, found.scale) == ("e4m3fn", np.float32(0.25))
    assert_same_bits(found.codes, wanted.codes.reshape(3, 4, 576))


@pytest.mark.parametrize("padding", [(0, 0), (0, 6), (244, 6)])
@pytest.mark.parametrize("shape", [(12, 288), (12, 1, 288), (3, 4, 288), (3, 4, 1, 288)])
def test_mxfp4_in_two_arrays(rows, shape, padding):
    wanted = quantize_mxfp4(rows, "even")
    scales = np.full((NUM_TOKENS + padding[0], 18 + padding[1]), 0xFF, np.uint8)
    scales[:NUM_TOKENS, :18] = wanted.scales
    for given in (scales, scales.view(ml_dtypes.float8_e8m0fnu)):
        found = import_cache("mxfp4_two_arrays", wanted.codes.reshape(shape), scales=given)
        assert isinstance(found, MXFP4)
        assert found.codes.shape == (shape[0], 288) if shape[-3:-1] in ((12,), (12, 1)) else (3, 4, 288)
        assert_same_bits(found.codes.reshape(-1, 288), wanted.codes)
        assert_same_bits(found.scales.reshape(-1, 18), wanted.scales)
    same_axes = wanted.scales.reshape(*shape[:-1], 18)
    assert_same_bits(import_cache("mxfp4_two_arrays", wanted.codes.reshape(shape), scales=same_axes).scales.reshape(-1, 18), wanted.scales)


def test_strided_views_are_read_as_what_they_show(rows):
    wide = np.full((NUM_TOKENS, 2, 700), np.nan, BF16)
    wide[:, 0, 10:586] = rows
    assert_same_bits(import_cache("bf16_packed", wide[:, 0, 10:586]), rows.astype(BF16))
    assert_same_bits(import_cache("bf16_packed", wide[:, :1, 10:586]), rows.astype(BF16))


# ---- tiles ----


def quantize_tiles(latent: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return (latent.reshape(-1, 4, 128) / scales[..., None]).astype(E4M3FN).view(np.uint8).reshape(-1, 512)


def test_tile128_values(rows):
    latent, rope = rows[:, :512], rows[:, 512:].astype(BF16)
    scales = (np.abs(latent).reshape(-1, 4, 128).max(-1) / 448).astype(np.float32)
    codes = quantize_tiles(latent, scales)
    cache = pack_tile128(codes, scales, rope)
    assert cache.shape == (NUM_TOKENS, TILE128_BYTES) == (NUM_TOKENS, 656)
    wanted = codes.view(E4M3FN).astype(np.float32).reshape(-1, 4, 128) * scales[..., None]
    wanted = np.concatenate([wanted.reshape(-1, 512), rope.astype(np.float32)], axis=1)
    for given in (cache, cache.view(E4M3FN), cache.reshape(3, 4, 656), cache.reshape(3, 4, 1, 656)):
        axes = (3, 4) if given.ndim > 2 else (NUM_TOKENS,)
        assert_same_bits(dequantize_tile128(given), wanted.reshape(*axes, 576))
        assert_same_bits(import_cache("fp8_tile128_bf16_rope", given), wanted.astype(BF16).reshape(*axes, 576))
    relative = np.abs(wanted[:, :512].reshape(-1, 4, 128) - latent.reshape(-1, 4, 128)).max(-1) / (scales * 448)
    assert relative.max() < 1.001 * 16 / 448  # half a step of E4M3 in its top binade: the scales are those of their own tiles


def test_tile128_with_scales_of_powers_of_two_is_exact_in_bf16(rows):
    scales = np.exp2(np.arange(NUM_TOKENS * 4).reshape(-1, 4) % 40 - 20).astype(np.float32)
    codes = np.random.default_rng(3).integers(0, 256, (NUM_TOKENS, 512), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    cache = pack_tile128(codes, scales, rows[:, 512:].astype(BF16))
    assert_same_bits(import_cache("fp8_tile128_bf16_rope", cache).astype(np.float32), dequantize_tile128(cache))


def test_tile128_keeps_what_is_not_finite_and_every_rope_bit():
    codes = np.full((1, 512), 0x38, np.uint8)
    codes[0, 5] = 0x7F
    rope = np.arange(64, dtype=np.uint16) + np.uint16(0x7F80)  # infinity and NaNs
    cache = pack_tile128(codes, np.array([[1, np.inf, np.nan, 3e38]], np.float32), rope[None].view(BF16))
    found = import_cache("fp8_tile128_bf16_rope", cache)
    assert np.isnan(found[0, 5]) and found[0, 4] == 1
    assert np.isinf(found[0, 128:256]).all() and np.isnan(found[0, 256:384]).all()
    assert found[0, 512] == np.inf and np.isnan(found[0, 513:]).all()


# ---- into a cache on the device ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_through_a_device_cache(emulator_device: Device, rows, layout):
    extra: dict[str, object] = {}
    match layout:
        case "bf16_packed":
            given = rows.astype(BF16)
        case "fp8_packed":
            given, extra = quantize_fp8(rows, scale=0.5).codes, {"scale": 0.5}
        case "mxfp4_two_arrays":
            record = quantize_mxfp4(rows, "ceil")
            given, extra = record.codes, {"scales": np.pad(record.scales, ((0, 244), (0, 6)), constant_values=0xFF)}
        case "fp8_tile128_bf16_rope":
            scales = np.full((NUM_TOKENS, 4), 0.3, np.float32)
            given = pack_tile128(quantize_tiles(rows[:, :512], scales), scales, rows[:, 512:].astype(BF16))
        case _:
            raise AssertionError(f"{layout} is not tested")
    imported = import_cache(layout, given, **extra)
    with PagedKVCache.from_record(emulator_device, imported, page_size=4) as cache:
        assert (cache.num_pages, cache.page_size) == (3, 4)
        stored = cache.to_numpy()
        for name in ("codes", "scales") if isinstance(imported, MXFP4) else ("codes",) if isinstance(imported, FP8) else ():
            assert_same_bits(getattr(stored, name).reshape(NUM_TOKENS, -1), getattr(imported, name))
        values = stored.astype(np.float32) if isinstance(stored, np.ndarray) else stored.dequantize()
        wanted = imported.astype(np.float32) if isinstance(imported, np.ndarray) else imported.dequantize()
        np.testing.assert_array_equal(values.reshape(NUM_TOKENS, 576), wanted)
        np.testing.assert_array_equal(cache.gather([11, 0, 5]), wanted[[11, 0, 5]])


# ---- refused ----

U8 = np.uint8


@pytest.mark.parametrize(
    ("arguments", "extra", "error", "message"),
    [
        (("fp8_ds_mla", np.zeros((4, 656), U8)), {}, ValueError, f"'fp8_ds_mla' is not known; it is one of {', '.join(LAYOUTS)}"),
        ((None, np.zeros((4, 656), U8)), {}, TypeError, "layout is None"),
        (("bf16_packed", np.zeros((4, 576), np.float16)), {}, TypeError, "cache has dtype float16; uint8 or bfloat16 is needed"),
        (("bf16_packed", np.zeros((4, 576), U8)), {}, ValueError, r"cache has shape \(4, 576\); \[total_kv, 1152\]"),
        (("bf16_packed", np.zeros((4, 1152), BF16)), {}, ValueError, r"cache has shape \(4, 1152\); \[total_kv, 576\]"),
        (("bf16_packed", np.zeros((2, 4, 2, 576), BF16)), {}, ValueError, r"cache has shape \(2, 4, 2, 576\)"),
        (("bf16_packed", np.zeros(576, BF16)), {}, ValueError, r"cache has shape \(576,\)"),
        (("bf16_packed", np.zeros((4, 576), BF16)), {"scale": 1.0}, ValueError, "scale is given; layout bf16_packed has none"),
        (("fp8_packed", np.zeros((4, 576), U8)), {}, ValueError, "scale is missing; layout fp8_packed has one"),
        (("fp8_packed", np.zeros((4, 576), U8)), {"scale": 0.0}, ValueError, "scale is 0.0"),
        (("fp8_packed", np.zeros((4, 576), ml_dtypes.float8_e4m3fnuz)), {"scale": 1.0}, TypeError, "float8_e4m3fnuz; uint8 or float8_e4m3fn"),
        (("mxfp4_two_arrays", np.zeros((4, 288), U8)), {}, ValueError, "scales is missing"),
        (("mxfp4_two_arrays", np.zeros((4, 288), U8)), {"scales": np.zeros((4, 18), np.float32)}, TypeError, "scales has dtype float32"),
        (("mxfp4_two_arrays", np.zeros((4, 288), U8)), {"scales": np.zeros((4, 17), U8)}, ValueError, r"scales has shape \(4, 17\)"),
        (("mxfp4_two_arrays", np.zeros((4, 288), U8)), {"scales": np.zeros((3, 24), U8)}, ValueError, r"codes of shape \(4, 288\) need \(4, 18\)"),
        (("mxfp4_two_arrays", np.zeros((4, 306), U8)), {"scales": np.zeros((4, 18), U8)}, ValueError, r"cache has shape \(4, 306\)"),
        (("fp8_tile128_bf16_rope", np.zeros((4, 584), U8)), {}, ValueError, r"cache has shape \(4, 584\); \[total_kv, 656\]"),
        (("fp8_tile128_bf16_rope", np.zeros((4, 656), U8)), {"scales": np.ones(4)}, ValueError, "scales is given; layout fp8_tile128"),
    ],
)  # fmt: skip
def test_what_is_refused(arguments, extra, error, message):
    with pytest.raises(error, match=message):
        import_cache(*arguments, **extra)
