"""How undefined bits pass through instructions, against what the instructions do: whatever the undefined bits of the sources are, the bits of the
result that count as defined must come out the same; and what a rule promises to keep defined is kept."""

from __future__ import annotations

import numpy as np
import pytest
from asm import encodings
from waves import ACCUM_OFFSET

from mla_rt.emulator.checks_undefined import UndefinedValues
from mla_rt.emulator.decoder import decode
from mla_rt.emulator.memory import Memory
from mla_rt.emulator.observer import SCC
from mla_rt.emulator.shadow import ALL, NUM_SCALARS
from mla_rt.emulator.state import EXEC, LANES, VCC, State
from mla_rt.emulator.watched import WatchedGroup

NUM_WAVES = 2
MEMORY = Memory(1 << 20)

# Vector sources v0 to v31 (of matrices: also v32 to v63), scalar sources s0 to s31 and VCC; results elsewhere or among them.
INSTRUCTIONS = """
v_mov_b32 v40, v1
v_mov_b64 v[40:41], v[2:3]
v_not_b32 v40, v1
v_and_b32 v40, v1, v2
v_and_b32 v40, 0xff00ff, v2
v_or_b32 v40, v1, v2
v_or_b32 v40, 0xff00ff, v2
v_xor_b32 v40, v1, v2
v_and_or_b32 v40, v1, v2, v3
v_or3_b32 v40, v1, v2, v3
v_lshl_or_b32 v40, v1, v2, v3
v_lshl_or_b32 v40, v1, 16, v3
v_bfi_b32 v40, v1, v2, v3
v_bfi_b32 v40, s1, v2, v3
v_cndmask_b32 v40, v1, v2, vcc
v_cndmask_b32_e64 v40, v1, v2, s[2:3]
v_cndmask_b32_e64 v40, -v1, |v2|, s[2:3]
v_cndmask_b32_e64 v40, 0, 1, s[2:3]
v_lshlrev_b32 v40, v1, v2
v_lshlrev_b32 v40, 7, v2
v_lshlrev_b32_e64 v40, s1, v2
v_lshrrev_b32 v40, 7, v2
v_ashrrev_i32 v40, 7, v2
v_ashrrev_i32 v40, v1, v2
v_lshlrev_b64 v[40:41], 9, v[2:3]
v_lshrrev_b64 v[40:41], 9, v[2:3]
v_lshrrev_b64 v[40:41], v1, v[2:3]
v_bfe_u32 v40, v1, 5, 9
v_bfe_u32 v40, v1, v2, 9
v_bfe_i32 v40, v1, 5, 9
v_alignbit_b32 v40, v1, v2, 13
v_alignbit_b32 v40, v1, v2, v3
v_alignbyte_b32 v40, v1, v2, 3
v_perm_b32 v40, v1, v2, v3
v_perm_b32 v40, v1, v2, s3
v_add_u32 v40, v1, v2
v_add_u32_e64 v40, s1, v2
v_add_u32_e64 v40, v1, v2 clamp
v_sub_u32 v40, v1, v2
v_add3_u32 v40, v1, v2, v3
v_mul_lo_u32 v40, v1, v2
v_lshl_add_u32 v40, v1, 3, v2
v_lshl_add_u32 v40, v1, v2, v3
v_mad_u64_u32 v[40:41], s[40:41], v1, v2, v[4:5]
v_mad_u64_u32 v[40:41], s[40:41], v1, s2, v[4:5]
v_mad_i64_i32 v[40:41], s[40:41], v1, s2, v[4:5]
v_lshl_add_u64 v[40:41], v[2:3], 3, v[4:5]
v_add_co_u32 v40, vcc, v1, v2
v_addc_co_u32 v40, vcc, v1, v2, vcc
v_mul_hi_u32 v40, v1, v2
v_mad_u32_u24 v40, v1, v2, v3
v_add_f32 v40, v1, v2
v_fma_f32 v40, v1, v2, v3
v_fmac_f32 v3, v1, v2
v_max3_f32 v40, v1, v2, v3
v_exp_f32 v40, v1
v_cvt_pk_bf16_f32 v40, v1, v2
v_cvt_pkrtz_f16_f32 v40, v1, v2
v_pack_b32_f16 v40, v1, v2
v_pack_b32_f16 v40, v1, v2 op_sel:[1,0,0]
v_cvt_pk_fp8_f32 v4, v1, v2
v_cvt_pk_fp8_f32 v4, v1, v2 op_sel:[0,0,1]
v_cvt_pk_fp8_f32 v1, v1, v2 op_sel:[0,0,1]
v_cvt_sr_fp8_f32 v4, v1, v2
v_cvt_sr_fp8_f32 v4, v1, v2 op_sel:[0,0,1,1]
v_cvt_scalef32_pk_fp8_f32 v4, v1, v2, v3 op_sel:[0,0,0,1]
v_cvt_scalef32_pk_fp4_f32 v4, v1, v2, v3 op_sel:[0,0,1,0]
v_cvt_scalef32_pk_fp4_f32 v4, v1, v2, v3 op_sel:[0,0,1,1]
v_cvt_scalef32_pk_bf16_fp8 v40, v1, v2
v_cvt_scalef32_pk_bf16_fp8 v40, v1, 1.0 op_sel:[1,0,0]
v_cvt_scalef32_pk_f32_fp8 v[40:41], v1, v2 op_sel:[1,0,0]
v_cvt_scalef32_pk_bf16_fp4 v40, v1, v2 op_sel:[1,1,0]
v_cvt_scalef32_pk_f32_fp4 v[40:41], v1, v2 op_sel:[0,1,0]
v_cvt_scalef32_f16_fp8 v4, v1, v2 op_sel:[1,0,0,1]
v_cvt_f32_fp8 v40, v1
v_cvt_f32_fp8_sdwa v40, v1 src0_sel:BYTE_2
v_cvt_pk_f32_fp8 v[40:41], v1
v_cvt_f32_bf16 v40, v1
v_cvt_f32_ubyte2 v40, v1
v_add_u32_sdwa v4, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_1 src1_sel:WORD_0
v_add_u32_sdwa v4, v1, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:WORD_0
v_mov_b32_sdwa v4, v1 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_1
v_mov_b32_sdwa v4, sext(v1) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1
v_mov_b32_dpp v4, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v4, v1 row_shr:1 row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v4, v1 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1
v_add_f32_dpp v4, v1, v2 row_newbcast:3 row_mask:0xf bank_mask:0xf
v_add_f32_dpp v4, v1, v1 row_newbcast:3 row_mask:0xf bank_mask:0xf
v_fmac_f32_dpp v4, v1, v2 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
v_pk_mul_f32 v[40:41], v[2:3], v[4:5]
v_pk_mul_f32 v[40:41], v[2:3], v[4:5] op_sel_hi:[1,0]
v_pk_fma_f32 v[40:41], v[2:3], s[4:5], v[6:7]
v_pk_mov_b32 v[40:41], v[2:3], v[4:5] op_sel:[1,0]
v_pk_add_u16 v40, v1, v2
v_pk_mul_f16 v40, v1, v2 op_sel:[1,0] op_sel_hi:[0,1]
v_pk_fma_f16 v40, v1, v2, v3
v_pk_maximum3_f16 v40, v1, v2, v3
v_add_i16 v4, v1, v2 op_sel:[1,0,1]
v_fma_f16 v4, v1, v2, v3 op_sel:[0,1,0,1]
v_cmp_lt_u32 vcc, v1, v2
v_cmp_gt_f32_e64 s[40:41], v1, s2
v_readfirstlane_b32 s40, v1
v_readlane_b32 s40, v1, 17
v_readlane_b32 s40, v1, s1
v_writelane_b32 v4, s1, 17
v_permlane16_swap_b32 v1, v2
v_permlane32_swap_b32 v1, v2
v_swap_b32 v1, v2
v_accvgpr_write_b32 a3, v1
v_accvgpr_read_b32 v40, a1
ds_bpermute_b32 v40, v1, v2
ds_swizzle_b32 v40, v1 offset:0x801f
ds_permute_b32 v40, v1, v2
v_mfma_f32_16x16x32_bf16 v[64:67], v[0:3], v[4:7], v[8:11]
v_mfma_f32_16x16x32_bf16 v[64:67], v[0:3], v[4:7], 0
v_mfma_f32_32x32x16_bf16 v[64:79], v[0:3], v[4:7], v[8:23]
v_mfma_f32_16x16x32_fp8_fp8 v[64:67], v[0:1], v[4:5], v[8:11]
v_mfma_f32_16x16x128_f8f6f4 v[64:67], v[0:7], v[8:15], v[16:19]
v_mfma_f32_32x32x64_f8f6f4 v[64:79], v[0:7], v[8:11], v[16:31] blgp:4
v_mfma_scale_f32_16x16x128_f8f6f4 v[64:67], v[0:3], v[8:15], v[16:19], v20, v21 op_sel:[1,0,0] op_sel_hi:[0,1,0] cbsz:4
v_mfma_f64_16x16x4_f64 v[64:71], v[0:1], v[2:3], v[8:15]
s_mov_b32 s40, s1
s_mov_b64 s[40:41], s[2:3]
s_movk_i32 s1, 0x1234
s_and_b32 s40, s1, s2
s_and_b64 s[40:41], s[2:3], s[4:5]
s_and_b64 s[40:41], s[2:3], exec
s_or_b32 s40, s1, s2
s_or_b64 s[40:41], s[2:3], s[4:5]
s_xor_b32 s40, s1, s2
s_andn2_b64 s[40:41], s[2:3], s[4:5]
s_not_b64 s[40:41], s[2:3]
s_add_u32 s40, s1, s2
s_sub_i32 s40, s1, s2
s_addc_u32 s40, s1, s2
s_mul_i32 s40, s1, s2
s_lshl_b32 s40, s1, 5
s_lshr_b32 s40, s1, s2
s_bfe_u32 s40, s1, 0x90005
s_cselect_b32 s40, s1, s2
s_cselect_b64 s[40:41], s[2:3], s[4:5]
s_pack_lh_b32_b16 s40, s1, s2
s_cmp_lt_u32 s1, s2
s_bitcmp1_b32 s1, 3
"""
LINES = tuple(line for line in INSTRUCTIONS.splitlines() if line)


def make_state(values: np.random.Generator) -> State:
    state = State(
        kernel="kernel",
        memory=MEMORY,
        num_workgroups=NUM_WAVES,
        waves_per_workgroup=1,
        num_vgprs=256,
        accum_offset=ACCUM_OFFSET,
        lds_bytes=0,
    )
    state.vgpr[:] = values.integers(0, 1 << 32, state.vgpr.shape, np.uint32)
    state.sgpr[:] = values.integers(0, 1 << 32, state.sgpr.shape, np.uint32)
    state.scc[:] = values.integers(0, 2, NUM_WAVES)
    state.sgpr[EXEC : EXEC + 2] = [[0xFFFFFFFF, 0xFFFF0FF3], [0xFFFFFFFF, 0xFFFFFF0F]]
    return state


def undefined_bits(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Mostly few lanes, with all, one half, one byte or one bit undefined."""
    choices = np.array([0xFFFFFFFF, 0xFFFF, 0xFFFF0000, 0xFF, 0xFF00, 0xFF0000, 0xFF000000, 1, 0x80000000, 0x400], np.uint32)
    return np.where(random.random(shape) < 0.05, random.choice(choices, shape), np.uint32(0))


class Watch:
    """An instruction executed with some bits undefined: the state after it, and what the check makes of it."""

    def __init__(self, text: str, seed: int):
        self.instruction = decode(dict(zip(LINES, encodings(LINES), strict=True))[text][1], 0x1000, ACCUM_OFFSET)
        self.seed = seed

    def run(self, flip: int) -> tuple[State, UndefinedValues]:
        """flip: 0, or what to draw the values of the undefined bits from."""
        random = np.random.default_rng(self.seed)
        state = make_state(random)
        check = UndefinedValues()
        check.begin(state)
        shadow = check._shadow
        noise = np.random.default_rng(flip)
        vectors = undefined_bits(random, state.vgpr.shape)
        vectors[np.arange(len(vectors)) % ACCUM_OFFSET >= 32] = 0
        scalars = undefined_bits(random, (NUM_SCALARS, NUM_WAVES))
        scalars[[register for register in range(NUM_SCALARS) if register >= 32 and register not in (VCC, VCC + 1, SCC)]] = 0
        for register, mask in enumerate(vectors):
            shadow.write_vector(register, slice(None), NUM_WAVES, mask if mask.any() else None, None)
        for register, mask in enumerate(scalars):
            shadow.write_scalar(register, slice(None), mask if mask.any() else None)
        if flip:
            state.vgpr ^= vectors & noise.integers(0, 1 << 32, vectors.shape, np.uint32)
            state.sgpr ^= scalars[: len(state.sgpr)] & noise.integers(0, 1 << 32, state.sgpr.shape, np.uint32)
            state.scc ^= scalars[SCC] != 0
        group = WatchedGroup(state, np.arange(NUM_WAVES))
        group.watchers = (check,)
        check.instruction(group, self.instruction)
        with np.errstate(all="ignore"):
            self.instruction.run(group)
        return state, check


def vector_mask(check: UndefinedValues, register: int) -> np.ndarray:
    mask = check._shadow.read_vector(register, slice(None))
    return np.zeros((NUM_WAVES, LANES), np.uint32) if mask is None else mask


def scalar_mask(check: UndefinedValues, register: int) -> np.ndarray:
    mask = check._shadow.read_scalar(register, slice(None))
    return np.zeros(NUM_WAVES, np.uint32) if mask is None else mask


@pytest.mark.parametrize("text", LINES)
def test_what_counts_as_defined_does_not_depend_on_undefined_bits(text: str) -> None:
    for seed in range(4):
        watch = Watch(text, seed)
        first, check = watch.run(0)
        second, _ = watch.run(1)
        different = first.vgpr ^ second.vgpr
        for register in np.flatnonzero(different.any(axis=(1, 2))).tolist():
            wrong = different[register] & ~vector_mask(check, register)
            assert not wrong.any(), f"v{register}: {np.argwhere(wrong)[0]}"
        different = first.sgpr ^ second.sgpr
        for register in np.flatnonzero(different.any(axis=1)).tolist():
            wrong = different[register] & ~scalar_mask(check, register)
            assert not wrong.any(), f"s{register}: {np.argwhere(wrong)[0]}"
        assert not ((first.scc != second.scc) & (scalar_mask(check, SCC) == 0)).any()


# Instruction, undefined bits of v1 (lane 0), undefined bits of v40 and v41 (lane 0) after it: exactly these.
EXACT = [
    ("v_mov_b32 v40, v1", 0xF0F0, 0xF0F0, 0),
    ("v_and_b32 v40, 0xff00, v1", 0xF0F0, 0xF000, 0),
    ("v_or_b32 v40, 0xff00, v1", 0xF0F0, 0x00F0, 0),
    ("v_lshlrev_b32 v40, 8, v1", 0xF0F0, 0xF0F000, 0),
    ("v_lshl_or_b32 v40, 0, 16, v1", 0xFFFF0000, 0xFFFF0000, 0),
    ("v_bfe_u32 v40, v1, 8, 8", 0xFFFF0000, 0, 0),
    ("s_mov_b32 s5, 0x0c0c0100\nv_perm_b32 v40, v2, v1, s5", 0xFFFF0000, 0, 0),  # bytes 0 and 1, and constants
    ("v_alignbit_b32 v40, v1, v2, 16", 0xFFFF0000, 0, 0),
    ("s_mov_b64 s[4:5], -1\nv_cndmask_b32_e64 v40, v1, v2, s[4:5]", 0xFFFFFFFF, 0, 0),  # the other one is chosen
    ("s_mov_b64 s[4:5], -1\nv_cndmask_b32_e64 v40, v2, v1, s[4:5]", 0x00FF, 0x00FF, 0),
    ("v_add_u32 v40, v1, v2", 0x0100, 0xFFFFFF00, 0),
    ("v_mad_u64_u32 v[40:41], s[40:41], v2, v3, v[0:1]", 0xFFFFFFFF, 0, 0xFFFFFFFF),
    ("v_cvt_pk_bf16_f32 v40, v1, v2", 0xFFFFFFFF, 0xFFFF, 0),
    ("v_cvt_pk_fp8_f32 v1, v2, v3 op_sel:[0,0,1]\nv_mov_b32 v40, v1", 0xFFFF0000, 0, 0),  # the other half is kept, this one written
    ("v_cvt_pk_fp8_f32 v1, v2, v3\nv_mov_b32 v40, v1", 0xFFFFFFFF, 0xFFFF0000, 0),
    ("v_cvt_pk_f32_fp8 v[40:41], v1", 0xFF00, 0, 0xFFFFFFFF),
    ("v_pk_mul_f32 v[40:41], v[2:3], v[0:1]", 0xFFFFFFFF, 0, 0xFFFFFFFF),
    ("v_pk_mul_f32 v[40:41], v[2:3], v[0:1] op_sel_hi:[1,0]", 0xFFFFFFFF, 0, 0),
    ("v_mov_b32_sdwa v40, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0", 0xFF00, 0, 0),
    ("v_add_f32 v40, v1, v2", 1, 0xFFFFFFFF, 0),
]


@pytest.mark.parametrize(("text", "undefined", "low", "high"), EXACT, ids=[case[0] for case in EXACT])
def test_what_the_refined_rules_keep_defined(text: str, undefined: int, low: int, high: int) -> None:
    state = make_state(np.random.default_rng(0))
    state.sgpr[EXEC : EXEC + 2] = 0xFFFFFFFF
    check = UndefinedValues()
    check.begin(state)
    shadow = check._shadow
    for register in range(len(state.vgpr)):
        shadow.write_vector(register, slice(None), NUM_WAVES, None, None)
    for register in range(len(shadow.scalar_flags)):
        shadow.write_scalar(register, slice(None), None)
    mask = np.zeros((NUM_WAVES, LANES), np.uint32)
    mask[0, 0] = undefined
    shadow.write_vector(1, slice(None), NUM_WAVES, mask, None)
    group = WatchedGroup(state, np.arange(NUM_WAVES))
    group.watchers = (check,)
    lines = tuple(line for case in EXACT for line in case[0].splitlines())
    codes = dict(zip(lines, encodings(lines), strict=True))
    for line in text.splitlines():
        code = codes[line][1]
        instruction = decode(code, 0x1000, ACCUM_OFFSET)
        group.pc += instruction.encoded.size
        check.instruction(group, instruction)
        with np.errstate(all="ignore"):
            instruction.run(group)
    for register, expected in ((40, low), (41, high)):
        found = vector_mask(check, register)
        assert found[0, 0] == expected, f"v{register}: {int(found[0, 0]):#x}"
        assert not found.ravel()[1:].any(), "other lanes"


def test_of_a_matrix_only_the_rows_and_columns_of_undefined_elements_are_undefined() -> None:
    watch = Watch("v_mfma_f32_16x16x32_bf16 v[64:67], v[0:3], v[4:7], v[8:11]", 0)
    state = make_state(np.random.default_rng(0))
    check = UndefinedValues()
    check.begin(state)
    for register in range(len(state.vgpr)):
        check._shadow.write_vector(register, slice(None), NUM_WAVES, None, None)
    mask = np.zeros((NUM_WAVES, LANES), np.uint32)
    mask[1, 16 + 5] = ALL  # row 5 of A, column 3 of B, the element of C in row 0, column 9
    check._shadow.write_vector(2, slice(None), NUM_WAVES, mask, None)
    check._shadow.write_vector(6, slice(None), NUM_WAVES, np.roll(mask, -2, axis=1), None)
    check._shadow.write_vector(8, slice(None), NUM_WAVES, np.roll(mask, -12, axis=1), None)
    group = WatchedGroup(state, np.arange(NUM_WAVES))
    group.watchers = (check,)
    check.instruction(group, watch.instruction)
    with np.errstate(all="ignore"):
        watch.instruction.run(group)
    expected = np.zeros((16, 16), np.bool_)
    expected[5], expected[:, 3], expected[0, 9] = True, True, True
    lane = np.arange(LANES)
    for i in range(4):
        found = vector_mask(check, 64 + i) == ALL
        assert not found[0].any()
        assert (found[1] == expected[4 * (lane // 16) + i, lane % 16]).all()
