"""Write docs/performance.md: what the model says of our kernels and of AITER's, side by side.

Takes some minutes the first time, most of them for AITER's kernels, which are fetched (40 MB); counts are kept under build/counts. After a change of
our kernels about three minutes, or one with --no-ragged, which leaves out the batch of unequal lengths, for a look at the rest on stdout.

AITER's repository carries a newer FP8 kernel than its wheels. What the model says of it is kept in aiter_newer.json, which
`--newer FOLDER --commit ID` writes anew from the code objects of a checkout (hsa/gfx950/mla).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from count_cache import ROOT
from mla_rt.batch import QK_WIDTH
from mla_rt.speed import BYTES_PER_TOKEN, Shape
from mla_rt.speed_model import RESOURCES, UPPER_PARTS, LaunchTime, SpeedOfLight
from mla_rt.speed_rates import MI355X
from performance_counts import (
    BATCHES,
    EIGHT,
    FORMATS,
    NEWER,
    RAGGED_LONGEST,
    RAGGED_REQUESTS,
    TILE,
    WIDER,
    Moved,
    kernels_hash,
    least_bytes,
    marginal_instructions,
    newer_bounds,
    our_marginal_instructions,
    ours,
    ours_ragged,
    ragged_lengths,
    unsplit,
    write_newer,
)
from performance_text import AFTER, BEFORE, ON_A_CARD, REPRODUCE

PAGE = ROOT / "docs" / "performance.md"
NAMES = {"fp8_e4m3fn": "FP8", "bf16": "bf16", "mxfp4": "MXFP4"}
RIVALS = ("fp8_e4m3fn", "bf16")  # formats that AITER has kernels for


def load_aiter() -> Any:
    """tests/peers/aiter_speed.py. Exits with the reason if AITER's wheel is out of reach."""
    sys.path.insert(0, str(ROOT / "tests" / "peers"))
    reason = importlib.import_module("aiter_wheel").missing()
    if reason:
        sys.exit(f"write_performance: {reason}")
    return importlib.import_module("aiter_speed")


def newer_row(shape: tuple[int, int]) -> list[str]:
    """As `side_by_side`, against AITER's newer FP8 kernel."""
    mine, theirs = ours(Shape(*shape, "fp8_e4m3fn")), newer_bounds()[shape]
    cells = [str(number) for number in shape]
    for bound in ("lower", "upper"):
        seconds = getattr(mine, f"{bound}_seconds")
        cells += [us(seconds), us(theirs[bound]), f"{seconds / theirs[bound]:.3f}"]
    return [*cells, ", ".join(map(str, theirs["splits"]))]


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    columns = list(columns)
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in rows), ""]


def side_by_side(aiter: Any, kv_format: str, num_heads: int, q_len: int, batch: int, kv_len: int) -> list[str]:
    """A row: what it is, ours, AITER's, ratios, and which of AITER's ways were best."""
    shape = Shape(batch, kv_len, kv_format, num_heads, q_len)
    mine, (lowest, highest) = ours(shape), aiter.fastest(kv_format, num_heads, q_len, batch, kv_len)
    return [
        *(f"{number}" for number in (batch, kv_len)),
        *(us(seconds) for seconds in (shape.kv_bytes / MI355X.hbm_bytes_per_second, mine.lower_seconds, lowest.lower_seconds)),
        f"{mine.lower_seconds / lowest.lower_seconds:.3f}",
        *(us(seconds) for seconds in (mine.upper_seconds, highest.upper_seconds)),
        f"{mine.upper_seconds / highest.upper_seconds:.3f}",
        f"{lowest.case.num_splits}, {highest.case.num_splits}" + (" (list)" if lowest.case.persistent and highest.case.persistent else ""),
    ]


SIDE_BY_SIDE = ("batch", "KV", "cache at peak", "ours ≥", "AITER ≥", "ratio", "ours ≤", "AITER ≤", "ratio", "AITER's splits")
PARTS = ("format", "heads", "q", "batch", "KV", "workgroups", "lower", "hbm", *RESOURCES, "upper", *(f"+ {name}" for name in UPPER_PARTS))


def parts(shape: Shape) -> list[str]:
    """A row: where our time goes, in both bounds."""
    report = ours(shape)
    head = [NAMES[shape.kv_format], *(f"{number}" for number in (shape.num_heads, shape.q_len, shape.batch, shape.kv_len))]
    return head + _parts_of(report)


def _parts_of(report: SpeedOfLight) -> list[str]:
    (launch,) = report.launches
    return [
        f"{launch.counts.num_workgroups}",
        us(report.lower_seconds),
        *(us(launch.resource_seconds[name]) for name in ("hbm", *RESOURCES)),
        us(report.upper_seconds),
        *(us(launch.upper_parts[name]) for name in UPPER_PARTS),
    ]


def ragged_rows(aiter: Any) -> list[list[str]]:
    lens = ragged_lengths()
    rows = []
    for kv_format in FORMATS:
        report = ours_ragged(kv_format)
        (launch,) = report.launches
        least = least_bytes(Shape(len(lens), 1, kv_format), int(lens.sum())) / MI355X.hbm_bytes_per_second
        rows.append(["ours", NAMES[kv_format], us(least), us(report.lower_seconds), us(report.upper_seconds), f"{busiest(launch):.3f}"])
    timed = aiter.ragged(lens.tolist())
    (launch,) = timed.model.launches
    rows.append(["AITER", "FP8", "–", us(timed.lower_seconds), us(timed.upper_seconds), f"{busiest(launch):.3f}"])
    return rows


def busiest(launch: LaunchTime) -> float:
    """The busiest compute unit's time over the mean, in the lower bound."""
    return float(launch.busy.max() / launch.busy.mean())


def tile_rows(aiter: Any) -> list[list[str]]:
    """Instructions of a wave and TILE tokens."""
    rows = [("ours", kv_format, our_marginal_instructions(kv_format)) for kv_format in FORMATS]
    for kv_format in RIVALS:
        case = aiter.KERNELS[kv_format, 16, 1][0]
        short, long = (aiter.counts_of(aiter.replace(case, kv_lens=(kv_len,), num_workgroups=1)) for kv_len in (1024, 8192))
        rows.append(("AITER", kv_format, marginal_instructions(short, long, 8192 - 1024)))
    return [
        [whose, NAMES[kv_format], f"{sum(per_tile.values()):.1f}", *(f"{per_tile[name]:.1f}" for name in TILE_CLASSES)]
        for whose, kv_format, per_tile in rows
    ]


TILE_CLASSES = ("valu", "transcendental", "mfma", "lds", "vmem", "salu", "smem", "wait", "barrier", "branch")


def bytes_row(kv_format: str, page_size: int, num_heads: int) -> list[str]:
    shape = unsplit(kv_format, page_size, num_heads)
    moved = Moved.of(shape, ours(shape, exact=True))
    return [NAMES[kv_format], f"{num_heads}", f"{page_size}", f"{moved.distinct:.4f}", f"{moved.by_die:.4f}", f"{moved.by_workgroup:.4f}"]


BYTES = ("format", "heads", "page size", "lines of the launch", "of each die, added up", "of each workgroup, added up")
BYTES_CASES = [(kv_format, page_size, 16) for kv_format in FORMATS for page_size in (1, 16, 64)] + [(kv_format, 64, 128) for kv_format in FORMATS]


def acceptance(aiter: Any, with_ragged: bool) -> list[list[str]]:
    """Rows: what is asked for, the limit, the worst figure and where, met or not."""
    best = {(kv_format, shape): aiter.fastest(kv_format, 16, 1, *shape) for kv_format in RIVALS for shape in EIGHT}

    def worst(kv_format: str, bound: str, theirs_besides: Callable[[int], float] = lambda batch: 0.0) -> tuple[float, str]:
        ratios = {}
        for shape in EIGHT:
            rival = getattr(best[kv_format, shape][bound == "upper_seconds"], bound) + theirs_besides(shape[0])
            ratios[shape] = getattr(ours(Shape(*shape, kv_format)), bound) / rival
        return _worst(ratios)

    single: Callable[[Shape], LaunchTime] = lambda shape: ours(shape).launches[0]  # noqa: E731
    newer = newer_bounds()
    of_newer = {
        bound: _worst({shape: getattr(ours(Shape(*shape, "fp8_e4m3fn")), f"{bound}_seconds") / newer[shape][bound] for shape in EIGHT})
        for bound in ("lower", "upper")
    }
    asked: list[tuple[str, float, tuple[float, str]]] = [
        (f"FP8: instructions of a wave and {TILE} tokens", 450, (sum(our_marginal_instructions("fp8_e4m3fn").values()), "")),
        ("FP8: lower bound over AITER's", 1.0, worst("fp8_e4m3fn", "lower_seconds")),
        ("the same, if the bytes of making AITER's FP8 q from bf16 count", 1.0, worst("fp8_e4m3fn", "lower_seconds", q_to_fp8_seconds)),
        ("FP8: upper bound over AITER's", 1.15, worst("fp8_e4m3fn", "upper_seconds")),
        ("FP8: lower bound over that of AITER's newer kernel", 1.0, of_newer["lower"]),
        ("FP8: upper bound over that of AITER's newer kernel", 1.15, of_newer["upper"]),
        ("bf16: lower bound over AITER's", 1.0, worst("bf16", "lower_seconds")),
        ("bf16: upper bound over AITER's", 1.0, worst("bf16", "upper_seconds")),
    ]
    long = [(batch, 8192) for batch in BATCHES[1:]]
    over_fp8 = {shape: single(Shape(*shape, "mxfp4")).lower_seconds / single(Shape(*shape, "fp8_e4m3fn")).resource_seconds["hbm"] for shape in long}
    asked.append(("MXFP4: lower bound without the launch over FP8's HBM time", 0.6, _worst(over_fp8)))
    for resource in ("valu", "lds", "mfma"):
        shares = {shape: _share(single(Shape(*shape, "mxfp4")), resource) for shape in long[1:]}
        asked.append((f"MXFP4: t_{resource} over t_hbm", 0.7, _worst(shares)))
    for label, cases, of in (
        ("bytes moved over cache + q + out, unsplit, page size ≥ 16", [case for case in BYTES_CASES if case[1] >= 16], "distinct"),
        ("the same at 128 heads, each die's bytes added up", [case for case in BYTES_CASES if case[2] == 128], "by_die"),
    ):
        moved = {case: getattr(Moved.of(shape := unsplit(*case), ours(shape, exact=True)), of) for case in cases}
        asked.append((label, 1.02, max((value, f"{NAMES[case[0]]}, {case[2]} heads, pages of {case[1]}") for case, value in moved.items())))
    if with_ragged:
        asked.append(("ragged: busiest compute unit over the mean", 1.1, max((busiest(ours_ragged(f).launches[0]), NAMES[f]) for f in FORMATS)))
    asked.append(("launches of a decode", 1, (max(len(ours(Shape(*shape, f)).launches) for shape in EIGHT for f in FORMATS), "")))
    return [
        [what, f"{limit:g}", f"{value:.3f}".rstrip("0").rstrip("."), where, "yes" if value <= limit else "**no**"]
        for what, limit, (value, where) in asked
    ]


def q_to_fp8_seconds(batch: int) -> float:
    """Reading a bf16 q of 16 heads and one token a request and writing it in FP8, at the peak rate and without a launch."""
    return batch * 16 * QK_WIDTH * 3 / MI355X.hbm_bytes_per_second


def _worst(values: dict[tuple[int, int], float]) -> tuple[float, str]:
    value, shape = max((value, shape) for shape, value in values.items())
    return value, "({}, {})".format(*shape)


def _share(launch: LaunchTime, resource: str) -> float:
    return launch.resource_seconds[resource] / launch.resource_seconds["hbm"]


def page(aiter: Any, with_ragged: bool) -> str:
    lens = ragged_lengths()
    lines = [BEFORE.format(hash=kernels_hash(), wheel=aiter.CACHE.name), "## What is asked of the kernels", ""]
    lines += table(("", "limit", "worst", "at", "met"), acceptance(aiter, with_ragged))
    lines += ["## Eight shapes, 16 heads, one query token", ""]
    for kv_format in RIVALS:
        lines += [f"{NAMES[kv_format]}, µs, modelled:", ""]
        lines += table(SIDE_BY_SIDE, (side_by_side(aiter, kv_format, 16, 1, *shape) for shape in EIGHT))
    made = json.loads(NEWER.read_text())
    lines += [f"FP8 against the newer kernel of AITER's repository (commit {made['commit'][:12]}, {made['folder']}), µs, modelled:", ""]
    lines += table((*SIDE_BY_SIDE[:2], *SIDE_BY_SIDE[3:]), map(newer_row, EIGHT))
    lines += ["MXFP4, µs, modelled (AITER has no such kernel):", ""]
    lines += table(("batch", "KV", "cache at peak", "ours ≥", "of ours in FP8", "ours ≤", "of ours in FP8"), map(mxfp4_row, EIGHT))
    lines += ["## Several query tokens, many heads", ""]
    for num_heads, q_len in dict.fromkeys((num_heads, q_len) for num_heads, q_len, *_ in WIDER):
        for kv_format in RIVALS:
            lines += [f"{num_heads} heads, {q_len} query token{'s' * (q_len > 1)}, {NAMES[kv_format]}, µs, modelled:", ""]
            rows = (side_by_side(aiter, kv_format, *wide) for wide in WIDER if wide[:2] == (num_heads, q_len))
            lines += table(SIDE_BY_SIDE, rows)
    if with_ragged:
        size = f"{RAGGED_REQUESTS} requests of 1 to {RAGGED_LONGEST} tokens, log-uniform, {int(lens.sum())} in all"
        lines += ["## Ragged batch", "", f"{size}; 16 heads, one query token, µs, modelled:", ""]
        lines += table(("", "format", "cache, q and out at peak", "≥", "≤", "busiest unit / mean"), ragged_rows(aiter))
    lines += [AFTER, ""]
    shapes = [Shape(*shape, kv_format) for kv_format in FORMATS for shape in EIGHT]
    shapes += [Shape(batch, kv_len, kv_format, heads, q_len) for kv_format in FORMATS for heads, q_len, batch, kv_len in WIDER]
    lines += table(PARTS, map(parts, shapes))
    lines += [f"Instructions of one wave for {TILE} further tokens, 16 heads, one query token, unsplit:", ""]
    lines += table(("", "format", "all", *TILE_CLASSES), tile_rows(aiter))
    lines += ["Bytes of the 128-byte lines that a decode touches, over those of cache, q and out (8 requests of 1024 tokens, unsplit):", ""]
    lines += table(BYTES, (bytes_row(*case) for case in BYTES_CASES))
    return "\n".join([*lines, REPRODUCE, "", ON_A_CARD])


def mxfp4_row(shape: tuple[int, int]) -> list[str]:
    mine, fp8 = (ours(Shape(*shape, kv_format)) for kv_format in ("mxfp4", "fp8_e4m3fn"))
    at_peak = shape[0] * shape[1] * BYTES_PER_TOKEN["mxfp4"] / MI355X.hbm_bytes_per_second
    lower, upper = mine.lower_seconds, mine.upper_seconds
    return [*map(str, shape), us(at_peak), us(lower), f"{lower / fp8.lower_seconds:.3f}", us(upper), f"{upper / fp8.upper_seconds:.3f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/performance.md from the speed-of-light reports.")
    parser.add_argument("--no-ragged", action="store_true", help="leave out the ragged batch and print the page instead of writing it")
    parser.add_argument("--newer", type=Path, metavar="FOLDER", help="write aiter_newer.json from the code objects there instead")
    parser.add_argument("--commit", default="", metavar="ID", help="of AITER's repository, for --newer")
    arguments = parser.parse_args()
    if arguments.newer is not None:
        write_newer(load_aiter(), arguments.newer, arguments.commit)
        print(NEWER.relative_to(ROOT))
        return 0
    text = page(load_aiter(), not arguments.no_ragged)
    if arguments.no_ragged:
        print(text, end="")
    else:
        PAGE.write_text(text, encoding="utf-8")
        print(PAGE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
