"""Packed vector instructions (VOP3P): two 16-bit results in a register, two f32 results in a register pair, dot products, mixed-precision FMA.

op_sel chooses the half of each source that feeds the low result, op_sel_hi the half that feeds the high one; neg and neg_hi negate likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import float_math as fm
from . import vector_integer as vi
from .instruction import Encoded, Row, Run, UnsupportedEncoding
from .operands import (
    FIRST_VGPR,
    KINDS,
    Kind,
    Reader,
    check_constant_bus,
    constant_bits,
    refuse_modifiers,
    require_even,
    scalar_u32,
    vector_source,
    vgpr_number,
    vgpr_reader,
)
from .state import Group
from .vector_binding import Write, apply_sign_modifiers, result_writer, saturate

Array = Any
U32 = np.uint32


def _codes(encoded: Encoded, count: int) -> list[int]:
    present = (1 << count) - 1
    if (encoded.neg | encoded.neg_hi | encoded.op_sel) & ~present:
        raise UnsupportedEncoding("a modifier of an absent operand")
    codes = [encoded.src0, encoded.src1, encoded.src2][:count]
    check_constant_bus(*codes)
    return codes


def _half_readers(encoded: Encoded, kind: Kind, count: int, select: int, negate: int) -> list[Reader]:
    """One 16-bit reader a source."""
    readers = []
    for i, code in enumerate(_codes(encoded, count)):
        read = vector_source(code, kind, None, select >> i & 1)
        readers.append(apply_sign_modifiers(read, kind, False, bool(negate >> i & 1)))
    return readers


def _apply(readers: list[Reader], compute: Callable[..., Array]) -> Reader:
    if len(readers) == 2:
        first, second = readers
        return lambda group: compute(first(group), second(group))
    first, second, third = readers
    return lambda group: compute(first(group), second(group), third(group))


def _packed16(mnemonic: str, kind_name: str, compute: Callable[..., Array], count: int = 2, clamped: Callable[..., Array] | None = None) -> Row:
    """clamped: as in Operation; float kinds clamp to 0..1."""
    kind = KINDS[kind_name]

    def bind(encoded: Encoded) -> Run:
        final = in_mode = encoded.mode.function(compute)
        if encoded.clamp:
            if kind.is_float:
                final = lambda *sources: encoded.mode.clamp(in_mode(*sources))  # noqa: E731
            elif clamped is None:
                raise UnsupportedEncoding("clamp")
            else:
                final = lambda *sources: saturate(clamped(*(source.astype(np.int64) for source in sources)), kind)  # noqa: E731
        low = _apply(_half_readers(encoded, kind, count, encoded.op_sel, encoded.neg), final)
        high = _apply(_half_readers(encoded, kind, count, encoded.op_sel_hi, encoded.neg_hi), final)
        register = encoded.vdst

        def run(group: Group) -> None:
            bottom, top = low(group).view(np.uint16), high(group).view(np.uint16)
            group.write_vgpr(register, bottom | top.astype(U32) << U32(16))

        return run

    return Row(mnemonic, bind)


def _half_of_pair(code: int, kind: Kind, half: int) -> Reader:
    """One dword of a 64-bit source of packed dwords: a register of the pair, or the low dword of an inline constant."""
    if code >= FIRST_VGPR:
        require_even(code - FIRST_VGPR)
        return vgpr_reader(code - FIRST_VGPR + half, kind)
    constant = constant_bits(code, kind, None)
    if constant is not None:
        if half and constant:
            raise UnsupportedEncoding("the high dword of an inline constant, which no document defines")
        return vector_source(code, kind)
    if code % 2:
        raise UnsupportedEncoding(f"a pair of registers that begins at the odd scalar operand {code}")
    narrow = scalar_u32(code + half)
    return lambda group: narrow(group)[:, None].view(kind.dtype)


def _pair_readers(encoded: Encoded, count: int, select: int, negate: int) -> list[Reader]:
    kind = KINDS["f32"]
    readers = []
    for i, code in enumerate(_codes(encoded, count)):
        read = apply_sign_modifiers(_half_of_pair(code, kind, select >> i & 1), kind, False, bool(negate >> i & 1))
        readers.append(encoded.mode.source(read, kind))
    return readers


def _packed_f32(mnemonic: str, compute: Callable[..., Array], count: int = 2) -> Row:
    def bind(encoded: Encoded) -> Run:
        final = (lambda *sources: encoded.mode.clamp(compute(*sources))) if encoded.clamp else compute
        low = _apply(_pair_readers(encoded, count, encoded.op_sel, encoded.neg), final)
        high = _apply(_pair_readers(encoded, count, encoded.op_sel_hi, encoded.neg_hi), final)
        register, settle = encoded.vdst, encoded.mode.settle(KINDS["f32"])
        require_even(register)

        def run(group: Group) -> None:
            bottom, top = settle(low(group)), settle(high(group))  # both before either is written: sources may be the destination
            group.write_vgpr(register, bottom.view(U32))
            group.write_vgpr(register + 1, top.view(U32))

        return run

    return Row(mnemonic, bind)


def _packed_move(encoded: Encoded) -> Run:
    """The low result from src0, the high one from src1, each from the dword that op_sel names."""
    if encoded.clamp or encoded.neg or encoded.neg_hi:
        raise UnsupportedEncoding("a modifier of pk_mov")
    check_constant_bus(encoded.src0, encoded.src1)
    require_even(encoded.vdst)
    kind = KINDS["u32"]
    first, second = _half_of_pair(encoded.src0, kind, encoded.op_sel & 1), _half_of_pair(encoded.src1, kind, encoded.op_sel >> 1 & 1)
    register = encoded.vdst

    def run(group: Group) -> None:
        bottom, top = first(group), np.array(second(group))  # a copy: the first write may change the second source
        group.write_vgpr(register, bottom)
        group.write_vgpr(register + 1, top)

    return run


def _dot_integer(mnemonic: str, kind_name: str, compute: Callable[..., Array]) -> Row:
    kind = KINDS[kind_name]

    def bind(encoded: Encoded) -> Run:
        if encoded.neg or encoded.neg_hi or encoded.op_sel or encoded.op_sel_hi not in (3, 7):
            raise UnsupportedEncoding("a modifier of an integer dot product")
        codes = _codes(encoded, 3)
        readers = [vector_source(codes[0], KINDS["u32"]), vector_source(codes[1], KINDS["u32"]), vector_source(codes[2], kind)]
        final = compute
        if encoded.clamp:
            final = lambda a, b, c: saturate(compute(a, b, c.astype(np.int64)), kind)  # noqa: E731
        write, value = result_writer(encoded, kind), _apply(readers, final)
        return lambda group: write(group, value(group))

    return Row(mnemonic, bind)


def bf16_halves(value: Array) -> tuple[Array, Array]:
    """The low and high bf16 of a dword as f32."""
    return (value << U32(16)).view(np.float32), (value & U32(0xFFFF0000)).view(np.float32)


def dot2_f32(a_low: Array, b_low: Array, a_high: Array, b_high: Array, addend: Array) -> Array:
    """a_low * b_low + a_high * b_high + addend in f32, denormals flushed in and out. The order of rounding is not documented."""
    a_low, b_low, a_high, b_high, addend = (fm.flush(x) for x in (a_low, b_low, a_high, b_high, addend))
    return fm.flush(fm.fma_f32(a_low, b_low, fm.fma_f32(a_high, b_high, addend)))


def dot2c_f32_bf16(a: Array, b: Array, addend: Array) -> Array:
    (a_low, a_high), (b_low, b_high) = bf16_halves(a), bf16_halves(b)
    return dot2_f32(a_low, b_low, a_high, b_high, addend)


def _f16_halves(value: Array) -> tuple[Array, Array]:
    """The low and high f16 of a dword as f32."""
    low, high = value.astype(np.uint16), (value >> U32(16)).astype(np.uint16)
    return low.view(np.float16).astype(np.float32), high.view(np.float16).astype(np.float32)


def dot2c_f32_f16(a: Array, b: Array, addend: Array) -> Array:
    (a_low, a_high), (b_low, b_high) = _f16_halves(a), _f16_halves(b)
    return dot2_f32(a_low, b_low, a_high, b_high, addend)


def _dot_float(mnemonic: str, halves: Callable[[Array], tuple[Array, Array]]) -> Row:
    def bind(encoded: Encoded) -> Run:
        if encoded.op_sel or encoded.op_sel_hi != 7:
            raise UnsupportedEncoding("op_sel on a dot product")
        codes = _codes(encoded, 3)
        if any(code < FIRST_VGPR and constant_bits(code, KINDS["u32"], None) not in (None, 0) for code in codes[:2]):
            raise UnsupportedEncoding("an inline constant in a packed source of a dot product")
        first, second = (vector_source(code, KINDS["u32"]) for code in codes[:2])
        f32 = KINDS["f32"]
        third = apply_sign_modifiers(vector_source(codes[2], f32), f32, bool(encoded.neg_hi & 4), bool(encoded.neg & 4))
        flip_low, flip_high = ([np.float32(-1 if bits >> i & 1 else 1) for i in range(2)] for bits in (encoded.neg, encoded.neg_hi))
        write, clamp = result_writer(encoded, f32), bool(encoded.clamp)

        def run(group: Group) -> None:
            a, b = halves(first(group)), halves(second(group))
            value = dot2_f32(
                a[0] * flip_low[0], b[0] * flip_low[1], a[1] * flip_high[0], b[1] * flip_high[1], third(group),
            )  # fmt: skip
            write(group, encoded.mode.clamp(value) if clamp else value)

        return run

    return Row(mnemonic, bind)


def _mix(mnemonic: str, half: int | None) -> Row:
    """f32 fused multiply-add whose sources are f32 (op_sel_hi 0) or a half of an f16 register; the result is f32 or one f16 half.

    neg_hi is abs here.
    """

    def source(encoded: Encoded, i: int, code: int) -> Reader:
        if encoded.op_sel_hi >> i & 1:
            narrow = vector_source(code, KINDS["f16"], None, encoded.op_sel >> i & 1)
            wide: Reader = lambda group: narrow(group).astype(np.float32)  # noqa: E731
        else:
            wide = encoded.mode.source(vector_source(code, KINDS["f32"]), KINDS["f32"])
        return apply_sign_modifiers(wide, KINDS["f32"], bool(encoded.neg_hi >> i & 1), bool(encoded.neg >> i & 1))

    def bind(encoded: Encoded) -> Run:
        codes = [encoded.src0, encoded.src1, encoded.src2]
        check_constant_bus(*codes)
        value = _apply([source(encoded, i, code) for i, code in enumerate(codes)], fm.fma_f32)
        write = result_writer(encoded, KINDS["f32"]) if half is None else _half_writer(encoded.vdst, half)
        if encoded.clamp:
            return lambda group: write(group, encoded.mode.clamp(value(group)))
        return lambda group: write(group, value(group))

    return Row(mnemonic, bind)


def _half_writer(register: int, half: int) -> Write:
    """f32 rounded to f16 into one half of the register; the other half stays."""
    keep, shift = U32(0xFFFF if half else 0xFFFF0000), U32(16 * half)

    def write(group: Group, value: np.ndarray) -> None:
        bits = value.astype(np.float16).view(np.uint16).astype(U32) << shift
        group.write_vgpr(register, (group.read_vgpr(register) & keep) | bits)

    return write


def _accvgpr(mnemonic: str, to_accumulator: bool) -> Row:
    """Moves between the two halves of the register file: a[n] is register accum_offset + n."""

    def bind(encoded: Encoded) -> Run:
        refuse_modifiers(encoded, "neg", "neg_hi", "clamp", "op_sel")
        if to_accumulator:
            source, register = vector_source(encoded.src0, KINDS["u32"]), encoded.accum_offset + encoded.vdst
        else:
            source, register = vgpr_reader(vgpr_number(encoded.src0) + encoded.accum_offset, KINDS["u32"]), encoded.vdst
        return lambda group: group.write_vgpr(register, source(group))

    return Row(mnemonic, bind)


def _accvgpr_mov(encoded: Encoded) -> Run:
    if encoded.encoding != "VOP1" or encoded.src0 < FIRST_VGPR:
        raise UnsupportedEncoding("accvgpr_mov of anything but an accumulator register")
    source, register = encoded.src0 - FIRST_VGPR + encoded.accum_offset, encoded.vdst + encoded.accum_offset
    return lambda group: group.write_vgpr(register, group.read_vgpr(source))


def _three(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda a, b, c: function(function(a, b), c)


def _multiply_add(a: Array, b: Array, c: Array) -> Array:
    return a * b + c


def _shift(function: Callable[..., Array]) -> Callable[..., Array]:
    """Shift amount first; 16-bit values shift by its low 4 bits."""
    return lambda amount, value: function(value, amount & amount.dtype.type(15))


ACCVGPR_VOP1 = {82: Row("v_accvgpr_mov_b32", _accvgpr_mov)}
VOP3P: dict[int, Row] = {
    0: _packed16("v_pk_mad_i16", "i16", _multiply_add, 3, clamped=_multiply_add),
    1: _packed16("v_pk_mul_lo_u16", "u16", np.multiply),
    2: _packed16("v_pk_add_i16", "i16", np.add, clamped=np.add),
    3: _packed16("v_pk_sub_i16", "i16", np.subtract, clamped=np.subtract),
    4: _packed16("v_pk_lshlrev_b16", "u16", _shift(np.left_shift)),
    5: _packed16("v_pk_lshrrev_b16", "u16", _shift(np.right_shift)),
    6: _packed16("v_pk_ashrrev_i16", "i16", _shift(np.right_shift)),
    7: _packed16("v_pk_max_i16", "i16", np.maximum),
    8: _packed16("v_pk_min_i16", "i16", np.minimum),
    9: _packed16("v_pk_mad_u16", "u16", _multiply_add, 3, clamped=_multiply_add),
    10: _packed16("v_pk_add_u16", "u16", np.add, clamped=np.add),
    11: _packed16("v_pk_sub_u16", "u16", np.subtract, clamped=np.subtract),
    12: _packed16("v_pk_max_u16", "u16", np.maximum),
    13: _packed16("v_pk_min_u16", "u16", np.minimum),
    14: _packed16("v_pk_fma_f16", "f16", fm.fma_f16, 3),
    15: _packed16("v_pk_add_f16", "f16", np.add),
    16: _packed16("v_pk_mul_f16", "f16", np.multiply),
    17: _packed16("v_pk_min_f16", "f16", fm.minimum),
    18: _packed16("v_pk_max_f16", "f16", fm.maximum),
    26: _dot_float("v_dot2_f32_bf16", bf16_halves),
    27: _packed16("v_pk_minimum3_f16", "f16", _three(fm.propagating_minimum), 3),
    28: _packed16("v_pk_maximum3_f16", "f16", _three(fm.propagating_maximum), 3),
    32: _mix("v_fma_mix_f32", None),
    33: _mix("v_fma_mixlo_f16", 0),
    34: _mix("v_fma_mixhi_f16", 1),
    35: _dot_float("v_dot2_f32_f16", _f16_halves),
    38: _dot_integer("v_dot2_i32_i16", "i32", vi.dot_i32_i16),
    39: _dot_integer("v_dot2_u32_u16", "u32", vi.dot_u32_u16),
    40: _dot_integer("v_dot4_i32_i8", "i32", vi.dot_i32_i8),
    41: _dot_integer("v_dot4_u32_u8", "u32", vi.dot_u32_u8),
    42: _dot_integer("v_dot8_i32_i4", "i32", vi.dot_i32_i4),
    43: _dot_integer("v_dot8_u32_u4", "u32", vi.dot_u32_u4),
    48: _packed_f32("v_pk_fma_f32", fm.fma_f32, 3),
    49: _packed_f32("v_pk_mul_f32", np.multiply),
    50: _packed_f32("v_pk_add_f32", np.add),
    51: Row("v_pk_mov_b32", _packed_move),
    0x58: _accvgpr("v_accvgpr_read_b32", to_accumulator=False),
    0x59: _accvgpr("v_accvgpr_write_b32", to_accumulator=True),
}
