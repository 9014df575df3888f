"""The tables of an AMD GPU ELF image: program headers, exported objects, relocations, notes. Layout: System V ABI, and LLVM's AMDGPU page."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

EM_AMDGPU = 224
PT_LOAD, PT_NOTE = 1, 4
PF_W = 2
SHT_RELA, SHT_DYNSYM = 4, 11
STT_OBJECT = 1
R_AMDGPU_RELATIVE64 = 13

# EF_AMDGPU_MACH, the low byte of e_flags.
MACHINES = {
    0x2F: "gfx906", 0x30: "gfx908", 0x36: "gfx1030", 0x3F: "gfx90a", 0x40: "gfx940", 0x41: "gfx1100",
    0x4B: "gfx941", 0x4C: "gfx942", 0x48: "gfx1200", 0x4E: "gfx1201", 0x4F: "gfx950",
}  # fmt: skip


@dataclass(frozen=True)
class Program:
    kind: int
    flags: int
    offset: int
    vaddr: int
    filesz: int
    memsz: int


@dataclass(frozen=True)
class Section:
    kind: int
    offset: int
    size: int
    link: int


class Elf:
    """The tables of a 64-bit little-endian ELF image that loading a code object needs. Every read is checked against the image's end."""

    def __init__(self, image: bytes):
        self.image = image
        if bytes(image[:6]) != b"\x7fELF\x02\x01":
            raise ValueError("not a code object: not a 64-bit little-endian ELF file")
        (_, machine, _, _, phoff, shoff, flags, _, _, phnum, _, shnum, _) = struct.unpack("<HHIQQQIHHHHHH", self.take(16, 48, "the ELF header"))
        if machine != EM_AMDGPU:
            raise ValueError(f"not a code object: ELF machine {machine}, not {EM_AMDGPU} (AMD GPU)")
        self.arch = MACHINES.get(flags & 0xFF, f"an unknown architecture (e_flags {flags:#x})")
        self.programs = []
        for kind, pflags, offset, vaddr, _, filesz, memsz, _ in struct.iter_unpack("<IIQQQQQQ", self.take(phoff, 56 * phnum, "the program headers")):
            if filesz > memsz and kind == PT_LOAD:
                raise ValueError(f"the segment at {vaddr:#x} is larger in the file than in memory")
            self.programs.append(Program(kind, pflags, offset, vaddr, filesz, memsz))
        self.sections = []
        for _, kind, _, _, offset, size, link, _, _, _ in struct.iter_unpack("<IIQQQQIIQQ", self.take(shoff, 64 * shnum, "the section headers")):
            self.sections.append(Section(kind, offset, size, link))

    def take(self, offset: int, size: int, what: str) -> bytes:
        if offset + size > len(self.image):
            raise ValueError(f"truncated code object: {what} ends at byte {offset + size}, the image at {len(self.image)}")
        return self.image[offset : offset + size]

    def read_virtual(self, vaddr: int, size: int) -> bytes:
        return self.take(vaddr - (program := self._program_of(vaddr)).vaddr + program.offset, size, f"the object at {vaddr:#x}")

    def is_read_only(self, vaddr: int) -> bool:
        return not self._program_of(vaddr).flags & PF_W

    def _program_of(self, vaddr: int) -> Program:
        for program in self.programs:
            if program.kind == PT_LOAD and program.vaddr <= vaddr < program.vaddr + program.memsz:
                return program
        raise ValueError(f"no loaded segment holds address {vaddr:#x}")

    def exported_objects(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """(name, (virtual address, bytes)) of each data object in the dynamic symbol table."""
        for section in self.sections:
            if section.kind != SHT_DYNSYM:
                continue
            if section.link >= len(self.sections):
                raise ValueError("the symbol table names no string table")
            strings = self.take(self.sections[section.link].offset, self.sections[section.link].size, "the string table")
            symbols = self.take(section.offset, section.size // 24 * 24, "the symbol table")
            for name, info, _, _, value, size in struct.iter_unpack("<IBBHQQ", symbols):
                if info & 15 == STT_OBJECT:
                    yield strings[name:].split(b"\0", 1)[0].decode(errors="backslashreplace"), (value, size)

    def relocations(self) -> Iterator[tuple[int, int]]:
        """(virtual address of a 64-bit word, addend): the word is to hold the load address plus the addend. ValueError for any other kind."""
        for section in self.sections:
            if section.kind != SHT_RELA:
                continue
            entries = self.take(section.offset, section.size // 24 * 24, "the relocations")
            for offset, info, addend in struct.iter_unpack("<QQq", entries):
                if info != R_AMDGPU_RELATIVE64:
                    raise ValueError(f"relocation of type {info & 0xFFFFFFFF} at {offset:#x}: only R_AMDGPU_RELATIVE64 is supported")
                yield offset, addend

    def notes(self) -> Iterator[tuple[bytes, int, bytes]]:
        """(owner with its terminating zero, type, content) of every note."""
        for program in self.programs:
            if program.kind != PT_NOTE:
                continue
            notes = self.take(program.offset, program.filesz, "the notes")
            position = 0
            while position + 12 <= len(notes):
                owner_size, size, kind = struct.unpack_from("<III", notes, position)
                owner_end = position + 12 + owner_size
                start = (owner_end + 3) & ~3
                yield notes[position + 12 : owner_end], kind, notes[start : start + size]
                position = (start + size + 3) & ~3
