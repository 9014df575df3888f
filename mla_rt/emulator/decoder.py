"""Bytes -> bound instructions, and straight-line blocks of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import UnknownInstruction
from . import buffer_memory, global_memory, lds, mfma, packed, scalar, scalar_memory, vector
from .encodings import extract_fields, identify, literal_follows
from .instruction import Encoded, Instruction, Row, Run, UnsupportedEncoding

TABLES: dict[str, Mapping[int, Row]] = {
    "SOP1": scalar.SOP1, "SOP2": scalar.SOP2, "SOPK": scalar.SOPK, "SOPC": scalar.SOPC, "SOPP": scalar.SOPP, "SMEM": scalar_memory.SMEM,
    "VOP1": vector.VOP1, "VOP1_SDWA": vector.VOP1, "VOP1_DPP": vector.VOP1,
    "VOP2": vector.VOP2, "VOP2_SDWA": vector.VOP2, "VOP2_DPP": vector.VOP2,
    "VOPC": vector.VOPC, "VOPC_SDWA": vector.VOPC,
    "VOP3": vector.VOP3, "VOP3SD": vector.VOP3, "VOP3P": packed.VOP3P, "VOP3P-MAI": mfma.MFMA, "VOP3PX2": mfma.MFMA_SCALED,
    "FLAT": global_memory.FLAT, "MUBUF": buffer_memory.MUBUF, "DS": lds.DS,
}  # fmt: skip
LONGEST = 16  # bytes


def decode(window: bytes, pc: int, accum_offset: int, origin: int = 0) -> Instruction:
    """The instruction that begins `window` (up to 16 bytes of code from address pc), bound. Raises UnknownInstruction, naming pc - origin."""

    def unknown(why: str, size: int = 8) -> UnknownInstruction:
        return UnknownInstruction(f"{why} (pc {pc - origin:#x}, bytes {window[:size].hex(' ')})")

    if len(window) < 4:
        raise unknown("the code ends")
    layout = identify(int.from_bytes(window[:4], "little"))
    if layout is None:
        raise unknown("unknown instruction format")
    if len(window) < layout.size:
        raise unknown("the code ends inside an instruction")
    word = int.from_bytes(window[: layout.size], "little")
    if word & layout.reserved:
        raise unknown(f"reserved bits set in {layout.name}", layout.size)
    fields = extract_fields(layout, word)
    if layout.size == 16 and word >> 64 + 23 & 0x1FF != 0x1A7:
        raise unknown("a scaled matrix prefix without its matrix instruction", layout.size)
    row = TABLES[layout.name].get(fields["op"])
    if row is None:
        raise unknown(f"unknown {layout.name} opcode {fields['op']}", layout.size)
    size = layout.size
    if literal_follows(layout, fields):
        if len(window) < size + 4:
            raise unknown("the code ends inside an instruction")
        fields["literal"] = int.from_bytes(window[size : size + 4], "little")
        size += 4
    encoded = Encoded(pc, size, layout.name, fields, window[:size], accum_offset)
    try:
        run = row.bind(encoded)
    except UnsupportedEncoding as error:
        raise unknown(f"{row.mnemonic}: {error}", size) from error
    return Instruction(encoded, row.mnemonic, run, row.ends_block)


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions that run one after another: the last may end the block. steps: (pc, run); end: pc behind the last."""

    steps: tuple[tuple[int, Run], ...]
    end: int

    def until(self, pc: int) -> Block:
        """The part before pc, if pc begins one of the instructions; else the whole block."""
        cut = bisect_left(self.steps, pc, key=lambda step: step[0])
        if 0 < cut < len(self.steps) and self.steps[cut][0] == pc:
            return Block(self.steps[:cut], pc)
        return self


class Program:
    """The code of a kernel, decoded as it is reached. code_at(pc) -> the bytes from pc on, at most `LONGEST`, none outside the code."""

    def __init__(self, code_at: Callable[[int], bytes], accum_offset: int):
        self._code_at, self._accum_offset = code_at, accum_offset
        self._blocks: dict[int, Block] = {}
        self._instructions: dict[int, Instruction] = {}
        self._origin = 0

    def instruction(self, pc: int) -> Instruction:
        """The instruction at pc. Code is compared with what was decoded before, since memory may hold other code by now."""
        window = self._code_at(pc)
        known = self._instructions.get(pc)
        if known is None or not window.startswith(known.encoded.raw):
            known = self._instructions[pc] = decode(window, pc, self._accum_offset, self._origin)
        return known

    def block(self, pc: int) -> Block:
        found = self._blocks.get(pc)
        if found is None:
            found = self._blocks[pc] = self._decode_block(pc)
        return found

    def _decode_block(self, pc: int) -> Block:
        steps: list[tuple[int, Run]] = []
        while True:
            try:
                instruction = self.instruction(pc)
            except UnknownInstruction:
                if not steps:
                    raise
                break  # a fault only if it is reached
            steps.append((pc, instruction.run))
            pc += instruction.encoded.size
            if instruction.ends_block:
                break
        return Block(tuple(steps), pc)

    def begin_launch(self, origin: int) -> None:
        """Errors name pc - origin. Blocks are rebuilt from instructions, which are checked against the code."""
        self._origin = origin
        self._blocks.clear()
