"""The sources of an instruction as the rules for undefined bits see them: masks and values by operand code.

A rule takes the sources of one execution and gives the mask of each register that the instruction writes, in the order of writing (a list), or
one mask for all. Masks are uint32 [waves, 64] or [waves] with a 1 for each undefined bit, None where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .instruction import Instruction
from .operands import FIRST_VGPR, KINDS, SCC, constant_bits
from .shadow import ALL, Shadow
from .state import EXEC, Group, bits_to_lanes

Mask = Any  # uint32 array or None
Masks = list[Mask] | np.ndarray | None
U32, U64 = np.uint32, np.uint64
ZERO = U32(0)
# Instructions that read an SGPR pair as one bit a lane, VCC unless the encoding names another.
_MASK_READERS = ("v_cndmask", "v_addc_co", "v_subb_co", "v_subbrev_co", "v_div_fmas")


class Sources:
    """The sources of an instruction that is being executed, by what it has read so far and by the fields of its encoding."""

    def __init__(self, shadow: Shadow, group: Group, instruction: Instruction, vector: list[int], scalar: list[int]):
        self.shadow, self.group, self.encoded, self.mnemonic = shadow, group, instruction.encoded, instruction.mnemonic
        self.vector_reads, self.scalar_reads = vector, scalar

    def any(self) -> bool:
        """Whether anything undefined was read at all."""
        waves = self.group.waves
        return any(self.shadow.read_vector(register, waves) is not None for register in self.vector_reads) or any(
            self.shadow.read_scalar(register, waves) is not None for register in self.scalar_reads
        )

    def lanes(self, skip_last: int | None = None) -> np.ndarray:
        """Lanes that have read something undefined: bool, broadcastable to [waves, 64]. skip_last: a register whose last read does not count."""
        found = np.zeros((self.group.n, 1), np.bool_)
        registers = self.vector_reads
        if skip_last is not None and registers and registers[-1] == skip_last:
            registers = registers[:-1]
        for register in registers:
            mask = self.shadow.read_vector(register, self.group.waves)
            if mask is not None:
                found = found | (mask != 0)
        by_lane = self.mnemonic.startswith(_MASK_READERS)
        for register in self.scalar_reads:
            mask = self.shadow.read_scalar(register, self.group.waves)
            if mask is not None and by_lane:
                pair = np.zeros((self.group.n, 2), U32)
                pair[:, register & 1] = mask
                found = found | bits_to_lanes(pair)
            elif mask is not None:
                found = found | (mask != 0)[:, None]
        return found

    def whole(self, skip_last: int | None = None) -> np.ndarray:
        """The result that any undefined source makes undefined as a whole."""
        found = np.where(self.lanes(skip_last), ALL, ZERO)
        return found[:, 0] if self.encoded.encoding.startswith("SOP") or (found.shape[1] == 1 and self.is_scalar) else found

    @property
    def is_scalar(self) -> bool:
        return self.mnemonic.startswith("s_")

    def mask(self, code: int, half: int = 0) -> np.ndarray:
        """Mask of an operand code (`half`: the second register of a pair), broadcastable to [waves, 64] ([waves] in scalar instructions)."""
        found: Mask = None
        if code >= FIRST_VGPR:
            found = self.shadow.read_vector(code - FIRST_VGPR + half, self.group.waves)
        elif code <= EXEC + 1:
            found = self.shadow.read_scalar(code + half, self.group.waves)
        elif code == SCC and not half:
            found = self.shadow.read_scalar(SCC, self.group.waves)
        if found is None:
            return np.zeros((1,) if self.is_scalar else (1, 1), U32)
        return found if self.is_scalar or code >= FIRST_VGPR else found[:, None]

    def value(self, code: int, half: int = 0, bits: int = 32) -> np.ndarray:
        """Value of an operand code, likewise. bits: of the operand, which decides how a constant is widened."""
        state, waves = self.group.state, self.group.waves
        if code >= FIRST_VGPR:
            return state.vgpr[code - FIRST_VGPR + half, waves]
        if code <= EXEC + 1:
            found = state.sgpr[code + half, waves]
        elif code == SCC:
            found = state.scc[waves].astype(U32)
        else:
            constant = constant_bits(code, KINDS["u64" if bits == 64 else "u32"], self.encoded.fields.get("literal")) or 0
            found = np.array([constant >> 32 * half & 0xFFFFFFFF], U32)
        return found if self.is_scalar else found[:, None]

    def codes(self, count: int = 1) -> list[int]:
        """Operand codes of the first `count` sources of a vector instruction."""
        fields = self.encoded.fields
        found = [fields["src0"]]
        if "vsrc1" in fields:
            found.append(fields["vsrc1"] + FIRST_VGPR)
        return (found + [fields[name] for name in ("src1", "src2") if name in fields])[:count]

    def pair(self, code: int) -> np.ndarray:
        """Mask of a 64-bit operand: uint64."""
        return self.mask(code).astype(U64) | self.mask(code, 1).astype(U64) << U64(32)


Rule = Callable[[Sources], Masks]
