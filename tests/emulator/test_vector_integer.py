"""Integer and bitwise vector instructions against Python integers."""

from __future__ import annotations

import itertools
import random

import pytest
from asm import encodings
from vectors import check, signed

M32, M64 = 2**32 - 1, 2**64 - 1
VALUES = [
    0,
    1,
    2,
    31,
    32,
    33,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x10000,
    0x7FFFFF,
    0x800000,
    0xFFFFFF,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFF,
]
_random = random.Random(1)
RANDOM = [_random.getrandbits(64) for _ in range(600)]
SHIFTS = [0, 1, 7, 15, 16, 31, 32, 33, 63, 64, 0xFFFFFFFF]


def s24(value: int) -> int:
    return signed(value, 24)


def saturated(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


def sext(value: int, bits: int) -> int:
    return signed(value, bits) if bits else 0


def perm(a: int, b: int, selector: int) -> int:
    data = (a << 32 | b).to_bytes(8, "little")
    result = []
    for pick in selector.to_bytes(4, "little"):
        if pick < 8:
            result.append(data[pick])
        elif pick < 12:
            result.append(0xFF if data[2 * (pick - 8) + 1] & 0x80 else 0)
        else:
            result.append(0 if pick == 12 else 0xFF)
    return int.from_bytes(bytes(result), "little")


def halves(value: int) -> tuple[int, int]:
    return value & 0xFFFF, value >> 16 & 0xFFFF


def sad(a: int, b: int, masked: bool = False) -> int:
    return sum(abs(x - y) for x, y in zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True) if y or not masked)


def dot(a: int, b: int, c: int, bits: int) -> int:
    return c + sum(signed(a >> i, bits) * signed(b >> i, bits) for i in range(0, 32, bits))


def leading(value: int) -> int:
    return 32 - value.bit_length() if value else M32


def leading_sign(value: int) -> int:
    flipped = value ^ (M32 if value >> 31 else 0)
    return 32 - flipped.bit_length() if flipped else M32


def bitop3(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


def median(*values: int) -> int:
    return sorted(values)[1]


# text -> (source bits, result bits, function of unsigned integers; the result is taken modulo the result's width)
CASES = {
    "v_mov_b32_e32 v6, v10": ((32,), 32, lambda a: a),
    "v_mov_b64_e32 v[6:7], v[10:11]": ((64,), 64, lambda a: a),
    "v_not_b32_e32 v6, v10": ((32,), 32, lambda a: ~a),
    "v_bfrev_b32_e32 v6, v10": ((32,), 32, lambda a: int(f"{a:032b}"[::-1], 2)),
    "v_ffbh_u32_e32 v6, v10": ((32,), 32, leading),
    "v_ffbl_b32_e32 v6, v10": ((32,), 32, lambda a: (a & -a).bit_length() - 1),
    "v_ffbh_i32_e32 v6, v10": ((32,), 32, leading_sign),
    "v_prng_b32_e32 v6, v10": ((32,), 32, lambda a: (a << 1) ^ (197 if a >> 31 else 0)),
    "v_sat_pk_u8_i16_e32 v6, v10": ((32,), 32, lambda a: saturated(signed(a, 16), 0, 255) | saturated(signed(a >> 16, 16), 0, 255) << 8),
    "v_add_u32_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: a + b),
    "v_sub_u32_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: a - b),
    "v_subrev_u32_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: b - a),
    "v_add_u32_e64 v6, v10, v12 clamp": ((32, 32), 32, lambda a, b: saturated(a + b, 0, M32)),
    "v_sub_u32_e64 v6, v10, v12 clamp": ((32, 32), 32, lambda a, b: saturated(a - b, 0, M32)),
    "v_add_i32 v6, v10, v12": ((32, 32), 32, lambda a, b: a + b),
    "v_add_i32 v6, v10, v12 clamp": ((32, 32), 32, lambda a, b: saturated(signed(a) + signed(b), -(2**31), 2**31 - 1)),
    "v_sub_i32 v6, v10, v12 clamp": ((32, 32), 32, lambda a, b: saturated(signed(a) - signed(b), -(2**31), 2**31 - 1)),
    "v_mul_i32_i24_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: s24(a) * s24(b)),
    "v_mul_hi_i32_i24_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: s24(a) * s24(b) >> 32),
    "v_mul_u32_u24_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "v_mul_hi_u32_u24_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32),
    "v_min_i32_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: min(signed(a), signed(b))),
    "v_max_i32_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: max(signed(a), signed(b))),
    "v_min_u32_e32 v6, v10, v12": ((32, 32), 32, min),
    "v_max_u32_e32 v6, v10, v12": ((32, 32), 32, max),
    "v_lshrrev_b32_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: b >> (a & 31)),
    "v_ashrrev_i32_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: signed(b) >> (a & 31)),
    "v_lshlrev_b32_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: b << (a & 31)),
    "v_and_b32_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: a & b),
    "v_or_b32_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: a | b),
    "v_xor_b32_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: a ^ b),
    "v_xnor_b32_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: ~(a ^ b)),
    "v_add_u16_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: (a + b) & 0xFFFF),
    "v_add_u16_e64 v6, v10, v12 clamp": ((32, 32), 32, lambda a, b: saturated((a & 0xFFFF) + (b & 0xFFFF), 0, 0xFFFF)),
    "v_sub_u16_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: (a - b) & 0xFFFF),
    "v_mul_lo_u16_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: (a * b) & 0xFFFF),
    "v_lshlrev_b16_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: (b << (a & 15)) & 0xFFFF),
    "v_lshrrev_b16_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: (b & 0xFFFF) >> (a & 15)),
    "v_ashrrev_i16_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: (signed(b, 16) >> (a & 15)) & 0xFFFF),
    "v_max_i16_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: max(signed(a, 16), signed(b, 16)) & 0xFFFF),
    "v_min_u16_e32 v6, v10, v12": ((32, 32), 32, lambda a, b: min(a & 0xFFFF, b & 0xFFFF)),
    "v_mad_i32_i24 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: s24(a) * s24(b) + c),
    "v_mad_i32_i24 v6, v10, v12, v14 clamp": ((32, 32, 32), 32, lambda a, b, c: saturated(s24(a) * s24(b) + signed(c), -(2**31), 2**31 - 1)),
    "v_mad_u32_u24 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    "v_mad_u32_u24 v6, v10, v12, v14 clamp": ((32, 32, 32), 32, lambda a, b, c: saturated((a & 0xFFFFFF) * (b & 0xFFFFFF) + c, 0, M32)),
    "v_bfe_u32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1)),
    "v_bfe_i32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: sext(signed(a) >> (b & 31), c & 31)),
    "v_bfi_b32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: (a & b) | (~a & c)),
    "v_alignbit_b32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: (a << 32 | b) >> (c & 31)),
    "v_alignbyte_b32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: (a << 32 | b) >> 8 * (c & 3)),
    "v_min3_i32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: min(signed(a), signed(b), signed(c))),
    "v_max3_i32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: max(signed(a), signed(b), signed(c))),
    "v_min3_u32 v6, v10, v12, v14": ((32, 32, 32), 32, min),
    "v_max3_u32 v6, v10, v12, v14": ((32, 32, 32), 32, max),
    "v_med3_i32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: median(signed(a), signed(b), signed(c))),
    "v_med3_u32 v6, v10, v12, v14": ((32, 32, 32), 32, median),
    "v_sad_u8 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: sad(a, b) + c),
    "v_sad_hi_u8 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: (sad(a, b) << 16) + c),
    "v_msad_u8 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: sad(a, b, True) + c),
    "v_sad_u16 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: sum(abs(x - y) for x, y in zip(halves(a), halves(b), strict=True)) + c),
    "v_sad_u32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: abs(a - b) + c),
    "v_perm_b32 v6, v10, v12, v14": ((32, 32, 32), 32, perm),
    "v_xad_u32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: (a << (b & 31)) + c),
    "v_add_lshl_u32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: (a + b) << (c & 31)),
    "v_add3_u32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: a + b + c),
    "v_lshl_or_b32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: (a << (b & 31)) | c),
    "v_and_or_b32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: (a & b) | c),
    "v_or3_b32 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: a | b | c),
    "v_mad_u32_u16 v6, v10, v12, v14 op_sel:[0,1,0,0]": ((32, 32, 32), 32, lambda a, b, c: (a & 0xFFFF) * (b >> 16) + c),
    "v_mad_i32_i16 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: signed(a, 16) * signed(b, 16) + c),
    "v_mad_legacy_u16 v6, v10, v12, v14": ((32, 32, 32), 32, lambda a, b, c: (a * b + c) & 0xFFFF),
    "v_bitop3_b32 v6, v10, v12, v14 bitop3:0xca": ((32, 32, 32), 32, lambda a, b, c: bitop3(a, b, c, 0xCA)),
    "v_bitop3_b32 v6, v10, v12, v14 bitop3:0x96": ((32, 32, 32), 32, lambda a, b, c: a ^ b ^ c),
    "v_bitop3_b32 v6, v10, v12, v14 bitop3:0x1b": ((32, 32, 32), 32, lambda a, b, c: bitop3(a, b, c, 0x1B)),
    "v_mul_lo_u32 v6, v10, v12": ((32, 32), 32, lambda a, b: a * b),
    "v_mul_hi_u32 v6, v10, v12": ((32, 32), 32, lambda a, b: a * b >> 32),
    "v_mul_hi_i32 v6, v10, v12": ((32, 32), 32, lambda a, b: signed(a) * signed(b) >> 32),
    "v_bcnt_u32_b32 v6, v10, v12": ((32, 32), 32, lambda a, b: a.bit_count() + b),
    "v_bfm_b32 v6, v10, v12": ((32, 32), 32, lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "v_cvt_pk_u16_u32 v6, v10, v12": ((32, 32), 32, lambda a, b: min(a, 0xFFFF) | min(b, 0xFFFF) << 16),
    "v_cvt_pk_i16_i32 v6, v10, v12": (
        (32, 32), 32, lambda a, b: (saturated(signed(a), -0x8000, 0x7FFF) & 0xFFFF) | (saturated(signed(b), -0x8000, 0x7FFF) & 0xFFFF) << 16,
    ),
    "v_lshlrev_b64 v[6:7], v10, v[12:13]": ((32, 64), 64, lambda a, b: b << (a & 63)),
    "v_lshrrev_b64 v[6:7], v10, v[12:13]": ((32, 64), 64, lambda a, b: b >> (a & 63)),
    "v_ashrrev_i64 v[6:7], v10, v[12:13]": ((32, 64), 64, lambda a, b: signed(b, 64) >> (a & 63)),
    "v_lshl_add_u64 v[6:7], v[10:11], 3, v[14:15]": ((64, 32, 64), 64, lambda a, b, c: (a << 3) + c),
    "v_lshl_add_u64 v[6:7], v[10:11], 0, v[14:15]": ((64, 32, 64), 64, lambda a, b, c: a + c),
}  # fmt: skip


def operand_tuples(bits: tuple[int, ...]) -> list[tuple[int, ...]]:
    pool = [VALUES if width == 32 else [*VALUES, 2**63, M64, 2**32, 0x123456789ABCDEF0] for width in bits]
    if len(bits) == 3:
        pool = [VALUES[::2] + [0x9ABCDEF0], SHIFTS + [0x04030C0D, 0x0B0A0908, 0x01060500], VALUES[1::2] + [0x0D0C0607, 0x0B0A0908]]
        pool = [p if width == 32 else [*p, M64, 2**63 + 5] for p, width in zip(pool, bits, strict=True)]
    found = list(itertools.product(*pool))
    if bits == (32, 64):
        found += list(itertools.product(SHIFTS, [M64, 2**63 + 1, 0x0123456789ABCDEF]))
    masks = [(1 << width) - 1 for width in bits]
    for i in range(0, len(RANDOM) - len(bits) + 1, len(bits)):
        found.append(tuple(value & mask for value, mask in zip(RANDOM[i : i + len(bits)], masks, strict=True)))
    return found


def code_of(text: str) -> bytes:
    lines = (*CASES, *KEPT, *ACCUMULATING)
    return dict(zip(lines, (code for _, code in encodings(lines)), strict=True))[text]


@pytest.mark.parametrize("text", CASES)
def test_value(text):
    source_bits, result_bits, function = CASES[text]
    mask = (1 << result_bits) - 1
    check(text, code_of(text), operand_tuples(source_bits), source_bits, result_bits, lambda *sources: function(*sources) & mask)


# Instructions of the newer kind write one half of the register and keep the other. text -> (half written, function)
KEPT = {
    "v_add_i16 v6, v10, v12": (0, lambda a, b, c: a + b),
    "v_add_i16 v6, v10, v12 op_sel:[0,1,1]": (1, lambda a, b, c: a + (b >> 16)),
    "v_add_i16 v6, v10, v12 clamp": (0, lambda a, b, c: saturated(signed(a, 16) + signed(b, 16), -0x8000, 0x7FFF)),
    "v_sub_i16 v6, v10, v12 clamp": (0, lambda a, b, c: saturated(signed(a, 16) - signed(b, 16), -0x8000, 0x7FFF)),
    "v_mad_u16 v6, v10, v12, v14 op_sel:[1,0,1,1]": (1, lambda a, b, c: (a >> 16) * b + (c >> 16)),
    "v_mad_i16 v6, v10, v12, v14": (0, lambda a, b, c: a * b + c),
    "v_min3_i16 v6, v10, v12, v14": (0, lambda a, b, c: min(signed(a, 16), signed(b, 16), signed(c, 16))),
    "v_max3_u16 v6, v10, v12, v14": (0, lambda a, b, c: max(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF)),
    "v_med3_i16 v6, v10, v12, v14": (0, lambda a, b, c: median(signed(a, 16), signed(b, 16), signed(c, 16))),
    "v_bitop3_b16 v6, v10, v12, v14 bitop3:0x96 op_sel:[1,0,0,1]": (1, lambda a, b, c: (a >> 16) ^ b ^ c),
    "v_ashr_pk_i8_i32 v6, v10, v12, v14": (
        0, lambda a, b, c: (saturated(signed(a) >> (c & 31), -128, 127) & 255) | (saturated(signed(b) >> (c & 31), -128, 127) & 255) << 8,
    ),
    "v_ashr_pk_u8_i32 v6, v10, v12, v14": (
        0, lambda a, b, c: saturated(signed(a) >> (c & 31), 0, 255) | saturated(signed(b) >> (c & 31), 0, 255) << 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", KEPT)
def test_the_other_half_is_kept(text):
    half, function = KEPT[text]
    cases = operand_tuples((32, 32, 32))
    old = 0xCAFEF00D

    def expected(a: int, b: int, c: int) -> int:
        value = function(a, b, c) & 0xFFFF
        return (old & 0xFFFF) | value << 16 if half else (old & 0xFFFF0000) | value

    check(text, code_of(text), cases, (32, 32, 32), 32, expected, old=[old] * len(cases))


ACCUMULATING = {
    "v_dot2c_i32_i16_e32 v6, v10, v12": 16,
    "v_dot4c_i32_i8_e32 v6, v10, v12": 8,
    "v_dot8c_i32_i4_e32 v6, v10, v12": 4,
}


@pytest.mark.parametrize("text", ACCUMULATING)
def test_dot_adds_to_the_destination(text):
    cases = operand_tuples((32, 32))
    check(text, code_of(text), cases, (32, 32), 32, lambda a, b: dot(a, b, 0x7FFFFFF0, ACCUMULATING[text]) & M32, old=[0x7FFFFFF0] * len(cases))
