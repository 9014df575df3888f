"""The arena: allocation, guard gaps, checks, and gathers and scatters at every alignment."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from waves import make_group, random_bytes

from mla_rt.emulator.memory import GUARD, POISON_LIMIT, Cells, Memory
from mla_rt.errors import KernelFault


@pytest.fixture
def memory():
    memory = Memory(1 << 30)
    yield memory
    memory.close()


def test_device_address_is_host_address(memory):
    address = memory.allocate(1000)
    memory.bytes_at(address, 1000)[:] = np.arange(1000) % 251
    assert ctypes.string_at(address + 300, 3) == bytes([300 % 251, 301 % 251, 302 % 251])


def test_allocations_are_aligned_poisoned_and_apart(memory):
    spans = [(memory.allocate(nbytes), nbytes) for nbytes in (1, 256, 4096, 4097, 0, 100)]
    for (address, nbytes), (following, _) in itertools.pairwise(spans):
        assert address % 256 == 0
        assert following - (address + nbytes) >= GUARD
        assert (memory.bytes_at(address, nbytes) == 0xFF).all()


def test_large_allocation_uses_no_memory_until_touched():
    with_room = Memory()
    try:
        if with_room.capacity < 16 << 30:
            pytest.skip("the system grants too little address space")
        address = with_room.allocate(9 << 30)
        tail = with_room.bytes_at(address + (9 << 30) - 8, 8)
        assert (tail == 0).all()
        assert POISON_LIMIT < (9 << 30)
        tail[:] = 7
        assert (with_room.bytes_at(address, 8) == 0).all()
    finally:
        with_room.close()


def test_bytes_at_refuses_what_no_allocation_holds(memory):
    first, second = memory.allocate(100), memory.allocate(100)
    assert memory.bytes_at(first + 40, 60).size == 60
    for address, nbytes in ((first, 101), (first - 1, 2), (first + 100, 1), (first, second - first + 1), (first, -1), (0, 4)):
        with pytest.raises(ValueError, match="not inside one live allocation"):
            memory.bytes_at(address, nbytes)


def test_free(memory):
    address = memory.allocate(5000)
    memory.bytes_at(address, 5000)[:] = 1
    memory.free(address)
    with pytest.raises(ValueError, match="no allocation"):
        memory.free(address)
    with pytest.raises(ValueError, match="not inside"):
        memory.bytes_at(address, 1)
    assert memory.allocate(5000) != address  # stale pointers keep faulting while there is fresh address space


def test_address_space_is_used_again_only_when_exhausted():
    memory = Memory(1 << 20)
    first = memory.allocate(300 << 10)
    kept = memory.allocate(300 << 10)
    with pytest.raises(MemoryError, match=r"no .* bytes of address space left"):
        memory.allocate(500 << 10)
    memory.free(first)
    again = memory.allocate(300 << 10)
    third = memory.allocate(200 << 10)
    spans = sorted([(kept, 300 << 10), (again, 300 << 10), (third, 200 << 10)])
    for (start, nbytes), (following, _) in itertools.pairwise(spans):
        assert start + nbytes + GUARD <= following
    assert (memory.bytes_at(again, 300 << 10) == 0xFF).all()
    memory.close()


def test_capacity_that_the_system_refuses():
    with pytest.raises(MemoryError, match="refuses to reserve"):
        Memory(1 << 62)


@pytest.mark.parametrize("misalignment", range(16))
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_dword_gathers(count, misalignment):
    data = random_bytes(count, 4096)
    cells = Cells(data.copy())
    offset = (np.random.default_rng(1).integers(0, 250, (3, 64)) * 16 + misalignment).astype(np.int64)
    values = cells.load_dwords(offset, count)
    assert len(values) == count
    for wave, lane in ((0, 0), (1, 17), (2, 63)):
        start = int(offset[wave, lane])
        expected = [int.from_bytes(data[start + 4 * i : start + 4 * i + 4].tobytes(), "little") for i in range(count)]
        assert [int(value[wave, lane]) for value in values] == expected


@pytest.mark.parametrize("misalignment", range(16))
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_dword_scatters_write_their_bytes_and_no_others(count, misalignment):
    cells = Cells(np.zeros(4096, np.uint8))
    expected = np.zeros(4096, np.uint8)
    rng = np.random.default_rng(2)
    offset = (rng.permutation(120)[:64] * 32 + misalignment).astype(np.int64)
    values = [rng.integers(0, 1 << 32, 64, dtype=np.uint64).astype(np.uint32) for _ in range(count)]
    cells.store_dwords(offset, values)
    for lane in range(64):
        for i in range(count):
            expected[offset[lane] + 4 * i : offset[lane] + 4 * i + 4] = list(int(values[i][lane]).to_bytes(4, "little"))
    np.testing.assert_array_equal(cells.u8, expected)


@pytest.mark.parametrize("step", [0, 1, 4, 8, 12])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_overlapping_scatters_the_last_lane_wins(count, step):
    cells, expected = Cells(np.zeros(1024, np.uint8)), np.zeros(1024, np.uint8)
    offset = np.arange(64, dtype=np.int64) * step + 16
    values = [np.arange(64, dtype=np.uint32) * 0x01010101 + i for i in range(count)]
    cells.store_dwords(offset, values)
    for lane in range(64):
        for i in range(count):
            expected[offset[lane] + 4 * i : offset[lane] + 4 * i + 4] = list(int(values[i][lane]).to_bytes(4, "little"))
    np.testing.assert_array_equal(cells.u8, expected)


def test_narrow_gathers_and_scatters():
    data = random_bytes(3, 256)
    cells = Cells(data.copy())
    offset = np.array([0, 1, 2, 7, 254], np.int64)
    assert cells.load_u8(offset).tolist() == [int(data[i]) for i in offset]
    assert cells.load_u16(offset).tolist() == [int(data[i]) | int(data[i + 1]) << 8 for i in offset]
    cells.store_u8(offset, np.array([0x101, 2, 3, 4, 5], np.uint32))
    assert [int(cells.u8[i]) for i in offset] == [1, 2, 3, 4, 5]
    cells.store_u16(np.array([33, 33, 40], np.int64), np.array([0x1111, 0x12345, 0x6677], np.uint32))
    assert cells.u8[[33, 34, 40, 41]].tolist() == [0x45, 0x23, 0x77, 0x66]
    cells.store_u16(np.array([50, 50], np.int64), np.array([1, 2], np.uint32))
    assert cells.u8[[50, 51]].tolist() == [2, 0]


def test_check_names_kernel_place_and_address(memory):
    address = memory.allocate(256, "scores")
    group = make_group(workgroups=2, waves=2, memory=memory)
    addresses = np.full((4, 64), address, np.uint64)
    addresses[2, 5] = address + 253
    with pytest.raises(KernelFault) as caught:
        memory.check(group, addresses, group.mask, 4)
    message = str(caught.value)
    for part in (
        "kernel",
        "read of 4 bytes",
        "'scores' of 256 bytes",
        "253 bytes below",
        "workgroup (0, 0, 0), wave 1, lane 5",
        f"{address + 253:#x}",
    ):
        assert part in message
    addresses[2, 5] = address + 252
    offsets = memory.check(group, addresses, group.mask, 4)
    assert (memory.cells.load_u8(offsets) == 0xFF).all()


def test_check_spans_several_allocations_but_not_their_gaps(memory):
    spots = [memory.allocate(64) for _ in range(5)]
    group = make_group(memory=memory)
    addresses = np.array([[spots[lane % 5] + lane % 61 for lane in range(64)]], np.uint64)
    np.testing.assert_array_equal(memory.check(group, addresses, group.mask, 4).view(np.uint64) + np.uint64(memory.base), addresses)
    memory.free(spots[2])
    with pytest.raises(KernelFault, match="lane 2,"):
        memory.check(group, addresses, group.mask, 4)
    inactive = group.mask & (np.arange(64) % 5 != 2)
    offsets = memory.check(group, addresses, inactive, 4)
    assert (offsets[~inactive] == 0).all()


@pytest.mark.parametrize("address", [0, 1 << 40, (1 << 64) - 4, (1 << 63)])
def test_check_of_wild_addresses(memory, address):
    memory.allocate(4096)
    group = make_group(memory=memory)
    with pytest.raises(KernelFault, match="outside live memory"):
        memory.check(group, np.full((1, 64), address, np.uint64), group.mask, 16, "write")


def test_check_alignment_looks_at_active_lanes_only(memory):
    address = memory.allocate(4096)
    group = make_group(memory=memory)
    addresses = address + np.arange(64, dtype=np.uint64)[None] * np.uint64(8) + (np.arange(64) == 9).astype(np.uint64)
    with pytest.raises(KernelFault, match=r"not aligned to 4 .*lane 9"):
        memory.check(group, addresses, group.mask, 4, "atomic", align=4)
    assert memory.check(group, addresses, group.mask & (np.arange(64) != 9), 4, "atomic", align=4).shape == (1, 64)


def test_nothing_is_live_after_close():
    memory = Memory(1 << 24)
    address = memory.allocate(100)
    memory.close()
    with pytest.raises(ValueError, match="not inside"):
        memory.bytes_at(address, 1)
