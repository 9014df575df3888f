"""Undefined bits through instructions that take or write parts of registers: packed values, narrow conversions, SDWA."""

from __future__ import annotations

import numpy as np

from .instruction import Encoded
from .lanes import sdwa_merge, sdwa_select
from .operands import FIRST_VGPR
from .shadow import ALL
from .undefined_sources import U32, ZERO, Masks, Rule, Sources


def _pack_of_two(sources: Sources) -> Masks:
    """A 16-bit result from each source."""
    low, high = (sources.mask(code) for code in sources.codes(2))
    return np.where(low != 0, U32(0xFFFF), ZERO) | np.where(high != 0, U32(0xFFFF0000), ZERO)


def _pack_halves(sources: Sources) -> Masks:
    """v_pack_b32_f16: the half of each source that op_sel names."""
    select = sources.encoded.fields.get("op_sel", 0)
    low, high = (sources.mask(code) >> U32(16 * (select >> i & 1)) & U32(0xFFFF) for i, code in enumerate(sources.codes(2)))
    return np.where(low != 0, U32(0xFFFF), ZERO) | np.where(high != 0, U32(0xFFFF0000), ZERO)


def _of_part(low: int, bits: int, registers: int = 1) -> Rule:
    """Only some bits of the source count."""

    def rule(sources: Sources) -> Masks:
        part = sources.mask(sources.codes()[0]) >> U32(low) & U32((1 << bits) - 1)
        if registers == 1:
            return np.where(part != 0, ALL, ZERO)
        width = bits // registers
        return [np.where(part >> U32(i * width) & U32((1 << width) - 1) != 0, ALL, ZERO) for i in range(registers)]

    return rule


def sdwa_rule(sources: Sources) -> Masks:
    """Selected bytes or words of the sources, and of the destination."""
    encoded = sources.encoded
    fields = encoded.fields
    found = sdwa_select(sources.mask(encoded.src0), encoded.src0_sel, False) != 0
    if "vsrc1" in fields:
        code = fields["vsrc1"] + (0 if fields["s1"] else FIRST_VGPR)
        found = found | (sdwa_select(sources.mask(code), fields["src1_sel"], False) != 0)
    found = np.broadcast_to(found, sources.group.mask.shape)
    if "dst_sel" not in fields:  # a compare
        return np.where(found, ALL, ZERO)
    if encoded.encoding == "VOP1_SDWA" and sources.mnemonic == "v_mov_b32":
        value = sdwa_select(sources.mask(encoded.src0), encoded.src0_sel, bool(encoded.src0_sext))
    else:
        value = np.where(found, ALL, ZERO)
    unused = encoded.dst_unused
    if (unused == 0 and encoded.dst_sel < 6) or unused == 2:
        return sdwa_merge(value, sources.mask(encoded.vdst + FIRST_VGPR), encoded.dst_sel, unused)
    return value


def _keep_field(low: int, bits: int) -> Rule:
    """The sources decide one field of the destination; the rest stays. (The last register read is the destination's old value.)"""
    field = U32(((1 << bits) - 1) << low)

    def rule(sources: Sources) -> Masks:
        register = sources.encoded.vdst
        old = sources.mask(register + FIRST_VGPR)
        return (old & ~field) | (sources.whole(skip_last=register) & field)

    return rule


def half_select_rule(sources: Sources) -> Masks:
    return _keep_field(16 * (sources.encoded.op_sel >> 3 & 1), 16)(sources)


HALF_SELECT = frozenset(
    [f"v_{name}{kind}" for name in ("min3_", "max3_", "med3_") for kind in ("i16", "u16", "f16")]
    + ["v_mad_u16", "v_mad_i16", "v_add_i16", "v_sub_i16", "v_fma_f16", "v_div_fixup_f16"]
    + ["v_ashr_pk_i8_i32", "v_ashr_pk_u8_i32", "v_bitop3_b16"]
)
_SCALED = "v_cvt_scalef32_"
# Conversions into a part of the destination -> its bits.
FIELDS = {
    **{f"v_cvt_pk_{small}_f32": 16 for small in ("fp8", "bf8")},
    **{f"v_cvt_sr_{small}_f32": 8 for small in ("fp8", "bf8")},
    **{f"v_cvt_sr_{wide}_f32": 16 for wide in ("f16", "bf16")},
    **{f"{_SCALED}pk_{small}_{wide}": 16 for small in ("fp8", "bf8") for wide in ("f32", "f16", "bf16")},
    **{f"{_SCALED}sr_{small}_{wide}": 8 for small in ("fp8", "bf8") for wide in ("f32", "f16", "bf16")},
    **{f"{_SCALED}{prefix}pk_fp4_{wide}": 8 for prefix in ("", "sr_") for wide in ("f32", "f16", "bf16")},
    **{f"{_SCALED}f16_{small}": 16 for small in ("fp8", "bf8")},
}


def field_rule(encoded: Encoded, name: str) -> Rule:
    bits = FIELDS[name]
    return _keep_field(16 * (encoded.op_sel >> 3) if bits == 16 else 8 * (encoded.op_sel >> 2), bits)


def _widen(bits: int, registers: int) -> Rule:
    """v_cvt_scalef32_pk_*: one element of `bits` for each half (registers 1) or each register; op_sel says where they begin."""

    def rule(sources: Sources) -> Masks:
        source, scale = sources.codes(2)
        select = sources.encoded.op_sel
        part = sources.mask(source) >> U32(16 * (select & 1) if bits == 8 else 8 * (select & 3))
        low, high = (part >> U32(i * bits) & U32((1 << bits) - 1) | sources.mask(scale) & U32(0x7F800000) for i in range(2))
        if registers == 2:
            return [np.where(each != 0, ALL, ZERO) for each in (low, high)]
        return np.where(low != 0, U32(0xFFFF), ZERO) | np.where(high != 0, U32(0xFFFF0000), ZERO)

    return rule


def packed_rule(encoded: Encoded, name: str) -> Rule:
    """Two results: of halves, or of registers of a pair."""
    select = encoded.op_sel, encoded.op_sel_hi
    move, wide = name == "v_pk_mov_b32", name in ("v_pk_mov_b32", "v_pk_fma_f32", "v_pk_mul_f32", "v_pk_add_f32")

    def rule(sources: Sources) -> Masks:
        count = 3 if any(part in name for part in ("fma", "mad", "3_")) else 2
        codes = sources.codes(count)
        if move:
            return [np.array(sources.mask(code, select[0] >> i & 1)) for i, code in enumerate(codes)]
        results = []
        for which in select:
            found = np.zeros((1, 1), np.bool_)
            for i, code in enumerate(codes):
                half = which >> i & 1
                mask = (
                    sources.mask(code, half if code < 128 or code >= FIRST_VGPR else 0)
                    if wide
                    else sources.mask(code) >> U32(16 * half) & U32(0xFFFF)
                )
                found = found | (mask != 0)
            results.append(found)
        if wide:
            return [np.where(found, ALL, ZERO) for found in results]
        return np.where(results[0], U32(0xFFFF), ZERO) | np.where(results[1], U32(0xFFFF0000), ZERO)

    return rule


PART_RULES: dict[str, Rule] = {
    "v_pack_b32_f16": _pack_halves,
    **{f"v_cvt_pk_{name}": _pack_of_two for name in ("bf16_f32", "f16_f32", "u16_u32", "i16_i32")},
    "v_cvt_pkrtz_f16_f32": _pack_of_two,
    **{f"v_cvt_f32_ubyte{i}": _of_part(8 * i, 8) for i in range(4)},
    **{f"v_cvt_f32_{small}": _of_part(0, 8) for small in ("fp8", "bf8")},
    **{f"v_cvt_pk_f32_{small}": _of_part(0, 16, 2) for small in ("fp8", "bf8")},
    "v_cvt_f32_bf16": _of_part(0, 16),
    **{f"{_SCALED}pk_{wide}_{small}": _widen(8, 1) for wide in ("f16", "bf16") for small in ("fp8", "bf8")},
    **{f"{_SCALED}pk_{wide}_fp4": _widen(4, 1) for wide in ("f16", "bf16")},
    **{f"{_SCALED}pk_f32_{small}": _widen(8, 2) for small in ("fp8", "bf8")},
    f"{_SCALED}pk_f32_fp4": _widen(4, 2),
}
