"""Index mode: registers counted from M0, checked on kernels whose lanes store what they read or wrote."""

from __future__ import annotations

import numpy as np
import pytest
from asm import assemble, launch
from waves import get_v, make_group, set_v

from mla_rt.emulator.decoder import Program
from mla_rt.emulator.memory import Memory
from mla_rt.emulator.state import M0
from mla_rt.errors import UnknownInstruction

ACCUM_OFFSET = 128
INDEX_OF_WAVE = [0, 3, 3, 7]


def run_waves(source: str, first: int = 0):
    """Four waves with s8 = INDEX_OF_WAVE and v[i] = 1000 * i + lane run the source (from its byte `first` on); the group after it."""
    code = assemble(source)
    group = make_group(waves=4)
    set_v(group, 0, *(1000 * i + np.arange(64) for i in range(64)))
    group.state.sgpr[8] = INDEX_OF_WAVE
    group.state.sgpr[M0] = 0xABCD0000
    program = Program(lambda pc: code[pc : pc + 16], ACCUM_OFFSET)
    for pc, run in program.block(first).steps:
        group.pc = pc
        if pc < len(code):
            run(group)
    return group


def value(register: int) -> np.ndarray:
    return np.asarray(1000 * register + np.arange(64))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("SRC0", {40: lambda i: value(10 + i) + value(20)}),
        ("SRC1", {40: lambda i: value(10) + value(20 + i)}),
        ("SRC0,SRC1", {40: lambda i: value(10 + i) + value(20 + i)}),
        ("DST", {None: lambda i: value(10) + value(20)}),
        ("SRC0,DST", {None: lambda i: value(10 + i) + value(20)}),
    ],
)
def test_each_operand(mode, expected):
    group = run_waves(f"s_set_gpr_idx_on s8, gpr_idx({mode})\nv_add_u32 v40, v10, v20\ns_set_gpr_idx_off\nv_add_u32 v50, v10, v20\ns_endpgm\n")
    for register, compute in expected.items():
        for wave, index in enumerate(INDEX_OF_WAVE):
            target = 40 + index if register is None else register
            np.testing.assert_array_equal(get_v(group, target)[wave], compute(index), err_msg=f"wave {wave}")
            if register is None and index:
                np.testing.assert_array_equal(get_v(group, 40)[wave], value(40), err_msg="the register that the instruction names was written")
    np.testing.assert_array_equal(get_v(group, 50), np.broadcast_to(value(10) + value(20), (4, 64)))


def test_third_source_long_form_and_constants():
    group = run_waves("s_set_gpr_idx_on s8, gpr_idx(SRC0,SRC1,SRC2)\nv_mad_u32_u24 v40, 3, v20, v30\ns_set_gpr_idx_off\ns_endpgm\n")
    for wave, index in enumerate(INDEX_OF_WAVE):
        np.testing.assert_array_equal(get_v(group, 40)[wave], 3 * value(20 + index) + value(30 + index))


def test_m0_holds_index_and_mode():
    group = run_waves("s_set_gpr_idx_on s8, gpr_idx(SRC1)\ns_set_gpr_idx_off\ns_endpgm\n")
    assert group.state.sgpr[M0].tolist() == [0xABCD2000 | index for index in INDEX_OF_WAVE]


def test_mode_and_index_change_inside():
    source = "s_set_gpr_idx_on s8, gpr_idx()\nv_mov_b32 v40, v10\ns_set_gpr_idx_mode gpr_idx(SRC0)\nv_mov_b32 v41, v10\n"
    group = run_waves(source + "s_mov_b32 s9, 5\ns_set_gpr_idx_idx s9\nv_mov_b32 v42, v10\ns_set_gpr_idx_off\ns_endpgm\n")
    np.testing.assert_array_equal(get_v(group, 40), np.broadcast_to(value(10), (4, 64)))
    for wave, index in enumerate(INDEX_OF_WAVE):
        np.testing.assert_array_equal(get_v(group, 41)[wave], value(10 + index))
    np.testing.assert_array_equal(get_v(group, 42), np.broadcast_to(value(15), (4, 64)))


def test_a_block_that_begins_inside():
    """Waves that wait for others in the middle go on in index mode."""
    code = assemble("s_set_gpr_idx_on s8, gpr_idx(SRC0)\nv_mov_b32 v40, v10\nv_mov_b32 v41, v11\ns_set_gpr_idx_off\ns_endpgm\n")
    group = make_group(waves=4)
    set_v(group, 0, *(1000 * i + np.arange(64) for i in range(64)))
    group.state.sgpr[8] = INDEX_OF_WAVE
    program = Program(lambda pc: code[pc : pc + 16], ACCUM_OFFSET)
    steps = program.block(0).until(8).steps + program.block(8).steps
    for group.pc, run in steps:
        run(group)
    for wave, index in enumerate(INDEX_OF_WAVE):
        np.testing.assert_array_equal(get_v(group, 41)[wave], value(11 + index))


@pytest.mark.parametrize(
    "source",
    [
        "s_set_gpr_idx_on s8, gpr_idx(SRC0)\ns_endpgm\n",
        "s_set_gpr_idx_off\ns_endpgm\n",
        "s_set_gpr_idx_on s8, gpr_idx(SRC0)\ns_set_gpr_idx_on s8, gpr_idx(SRC0)\ns_endpgm\n",
        "s_set_gpr_idx_on s8, gpr_idx(SRC0)\nv_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3]\ns_set_gpr_idx_off\ns_endpgm\n",
        "s_set_gpr_idx_on s8, gpr_idx(SRC0)\nds_read_b32 v1, v2\ns_set_gpr_idx_off\ns_endpgm\n",
        "s_set_gpr_idx_on s8, gpr_idx(SRC0)\nv_readfirstlane_b32 s1, v2\ns_set_gpr_idx_off\ns_endpgm\n",
        "s_set_gpr_idx_on s8, gpr_idx(SRC0)\ns_branch 4\ns_set_gpr_idx_off\ns_endpgm\n",
    ],
)
def test_what_is_not_emulated_raises(source):
    memory = Memory()
    try:
        with pytest.raises(UnknownInstruction, match=r"pc 0x"):
            launch(assemble(source), b"", memory)
    finally:
        memory.close()
