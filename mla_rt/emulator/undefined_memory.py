"""Which bytes of device memory were never written: fresh allocations until they are uploaded, filled or stored to."""

from __future__ import annotations

import numpy as np

from .memory import Cells


class UndefinedMemory:
    """Offsets are those of Memory.check. An allocation without an undefined byte costs nothing."""

    def __init__(self) -> None:
        self._cells: dict[int, Cells] = {}  # by the allocation's first offset: a byte each, 0xFF while undefined

    def allocated(self, start: int, nbytes: int) -> None:
        self._cells[start] = Cells(np.full(-(-nbytes // 16) * 16, 0xFF, np.uint8))

    def freed(self, start: int) -> None:
        self._cells.pop(start, None)

    def define(self, start: int, offset: int, nbytes: int, size: int) -> None:
        """Bytes offset..offset+nbytes-1 of the allocation of `size` bytes at `start` have a value now."""
        if nbytes == size:
            self._cells.pop(start, None)
        elif start in self._cells:
            self._cells[start].u8[offset : offset + nbytes] = 0

    def cells(self, start: int) -> Cells | None:
        """The marks of the allocation at `start`, by offset from it; None if all its bytes are defined."""
        return self._cells.get(start)
