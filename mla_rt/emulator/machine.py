"""Launches: initial registers, scheduling of waves, barriers, limits.

Waves that stand at the same pc execute together. When they part, the group with the lowest pc runs first, so that the sides of a branch and the
iterations of a loop meet again; groups that come to the same pc merge. Within a straight line of code there is no scheduling at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import KernelFault, UnknownInstruction
from .decoder import LONGEST, Block, Program
from .descriptor import Descriptor
from .float_mode import FloatMode
from .memory import Memory
from .observer import Observer
from .state import EXEC, LANES, Group, State

MAX_RESIDENT_WAVES = 512  # large enough for numpy, small enough that a register of all waves (128 KiB) stays in cache
MAX_GROUP_INSTRUCTIONS = 20_000_000  # of one batch of workgroups, an instruction of many waves counting once: far above any real kernel
_PROGRESS_SECONDS = 0.2

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Dispatch:
    """One launch. entry: device address of the first instruction; image_base: device address of the code object's virtual address 0 (faults give
    pc relative to it); grid: workgroups, block: work-items, each (x, y, z); kernarg: device address of the arguments."""

    kernel: str
    entry: int
    image_base: int
    descriptor: Descriptor
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    kernarg: int
    dynamic_lds_bytes: int = 0


@dataclass(frozen=True)
class LaunchReport:
    """num_instructions: instructions times waves that executed them; seconds: wall time."""

    num_instructions: int
    seconds: float


def run(
    dispatch: Dispatch,
    memory: Memory,
    *,
    seed: int | None = None,
    progress: Progress | None = None,
    observers: Sequence[Observer] = (),
    max_resident_waves: int = MAX_RESIDENT_WAVES,
    max_group_instructions: int = MAX_GROUP_INSTRUCTIONS,
) -> LaunchReport:
    """Run a launch to its end.

    seed None: all waves advance together. With a seed, between barriers the waves of a workgroup run one after another in a random order, and
    workgroups are taken in a random order, so that a missing barrier shows.
    observers: see every step, in this order.
    progress(finished workgroups, all workgroups) is called between batches of workgroups and, within one, about five times a second.
    Raises KernelFault for what hardware would punish, UnknownInstruction for what is not emulated, ValueError for an impossible launch.
    """
    started = time.perf_counter()
    _check(dispatch)
    program = _program(dispatch, memory)
    random = None if seed is None else np.random.default_rng(seed)
    total = int(np.prod(dispatch.grid, dtype=np.int64))
    order = np.arange(total) if random is None else random.permutation(total)
    batch_size = max(1, max_resident_waves // _waves_per_workgroup(dispatch))
    executed = 0
    # Infinities and NaNs are results here, and integers wrap.
    with np.errstate(all="ignore"):
        for first in range(0, total, batch_size):
            heartbeat = None if progress is None else _Heartbeat(progress, first, total)
            state = _initial_state(dispatch, memory, order[first : first + batch_size])
            state.observers = tuple(observers)
            batch = _Batch(state, program, max_group_instructions, heartbeat)
            batch.run(random)
            executed += batch.num_instructions
    if progress is not None:
        progress(total, total)
    return LaunchReport(executed, time.perf_counter() - started)


def _check(dispatch: Dispatch) -> None:
    descriptor = dispatch.descriptor
    for name, _ in descriptor.user_sgprs:
        if name != "kernarg_segment_ptr":
            raise UnknownInstruction(f"{dispatch.kernel}: the kernel wants {name} in its first SGPRs, which is not emulated")
    if descriptor.workgroup_info or descriptor.scratch_bytes:
        raise UnknownInstruction(f"{dispatch.kernel}: scratch memory ({descriptor.scratch_bytes} bytes a work-item) is not emulated")
    num_items = int(np.prod(dispatch.block, dtype=np.int64))
    if not 1 <= num_items <= 1024 or min(dispatch.block) < 1:
        raise ValueError(f"{dispatch.kernel}: block {dispatch.block} must have 1 to 1024 work-items")
    if min(dispatch.grid) < 1 or max(dispatch.grid) >= 1 << 31:
        raise ValueError(f"{dispatch.kernel}: grid {dispatch.grid} must be positive in each dimension")
    if descriptor.lds_bytes + dispatch.dynamic_lds_bytes > 160 * 1024:
        raise ValueError(f"{dispatch.kernel}: {descriptor.lds_bytes + dispatch.dynamic_lds_bytes} bytes of LDS, more than the 163840 of a workgroup")


def _program(dispatch: Dispatch, memory: Memory) -> Program:
    def code_at(pc: int) -> bytes:
        for size in range(LONGEST, 0, -4):
            try:
                return memory.bytes_at(pc, size).tobytes()
            except ValueError:
                continue
        return b""

    descriptor = dispatch.descriptor
    try:
        mode = FloatMode.parse(descriptor.float_mode, descriptor.ieee, descriptor.dx10_clamp)
    except ValueError as error:
        raise UnknownInstruction(f"{dispatch.kernel}: {error}") from None
    return Program(code_at, descriptor.accum_offset, dispatch.image_base, mode)


def _waves_per_workgroup(dispatch: Dispatch) -> int:
    return -(-int(np.prod(dispatch.block, dtype=np.int64)) // LANES)


def _initial_state(dispatch: Dispatch, memory: Memory, workgroups: np.ndarray) -> State:
    """Registers as the hardware sets them at the start of a wave, for the workgroups of these linear numbers."""
    descriptor = dispatch.descriptor
    waves_per_workgroup = _waves_per_workgroup(dispatch)
    state = State(
        kernel=dispatch.kernel,
        memory=memory,
        num_workgroups=len(workgroups),
        waves_per_workgroup=waves_per_workgroup,
        num_vgprs=descriptor.num_vgprs,
        accum_offset=descriptor.accum_offset,
        lds_bytes=descriptor.lds_bytes + dispatch.dynamic_lds_bytes,
    )
    state.image_base = dispatch.image_base
    state.pc[:] = dispatch.entry
    x, y, _ = dispatch.grid
    state.workgroup_id[:] = np.stack([workgroups % x, workgroups // x % y, workgroups // (x * y)], axis=1)

    register = 0
    for _, count in descriptor.user_sgprs:
        state.sgpr[register] = dispatch.kernarg & 0xFFFFFFFF
        state.sgpr[register + 1] = dispatch.kernarg >> 32
        register += count
    first, count = descriptor.kernarg_preload
    if count:
        preloaded = memory.bytes_at(dispatch.kernarg + 4 * first, 4 * count).view(np.uint32)
        state.sgpr[register : register + count] = preloaded[:, None]
    register = descriptor.num_user_sgprs
    for axis, wanted in enumerate(descriptor.workgroup_ids):
        if wanted:
            state.sgpr[register] = state.workgroup_id[state.workgroup, axis]
            register += 1

    block_x, block_y, block_z = dispatch.block
    item = np.arange(waves_per_workgroup * LANES).reshape(waves_per_workgroup, LANES)
    packed = item % block_x | item // block_x % block_y << 10 | item // (block_x * block_y) << 20
    live = item < block_x * block_y * block_z
    state.vgpr[0] = packed.astype(np.uint32)[state.wave_in_workgroup]
    masks = np.packbits(live, axis=1, bitorder="little").view(np.uint32)
    state.sgpr[EXEC : EXEC + 2] = masks[state.wave_in_workgroup].T
    return state


class _Heartbeat:
    def __init__(self, progress: Progress, finished: int, total: int):
        self.progress, self.finished, self.total = progress, finished, total
        self.next = time.perf_counter() + _PROGRESS_SECONDS

    def beat(self) -> None:
        now = time.perf_counter()
        if now >= self.next:
            self.next = now + _PROGRESS_SECONDS
            self.progress(self.finished, self.total)


class _Batch:
    """The resident workgroups of a launch, run to their end."""

    def __init__(self, state: State, program: Program, max_group_instructions: int, heartbeat: _Heartbeat | None):
        self.state, self.program, self.heartbeat = state, program, heartbeat
        self.limit, self.issued, self.num_instructions = max_group_instructions, 0, 0
        self.live = np.ones(state.num_waves, np.bool_)

    def run(self, random: np.random.Generator | None) -> None:
        """Phase by phase: every live wave runs to its next barrier or end. Since ended waves count as arrived, all barriers then open."""
        for observer in self.state.observers:
            observer.begin(self.state)
        while self.live.any():
            for waves in self._turns(random):
                if len(waves):
                    self._advance(waves)
            for observer in self.state.observers:
                observer.phase(self.state)
        for observer in self.state.observers:
            observer.end(self.state)

    def _turns(self, random: np.random.Generator | None) -> Iterator[np.ndarray]:
        """The sets of waves that take their turn one after another in a phase."""
        if random is None:
            yield np.flatnonzero(self.live)
            return
        for position in random.permutation(self.state.waves_per_workgroup):
            yield np.flatnonzero(self.live & (self.state.wave_in_workgroup == position))

    def _advance(self, waves: np.ndarray) -> None:
        """Run these waves until each is at a barrier or has ended."""
        ready: dict[int, list[np.ndarray]] = {}
        self._part(ready, waves, self.state.pc[waves])
        while ready:
            pc = min(ready)
            meeting = ready.pop(pc)
            group = Group(self.state, meeting[0] if len(meeting) == 1 else np.sort(np.concatenate(meeting)))
            self._run_group(group, pc, ready)
            if self.heartbeat is not None:
                self.heartbeat.beat()

    def _part(self, ready: dict[int, list[np.ndarray]], waves: np.ndarray, pcs: np.ndarray) -> None:
        self.state.pc[waves] = pcs
        for pc in np.unique(pcs):
            ready.setdefault(int(pc), []).append(waves[pcs == pc])

    def _block(self, pc: int) -> Block:
        try:
            return self.program.block(pc)
        except UnknownInstruction as error:
            raise UnknownInstruction(f"{self.state.kernel}: {error}") from error

    def _run_group(self, group: Group, pc: int, ready: dict[int, list[np.ndarray]]) -> None:
        """Run a group from pc until it stops, parts, or is no longer the one with the lowest pc."""
        meeting = min(ready) if ready else None
        while True:
            block = self._block(pc)
            if meeting is not None and pc < meeting < block.end:
                block = block.until(meeting)
            group.next_pc = block.end
            for observer in self.state.observers:
                observer.block(group, block)
            try:
                for group.pc, execute in block.steps:
                    execute(group)
            except IndexError as error:
                raise group.fault("a register beyond those that the kernel declares") from error
            self.issued += len(block.steps)
            self.num_instructions += len(block.steps) * group.n
            if self.issued > self.limit:
                raise group.fault(f"more than {self.limit} instructions without an end")
            if group.stop is not None:
                self.state.pc[group.waves] = block.end
                if group.stop == "end":
                    self.live[group.waves] = False
                return
            following = group.next_pc
            if not isinstance(following, int):
                if (following != following[0]).any():
                    self._part(ready, group.indices, following)
                    return
                following = int(following[0])
            if meeting is not None and following >= meeting:
                self._part(ready, group.indices, np.full(group.n, following))
                return
            pc = following


__all__ = ["Descriptor", "Dispatch", "KernelFault", "LaunchReport", "run"]
