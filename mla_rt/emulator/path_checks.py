"""Checks along the path of instructions that waves execute: a result used before the wait for it, and wait states that are missing.

What is outstanding at a place, and what was just executed, is a small value (`Path`) that depends on the instructions alone. So one block of code
is checked once for each such value with which it is entered, and afterwards costs a dictionary look-up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import KernelFault
from .completion import MAX_LGKMCNT, MAX_VMCNT, Wait, wait_of
from .decoder import Block
from .footprint import SGPR
from .hazards import Facts, facts_of, needs
from .instruction import Instruction
from .observer import SCC, Observer
from .state import EXEC, M0, VCC, Group, State

_NAMES = {VCC: "vcc_lo", VCC + 1: "vcc_hi", M0: "m0", EXEC: "exec_lo", EXEC + 1: "exec_hi", SCC: "scc"}


class Path(NamedTuple):
    """vmem, lds: the pcs of the accesses that vmcnt and lgkmcnt count in order, oldest first; unordered: those of scalar loads and flat accesses.
    recent: (pc, wait states since) of the latest instructions, oldest first."""

    vmem: tuple[int, ...] = ()
    lds: tuple[int, ...] = ()
    unordered: frozenset[int] = frozenset()
    recent: tuple[tuple[int, int], ...] = ()


class _Violation(NamedTuple):
    pc: int
    what: str


class PathChecks(Observer):
    """One launch's checks of waits and hazards."""

    def __init__(self) -> None:
        self._facts: dict[int, Facts] = {}
        self._waits: dict[int, Wait] = {}
        self._numbers: dict[Path, int] = {Path(): 0}
        self._paths: list[Path] = [Path()]
        self._after: dict[tuple[int, int, int], int | _Violation] = {}

    def begin(self, state: State) -> None:
        self._at = np.zeros(state.num_waves, np.int64)  # number of the path on which each wave is

    def block(self, group: Group, block: Block) -> None:
        numbers = self._at[group.waves]
        first = int(numbers[0])
        if (numbers == first).all():
            self._at[group.waves] = self._follow(group, first, block, 0)
            return
        for number in np.unique(numbers):
            same = numbers == number
            self._at[group.indices[same]] = self._follow(group, int(number), block, int(same.argmax()))

    def _follow(self, group: Group, number: int, block: Block, wave: int) -> int:
        key = (number, block.steps[0][0], len(block.steps))
        after = self._after.get(key)
        if after is None:
            after = self._after[key] = self._check(self._paths[number], group, block)
        if isinstance(after, _Violation):
            raise self._fault(group, after, wave)
        return after

    def _fault(self, group: Group, violation: _Violation, wave: int) -> KernelFault:
        at = Group(group.state, group.indices[wave : wave + 1])
        at.pc = violation.pc
        return at.fault(violation.what)

    def _check(self, path: Path, group: Group, block: Block) -> int | _Violation:
        state = group.state
        for (pc, _), instruction in zip(block.steps, block.instructions, strict=True):
            facts = self._facts_at(pc, instruction)
            what = self._unawaited(path, facts, state) or self._hazard(path, facts, state)
            if what is not None:
                return _Violation(pc, what)
            path = self._step(path, pc, facts)
        number = self._numbers.get(path)
        if number is None:
            number = self._numbers[path] = len(self._paths)
            self._paths.append(path)
        return number

    def _facts_at(self, pc: int, instruction: Instruction) -> Facts:
        facts = self._facts.get(pc)
        if facts is None:
            facts = self._facts[pc] = facts_of(instruction)
            wait = wait_of(instruction)
            if wait is not None:
                self._waits[pc] = wait
        return facts

    def _step(self, path: Path, pc: int, facts: Facts) -> Path:
        vmem, lds, unordered, recent = path
        if facts.memory in ("vmem", "flat"):
            vmem = (*vmem, pc)[-MAX_VMCNT:]
        if facts.memory == "lds":
            lds = (*lds, pc)[-MAX_LGKMCNT:]
        elif facts.memory in ("smem", "flat"):
            unordered |= {pc}
        wait = self._waits.get(pc)
        if wait is not None:
            vmem = vmem[max(0, len(vmem) - wait.vmcnt) :]
            lds = lds[max(0, len(lds) - wait.lgkmcnt) :]
            if wait.lgkmcnt == 0:
                unordered = frozenset()
        # Of what is done in order, only that has to be known which began with the first access that still brings something.
        vmem, lds = self._from_first_load(vmem), self._from_first_load(lds)
        recent = tuple((p, age + facts.states) for p, age in recent if age + facts.states < self._facts[p].horizon)
        if facts.horizon:
            recent = (*recent, (pc, 0))
        return Path(vmem, lds, unordered, recent)

    def _from_first_load(self, accesses: tuple[int, ...]) -> tuple[int, ...]:
        for i, pc in enumerate(accesses):
            if self._facts[pc].writes:
                return accesses[i:]
        return ()

    def _unawaited(self, path: Path, facts: Facts, state: State) -> str | None:
        """The register that is used though its load may not have come back."""
        touched = facts.reads | facts.writes
        for queue, kind, counter in ((path.vmem, "vmem", "vmcnt"), (path.lds, "lds", "lgkmcnt")):
            for i, pc in enumerate(queue):
                pending = self._facts[pc].writes & touched
                if pending and facts.memory == kind and not pending & facts.reads:
                    continue  # the same counter's results come in order: the later load wins
                if pending:
                    return self._missing_wait(facts, min(pending & facts.reads or pending), pc, f"{counter}({len(queue) - 1 - i})", state)
        for pc in sorted(path.unordered):
            pending = self._facts[pc].writes & touched
            if pending:
                return self._missing_wait(facts, min(pending & facts.reads or pending), pc, "lgkmcnt(0)", state)
        return None

    def _missing_wait(self, facts: Facts, register: int, pc: int, wait: str, state: State) -> str:
        load = f"{self._facts[pc].mnemonic} at pc {pc - state.image_base:#x}"
        verb = "reads" if register in facts.reads else "overwrites"
        return f"{facts.mnemonic} {verb} {_name(register, state)} before the result of {load} is there: no s_waitcnt {wait} between them"

    def _hazard(self, path: Path, facts: Facts, state: State) -> str | None:
        """The wait states that are missing. Of several matrix instructions that wrote a register, the latest counts."""
        replaced: set[int] = set()
        for pc, age in reversed(path.recent):
            first = self._facts[pc]
            for states, registers, why in needs(first, facts):
                if age < states and registers - replaced:
                    where = f"{_name(min(registers - replaced), state)}, {first.mnemonic} at pc {pc - state.image_base:#x}"
                    return f"{why} ({where}): {states} wait states are needed between them, there are {age}"
            if first.is_matrix:
                replaced |= first.writes
        return None


def _name(register: int, state: State) -> str:
    if register >= SGPR:
        return _NAMES.get(register - SGPR, f"s{register - SGPR}")
    return f"a{register - state.accum_offset}" if register >= state.accum_offset else f"v{register}"
