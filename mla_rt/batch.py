"""What a caller hands to `decode`, checked and brought into the one layout that kernels take. Nothing here touches a device.

Whatever is wrong with an argument is found here, before anything is launched: a kernel checks nothing.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .elements import MX_BLOCK
from .formats import FP8, MXFP4

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
QK_WIDTH = KV_LORA_RANK + QK_ROPE_HEAD_DIM
MAX_NUM_HEADS = 128
MAX_Q_LEN = 8
MAX_PAGE_SIZE = 128

_BF16 = np.dtype(ml_dtypes.bfloat16)
_FP8_DTYPES = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e4m3fnuz))
_INT32_MAX = 2**31 - 1
MAX_KV_LEN = 2**31 - 128  # the kernels count tokens in int32, a tile ahead
_INT64_MAX = 2**63 - 1


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
class Batch:
    """A checked batch: every array contiguous, every index in range.

    q [total_q, num_heads, 576] bfloat16; qo_indptr, kv_indptr [batch + 1] int32, kv_indptr in pages; kv_indices [kv_indptr[-1]] int32;
    kv_last_page_len [batch] int32; kv_lens [batch] int64, tokens. For an empty request kv_last_page_len is page_size, so that
    (number of pages - 1) * page_size + kv_last_page_len is the length of every request.
    """

    q: np.ndarray
    cache: Cache
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    kv_last_page_len: np.ndarray
    kv_lens: np.ndarray
    page_size: int
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
    page_size = _integer("page_size", page_size)
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise ValueError(f"page_size is {page_size}; a power of two from 1 to {MAX_PAGE_SIZE} is supported")
    q = _check_q(q)
    cache = _make_cache(kv, page_size)

    if block_table is not None or kv_lens is not None:
        if kv_indptr is not None or kv_indices is not None or kv_last_page_len is not None:
            raise ValueError("block_table and kv_lens replace kv_indptr, kv_indices and kv_last_page_len: give one or the other")
        if block_table is None or kv_lens is None:
            raise ValueError(f"block_table and kv_lens belong together, {'block_table' if block_table is None else 'kv_lens'} is missing")
        kv_indptr, kv_indices, kv_last_page_len = _from_block_table(block_table, kv_lens, page_size, len(cache.rows))
    elif kv_indptr is None:
        raise ValueError("kv_indptr is missing (or block_table and kv_lens in its place)")
    kv_indptr = _indptr("kv_indptr", kv_indptr)
    kv_indices = _page_ids(kv_indices, int(kv_indptr[-1]), len(cache.rows))
    batch = len(kv_indptr) - 1
    num_pages = np.diff(kv_indptr)
    kv_last_page_len = _last_page_lens(kv_last_page_len, num_pages, page_size)
    lengths = (num_pages - 1) * page_size + kv_last_page_len
    if lengths.max(initial=0) > MAX_KV_LEN:
        raise ValueError(f"request {int(lengths.argmax())} has {int(lengths.max())} tokens; the limit is {MAX_KV_LEN}")

    return Batch(
        q=q,
        cache=cache,
        qo_indptr=_query_indptr(qo_indptr, batch, len(q)).astype(np.int32),
        kv_indptr=kv_indptr.astype(np.int32),
        kv_indices=kv_indices.astype(np.int32),
        kv_last_page_len=kv_last_page_len.astype(np.int32),
        kv_lens=lengths,
        page_size=page_size,
        sm_scale=_positive("sm_scale", sm_scale),
        causal=_flag("causal", causal),
        num_splits=None if num_splits is None else _count("num_splits", num_splits),
    )


def _check_q(q: Any) -> np.ndarray:
    q = _array("q", q)
    if q.dtype != _BF16:
        raise TypeError(f"q has dtype {q.dtype}; {_BF16} is needed{_dtype_advice('q', q.dtype)}")
    if q.ndim != 3 or q.shape[2] != QK_WIDTH:
        raise ValueError(f"q has shape {q.shape}; [total_q, num_heads, {QK_WIDTH}] is needed")
    if not 1 <= q.shape[1] <= MAX_NUM_HEADS:
        raise ValueError(f"q has {counted(q.shape[1], 'head')}; 1 to {MAX_NUM_HEADS} are supported")
    return np.ascontiguousarray(q)


def _make_cache(kv: Any, page_size: int) -> Cache:
    if isinstance(kv, MXFP4):
        rows = _pages("kv.codes", kv.codes, QK_WIDTH // 2, page_size)
        return Cache("mxfp4", rows, _pages("kv.scales", kv.scales, QK_WIDTH // MX_BLOCK, page_size), np.float32(1))
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
    block_table = _integers("block_table", block_table, ndim=2, limit=None)
    kv_lens = _integers("kv_lens", kv_lens, ndim=1)
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
        raise ValueError(f"block_table[{row}, {column}] is {block_table[row, column]}; {_pages_there(num_pages)}")
    return np.concatenate([[0], np.cumsum(pages_used)]), block_table[used], kv_lens - (pages_used - 1) * page_size


def _pages_there(num_pages: int) -> str:
    return f"kv has pages 0 to {num_pages - 1}" if num_pages else "kv has no pages"


def _page_ids(kv_indices: Any, num_used: int, num_pages: int) -> np.ndarray:
    if kv_indices is None:
        if num_used > num_pages:
            raise ValueError(f"kv_indptr ends at {counted(num_used, 'page')}; kv has {num_pages}")
        return np.arange(num_used)
    kv_indices = _integers("kv_indices", kv_indices, ndim=1, limit=None)
    if len(kv_indices) != num_used:
        raise ValueError(f"kv_indices has {counted(len(kv_indices), 'entry', 'entries')}; kv_indptr ends at {num_used}")
    outside = (kv_indices < 0) | (kv_indices >= num_pages)
    if outside.any():
        bad = int(outside.argmax())
        raise ValueError(f"kv_indices[{bad}] is {kv_indices[bad]}; {_pages_there(num_pages)}")
    return kv_indices


def _last_page_lens(kv_last_page_len: Any, num_pages: np.ndarray, page_size: int) -> np.ndarray:
    """[batch]; page_size for the requests that have no page, whatever was given for them in 0..page_size."""
    if kv_last_page_len is None:
        return np.full(len(num_pages), page_size)
    last = _integers("kv_last_page_len", kv_last_page_len, ndim=1)
    if len(last) != len(num_pages):
        raise ValueError(f"kv_last_page_len has {counted(len(last), 'entry', 'entries')}; kv_indptr describes {counted(len(num_pages), 'request')}")
    lowest = np.where(num_pages > 0, 1, 0)
    outside = (last < lowest) | (last > page_size)
    if outside.any():
        bad = int(outside.argmax())
        pages = counted(int(num_pages[bad]), "page")
        raise ValueError(f"kv_last_page_len[{bad}] is {last[bad]}; {lowest[bad]} to page_size {page_size} is allowed for {pages}")
    return np.where(num_pages > 0, last, page_size)


def _query_indptr(qo_indptr: Any, batch: int, total_q: int) -> np.ndarray:
    if qo_indptr is None:
        if total_q != batch:
            raise ValueError(f"q has {counted(total_q, 'token')} for {counted(batch, 'request')}; without qo_indptr each request has exactly one")
        return np.arange(batch + 1)
    qo_indptr = _indptr("qo_indptr", qo_indptr)
    if len(qo_indptr) != batch + 1:
        raise ValueError(f"qo_indptr has {counted(len(qo_indptr), 'entry', 'entries')}; {batch + 1} are needed for {counted(batch, 'request')}")
    if qo_indptr[-1] != total_q:
        raise ValueError(f"qo_indptr ends at {qo_indptr[-1]}; q has {counted(total_q, 'token')}")
    q_lens = np.diff(qo_indptr)
    if q_lens.max(initial=0) > MAX_Q_LEN:
        raise ValueError(f"request {int(q_lens.argmax())} has {int(q_lens.max())} query tokens; the limit is {MAX_Q_LEN}")
    return qo_indptr


def _indptr(name: str, values: Any) -> np.ndarray:
    indptr = _integers(name, values, ndim=1)
    if len(indptr) == 0 or indptr[0] != 0:
        raise ValueError(f"{name} starts with {indptr[0] if len(indptr) else 'nothing'}; prefix sums start with 0")
    falls = np.diff(indptr) < 0
    if falls.any():
        bad = int(falls.argmax())
        raise ValueError(f"{name} falls from {indptr[bad]} to {indptr[bad + 1]} at entry {bad + 1}; prefix sums never fall")
    return indptr


def _integers(name: str, values: Any, *, ndim: int, limit: int | None = _INT32_MAX) -> np.ndarray:
    """An int64 array; `limit`: the largest magnitude, None where the caller knows a tighter one."""
    array = _array(name, values, objects=True)
    if array.dtype == object:  # what numpy makes of Python integers beyond 64 bits
        if not all(type(value) is int for value in array.flat):
            raise _no_numbers(name, values)
        raise ValueError(f"{name} holds {max(array.flat, key=abs)}; the limit is {limit or _INT64_MAX}")
    if isinstance(values, list | tuple) and array.size == 0:
        array = array.astype(np.int64)  # numpy makes floats of an empty list
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; integers are needed")
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}; {counted(ndim, 'dimension')} {'are' if ndim > 1 else 'is'} needed")
    if limit is not None and array.size:
        largest = max(int(array.max()), int(array.min()), key=abs)
        if abs(largest) > limit:
            raise ValueError(f"{name} holds {largest}; the limit is {limit}")
    return array.astype(np.int64)


def _array(name: str, values: Any, *, objects: bool = False) -> np.ndarray:
    """numpy's own view of an argument; what numpy can make nothing of is a TypeError. objects: an array of Python objects is let through."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is no array: {error}") from None
    if array.dtype == object and not objects:
        raise _no_numbers(name, values)
    return array


def _no_numbers(name: str, values: Any) -> TypeError:
    return TypeError(f"{name} is a {type(values).__name__} that numpy makes no numeric array of")


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: 1 page, 2 pages."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _integer(name: str, value: Any) -> int:
    value = _scalar(value)
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is {value!r}; an integer is needed")
    return int(value)


def _count(name: str, value: Any) -> int:
    count = _integer(name, value)
    if not 1 <= count <= _INT32_MAX:
        raise ValueError(f"{name} is {count}; 1 to {_INT32_MAX} is allowed")
    return count


def _positive(name: str, value: Any) -> np.float32:
    value = _scalar(value)
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; a number is needed")
    with np.errstate(over="ignore", under="ignore"):
        try:
            single = np.float32(value)
        except OverflowError:  # a Python integer beyond float64
            single = np.float32(np.inf)
    if not (np.isfinite(single) and single > 0):
        raise ValueError(f"{name} is {value}; a positive number within float32 is needed")
    return single


def _flag(name: str, value: Any) -> bool:
    value = _scalar(value)
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}; True or False is needed")
    return bool(value)


def _scalar(value: Any) -> Any:
    """What a zero-dimensional array holds, as npz files deliver numbers."""
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value
