"""The free-page allocator and the sequences that grow in its pages, against a plain model of lists."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_rt.page_allocator import OutOfPages, PageAllocator, PagedSequences
from mla_rt.requests import make_requests

# ---- the pool ----


def test_all_pages_come_once_and_can_be_had_again():
    pool = PageAllocator(10)
    first, rest = pool.allocate(3), pool.allocate(7)
    assert first.dtype == np.int32
    assert sorted([*first, *rest]) == list(range(10))
    assert pool.num_free == 0
    pool.free(first[1:])
    assert pool.num_free == 2
    assert sorted(pool.allocate(2)) == sorted(first[1:])
    assert pool.allocate(0).shape == (0,)


def test_exhaustion_says_what_was_asked_and_what_there_is_and_changes_nothing():
    pool = PageAllocator(8)
    taken = pool.allocate(5)
    with pytest.raises(OutOfPages, match=r"^4 pages asked for, 3 of 8 are free$") as caught:
        pool.allocate(4)
    assert (caught.value.asked, caught.value.free, caught.value.total) == (4, 3, 8)
    assert pool.num_free == 3
    assert not set(pool.allocate(3)) & set(taken)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1, 7], "page 7 given back, but it is free"),
        ([1, 2, 1], "page 1 given back twice at once"),
        ([1, 8], "page 8 given back; there are pages 0 to 7"),
        ([-1], "page -1 given back; there are pages 0 to 7"),
    ],
)
def test_a_page_is_given_back_once_by_whom_it_was_given_to(pages, message):
    pool = PageAllocator(8)
    pool.allocate(4)  # 0 to 3
    with pytest.raises(ValueError, match=message):
        pool.free(pages)
    assert pool.num_free == 4
    pool.free([0, 1, 2, 3])  # nothing of the refused calls happened
    with pytest.raises(ValueError, match="page 0 given back, but it is free"):
        pool.free([0])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: PageAllocator(0), ValueError),
        (lambda: PageAllocator(2.5), TypeError),
        (lambda: PageAllocator(4).allocate(-1), ValueError),
        (lambda: PageAllocator(4).free([0.5]), TypeError),
    ],
)
def test_bad_arguments_of_the_pool(call, error):
    with pytest.raises(error):
        call()


# ---- sequences ----


def slots_by_table(sequences: PagedSequences, sequence: int) -> list[int]:
    kv_indptr, kv_indices, last = sequences.tables([sequence])
    length = (len(kv_indices) - 1) * sequences.page_size + int(last[0]) if len(kv_indices) else 0
    assert kv_indptr.tolist() == [0, len(kv_indices)]
    return [int(kv_indices[t // sequences.page_size]) * sequences.page_size + t % sequences.page_size for t in range(length)]


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 16, 128]))
def test_random_sequences_against_lists(seed, page_size):
    rng = np.random.default_rng(seed)
    pool = PageAllocator(int(rng.integers(1, 40)))
    sequences = PagedSequences(pool, page_size)
    model: dict[int, list[int]] = {}  # slots by sequence

    def pages_held() -> int:
        return sum(-(-len(slots) // page_size) for slots in model.values())

    for _ in range(30):
        alive = list(model)
        match rng.integers(5):
            case 0:
                model[sequences.add()] = []
            case 1 if alive:
                gone = int(rng.choice(alive))
                sequences.release(gone)
                del model[gone]
            case 2 if alive:
                shorter = int(rng.choice(alive))
                keep = int(rng.integers(len(model[shorter]) + 1))
                sequences.truncate(shorter, keep)
                del model[shorter][keep:]
            case _:
                chosen = [int(s) for s in rng.permutation(alive)[: rng.integers(1 + len(alive))]]
                counts = rng.integers(0, 2 * page_size + 2, len(chosen))
                asked = sum(-(-(len(model[s]) + n) // page_size) + (-len(model[s]) // page_size) for s, n in zip(chosen, counts, strict=True))
                if asked > pool.num_free:
                    with pytest.raises(OutOfPages):
                        sequences.append(chosen, counts)
                else:
                    slots = sequences.append(chosen, counts).tolist()
                    for s, n in zip(chosen, counts, strict=True):
                        model[s] += slots[:n]
                        del slots[:n]
                    assert not slots
        everything = [slot for slots in model.values() for slot in slots]
        assert len(set(everything)) == len(everything)
        assert all(0 <= slot < pool.num_pages * page_size for slot in everything)
        assert pool.num_free == pool.num_pages - pages_held()
        for sequence, slots in model.items():
            assert slots_by_table(sequences, sequence) == sequences.slots(sequence).tolist() == slots
    assert sequences.lengths(list(model)).tolist() == [len(slots) for slots in model.values()]
    for sequence in list(model):
        sequences.release(sequence)
    assert (pool.num_free, len(sequences)) == (pool.num_pages, 0)


def test_tables_are_what_decode_takes():
    pool = PageAllocator(20)
    sequences = PagedSequences(pool, 4)
    a, b, c, d = (sequences.add() for _ in range(4))
    sequences.append([a, c], [9, 4])
    sequences.append([c, a, d], [1, 3, 1])
    tables = sequences.tables([d, b, a, c])
    assert [array.dtype for array in tables] == [np.int32] * 3
    assert tables.kv_indptr.tolist() == [0, 1, 1, 4, 6]
    assert tables.kv_last_page_len.tolist() == [1, 4, 4, 1]
    requests = make_requests(None, *tables, page_size=4, num_pages=20, total_q=4)
    assert requests.kv_lens.tolist() == [1, 0, 12, 5] == sequences.lengths([d, b, a, c]).tolist()


def test_one_count_for_all_and_slots_in_order():
    sequences = PagedSequences(PageAllocator(4), 2)
    a, b = sequences.add(), sequences.add()
    assert sequences.append([a, b]).tolist() == [0, 2]
    assert sequences.append([b, a], 1).tolist() == [3, 1]
    assert sequences.append([a], 2).tolist() == [4, 5]
    assert sequences.append([], []).tolist() == []


def test_running_out_leaves_all_sequences_as_they_were():
    sequences = PagedSequences(PageAllocator(3), 2)
    a, b = sequences.add(), sequences.add()
    sequences.append([a, b], [2, 1])
    with pytest.raises(OutOfPages, match=r"^2 pages asked for, 1 of 3 are free$"):
        sequences.append([a, b], [1, 2])
    assert sequences.lengths([a, b]).tolist() == [2, 1]
    assert sequences.append([b], [3]).tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.append([0, 99]), "there is no sequence 99"),
        (lambda s: s.append([1]), "there is no sequence 1: it was never added, or it was released"),
        (lambda s: s.tables([1]), "there is no sequence 1"),
        (lambda s: s.release(1), "there is no sequence 1"),
        (lambda s: s.append([0, 2, 0]), "sequence 0 is named twice"),
        (lambda s: s.append([0, 2], [1]), "counts has 1 entry for 2 sequences"),
        (lambda s: s.append([0, 2], [1, -1]), r"counts\[1\] is -1; 0 or more"),
        (lambda s: s.append([2], 2**31 - 1), "sequence 2 would have 2147483647 tokens; the limit is 2147483520"),
        (lambda s: s.truncate(0, 6), "num_tokens is 6; sequence 0 has 5"),
        (lambda s: s.truncate(0, -1), "num_tokens is -1; sequence 0 has 5"),
        (lambda s: PagedSequences(s.allocator, 48), "page_size is 48"),
    ],
)
def test_bad_calls_name_what_is_wrong_and_change_nothing(call, message):
    sequences = PagedSequences(PageAllocator(4), 4)
    for count in (5, 1, 0):
        sequences.append([sequences.add()], count)
    sequences.release(1)
    with pytest.raises(ValueError, match=message):
        call(sequences)
    assert sequences.lengths([0, 2]).tolist() == [5, 0]
    assert sequences.allocator.num_free == 2


def test_a_name_is_never_used_again():
    sequences = PagedSequences(PageAllocator(4), 1)
    first = sequences.add()
    sequences.release(first)
    assert sequences.add() != first


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_step_of_512_sequences_is_quick(page_size):
    """Of 1000 tokens each. One core takes 0.2 ms for the growth and 0.12 ms (512 000 pages: 6 ms) for the tables; the limits are far off."""
    lengths = np.full(512, 1000)
    pool = PageAllocator(512 * 1100 // page_size + 512)
    sequences = PagedSequences(pool, page_size)
    names = [sequences.add() for _ in lengths]
    sequences.append(names, lengths)
    seconds = {"grow": [], "tables": []}
    for _ in range(5):
        start = time.perf_counter()
        sequences.append(names)
        middle = time.perf_counter()
        sequences.tables(names)
        seconds["grow"].append(middle - start)
        seconds["tables"].append(time.perf_counter() - middle)
    assert min(seconds["grow"]) < 5e-3
    assert min(seconds["tables"]) < (100e-3 if page_size == 1 else 5e-3)
