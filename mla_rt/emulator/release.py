"""Who may know whose device memory accesses: release and acquire of device scope, as `checks_memory.py` describes them.

Accesses are numbered in time. What a wave knows is a table: for a wave (workgroup code, wave) all its accesses with smaller numbers are ordered
before what the wave does now. Atomics and sc1 stores reach memory by themselves and need no buffer_wbl2: they have a bound of their own, as has
each location that waves synchronise at.
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
        self._published: dict[int, Known] = {}  # by location

    def begin(self, state: State, workgroup: np.ndarray) -> None:
        """workgroup: a code for each wave."""
        waves, count = state.num_waves, state.waves_per_workgroup
        self._workgroup, self._position = workgroup, state.wave_in_workgroup
        self._mates = np.arange(count) * state.num_workgroups + state.workgroup[:, None]  # waves of each wave's workgroup
        self._issued = np.zeros(waves, np.int64)  # vector memory instructions
        self._done = np.zeros(waves, np.int64)  # accesses with smaller numbers are complete
        self._before_barrier = 0  # accesses with smaller numbers were issued before the last barrier
        self._writing_back = np.zeros((waves, count), np.int64)  # bounds, for each wave of the workgroup, of a buffer_wbl2 under way
        self._released = np.zeros((waves, count), np.int64)  # of the last that is complete
        self._scalar_clean = np.zeros(waves, np.int64)
        self._knows: dict[int, Known] = {}
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
        for wave in group.indices.tolist():
            if wave in self._seen:
                merge(self._knows.setdefault(wave, {}), self._seen[wave])

    def barrier(self, number: int) -> None:
        """What a wave knows, and the loads that it has waited for, the others of its workgroup have too. number: of the next access."""
        self._before_barrier = number
        for table in (self._knows, self._seen):
            for wave in list(table):
                for mate in self._mates[wave].tolist():
                    if mate != wave:
                        merge(table.setdefault(mate, {}), table[wave])

    def synchronise(self, group: Group, address: np.ndarray, mask: np.ndarray, access: str, returns: bool, numbers: np.ndarray) -> None:
        """An atomic, or a load or store with sc1, of the lanes of `mask`; where it is done together, wave after wave."""
        for row, wave in enumerate(group.indices.tolist()):
            for location in np.unique(address[row][mask[row]] & ~np.uint64(3)).tolist():
                if access == "read" or (access == "atomic" and returns):
                    self._awaited.setdefault(wave, []).append((int(self._issued[wave]), dict(self._published.get(location, {}))))
                if access != "read":
                    self._publish(wave, location, int(numbers[row]))

    def _publish(self, wave: int, location: int, number: int) -> None:
        published = self._published.setdefault(location, {})
        code = int(self._workgroup[wave])
        for position, released in enumerate(self._released[wave].tolist()):
            merge(published, {(code, position): released, (code, position, "atomic"): self._before_barrier})
        merge(published, {(code, int(self._position[wave]), "atomic"): int(self._done[wave]), ("at", location): number + 1})
        merge(published, self._knows.get(wave, {}))

    def ordered(self, wave: int, source: tuple[int, int], number: int, atomic: bool, location: int) -> bool:
        """Whether the access with this number, of the wave `source`, is ordered before what the wave does now. atomic: it was one, at `location`."""
        if source[0] == int(self._workgroup[wave]):
            return True
        known = self._knows.get(wave, {})
        if known.get(source, 0) > number:
            return True
        return atomic and (known.get((*source, "atomic"), 0) > number or known.get(("at", location), 0) > number)

    def scalar_cache_clean(self, wave: int, number: int) -> bool:
        """Whether the wave has invalidated the scalar cache since the access with this number."""
        return int(self._scalar_clean[wave]) > number
