"""Scalar loads."""

from __future__ import annotations

import numpy as np
import pytest
from waves import execute, make_group, random_bytes, set_s64

from mla_rt.emulator.memory import Memory
from mla_rt.errors import KernelFault


@pytest.fixture
def memory():
    memory = Memory(1 << 30)
    yield memory
    memory.close()


@pytest.fixture
def words(memory):
    """Address and uint32 contents of an allocation of 1024 bytes."""
    address = memory.allocate(1024, "arguments")
    memory.bytes_at(address, 1024)[:] = random_bytes(1, 1024)
    return address, memory.bytes_at(address, 1024).view(np.uint32)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_load(memory, words, count):
    address, contents = words
    group = make_group(workgroups=3, memory=memory)
    for wave in range(3):
        group.state.sgpr[2, wave], group.state.sgpr[3, wave] = (address + 256 * wave) & 0xFFFFFFFF, address >> 32
    before = group.state.sgpr.copy()
    suffix, last = (f"x{count}", f"s[16:{15 + count}]") if count > 1 else ("", "s16")
    execute(group, f"s_load_dword{suffix} {last}, s[2:3], 0x24")
    for wave in range(3):
        np.testing.assert_array_equal(group.state.sgpr[16 : 16 + count, wave], contents[64 * wave + 9 : 64 * wave + 9 + count])
    np.testing.assert_array_equal(group.state.sgpr[16 + count : 102], before[16 + count : 102])


@pytest.mark.parametrize(
    ("operand", "scalar", "word"),
    [("s8", 12, 3), ("-4", 0, 0), ("s8 offset:0x10", 4, 5), ("s8 offset:-8", 12, 1), ("0x3", 0, 1)],
)
def test_offsets(memory, words, operand, scalar, word):
    """An SGPR, a negative immediate, both; the low two address bits are ignored."""
    address, contents = words
    group = make_group(memory=memory)
    base = address + (4 if operand in ("-4", "0x3") else 0)
    set_s64(group, 2, base)
    group.state.sgpr[8] = scalar
    execute(group, f"s_load_dword s4, s[2:3], {operand}")
    assert group.state.sgpr[4, 0] == contents[word]


def test_destination_may_be_the_base(memory, words):
    address, contents = words
    group = make_group(memory=memory)
    set_s64(group, 0, address)
    execute(group, "s_load_dwordx4 s[0:3], s[0:1], 0x0")
    np.testing.assert_array_equal(group.state.sgpr[:4, 0], contents[:4])


def test_bounds(memory, words):
    """A load of 4 dwords at a multiple of 16 may be 3 dwords widened by the compiler, so only these must be inside."""
    address = memory.allocate(28)
    memory.bytes_at(address, 28)[:] = np.arange(28)
    group = make_group(memory=memory)
    set_s64(group, 2, address)
    execute(group, "s_load_dwordx4 s[4:7], s[2:3], 0x10")
    assert group.state.sgpr[6, 0] == 0x1B1A1918
    for text in (
        "s_load_dwordx4 s[4:7], s[2:3], 0x14",
        "s_load_dwordx8 s[8:15], s[2:3], 0x0",
        "s_load_dword s4, s[2:3], 0x1c",
        "s_load_dword s4, s[2:3], -4",
    ):
        with pytest.raises(KernelFault, match="scalar read"):
            execute(group, text)


def test_buffer_load_checks_its_range(memory, words):
    address, contents = words
    group = make_group(memory=memory)
    set_s64(group, 8, address)
    group.state.sgpr[10], group.state.sgpr[11] = 24, 0x00027000
    execute(group, "s_buffer_load_dwordx4 s[16:19], s[8:11], 0x10")
    assert group.state.sgpr[16:20, 0].tolist() == [contents[4], contents[5], 0, 0]
    group.state.sgpr[12] = 8
    execute(group, "s_buffer_load_dwordx2 s[16:17], s[8:11], s12")
    assert group.state.sgpr[16:18, 0].tolist() == contents[2:4].tolist()


def test_clocks_move_forward_and_cache_operations_do_nothing(memory):
    group = make_group(memory=memory)
    for name in ("s_memtime", "s_memrealtime"):
        execute(group, f"{name} s[4:5]")
        first = group.read_sgpr64(4).copy()
        execute(group, f"{name} s[4:5]")
        assert (group.read_sgpr64(4) >= first).all() and (first > 0).all()
    before = group.state.sgpr.copy()
    execute(group, "s_dcache_wb\ns_dcache_inv")
    np.testing.assert_array_equal(group.state.sgpr, before)
