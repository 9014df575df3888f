"""The code object parser against a compiled sample whose facts are read off its source, bad images, and the packing of arguments."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mla_rt import code_object, msgpack
from mla_rt.code_object import Argument, CodeObject, code_object_path, pack_arguments, packaged_archs
from mla_rt.elf import Elf


@pytest.fixture(scope="module")
def image(sample: Path) -> bytes:
    return sample.read_bytes()


@pytest.fixture(scope="module")
def parsed(image: bytes) -> CodeObject:
    return CodeObject.parse(image)


class At:
    """Stands for a buffer."""

    def __init__(self, address: int):
        self.address = address


def good_values() -> dict[str, Any]:
    return {
        "x": At(0x1122334455667788),
        "y": None,
        "out": At(0x7FFF00000100),
        "n": np.int32(-2),
        "scale": np.float32(1.5),
        "flag": np.uint8(7),
        "shift": np.float64(0.25),
    }


def test_kernels_and_their_arguments(parsed: CodeObject) -> None:
    assert parsed.arch == "gfx950"
    assert sorted(parsed.kernels) == ["follow", "reverse", "scale_add"]
    assert parsed.kernels["scale_add"].args == (
        Argument("x", 0, 8, "global_buffer"),
        Argument("y", 8, 8, "global_buffer"),
        Argument("out", 16, 8, "global_buffer"),
        Argument("n", 24, 4, "by_value"),
        Argument("scale", 28, 4, "by_value"),
        Argument("flag", 32, 1, "by_value"),
        Argument("shift", 40, 8, "by_value"),
    )
    assert [arg.name for arg in parsed.kernels["reverse"].args] == ["x", "out"]


def test_sizes(parsed: CodeObject) -> None:
    scale_add, reverse = parsed.kernels["scale_add"], parsed.kernels["reverse"]
    assert (scale_add.kernarg_bytes, scale_add.lds_bytes, scale_add.block_size, scale_add.wavefront_size) == (48, 0, 256, 64)
    assert (reverse.kernarg_bytes, reverse.lds_bytes, reverse.block_size, reverse.wavefront_size) == (16, 1024, 256, 64)
    for info in parsed.kernels.values():
        assert info.scratch_bytes == 0 and info.num_agprs == 0
        assert 0 < info.num_vgprs < 32 and 0 < info.num_sgprs < 64
        # The descriptor says the same as the note: LDS and kernarg bytes are its first and third word.
        assert len(info.descriptor) == 64
        assert struct.unpack_from("<I4xI", info.descriptor) == (info.lds_bytes, info.kernarg_bytes)


def test_entries_are_code(parsed: CodeObject) -> None:
    entries = [info.entry for info in parsed.kernels.values()]
    assert len(set(entries)) == 3
    for entry in entries:
        assert entry % 256 == 0
        (segment,) = [s for s in parsed.segments if s.vaddr <= entry < s.vaddr + s.memsz]
        code = segment.data[entry - segment.vaddr :]
        assert struct.pack("<I", 0xBF810000) in code  # s_endpgm


def test_constants_are_the_read_only_words(parsed: CodeObject) -> None:
    assert parsed.constants == {"BLOCK": 256, "NEGATIVE": -7}  # not `value`, which can be written
    assert parsed.symbols["value"][1] == 4 and parsed.symbols["table"][1] == 16


def test_relocations_hold_addresses_of_the_image(parsed: CodeObject) -> None:
    assert parsed.relocations == ((parsed.symbols["table"][0], parsed.symbols["value"][0]),)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_arch_is_that_of_the_elf_flags(arch: str, compile_sample: Callable[[str], Path]) -> None:
    assert CodeObject.load(compile_sample(arch)).arch == arch


def test_an_unknown_arch_is_named_by_its_number(image: bytes) -> None:
    assert "0x5fe" in CodeObject.parse(image[:48] + struct.pack("<I", 0x5FE) + image[52:]).arch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda image: b"", "not a code object"),
        (lambda image: b"MZ" + image[2:], "not a code object"),
        (lambda image: image[:4] + b"\x01" + image[5:], "64-bit"),
        (lambda image: image[:18] + struct.pack("<H", 62) + image[20:], "ELF machine 62, not 224"),
        (lambda image: image[:40], "truncated code object: the ELF header"),
        (lambda image: image[:100], "truncated code object: the program headers"),
        (lambda image: image[:-1], "truncated code object: the section headers"),
        (lambda image: image.replace(b"AMDGPU\0", b"AMDGPX\0"), "no AMDGPU metadata note"),
        (lambda image: image.replace(b".vgpr_count", b".vgpr_cOUnt"), r"\.vgpr_count is None, not int"),
        (lambda image: image.replace(b"reverse.kd", b"reverse.kx", 1), "kernel reverse has no 64-byte descriptor"),
    ],
)
def test_what_is_no_code_object_is_refused(change: Callable[[bytes], bytes], message: str, image: bytes) -> None:
    changed = change(image)
    assert changed != image
    with pytest.raises(ValueError, match=message):
        CodeObject.parse(changed)


def test_every_truncation_is_a_value_error(image: bytes) -> None:
    for length in range(0, len(image), 7):
        with pytest.raises(ValueError):
            CodeObject.parse(image[:length])


def test_damage_is_read_or_refused(image: bytes) -> None:
    """No damaged byte of the headers, note or symbols raises anything but ValueError."""
    draw = random.Random(1)
    refused = 0
    for _ in range(2000):
        damaged = bytearray(image)
        damaged[draw.randrange(0, 0x1000) if draw.random() < 0.7 else draw.randrange(len(image))] = draw.randrange(256)
        try:
            CodeObject.parse(bytes(damaged))
        except ValueError:
            refused += 1
    assert 100 < refused < 1900


def test_notes_are_padded_to_four_bytes() -> None:
    notes = [(b"X\0", 7, b"12345"), (b"AMDGPU\0", 32, b"\x81\x01\x02")]
    packed = b""
    for owner, kind, content in notes:
        packed += struct.pack("<III", len(owner), len(content), kind) + owner.ljust(-(-len(owner) // 4) * 4, b"\0")
        packed += content.ljust(-(-len(content) // 4) * 4, b"\0")
    header = b"\x7fELF\x02\x01\x01\x40\x03".ljust(16, b"\0") + struct.pack("<HHIQQQIHHHHHH", 3, 224, 1, 0, 64, 0, 0x54F, 64, 56, 1, 64, 0, 0)
    program = struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(packed), len(packed), 4)
    assert list(Elf(header + program + packed).notes()) == notes


def test_load_names_the_file(tmp_path: Path, sample: Path) -> None:
    bad = tmp_path / "bad.co"
    bad.write_bytes(b"not ELF at all")
    with pytest.raises(ValueError, match=r"bad\.co: not a code object"):
        CodeObject.load(bad)
    with pytest.raises(FileNotFoundError):
        CodeObject.load(tmp_path / "none.co")
    assert CodeObject.load(str(sample)).arch == "gfx950"


def test_packing_is_the_kernarg_segment(parsed: CodeObject) -> None:
    packed = pack_arguments(parsed.kernels["scale_add"], good_values())
    assert isinstance(packed, ctypes.Structure)
    expected = struct.pack("<QQQifB7xd", 0x1122334455667788, 0, 0x7FFF00000100, -2, 1.5, 7, 0.25)
    assert bytes(packed) == expected and len(expected) == 48


def test_packing_follows_the_offsets_of_the_note(parsed: CodeObject) -> None:
    info = replace(parsed.kernels["reverse"], args=(Argument("out", 16, 8, "global_buffer"), Argument("x", 4, 2, "by_value")), kernarg_bytes=32)
    assert bytes(pack_arguments(info, {"x": np.uint16(0xABCD), "out": At(5)})) == struct.pack("<4xH10xQ8x", 0xABCD, 5)
    overlapping = replace(info, args=(Argument("out", 0, 8, "global_buffer"), Argument("x", 4, 2, "by_value")))
    with pytest.raises(ValueError, match="argument x at offset 4 overlaps"):
        pack_arguments(overlapping, {"x": np.uint16(1), "out": None})


def test_missing_and_unknown_names(parsed: CodeObject) -> None:
    info, values = parsed.kernels["scale_add"], good_values()
    del values["n"], values["scale"]
    with pytest.raises(TypeError, match="scale_add: missing arguments n, scale"):
        pack_arguments(info, values)
    with pytest.raises(TypeError, match="scale_add: unknown argument alpha; it takes x, y, out, n"):
        pack_arguments(info, good_values() | {"alpha": np.float32(1)})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 3, "argument n is passed by value: a numpy scalar of 4 bytes is needed, not builtins.int"),
        ("scale", 1.0, "argument scale is passed by value: a numpy scalar of 4 bytes is needed, not builtins.float"),
        ("flag", True, "not builtins.bool"),
        ("n", None, "argument n is passed by value.*not builtins.NoneType"),
        ("n", np.array(3, np.int32), "not numpy.ndarray"),
        ("n", np.int64(3), "argument n is passed by value in 4 bytes, but numpy.int64 has 8"),
        ("scale", np.float64(1), "in 4 bytes, but numpy.float64 has 8"),
        ("shift", np.float32(1), "in 8 bytes, but numpy.float32 has 4"),
        ("x", 4096, "argument x is a pointer: a Buffer or None is needed, not builtins.int"),
        ("x", np.uint64(4096), "argument x is a pointer"),
        ("x", np.zeros(4, np.float32), "argument x is a pointer.*not numpy.ndarray"),
    ],
)
def test_wrong_kinds_of_value(name: str, value: Any, message: str, parsed: CodeObject) -> None:
    with pytest.raises(TypeError, match=message):
        pack_arguments(parsed.kernels["scale_add"], good_values() | {name: value})


def test_hidden_arguments_are_not_passed(parsed: CodeObject) -> None:
    info = replace(parsed.kernels["reverse"], args=(Argument("arg0", 0, 4, "hidden_block_count_x"),))
    with pytest.raises(TypeError, match="kind hidden_block_count_x"):
        pack_arguments(info, {"arg0": np.int32(1)})


def test_packaged_code_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_object, "CODE_OBJECTS", tmp_path)
    assert packaged_archs() == []
    with pytest.raises(FileNotFoundError, match=r"no code object k\.co for gfx950.*`make all`"):
        code_object_path("k", "gfx950")
    (tmp_path / "gfx950").mkdir()
    (tmp_path / "gfx950" / "k.co").write_bytes(b"")
    assert packaged_archs() == ["gfx950"]
    assert code_object_path("k", "gfx950") == tmp_path / "gfx950" / "k.co"
    with pytest.raises(FileNotFoundError, match=r"for gfx942 \(there are some for gfx950\)"):
        code_object_path("k", "gfx942")


# Encodings written out from the msgpack specification.
@pytest.mark.parametrize(
    ("data", "value"),
    [
        ("7f", 127),
        ("ff", -1),
        ("e0", -32),
        ("c0", None),
        ("c2", False),
        ("c3", True),
        ("ccff", 255),
        ("cd0102", 258),
        ("ce00010000", 65536),
        ("cf0000000100000000", 1 << 32),
        ("d080", -128),
        ("d18000", -32768),
        ("d2ffffffff", -1),
        ("d3ffffffffffffff00", -256),
        ("ca3fc00000", 1.5),
        ("cb4000000000000000", 2.0),
        ("a3616263", "abc"),
        ("d903616263", "abc"),
        ("da0003616263", "abc"),
        ("db00000003616263", "abc"),
        ("c4020001", b"\0\1"),
        ("92a16101", ["a", 1]),
        ("dc0001c3", [True]),
        ("dd00000001c3", [True]),
        ("81a161910f", {"a": [15]}),
        ("de0001a16101", {"a": 1}),
        ("df00000001a16101", {"a": 1}),
    ],
)
def test_msgpack(data: str, value: Any) -> None:
    assert msgpack.unpack(bytes.fromhex(data)) == value
    with pytest.raises(ValueError, match="follow"):
        msgpack.unpack(bytes.fromhex(data + "00"))
    for length in range(len(data) // 2):
        with pytest.raises(ValueError, match="not whole"):
            msgpack.unpack(bytes.fromhex(data)[:length])


@pytest.mark.parametrize("data", ["c1", "c70101ff", "a2ff00", "8190c0"])
def test_msgpack_that_code_objects_do_not_use(data: str) -> None:
    with pytest.raises(ValueError):
        msgpack.unpack(bytes.fromhex(data))
