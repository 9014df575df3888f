"""Whole kernels in assembly: divergence, loops, barriers, the order of waves, registers at the start, faults."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from asm import assemble, descriptor, launch

from mla_rt.emulator.descriptor import Descriptor
from mla_rt.emulator.machine import Dispatch, run
from mla_rt.emulator.memory import Memory
from mla_rt.errors import KernelFault, UnknownInstruction


@pytest.fixture
def memory():
    with_pages = Memory()
    yield with_pages
    with_pages.close()


def store(result: str, address: str = "v1") -> str:
    """Store a register of each work-item at s[6:7] + the byte offset in `address`, then end."""
    return f"global_store_dword {address}, {result}, s[6:7]\ns_endpgm\n"


# s[6:7] = output, v1 = 4 * global work-item index in a grid of blocks of 2 ** s8 work-items
PROLOGUE = """
s_load_dwordx2 s[6:7], s[0:1], 0x0
s_load_dword s8, s[0:1], 0x8
s_waitcnt lgkmcnt(0)
s_lshl_b32 s9, s2, s8
v_add_u32_e32 v1, s9, v0
v_lshlrev_b32_e32 v1, 2, v1
"""


def run_kernel(body: str, memory: Memory, *, workgroups: int = 1, items: int = 64, words: int | None = None, **options) -> np.ndarray:
    """The output, uint32 [workgroups * items] (or `words`), of the prologue and a body."""
    count = words or workgroups * items
    out = memory.allocate(4 * count)
    arguments = struct.pack("<QI", out, items.bit_length() - 1)
    launch(assemble(PROLOGUE + body), arguments, memory, grid=(workgroups, 1, 1), block=(items, 1, 1), **options)
    result = memory.bytes_at(out, 4 * count).view(np.uint32).copy()
    memory.free(out)
    return result


# Lane n loops n times (lane 0 once): the trip count differs in every lane and wave.
TRIANGLE = """
v_mov_b32_e32 v2, 0
v_mov_b32_e32 v3, 0
s_mov_b64 s[10:11], exec
loop:
v_add_u32_e32 v2, v2, v3
v_add_u32_e32 v3, 1, v3
v_cmp_lt_u32_e32 vcc, v3, v0
s_and_b64 exec, exec, vcc
s_cbranch_execnz loop
s_mov_b64 exec, s[10:11]
""" + store("v2")


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("max_resident_waves", [1, 4, 512])
def test_loop_with_different_trip_counts(memory, seed, max_resident_waves):
    """Batches of one workgroup, of one, and of all five."""
    got = run_kernel(TRIANGLE, memory, workgroups=5, items=256, seed=seed, max_resident_waves=max_resident_waves)
    item = np.arange(256)
    assert np.array_equal(got.reshape(5, 256), np.broadcast_to(item * (item - 1) // 2, (5, 256)))


def test_waves_part_and_meet(memory):
    """Even waves take one side of a branch and odd waves the other; a loop around it runs (wave + 1) times."""
    body = """
v_readfirstlane_b32 s10, v0
s_lshr_b32 s10, s10, 6
s_mov_b32 s11, 0
s_mov_b32 s12, 0
again:
s_bitcmp1_b32 s10, 0
s_cbranch_scc1 odd
s_add_u32 s12, s12, 100
s_branch joined
odd:
s_add_u32 s12, s12, 1
joined:
s_add_u32 s11, s11, 1
s_cmp_le_u32 s11, s10
s_cbranch_scc1 again
v_mov_b32_e32 v2, s12
""" + store("v2")
    got = run_kernel(body, memory, workgroups=3, items=512)
    wave = np.arange(8)
    expected = np.where(wave % 2 == 1, 1, 100) * (wave + 1)
    assert np.array_equal(got.reshape(3, 8, 64), np.broadcast_to(expected[None, :, None], (3, 8, 64)))


def test_converged_waves_execute_together(memory):
    """A branch that parts the waves costs its two sides once each, not the rest of the kernel twice."""
    body = """
v_readfirstlane_b32 s10, v0
s_cmp_eq_u32 s10, 0
s_cbranch_scc1 skip
v_mov_b32_e32 v2, 7
skip:
""" + "v_add_u32_e32 v3, v3, v3\n" * 50 + store("v1")  # fmt: skip
    out = memory.allocate(4 * 128)
    arguments = struct.pack("<QI", out, 7)
    code = assemble(PROLOGUE + body)
    launch(code, arguments, memory, block=(128, 1, 1), max_group_instructions=6 + 3 + 1 + 50 + 2)
    with pytest.raises(KernelFault):
        launch(code, arguments, memory, block=(128, 1, 1), max_group_instructions=6 + 3 + 1 + 50 + 1)


# Each wave writes its number to LDS, then reads that of the wave before it.
EXCHANGE = """
v_lshlrev_b32_e32 v4, 2, v0
ds_write_b32 v4, v0
s_waitcnt lgkmcnt(0)
{barrier}
v_add_u32_e32 v5, 0xffffff00, v4
v_and_b32_e32 v5, 0x3ff, v5
ds_read_b32 v2, v5
s_waitcnt lgkmcnt(0)
""" + store("v2")


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_barrier_orders_lds(memory, seed):
    got = run_kernel(EXCHANGE.format(barrier="s_barrier"), memory, workgroups=2, items=256, lds_bytes=1024, seed=seed)
    assert np.array_equal(got.reshape(2, 256), np.broadcast_to((np.arange(256) - 64) % 256, (2, 256)))


def test_a_seed_reveals_a_missing_barrier(memory):
    """Without the barrier some wave reads before its neighbour wrote, and finds the poison that LDS starts with, in every order of waves."""
    for seed in range(5):
        got = run_kernel(EXCHANGE.format(barrier=""), memory, workgroups=2, items=256, lds_bytes=1024, seed=seed)
        assert (got == 0xFFFFFFFF).any()


def test_seeds_differ_in_the_order_of_waves(memory):
    """All waves store their number at one place: the last one to run is seen."""
    body = "v_readfirstlane_b32 s10, v0\nv_mov_b32_e32 v2, s10\nv_mov_b32_e32 v1, 0\n" + store("v2")
    last = {int(run_kernel(body, memory, items=256, seed=seed)[0]) for seed in range(12)}
    assert len(last) > 1 and last <= {0, 64, 128, 192}


def test_seeded_runs_repeat(memory):
    first, second = (run_kernel(EXCHANGE.format(barrier=""), memory, workgroups=2, items=256, lds_bytes=1024, seed=3) for _ in range(2))
    assert np.array_equal(first, second)


def test_ended_waves_do_not_hold_a_barrier(memory):
    """The first wave ends before the barrier that the others wait at."""
    body = """
v_readfirstlane_b32 s10, v0
s_cmp_eq_u32 s10, 0
s_cbranch_scc1 done
s_barrier
global_store_dword v1, v0, s[6:7]
done:
s_endpgm
"""
    got = run_kernel(body, memory, items=256)
    assert np.array_equal(got, [0xFFFFFFFF] * 64 + list(range(64, 256)))


def test_start_registers(memory):
    """Workgroup ids in s2..s4, work-item ids packed in v0, kernel arguments behind s[0:1]; partial waves; poison elsewhere."""
    body = """
s_load_dwordx2 s[6:7], s[0:1], 0x0
s_waitcnt lgkmcnt(0)
s_mul_i32 s8, s4, 6
s_mul_i32 s9, s3, 2
s_add_u32 s8, s8, s9
s_add_u32 s8, s8, s2
v_bfe_u32 v1, v0, 10, 10
v_bfe_u32 v2, v0, 20, 10
v_and_b32_e32 v3, 0x3ff, v0
v_mul_u32_u24_e32 v1, 5, v1
v_mul_u32_u24_e32 v2, 35, v2
v_add3_u32 v1, v1, v2, v3
s_mulk_i32 s8, 0x46
v_add_u32_e32 v1, s8, v1
v_lshlrev_b32_e32 v1, 3, v1
v_add_u32_e32 v4, v30, v31
v_mov_b32_e32 v5, v0
global_store_dwordx2 v1, v[4:5], s[6:7]
s_endpgm
"""
    grid, block = (2, 3, 4), (5, 7, 2)
    count = 24 * 70
    out = memory.allocate(8 * (count + 64))
    launch(assemble(body), struct.pack("<Q", out), memory, grid=grid, block=block, dims=3)
    got = memory.bytes_at(out, 8 * (count + 64)).view(np.uint32).reshape(-1, 2)
    z, y, x = np.meshgrid(np.arange(2), np.arange(7), np.arange(5), indexing="ij")
    packed = (x | y << 10 | z << 20).reshape(-1)
    assert np.array_equal(got[:count, 1], np.tile(packed, 24))
    assert (got[:count, 0] == 0xFFFFFFFE).all()  # poison + poison
    assert (got[count:] == 0xFFFFFFFF).all()  # nothing behind the last work-item


def test_functions_are_called_and_return(memory):
    body = """
s_getpc_b64 s[10:11]
s_add_u32 s10, s10, 16
s_addc_u32 s11, s11, 0
s_swappc_b64 s[12:13], s[10:11]
s_branch finish
v_mov_b32_e32 v2, 42
s_setpc_b64 s[12:13]
finish:
""" + store("v2")
    assert (run_kernel(body, memory) == 42).all()


def test_unknown_instruction_names_kernel_pc_and_bytes(memory):
    body = "s_nop 0\n.long 0xbe807f00\n" + store("v1")
    with pytest.raises(UnknownInstruction, match=r"test_kernel: .*pc 0x24, bytes 00 7f 80 be"):
        run_kernel(body, memory)
    # Not reached, not a fault.
    assert run_kernel("s_branch over\n.long 0xbe807f00\nover:\n" + store("v1"), memory)[1] == 4


def test_running_off_the_code(memory):
    with pytest.raises(UnknownInstruction, match="the code ends"):
        launch(assemble("s_nop 0\n"), b"", memory)


def test_endless_loop(memory):
    with pytest.raises(KernelFault, match=r"more than 10000 instructions.*pc 0x24, workgroup \(0, 0, 0\)"):
        run_kernel("s_nop 0\nforever:\ns_branch forever\n", memory, max_group_instructions=10_000)


def test_register_beyond_the_declared(memory):
    with pytest.raises(KernelFault, match="register beyond"):
        run_kernel("v_mov_b32_e32 v70, 0\n" + store("v1"), memory)


def test_fault_names_the_place(memory):
    """A store past the end, by one lane of the second workgroup."""
    body = """
v_cmp_eq_u32_e32 vcc, 5, v0
v_mov_b32_e32 v2, 0x10000000
v_cndmask_b32_e32 v2, v1, v2, vcc
s_cmp_eq_u32 s2, 1
s_cselect_b64 vcc, -1, 0
v_cndmask_b32_e32 v2, v1, v2, vcc
""" + store("v0", "v2")
    with pytest.raises(KernelFault, match=r"test_kernel: .*pc 0x3c, workgroup \(1, 0, 0\), wave 0, lane 5"):
        run_kernel(body, memory, workgroups=2)


def test_report_and_progress(memory):
    calls: list[tuple[int, int]] = []
    out = memory.allocate(4 * 64 * 8)
    code = assemble(PROLOGUE + store("v0"))
    report = launch(code, struct.pack("<QI", out, 6), memory, grid=(8, 1, 1), max_resident_waves=2, progress=lambda *at: calls.append(at))
    assert report.num_instructions == 8 * 8 and report.seconds > 0
    assert calls[-1] == (8, 8) and all(0 <= done <= total == 8 for done, total in calls)


def test_code_that_changed_is_decoded_anew(memory):
    """Another kernel at the address of one that ran before."""
    for value in (1, 2, 3):
        assert (run_kernel(f"v_mov_b32_e32 v2, {value}\n" + store("v2"), memory) == value).all()


# The descriptor that clang writes for a small kernel (rsrc1 0xaf0080, rsrc2 0x1384, properties 8), with sizes put in.
def raw_descriptor(*, rsrc1: int = 0xAF0080, properties: int = 8, scratch: int = 0) -> bytes:
    raw = bytearray(64)
    struct.pack_into("<IIIIq", raw, 0, 4096, scratch, 24, 0, -0x1000)
    struct.pack_into("<IIIHH", raw, 44, 3, rsrc1, 0x1384, properties, 0)
    return bytes(raw)


def test_descriptor():
    parsed = Descriptor.parse(raw_descriptor())
    assert (parsed.lds_bytes, parsed.scratch_bytes, parsed.kernarg_bytes, parsed.entry_offset) == (4096, 0, 24, -0x1000)
    assert (parsed.num_vgprs, parsed.accum_offset, parsed.float_mode, parsed.ieee, parsed.dx10_clamp) == (8, 16, 0xF0, True, True)
    assert parsed.user_sgprs == (("kernarg_segment_ptr", 2),) and parsed.num_user_sgprs == 2
    assert parsed.workgroup_ids == (True, True, True) and parsed.workitem_id_dims == 3
    with pytest.raises(ValueError, match="64 bytes"):
        Descriptor.parse(bytes(60))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (raw_descriptor(rsrc1=0xAD0080), "float mode 0xd0"),
        (raw_descriptor(rsrc1=0xAF1080), "float mode 0xf1"),
        (raw_descriptor(properties=0xA), "dispatch_ptr"),
        (raw_descriptor(scratch=16), "scratch"),
    ],
)
def test_what_is_not_emulated_is_refused(memory, raw, message):
    dispatch = Dispatch("test_kernel", 0, 0, Descriptor.parse(raw), (1, 1, 1), (64, 1, 1), 0)
    with pytest.raises(UnknownInstruction, match=message):
        run(dispatch, memory)


@pytest.mark.parametrize(("grid", "block", "dynamic"), [((0, 1, 1), (64, 1, 1), 0), ((1, 1, 1), (2048, 1, 1), 0), ((1, 1, 1), (64, 1, 1), 163841)])
def test_impossible_launches(memory, grid, block, dynamic):
    with pytest.raises(ValueError, match="test_kernel"):
        run(Dispatch("test_kernel", 0, 0, descriptor(), grid, block, 0, dynamic), memory)
