"""A group of waves that tells observers which registers its instructions read and write."""

from __future__ import annotations

import numpy as np

from .completion import TimedGroup
from .observer import SCC, Observer
from .state import EXEC, bits_to_lanes


class WatchedGroup(TimedGroup):
    """A TimedGroup for launches with observers that want registers: see `Observer.vgpr_read` and the methods behind it."""

    watchers: tuple[Observer, ...] = ()

    def read_vgpr(self, register: int) -> np.ndarray:
        for watcher in self.watchers:
            watcher.vgpr_read(self, register)
        return super().read_vgpr(register)

    def put_vgpr(self, register: int, value: np.ndarray, mask: np.ndarray | None) -> None:
        for watcher in self.watchers:
            watcher.vgpr_write(self, register, value, mask)
        super().put_vgpr(register, value, mask)

    def read_sgpr(self, register: int) -> np.ndarray:
        self._sgpr_read(register)
        return super().read_sgpr(register)

    def write_sgpr(self, register: int, value: np.ndarray | int) -> None:
        self._sgpr_write(register, value)
        super().write_sgpr(register, value)

    def read_sgpr64(self, register: int) -> np.ndarray:
        self._sgpr_read(register, register + 1)
        return super().read_sgpr64(register)

    def write_sgpr64(self, register: int, value: np.ndarray) -> None:
        self._sgpr_write(register, value.astype(np.uint32))
        self._sgpr_write(register + 1, (value >> np.uint64(32)).astype(np.uint32))
        super().write_sgpr64(register, value)

    def read_mask(self, register: int) -> np.ndarray:
        self._sgpr_read(register, register + 1)
        return super().read_mask(register)

    def write_mask(self, register: int, lanes: np.ndarray) -> None:
        packed = np.packbits(lanes & self.mask, axis=1, bitorder="little").view(np.uint32)
        self._sgpr_write(register, packed[:, 0])
        self._sgpr_write(register + 1, packed[:, 1])
        super().write_mask(register, lanes)

    def refresh_exec(self) -> None:
        self.mask = bits_to_lanes(np.ascontiguousarray(self.state.sgpr[EXEC : EXEC + 2, self.waves].T))
        self.exec_full = bool(self.mask.all())

    @property
    def scc(self) -> np.ndarray:
        self._sgpr_read(SCC)
        return self.state.scc[self.waves]

    @scc.setter
    def scc(self, value: np.ndarray) -> None:
        self._sgpr_write(SCC, value)
        self.state.scc[self.waves] = value

    def _sgpr_read(self, *registers: int) -> None:
        for watcher in self.watchers:
            for register in registers:
                watcher.sgpr_read(self, register)

    def _sgpr_write(self, register: int, value: np.ndarray | int) -> None:
        for watcher in self.watchers:
            watcher.sgpr_write(self, register, value)
