"""Every instruction of AMD's gfx950 MLA kernels is one that the emulator knows."""

from __future__ import annotations

from collections import Counter

import pytest
from aiter_wheel import code_objects

from mla_rt.code_object import CodeObject
from mla_rt.elf import PT_LOAD, Elf
from mla_rt.emulator.decoder import Program
from mla_rt.emulator.descriptor import Descriptor
from mla_rt.emulator.encodings import identify
from mla_rt.emulator.float_mode import FloatMode
from mla_rt.errors import UnknownInstruction

pytestmark = pytest.mark.peers
SMALLEST_FILE = 2000  # instructions: fewer were not a kernel


def text_of(path) -> tuple[bytes, int]:
    """The executable bytes of a code object and their virtual address."""
    elf = Elf(path.read_bytes())
    (segment,) = [program for program in elf.programs if program.kind == PT_LOAD and program.flags & 1]
    return elf.take(segment.offset, segment.filesz, "the code"), segment.vaddr


def walk(path) -> tuple[int, Counter[str], list[str]]:
    """Instructions decoded and bound, how often each mnemonic, and what is unknown, over all bytes of the code."""
    (kernel,) = CodeObject.load(path).kernels.values()
    descriptor = Descriptor.parse(kernel.descriptor)
    mode = FloatMode.parse(descriptor.float_mode, descriptor.ieee, descriptor.dx10_clamp)
    code, base = text_of(path)
    program = Program(lambda pc: code[pc - base : pc - base + 16], descriptor.accum_offset, mode=mode)
    pc, mnemonics, unknown = base, Counter(), []
    while pc < base + len(code):
        try:
            block = program.block(pc)
        except UnknownInstruction as error:
            unknown.append(f"{path.stem}: {error}")
            layout = identify(int.from_bytes(code[pc - base : pc - base + 4], "little"))
            pc += 4 if layout is None else layout.size
            continue
        mnemonics.update(instruction.mnemonic for instruction in block.instructions)
        pc = block.end
    assert pc == base + len(code), "an instruction runs beyond the code"
    return mnemonics.total(), mnemonics, unknown


def test_every_instruction_decodes_and_binds():
    files = code_objects()
    assert len(files) == 20
    total, unknown = Counter(), []
    for path in files.values():
        count, mnemonics, bad = walk(path)
        assert count > SMALLEST_FILE, path.stem
        total += mnemonics
        unknown += bad
    assert not unknown, f"{len(unknown)} unknown instructions:\n" + "\n".join(unknown[:40])
    # An empty walk must not pass: every file ends one program, and these are what the kernels are about.
    assert total["s_endpgm"] == len(files)
    for mnemonic in ("v_mfma_f32_16x16x32_fp8_fp8", "v_mfma_f32_32x32x64_f8f6f4", "ds_read_b64_tr_b8", "s_set_gpr_idx_on", "v_permlane32_swap_b32"):
        assert total[mnemonic], mnemonic
