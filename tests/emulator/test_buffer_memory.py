"""Buffer loads, stores, atomics and LDS-DMA with the range check of the resource."""

from __future__ import annotations

import numpy as np
import pytest
from waves import ACCUM_OFFSET, execute, get_v, make_group, random_bytes, set_s64, set_v, set_v64

from mla_rt.emulator.memory import Memory
from mla_rt.errors import KernelFault, UnknownInstruction

RAW = 0x00027000
LANE = np.arange(64)
OWNED = 4096


@pytest.fixture
def memory():
    memory = Memory(1 << 30)
    yield memory
    memory.close()


@pytest.fixture
def buffer(memory):
    """(group, uint8 contents); s[4:7] is a raw resource of 1000 bytes over an allocation of 4096."""
    address = memory.allocate(OWNED, "buffer")
    contents = memory.bytes_at(address, OWNED)
    contents[:] = random_bytes(2, OWNED)
    group = make_group(lds_bytes=4096, memory=memory)
    set_s64(group, 4, address)
    group.state.sgpr[6], group.state.sgpr[7] = 1000, RAW
    return group, contents


def dword(contents: np.ndarray, offset: int) -> int:
    return int.from_bytes(contents[offset : offset + 4].tobytes(), "little")


@pytest.mark.parametrize(("suffix", "registers"), [("dword", "v4"), ("dwordx2", "v[4:5]"), ("dwordx3", "v[4:6]"), ("dwordx4", "v[4:7]")])
def test_load_is_checked_dword_by_dword(buffer, suffix, registers):
    group, contents = buffer
    offset = LANE * 16 + 4
    set_v(group, 0, offset)
    execute(group, f"buffer_load_{suffix} {registers}, v0, s[4:7], 0 offen offset:8")
    for i in range(int(suffix[6:] or 1)):
        for lane in range(64):
            start = int(offset[lane]) + 8 + 4 * i
            assert get_v(group, 4 + i)[0, lane] == (dword(contents, start) if start + 4 <= 1000 else 0)


def test_scalar_offset_is_not_range_checked(buffer):
    group, contents = buffer
    set_v(group, 0, LANE * 4)
    group.state.sgpr[9] = 2000
    execute(group, "buffer_load_dword v4, v0, s[4:7], s9 offen")
    np.testing.assert_array_equal(get_v(group, 4)[0], contents[2000 : 2000 + 256].view(np.uint32))
    execute(group, "buffer_load_dword v4, off, s[4:7], s9 offset:996")
    assert (get_v(group, 4) == dword(contents, 2996)).all()
    execute(group, "buffer_load_dword v4, off, s[4:7], s9 offset:1000")
    assert (get_v(group, 4) == 0).all()


def test_offset_sum_wraps_and_addresses_round_down_to_dwords(buffer):
    group, contents = buffer
    set_v(group, 0, 0xFFFFFFF8)
    execute(group, "buffer_load_dword v4, v0, s[4:7], 0 offen offset:13")
    assert (get_v(group, 4) == dword(contents, 4)).all()
    execute(group, "buffer_load_dword v4, v0, s[4:7], 0 offen")
    assert (get_v(group, 4) == 0).all()


@pytest.mark.parametrize(("name", "nbytes", "signed"), [("ubyte", 1, False), ("sbyte", 1, True), ("ushort", 2, False), ("sshort", 2, True)])
def test_narrow_loads(buffer, name, nbytes, signed):
    group, contents = buffer
    offset = LANE * 2 + 900
    set_v(group, 0, offset)
    execute(group, f"buffer_load_{name} v4, v0, s[4:7], 0 offen")
    for lane in range(64):
        start = int(offset[lane])
        raw = int.from_bytes(contents[start : start + nbytes].tobytes(), "little", signed=signed) if start + nbytes <= 1000 else 0
        assert get_v(group, 4)[0, lane] == raw & 0xFFFFFFFF
    set_v(group, 5, 0x12345678)
    execute(group, "buffer_load_short_d16_hi v5, v0, s[4:7], 0 offen")
    assert get_v(group, 5)[0, 0] == 0x5678 | int.from_bytes(contents[900:902].tobytes(), "little") << 16
    assert get_v(group, 5)[0, 63] == 0x5678


def test_structured_access_checks_the_index(buffer):
    group, contents = buffer
    group.state.sgpr[5] |= 32 << 16  # stride
    group.state.sgpr[6] = 40  # records
    set_v(group, 2, LANE, LANE % 7 * 4)
    execute(group, "buffer_load_dword v4, v[2:3], s[4:7], 0 idxen offen offset:4")
    for lane in range(64):
        assert get_v(group, 4)[0, lane] == (dword(contents, lane * 32 + lane % 7 * 4 + 4) if lane < 40 else 0)


@pytest.mark.parametrize(("suffix", "registers"), [("dword", "v4"), ("dwordx2", "v[4:5]"), ("dwordx3", "v[4:6]"), ("dwordx4", "v[4:7]")])
def test_store_drops_dwords_out_of_range(buffer, suffix, registers):
    group, contents = buffer
    expected = contents.copy()
    count = int(suffix[6:] or 1)
    values = random_bytes(3, 256 * count).view(np.uint32).reshape(64, count)
    set_v(group, 0, LANE * 16 + 8)
    set_v(group, 4, *values.T)
    execute(group, f"buffer_store_{suffix} {registers}, v0, s[4:7], 0 offen")
    for lane in range(64):
        for i in range(count):
            start = lane * 16 + 8 + 4 * i
            if start + 4 <= 1000:
                expected[start : start + 4] = values[lane, i : i + 1].view(np.uint8)
    np.testing.assert_array_equal(contents, expected)


def test_narrow_stores(buffer):
    group, contents = buffer
    expected = contents.copy()
    set_v(group, 0, LANE * 3 + 850)
    set_v(group, 1, 0xAABBCC00 + LANE)
    execute(group, "buffer_store_byte v1, v0, s[4:7], 0 offen\nbuffer_store_byte_d16_hi v1, v0, s[4:7], 0 offen offset:1")
    for lane in range(64):
        for start, value in ((lane * 3 + 850, lane), (lane * 3 + 851, 0xBB)):
            if start < 1000:
                expected[start] = value
    np.testing.assert_array_equal(contents, expected)


def test_atomics_skip_lanes_out_of_range(buffer):
    group, contents = buffer
    contents[:] = 0
    set_v(group, 0, np.where(LANE % 2, 1000, 996))
    set_v(group, 1, LANE)
    execute(group, "buffer_atomic_add v1, v0, s[4:7], 0 offen sc0")
    assert dword(contents, 996) == sum(range(0, 64, 2)) and dword(contents, 1000) == 0
    assert get_v(group, 1)[0, :6].tolist() == [0, 1, 0, 3, 2, 5]
    set_v(group, 2, 7, 0)
    set_v(group, 0, 0)
    execute(group, "buffer_atomic_cmpswap v[2:3], v0, s[4:7], 0 offen")
    assert dword(contents, 0) == 7


def test_unbound_resource_reads_zero(buffer):
    group, _ = buffer
    group.state.sgpr[7] = 0
    set_v(group, 0, LANE * 4)
    execute(group, "buffer_load_dword v4, v0, s[4:7], 0 offen")
    assert (get_v(group, 4) == 0).all()


def test_resource_larger_than_its_memory_is_a_fault(buffer):
    group, _ = buffer
    group.state.sgpr[6] = OWNED + 1000
    set_v(group, 0, OWNED - 128 + LANE * 4)
    with pytest.raises(KernelFault, match=r"'buffer'.*lane 32"):
        execute(group, "buffer_load_dword v4, v0, s[4:7], 0 offen")


@pytest.mark.parametrize(("suffix", "nbytes", "stride"), [("dword", 4, 4), ("dwordx3", 12, 16), ("dwordx4", 16, 16)])
def test_lds_form_writes_zero_for_lanes_out_of_range(buffer, suffix, nbytes, stride):
    group, contents = buffer
    set_v(group, 0, LANE * 16 + 256)
    group.state.sgpr[124] = 512
    execute(group, f"buffer_load_{suffix} v0, s[4:7], 0 offen offset:32 lds")
    expected = np.full(4096, 0xFF, np.uint8)
    for lane in range(64):
        for i in range(nbytes // 4):
            source, target = lane * 16 + 288 + 4 * i, 512 + 32 + lane * stride + 4 * i
            expected[target : target + 4] = contents[source : source + 4] if source + 4 <= 1000 else 0
    np.testing.assert_array_equal(group.state.lds.view(np.uint8)[0], expected)


def test_accumulator_data_and_cache_operations(buffer):
    group, contents = buffer
    set_v(group, 0, LANE * 4)
    execute(group, "buffer_load_dword a1, v0, s[4:7], 0 offen\nbuffer_wbl2 sc1\nbuffer_inv sc1")
    np.testing.assert_array_equal(get_v(group, ACCUM_OFFSET + 1)[0], contents[:256].view(np.uint32))


def test_what_is_not_emulated_is_refused(buffer):
    group, _ = buffer
    group.state.sgpr[5] |= 1 << 31
    with pytest.raises(KernelFault, match="swizzling"):
        execute(group, "buffer_load_dword v4, off, s[4:7], 0")
    with pytest.raises(UnknownInstruction):
        execute(group, "buffer_load_dword v4, off, s[4:7], src_shared_base")


def test_inactive_lanes(memory, buffer):
    group, contents = buffer
    quiet = make_group(memory=memory, active=1 << 5)
    quiet.state.sgpr[4:8] = group.state.sgpr[4:8]
    set_v(quiet, 4, 0x77777777)
    set_v64(quiet, 0, LANE * 4)
    execute(quiet, "buffer_load_dword v4, v0, s[4:7], 0 offen")
    assert get_v(quiet, 4)[0, 5] == dword(contents, 20)
    assert (np.delete(get_v(quiet, 4)[0], 5) == 0x77777777).all()
