"""Lane movement: DPP, SDWA, readlane and writelane, permlane swaps, EXEC."""

from __future__ import annotations

import pytest
from asm import encodings
from vectors import ALL_LANES, execute, get_vgpr, make_group, set_vgpr, signed

A = [0x10000000 + 0x01010101 * lane for lane in range(64)]
B = [0xA0000000 + lane for lane in range(64)]
OLD = [0xDEAD0000 + lane for lane in range(64)]

# DPP control text -> source lane of a lane, or None where it has none.
CONTROLS = {
    "quad_perm:[1,0,3,2]": lambda n: n ^ 1,
    "quad_perm:[0,0,0,3]": lambda n: n if n % 4 == 3 else n & ~3,
    "row_shl:1": lambda n: n + 1 if n % 16 < 15 else None,
    "row_shl:15": lambda n: n + 15 if n % 16 == 0 else None,
    "row_shr:4": lambda n: n - 4 if n % 16 >= 4 else None,
    "row_ror:3": lambda n: n // 16 * 16 + (n - 3) % 16,
    "wave_shl:1": lambda n: n + 1 if n < 63 else None,
    "wave_rol:1": lambda n: (n + 1) % 64,
    "wave_shr:1": lambda n: n - 1 if n else None,
    "wave_ror:1": lambda n: (n - 1) % 64,
    "row_mirror": lambda n: n // 16 * 16 + 15 - n % 16,
    "row_half_mirror": lambda n: n // 8 * 8 + 7 - n % 8,
    "row_bcast:15": lambda n: n // 16 * 16 - 1 if n >= 16 else None,
    "row_bcast:31": lambda n: 31 if n >= 32 else None,
    "row_newbcast:5": lambda n: n // 16 * 16 + 5,
}
MOVES = {name: f"v_mov_b32_dpp v6, v10 {name} row_mask:0xf bank_mask:0xf" for name in CONTROLS}
LINES = {
    "masked": "v_mov_b32_dpp v6, v10 row_shl:1 row_mask:0x5 bank_mask:0x6",
    "zero": "v_mov_b32_dpp v6, v10 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1",
    "add": "v_add_u32_dpp v6, v10, v12 row_ror:1 row_mask:0xf bank_mask:0xf",
    "sub f32": "v_sub_f32_dpp v6, -v10, |v12| quad_perm:[3,2,1,0] row_mask:0xf bank_mask:0xf",
    "mov 64": "v_mov_b64_dpp v[6:7], v[10:11] row_newbcast:2 row_mask:0xf bank_mask:0xf",
    "fmac": "v_fmac_f32_dpp v6, v10, v12 row_newbcast:0 row_mask:0xf bank_mask:0xf",
    "sdwa bytes": "v_add_u32_sdwa v6, v10, v12 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_3 src1_sel:WORD_1",
    "sdwa sext": "v_add_u32_sdwa v6, sext(v10), v12 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:DWORD",
    "sdwa pad": "v_mov_b32_sdwa v6, v10 dst_sel:BYTE_2 dst_unused:UNUSED_PAD src0_sel:DWORD",
    "sdwa keep": "v_mov_b32_sdwa v6, v10 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_0",
    "sdwa sign": "v_mov_b32_sdwa v6, v10 dst_sel:BYTE_1 dst_unused:UNUSED_SEXT src0_sel:DWORD",
    "sdwa half": "v_add_f16_sdwa v6, -v10, v12 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:WORD_0",
    "sdwa scalar": "v_add_u32_sdwa v6, s5, v12 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD",
    "readfirstlane": "v_readfirstlane_b32 s6, v10",
    "readlane": "v_readlane_b32 s6, v10, 37",
    "readlane s": "v_readlane_b32 s6, v10, s5",
    "writelane": "v_writelane_b32 v6, s5, 63",
    "permlane16": "v_permlane16_swap_b32_e32 v6, v10",
    "permlane32": "v_permlane32_swap_b32_e32 v6, v10",
    "swap": "v_swap_b32 v6, v10",
    "mbcnt lo": "v_mbcnt_lo_u32_b32 v6, s5, v12",
    "mbcnt hi": "v_mbcnt_hi_u32_b32 v6, s5, v12",
    "mov": "v_mov_b32_e32 v6, v10",
}


def run(name: str, *, active: int = ALL_LANES, s5: int = 0, a: list[int] = A, b: list[int] = B, old: list[int] = OLD):
    lines = (*MOVES.values(), *LINES.values())
    code = dict(zip(lines, (code for _, code in encodings(lines)), strict=True))[{**MOVES, **LINES}[name]]
    group = make_group(active=active)
    set_vgpr(group, 10, a)
    set_vgpr(group, 12, b)
    set_vgpr(group, 6, old)
    group.state.sgpr[5] = s5
    execute(group, code)
    return group


@pytest.mark.parametrize("active", [ALL_LANES, 0x0FF0FFFF3333AAAA])
@pytest.mark.parametrize("name", CONTROLS)
def test_dpp_source_lanes(name, active):
    """A lane without a source, or whose source EXEC disables, keeps its value."""

    def expected(lane: int) -> int:
        source = CONTROLS[name](lane)
        usable = source is not None and active >> source & 1 and active >> lane & 1
        return A[source] if usable else OLD[lane]

    assert get_vgpr(run(name, active=active), 6) == [expected(lane) for lane in range(64)]


def test_dpp_masks():
    """Row mask 5: rows 0 and 2; bank mask 6: banks 1 and 2 of four lanes in each."""
    got = get_vgpr(run("masked"), 6)
    for lane in range(64):
        written = lane // 16 in (0, 2) and lane % 16 // 4 in (1, 2)
        assert got[lane] == (A[lane + 1] if written else OLD[lane])


def test_dpp_bound_ctrl_reads_zero():
    assert get_vgpr(run("zero"), 6) == [A[lane - 1] if lane % 16 else 0 for lane in range(64)]
    active = ALL_LANES ^ 1 << 7
    assert get_vgpr(run("zero", active=active), 6) == [
        OLD[7] if lane == 7 else 0 if lane % 16 == 0 or lane == 8 else A[lane - 1] for lane in range(64)
    ]


def test_dpp_arithmetic():
    assert get_vgpr(run("add"), 6) == [(A[lane // 16 * 16 + (lane - 1) % 16] + B[lane]) & 0xFFFFFFFF for lane in range(64)]
    one, minus_two, three = 0x3F800000, 0xC0000000, 0x40400000
    got = get_vgpr(run("sub f32", a=[one, one, one, three] * 16, b=[minus_two] * 64), 6)
    assert got == [0xC0A00000, 0xC0400000, 0xC0400000, 0xC0400000] * 16  # -3 - 2 in the first lane of four, else -1 - 2
    got = get_vgpr(run("fmac", a=[three] * 64, b=[minus_two] * 64, old=[one] * 64), 6)
    assert got == [0xC0A00000] * 64


def test_dpp_of_64_bits():
    group = make_group()
    group = run("mov 64")
    assert get_vgpr(group, 6) == [A[lane // 16 * 16 + 2] for lane in range(64)]


def test_sdwa_sources():
    assert get_vgpr(run("sdwa bytes"), 6) == [(a >> 24) + (b >> 16) for a, b in zip(A, B, strict=True)]
    a = [0x00008000 | lane for lane in range(64)]
    assert get_vgpr(run("sdwa sext", a=a), 6) == [(-128 + b) & 0xFFFFFFFF for b in B]
    assert get_vgpr(run("sdwa scalar", s5=0x12345678), 6) == [(0x1234 + b) & 0xFFFFFFFF for b in B]
    got = get_vgpr(run("sdwa half", a=[0x3C007FFF] * 64, b=[0xFFFF4200] * 64), 6)
    assert got == [0x4000] * 64  # -1 + 3


def test_sdwa_destination():
    assert get_vgpr(run("sdwa pad"), 6) == [(a & 0xFF) << 16 for a in A]
    assert get_vgpr(run("sdwa keep"), 6) == [(old & 0xFFFF) | (a & 0xFF) << 16 for a, old in zip(A, OLD, strict=True)]
    a = [0x100 + 4 * lane for lane in range(64)]
    assert get_vgpr(run("sdwa sign", a=a), 6) == [(signed(v, 8) << 8) & 0xFFFFFFFF for v in a]


def test_readlane_and_writelane_ignore_exec():
    assert run("readlane", active=1).state.sgpr[6][0] == A[37]
    assert run("readlane s", active=1, s5=0xFFFFFF42).state.sgpr[6][0] == A[2]  # only the low six bits of the lane count
    assert run("readfirstlane").state.sgpr[6][0] == A[0]
    assert run("readfirstlane", active=0x8800).state.sgpr[6][0] == A[11]
    assert run("readfirstlane", active=0).state.sgpr[6][0] == A[0]
    assert get_vgpr(run("writelane", active=1, s5=77), 6) == [*OLD[:63], 77]


@pytest.mark.parametrize(("name", "row"), [("permlane16", 16), ("permlane32", 32)])
def test_permlane_swap(name, row):
    """The destination's odd rows and the source's even rows change places."""
    group = run(name)
    odd = [lane // row % 2 == 1 for lane in range(64)]
    assert get_vgpr(group, 6) == [A[lane - row] if odd[lane] else OLD[lane] for lane in range(64)]
    assert get_vgpr(group, 10) == [A[lane] if odd[lane] else OLD[lane + row] for lane in range(64)]


def test_swap_and_exec():
    active = 0xF0F0F0F0F0F0F0F0
    group = run("swap", active=active)
    assert get_vgpr(group, 6) == [A[lane] if active >> lane & 1 else OLD[lane] for lane in range(64)]
    assert get_vgpr(group, 10) == [OLD[lane] if active >> lane & 1 else A[lane] for lane in range(64)]
    assert get_vgpr(run("mov", active=0), 6) == OLD


def test_mbcnt_counts_lanes_below():
    mask = 0x80FF1235
    low = get_vgpr(run("mbcnt lo", s5=mask), 6)
    high = get_vgpr(run("mbcnt hi", s5=mask), 6)
    for lane in range(64):
        assert low[lane] == (B[lane] + (mask & (1 << min(lane, 32)) - 1).bit_count()) & 0xFFFFFFFF
        assert high[lane] == (B[lane] + (mask & (1 << max(lane - 32, 0)) - 1).bit_count()) & 0xFFFFFFFF
