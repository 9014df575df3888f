"""Value tests of single instructions: operands laid out over the lanes of as many waves as it takes, results read back as Python integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mla_rt.emulator.decoder import decode
from mla_rt.emulator.float_mode import DEFAULT_MODE, FloatMode
from mla_rt.emulator.state import EXEC, LANES, Group, State

ACCUM_OFFSET = 64
ALL_LANES = 2**64 - 1
SOURCES = (10, 12, 14)  # VGPRs of the operands; a 64-bit operand takes the next one too
RESULT = 6


def make_group(num_waves: int = 1, *, active: int = ALL_LANES, lds_bytes: int = 0) -> Group:
    """Waves of one workgroup, without memory, at pc 0."""
    state = State(
        kernel="kernel",
        memory=None,  # type: ignore[arg-type]
        num_workgroups=1,
        waves_per_workgroup=num_waves,
        num_vgprs=2 * ACCUM_OFFSET,
        accum_offset=ACCUM_OFFSET,
        lds_bytes=lds_bytes,
    )
    state.sgpr[EXEC], state.sgpr[EXEC + 1] = active & 0xFFFFFFFF, active >> 32
    return Group(state, np.arange(num_waves))


def execute(group: Group, code: bytes, mode: FloatMode = DEFAULT_MODE) -> None:
    with np.errstate(all="ignore"):  # as the machine does
        decode(code, 0, ACCUM_OFFSET, mode=mode).run(group)


def set_vgpr(group: Group, register: int, values: Sequence[int], bits: int = 32) -> None:
    """One value a lane, in order of waves; the lanes behind the last value get 0."""
    padded = np.zeros(group.n * LANES, np.uint64)
    padded[: len(values)] = np.array(values, np.uint64)
    for i in range(max(bits // 32, 1)):
        group.state.vgpr[register + i] = (padded >> np.uint64(32 * i) & np.uint64(0xFFFFFFFF)).astype(np.uint32).reshape(group.n, LANES)


def get_vgpr(group: Group, register: int, bits: int = 32) -> list[int]:
    value = group.state.vgpr[register].reshape(-1).astype(np.uint64)
    if bits == 64:
        value = value | group.state.vgpr[register + 1].reshape(-1).astype(np.uint64) << np.uint64(32)
    return [int(v) & ((1 << bits) - 1) for v in value]


def set_mask(group: Group, register: int, lanes: Sequence[bool]) -> None:
    padded = np.zeros(group.n * LANES, np.bool_)
    padded[: len(lanes)] = lanes
    words = np.packbits(padded.reshape(group.n, LANES), axis=1, bitorder="little").view(np.uint32)
    group.state.sgpr[register : register + 2] = words.T


def get_mask(group: Group, register: int) -> list[bool]:
    return [bool(v) for v in group.read_mask(register).reshape(-1)]


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def check(
    text: str,
    code: bytes,
    operands: Sequence[Sequence[int]],
    source_bits: Sequence[int],
    result_bits: int,
    expected: Callable[..., int],
    same: Callable[[int, int], bool] = lambda got, wanted: got == wanted,
    old: Sequence[int] | None = None,
    mode: FloatMode = DEFAULT_MODE,
) -> None:
    """Run one instruction over all operand tuples and compare every lane with expected(*operands). `old`: what the result register held."""
    group = make_group(-(-len(operands) // LANES))
    for i, bits in enumerate(source_bits):
        set_vgpr(group, SOURCES[i], [each[i] for each in operands], bits)
    if old is not None:
        set_vgpr(group, RESULT, old, result_bits)
    execute(group, code, mode)
    results = get_vgpr(group, RESULT, max(result_bits, 32))
    for lane, each in enumerate(operands):
        got, wanted = results[lane], expected(*each)
        assert same(got, wanted), f"{text} of {[hex(v) for v in each]}: {got:#x}, expected {wanted:#x}"
