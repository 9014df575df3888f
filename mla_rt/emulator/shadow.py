"""Shadow of the registers and LDS of the resident waves: for each bit, whether it is undefined.

A register without an undefined bit in any wave has no shadow at all, so that defined values, nearly all of them, cost next to nothing.
"""

from __future__ import annotations

import numpy as np

from .memory import Cells
from .observer import SCC
from .state import EXEC, LANES, POISON, State

ALL = np.uint32(0xFFFFFFFF)
Waves = slice | np.ndarray
NUM_SCALARS = 256  # SGPRs by number, and SCC


def any_set(mask: np.ndarray) -> bool:
    """mask.any(), much faster for integers."""
    return mask.size > 0 and int(mask.max()) != 0


class Shadow:
    """Masks: uint32, a 1 for an undefined bit; vector [waves, 64], scalar [waves]. What a wave starts with is taken from `state`."""

    def __init__(self, state: State):
        self._state = state
        registers, waves = len(state.vgpr), state.num_waves
        self._untouched = np.full((waves, LANES), ALL)  # shared by all registers that nothing has written
        self.vector: list[np.ndarray | None] = [None] + [self._untouched] * (registers - 1)  # v0: the work-item's number
        self._waves_of = np.ones((registers, waves), np.bool_)  # where a vector register may have undefined bits
        self._waves_of[0] = False
        self._scalar = np.zeros((NUM_SCALARS, waves), np.uint32)
        self._scalar[: len(state.sgpr)][(state.sgpr == POISON).all(axis=1)] = ALL
        self._scalar[EXEC : EXEC + 2] = 0
        self._scalar[SCC] = ALL
        self.scalar_flags: list[bool] = [bool(row.any()) for row in self._scalar]
        self._lds: Cells | None = None

    def read_vector(self, register: int, waves: Waves) -> np.ndarray | None:
        """The register's mask, or None if it is zero in these waves."""
        mask = self.vector[register]
        if mask is None or not self._waves_of[register, waves].any():
            return None
        part = mask[waves]
        return part if any_set(part) else None

    def write_vector(self, register: int, waves: Waves, count: int, value: np.ndarray | None, lanes: np.ndarray | None) -> None:
        """value: broadcastable to [count, 64], None for zero; lanes: bool [count, 64] that are written, None for all. count: of the waves."""
        mask = self.vector[register]
        if value is None and lanes is None and count == self._state.num_waves:
            self.vector[register] = None
            self._waves_of[register] = False
            return
        if mask is None or mask is self._untouched:
            mask = self.vector[register] = np.zeros_like(self._untouched) if mask is None else mask.copy()
        new: np.ndarray | np.uint32 = np.uint32(0) if value is None else value
        mask[waves] = new if lanes is None else np.where(lanes, new, mask[waves])
        self._waves_of[register, waves] = False if value is None and lanes is None else mask[waves].any(axis=1)
        if not self._waves_of[register].any():
            self.vector[register] = None

    def read_scalar(self, register: int, waves: Waves) -> np.ndarray | None:
        if not self.scalar_flags[register]:
            return None
        mask = self._scalar[register, waves]
        return mask if any_set(mask) else None

    def write_scalar(self, register: int, waves: Waves, value: np.ndarray | None) -> None:
        self._scalar[register, waves] = 0 if value is None else value
        self.scalar_flags[register] = value is not None or bool(self._scalar[register].any())

    @property
    def lds(self) -> Cells:
        """A byte for each of LDS, as `state.lds` lies in memory: 0xFF while it is undefined."""
        if self._lds is None:
            self._lds = Cells(np.full(self._state.lds.nbytes, 0xFF, np.uint8))
        return self._lds
