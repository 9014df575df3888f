"""Scalar instructions against Python integers: result and SCC."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from asm import encodings
from vectors import execute, make_group, signed

from mla_rt.emulator.state import EXEC, M0, VCC

M32, M64 = 2**32 - 1, 2**64 - 1
VALUES = [0, 1, 2, 31, 32, 33, 0x7F, 0x80, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0x80000001, M32 - 1, M32, 0x00200008, 0x00080010]
WIDE = [0, 1, 2, 63, 64, M32, 2**32, 2**63 - 1, 2**63, 2**63 + 1, M64, 0x0123456789ABCDEF, 0x00200010, 0x0040001F]
_random = random.Random(3)
VALUES += [_random.getrandbits(32) for _ in range(6)]
WIDE += [_random.getrandbits(64) for _ in range(6)]


def nonzero(function, bits: int):
    """Result, and SCC = the result is not 0."""

    def run(*sources):
        value = function(*sources) & ((1 << bits) - 1)
        return value, value != 0

    return run


def plain(function):
    return lambda *sources: (function(*sources), None)


def overflow(function):
    def run(a: int, b: int):
        exact = function(signed(a), signed(b))
        return exact, not -(2**31) <= exact < 2**31

    return run


def bfe(bits: int, is_signed: bool):
    def run(a: int, b: int) -> int:
        offset, width = b & (bits - 1), b >> 16 & 127
        shifted = (signed(a, bits) if is_signed else a) >> offset
        if width == 0:
            return 0
        width = min(width, bits)
        return signed(shifted, width) if is_signed else shifted & ((1 << width) - 1)

    return run


def first_set(value: int) -> int:
    return (value & -value).bit_length() - 1


def leading(value: int, bits: int) -> int:
    return bits - value.bit_length() if value else -1


def leading_sign(value: int, bits: int) -> int:
    return leading(value ^ (((1 << bits) - 1) if value >> (bits - 1) else 0), bits)


def any_of_four(value: int, bits: int, step: int) -> int:
    result = 0
    for i in range(0, bits, 4):
        if value >> i & 15:
            result |= (15 << i) if step == 4 else 1 << i // 4
    return result


BITWISE = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b), "xnor": lambda a, b: ~(a ^ b),
}  # fmt: skip
# name -> (result bits, source bits, function -> (result, scc or None)); functions named with `scc` take the old SCC first
TWO = {
    "s_add_u32": (32, (32, 32), lambda a, b: (a + b, a + b > M32)),
    "s_sub_u32": (32, (32, 32), lambda a, b: (a - b, b > a)),
    "s_add_i32": (32, (32, 32), overflow(lambda a, b: a + b)),
    "s_sub_i32": (32, (32, 32), overflow(lambda a, b: a - b)),
    "s_min_i32": (32, (32, 32), lambda a, b: (min(signed(a), signed(b)), signed(a) < signed(b))),
    "s_min_u32": (32, (32, 32), lambda a, b: (min(a, b), a < b)),
    "s_max_i32": (32, (32, 32), lambda a, b: (max(signed(a), signed(b)), signed(a) >= signed(b))),
    "s_max_u32": (32, (32, 32), lambda a, b: (max(a, b), a >= b)),
    "s_lshl_b32": (32, (32, 32), nonzero(lambda a, b: a << (b & 31), 32)),
    "s_lshr_b32": (32, (32, 32), nonzero(lambda a, b: a >> (b & 31), 32)),
    "s_ashr_i32": (32, (32, 32), nonzero(lambda a, b: signed(a) >> (b & 31), 32)),
    "s_lshl_b64": (64, (64, 32), nonzero(lambda a, b: a << (b & 63), 64)),
    "s_lshr_b64": (64, (64, 32), nonzero(lambda a, b: a >> (b & 63), 64)),
    "s_ashr_i64": (64, (64, 32), nonzero(lambda a, b: signed(a, 64) >> (b & 63), 64)),
    "s_bfm_b32": (32, (32, 32), plain(lambda a, b: ((1 << (a & 31)) - 1) << (b & 31))),
    "s_bfm_b64": (64, (32, 32), plain(lambda a, b: ((1 << (a & 63)) - 1) << (b & 63))),
    "s_mul_i32": (32, (32, 32), plain(lambda a, b: a * b)),
    "s_mul_hi_u32": (32, (32, 32), plain(lambda a, b: a * b >> 32)),
    "s_mul_hi_i32": (32, (32, 32), plain(lambda a, b: signed(a) * signed(b) >> 32)),
    "s_bfe_u32": (32, (32, 32), nonzero(bfe(32, False), 32)),
    "s_bfe_i32": (32, (32, 32), nonzero(bfe(32, True), 32)),
    "s_bfe_u64": (64, (64, 32), nonzero(bfe(64, False), 64)),
    "s_bfe_i64": (64, (64, 32), nonzero(bfe(64, True), 64)),
    "s_absdiff_i32": (32, (32, 32), nonzero(lambda a, b: abs(signed(a - b)), 32)),
    "s_pack_ll_b32_b16": (32, (32, 32), plain(lambda a, b: a & 0xFFFF | b << 16)),
    "s_pack_lh_b32_b16": (32, (32, 32), plain(lambda a, b: a & 0xFFFF | b >> 16 << 16)),
    "s_pack_hh_b32_b16": (32, (32, 32), plain(lambda a, b: a >> 16 | b >> 16 << 16)),
    **{f"s_lshl{n}_add_u32": (32, (32, 32), lambda a, b, n=n: ((a << n) + b, (a << n) + b > M32)) for n in (1, 2, 3, 4)},
    **{f"s_{name}_b{bits}": (bits, (bits, bits), nonzero(f, bits)) for name, f in BITWISE.items() for bits in (32, 64)},
}
WITH_SCC = {
    "s_addc_u32": (32, (32, 32), lambda scc, a, b: (a + b + scc, a + b + scc > M32)),
    "s_subb_u32": (32, (32, 32), lambda scc, a, b: (a - b - scc, b + scc > a)),
    "s_cselect_b32": (32, (32, 32), lambda scc, a, b: (a if scc else b, scc)),
    "s_cselect_b64": (64, (64, 64), lambda scc, a, b: (a if scc else b, scc)),
}
ONE = {
    "s_abs_i32": (32, (32,), nonzero(lambda a: abs(signed(a)), 32)),
    "s_sext_i32_i8": (32, (32,), plain(lambda a: signed(a, 8))),
    "s_sext_i32_i16": (32, (32,), plain(lambda a: signed(a, 16))),
    "s_flbit_i32": (32, (32,), plain(lambda a: leading_sign(a, 32))),
    "s_flbit_i32_i64": (32, (64,), plain(lambda a: leading_sign(a, 64))),
    "s_bitreplicate_b64_b32": (64, (32,), plain(lambda a: sum(3 << 2 * i for i in range(32) if a >> i & 1))),
}
for _bits in (32, 64):
    ONE |= {
        f"s_mov_b{_bits}": (_bits, (_bits,), plain(lambda a: a)),
        f"s_not_b{_bits}": (_bits, (_bits,), nonzero(lambda a: ~a, _bits)),
        f"s_wqm_b{_bits}": (_bits, (_bits,), nonzero(lambda a, n=_bits: any_of_four(a, n, 4), _bits)),
        f"s_quadmask_b{_bits}": (_bits, (_bits,), nonzero(lambda a, n=_bits: any_of_four(a, n, 1), _bits)),
        f"s_brev_b{_bits}": (_bits, (_bits,), plain(lambda a, n=_bits: int(f"{a:0{n}b}"[::-1], 2))),
        f"s_bcnt0_i32_b{_bits}": (32, (_bits,), nonzero(lambda a, n=_bits: n - a.bit_count(), 32)),
        f"s_bcnt1_i32_b{_bits}": (32, (_bits,), nonzero(lambda a: a.bit_count(), 32)),
        f"s_ff0_i32_b{_bits}": (32, (_bits,), plain(lambda a, n=_bits: first_set(~a & ((1 << n) - 1)))),
        f"s_ff1_i32_b{_bits}": (32, (_bits,), plain(first_set)),
        f"s_flbit_i32_b{_bits}": (32, (_bits,), plain(lambda a, n=_bits: leading(a, n))),
    }
ALL = {**TWO, **WITH_SCC, **ONE}


def pair(register: int, bits: int) -> str:
    return f"s{register}" if bits == 32 else f"s[{register}:{register + 1}]"


def text_of(name: str) -> str:
    result, sources, _ = ALL[name]
    return f"{name} {pair(6, result)}, " + ", ".join(pair(10 + 2 * i, bits) for i, bits in enumerate(sources))


COMPARE_LINES = {
    f"{name}_{kind}": f"s_cmp_{name}_{kind} {pair(10, int(kind[1:]))}, {pair(12, int(kind[1:]))}"
    for kind, names in (("i32", "eq lg gt ge lt le"), ("u32", "eq lg gt ge lt le"), ("u64", "eq lg"))
    for name in names.split()
}
OTHERS = {
    "bitcmp0": "s_bitcmp0_b32 s10, s12",
    "bitcmp1": "s_bitcmp1_b64 s[10:11], s12",
    "bitset0": "s_bitset0_b32 s6, s10",
    "bitset1": "s_bitset1_b64 s[6:7], s10",
    "cmov": "s_cmov_b32 s6, s10",
    "movk": "s_movk_i32 s6, 0x8001",
    "addk": "s_addk_i32 s6, 0x8000",
    "mulk": "s_mulk_i32 s6, 0xfffe",
    "cmovk": "s_cmovk_i32 s6, 0x12",
    "cmpk_i": "s_cmpk_gt_i32 s6, 0xffff",
    "cmpk_u": "s_cmpk_gt_u32 s6, 0xffff",
    "literal": "s_add_u32 s6, s10, 0xdeadbeef",
    "inline": "s_add_u32 s6, -16, 64",
    "inline 64": "s_and_b64 s[6:7], s[10:11], -2",
    "float 64": "s_mov_b64 s[6:7], 0.5",
    "literal 64": "s_mov_b64 s[6:7], 0x80000000",
    "scc source": "s_mov_b32 s6, src_scc",
    "vccz": "s_mov_b32 s6, src_vccz",
    "saveexec": "s_and_saveexec_b64 s[6:7], s[10:11]",
    "saveexec vcc": "s_or_saveexec_b64 vcc, s[10:11]",
    "wrexec": "s_andn1_wrexec_b64 s[6:7], s[10:11]",
    "exec_lo": "s_mov_b32 exec_lo, s10",
    "exec": "s_mov_b64 exec, s[10:11]",
    "m0": "s_add_u32 m0, m0, 16",
    "movrels": "s_movrels_b32 s6, s10",
    "movreld": "s_movreld_b64 s[6:7], s[10:11]",
}


def code_of(text: str) -> bytes:
    lines = (*map(text_of, ALL), *COMPARE_LINES.values(), *OTHERS.values())
    return dict(zip(lines, (code for _, code in encodings(lines)), strict=True))[text]


def set_sgpr(group, register: int, values: list[int], bits: int) -> None:
    for i in range(bits // 32):
        group.state.sgpr[register + i] = [value >> 32 * i & M32 for value in values]


def get_sgpr(group, register: int, bits: int) -> list[int]:
    words = group.state.sgpr[register : register + bits // 32].astype(np.uint64)
    return [int(v) for v in (words[0] | words[1] << np.uint64(32) if bits == 64 else words[0])]


@pytest.mark.parametrize("scc", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_value_and_scc(name, scc):
    """One operand tuple a wave."""
    result_bits, source_bits, function = ALL[name]
    cases = list(itertools.product(*(VALUES if bits == 32 else WIDE for bits in source_bits)))
    group = make_group(len(cases))
    group.state.scc[:] = scc
    for i, bits in enumerate(source_bits):
        set_sgpr(group, 10 + 2 * i, [case[i] for case in cases], bits)
    execute(group, code_of(text_of(name)))
    for got, got_scc, case in zip(get_sgpr(group, 6, result_bits), group.state.scc, cases, strict=True):
        value, new_scc = function(scc, *case) if name in WITH_SCC else function(*case)
        wanted = (value & ((1 << result_bits) - 1), scc if new_scc is None else bool(new_scc))
        assert (got, bool(got_scc)) == wanted, f"{name} of {[hex(v) for v in case]}: {got:#x}, scc {got_scc}, expected {wanted}"


@pytest.mark.parametrize("name", COMPARE_LINES)
def test_compare(name):
    test, kind = name.split("_")
    bits = int(kind[1:])
    cases = list(itertools.product(VALUES if bits == 32 else WIDE, repeat=2))
    group = make_group(len(cases))
    set_sgpr(group, 10, [a for a, _ in cases], bits)
    set_sgpr(group, 12, [b for _, b in cases], bits)
    execute(group, code_of(COMPARE_LINES[name]))
    functions = {"eq": "__eq__", "lg": "__ne__", "gt": "__gt__", "ge": "__ge__", "lt": "__lt__", "le": "__le__"}
    for got, (a, b) in zip(group.state.scc, cases, strict=True):
        x, y = (signed(a), signed(b)) if kind[0] == "i" else (a, b)
        assert bool(got) == getattr(x, functions[test])(y), (a, b)


def run(name: str, *, scc: bool = False, **registers: int):
    """registers: s6=…, s10=… as 64-bit values into pairs; vcc, exec, m0."""
    group = make_group()
    group.state.scc[:] = scc
    for register, value in registers.items():
        number = {"vcc": VCC, "exec": EXEC, "m0": M0}.get(register) or int(register[1:])
        set_sgpr(group, number, [value], 32 if register == "m0" else 64)
    group.refresh_exec()
    execute(group, code_of(OTHERS[name]))
    return group


def value(group, register: int = 6, bits: int = 32) -> int:
    return get_sgpr(group, register, bits)[0]


def test_bit_instructions():
    assert run("bitcmp0", s10=0b1011, s12=34).scc[0] and not run("bitcmp0", s10=0b1011, s12=1).scc[0]
    assert run("bitcmp1", s10=1 << 40, s12=40).scc[0] and not run("bitcmp1", s10=1 << 40, s12=41).scc[0]
    assert value(run("bitset0", s6=0xFF, s10=35)) == 0xF7
    assert value(run("bitset1", s6=1, s10=63), bits=64) == 2**63 + 1


def test_conditional_moves():
    assert value(run("cmov", scc=True, s6=1, s10=2)) == 2 and value(run("cmov", s6=1, s10=2)) == 1
    assert value(run("cmovk", scc=True, s6=1)) == 0x12 and value(run("cmovk", s6=1)) == 1


def test_sixteen_bit_constants():
    assert value(run("movk")) == 0xFFFF8001
    group = run("addk", s6=0x80000000)
    assert value(group) == 0x7FFF8000 and group.scc[0]
    group = run("addk", s6=0x10000)
    assert value(group) == 0x8000 and not group.scc[0]
    assert value(run("mulk", s6=7)) == M32 - 13
    assert run("cmpk_i", s6=0).scc[0] and not run("cmpk_u", s6=0).scc[0]  # 0 > -1, but 0 <= 65535


def test_constants_and_special_sources():
    assert value(run("literal", s10=1)) == 0xDEADBEF0
    assert value(run("inline")) == 48
    assert value(run("inline 64", s10=M64), bits=64) == M64 - 1
    assert value(run("float 64"), bits=64) == 0x3FE0000000000000
    assert value(run("literal 64"), bits=64) == 0x80000000
    assert value(run("scc source", scc=True)) == 1
    assert value(run("vccz", vcc=0)) == 1 and value(run("vccz", vcc=1 << 60)) == 0


def test_exec_is_followed():
    old = 0xFF00FF00FF00FF00
    group = run("saveexec", exec=old, s10=0x0FF0)
    assert value(group, 6, 64) == old and value(group, EXEC, 64) == 0x0F00 and group.scc[0]
    assert list(np.flatnonzero(group.mask[0])) == [8, 9, 10, 11] and not group.exec_full
    group = run("saveexec vcc", exec=old, s10=M64)
    assert value(group, VCC, 64) == old and group.exec_full
    group = run("wrexec", exec=old, s10=old)
    assert value(group, 6, 64) == 0 and not group.mask.any() and not group.scc[0]
    assert list(np.flatnonzero(run("exec_lo", exec=0, s10=5).mask[0])) == [0, 2]
    assert list(np.flatnonzero(run("exec", s10=1 << 63).mask[0])) == [63]


def test_m0_and_indexed_moves():
    assert value(run("m0", m0=0x100), M0) == 0x110
    assert value(run("movrels", m0=2, s10=1, s12=77)) == 77
    assert value(run("movreld", m0=4, s10=M64 - 5), 10, 64) == M64 - 5
