"""Counters against counts made another way: by hand, and by an independent trace of the product's kernels, instruction class by class."""

from __future__ import annotations

import importlib
import struct
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from asm import assemble, descriptor
from single_step import class_of_mnemonic, mnemonics, single_step

from build_kernels import compile_with_ziglang
from mla_rt.decode import decode
from mla_rt.device import open_device
from mla_rt.emulator.counters import Counters
from mla_rt.emulator.instruction_class import CLASSES
from mla_rt.emulator.machine import Dispatch, run
from mla_rt.emulator.memory import Memory
from mla_rt.emulator.observer import Observer
from mla_rt.formats import quantize_fp8, quantize_mxfp4

HIP = Path(__file__).resolve().parent.parent.parent / "src" / "hip"


@pytest.fixture
def memory():
    with_pages = Memory()
    yield with_pages
    with_pages.close()


def count(code: bytes, arguments: bytes, memory: Memory, *, grid=(1, 1, 1), block=(64, 1, 1), lds_bytes=0, keep_trace=False, also=(), **options):
    image, kernarg = memory.allocate(len(code) + 64), memory.allocate(max(len(arguments), 8))
    memory.bytes_at(image, len(code))[:] = np.frombuffer(code, np.uint8)
    memory.bytes_at(kernarg, len(arguments))[:] = np.frombuffer(arguments, np.uint8)
    dispatch = Dispatch("kernel", image, image, descriptor(lds_bytes=lds_bytes), grid, block, kernarg)
    counters = Counters(dispatch, keep_trace=keep_trace)
    report = run(dispatch, memory, observers=(counters, *also), **options)
    counts = counters.counts()
    assert counts.num_instructions == report.num_instructions
    return counts


# Every class once or more; each wave loops (its number + 2) times.
EVERY_CLASS = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshrrev_b32_e32 v1, 6, v0
v_readfirstlane_b32 s6, v1
s_add_i32 s6, s6, 2
v_lshlrev_b32_e32 v2, 4, v0
s_waitcnt lgkmcnt(0)
loop:
v_exp_f32_e32 v3, v3
s_nop 0
v_mfma_f32_16x16x32_bf16 v[8:11], v[12:15], v[16:19], v[8:11]
v_mfma_f32_16x16x128_f8f6f4 v[8:11], v[12:15], v[16:23], v[8:11] cbsz:4
ds_write_b128 v2, v[12:15]
s_waitcnt lgkmcnt(0)
ds_read_b64 v[4:5], v2
s_sub_i32 s6, s6, 1
s_cmp_lg_u32 s6, 0
s_cbranch_scc1 loop
s_barrier
global_load_dwordx4 v[12:15], v2, s[4:5]
s_waitcnt vmcnt(0)
global_atomic_add v2, v3, s[4:5]
global_store_dword v2, v3, s[4:5]
v_accvgpr_write_b32 a0, v3
s_endpgm
"""


def test_a_kernel_counted_by_hand(memory):
    buffer = memory.allocate(4096)
    counts = count(assemble(EVERY_CLASS), struct.pack("<Q", buffer), memory, grid=(3, 1, 1), block=(192, 1, 1), lds_bytes=4096, keep_trace=True)
    loops = np.tile(np.array([2, 3, 4]), (3, 1))
    expected = {
        "valu": 4 + 0 * loops, "transcendental": loops, "mfma": 2 * loops, "salu": 1 + 2 * loops, "smem": 1 + 0 * loops, "lds": 2 * loops,
        "vmem": 3 + 0 * loops, "wait": 2 + loops, "barrier": 1 + 0 * loops, "branch": loops, "other": 1 + loops,
    }  # fmt: skip
    assert {name: counts.of_class(name).tolist() for name in CLASSES} == {name: number.tolist() for name, number in expected.items()}
    assert counts.by_class == {name: int(number.sum()) for name, number in expected.items()}
    assert counts.kind_totals["v_mfma_f32_16x16x32_bf16"] == 27 and counts.kind_totals["v_mfma_f32_16x16x128_f8f6f4 fp4×fp8"] == 27
    assert counts.kind_totals["s_waitcnt lgkmcnt"] == 9 + 27 and counts.kind_totals["s_waitcnt vmcnt"] == 9
    assert np.array_equal(counts.lds_written_bytes, 1024 * loops) and np.array_equal(counts.lds_read_bytes, 512 * loops)
    assert np.array_equal(counts.lds_cycles, (8 + 2) * loops)
    # Reads of 8 bytes at 16 * lane: the 32 lanes of a phase want dwords 4n and 4n + 1, two of each bank.
    assert np.array_equal(counts.lds_conflict_cycles, 2 * loops)
    assert [(site[0], site[1:]) for site in counts.lds_sites.values()] == [("ds_write_b128", (0, 27)), ("ds_read_b64", (54, 27))]
    assert np.array_equal(counts.read_bytes, np.full((3, 3), 1024 + 256)) and np.array_equal(counts.written_bytes, np.full((3, 3), 512))
    assert np.array_equal(counts.scalar_read_bytes, np.full((3, 3), 8)) and np.array_equal(counts.atomics, np.full((3, 3), 64))
    # 192 lanes of 16 bytes are 24 lines of the buffer, and one of the arguments.
    assert counts.workgroup_lines_read.tolist() == [25] * 3 and counts.lines_read == 25
    assert counts.workgroup_lines_written.tolist() == [24] * 3 and counts.lines_written == 24
    assert [len(trace) for trace in counts.trace] == counts.by_kind[0].sum(axis=1).tolist()
    assert [i.mnemonic for i in counts.trace[0]][:2] == ["s_load_dwordx2", "v_lshrrev_b32"] and counts.trace[2][-1].mnemonic == "s_endpgm"


class LineSets(Observer):
    """The lines that each workgroup touches, as Python sets, byte by byte."""

    def __init__(self):
        self.read, self.written = {}, {}

    def memory(self, group, address, mask, nbytes, access):
        for wave, workgroup in enumerate(group.workgroup):
            key = tuple(group.state.workgroup_id[workgroup])
            lanes = np.broadcast_to(address, mask.shape)[wave][mask[wave]]
            lines = {int(start + i) // 128 for start in lanes for i in range(nbytes)}
            for sets, wanted in ((self.read, access != "write"), (self.written, access in ("write", "atomic"))):
                if wanted:
                    sets.setdefault(key, set()).update(lines)


SCATTERED = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
s_waitcnt lgkmcnt(0)
global_load_dword v2, v1, s[4:5]
s_lshl_b32 s8, s2, 9
s_lshl_b32 s9, s3, 6
s_add_u32 s6, s6, s8
s_addc_u32 s7, s7, 0
s_add_u32 s6, s6, s9
s_addc_u32 s7, s7, 0
s_waitcnt vmcnt(0)
global_load_dwordx3 v[4:6], v2, s[6:7]
v_cmp_gt_u32_e32 vcc, 40, v0
s_and_b64 exec, exec, vcc
global_store_dwordx2 v2, v[4:5], s[6:7]
global_atomic_add v1, v4, s[6:7]
s_endpgm
"""


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"max_resident_waves": 4}, {"timing": "latest"}])
def test_lines_of_scattered_accesses(memory, options):
    """Unaligned and overlapping accesses across line borders, in a grid of two dimensions, in any order and in batches."""
    offsets, data = memory.allocate(256), memory.allocate(1 << 14)
    memory.bytes_at(offsets, 256).view(np.uint32)[:] = 4 * np.random.default_rng(1).integers(0, 2000, 64)
    sets = LineSets()
    counts = count(assemble(SCATTERED), struct.pack("<QQ", offsets, data), memory, grid=(5, 3, 1), also=(sets,), **options)
    order = [(x, y, 0) for y in range(3) for x in range(5)]
    assert counts.workgroup_lines_read.tolist() == [len(sets.read[key]) for key in order]
    assert counts.workgroup_lines_written.tolist() == [len(sets.written[key]) for key in order]
    assert counts.lines_read == len(set.union(*sets.read.values())) < counts.workgroup_lines_read.sum()
    assert counts.lines_written == len(set.union(*sets.written.values())) < counts.workgroup_lines_written.sum()
    assert counts.read_bytes.sum() == 15 * (64 * (4 + 12) + 40 * 4) and counts.written_bytes.sum() == 15 * 40 * (8 + 4)


@pytest.mark.parametrize("kv_format", ["fp8_e4m3fn", "mxfp4", "bf16"])
def test_product_kernels_agree_with_a_trace(tmp_path, monkeypatch, kv_format):
    """Every wave, class by class and kind by kind, against waves that run alone, one instruction at a time."""
    compile_with_ziglang(HIP / "mla_decode.hip", tmp_path / "mla_decode.co", "gfx950")
    monkeypatch.setattr(importlib.import_module("mla_rt.device"), "code_object_path", lambda stem, arch: tmp_path / f"{stem}.co")
    rng = np.random.default_rng(0)
    q, kv = (rng.standard_normal((n, *shape), np.float32).astype(ml_dtypes.bfloat16) for n, shape in ((2, (5, 576)), (171, (576,))))
    stored = {"bf16": lambda: kv, "fp8_e4m3fn": lambda: quantize_fp8(kv), "mxfp4": lambda: quantize_mxfp4(kv)}[kv_format]()
    seen = []
    with open_device("emulator") as device:

        def observe(dispatch):
            names = mnemonics(tmp_path / "mla_decode.s", dispatch.kernel)
            seen.append((Counters(dispatch), single_step(dispatch, device.memory, names)))
            return [seen[-1][0]]

        device.observe = observe
        decode(q, stored, kv_indptr=[0, 150, 171], sm_scale=0.04, num_splits=2, device=device)
    assert len(seen) == 1
    for counters, traced in seen:
        counts = counters.counts()
        assert counts.by_kind.shape[:2] == (len(traced), len(traced[0]))
        for workgroup, waves in enumerate(traced):
            for wave, by_mnemonic in enumerate(waves):
                by_class = Counter()
                for name, number in by_mnemonic.items():
                    by_class[class_of_mnemonic(name)] += number
                assert {name: int(counts.of_class(name)[workgroup, wave]) for name in CLASSES if counts.of_class(name)[workgroup, wave]} == by_class
                by_kind = Counter()
                for kind, number in zip(counts.kinds, counts.by_kind[workgroup, wave], strict=True):
                    by_kind[kind.split()[0]] += int(number)
                assert +by_kind == by_mnemonic


def test_repeated_is_the_launch_several_times_over(memory):
    buffer = memory.allocate(4096)
    counts = count(assemble(EVERY_CLASS), struct.pack("<Q", buffer), memory, grid=(2, 1, 1), block=(192, 1, 1), lds_bytes=4096)
    more = counts.repeated(3)
    assert more.num_workgroups == 6 and more.grid == (6, 1, 1) and more.sampled == 2
    assert more.kind_totals == {kind: 3 * total for kind, total in counts.kind_totals.items()}
    assert more.lines_read == 3 * counts.lines_read and more.lds_conflict_cycles.sum() == 3 * counts.lds_conflict_cycles.sum()
    assert [site[1:] for site in more.lds_sites.values()] == [(3 * a, 3 * b) for _, a, b in counts.lds_sites.values()]


def test_a_launch_of_ten_thousand_instructions_is_quick(memory):
    """One workgroup that executes ten thousand instructions, in under two seconds."""
    code = assemble(
        "s_mov_b32 s6, 1000\nloop:\n" + 7 * "v_add_f32_e32 v1, v2, v3\n" + "s_sub_i32 s6, s6, 1\ns_cmp_lg_u32 s6, 0\ns_cbranch_scc1 loop\ns_endpgm\n"
    )
    image = memory.allocate(len(code) + 64)
    memory.bytes_at(image, len(code))[:] = np.frombuffer(code, np.uint8)
    report = run(Dispatch("kernel", image, image, descriptor(), (1, 1, 1), (256, 1, 1), memory.allocate(8)), memory)
    assert report.num_instructions == 4 * 10002 and report.seconds < 2
    assert report.instructions_per_second == pytest.approx(report.num_instructions / report.seconds)
