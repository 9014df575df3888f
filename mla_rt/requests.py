"""The requests of a batch: which query tokens and which pages of the cache are whose. Checked once, in the one form that kernels take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arguments import INT32_MAX, as_integer, as_integers, counted

MAX_Q_LEN = 8
MAX_PAGE_SIZE = 128
MAX_KV_LEN = 2**31 - 128  # the kernels count tokens in int32, a tile ahead


@dataclass(frozen=True)
class Requests:
    """Every array contiguous, every index in range.

    qo_indptr, kv_indptr [batch + 1] int32, kv_indptr in pages; kv_indices [kv_indptr[-1]] int32; kv_last_page_len [batch] int32;
    kv_lens [batch] int64, tokens. For an empty request kv_last_page_len is page_size, so that
    (number of pages - 1) * page_size + kv_last_page_len is the length of every request.
    """

    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    kv_last_page_len: np.ndarray
    kv_lens: np.ndarray
    page_size: int

    @property
    def num_requests(self) -> int:
        return len(self.kv_lens)

    @property
    def total_q(self) -> int:
        return int(self.qo_indptr[-1])


def as_page_size(value: Any) -> int:
    page_size = as_integer("page_size", value)
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise ValueError(f"page_size is {page_size}; a power of two from 1 to {MAX_PAGE_SIZE} is supported")
    return page_size


def make_requests(
    qo_indptr: Any,
    kv_indptr: Any,
    kv_indices: Any,
    kv_last_page_len: Any,
    *,
    page_size: int,
    num_pages: int | None = None,
    total_q: int | None = None,
) -> Requests:
    """Check what `plan` and `decode` describe. Raises TypeError or ValueError with the name, the value and the limit.

    num_pages, total_q: pages of the cache and tokens of q that there are; None: not known yet.
    """
    kv_indptr = _indptr("kv_indptr", kv_indptr)
    kv_indices = _page_ids(kv_indices, int(kv_indptr[-1]), num_pages)
    pages_of = kv_indptr[1:] - kv_indptr[:-1]
    kv_last_page_len = _last_page_lens(kv_last_page_len, pages_of, page_size)
    kv_lens = (pages_of - 1) * page_size + kv_last_page_len
    if kv_lens.max(initial=0) > MAX_KV_LEN:
        raise ValueError(f"request {int(kv_lens.argmax())} has {int(kv_lens.max())} tokens; the limit is {MAX_KV_LEN}")
    return Requests(
        qo_indptr=_query_indptr(qo_indptr, len(pages_of), total_q).astype(np.int32),
        kv_indptr=kv_indptr.astype(np.int32),
        kv_indices=np.ascontiguousarray(kv_indices, np.int32),
        kv_last_page_len=kv_last_page_len.astype(np.int32),
        kv_lens=kv_lens,
        page_size=page_size,
    )


def pages_there(num_pages: int) -> str:
    return f"kv has pages 0 to {num_pages - 1}" if num_pages else "kv has no pages"


def _page_ids(kv_indices: Any, num_used: int, num_pages: int | None) -> np.ndarray:
    if kv_indices is None:
        if num_pages is not None and num_used > num_pages:
            raise ValueError(f"kv_indptr ends at {counted(num_used, 'page')}; kv has {num_pages}")
        return np.arange(num_used, dtype=np.int32)
    kv_indices = as_integers("kv_indices", kv_indices, ndim=1, limit=None)
    if len(kv_indices) != num_used:
        raise ValueError(f"kv_indices has {counted(len(kv_indices), 'entry', 'entries')}; kv_indptr ends at {num_used}")
    largest = INT32_MAX if num_pages is None else num_pages - 1
    if num_used and (kv_indices.min() < 0 or kv_indices.max() > largest):
        bad = int(((kv_indices < 0) | (kv_indices > largest)).argmax())
        allowed = f"0 to {INT32_MAX} is allowed" if num_pages is None else pages_there(num_pages)
        raise ValueError(f"kv_indices[{bad}] is {kv_indices[bad]}; {allowed}")
    return kv_indices


def _last_page_lens(kv_last_page_len: Any, pages_of: np.ndarray, page_size: int) -> np.ndarray:
    """[batch]; page_size for the requests that have no page, whatever was given for them in 0..page_size."""
    if kv_last_page_len is None:
        return np.full(len(pages_of), page_size)
    last = as_integers("kv_last_page_len", kv_last_page_len, ndim=1).astype(np.int64)
    if len(last) != len(pages_of):
        raise ValueError(f"kv_last_page_len has {counted(len(last), 'entry', 'entries')}; kv_indptr describes {counted(len(pages_of), 'request')}")
    has_pages = pages_of > 0
    outside = (last < has_pages) | (last > page_size)
    if outside.any():
        bad = int(outside.argmax())
        pages = counted(int(pages_of[bad]), "page")
        raise ValueError(f"kv_last_page_len[{bad}] is {last[bad]}; {int(has_pages[bad])} to page_size {page_size} is allowed for {pages}")
    return np.where(has_pages, last, page_size)


def _query_indptr(qo_indptr: Any, num_requests: int, total_q: int | None) -> np.ndarray:
    if qo_indptr is None:
        if total_q is not None and total_q != num_requests:
            tokens, requests = counted(total_q, "token"), counted(num_requests, "request")
            raise ValueError(f"q has {tokens} for {requests}; without qo_indptr each request has exactly one")
        return np.arange(num_requests + 1)
    qo_indptr = _indptr("qo_indptr", qo_indptr)
    if len(qo_indptr) != num_requests + 1:
        entries, requests = counted(len(qo_indptr), "entry", "entries"), counted(num_requests, "request")
        raise ValueError(f"qo_indptr has {entries}; {num_requests + 1} are needed for {requests}")
    if total_q is not None and qo_indptr[-1] != total_q:
        raise ValueError(f"qo_indptr ends at {qo_indptr[-1]}; q has {counted(total_q, 'token')}")
    q_lens = qo_indptr[1:] - qo_indptr[:-1]
    if q_lens.max(initial=0) > MAX_Q_LEN:
        raise ValueError(f"request {int(q_lens.argmax())} has {int(q_lens.max())} query tokens; the limit is {MAX_Q_LEN}")
    return qo_indptr


def _indptr(name: str, values: Any) -> np.ndarray:
    """int64, so that differences cannot overflow."""
    indptr = as_integers(name, values, ndim=1).astype(np.int64)
    if len(indptr) == 0 or indptr[0] != 0:
        raise ValueError(f"{name} starts with {indptr[0] if len(indptr) else 'nothing'}; prefix sums start with 0")
    falls = indptr[1:] < indptr[:-1]
    if falls.any():
        bad = int(falls.argmax())
        raise ValueError(f"{name} falls from {indptr[bad]} to {indptr[bad + 1]} at entry {bad + 1}; prefix sums never fall")
    return indptr
