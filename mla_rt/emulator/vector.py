"""The VOP1, VOP2, VOP3 and VOPC tables. An instruction of a short format is listed once; VOP3 has the short formats at fixed places."""

from __future__ import annotations

import numpy as np

from . import float_math as fm
from .convert import VOP1_CONVERT, VOP3_CONVERT
from .instruction import Encoded, Row, Run, UnsupportedEncoding
from .lanes import LANES_VOP1, LANES_VOP3
from .operands import KINDS, refuse_modifiers, vector_source, vgpr_reader
from .packed import ACCVGPR_VOP1, dot2c_f32_bf16, dot2c_f32_f16
from .state import Group
from .vector_binding import result_writer, row
from .vector_float import FLOAT_VOP1, FLOAT_VOP2, FLOAT_VOP3
from .vector_integer import INTEGER_VOP1, INTEGER_VOP2, INTEGER_VOP3
from .vector_mask import MASK_VOP2, MASK_VOP3, VOPC


def _fma_with_literal(mnemonic: str, literal_multiplies: bool) -> Row:
    """v_fmamk (src0 * literal + vsrc1) and v_fmaak (src0 * vsrc1 + literal)."""

    def bind(encoded: Encoded) -> Run:
        if encoded.encoding != "VOP2":
            raise UnsupportedEncoding("SDWA or DPP on an instruction with a literal")
        f32 = KINDS["f32"]
        first = encoded.mode.source(vector_source(encoded.src0, f32, encoded.literal), f32)
        second = encoded.mode.source(vgpr_reader(encoded.vsrc1, f32), f32)
        constant = encoded.mode.settle(f32)(np.array([[encoded.literal]], np.uint32).view(np.float32))
        write = result_writer(encoded, f32)

        def run(group: Group) -> None:
            a, b = first(group), second(group)
            write(group, fm.fma_f32(a, constant, b) if literal_multiplies else fm.fma_f32(a, b, constant))

        return run

    return Row(mnemonic, bind)


def _merge(*tables: dict[int, Row]) -> dict[int, Row]:
    merged: dict[int, Row] = {}
    for table in tables:
        overlap = merged.keys() & table.keys()
        if overlap:
            raise ValueError(f"opcodes defined twice: {[merged[op].mnemonic for op in overlap]}")
        merged.update(table)
    return merged


def _nop(encoded: Encoded) -> Run:
    refuse_modifiers(encoded, "vdst", "neg", "abs", "clamp", "omod", "op_sel")
    return lambda group: None


_NOP = {0: Row("v_nop", _nop)}
VOP1 = _merge(_NOP, INTEGER_VOP1, FLOAT_VOP1, LANES_VOP1, ACCVGPR_VOP1, VOP1_CONVERT)
VOP2 = _merge(
    MASK_VOP2,
    INTEGER_VOP2,
    FLOAT_VOP2,
    {
        22: row("v_dot2c_f32_bf16", "f32 = u32 u32 f32", dot2c_f32_bf16, accumulates=True),
        23: _fma_with_literal("v_fmamk_f32", True),
        24: _fma_with_literal("v_fmaak_f32", False),
        55: row("v_dot2c_f32_f16", "f32 = u32 u32 f32", dot2c_f32_f16, accumulates=True),
    },
)
_SHORT_ONLY = frozenset({2, 81, 82})  # LLVM knows no VOP3 form of v_readfirstlane_b32, v_swap_b32, v_accvgpr_mov_b32
VOP3 = _merge(
    VOPC,
    {0x100 + opcode: entry for opcode, entry in VOP2.items() if opcode not in (23, 24)},
    {0x140 + opcode: entry for opcode, entry in VOP1.items() if opcode not in _SHORT_ONLY and opcode not in VOP1_CONVERT},
    INTEGER_VOP3,
    FLOAT_VOP3,
    MASK_VOP3,
    LANES_VOP3,
    VOP3_CONVERT,
)
__all__ = ["VOP1", "VOP2", "VOP3", "VOPC"]
