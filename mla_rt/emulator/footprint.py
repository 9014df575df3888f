"""Which registers an instruction reads and writes, found by executing it once on a single wave that keeps a record.

So there is no second description of the instructions that could differ from how they run.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from .instruction import Instruction
from .memory import Cells
from .observer import SCC
from .state import LANES, NUM_SGPRS, Group, State

SGPR = 1 << 10  # scalar register n is SGPR + n here, a vector register of the unified file its own number


@dataclass(frozen=True, slots=True)
class Footprint:
    """reads: in the order in which they are read, with repetitions; EXEC is among them only as an operand. writes: whatever the lanes."""

    reads: tuple[int, ...]
    writes: frozenset[int]


def footprint(instruction: Instruction) -> Footprint:
    """The registers of an instruction. Relative ones (s_movrel, index mode) are those of index 0."""
    group = _Recorder()
    with np.errstate(all="ignore"), suppress(_Stopped):
        instruction.run(group)
    return Footprint(tuple(group.reads), frozenset(group.writes))


class _Stopped(Exception):
    """The instruction reported a fault: all operands but zero are meaningless here."""


class _NoMemory:
    """Memory in which every access is legal and hits the first bytes."""

    cells = Cells(np.zeros(256, np.uint8))
    exclusive = nullcontext()

    def check(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str = "read", align: int = 1) -> np.ndarray:
        return np.zeros(address.shape, np.int64)


class _Recorder(Group):
    """One wave with all lanes active. Every register holds 0."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.writes: set[int] = set()
        state: Any = SimpleNamespace(
            memory=_NoMemory(),
            observers=(),
            sgpr=np.zeros((NUM_SGPRS, 1), np.uint32),
            lds=np.zeros((1, 40 << 10), np.uint32),
            lds_bytes=160 << 10,
            workgroup=np.zeros(1, np.int64),
        )
        self.state: State = state
        self.indices, self.waves, self.n = np.zeros(1, np.int64), slice(0, 1), 1
        self.pc, self.next_pc, self.stop = 0, 0, None
        self.mask, self.exec_full = np.ones((1, LANES), np.bool_), True
        self._zero = np.zeros((1, LANES), np.uint32)

    def refresh_exec(self) -> None:
        pass

    def read_vgpr(self, register: int) -> np.ndarray:
        self.reads.append(register)
        return self._zero

    def write_vgpr(self, register: int, value: np.ndarray, mask: np.ndarray | None = None) -> None:
        self.writes.add(register)

    def write_vgpr_all_lanes(self, register: int, value: np.ndarray) -> None:
        self.writes.add(register)

    def write_lds_dma(self, cells: Cells, offset: np.ndarray, values: list[np.ndarray], mask: np.ndarray) -> None:
        pass

    def read_sgpr(self, register: int) -> np.ndarray:
        self.reads.append(SGPR + register)
        return np.zeros(1, np.uint32)

    def write_sgpr(self, register: int, value: np.ndarray | int) -> None:
        self.writes.add(SGPR + register)

    def read_sgpr64(self, register: int) -> np.ndarray:
        self.reads += (SGPR + register, SGPR + register + 1)
        return np.zeros(1, np.uint64)

    def write_sgpr64(self, register: int, value: np.ndarray) -> None:
        self.writes.update((SGPR + register, SGPR + register + 1))

    def read_mask(self, register: int) -> np.ndarray:
        self.read_sgpr64(register)
        return np.zeros((1, LANES), np.bool_)

    def write_mask(self, register: int, lanes: np.ndarray) -> None:
        self.writes.update((SGPR + register, SGPR + register + 1))

    @property
    def scc(self) -> np.ndarray:
        self.reads.append(SGPR + SCC)
        return np.zeros(1, np.bool_)

    @scc.setter
    def scc(self, value: np.ndarray) -> None:
        self.writes.add(SGPR + SCC)

    @property
    def workgroup(self) -> np.ndarray:
        return self.state.workgroup

    def fault(self, what: str, lanes: np.ndarray | None = None, address: np.ndarray | None = None) -> Any:
        return _Stopped(what)
