"""Waves for instruction tests: registers set by hand, assembly text encoded by LLVM, decoded and executed."""

from __future__ import annotations

import numpy as np
from asm import encodings

from mla_rt.emulator.decoder import decode
from mla_rt.emulator.memory import Memory
from mla_rt.emulator.state import EXEC, Group, State

ACCUM_OFFSET = 128


def execute(group: Group, text: str) -> None:
    """Run instructions, one a line."""
    for _, code in encodings(tuple(text.splitlines())):
        decode(code, 0x1000, ACCUM_OFFSET).run(group)


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
