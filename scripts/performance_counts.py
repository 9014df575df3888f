"""The figures of docs/performance.md: shapes, our kernels counted on the emulator, and the model's times of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import mla_rt
from count_cache import ROOT, counted
from mla_rt.batch import KV_LORA_RANK, QK_WIDTH
from mla_rt.code_object import code_object_path
from mla_rt.emulator.counters import LINE_BYTES, LaunchCounts
from mla_rt.emulator_device import EmulatorDevice
from mla_rt.speed import BYTES_PER_TOKEN, Shape, count_batch, count_launches, random_batch
from mla_rt.speed_model import LaunchTime, SpeedOfLight, speed_of_light

FORMATS = ("fp8_e4m3fn", "bf16", "mxfp4")
BATCHES, KV_LENS = (4, 32, 64, 256), (1024, 8192)
EIGHT = [(batch, kv_len) for kv_len in KV_LENS for batch in BATCHES]
# Beside them: (num_heads, q_len, batch, kv_len).
WIDER = [(num_heads, q_len, batch, 8192) for num_heads, q_len in ((16, 4), (128, 1)) for batch in (4, 64)]
RAGGED_REQUESTS, RAGGED_LONGEST = 256, 32768
TILE = 128  # tokens, in which marginal instructions are stated
# Requests are counted on as few tokens as their cut into splits allows: equal requests do equal work.
MAX_TOKENS = 1 << 13

NEWER = ROOT / "scripts" / "aiter_newer.json"
KERNELS = code_object_path("mla_decode", "gfx950")
_CUT_BY = [Path(mla_rt.__path__[0], name) for name in ("work_list.py", "plan.py", "decode.py", "speed.py")]


def kernels_hash() -> str:
    """Of the code object that the figures are of."""
    return hashlib.sha256(KERNELS.read_bytes()).hexdigest()[:16]


def ragged_lengths() -> np.ndarray:
    """[RAGGED_REQUESTS] int64, log-uniform in 1 to RAGGED_LONGEST."""
    drawn = np.random.default_rng(1).uniform(0, np.log(RAGGED_LONGEST), RAGGED_REQUESTS)
    return np.clip(np.exp(drawn).astype(np.int64), 1, RAGGED_LONGEST)


@cache
def ours(shape: Shape, *, exact: bool = False) -> SpeedOfLight:
    """The model of a decode of equal requests. exact: all of them are counted, as which workgroups share a die asks for."""

    def count() -> list[LaunchCounts]:
        with closing(EmulatorDevice()) as device:
            return list(count_launches(shape, device, exact=exact, max_tokens=MAX_TOKENS))

    return speed_of_light(counted(f"{shape!r}{' exact' * exact}", [KERNELS, *_CUT_BY], count))


@cache
def ours_ragged(kv_format: str) -> SpeedOfLight:
    """The model of a decode of `ragged_lengths`, all of which is emulated: about a minute."""

    def count() -> list[LaunchCounts]:
        with closing(EmulatorDevice()) as device:
            return count_batch(random_batch(ragged_lengths(), kv_format), device)

    return speed_of_light(counted(f"ragged {kv_format} {ragged_lengths().tolist()}", [KERNELS, *_CUT_BY], count))


def least_bytes(shape: Shape, total_kv: int | None = None) -> int:
    """Cache, q and out, each once. total_kv: tokens, if not those of equal requests."""
    tokens = shape.batch * shape.kv_len if total_kv is None else total_kv
    return tokens * BYTES_PER_TOKEN[shape.kv_format] + shape.batch * shape.q_len * shape.num_heads * (QK_WIDTH + KV_LORA_RANK) * 2


@dataclass(frozen=True)
class Moved:
    """Bytes of a decode over those of cache, q and out. distinct: lines of the whole launch; by_die, by_workgroup: the same of each die
    (each has an L2 cache) and of each workgroup, added up."""

    distinct: float
    by_die: float
    by_workgroup: float

    @classmethod
    def of(cls, shape: Shape, report: SpeedOfLight) -> Moved:
        least, counts = least_bytes(shape), [launch.counts for launch in report.launches]
        distinct = sum(one.lines_read + one.lines_written for one in counts)
        by_die = sum(one.die_lines_read + one.die_lines_written for one in counts)
        by_workgroup = sum(int(one.workgroup_lines_read.sum() + one.workgroup_lines_written.sum()) for one in counts)
        return cls(distinct * LINE_BYTES / least, by_die * LINE_BYTES / least, by_workgroup * LINE_BYTES / least)


def marginal_instructions(short: LaunchCounts, long: LaunchCounts, tokens: int) -> dict[str, float]:
    """Instructions by class of a wave and TILE tokens: of launches of one workgroup that differ by so many tokens."""
    assert short.num_workgroups == long.num_workgroups == 1
    tiles = tokens / TILE * long.waves_per_workgroup
    return {name: (total - short.by_class[name]) / tiles for name, total in long.by_class.items()}


def our_marginal_instructions(kv_format: str) -> dict[str, float]:
    """Of 16 heads and one query token, unsplit."""
    short, long = (_single(ours(Shape(1, kv_len, kv_format, num_splits=1)).launches) for kv_len in KV_LENS)
    return marginal_instructions(short.counts, long.counts, KV_LENS[1] - KV_LENS[0])


def _single(launches: Sequence[LaunchTime]) -> LaunchTime:
    (launch,) = launches
    return launch


def unsplit(kv_format: str, page_size: int, num_heads: int) -> Shape:
    """A small batch, each request in one piece."""
    return Shape(8, 1024, kv_format, num_heads, num_splits=1, page_size=page_size)


def write_newer(aiter: Any, folder: Path, commit: str) -> None:
    """aiter_newer.json from these code objects of AITER: bounds in seconds, and the splits at which they are reached, by shape."""
    kernels = [case.kernel for case in aiter.KERNELS["fp8_e4m3fn", 16, 1]]
    files = {name: hashlib.sha256((folder / f"{name}.co").read_bytes()).hexdigest() for name in kernels}
    aiter.FOLDER = folder
    rows = []
    for batch, kv_len in EIGHT:
        lowest, highest = aiter.fastest("fp8_e4m3fn", 16, 1, batch, kv_len)
        splits = [lowest.case.num_splits, highest.case.num_splits]
        rows.append({"shape": [batch, kv_len], "lower": lowest.lower_seconds, "upper": highest.upper_seconds, "splits": splits})
    content = {"label": "modelled", "repository": "ROCm/aiter", "commit": commit, "folder": "hsa/gfx950/mla", "sha256": files, "rows": rows}
    NEWER.write_text(json.dumps(content, indent=1) + "\n")


def newer_bounds() -> dict[tuple[int, int], dict[str, Any]]:
    """aiter_newer.json by shape."""
    return {(row["shape"][0], row["shape"][1]): row for row in json.loads(NEWER.read_text())["rows"]}
