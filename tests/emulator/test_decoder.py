"""Every row of the scalar and vector tables against LLVM: what it assembles decodes to that row, and its fields to its operands."""

from __future__ import annotations

import functools
import itertools

import pytest
from asm import accepted, encodings

from mla_rt.emulator import packed, scalar, vector
from mla_rt.emulator.decoder import decode
from mla_rt.emulator.encodings import extract_fields, identify, literal_follows
from mla_rt.errors import UnknownInstruction

ACCUM_OFFSET = 32

# Operand texts of each role. LLVM takes the one of the right width; all encode the same number.
ROLES = {
    "sdst": ["s6", "s[6:7]"],
    "ssrc0": ["s10", "s[10:11]"],
    "ssrc1": ["s12", "s[12:13]"],
    "vdst": ["v6", "v[6:7]"],
    "src0": ["v10", "v[10:11]"],
    "src1": ["v12", "v[12:13]"],
    "vsrc1": ["v12", "v[12:13]"],
    "src2": ["v14", "v[14:15]"],
    "mask": ["s[20:21]"],
}
SOURCES3 = {"src0": 266, "src1": 268, "src2": 270}

# encoding -> list of (operand roles, text behind them, fields expected)
FORMS: dict[str, list[tuple[str, str, dict[str, int]]]] = {
    "SOP1": [
        ("sdst ssrc0", "", {"sdst": 6, "ssrc0": 10}),
        ("ssrc0", "", {"ssrc0": 10}),
        ("sdst", "", {"sdst": 6}),
    ],
    "SOP2": [("sdst ssrc0 ssrc1", "", {"sdst": 6, "ssrc0": 10, "ssrc1": 12})],
    "SOPC": [("ssrc0 ssrc1", "", {"ssrc0": 10, "ssrc1": 12}), ("ssrc0", ", gpr_idx(SRC0,DST)", {"ssrc0": 10, "ssrc1": 9})],
    "SOPK": [("sdst", ", 0x1234", {"sdst": 6, "simm16": 0x1234}), ("sdst", ", 4660", {"sdst": 6, "simm16": 0x1234})],
    "SOPP": [
        ("", "", {"simm16": 0}),
        ("", " 4", {"simm16": 4}),
        ("", " vmcnt(1) & lgkmcnt(2)", {"simm16": 0x271}),
        ("", " gpr_idx(SRC1)", {"simm16": 2}),
    ],
    "VOP1": [
        ("vdst src0", "", {"vdst": 6, "src0": 266}),
        ("sdst src0", "", {"vdst": 6, "src0": 266}),
        ("", "", {"vdst": 0, "src0": 0}),
        ("acc", "", {"vdst": 6, "src0": 266}),
    ],
    "VOP1_SDWA": [("vdst src0", " dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2", {"vdst": 6, "src0": 266, "dst_sel": 5, "src0_sel": 2})],
    "VOP1_DPP": [("vdst src0", " row_shl:3 row_mask:0x7 bank_mask:0xb", {"vdst": 6, "src0": 266, "dpp_ctrl": 0x103, "row_mask": 7, "bank_mask": 11})],
    "VOP2": [
        ("vdst src0 vsrc1", "", {"vdst": 6, "src0": 266, "vsrc1": 12}),
        ("vdst src0 vsrc1", ", vcc", {"vdst": 6, "src0": 266, "vsrc1": 12}),
        ("vdst vcc src0 vsrc1", "", {"vdst": 6, "src0": 266, "vsrc1": 12}),
        ("vdst vcc src0 vsrc1", ", vcc", {"vdst": 6, "src0": 266, "vsrc1": 12}),
        ("vdst src0 vsrc1", ", 0x42280000", {"vdst": 6, "src0": 266, "vsrc1": 12, "literal": 0x42280000}),
        ("vdst src0 literal vsrc1", "", {"vdst": 6, "src0": 266, "vsrc1": 12, "literal": 0x42280000}),
    ],
    "VOP2_SDWA": [
        (
            roles,
            tail + " dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_3",
            {"vdst": 6, "src0": 266, "src0_sel": 5, "src1_sel": 3},
        )
        for roles, tail in (("vdst src0 vsrc1", ""), ("vdst src0 vsrc1", ", vcc"), ("vdst vcc src0 vsrc1", ""), ("vdst vcc src0 vsrc1", ", vcc"))
    ],
    "VOP2_DPP": [
        (roles, tail + " quad_perm:[3,2,1,0] row_mask:0xf bank_mask:0xf bound_ctrl:1", {"vdst": 6, "src0": 266, "dpp_ctrl": 0x1B, "bound_ctrl": 1})
        for roles, tail in (("vdst src0 vsrc1", ""), ("vdst src0 vsrc1", ", vcc"), ("vdst vcc src0 vsrc1", ""), ("vdst vcc src0 vsrc1", ", vcc"))
    ],
    "VOPC": [("vcc src0 vsrc1", "", {"src0": 266, "vsrc1": 12})],
    "VOPC_SDWA": [
        ("mask src0 vsrc1", " src0_sel:WORD_1 src1_sel:DWORD", {"src0": 266, "vsrc1": 12, "sdst": 20, "sd": 1, "src0_sel": 5, "src1_sel": 6})
    ],
    "VOP3": [
        ("vdst src0 src1 src2", "", {"vdst": 6, **SOURCES3}),
        ("vdst src0 src1 mask", "", {"vdst": 6, "src0": 266, "src1": 268, "src2": 20}),
        ("vdst src0 src1 src2", " bitop3:0xca", {"vdst": 6, "omod": 3, "abs": 1, "neg": 2, **SOURCES3}),
        ("vdst src0 src1", "", {"vdst": 6, "src0": 266, "src1": 268}),
        ("vdst src0 ssrc1", "", {"vdst": 6, "src0": 266, "src1": 12}),
        ("sdst src0 ssrc1", "", {"vdst": 6, "src0": 266, "src1": 12}),
        ("vdst ssrc0", ", m0", {"vdst": 6, "src0": 10, "src1": 124}),
        ("mask src0 src1", "", {"vdst": 20, "src0": 266, "src1": 268}),
        ("vdst src0", "", {"vdst": 6, "src0": 266}),
        ("sdst src0", "", {"vdst": 6, "src0": 266}),
        ("", "", {"vdst": 0, "src0": 0}),
    ],
    "VOP3SD": [
        ("vdst mask src0 src1", "", {"vdst": 6, "sdst": 20, "src0": 266, "src1": 268}),
        ("vdst mask src0 src1 src2", "", {"vdst": 6, "sdst": 20, **SOURCES3}),
        ("vdst mask src0 src1 mask", "", {"vdst": 6, "sdst": 20, "src0": 266, "src1": 268, "src2": 20}),
        ("vdst vcc src0 src1 src2", "", {"vdst": 6, "sdst": 106, **SOURCES3}),
    ],
    "VOP3P": [
        ("vdst src0 src1 src2", "", {"vdst": 6, **SOURCES3}),
        ("vdst src0 src1", "", {"vdst": 6, "src0": 266, "src1": 268}),
        ("vdst src0 src1", " op_sel:[1,0] op_sel_hi:[0,1]", {"vdst": 6, "op_sel": 1, "src0": 266, "src1": 268}),
        ("accdst src0", "", {"vdst": 6, "src0": 266}),
        ("vdst accsrc", "", {"vdst": 6, "src0": 266}),
    ],
}
ROLES.update({"acc": ["a6, a10"], "accdst": ["a6"], "accsrc": ["a10"], "vcc": ["vcc"], "literal": ["0x42280000"]})
LONE_OPERAND = {"ssrc0": ("s_setpc_b64", "s_set_gpr_idx_idx"), "sdst": ("s_getpc_b64",)}
TABLES = {
    "SOP1": scalar.SOP1, "SOP2": scalar.SOP2, "SOPC": scalar.SOPC, "SOPK": scalar.SOPK, "SOPP": scalar.SOPP,
    "VOP1": vector.VOP1, "VOP2": vector.VOP2, "VOPC": vector.VOPC, "VOP3": vector.VOP3, "VOP3P": packed.VOP3P,
}  # fmt: skip
SUFFIX = {"VOP1": "_e32", "VOP2": "_e32", "VOPC": "_e32", "VOP3": "_e64", "VOP3SD": "_e64"}
# Conversions to and from the narrow formats have tables and tests of their own.
ELSEWHERE = frozenset(entry.mnemonic for table in (vector.VOP1_CONVERT, vector.VOP3_CONVERT) for entry in table.values())


def texts(encoding: str, mnemonic: str) -> list[tuple[str, dict[str, int]]]:
    """Candidate lines for a mnemonic in an encoding, with the fields that each must give."""
    found = []
    kind = encoding.partition("_")[2]
    suffixes = [f"_{kind.lower()}"] if kind else [SUFFIX.get(encoding, ""), ""]
    # Register pairs only where the name speaks of 64 bits or of pairs of dwords: it keeps the number of candidates down.
    wide = "64" in mnemonic or mnemonic.startswith(("v_pk_", "v_mqsad", "v_qsad"))
    for suffix, (roles, tail, fields) in itertools.product(suffixes, FORMS[encoding]):
        if encoding == "SOP1" and roles in LONE_OPERAND and mnemonic not in LONE_OPERAND[roles]:
            continue
        for operands in itertools.product(*(ROLES[role][: None if wide else 1] for role in roles.split())):
            found.append((f"{mnemonic}{suffix} {', '.join(operands)}{tail}".strip(), fields))
    return found


@functools.cache
def assembled() -> dict[str, bytes]:
    """All candidates of all tables, in one run of LLVM."""
    lines = []
    for name, table in TABLES.items():
        for entry in table.values():
            if entry.mnemonic not in ELSEWHERE:
                for encoding in FORMS:
                    if encoding.startswith(name):
                        lines += [text for text, _ in texts(encoding, entry.mnemonic)]
    return accepted(tuple(dict.fromkeys(lines)))


CASES = [(name, opcode) for name, table in TABLES.items() for opcode, entry in table.items() if entry.mnemonic not in ELSEWHERE]


@pytest.mark.parametrize(("table", "opcode"), CASES, ids=[f"{name}-{TABLES[name][opcode].mnemonic}" for name, opcode in CASES])
def test_row_is_llvms(table, opcode):
    mnemonic = TABLES[table][opcode].mnemonic
    in_this_table = 0
    for encoding in FORMS:
        if not encoding.startswith(table):
            continue
        for text, fields in texts(encoding, mnemonic):
            code = assembled().get(text)
            if code is None:
                continue
            instruction = decode(code, 0, ACCUM_OFFSET)
            got = instruction.encoded
            assert instruction.mnemonic == mnemonic and got.size == len(code), text
            if got.encoding == encoding:
                in_this_table += 1
                assert got.op == opcode
                assert {name: got.fields[name] for name in fields} == fields, text
    assert in_this_table, f"LLVM has no {mnemonic} in {table}"


SAMPLES = [  # text, encoding, some fields
    ("s_mov_b32 s1, 0xdeadbeef", "SOP1", {"ssrc0": 255, "literal": 0xDEADBEEF}),
    ("s_add_u32 s1, 0x12345678, s3", "SOP2", {"ssrc0": 255, "ssrc1": 3, "literal": 0x12345678}),
    ("v_add_f32_e32 v1, 0x40490fdb, v2", "VOP2", {"src0": 255, "literal": 0x40490FDB}),
    ("v_fma_f32 v1, -v2, |v3|, -|v4| clamp", "VOP3", {"neg": 5, "abs": 6, "clamp": 1}),
    ("v_pk_fma_f16 v1, v2, v3, v4 op_sel:[1,0,1] op_sel_hi:[0,1,0] neg_lo:[1,0,0] neg_hi:[0,0,1] clamp", "VOP3P",
     {"op_sel": 5, "op_sel_hi": 2, "neg": 1, "neg_hi": 4, "clamp": 1}),
    ("v_mad_u16 v1, v2, v3, v4 op_sel:[0,1,0,1]", "VOP3", {"op_sel": 10}),
    ("s_load_dwordx4 s[4:7], s[2:3], -8", "SMEM", {"sdata": 4, "sbase": 1, "offset": -8, "imm": 1, "soffset_en": 0}),
    ("s_load_dword s4, s[2:3], s5 offset:0x10", "SMEM", {"soffset": 5, "soffset_en": 1, "offset": 16, "imm": 1}),
    ("global_load_dwordx4 v[4:7], v2, s[8:9] offset:-16", "FLAT", {"seg": 2, "vdst": 4, "addr": 2, "saddr": 8, "offset": -16}),
    ("global_store_dword v[2:3], a5, off", "FLAT", {"saddr": 127, "data": 5, "acc": 1}),
    ("flat_load_dword v1, v[2:3] offset:4095", "FLAT", {"seg": 0, "offset": 4095}),
    ("buffer_load_dwordx4 v5, s[8:11], s3 offen offset:4092 lds", "MUBUF", {"vaddr": 5, "srsrc": 2, "soffset": 3, "offen": 1, "lds": 1}),
    ("ds_read_b128 a[4:7], v1 offset:65520", "DS", {"vdst": 4, "addr": 1, "acc": 1, "offset0": 0xF0, "offset1": 0xFF}),
    ("v_mfma_f32_16x16x32_bf16 a[0:3], v[4:7], a[8:11], a[0:3]", "VOP3P-MAI", {"acc_cd": 1, "acc": 2, "src2": 256}),
    ("v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[20:23], v24, v25 op_sel:[1,0,0] op_sel_hi:[0,1,0]", "VOP3PX2",
     {"vdst": 0, "src0": 260, "src1": 268, "src2": 276, "scale_src0": 280, "scale_src1": 281, "scale_op_sel": 1, "scale_op_sel_hi": 2, "op": 0x2D}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "encoding", "fields"), SAMPLES)
def test_fields(text, encoding, fields):
    lines = tuple(case[0] for case in SAMPLES)
    code = dict(zip(lines, (code for _, code in encodings(lines)), strict=True))[text]
    layout = identify(int.from_bytes(code[:4], "little"))
    assert layout is not None and layout.name == encoding
    word = int.from_bytes(code[: layout.size], "little")
    assert not word & layout.reserved
    got = extract_fields(layout, word)
    if literal_follows(layout, got):
        got["literal"] = int.from_bytes(code[layout.size :], "little")
        assert len(code) == layout.size + 4
    else:
        assert len(code) == layout.size
    assert {name: got[name] for name in fields} == fields


UNKNOWN = {
    "format": "00 00 00 c4 00 00 00 00",  # EXP, which compute has not
    "opcode": "00 7f 80 be",  # SOP1 127
    "reserved bits": "01 00 06 c0 10 00 20 00",  # SMEM with bit 53
    "omod": "00 00 01 d1 01 05 02 08",  # v_add_f32 mul:2
    "neg on an integer": "00 00 34 d1 01 05 02 20",  # v_add_u32_e64 v0, -v1, v2
    "clamp without a meaning": "00 80 13 d1 01 05 02 00",  # v_and_b32_e64 clamp
    "scale prefix before another instruction": "00 00 ac d3 18 33 02 00 00 00 01 d1 01 05 02 00",
    "cut literal": "ff 00 81 be",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_raises_with_pc_and_bytes(name):
    code = bytes.fromhex(UNKNOWN[name])
    with pytest.raises(UnknownInstruction) as caught:
        decode(code, 0x1040, ACCUM_OFFSET, origin=0x1000)
    assert "pc 0x40" in str(caught.value) and code[:4].hex(" ") in str(caught.value)
