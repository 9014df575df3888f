"""Who may know whose device memory accesses: release and acquire of device scope, as `checks_memory.py` describes them.

Accesses are numbered in time. What a wave knows is a table: for a wave (workgroup code, wave) all its accesses with smaller numbers are ordered
before what the wave does now. Reads, atomics and sc1 stores need no buffer_wbl2, only to be complete (waited for, before the barrier if another wave
releases): they have a bound of their own, as has each location that waves synchronise at.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .instruction import Instruction
from .state import Group, State

Known = dict[Any, int]
_VMEM = frozenset({"FLAT", "MUBUF"})
_CACHE_OPERATIONS = frozenset({"buffer_wbl2", "buffer_inv"})


def merge(into: Known, other: Known) -> None:
    for key, bound in other.items():
        if into.get(key, 0) < bound:
            into[key] = bound


def vmcnt_of(simm16: int) -> int:
    """The vmcnt field of an s_waitcnt."""
    return simm16 & 15 | simm16 >> 10 & 48


class Releases:
    def __init__(self) -> None:
        self._published: dict[int, tuple[int, Known]] = {}  # by location: number of the last to write there, and what it published

    def begin(self, state: State, workgroup: np.ndarray) -> None:
        """workgroup: a code for each wave."""
        waves, count = state.num_waves, state.waves_per_workgroup
        self._workgroup, self._position = workgroup, state.wave_in_workgroup
        self._mates = np.arange(count) * state.num_workgroups + state.workgroup[:, None]  # waves of each wave's workgroup
        self._issued = np.zeros(waves, np.int64)  # vector memory instructions
        self._done = np.zeros(waves, np.int64)  # accesses with smaller numbers are complete
        self._before_barrier = 0  # accesses with smaller numbers were issued before the last barrier
        self._done_before_barrier = np.zeros(waves, np.int64)  # and of each wave, were complete
        self._writing_back = np.zeros((waves, count), np.int64)  # bounds, for each wave of the workgroup, of a buffer_wbl2 under way
        self._released = np.zeros((waves, count), np.int64)  # of the last that is complete
        self._scalar_clean = np.zeros(waves, np.int64)
        self._knows: dict[int, Known] = {}
        self._publications: dict[int, Known] = {}  # what waves would publish, until they next wait, acquire or pass a barrier
        # What synchronising loads have seen: those under way with the number of vector memory instructions issued by then, and those waited for.
        self._awaited: dict[int, list[tuple[int, Known]]] = {}
        self._seen: dict[int, Known] = {}

    def instruction(self, group: Group, instruction: Instruction, number: int) -> None:
        """number: of the next access."""
        name, encoding = instruction.mnemonic, instruction.encoded.encoding
        if encoding in _VMEM and name not in _CACHE_OPERATIONS:
            self._issued[group.waves] += 1
        elif name == "s_waitcnt":
            self._wait(group, vmcnt_of(instruction.encoded.simm16), number)
        elif name == "buffer_wbl2" and instruction.encoded.sc1:
            self._writing_back[group.waves] = self._before_barrier
            self._writing_back[group.indices, self._position[group.indices]] = number
        elif name == "buffer_inv" and instruction.encoded.sc1:
            self._acquire(group)
        elif name == "s_dcache_inv":
            self._scalar_clean[group.waves] = number

    def _wait(self, group: Group, vmcnt: int, number: int) -> None:
        self._publications.clear()
        if vmcnt == 0:
            self._done[group.waves] = number
            np.maximum.at(self._released, group.indices, self._writing_back[group.indices])
        if self._awaited:
            for wave in group.indices.tolist():
                covered = int(self._issued[wave]) - vmcnt
                awaited = self._awaited.pop(wave, [])
                for issued, known in awaited:
                    if issued <= covered:
                        merge(self._seen.setdefault(wave, {}), known)
                    else:
                        self._awaited.setdefault(wave, []).append((issued, known))

    def _acquire(self, group: Group) -> None:
        self._publications.clear()
        for wave in group.indices.tolist():
            if wave in self._seen:
                merge(self._knows.setdefault(wave, {}), self._seen[wave])

    def barrier(self, number: int) -> None:
        """What a wave knows, and the loads that it has waited for, the others of its workgroup have too. number: of the next access."""
        self._publications.clear()
        self._before_barrier = number
        self._done_before_barrier = self._done.copy()
        for table in (self._knows, self._seen):
            for wave in list(table):
                for mate in self._mates[wave].tolist():
                    if mate != wave:
                        merge(table.setdefault(mate, {}), table[wave])

    def synchronise(self, group: Group, address: np.ndarray, mask: np.ndarray, access: str, returns: bool, numbers: np.ndarray) -> None:
        """An atomic, or a load or store with sc1, of the lanes of `mask`; where it is done together, wave after wave."""
        for row, wave in enumerate(group.indices.tolist()):
            locations = np.unique(address[row][mask[row]] & ~np.uint64(3)).tolist()
            if access == "read" or (access == "atomic" and returns):
                self._await(wave, locations)
            if access != "read":
                self._publish(wave, locations, access == "write", int(numbers[row]))

    def _await(self, wave: int, locations: list[int]) -> None:
        for location in locations:
            if location in self._published:
                number, known = self._published[location]
                self._awaited.setdefault(wave, []).append((int(self._issued[wave]), known | {("at", location): number + 1}))

    def _publish(self, wave: int, locations: list[int], overwrites: bool, number: int) -> None:
        """overwrites: who sees what was written sees nothing of what was there before."""
        published = self._publication(wave)
        if overwrites:
            self._published.update(dict.fromkeys(locations, (number, published)))
            return
        for location in locations:
            before = self._published.get(location, (0, {}))[1]
            together = dict(before)
            merge(together, published)
            self._published[location] = number, together

    def _publication(self, wave: int) -> Known:
        """What others know who see what the wave writes now; not to be changed."""
        if wave not in self._publications:
            code, position = int(self._workgroup[wave]), int(self._position[wave])
            complete = self._done_before_barrier[self._mates[wave]]
            complete[position] = self._done[wave]
            published = dict(self._knows.get(wave, {}))
            for mate, bounds in enumerate(zip(self._released[wave].tolist(), complete.tolist(), strict=True)):
                merge(published, {(code, mate): bounds[0], (code, mate, "complete"): bounds[1]})
            self._publications[wave] = published
        return self._publications[wave]

    def ordered(self, wave: int, source: tuple[int, int], number: int, *, read: bool, atomic: bool, location: int) -> bool:
        """Whether the access with this number, of the wave `source`, is ordered before what the wave does now.

        read, atomic: what it was; location: where.
        """
        if source[0] == int(self._workgroup[wave]):
            return number < self._before_barrier or source[1] == int(self._position[wave])
        known = self._knows.get(wave, {})
        if known.get(source, 0) > number:
            return True
        if (read or atomic) and known.get((*source, "complete"), 0) > number:
            return True
        return atomic and known.get(("at", location), 0) > number

    @property
    def phase_begin(self) -> int:
        """Number of the first access since the last barrier."""
        return self._before_barrier

    def scalar_cache_clean(self, wave: int, number: int) -> bool:
        """Whether the wave has invalidated the scalar cache since the access with this number."""
        return int(self._scalar_clean[wave]) > number
