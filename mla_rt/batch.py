"""What a caller hands to `decode`, checked and brought into the one layout that kernels take. Nothing here touches a device.

Whatever is wrong with an argument is found here, before anything is launched: a kernel checks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .arguments import as_count, as_flag, as_integers, as_ndarray, as_positive, counted
from .elements import MX_BLOCK
from .formats import FP8, MXFP4
from .requests import Requests, as_page_size, make_requests, pages_there

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
QK_WIDTH = KV_LORA_RANK + QK_ROPE_HEAD_DIM
MAX_NUM_HEADS = 128
ROW_BYTES = {"bf16": 2 * QK_WIDTH, "fp8_e4m3fn": QK_WIDTH, "fp8_e4m3fnuz": QK_WIDTH, "mxfp4": QK_WIDTH // 2}  # of a token, by kv_format
SCALES_PER_ROW = QK_WIDTH // MX_BLOCK

_BF16 = np.dtype(ml_dtypes.bfloat16)
_FP8_DTYPES = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e4m3fnuz))


@dataclass(frozen=True)
class Cache:
    """The KV cache as bytes.

    kv_format  "bf16", "fp8_e4m3fn", "fp8_e4m3fnuz" or "mxfp4"
    rows       [num_pages, page_size, row_bytes] uint8, contiguous; row_bytes 1152 (bf16), 576 (fp8), 288 (mxfp4)
    scales     [num_pages, page_size, 18] uint8 E8M0, contiguous; None unless mxfp4
    kv_scale   dequantizes a whole fp8 cache; 1 otherwise
    """

    kv_format: str
    rows: np.ndarray
    scales: np.ndarray | None
    kv_scale: np.float32

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.scales is None else self.scales.nbytes)


@dataclass(frozen=True)
class Batch(Requests):
    """A checked batch: the requests, their q [total_q, num_heads, 576] bfloat16, contiguous, the cache and how to decode it."""

    q: np.ndarray
    cache: Cache
    sm_scale: np.float32
    causal: bool
    num_splits: int | None

    @property
    def num_heads(self) -> int:
        return int(self.q.shape[1])

    def token_slots(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the tokens lie: (slots [sum of kv_lens] int64 into the cache as [num_pages * page_size], indptr [batch + 1] of tokens)."""
        pages = self.kv_indices.astype(np.int64)[:, None] * self.page_size + np.arange(self.page_size)
        position = np.arange(len(pages)) - np.repeat(self.kv_indptr[:-1], np.diff(self.kv_indptr))
        length_left = np.repeat(self.kv_lens, np.diff(self.kv_indptr)) - position * self.page_size
        indptr = np.concatenate([[0], np.cumsum(self.kv_lens)])
        return pages[np.arange(self.page_size) < length_left[:, None]], indptr


def make_batch(
    q: Any,
    kv: Any,
    *,
    sm_scale: Any,
    kv_indptr: Any = None,
    qo_indptr: Any = None,
    kv_indices: Any = None,
    kv_last_page_len: Any = None,
    page_size: Any = 1,
    block_table: Any = None,
    kv_lens: Any = None,
    causal: Any = True,
    num_splits: Any = None,
) -> Batch:
    """Check the arguments of `decode` (described there). Raises TypeError or ValueError with the name, the value and the limit."""
    page_size = as_page_size(page_size)
    q = _check_q(q)
    cache = make_cache(kv, page_size)

    if block_table is not None or kv_lens is not None:
        if kv_indptr is not None or kv_indices is not None or kv_last_page_len is not None:
            raise ValueError("block_table and kv_lens replace kv_indptr, kv_indices and kv_last_page_len: give one or the other")
        if block_table is None or kv_lens is None:
            raise ValueError(f"block_table and kv_lens belong together, {'block_table' if block_table is None else 'kv_lens'} is missing")
        kv_indptr, kv_indices, kv_last_page_len = _from_block_table(block_table, kv_lens, page_size, len(cache.rows))
    elif kv_indptr is None:
        raise ValueError("kv_indptr is missing (or block_table and kv_lens in its place)")
    requests = make_requests(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size=page_size, num_pages=len(cache.rows), total_q=len(q))
    return Batch(
        **vars(requests),
        q=q,
        cache=cache,
        sm_scale=as_positive("sm_scale", sm_scale),
        causal=as_flag("causal", causal),
        num_splits=None if num_splits is None else as_count("num_splits", num_splits),
    )


def _check_q(q: Any) -> np.ndarray:
    q = as_ndarray("q", q)
    if q.dtype != _BF16:
        raise TypeError(f"q has dtype {q.dtype}; {_BF16} is needed{_dtype_advice('q', q.dtype)}")
    if q.ndim != 3 or q.shape[2] != QK_WIDTH:
        raise ValueError(f"q has shape {q.shape}; [total_q, num_heads, {QK_WIDTH}] is needed")
    if not 1 <= q.shape[1] <= MAX_NUM_HEADS:
        raise ValueError(f"q has {counted(q.shape[1], 'head')}; 1 to {MAX_NUM_HEADS} are supported")
    return np.ascontiguousarray(q)


def make_cache(kv: Any, page_size: int) -> Cache:
    """A bfloat16 array, FP8 or MXFP4, [total_kv, ...] or [num_pages, page_size, ...], as bytes. TypeError or ValueError for anything else."""
    if isinstance(kv, MXFP4):
        rows = _pages("kv.codes", kv.codes, ROW_BYTES["mxfp4"], page_size)
        return Cache("mxfp4", rows, _pages("kv.scales", kv.scales, SCALES_PER_ROW, page_size), np.float32(1))
    if isinstance(kv, FP8):
        return Cache(f"fp8_{kv.dtype}", _pages("kv.codes", kv.codes, QK_WIDTH, page_size), None, kv.scale)
    if not isinstance(kv, np.ndarray):
        raise TypeError(f"kv is a {type(kv).__name__}; a {_BF16} array, FP8 or MXFP4 is needed")
    if kv.dtype != _BF16:
        raise TypeError(f"kv has dtype {kv.dtype}; a {_BF16} array, FP8 or MXFP4 is needed{_dtype_advice('kv', kv.dtype)}")
    rows = _pages("kv", kv, QK_WIDTH, page_size)
    return Cache("bf16", rows.view(np.uint8), None, np.float32(1))


def _dtype_advice(name: str, dtype: np.dtype) -> str:
    """What probably makes an array of another dtype right, to follow "is needed"; empty if nobody can know."""
    if dtype.kind == "f":
        return f": {name}.astype(ml_dtypes.bfloat16)"
    if dtype == np.uint16:
        return f" (its bits: {name}.view(ml_dtypes.bfloat16))"
    if dtype == np.dtype("V2"):
        return f" (np.save loses that dtype: {name}.view(ml_dtypes.bfloat16); better save {name}.view(np.uint16))"
    if name == "kv" and dtype == np.uint8:
        return " (codes need to say what they are: mla_rt.FP8(codes, scale, dtype) or mla_rt.MXFP4(codes, scales))"
    if name == "kv" and dtype in _FP8_DTYPES:
        return f" (mla_rt.FP8(kv.view(np.uint8), scale, '{dtype.name.removeprefix('float8_')}'))"
    return ""


def _pages(name: str, array: np.ndarray, width: int, page_size: int) -> np.ndarray:
    """[total_kv, width] or [num_pages, page_size, width] -> contiguous [num_pages, page_size, width]."""
    array = np.asarray(array)
    if array.ndim not in (2, 3) or array.shape[-1] != width:
        raise ValueError(f"{name} has shape {array.shape}; [total_kv, {width}] or [num_pages, page_size, {width}] is needed")
    if array.ndim == 3 and array.shape[1] != page_size:
        raise ValueError(f"{name} has {counted(array.shape[1], 'token')} a page, but page_size is {page_size}")
    if array.ndim == 2 and len(array) % page_size:
        raise ValueError(f"{name} has {counted(len(array), 'row')}: no whole number of pages of page_size {page_size}")
    return np.ascontiguousarray(array).reshape(-1, page_size, width)


def _from_block_table(block_table: Any, kv_lens: Any, page_size: int, num_pages: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The padded alternative, in the one form that kernels know. Table entries past a length are dropped unread."""
    block_table = as_integers("block_table", block_table, ndim=2, limit=None)
    kv_lens = as_integers("kv_lens", kv_lens, ndim=1).astype(np.int64)
    if len(block_table) != len(kv_lens):
        raise ValueError(f"block_table has {counted(len(block_table), 'request')}, kv_lens {len(kv_lens)}")
    capacity = block_table.shape[1] * page_size
    if kv_lens.min(initial=0) < 0 or kv_lens.max(initial=0) > capacity:
        bad = int(np.flatnonzero((kv_lens < 0) | (kv_lens > capacity))[0])
        raise ValueError(f"kv_lens[{bad}] is {kv_lens[bad]}; a row of block_table holds 0 to {counted(capacity, 'token')}")
    pages_used = -(-kv_lens // page_size)
    used = np.arange(block_table.shape[1]) < pages_used[:, None]
    outside = used & ((block_table < 0) | (block_table >= num_pages))
    if outside.any():
        row, column = (int(i) for i in np.unravel_index(outside.argmax(), outside.shape))
        raise ValueError(f"block_table[{row}, {column}] is {block_table[row, column]}; {pages_there(num_pages)}")
    return np.concatenate([[0], np.cumsum(pages_used)]), block_table[used], kv_lens - (pages_used - 1) * page_size
