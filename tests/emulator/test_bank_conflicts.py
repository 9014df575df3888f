"""Bank conflicts against patterns counted by hand, and the memory of patterns against the plain count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_rt.emulator.bank_conflicts import ConflictMemo, extra_cycles, phases_of

LANES = np.arange(64)
ALL = np.ones(64, np.bool_)


def extra(address: np.ndarray, nbytes: int, access: str = "read", mask: np.ndarray = ALL) -> int:
    return int(extra_cycles(np.broadcast_to(address, 64).astype(np.int64)[None], mask[None], nbytes, access)[0])


@pytest.mark.parametrize(
    ("address", "nbytes", "access", "expected"),
    [
        (4 * LANES, 4, "read", 0),  # 64 dwords in 64 banks
        (8 * LANES, 4, "read", 1),  # lanes n and n + 32 meet in every second bank
        (256 * LANES, 4, "read", 63),  # all lanes in bank 0
        (0, 4, "read", 0),  # one dword for all
        (LANES, 1, "read", 0),  # four lanes a dword
        (4 * (LANES // 2) + 256 * (LANES % 2), 4, "read", 1),  # each bank holds two dwords that are wanted
        (16 * LANES, 16, "read", 0),  # each phase takes 64 banks once
        (256 * LANES, 16, "read", 60),  # 4 phases of 16 lanes, all in banks 0 to 3
        (8 * LANES, 8, "read", 0),
        (256 * LANES, 8, "read", 62),  # 2 phases of 32 lanes
        (256 * LANES, 8, "transposed read", 62),
        (12 * LANES, 12, "read", 8),  # in each of 8 phases, lanes n and n + 20, 60 dwords apart, meet in 32 banks
        (4 * LANES, 4, "write", 0),
        (128 * LANES, 4, "write", 62),  # 2 phases of 32 lanes in one of 32 banks
        (8 * LANES, 8, "write", 0),
        (128 * LANES, 8, "write", 60),  # 4 phases of 16 lanes
        (16 * LANES, 16, "write", 0),
        (144 * LANES, 16, "write", 0),  # rows of 128 bytes, padded by 16
        (1024 * LANES, 16, "write", 56),  # 8 phases of 8 lanes
        (16 * LANES, 16, "DMA write", 0),
        (0, 4, "write", 0),  # the last lane wins; one dword is written
        (0, 4, "atomic", 62),  # one after the other
        (4 * LANES, 4, "atomic", 0),
    ],
)
def test_patterns_counted_by_hand(address, nbytes, access, expected):
    assert extra(np.asarray(address), nbytes, access) == expected


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [(0, 20, True), (0, 12, True), (0, 4, False), (4, 16, True), (11, 31, True), (15, 16, False), (31, 32, False), (32, 52, True)],
)
def test_which_lanes_share_a_cycle_of_a_16_byte_read(first, second, together):
    """The measured phases: two lanes that want different dwords of a bank collide if and only if they are in one phase."""
    mask = np.isin(LANES, (first, second))
    assert extra(256 * LANES, 16, "read", mask) == int(together)


def test_disabled_lanes_take_no_bank():
    assert extra(256 * LANES, 4, "read", LANES < 3) == 2
    assert extra(256 * LANES, 4, "read", np.zeros(64, np.bool_)) == 0


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 12, 16])
@pytest.mark.parametrize("access", ["read", "write", "atomic", "DMA write"])
def test_phases_hold_each_lane_once(nbytes, access):
    assert sorted(phases_of(nbytes, access).lanes.ravel()) == list(range(64))


@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8, 12, 16]), st.sampled_from(["read", "write", "atomic"]))
def test_remembered_patterns_give_the_same_count(seed, nbytes, access):
    """Waves of equal, shifted and different patterns, some with disabled lanes; a second call is answered from memory."""
    rng = np.random.default_rng(seed)
    rows = 4 * rng.integers(0, 200, (3, 64))
    address = rows[rng.integers(0, 3, 10)] + 4 * rng.integers(0, 100, (10, 1))
    mask = rng.random((10, 64)) < rng.choice([0.0, 0.5, 1.0], (10, 1))
    memo = ConflictMemo()
    expected = extra_cycles(address, mask, nbytes, access)
    assert np.array_equal(memo(address, mask, nbytes, access), expected)
    assert np.array_equal(memo(address, mask, nbytes, access), expected)
