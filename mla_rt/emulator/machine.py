"""Launches: what is checked before, batches of workgroups, and the registers that a wave starts with. `schedule.py` runs the waves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import KernelFault, UnknownInstruction
from .checks import strict_observers
from .completion import TIMINGS
from .decoder import LONGEST, Program
from .descriptor import Descriptor
from .float_mode import FloatMode
from .memory import Memory
from .observer import Observer
from .parallel import num_cores, run_batches
from .path_checks import PathChecks
from .schedule import Batch, Heartbeat, Progress
from .state import EXEC, LANES, State

MAX_RESIDENT_WAVES = 512  # large enough for numpy, small enough that a register of all waves (128 KiB) stays in cache
# The same in each of several worker processes: half as many cost no more time each, and the work is spread more evenly. Forking takes 20 to 40 ms,
# so a launch is shared unasked where one process would need more than one batch: decodes of that size take seconds.
MAX_WORKER_WAVES = 256
MAX_GROUP_INSTRUCTIONS = 20_000_000  # of one batch of workgroups, an instruction of many waves counting once: far above any real kernel
CHECKS = ("off", "strict")


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

    @property
    def instructions_per_second(self) -> float:
        """Of waves, by wall time."""
        return self.num_instructions / self.seconds


def run(
    dispatch: Dispatch,
    memory: Memory,
    *,
    seed: int | None = None,
    progress: Progress | None = None,
    timing: str = "earliest",
    checks: str = "off",
    observers: Sequence[Observer] = (),
    max_resident_waves: int = MAX_RESIDENT_WAVES,
    max_group_instructions: int = MAX_GROUP_INSTRUCTIONS,
    num_processes: int | None = None,
) -> LaunchReport:
    """Run a launch to its end.

    seed None: all waves advance together. With a seed, waves run in random pieces between barriers and workgroups in a random order, so that a
    result that depends on the order shows (see `schedule.py`).
    timing: when loads complete, "earliest", "latest" or "hardware" (see `completion.py`).
    checks: "off", or "strict": what hardware does not promise is a fault too.
    observers: see every step, in this order.
    progress(finished workgroups, all workgroups) is called between batches of workgroups and, within one, about five times a second.
    num_processes: how many worker processes may share a launch without seed, checks, observers and with timing "earliest"; None: one for each core
    if the launch is large, else none. Results are the same to the bit.
    Raises KernelFault for what hardware would punish, UnknownInstruction for what is not emulated, ValueError for an impossible launch, DeviceError
    if a worker process dies.
    """
    started = time.perf_counter()
    for name, value, known in (("timing", timing, TIMINGS), ("checks", checks, CHECKS)):
        require_choice(name, value, known)
    _check(dispatch)
    program = _program(dispatch, memory)
    random = None if seed is None else np.random.default_rng(seed)
    total = int(np.prod(dispatch.grid, dtype=np.int64))
    order = np.arange(total) if random is None else random.permutation(total)
    watching = (PathChecks(), *strict_observers(), *observers) if checks == "strict" else tuple(observers)
    plain = seed is None and timing == "earliest" and not watching
    if num_processes is None:
        num_processes = num_cores() if total * _waves_per_workgroup(dispatch) > MAX_RESIDENT_WAVES else 1
    elif num_processes < 1:
        raise ValueError(f"num_processes is {num_processes}; at least 1 is needed")
    parallel = plain and num_processes > 1
    batch_size = max(1, (min(max_resident_waves, MAX_WORKER_WAVES) if parallel else max_resident_waves) // _waves_per_workgroup(dispatch))
    if parallel:
        batch_size = min(batch_size, -(-total // num_processes))
    num_batches = -(-total // batch_size)

    def run_batch(number: int, progress: Progress | None = None) -> int:
        first = number * batch_size
        state = _initial_state(dispatch, memory, order[first : first + batch_size])
        state.observers = watching
        heartbeat = None if progress is None else Heartbeat(progress, first, total)
        batch = Batch(state, program, max_group_instructions, heartbeat, timing=timing, strict=checks == "strict")
        # Infinities and NaNs are results here, and integers wrap.
        with np.errstate(all="ignore"):
            batch.run(random)
        return batch.num_instructions

    if parallel and num_batches > 1:
        tick = None if progress is None else lambda finished: progress(min(finished * batch_size, total), total)
        executed = run_batches(memory, num_batches, num_processes, run_batch, tick)
    else:
        executed = sum(run_batch(number, progress) for number in range(num_batches))
    if progress is not None:
        progress(total, total)
    return LaunchReport(executed, time.perf_counter() - started)


def require_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """ValueError, naming the option, unless the value is one of those known."""
    if value not in known:
        raise ValueError(f"{name} {value!r}: it is {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")


def _check(dispatch: Dispatch) -> None:
    descriptor = dispatch.descriptor
    for name, _ in descriptor.user_sgprs:
        if name != "kernarg_segment_ptr":
            raise UnknownInstruction(f"{dispatch.kernel}: the kernel wants {name} in its first SGPRs, which is not emulated")
    if descriptor.workgroup_info or descriptor.scratch_bytes:
        raise UnknownInstruction(f"{dispatch.kernel}: the kernel uses {descriptor.scratch_bytes} bytes of scratch memory a work-item, but may not")
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
    packed &= (1 << 10 * descriptor.workitem_id_dims) - 1  # the compiler does not mask off what the kernel has not asked for
    live = item < block_x * block_y * block_z
    state.vgpr[0] = packed.astype(np.uint32)[state.wave_in_workgroup]
    masks = np.packbits(live, axis=1, bitorder="little").view(np.uint32)
    state.sgpr[EXEC : EXEC + 2] = masks[state.wave_in_workgroup].T
    return state


__all__ = ["Descriptor", "Dispatch", "KernelFault", "LaunchReport", "run"]
