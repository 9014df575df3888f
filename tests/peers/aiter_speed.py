"""How fast the model takes AITER's MLA decode to be: its code objects, counted on the emulator, at the number of splits that suits each shape best.

What is generous to it:
- every number of splits is tried, and each of the two totals takes the one that is best for it; AITER's host code knows one rule;
- building the metadata and the work list costs nothing, and neither does bringing q to FP8, which its FP8 kernels want;
- merging the splits, which is a launch of its own and comes from no code object of the wheel, costs one launch and its bytes at the peak rate, even
  in the upper bound; unsplit requests of kernels that write the result themselves need none;
- a persistent kernel's idle workgroups are left out, and with them their start.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from aiter_mla import BF16, FP8, V_WIDTH, WORK_BLOCK, Case, count, plan_work
from aiter_wheel import CACHE

from count_cache import counted
from mla_rt.emulator.counters import LaunchCounts
from mla_rt.emulator_device import EmulatorDevice
from mla_rt.speed_model import SpeedOfLight, speed_of_light
from mla_rt.speed_rates import MI355X

_A8W8, _A16W16 = "mla_a8w8_qh16_qseqlen", "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1"
# By (kv_format, num_heads, q_len): the plain kernels, whose splits are a number, and the persistent ones, which take works from a list. The bf16
# kernel for one query token leaves the merge to another launch even if there is one split; the plain FP8 kernel for four does not split rightly.
KERNELS = {
    ("fp8_e4m3fn", 16, 1): (Case(f"{_A8W8}1_gqaratio16", FP8, FP8), Case(f"{_A8W8}1_gqaratio16_ps", FP8, FP8, persistent=True)),
    ("bf16", 16, 1): (Case("mla_dec_stage1_bf16_a16w16_subQ16_mqa16", BF16, BF16, rows_per_workgroup=16, final=False),),
    ("fp8_e4m3fn", 16, 4): (Case(f"{_A8W8}4_gqaratio16_ps", FP8, FP8, q_len=4, persistent=True),),
    ("bf16", 16, 4): (Case(_A16W16, BF16, BF16, q_len=4), Case(f"{_A16W16}_ps", BF16, BF16, q_len=4, persistent=True)),
    ("fp8_e4m3fn", 128, 1): (
        Case("mla_a8w8_qh128_m32x4_n16x2_msk1", FP8, FP8, num_heads=128),
        Case("mla_a8w8_qh128_m32x4_n16x2_msk1_ps", FP8, FP8, num_heads=128, persistent=True),
    ),
    ("bf16", 128, 1): (Case("mla_dec_stage1_bf16_a16w16_subQ128_mqa128", BF16, BF16, num_heads=128),),
}
FOLDER = CACHE  # of the code objects
SPLITS = range(1, 33)  # of a request, that are tried in the plain kernels
WIDE_SPLITS = (2, 4, 8, 16, 32)  # of more than 16 rows a request, which take long to count
RAGGED = replace(KERNELS["fp8_e4m3fn", 16, 1][1], balanced=True, num_workgroups=MI355X.num_cus)


@dataclass(frozen=True)
class Timed:
    """One way to run AITER: case: kernel and splits (of a batch of equal requests that of one of them); model: of its own launch; merge_seconds: of
    the second launch, 0: none."""

    case: Case
    model: SpeedOfLight
    merge_seconds: float

    @property
    def lower_seconds(self) -> float:
        return self.model.lower_seconds + self.merge_seconds

    @property
    def upper_seconds(self) -> float:
        return self.model.upper_seconds + self.merge_seconds

    def __str__(self) -> str:
        splits = "balanced list" if self.case.balanced else f"{self.case.num_splits} split{'s' * (self.case.num_splits > 1)}"
        return f"{self.case.kernel}, {splits}"


def counts_of(case: Case) -> LaunchCounts:
    """The launch of this case, counted once."""
    path = FOLDER / f"{case.kernel}.co"

    def count_it() -> list[LaunchCounts]:
        with EmulatorDevice(timing="hardware") as device:
            return [count(case, path, device)]

    (counts,) = counted(repr(case), [path, Path(__file__).with_name("aiter_mla.py")], count_it)
    return counts


def ways(case: Case, batch: int, kv_len: int) -> Iterator[Timed]:
    """Numbers of splits for a batch of equal requests: one request is counted, the others do as much work on as much memory."""
    for num_splits in _splits_to_try(case, batch, kv_len):
        one = replace(case, kv_lens=(kv_len,), num_splits=num_splits, num_workgroups=num_splits)
        rows = batch * case.q_len * case.num_heads
        merge = merge_seconds(rows * num_splits, rows) if num_splits > 1 or not case.final else 0.0
        yield Timed(one, speed_of_light([counts_of(one).repeated(batch)]), merge)


def _splits_to_try(case: Case, batch: int, kv_len: int) -> Iterable[int]:
    """In a persistent kernel as many as give each compute unit one work at most, of whole blocks and of one length but for the last."""
    tried = SPLITS if case.num_heads * case.q_len == 16 else WIDE_SPLITS
    if not case.persistent:
        return [num_splits for num_splits in tried if num_splits <= kv_len]
    blocks = -(-kv_len // WORK_BLOCK)
    of_list = range(1, MI355X.num_cus // batch + 1) if tried is SPLITS else WIDE_SPLITS + (64,)
    each = sorted({-(-blocks // min(num_splits, blocks)) for num_splits in of_list if num_splits * batch <= MI355X.num_cus})
    return [-(-blocks // length) for length in each]


def merge_seconds(partial_rows: int, rows: int) -> float:
    """A launch that reads so many rows of f32 partials and log-sum-exps and writes so many of bf16 results, at the peak rate of the memory."""
    nbytes = partial_rows * (V_WIDTH + 1) * 4 + rows * V_WIDTH * 2
    return MI355X.launch_seconds + nbytes / MI355X.hbm_bytes_per_second


def fastest(kv_format: str, num_heads: int, q_len: int, batch: int, kv_len: int) -> tuple[Timed, Timed]:
    """AITER's best by the lower bound, and by the upper bound."""
    cases = [case for case in KERNELS[kv_format, num_heads, q_len] if (FOLDER / f"{case.kernel}.co").is_file()]
    timed = [way for case in cases for way in ways(case, batch, kv_len)]
    return min(timed, key=lambda way: way.lower_seconds), min(timed, key=lambda way: way.upper_seconds)


def ragged(kv_lens: Iterable[int]) -> Timed:
    """The persistent FP8 kernel for 16 heads and one query token, on a list that gives each compute unit as much."""
    case = replace(RAGGED, kv_lens=tuple(kv_lens))
    partial_rows = case.num_heads * sum(work.partial_row >= 0 for work in itertools.chain(*plan_work(case)))
    merge = merge_seconds(partial_rows, case.num_heads * len(case.kv_lens)) if partial_rows else 0.0
    return Timed(case, speed_of_light([counts_of(case)]), merge)
