"""Waves for instruction tests: registers set by hand, one instruction given as assembly text, encoded by LLVM and executed by the emulator."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache

import numpy as np

from mla_rt.emulator import buffer_memory, convert, encodings, global_memory, lds, mfma, scalar_memory
from mla_rt.emulator.instruction import Encoded, Row
from mla_rt.emulator.memory import Memory
from mla_rt.emulator.state import EXEC, Group, State

ACCUM_OFFSET = 128
TABLES = {
    "SMEM": scalar_memory.SMEM,
    "FLAT": global_memory.FLAT,
    "MUBUF": buffer_memory.MUBUF,
    "DS": lds.DS,
    "VOP1": convert.VOP1_CONVERT,
    "VOP1_SDWA": convert.VOP1_CONVERT,
    "VOP3": convert.VOP3_CONVERT,
    "VOP3P-MAI": mfma.MFMA,
    "VOP3PX2": mfma.MFMA_SCALED,
}


@lru_cache(maxsize=None)
def assemble(text: str) -> tuple[bytes, ...]:
    """The encodings of instructions, one a line, from LLVM's assembler."""
    command = [sys.executable, "-m", "ziglang", "clang", "-cc1as", "-triple", "amdgcn-amd-amdhsa", "-target-cpu", "gfx950"]
    command += ["-filetype", "asm", "-show-encoding", "-o", "-", "-"]
    done = subprocess.run(command, input=text + "\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"encoding: \[(.*?)\]", done.stdout)
    assert len(found) == len(text.strip().splitlines())
    return tuple(bytes(int(byte, 16) for byte in each.split(",")) for each in found)


def decode(code: bytes) -> tuple[Row, Encoded]:
    """The table row and the fields of one instruction."""
    layout = encodings.identify(int.from_bytes(code[:4], "little"))
    assert layout is not None and layout.size == len(code)
    fields = encodings.extract_fields(layout, int.from_bytes(code, "little"))
    return TABLES[layout.name][fields["op"]], Encoded(0x1000, len(code), layout.name, fields, code, ACCUM_OFFSET)


def execute(group: Group, text: str) -> None:
    """Run instructions, one a line."""
    for code in assemble(text):
        row, encoded = decode(code)
        row.bind(encoded)(group)


def make_group(*, workgroups: int = 1, waves: int = 1, lds_bytes: int = 0, memory: Memory | None = None, active: int = 2**64 - 1) -> Group:
    """All waves of `workgroups` workgroups of `waves` waves; `active` is the EXEC mask of each. Without `memory` there is none."""
    state = State(
        kernel="kernel",
        memory=memory,  # type: ignore[arg-type]
        num_workgroups=workgroups,
        waves_per_workgroup=waves,
        num_vgprs=256,
        accum_offset=ACCUM_OFFSET,
        lds_bytes=lds_bytes,
    )
    state.sgpr[EXEC], state.sgpr[EXEC + 1] = active & 0xFFFFFFFF, active >> 32
    return Group(state, np.arange(workgroups * waves))


def set_v(group: Group, register: int, *values: object) -> None:
    """Set consecutive registers, of all lanes; `values` are 32-bit patterns broadcast to [waves, 64]."""
    for i, value in enumerate(values):
        group.state.vgpr[register + i] = np.asarray(value).astype(np.uint32)


def set_v64(group: Group, register: int, values: object) -> None:
    """Set a register pair from 64-bit values."""
    wide = np.asarray(values).astype(np.uint64)
    set_v(group, register, wide & np.uint64(0xFFFFFFFF), wide >> np.uint64(32))


def set_s64(group: Group, register: int, value: int) -> None:
    group.state.sgpr[register], group.state.sgpr[register + 1] = value & 0xFFFFFFFF, value >> 32


def get_v(group: Group, register: int, dtype: type = np.uint32) -> np.ndarray:
    """A register of all waves, [waves, 64]."""
    return group.state.vgpr[register].view(dtype)


def random_bytes(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
