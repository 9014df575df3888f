"""Packed instructions, dot products, mixed precision and accumulator registers."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from asm import encodings
from exact import F16, F32, SPECIAL
from vectors import ACCUM_OFFSET, check, execute, get_vgpr, make_group, set_vgpr, signed

M16 = 0xFFFF
WORDS = [0x00000001, 0xFFFF7FFF, 0x80008000, 0x12349ABC, 0x7FFF0000, 0x000FFFF0, 0xDEADBEEF, 0x00110003]
TRIPLES = list(itertools.product(WORDS, WORDS, WORDS[::2]))


def s16(value: int) -> int:
    return signed(value, 16)


def limit(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


# name and modifiers -> function of three 16-bit unsigned values
INTEGER = {
    "v_pk_mad_i16 v6, v10, v12, v14": lambda a, b, c: a * b + c,
    "v_pk_mad_u16 v6, v10, v12, v14 clamp": lambda a, b, c: min(a * b + c, M16),
    "v_pk_mad_i16 v6, v10, v12, v14 clamp": lambda a, b, c: limit(s16(a) * s16(b) + s16(c), -0x8000, 0x7FFF),
    "v_pk_mul_lo_u16 v6, v10, v12": lambda a, b, c: a * b,
    "v_pk_add_i16 v6, v10, v12": lambda a, b, c: a + b,
    "v_pk_add_i16 v6, v10, v12 clamp": lambda a, b, c: limit(s16(a) + s16(b), -0x8000, 0x7FFF),
    "v_pk_sub_i16 v6, v10, v12": lambda a, b, c: a - b,
    "v_pk_sub_u16 v6, v10, v12 clamp": lambda a, b, c: max(a - b, 0),
    "v_pk_add_u16 v6, v10, v12 clamp": lambda a, b, c: min(a + b, M16),
    "v_pk_lshlrev_b16 v6, v10, v12": lambda a, b, c: b << (a & 15),
    "v_pk_lshrrev_b16 v6, v10, v12": lambda a, b, c: b >> (a & 15),
    "v_pk_ashrrev_i16 v6, v10, v12": lambda a, b, c: s16(b) >> (a & 15),
    "v_pk_max_i16 v6, v10, v12": lambda a, b, c: max(s16(a), s16(b)),
    "v_pk_min_i16 v6, v10, v12": lambda a, b, c: min(s16(a), s16(b)),
    "v_pk_max_u16 v6, v10, v12": lambda a, b, c: max(a, b),
    "v_pk_min_u16 v6, v10, v12": lambda a, b, c: min(a, b),
}
SELECT = {
    "v_pk_add_u16 v6, v10, v12 op_sel:[1,0] op_sel_hi:[0,1]": lambda a, b: (a >> 16) + b & M16 | ((a + (b >> 16)) & M16) << 16,
    "v_pk_add_u16 v6, v10, 5": lambda a, b: (a + 5) & M16 | (a >> 16) << 16,
    "v_pk_add_u16 v6, v10, -3": lambda a, b: (a - 3) & M16 | ((a >> 16) - 1 & M16) << 16,
    "v_pk_mul_lo_u16 v6, v10, 1.0 op_sel:[0,1] op_sel_hi:[1,0]": lambda a, b: a * 0x3F80 & M16,
    "v_pk_add_u16 v6, v10, 5 op_sel_hi:[1,0]": lambda a, b: (a + 5) & M16 | ((a >> 16) + 5 & M16) << 16,
}


def s4(value: int) -> int:
    return signed(value, 4)


def dot(bits: int, is_signed: bool):
    def field(value: int, low: int) -> int:
        bare = value >> low & ((1 << bits) - 1)
        return signed(bare, bits) if is_signed else bare

    return lambda a, b, c: sum(field(a, i) * field(b, i) for i in range(0, 32, bits)) + (signed(c) if is_signed else c)


DOTS = {f"v_dot{32 // bits}_{sign}32_{sign}{bits} v6, v10, v12, v14{clamp}": (bits, sign == "i", bool(clamp))
        for bits in (16, 8, 4) for sign in "iu" for clamp in ("", " clamp")}  # fmt: skip
OTHERS = {
    "pk_fma": "v_pk_fma_f32 v[6:7], v[10:11], v[12:13], v[14:15]",
    "pk_fma neg": "v_pk_fma_f32 v[6:7], v[10:11], v[12:13], v[14:15] op_sel:[1,0,0] op_sel_hi:[0,1,1] neg_lo:[1,0,0] neg_hi:[0,0,1]",
    "pk_mul scalar": "v_pk_mul_f32 v[6:7], v[10:11], s[4:5]",
    "pk_mul low scalar": "v_pk_mul_f32 v[6:7], v[10:11], s[4:5] op_sel_hi:[1,0]",
    "pk_add own": "v_pk_add_f32 v[6:7], v[6:7], v[6:7] op_sel:[1,0] op_sel_hi:[0,0]",
    "pk_mul constant": "v_pk_mul_f32 v[6:7], v[10:11], 2.0 op_sel_hi:[1,0]",
    "pk_mov": "v_pk_mov_b32 v[6:7], v[10:11], v[12:13] op_sel:[1,0]",
    "pk_mov own": "v_pk_mov_b32 v[6:7], v[10:11], v[6:7] op_sel:[0,0]",
    "pk_fma_f16": "v_pk_fma_f16 v6, v10, v12, v14 op_sel_hi:[1,0,1] neg_lo:[0,1,0]",
    "pk_mul_f16 constant": "v_pk_mul_f16 v6, v10, 2.0",
    "pk_max_f16": "v_pk_max_f16 v6, v10, v12",
    "pk_add_f16 clamp": "v_pk_add_f16 v6, v10, v12 clamp",
    "mix": "v_fma_mix_f32 v6, v10, -v12, |v14| op_sel:[1,0,0] op_sel_hi:[1,0,1]",
    "mixlo": "v_fma_mixlo_f16 v6, v10, v12, v14",
    "mixhi": "v_fma_mixhi_f16 v6, v10, v12, v14",
    "dot bf16": "v_dot2_f32_bf16 v6, v10, v12, v14",
    "dot f16": "v_dot2_f32_f16 v6, v10, v12, v14 neg_lo:[1,0,0]",
    "dot2c": "v_dot2c_f32_bf16_e32 v6, v10, v12",
    "acc write": "v_accvgpr_write_b32 a7, v10",
    "acc constant": "v_accvgpr_write_b32 a7, 1.0",
    "acc read": "v_accvgpr_read_b32 v6, a7",
    "acc mov": "v_accvgpr_mov_b32 a8, a7",
}


def code_of(text: str) -> bytes:
    lines = (*INTEGER, *SELECT, *DOTS, *OTHERS.values())
    return dict(zip(lines, (code for _, code in encodings(lines)), strict=True))[text]


@pytest.mark.parametrize("text", INTEGER)
def test_packed_integers(text):
    function = INTEGER[text]

    def expected(a: int, b: int, c: int) -> int:
        return function(a & M16, b & M16, c & M16) & M16 | (function(a >> 16, b >> 16, c >> 16) & M16) << 16

    check(text, code_of(text), TRIPLES, (32, 32, 32), 32, expected)


@pytest.mark.parametrize("text", SELECT)
def test_op_sel(text):
    check(text, code_of(text), list(itertools.product(WORDS, WORDS)), (32, 32), 32, SELECT[text])


@pytest.mark.parametrize("text", DOTS)
def test_integer_dot(text):
    bits, is_signed, clamp = DOTS[text]
    exact = dot(bits, is_signed)
    low, high = (-(2**31), 2**31 - 1) if is_signed else (0, 2**32 - 1)
    cases = [*TRIPLES, (0x7FFF7FFF, 0x7FFF7FFF, 0x7FFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), (0x80808080, 0x7F7F7F7F, 0x80000001)]
    check(text, code_of(text), cases, (32, 32, 32), 32, lambda a, b, c: (limit(exact(a, b, c), low, high) if clamp else exact(a, b, c)) & 0xFFFFFFFF)


def wide_values() -> list[int]:
    special = SPECIAL[F32]
    return [special[i] | special[(5 * i + 3) % len(special)] << 32 for i in range(len(special))]


def test_packed_f32():
    triples = list(itertools.product(wide_values(), wide_values()[::3], wide_values()[::4]))
    same = lambda got, wanted: F32.same(got & 0xFFFFFFFF, wanted & 0xFFFFFFFF) and F32.same(got >> 32, wanted >> 32)  # noqa: E731

    def low(v: int) -> int:
        return v & 0xFFFFFFFF

    def fma(a: int, b: int, c: int) -> int:
        return F32.fma(low(a), low(b), low(c)) | F32.fma(a >> 32, b >> 32, c >> 32) << 32

    def mixed(a: int, b: int, c: int) -> int:
        return F32.fma(a >> 32 ^ F32.sign, low(b), low(c)) | F32.fma(low(a), b >> 32, c >> 32 ^ F32.sign) << 32

    check("pk_fma", code_of(OTHERS["pk_fma"]), triples, (64, 64, 64), 64, fma, same)
    check("pk_fma neg", code_of(OTHERS["pk_fma neg"]), triples, (64, 64, 64), 64, mixed, same)


@pytest.mark.parametrize(("name", "factors"), [("pk_mul scalar", (3, 5)), ("pk_mul low scalar", (3, 3)), ("pk_mul constant", (2, 2))])
def test_packed_f32_scalars(name, factors):
    group = make_group()
    two_numbers = [F32.round(Fraction(n)) | F32.round(Fraction(-n - 1)) << 32 for n in range(64)]
    set_vgpr(group, 10, two_numbers, 64)
    group.state.sgpr[4], group.state.sgpr[5] = F32.round(Fraction(3)), F32.round(Fraction(5))
    execute(group, code_of(OTHERS[name]))
    assert get_vgpr(group, 6, 64) == [
        F32.round(Fraction(n * factors[0]), negative_zero=False) | F32.round(Fraction((-n - 1) * factors[1])) << 32 for n in range(64)
    ]


def test_packed_destination_may_be_a_source():
    group = make_group()
    set_vgpr(group, 6, [F32.round(Fraction(1)) | F32.round(Fraction(10)) << 32] * 64, 64)
    execute(group, code_of(OTHERS["pk_add own"]))
    assert get_vgpr(group, 6, 64) == [F32.round(Fraction(11)) | F32.round(Fraction(2)) << 32] * 64
    set_vgpr(group, 6, [0x2222222211111111] * 64, 64)
    set_vgpr(group, 10, [0x4444444433333333] * 64, 64)
    set_vgpr(group, 12, [0x6666666655555555] * 64, 64)
    execute(group, code_of(OTHERS["pk_mov own"]))
    assert get_vgpr(group, 6, 64) == [0x1111111133333333] * 64
    execute(group, code_of(OTHERS["pk_mov"]))
    assert get_vgpr(group, 6, 64) == [0x5555555544444444] * 64


def halves(values: list[int]) -> list[int]:
    return [v | values[(7 * i + 2) % len(values)] << 16 for i, v in enumerate(values)]


def test_packed_f16():
    words = halves(SPECIAL[F16])
    triples = list(itertools.product(words, words, words[::3]))
    same = lambda got, wanted: F16.same(got & M16, wanted & M16) and F16.same(got >> 16, wanted >> 16)  # noqa: E731

    def fma(a: int, b: int, c: int) -> int:
        return F16.fma(a & M16, b & M16 ^ F16.sign, c & M16) | F16.fma(a >> 16, b & M16, c >> 16) << 16

    def larger(x: int, y: int) -> int:
        if F16.is_nan(x) or F16.is_nan(y):
            quiet = F16.is_signalling(x) or F16.is_signalling(y) or (F16.is_nan(x) and F16.is_nan(y))
            return F16.nan if quiet else y if F16.is_nan(x) else x
        return max(x, y, key=lambda bits: (F16.value(bits), not bits & F16.sign))

    def clamped(x: int, y: int) -> int:
        total = F16.add(x, y)
        return 0 if F16.is_nan(total) or F16.value(total) <= 0 else min(total, F16.round(Fraction(1)))

    check("pk_fma_f16", code_of(OTHERS["pk_fma_f16"]), triples, (32, 32, 32), 32, fma, same)
    pairs = list(itertools.product(words, words))
    check("pk_max", code_of(OTHERS["pk_max_f16"]), pairs, (32, 32), 32, lambda a, b: larger(a & M16, b & M16) | larger(a >> 16, b >> 16) << 16, same)
    check(
        "pk_add",
        code_of(OTHERS["pk_add_f16 clamp"]),
        pairs,
        (32, 32),
        32,
        lambda a, b: clamped(a & M16, b & M16) | clamped(a >> 16, b >> 16) << 16,
        same,
    )


def test_packed_f16_constant_has_a_zero_above():
    group = make_group()
    set_vgpr(group, 10, [F16.round(Fraction(3)) | F16.round(Fraction(3)) << 16] * 64)
    execute(group, code_of(OTHERS["pk_mul_f16 constant"]))
    assert get_vgpr(group, 6) == [F16.round(Fraction(6))] * 64


def widened(bits: int) -> int:
    return F32.round(F16.value(bits & M16), negative_zero=bits & M16 == F16.sign)


def test_mixed_precision():
    triples = list(itertools.product(halves(SPECIAL[F16]), SPECIAL[F32], halves(SPECIAL[F16])[::2]))
    check("mix", code_of(OTHERS["mix"]), triples, (32, 32, 32), 32,
          lambda a, b, c: F32.fma(widened(a >> 16), b ^ F32.sign, widened(c) & ~F32.sign), F32.same)  # fmt: skip
    numbers = [F32.round(Fraction(n, 7)) for n in range(-20, 20)]
    cases = list(itertools.product(numbers, numbers[::5], numbers[::7]))

    def rounded(a: int, b: int, c: int) -> int:
        wide = F32.fma(a, b, c)
        return F16.round(F32.value(wide), negative_zero=wide == F32.sign)

    old = 0xAAAA5555
    check("mixlo", code_of(OTHERS["mixlo"]), cases, (32, 32, 32), 32, lambda a, b, c: 0xAAAA0000 | rounded(a, b, c), old=[old] * len(cases))
    check("mixhi", code_of(OTHERS["mixhi"]), cases, (32, 32, 32), 32, lambda a, b, c: rounded(a, b, c) << 16 | 0x5555, old=[old] * len(cases))


def bf16(value: Fraction) -> int:
    return F32.round(value) >> 16


def test_float_dots():
    """Numbers whose products and sums are exact in f32."""
    numbers = [Fraction(n, 4) for n in (-7, -2, 0, 1, 3, 40)]
    pairs = list(itertools.product(numbers, repeat=2))
    cases = [(a, b, c) for a in pairs for b in pairs[::5] for c in numbers[::2]]
    exact = [a[0] * b[0] + a[1] * b[1] + c for a, b, c in cases]
    encoded = [(bf16(a[0]) | bf16(a[1]) << 16, bf16(b[0]) | bf16(b[1]) << 16, F32.round(c)) for a, b, c in cases]
    wanted = dict(zip(encoded, exact, strict=True))
    same = lambda got, expected: F32.value(got) == F32.value(expected)  # noqa: E731
    check("dot bf16", code_of(OTHERS["dot bf16"]), encoded, (32, 32, 32), 32, lambda a, b, c: F32.round(wanted[a, b, c]), same)
    pending = iter(exact)
    check("dot2c", code_of(OTHERS["dot2c"]), [case[:2] for case in encoded], (32, 32), 32, lambda a, b: F32.round(next(pending)), same,
          old=[case[2] for case in encoded])  # fmt: skip
    in_f16 = [(F16.round(a[0]) | F16.round(a[1]) << 16, F16.round(b[0]) | F16.round(b[1]) << 16, F32.round(c)) for a, b, c in cases]
    negated = {key: -a[0] * b[0] + a[1] * b[1] + c for key, (a, b, c) in zip(in_f16, cases, strict=True)}
    check("dot f16", code_of(OTHERS["dot f16"]), in_f16, (32, 32, 32), 32, lambda a, b, c: F32.round(negated[a, b, c]), same)


def test_accumulator_registers():
    """a[n] is register accum_offset + n."""
    group = make_group(active=0xFF)
    set_vgpr(group, 10, range(100, 164))
    old = get_vgpr(group, ACCUM_OFFSET + 7)
    execute(group, code_of(OTHERS["acc write"]))
    assert get_vgpr(group, ACCUM_OFFSET + 7) == [*range(100, 108), *old[8:]]
    execute(group, code_of(OTHERS["acc read"]))
    assert get_vgpr(group, 6)[:8] == list(range(100, 108))
    execute(group, code_of(OTHERS["acc mov"]))
    assert get_vgpr(group, ACCUM_OFFSET + 8)[:8] == list(range(100, 108))
    execute(group, code_of(OTHERS["acc constant"]))
    assert get_vgpr(group, ACCUM_OFFSET + 7)[:8] == [0x3F800000] * 8
