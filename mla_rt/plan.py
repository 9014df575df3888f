"""From the lengths of a batch to the work list of its launches. Pure numpy, O(batch + work), no device.

A request's query rows (row = q_idx * num_heads + head) are cut into row tiles, its tokens into splits. One workgroup takes one row tile
over one split. A request that is not split writes its result directly; the others write partials that a second launch merges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class WorkList:
    """What is launched.

    work          [num_work, 5] int32: request_idx, row_begin, kv_begin, kv_end, partial_idx. Rows row_begin.. of the request (at most a tile)
                  against its tokens kv_begin..kv_end-1; partial_idx is the slot of the partial result, -1: the result is final.
                  kv_begin == kv_end only for a request without tokens, whose rows are out 0, lse -inf.
    merge         [num_merges, 4] int32: row_begin (global: q_token * num_heads + head), num_rows, partial_begin, num_splits: the partials
                  of one row tile lie in consecutive slots in the order of the splits, so that the merge adds in a fixed order
    num_partials  slots of the partial buffers
    """

    work: np.ndarray
    merge: np.ndarray
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
) -> WorkList:
    """Plan a batch.

    qo_indptr        [batch + 1] integers, prefix sums of query tokens; a request without query tokens gives no work
    kv_lens          [batch] integers >= 0, tokens
    num_splits       k: the tokens of every request are cut evenly at i * kv_len // k (cuts without tokens are dropped);
                     None: cut in whole tiles such that the work fills `num_cus` compute units
    rows_per_tile, tokens_per_tile   of the kernel, from its code object

    Raises ValueError if the rows or slots do not fit the int32 of the work list.
    """
    qo_indptr = np.asarray(qo_indptr, np.int64)
    kv_lens = np.asarray(kv_lens, np.int64)
    num_rows = np.diff(qo_indptr) * num_heads
    row_tiles = -(-num_rows // rows_per_tile)
    if num_splits is None:
        # Splits end on tile boundaries: a split that starts inside a tile would pay for one more.
        cut_unit = tokens_per_tile
        splits = _fill_cus(row_tiles, -(-kv_lens // tokens_per_tile), num_cus)
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

    # Row tiles of one split are neighbours: they read the same tokens, which then come from the cache.
    request = np.repeat(np.arange(len(kv_lens)), num_work_of)
    position = np.arange(num_work) - np.repeat(np.cumsum(num_work_of) - num_work_of, num_work_of)
    split, tile = np.divmod(position, row_tiles[request])
    first_partial = np.cumsum(num_partials_of) - num_partials_of
    kv_len = kv_lens[request]
    work = np.empty((num_work, 5), np.int32)
    work[:, 0] = request
    work[:, 1] = tile * rows_per_tile
    work[:, 2] = np.minimum(split * units[request] // splits[request] * cut_unit, kv_len)
    work[:, 3] = np.minimum((split + 1) * units[request] // splits[request] * cut_unit, kv_len)
    work[:, 4] = np.where(splits[request] > 1, first_partial[request] + tile * splits[request] + split, -1)

    num_merges_of = np.where(splits > 1, row_tiles, 0)
    request = np.repeat(np.arange(len(kv_lens)), num_merges_of)
    tile = np.arange(len(request)) - np.repeat(np.cumsum(num_merges_of) - num_merges_of, num_merges_of)
    merge = np.empty((len(request), 4), np.int32)
    merge[:, 0] = qo_indptr[request] * num_heads + tile * rows_per_tile
    merge[:, 1] = np.minimum(rows_per_tile, num_rows[request] - tile * rows_per_tile)
    merge[:, 2] = first_partial[request] + tile * splits[request]
    merge[:, 3] = splits[request]
    return WorkList(work, merge, num_partials)


def _fill_cus(row_tiles: np.ndarray, kv_tiles: np.ndarray, num_cus: int) -> np.ndarray:
    """Splits of each request: the longest split, in tiles, is as short as one workgroup a CU allows.

    Where there are more row tiles than CUs, no request is cut into pieces shorter than a CU's fair share of all tiles.
    """

    def splits_of(longest: int) -> np.ndarray:
        return np.maximum(-(-kv_tiles // longest), 1)

    total_tiles = int((row_tiles * kv_tiles).sum())
    fair_share = max(-(-total_tiles // num_cus), 1)
    if int(row_tiles.sum()) >= num_cus:
        return splits_of(fair_share)
    # The number of workgroups falls as the longest split grows; at the longest request it is the number of row tiles, which fits.
    too_short, fits = fair_share - 1, max(int(kv_tiles.max(initial=0)), fair_share)
    while fits - too_short > 1:
        middle = (too_short + fits) // 2
        if int((row_tiles * splits_of(middle)).sum()) <= num_cus:
            fits = middle
        else:
            too_short = middle
    return splits_of(fits)
