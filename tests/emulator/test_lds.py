"""LDS instructions, against bytes and lane-by-lane models in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from waves import ACCUM_OFFSET, execute, get_v, make_group, random_bytes, set_v, set_v64

from mla_rt.errors import KernelFault, UnknownInstruction

LANE = np.arange(64)
SIZE = 4096


def filled(*, workgroups: int = 1, waves: int = 1, size: int = SIZE, active: int = 2**64 - 1):
    """A group whose LDS holds random bytes; and a view of these bytes, [workgroups, size]."""
    group = make_group(workgroups=workgroups, waves=waves, lds_bytes=size, active=active)
    contents = group.state.lds.view(np.uint8)
    contents[:] = random_bytes(11, contents.size).reshape(contents.shape)
    return group, contents


def number(row: np.ndarray, start: int, nbytes: int, *, signed: bool = False) -> int:
    return int.from_bytes(row[start : start + nbytes].tobytes(), "little", signed=signed)


@pytest.mark.parametrize("step", [16, 4, 12])
@pytest.mark.parametrize(("name", "count"), [("b32", 1), ("b64", 2), ("b96", 3), ("b128", 4)])
def test_read(name, count, step):
    """Each workgroup reads its own LDS."""
    group, contents = filled(workgroups=3, waves=2)
    address = LANE * step + np.arange(6)[:, None] * 32
    set_v(group, 0, address)
    registers = "v4" if count == 1 else f"v[4:{3 + count}]"
    execute(group, f"ds_read_{name} {registers}, v0 offset:516")
    for wave in range(6):
        for lane in (0, 1, 31, 63):
            for i in range(count):
                assert get_v(group, 4 + i)[wave, lane] == number(contents[wave % 3], address[wave, lane] + 516 + 4 * i, 4)


@pytest.mark.parametrize(
    ("name", "nbytes", "signed", "half"),
    [
        ("u8", 1, False, None),
        ("i8", 1, True, None),
        ("u16", 2, False, None),
        ("i16", 2, True, None),
        ("u8_d16", 1, False, 0),
        ("u8_d16_hi", 1, False, 1),
        ("i8_d16", 1, True, 0),
        ("i8_d16_hi", 1, True, 1),
        ("u16_d16", 2, False, 0),
        ("u16_d16_hi", 2, False, 1),
    ],
)
def test_read_narrow(name, nbytes, signed, half):
    group, contents = filled()
    set_v(group, 0, LANE * 6)
    set_v(group, 1, 0xABCD1234)
    execute(group, f"ds_read_{name} v1, v0 offset:2")
    for lane in range(64):
        value = number(contents[0], lane * 6 + 2, nbytes, signed=signed) & 0xFFFFFFFF
        expected = value if half is None else 0xABCD0000 | value & 0xFFFF if half == 0 else 0x1234 | (value & 0xFFFF) << 16
        assert get_v(group, 1)[0, lane] == expected


@pytest.mark.parametrize(("name", "count", "unit"), [("read2_b32", 1, 4), ("read2st64_b32", 1, 256), ("read2_b64", 2, 8), ("read2st64_b64", 2, 512)])
def test_read2(name, count, unit):
    group, contents = filled()
    set_v(group, 0, LANE * 8)
    execute(group, f"ds_{name} v[0:{2 * count - 1}], v0 offset0:3 offset1:1")
    for lane in range(64):
        expected = [number(contents[0], lane * 8 + offset * unit + 4 * i, 4) for offset in (3, 1) for i in range(count)]
        assert [int(get_v(group, i)[0, lane]) for i in range(2 * count)] == expected


@pytest.mark.parametrize("step", [16, 4])
@pytest.mark.parametrize(("name", "count"), [("b32", 1), ("b64", 2), ("b96", 3), ("b128", 4)])
def test_write_highest_lane_wins(name, count, step):
    active = 0x7FFFFFFFFFFFFFFE
    group, contents = filled(workgroups=2, active=active)
    expected = contents.copy()
    values = random_bytes(12, 64 * 4 * count).view(np.uint32).reshape(64, count)
    set_v(group, 0, LANE * step)
    set_v(group, 4, *values.T)
    registers = "v4" if count == 1 else f"v[4:{3 + count}]"
    execute(group, f"ds_write_{name} v0, {registers} offset:64")
    for lane in range(1, 63):
        expected[:, lane * step + 64 : lane * step + 64 + 4 * count] = values[lane].view(np.uint8)
    np.testing.assert_array_equal(contents, expected)


@pytest.mark.parametrize(("name", "nbytes", "half"), [("b8", 1, 0), ("b16", 2, 0), ("b8_d16_hi", 1, 1), ("b16_d16_hi", 2, 1)])
def test_write_narrow(name, nbytes, half):
    group, contents = filled()
    expected = contents.copy()
    values = random_bytes(13, 256).view(np.uint32)
    set_v(group, 0, LANE * 2)
    set_v(group, 1, values)
    execute(group, f"ds_write_{name} v0, v1 offset:10")
    for lane in range(64):
        part = int(values[lane]) >> 16 * half & ((1 << 8 * nbytes) - 1)
        expected[0, lane * 2 + 10 : lane * 2 + 10 + nbytes] = list(part.to_bytes(nbytes, "little"))
    np.testing.assert_array_equal(contents, expected)


@pytest.mark.parametrize(
    ("name", "count", "unit"), [("write2_b32", 1, 4), ("write2st64_b32", 1, 256), ("write2_b64", 2, 8), ("write2st64_b64", 2, 512)]
)
def test_write2(name, count, unit):
    group, contents = filled()
    expected = contents.copy()
    values = random_bytes(14, 64 * 4 * 2 * count).view(np.uint32).reshape(64, 2 * count)
    step = (4 if "st64" in name else 16) * count  # so that no two lanes write one dword
    set_v(group, 0, LANE * step)
    set_v(group, 4, *values.T)
    first, second = ("v4", "v5") if count == 1 else ("v[4:5]", "v[6:7]")
    execute(group, f"ds_{name} v0, {first}, {second} offset0:2 offset1:5")
    for lane in range(64):
        for i, offset in enumerate((2, 5)):
            start = lane * step + offset * unit
            expected[0, start : start + 4 * count] = values[lane, i * count : (i + 1) * count].view(np.uint8)
    np.testing.assert_array_equal(contents, expected)


def test_accumulator_registers_and_offset_wrap():
    group, contents = filled()
    set_v(group, 0, LANE * 8 - 64)  # negative for the first lanes; the compiler folds the constant that makes the sum positive
    execute(group, "ds_read_b64 a[0:1], v0 offset:64\nds_write_b32 v0, a0 offset:2112")
    for lane in range(64):
        assert get_v(group, ACCUM_OFFSET)[0, lane] == number(contents[0], lane * 8, 4)
        assert number(contents[0], lane * 8 + 2048, 4) == number(contents[0], lane * 8, 4)


@pytest.mark.parametrize(
    ("text", "reach"),
    [
        ("ds_read_b128 v[4:7], v0", 16),
        ("ds_read_u8 v4, v0", 1),
        ("ds_write_b64 v0, v[4:5]", 8),
        ("ds_write_b16 v0, v4", 2),
        ("ds_read2_b32 v[4:5], v0 offset1:3", 16),
        ("ds_add_u32 v0, v4", 4),
        ("ds_read_b64_tr_b16 v[4:5], v0", 8),
    ],
)
def test_out_of_bounds_is_a_fault(text, reach):
    group, _ = filled(size=1000, workgroups=2)
    last = (1000 - reach) & -8 if "tr" in text else 1000 - reach
    set_v(group, 0, np.where(LANE == 40, last, 0))
    execute(group, text)
    set_v(group, 0, np.where(LANE == 40, last + 8, 0))
    with pytest.raises(KernelFault, match=r"outside the workgroup's 1000 bytes .*lane 40"):
        execute(group, text)
    set_v(group, 0, np.where(LANE == 40, 0xFFFFFFF8, 0))
    with pytest.raises(KernelFault, match="outside the workgroup's"):
        execute(group, text)


@pytest.mark.parametrize(("text", "good", "bad"), [
    ("ds_read_b32 v4, v0", 4, 2), ("ds_read_b128 v[4:7], v0", 4, 6), ("ds_write_b16 v0, v4", 2, 3),
    ("ds_read_b64_tr_b8 v[4:5], v0", 8, 4), ("ds_add_u64 v0, v[4:5]", 8, 4),
])  # fmt: skip
def test_misaligned_is_a_fault(text, good, bad):
    group, _ = filled()
    set_v(group, 0, np.full(64, good))
    execute(group, text)
    set_v(group, 0, np.where(LANE == 7, bad, good))
    with pytest.raises(KernelFault, match=r"not aligned to .*lane 7"):
        execute(group, text)


def test_kernel_without_lds():
    group = make_group(lds_bytes=0)
    set_v(group, 0, 0)
    with pytest.raises(KernelFault, match="outside the workgroup's 0 bytes"):
        execute(group, "ds_read_b32 v4, v0")
    execute(make_group(lds_bytes=0, active=0), "ds_read_b32 v4, v0\nds_write_b128 v0, v[4:7]\nds_read_b64_tr_b16 v[4:5], v0\nds_add_u32 v0, v4")


def element(row: np.ndarray, address: int, index: int, bits: int) -> int:
    return number(row, address, 12) >> (index * bits) & ((1 << bits) - 1)


@pytest.mark.parametrize(("name", "bits", "dwords"), [("b64_tr_b16", 16, 2), ("b64_tr_b8", 8, 2), ("b64_tr_b4", 4, 2), ("b96_tr_b6", 6, 3)])
def test_transposed_reads(name, bits, dwords):
    """In each group of 16 lanes: number the elements in the order of the lanes whose addresses supply them; lane t gets t, 16 + t, 32 + t, …"""
    group, contents = filled(workgroups=2)
    rng = np.random.default_rng(3)
    address = (rng.permutation(128)[:128].reshape(2, 64) * 16).astype(np.int64)
    set_v(group, 0, address)
    execute(group, f"ds_read_{name} v[4:{3 + dwords}], v0 offset:8")
    per_lane = 32 * dwords // bits
    for wave in range(2):
        for lane in range(64):
            result = sum(int(get_v(group, 4 + i)[wave, lane]) << 32 * i for i in range(dwords))
            for j in range(per_lane):
                source = 16 * j + lane % 16
                supplier = lane // 16 * 16 + source // per_lane
                expected = element(contents[wave], int(address[wave, supplier]) + 8, source % per_lane, bits)
                assert result >> (j * bits) & ((1 << bits) - 1) == expected


def test_transposed_read_of_16_bit_columns():
    """A 64 x 16 matrix of 16-bit values in rows of 32 bytes: lane t of a group gets column t of four rows."""
    group, contents = filled()
    matrix = np.arange(1024, dtype=np.uint16).reshape(64, 16)
    contents[0, :2048] = matrix.view(np.uint8).ravel()
    # Lanes 4j..4j+3 of a group address row j, 8 bytes each.
    set_v(group, 0, (LANE // 4) * 32 + (LANE % 4) * 8)
    execute(group, "ds_read_b64_tr_b16 v[4:5], v0")
    for lane in range(64):
        first = lane // 16 * 4
        low, high = int(get_v(group, 4)[0, lane]), int(get_v(group, 5)[0, lane])
        assert [low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16] == matrix[first : first + 4, lane % 16].tolist()


def test_transposed_read_needs_whole_waves():
    group, _ = filled(active=2**64 - 2)
    set_v(group, 0, 0)
    with pytest.raises(KernelFault, match="only some lanes active"):
        execute(group, "ds_read_b64_tr_b16 v[4:5], v0")


def test_bpermute_and_permute():
    active = ~(1 << 10) & 2**64 - 1
    group = make_group(workgroups=2, active=active)
    source = np.random.default_rng(5).integers(0, 64, (2, 64))
    value = random_bytes(6, 512).view(np.uint32).reshape(2, 64)
    set_v(group, 0, (source - 1) * 4 + 256 * 3)  # lane numbers count modulo 64
    set_v(group, 1, value)
    set_v(group, 2, 0x77777777)
    execute(group, "ds_bpermute_b32 v2, v0, v1 offset:4")
    for wave in range(2):
        for lane in range(64):
            named = int(source[wave, lane])
            expected = 0x77777777 if lane == 10 else 0 if named == 10 else value[wave, named]
            assert get_v(group, 2)[wave, lane] == expected
    execute(group, "ds_permute_b32 v3, v0, v1 offset:4")
    for wave in range(2):
        received = np.zeros(64, np.uint32)
        for lane in range(64):
            if lane != 10:
                received[source[wave, lane]] = value[wave, lane]
        received[10] = 0xFFFFFFFF  # inactive: keeps what it held
        np.testing.assert_array_equal(get_v(group, 3)[wave], received)


@pytest.mark.parametrize(
    ("pattern", "source"),
    [
        ("swizzle(QUAD_PERM,3,3,1,0)", lambda lane: lane - lane % 4 + (3, 3, 1, 0)[lane % 4]),
        ("swizzle(SWAP,16)", lambda lane: lane ^ 16),
        ("swizzle(REVERSE,8)", lambda lane: lane ^ 7),
        ("swizzle(BROADCAST,8,5)", lambda lane: lane - lane % 8 + 5),
        ('swizzle(BITMASK_PERM,"0p1ii")', lambda lane: (lane & 0b101011 | 0b100) ^ 3),
    ],
)
def test_swizzle(pattern, source):
    group = make_group()
    set_v(group, 1, LANE + 100)
    execute(group, f"ds_swizzle_b32 v0, v1 offset:{pattern}")
    assert get_v(group, 0)[0].tolist() == [100 + source(lane) for lane in range(64)]


def test_swizzle_from_inactive_lanes_reads_zero():
    group = make_group(active=0b0111)
    set_v(group, 0, 5)
    set_v(group, 1, LANE + 100)
    execute(group, "ds_swizzle_b32 v0, v1 offset:swizzle(SWAP,1)")
    assert get_v(group, 0)[0, :5].tolist() == [101, 100, 0, 5, 5]
    with pytest.raises(UnknownInstruction, match="rotate or FFT"):
        execute(group, "ds_swizzle_b32 v0, v1 offset:0xe000")


MODEL = {
    "add_u": lambda m, d, bits: (m + d) % (1 << bits),
    "sub_u": lambda m, d, bits: (m - d) % (1 << bits),
    "rsub_u": lambda m, d, bits: (d - m) % (1 << bits),
    "inc_u": lambda m, d, bits: 0 if m >= d else m + 1,
    "dec_u": lambda m, d, bits: d if m == 0 or m > d else m - 1,
    "min_i": lambda m, d, bits: min(m, d, key=lambda x: x - (x >> (bits - 1) << bits)),
    "max_i": lambda m, d, bits: max(m, d, key=lambda x: x - (x >> (bits - 1) << bits)),
    "min_u": lambda m, d, bits: min(m, d),
    "max_u": lambda m, d, bits: max(m, d),
    "and_b": lambda m, d, bits: m & d,
    "or_b": lambda m, d, bits: m | d,
    "xor_b": lambda m, d, bits: m ^ d,
    "wrxchg_b": lambda m, d, bits: d,
}


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", MODEL)
def test_integer_atomics_serialise_in_lane_order(name, bits):
    size, dtype = bits // 8, np.dtype(f"u{bits // 8}")
    group, contents = filled(workgroups=2)
    cells = contents.view(dtype)
    start = cells[:, :4].copy()
    target = np.stack([LANE * 7 % 4, LANE % 3])
    operand = random_bytes(15, 128 * size).view(dtype).reshape(2, 64)
    found, model = np.zeros((2, 64), dtype), start.tolist()
    for wave in range(2):
        for lane in range(64):
            found[wave, lane] = model[wave][target[wave, lane]]
            model[wave][target[wave, lane]] = MODEL[name](model[wave][target[wave, lane]], int(operand[wave, lane]), bits)
    set_v(group, 0, target * size)
    set_v64(group, 2, operand)
    set_v64(group, 4, 0)
    operation, kind = name.split("_")
    destination, source = ("v4", "v2") if bits == 32 else ("v[4:5]", "v[2:3]")
    execute(group, f"ds_{operation}_rtn_{kind}{bits} {destination}, v0, {source}")
    assert cells[:, :4].tolist() == model
    returned = get_v(group, 4).astype(np.uint64) | (get_v(group, 5).astype(np.uint64) << np.uint64(32) if bits == 64 else np.uint64(0))
    np.testing.assert_array_equal(returned, found)
    if name != "wrxchg_b":
        cells[:, :4] = start
        execute(group, f"ds_{operation}_{kind}{bits} v0, {source}")
        assert cells[:, :4].tolist() == model


def test_compare_and_swap_takes_the_compared_value_first():
    group, contents = filled()
    contents[0, :8] = 0
    set_v(group, 0, 0)
    set_v(group, 1, LANE)
    set_v(group, 2, LANE + 1)
    execute(group, "ds_cmpst_rtn_b32 v3, v0, v1, v2")
    np.testing.assert_array_equal(get_v(group, 3)[0], LANE)
    assert number(contents[0], 0, 4) == 64


def test_float_atomics():
    group, contents = filled()
    contents[0, :64] = 0
    set_v(group, 0, 0)
    set_v(group, 1, np.full(64, 0.5, np.float32).view(np.uint32))
    execute(group, "ds_add_rtn_f32 v2, v0, v1\nds_add_f32 v0, v1")
    np.testing.assert_array_equal(get_v(group, 2, np.float32)[0], LANE * 0.5)
    assert contents[0, :4].view(np.float32)[0] == 64
    set_v(group, 1, (LANE - 10).astype(np.float32).view(np.uint32))
    execute(group, "ds_min_f32 v0, v1 offset:4\nds_max_f32 v0, v1 offset:8")
    assert contents[0, 4:12].view(np.float32).tolist() == [-10, 53]
    set_v(group, 1, 0x3F804000)
    execute(group, "ds_pk_add_bf16 v0, v1 offset:16")
    assert number(contents[0], 16, 4) == 0x42804300
    set_v64(group, 4, np.full(64, 0.25).view(np.uint64))
    execute(group, "ds_add_rtn_f64 v[6:7], v0, v[4:5] offset:24")
    assert contents[0, 24:32].view(np.float64)[0] == 16
    assert get_v(group, 7)[0, 4] == 0x3FF00000  # lane 4 found 4 * 0.25
