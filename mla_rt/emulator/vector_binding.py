"""One definition of a vector instruction, reachable from every encoding that has it.

An `Operation` names its result and operand kinds and computes on whole arrays. `bind_operation` makes it run from the VOP1, VOP2 and VOP3
words and from their SDWA and DPP forms: it resolves operands, applies the modifiers that the encoding carries, and writes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .float_mode import FloatMode
from .instruction import Encoded, Row, Run, UnsupportedEncoding
from .lanes import Dpp, check_sdwa_select, sdwa_merge, sdwa_select
from .operands import FIRST_VGPR, KINDS, Kind, Reader, check_constant_bus, require_even, vector_source, vgpr_reader
from .state import Group

Write = Callable[[Group, np.ndarray], None]


@dataclass(frozen=True)
class Operation:
    """signature: "result = source source …" in kinds of operands.KINDS; compute: arrays of the sources' types -> array of the result's type.

    accumulates: the last source is the destination register (v_fmac); clamped: the result with integer clamp, where the instruction has one,
    computed from int64 sources without wrapping (the binder saturates it); half_select: VOP3's op_sel chooses 16-bit halves, and the half that is
    not written keeps its value; sign_bits: neg and abs are allowed though the kinds are integers (v_cndmask: they act on bit 31).
    """

    mnemonic: str
    signature: str
    compute: Callable[..., Any]
    accumulates: bool = False
    clamped: Callable[..., Any] | None = None
    half_select: bool = False
    sign_bits: bool = False

    @property
    def result(self) -> Kind:
        return KINDS[self.signature.split()[0]]

    @property
    def sources(self) -> list[Kind]:
        return [KINDS[name] for name in self.signature.split("=")[1].split()]


def apply_sign_modifiers(read: Reader, kind: Kind, absolute: bool, negate: bool, *, on_bits: bool = False) -> Reader:
    """The reader with |x| and then -x. They act on the sign bit, NaN included."""
    if not (absolute or negate):
        return read
    if on_bits:
        keep, flip = np.uint32(0x7FFFFFFF if absolute else 0xFFFFFFFF), np.uint32(0x80000000 if negate else 0)
        return lambda group: (read(group) & keep) ^ flip
    if not kind.is_float:
        raise UnsupportedEncoding("neg or abs on an integer operand")
    if absolute and negate:
        return lambda group: -np.abs(read(group))
    return (lambda group: np.abs(read(group))) if absolute else (lambda group: -read(group))


def _vop3_sources(encoded: Encoded, kinds: list[Kind], half_select: bool, on_bits: bool) -> list[Reader]:
    readers = []
    absolute, codes = encoded.fields.get("abs", 0), (encoded.src0, encoded.src1, encoded.src2)[: len(kinds)]
    check_constant_bus(*codes)
    for i, kind in enumerate(kinds):
        half = encoded.fields.get("op_sel", 0) >> i & 1 if half_select and kind.bits == 16 else 0
        read = vector_source(codes[i], kind, None, half)
        readers.append(apply_sign_modifiers(read, kind, bool(absolute >> i & 1), bool(encoded.neg >> i & 1), on_bits=on_bits))
    present = (1 << len(kinds)) - 1
    if (absolute | encoded.neg) & ~present:
        raise UnsupportedEncoding("a modifier of an absent operand")
    if encoded.fields.get("op_sel", 0) & ~((present | 8) if half_select else 0):
        raise UnsupportedEncoding(f"op_sel {encoded.op_sel:#x}")
    return readers


def _from_dword(read: Reader, kind: Kind) -> Reader:
    """A reader of uint32 turned into one of the kind's type (16-bit kinds take the low half)."""
    if kind.bits == 16:
        return lambda group: read(group).astype(np.uint16).view(kind.dtype)
    return lambda group: read(group).view(kind.dtype)


def _selected(read: Reader, select: int, sign_extend: bool) -> Reader:
    return lambda group: sdwa_select(read(group), select, sign_extend)


def _sdwa_sources(encoded: Encoded, kinds: list[Kind], on_bits: bool) -> list[Reader]:
    readers = []
    codes = [encoded.src0]
    if "vsrc1" in encoded.fields:
        codes.append(encoded.vsrc1 + (0 if encoded.s1 else FIRST_VGPR))
    check_constant_bus(*codes[: len(kinds)])
    for i, (code, kind) in enumerate(zip(codes, kinds, strict=False)):
        if kind.bits == 64:
            raise UnsupportedEncoding("SDWA on a 64-bit operand")
        select, extend = check_sdwa_select(encoded.fields[f"src{i}_sel"]), bool(encoded.fields[f"src{i}_sext"])
        whole = vector_source(code, KINDS["u32"])
        read = _from_dword(_selected(whole, select, extend), kind)
        readers.append(apply_sign_modifiers(read, kind, bool(encoded.fields[f"src{i}_abs"]), bool(encoded.fields[f"src{i}_neg"]), on_bits=on_bits))
    return readers


def _dpp_sources(encoded: Encoded, kinds: list[Kind], dpp: Dpp, on_bits: bool) -> list[Reader]:
    if kinds[0].bits == 64:
        require_even(encoded.src0)
        low, high, dtype = dpp.reader(encoded.src0), dpp.reader(encoded.src0 + 1), kinds[0].dtype
        moved: Reader = lambda group: (low(group).astype(np.uint64) | high(group).astype(np.uint64) << np.uint64(32)).view(dtype)  # noqa: E731
    else:
        moved = _from_dword(dpp.reader(encoded.src0), kinds[0])
    readers = [moved] + [vgpr_reader(encoded.vsrc1, kind) for kind in kinds[1:2] if "vsrc1" in encoded.fields]
    return [
        apply_sign_modifiers(read, kind, bool(encoded.fields[f"src{i}_abs"]), bool(encoded.fields[f"src{i}_neg"]), on_bits=on_bits)
        for i, (read, kind) in enumerate(zip(readers, kinds, strict=False))
    ]


def bind_sources(
    encoded: Encoded, kinds: list[Kind], *, half_select: bool = False, on_bits: bool = False, dpp: Dpp | None = None, exact: bool = False
) -> list[Reader]:
    """Readers of the source operands of a vector instruction in any encoding, with neg, abs, op_sel, SDWA selects and DPP applied, in the
    floating-point mode of the instruction (exact: bits as they are)."""
    readers = _encoded_sources(encoded, kinds, half_select, on_bits, dpp)
    return readers if exact else [encoded.mode.source(read, kind) for read, kind in zip(readers, kinds, strict=False)]


def _encoded_sources(encoded: Encoded, kinds: list[Kind], half_select: bool, on_bits: bool, dpp: Dpp | None) -> list[Reader]:
    name = encoded.encoding
    if name in ("VOP3", "VOP3SD"):
        return _vop3_sources(encoded, kinds, half_select, on_bits)
    if name.endswith("_SDWA"):
        return _sdwa_sources(encoded, kinds, on_bits)
    if name.endswith("_DPP"):
        return _dpp_sources(encoded, kinds, dpp or Dpp(encoded), on_bits)
    literal = encoded.fields.get("literal")
    readers = [vector_source(encoded.src0, kinds[0], literal)]
    if "vsrc1" in encoded.fields and len(kinds) > 1:
        readers.append(vgpr_reader(encoded.vsrc1, kinds[1]))
    return readers


def saturate(value: np.ndarray, kind: Kind) -> np.ndarray:
    """int64 -> the kind's integer type, to its nearest value."""
    limits = np.iinfo(kind.dtype)
    return np.clip(value, limits.min, limits.max).astype(kind.dtype)


def result_writer(encoded: Encoded, kind: Kind, *, half_select: bool = False, dpp: Dpp | None = None) -> Write:
    """A function that writes a result of this kind to vdst, under EXEC, the DPP masks and the SDWA destination select, in the instruction's mode."""
    return encoded.mode.result(_exact_writer(encoded, kind, half_select, dpp), kind)


def _exact_writer(encoded: Encoded, kind: Kind, half_select: bool, dpp: Dpp | None) -> Write:
    register = encoded.vdst
    mask_of: Callable[[Group], np.ndarray | None] = dpp.write_mask if dpp else lambda group: None
    if kind.bits == 64:
        require_even(register)

        def write64(group: Group, value: np.ndarray) -> None:
            mask = mask_of(group)
            words = np.ascontiguousarray(value).view(np.uint32)
            group.write_vgpr(register, words[:, 0::2], mask)
            group.write_vgpr(register + 1, words[:, 1::2], mask)

        return write64
    if kind.bits == 16:
        to_dword: Callable[[np.ndarray], np.ndarray] = lambda value: value.view(np.uint16).astype(np.uint32)  # noqa: E731
    else:
        to_dword = lambda value: value.view(np.uint32)  # noqa: E731
    if encoded.encoding.endswith("_SDWA"):
        select, unused = check_sdwa_select(encoded.dst_sel), encoded.dst_unused
        if unused > 2 or encoded.omod:
            raise UnsupportedEncoding("reserved SDWA modifier")
        return lambda group, value: group.write_vgpr(register, sdwa_merge(to_dword(value), group.read_vgpr(register), select, unused))
    if half_select and kind.bits == 16:
        shift = 16 * (encoded.fields.get("op_sel", 0) >> 3 & 1)
        keep = np.uint32(0xFFFF0000 >> shift)
        return lambda group, value: group.write_vgpr(register, (group.read_vgpr(register) & keep) | (to_dword(value) << np.uint32(shift)))
    if dpp is not None:
        return lambda group, value: group.write_vgpr(register, to_dword(value), mask_of(group))
    if kind.bits == 16:
        return lambda group, value: group.write_vgpr(register, to_dword(value))
    return lambda group, value: group.write_vgpr(register, value.view(np.uint32))


def _clamping(operation: Operation, mode: FloatMode) -> Callable[..., Any]:
    kind, compute = operation.result, mode.function(operation.compute)
    if kind.is_float:
        return lambda *sources: mode.clamp(compute(*sources))
    if operation.clamped is None:
        raise UnsupportedEncoding("clamp")
    wide = operation.clamped
    return lambda *sources: saturate(wide(*(source.astype(np.int64) for source in sources)), kind)


def bind_operation(operation: Operation, encoded: Encoded) -> Run:
    """The operation as a function of a group, for any encoding."""
    if encoded.fields.get("omod"):
        raise UnsupportedEncoding("omod, which acts only outside IEEE mode and with denormals flushed")
    dpp = Dpp(encoded) if encoded.encoding.endswith("_DPP") else None
    kinds = operation.sources
    direct = kinds[:-1] if operation.accumulates else kinds
    readers = bind_sources(encoded, direct, half_select=operation.half_select, on_bits=operation.sign_bits, dpp=dpp)
    if operation.accumulates:
        readers.append(encoded.mode.source(vgpr_reader(encoded.vdst, kinds[-1]), kinds[-1]))
    if len(readers) != len(kinds):
        raise UnsupportedEncoding(f"{len(kinds)} operands in {encoded.encoding}")
    write = result_writer(encoded, operation.result, half_select=operation.half_select, dpp=dpp)
    compute = _clamping(operation, encoded.mode) if encoded.fields.get("clamp") else encoded.mode.function(operation.compute)
    if len(readers) == 1:
        (first,) = readers
        return lambda group: write(group, compute(first(group)))
    if len(readers) == 2:
        first, second = readers
        return lambda group: write(group, compute(first(group), second(group)))
    first, second, third = readers
    return lambda group: write(group, compute(first(group), second(group), third(group)))


def row(mnemonic: str, signature: str, compute: Callable[..., Any], **options: Any) -> Row:
    operation = Operation(mnemonic, signature, compute, **options)
    return Row(mnemonic, lambda encoded: bind_operation(operation, encoded))
