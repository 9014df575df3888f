"""From the lengths of a batch to the work list of its launch. Pure numpy, O(batch + work), no device.

A request's query rows (row = q_idx * num_heads + head) are cut into row tiles, its tokens into splits. One workgroup takes one row tile
over one split. A request that is not split writes its result directly; the others leave partials, which a row tile's workgroups merge as
they arrive: the last of four neighbours those four, the last of four such those, and so on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

_INT32_MAX = 2**31 - 1
WORK_WORDS = 8
NUM_DIES = 8  # of an MI355X, each with an L2 cache of its own; workgroup i runs on die i mod 8
MERGE_WIDTH = 4  # partials that are merged at a time: the code object exports it too

# The cost model, in µs of the speed reports' upper bound: what every workgroup takes besides its tiles (loading its query, storing its result), and
# what the last of several splits to arrive takes for each level of merging: round trips, and partial results at its share of the memory, for which
# all compute units that have work compete.
FIXED_COST, LEVEL_COST, LEVEL_COST_OF_ALL = 9.0, 2.1, 5.0
# Lengths of a split that are tried: these parts of a CU's fair share of all tiles, and those of the longest request.
_OF_FAIR_SHARE = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 0.8, 0.84, 0.88, 0.92, 0.96, 1, 1.04, 1.08, 1.15, 1.3)
_OF_LONGEST = (1 / 96, 1 / 64, 1 / 48, 1 / 32, 1 / 24, 1 / 16, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 1)
MAX_PARTIALS_PER_CU = 32  # of splits chosen here: the bound of a plan's workspaces


@dataclass(frozen=True)
class WorkList:
    """What is launched.

    work          [num_work, 8] int32, a row a workgroup, the longest first:
                  request_idx, row_begin, kv_begin, kv_end: rows row_begin.. of the request (at most a tile) against these tokens of it;
                  kv_begin == kv_end only for a request without tokens (out 0, lse -inf);
                  merge_idx: first counter of the row tile's arrivals; -1: not split, the result is final;
                  first_partial, split, num_splits: the row tile's partials are num_splits slots from first_partial on, in the order of the
                  splits, so that the merge adds in a fixed order; this one is number `split`
    num_counters  of arrivals: a row tile that is split has one for each merge, level by level
    num_partials  slots of the partial buffers
    """

    work: np.ndarray
    num_counters: int
    num_partials: int


def make_work_list(
    qo_indptr: np.ndarray,
    kv_lens: np.ndarray,
    *,
    num_heads: int,
    num_splits: int | None,
    num_cus: int,
    rows_per_tile: int,
    tokens_per_tile: int,
    tile_cost: float,
) -> WorkList:
    """Plan a batch.

    qo_indptr        [batch + 1] integers, prefix sums of query tokens; a request without query tokens gives no work
    kv_lens          [batch] integers >= 0, tokens
    num_splits       k: the tokens of every request are cut evenly at i * kv_len // k (cuts without tokens are dropped);
                     None: cut in whole tiles such that the launch ends first on `num_cus` compute units
    rows_per_tile, tokens_per_tile, tile_cost   of the kernel: see DecodeKernel

    Raises ValueError if the rows or slots do not fit the int32 of the work list.
    """
    qo_indptr = np.asarray(qo_indptr, np.int64)
    kv_lens = np.asarray(kv_lens, np.int64)
    num_rows = np.diff(qo_indptr) * num_heads
    row_tiles = -(-num_rows // rows_per_tile)
    if num_splits is None:
        # Splits end on tile boundaries: a split that starts inside a tile would pay for one more.
        cut_unit = tokens_per_tile
        splits = _choose_splits(row_tiles, -(-kv_lens // tokens_per_tile), num_cus, tile_cost)
    else:
        # With no more cuts than tokens every cut i * n // k has a token; with more, the non-empty ones are the tokens one by one.
        cut_unit = 1
        splits = np.clip(kv_lens, 1, num_splits)
    units = -(-kv_lens // cut_unit)

    num_work_of = row_tiles * splits
    num_partials_of = np.where(splits > 1, num_work_of, 0)
    num_work, num_partials = int(num_work_of.sum()), int(num_partials_of.sum())
    if max(num_work, int(num_rows.sum())) > _INT32_MAX:
        raise ValueError(f"{int(num_rows.sum())} query rows and {num_work} pieces of work exceed the limit of {_INT32_MAX} a launch")

    counters_a_tile = num_merges(splits)
    num_counters_of = row_tiles * counters_a_tile
    first_work, first_counter, first_partial = (np.cumsum(counts) - counts for counts in (num_work_of, num_counters_of, num_partials_of))
    # Of each piece of work, what its request says. (One array, repeated once: the time of a plan is the number of calls.)
    of_request = (np.arange(len(kv_lens)), first_work, row_tiles, splits, kv_lens, units, first_counter, counters_a_tile, first_partial)
    request, first, tiles, num_splits_of, kv_len, units_of, counter, counters, partial = np.repeat(np.array(of_request), num_work_of, axis=1)
    position = np.arange(num_work)
    split, tile = np.divmod(position - first, tiles)
    kv_begin, kv_end = (np.minimum(cut * units_of // num_splits_of * cut_unit, kv_len) for cut in (split, split + 1))
    is_split = num_splits_of > 1
    work = np.empty((num_work, WORK_WORDS), np.int32)
    work[:, 0] = request
    work[:, 1] = tile * rows_per_tile
    work[:, 2] = kv_begin
    work[:, 3] = kv_end
    work[:, 4] = np.where(is_split, counter + tile * counters, -1)
    work[:, 5] = np.where(is_split, partial + tile * num_splits_of, 0)
    work[:, 6] = split
    work[:, 7] = num_splits_of
    # Workgroups start in this order as CUs become free: the long ones first, so that the short ones fill the gaps at the end.
    # (Of equal lengths the first comes first: with the place in the key no stable sort is needed, which would take longer.)
    order = np.argsort((kv_begin - kv_end) * num_work + position)
    if row_tiles.max(initial=0) > 1:
        # The row tiles of a split read the same tokens. NUM_DIES apart they run side by side on one die, whose L2 cache then brings them once.
        tile_in_order = tile[order]
        split_in_order = np.cumsum(tile_in_order == 0) - 1
        order = order[np.lexsort((split_in_order % NUM_DIES, tile_in_order, split_in_order // NUM_DIES))]
    return WorkList(work[order], int(num_counters_of.sum()), num_partials)


def num_merges(splits: np.ndarray) -> np.ndarray:
    """How many merges make one result of so many splits."""
    total = np.zeros_like(splits)
    while (splits > 1).any():
        total += np.where(splits > 1, -(-splits // MERGE_WIDTH), 0)
        splits = -(-splits // MERGE_WIDTH)
    return total


def _choose_splits(row_tiles: np.ndarray, kv_tiles: np.ndarray, num_cus: int, tile_cost: float) -> np.ndarray:
    """Splits of each request for which the model's launch ends first.

    All requests are cut by one longest length, so that a request's splits, and its result to the last bit, do not depend on its place in the batch.
    """
    # Requests of equal length cost the same: one column for each length that occurs.
    tiles, num_row_tiles = _sum_by(kv_tiles, row_tiles)
    longest = max(int(kv_tiles.max(initial=1)), 1)
    fair_share = max(int((num_row_tiles * tiles).sum()) / num_cus, 1.0)
    tried = {min(math.ceil(fair_share * x), longest) for x in _OF_FAIR_SHARE} | {math.ceil(longest * x) for x in _OF_LONGEST}
    lengths = np.array(sorted(tried, reverse=True))  # of equals the first is taken, that with the fewest splits
    # In float64, which divides several times faster than int64, and exactly enough: a quotient beyond a whole number is so by more than it rounds.
    splits = np.maximum(np.ceil(tiles / lengths[:, None]), 1.0)
    count = (num_row_tiles * splits).astype(np.int64)
    cost = cost_of(np.ceil(tiles / splits), splits, tile_cost, _busy_share(count.sum(axis=1, keepdims=True), num_cus))
    num_partials = np.where(splits > 1, count, 0).sum(axis=1)
    # No launch ends before its longest piece, nor before its work is spread evenly, which long pieces do not let it be: those lengths are tried first
    # that look best by that, and those that cannot be better than the best not at all.
    longest_piece = np.where(num_row_tiles > 0, cost, 0.0).max(axis=1, initial=0.0)
    no_earlier = np.maximum((cost * count).sum(axis=1) / num_cus, longest_piece)
    no_earlier[num_partials > MAX_PARTIALS_PER_CU * num_cus] = np.inf
    best_end, best = np.inf, 0
    for candidate in np.argsort(no_earlier + longest_piece / 10, kind="stable").tolist():
        if no_earlier[candidate] <= best_end:
            end = _end(cost[candidate], count[candidate], num_cus, best_end)
            if (end, candidate) < (best_end, best):
                best_end, best = end, candidate
    return np.maximum(-(-kv_tiles // int(lengths[best])), 1)


def cost_of(tiles: np.ndarray, splits: np.ndarray, tile_cost: float, busy_share: Any) -> np.ndarray:
    """µs of a workgroup with so many tiles, one of `splits` of its row tile, any of which may arrive last. busy_share: of the compute units."""
    levels = (np.frexp(splits - 1.0)[1] + 1) // 2  # the bits of splits - 1, two of which a merge of four takes away
    return tiles * tile_cost + FIXED_COST + levels * (LEVEL_COST + LEVEL_COST_OF_ALL * busy_share)


def _busy_share(num_work: Any, num_cus: int) -> Any:
    """Of the compute units, how many have work."""
    return np.minimum(num_work, num_cus) / num_cus


def modelled_end(row_tiles: np.ndarray, kv_tiles: np.ndarray, splits: np.ndarray, num_cus: int, tile_cost: float) -> float:
    """When a launch ends, in µs, with a workgroup a CU at a time and the longest first (the k-th longest of a round goes to the k-th least busy)."""
    count = row_tiles * splits
    return _end(cost_of(np.ceil(kv_tiles / splits), splits, tile_cost, _busy_share(count.sum(), num_cus)), count, num_cus)


def _end(cost: np.ndarray, count: np.ndarray, num_cus: int, limit: float = math.inf) -> float:
    """`modelled_end` of `count` pieces of each cost; of ends beyond the limit, no more than that they are."""
    longest_first = np.argsort(-cost)
    pieces = np.repeat(cost[longest_first], count[longest_first])
    if len(pieces) <= num_cus:
        return float(pieces.max(initial=0.0))
    loads = pieces[num_cus - 1 :: -1].copy()
    for first in range(num_cus, len(pieces), num_cus):
        if first > num_cus:
            loads.sort()
        round_of = pieces[first : first + num_cus]
        loads[: len(round_of)] += round_of
        if (end := float(loads.max())) > limit:
            break
    return end


def _sum_by(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct keys, ascending, and the sum of the values of each."""
    order = np.argsort(keys)
    keys = keys[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)])
    return keys[first], np.add.reduceat(values[order], first) if len(keys) else values
