"""How fast the model takes AITER's MLA decode to be: its code objects, counted on the emulator, at the number of splits that suits each shape best.

What is generous to it:
- every number of splits is tried, and each of the two totals takes the one that is best for it; AITER's host code knows one rule;
- building the metadata and work list costs nothing;
- merging the splits, which is a launch of its own and comes from no code object of the wheel, costs one launch and its bytes at the peak rate, even
  in the upper bound; unsplit requests of kernels that write the result themselves need none;
- a persistent kernel's idle workgroups are left out, and with them their start.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from aiter_mla import BF16, FP8, V_WIDTH, WORK_BLOCK, Case, run
from aiter_wheel import CACHE

import mla_rt.emulator
from mla_rt.emulator.counters import LaunchCounts
from mla_rt.emulator_device import EmulatorDevice
from mla_rt.speed_model import SpeedOfLight, speed_of_light
from mla_rt.speed_rates import MI355X

COUNTS = CACHE.parent / "counts"
MAX_SPLITS = 32  # of a request, in the plain kernels
# For FP8 the plain kernel and the persistent one; the bf16 kernel leaves the merge to another launch whatever the splits.
ONE_TOKEN_16_HEADS = {
    "fp8_e4m3fn": (
        Case("mla_a8w8_qh16_qseqlen1_gqaratio16", FP8, FP8),
        Case("mla_a8w8_qh16_qseqlen1_gqaratio16_ps", FP8, FP8, persistent=True),
    ),
    "bf16": (Case("mla_dec_stage1_bf16_a16w16_subQ16_mqa16", BF16, BF16, rows_per_workgroup=16, final=False),),
}


@dataclass(frozen=True)
class Timed:
    """One way to run AITER on a shape: kernel and splits of each request; model: of its own launch; merge_seconds: of the second launch, 0: none."""

    case: Case
    model: SpeedOfLight
    merge_seconds: float

    @property
    def lower_seconds(self) -> float:
        return self.model.lower_seconds + self.merge_seconds

    @property
    def upper_seconds(self) -> float:
        return self.model.upper_seconds + self.merge_seconds


def count(case: Case) -> LaunchCounts:
    """The launch of this case; from the cache if this code object has been counted by this emulator before."""
    path = CACHE / f"{case.kernel}.co"
    key = hashlib.sha256()
    for file in (path, Path(__file__).with_name("aiter_mla.py"), *sorted(Path(mla_rt.emulator.__path__[0]).glob("*.py"))):
        key.update(file.read_bytes())
    key.update(repr(case).encode())
    cached = COUNTS / f"{key.hexdigest()[:32]}.pickle"
    if cached.is_file():
        return pickle.loads(cached.read_bytes())
    with EmulatorDevice(timing="hardware") as device:
        counts = run(case, path, device).counts
    COUNTS.mkdir(parents=True, exist_ok=True)
    partial = cached.with_suffix(f".{id(counts)}")
    partial.write_bytes(pickle.dumps(counts))
    partial.replace(cached)
    return counts


def ways(case: Case, batch: int, kv_len: int) -> Iterator[Timed]:
    """Every number of splits for a batch of equal requests: one request is counted, the others do as much work on as much memory."""
    for num_splits in _splits_to_try(case, batch, kv_len):
        one = replace(case, kv_lens=(kv_len,), num_splits=num_splits, num_workgroups=num_splits)
        merge = merge_seconds(batch * case.q_len * case.num_heads, num_splits) if num_splits > 1 or not case.final else 0.0
        counts = count(one)
        yield Timed(one, speed_of_light([counts.repeated(batch) if batch > 1 else counts]), merge)


def _splits_to_try(case: Case, batch: int, kv_len: int) -> Iterator[int]:
    """Up to MAX_SPLITS; in the persistent kernel as many as give each compute unit one work, of whole blocks and of one length but for the last."""
    blocks, taken = -(-kv_len // WORK_BLOCK), set()
    for num_splits in range(1, (MI355X.num_cus // batch if case.persistent else min(MAX_SPLITS, kv_len)) + 1):
        if not case.persistent:
            yield num_splits
        elif (length := -(-blocks // num_splits)) not in taken:
            taken.add(length)
            yield -(-blocks // length)


def merge_seconds(rows: int, num_splits: int) -> float:
    """A launch that reads f32 partials and log-sum-exps of so many query rows and writes bf16 results, at the peak rate of the memory."""
    nbytes = rows * (num_splits * (V_WIDTH + 1) * 4 + V_WIDTH * 2)
    return MI355X.launch_seconds + nbytes / MI355X.hbm_bytes_per_second


def fastest(kv_format: str, batch: int, kv_len: int) -> tuple[Timed, Timed]:
    """AITER's best for 16 heads and one query token: by the lower bound, and by the upper bound."""
    timed = [way for case in ONE_TOKEN_16_HEADS[kv_format] for way in ways(case, batch, kv_len)]
    return min(timed, key=lambda way: way.lower_seconds), min(timed, key=lambda way: way.upper_seconds)
