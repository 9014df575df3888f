"""Check of LDS: races between the waves of a workgroup, and bytes that an LDS-DMA may not have written yet.

Between two barriers (a phase) nothing orders the waves of a workgroup. So a dword that two waves touch in one phase, one of them writing, is a
race; atomics do not race with each other. An access that no lgkmcnt wait covers by the barrier goes on in the next phase. An LDS-DMA writes at some
time between its issue and the vmcnt wait that covers it, so it counts as a write in every phase in between, and its own wave must not touch the
bytes before the wait.

Each wave has one mark a dword for each kind of access. Marking is one scatter an access; the marks of a workgroup's waves are compared once, at
the end of the phase. What is found is then looked up, byte for byte, in the log of the phase's accesses, which costs nothing unless there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .instruction import Instruction
from .observer import Observer
from .shadow import any_set
from .state import Group, State

_LOG_LIMIT = 1024  # accesses of a phase to remember; a longer phase is compared in parts
_CHUNK = 1 << 18  # bytes of marks to compare at once, so that they stay in the processor's cache
_KINDS = {"read": 0, "transposed read": 0, "write": 1, "DMA write": 1, "atomic": 2}
_READ, _WRITE, _ATOMIC = 0, 1, 2


@dataclass(frozen=True)
class _Access:
    pc: int
    waves: np.ndarray
    address: np.ndarray
    mask: np.ndarray
    nbytes: int
    access: str
    issued: np.ndarray  # [waves] DS instructions of each wave by then, this one included
    carried: bool = False  # begun in an earlier phase


@dataclass(frozen=True)
class _Touch:
    """One lane of an access."""

    access: _Access
    row: int
    lane: int

    @property
    def wave(self) -> int:
        return int(self.access.waves[self.row])

    @property
    def start(self) -> int:
        return int(self.access.address[self.row, self.lane])


class LdsRaces(Observer):
    watches_registers = True  # for `instruction`
    watches_completion = True

    def begin(self, state: State) -> None:
        self._dwords = -(-state.lds.shape[1] // 8) * 8  # of a wave's marks: rows of whole 8 bytes
        self._read, self._write = (np.zeros(state.num_waves * self._dwords, np.uint8) for _ in range(2))
        self._atomic: np.ndarray | None = None
        self._pending = np.zeros(state.num_waves * self._dwords, np.uint8)  # DMAs in flight to a dword, of each wave
        self._num_in_flight = 0
        self._log: list[_Access] = []
        self._issued, self._covered = (np.zeros(state.num_waves, np.int64) for _ in range(2))  # DS instructions; those that waits cover

    def instruction(self, group: Group, instruction: Instruction) -> None:
        if instruction.encoded.encoding == "DS":
            self._issued[group.waves] += 1
        elif instruction.mnemonic == "s_waitcnt":
            lgkmcnt = instruction.encoded.simm16 >> 8 & 15
            if lgkmcnt < 15:  # DS instructions complete in order; whatever else is counted makes it only fewer of them
                self._covered[group.waves] = np.maximum(self._covered[group.waves], self._issued[group.waves] - lgkmcnt)

    def lds(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> None:
        where = self._where(group.indices, address, mask)
        if access == "DMA write":
            self._add_pending(where, nbytes, 1)
            self._num_in_flight += where.size
        elif self._num_in_flight:
            self._check_pending(group, address, mask, nbytes, access)
        _mark(self._marks_of(_KINDS[access]), where, nbytes)
        if len(self._log) >= _LOG_LIMIT:
            self._compare(group.state)
            self._log = [entry for entry in self._log if entry.access == "DMA write"]
        self._log.append(_Access(group.pc, group.indices, address, mask, nbytes, access, self._issued[group.indices]))

    def landed(self, state: State, waves: np.ndarray, address: np.ndarray, mask: np.ndarray, nbytes: int) -> None:
        where = self._where(waves, address, mask)
        self._add_pending(where, nbytes, -1)
        self._num_in_flight -= where.size

    def phase(self, state: State) -> None:
        self._compare(state)
        self._read[:] = 0
        if self._num_in_flight:
            np.not_equal(self._pending, 0, out=self._write.view(np.bool_))
        else:
            self._write[:] = 0
        if self._atomic is not None:
            self._atomic[:] = 0
        if self._num_in_flight or (self._issued != self._covered).any():
            self._log = [kept for kept in map(self._carried, self._log) if kept is not None]
        else:
            self._log = []

    def _marks_of(self, kind: int) -> np.ndarray:
        if kind == _ATOMIC and self._atomic is None:
            self._atomic = np.zeros_like(self._pending)
        marks = (self._read, self._write, self._atomic)[kind]
        assert marks is not None
        return marks

    def _where(self, waves: np.ndarray, address: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Byte positions in the marks, one-dimensional: 4 a mark, the marks of a wave behind those of the wave before."""
        where = address + (waves * (4 * self._dwords))[:, None]
        return where.ravel() if mask.all() else where[mask]

    def _add_pending(self, where: np.ndarray, nbytes: int, count: int) -> None:
        # A DMA's lanes never share a dword, so plain indexing adds right. Four counts at once do not carry: a dword has few DMAs in flight.
        if nbytes == 16 and where.size and not int(np.bitwise_or.reduce(where)) & 15:
            self._pending.view(np.uint32)[where >> 4] += np.uint32(count * 0x01010101 & 0xFFFFFFFF)
            return
        for i in range(nbytes // 4):
            self._pending[(where >> 2) + i] += np.uint8(count & 0xFF)

    def _check_pending(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> None:
        first = (address >> 2) + (group.indices * self._dwords)[:, None]
        last = (address + nbytes - 1 >> 2) + (group.indices * self._dwords)[:, None]
        if nbytes == 16 and not (first & 3).any():
            hit = self._pending.view(np.uint32).take(first >> 2, mode="clip") != 0
        elif nbytes == 8 and not (first & 1).any():
            hit = self._pending.view(np.uint16).take(first >> 1, mode="clip") != 0
        else:
            hit = np.zeros(address.shape, np.bool_)
            for i in range((nbytes + 2) // 4 + 1):
                hit |= self._pending.take(np.minimum(first + i, last), mode="clip") != 0
        hit &= mask
        if hit.any():
            verb = "read" if _KINDS[access] == _READ else "overwrite"
            what = f"{verb} of {nbytes} bytes of LDS that an LDS-DMA of this wave may not have written yet: no vmcnt wait covers it"
            raise group.fault(what, hit, address)

    def _carried(self, entry: _Access) -> _Access | None:
        """The part of an access that goes on in the next phase, marked there."""
        if entry.access == "DMA write":
            first = (entry.address >> 2) + (entry.waves * self._dwords)[:, None]
            mask = entry.mask & (self._pending.take(first, mode="clip") != 0)
        else:
            mask = entry.mask & (entry.issued > self._covered[entry.waves])[:, None]
        if not mask.any():
            return None
        if entry.access != "DMA write":
            _mark(self._marks_of(_KINDS[entry.access]), self._where(entry.waves, entry.address, mask), entry.nbytes)
        return replace(entry, mask=mask, carried=True)

    # ---- comparing the waves of each workgroup

    def _compare(self, state: State) -> None:
        if state.waves_per_workgroup == 1 or not self._log:
            return
        shape = (state.waves_per_workgroup, state.num_workgroups * self._dwords // 8)
        planes = (self._read, self._write) if self._atomic is None else (self._read, self._write, self._atomic)
        marks = [plane.view(np.uint64).reshape(shape) for plane in planes]
        for start in range(0, shape[1], _CHUNK // 8):
            conflict = _conflicts(*(plane[:, start : start + _CHUNK // 8] for plane in marks))
            if any_set(conflict):
                self._report(state, np.flatnonzero(conflict.view(np.uint8)) + 8 * start)

    def _report(self, state: State, found: np.ndarray) -> None:
        """found: indices workgroup slot * dwords + dword, ascending. Faults at the first byte that really races."""
        planes = np.zeros((3, state.waves_per_workgroup, 4 * len(found)), np.uint8)
        for entry in self._log:
            rows, lanes = np.nonzero(entry.mask)
            waves, start = entry.waves[rows], entry.address[rows, lanes]
            for i in range(entry.nbytes):
                byte = state.workgroup[waves] * (4 * self._dwords) + start + i
                place = np.minimum(np.searchsorted(found, byte >> 2), len(found) - 1)
                hit = found[place] == byte >> 2
                planes[_KINDS[entry.access], state.wave_in_workgroup[waves[hit]], 4 * place[hit] + (byte[hit] & 3)] = 1
        racing = np.flatnonzero(_conflicts(*planes))
        if len(racing):
            dword, byte = divmod(int(racing[0]), 4)
            slot, dword = divmod(int(found[dword]), self._dwords)
            self._fault(state, slot, 4 * dword + byte)

    def _fault(self, state: State, slot: int, byte: int) -> None:
        touches = []
        for entry in self._log:
            here = entry.mask & (state.workgroup[entry.waves] == slot)[:, None] & (entry.address <= byte) & (byte < entry.address + entry.nbytes)
            touches += [_Touch(entry, int(row), int(lane)) for row, lane in np.argwhere(here)]
        for i, second in enumerate(touches):
            for first in touches[:i]:
                kinds = {_KINDS[first.access.access], _KINDS[second.access.access]}
                if first.wave != second.wave and kinds not in ({_READ}, {_ATOMIC}):
                    raise _fault(state, first, second)


def _conflicts(read: np.ndarray, write: np.ndarray, atomic: np.ndarray | None = None) -> np.ndarray:
    """Where two waves conflict. Marks: unsigned integers of 0/1 bytes [waves of a workgroup, n]; the result: the same, [n]."""
    found = np.zeros(read.shape[1], read.dtype)
    reads, writes = read[0].copy(), write[0].copy()  # of the waves so far
    atomics = None if atomic is None else atomic[0].copy()
    for wave in range(1, len(read)):
        found |= (read[wave] & writes) | (write[wave] & (reads | writes))
        if atomic is not None and atomics is not None:
            found |= ((read[wave] | write[wave]) & atomics) | (atomic[wave] & (reads | writes))
            atomics |= atomic[wave]
        reads |= read[wave]
        writes |= write[wave]
    return found


def _mark(plane: np.ndarray, where: np.ndarray, nbytes: int) -> None:
    """Mark the dwords of accesses of `nbytes` at these byte positions."""
    low = int(np.bitwise_or.reduce(where)) if where.size else 0
    if nbytes == 16 and not low & 15:
        plane.view(np.uint32)[where >> 4] = 0x01010101
    elif nbytes == 8 and not low & 7:
        plane.view(np.uint16)[where >> 3] = 0x0101
    else:
        last = where + nbytes - 1 >> 2
        for i in range((nbytes + 2) // 4 + 1):
            plane[np.minimum((where >> 2) + i, last)] = 1


def _fault(state: State, first: _Touch, second: _Touch) -> Exception:
    """The later access is the place of the fault."""
    group = Group(state, np.array([second.wave]))
    group.pc = second.access.pc
    lanes = np.zeros((1, second.access.mask.shape[1]), np.bool_)
    lanes[0, second.lane] = True
    earlier = (
        f"{first.access.access} of {first.access.nbytes} bytes at {first.start:#x} by wave {state.wave_in_workgroup[first.wave]}, lane {first.lane} "
        f"at pc {first.access.pc - state.image_base:#x}"
    )
    between = "no wait for it before the barrier" if first.access.carried else "no barrier between"
    what = f"LDS race: {second.access.access} of {second.access.nbytes} bytes and, with {between}, {earlier}"
    return group.fault(what, lanes, np.array([[second.start]]))
