"""Matrix instructions against numpy. Where each element lies in the registers is written out here from the ISA guide's layout tables."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from asm import encodings
from waves import ACCUM_OFFSET, execute, get_v, make_group, random_bytes, set_v

from mla_rt.emulator.decoder import decode
from mla_rt.errors import UnknownInstruction

WAVES = 2
# Item n of lane l of A is A[block][row][k]; of B it is B[block][k][column] with the column in the row's place.
Place = Callable[[int, int], tuple[int, int, int]]


def result_16x16(lane: int, register: int) -> tuple[int, int, int]:
    return register // 4, 4 * (lane // 16) + register % 4, lane % 16


def result_32x32(lane: int, register: int) -> tuple[int, int, int]:
    return register // 16, 8 * (register % 16 // 4) + 4 * (lane // 32) + register % 4, lane % 32


def result_4x4(lane: int, register: int) -> tuple[int, int, int]:
    return lane // 4, register, lane % 4


def result_f64_16x16(lane: int, pair: int) -> tuple[int, int, int]:
    return 0, 4 * pair + lane // 16, lane % 16


def result_f64_4x4(lane: int, pair: int) -> tuple[int, int, int]:
    return lane // 4 % 4, lane // 16, lane % 4


# mnemonic: (dim, depth, blocks, bits of an item, items a lane, place of an item, place of a result, results a lane)
SHAPES: dict[str, tuple[int, int, int, int, int, Place, Place, int]] = {
    "f32_16x16x32_bf16": (16, 32, 1, 16, 8, lambda lane, n: (0, lane % 16, 8 * (lane // 16) + n), result_16x16, 4),
    "f32_16x16x32_f16": (16, 32, 1, 16, 8, lambda lane, n: (0, lane % 16, 8 * (lane // 16) + n), result_16x16, 4),
    "f32_32x32x16_bf16": (32, 16, 1, 16, 8, lambda lane, n: (0, lane % 32, 8 * (lane // 32) + n), result_32x32, 16),
    "f32_32x32x16_f16": (32, 16, 1, 16, 8, lambda lane, n: (0, lane % 32, 8 * (lane // 32) + n), result_32x32, 16),
    "f32_16x16x16_bf16": (16, 16, 1, 16, 4, lambda lane, n: (0, lane % 16, 4 * (lane // 16) + n), result_16x16, 4),
    "f32_16x16x16_f16": (16, 16, 1, 16, 4, lambda lane, n: (0, lane % 16, 4 * (lane // 16) + n), result_16x16, 4),
    "f32_32x32x8_bf16": (32, 8, 1, 16, 4, lambda lane, n: (0, lane % 32, 4 * (lane // 32) + n), result_32x32, 16),
    "f32_32x32x8_f16": (32, 8, 1, 16, 4, lambda lane, n: (0, lane % 32, 4 * (lane // 32) + n), result_32x32, 16),
    "f32_32x32x4_2b_bf16": (32, 4, 2, 16, 4, lambda lane, n: (lane // 32, lane % 32, n), result_32x32, 32),
    "f32_32x32x4_2b_f16": (32, 4, 2, 16, 4, lambda lane, n: (lane // 32, lane % 32, n), result_32x32, 32),
    "f32_16x16x4_4b_bf16": (16, 4, 4, 16, 4, lambda lane, n: (lane // 16, lane % 16, n), result_16x16, 16),
    "f32_16x16x4_4b_f16": (16, 4, 4, 16, 4, lambda lane, n: (lane // 16, lane % 16, n), result_16x16, 16),
    "f32_4x4x4_16b_bf16": (4, 4, 16, 16, 4, lambda lane, n: (lane // 4, lane % 4, n), result_4x4, 4),
    "f32_4x4x4_16b_f16": (4, 4, 16, 16, 4, lambda lane, n: (lane // 4, lane % 4, n), result_4x4, 4),
    "f32_16x16x4_f32": (16, 4, 1, 32, 1, lambda lane, n: (0, lane % 16, lane // 16), result_16x16, 4),
    "f32_32x32x2_f32": (32, 2, 1, 32, 1, lambda lane, n: (0, lane % 32, lane // 32), result_32x32, 16),
    "f32_32x32x1_2b_f32": (32, 1, 2, 32, 1, lambda lane, n: (lane // 32, lane % 32, 0), result_32x32, 32),
    "f32_16x16x1_4b_f32": (16, 1, 4, 32, 1, lambda lane, n: (lane // 16, lane % 16, 0), result_16x16, 16),
    "f32_4x4x1_16b_f32": (4, 1, 16, 32, 1, lambda lane, n: (lane // 4, lane % 4, 0), result_4x4, 4),
    "i32_16x16x64_i8": (16, 64, 1, 8, 16, lambda lane, n: (0, lane % 16, 16 * (lane // 16) + n), result_16x16, 4),
    "i32_32x32x32_i8": (32, 32, 1, 8, 16, lambda lane, n: (0, lane % 32, 16 * (lane // 32) + n), result_32x32, 16),
    "i32_16x16x32_i8": (16, 32, 1, 8, 8, lambda lane, n: (0, lane % 16, 8 * (lane // 16) + n), result_16x16, 4),
    "i32_32x32x16_i8": (32, 16, 1, 8, 8, lambda lane, n: (0, lane % 32, 8 * (lane // 32) + n), result_32x32, 16),
    "i32_32x32x4_2b_i8": (32, 4, 2, 8, 4, lambda lane, n: (lane // 32, lane % 32, n), result_32x32, 32),
    "i32_16x16x4_4b_i8": (16, 4, 4, 8, 4, lambda lane, n: (lane // 16, lane % 16, n), result_16x16, 16),
    "i32_4x4x4_16b_i8": (4, 4, 16, 8, 4, lambda lane, n: (lane // 4, lane % 4, n), result_4x4, 4),
    "f64_16x16x4_f64": (16, 4, 1, 64, 1, lambda lane, n: (0, lane % 16, lane // 16), result_f64_16x16, 4),
    "f64_4x4x4_4b_f64": (4, 4, 4, 64, 1, lambda lane, n: (lane // 4 % 4, lane % 4, lane // 16), result_f64_4x4, 1),
    **{
        f"f32_16x16x32_{a}_{b}": (16, 32, 1, 8, 8, lambda lane, n: (0, lane % 16, 8 * (lane // 16) + n), result_16x16, 4)
        for a in ("fp8", "bf8")
        for b in ("fp8", "bf8")
    },
    **{
        f"f32_32x32x16_{a}_{b}": (32, 16, 1, 8, 8, lambda lane, n: (0, lane % 32, 8 * (lane // 32) + n), result_32x32, 16)
        for a in ("fp8", "bf8")
        for b in ("fp8", "bf8")
    },
}
DTYPES = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "i8": np.int8,
    "fp8": ml_dtypes.float8_e4m3fn,
    "bf8": ml_dtypes.float8_e5m2,
    "fp6": ml_dtypes.float6_e2m3fn,
    "bf6": ml_dtypes.float6_e3m2fn,
    "fp4": ml_dtypes.float4_e2m1fn,
}
BITS = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16, "i8": 8, "fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4}


def patterns_of(values: np.ndarray, kind: str) -> np.ndarray:
    """Bit patterns of values of a type, as uint64."""
    stored = values.astype(DTYPES[kind])
    return stored.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[stored.dtype.itemsize]).astype(np.uint64)


def registers_of(patterns: np.ndarray, bits: int, items: int, place: Place) -> list[np.ndarray]:
    """Patterns [waves, blocks, row, k] -> the operand's registers, each [waves, 64]: items in order as a little-endian string of bits."""
    count = max(1, items * bits // 32)
    registers = [np.zeros((len(patterns), 64), np.uint32) for _ in range(count)]
    for wave in range(len(patterns)):
        for lane in range(64):
            string = 0
            for n in range(items):
                string |= int(patterns[(wave, *place(lane, n))]) << n * bits
            for i in range(count):
                registers[i][wave, lane] = string >> 32 * i & 0xFFFFFFFF
    return registers


def tuple_of(first: int, count: int, bank: str = "v") -> str:
    return f"{bank}{first}" if count == 1 else f"{bank}[{first}:{first + count - 1}]"


def small_integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Exact in every type here, and so are their products and sums: the result does not depend on the order of addition."""
    return rng.integers(-6, 7, shape).astype(np.float64)


@pytest.mark.parametrize("name", SHAPES)
def test_matrix_product(name):
    dim, depth, blocks, bits, items, place, result_place, results = SHAPES[name]
    result_kind, _, *kinds = name.split("_")
    kinds = [kind for kind in kinds if kind in DTYPES]
    kind_a, kind_b = kinds[0], kinds[-1]
    rng = np.random.default_rng(len(name))
    a, b = small_integers(rng, WAVES, blocks, dim, depth), small_integers(rng, WAVES, blocks, depth, dim)
    c = rng.integers(-100, 100, (WAVES, blocks, dim, dim)).astype(np.float64)
    group = make_group(workgroups=WAVES, active=0x1)  # EXEC is ignored
    registers_a = registers_of(patterns_of(a, kind_a), bits, items, place)
    registers_b = registers_of(patterns_of(b, kind_b).swapaxes(2, 3), bits, items, place)
    set_v(group, 100, *registers_a)
    set_v(group, 110, *registers_b)
    dtype = {"f32": np.float32, "f64": np.float64, "i32": np.int32}[result_kind]
    dwords = np.dtype(dtype).itemsize // 4
    lanes = np.zeros((results, WAVES, 64), dtype)
    for r in range(results):
        for lane in range(64):
            block, row, column = result_place(lane, r)
            lanes[r, :, lane] = c[:, block, row, column]
    for r in range(results):
        set_v(group, 10 + dwords * r, *(lanes[r][..., None].view(np.uint32)[..., i] for i in range(dwords)))
    total = results * dwords
    sources = f"{tuple_of(100, len(registers_a))}, {tuple_of(110, len(registers_b))}"
    execute(group, f"v_mfma_{name} {tuple_of(50, total)}, {sources}, {tuple_of(10, total)}\nv_mfma_{name} {tuple_of(10, total)}, {sources}, 0")
    for first, expected in ((50, a @ b + c), (10, a @ b)):
        for r in range(results):
            words = np.stack([get_v(group, first + dwords * r + i) for i in range(dwords)], axis=-1)
            found = words.view(dtype)[..., 0]
            for lane in range(64):
                block, row, column = result_place(lane, r)
                np.testing.assert_array_equal(found[:, lane], expected[:, block, row, column])


def f8f6f4_place(shape: str, kind: str) -> Place:
    """16x16x128: lane group g = l/16 holds k = 32g.. of 4- and 6-bit types, and of 8-bit types 16g.. in v0-3 and 64 + 16g.. in v4-7.

    32x32x64: the same with g = l/32 and 32 + 16g.
    """
    dim, half = (16, 64) if shape == "16x16x128" else (32, 32)
    if BITS[kind] == 8:
        return lambda lane, n: (0, lane % dim, 16 * (lane // dim) + n if n < 16 else half + 16 * (lane // dim) + n - 16)
    return lambda lane, n: (0, lane % dim, 32 * (lane // dim) + n)


FORMATS = ["fp8", "bf8", "fp6", "bf6", "fp4"]
F8F6F4 = {"16x16x128": (16, 128, result_16x16, 4), "32x32x64": (32, 64, result_32x32, 16)}


def random_codes(rng: np.random.Generator, kind: str, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes of finite values, and these values; bf8 without its extremes, so that sums of products are exact in float64."""
    codes = rng.integers(0, 1 << BITS[kind], shape)
    magnitude = np.abs(codes.astype(np.uint8).view(DTYPES[kind]).astype(np.float64))
    usable = (magnitude <= 512) & (magnitude >= 2.0**-6) if kind == "bf8" else np.isfinite(magnitude)
    codes = np.where(usable, codes, 0)
    return codes, codes.astype(np.uint8).view(DTYPES[kind]).astype(np.float64)


def f8f6f4_operands(shape: str, kind_a: str, kind_b: str, seed: int):
    """(group, text of the operands, A, B): A and B are set at v[20:…] and v[40:…]."""
    dim, depth, _, _ = F8F6F4[shape]
    rng = np.random.default_rng(seed)
    codes_a, a = random_codes(rng, kind_a, WAVES, 1, dim, depth)
    codes_b, b = random_codes(rng, kind_b, WAVES, 1, dim, depth)
    group = make_group(workgroups=WAVES)
    set_v(group, 20, *registers_of(codes_a, BITS[kind_a], 32, f8f6f4_place(shape, kind_a)))
    set_v(group, 40, *registers_of(codes_b, BITS[kind_b], 32, f8f6f4_place(shape, kind_b)))
    return group, f"v[20:{19 + BITS[kind_a]}], v[40:{39 + BITS[kind_b]}]", a[:, 0], b[:, 0].swapaxes(1, 2)


def result_matrix(group, shape: str, first: int) -> np.ndarray:
    dim, _, place, results = F8F6F4[shape]
    matrix = np.full((WAVES, dim, dim), np.inf)
    for r in range(results):
        for lane in range(64):
            _, row, column = place(lane, r)
            matrix[:, row, column] = get_v(group, first + r, np.float32)[:, lane]
    return matrix


@pytest.mark.parametrize("kind_b", FORMATS)
@pytest.mark.parametrize("kind_a", FORMATS)
@pytest.mark.parametrize("shape", F8F6F4)
def test_f8f6f4_formats(shape, kind_a, kind_b):
    """All pairs of formats. The sums are exact in float64, so the float32 result is determined to the bit."""
    group, operands, a, b = f8f6f4_operands(shape, kind_a, kind_b, FORMATS.index(kind_a) * 5 + FORMATS.index(kind_b))
    results = F8F6F4[shape][3]
    execute(group, f"v_mfma_f32_{shape}_f8f6f4 v[0:{results - 1}], {operands}, 1.0 cbsz:{FORMATS.index(kind_a)} blgp:{FORMATS.index(kind_b)}")
    np.testing.assert_array_equal(result_matrix(group, shape, 0), (a @ b + 1).astype(np.float32))


def scale_registers(scales: np.ndarray, byte: int, seed: int) -> np.ndarray:
    """Scale codes [waves, row, block] -> the register: block b of row r is the chosen byte of lane r + rows * b; the other bytes are random."""
    waves, rows, _ = scales.shape
    words = random_bytes(seed, waves * 256).view(np.uint32).reshape(waves, 64).copy()
    for lane in range(64):
        words[:, lane] = words[:, lane] & ~np.uint32(0xFF << 8 * byte) | scales[:, lane % rows, lane // rows].astype(np.uint32) << np.uint32(8 * byte)
    return words


def scaled(matrix: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of `matrix` times 2**(scale - 127) per block of 32 columns."""
    return matrix * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=2)


@pytest.mark.parametrize("kind_b", FORMATS)
@pytest.mark.parametrize("kind_a", FORMATS)
@pytest.mark.parametrize("shape", F8F6F4)
def test_f8f6f4_block_scales(shape, kind_a, kind_b):
    dim, depth, _, results = F8F6F4[shape]
    index = FORMATS.index(kind_a) * 5 + FORMATS.index(kind_b)
    group, operands, a, b = f8f6f4_operands(shape, kind_a, kind_b, 100 + index)
    rng = np.random.default_rng(200 + index)
    scales_a, scales_b = (rng.integers(125, 130, (WAVES, dim, depth // 32)) for _ in range(2))
    byte_a, byte_b = index % 4, index // 4 % 4
    set_v(group, 60, scale_registers(scales_a, byte_a, 1), scale_registers(scales_b, byte_b, 2))
    select = f"op_sel:[{byte_a & 1},{byte_b & 1},0] op_sel_hi:[{byte_a >> 1},{byte_b >> 1},0]"
    formats = f"cbsz:{FORMATS.index(kind_a)} blgp:{FORMATS.index(kind_b)}"
    execute(group, f"v_mfma_scale_f32_{shape}_f8f6f4 v[0:{results - 1}], {operands}, 2.0, v60, v61 {select} {formats}")
    expected = scaled(a, scales_a) @ scaled(b.swapaxes(1, 2), scales_b).swapaxes(1, 2) + 2
    np.testing.assert_array_equal(result_matrix(group, shape, 0), expected.astype(np.float32))


@pytest.mark.parametrize("shape", F8F6F4)
def test_extreme_scales(shape):
    """Code 0 is 2^-127 and not zero, 254 is 2^127, 255 makes the row or column of its block NaN and no other."""
    dim, depth, _, results = F8F6F4[shape]
    group, operands, a, b = f8f6f4_operands(shape, "fp4", "fp4", 7)
    scales_a, scales_b = np.zeros((WAVES, dim, depth // 32)), np.full((WAVES, dim, depth // 32), 254)
    set_v(group, 60, scale_registers(scales_a, 0, 1), scale_registers(scales_b, 0, 2))
    text = f"v_mfma_scale_f32_{shape}_f8f6f4 v[0:{results - 1}], {operands}, 0, v60, v61 op_sel_hi:[0,0,0] cbsz:4 blgp:4"
    execute(group, text)
    np.testing.assert_array_equal(result_matrix(group, shape, 0), (a @ b).astype(np.float32))
    scales_a[1, 5, depth // 32 - 1] = 255
    set_v(group, 60, scale_registers(scales_a, 0, 1))
    execute(group, text)
    nan = np.zeros((WAVES, dim, dim), np.bool_)
    nan[1, 5] = True
    np.testing.assert_array_equal(np.isnan(result_matrix(group, shape, 0)), nan)


def test_infinities_and_nans_propagate():
    group = make_group(workgroups=WAVES)
    a, b = np.ones((WAVES, 1, 16, 32)), np.ones((WAVES, 1, 32, 16))
    a[0, 0, 3, 7], a[1, 0, 4, 0], b[1, 0, 0, 5], b[0, 0, 31, 15] = np.inf, np.inf, 0, np.nan
    place = SHAPES["f32_16x16x32_bf16"][5]
    set_v(group, 20, *registers_of(patterns_of(a, "bf16"), 16, 8, place))
    set_v(group, 24, *registers_of(patterns_of(b, "bf16").swapaxes(2, 3), 16, 8, place))
    execute(group, "v_mfma_f32_16x16x32_bf16 v[0:3], v[20:23], v[24:27], 0")
    found = np.zeros((WAVES, 16, 16), np.float32)
    for r in range(4):
        for lane in range(64):
            found[:, 4 * (lane // 16) + r, lane % 16] = get_v(group, r, np.float32)[:, lane]
    expected = np.full((WAVES, 16, 16), 32.0)
    expected[0, 3], expected[1, 4], expected[1, :, 5], expected[0, :, 15] = np.inf, np.inf, 31, np.nan
    expected[1, 4, 5] = np.nan  # inf * 0
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("a", "b", "c", "d"), [("a", "a", "v", "v"), ("a", "v", "a", "a"), ("v", "a", "v", "v"), ("v", "v", "a", "a")])
def test_accumulator_banks(a, b, c, d):
    """A and B choose their half of the register file one by one, C and D together."""
    rng = np.random.default_rng(1)
    left, right = small_integers(rng, WAVES, 1, 16, 32), small_integers(rng, WAVES, 1, 32, 16)
    group = make_group(workgroups=WAVES)
    base = {"v": 0, "a": ACCUM_OFFSET}
    place = SHAPES["f32_16x16x32_bf16"][5]
    set_v(group, base[a] + 20, *registers_of(patterns_of(left, "bf16"), 16, 8, place))
    set_v(group, base[b] + 24, *registers_of(patterns_of(right, "bf16").swapaxes(2, 3), 16, 8, place))
    set_v(group, base[c] + 28, *[np.full(64, 8.0, np.float32).view(np.uint32)] * 4)
    execute(group, f"v_mfma_f32_16x16x32_bf16 {d}[0:3], {a}[20:23], {b}[24:27], {c}[28:31]")
    expected = (left @ right)[:, 0] + 8
    for r in range(4):
        for lane in range(64):
            np.testing.assert_array_equal(get_v(group, base[d] + r, np.float32)[:, lane], expected[:, 4 * (lane // 16) + r, lane % 16])


def test_result_may_overwrite_the_operands():
    rng = np.random.default_rng(2)
    left, right = small_integers(rng, WAVES, 1, 16, 32), small_integers(rng, WAVES, 1, 32, 16)
    group = make_group(workgroups=WAVES)
    place = SHAPES["f32_16x16x32_bf16"][5]
    set_v(group, 0, *registers_of(patterns_of(left, "bf16"), 16, 8, place))
    set_v(group, 4, *registers_of(patterns_of(right, "bf16").swapaxes(2, 3), 16, 8, place))
    execute(group, "v_mfma_f32_16x16x32_bf16 v[0:3], v[0:3], v[4:7], 0")
    np.testing.assert_array_equal(get_v(group, 1, np.float32)[:, 17], (left @ right)[:, 0, 5, 1])


def test_integer_accumulation_wraps():
    group = make_group()
    set_v(group, 0, *[0x7F7F7F7F] * 4)
    set_v(group, 4, *[0x7F7F7F7F] * 4)
    set_v(group, 8, *[0x7FFFFFFF] * 4)
    execute(group, "v_mfma_i32_16x16x64_i8 v[12:15], v[0:3], v[4:7], v[8:11]")
    assert (get_v(group, 12) == 0x7FFFFFFF + 64 * 127 * 127).all()


def test_one_rounding():
    """2**24 + 1 + 1: two single-precision additions would lose both ones."""
    group = make_group()
    set_v(group, 0, f := np.full(64, 1.0, np.float32).view(np.uint32))
    set_v(group, 1, np.where(np.arange(64) < 32, f, 0))  # k = 0 and 1 hold one, k = 2 and 3 zero
    set_v(group, 4, *[np.full(64, 2.0**24, np.float32).view(np.uint32)] * 4)
    execute(group, "v_mfma_f32_16x16x4_f32 v[8:11], v0, v1, v[4:7]")
    assert (get_v(group, 8, np.float32) == 2.0**24 + 2).all()


@pytest.mark.parametrize(("modifiers", "why"), [("cbsz:5", "format"), ("blgp:7", "format")])
def test_reserved_formats_are_refused(modifiers, why):
    ((_, code),) = encodings(("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0",))
    word = int.from_bytes(code, "little") | ({"cbsz:5": 5 << 8, "blgp:7": 7 << 61}[modifiers])
    with pytest.raises(UnknownInstruction, match=why):
        decode(word.to_bytes(8, "little"), 0, ACCUM_OFFSET)
