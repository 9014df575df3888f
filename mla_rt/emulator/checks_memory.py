"""Check of device memory: accesses of different waves to the same bytes that nothing orders.

Waves of one workgroup are ordered by a barrier. (Of the reads between two barriers only the last is kept: a write that races with another wave's read
is found if that one was the last before it, or if it comes after.)

Workgroup i runs on compute die i mod 8 and the dies' L2 caches are not coherent, so data go from one workgroup to another only like this (what
LLVM makes of a release and an acquire fence of agent scope):

    writer   stores; buffer_wbl2 sc1; s_waitcnt vmcnt(0); an atomic, or a store with sc1, at some location
         or  stores with sc1; s_waitcnt vmcnt(0), in each wave; then, after a barrier if need be, an atomic or a store with sc1
    reader   an atomic that returns, or a load with sc1, at that location; a wait for it; buffer_inv sc1; loads

Other waves of the writer's workgroup are covered if they issued their stores before a barrier before the buffer_wbl2 (LLVM has them wait for
nothing: they share the way to the L2); those of the reader's workgroup after a barrier behind the buffer_inv. A scalar load needs an s_dcache_inv
besides, for any byte that was written in the launch.

Every access gets a number (one a wave, rising with time), and each dword the number of its last write and its last read. A read that an earlier one
of another workgroup is ordered before stands for both: who is ordered behind it is behind the earlier one too. Reads are only listed until an
allocation is first written: most never are. Allocations with accesses narrower than a dword are kept byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .instruction import Instruction
from .memory import Memory
from .observer import Observer
from .release import Releases
from .state import Group, State

_LIST_LIMIT = 1 << 24  # cells in the list of an allocation's reads; beyond, they are marked


@dataclass(frozen=True)
class _Read:
    numbers: np.ndarray  # one for each cell
    cells: np.ndarray


@dataclass
class _Allocation:
    """Cells (dwords, or bytes if `shift` is 0) of one allocation. writer, reader: number of the last access; reader < 0: of several workgroups,
    which nothing orders."""

    start: int
    nbytes: int
    shift: int = 2
    writer: np.ndarray | None = None
    reader: np.ndarray | None = None
    reads: list[_Read] = field(default_factory=list)
    listed: int = 0

    def refine(self) -> None:
        """From dwords to bytes."""
        self.shift = 0
        if self.writer is not None:
            self.writer = np.repeat(self.writer, 4)
        if self.reader is not None:
            self.reader = np.repeat(self.reader, 4)
        self.reads = [_Read(np.repeat(read.numbers, 4), _bytes_of(read.cells)) for read in self.reads]


def _bytes_of(dwords: np.ndarray) -> np.ndarray:
    return np.asarray((4 * dwords[:, None] + np.arange(4, dtype=dwords.dtype)).ravel())


class MemoryRaces(Observer):
    watches_registers = True  # for `instruction`

    def __init__(self) -> None:
        self._allocations: dict[int, _Allocation] = {}
        self._numbers = 1
        self._workgroup_of = np.zeros(1 << 16, np.int64)  # of each number: a code of the workgroup; below, its wave, pc and whether atomic
        self._source_of = np.zeros(1 << 16, np.int32)  # waves by number, over all batches
        self._pc_of = np.zeros(1 << 16, np.int64)
        self._atomic = np.zeros(1 << 16, np.bool_)
        self._wave_of_source: list[int] = []
        self._releases = Releases()
        self._instruction: Instruction | None = None

    def begin(self, state: State) -> None:
        x, y, z = (state.workgroup_id[:, axis] for axis in range(3))
        self._workgroup = (x | y << 21 | z << 42)[state.workgroup]
        self._wave_of_source += state.wave_in_workgroup.tolist()
        self._releases.begin(state, self._workgroup)

    def instruction(self, group: Group, instruction: Instruction) -> None:
        self._instruction = instruction
        self._releases.instruction(group, instruction, self._numbers)

    def phase(self, state: State) -> None:
        self._releases.barrier(self._numbers)

    def memory(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> None:
        fields = self._instruction.encoded.fields if self._instruction is not None else {}
        synchronises = access == "atomic" or bool(fields.get("sc1"))
        numbers = self._new_numbers(group, synchronises)
        lanes = address.shape[1]
        owner = np.repeat(numbers, lanes)
        active = mask.ravel()
        everywhere = bool(active.all())
        flat = address.ravel() if everywhere else address.ravel()[active]
        owner = owner if everywhere else owner[active]
        for allocation, inside in self._touched(group.state.memory, flat):
            where = flat if inside is None else flat[inside]
            mine = owner if inside is None else owner[inside]
            cells, mine = self._cells(allocation, where, mine, nbytes)
            if access in ("read", "scalar read"):
                self._read(group, allocation, cells, mine, access, nbytes)
            else:
                self._write(group, allocation, cells, mine, access, nbytes)
        if synchronises:
            self._releases.synchronise(group, address, mask, access, bool(fields.get("sc0")), numbers)

    def _new_numbers(self, group: Group, atomic: bool) -> np.ndarray:
        first, end = self._numbers, self._numbers + group.n
        while end > len(self._pc_of):
            for name in ("_workgroup_of", "_source_of", "_pc_of", "_atomic"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self._workgroup_of[first:end] = self._workgroup[group.indices]
        self._source_of[first:end] = group.indices + (len(self._wave_of_source) - group.state.num_waves)
        self._pc_of[first:end] = group.pc - group.state.image_base
        self._atomic[first:end] = atomic
        self._numbers = end
        return np.arange(first, end, dtype=np.int32)

    def _touched(self, memory: Memory, address: np.ndarray) -> list[tuple[_Allocation, np.ndarray | None]]:
        """The allocations that these addresses lie in, each with the mask of its addresses (None: all)."""
        low, high = memory.extent_at(int(address.min())), memory.extent_at(int(address.max()))
        if low == high:
            return [(self._allocation(*low), None)]
        found, left = [], np.ones(address.shape, np.bool_)
        while left.any():
            start, nbytes = memory.extent_at(int(address[left].min()))
            inside = (address >= np.uint64(start)) & (address < np.uint64(start + nbytes))
            found.append((self._allocation(start, nbytes), inside))
            left &= ~inside
        return found

    def _allocation(self, start: int, nbytes: int) -> _Allocation:
        if start not in self._allocations:
            self._allocations[start] = _Allocation(start, nbytes)
        return self._allocations[start]

    def _cells(self, allocation: _Allocation, address: np.ndarray, numbers: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
        offset = (address - np.uint64(allocation.start)).view(np.int64)
        if allocation.shift and (nbytes & 3 or int(np.bitwise_or.reduce(offset)) & 3):
            allocation.refine()
        count = nbytes >> allocation.shift
        first = (offset >> allocation.shift).astype(np.uint32 if allocation.nbytes >> allocation.shift < 1 << 32 else np.uint64)
        if count == 1:
            return first, numbers
        return (first[:, None] + np.arange(count, dtype=first.dtype)).ravel(), np.repeat(numbers, count)

    # ---- the rules

    def _read(self, group: Group, allocation: _Allocation, cells: np.ndarray, numbers: np.ndarray, access: str, nbytes: int) -> None:
        if allocation.writer is None:
            allocation.reads.append(_Read(numbers, cells))
            allocation.listed += len(cells)
            if allocation.listed > _LIST_LIMIT:
                self._mark_reads(allocation)
            return
        earlier = allocation.writer.take(cells)
        scalar = access == "scalar read"
        suspect = earlier != 0
        if suspect.any():
            if not scalar:
                suspect &= self._apart(earlier, numbers)
            self._judge(group, allocation, suspect, cells, numbers, earlier, f"{access} of {nbytes} bytes", "write", scalar=scalar)
        self._mark_reads(allocation)
        self._mark_read(allocation, cells, numbers, group)

    def _write(self, group: Group, allocation: _Allocation, cells: np.ndarray, numbers: np.ndarray, access: str, nbytes: int) -> None:
        self._mark_reads(allocation)
        if allocation.writer is None:
            allocation.writer = np.zeros(allocation.nbytes + 3 >> allocation.shift, np.int32)
        assert allocation.reader is not None
        for table, verb in ((allocation.writer, "write"), (allocation.reader, "read")):
            earlier = table.take(cells)
            suspect = earlier != 0
            if suspect.any():
                suspect &= (earlier < 0) | self._apart(np.abs(earlier), numbers)
                suspect &= ~(self._atomic[np.abs(earlier)] & self._atomic[numbers])
                self._judge(group, allocation, suspect, cells, numbers, earlier, f"{access} of {nbytes} bytes", verb)
        # Where lanes of one instruction meet in a cell, those of different waves race, unless it is an atomic.
        order = np.argsort(cells, kind="stable")
        sorted_cells, sorted_numbers = cells[order], numbers[order]
        meet = (sorted_cells[1:] == sorted_cells[:-1]) & (sorted_numbers[1:] != sorted_numbers[:-1]) & ~self._atomic[sorted_numbers[1:]]
        if meet.any():
            self._judge(group, allocation, meet, sorted_cells[1:], sorted_numbers[1:], sorted_numbers[:-1], f"{access} of {nbytes} bytes", "write")
        allocation.writer[cells] = numbers

    def _apart(self, earlier: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Whether accesses are of different workgroups, or of different waves of one with no barrier between."""
        in_phase = (earlier >= self._releases.phase_begin) & (self._source_of[earlier] != self._source_of[numbers])
        return np.asarray(in_phase | (self._workgroup_of[earlier] != self._workgroup_of[numbers]))

    def _mark_reads(self, allocation: _Allocation) -> None:
        """Turn the list of reads into marks."""
        if allocation.reader is None:
            allocation.reader = np.zeros(allocation.nbytes + 3 >> allocation.shift, np.int32)
        for read in allocation.reads:
            self._mark_read(allocation, read.cells, read.numbers)
        allocation.reads, allocation.listed = [], 0

    def _mark_read(self, allocation: _Allocation, cells: np.ndarray, numbers: np.ndarray, group: Group | None = None) -> None:
        """group: the waves that read just now; None: the reads were some time ago, and who knew of whose is no longer known."""
        reader = allocation.reader
        assert reader is not None
        earlier = reader.take(cells)
        shared = (earlier < 0) | (earlier != 0) & (self._workgroup_of[np.abs(earlier)] != self._workgroup_of[numbers])
        if group is not None and shared.any():
            shared &= ~self._ordered_reads(group, earlier, numbers, shared & (earlier > 0))
        reader[cells] = np.where(shared, -numbers, numbers)
        # Lanes of several workgroups that read one cell at once: the last one's number stays, so it is marked as shared.
        kept = reader.take(cells)
        lost = self._workgroup_of[np.abs(kept)] != self._workgroup_of[numbers]
        if lost.any():
            reader[cells[lost]] = -np.abs(kept[lost])

    def _ordered_reads(self, group: Group, earlier: np.ndarray, numbers: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """Where, of those asked for, the earlier read is ordered before the one at hand."""
        ordered = np.zeros(asked.shape, np.bool_)
        pairs, which = np.unique(numbers[asked].astype(np.int64) << 32 | earlier[asked], return_inverse=True)
        answers = []
        for number, before in zip((pairs >> 32).tolist(), (pairs & 0xFFFFFFFF).tolist(), strict=True):
            wave = int(group.indices[number - (self._numbers - group.n)])
            answers.append(self._releases.ordered(wave, self._source(before), before, read=True, atomic=False, location=0))
        ordered[asked] = np.array(answers, np.bool_)[which]
        return ordered

    def _source(self, number: int) -> tuple[int, int]:
        """Workgroup code and wave of the access with this number."""
        return int(self._workgroup_of[number]), self._wave_of_source[self._source_of[number]]

    def _judge(
        self,
        group: Group,
        allocation: _Allocation,
        suspect: np.ndarray,
        cells: np.ndarray,
        numbers: np.ndarray,
        earlier: np.ndarray,
        what: str,
        verb: str,
        *,
        scalar: bool = False,
    ) -> None:
        """Fault at the first of the suspects that no release and acquire order. numbers: of the accesses at hand; earlier: of those before."""
        chosen = np.flatnonzero(suspect)
        if not len(chosen):
            return
        pairs = numbers[chosen].astype(np.int64) << 32 | earlier[chosen].astype(np.int64) & 0xFFFFFFFF
        distinct = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1]))
        pairs, first = np.unique(pairs[distinct], return_index=True)  # a few, of a hundred thousand
        for at in self._decisive(pairs, earlier[chosen[distinct[first]]]):
            i = int(chosen[distinct[first[at]]])
            number, before = int(numbers[i]), abs(int(earlier[i]))
            row = number - (self._numbers - group.n)
            wave = int(group.indices[row])
            location = allocation.start + (int(cells[i]) << allocation.shift)
            shared = int(earlier[i]) < 0
            source = self._source(before)
            ordered = not shared and self._releases.ordered(
                wave, source, before, read=verb == "read", atomic=bool(self._atomic[before]), location=location & ~3
            )
            if ordered and (not scalar or self._releases.scalar_cache_clean(wave, before)):
                continue
            lanes = np.zeros(group.mask.shape, np.bool_)
            lanes[row, 0] = True
            other = (source[0] & 0x1FFFFF, source[0] >> 21 & 0x1FFFFF, source[0] >> 42)
            same = source[0] == int(self._workgroup_of[number])
            reason = f"with no {'barrier' if same else 'release and acquire of device scope'} between them"
            if ordered:
                reason = "and no s_dcache_inv since: the scalar cache sees no stores"
            place = f"workgroup {other}, wave {source[1]} at pc {int(self._pc_of[before]):#x}"
            raise group.fault(f"race on device memory: {what} and a {verb} by {place}, {reason}", lanes, np.array([[location]]))

    def _decisive(self, pairs: np.ndarray, earlier: np.ndarray) -> list[int]:
        """Of ascending pairs (access at hand << 32 | earlier one), those that decide for all: of each two waves the pair with the latest earlier
        access, as order goes by time. Accesses of several workgroups and atomics, which have more ways to be ordered, are all judged."""
        before = np.abs(earlier)
        special = (earlier < 0) | self._atomic[before]
        plain = np.flatnonzero(~special)[::-1]
        _, latest = np.unique(pairs[plain] >> 32 << 32 | self._source_of[before[plain]], return_index=True)
        return [*np.flatnonzero(special).tolist(), *plain[latest].tolist()]
