"""Wait states: each hazard with one wait state too few and with enough, counted as LLVM counts them; and what is no hazard."""

from __future__ import annotations

import numpy as np
import pytest
from asm import assemble

from faulty import run, run_source
from mla_rt.emulator.decoder import Program
from mla_rt.emulator.footprint import SGPR, footprint
from mla_rt.emulator.path_checks import PathChecks
from mla_rt.emulator.state import EXEC, VCC, Group, State
from mla_rt.errors import KernelFault

ACCUM_OFFSET = 256
M4, M8, M16 = "v_mfma_f32_16x16x32_bf16", "v_mfma_f32_32x32x16_bf16", "v_mfma_f32_32x32x4_2b_bf16"
FP8_16, FP8_32 = "v_mfma_f32_16x16x128_f8f6f4", "v_mfma_f32_32x32x64_f8f6f4"

# first instruction; the one that needs distance from it; wait states. The compiler's distances for the matrix instructions, measured
# from the code that it makes: 8 for 4 passes, 12 for 8, 20 for 16.
HAZARDS = [
    (f"{M4} v[8:11], v[0:3], v[4:7], 0", "global_store_dword v[40:41], v8, off", 8),
    (f"{M4} a[8:11], v[0:3], v[4:7], 0", "v_accvgpr_read_b32 v9, a11", 8),
    (f"{M4} v[8:11], v[0:3], v[4:7], 0", "ds_write_b32 v40, v10", 8),
    (f"{M4} v[8:11], v[0:3], v[4:7], 0", "v_mov_b32 v11, 0", 8),
    (f"{M4} v[8:11], v[0:3], v[4:7], 0", "ds_read_b32 v8, v40", 8),
    (f"{M4} v[8:11], v[0:3], v[4:7], 0", f"{M4} v[12:15], v[8:11], v[4:7], 0", 8),
    (f"{M4} v[8:11], v[0:3], v[4:7], 0", f"{M4} v[12:15], v[0:3], v[8:11], 0", 8),
    (f"{M8} v[16:31], v[0:3], v[4:7], 0", "v_add_f32 v40, v31, v31", 12),
    (f"{M16} v[16:47], v[0:1], v[4:5], 0", "v_add_f32 v40, v31, v31", 20),
    (f"{FP8_16} v[16:19], v[0:7], v[8:15], 0", "v_mov_b32 v40, v19", 12),
    (f"{FP8_16} v[16:19], v[0:3], v[8:11], 0 cbsz:4 blgp:4", "v_mov_b32 v40, v19", 8),
    (f"{FP8_32} v[16:31], v[0:7], v[8:15], 0", "v_mov_b32 v40, v19", 20),
    ("v_mfma_f32_4x4x4_16b_f16 v[8:11], v[0:1], v[4:5], 0", "v_mov_b32 v40, v8", 5),
    ("v_mfma_f32_16x16x4_f32 v[8:11], v0, v4, 0", "v_mov_b32 v40, v8", 10),
    ("v_mfma_f64_16x16x4_f64 v[8:15], v[0:1], v[4:5], 0", "global_store_dwordx4 v[40:41], v[8:11], off", 18),
    ("v_mfma_f64_16x16x4_f64 v[8:15], v[0:1], v[4:5], 0", "v_add_f64 v[40:41], v[8:9], v[0:1]", 19),
    ("v_mfma_f64_16x16x4_f64 v[8:15], v[0:1], v[4:5], 0", "v_mfma_f64_16x16x4_f64 v[16:23], v[8:9], v[4:5], 0", 19),
    ("v_mfma_f64_4x4x4_4b_f64 v[8:9], v[0:1], v[4:5], 0", "global_store_dwordx2 v[40:41], v[8:9], off", 9),
    ("v_mfma_f64_4x4x4_4b_f64 v[8:9], v[0:1], v[4:5], 0", "v_mul_f64 v[40:41], v[8:9], v[0:1]", 6),
    ("v_mfma_f64_4x4x4_4b_f64 v[8:9], v[0:1], v[4:5], 0", "v_mfma_f64_4x4x4_4b_f64 v[8:9], v[0:1], v[4:5], v[8:9]", 4),
    # the accumulator of the next one
    (f"{M4} v[8:11], v[0:3], v[4:7], 0", f"{M4} v[8:11], v[0:3], v[4:7], v[8:11]", 0),
    ("v_mfma_f32_4x4x4_16b_f16 v[8:11], v[0:1], v[4:5], 0", "v_mfma_f32_4x4x4_16b_f16 v[8:11], v[0:1], v[4:5], v[8:11]", 2),
    (f"{M4} v[8:11], v[0:3], v[4:7], 0", f"{M4} v[12:15], v[0:3], v[4:7], v[10:13]", 6),
    (f"{M8} v[16:31], v[0:3], v[4:7], 0", f"{M4} v[12:15], v[0:3], v[4:7], v[16:19]", 10),
    ("v_mfma_f32_16x16x4_f32 v[8:11], v0, v4, 0", f"{M4} v[12:15], v[0:3], v[4:7], v[10:13]", 0),
    # overwriting what it accumulates on
    (f"{M4} v[8:11], v[0:3], v[4:7], v[12:15]", "v_mov_b32 v12, 0", 3),
    (f"{M8} v[16:31], v[0:3], v[4:7], v[32:47]", "v_mov_b32 v47, 0", 7),
    (f"{M4} v[8:11], v[0:3], v[4:7], v[12:15]", "v_mov_b32 v0, 0", 0),
    # vector instructions
    ("v_mov_b32 v0, 0", f"{M4} v[8:11], v[0:3], v[4:7], 0", 2),
    ("v_mov_b32 v12, 0", f"{M4} v[8:11], v[0:3], v[4:7], v[12:15]", 2),
    ("v_mov_b32 v12, 0", "v_mov_b32_dpp v2, v12 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", 2),
    ("v_cmpx_lt_u32 v1, v2", "v_mov_b32_dpp v2, v12 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", 5),
    ("v_cmpx_lt_u32 v1, v2", f"{M4} v[8:11], v[0:3], v[4:7], 0", 4),
    ("v_mov_b32 v12, 0", "v_permlane32_swap_b32 v2, v12", 2),
    ("v_mov_b32 v12, 0", "v_permlane16_swap_b32 v12, v2", 2),
    ("v_mov_b32 v12, 0", "v_readfirstlane_b32 s4, v12", 1),
    ("v_mov_b32 v12, 0", "v_readlane_b32 s4, v12, 3", 1),
    ("v_cmpx_lt_u32 v1, v2", "v_readlane_b32 s4, v12, 3", 4),
    ("v_readfirstlane_b32 s4, v1", "v_readlane_b32 s5, v12, s4", 4),
    ("v_readfirstlane_b32 s4, v1", "global_load_dword v2, v1, s[4:5]", 5),
    ("v_readfirstlane_b32 s4, v1", "v_mov_b32 v2, s4", 2),
    ("v_cmp_lt_u32 vcc, v1, v2", "v_cndmask_b32 v2, v1, v3, vcc", 2),
    ("v_cmp_lt_u32 vcc, v1, v2", "v_div_fmas_f32 v2, v1, v3, v4", 4),
    ("v_exp_f32 v2, v1", "v_add_f32 v2, v2, v2", 1),
    ("v_exp_f32 v2, v1", "v_exp_f32 v2, v2", 0),
    ("v_cvt_pk_fp8_f32 v2, v1, v3 op_sel:[0,0,1]", "v_mov_b32 v4, v2", 1),
    ("v_cvt_pk_fp8_f32 v2, v1, v3", "v_mov_b32 v4, v2", 0),
    ("v_mov_b32_sdwa v2, v1 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD", "v_mov_b32 v4, v2", 1),
    ("v_dot2_f32_bf16 v2, v1, v3, v4", "v_mov_b32 v4, v2", 3),
    ("global_store_dwordx4 v[40:41], v[8:11], off", "v_mov_b32 v11, 0", 2),
    ("global_store_dwordx2 v[40:41], v[8:9], off", "v_mov_b32 v9, 0", 0),
    ("buffer_store_dwordx3 v[8:10], off, s[4:7], 0", "v_mov_b32 v8, 0", 2),
    ("buffer_store_dwordx3 v[8:10], off, s[4:7], s8", "v_mov_b32 v8, 0", 0),
    ("s_mov_b32 m0, 0", "global_load_lds_dword v[40:41], off", 1),
    # interlocked, or nothing in common
    ("v_mov_b32 v2, 0", "v_add_f32 v2, v2, v2", 0),
    ("s_mov_b32 s4, 0", "v_mov_b32 v2, s4", 0),
    ("s_mov_b64 vcc, 0", "v_cndmask_b32 v2, v1, v3, vcc", 0),
    ("v_cmp_lt_u32 vcc, v1, v2", "s_cbranch_vccz 0", 0),
    ("v_mov_b32 v40, 0", "global_load_dword v2, v[40:41], off", 0),
    (f"{M4} v[8:11], v[0:3], v[4:7], 0", f"{M4} v[12:15], v[0:3], v[4:7], 0", 0),
]


def follow(*lines: str) -> None:
    """Check a straight piece of code. Raises KernelFault."""
    code = assemble("\n".join((*lines, "s_endpgm")))
    state = State(
        kernel="code",
        memory=None,
        num_workgroups=1,
        waves_per_workgroup=1,
        num_vgprs=512,
        accum_offset=ACCUM_OFFSET,
        lds_bytes=0,  # type: ignore[arg-type]
    )
    checks = PathChecks()
    checks.begin(state)
    program = Program(lambda pc: code[pc : pc + 16], ACCUM_OFFSET)
    pc = 0
    while pc < len(code):
        block = program.block(pc)
        checks.block(Group(state, np.arange(1)), block)
        pc = block.end


@pytest.mark.parametrize(("first", "then", "states"), HAZARDS)
def test_wait_states(first, then, states):
    """Enough as one s_nop, as several instructions and with s_waitcnt among them; one fewer is a fault that says how many there are."""
    fillers = [["s_waitcnt expcnt(0)", *["s_mov_b32 s20, 0"] * (states - 1)][:states], [f"s_nop {min(states, 16) - 1}"][:states]]
    if states > 16:
        fillers[1].append(f"s_nop {states - 17}")
    for filler in fillers:
        follow(first, *filler, then)
    if states == 0:
        return
    short = ["s_mov_b32 s20, 0"] * (states - 1)
    with pytest.raises(
        KernelFault,
        match=rf"^code: .*{then.split()[0].removesuffix('_sdwa').removesuffix('_dpp')}.*: {states} wait states are needed "
        rf"between them, there are {states - 1} \(pc 0x\w+, workgroup \(0, 0, 0\), wave 0\)$",
    ):
        follow(first, *short, then)


@pytest.mark.parametrize("filler", ["", "s_nop 0"])
def test_wait_states_count_along_the_path_taken(filler):
    """Around a loop: from its end to its beginning there is the branch, one wait state of two, and not what stands before the loop."""
    source = f"""
s_mov_b32 s6, 0
v_mov_b32 v2, 0
v_mov_b32 v12, 0
s_nop 7
again:
v_mov_b32_dpp v2, v12 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
s_add_u32 s6, s6, 1
s_cmp_lt_u32 s6, 3
v_mov_b32 v12, 1
{filler}
s_cbranch_scc1 again
s_endpgm
"""
    values = np.zeros(64, np.uint32)
    if filler:
        run_source(source, values)
    else:
        with pytest.raises(KernelFault, match=r"v_mov_b32 reads across lanes .*: 2 wait states are needed between them, there are 1 \(pc 0x10,"):
            run_source(source, values)


FAULTY = {
    "matrix_result_too_early": r"reads the result of v_mfma_f32_16x16x32_bf16 \(v8, .*\): 8 wait states are needed between them, there are 7",
    "accumulator_overwritten": r"v_mov_b32 overwrites what v_mfma_f32_16x16x32_bf16 accumulates on \(v8, .*\): 3 wait states are needed.* are 2",
    "transcendental_too_early": r"v_add_f32 reads a register that v_exp_f32 wrote \(v2, .*\): 1 wait states are needed between them, there are 0",
}


@pytest.mark.parametrize("name", FAULTY)
def test_faulty_kernels(name):
    values = np.zeros(64, np.uint32)
    with pytest.raises(KernelFault, match=rf"^test_kernel: .*{FAULTY[name]} \(pc 0x\w+, workgroup \(0, 0, 0\), wave 0\)$"):
        run(name, True, values)
    results = run(name, False, values)
    assert np.array_equal(results.view(np.float32), np.exp2(np.arange(64, dtype=np.float32)) + 1 if "transcendental" in name else np.zeros(64))


def test_footprints():
    """Registers, in the numbering of the unified file, against a list made by hand."""
    vcc, exec_mask = {SGPR + VCC, SGPR + VCC + 1}, {SGPR + EXEC, SGPR + EXEC + 1}
    a = ACCUM_OFFSET
    lines = {
        "v_add_f32 v1, v2, s3": ({2, SGPR + 3}, {1}),
        "v_fmac_f32 v1, v2, v3": ({1, 2, 3}, {1}),
        "v_add_co_u32 v1, vcc, v2, v3": ({2, 3}, {1} | vcc),
        "v_addc_co_u32 v1, vcc, v2, v3, vcc": ({2, 3} | vcc, {1} | vcc),
        "v_cmpx_lt_u32 v1, v2": ({1, 2}, vcc | exec_mask),
        "v_permlane32_swap_b32 v1, v2": ({1, 2}, {1, 2}),
        "global_load_dwordx4 a[4:7], v1, s[2:3]": ({1, SGPR + 2, SGPR + 3}, {a + 4, a + 5, a + 6, a + 7}),
        "global_load_ubyte v4, v[2:3], off": ({2, 3}, {4}),
        "global_load_short_d16 v4, v[2:3], off": ({2, 3, 4}, {4}),
        "global_store_dwordx2 v[2:3], v[4:5], off": ({2, 3, 4, 5}, set()),
        "global_atomic_add v6, v[2:3], v4, off sc0": ({2, 3, 4}, {6}),
        "buffer_load_dwordx2 v[4:5], v1, s[4:7], s8 offen": ({1, *range(SGPR + 4, SGPR + 9)}, {4, 5}),
        "global_load_lds_dwordx4 v[2:3], off": ({2, 3, SGPR + 124}, set()),
        "ds_read2_b64 v[4:7], v1": ({1}, {4, 5, 6, 7}),
        "ds_read_b64_tr_b16 v[4:5], v1": ({1}, {4, 5}),
        "ds_write_b128 v1, v[4:7]": ({1, 4, 5, 6, 7}, set()),
        "ds_bpermute_b32 v1, v2, v3": ({2, 3}, {1}),
        "s_load_dwordx4 s[4:7], s[2:3], s8": ({SGPR + 2, SGPR + 3, SGPR + 8}, set(range(SGPR + 4, SGPR + 8))),
        "s_and_saveexec_b64 s[4:5], s[2:3]": ({SGPR + 2, SGPR + 3} | exec_mask, {SGPR + 4, SGPR + 5, SGPR + 253} | exec_mask),
        "s_cmp_lt_u32 s1, s2": ({SGPR + 1, SGPR + 2}, {SGPR + 253}),
        f"{M4} a[8:11], v[0:3], a[4:7], a[12:15]": (
            {0, 1, 2, 3, a + 4, a + 5, a + 6, a + 7, a + 12, a + 13, a + 14, a + 15},
            set(range(a + 8, a + 12)),
        ),
    }
    program = Program(lambda pc: code[pc : pc + 16], ACCUM_OFFSET)
    code = assemble("\n".join((*lines, "s_endpgm")))
    for instruction, (line, (reads, writes)) in zip(program.block(0).instructions, lines.items(), strict=False):
        found = footprint(instruction)
        assert (set(found.reads), set(found.writes)) == (reads, writes), line
