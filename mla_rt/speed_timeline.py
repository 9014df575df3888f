"""One workgroup over time: a simple in-order model of its waves on a compute unit of its own.

A wave issues its instructions in order. One that finds its unit busy (SIMD, matrix core, LDS, vector memory pipe) waits for it; s_waitcnt waits for
what it names, s_barrier for the other waves; nothing else stalls. In particular a register is taken to be ready when it is read, instruction
fetch and the memory's queues have no limit, and every LDS instruction takes its wave's average of LDS cycles (bank conflicts included).
Modelled, not measured; between the two bounds of `speed_model` rather than either of them.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from .emulator.completion import wait_of
from .emulator.counters import LaunchCounts
from .emulator.instruction import Instruction
from .emulator.instruction_class import class_of, kind_of
from .speed_model import bytes_a_lane
from .speed_rates import MI355X, Rates

LANES = 64


@dataclass(frozen=True)
class Segment:
    """An instruction of a wave: from when its turn came (what it waited for included) to the turn of the next. Clocks; name: mnemonic."""

    start: float
    end: float
    of_class: str
    name: str


@dataclass(frozen=True)
class Timeline:
    """waves: the segments of each wave, in order, without gaps; clocks: when the last wave ends."""

    kernel: str
    rates: Rates
    waves: tuple[tuple[Segment, ...], ...]

    @property
    def clocks(self) -> float:
        return max((wave[-1].end for wave in self.waves if wave), default=0.0)

    def chrome_trace(self) -> dict[str, Any]:
        """For chrome://tracing or Perfetto: JSON as a dict, one thread a wave, µs."""
        microsecond = 1e6 / self.rates.clock_hz
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"{self.kernel}, one workgroup, modelled on {self.rates.name}"}}
        ]
        for number, wave in enumerate(self.waves):
            events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": f"wave {number}"}})
            events += [
                {
                    "name": segment.name, "cat": segment.of_class, "ph": "X", "pid": 0, "tid": number,
                    "ts": round(segment.start * microsecond, 6), "dur": round((segment.end - segment.start) * microsecond, 6),
                }
                for segment in wave
            ]  # fmt: skip
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"label": "modelled", "card": self.rates.name}}


def timeline(counts: LaunchCounts, rates: Rates = MI355X) -> Timeline:
    """Of the first workgroup. ValueError if the launch was counted without its trace."""
    if not counts.trace:
        raise ValueError(f"{counts.kernel} was counted without a trace")
    unit = _ComputeUnit(counts, rates)
    segments: list[list[Segment]] = [[] for _ in counts.trace]
    ready = [(0.0, wave) for wave in range(len(counts.trace))]
    position = [0] * len(counts.trace)
    arrived: list[tuple[float, int]] = []
    running = len(counts.trace)
    while ready:
        now, wave = heapq.heappop(ready)
        if position[wave] == len(counts.trace[wave]):
            running -= 1
        else:
            instruction = counts.trace[wave][position[wave]]
            position[wave] += 1
            of_class = class_of(instruction)
            if of_class == "barrier":
                arrived.append((now, wave))
            else:
                end = unit.issue(wave, now, instruction, of_class)
                segments[wave].append(Segment(now, end, of_class, instruction.mnemonic))
                heapq.heappush(ready, (end, wave))
        if arrived and len(arrived) == running:
            opens = max(time for time, _ in arrived) + rates.issue_clocks
            for time, waiting in arrived:
                segments[waiting].append(Segment(time, opens, "barrier", "s_barrier"))
                heapq.heappush(ready, (opens, waiting))
            arrived = []
    return Timeline(counts.kernel, rates, tuple(map(tuple, segments)))


class _ComputeUnit:
    """Until when each unit is busy, and when what each wave asked of memory arrives."""

    def __init__(self, counts: LaunchCounts, rates: Rates):
        self.rates = rates
        waves = len(counts.trace)
        lds_cycles = (counts.lds_cycles + counts.lds_conflict_cycles)[0] / np.maximum(counts.of_class("lds")[0], 1)
        self.lds_clocks = [max(float(cycles), 1.0) for cycles in lds_cycles]
        self.bytes_a_clock = rates.hbm_bytes_per_second / rates.clock_hz / rates.num_cus
        self.valu_free, self.mfma_free = [0.0] * rates.simds_per_cu, [0.0] * rates.simds_per_cu
        self.lds_free = self.vmem_free = self.memory_free = 0.0
        self.vmcnt: list[list[float]] = [[] for _ in range(waves)]
        self.lgkmcnt: list[list[float]] = [[] for _ in range(waves)]

    def issue(self, wave: int, now: float, instruction: Instruction, of_class: str) -> float:
        """When the wave's next instruction has its turn."""
        rates, simd = self.rates, wave % self.rates.simds_per_cu
        start = now
        if of_class in ("valu", "transcendental"):
            start = max(now, self.valu_free[simd])
            self.valu_free[simd] = start + (rates.valu_clocks if of_class == "valu" else rates.transcendental_clocks)
        elif of_class == "mfma":
            start = max(now, self.mfma_free[simd])
            self.mfma_free[simd] = start + rates.mfma(kind_of(instruction))
        elif of_class == "lds":
            start = max(now, self.lds_free)
            self.lds_free = start + self.lds_clocks[wave]
            self.lgkmcnt[wave].append(self.lds_free + rates.lds_latency_clocks)
        elif of_class == "vmem":
            start = max(now, self.vmem_free)
            nbytes = bytes_a_lane(instruction.mnemonic)
            self.vmem_free = start + rates.vmem_clocks[nbytes]
            self.memory_free = max(self.memory_free, start) + LANES * nbytes / self.bytes_a_clock
            self.vmcnt[wave].append(self.memory_free + rates.vmem_latency_clocks)
        elif of_class == "smem":
            self.lgkmcnt[wave].append(now + rates.smem_latency_clocks)
        elif (wait := wait_of(instruction)) is not None:
            start = max(now, self._arrival(self.vmcnt[wave], wait.vmcnt), self._arrival(self.lgkmcnt[wave], wait.lgkmcnt))
        return start + rates.issue_clocks

    @staticmethod
    def _arrival(pending: list[float], allowed: int) -> float:
        """When at most `allowed` of the pending are left, which then are all that is pending."""
        waited_for = pending[: max(len(pending) - allowed, 0)]
        del pending[: len(waited_for)]
        return max(waited_for, default=0.0)
