"""A code object as data: what the compiler published about its kernels, and the packing of their arguments by name.

A code object is an ELF file whose AMDGPU note (msgpack) names every kernel with its arguments, register and LDS needs, and which holds one
64-byte descriptor a kernel. Layout: LLVM, "User Guide for AMDGPU Backend", sections "ELF Code Object" and "Code Object Metadata".
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from . import msgpack
from .elf import PT_LOAD, Elf

Value = TypeVar("Value")
NT_AMDGPU_METADATA = 32
DESCRIPTOR_BYTES = 64
# Far beyond any kernel: what is larger is damaged, and would only use up memory.
MAX_LOADED_BYTES, MAX_KERNARG_BYTES = 1 << 28, 1 << 16
ENTRY_OFFSET = 16  # of the signed 64-bit distance from a descriptor to its kernel's first instruction

CODE_OBJECTS = Path(__file__).parent / "code_objects"


def packaged_archs() -> list[str]:
    """The architectures for which this installation carries code objects, sorted; empty if none were built."""
    return sorted({path.parent.name for path in CODE_OBJECTS.glob("*/*.co")})


def code_object_path(stem: str, arch: str) -> Path:
    """Where the code object of `src/hip/<stem>.hip` for `arch` lies. FileNotFoundError if it was not built."""
    path = CODE_OBJECTS / arch / f"{stem}.co"
    if not path.is_file():
        there = ", ".join(packaged_archs()) or "no architecture"
        raise FileNotFoundError(f"no code object {stem}.co for {arch} (there are some for {there}): run `make all`")
    return path


@dataclass(frozen=True)
class Argument:
    """One kernel parameter. offset and size in bytes of the kernarg segment; kind: "global_buffer", "by_value" or what else the note says."""

    name: str
    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class KernelInfo:
    """What the code object says of one kernel. Sizes in bytes; num_vgprs counts AGPRs too; entry: virtual address of the first instruction."""

    name: str
    args: tuple[Argument, ...]
    kernarg_bytes: int
    lds_bytes: int
    scratch_bytes: int
    num_vgprs: int
    num_agprs: int
    num_sgprs: int
    block_size: int
    wavefront_size: int
    descriptor: bytes
    entry: int

    @cached_property
    def arguments_type(self) -> type[ctypes.Structure]:
        """The kernarg segment as a ctypes structure: one unsigned field a parameter, at the note's offset, and explicit padding between."""
        fields: list[tuple[str, Any]] = []
        end = 0
        for arg in sorted(self.args, key=lambda arg: arg.offset):
            if arg.offset < end:
                raise ValueError(f"{self.name}: argument {arg.name} at offset {arg.offset} overlaps the one before it")
            if arg.offset > end:
                fields.append((f"_padding_{end}", ctypes.c_uint8 * (arg.offset - end)))
            fields.append((arg.name, ctypes.c_uint8 * arg.size))
            end = arg.offset + arg.size
        if self.kernarg_bytes > end:
            fields.append((f"_padding_{end}", ctypes.c_uint8 * (self.kernarg_bytes - end)))
        return type(f"{self.name}_arguments", (ctypes.Structure,), {"_fields_": fields})


@dataclass(frozen=True)
class Segment:
    """A loadable part of the image: `data` at virtual address `vaddr`, zeros after it up to `memsz` bytes."""

    vaddr: int
    data: bytes
    memsz: int


@dataclass(frozen=True)
class CodeObject:
    """A parsed code object.

    arch: as `--offload-arch` names it; constants: value by name of each exported 4-byte read-only object (int32); symbols: (virtual address,
    bytes) of each exported object; relocations: (virtual address, addend) of each 64-bit word that holds the image's load address plus addend.
    """

    image: bytes
    arch: str
    kernels: Mapping[str, KernelInfo]
    constants: Mapping[str, int]
    symbols: Mapping[str, tuple[int, int]]
    segments: tuple[Segment, ...]
    relocations: tuple[tuple[int, int], ...]

    @classmethod
    def load(cls, path: str | Path) -> CodeObject:
        """Parse the file. OSError if it cannot be read; ValueError, naming the file, if it is no code object."""
        try:
            return cls.parse(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def parse(cls, image: bytes) -> CodeObject:
        """Parse an image. ValueError saying what is wrong if it is not a whole AMD GPU code object with a metadata note."""
        elf = Elf(image)
        exported = dict(elf.exported_objects())
        kernels = {}
        for entry in _field(_metadata(elf), "amdhsa.kernels", list, []):
            kernel = _kernel_info(elf, entry, exported)
            kernels[kernel.name] = kernel
        constants = {
            name: int.from_bytes(elf.read_virtual(vaddr, 4), "little", signed=True)
            for name, (vaddr, size) in exported.items()
            if size == 4 and elf.is_read_only(vaddr)
        }
        segments = tuple(Segment(s.vaddr, elf.take(s.offset, s.filesz, "a segment"), s.memsz) for s in elf.programs if s.kind == PT_LOAD)
        if not segments:
            raise ValueError("the code object has nothing to load")
        end = max(segment.vaddr + segment.memsz for segment in segments)
        if end > MAX_LOADED_BYTES:
            raise ValueError(f"the code object would take {end} bytes of memory, more than {MAX_LOADED_BYTES}")
        return cls(image, elf.arch, kernels, constants, exported, segments, tuple(elf.relocations()))


def pack_arguments(info: KernelInfo, values: Mapping[str, Any]) -> ctypes.Structure:
    """The kernarg segment of a launch of `info`, packed by name.

    Pointers: an object with an integer `address` (a Buffer), or None for null. By-value parameters: a numpy scalar of the parameter's size
    (the note publishes no type, so int32 and float32 cannot be told apart here). TypeError, naming the argument, for everything else: missing
    and unknown names, bare Python numbers, arrays, a scalar of another size, hidden parameters.
    """
    names = [arg.name for arg in info.args]
    if missing := [name for name in names if name not in values]:
        raise TypeError(f"{info.name}: missing argument{'s' * (len(missing) > 1)} {', '.join(missing)}")
    if unknown := [name for name in values if name not in names]:
        raise TypeError(f"{info.name}: unknown argument{'s' * (len(unknown) > 1)} {', '.join(unknown)}; it takes {', '.join(names) or 'none'}")
    segment = bytearray(ctypes.sizeof(info.arguments_type))
    for arg in info.args:
        segment[arg.offset : arg.offset + arg.size] = argument_bytes(info, arg, values[arg.name])
    return info.arguments_type.from_buffer(segment)


def argument_bytes(info: KernelInfo, arg: Argument, value: Any) -> bytes:
    """What `pack_arguments` packs for one argument."""
    place, got = f"{info.name}: argument {arg.name}", f"{type(value).__module__}.{type(value).__qualname__}"
    if arg.kind == "global_buffer":
        address = 0 if value is None else getattr(value, "address", None)
        if not isinstance(address, int):
            raise TypeError(f"{place} is a pointer: a Buffer or None is needed, not {got}")
        return struct.pack("<Q", address)
    if arg.kind != "by_value":
        raise TypeError(f"{place} is of kind {arg.kind}, which launches here do not pass")
    if not isinstance(value, np.generic):
        raise TypeError(f"{place} is passed by value: a numpy scalar of {arg.size} bytes is needed, not {got}")
    if value.dtype.itemsize != arg.size:
        raise TypeError(f"{place} is passed by value in {arg.size} bytes, but {got} has {value.dtype.itemsize}")
    return value.tobytes()


def _metadata(elf: Elf) -> Any:
    for owner, kind, content in elf.notes():
        if (owner, kind) == (b"AMDGPU\0", NT_AMDGPU_METADATA):
            return msgpack.unpack(content)
    raise ValueError("no AMDGPU metadata note (a code object of version 3 or later carries one)")


def _kernel_info(elf: Elf, entry: Mapping[str, Any], exported: Mapping[str, tuple[int, int]]) -> KernelInfo:
    name, symbol = _field(entry, ".name", str), _field(entry, ".symbol", str)
    vaddr, size = exported.get(symbol, (0, 0))
    if size != DESCRIPTOR_BYTES:
        raise ValueError(f"kernel {name} has no {DESCRIPTOR_BYTES}-byte descriptor {symbol}")
    descriptor = elf.read_virtual(vaddr, DESCRIPTOR_BYTES)
    args = tuple(_argument(arg, f"arg{index}") for index, arg in enumerate(_field(entry, ".args", list, [])))
    kernarg_bytes = _field(entry, ".kernarg_segment_size", int)
    if max([kernarg_bytes, *(arg.offset + arg.size for arg in args)]) > MAX_KERNARG_BYTES:
        raise ValueError(f"kernel {name} wants more than {MAX_KERNARG_BYTES} bytes of arguments")
    return KernelInfo(
        name=name,
        args=args,
        kernarg_bytes=kernarg_bytes,
        lds_bytes=_field(entry, ".group_segment_fixed_size", int),
        scratch_bytes=_field(entry, ".private_segment_fixed_size", int),
        num_vgprs=_field(entry, ".vgpr_count", int),
        num_agprs=_field(entry, ".agpr_count", int, 0),  # only GPUs that have AGPRs have the field
        num_sgprs=_field(entry, ".sgpr_count", int),
        block_size=_field(entry, ".max_flat_workgroup_size", int),
        wavefront_size=_field(entry, ".wavefront_size", int),
        descriptor=descriptor,
        entry=vaddr + struct.unpack_from("<q", descriptor, ENTRY_OFFSET)[0],
    )


def _argument(entry: Mapping[str, Any], default_name: str) -> Argument:
    # The compiler marks a pointer that it rewrote to the global address space by this suffix; the source's name is what callers use.
    name = _field(entry, ".name", str, default_name).removesuffix(".coerce")
    return Argument(name, _field(entry, ".offset", int), _field(entry, ".size", int), _field(entry, ".value_kind", str))


def _field(entry: Any, key: str, kind: type[Value], default: Value | None = None) -> Value:
    """The entry's value, of this type and not negative. ValueError if it is not there and has no default, or is something else."""
    value = entry.get(key, default) if isinstance(entry, dict) else None
    if not isinstance(value, kind) or (isinstance(value, int) and value < 0):
        raise ValueError(f"the metadata note's {key} is {value!r}, not {kind.__name__}")
    return value
