"""Which waves run when: groups that advance together, barriers, and random interleavings.

Waves that stand at the same pc execute together. When they part, the group with the lowest pc runs first, so that the sides of a branch and the
iterations of a loop meet again; groups that come to the same pc merge. Within a straight line of code there is no scheduling at all.

A *phase* lasts until every live wave has reached a barrier or its end. Within one, the order is free, and three orders are known:

- all waves advance together (the default);
- random pieces, drawn from a seed: some of the waves run a random number of instructions, then others, a few times over; then the rest of the phase
  is run wave after wave, in a random order. A result that depends on the order differs from seed to seed, one that misses a barrier is wrong;
- in step (hardware timing): no wave gets more than LEAD instructions ahead of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from ..errors import KernelFault, UnknownInstruction
from .completion import Completion, TimedGroup
from .decoder import Block, Program
from .state import Group, State
from .watched import WatchedGroup

LEAD = 16  # instructions; production kernels that count on their waves keeping pace are right with it
_PIECES = 5  # random pieces in a phase before the rest is run wave after wave
_LONGEST_PIECE_LOG2 = 9
_PROGRESS_SECONDS = 0.2

Progress = Callable[[int, int], None]
Check = Callable[[Group, Block], None]


class Heartbeat:
    """Calls progress(finished, total) about five times a second."""

    def __init__(self, progress: Progress, finished: int, total: int):
        self.progress, self.finished, self.total = progress, finished, total
        self.next = time.perf_counter() + _PROGRESS_SECONDS

    def beat(self) -> None:
        now = time.perf_counter()
        if now >= self.next:
            self.next = now + _PROGRESS_SECONDS
            self.progress(self.finished, self.total)


class Batch:
    """The resident workgroups of a launch, run to their end.

    timing: a completion model; strict: whether every barrier must be reached by all waves of its workgroup.
    """

    def __init__(self, state: State, program: Program, max_group_instructions: int, heartbeat: Heartbeat | None, *, timing: str, strict: bool):
        self.state, self.program, self.heartbeat = state, program, heartbeat
        self.limit, self.issued, self.num_instructions = max_group_instructions, 0, 0
        self.live = np.ones(state.num_waves, np.bool_)
        self.running = self.live.copy()  # neither ended nor at a barrier
        self.in_step, self.strict = timing == "hardware", strict
        self.completion = None
        if timing != "earliest" or any(observer.watches_registers or observer.watches_completion for observer in state.observers):
            self.completion = Completion(state, timing)

    def run(self, random: np.random.Generator | None) -> None:
        """Phase by phase: every live wave runs to its next barrier or end. Since ended waves count as arrived, all barriers then open."""
        for observer in self.state.observers:
            observer.begin(self.state)
        while self.live.any():
            self.running[:] = self.live
            for waves, length in self._turns(random):
                if len(waves):
                    self._advance(waves, length)
            if self.strict:
                self._check_barriers()
            for observer in self.state.observers:
                observer.phase(self.state)
        for observer in self.state.observers:
            observer.end(self.state)

    def _turns(self, random: np.random.Generator | None) -> Iterator[tuple[np.ndarray, int | None]]:
        """The sets of waves that take their turn one after another in a phase, and for how many instructions (None: until they stop)."""
        if self.in_step:
            while self.running.any():
                if random is None:
                    yield np.flatnonzero(self.running), LEAD
                else:
                    first = self._random_part(random)
                    second = self.running & ~first
                    yield np.flatnonzero(first), LEAD
                    yield np.flatnonzero(second), LEAD
        elif random is None:
            yield np.flatnonzero(self.running), None
        else:
            for _ in range(_PIECES):
                yield np.flatnonzero(self._random_part(random)), int(2 ** random.uniform(0, _LONGEST_PIECE_LOG2))
            for position in random.permutation(self.state.waves_per_workgroup):
                yield np.flatnonzero(self.running & (self.state.wave_in_workgroup == position)), None

    def _random_part(self, random: np.random.Generator) -> np.ndarray:
        """Some of the running waves: some positions in all workgroups, or in some; rarely a choice of its own for each wave. bool [waves]."""
        state = self.state
        if random.random() < 0.1:
            chosen = random.random(state.num_waves) < 0.5
        else:
            chosen = (random.random(state.waves_per_workgroup) < 0.5)[state.wave_in_workgroup]
            if random.random() < 0.5:
                chosen &= (random.random(state.num_workgroups) < 0.5)[state.workgroup]
        return self.running & chosen

    def _advance(self, waves: np.ndarray, length: int | None) -> None:
        """Run these waves until each has stopped, or has executed `length` instructions."""
        left = None if length is None else np.full(self.state.num_waves, length)
        ready: dict[int, list[np.ndarray]] = {}
        self._part(ready, waves)
        while ready:
            pc = min(ready)
            meeting = ready.pop(pc)
            group = self._group(meeting[0] if len(meeting) == 1 else np.sort(np.concatenate(meeting)))
            executed = self._run_group(group, pc, min(ready) if ready else None, None if left is None else int(left[group.waves].min()))
            if group.stop is None:
                waves = group.indices
                if left is not None:
                    left[waves] -= executed
                    waves = waves[left[waves] > 0]
                self._part(ready, waves)
            if self.heartbeat is not None:
                self.heartbeat.beat()

    def _part(self, ready: dict[int, list[np.ndarray]], waves: np.ndarray) -> None:
        pcs = self.state.pc[waves]
        for pc in np.unique(pcs):
            ready.setdefault(int(pc), []).append(waves[pcs == pc])

    def _group(self, waves: np.ndarray) -> Group:
        if self.completion is None:
            return Group(self.state, waves)
        watchers = self.completion.watchers
        group = WatchedGroup(self.state, waves) if watchers else TimedGroup(self.state, waves)
        if isinstance(group, WatchedGroup):
            group.watchers = watchers
        self.completion.enter(group)
        return group

    def _block(self, pc: int) -> Block:
        try:
            return self.program.block(pc)
        except UnknownInstruction as error:
            raise UnknownInstruction(f"{self.state.kernel}: {error}") from error

    def _run_group(self, group: Group, pc: int, meeting: int | None, length: int | None) -> int:
        """Run a group from pc until it stops, parts, comes to where others wait (pc `meeting`), or has executed `length` instructions.

        Returns how many it has executed.
        """
        executed = 0
        while True:
            block = self._block(pc)
            if meeting is not None and pc < meeting < block.end:
                block = block.until(meeting)
            if length is not None and len(block.steps) > length - executed:
                count = length - executed
                block = Block(block.steps[:count], block.steps[count][0], block.instructions[:count])
            group.next_pc = block.end
            for observer in self.state.observers:
                observer.block(group, block)
            try:
                self._execute(group, block)
            except IndexError as error:
                raise group.fault("a register beyond those that the kernel declares") from error
            executed += len(block.steps)
            self.issued += len(block.steps)
            self.num_instructions += len(block.steps) * group.n
            if self.issued > self.limit:
                raise group.fault(f"more than {self.limit} instructions without an end")
            if group.stop is not None:
                self.state.pc[group.waves] = block.end
                self.running[group.waves] = False
                if group.stop == "end":
                    self.live[group.waves] = False
                return executed
            following = group.next_pc
            if not isinstance(following, int):
                if (following != following[0]).any():
                    self.state.pc[group.waves] = following
                    return executed
                following = int(following[0])
            if executed == length or (meeting is not None and following >= meeting):
                self.state.pc[group.waves] = following
                return executed
            pc = following

    def _execute(self, group: Group, block: Block) -> None:
        if self.completion is None:
            for group.pc, execute in block.steps:
                execute(group)
        else:
            assert isinstance(group, TimedGroup)
            self.completion.execute(group, block)

    def _check_barriers(self) -> None:
        """At the end of a phase: in each workgroup either all waves have ended or all stand at one barrier.

        Hardware is laxer: it counts an ended wave as arrived and does not look which s_barrier a wave stands at. But a program in which that
        happens has lost its way: what one side takes for its first barrier is the other side's second.
        """
        state = self.state
        shape = (state.waves_per_workgroup, state.num_workgroups)
        live, pc = self.live.reshape(shape), state.pc.reshape(shape)
        left_behind = live.any(axis=0) & ~live.all(axis=0)
        if left_behind.any():
            workgroup = int(left_behind.argmax())
            waiting, ended = int(live[:, workgroup].argmax()), int((~live[:, workgroup]).argmax())
            raise self._barrier_fault(f"wave {ended} ended without reaching the barrier at which this wave waits", waiting, workgroup)
        apart = live.all(axis=0) & (pc != pc[0]).any(axis=0)
        if apart.any():
            workgroup = int(apart.argmax())
            other = int((pc[:, workgroup] != pc[0, workgroup]).argmax())
            elsewhere = int(pc[other, workgroup]) - 4 - state.image_base
            raise self._barrier_fault(f"wave {other} waits at another barrier, at pc {elsewhere:#x}, than this wave", 0, workgroup)

    def _barrier_fault(self, what: str, wave: int, workgroup: int) -> KernelFault:
        group = Group(self.state, np.array([wave * self.state.num_workgroups + workgroup]))
        group.pc -= 4  # of the s_barrier, which the wave stands behind
        return group.fault(what)
