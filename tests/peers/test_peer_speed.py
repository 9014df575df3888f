"""How AITER's kernels are timed by the model: counting one request for a batch of equal ones, sharing out a list, and docs/performance.md."""

from __future__ import annotations

import itertools
from dataclasses import replace

import aiter_speed
import pytest
from aiter_mla import WORK_BLOCK, plan_work
from aiter_wheel import code_objects

import write_performance
from mla_rt.speed_model import speed_of_light

pytestmark = pytest.mark.peers
PAGE = write_performance.PAGE.read_text(encoding="utf-8")
ONE_TOKEN = [case for kv_format in ("fp8_e4m3fn", "bf16") for case in aiter_speed.KERNELS[kv_format, 16, 1]]


@pytest.fixture(autouse=True)
def wheel():
    code_objects()


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    "case", [case for kv_format in ("fp8_e4m3fn", "bf16") for case in aiter_speed.KERNELS[kv_format, 16, 1]], ids=lambda c: c.kernel
)
def test_one_request_repeated_counts_as_equal_requests_do(case, num_splits):
    one = aiter_speed.counts_of(replace(case, kv_lens=(512,), num_splits=num_splits, num_workgroups=num_splits)).repeated(4)
    four = aiter_speed.counts_of(replace(case, kv_lens=(512,) * 4, num_splits=num_splits, num_workgroups=4 * num_splits))
    assert one.by_class == four.by_class and one.kind_totals == four.kind_totals
    assert one.lds_cycles.sum() == four.lds_cycles.sum() and one.lds_conflict_cycles.sum() == four.lds_conflict_cycles.sum()
    # Requests of one batch share lines of the index arrays, and their partials may begin within a line.
    assert one.lines_read == pytest.approx(four.lines_read, rel=0.01) and one.lines_written == pytest.approx(four.lines_written, rel=0.01)
    modelled = [speed_of_light([counts]) for counts in (one, four)]
    assert modelled[0].lower_seconds == pytest.approx(modelled[1].lower_seconds, rel=0.01)
    assert modelled[0].upper_seconds == pytest.approx(modelled[1].upper_seconds, rel=0.02)


def test_a_balanced_list_takes_every_token_once():
    case = replace(aiter_speed.RAGGED, kv_lens=(300, 1, 9000, 128, 4097), num_workgroups=7)
    works = plan_work(case)
    assert len(works) == 7
    blocks = [sum(-(-(work.kv_end - work.kv_begin) // WORK_BLOCK) for work in workgroup) for workgroup in works]
    assert max(blocks) <= sum(blocks) / 7 + 4  # and what works cost beside their tokens
    flat = list(itertools.chain(*works))
    for request, kv_len in enumerate(case.kv_lens):
        mine = [work for work in flat if work.request == request]
        assert [mine[0].kv_begin, mine[-1].kv_end] == [0, kv_len] and all(a.kv_end == b.kv_begin for a, b in itertools.pairwise(mine))
        assert all((work.partial_row >= 0) == (len(mine) > 1) for work in mine)
    rows = [work.partial_row for work in flat if work.partial_row >= 0]
    assert rows == list(range(len(rows)))


@pytest.mark.parametrize("kv_format", write_performance.RIVALS)
def test_the_page_says_what_counting_says(kv_format):
    """The cheapest row, AITER's figures alone: ours may be another compiler's."""
    cells = write_performance.side_by_side(aiter_speed, kv_format, 16, 1, 4, 1024)
    of_aiter = [cells[i] for i in (0, 1, 2, 4, 7, 9)]
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| 4 | 1024 |")]
    assert of_aiter in [[row[i] for i in (0, 1, 2, 4, 7, 9)] for row in rows if len(row) == len(cells)]
