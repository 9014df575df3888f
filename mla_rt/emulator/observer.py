"""What watches a launch: checks and counters. An observer sees what every wave does and never changes a result.

The machine and the memory instructions call these methods at the one place where each thing happens; without observers nothing is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

SCC = 253  # the number by which register hooks know SCC: its operand code

if TYPE_CHECKING:
    from .decoder import Block
    from .instruction import Instruction
    from .state import Group, State


class Observer:
    """Every method does nothing; an observer overrides what it needs and raises `group.fault(...)` for what it finds.

    watches_registers: whether `instruction` and the `…_read` and `…_write` methods are called, which slows a run; False on the class.
    watches_completion: whether `landed` is called.
    """

    watches_registers = False
    watches_completion = False

    def begin(self, state: State) -> None:
        """A batch of workgroups becomes resident."""

    def block(self, group: Group, block: Block) -> None:
        """The group is about to run the block's instructions, all of them."""

    def lds(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> None:
        """The lanes of `mask` access `nbytes` each at `address` (int64 [waves, 64], bytes from the start of the workgroup's LDS).

        access: "read", "write", "atomic", "transposed read" or "DMA write". All lanes are within bounds.
        """

    def memory(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> None:
        """The same for device memory: `address` uint64 [waves, 64], or [waves, 1] for the one access of a scalar load.

        access: "read", "scalar read", "write" or "atomic".
        """

    def instruction(self, group: Group, instruction: Instruction) -> None:
        """The group is about to execute one instruction, at group.pc. What follows, up to the next call, is its doing."""

    def vgpr_read(self, group: Group, register: int) -> None:
        """The instruction reads this register of the unified file, all lanes."""

    def vgpr_write(self, group: Group, register: int, value: np.ndarray, mask: np.ndarray | None) -> None:
        """It writes the lanes of `mask` (bool [waves, 64]; None: all). value: uint32, broadcastable to [waves, 64].

        Reported when a load is issued, whatever the completion model: that nothing uses a register too early is checked elsewhere.
        """

    def sgpr_read(self, group: Group, register: int) -> None:
        """It reads this scalar register, or SCC. Where EXEC only says which lanes take part, that is not reported."""

    def sgpr_write(self, group: Group, register: int, value: np.ndarray | int) -> None:
        """It writes this scalar register, or SCC (value: bool). value: broadcastable to [waves]."""

    def landed(self, state: State, waves: np.ndarray, address: np.ndarray, mask: np.ndarray, nbytes: int) -> None:
        """An s_waitcnt of the waves (int indices into `state`) covers an LDS-DMA that wrote `nbytes` for each lane of `mask` at `address`.

        Reported whatever the completion model: from here on the wave may count on the bytes, and other waves after a barrier. address: as in
        `lds`, [len(waves), 64].
        """

    def phase(self, state: State) -> None:
        """Every live wave has reached a barrier, all barriers open."""

    def end(self, state: State) -> None:
        """All resident workgroups have ended."""
