"""The speed-of-light report: text for a terminal, JSON for programs.

`speed_of_light` (speed_model.py) makes it of the counts of any launches; what a decode adds, instructions a tile and the cache it reads, is Tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .emulator.counters import LaunchCounts
from .emulator.instruction_class import CLASSES
from .speed_model import RESOURCES, LaunchTime, SpeedOfLight

RESOURCE_NAMES = {
    "hbm": "device memory", "issue": "issue", "valu": "vector ALU", "mfma": "matrix cores", "lds": "LDS", "vmem": "vector memory pipe",
}  # fmt: skip
_LDS_BYTES = {"LDS bytes read": "lds_read_bytes", "LDS bytes written": "lds_written_bytes", "LDS cycles": "lds_cycles"}
_PER_TILE = {**_LDS_BYTES, "bank conflict cycles": "lds_conflict_cycles", "bytes read": "read_bytes", "bytes written": "written_bytes"}
FOOTNOTE = """\
lower bound   everything overlaps: each compute unit takes as long as its busiest resource, the launch at least as long as its lines of memory
upper bound   nothing overlaps inside a wave: every wait lasts a whole round trip, memory comes at each compute unit's share of the peak rate
LDS           phases of 16-byte writes and of dwords are not published: their conflicts are counted for phases of consecutive lanes
All times are modelled: exact counts times the rates of one table (mla_rt/speed_rates.py). Nothing here was measured."""


@dataclass(frozen=True)
class Tiles:
    """What a tile of the KV costs one workgroup: the difference between two launches of one workgroup that differ by whole tiles.

    Numbers by name: classes of instructions, then LDS and memory. per_tile: of one tile; once: of prologue and epilogue together; merge: what two
    workgroups that share a row tile do more than two that do not, one of them merging what both found.
    """

    tokens_per_tile: int
    per_tile: Mapping[str, float]
    once: Mapping[str, float]
    merge: Mapping[str, float]

    @property
    def instructions_per_token(self) -> float:
        """Of all waves of the workgroup."""
        return sum(self.per_tile[name] for name in CLASSES) / self.tokens_per_tile


def marginal(short: LaunchCounts, short_tiles: int, long: LaunchCounts, long_tiles: int, split: LaunchCounts, tokens_per_tile: int) -> Tiles:
    """Of launches alike in all but this: so many tiles a workgroup, and `split`: two workgroups a row tile, short_tiles each."""

    def numbers(counts: LaunchCounts) -> dict[str, float]:
        totals = counts.by_class | {name: int(getattr(counts, field).sum()) for name, field in _PER_TILE.items()}
        return {name: total / counts.num_workgroups for name, total in totals.items()}

    few, many, halves = numbers(short), numbers(long), numbers(split)
    per_tile = {name: (many[name] - few[name]) / (long_tiles - short_tiles) for name in few}
    once = {name: few[name] - short_tiles * per_tile[name] for name in few}
    return Tiles(tokens_per_tile, per_tile, once, {name: 2 * (halves[name] - few[name]) for name in few})


def as_json(report: SpeedOfLight, title: str, tiles: Tiles | None = None, kv_bytes: int | None = None) -> dict[str, Any]:
    """The whole report as what json.dump takes. kv_bytes: of the cache that must be read at least once."""
    rates = report.rates
    return {
        "label": "modelled",
        "title": title,
        "card": {field.name: getattr(rates, field.name) for field in fields(rates)},
        "lower_seconds": report.lower_seconds,
        "upper_seconds": report.upper_seconds,
        "fixed_seconds": report.fixed_seconds,
        "kv_bytes": kv_bytes,
        "kv_seconds": None if kv_bytes is None else kv_bytes / rates.hbm_bytes_per_second,
        "launches": [_launch_json(launch) for launch in report.launches],
        "tiles": None
        if tiles is None
        else {
            "tokens_per_tile": tiles.tokens_per_tile,
            "per_tile": dict(tiles.per_tile),
            "once": dict(tiles.once),
            "merge": dict(tiles.merge),
            "instructions_per_token": tiles.instructions_per_token,
        },
    }


def _launch_json(launch: LaunchTime) -> dict[str, Any]:
    counts = launch.counts
    return {
        "kernel": counts.kernel,
        "grid": counts.grid,
        "block": counts.block,
        "num_workgroups": counts.num_workgroups,
        "counted_workgroups": counts.sampled or counts.num_workgroups,
        "num_vgprs": counts.num_vgprs,
        "lds_bytes": counts.lds_bytes,
        "workgroups_per_cu": launch.occupancy.workgroups_per_cu,
        "waves_per_simd": launch.occupancy.waves_per_simd,
        "occupancy_limited_by": launch.occupancy.limited_by,
        "lower_seconds": launch.lower_seconds,
        "upper_seconds": launch.upper_seconds,
        "bound_by": launch.bound_by,
        "resource_seconds": launch.resource_seconds,
        "upper_parts_seconds": launch.upper_parts,
        "utilization": launch.utilization,
        "workgroups_of_cu": launch.of_cu.tolist(),
        "busy_seconds_of_cu": launch.busy.tolist(),
        "instructions": counts.num_instructions,
        "instructions_by_class": counts.by_class,
        "instructions_by_kind": counts.kind_totals,
        **{name: int(getattr(counts, name).sum()) for name in [*_PER_TILE.values(), "scalar_read_bytes", "atomics"]},
        "lines_read": counts.lines_read,
        "lines_written": counts.lines_written,
        "workgroup_lines_read": int(counts.workgroup_lines_read.sum()),
        "workgroup_lines_written": int(counts.workgroup_lines_written.sum()),
        "lds_conflicts_by_pc": {f"{pc:#x}": cycles for pc, (_, cycles, _) in counts.lds_sites.items() if cycles},
    }


def _conflict_lines(counts: LaunchCounts, count: int) -> list[str]:
    """The worst conflicts; places of one mnemonic and rate together."""
    alike: dict[tuple[str, float], list[tuple[int, int]]] = {}
    for pc, (mnemonic, cycles, accesses) in counts.lds_sites.items():
        if cycles:
            alike.setdefault((mnemonic, round(cycles / accesses, 1)), []).append((pc, cycles))
    worst = sorted(alike.items(), key=lambda item: -sum(cycles for _, cycles in item[1]))[:count]
    lines = []
    for (mnemonic, rate), places in worst:
        where = f"at {places[0][0]:#x}" + (f" and {len(places) - 1} more places" if len(places) > 1 else "")
        lines.append(f"{mnemonic} {where}: {rate} more cycles an access, {sum(cycles for _, cycles in places):,} in all")
    return lines


def as_text(report: SpeedOfLight, title: str, tiles: Tiles | None = None, kv_bytes: int | None = None) -> str:
    """The report for a terminal of 140 columns."""
    rates = report.rates
    card = f"{rates.num_cus} compute units at {rates.clock_hz / 1e9:g} GHz, {rates.hbm_bytes_per_second / 1e12:g} TB/s"
    lines = [title, f"modelled on {rates.name}: {card}", ""]
    for launch in report.launches:
        lines += [*_launch_text(launch), ""]
    if tiles is not None:
        lines += [*_tiles_text(tiles), ""]
    lines.append(f"{'total':<14} lower bound {_us(report.lower_seconds)}   upper bound {_us(report.upper_seconds)}")
    parts = f"{len(report.launches)} launch{'es' * (len(report.launches) > 1)} x {_us(rates.launch_seconds).strip()} fixed"
    if kv_bytes is not None:
        parts += f"; the cache alone, {kv_bytes:,} bytes at the peak rate, takes {_us(kv_bytes / rates.hbm_bytes_per_second).strip()}"
    return "\n".join([*lines, f"{'':<14} of which {parts}", "", FOOTNOTE])


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:8.2f} µs"


def _launch_text(launch: LaunchTime) -> list[str]:
    counts, fit = launch.counts, launch.occupancy
    sampled = "" if counts.sampled is None else f"   (counted on {counts.sampled:,} of them and scaled: equal work but for branches on the numbers)"
    grid, block = (" x ".join(str(n) for n in size if n > 1) or "1" for size in (counts.grid, counts.block))
    lines = [
        f"{counts.kernel}",
        f"  {'workgroups':<12} {grid} of {block} work-items{sampled}",
        f"  {'occupancy':<12} {fit.workgroups_per_cu} workgroups a compute unit, {fit.waves_per_simd:g} waves a SIMD, limited by {fit.limited_by}: "
        f"{counts.num_vgprs} registers, {counts.lds_bytes:,} bytes of LDS",
        f"  {'placement':<12} {int((launch.of_cu > 0).sum())} of {len(launch.of_cu)} compute units have work, "
        f"{launch.of_cu.min()} to {launch.of_cu.max()} workgroups each; busy {launch.utilization:.0%} of the time in the lower bound",
        f"  {'time':<12} lower bound {_us(launch.lower_seconds)}   upper bound {_us(launch.upper_seconds)}",
    ]
    for name in ("hbm", *RESOURCES):
        share = launch.resource_seconds[name] / launch.lower_seconds if launch.lower_seconds else 0.0
        bound = "  <- bounds it" if name == launch.bound_by else ""
        lines.append(f"    t_{name:<8} {_us(launch.resource_seconds[name])} {share:7.1%}  {RESOURCE_NAMES[name]}{bound}")
    parts = ", ".join(f"{name} {seconds * 1e6:.2f}" for name, seconds in launch.upper_parts.items() if seconds)
    lines.append(f"  {'upper bound':<12} of the slot that ends last, µs: {parts}")
    waves = counts.num_workgroups * counts.waves_per_workgroup
    by_class = ", ".join(f"{name} {total / waves:.1f}" for name, total in counts.by_class.items() if total)
    lines.append(f"  {'a wave':<12} {counts.num_instructions / waves:,.1f} instructions: {by_class}")
    matrix = {kind: total for kind, total in counts.kind_totals.items() if kind.startswith("v_mfma")}
    if matrix:
        lines.append(f"  {'mfma':<12} " + ", ".join(f"{kind.removeprefix('v_mfma_')}: {total / waves:.1f} a wave" for kind, total in matrix.items()))
    if counts.by_class["lds"]:
        cycles, conflicts = int(counts.lds_cycles.sum()), int(counts.lds_conflict_cycles.sum())
        lines.append(
            f"  {'LDS':<12} {counts.lds_read_bytes.sum():,} bytes read, {counts.lds_written_bytes.sum():,} written, {cycles:,} cycles "
            f"and {conflicts:,} more from bank conflicts ({conflicts / max(cycles, 1):.0%})"
        )
        lines += [f"  {'':<12}   {line}" for line in _conflict_lines(counts, 4)]
    lines.append(
        f"  {'memory':<12} {counts.read_bytes.sum() + counts.scalar_read_bytes.sum():,} bytes requested, {counts.lines_read:,} distinct lines of 128 "
        f"(workgroup by workgroup {counts.workgroup_lines_read.sum():,})"
    )
    lines.append(
        f"  {'':<12} {counts.written_bytes.sum():,} bytes written, {counts.lines_written:,} distinct lines"
        + (f"; {counts.atomics.sum():,} atomics" if counts.atomics.any() else "")
    )
    return lines


def _tiles_text(tiles: Tiles) -> list[str]:
    def row(numbers: Mapping[str, float]) -> str:
        total = sum(numbers[name] for name in CLASSES)
        return f"{total:,.1f} instructions: " + ", ".join(f"{name} {numbers[name]:,.1f}" for name in CLASSES if numbers[name])

    other = {name: tiles.per_tile[name] for name in _PER_TILE if tiles.per_tile[name]}
    return [
        f"a tile of {tiles.tokens_per_tile} tokens, all waves of a workgroup (marginal)",
        f"  {'tile':<12} {row(tiles.per_tile)}",
        f"  {'':<12} " + ", ".join(f"{name} {number:,.0f}" for name, number in other.items()),
        f"  {'token':<12} {tiles.instructions_per_token:.2f} instructions",
        f"  {'once':<12} {row(tiles.once)} (prologue and epilogue)",
        f"  {'merge':<12} {row(tiles.merge)} (of two splits, more than unsplit)",
    ]


def as_measured_json(title: str, device: str, seconds: np.ndarray, kv_bytes: int) -> dict[str, Any]:
    """Times of a device: seconds of each repetition."""
    return {
        "label": "measured",
        "title": title,
        "device": device,
        "seconds": seconds.tolist(),
        "median_seconds": float(np.median(seconds)),
        "kv_bytes": kv_bytes,
    }


def as_measured_text(title: str, device: str, seconds: np.ndarray, kv_bytes: int) -> str:
    """The same for a terminal."""
    median = float(np.median(seconds))
    return "\n".join(
        [
            title,
            f"measured on {device}, events around all launches of a decode, {len(seconds)} repetitions",
            "",
            f"{'median':<14} {_us(median)}   fastest {_us(float(seconds.min()))}   slowest {_us(float(seconds.max()))}",
            f"{'cache':<14} {kv_bytes:,} bytes, {kv_bytes / max(median, 1e-12) / 1e12:.3f} TB/s",
        ]
    )
