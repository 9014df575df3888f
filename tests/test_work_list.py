"""The work list against what it must cover, by brute force over (row, token) pairs."""

from __future__ import annotations

import heapq
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_rt.work_list import WORK_WORDS, cost_of, make_work_list, modelled_end

ROWS, TOKENS, TILE_COST = 16, 64, 4.2


def plan(q_lens, kv_lens, *, num_heads=16, num_splits=None, num_cus=256, rows=ROWS, tokens=TOKENS):
    qo_indptr = np.concatenate([[0], np.cumsum(q_lens, dtype=np.int64)])
    options = {
        "num_heads": num_heads,
        "num_splits": num_splits,
        "num_cus": num_cus,
        "rows_per_tile": rows,
        "tokens_per_tile": tokens,
        "tile_cost": TILE_COST,
    }
    work_list = make_work_list(qo_indptr, np.array(kv_lens, np.int64), **options)
    assert work_list.work.dtype == np.int32 and work_list.work.flags.c_contiguous
    return work_list


def merges_of(num_splits):
    """Merges of four until one is left."""
    return 0 if num_splits == 1 else math.ceil(num_splits / 4) + merges_of(math.ceil(num_splits / 4))


def check(work_list, q_lens, kv_lens, num_heads, rows=ROWS):
    """Every (row, token) exactly once; every row written exactly once, directly or by one merge of its own partials in order of tokens."""
    covered = [np.zeros((q_len * num_heads, kv_len), int) for q_len, kv_len in zip(q_lens, kv_lens, strict=True)]
    first_row = np.concatenate([[0], np.cumsum(q_lens, dtype=np.int64)]) * num_heads
    written = np.zeros(first_row[-1], int)
    merges = {}
    for request, row_begin, kv_begin, kv_end, merge_idx, first_partial, split, num_splits in work_list.work.tolist():
        num_rows = min(rows, len(covered[request]) - row_begin)
        assert num_rows >= 1 and row_begin % rows == 0
        assert 0 <= kv_begin <= kv_end <= kv_lens[request]
        assert kv_begin < kv_end or (kv_lens[request] == 0 and merge_idx == -1)
        covered[request][row_begin : row_begin + num_rows, kv_begin:kv_end] += 1
        if merge_idx == -1:
            assert (kv_begin, kv_end) == (0, kv_lens[request]) and (split, num_splits) == (0, 1)
            written[first_row[request] + row_begin :][:num_rows] += 1
        else:
            pieces = merges.setdefault(merge_idx, {})
            assert split not in pieces
            pieces[split] = (first_row[request] + row_begin, num_rows, first_partial, num_splits, kv_begin, kv_end)
    assert all((c == 1).all() for c in covered)
    counters, slots = [], []
    for first_counter, pieces in merges.items():
        (row_begin, num_rows, first_partial, num_splits), *others = {piece[:4] for piece in pieces.values()}
        assert not others and num_splits >= 2 and sorted(pieces) == list(range(num_splits))
        assert all(pieces[split][5] == pieces[split + 1][4] for split in range(num_splits - 1))
        slots += range(first_partial, first_partial + num_splits)
        counters += range(first_counter, first_counter + merges_of(num_splits))
        written[row_begin : row_begin + num_rows] += 1
    assert sorted(slots) == list(range(work_list.num_partials))
    assert sorted(counters) == list(range(work_list.num_counters))
    assert (written == 1).all()
    lengths = work_list.work[:, 3] - work_list.work[:, 2]
    assert (np.diff(lengths[work_list.work[:, 1] == 0]) <= 0).all()  # the other row tiles of a split follow its first


batches = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 200)), max_size=8)


@settings(deadline=None, max_examples=200)
@given(batches, st.integers(1, 40), st.one_of(st.none(), st.integers(1, 40)), st.integers(1, 40))
def test_every_row_meets_every_token_once(batch, num_heads, num_splits, num_cus):
    q_lens, kv_lens = [b[0] for b in batch], [b[1] for b in batch]
    check(plan(q_lens, kv_lens, num_heads=num_heads, num_splits=num_splits, num_cus=num_cus), q_lens, kv_lens, num_heads)


@settings(deadline=None, max_examples=50)
@given(batches, st.integers(1, 32), st.sampled_from([(16, 64), (32, 128), (1, 1), (64, 16)]))
def test_tile_sizes_are_parameters(batch, num_heads, tile):
    q_lens, kv_lens = [b[0] for b in batch], [b[1] for b in batch]
    work_list = plan(q_lens, kv_lens, num_heads=num_heads, num_cus=16, rows=tile[0], tokens=tile[1])
    check(work_list, q_lens, kv_lens, num_heads, rows=tile[0])
    assert (work_list.work[:, 2] % tile[1] == 0).all()  # splits begin on whole tiles


def test_given_splits_cut_evenly_and_drop_empty_cuts():
    work = plan([1, 1, 1], [10, 2, 0], num_splits=4).work
    assert work[:, [0, 2, 3]].tolist() == [[0, 2, 5], [0, 7, 10], [0, 0, 2], [0, 5, 7], [1, 0, 1], [1, 1, 2], [2, 0, 0]]
    # Merge, first slot, split, splits: of the second request two cuts remain.
    assert work[:, 4:].tolist() == [[0, 0, 1, 4], [0, 0, 3, 4], [0, 0, 0, 4], [0, 0, 2, 4], [1, 4, 0, 2], [1, 4, 1, 2], [-1, 0, 0, 1]]


@pytest.mark.parametrize("kv_len", [1, 2, 3, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("num_splits", [1, 2, 7, 32, 3000])
def test_given_splits_are_the_nonempty_cuts(kv_len, num_splits):
    cuts = [(i * kv_len // num_splits, (i + 1) * kv_len // num_splits) for i in range(num_splits)]
    assert sorted(plan([1], [kv_len], num_splits=num_splits).work[:, 2:4].tolist()) == [[begin, end] for begin, end in cuts if begin < end]


def test_no_more_splits_than_tokens():
    assert plan([1], [3], num_splits=2**31 - 1).work[:, 2:4].tolist() == [[0, 1], [1, 2], [2, 3]]


def test_row_tiles_of_one_split_run_on_one_die():
    """Workgroup i on die i mod 8: the more they are apart, the later the L2 cache has to keep the tokens for them."""
    work = plan([4] * 5, [100] * 5, num_heads=16, num_splits=2).work
    places = {}
    for i, (request, row_begin, kv_begin) in enumerate(work[:, :3].tolist()):
        places.setdefault((request, kv_begin), {})[row_begin] = i
    assert len(places) == 10
    for number, by_row in enumerate(places.values()):
        assert list(by_row) == [0, 16, 32, 48] and np.diff(list(by_row.values())).tolist() == ([8, 8, 8] if number < 8 else [2, 2, 2])


def test_nothing_to_do():
    for q_lens, kv_lens in [([], []), ([0], [100]), ([0, 0], [0, 5])]:
        work_list = plan(q_lens, kv_lens)
        assert work_list.work.shape == (0, WORK_WORDS) and work_list.num_counters == work_list.num_partials == 0


def splits_of(work_list, batch):
    return np.bincount(work_list.work[:, 0], minlength=batch)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 20000), min_size=1, max_size=40), st.integers(1, 300))
def test_auto_split_is_near_the_best_of_all_lengths(kv_lens, num_cus):
    work_list = plan([1] * len(kv_lens), kv_lens, num_cus=num_cus)
    work = work_list.work
    ends = np.array(kv_lens)[work[:, 0]]
    assert (work[:, 2] % TOKENS == 0).all()
    assert ((work[:, 3] % TOKENS == 0) | (work[:, 3] == ends)).all()
    tiles = -(-np.array(kv_lens) // TOKENS)
    one = np.ones_like(tiles)
    best = min(modelled_end(one, tiles, np.maximum(-(-tiles // length), 1), num_cus, TILE_COST) for length in range(1, max(2, tiles.max() + 1)))
    assert modelled_end(one, tiles, splits_of(work_list, len(kv_lens)), num_cus, TILE_COST) <= 1.15 * best + TILE_COST


def test_auto_split_of_common_shapes():
    for batch, kv_len, num_work, longest in [(4, 1024, 32, 1), (4, 8192, 128, 2), (32, 8192, 256, 8), (64, 8192, 256, 16), (256, 8192, 256, 64)]:
        work = plan([1] * batch, [kv_len] * batch, tokens=128).work
        assert (len(work), (work[:, 3] - work[:, 2]).max()) == (num_work, longest * 128)


def busiest_over_mean(work):
    """In the cost model's units, overhead included; workgroups in the list's order, each to the CU that is free first."""
    cost = cost_of(np.ceil((work[:, 3] - work[:, 2]) / 128), work[:, 7], TILE_COST, min(len(work) / 256, 1.0))
    loads = [0.0] * 256
    for piece in cost.tolist():
        heapq.heapreplace(loads, loads[0] + piece)
    return max(loads) / (sum(loads) / 256)


def test_ragged_batches_keep_all_cus_busy():
    """256 requests, lengths log-uniform in 1..32768."""
    ratios = []
    for seed in range(10):
        kv_lens = np.exp(np.random.default_rng(seed).uniform(0, np.log(32768), 256)).astype(int)
        ratios.append(busiest_over_mean(plan([1] * 256, kv_lens, tokens=128).work))
    assert np.mean(ratios) <= 1.1 and max(ratios) <= 1.15


def test_one_long_request_among_short_ones_is_cut_alone():
    work = plan([1] * 33, [64] * 32 + [64 * 448]).work
    counts = np.bincount(work[:, 0]).tolist()
    assert counts[:32] == [1] * 32 and counts[32] > 50


def test_too_many_rows_are_refused():
    with pytest.raises(ValueError, match=r"query rows .* exceed the limit of 2147483647"):
        plan([8] * (1 << 21), [0] * (1 << 21), num_heads=128)


def test_planning_is_vectorized():
    """A step of a large server: far more requests than a Python loop would do in this time, so a loop over them shows."""
    rng = np.random.default_rng(0)
    q_lens, kv_lens = [1] * 100_000, rng.integers(0, 2000, 100_000).tolist()
    begin = time.perf_counter()
    plan(q_lens, kv_lens)
    assert time.perf_counter() - begin < 1.0
