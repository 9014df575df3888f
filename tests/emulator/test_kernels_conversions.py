"""Compiled conversions, one for each conversion instruction, against numpy and ml_dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from asm import instructions_of
from compiled import compiled_module

from mla_rt.emulator.convert import VOP1_CONVERT, VOP3_CONVERT
from mla_rt.emulator.vector_float import FLOAT_VOP1, FLOAT_VOP3
from mla_rt.resources import Module

LANES = 64
BF16 = ml_dtypes.bfloat16
WIDE: dict[str, type] = {"f32": np.float32, "f16": np.float16, "bf16": BF16}
# Type, bits, and whether there are infinity or NaN for what is too large; the others saturate.
NARROW: dict[str, tuple[type, int, bool]] = {
    "fp8": (ml_dtypes.float8_e4m3fn, 8, True),
    "bf8": (ml_dtypes.float8_e5m2, 8, True),
    "fp6": (ml_dtypes.float6_e2m3fn, 6, False),
    "bf6": (ml_dtypes.float6_e3m2fn, 6, False),
    "fp4": (ml_dtypes.float4_e2m1fn, 4, False),
}
A_LANE = {"fp8": 4, "bf8": 4, "fp6": 32, "bf6": 32, "fp4": 8}  # elements
SCALES = (1.0, 0.125, 64.0)


module = compiled_module("conversions")


def convert(module: Module, name: str, source: np.ndarray, nbytes: int, **values: Any) -> np.ndarray:
    """The bytes that the kernel makes of these (and, where it takes one, of this scale and noise)."""
    device = module.device
    buffers = {"in": device.to_device(np.ascontiguousarray(source).view(np.uint8)), "out": device.allocate(nbytes)}
    if "noise" in values:
        buffers["noise"] = device.to_device(values.pop("noise"))
    device.launch(module.kernel(name), 1, **buffers, **values)
    result = buffers["out"].download(nbytes, np.uint8)
    for buffer in buffers.values():
        buffer.free()
    return result


def packed_bytes(name: str) -> int:
    """Of a lane's elements in memory: a vector of six dwords takes the room of eight."""
    return 32 if NARROW[name][1] == 6 else A_LANE[name] * NARROW[name][1] // 8


def packed(name: str, codes: np.ndarray) -> np.ndarray:
    """uint8 codes [64, n] -> bytes [64, packed_bytes], the first element in the lowest bits."""
    as_bits = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., : NARROW[name][1]]
    dense = np.packbits(as_bits.reshape(LANES, -1), axis=-1, bitorder="little")
    return np.pad(dense, ((0, 0), (0, packed_bytes(name) - dense.shape[1])))


def unpacked(name: str, raw: np.ndarray) -> np.ndarray:
    """Bytes -> uint8 codes [64, n]."""
    bits = NARROW[name][1]
    as_bits = np.unpackbits(raw.reshape(LANES, -1), axis=-1, bitorder="little")[:, : A_LANE[name] * bits]
    return np.packbits(as_bits.reshape(LANES, -1, bits), axis=-1, bitorder="little")[..., 0]


def spread(seed: int, count: int, dtype: type) -> np.ndarray:
    """Normal values [64, count] from below the smallest to above the largest of the narrow formats."""
    random = np.random.default_rng(seed)
    return (random.standard_normal((LANES, count)) * 2.0 ** random.integers(-10, 9, (LANES, count))).astype(dtype)


def decoded(name: str, codes: np.ndarray) -> np.ndarray:
    return codes.view(NARROW[name][0]).astype(np.float64)


def encoded(name: str, values: np.ndarray) -> np.ndarray:
    """Nearest even; what is too large as the format has it."""
    dtype, _, has_special = NARROW[name]
    if not has_special:
        largest = float(ml_dtypes.finfo(dtype).max)
        values = np.clip(values, -largest, largest)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32).astype(dtype).view(np.uint8)


def toward_zero(name: str, values: np.ndarray) -> np.ndarray:
    """The codes of values within range, rounded toward zero."""
    codes = encoded(name, values)
    return np.where(np.abs(decoded(name, codes)) > np.abs(values), codes - 1, codes).astype(np.uint8)


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal values and signs of zero; NaN equals NaN."""
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(expected)[numbers])


def assert_same_codes(name: str, got: np.ndarray, expected: np.ndarray) -> None:
    nan = np.isnan(decoded(name, expected))
    np.testing.assert_array_equal(np.where(nan, 0, got), np.where(nan, 0, expected))
    assert np.isnan(decoded(name, got[nan])).all()


def test_every_conversion_is_tested(module):
    found = {instruction.mnemonic for instruction in instructions_of(module.code_object) if instruction.mnemonic.startswith("v_cvt")}
    rows = [row for table in (VOP1_CONVERT, VOP3_CONVERT, FLOAT_VOP1, FLOAT_VOP3) for row in table.values()]
    assert found == {row.mnemonic for row in rows if row.mnemonic.startswith("v_cvt")}
    tested = {name for case in (WIDENING, SINGLE, NARROWING, INTERLEAVED, RANDOM, PLAIN_RANDOM) for name in case} | set(STANDARD)
    assert set(module.kernels) == tested


WIDENING = [f"widen_{n}_{w}" for n in NARROW for w in WIDE] + ["plain_fp8_f32", "plain_bf8_f32"]
SINGLE = [f"single_{n}_{w}" for n in ("fp8", "bf8") for w in ("f32", "f16")] + ["plain_single_fp8_f32", "plain_single_bf8_f32"]
INTERLEAVED = ["interleaved_f32_fp6", "interleaved_f32_bf6"]
NARROWING = [f"narrow_{w}_{n}" for n in NARROW for w in WIDE if (w, n) not in (("f32", "fp6"), ("f32", "bf6"))] + ["plain_f32_fp8", "plain_f32_bf8"]
RANDOM = [f"random_{w}_{n}" for n in NARROW for w in WIDE] + ["plain_random_f32_fp8", "plain_random_f32_bf8"]
PLAIN_RANDOM = ["plain_random_f32_bf16", "plain_random_f32_f16"]


def scales_of(name: str) -> tuple[float, ...]:
    return (1.0,) if name.startswith("plain") else SCALES


def scale_argument(name: str, scale: float) -> dict[str, Any]:
    return {} if name.startswith("plain") else {"scale": np.float32(scale)}


@pytest.mark.parametrize("name", WIDENING + SINGLE)
def test_widening(module, name):
    narrow, wide = name.split("_")[-2:]
    _, bits, _ = NARROW[narrow]
    random = np.random.default_rng(len(name))
    codes = random.integers(0, 1 << bits, (LANES, A_LANE[narrow]), dtype=np.uint8)
    codes.reshape(-1)[: 1 << bits] = np.arange(1 << bits)[: codes.size]  # each once
    dtype = np.dtype(WIDE[wide])
    for scale in scales_of(name):
        raw = convert(module, name, packed(narrow, codes), codes.size * dtype.itemsize, **scale_argument(name, scale))
        with np.errstate(over="ignore"):
            assert_same(raw.view(dtype).reshape(codes.shape), (decoded(narrow, codes) * scale).astype(np.float32).astype(dtype))


@pytest.mark.parametrize("name", NARROWING)
def test_narrowing(module, name):
    wide, narrow = name.split("_")[-2:]
    for seed, scale in enumerate(scales_of(name)):
        values = spread(seed, A_LANE[narrow], WIDE[wide])
        raw = convert(module, name, values, LANES * packed_bytes(narrow), **scale_argument(name, scale))
        assert_same_codes(narrow, unpacked(narrow, raw), encoded(narrow, values.astype(np.float64) / scale))


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_narrowing(module, name):
    narrow = name.split("_")[-1]
    values = spread(1, 32, np.float32)
    raw = convert(module, name, values, LANES * packed_bytes(narrow), scale=np.float32(2.0))
    in_turn = values.reshape(LANES, 2, 16).swapaxes(1, 2).reshape(LANES, 32)
    assert_same_codes(narrow, unpacked(narrow, raw), encoded(narrow, in_turn.astype(np.float64) / 2))


@pytest.mark.parametrize("name", RANDOM)
def test_random_rounding(module, name):
    """Without noise toward zero; with any noise to one of the two neighbours, now this and now that."""
    wide, narrow = name.split("_")[-2:]
    dtype = NARROW[narrow][0]
    largest, smallest = float(ml_dtypes.finfo(dtype).max), float(ml_dtypes.finfo(dtype).smallest_subnormal)
    for seed, scale in enumerate(scales_of(name)):
        within = np.clip(spread(seed, A_LANE[narrow], np.float64), -0.9 * largest, 0.9 * largest)
        values = (within * scale).astype(WIDE[wide])
        exact = values.astype(np.float64) / scale
        down = toward_zero(narrow, exact)

        def codes(noise: np.ndarray, values: np.ndarray = values, scale: float = scale) -> np.ndarray:
            return unpacked(narrow, convert(module, name, values, LANES * packed_bytes(narrow), noise=noise, **scale_argument(name, scale)))

        np.testing.assert_array_equal(codes(np.zeros(LANES, np.uint32)), down)
        got = codes(np.random.default_rng(seed).integers(0, 1 << 32, LANES, dtype=np.uint32))
        inexact = decoded(narrow, down) != exact
        assert ((got == down) | (inexact & (got == down + 1))).all()
        between = inexact & (np.abs(exact) > smallest)
        assert 0.2 < (got != down)[between].mean() < 0.8


@pytest.mark.parametrize("name", PLAIN_RANDOM)
def test_random_rounding_to_16_bits(module, name):
    values = spread(3, 2, np.float32)
    raw = convert(module, name, values, LANES * 4, noise=np.zeros(LANES, np.uint32)).view(np.uint16).reshape(LANES, 2)
    if name.endswith("bf16"):
        np.testing.assert_array_equal(raw, values.view(np.uint32) >> 16)
    else:
        nearest = values.astype(np.float16)
        down = np.where(np.abs(nearest.astype(np.float32)) > np.abs(values), np.nextafter(nearest, np.float16(0)), nearest)
        np.testing.assert_array_equal(raw, down.view(np.uint16))


def integers(dtype: type) -> np.ndarray:
    limits = np.iinfo(dtype)
    random = np.random.default_rng(limits.bits)
    values = random.integers(limits.min, limits.max, (LANES, 1), endpoint=True)
    values[:6, 0] = limits.min, limits.max, 0, 1, limits.max - 1, limits.max // 2 + 1
    return values.astype(dtype)


def floats(dtype: type, largest: float, count: int = 1) -> np.ndarray:
    """Values beyond ± largest, halves, zeros, infinities and NaN among them."""
    random = np.random.default_rng(count)
    values = random.uniform(-1.25 * largest, 1.25 * largest, (LANES, count))
    values[:8, 0] = 0.0, -0.0, 0.5, -0.5, 2.5, -np.inf, np.inf, np.nan
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def to_integer(dtype: type, rounding: Callable[[np.ndarray], np.ndarray] = np.trunc) -> Callable[[np.ndarray], np.ndarray]:
    """Rounded, to the nearest of the type's values, NaN to 0."""
    limits = np.iinfo(dtype)

    def run(values: np.ndarray) -> np.ndarray:
        wide = rounding(np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=2.0**40, neginf=-(2.0**40)))
        return np.clip(wide, limits.min, limits.max).astype(dtype)

    return run


def as_type(dtype: type) -> Callable[[np.ndarray], np.ndarray]:
    def run(values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(dtype)

    return run


def normalized(dtype: type) -> Callable[[np.ndarray], np.ndarray]:
    largest, lowest = np.iinfo(dtype).max, 0 if dtype is np.uint16 else -1
    return lambda values: np.rint(np.nan_to_num(np.clip(values.astype(np.float64), lowest, 1), nan=0.0) * largest).astype(dtype)


def half_toward_zero(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float16)
    beyond = np.isinf(nearest) & np.isfinite(values)
    nearest = np.where(beyond, np.copysign(np.float16(65504), values).astype(np.float16), nearest)
    return np.where(np.abs(nearest.astype(np.float64)) > np.abs(values.astype(np.float64)), np.nextafter(nearest, np.float16(0)), nearest)


# kernel -> operands [64, n] and the function of each element
F16_RANGE, I32_RANGE, U32_RANGE = 65504.0, 2.0**31, 2.0**32
STANDARD: dict[str, tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]] = {
    "plain_f32_bf16": (floats(np.float32, 3.4e38, 2), as_type(BF16)),
    "plain_f32_f16": (floats(np.float32, F16_RANGE, 2), as_type(np.float16)),
    "plain_bf16_f32": (floats(BF16, 1e30), as_type(np.float32)),
    "convert_f32_f16": (floats(np.float32, F16_RANGE), as_type(np.float16)),
    "convert_f16_f32": (floats(np.float16, 1e4), as_type(np.float32)),
    "convert_f32_f64": (floats(np.float32, 1e30), as_type(np.float64)),
    "convert_f64_f32": (floats(np.float64, 3.4e38), as_type(np.float32)),
    "convert_i32_f32": (integers(np.int32), as_type(np.float32)),
    "convert_u32_f32": (integers(np.uint32), as_type(np.float32)),
    "convert_i32_f64": (integers(np.int32), as_type(np.float64)),
    "convert_u32_f64": (integers(np.uint32), as_type(np.float64)),
    "convert_i16_f16": (integers(np.int16), lambda values: values.astype(np.float64).astype(np.float16)),
    "convert_u16_f16": (integers(np.uint16) // 2, lambda values: values.astype(np.float64).astype(np.float16)),
    "convert_u8_f32": (integers(np.uint32).view(np.uint8).reshape(LANES, 4), as_type(np.float32)),
    "convert_f32_i32": (floats(np.float32, I32_RANGE), to_integer(np.int32)),
    "convert_f32_u32": (floats(np.float32, U32_RANGE), to_integer(np.uint32)),
    "convert_f64_i32": (floats(np.float64, I32_RANGE), to_integer(np.int32)),
    "convert_f64_u32": (floats(np.float64, U32_RANGE), to_integer(np.uint32)),
    "convert_f16_i16": (floats(np.float16, 2.0**15), to_integer(np.int16)),
    "convert_f16_u16": (floats(np.float16, 2.0**15), to_integer(np.uint16)),
    "round_down_i32": (floats(np.float32, 100.0), to_integer(np.int32, np.floor)),
    "round_half_up_i32": (floats(np.float32, 100.0), to_integer(np.int32, lambda values: np.floor(values + 0.5))),
    "sixteenths_f32": (integers(np.uint32), lambda values: (((values & 15) ^ 8).astype(np.int64) - 8) / 16),
    "pack_toward_zero_f16": (floats(np.float32, F16_RANGE, 2), half_toward_zero),
    "pack_normalized_i16": (floats(np.float32, 1.0, 2), normalized(np.int16)),
    "pack_normalized_u16": (floats(np.float32, 1.0, 2), normalized(np.uint16)),
    "pack_normalized_halves_i16": (floats(np.float16, 1.0, 2), normalized(np.int16)),
    "pack_normalized_halves_u16": (floats(np.float16, 1.0, 2), normalized(np.uint16)),
    "pack_bytes_u8": (floats(np.float32, 255.0, 4), to_integer(np.uint8, np.rint)),
}
RESULT = {"u8": np.uint8, "i16": np.int16, "u16": np.uint16, "i32": np.int32, "u32": np.uint32, "f64": np.float64, **WIDE}


@pytest.mark.parametrize("name", STANDARD)
def test_between_standard_types(module, name):
    operands, expected = STANDARD[name]
    dtype = np.dtype(RESULT[name.split("_")[-1]])
    raw = convert(module, name, operands, operands.size * dtype.itemsize)
    assert_same(raw.view(dtype).reshape(operands.shape), expected(operands))
