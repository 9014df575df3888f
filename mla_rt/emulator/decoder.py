"""Bytes -> bound instructions, and straight-line blocks of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ..errors import UnknownInstruction
from . import buffer_memory, global_memory, indexed, lds, mfma, packed, scalar, scalar_memory, vector
from .encodings import MAI_ENCODING, VOP3PX2, extract_fields, identify, literal_follows
from .float_mode import DEFAULT_MODE, FloatMode
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


class _Undecodable(Exception):
    """Why bytes are no instruction, and how many of them to show."""

    def __init__(self, why: str, size: int = 8):
        self.why, self.size = why, size


def decode(window: bytes, pc: int, accum_offset: int, origin: int = 0, mode: FloatMode = DEFAULT_MODE) -> Instruction:
    """The instruction that begins `window` (up to 16 bytes of code from address pc), bound. Raises UnknownInstruction, naming pc - origin."""
    try:
        return _decode(window, accum_offset, mode)
    except _Undecodable as error:
        shown = window[: error.size].hex(" ")
        raise UnknownInstruction(f"{error.why} (pc {pc - origin:#x}, bytes {shown})") from error.__cause__


# Kept over launches and code objects: the same bytes bind to the same function. 16384 instructions are those of a few dozen kernels.
@lru_cache(maxsize=16384)
def _decode(window: bytes, accum_offset: int, mode: FloatMode) -> Instruction:
    if len(window) < 4:
        raise _Undecodable("the code ends")
    layout = identify(int.from_bytes(window[:4], "little"))
    if layout is None:
        raise _Undecodable("unknown instruction format")
    if len(window) < layout.size:
        raise _Undecodable("the code ends inside an instruction")
    word = int.from_bytes(window[: layout.size], "little")
    if word & layout.reserved:
        raise _Undecodable(f"reserved bits set in {layout.name}", layout.size)
    fields = extract_fields(layout, word)
    if layout is VOP3PX2 and fields["encoding"] != MAI_ENCODING:
        raise _Undecodable("a scaled matrix prefix without its matrix instruction", layout.size)
    row = TABLES[layout.name].get(fields["op"])
    if row is None:
        raise _Undecodable(f"unknown {layout.name} opcode {fields['op']}", layout.size)
    size = layout.size
    if literal_follows(layout, fields):
        size += 4
        if len(window) < size:
            raise _Undecodable("the code ends inside an instruction")
        fields["literal"] = int.from_bytes(window[size - 4 : size], "little")
    encoded = Encoded(size, layout.name, fields, window[:size], accum_offset, mode)
    try:
        run = row.bind(encoded)
    except UnsupportedEncoding as error:
        raise _Undecodable(f"{row.mnemonic}: {error}", size) from error
    return Instruction(encoded, row.mnemonic, run, row.ends_block)


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions that run one after another: the last may end the block. steps: (pc, run); end: pc behind the last; instructions: of each step."""

    steps: tuple[tuple[int, Run], ...]
    end: int
    instructions: tuple[Instruction, ...]

    def until(self, pc: int) -> Block:
        """The part before pc, if pc begins one of the instructions; else the whole block."""
        cut = bisect_left(self.steps, pc, key=lambda step: step[0])
        if 0 < cut < len(self.steps) and self.steps[cut][0] == pc:
            return Block(self.steps[:cut], pc, self.instructions[:cut])
        return self


class Program:
    """The code of a launch, decoded as it is reached.

    code_at(pc): the bytes from pc on, at most `LONGEST`, none outside the code. origin: errors name pc - origin.
    """

    def __init__(self, code_at: Callable[[int], bytes], accum_offset: int, origin: int = 0, mode: FloatMode = DEFAULT_MODE):
        self._code_at, self._accum_offset, self._origin, self._mode = code_at, accum_offset, origin, mode
        self._blocks: dict[int, Block] = {}
        self._relative_pcs: set[int] = set()  # of instructions in index mode: a block may also begin among them

    def block(self, pc: int) -> Block:
        found = self._blocks.get(pc)
        if found is None:
            found = self._blocks[pc] = self._decode_block(pc)
        return found

    def _decode_block(self, pc: int) -> Block:
        steps: list[tuple[int, Run]] = []
        instructions: list[Instruction] = []
        relative = pc in self._relative_pcs
        while True:
            try:
                instruction = decode(self._code_at(pc), pc, self._accum_offset, self._origin, self._mode)
                if relative:
                    self._relative_pcs.add(pc)
                    instruction = self._relative(instruction, pc)
            except UnknownInstruction:
                if not steps or relative:
                    raise
                break  # a fault only if it is reached
            if instruction.mnemonic in (indexed.ON, indexed.OFF):
                if relative == (instruction.mnemonic == indexed.ON):
                    raise UnknownInstruction(f"{instruction.mnemonic} without its counterpart in a straight line (pc {pc - self._origin:#x})")
                relative = not relative
            steps.append((pc, instruction.run))
            instructions.append(instruction)
            pc += instruction.encoded.size
            if instruction.ends_block:
                break
        return Block(tuple(steps), pc, tuple(instructions))

    def _relative(self, instruction: Instruction, pc: int) -> Instruction:
        """The instruction in index mode, in which only straight lines of code are emulated."""
        try:
            if instruction.ends_block:
                raise UnsupportedEncoding("index mode")
            return indexed.relative(instruction, TABLES[instruction.encoded.encoding][instruction.encoded.op])
        except UnsupportedEncoding as error:
            raise UnknownInstruction(f"{instruction.mnemonic}: {error} (pc {pc - self._origin:#x})") from error
