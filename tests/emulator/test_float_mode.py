"""What the floating-point mode of a kernel changes: f32 denormals flushed, outside IEEE mode, the NaN rule of clamp. Oracle: exact rationals."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Callable

import numpy as np
import pytest
from asm import assemble, descriptor, encodings
from exact import F16, F32, F64, SPECIAL
from test_vector_float import near_ones, randoms
from vectors import ALL_LANES, check, execute, get_mask, get_vgpr, make_group, set_vgpr

from mla_rt.emulator.float_mode import FloatMode
from mla_rt.emulator.machine import Dispatch, run
from mla_rt.emulator.memory import Memory
from mla_rt.errors import UnknownInstruction

FLUSHED = FloatMode(flush_f32=True)
NOT_IEEE = FloatMode(ieee=False)
ONE, TWO, DENORMAL, SMALLEST_NORMAL = 0x3F800000, 0x40000000, 0x00400000, 0x00800000
SIGNALLING, QUIET = 0x7F800001, 0x7FC00000


def flush(bits: int) -> int:
    return bits if bits & 0x7F800000 else bits & 0x80000000


def tiny(count: int, seed: int) -> list[int]:
    """Denormals and the smallest normal numbers, of both signs."""
    return [bits & 0x81FFFFFF for bits in randoms(F32, count, seed)]


def operands(count: int) -> list[tuple[int, ...]]:
    few = SPECIAL[F32][:14] + SPECIAL[F32][-2:]
    found: list[tuple[int, ...]] = list(itertools.product(few if count < 3 else few[::2], repeat=count))
    found += list(zip(*(tiny(400, seed) for seed in range(count)), strict=True))
    small = [tiny(400, 10), near_ones(F32, 400, 11), tiny(400, 12)]
    return found + list(zip(*small[:count], strict=True))


def line(name: str, count: int) -> str:
    return f"{name} v6, " + ", ".join(f"v{10 + 2 * i}" for i in range(count))


def lower(a: int, b: int) -> int:
    """v_min_f32 of numbers (no NaN)."""
    x, y = F32.value(a), F32.value(b)
    return a | b if x == y == 0 else a if x < y else b


def upper(a: int, b: int) -> int:
    x, y = F32.value(a), F32.value(b)
    return a & b if x == y == 0 else a if x > y else b


ARITHMETIC: dict[str, tuple[int, Callable[..., int]]] = {
    "v_add_f32": (2, F32.add),
    "v_mul_f32": (2, F32.multiply),
    "v_sub_f32": (2, lambda a, b: F32.add(a, b ^ 0x80000000)),
    "v_fma_f32": (3, F32.fma),
    "v_add_f32_sdwa": (2, F32.add),
}
SELECTING: dict[str, tuple[int, Callable[..., int]]] = {
    "v_min_f32": (2, lower),
    "v_max_f32": (2, upper),
    "v_min3_f32": (3, lambda a, b, c: lower(lower(a, b), c)),
    "v_max3_f32": (3, lambda a, b, c: upper(upper(a, b), c)),
    "v_med3_f32": (3, lambda a, b, c: upper(lower(a, b), lower(upper(a, b), c))),
}


@pytest.mark.parametrize("name", [*ARITHMETIC, *SELECTING])
def test_operands_and_results_are_flushed(name):
    count, compute = {**ARITHMETIC, **SELECTING}[name]
    tuples = operands(count)
    if name in SELECTING:
        tuples = [each for each in tuples if not any(F32.is_nan(bits) for bits in each)]
    tail = " dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD" if name.endswith("_sdwa") else ""
    ((text, code),) = encodings((line(name, count) + tail,))
    check(text, code, tuples, [32] * count, 32, lambda *each: flush(compute(*map(flush, each))), F32.same, mode=FLUSHED)
    kept = [each for each in tuples if any(0 < bits & 0x7FFFFFFF < SMALLEST_NORMAL for bits in each)]
    assert len(kept) > 300
    check(text, code, kept, [32] * count, 32, compute, F32.same)  # the default mode keeps them


def test_accumulator_and_literals_are_flushed():
    a, b, c = (tiny(64, seed) for seed in (1, 2, 3))
    ((fmac, fmac_code),) = encodings(("v_fmac_f32 v6, v10, v12",))
    check(
        fmac, fmac_code, list(zip(a, near_ones(F32, 64, 4), strict=True)), [32, 32], 32,
        lambda x, y: flush(F32.fma(flush(x), y, 0)), F32.same,
        old=[DENORMAL] * 64, mode=FLUSHED,
    )  # fmt: skip
    for text, compute in (
        ("v_fmamk_f32 v6, v10, 0x00400000, v12", lambda x, y: F32.fma(flush(x), 0, flush(y))),
        ("v_fmaak_f32 v6, v10, v12, 0x00400000", lambda x, y: F32.fma(flush(x), flush(y), 0)),
    ):
        ((_, code),) = encodings((text,))
        check(text, code, list(zip(b, c, strict=True)), [32, 32], 32, lambda x, y, compute=compute: flush(compute(x, y)), F32.same, mode=FLUSHED)


@pytest.mark.parametrize(("name", "compute"), [("v_pk_add_f32", F32.add), ("v_pk_mul_f32", F32.multiply), ("v_pk_fma_f32", F32.fma)])
def test_packed_f32(name, compute):
    count = 3 if "fma" in name else 2
    tuples = operands(count)[: 64 * (len(operands(count)) // 64)]
    group = make_group(len(tuples) // 64)
    for i in range(count):
        set_vgpr(group, 10 + 2 * i, [each[i] for each in tuples])
        set_vgpr(group, 11 + 2 * i, [each[i] for each in reversed(tuples)])
    ((_, code),) = encodings((f"{name} v[6:7], " + ", ".join(f"v[{10 + 2 * i}:{11 + 2 * i}]" for i in range(count)),))
    execute(group, code, FLUSHED)
    for register, order in ((6, tuples), (7, tuples[::-1])):
        for got, each in zip(get_vgpr(group, register), order, strict=True):
            assert F32.same(got, flush(compute(*map(flush, each)))), [hex(bits) for bits in each]


def test_conversions():
    numbers = tiny(256, 5) + SPECIAL[F32]
    for text, bits, compute in (
        ("v_cvt_f64_f32 v[6:7], v10", 64, lambda x: F64.round(F32.value(flush(x)), negative_zero=bool(x >> 31))),
        ("v_cvt_f16_f32 v6, v10", 16, lambda x: F16.round(F32.value(flush(x)), negative_zero=bool(x >> 31))),
        ("v_ceil_f32 v6, v10", 32, None),
    ):
        ((_, code),) = encodings((text,))
        if compute is None:  # a denormal is zero before it is rounded up
            check(text, code, [(x,) for x in tiny(64, 6) if not x & 0x7F800000], [32], 32, lambda x: x & 0x80000000, mode=FLUSHED)
        else:
            same = {64: F64.same, 16: F16.same}[bits]
            check(text, code, [(x,) for x in numbers], [32], bits, compute, same, mode=FLUSHED)
    ((text, code),) = encodings(("v_cvt_f32_f64 v6, v[10:11]",))
    wide = [F64.round(F32.value(x), negative_zero=bool(x >> 31)) for x in numbers]
    check(text, code, [(x,) for x in wide], [64], 32, lambda x: flush(F32.round(F64.value(x), negative_zero=bool(x >> 63))), F32.same, mode=FLUSHED)


def result_of(text: str, *values: int, mode: FloatMode = FLUSHED, old: int = 0, register: int = 6) -> int:
    """Lane 0 of v6 after an instruction with these values in v10, v12, …"""
    group = make_group()
    set_vgpr(group, 6, [old])
    for i, value in enumerate(values):
        set_vgpr(group, 10 + 2 * i, [value])
    execute(group, encodings((text,))[0][1], mode)
    return get_vgpr(group, register)[0]


def test_scaled_conversions_flush_the_wide_side():
    # 2^-127 over a scale of 2^-126 is 1/2 (0x30 in E4M3); 1/2 (0x30) times 2^-126 is a denormal, 1 (0x38) times it is not.
    narrow, widen = "v_cvt_scalef32_pk_fp8_f32 v6, v10, v12, v14", "v_cvt_scalef32_pk_f32_fp8 v[6:7], v10, v12"
    assert result_of(narrow, DENORMAL, ONE, SMALLEST_NORMAL, mode=FloatMode()) & 0xFF == 0x30
    assert result_of(narrow, DENORMAL, ONE, SMALLEST_NORMAL) & 0xFF == 0
    assert result_of(widen, 0x3830, SMALLEST_NORMAL, mode=FloatMode()) == DENORMAL
    assert result_of(widen, 0x3830, SMALLEST_NORMAL) == 0
    assert result_of(widen, 0x3830, SMALLEST_NORMAL, register=7) == SMALLEST_NORMAL


def test_what_is_not_arithmetic_keeps_denormals():
    # VCC is all ones, as every register before it is written.
    for text in ("v_mov_b32 v6, v10", "v_or_b32 v6, v10, v12", "v_perm_b32 v6, v10, v10, v12", "v_cndmask_b32 v6, v12, v10, vcc"):
        selector = 0x03020100 if "perm" in text else 0
        assert result_of(text, DENORMAL, selector) == DENORMAL, text


def test_other_formats_keep_denormals():
    ((text, code),) = encodings(("v_add_f16 v6, v10, v12",))
    small = [bits & 0x83FF for bits in randoms(F16, 128, 7)]
    check(text, code, list(zip(small[:64], small[64:], strict=True)), [16, 16], 16, F16.add, F16.same, mode=FLUSHED)
    ((text, code),) = encodings(("v_add_f64 v[6:7], v[10:11], v[12:13]",))
    small = [bits & 0x800FFFFFFFFFFFFF for bits in randoms(F64, 128, 8)]
    check(text, code, list(zip(small[:64], small[64:], strict=True)), [64, 64], 64, F64.add, F64.same, mode=FLUSHED)


def test_compares_take_denormals_for_zero_but_the_class_test_does_not():
    def lanes_of(text: str, mode: FloatMode) -> bool:
        group = make_group()
        set_vgpr(group, 10, [DENORMAL])
        set_vgpr(group, 12, [1 << 7 if "class" in text else 0])
        execute(group, encodings((text,))[0][1], mode)
        return get_mask(group, 106)[0]

    assert lanes_of("v_cmp_gt_f32 vcc, v10, v12", FloatMode()) and not lanes_of("v_cmp_gt_f32 vcc, v10, v12", FLUSHED)
    assert lanes_of("v_cmp_eq_f32 vcc, v10, v12", FLUSHED)
    assert lanes_of("v_cmp_gt_u32 vcc, v10, v12", FLUSHED)
    assert lanes_of("v_cmp_class_f32 vcc, v10, v12", FLUSHED)  # bit 7: positive denormal


@pytest.mark.parametrize(
    ("text", "values", "expected", "in_ieee_mode"),
    [
        ("v_max_f32 v6, v10, v12", (SIGNALLING, ONE), ONE, QUIET),
        ("v_min_f32 v6, v10, v12", (ONE, SIGNALLING), ONE, QUIET),
        ("v_max3_f32 v6, v10, v12, v14", (SIGNALLING, ONE, 0), ONE, 0),
        ("v_min3_f32 v6, v10, v12, v14", (SIGNALLING, ONE, TWO), ONE, TWO),
        ("v_med3_f32 v6, v10, v12, v14", (SIGNALLING, ONE, TWO), ONE, TWO),
    ],
)
def test_outside_ieee_mode_a_signalling_nan_is_like_a_quiet_one(text, values, expected, in_ieee_mode):
    assert result_of(text, *values, mode=NOT_IEEE) == expected
    assert F32.same(result_of(text, *values, mode=FloatMode()), in_ieee_mode)


def test_packed_halves_outside_ieee_mode():
    text, values = "v_pk_max_f16 v6, v10, v12", (0x7C017C01, 0x3C003C00)
    assert result_of(text, *values, mode=NOT_IEEE) == 0x3C003C00
    assert F16.is_nan(result_of(text, *values, mode=FloatMode()) & 0xFFFF)


@pytest.mark.parametrize("text", ["v_add_f32 v6, v10, v12 clamp", "v_pk_add_f32 v[6:7], v[10:11], v[12:13] clamp"])
def test_clamp_of_nan(text):
    assert result_of(text, QUIET, ONE, mode=FloatMode()) == 0
    assert F32.is_nan(result_of(text, QUIET, ONE, mode=FloatMode(dx10_clamp=False)))
    for mode in (FloatMode(), FloatMode(dx10_clamp=False)):
        assert result_of(text, ONE, ONE, mode=mode) == ONE
        assert result_of(text, ONE | 1 << 31, 0, mode=mode) == 0


def test_modes_of_descriptors():
    assert FloatMode.parse(0xF0, True, True) == FloatMode()
    assert FloatMode.parse(0xC0, False, False) == FloatMode(flush_f32=True, ieee=False, dx10_clamp=False)
    for unknown in (0x00, 0x30, 0xD0, 0xE0, 0x70, 0xB0, 0xF1, 0xF4, 0xC8):
        with pytest.raises(ValueError, match=f"{unknown:#x}"):
            FloatMode.parse(unknown, True, True)


def test_a_launch_takes_its_mode_from_the_descriptor():
    """The same bytes under two descriptors, one after the other: instructions bound for one mode are not used for the other."""
    code = assemble("s_load_dwordx2 s[6:7], s[0:1], 0x0\nv_mul_f32 v1, 1.0, v0\nv_mov_b32 v2, 0\ns_waitcnt lgkmcnt(0)\n"
                    "v_lshlrev_b32 v2, 2, v0\nglobal_store_dword v2, v1, s[6:7]\ns_endpgm\n")  # fmt: skip
    memory = Memory()
    try:
        image, output, kernarg = memory.allocate(len(code)), memory.allocate(256), memory.allocate(8)
        memory.bytes_at(image, len(code))[:] = np.frombuffer(code, np.uint8)
        memory.bytes_at(kernarg, 8)[:] = np.frombuffer(struct.pack("<Q", output), np.uint8)

        def launch(float_mode: int) -> np.ndarray:
            wanted = dataclasses.replace(descriptor(), float_mode=float_mode)
            run(Dispatch("scale", image, image, wanted, (1, 1, 1), (64, 1, 1), kernarg), memory)
            return memory.bytes_at(output, 256).view(np.uint32).copy()

        lanes = np.arange(64)  # as floats: denormals
        for float_mode, expected in ((0xF0, lanes), (0xC0, 0 * lanes), (0xF0, lanes)):
            np.testing.assert_array_equal(launch(float_mode), expected)
        with pytest.raises(UnknownInstruction, match="float mode 0xd0"):
            launch(0xD0)
    finally:
        memory.close()


def test_flushing_touches_only_active_lanes():
    group = make_group(active=ALL_LANES & ~1)
    set_vgpr(group, 6, [DENORMAL] * 64)
    set_vgpr(group, 10, [DENORMAL] * 64)
    execute(group, encodings(("v_add_f32 v6, v10, v10",))[0][1], FLUSHED)
    assert get_vgpr(group, 6) == [DENORMAL] + [0] * 63
