"""Floating-point vector instructions against exact rational arithmetic."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from asm import encodings
from exact import F16, F32, F64, SPECIAL, Float
from vectors import check, signed

NAMES = {F16: "f16", F32: "f32", F64: "f64"}
REGISTER = {16: "v{}", 32: "v{}", 64: "v[{}:{}]"}


def register(number: int, bits: int) -> str:
    return REGISTER[bits].format(number, number + 1)


def line(name: str, result_bits: int, source_bits: tuple[int, ...]) -> str:
    return f"{name} {register(6, result_bits)}, " + ", ".join(register(10 + 2 * i, bits) for i, bits in enumerate(source_bits))


def randoms(form: Float, count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.getrandbits(form.bits) for _ in range(count)]


def near_ones(form: Float, count: int, seed: int) -> list[int]:
    """Numbers of similar exponents, so that sums cancel and round in every way."""
    generator = random.Random(seed)
    one = form.bias << form.mantissa
    return [
        one + (generator.randrange(-3, 4) << form.mantissa) ^ generator.getrandbits(form.mantissa) ^ generator.getrandbits(1) << form.bits - 1
        for _ in range(count)
    ]


def pairs(form: Float) -> list[tuple[int, int]]:
    return (
        list(itertools.product(SPECIAL[form], repeat=2))
        + list(zip(randoms(form, 256, 1), randoms(form, 256, 2), strict=True))
        + list(zip(near_ones(form, 256, 3), near_ones(form, 256, 4), strict=True))
    )


def triples(form: Float) -> list[tuple[int, int, int]]:
    few = SPECIAL[form][::2] + SPECIAL[form][-3:]
    found = list(itertools.product(few, repeat=3))
    found += list(zip(near_ones(form, 800, 5), near_ones(form, 800, 6), near_ones(form, 800, 7), strict=True))
    found += list(zip(randoms(form, 800, 8), randoms(form, 800, 9), randoms(form, 800, 10), strict=True))
    return found + hard_fma(form)


def hard_fma(form: Float) -> list[tuple[int, int, int]]:
    """Products whose exact sum with c lies a hair beside a tie of the format: wrong if rounded twice."""
    found = []
    one, half_ulp = Fraction(1), Fraction(1, 2 ** (form.mantissa + 1))
    tiny = Fraction(2) ** (-form.bias - 4)
    for base, direction in itertools.product((one, one + 2 * half_ulp, Fraction(3, 2)), (1, -1)):
        # c + a * b with a * b = half an ulp, plus a crumb that only the exact sum holds: (half + crumb) as a product of two close numbers.
        epsilon = Fraction(1, 2**form.mantissa)
        for a, b in (((1 + epsilon), half_ulp * (1 - epsilon)), ((1 + epsilon), half_ulp * (1 + epsilon)), (half_ulp, one)):
            found.append((form.round(a), form.round(direction * b), form.round(base)))
    for scale in (1, 3, 5):  # denormal results
        found.append((form.round(tiny * scale), form.round(Fraction(1, 2) + epsilon), form.round(Fraction(0))))
        found.append((form.round(tiny * scale), form.round(Fraction(1, 2) + epsilon), form.round(tiny)))
    if form is F32:  # just beside the tie of two denormals, by less than float64 can tell
        a, b = Fraction(2) ** -75 * (1 + epsilon), Fraction(2) ** -75 * (1 - epsilon)
        for steps, sign in itertools.product((2**20 + 1, 2**20), (1, -1)):
            found.append((form.round(a), form.round(sign * b), form.round(Fraction(steps, 2**149))))
    return found


def minimum(form: Float, a: int, b: int, sign: int = 1) -> int:
    """sign 1: v_min, -1: v_max."""
    if form.is_signalling(a) or form.is_signalling(b) or (form.is_nan(a) and form.is_nan(b)):
        return form.nan
    if form.is_nan(a):
        return b
    if form.is_nan(b):
        return a

    def order(bits: int) -> tuple[Fraction | float, int]:
        return form.value(bits), 0 if bits & form.sign else 1

    return (min if sign == 1 else max)(a, b, key=order)


def median(form: Float, a: int, b: int, c: int) -> int:
    if any(form.is_nan(x) for x in (a, b, c)):
        return minimum(form, minimum(form, a, b), c)
    return sorted((a, b, c), key=lambda bits: (form.value(bits), 0 if bits & form.sign else 1))[1]


def negated(form: Float, bits: int) -> int:
    return bits ^ form.sign


TWO = [
    ("v_add_{}", lambda form: form.add),
    ("v_mul_{}", lambda form: form.multiply),
    ("v_min_{}", lambda form: lambda a, b: minimum(form, a, b)),
    ("v_max_{}", lambda form: lambda a, b: minimum(form, a, b, -1)),
    ("v_sub_{}", lambda form: lambda a, b: form.add(a, negated(form, b))),
    ("v_subrev_{}", lambda form: lambda a, b: form.add(negated(form, a), b)),
]
THREE = [
    ("v_fma_{}", lambda form: form.fma),
    ("v_min3_{}", lambda form: lambda a, b, c: minimum(form, minimum(form, a, b), c)),
    ("v_max3_{}", lambda form: lambda a, b, c: minimum(form, minimum(form, a, b, -1), c, -1)),
    ("v_med3_{}", lambda form: lambda a, b, c: median(form, a, b, c)),
]
BINARY = [(name.format(NAMES[form]), form, make(form)) for form in NAMES for name, make in TWO if form is not F64 or "sub" not in name]
TERNARY = [(name.format(NAMES[form]), form, make(form)) for form in NAMES for name, make in THREE if form is not F64 or "fma" in name]


def _no_nan(form: Float, f):
    return lambda a, b, c: form.nan if any(form.is_nan(x) for x in (a, b, c)) else f(a, b, c)


TERNARY += [
    ("v_maximum3_f32", F32, _no_nan(F32, lambda a, b, c: minimum(F32, minimum(F32, a, b, -1), c, -1))),
    ("v_minimum3_f32", F32, _no_nan(F32, lambda a, b, c: minimum(F32, minimum(F32, a, b), c))),
]


def integral(form: Float, rounding) -> object:
    """A function to integral values, keeping zeros' signs, infinities and NaN."""

    def run(bits: int) -> int:
        value = form.value(bits)
        if isinstance(value, float):
            return form.nan if math.isnan(value) else bits
        return form.round(Fraction(rounding(value)), negative_zero=bool(bits & form.sign))

    return run


def fract(form: Float):
    below_one = form.round(Fraction(1)) - 1

    def run(bits: int) -> int:
        value = form.value(bits)
        if isinstance(value, float):
            return form.nan
        return min(form.round(value - math.floor(value)), below_one)

    return run


def frexp_mantissa(form: Float):
    def run(bits: int) -> int:
        value = form.value(bits)
        if isinstance(value, float) or value == 0:
            return bits
        while abs(value) >= 1:
            value /= 2
        while abs(value) < Fraction(1, 2):
            value *= 2
        return form.round(value)

    return run


def frexp_exponent(form: Float, result_bits: int):
    def run(bits: int) -> int:
        value, exponent = form.value(bits), 0
        if isinstance(value, float) or value == 0:
            return 0
        while abs(value) >= Fraction(2) ** exponent:
            exponent += 1
        while abs(value) < Fraction(2) ** (exponent - 1):
            exponent -= 1
        return exponent & ((1 << result_bits) - 1)

    return run


def to_integer(form: Float, low: int, high: int, bits: int, rounding=math.trunc):
    def run(source: int) -> int:
        value = form.value(source)
        if isinstance(value, float):
            return 0 if math.isnan(value) else (low if value < 0 else high) & ((1 << bits) - 1)
        return max(low, min(high, rounding(value))) & ((1 << bits) - 1)

    return run


def convert(source: Float, target: Float):
    return lambda bits: target.round(source.value(bits), negative_zero=bool(bits & source.sign))


UNARY = []
for _form, _name in NAMES.items():
    for _text, _rounding in (("floor", math.floor), ("ceil", math.ceil), ("trunc", math.trunc), ("rndne", round)):
        UNARY.append((f"v_{_text}_{_name}", _form.bits, _form, _form, integral(_form, _rounding)))
    UNARY.append((f"v_fract_{_name}", _form.bits, _form, _form, fract(_form)))
    UNARY.append((f"v_frexp_mant_{_name}", _form.bits, _form, _form, frexp_mantissa(_form)))
UNARY += [
    ("v_frexp_exp_i16_f16", 16, F16, None, frexp_exponent(F16, 16)),
    ("v_frexp_exp_i32_f32", 32, F32, None, frexp_exponent(F32, 32)),
    ("v_frexp_exp_i32_f64", 32, F64, None, frexp_exponent(F64, 32)),
    ("v_cvt_i32_f32", 32, F32, None, to_integer(F32, -(2**31), 2**31 - 1, 32)),
    ("v_cvt_u32_f32", 32, F32, None, to_integer(F32, 0, 2**32 - 1, 32)),
    ("v_cvt_i32_f64", 32, F64, None, to_integer(F64, -(2**31), 2**31 - 1, 32)),
    ("v_cvt_u32_f64", 32, F64, None, to_integer(F64, 0, 2**32 - 1, 32)),
    ("v_cvt_flr_i32_f32", 32, F32, None, to_integer(F32, -(2**31), 2**31 - 1, 32, math.floor)),
    ("v_cvt_rpi_i32_f32", 32, F32, None, to_integer(F32, -(2**31), 2**31 - 1, 32, lambda v: math.floor(v + Fraction(1, 2)))),
    ("v_cvt_i16_f16", 16, F16, None, to_integer(F16, -(2**15), 2**15 - 1, 16)),
    ("v_cvt_u16_f16", 16, F16, None, to_integer(F16, 0, 2**16 - 1, 16)),
    ("v_cvt_f32_f16", 32, F16, F32, convert(F16, F32)),
    ("v_cvt_f16_f32", 16, F32, F16, convert(F32, F16)),
    ("v_cvt_f32_f64", 32, F64, F32, convert(F64, F32)),
    ("v_cvt_f64_f32", 64, F32, F64, convert(F32, F64)),
]
INTEGERS = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x01000001, 0x00FFFFFF, 0x80000040, 0x80000080, 0x800000C0, 0xDEADBEEF]
FROM_INTEGER = [
    ("v_cvt_f32_i32", F32, lambda v: F32.round(Fraction(signed(v)))),
    ("v_cvt_f32_u32", F32, lambda v: F32.round(Fraction(v))),
    ("v_cvt_f64_i32", F64, lambda v: F64.round(Fraction(signed(v)))),
    ("v_cvt_f64_u32", F64, lambda v: F64.round(Fraction(v))),
    ("v_cvt_f16_i16", F16, lambda v: F16.round(Fraction(signed(v, 16)))),
    ("v_cvt_f16_u16", F16, lambda v: F16.round(Fraction(v & 0xFFFF))),
    *((f"v_cvt_f32_ubyte{i}", F32, lambda v, i=i: F32.round(Fraction(v >> 8 * i & 255))) for i in range(4)),
]

LINES = (
    [line(name, form.bits, (form.bits,) * 2) for name, form, _ in BINARY]
    + [line(name, form.bits, (form.bits,) * 3) for name, form, _ in TERNARY]
    + [line(name, bits, (source.bits,)) for name, bits, source, _, _ in UNARY]
    + [line(name, form.bits, (32,)) for name, form, _ in FROM_INTEGER]
)
MORE = {
    "fmac_f32": "v_fmac_f32_e32 v6, v10, v12",
    "fmac_f64": "v_fmac_f64_e32 v[6:7], v[10:11], v[12:13]",
    "fmamk": "v_fmamk_f32 v6, v10, 0x40490fdb, v12",
    "fmaak": "v_fmaak_f32 v6, v10, v12, 0x40490fdb",
    "ldexp_f32": "v_ldexp_f32 v6, v10, v12",
    "ldexp_f64": "v_ldexp_f64 v[6:7], v[10:11], v12",
    "ldexp_f16": "v_ldexp_f16_e32 v6, v10, v12",
    "modifiers": "v_fma_f32 v6, -v10, |v12|, -|v14|",
    "clamp": "v_mul_f32_e64 v6, v10, v12 clamp",
    "pkrtz": "v_cvt_pkrtz_f16_f32 v6, v10, v12",
    "pack": "v_pack_b32_f16 v6, v10, v12 op_sel:[1,0,0]",
    "fma_f16_high": "v_fma_f16 v6, v10, v12, v14 op_sel:[1,0,1,1]",
    "legacy": "v_mul_legacy_f32 v6, v10, v12",
    **{
        name: f"v_{name}_e32 v6, v10"
        for name in ("exp_f32", "log_f32", "rcp_f32", "rsq_f32", "sqrt_f32", "sin_f32", "cos_f32", "exp_f16", "log_f16", "rcp_f16")
    },
}


def code_of(text: str) -> bytes:
    lines = (*LINES, *MORE.values())
    return dict(zip(lines, (code for _, code in encodings(lines)), strict=True))[text]


@pytest.mark.parametrize(("name", "form", "expected"), BINARY, ids=[case[0] for case in BINARY])
def test_two_operands(name, form, expected):
    text = line(name, form.bits, (form.bits,) * 2)
    check(text, code_of(text), pairs(form), (form.bits,) * 2, form.bits, expected, form.same)


@pytest.mark.parametrize(("name", "form", "expected"), TERNARY, ids=[case[0] for case in TERNARY])
def test_three_operands(name, form, expected):
    text = line(name, form.bits, (form.bits,) * 3)
    same = (lambda got, wanted: F16.same(got & 0xFFFF, wanted)) if form is F16 else form.same
    check(text, code_of(text), triples(form), (form.bits,) * 3, form.bits, expected, same)


@pytest.mark.parametrize(("name", "bits", "source", "target", "expected"), UNARY, ids=[case[0] for case in UNARY])
def test_one_operand(name, bits, source, target, expected):
    text = line(name, bits, (source.bits,))
    values = SPECIAL[source] + randoms(source, 100, 11) + near_ones(source, 100, 12)
    values += [source.round(Fraction(n, 2)) for n in range(-9, 10)] + [source.round(Fraction(n) * 2**e) for n in (-1, 1, 3) for e in (14, 15, 16)]
    if source.bits > 16:
        values += [source.round(Fraction(2**e) + d) for e in (31, 32) for d in (-1, 0, 1)] + [source.round(Fraction(-(2**31)) - 1)]
    check(text, code_of(text), [(v,) for v in values], (source.bits,), bits, expected, target.same if target else lambda a, b: a == b)


@pytest.mark.parametrize(("name", "form", "expected"), FROM_INTEGER, ids=[case[0] for case in FROM_INTEGER])
def test_from_integers(name, form, expected):
    text = line(name, form.bits, (32,))
    check(text, code_of(text), [(v,) for v in INTEGERS], (32,), form.bits, expected)


@pytest.mark.parametrize(("name", "form"), [("fmac_f32", F32), ("fmac_f64", F64)])
def test_fmac_adds_to_the_destination(name, form):
    cases = triples(form)
    expected = {(a, b, c): form.fma(a, b, c) for a, b, c in cases}
    pending = iter(cases)
    check(name, code_of(MORE[name]), [(a, b) for a, b, _ in cases], (form.bits,) * 2, form.bits, lambda a, b: expected[next(pending)], form.same,
          old=[c for _, _, c in cases])  # fmt: skip


def test_fma_with_a_literal():
    pi = 0x40490FDB
    cases = pairs(F32)
    check("fmamk", code_of(MORE["fmamk"]), cases, (32, 32), 32, lambda a, b: F32.fma(a, pi, b), F32.same)
    check("fmaak", code_of(MORE["fmaak"]), cases, (32, 32), 32, lambda a, b: F32.fma(a, b, pi), F32.same)


@pytest.mark.parametrize(("form", "bits"), [(F16, 16), (F32, 32), (F64, 32)])
def test_ldexp(form, bits):
    def expected(a: int, b: int) -> int:
        value = form.value(a)
        power = Fraction(2) ** max(-3000, min(3000, signed(b, bits)))
        return form.round(value if isinstance(value, float) else value * power, negative_zero=bool(a & form.sign))

    exponents = [
        0,
        1,
        5,
        (1 << bits) - 1,
        (1 << bits) - 10,
        (1 << bits) - 140,
        100,
        130,
        (1 << bits) - 1000,
        1000,
        (1 << (bits - 1)) - 1,
        1 << (bits - 1),
    ]
    cases = list(itertools.product(SPECIAL[form] + near_ones(form, 8, 13), exponents))
    check("ldexp", code_of(MORE[f"ldexp_{NAMES[form]}"]), cases, (form.bits, 32), form.bits, expected, form.same)


def test_neg_and_abs():
    def expected(a: int, b: int, c: int) -> int:
        return F32.fma(a ^ F32.sign, b & ~F32.sign, c | F32.sign)

    check("modifiers", code_of(MORE["modifiers"]), triples(F32), (32, 32, 32), 32, expected, F32.same)


def test_clamp_limits_to_one_and_makes_nan_zero():
    def expected(a: int, b: int) -> int:
        product = F32.multiply(a, b)
        value = F32.value(product)
        return 0 if F32.is_nan(product) or value <= 0 else F32.round(Fraction(1)) if value >= 1 else product

    check("clamp", code_of(MORE["clamp"]), pairs(F32), (32, 32), 32, expected)


def test_pack_toward_zero():
    def one(bits: int) -> int:
        value = F32.value(bits)
        if isinstance(value, float):
            return F16.round(value)
        nearest = F16.round(value, negative_zero=bool(bits & F32.sign))
        if nearest & ~F16.sign == F16.infinity or abs(F16.value(nearest)) > abs(value):
            return nearest - 1
        return nearest

    values = SPECIAL[F32] + [F32.round(Fraction(n, 4096)) for n in range(4090, 4102)] + [F32.round(Fraction(65519)), F32.round(Fraction(65536))]
    same = lambda got, wanted: F16.same(got & 0xFFFF, wanted & 0xFFFF) and F16.same(got >> 16, wanted >> 16)  # noqa: E731
    check("pkrtz", code_of(MORE["pkrtz"]), list(itertools.product(values, values)), (32, 32), 32, lambda a, b: one(a) | one(b) << 16, same)


def test_halves_of_16_bit_operands():
    cases = list(itertools.product([0x12345678, 0xFFFF0001], [0x9ABCDEF0, 0x00008000]))
    check("pack", code_of(MORE["pack"]), cases, (32, 32), 32, lambda a, b: a >> 16 | (b & 0xFFFF) << 16)
    halves = [(a << 16 | 0x7E00, b, c << 16) for a, b, c in triples(F16)[:500]]
    same = lambda got, wanted: got & 0xFFFF == 0x5555 and F16.same(got >> 16, wanted)  # noqa: E731
    check("fma_f16_high", code_of(MORE["fma_f16_high"]), halves, (32, 32, 32), 32, lambda a, b, c: F16.fma(a >> 16, b, c >> 16), same,
          old=[0xAAAA5555] * len(halves))  # fmt: skip


def test_legacy_multiply_zero_wins():
    expected = lambda a, b: 0 if not a << 1 & 0xFFFFFFFF or not b << 1 & 0xFFFFFFFF else F32.multiply(a, b)  # noqa: E731
    check("legacy", code_of(MORE["legacy"]), pairs(F32), (32, 32), 32, expected, F32.same)


def flushed(bits: int) -> int:
    return bits & F32.sign if bits & ~F32.sign < 0x00800000 else bits


def close(form: Float, ulps: int):
    def same(got: int, wanted: int) -> bool:
        if form.same(got, wanted):
            return True
        return not form.is_nan(got) and not form.is_nan(wanted) and not (got ^ wanted) & form.sign and abs(got - wanted) <= ulps

    return same


def real(function, domain=lambda v: True):
    """A function of Python floats on f32 bits: denormals flushed in and out."""

    def run(bits: int) -> int:
        value = F32.value(flushed(bits))
        if isinstance(value, float) and math.isnan(value):
            return F32.nan
        number = float(value) if value else math.copysign(0.0, -1.0 if bits & F32.sign else 1.0)
        return flushed(F32.round(function(number)))

    return run


def exp2(x: float) -> float:
    return math.inf if x >= 1024 else 0.0 if x < -1100 else 2.0**x


def log2(x: float) -> float:
    return -math.inf if x == 0 else math.nan if x < 0 else math.log2(x)


def reciprocal(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else math.copysign(0.0, x) if math.isinf(x) else 1 / x


def root(x: float) -> float:
    return math.nan if x < 0 else math.sqrt(x)


def reciprocal_root(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else math.nan if x < 0 else 0.0 if math.isinf(x) else 1 / math.sqrt(x)


@pytest.mark.parametrize(
    ("name", "function"),
    [("exp_f32", exp2), ("log_f32", log2), ("rcp_f32", reciprocal), ("sqrt_f32", root), ("rsq_f32", reciprocal_root)],
)
def test_transcendental(name, function):
    values = SPECIAL[F32] + randoms(F32, 300, 14) + near_ones(F32, 100, 15)
    values += [F32.round(Fraction(n, 2)) for n in range(-300, 300, 7)]
    negative_zero = {"rcp_f32", "sqrt_f32"}

    def expected(bits: int) -> int:
        wanted = real(function)(bits)
        # The sign of a zero result: F32.round cannot know it.
        return wanted | (bits & F32.sign) if wanted == 0 and name in negative_zero else wanted

    check(name, code_of(MORE[name]), [(v,) for v in values], (32,), 32, expected, close(F32, 1))


def test_sine_and_cosine_take_turns():
    values = [F32.round(Fraction(n, 16)) for n in range(-40, 41)]

    def near(got: int, wanted: int) -> bool:
        return abs(float(F32.value(got)) - float(F32.value(wanted))) < 1e-6

    check("sin", code_of(MORE["sin_f32"]), [(v,) for v in values], (32,), 32, lambda v: F32.round(math.sin(2 * math.pi * float(F32.value(v)))), near)
    check("cos", code_of(MORE["cos_f32"]), [(v,) for v in values], (32,), 32, lambda v: F32.round(math.cos(2 * math.pi * float(F32.value(v)))), near)


@pytest.mark.parametrize(("name", "function"), [("exp_f16", exp2), ("log_f16", log2), ("rcp_f16", reciprocal)])
def test_half_transcendental(name, function):
    def expected(bits: int) -> int:
        value = F16.value(bits)
        if isinstance(value, float) and math.isnan(value):
            return F16.nan
        wanted = F16.round(function(float(value) if value else math.copysign(0.0, -1.0 if bits & F16.sign else 1.0)))
        return wanted | (bits & F16.sign) if wanted == 0 and name == "rcp_f16" else wanted

    check(name, code_of(MORE[name]), [(v,) for v in range(0, 65536, 37)] + [(v,) for v in SPECIAL[F16]], (16,), 16, expected, close(F16, 1))
