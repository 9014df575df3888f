"""Bit-field layouts of the gfx950 instruction formats.

A format is its name, its length and its fields as (lowest bit, width) of the instruction read as one little-endian integer. Field names are
those of the CDNA4 ISA guide in lower case. Bits that no field covers are reserved: they must be zero.

The SDWA and DPP forms of VOP1, VOP2 and VOPC are formats of their own ("VOP2_SDWA", "VOP1_DPP", …). In them `src0` is, as everywhere else,
the 9-bit operand code (256 + n for v[n]), not the raw 8-bit field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LITERAL, SDWA, DPP = 255, 249, 250  # operand codes of src0/ssrc that mean "a further dword follows"


@dataclass(frozen=True)
class Format:
    """name: as in the ISA guide; size: bytes without a literal; fields: name -> (lowest bit, width); signed: fields in two's complement."""

    name: str
    size: int
    fields: Mapping[str, tuple[int, int]]
    signed: frozenset[str] = frozenset()
    reserved: int = field(init=False)

    def __post_init__(self) -> None:
        used = 0
        for low, width in self.fields.values():
            used |= ((1 << width) - 1) << low
        object.__setattr__(self, "reserved", ~used & ((1 << 8 * self.size) - 1))

    def extract(self, word: int) -> dict[str, int]:
        values = {}
        for name, (low, width) in self.fields.items():
            value = word >> low & ((1 << width) - 1)
            if name in self.signed and value >> (width - 1):
                value -= 1 << width
            values[name] = value
        return values


# `encoding` holds the bits that identify the format; `op` is the key of the format's instruction table.
_Fields = dict[str, tuple[int, int]]
SOP2 = Format("SOP2", 4, {"encoding": (30, 2), "op": (23, 7), "sdst": (16, 7), "ssrc1": (8, 8), "ssrc0": (0, 8)})
SOPK = Format("SOPK", 4, {"encoding": (28, 4), "op": (23, 5), "sdst": (16, 7), "simm16": (0, 16)})
SOP1 = Format("SOP1", 4, {"encoding": (23, 9), "sdst": (16, 7), "op": (8, 8), "ssrc0": (0, 8)})
SOPC = Format("SOPC", 4, {"encoding": (23, 9), "op": (16, 7), "ssrc1": (8, 8), "ssrc0": (0, 8)})
SOPP = Format("SOPP", 4, {"encoding": (23, 9), "op": (16, 7), "simm16": (0, 16)})
SMEM = Format(
    "SMEM",
    8,
    {"encoding": (26, 6), "op": (18, 8), "imm": (17, 1), "glc": (16, 1), "nv": (15, 1), "soffset_en": (14, 1), "sdata": (6, 7), "sbase": (0, 6)}
    | {"soffset": (57, 7), "offset": (32, 21)},
    signed=frozenset({"offset"}),
)

_VOP1: _Fields = {"encoding": (25, 7), "vdst": (17, 8), "op": (9, 8)}
_VOP2: _Fields = {"encoding": (31, 1), "op": (25, 6), "vdst": (17, 8), "vsrc1": (9, 8)}
_VOPC: _Fields = {"encoding": (25, 7), "op": (17, 8), "vsrc1": (9, 8)}
_SRC0: _Fields = {"src0": (0, 9)}
VOP1 = Format("VOP1", 4, _VOP1 | _SRC0)
VOP2 = Format("VOP2", 4, _VOP2 | _SRC0)
VOPC = Format("VOPC", 4, _VOPC | _SRC0)

# `kind` is the src0 code that announces the second dword; `s0`/`s1` say that a source is an SGPR.
_KIND: _Fields = {"kind": (0, 9)}
_SDWA_SRC0: _Fields = {"src0": (32, 8), "src0_sel": (48, 3), "src0_sext": (51, 1), "src0_neg": (52, 1), "src0_abs": (53, 1), "s0": (55, 1)}
_SDWA_SRC1: _Fields = {"src1_sel": (56, 3), "src1_sext": (59, 1), "src1_neg": (60, 1), "src1_abs": (61, 1), "s1": (63, 1)}
_SDWA: _Fields = _KIND | _SDWA_SRC0 | _SDWA_SRC1
_SDWA_DST: _Fields = {"dst_sel": (40, 3), "dst_unused": (43, 2), "clamp": (45, 1), "omod": (46, 2)}
_SDWA_SDST: _Fields = {"sdst": (40, 7), "sd": (47, 1)}
_DPP: _Fields = (
    _KIND
    | {"src0": (32, 8), "dpp_ctrl": (40, 9), "bound_ctrl": (51, 1), "bank_mask": (56, 4), "row_mask": (60, 4)}
    | {"src0_neg": (52, 1), "src0_abs": (53, 1), "src1_neg": (54, 1), "src1_abs": (55, 1)}
)
VOP1_SDWA = Format("VOP1_SDWA", 8, _VOP1 | _SDWA | _SDWA_DST)
VOP2_SDWA = Format("VOP2_SDWA", 8, _VOP2 | _SDWA | _SDWA_DST)
VOPC_SDWA = Format("VOPC_SDWA", 8, _VOPC | _SDWA | _SDWA_SDST)
VOP1_DPP = Format("VOP1_DPP", 8, _VOP1 | _DPP)
VOP2_DPP = Format("VOP2_DPP", 8, _VOP2 | _DPP)

_SRC3: _Fields = {"src0": (32, 9), "src1": (41, 9), "src2": (50, 9)}
_VOP3: _Fields = {"encoding": (26, 6), "op": (16, 10), "clamp": (15, 1), "vdst": (0, 8), "omod": (59, 2), "neg": (61, 3)} | _SRC3
VOP3 = Format("VOP3", 8, _VOP3 | {"op_sel": (11, 4), "abs": (8, 3)})
VOP3SD = Format("VOP3SD", 8, _VOP3 | {"sdst": (8, 7)})
_PACKED: _Fields = {"encoding": (23, 9), "op": (16, 7), "vdst": (0, 8)} | _SRC3
# op_sel_hi is split over the two dwords (bit 2 apart from bits 1:0): `extract_fields` joins it.
VOP3P = Format(
    "VOP3P",
    8,
    _PACKED | {"clamp": (15, 1), "op_sel_hi2": (14, 1), "op_sel": (11, 3), "neg_hi": (8, 3), "op_sel_hi": (59, 2), "neg": (61, 3)},
)
_MAI: _Fields = _PACKED | {"cbsz": (8, 3), "abid": (11, 4), "acc_cd": (15, 1), "acc": (59, 2), "blgp": (61, 3)}
MAI = Format("VOP3P-MAI", 8, _MAI)
# A prefix that carries the scales, then an ordinary VOP3P-MAI word.
VOP3PX2 = Format(
    "VOP3PX2",
    16,
    {"prefix": (16, 16), "scale_op_sel": (11, 2), "scale_src0": (32, 9), "scale_src1": (41, 9), "scale_op_sel_hi": (59, 2)}
    | {name: (low + 64, width) for name, (low, width) in _MAI.items()},
)

FLAT = Format(
    "FLAT",
    8,
    {"encoding": (26, 6), "sc1": (25, 1), "op": (18, 7), "nt": (17, 1), "sc0": (16, 1), "seg": (14, 2), "lds": (13, 1), "offset": (0, 13)}
    | {"addr": (32, 8), "data": (40, 8), "saddr": (48, 7), "acc": (55, 1), "vdst": (56, 8)},
    signed=frozenset({"offset"}),
)
MUBUF = Format(
    "MUBUF",
    8,
    {"encoding": (26, 6), "op": (18, 7), "nt": (17, 1), "lds": (16, 1), "sc1": (15, 1), "sc0": (14, 1), "idxen": (13, 1), "offen": (12, 1)}
    | {"offset": (0, 12), "vaddr": (32, 8), "vdata": (40, 8), "srsrc": (48, 5), "acc": (55, 1), "soffset": (56, 8)},
)
DS = Format(
    "DS",
    8,
    {"encoding": (26, 6), "acc": (25, 1), "op": (17, 8), "gds": (16, 1), "offset1": (8, 8), "offset0": (0, 8)}
    | {"addr": (32, 8), "data0": (40, 8), "data1": (48, 8), "vdst": (56, 8)},
)

# VOP2 instructions whose third operand is always a literal dword: fmamk/fmaak f32, madmk/madak f16.
VOP2_WITH_LITERAL = frozenset({23, 24, 36, 37})
SOPK_WITH_LITERAL = frozenset({20})  # s_setreg_imm32_b32
# VOP3 instructions with a scalar destination: carry arithmetic, div_scale, mad_u64_u32, mad_i64_i32.
VOP3_WITH_SDST = frozenset({*range(0x119, 0x11F), 0x1E0, 0x1E1, 0x1E8, 0x1E9})
SCALED_MFMA_PREFIX = 0xD3AC
MAI_ENCODING = 0x1A7
ACCVGPR_READ, ACCVGPR_WRITE = 0x58, 0x59  # matrix opcodes by number, VOP3P by layout


def _vop(dword: int, plain: Format, sdwa: Format, dpp: Format | None) -> Format | None:
    return {SDWA: sdwa, DPP: dpp}.get(dword & 0x1FF, plain)


def identify(dword: int) -> Format | None:
    """The format of the instruction that begins with this dword, or None if the bits belong to no format of gfx950 compute."""
    if not dword >> 31:
        family = dword >> 25 & 0x3F
        if family == 0x3F:
            return _vop(dword, VOP1, VOP1_SDWA, VOP1_DPP)
        if family == 0x3E:
            return _vop(dword, VOPC, VOPC_SDWA, None)
        return _vop(dword, VOP2, VOP2_SDWA, VOP2_DPP)
    if dword >> 30 == 0b10:
        if dword >> 28 == 0b1011:
            return {0x17D: SOP1, 0x17E: SOPC, 0x17F: SOPP}.get(dword >> 23, SOPK)
        return SOP2
    if dword >> 16 == SCALED_MFMA_PREFIX:
        return VOP3PX2
    if dword >> 23 == MAI_ENCODING:
        op = dword >> 16 & 0x7F
        # Below 0x34 are the packed instructions, but for the two unscaled f8f6f4 matrix instructions.
        return MAI if op in (0x2D, 0x2E) or (op >= 0x34 and op not in (ACCVGPR_READ, ACCVGPR_WRITE)) else VOP3P
    if dword >> 26 == 0x34:
        return VOP3SD if dword >> 16 & 0x3FF in VOP3_WITH_SDST else VOP3
    return {0x30: SMEM, 0x36: DS, 0x37: FLAT, 0x38: MUBUF}.get(dword >> 26)


def extract_fields(layout: Format, word: int) -> dict[str, int]:
    """The fields of an instruction whose bytes, as a little-endian integer, are `word` (without a literal)."""
    fields = layout.extract(word)
    if layout is VOP3P:
        fields["op_sel_hi"] |= fields.pop("op_sel_hi2") << 2
    elif layout is FLAT and fields["seg"] == 0:
        fields["offset"] &= 0xFFF  # the flat segment's offset is unsigned
    elif "kind" in fields:
        fields.pop("kind")
        if not fields.get("s0"):
            fields["src0"] += 256
    return fields


def literal_follows(layout: Format, fields: Mapping[str, int]) -> bool:
    """Whether a 32-bit literal follows the instruction."""
    if (layout is VOP2 and fields["op"] in VOP2_WITH_LITERAL) or (layout is SOPK and fields["op"] in SOPK_WITH_LITERAL):
        return True
    return layout.size == 4 and LITERAL in (fields.get("src0"), fields.get("ssrc0"), fields.get("ssrc1"))
