"""The speed-of-light report as one HTML page: resource bars, occupancy over the compute units, the timeline of a workgroup.

Self-contained (styles inline, pictures as inline SVG, no script, nothing fetched) and readable in light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .emulator.instruction_class import CLASSES
from .speed_model import RESOURCES, LaunchTime, SpeedOfLight
from .speed_report import FOOTNOTE, RESOURCE_NAMES, Tiles
from .speed_timeline import Segment, Timeline

_WIDTH = 1000  # of the pictures, in their own units
_COLUMNS = 500  # that a timeline is sampled into: what is shorter than a column cannot be seen
_LANE = 26  # height of a wave
_ZOOM = 0.18  # of the timeline, shown larger below it
_CLASS_NAMES = {
    "valu": "vector ALU", "transcendental": "transcendental", "mfma": "matrix", "salu": "scalar ALU", "smem": "scalar memory", "lds": "LDS",
    "vmem": "vector memory", "wait": "wait", "barrier": "barrier", "branch": "branch", "other": "other",
}  # fmt: skip
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f27; --soft: #5d6675; --line: #dfe3ea; --page: #f5f6f9; --card: #fff; --track: #eceff4;
  --accent: #2a63d4; --strong: #d2561a; --valu: #3f7fdb; --transcendental: #8a5fd0; --mfma: #e07b28; --salu: #94a3b8; --smem: #2fa7a0;
  --lds: #3fa45a; --vmem: #d64a68; --wait: #e6e9ef; --barrier: #c3c9d4; --branch: #6b7688; --other: #aeb6c3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaf0; --soft: #98a2b3; --line: #2c323e; --page: #12151b; --card: #1a1e27;
  --track: #262c37; --accent: #6f9ff5; --strong: #f08a4b; --valu: #5b95ea; --transcendental: #a583e6; --mfma: #f0954a; --salu: #7d8a9e;
  --smem: #45bdb5; --lds: #57bd73; --vmem: #e66d86; --wait: #262c37; --barrier: #475062; --branch: #a3aec0; --other: #5c6677; } }
* { box-sizing: border-box; }
body, svg text { font-family: system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
body { margin: 0; background: var(--page); color: var(--ink); font-size: 15px; line-height: 1.5; }
main { max-width: 1080px; margin: 0 auto; padding: 36px 24px 60px; }
h1 { font-size: 22px; line-height: 1.25; margin: 0 0 6px; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 0 0 4px; }
h3 { font-size: 13px; margin: 26px 0 10px; color: var(--soft); font-weight: 600; }
p { margin: 0 0 8px; }
.soft { color: var(--soft); font-size: 13.5px; }
.badge { display: inline-block; padding: 1px 10px; border-radius: 99px; background: var(--strong); color: #fff; font-size: 12.5px;
  font-weight: 600; vertical-align: 3px; margin-left: 8px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 22px 26px; margin-top: 20px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 14px 28px; }
.figures b { display: block; font-size: 29px; line-height: 1.2; font-weight: 650; letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.figures small { font-size: 15px; font-weight: 500; color: var(--soft); }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 8px 56px; align-items: start; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 13px; fill: var(--ink); }
svg .soft { font-size: 12px; fill: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 12px 0 0; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
td, th { padding: 5px 0 5px 16px; border-bottom: 1px solid var(--line); text-align: right; }
th { font-weight: 600; color: var(--soft); white-space: nowrap; }
td:first-child, th:first-child { padding-left: 0; text-align: left; }
.words td, .words th { text-align: left; }
tr:last-child td { border-bottom: 0; }
"""


def as_html(report: SpeedOfLight, title: str, tiles: Tiles | None = None, kv_bytes: int | None = None, sample: Timeline | None = None) -> str:
    """The page. kv_bytes: of the cache that must be read at least once; sample: the timeline of one workgroup."""
    rates = report.rates
    figures = [
        (_us(report.lower_seconds), "lower bound: everything overlaps"),
        (_us(report.upper_seconds), "upper bound: nothing overlaps in a wave"),
        (_us(report.fixed_seconds), f"of either for {len(report.launches)} launch{'es' * (len(report.launches) > 1)}"),
    ]
    if kv_bytes is not None:
        figures.append((_us(kv_bytes / rates.hbm_bytes_per_second), f"the cache alone, {kv_bytes / 1e6:,.1f} MB at peak"))
    card = f"{rates.num_cus} compute units at {rates.clock_hz / 1e9:g} GHz, {rates.hbm_bytes_per_second / 1e12:g} TB/s"
    parts = [
        f'<h1>{escape(title)}<span class="badge">modelled</span></h1>',
        f'<p class="soft">Speed of light on {escape(rates.name)} ({card}): exact counts from the emulator times a table of rates. '
        "Nothing here was measured.</p>",
        "<section>" + _figures(figures) + "</section>",
        *(_launch(launch) for launch in report.launches),
    ]
    if tiles is not None:
        parts.append(_tiles(tiles))
    if sample is not None:
        parts.append(_timeline_section(sample))
    parts.append(_sources(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.2f}<small> µs</small>"


def _figures(figures: Iterable[tuple[str, str]]) -> str:
    shown = "".join(f'<div><b>{value}</b><span class="soft">{escape(what)}</span></div>' for value, what in figures)
    return f'<div class="figures">{shown}</div>'


def _launch(launch: LaunchTime) -> str:
    counts, fit = launch.counts, launch.occupancy
    sampled = (
        "" if counts.sampled is None else f" Counted on {counts.sampled:,} of the workgroups and scaled: equal work but for branches on the numbers."
    )
    facts = (
        f"{counts.num_workgroups:,} workgroups of {counts.waves_per_workgroup} waves; {fit.workgroups_per_cu} fit a compute unit "
        f"(limited by {fit.limited_by}: {counts.num_vgprs} registers, {counts.lds_bytes:,} bytes of LDS).{sampled}"
    )
    return "\n".join(
        [
            f"<section><h2>{escape(counts.kernel)}</h2>",
            f'<p class="soft">{escape(facts)}</p>',
            f"<h3>Time by resource, if only that resource counted (upper bound of all: {launch.upper_seconds * 1e6:,.2f} µs)</h3>",
            _resource_bars(launch),
            f"<h3>Occupancy over compute units: busy {launch.utilization:.0%} of the time in the lower bound</h3>",
            _occupancy(launch),
            "<h3>Counts</h3>",
            _counts_table(launch),
            "</section>",
        ]
    )


def _resource_bars(launch: LaunchTime) -> str:
    """Bars up to the lower bound, a line; the numbers stand in a column of their own beside it."""
    left, right, row = 170, 790, 30
    scale = (right - left) / max(launch.lower_seconds, 1e-12)
    names = ("hbm", *RESOURCES)
    height = row * len(names) + 20
    shapes = []
    for i, name in enumerate(names):
        seconds, y = launch.resource_seconds[name], row * i + 4
        share = seconds / launch.lower_seconds if launch.lower_seconds else 0.0
        colour = "var(--strong)" if name == launch.bound_by else "var(--accent)"
        shapes.append(
            f'<text x="{left - 14}" y="{y + 15}" text-anchor="end">{RESOURCE_NAMES[name]}</text>'
            f'<rect x="{left}" y="{y}" width="{right - left}" height="21" rx="3" fill="var(--track)"/>'
            f'<rect x="{left}" y="{y}" width="{seconds * scale:.1f}" height="21" rx="3" fill="{colour}"/>'
            f'<text x="{right + 100}" y="{y + 15}" text-anchor="end">{seconds * 1e6:,.2f} µs</text>'
            f'<text class="soft" x="{_WIDTH - 50}" y="{y + 15}" text-anchor="end">{share:.0%}</text>'
        )
    shapes.append(
        f'<line x1="{right}" y1="0" x2="{right}" y2="{height - 16}" stroke="var(--soft)" stroke-dasharray="3 4"/>'
        f'<text class="soft" x="{right}" y="{height - 2}" text-anchor="middle">lower bound {launch.lower_seconds * 1e6:,.2f} µs</text>'
    )
    return _svg(height, "time by resource", shapes)


def _occupancy(launch: LaunchTime) -> str:
    num_cus, height = len(launch.busy), 96
    step, longest = _WIDTH / num_cus, float(launch.busy.max())
    shapes = [f'<rect x="0" y="0" width="{_WIDTH}" height="{height - 22}" rx="4" fill="var(--track)"/>']
    for cu, (seconds, workgroups) in enumerate(zip(launch.busy, launch.of_cu, strict=True)):
        tall = (height - 26) * float(seconds) / longest
        if workgroups:
            shapes.append(
                f'<rect x="{(cu + 0.12) * step:.2f}" y="{height - 22 - tall:.1f}" width="{step * 0.76:.2f}" height="{tall:.1f}" fill="var(--accent)">'
                f"<title>compute unit {cu}: {workgroups} workgroups, busy {float(seconds) * 1e6:.2f} µs</title></rect>"
            )
    idle = int((launch.of_cu == 0).sum())
    spread = f"{launch.of_cu[launch.of_cu > 0].min()} to {launch.of_cu.max()} workgroups each"
    shapes.append(f'<text class="soft" x="0" y="{height - 4}">compute unit 0</text>')
    shapes.append(f'<text class="soft" x="{_WIDTH}" y="{height - 4}" text-anchor="end">{num_cus - 1}</text>')
    summary = f"{num_cus - idle} busy with {spread}, {idle} idle"
    shapes.append(f'<text class="soft" x="{_WIDTH / 2}" y="{height - 4}" text-anchor="middle">{summary}</text>')
    return _svg(height, "occupancy over compute units", shapes)


def _counts_table(launch: LaunchTime) -> str:
    counts = launch.counts
    waves = counts.num_workgroups * counts.waves_per_workgroup
    rows = [[_CLASS_NAMES[name], f"{total / waves:,.1f}", f"{total:,}"] for name, total in counts.by_class.items() if total]
    rows.append(["all", f"{counts.num_instructions / waves:,.1f}", f"{counts.num_instructions:,}"])
    numbers = {
        "bytes read, as requested": counts.read_bytes.sum() + counts.scalar_read_bytes.sum(),
        "distinct lines read (128 bytes)": counts.lines_read,
        "the same, workgroup by workgroup": counts.workgroup_lines_read.sum(),
        "bytes written": counts.written_bytes.sum(),
        "distinct lines written": counts.lines_written,
        "atomics": counts.atomics.sum(),
        "LDS bytes read": counts.lds_read_bytes.sum(),
        "LDS bytes written": counts.lds_written_bytes.sum(),
        "LDS cycles": counts.lds_cycles.sum(),
        "more by bank conflicts": counts.lds_conflict_cycles.sum(),
    }
    moved = [[name, f"{number:,}"] for name, number in numbers.items() if number]
    return f'<div class="tables">{_table(["instructions", "a wave", "launch"], rows)}{_table(["memory and LDS", "launch"], moved)}</div>'


def _tiles(tiles: Tiles) -> str:
    figures = [
        (f"{sum(tiles.per_tile[name] for name in CLASSES):,.0f}", "instructions a tile, all waves"),
        (f"{tiles.instructions_per_token:.2f}", "instructions a token"),
        (f"{sum(tiles.once[name] for name in CLASSES):,.0f}", "instructions before and after all tiles"),
    ]

    def rows(names: Iterable[str]) -> list[list[str]]:
        columns = (tiles.per_tile, tiles.once, tiles.merge)
        used = [name for name in names if any(column[name] for column in columns)]
        return [[_CLASS_NAMES.get(name, name), *(f"{column[name]:,.0f}" for column in columns)] for name in used]

    instructions = _table(["instructions", "a tile", "once", "merge of two"], rows(CLASSES))
    moved = _table(["memory and LDS", "a tile", "once", "merge of two"], rows(name for name in tiles.per_tile if name not in CLASSES))
    return "\n".join(
        [
            f"<section><h2>A tile of {tiles.tokens_per_tile} tokens</h2>",
            '<p class="soft">One workgroup, all its waves: the difference between two lengths of the KV, by the tiles between them. Once: prologue '
            "and epilogue. Merge: what two workgroups that share their query rows do more than two that do not.</p>",
            _figures(figures),
            "<h3>Instructions and traffic</h3>",
            f'<div class="tables">{instructions}{moved}</div>',
            "</section>",
        ]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells}</tr>{body}</table></div>'


def _timeline_section(sample: Timeline) -> str:
    whole = sample.clocks
    begin = whole * (1 - _ZOOM) / 2
    present = [name for name in CLASSES if any(segment.of_class == name for wave in sample.waves for segment in wave)]
    legend = "".join(f'<span><i style="background:var(--{name})"></i>{_CLASS_NAMES[name]}</span>' for name in present)
    return "\n".join(
        [
            "<section><h2>Timeline of one workgroup</h2>",
            '<p class="soft">A few tiles on a compute unit of its own, by a simple in-order model: each wave issues in order and stalls only '
            "on busy units, waits and barriers. A class's colour includes the time for which its instruction found the unit busy.</p>",
            f"<h3>All of it: {whole:,.0f} clocks, {whole / sample.rates.clock_hz * 1e6:.2f} µs</h3>",
            _timeline(sample, 0.0, whole),
            f"<h3>The middle {_ZOOM:.0%}</h3>",
            _timeline(sample, begin, begin + whole * _ZOOM),
            f'<div class="legend">{legend}</div></section>',
        ]
    )


def _timeline(sample: Timeline, begin: float, end: float) -> str:
    left = 62
    scale = (_WIDTH - left) / _COLUMNS
    shapes = []
    for number, wave in enumerate(sample.waves):
        y = number * _LANE
        shapes.append(f'<text class="soft" x="0" y="{y + 15}">wave {number}</text>')
        shapes += [
            f'<rect x="{left + first * scale:.1f}" y="{y}" width="{(last - first) * scale:.1f}" height="{_LANE - 5}" fill="var(--{name})">'
            f"<title>{_CLASS_NAMES[name]}</title></rect>"
            for first, last, name in _columns(wave, begin, end)
        ]
    bottom = len(sample.waves) * _LANE
    for i in range(5):
        microseconds = (begin + (end - begin) * i / 4) / sample.rates.clock_hz * 1e6
        x, anchor = left + (_WIDTH - left) * i / 4, ("start", "middle", "middle", "middle", "end")[i]
        shapes.append(f'<text class="soft" x="{x:.1f}" y="{bottom + 13}" text-anchor="{anchor}">{microseconds:.2f} µs</text>')
    return _svg(bottom + 18, "timeline of the waves of a workgroup", shapes)


def _columns(wave: Sequence[Segment], begin: float, end: float) -> list[tuple[int, int, str]]:
    """The class that takes most of each column, equal neighbours joined: (first column, column behind the last, class)."""
    width = (end - begin) / _COLUMNS
    shares: list[dict[str, float]] = [{} for _ in range(_COLUMNS)]
    for segment in wave:
        first, last = max(segment.start, begin), min(segment.end, end)
        column = int((first - begin) / width) if last > first else _COLUMNS
        while column < _COLUMNS and begin + column * width < last:
            part = min(last, begin + (column + 1) * width) - max(first, begin + column * width)
            shares[column][segment.of_class] = shares[column].get(segment.of_class, 0.0) + part
            column += 1
    joined: list[tuple[int, int, str]] = []
    for column, share in enumerate(shares):
        if not share:
            continue
        name = max(share, key=lambda of_class: share[of_class])
        if joined and joined[-1][1] == column and joined[-1][2] == name:
            joined[-1] = (joined[-1][0], column + 1, name)
        else:
            joined.append((column, column + 1, name))
    return joined


def _svg(height: float, what: str, shapes: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(what)}">' + "".join(shapes) + "</svg>"


def _sources(report: SpeedOfLight) -> str:
    rows = []
    for name, source in report.rates.sources.items():
        value = getattr(report.rates, name)
        shown = f"{value:,.7g}" if isinstance(value, (int, float)) else f"{len(value)} entries"
        rows.append([name, shown, source])
    notes = "".join(f'<p class="soft">{escape(line)}</p>' for line in FOOTNOTE.splitlines())
    table = f'<div class="words">{_table(["rate", "value", "source"], rows)}</div>'
    return f"<section><h2>How the model works</h2>{notes}<h3>Rates of {escape(report.rates.name)}</h3>{table}</section>"
