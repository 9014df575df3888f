"""What watches a launch: checks and counters. An observer sees what every wave does and never changes a result.

The machine and the memory instructions call these methods at the one place where each thing happens; without observers nothing is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .decoder import Block
    from .state import Group, State


class Observer:
    """Every method does nothing; an observer overrides what it needs and raises `group.fault(...)` for what it finds."""

    def begin(self, state: State) -> None:
        """A batch of workgroups becomes resident."""

    def block(self, group: Group, block: Block) -> None:
        """The group is about to run the block's instructions, all of them."""

    def lds(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> None:
        """The lanes of `mask` access `nbytes` each at `address` (int64 [waves, 64], bytes from the start of the workgroup's LDS).

        access: "read", "write", "atomic", "transposed read" or "DMA write". All lanes are within bounds.
        """

    def memory(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> None:
        """The same for device memory: `address` uint64 [waves, 64], or [waves, 1] for the one access of a scalar load. access: "read", "write", "atomic"."""

    def phase(self, state: State) -> None:
        """Every live wave has reached a barrier, all barriers open."""

    def end(self, state: State) -> None:
        """All resident workgroups have ended."""
