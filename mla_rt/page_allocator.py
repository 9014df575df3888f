"""Which pages of a cache are whose: a pool of free pages, and sequences that grow by tokens and give their pages back. Knows no device.

A serving loop's use, with a cache of the same num_pages and page_size:

    pages = PageAllocator(num_pages)
    sequences = PagedSequences(pages, page_size)
    request = sequences.add()
    cache.append(new_kv, sequences.append([request], [len(new_kv)]))      # slots of its tokens
    kv_indptr, kv_indices, kv_last_page_len = sequences.tables([request])  # as decode and plan take them
    sequences.release(request)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .arguments import as_count, as_integer, as_integers, counted
from .requests import MAX_KV_LEN, as_page_size


class OutOfPages(RuntimeError):
    """More pages were asked for than are free. asked, free, total: numbers of pages. Nothing was changed: free some and ask again."""

    def __init__(self, asked: int, free: int, total: int):
        super().__init__(f"{counted(asked, 'page')} asked for, {free} of {total} are free")
        self.asked, self.free, self.total = asked, free, total


class PageAllocator:
    """A pool of the page ids 0 to num_pages - 1, all free at first. The pages given back last are given out first."""

    def __init__(self, num_pages: int):
        """ValueError unless 1 <= num_pages < 2**31."""
        self.num_pages = as_count("num_pages", num_pages)
        self._stack = np.arange(self.num_pages, dtype=np.int32)[::-1].copy()  # the free ones are the first num_free
        self._taken = np.zeros(self.num_pages, np.bool_)
        self.num_free = self.num_pages

    def allocate(self, count: int) -> np.ndarray:
        """`count` page ids, int32 [count], in the hands of the caller until `free`. OutOfPages if fewer are free; ValueError for a negative count."""
        count = as_integer("count", count)
        if count < 0:
            raise ValueError(f"count is {count}; 0 or more is needed")
        if count > self.num_free:
            raise OutOfPages(count, self.num_free, self.num_pages)
        rest = self.num_free - count
        pages = self._stack[rest : self.num_free][::-1].copy()
        self._taken[pages] = True
        self.num_free = rest
        return pages

    def free(self, pages: Any) -> None:
        """Give back page ids [n]. ValueError, naming the first, if one is no page, is free already or comes twice; nothing is changed then."""
        pages = as_integers("pages", pages, ndim=1)
        outside = (pages < 0) | (pages >= self.num_pages)
        if outside.any():
            raise ValueError(f"page {pages[outside.argmax()]} given back; there are pages 0 to {self.num_pages - 1}")
        not_taken = ~self._taken[pages]
        if not_taken.any():
            raise ValueError(f"page {pages[not_taken.argmax()]} given back, but it is free")
        in_order = np.sort(pages)
        twice = in_order[1:] == in_order[:-1]
        if twice.any():
            raise ValueError(f"page {in_order[twice.argmax()]} given back twice at once")
        self._taken[pages] = False
        self._stack[self.num_free : self.num_free + len(pages)] = pages[::-1]
        self.num_free += len(pages)


class PageTables(NamedTuple):
    """Where the tokens of a batch lie, as `decode` and `plan` take it.

    kv_indptr [batch + 1] int32, prefix sums of pages; kv_indices [kv_indptr[-1]] int32, page ids; kv_last_page_len [batch] int32, page_size for an
    empty sequence.
    """

    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    kv_last_page_len: np.ndarray


class PagedSequences:
    """Sequences of tokens in pages of one pool. A sequence is named by the int that `add` returned, which is never used again.

    Every call but `add` takes time proportional to what it returns or changes plus the number of sequences named, without a Python loop over tokens
    or pages. The page table takes 4 bytes times the most sequences there were at once times the most pages that one had.

    ValueError for a sequence that was never added or was released, and for one named twice where it would be changed twice.
    """

    def __init__(self, allocator: PageAllocator, page_size: int):
        """page_size: tokens a page, a power of two from 1 to 128 (else ValueError)."""
        self.allocator, self.page_size = allocator, as_page_size(page_size)
        self._row_of: dict[int, int] = {}
        self._next_sequence = 0
        self._free_rows: list[int] = []
        self._table = np.zeros((0, 1), np.int32)  # [row, page of the sequence]
        self._lengths = np.zeros(0, np.int64)  # [row], tokens

    def __len__(self) -> int:
        return len(self._row_of)

    def add(self) -> int:
        """A new sequence, without tokens."""
        if not self._free_rows:
            num_rows = len(self._table)
            self._resize(max(2 * num_rows, 16), self._table.shape[1])
            self._free_rows = list(range(len(self._table) - 1, num_rows - 1, -1))
        sequence = self._next_sequence
        self._next_sequence += 1
        self._row_of[sequence] = self._free_rows.pop()
        return sequence

    def lengths(self, sequences: Sequence[int]) -> np.ndarray:
        """Tokens of each: int64 [len(sequences)]."""
        return self._lengths[self._rows(sequences)]

    def append(self, sequences: Sequence[int], counts: Any = 1) -> np.ndarray:
        """Room for counts[i] (or `counts`) more tokens at the end of each sequence: their slots, int64 [sum of counts], those of sequences[0] first.

        OutOfPages if the pages that this takes are not free, and ValueError for a negative count or a sequence beyond 2**31 - 128 tokens; nothing
        is changed then, for none of the sequences.
        """
        rows = self._distinct_rows(sequences)
        counts = as_integers("counts", np.broadcast_to(counts, len(rows)) if np.ndim(counts) == 0 else counts, ndim=1).astype(np.int64)
        if len(counts) != len(rows):
            raise ValueError(f"counts has {counted(len(counts), 'entry', 'entries')} for {counted(len(rows), 'sequence')}")
        if counts.min(initial=0) < 0:
            raise ValueError(f"counts[{int(counts.argmin())}] is {counts.min()}; 0 or more is needed")
        old_lengths = self._lengths[rows]
        lengths = old_lengths + counts
        if lengths.max(initial=0) > MAX_KV_LEN:
            raise ValueError(f"sequence {sequences[int(lengths.argmax())]} would have {lengths.max()} tokens; the limit is {MAX_KV_LEN}")
        old_pages = self._pages(old_lengths)
        new_pages = self._pages(lengths) - old_pages
        pages = self.allocator.allocate(int(new_pages.sum()))
        width = int((old_pages + new_pages).max(initial=0))
        if width > self._table.shape[1]:
            self._resize(len(self._table), max(width, 2 * self._table.shape[1]))
        if len(pages):
            self._table.reshape(-1)[_ranges(self._first_entry(rows) + old_pages, new_pages)] = pages
        self._lengths[rows] = lengths
        return self._slots(rows, old_lengths, counts)

    def truncate(self, sequence: int, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens (0 to all of them, else ValueError); pages without tokens are free again."""
        (row,) = self._rows([sequence])
        length, num_tokens = int(self._lengths[row]), as_integer("num_tokens", num_tokens)
        if not 0 <= num_tokens <= length:
            raise ValueError(f"num_tokens is {num_tokens}; sequence {sequence} has {length}")
        kept, held = self._pages(np.array([num_tokens, length]))
        self.allocator.free(self._table[row, kept:held])
        self._lengths[row] = num_tokens

    def release(self, sequence: int) -> None:
        """Give all its pages back; the sequence is no more."""
        self.truncate(sequence, 0)
        self._free_rows.append(self._row_of.pop(sequence))

    def tables(self, sequences: Sequence[int]) -> PageTables:
        """Where the tokens of these sequences lie, in this order."""
        rows = self._rows(sequences)
        lengths = self._lengths[rows]
        pages = self._pages(lengths)
        kv_indptr = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(pages, out=kv_indptr[1:])
        last = np.where(pages > 0, lengths - (pages - 1) * self.page_size, self.page_size)
        kv_indices = self._table.reshape(-1)[_ranges(self._first_entry(rows), pages)]
        return PageTables(kv_indptr, kv_indices, last.astype(np.int32))

    def slots(self, sequence: int) -> np.ndarray:
        """Slots of all its tokens, int64 [tokens], the first token first."""
        rows = self._rows([sequence])
        return self._slots(rows, np.zeros(1, np.int64), self._lengths[rows])

    def _slots(self, rows: np.ndarray, first_tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Of counts[i] tokens from first_tokens[i] on, one sequence after the other."""
        page_idx, offset = np.divmod(_ranges(first_tokens, counts), self.page_size)
        pages = self._table.reshape(-1)[np.repeat(self._first_entry(rows), counts) + page_idx]
        return pages.astype(np.int64) * self.page_size + offset

    def _first_entry(self, rows: np.ndarray) -> np.ndarray:
        """Where the rows begin in the flat table."""
        return rows * self._table.shape[1]

    def _pages(self, lengths: np.ndarray) -> np.ndarray:
        return -(-lengths // self.page_size)

    def _rows(self, sequences: Sequence[int]) -> np.ndarray:
        try:
            return np.array([self._row_of[sequence] for sequence in sequences], np.int64)
        except KeyError as error:
            raise ValueError(f"there is no sequence {error.args[0]}: it was never added, or it was released") from None

    def _distinct_rows(self, sequences: Sequence[int]) -> np.ndarray:
        rows = self._rows(sequences)
        if len(set(sequences)) < len(rows):
            twice = next(sequence for i, sequence in enumerate(sequences) if sequence in sequences[:i])
            raise ValueError(f"sequence {twice} is named twice")
        return rows

    def _resize(self, num_rows: int, width: int) -> None:
        table, lengths = np.zeros((num_rows, width), np.int32), np.zeros(num_rows, np.int64)
        table[: len(self._table), : self._table.shape[1]] = self._table
        lengths[: len(self._lengths)] = self._lengths
        self._table, self._lengths = table, lengths


def _ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, … (counts[0] of them), then the same from first[1] on, and so forth."""
    before = np.cumsum(counts) - counts
    numbers = np.repeat(first - before, counts)
    numbers += np.arange(len(numbers))
    return numbers
