"""Registers and LDS of all resident waves of a launch, and the group of waves that executes one instruction together.

Registers are arrays over all waves, `[register][wave][lane]`, so that one numpy call executes an instruction for every wave that stands
at the same pc. Waves are numbered so that equal waves of different workgroups are neighbours (wave = index in workgroup * workgroups +
workgroup): a group is then nearly always a slice, and reading a register is a view.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import KernelFault

if TYPE_CHECKING:
    from .memory import Cells, Memory
    from .observer import Observer

LANES = 64
NUM_SGPRS = 128
VCC, M0, EXEC = 106, 124, 126
POISON = np.uint32(0xFFFFFFFF)  # NaN as f32, bf16, fp8 and E8M0: what was never written shows up in results


class State:
    """All resident waves. vgpr: uint32 [registers][waves][64] (a0 is register accum_offset); sgpr: uint32 [128][waves]; scc: bool [waves]."""

    def __init__(
        self,
        *,
        kernel: str,
        memory: Memory,
        num_workgroups: int,
        waves_per_workgroup: int,
        num_vgprs: int,
        accum_offset: int,
        lds_bytes: int,
    ):
        waves = num_workgroups * waves_per_workgroup
        self.kernel, self.memory, self.accum_offset = kernel, memory, accum_offset
        self.num_workgroups, self.waves_per_workgroup, self.num_waves = num_workgroups, waves_per_workgroup, waves
        self.vgpr = np.full((num_vgprs, waves, LANES), POISON, np.uint32)
        self.sgpr = np.full((NUM_SGPRS, waves), POISON, np.uint32)
        self.scc = np.zeros(waves, np.bool_)
        self.pc = np.zeros(waves, np.int64)
        self.observers: tuple[Observer, ...] = ()
        self.image_base = 0  # of the code object: faults name pc relative to it
        self.workgroup = np.arange(waves) % num_workgroups  # slot of the wave's workgroup among the resident ones
        self.wave_in_workgroup = np.arange(waves) // num_workgroups
        self.workgroup_id = np.zeros((num_workgroups, 3), np.int64)
        # One row a workgroup, of whole dwords of 16-byte rows; lds_bytes is the limit that accesses are checked against.
        self.lds_bytes = lds_bytes
        self.lds = np.full((num_workgroups, (lds_bytes + 15) // 16 * 4), POISON, np.uint32)


def bits_to_lanes(words: np.ndarray) -> np.ndarray:
    """uint32 [waves, 2], contiguous -> bool [waves, 64]."""
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(np.bool_)


class Group:
    """The waves that execute the current instruction, by index: a slice where they are contiguous, else an index array.

    Values read are uint32 arrays [waves, 64] (vector) or [waves] (scalar) and may be views of the state: never change them in place.

    An instruction that changes the flow of control (a Row with `ends_block`) reports through `next_pc` (int, or int64 [waves] where waves part) and
    `stop` ("end", "barrier"); the machine has set `next_pc` to the instruction behind it and `stop` to None.
    """

    def __init__(self, state: State, waves: np.ndarray):
        self.state = state
        self.indices = np.asarray(waves)
        contiguous = len(waves) > 0 and int(waves[-1]) - int(waves[0]) + 1 == len(waves) and bool(np.all(np.diff(waves) == 1))
        self.waves: slice | np.ndarray = slice(int(waves[0]), int(waves[-1]) + 1) if contiguous else self.indices
        self.n = len(waves)
        self.pc = int(state.pc[self.waves][0])  # of the current instruction; the machine keeps it
        self.next_pc: int | np.ndarray = self.pc
        self.stop: str | None = None
        # A view of the registers of these waves, where there is one: halves the cost of an access.
        self._vgpr = state.vgpr[:, self.waves] if contiguous else None
        self.refresh_exec()

    # EXEC is read by nearly every instruction and written by few, so its expansion to lanes is cached here.
    def refresh_exec(self) -> None:
        self.mask = self.read_mask(EXEC)
        self.exec_full = bool(self.mask.all())

    def read_vgpr(self, register: int) -> np.ndarray:
        if self._vgpr is not None:
            return self._vgpr[register]
        return self.state.vgpr[register, self.waves]

    def write_vgpr(self, register: int, value: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Write the lanes of `mask` (bool [waves, 64]; None: the lanes of EXEC)."""
        if mask is None and not self.exec_full:
            mask = self.mask
        if mask is None:
            self.write_vgpr_all_lanes(register, value)
        elif self._vgpr is not None:
            np.copyto(self._vgpr[register], value, where=mask, casting="unsafe")
        else:
            self.state.vgpr[register, self.waves] = np.where(mask, value, self.state.vgpr[register, self.waves])

    def write_vgpr_all_lanes(self, register: int, value: np.ndarray) -> None:
        """Write every lane, whatever EXEC says (matrix instructions, lane writes)."""
        if self._vgpr is not None:
            self._vgpr[register] = value
        else:
            self.state.vgpr[register, self.waves] = value

    def write_lds_dma(self, cells: Cells, offset: np.ndarray, values: list[np.ndarray], mask: np.ndarray) -> None:
        """The LDS side of LDS-DMA: store consecutive dwords `values` (uint32 [waves, 64] each) of the lanes of `mask` at `offset` into `cells`."""
        if self.exec_full and mask is self.mask:
            cells.store_dwords(offset.ravel(), [value.ravel() for value in values])
        else:
            cells.store_dwords(offset[mask], [value[mask] for value in values])

    def read_sgpr(self, register: int) -> np.ndarray:
        return self.state.sgpr[register, self.waves]

    def write_sgpr(self, register: int, value: np.ndarray | int) -> None:
        self.state.sgpr[register, self.waves] = value
        if register in (EXEC, EXEC + 1):
            self.refresh_exec()

    def read_sgpr64(self, register: int) -> np.ndarray:
        low, high = self.state.sgpr[register, self.waves], self.state.sgpr[register + 1, self.waves]
        return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)

    def write_sgpr64(self, register: int, value: np.ndarray) -> None:
        self.state.sgpr[register, self.waves] = value.astype(np.uint32)
        self.state.sgpr[register + 1, self.waves] = (value >> np.uint64(32)).astype(np.uint32)
        if register == EXEC:
            self.refresh_exec()

    def read_mask(self, register: int) -> np.ndarray:
        """The SGPR pair as one bool a lane, [waves, 64]."""
        return bits_to_lanes(np.ascontiguousarray(self.state.sgpr[register : register + 2, self.waves].T))

    def write_mask(self, register: int, lanes: np.ndarray) -> None:
        """Write an SGPR pair from one bool a lane (broadcastable to [waves, 64]); lanes that EXEC disables become 0."""
        packed = np.packbits(lanes & self.mask, axis=1, bitorder="little").view(np.uint32)
        self.state.sgpr[register : register + 2, self.waves] = packed.T
        if register == EXEC:
            self.refresh_exec()

    @property
    def scc(self) -> np.ndarray:
        return self.state.scc[self.waves]

    @scc.setter
    def scc(self, value: np.ndarray) -> None:
        self.state.scc[self.waves] = value

    @property
    def workgroup(self) -> np.ndarray:
        """Resident slot of each wave's workgroup: the row of `state.lds`."""
        return self.state.workgroup[self.waves]

    def fault(self, what: str, lanes: np.ndarray | None = None, address: np.ndarray | None = None) -> KernelFault:
        """The exception for a fault of the current instruction: `lanes` (bool [waves, 64]) are at fault, the first is named with its address."""
        wave, lane = 0, None
        if lanes is not None:
            wave, lane = (int(i) for i in np.argwhere(lanes)[0])
        index = int(self.indices[wave])
        workgroup = tuple(int(i) for i in self.state.workgroup_id[self.state.workgroup[index]])
        place = f"workgroup {workgroup}, wave {int(self.state.wave_in_workgroup[index])}" + ("" if lane is None else f", lane {lane}")
        at = "" if address is None else f", address {int(np.broadcast_to(address, (self.n, LANES))[wave, lane or 0]):#x}"
        return KernelFault(f"{self.state.kernel}: {what} (pc {self.pc - self.state.image_base:#x}, {place}{at})")
