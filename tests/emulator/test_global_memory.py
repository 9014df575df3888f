"""Global loads, stores, atomics and LDS-DMA, against bytes and a lane-by-lane model in plain Python."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from waves import ACCUM_OFFSET, execute, get_v, make_group, random_bytes, set_s64, set_v, set_v64

from mla_rt.emulator.memory import Memory
from mla_rt.errors import KernelFault, UnknownInstruction

SIZE = 1 << 16
LANE = np.arange(64)


@pytest.fixture
def memory():
    memory = Memory(32 << 30)
    yield memory
    memory.close()


@pytest.fixture
def data(memory):
    """Address and contents of one allocation."""
    address = memory.allocate(SIZE, "data")
    memory.bytes_at(address, SIZE)[:] = random_bytes(0, SIZE)
    return address, memory.bytes_at(address, SIZE)


def sign_extended(value: int, bits: int) -> int:
    return (value - (1 << bits) if value >> (bits - 1) else value) & 0xFFFFFFFF


@pytest.mark.parametrize("step", [16, 4, 1, 29])
@pytest.mark.parametrize(("suffix", "registers"), [("dword", "v4"), ("dwordx2", "v[4:5]"), ("dwordx3", "v[4:6]"), ("dwordx4", "v[4:7]")])
def test_load_dwords(memory, data, suffix, registers, step):
    address, contents = data
    group = make_group(workgroups=3, memory=memory)
    offset = LANE * step + np.arange(3)[:, None] * 3000
    set_v64(group, 0, address + offset + 16)
    execute(group, f"global_load_{suffix} {registers}, v[0:1], off offset:-16")
    for i in range(int(suffix[6:] or 1)):
        for wave, lane in ((0, 0), (1, 13), (2, 63)):
            expected = struct.unpack_from("<I", contents.tobytes(), offset[wave, lane] + 4 * i)[0]
            assert get_v(group, 4 + i)[wave, lane] == expected


@pytest.mark.parametrize(
    ("name", "nbytes", "signed", "half"),
    [
        ("ubyte", 1, False, None),
        ("sbyte", 1, True, None),
        ("ushort", 2, False, None),
        ("sshort", 2, True, None),
        ("ubyte_d16", 1, False, 0),
        ("ubyte_d16_hi", 1, False, 1),
        ("sbyte_d16", 1, True, 0),
        ("sbyte_d16_hi", 1, True, 1),
        ("short_d16", 2, False, 0),
        ("short_d16_hi", 2, False, 1),
    ],
)
def test_load_narrow(memory, data, name, nbytes, signed, half):
    address, contents = data
    group = make_group(memory=memory)
    set_v64(group, 0, address + LANE * 7)
    set_v(group, 2, 0xABCD1234)
    execute(group, f"global_load_{name} v2, v[0:1], off offset:3")
    for lane in range(64):
        raw = int.from_bytes(contents[lane * 7 + 3 : lane * 7 + 3 + nbytes].tobytes(), "little")
        value = sign_extended(raw, 8 * nbytes) if signed else raw
        expected = value if half is None else 0xABCD0000 | value & 0xFFFF if half == 0 else 0x1234 | (value & 0xFFFF) << 16
        assert get_v(group, 2)[0, lane] == expected


def test_scalar_base_takes_an_unsigned_32_bit_offset(memory):
    address = memory.allocate(5 << 30)
    memory.bytes_at(address + 0xFFFFFF00, 4)[:] = [1, 2, 3, 4]
    group = make_group(memory=memory)
    set_s64(group, 4, address)
    set_v(group, 0, 0xFFFFFF10)
    execute(group, "global_load_dword v1, v0, s[4:5] offset:-16")
    assert (get_v(group, 1) == 0x04030201).all()


def test_inactive_lanes_touch_nothing(memory, data):
    address, contents = data
    before = contents.copy()
    group = make_group(memory=memory, active=0b1010)
    set_v64(group, 0, np.where((0b1010 >> LANE & 1) == 1, address + LANE * 4, 0))
    set_v(group, 2, 0x55555555)
    execute(group, "global_load_dword v2, v[0:1], off")
    assert (get_v(group, 2)[0] == 0x55555555).sum() == 62
    assert get_v(group, 2)[0, 3] == struct.unpack_from("<I", before.tobytes(), 12)[0]
    set_v(group, 3, 0x01020304)
    execute(group, "global_store_dword v[0:1], v3, off")
    assert (contents != before).sum() <= 8
    assert contents[4:8].tolist() == contents[12:16].tolist() == [4, 3, 2, 1]
    nobody = make_group(memory=memory, active=0)
    execute(nobody, "global_load_dwordx4 v[4:7], v[0:1], off\nglobal_store_dwordx3 v[0:1], v[4:6], off\nglobal_atomic_add v[0:1], v4, off")


@pytest.mark.parametrize("step", [16, 4, 1])
@pytest.mark.parametrize(("suffix", "registers"), [("dword", "v4"), ("dwordx2", "v[4:5]"), ("dwordx3", "v[4:6]"), ("dwordx4", "v[4:7]")])
def test_store_dwords_highest_lane_wins(memory, data, suffix, registers, step):
    address, contents = data
    expected = contents.copy()
    group = make_group(memory=memory)
    set_v64(group, 0, address + LANE * step)
    count = int(suffix[6:] or 1)
    values = random_bytes(5, 64 * 4 * count).view(np.uint32).reshape(64, count)
    set_v(group, 4, *values.T)
    execute(group, f"global_store_{suffix} v[0:1], {registers}, off offset:8")
    for lane in range(64):
        expected[lane * step + 8 : lane * step + 8 + 4 * count] = values[lane].view(np.uint8)
    np.testing.assert_array_equal(contents, expected)


@pytest.mark.parametrize(("name", "nbytes", "half"), [("byte", 1, 0), ("byte_d16_hi", 1, 1), ("short", 2, 0), ("short_d16_hi", 2, 1)])
def test_store_narrow(memory, data, name, nbytes, half):
    address, contents = data
    expected = contents.copy()
    group = make_group(memory=memory)
    set_s64(group, 2, address)
    set_v(group, 0, LANE * 5)
    values = random_bytes(6, 256).view(np.uint32)
    set_v(group, 1, values)
    execute(group, f"global_store_{name} v0, v1, s[2:3]")
    for lane in range(64):
        part = int(values[lane]) >> (16 * half) & ((1 << 8 * nbytes) - 1)
        expected[lane * 5 : lane * 5 + nbytes] = list(part.to_bytes(nbytes, "little"))
    np.testing.assert_array_equal(contents, expected)


def test_accumulator_registers(memory, data):
    address, contents = data
    group = make_group(memory=memory)
    set_v64(group, 0, address + LANE * 8)
    execute(group, "global_load_dwordx2 a[2:3], v[0:1], off")
    words = contents[: 64 * 8].view(np.uint32).reshape(64, 2)
    np.testing.assert_array_equal(get_v(group, ACCUM_OFFSET + 2)[0], words[:, 0])
    np.testing.assert_array_equal(get_v(group, ACCUM_OFFSET + 3)[0], words[:, 1])
    set_v64(group, 0, address + 4096 + LANE * 4)
    execute(group, "global_store_dword v[0:1], a3, off")
    np.testing.assert_array_equal(contents[4096 : 4096 + 256].view(np.uint32), words[:, 1])


def test_destination_may_be_the_address(memory, data):
    address, contents = data
    group = make_group(memory=memory)
    set_v64(group, 0, address + LANE * 16)
    execute(group, "global_load_dwordx4 v[0:3], v[0:1], off")
    np.testing.assert_array_equal(np.stack([get_v(group, i)[0] for i in range(4)], axis=-1), contents[:1024].view(np.uint32).reshape(64, 4))


@pytest.mark.parametrize(
    "text", ["global_load_dwordx4 v[4:7], v[0:1], off", "global_store_dwordx4 v[0:1], v[4:7], off", "global_load_ubyte v4, v[0:1], off offset:15"]
)
def test_out_of_bounds_is_a_fault(memory, data, text):
    address, _ = data
    group = make_group(memory=memory)
    set_v64(group, 0, address + SIZE - 16 - 16 * LANE)
    execute(group, text)
    set_v64(group, 0, address + SIZE - 15 - 16 * LANE)
    with pytest.raises(KernelFault, match=r"outside live memory .*'data'.*lane 0"):
        execute(group, text)


def test_flat_access_to_global_memory_and_refusal_of_scratch(memory, data):
    address, contents = data
    group = make_group(memory=memory)
    set_v64(group, 0, address + LANE * 4)
    execute(group, "flat_load_dword v2, v[0:1] offset:4095")
    assert get_v(group, 2)[0, 1] == struct.unpack_from("<I", contents.tobytes(), 4 + 4095)[0]
    for text in ("scratch_load_dword v0, v1, off", "scratch_store_dword off, v0, s3"):
        with pytest.raises(UnknownInstruction, match="scratch"):
            execute(group, text)


MODEL = {  # what an integer atomic leaves, from (memory, data, bits)
    "swap": lambda m, d, bits: d,
    "add": lambda m, d, bits: (m + d) % (1 << bits),
    "sub": lambda m, d, bits: (m - d) % (1 << bits),
    "smin": lambda m, d, bits: min(m, d, key=lambda x: x - (x >> (bits - 1) << bits)),
    "smax": lambda m, d, bits: max(m, d, key=lambda x: x - (x >> (bits - 1) << bits)),
    "umin": lambda m, d, bits: min(m, d),
    "umax": lambda m, d, bits: max(m, d),
    "and": lambda m, d, bits: m & d,
    "or": lambda m, d, bits: m | d,
    "xor": lambda m, d, bits: m ^ d,
    "inc": lambda m, d, bits: 0 if m >= d else m + 1,
    "dec": lambda m, d, bits: d if m == 0 or m > d else m - 1,
}


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", MODEL)
def test_integer_atomics_serialise_in_lane_order(memory, data, name, bits):
    address, contents = data
    group = make_group(workgroups=2, memory=memory, active=0xFFFFFFFFFFFFFFF7)
    size, dtype = bits // 8, np.dtype(f"u{bits // 8}")
    cells = contents.view(dtype)
    cells[:4] = random_bytes(9, 4 * size).view(dtype)
    cells[0] = 2  # for inc and dec to wrap
    target = (np.arange(128) * 7 % 4).reshape(2, 64)
    operand = random_bytes(8, 128 * size).view(dtype).reshape(2, 64).copy()
    operand[target == 0] = 3
    found, model = np.zeros((2, 64), dtype), [int(cell) for cell in cells[:4]]
    for wave in range(2):
        for lane in range(64):
            if lane != 3:
                found[wave, lane] = model[target[wave, lane]]
                model[target[wave, lane]] = MODEL[name](model[target[wave, lane]], int(operand[wave, lane]), bits)
    set_v64(group, 0, address + target * size)
    set_v64(group, 2, operand)
    set_v64(group, 4, 0)
    suffix, registers = ("", "v4, v[0:1], v2") if bits == 32 else ("_x2", "v[4:5], v[0:1], v[2:3]")
    execute(group, f"global_atomic_{name}{suffix} {registers}, off sc0")
    assert [int(cell) for cell in cells[:4]] == model
    returned = get_v(group, 4).astype(np.uint64) | (get_v(group, 5).astype(np.uint64) << np.uint64(32) if bits == 64 else 0)
    np.testing.assert_array_equal(returned, found)


@pytest.mark.parametrize("bits", [32, 64])
def test_compare_and_swap(memory, data, bits):
    """Every lane tries to replace lane number i by i + 1: all succeed, one after the other."""
    address, contents = data
    size = bits // 8
    contents.view(np.dtype(f"u{size}"))[0] = 0
    group = make_group(memory=memory)
    set_s64(group, 2, address)
    set_v(group, 0, 0)
    if bits == 32:
        set_v(group, 2, LANE + 1, LANE)
        execute(group, "global_atomic_cmpswap v6, v0, v[2:3], s[2:3] sc0")
    else:
        set_v64(group, 2, LANE + 1)
        set_v64(group, 4, LANE)
        execute(group, "global_atomic_cmpswap_x2 v[6:7], v0, v[2:5], s[2:3] sc0")
    assert contents.view(np.dtype(f"u{size}"))[0] == 64
    np.testing.assert_array_equal(get_v(group, 6)[0], LANE)


def test_atomic_without_return_leaves_registers(memory, data):
    address, contents = data
    contents.view(np.uint32)[0] = 5
    group = make_group(workgroups=4, memory=memory)
    set_v64(group, 0, np.full((4, 64), address))
    set_v(group, 2, 1)
    before = group.state.vgpr.copy()
    execute(group, "global_atomic_add v[0:1], v2, off")
    assert contents.view(np.uint32)[0] == 5 + 256
    np.testing.assert_array_equal(group.state.vgpr, before)


def test_float_atomics(memory, data):
    address, contents = data
    contents[:16] = 0
    group = make_group(memory=memory)
    set_v64(group, 0, np.full(64, address))
    set_v(group, 2, np.full(64, 0.25, np.float32).view(np.uint32))
    execute(group, "global_atomic_add_f32 v3, v[0:1], v2, off sc0")
    np.testing.assert_array_equal(get_v(group, 3, np.float32)[0], LANE * 0.25)
    assert contents[:4].view(np.float32)[0] == 16
    contents[:8] = 0
    set_v(group, 2, 0x3F804000)  # bf16 1.0 in the high half, 2.0 in the low
    execute(group, "global_atomic_pk_add_bf16 v[0:1], v2, off")
    assert contents[:4].view(np.uint32)[0] == 0x42804300  # 64.0, 128.0
    contents[:8] = 0
    set_v(group, 2, 0x3C004000)  # f16 1.0, 2.0
    execute(group, "global_atomic_pk_add_f16 v[0:1], v2, off")
    assert contents[:4].view(np.uint32)[0] == 0x54005800
    contents[:8] = 0
    set_v64(group, 2, np.arange(64, dtype=np.float64).view(np.uint64))
    execute(group, "global_atomic_add_f64 v[0:1], v[2:3], off")
    assert contents[:8].view(np.float64)[0] == 2016
    execute(group, "global_atomic_min_f64 v[0:1], v[2:3], off")
    assert contents[:8].view(np.float64)[0] == 0
    execute(group, "global_atomic_max_f64 v[0:1], v[2:3], off")
    assert contents[:8].view(np.float64)[0] == 63


def test_atomics_must_be_aligned(memory, data):
    address, _ = data
    group = make_group(memory=memory)
    set_v64(group, 0, np.full(64, address + 4))
    execute(group, "global_atomic_add v[0:1], v2, off")
    with pytest.raises(KernelFault, match="not aligned to 8"):
        execute(group, "global_atomic_add_x2 v[0:1], v[2:3], off")


@pytest.mark.parametrize(("suffix", "nbytes", "stride"), [("dword", 4, 4), ("dwordx3", 12, 16), ("dwordx4", 16, 16)])
def test_load_to_lds(memory, data, suffix, nbytes, stride):
    """The immediate counts in both addresses; the lane number is the physical one; what is not written keeps its value."""
    address, contents = data
    active = 0xFFFFFFFFFFFFFF0F
    group = make_group(workgroups=2, waves=2, lds_bytes=4096, memory=memory, active=active)
    offset = (np.arange(4)[:, None] * 64 + LANE) * 20
    set_v64(group, 0, address + offset)
    group.state.sgpr[124] = np.where(np.arange(4) < 2, 0, 2048) | 3  # the low two bits are ignored
    execute(group, f"global_load_lds_{suffix} v[0:1], off offset:16")
    expected = np.full((2, 4096), 0xFF, np.uint8)
    for wave in range(4):
        for lane in range(64):
            if active >> lane & 1:
                start = (2048 if wave >= 2 else 0) + 16 + lane * stride
                expected[wave % 2, start : start + nbytes] = contents[offset[wave, lane] + 16 : offset[wave, lane] + 16 + nbytes]
    np.testing.assert_array_equal(group.state.lds.view(np.uint8), expected)


@pytest.mark.parametrize(("name", "nbytes", "signed"), [("ubyte", 1, False), ("sbyte", 1, True), ("ushort", 2, False), ("sshort", 2, True)])
def test_narrow_load_to_lds_fills_dwords(memory, data, name, nbytes, signed):
    address, contents = data
    group = make_group(lds_bytes=256, memory=memory)
    set_v64(group, 0, address + LANE * 3)
    group.state.sgpr[124] = 0
    execute(group, f"global_load_lds_{name} v[0:1], off")
    for lane in range(64):
        raw = int.from_bytes(contents[lane * 3 : lane * 3 + nbytes].tobytes(), "little")
        assert group.state.lds[0, lane] == (sign_extended(raw, 8 * nbytes) if signed else raw)


@pytest.mark.parametrize(("m0", "offset"), [(16, 0), (0, 16), (1008, 0), (0xFFFFFFF0, 0)])
def test_load_to_lds_past_the_end_is_a_fault(memory, data, m0, offset):
    address, _ = data
    group = make_group(lds_bytes=1024, memory=memory)
    set_v64(group, 0, address + LANE * 16)
    group.state.sgpr[124] = m0
    with pytest.raises(KernelFault, match="LDS DMA write of 16 bytes outside the workgroup's 1024 bytes"):
        execute(group, f"global_load_lds_dwordx4 v[0:1], off offset:{offset}")
