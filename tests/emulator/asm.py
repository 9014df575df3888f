"""The LLVM assembler of the ziglang package as an oracle: text -> bytes, and small kernels run on the emulator."""

from __future__ import annotations

import functools
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mla_rt.code_object import CodeObject
from mla_rt.emulator.decoder import LONGEST, decode
from mla_rt.emulator.descriptor import Descriptor
from mla_rt.emulator.instruction import Instruction
from mla_rt.emulator.machine import Dispatch, LaunchReport, run
from mla_rt.emulator.memory import Memory

_CLANG = [sys.executable, "-m", "ziglang", "clang"]
_ENCODING = re.compile(r"^\s*(.*?)\s*(?:;|//) encoding: \[([0-9a-fx,]+)\]")


def _show_encodings(lines: tuple[str, ...]) -> tuple[list[tuple[str, bytes]], str]:
    """LLVM's text and bytes of every line that it accepts, and its errors."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "lines.s")
        source.write_text("\n".join(lines) + "\n")
        options = ["-triple", "amdgcn-amd-amdhsa", "-target-cpu", "gfx950", "-filetype", "asm", "-show-encoding", "-o", "-"]
        done = subprocess.run([*_CLANG, "-cc1as", *options, str(source)], capture_output=True, text=True)
    found = [match.groups() for match in map(_ENCODING.match, done.stdout.splitlines()) if match]
    return [(text, bytes(int(byte, 16) for byte in code.split(","))) for text, code in found], done.stderr


@functools.cache
def encodings(lines: tuple[str, ...]) -> tuple[tuple[str, bytes], ...]:
    """Each line of assembly as LLVM prints it back and as bytes, in order. No line may need a fixup (a label). An error of LLVM fails the test."""
    found, errors = _show_encodings(lines)
    assert not errors, errors[:4000]
    assert len(found) == len(lines), f"{len(lines)} lines gave {len(found)} encodings"
    return tuple(found)


@functools.cache
def accepted(candidates: tuple[str, ...]) -> dict[str, bytes]:
    """Those of many candidate lines that LLVM accepts, with their bytes. A line comes back as it was given if LLVM prints it so."""
    numbers = re.compile(r"lines\.s:(\d+):\d+: error")
    _, errors = _show_encodings(candidates)
    rejected = {int(number) - 1 for number in numbers.findall(errors)}
    kept = tuple(line for i, line in enumerate(candidates) if i not in rejected)
    return dict(zip(kept, (code for _, code in encodings(kept)), strict=True))


@functools.cache
def assemble(source: str) -> bytes:
    """The .text section of an assembled source."""
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder, "kernel.s"), Path(folder, "kernel.o")
        text.write_text(source)
        command = [*_CLANG, "-target", "amdgcn-amd-amdhsa", "-mcpu=gfx950", "-mcode-object-version=5", "-c", str(text), "-o", str(binary)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        image = binary.read_bytes()
    section_table, entry_size, count, names_index = struct.unpack_from("<Q10xHHH", image, 0x28)
    headers = [struct.unpack_from("<IIQQQQ", image, section_table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        if image[names + name :].startswith(b".text\0"):
            return image[offset : offset + size]
    raise AssertionError("no .text section")


def instructions_of(code_object: CodeObject) -> Iterator[Instruction]:
    """Every instruction of a code object's kernels, each up to its s_endpgm."""
    for kernel in code_object.kernels.values():
        (segment,) = [s for s in code_object.segments if s.vaddr <= kernel.entry < s.vaddr + len(s.data)]
        position = kernel.entry - segment.vaddr
        while True:
            instruction = decode(segment.data[position : position + LONGEST], position, Descriptor.parse(kernel.descriptor).accum_offset)
            yield instruction
            position += instruction.encoded.size
            if instruction.mnemonic == "s_endpgm":
                break


def descriptor(*, lds_bytes: int = 0, num_vgprs: int = 64, accum_offset: int = 32, dims: int = 1) -> Descriptor:
    """The kernel descriptor of clang's usual kernels: s[0:1] kernarg, s2, s3, s4 workgroup x, y, z."""
    raw = bytearray(64)
    struct.pack_into("<IIIIq", raw, 0, lds_bytes, 0, 64, 0, 0)
    rsrc1 = (num_vgprs // 8 - 1) | 0xF0 << 12 | 1 << 21 | 1 << 23
    rsrc2 = 2 << 1 | 7 << 7 | (dims - 1) << 11
    struct.pack_into("<IIIH", raw, 44, accum_offset // 4 - 1, rsrc1, rsrc2, 8)
    return Descriptor.parse(bytes(raw))


def launch(
    code: bytes,
    arguments: bytes,
    memory: Memory,
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (64, 1, 1),
    lds_bytes: int = 0,
    num_vgprs: int = 64,
    dims: int = 1,
    **options: object,
) -> LaunchReport:
    """Run machine code (from its first byte) with these kernel argument bytes."""
    image = memory.allocate(len(code), "code")
    memory.bytes_at(image, len(code))[:] = np.frombuffer(code, np.uint8)
    kernarg = memory.allocate(max(len(arguments), 8), "arguments")
    memory.bytes_at(kernarg, len(arguments))[:] = np.frombuffer(arguments, np.uint8)
    wanted = descriptor(lds_bytes=lds_bytes, num_vgprs=num_vgprs, dims=dims)
    dispatch = Dispatch("test_kernel", image, image, wanted, grid, block, kernarg)
    try:
        return run(dispatch, memory, **options)  # type: ignore[arg-type]
    finally:
        memory.free(image)
        memory.free(kernarg)
