"""Every row of the memory, conversion and matrix tables against LLVM: the mnemonic's encoding decodes to that row, and its fields to its operands."""

from __future__ import annotations

import re

import pytest
from asm import encodings

from mla_rt.emulator import buffer_memory, convert, global_memory, lds, mfma, scalar_memory
from mla_rt.emulator.decoder import decode
from mla_rt.errors import UnknownInstruction


def tuple_of(first: int, count: int, bank: str = "v") -> str:
    return f"{bank}{first}" if count == 1 else f"{bank}[{first}:{first + count - 1}]"


def width(name: str) -> int:
    """Dwords that a memory mnemonic moves, by its suffix."""
    if found := re.search(r"dwordx(\d+)", name):
        return int(found[1])
    if found := re.search(r"_[biuf](\d+)(_tr_b\d+)?$", name):
        return max(1, int(found[1]) // 32)
    return 2 if name.endswith("_x2") else 1


def smem_text(name: str) -> str:
    if "dcache" in name:
        return name
    if "time" in name:
        return f"{name} s[4:5]"
    count = width(name)
    base = "s[8:11]" if "buffer" in name else "s[8:9]"
    return f"{name} {tuple_of(16, count, 's')}, {base}, 0x40"


def flat_text(name: str) -> str:
    count = width(name)
    if "atomic" in name:
        operands = 2 * count if "cmpswap" in name else count
        return f"{name} {tuple_of(4, count)}, v[2:3], {tuple_of(8, operands)}, off offset:-8 sc0"
    if "lds" in name:
        return f"{name} v[2:3], off offset:-8"
    if "store" in name:
        return f"{name} v[2:3], {tuple_of(4, count)}, off offset:-8"
    return f"{name} {tuple_of(4, count)}, v[2:3], off offset:-8"


def mubuf_text(name: str) -> str:
    if name in ("buffer_wbl2", "buffer_inv"):
        return f"{name} sc1"
    count = width(name) * (2 if "cmpswap" in name else 1)
    return f"{name} {tuple_of(4, count)}, v2, s[8:11], s3 offen offset:8"


def ds_text(name: str) -> str:
    count = width(name)
    if "permute" in name:
        return f"{name} v4, v2, v6 offset:8"
    if "swizzle" in name:
        return f"{name} v4, v2 offset:8"
    if "read2" in name:
        return f"{name} {tuple_of(4, 2 * count)}, v2 offset0:8"
    if "write2" in name:
        return f"{name} v2, {tuple_of(6, count)}, {tuple_of(10, count)} offset0:8"
    if "read" in name:
        return f"{name} {tuple_of(4, count)}, v2 offset:8"
    sources = f"{tuple_of(6, count)}, {tuple_of(10, count)}" if "cmpst" in name else tuple_of(6, count)
    return f"{name} {tuple_of(4, count)}, v2, {sources} offset:8" if "rtn" in name else f"{name} v2, {sources} offset:8"


@pytest.mark.parametrize(
    ("table", "text_of", "fields"),
    [
        (scalar_memory.SMEM, smem_text, {"sbase": 4, "imm": 1, "offset": 64}),
        (global_memory.FLAT, flat_text, {"addr": 2, "saddr": 0x7F, "offset": -8, "seg": 2}),
        (buffer_memory.MUBUF, mubuf_text, {"vaddr": 2, "srsrc": 2, "soffset": 3, "offset": 8, "offen": 1, "idxen": 0, "lds": 0}),
        (lds.DS, ds_text, {"addr": 2, "offset0": 8, "offset1": 0, "gds": 0}),
    ],
    ids=["SMEM", "FLAT", "MUBUF", "DS"],
)
def test_memory_rows(table, text_of, fields):
    names = {opcode: row.mnemonic for opcode, row in table.items()}
    assert len(set(names.values())) == len(names)
    lines = tuple(text_of(name) for name in names.values())
    for (opcode, name), line, (_, code) in zip(names.items(), lines, encodings(lines), strict=True):
        instruction = decode(code, 0, 256)
        assert (instruction.mnemonic, instruction.encoded.op) == (name, opcode), line
        if any(part in name for part in ("dcache", "time", "wbl2", "inv")):
            continue
        assert {field: instruction.encoded.fields[field] for field in fields} == fields, line
        registers = instruction.encoded.fields
        if "vdst" in registers and re.match(r"\S+ (v4|v\[4)", line) and "store" not in name and "write" not in name:
            assert registers["vdst"] == 4, line


def convert_text(name: str) -> str:
    """Operands by what the name says is converted to what."""
    plain = {
        "v_cvt_f32_fp8": "v4, v2", "v_cvt_f32_bf8": "v4, v2", "v_cvt_pk_f32_fp8": "v[4:5], v2", "v_cvt_pk_f32_bf8": "v[4:5], v2",
        "v_cvt_f32_bf16": "v4, v2",
    }  # fmt: skip
    if name in plain:
        return f"{name} {plain[name]}"
    if not name.startswith("v_cvt_scalef32_"):
        return f"{name} v4, v2, v3"
    kind = name.removeprefix("v_cvt_scalef32_")
    *how, to, of = kind.split("_")
    count = 32 if "pk32" in how or "2xpk16" in how else 2 if "pk" in how else 1
    bits = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4}
    target = tuple_of(4, max(1, count * bits[to] // 32))
    separate = of == "f32" and how == ["pk"]
    if how == ["2xpk16"]:
        sources = "v[40:55], v[60:75]"
    elif separate:
        sources = "v40, v41"
    else:
        sources = tuple_of(40, max(1, count * bits[of] // 32))
    return f"{name} {target}, {sources}{', v80' if 'sr' in how else ''}, v81"


def test_conversion_rows():
    for table, suffix in ((convert.VOP1_CONVERT, ""), (convert.VOP3_CONVERT, "_e64")):
        names = {opcode: row.mnemonic for opcode, row in table.items()}
        lines = []
        for name in names.values():
            text = convert_text(name)
            mnemonic, operands = text.split(" ", 1)
            lines.append(f"{mnemonic}{suffix if name in {row.mnemonic for row in convert.VOP1_CONVERT.values()} else ''} {operands}")
        for (opcode, name), line, (_, code) in zip(names.items(), lines, encodings(tuple(lines)), strict=True):
            instruction = decode(code, 0, 256)
            assert (instruction.mnemonic, instruction.encoded.op) == (name, opcode), line
            assert instruction.encoded.vdst == 4


def mfma_text(name: str) -> str:
    """Register counts worked out from the mnemonic: dim x dim x depth [_blocks] _ types."""
    result, shape, *types = name.removeprefix("v_mfma_").removeprefix("scale_").split("_")
    dim, _, depth = (int(part) for part in shape.split("x"))
    blocks = int(types.pop(0)[:-1]) if types[0].endswith("b") and types[0][:-1].isdigit() else 1
    bits = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16, "i8": 8, "fp8": 8, "bf8": 8, "f8f6f4": 8}[types[0]]
    inputs, outputs = max(1, dim * blocks * depth * bits // 64 // 32), dim * dim * blocks * (2 if result == "f64" else 1) // 64
    text = f"{name} {tuple_of(100, outputs)}, {tuple_of(20, inputs)}, {tuple_of(40, inputs)}, {tuple_of(100, outputs)}"
    return text + ", v80, v81 op_sel:[1,0] op_sel_hi:[0,1]" if "scale" in name else text


def test_matrix_rows():
    for table in (mfma.MFMA, mfma.MFMA_SCALED):
        names = {opcode: row.mnemonic for opcode, row in table.items()}
        lines = tuple(mfma_text(name) for name in names.values())
        for (opcode, name), line, (_, code) in zip(names.items(), lines, encodings(lines), strict=True):
            instruction = decode(code, 0, 256)
            fields = instruction.encoded.fields
            assert (instruction.mnemonic, instruction.encoded.op) == (name, opcode), line
            assert (fields["vdst"], fields["src0"], fields["src1"], fields["src2"]) == (100, 256 + 20, 256 + 40, 256 + 100)


def test_scaled_matrix_fields():
    """A known encoding of 16 bytes, and one with byte selects and formats."""
    code = bytes.fromhex("0000acd3 18330200 0008add3 04195204")
    text = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[20:23], v24, v25 op_sel_hi:[0,0,0]"
    chosen = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[12:17], v[20:23], v24, v25 op_sel:[0,1,0] op_sel_hi:[1,0,0] cbsz:4 blgp:2"
    (_, plain), (_, selected) = encodings((text, chosen))
    assert plain == code
    fields = decode(plain, 0, 256).encoded.fields
    assert (fields["scale_src0"], fields["scale_src1"], fields["scale_op_sel"], fields["scale_op_sel_hi"]) == (256 + 24, 256 + 25, 0, 0)
    fields = decode(selected, 0, 256).encoded.fields
    assert (fields["scale_op_sel"], fields["scale_op_sel_hi"], fields["cbsz"], fields["blgp"]) == (2, 1, 4, 2)


@pytest.mark.parametrize(
    "text",
    [
        "v_mfma_f32_32x32x4_2b_bf16 v[0:31], v[40:41], v[42:43], v[0:31] cbsz:1",
        "v_mfma_f32_16x16x4_f32 v[0:3], v4, v5, v[0:3] blgp:1",
        "v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[10:11], v[0:7] neg:[1,0,0]",
        "v_cvt_pk_bf16_f32 v0, v1, v2 clamp",
        "ds_swizzle_b32 v0, v1 offset:0xc020",
        "scratch_load_dword v0, v1, off",
    ],
)
def test_modifiers_that_are_not_emulated_are_refused(text):
    ((_, code),) = encodings((text,))
    with pytest.raises(UnknownInstruction, match=r"pc 0x0"):
        decode(code, 0, 256)
