"""From the counts of launches to time on a card. Everything that comes out is modelled, nothing measured.

Each workgroup has a demand on each resource of its compute unit, in clocks:
  issue   of its longest wave: a wave issues one instruction in `issue_clocks`
  valu    of its fullest SIMD (waves go to the SIMDs in turn): vector instructions, transcendental ones longer
  mfma    of its fullest SIMD: matrix instructions
  lds     cycles of its LDS accesses, bank conflicts included
  vmem    of the vector memory pipe, by the width of each instruction
and on the card's memory: bytes of the distinct 128-byte lines that it touches.

Two totals bound the truth under the stated rates. Lower: everything overlaps; a compute unit takes as long as its busiest resource, the launch at
least as long as its distinct lines take at the peak rate. Upper: nothing overlaps within a wave; a workgroup takes the sum of all demands of its
longest wave, the latency of everything that it waits for, and its own lines at its compute unit's share of the memory, caches left aside.
Workgroups are placed in order on the first free slot (`occupancy` says how many a compute unit has), so that idle units and tails show.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .emulator.counters import LINE_BYTES, LaunchCounts
from .occupancy import Occupancy, occupancy
from .speed_rates import MI355X, Rates

RESOURCES = ("issue", "valu", "mfma", "lds", "vmem")
# What the upper bound adds up: issue of all but vector and matrix instructions, whose issue is part of their own clocks; latency of all waits and
# scalar loads; neighbours: by how much the workgroups of a compute unit hold each other up; memory: the workgroup's lines at its unit's share.
SERIAL_PARTS = (*RESOURCES, "latency")
UPPER_PARTS = (*SERIAL_PARTS, "neighbours", "memory")
_WIDTHS = (("x4", 16), ("x3", 12), ("x2", 8), ("64", 8))  # how a vector memory mnemonic says its bytes a lane, if more than a dword


@dataclass(frozen=True)
class Demand:
    """What each workgroup asks of its compute unit, float [workgroups] each.

    clocks: by RESOURCES; serial: by SERIAL_PARTS, clocks of the longest wave if nothing overlaps and nothing else runs, memory traffic not included.
    """

    clocks: dict[str, np.ndarray]
    serial: dict[str, np.ndarray]


@dataclass(frozen=True)
class LaunchTime:
    """A launch on a card.

    resource_seconds: by "hbm" and RESOURCES, of the busiest compute unit (hbm: of the card): how long the launch takes if only this counted.
    lower_seconds, upper_seconds: of the launch, without its fixed cost; upper_parts: by UPPER_PARTS, what the upper bound is the sum of where the
    card's memory does not bound it too: of the workgroups that share the slot which ends last. busy: seconds that each compute unit has work in the
    lower bound, [num_cus]; of_cu: how many workgroups each runs.
    """

    counts: LaunchCounts
    occupancy: Occupancy
    resource_seconds: dict[str, float]
    lower_seconds: float
    upper_seconds: float
    upper_parts: dict[str, float]
    busy: np.ndarray
    of_cu: np.ndarray

    @property
    def bound_by(self) -> str:
        """The resource that takes longest."""
        return max(self.resource_seconds, key=lambda name: self.resource_seconds[name])

    @property
    def hbm_bytes(self) -> int:
        """Bytes of all distinct lines, read and written."""
        return (self.counts.lines_read + self.counts.lines_written) * LINE_BYTES

    @property
    def utilization(self) -> float:
        """Share of the card's compute units, over the time until the last is done, that have work."""
        return float(self.busy.mean() / self.busy.max())


@dataclass(frozen=True)
class SpeedOfLight:
    """Launches one after another on a card: the model's two totals, fixed cost of each launch included."""

    rates: Rates
    launches: tuple[LaunchTime, ...]

    @property
    def lower_seconds(self) -> float:
        return sum(launch.lower_seconds for launch in self.launches) + self.fixed_seconds

    @property
    def upper_seconds(self) -> float:
        return sum(launch.upper_seconds for launch in self.launches) + self.fixed_seconds

    @property
    def fixed_seconds(self) -> float:
        return len(self.launches) * self.rates.launch_seconds


def speed_of_light(launches: Sequence[LaunchCounts], rates: Rates = MI355X) -> SpeedOfLight:
    """The model of these launches, run one after another. ValueError for a kernel that does not fit a compute unit or a rate that is not known."""
    return SpeedOfLight(rates, tuple(launch_time(counts, rates) for counts in launches))


def demand(counts: LaunchCounts, rates: Rates) -> Demand:
    """The demands of each workgroup."""
    waves = counts.waves_per_workgroup

    def clocks_of(kinds: Mapping[str, float]) -> np.ndarray:
        """Of each wave, [workgroups, waves], for kinds with so many clocks each."""
        return counts.by_kind @ np.array([kinds.get(kind, 0.0) for kind in counts.kinds])

    def of_class(*classes: str) -> list[str]:
        return [kind for kind, of in zip(counts.kinds, counts.classes, strict=True) if of in classes]

    def fullest_simd(clocks: np.ndarray) -> np.ndarray:
        padded = np.zeros((len(clocks), -(-waves // rates.simds_per_cu) * rates.simds_per_cu))
        padded[:, :waves] = clocks
        return np.asarray(padded.reshape(len(clocks), -1, rates.simds_per_cu).sum(axis=1).max(axis=1))

    valu = clocks_of(dict.fromkeys(of_class("valu"), rates.valu_clocks) | dict.fromkeys(of_class("transcendental"), rates.transcendental_clocks))
    mfma = clocks_of({kind: rates.mfma(kind) for kind in of_class("mfma")})
    exchanges = [kind for kind in of_class("lds") if kind in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32")]
    lds = counts.lds_cycles + counts.lds_conflict_cycles + clocks_of(dict.fromkeys(exchanges, rates.lds_exchange_clocks))
    vmem = clocks_of({kind: rates.vmem_clocks[bytes_a_lane(kind)] for kind in of_class("vmem")})
    instructions = counts.by_kind.sum(axis=2)
    shared = {"lds": lds.sum(axis=1), "vmem": vmem.sum(axis=1)}
    latency = {kind: rates.smem_latency_clocks for kind in of_class("smem")}
    for kind in of_class("wait"):
        latency[kind] = max(rates.vmem_latency_clocks * ("vmcnt" in kind), rates.lds_latency_clocks * ("lgkmcnt" in kind))
    # A vector instruction's issue is part of the clocks for which it holds its SIMD.
    issue_of_others = rates.issue_clocks * (instructions - counts.by_kind[:, :, _columns(counts, ("valu", "transcendental", "mfma"))].sum(axis=2))
    of_wave = {"issue": issue_of_others, "valu": valu, "mfma": mfma, "latency": clocks_of(latency)}
    longest = (np.arange(counts.num_workgroups), np.sum(list(of_wave.values()), axis=0).argmax(axis=1))
    serial = {name: values[longest] for name, values in of_wave.items()} | shared
    clocks = {"issue": rates.issue_clocks * instructions.max(axis=1), "valu": fullest_simd(valu), "mfma": fullest_simd(mfma), **shared}
    return Demand(*({name: np.asarray(values, np.float64) for name, values in parts.items()} for parts in (clocks, serial)))


def _columns(counts: LaunchCounts, classes: tuple[str, ...]) -> list[int]:
    return [i for i, of in enumerate(counts.classes) if of in classes]


def bytes_a_lane(kind: str) -> int:
    """4, 8, 12 or 16: what the pipe handles an instruction of this mnemonic as."""
    return next((nbytes for suffix, nbytes in _WIDTHS if kind.endswith(suffix)), 4)


def launch_time(counts: LaunchCounts, rates: Rates) -> LaunchTime:
    """The model of one launch. ValueError as in `speed_of_light`."""
    fit = occupancy(num_vgprs=counts.num_vgprs, lds_bytes=counts.lds_bytes, block_size=int(np.prod(counts.block)))
    if fit.workgroups_per_cu < 1:
        raise ValueError(f"{counts.kernel}: a workgroup does not fit a compute unit ({fit.limited_by})")
    wanted = demand(counts, rates)
    together = max(1, min(fit.workgroups_per_cu, -(-counts.num_workgroups // rates.num_cus)))
    # How much of its demand a workgroup adds to its unit's time while others run beside it: each has its own issue; workgroups of few waves
    # take turns at the SIMDs; the rest is one for all.
    waves, simds = counts.waves_per_workgroup, rates.simds_per_cu
    by_simds = -(-together * waves // simds) / (together * -(-waves // simds))
    weight = {"issue": 1 / together, "valu": by_simds, "mfma": by_simds, "lds": 1.0, "vmem": 1.0}
    shared = together * np.max([weight[name] * wanted.clocks[name] for name in RESOURCES if name != "issue"], axis=0)
    lower = np.maximum(wanted.clocks["issue"], shared)
    active_cus = min(rates.num_cus, counts.num_workgroups)
    share = min(rates.hbm_bytes_per_second / rates.clock_hz / active_cus, rates.bytes_in_flight / rates.vmem_latency_clocks)
    own_bytes = LINE_BYTES * (counts.workgroup_lines_read + counts.workgroup_lines_written)
    serial = np.sum(list(wanted.serial.values()), axis=0)
    parts = wanted.serial | {"neighbours": np.maximum(shared - serial, 0.0), "memory": together * own_bytes / share}
    upper = np.sum(list(parts.values()), axis=0)

    cu, _, end = _place(lower, rates.num_cus, fit.workgroups_per_cu)
    upper_cu, upper_slot, upper_end = _place(upper, rates.num_cus, fit.workgroups_per_cu)
    last = upper_end.argmax()
    of_last = (upper_cu == upper_cu[last]) & (upper_slot == upper_slot[last])
    totals = {name: np.bincount(cu, weight[name] * wanted.clocks[name], rates.num_cus) for name in RESOURCES}
    busy = np.bincount(cu, lower, rates.num_cus) / together
    hbm_seconds = LINE_BYTES * (counts.lines_read + counts.lines_written) / rates.hbm_bytes_per_second
    return LaunchTime(
        counts=counts,
        occupancy=fit,
        resource_seconds={"hbm": hbm_seconds} | {name: float(totals[name].max()) / rates.clock_hz for name in RESOURCES},
        lower_seconds=max(hbm_seconds, float(end.max()) / rates.clock_hz),
        upper_seconds=max(hbm_seconds, float(upper_end.max()) / rates.clock_hz),
        upper_parts={name: float(parts[name][of_last].sum()) / rates.clock_hz for name in UPPER_PARTS},
        busy=busy / rates.clock_hz,
        of_cu=np.bincount(cu, minlength=rates.num_cus),
    )


def _place(clocks: np.ndarray, num_cus: int, slots_per_cu: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Workgroups of these clocks go, in order, to the slot that is free first, to every unit once before a second: (unit, slot, end) of each."""
    free = [(0.0, slot, cu) for slot in range(slots_per_cu) for cu in range(num_cus)]
    (placed, slots), end = np.empty((2, len(clocks)), np.int64), np.empty(len(clocks))
    for i, duration in enumerate(clocks):
        start, slot, cu = free[0]
        placed[i], slots[i], end[i] = cu, slot, start + duration
        heapq.heapreplace(free, (end[i], slot, cu))
    return placed, slots, end
