"""Completion models and the check of waits: kernels with a missing or weak wait, the same ones mended, and the product kernels."""

from __future__ import annotations

import numpy as np
import pytest
from asm import assemble

from faulty import run, run_source
from mla_rt.device import open_device
from mla_rt.emulator.completion import TIMINGS, passes
from mla_rt.emulator.decoder import decode
from mla_rt.errors import KernelFault

VALUES = np.arange(100, 228, dtype=np.uint32)
FIRST = VALUES[:64].copy()
# kernel: what the check says (pcs are offsets into the code), what the mended kernel leaves, its output being the first 64 dwords
WAITS = {
    "load_without_wait": (r"v_add_u32 reads v2 before the result of global_load_dword at pc 0x10 is there: no s_waitcnt vmcnt\(0\)", 2 * FIRST),
    "wait_too_weak": (r"v_add_u32 reads v3 before the result of global_load_dword at pc 0x18 is there: no s_waitcnt vmcnt\(0\)", FIRST + VALUES[64:]),
    "load_overwritten": (r"v_mov_b32 overwrites v2 before the result of global_load_dword at pc 0x10 is there", np.full(64, 7)),
    "lds_read_without_wait": (r"reads v4 before the result of ds_read_b32 at pc 0x3\w is there: no s_waitcnt lgkmcnt\(0\)", FIRST[::-1]),
    "scalar_load_out_of_order": (
        r"v_mov_b32 reads s6 before the result of s_load_dword at pc 0x8 is there: no s_waitcnt lgkmcnt\(0\)",
        np.full(64, 5),
    ),
    "wait_counts_dma": (r"reads v4 before the result of ds_bpermute_b32 at pc 0x\w\w is there: no s_waitcnt lgkmcnt\(0\)", np.roll(FIRST, -1)),
}


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", WAITS)
def test_missing_wait_is_reported(name, timing):
    what, expected = WAITS[name]
    with pytest.raises(KernelFault, match=rf"^test_kernel: .*{what}.* \(pc 0x\w+, workgroup \(0, 0, 0\), wave 0\)$"):
        run(name, True, VALUES, timing=timing)
    assert np.array_equal(run(name, False, VALUES, timing=timing)[:64], expected)


@pytest.mark.parametrize("name", [name for name in WAITS if name != "wait_too_weak"])
def test_latest_shows_a_missing_wait_in_the_result(name):
    """Without checks, too: what is used before its wait is not there yet. Under "earliest" the kernel is right by luck."""
    _, expected = WAITS[name]
    if name == "load_overwritten":
        assert np.array_equal(run(name, True, VALUES, timing="latest", checks="off")[:64], FIRST)
    elif name == "scalar_load_out_of_order":
        assert not np.array_equal(run(name, True, VALUES, timing="latest", checks="off")[:64], expected)
    else:
        assert (run(name, True, VALUES, timing="latest", checks="off")[:64] != expected).all()
    assert np.array_equal(run(name, True, VALUES, timing="earliest", checks="off")[:64], expected)


def test_hardware_lands_lds_reads_by_the_clock():
    """A read is there about 28 instructions after its issue without any wait, and not before."""
    source = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
v_mov_b32 v2, 7
v_mov_b32 v3, 1
s_waitcnt lgkmcnt(0)
ds_write_b32 v1, v2
ds_read_b32 v3, v1
.rept {count}
s_mov_b32 s6, 0
.endr
global_store_dword v1, v3, s[4:5]
s_endpgm
"""

    def stored(count: int, timing: str) -> int:
        values = run_source(source.format(count=count), VALUES, timing=timing, checks="off")[:64]
        assert (values == values[0]).all()
        return int(values[0])

    assert [stored(count, "hardware") for count in (0, 20, 40)] == [1, 1, 7]
    assert [stored(count, "latest") for count in (0, 20, 40)] == [1, 1, 1]
    assert [stored(count, "earliest") for count in (0, 20, 40)] == [7, 7, 7]


def test_dma_lands_at_its_wait():
    source = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
v_mov_b32 v2, 7
s_mov_b32 m0, 0
ds_write_b32 v1, v2
s_waitcnt lgkmcnt(0)
global_load_lds_dword v1, s[4:5]
{wait}
ds_read_b32 v3, v1
s_waitcnt lgkmcnt(0)
global_store_dword v1, v3, s[4:5]
s_endpgm
"""
    for timing, unawaited in (("earliest", FIRST), ("latest", np.full(64, 7)), ("hardware", np.full(64, 7))):
        assert np.array_equal(run_source(source.format(wait="s_waitcnt vmcnt(0)"), VALUES, timing=timing)[:64], FIRST)
        assert np.array_equal(run_source(source.format(wait="s_nop 15"), VALUES, timing=timing, checks="off")[:64], unawaited)


def test_groups_that_part_and_merge_keep_what_is_outstanding():
    """Four waves load together, part (each adds its own number, even ones in a detour), and wait where they have met again."""
    source = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
v_readfirstlane_b32 s6, v0
s_lshr_b32 s6, s6, 6
s_waitcnt lgkmcnt(0)
global_load_dword v2, v1, s[4:5]
s_bitcmp1_b32 s6, 0
s_cbranch_scc1 odd
global_load_dword v3, v1, s[4:5]
s_mov_b32 s7, 0
s_nop 3
odd:
v_mov_b32 v4, s6
s_waitcnt vmcnt(0)
v_add_u32 v2, v2, v4
global_store_dword v1, v2, s[4:5]
s_endpgm
"""
    values = np.arange(1000, 1256, dtype=np.uint32)
    expected = values + np.arange(256) // 64
    for timing in TIMINGS:
        for seed in (None, 0, 1, 2, 3):
            assert np.array_equal(run_source(source, values, timing=timing, seed=seed, items=256), expected)


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_full_counter_holds_back_the_next_access(timing):
    """After 63 stores and 15 LDS reads more, what was asked for before them is there without a wait: the counters hold no more."""
    source = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
v_mov_b32 v2, 7
s_waitcnt lgkmcnt(0)
ds_write_b32 v1, v2
ds_read_b32 v3, v1
.rept 15
ds_read_b32 v5, v1
.endr
global_load_dword v4, v1, s[4:5]
.rept {stores}
global_store_dword v1, v2, s[4:5] offset:256
.endr
v_add_u32 v2, v3, v4
global_store_dword v1, v2, s[4:5]
s_endpgm
"""
    assert np.array_equal(run_source(source.format(stores=63), VALUES, timing=timing)[:64], FIRST + 7)
    with pytest.raises(KernelFault, match=r"v_add_u32 reads v4 .* no s_waitcnt vmcnt\(62\)"):
        run_source(source.format(stores=62), VALUES, timing=timing)


def test_passes():
    """The passes of the ISA guide's table of matrix instructions, for a sample of the shapes and formats."""
    lines = {
        "v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], v[0:3]": 2,
        "v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]": 4,
        "v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3]": 4,
        "v_mfma_i32_16x16x64_i8 v[0:3], v[4:7], v[8:11], v[0:3]": 4,
        "v_mfma_f32_16x16x4_f32 v[0:3], v4, v5, v[0:3]": 8,
        "v_mfma_f32_16x16x4_4b_f16 v[0:15], v[16:17], v[18:19], v[0:15]": 8,
        "v_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[20:23], v[0:15]": 8,
        "v_mfma_f32_32x32x16_fp8_fp8 v[0:15], v[16:17], v[18:19], v[0:15]": 8,
        "v_mfma_f32_32x32x4_2b_f16 v[0:31], v[32:33], v[34:35], v[0:31]": 16,
        "v_mfma_f32_32x32x2_f32 v[0:15], v16, v17, v[0:15]": 16,
        "v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[10:11], v[0:7]": 16,
        "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3]": 8,
        "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[12:15], v[0:3] cbsz:4 blgp:4": 4,
        "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[12:19], v[0:3] cbsz:4": 8,
        "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], v[0:15]": 16,
        "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:21], v[24:29], v[0:15] cbsz:2 blgp:3": 8,
    }
    code = assemble("\n".join(lines))
    for offset, expected in zip(range(0, len(code), 8), lines.values(), strict=True):
        assert passes(decode(code[offset : offset + 16], offset, 256)) == expected


@pytest.mark.parametrize("option", [{"timing": "later"}, {"checks": "some"}])
def test_unknown_options(option):
    with pytest.raises(ValueError, match=f"^{next(iter(option))} '{next(iter(option.values()))}': it is 'e?"):
        open_device("emulator", **option)


@pytest.mark.parametrize("option", [{"seed": 0}, {"timing": "latest"}, {"checks": "strict"}])
def test_options_of_the_emulator_only(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} is an option of the emulator"):
        open_device("hip", **option)
