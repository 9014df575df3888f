"""What a launch does, counted exactly: instructions by kind, LDS cycles, bytes and lines of memory.

Instructions are counted by blocks: the table of a block's kinds is made once, and running the block costs one addition.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .bank_conflicts import ConflictMemo, phases_of
from .instruction import Instruction
from .instruction_class import CLASSES, class_of, kind_of
from .observer import Observer

if TYPE_CHECKING:
    from .decoder import Block
    from .machine import Dispatch
    from .state import Group, State

LINE_BYTES = 128  # of the L2 cache
NUM_DIES = 8  # of a card, each with an L2 cache of its own; workgroup i runs on die i mod 8
_LINE_SHIFT = LINE_BYTES.bit_length() - 1
_MERGE_AT = 1 << 22  # (workgroup, line) pairs to gather before equal ones are dropped
_WAVE_COUNTS = (
    "lds_read_bytes", "lds_written_bytes", "lds_cycles", "lds_conflict_cycles",
    "read_bytes", "written_bytes", "scalar_read_bytes", "atomics",
)  # fmt: skip


@dataclass(frozen=True)
class LaunchCounts:
    """One launch. Arrays [workgroups, waves] are by linear number of the workgroup and wave within it.

    num_vgprs: allocated, AGPRs included; lds_bytes: of a workgroup, dynamic LDS included.
    kinds, classes: of each kind of instruction its name (`kind_of`) and class (`class_of`); by_kind: int64 [workgroups, waves, kinds].
    lds_*_bytes: of the active lanes, DMA writes included; lds_cycles: phases of the accesses without conflicts; lds_conflict_cycles: what bank
    conflicts add. read_bytes, written_bytes: of active lanes, as requested by vector memory instructions, atomics included on both sides;
    atomics: lanes that did one.
    workgroup_lines_read, workgroup_lines_written: int64 [workgroups], distinct 128-byte lines of device memory that each workgroup touches;
    die_lines_read, die_lines_written: distinct ones of each die, added up; lines_read, lines_written: of the whole launch.
    lds_sites: by pc relative to the code object, for each instruction that accesses LDS (LDS-DMA too): (mnemonic, conflict cycles, accesses of a
    wave), of all waves.
    trace: of the first workgroup, for each wave, the instructions in the order executed.
    sampled: None: all was counted; else how many workgroups were, of which the others are copies.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    num_vgprs: int
    lds_bytes: int
    kinds: tuple[str, ...]
    classes: tuple[str, ...]
    by_kind: np.ndarray
    lds_read_bytes: np.ndarray
    lds_written_bytes: np.ndarray
    lds_cycles: np.ndarray
    lds_conflict_cycles: np.ndarray
    read_bytes: np.ndarray
    written_bytes: np.ndarray
    scalar_read_bytes: np.ndarray
    atomics: np.ndarray
    workgroup_lines_read: np.ndarray
    workgroup_lines_written: np.ndarray
    die_lines_read: int
    die_lines_written: int
    lines_read: int
    lines_written: int
    lds_sites: dict[int, tuple[str, int, int]]
    trace: tuple[tuple[Instruction, ...], ...] = field(repr=False, default=())
    sampled: int | None = None

    @property
    def num_workgroups(self) -> int:
        return int(self.by_kind.shape[0])

    @property
    def waves_per_workgroup(self) -> int:
        return int(self.by_kind.shape[1])

    @property
    def num_instructions(self) -> int:
        """Instructions times waves that executed them."""
        return int(self.by_kind.sum())

    def of_class(self, name: str) -> np.ndarray:
        """Instructions of one of CLASSES, int64 [workgroups, waves]."""
        columns = [i for i, of in enumerate(self.classes) if of == name]
        return np.asarray(self.by_kind[:, :, columns].sum(axis=2))

    @cached_property
    def by_class(self) -> dict[str, int]:
        """Of the whole launch, every class."""
        return {name: int(self.of_class(name).sum()) for name in CLASSES}

    @cached_property
    def kind_totals(self) -> dict[str, int]:
        """Of the whole launch, by kind; the most frequent first."""
        totals = self.by_kind.sum(axis=(0, 1))
        return {self.kinds[i]: int(totals[i]) for i in np.argsort(-totals, kind="stable")}

    def repeated(self, times: int) -> LaunchCounts:
        """This launch `times` over, on as many times the memory: what a batch of that many equal requests counts, without running it.

        Each workgroup is followed by its copies, so that the long ones still come before the short ones.
        """
        names = ("by_kind", "workgroup_lines_read", "workgroup_lines_written", *_WAVE_COUNTS)
        x, y, z = self.grid
        arrays: dict[str, Any] = {name: np.repeat(getattr(self, name), times, axis=0) for name in names}
        return replace(
            self,
            **arrays,
            grid=(x * times, y, z),
            die_lines_read=self.die_lines_read * times,
            die_lines_written=self.die_lines_written * times,
            lines_read=self.lines_read * times,
            lines_written=self.lines_written * times,
            lds_sites={pc: (mnemonic, cycles * times, accesses * times) for pc, (mnemonic, cycles, accesses) in self.lds_sites.items()},
            sampled=self.num_workgroups,
        )


class Counters(Observer):
    """Counts one launch; `counts()` when it has ended. keep_trace: also record what each wave of the first workgroup executes."""

    def __init__(self, dispatch: Dispatch, *, keep_trace: bool = False):
        self._dispatch = dispatch
        num_workgroups = int(np.prod(dispatch.grid, dtype=np.int64))
        waves = -(-int(np.prod(dispatch.block, dtype=np.int64)) // 64)
        self._shape = (num_workgroups, waves)
        self._blocks: dict[tuple[int, int], tuple[Instruction, ...]] = {}
        self._runs: dict[tuple[int, int], np.ndarray] = {}  # how often each wave ran the block, int64 [workgroups * waves]
        self._of_wave = {name: np.zeros(num_workgroups * waves, np.int64) for name in _WAVE_COUNTS}
        self._conflicts = ConflictMemo()
        self._sites: dict[int, list[int]] = {}  # pc: conflict cycles, accesses
        self._lines = {"read": _Lines(num_workgroups), "write": _Lines(num_workgroups)}
        self._row = self._workgroup = np.zeros(0, np.int64)
        self._traces: list[list[tuple[Instruction, ...]]] | None = [[] for _ in range(waves)] if keep_trace else None
        self._traced = np.zeros(0, np.bool_)

    def begin(self, state: State) -> None:
        grid_x, grid_y, _ = self._dispatch.grid
        linear = state.workgroup_id @ np.array([1, grid_x, grid_x * grid_y])
        self._workgroup = linear[state.workgroup]
        self._row = self._workgroup * self._shape[1] + state.wave_in_workgroup
        self._traced = self._workgroup == 0

    def block(self, group: Group, block: Block) -> None:
        key = (block.steps[0][0], block.end)
        runs = self._runs.get(key)
        if runs is None:
            self._blocks[key] = block.instructions
            runs = self._runs[key] = np.zeros(self._shape[0] * self._shape[1], np.int64)
        runs[self._row[group.waves]] += 1
        if self._traces is not None:
            traced = self._traced[group.waves]
            if traced.any():
                for wave in group.state.wave_in_workgroup[group.waves][traced]:
                    self._traces[wave].append(block.instructions)

    def lds(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> None:
        waves = self._row[group.waves]
        moved = mask.sum(axis=1) * nbytes
        reads, writes = access in ("read", "transposed read", "atomic"), access in ("write", "DMA write", "atomic")
        if reads:
            self._of_wave["lds_read_bytes"][waves] += moved
        if writes:
            self._of_wave["lds_written_bytes"][waves] += moved
        self._of_wave["lds_cycles"][waves] += len(phases_of(nbytes, access).lanes)
        conflicts = self._conflicts(address, mask, nbytes, access)
        self._of_wave["lds_conflict_cycles"][waves] += conflicts
        site = self._sites.setdefault(group.pc, [0, 0])
        site[0] += int(conflicts.sum())
        site[1] += group.n

    def memory(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> None:
        waves = self._row[group.waves]
        if access == "scalar read":
            if nbytes == 12:  # there is no such load: only 12 bytes of it must be mapped, but the four dwords are read
                nbytes = 16
            self._of_wave["scalar_read_bytes"][waves] += mask[:, 0] * nbytes
        else:
            lanes = mask.sum(axis=1)
            if access != "write":
                self._of_wave["read_bytes"][waves] += lanes * nbytes
            if access != "read":
                self._of_wave["written_bytes"][waves] += lanes * nbytes
            if access == "atomic":
                self._of_wave["atomics"][waves] += lanes
        workgroups = self._workgroup[group.waves]
        if access != "write":
            self._lines["read"].touch(workgroups, address, mask, nbytes)
        if access in ("write", "atomic"):
            self._lines["write"].touch(workgroups, address, mask, nbytes)

    def counts(self) -> LaunchCounts:
        descriptor = self._dispatch.descriptor
        mnemonic_at: dict[int, str] = {}
        kind_index: dict[str, int] = {}
        classes: list[str] = []
        for instruction in (instruction for instructions in self._blocks.values() for instruction in instructions):
            kind = kind_of(instruction)
            if kind not in kind_index:
                kind_index[kind] = len(classes)
                classes.append(class_of(instruction))
        by_kind = np.zeros((self._shape[0] * self._shape[1], len(classes)), np.int64)
        for key, instructions in self._blocks.items():
            in_block = np.bincount([kind_index[kind_of(instruction)] for instruction in instructions], minlength=len(classes))
            by_kind += self._runs[key][:, None] * in_block
        for (pc, _), instructions in self._blocks.items():
            for instruction in instructions:
                mnemonic_at[pc] = instruction.mnemonic
                pc += instruction.encoded.size
        of_wave: dict[str, Any] = {name: values.reshape(self._shape) for name, values in self._of_wave.items()}
        lines_read, lines_written = (self._lines[side].result() for side in ("read", "write"))
        return LaunchCounts(
            kernel=self._dispatch.kernel,
            grid=self._dispatch.grid,
            block=self._dispatch.block,
            num_vgprs=descriptor.num_vgprs,
            lds_bytes=descriptor.lds_bytes + self._dispatch.dynamic_lds_bytes,
            kinds=tuple(kind_index),
            classes=tuple(classes),
            by_kind=by_kind.reshape(*self._shape, -1),
            **of_wave,
            workgroup_lines_read=lines_read[0],
            workgroup_lines_written=lines_written[0],
            die_lines_read=lines_read[1],
            die_lines_written=lines_written[1],
            lines_read=lines_read[2],
            lines_written=lines_written[2],
            lds_sites={pc - self._dispatch.image_base: (mnemonic_at[pc], site[0], site[1]) for pc, site in sorted(self._sites.items())},
            trace=() if self._traces is None else tuple(tuple(i for part in trace for i in part) for trace in self._traces),
        )


class _Lines:
    """The set of (workgroup, line) pairs that accesses touch."""

    def __init__(self, num_workgroups: int):
        self._num_workgroups = num_workgroups
        self._seen = np.zeros(0, np.int64)  # sorted, none twice: workgroup * 2**40 + line
        self._recent: list[np.ndarray] = []
        self._num_recent = 0
        self._limit = _MERGE_AT

    def touch(self, workgroups: np.ndarray, address: np.ndarray, mask: np.ndarray, nbytes: int) -> None:
        start = address.astype(np.int64)
        first, last = start >> _LINE_SHIFT, (start + nbytes - 1) >> _LINE_SHIFT
        wanted = mask.copy()
        # Neighbouring lanes mostly share a line; a lane that repeats what the one before it touched adds nothing.
        wanted[:, 1:] &= ~mask[:, :-1] | (first[:, 1:] != first[:, :-1]) | (last[:, 1:] != last[:, :-1])
        rows, lanes = np.nonzero(wanted)
        self._add(workgroups[rows], first[rows, lanes])
        crossing = first[rows, lanes] != last[rows, lanes]
        if crossing.any():  # an access is at most 64 bytes long, so it touches two lines at most
            self._add(workgroups[rows[crossing]], last[rows[crossing], lanes[crossing]])

    def _add(self, workgroups: np.ndarray, lines: np.ndarray) -> None:
        self._recent.append(workgroups << 40 | lines)  # addresses have 47 bits, so lines have 40
        self._num_recent += len(lines)
        if self._num_recent > self._limit:
            self._merge()

    def _merge(self) -> None:
        self._seen = np.unique(np.concatenate([self._seen, *self._recent]))
        self._recent, self._num_recent = [], 0
        self._limit = max(_MERGE_AT, len(self._seen))

    def result(self) -> tuple[np.ndarray, int, int]:
        """Distinct lines of each workgroup, of each die, added up, and of all together."""
        self._merge()
        workgroup, line = self._seen >> 40, self._seen & (1 << 40) - 1
        of_dies = len(np.unique(workgroup % NUM_DIES << 40 | line))
        return np.bincount(workgroup, minlength=self._num_workgroups), of_dies, len(np.unique(line))
