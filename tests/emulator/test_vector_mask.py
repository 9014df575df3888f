"""Compares, conditional selection, carry arithmetic and division."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from asm import encodings
from exact import F16, F32, F64, SPECIAL, Float
from vectors import SOURCES, execute, get_mask, get_vgpr, make_group, set_mask, set_vgpr, signed

from mla_rt.emulator.state import EXEC, VCC

FLOATS = {"f16": F16, "f32": F32, "f64": F64}
ORDERED = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
}
NEGATED = {"nge": "ge", "nlg": "lg", "ngt": "gt", "nle": "le", "neq": "eq", "nlt": "lt"}
INTEGER_TESTS = {"lt": ORDERED["lt"], "eq": ORDERED["eq"], "le": ORDERED["le"], "gt": ORDERED["gt"], "ne": ORDERED["lg"], "ge": ORDERED["ge"]}
INTEGERS = [0, 1, 2, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF]


def float_test(name: str, form: Float):
    def run(a: int, b: int) -> bool:
        unordered = form.is_nan(a) or form.is_nan(b)
        if name in ("f", "tru"):
            return name == "tru"
        if name in ("o", "u"):
            return unordered == (name == "u")
        if name in NEGATED:
            return unordered or not ORDERED[NEGATED[name]](form.value(a), form.value(b))
        return not unordered and ORDERED[name](form.value(a), form.value(b))

    return run


def integer_test(name: str, bits: int, is_signed: bool):
    def run(a: int, b: int) -> bool:
        if name in ("f", "t"):
            return name == "t"
        a, b = a & ((1 << bits) - 1), b & ((1 << bits) - 1)
        return INTEGER_TESTS[name](signed(a, bits), signed(b, bits)) if is_signed else INTEGER_TESTS[name](a, b)

    return run


COMPARES = [
    (f"{name}_{kind}", form.bits, list(itertools.product(SPECIAL[form], repeat=2)), float_test(name, form))
    for kind, form in FLOATS.items()
    for name in ("f", *ORDERED, "o", "u", *NEGATED, "tru")
] + [
    (f"{name}_{sign}{bits}", bits, list(itertools.product([value & ((1 << max(bits, 32)) - 1) for value in INTEGERS], repeat=2)),
     integer_test(name, bits, sign == "i"))
    for sign in "iu"
    for bits in (16, 32, 64)
    for name in ("f", *INTEGER_TESTS, "t")
]  # fmt: skip


def sources(bits: int) -> str:
    return "v[10:11], v[12:13]" if bits == 64 else "v10, v12"


def compare_lines(name: str, bits: int) -> list[str]:
    return [f"v_cmp_{name}_e32 vcc, {sources(bits)}", f"v_cmp_{name}_e64 s[20:21], {sources(bits)}", f"v_cmpx_{name}_e64 s[20:21], {sources(bits)}"]


OTHERS = {
    "class_f16": "v_cmp_class_f16_e32 vcc, v10, v12",
    "class_f32": "v_cmp_class_f32_e32 vcc, v10, v12",
    "class_f64": "v_cmp_class_f64_e32 vcc, v[10:11], v12",
    "neg abs": "v_cmp_gt_f32_e64 s[20:21], -|v10|, v12",
    "cndmask": "v_cndmask_b32_e32 v6, v10, v12, vcc",
    "cndmask e64": "v_cndmask_b32_e64 v6, -v10, |v12|, s[20:21]",
    "add_co": "v_add_co_u32_e32 v6, vcc, v10, v12",
    "sub_co": "v_sub_co_u32_e64 v6, s[20:21], v10, v12",
    "subrev_co": "v_subrev_co_u32_e32 v6, vcc, v10, v12",
    "addc_co": "v_addc_co_u32_e64 v6, s[22:23], v10, v12, s[20:21]",
    "subb_co": "v_subb_co_u32_e32 v6, vcc, v10, v12, vcc",
    "subbrev_co": "v_subbrev_co_u32_e32 v6, vcc, v10, v12, vcc",
    "add_co clamp": "v_add_co_u32_e64 v6, s[20:21], v10, v12 clamp",
    "mad_u64": "v_mad_u64_u32 v[6:7], s[20:21], v10, v12, v[14:15]",
    "mad_i64": "v_mad_i64_i32 v[6:7], s[20:21], v10, v12, v[14:15]",
}


def code_of(text: str) -> bytes:
    lines = (*(line for name, bits, _, _ in COMPARES for line in compare_lines(name, bits)), *OTHERS.values())
    return dict(zip(lines, (code for _, code in encodings(lines)), strict=True))[text]


@pytest.mark.parametrize(("name", "bits", "cases", "expected"), COMPARES, ids=[case[0] for case in COMPARES])
def test_compare(name, bits, cases, expected):
    """Short form to VCC, long form to an SGPR pair, cmpx to EXEC too; lanes that EXEC disables give 0."""
    active = 0xFFFF0F0FFFFFFFF3
    wanted = [expected(a, b) and bool(active >> lane % 64 & 1) for lane, (a, b) in enumerate(cases)]
    for text, registers in zip(compare_lines(name, bits), ([VCC], [20], [20, EXEC]), strict=True):
        group = make_group(-(-len(cases) // 64), active=active)
        set_vgpr(group, 10, [a for a, _ in cases], bits)
        set_vgpr(group, 12, [b for _, b in cases], bits)
        execute(group, code_of(text))
        for register in registers:
            got = get_mask(group, register)[: len(cases)]
            wrong = [i for i in range(len(cases)) if got[i] != wanted[i]]
            assert not wrong, f"{text} of {[hex(v) for v in cases[wrong[0]]]} in lane {wrong[0]}: {got[wrong[0]]}"
        if EXEC in registers:
            assert [bool(v) for v in group.mask.reshape(-1)] == get_mask(group, EXEC)


@pytest.mark.parametrize("kind", FLOATS)
def test_class(kind):
    form = FLOATS[kind]

    def class_of(bits: int) -> int:
        magnitude, negative = bits & ~form.sign, bool(bits & form.sign)
        if form.is_nan(bits):
            return 0 if form.is_signalling(bits) else 1
        order = 3 if magnitude == form.infinity else 0 if magnitude == 0 else 1 if magnitude >> form.mantissa == 0 else 2
        return {3: (9, 2), 2: (8, 3), 1: (7, 4), 0: (6, 5)}[order][negative]

    cases = [(a, 1 << i) for a in SPECIAL[form] for i in range(10)] + [(a, 0x3FF ^ 1 << i) for a in SPECIAL[form] for i in range(10)]
    group = make_group(-(-len(cases) // 64))
    set_vgpr(group, 10, [a for a, _ in cases], form.bits)
    set_vgpr(group, 12, [b for _, b in cases])
    execute(group, code_of(OTHERS[f"class_{kind}"]))
    for got, (a, classes) in zip(get_mask(group, VCC), cases, strict=False):
        assert got == bool(classes >> class_of(a) & 1), f"{a:#x} in {classes:#x}"


def test_compare_with_sign_modifiers():
    group = make_group()
    set_vgpr(group, 10, [0xBF800000, 0x3F800000, 0x00000000])
    set_vgpr(group, 12, [0xC0000000, 0x80000000, 0x80000001])
    execute(group, code_of(OTHERS["neg abs"]))
    assert get_mask(group, 20)[:3] == [True, False, True]  # -1 > -2, -1 > -0, -0 > -tiny


PAIRS = list(itertools.product([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF, 0x12345678], repeat=2))
PATTERN = [i % 3 == 0 for i in range(len(PAIRS))]


def run_pairs(name: str, carry_in: int | None = None):
    group = make_group()
    set_vgpr(group, 10, [a for a, _ in PAIRS])
    set_vgpr(group, 12, [b for _, b in PAIRS])
    if carry_in is not None:
        set_mask(group, carry_in, PATTERN)
    execute(group, code_of(OTHERS[name]))
    return group, get_vgpr(group, 6)[: len(PAIRS)]


def test_cndmask():
    _, got = run_pairs("cndmask", VCC)
    assert got == [b if take else a for (a, b), take in zip(PAIRS, PATTERN, strict=True)]
    _, got = run_pairs("cndmask e64", 20)
    assert got == [b & 0x7FFFFFFF if take else a ^ 0x80000000 for (a, b), take in zip(PAIRS, PATTERN, strict=True)]


@pytest.mark.parametrize(
    ("name", "carry_in", "carry_out", "function"),
    [
        ("add_co", None, VCC, lambda a, b, c: a + b),
        ("sub_co", None, 20, lambda a, b, c: a - b),
        ("subrev_co", None, VCC, lambda a, b, c: b - a),
        ("addc_co", 20, 22, lambda a, b, c: a + b + c),
        ("subb_co", VCC, VCC, lambda a, b, c: a - b - c),
        ("subbrev_co", VCC, VCC, lambda a, b, c: b - a - c),
    ],
)
def test_carry(name, carry_in, carry_out, function):
    group, got = run_pairs(name, carry_in)
    exact = [function(a, b, take) for (a, b), take in zip(PAIRS, PATTERN, strict=True)]
    assert got == [value % 2**32 for value in exact]
    assert get_mask(group, carry_out)[: len(PAIRS)] == [not 0 <= value < 2**32 for value in exact]


def test_carry_with_clamp():
    group, got = run_pairs("add_co clamp")
    assert got == [min(a + b, 0xFFFFFFFF) for a, b in PAIRS]
    assert get_mask(group, 20)[: len(PAIRS)] == [a + b > 0xFFFFFFFF for a, b in PAIRS]


@pytest.mark.parametrize("name", ["mad_u64", "mad_i64"])
def test_mad_64(name):
    wide = [0, 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
    cases = [(a, b, c) for a, b in PAIRS for c in wide]
    group = make_group(-(-len(cases) // 64))
    for i, bits in enumerate((32, 32, 64)):
        set_vgpr(group, SOURCES[i], [case[i] for case in cases], bits)
    execute(group, code_of(OTHERS[name]))
    got, carries = get_vgpr(group, 6, 64), get_mask(group, 20)
    for lane, (a, b, c) in enumerate(cases):
        exact = signed(a) * signed(b) + signed(c, 64) if name == "mad_i64" else a * b + c
        assert got[lane] == exact % 2**64
        assert carries[lane] == (not -(2**63) <= exact < 2**63 if name == "mad_i64" else exact >= 2**64)


# What LLVM makes of `a / b`: the whole sequence must round correctly, denormals and extremes included.
DIVIDE = {
    F32: [
        "v_div_scale_f32 v20, s[20:21], v12, v12, v10", "v_rcp_f32_e32 v21, v20", "v_div_scale_f32 v22, vcc, v10, v12, v10",
        "v_fma_f32 v23, -v20, v21, 1.0", "v_fma_f32 v21, v23, v21, v21", "v_mul_f32_e32 v24, v22, v21", "v_fma_f32 v25, -v20, v24, v22",
        "v_fma_f32 v24, v25, v21, v24", "v_fma_f32 v20, -v20, v24, v22", "v_div_fmas_f32 v20, v20, v21, v24", "v_div_fixup_f32 v6, v20, v12, v10",
    ],
    F64: [
        "v_div_scale_f64 v[20:21], s[20:21], v[12:13], v[12:13], v[10:11]", "v_rcp_f64_e32 v[22:23], v[20:21]",
        "v_fma_f64 v[24:25], -v[20:21], v[22:23], 1.0", "v_fma_f64 v[22:23], v[22:23], v[24:25], v[22:23]",
        "v_fma_f64 v[24:25], -v[20:21], v[22:23], 1.0", "v_fma_f64 v[22:23], v[22:23], v[24:25], v[22:23]",
        "v_div_scale_f64 v[24:25], vcc, v[10:11], v[12:13], v[10:11]", "v_mul_f64 v[26:27], v[24:25], v[22:23]",
        "v_fma_f64 v[20:21], -v[20:21], v[26:27], v[24:25]", "v_div_fmas_f64 v[20:21], v[20:21], v[22:23], v[26:27]",
        "v_div_fixup_f64 v[6:7], v[20:21], v[12:13], v[10:11]",
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", DIVIDE, ids=["f32", "f64"])
def test_division_rounds_correctly(form):
    generator = random.Random(7)
    values = [*SPECIAL[form], *(generator.getrandbits(form.bits) for _ in range(20))]
    values += [form.round(Fraction(2) ** e * 3 / 2) for e in (-form.bias - 5, 1 - form.bias, -60, form.bias - 1, form.bias)]
    cases = list(itertools.product(values, repeat=2))
    group = make_group(-(-len(cases) // 64))
    set_vgpr(group, 10, [a for a, _ in cases], form.bits)
    set_vgpr(group, 12, [b for _, b in cases], form.bits)
    for _, code in encodings(tuple(DIVIDE[form])):
        execute(group, code)
    for got, (a, b) in zip(get_vgpr(group, 6, form.bits), cases, strict=False):
        # A quotient among the denormals is rounded a second time when the scaling is undone: one unit of the last place.
        wanted = form.divide(a, b)
        denormal = wanted & ~form.sign < 1 << form.mantissa
        assert form.same(got, wanted) or (denormal and abs(got - wanted) <= 1), f"{a:#x} / {b:#x}: {got:#x}, expected {wanted:#x}"
