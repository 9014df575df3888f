"""Operand codes -> readers: functions of a group that return an operand's value in every lane (or, for scalar operands, in every wave).

A *kind* says how an instruction looks at an operand: its numpy type and how many bits of the registers it takes. Readers are resolved when an
instruction is bound; nothing here is looked up while it runs. Vector readers return arrays that broadcast to [waves, 64]: a VGPR gives
[waves, 64], an SGPR [waves, 1], a constant [1, 1]. What they return may be a view of the state and is never changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .instruction import Encoded, UnsupportedEncoding
from .state import EXEC, M0, VCC, Group

Reader = Callable[[Group], np.ndarray]

VCCZ, EXECZ, SCC, LITERAL, FIRST_VGPR = 251, 252, 253, 255, 256
LAST_SGPR, FLAT_SCRATCH = 101, 102
_INLINE_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
_INVERSE_2PI = 248
_INVERSE_2PI_BITS = {16: 0x3118, 32: 0x3E22F983, 64: 0x3FC45F306DC9C882}


@dataclass(frozen=True)
class Kind:
    """bits: 16 (one half of a register), 32 or 64 (two registers); dtype: the numpy type of its values."""

    bits: int
    dtype: type

    @property
    def is_float(self) -> bool:
        return issubclass(self.dtype, np.floating)


KINDS = {
    "u16": Kind(16, np.uint16), "i16": Kind(16, np.int16), "f16": Kind(16, np.float16),
    "u32": Kind(32, np.uint32), "i32": Kind(32, np.int32), "f32": Kind(32, np.float32),
    "u64": Kind(64, np.uint64), "i64": Kind(64, np.int64), "f64": Kind(64, np.float64),
}  # fmt: skip
UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def constant_bits(code: int, kind: Kind, literal: int | None) -> int | None:
    """The bit pattern of an inline constant or literal as an operand of this kind; None if the code is not a constant.

    16-bit kinds give the dword of which the instruction takes a half: an integer is sign-extended to 32 bits, a floating-point constant is an f16
    with zeros above it for f16 operands and an f32 for integer operands (clang relies on each of these in packed instructions).
    """
    mask = (1 << max(kind.bits, 32)) - 1
    if 128 <= code <= 208:
        return (code - 128 if code <= 192 else 192 - code) & mask
    if code in _INLINE_FLOATS or code == _INVERSE_2PI:
        bits = 32 if kind.bits == 16 and not kind.is_float else kind.bits
        if code == _INVERSE_2PI:
            return _INVERSE_2PI_BITS[bits]
        float_type = {16: np.float16, 32: np.float32, 64: np.float64}[bits]
        return int(float_type(_INLINE_FLOATS[code]).view(UNSIGNED[bits]))
    if code == LITERAL:
        if literal is None:
            raise UnsupportedEncoding("a literal operand in a format that has none")
        if kind.bits == 64:
            if kind.is_float:
                return literal << 32
            return literal | (0xFFFFFFFF00000000 if kind.dtype is np.int64 and literal >> 31 else 0)
        return literal & mask
    return None


def _is_sgpr(code: int) -> bool:
    return code <= FLAT_SCRATCH + 1 or code in (VCC, VCC + 1, M0, EXEC, EXEC + 1)


def _is_sgpr_pair(code: int) -> bool:
    """Pairs begin at an even register, here and in every field that names one; m0 begins none."""
    return code % 2 == 0 and (code <= FLAT_SCRATCH or code in (VCC, EXEC))


def scalar_u32(code: int, literal: int | None = None) -> Reader:
    """Reader of a 32-bit scalar operand: uint32 [waves]."""
    if _is_sgpr(code):
        return lambda group: group.read_sgpr(code)
    constant = constant_bits(code, KINDS["u32"], literal)
    if constant is not None:
        value = np.array([constant], np.uint32)
        return lambda group: value
    if code == SCC:
        return lambda group: group.scc.astype(np.uint32)
    if code == VCCZ:
        return lambda group: (group.read_sgpr64(VCC) == 0).astype(np.uint32)
    if code == EXECZ:
        return lambda group: (group.read_sgpr64(EXEC) == 0).astype(np.uint32)
    raise UnsupportedEncoding(f"scalar operand code {code}")


def scalar_u64(code: int, literal: int | None = None, *, signed: bool = False) -> Reader:
    """Reader of a 64-bit scalar operand: uint64 [waves]. `signed` decides how a literal is widened."""
    if _is_sgpr_pair(code):
        return lambda group: group.read_sgpr64(code)
    constant = constant_bits(code, KINDS["i64" if signed else "u64"], literal)
    if constant is not None:
        value = np.array([constant], np.uint64)
        return lambda group: value
    if code in (SCC, VCCZ, EXECZ):
        narrow = scalar_u32(code)
        return lambda group: narrow(group).astype(np.uint64)
    raise UnsupportedEncoding(f"scalar operand code {code}")


def vgpr_reader(register: int, kind: Kind, half: int = 0) -> Reader:
    """Reader of one VGPR (two for 64-bit kinds, from an even one on); `half` chooses the upper 16 bits for 16-bit kinds."""
    dtype = kind.dtype
    if kind.bits == 64:
        require_even(register)
    if kind.bits == 32:
        if dtype is np.uint32:
            return lambda group: group.read_vgpr(register)
        return lambda group: group.read_vgpr(register).view(dtype)
    if kind.bits == 16:
        return lambda group: group.read_vgpr(register).view(dtype)[:, half::2]

    def read(group: Group) -> np.ndarray:
        pair = np.empty((group.n, 64, 2), np.uint32)
        pair[:, :, 0] = group.read_vgpr(register)
        pair[:, :, 1] = group.read_vgpr(register + 1)
        return pair.view(dtype)[:, :, 0]

    return read


def vector_source(code: int, kind: Kind, literal: int | None = None, half: int = 0) -> Reader:
    """Reader of a 9-bit vector source operand. For 16-bit kinds `half` 1 takes bits 31:16 of a register or constant."""
    if code >= FIRST_VGPR:
        return vgpr_reader(code - FIRST_VGPR, kind, half)
    dtype = kind.dtype
    bits = constant_bits(code, kind, literal)
    if bits is not None:
        if kind.bits == 16:
            bits = bits >> 16 * half & 0xFFFF
        value: np.ndarray = np.array([[bits]], UNSIGNED[kind.bits]).view(dtype)
        return lambda group: value
    if kind.bits == 64:
        wide = scalar_u64(code)
        return lambda group: wide(group).view(dtype)[:, None]
    narrow = scalar_u32(code)
    if kind.bits == 32:
        return lambda group: narrow(group)[:, None].view(dtype)
    shift = np.uint32(16 * half)
    return lambda group: (narrow(group) >> shift).astype(np.uint16)[:, None].view(dtype)


def require_even(register: int) -> None:
    """Tuples of vector registers begin at an even one."""
    if register % 2:
        raise UnsupportedEncoding(f"a pair of registers that begins at the odd v{register}")


def vgpr_number(code: int) -> int:
    """The register of a source operand that can only be a vector register."""
    if code < FIRST_VGPR:
        raise UnsupportedEncoding(f"operand code {code} where a vector register is needed")
    return code - FIRST_VGPR


def check_constant_bus(*codes: int) -> None:
    """UnsupportedEncoding if the operands of a vector instruction, vcc among them where it is read unasked, are more than one scalar value.

    An SGPR, vcc, m0, EXEC, or a literal counts as often as it is used once; inline constants do not count.
    """
    scalars = {code for code in codes if code <= EXEC + 1 or VCCZ <= code <= SCC or code == LITERAL}
    if len(scalars) > 1:
        raise UnsupportedEncoding(f"more than one scalar operand: codes {', '.join(map(str, sorted(scalars)))}")


def refuse_modifiers(encoded: Encoded, *names: str) -> None:
    """UnsupportedEncoding if one of these fields is there and not zero."""
    for name in names:
        if encoded.fields.get(name):
            raise UnsupportedEncoding(f"{name} on an instruction that has none")


def source_u32(code: int, literal: int | None = None) -> Reader:
    """Reader of a 32-bit vector source: uint32, broadcastable to [waves, 64]."""
    return vector_source(code, KINDS["u32"], literal)


def source_u64(code: int, literal: int | None = None) -> Reader:
    """Reader of a 64-bit vector source: uint64, broadcastable to [waves, 64]."""
    return vector_source(code, KINDS["u64"], literal)


def mask_source(code: int) -> Reader:
    """Reader of a lane mask operand (an SGPR pair or a constant): bool, broadcastable to [waves, 64]."""
    if _is_sgpr_pair(code):
        return lambda group: group.read_mask(code)
    constant = constant_bits(code, KINDS["i64"], None)
    if constant is None:
        raise UnsupportedEncoding(f"lane mask operand code {code}")
    lanes = np.array([[constant >> lane & 1 for lane in range(64)]], np.bool_)
    return lambda group: lanes


def check_scalar_destination(code: int, registers: int = 1) -> int:
    """The SGPR number of a destination code, or UnsupportedEncoding."""
    if not (_is_sgpr(code) if registers == 1 else _is_sgpr_pair(code)):
        raise UnsupportedEncoding(f"scalar destination code {code}")
    return code
