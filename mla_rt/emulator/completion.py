"""When the results of memory instructions arrive.

A load returns after it was issued, and `s_waitcnt` is how a program knows that it has. Which instructions a wait covers follows from two counters:
vmcnt counts loads, stores, atomics and LDS-DMA in order; lgkmcnt counts LDS instructions, in order among themselves, and scalar loads, in no order,
so that only lgkmcnt(0) covers those. A completion model chooses a moment between the issue and the wait:

- "earliest": at issue. Shows what reuses a register or LDS area that an earlier access still needs.
- "latest": at the wait that covers it, never before. Shows a wait that is missing or too weak.
- "hardware": between the two, much as on a GPU, for hand-scheduled kernels that count on latencies: LDS reads and scalar loads LATENCY clocks after
  issue, LDS-DMA at its wait, loads to registers at once; and no wave runs far ahead of its workgroup (`schedule.py`).

Stores take effect at once in every model.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .decoder import Block
from .instruction import Instruction, Run
from .memory import Cells
from .observer import Observer
from .state import LANES, Group, State

TIMINGS = ("earliest", "latest", "hardware")
# Clocks. Production kernels are right with 96 to 128 for LDS; one uses scalar loads some 900 clocks after their issue without a wait.
LATENCY = {"lds": 112, "smem": 400}
ISSUE_CLOCKS = 4  # of any instruction of a wave
MAX_VMCNT, MAX_LGKMCNT = 63, 15  # also what a wait encodes that does not wait
_NEVER = float("inf")
_S_WAITCNT = 12
_FIRST_6_BIT_FORMAT = 2  # of the f8f6f4 format codes: 0 and 1 have 8 bits


class Wait(NamedTuple):
    """What an s_waitcnt allows to be outstanding."""

    vmcnt: int
    lgkmcnt: int


def wait_of(instruction: Instruction) -> Wait | None:
    """The limits of an s_waitcnt; None for another instruction."""
    encoded = instruction.encoded
    if encoded.encoding != "SOPP" or encoded.op != _S_WAITCNT:
        return None
    bits = encoded.simm16
    return Wait(bits & 0xF | bits >> 10 & 0x30, bits >> 8 & 0xF)


def memory_kind(instruction: Instruction) -> str | None:
    """How an instruction counts: "vmem" in vmcnt, "lds" and "smem" in lgkmcnt, "flat" in both; None: in neither."""
    encoded = instruction.encoded
    if encoded.encoding == "FLAT":
        return "flat" if encoded.seg == 0 else "vmem"
    return {"MUBUF": "vmem", "DS": "lds", "SMEM": "smem"}.get(encoded.encoding)


def is_matrix(instruction: Instruction) -> bool:
    return instruction.encoded.encoding in ("VOP3P-MAI", "VOP3PX2")


def passes(instruction: Instruction) -> int:
    """How many passes of 4 clocks a matrix instruction occupies the matrix core (the ISA guide's table of passes)."""
    words = instruction.mnemonic.split("_")
    size, inputs = int(next(word for word in words if word[0].isdigit()).split("x")[0]), words[-1]
    if inputs == "f8f6f4":
        narrow = min(instruction.encoded.cbsz, instruction.encoded.blgp) >= _FIRST_6_BIT_FORMAT
        return (4 if size == 16 else 8) * (1 if narrow else 2)
    if inputs == "f64":
        return 16 if size == 16 else 4
    if size == 4:
        return 2
    several_blocks = any(word[-1] == "b" and word[:-1].isdigit() for word in words)
    return (4 if size == 16 else 8) * (2 if several_blocks or inputs == "f32" else 1)


class Access:
    """An issued memory instruction of the waves `waves`, with the results that are still to arrive: row i belongs to waves[i]."""

    __slots__ = ("dma", "dma_pending", "due", "kind", "sgprs", "vgprs", "waves", "where")

    def __init__(self, kind: str, group: Group):
        self.kind, self.waves, self.where = kind, group.indices, group.waves
        self.due = _NEVER
        self.vgprs: list[tuple[int, np.ndarray, np.ndarray | None]] = []
        self.sgprs: list[tuple[int, np.ndarray]] = []
        self.dma: tuple[Cells, np.ndarray, list[np.ndarray], np.ndarray] | None = None
        self.dma_pending = False

    def _rows(self, waves: np.ndarray) -> slice | np.ndarray:
        """Which rows belong to `waves`, some or all of those that issued it."""
        return slice(None) if len(waves) == len(self.waves) else np.searchsorted(self.waves, waves)

    def land(self, state: State, waves: np.ndarray) -> None:
        """Write the results of these waves."""
        rows = self._rows(waves)
        where = self.where if isinstance(rows, slice) else waves
        for register, value, mask in self.vgprs:
            target = state.vgpr[register]
            if mask is None:
                target[where] = value[rows]
            else:
                target[where] = np.where(mask[rows], value[rows], target[where])
        for scalar, value in self.sgprs:
            state.sgpr[scalar, where] = value[rows]
        if self.dma is not None and self.dma_pending:
            cells, offset, values, mask = self.dma
            active = mask[rows]
            cells.store_dwords(offset[rows][active], [value[rows][active] for value in values])

    def report(self, state: State, waves: np.ndarray, observers: Sequence[Observer]) -> None:
        """Tell observers that an LDS-DMA is covered."""
        if self.dma is None:
            return
        _, offset, values, mask = self.dma
        rows = self._rows(waves)
        address = offset[rows] - (state.workgroup[waves] * (state.lds.shape[1] * 4))[:, None]
        for observer in observers:
            observer.landed(state, waves, address, mask[rows], 4 * len(values))


class Track:
    """Waves with the same accesses outstanding, oldest first.

    vmem, lgkm: what vmcnt and lgkmcnt count; flying: what lands without a wait (hardware timing), in the order of arrival;
    clock: of the wave; matrix_free: when the matrix core can begin another instruction.
    """

    __slots__ = ("clock", "flying", "lgkm", "matrix_free", "vmem", "waves")

    def __init__(self, waves: np.ndarray):
        self.waves = waves
        self.vmem: deque[Access] = deque()
        self.lgkm: deque[Access] = deque()
        self.flying: deque[Access] = deque()
        self.clock = self.matrix_free = 0

    def part(self, waves: np.ndarray) -> Track:
        """The track of some of these waves, on its own."""
        other = Track(waves)
        other.vmem, other.lgkm, other.flying = self.vmem.copy(), self.lgkm.copy(), self.flying.copy()
        other.clock, other.matrix_free = self.clock, self.matrix_free
        return other

    def key(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(id, queue)) for queue in (self.vmem, self.lgkm, self.flying))


class TimedGroup(Group):
    """A group whose memory instructions may deliver later. The machine's Completion sets `access` while one of them executes."""

    access: Access | None = None
    defers_registers = False
    defers_dma = False
    tracks: Sequence[Track] = ()
    clock = 0
    matrix_free = 0  # the clock at which the matrix core can begin another instruction
    due = _NEVER  # the clock at which the next of the accesses with a latency lands

    def write_vgpr(self, register: int, value: np.ndarray, mask: np.ndarray | None = None) -> None:
        self.put_vgpr(register, value, self.mask if mask is None and not self.exec_full else mask)

    def write_vgpr_all_lanes(self, register: int, value: np.ndarray) -> None:
        self.put_vgpr(register, value, None)

    def put_vgpr(self, register: int, value: np.ndarray, mask: np.ndarray | None) -> None:
        """Write the lanes of `mask`, None: all lanes, now or when the access lands."""
        if self.access is not None and self.defers_registers:
            if register >= len(self.state.vgpr):
                raise IndexError  # at the instruction that names it, not where it lands
            self.access.vgprs.append((register, np.broadcast_to(value, (self.n, LANES)), mask))
        elif mask is None:
            super().write_vgpr_all_lanes(register, value)
        else:
            super().write_vgpr(register, value, mask)

    def write_sgpr(self, register: int, value: np.ndarray | int) -> None:
        if self.access is not None and self.defers_registers:
            self.access.sgprs.append((register, np.broadcast_to(np.asarray(value, np.uint32), (self.n,))))
        else:
            super().write_sgpr(register, value)

    def write_sgpr64(self, register: int, value: np.ndarray) -> None:
        if self.access is not None and self.defers_registers:
            self.write_sgpr(register, value.astype(np.uint32))
            self.write_sgpr(register + 1, (value >> np.uint64(32)).astype(np.uint32))
        else:
            super().write_sgpr64(register, value)

    def write_lds_dma(self, cells: Cells, offset: np.ndarray, values: list[np.ndarray], mask: np.ndarray) -> None:
        if self.access is not None:
            self.access.dma, self.access.dma_pending = (cells, offset, values, mask), self.defers_dma
        if not self.defers_dma:
            super().write_lds_dma(cells, offset, values, mask)


Action = Callable[["Completion", TimedGroup, Run], None]
Step = tuple[int, Run, Action | None, Instruction, int]  # pc, …, clocks for which it keeps the matrix core


class Completion:
    """The completion model of one batch of workgroups."""

    def __init__(self, state: State, timing: str):
        self.state, self.timing = state, timing
        self.hardware = timing == "hardware"
        self.watchers = tuple(observer for observer in state.observers if observer.watches_registers)
        self.completion_watchers = tuple(observer for observer in state.observers if observer.watches_completion)
        # Without anything that arrives later and nobody who wants to know, there is nothing to keep.
        self.tracking = timing != "earliest" or bool(self.completion_watchers)
        self._track_of = np.zeros(state.num_waves, np.int64)
        self._tracks = {0: Track(np.arange(state.num_waves))}
        self._next_track = 1
        self._plans: dict[tuple[int, int], tuple[Step, ...]] = {}

    def enter(self, group: TimedGroup) -> None:
        """The group begins to run: find what its waves have outstanding."""
        if not self.tracking:
            return
        ids = self._track_of[group.waves]
        first = int(ids[0])
        if len(self._tracks[first].waves) == group.n and bool((ids == first).all()):
            group.tracks = (self._tracks[first],)
        else:
            group.tracks = self._regroup(group.indices, ids)
        group.clock = max(track.clock for track in group.tracks)
        group.matrix_free = max(track.matrix_free for track in group.tracks)
        self._find_due(group)

    def _regroup(self, waves: np.ndarray, ids: np.ndarray) -> list[Track]:
        """Cut the tracks of these waves off those of other waves, and join those that are alike."""
        alike: dict[object, list[Track]] = {}
        for number in np.unique(ids):
            track = self._tracks[int(number)]
            mine = waves[ids == number]
            if len(mine) == len(track.waves):
                del self._tracks[int(number)]
            else:
                track.waves = np.setdiff1d(track.waves, mine, assume_unique=True)
            part = track.part(mine)
            alike.setdefault(part.key(), []).append(part)
        tracks = []
        for parts in alike.values():
            joined = parts[0]
            if len(parts) > 1:
                joined.waves = np.sort(np.concatenate([part.waves for part in parts]))
                joined.clock = max(part.clock for part in parts)
                joined.matrix_free = max(part.matrix_free for part in parts)
            self._tracks[self._next_track] = joined
            self._track_of[joined.waves] = self._next_track
            self._next_track += 1
            tracks.append(joined)
        return tracks

    def execute(self, group: TimedGroup, block: Block) -> None:
        """Run the block's instructions."""
        plan = self._plan(block)
        if self.hardware:
            self._execute_by_clock(group, plan)
            return
        for group.pc, run, action, instruction, _ in plan:
            for watcher in self.watchers:
                watcher.instruction(group, instruction)
            if action is None:
                run(group)
            else:
                action(self, group, run)

    def _execute_by_clock(self, group: TimedGroup, plan: Sequence[Step]) -> None:
        for group.pc, run, action, instruction, matrix_clocks in plan:
            if group.due <= group.clock:
                for track in group.tracks:
                    self._land_flying(track, group.clock)
                self._find_due(group)
            for watcher in self.watchers:
                watcher.instruction(group, instruction)
            if matrix_clocks:
                group.clock = max(group.clock, group.matrix_free)
                group.matrix_free = group.clock + matrix_clocks
            if action is None:
                run(group)
            else:
                action(self, group, run)
            group.clock += ISSUE_CLOCKS
        for track in group.tracks:
            track.clock, track.matrix_free = group.clock, group.matrix_free

    def _plan(self, block: Block) -> tuple[Step, ...]:
        key = (block.steps[0][0], len(block.steps))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = tuple(
                (pc, run, self._action(instruction), instruction, ISSUE_CLOCKS * passes(instruction) if is_matrix(instruction) else 0)
                for (pc, run), instruction in zip(block.steps, block.instructions, strict=True)
            )
        return plan

    def _action(self, instruction: Instruction) -> Action | None:
        if not self.tracking:
            return None
        kind, wait = memory_kind(instruction), wait_of(instruction)
        if kind is not None:
            return lambda completion, group, run: completion.issue(group, run, kind)
        if wait is not None:
            return lambda completion, group, run: completion.wait(group, wait)
        return None

    def issue(self, group: TimedGroup, run: Run, kind: str) -> None:
        """Execute a memory instruction."""
        access = Access(kind, group)
        at_once = self.timing == "earliest" or (self.hardware and kind in ("vmem", "flat"))
        group.access, group.defers_registers, group.defers_dma = access, not at_once, self.timing != "earliest"
        try:
            run(group)
        finally:
            group.access = None
        if self.hardware and kind in LATENCY:
            access.due = group.clock + LATENCY[kind]
            group.due = min(group.due, access.due)
        for track in group.tracks:
            if kind != "lds" and kind != "smem":
                track.vmem.append(access)
            if kind != "vmem":
                track.lgkm.append(access)
            if access.due < _NEVER:
                insort(track.flying, access, key=lambda flying: flying.due)
            # A counter at its maximum holds the next instruction back until the oldest access is done.
            if len(track.vmem) > MAX_VMCNT or len(track.lgkm) > MAX_LGKMCNT:
                self._cover(group, track, Wait(MAX_VMCNT, MAX_LGKMCNT))

    def wait(self, group: TimedGroup, wait: Wait) -> None:
        """Land what an s_waitcnt covers."""
        for track in group.tracks:
            self._cover(group, track, wait)
        self._find_due(group)

    def _cover(self, group: TimedGroup, track: Track, wait: Wait) -> None:
        while len(track.vmem) > wait.vmcnt:
            access = track.vmem.popleft()
            if access.kind == "vmem" or access not in track.lgkm:
                self._land(access, track)
        if wait.lgkmcnt == 0:
            while track.lgkm:
                self._cover_lgkm(group, track, track.lgkm.popleft())
        elif len(track.lgkm) > wait.lgkmcnt:
            in_order = [access for access in track.lgkm if access.kind == "lds"]
            for access in in_order[: max(0, len(in_order) - wait.lgkmcnt)]:
                track.lgkm.remove(access)
                self._cover_lgkm(group, track, access)

    def _cover_lgkm(self, group: TimedGroup, track: Track, access: Access) -> None:
        if access.kind in LATENCY and self.hardware:
            if access in track.flying:  # the wave stands still until it lands
                group.clock = max(group.clock, int(access.due))
                self._land_flying(track, group.clock)
        elif access.kind != "flat" or access not in track.vmem:
            self._land(access, track)

    def _land(self, access: Access, track: Track) -> None:
        access.land(self.state, track.waves)
        access.report(self.state, track.waves, self.completion_watchers)

    def _land_flying(self, track: Track, clock: int) -> None:
        while track.flying and track.flying[0].due <= clock:
            track.flying.popleft().land(self.state, track.waves)

    def _find_due(self, group: TimedGroup) -> None:
        group.due = min((track.flying[0].due for track in group.tracks if track.flying), default=_NEVER)
