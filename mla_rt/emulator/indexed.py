"""Relative registers: between s_set_gpr_idx_on and s_set_gpr_idx_off the VGPR operands of vector instructions are counted from an index.

M0 holds both: the index in bits 7:0, and in bits 15:12 which operands it is added to (source 0, 1, 2, destination). Waves may have different
indices, so an instruction runs once for each. That index mode is on is known from the code alone: the decoder asks that a straight line of code
which turns it on also turns it off.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import UnknownInstruction
from .instruction import Encoded, Instruction, Row, Run, UnsupportedEncoding
from .operands import FIRST_VGPR, scalar_u32
from .state import M0, Group

INDEX, MODE, MODE_SHIFT = 0xFF, 0xF, 12
ON, OFF = "s_set_gpr_idx_on", "s_set_gpr_idx_off"
_MODE_BIT = {"src0": 1, "src1": 2, "vsrc1": 2, "src2": 4, "vdst": 8}
_FORMATS = frozenset({"VOP1", "VOP2", "VOP3"})
# Instructions that move values between lanes or banks, or whose destination is also a source or no VGPR.
_EXCLUDED = ("readlane", "writelane", "readfirstlane", "permlane", "swap", "accvgpr", "fmac", "dot2c", "v_cmp", "cvt_pk_fp8", "cvt_pk_bf8", "cvt_sr")


def _write_m0(group: Group, low: int, mask: int, value: np.ndarray | int) -> None:
    field = np.uint32(mask << low)
    bits = (np.asarray(value, np.uint32) & np.uint32(mask)) << np.uint32(low)
    group.write_sgpr(M0, group.read_sgpr(M0) & ~field | bits)


def _bind_on(encoded: Encoded) -> Run:
    index, mode = scalar_u32(encoded.ssrc0), encoded.ssrc1
    if mode > MODE:
        raise UnsupportedEncoding(f"index mode {mode:#x}")

    def run(group: Group) -> None:
        _write_m0(group, 0, INDEX, index(group))
        _write_m0(group, MODE_SHIFT, MODE, mode)

    return run


def _bind_mode(encoded: Encoded) -> Run:
    if encoded.simm16 > MODE:
        raise UnsupportedEncoding(f"index mode {encoded.simm16:#x}")
    return lambda group: _write_m0(group, MODE_SHIFT, MODE, encoded.simm16)


def _bind_index(encoded: Encoded) -> Run:
    index = scalar_u32(encoded.ssrc0)
    return lambda group: _write_m0(group, 0, INDEX, index(group))


INDEX_SOPC = {17: Row(ON, _bind_on)}
INDEX_SOPP = {28: Row(OFF, lambda encoded: lambda group: None), 29: Row("s_set_gpr_idx_mode", _bind_mode)}
INDEX_SOP1 = {50: Row("s_set_gpr_idx_idx", _bind_index)}


def _shifted(encoded: Encoded, index: int, mode: int) -> Encoded:
    """The instruction with the registers that it names in this index and mode."""
    fields = dict(encoded.fields)
    for name, bit in _MODE_BIT.items():
        is_vgpr = name in ("vdst", "vsrc1") or fields.get(name, 0) >= FIRST_VGPR
        if mode & bit and name in fields and is_vgpr:
            fields[name] += index
    return replace(encoded, fields=fields)


def relative(instruction: Instruction, row: Row) -> Instruction:
    """The instruction as it runs in index mode; the same one if it has no VGPR operands. UnsupportedEncoding if that is not emulated."""
    encoded = instruction.encoded
    if encoded.encoding.startswith("S"):
        return instruction
    if encoded.encoding not in _FORMATS or any(word in instruction.mnemonic for word in _EXCLUDED):
        raise UnsupportedEncoding("index mode")
    bound: dict[int, Run] = {}

    def bind(word: int) -> Run:
        try:
            return row.bind(_shifted(encoded, word & INDEX, word >> MODE_SHIFT))
        except UnsupportedEncoding as error:
            raise UnknownInstruction(f"{instruction.mnemonic}: {error} in index mode") from error

    def run(group: Group) -> None:
        words = group.read_sgpr(M0) & np.uint32(INDEX | MODE << MODE_SHIFT)
        for word in np.unique(words):
            if int(word) not in bound:
                bound[int(word)] = bind(int(word))
            same = words == word
            bound[int(word)](group if same.all() else _part(group, same))

    return replace(instruction, run=run)


def _part(group: Group, chosen: np.ndarray) -> Group:
    """The chosen waves (bool [waves]) of the group, executing the same instruction."""
    part = type(group)(group.state, group.indices[chosen])
    for name, value in vars(group).items():
        vars(part).setdefault(name, value)  # what the machine and the observers have set on the group
    part.pc = group.pc
    return part
