"""Operations across lanes: DPP source permutations, SDWA sub-dword selection, readlane/writelane, permlane swaps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .instruction import Encoded, Row, Run, UnsupportedEncoding
from .operands import (
    FIRST_VGPR,
    KINDS,
    Reader,
    check_constant_bus,
    check_scalar_destination,
    refuse_modifiers,
    scalar_u32,
    vector_source,
    vgpr_number,
    vgpr_reader,
)
from .state import LANES, Group

_LANE = np.arange(LANES)
_ROW_START = _LANE & ~15
SDWA_DWORD = 6


def dpp_lanes(ctrl: int) -> np.ndarray:
    """Source lane of every lane for a DPP control code: int [64], -1 where the source lies outside the row or wave."""
    in_row, step = _LANE & 15, ctrl & 15
    if ctrl <= 0xFF:
        return (_LANE & ~3) + (ctrl >> 2 * (_LANE & 3) & 3)
    if 0x101 <= ctrl <= 0x10F:
        return np.where(in_row + step < 16, _LANE + step, -1)
    if 0x111 <= ctrl <= 0x11F:
        return np.where(in_row >= step, _LANE - step, -1)
    if 0x121 <= ctrl <= 0x12F:
        return _ROW_START + (in_row - step) % 16
    if 0x150 <= ctrl <= 0x15F:
        return _ROW_START + step
    fixed = {
        0x130: np.where(_LANE < 63, _LANE + 1, -1),  # wave_shl
        0x134: (_LANE + 1) % LANES,  # wave_rol
        0x138: _LANE - 1,  # wave_shr
        0x13C: (_LANE - 1) % LANES,  # wave_ror
        0x140: _ROW_START + 15 - in_row,  # row_mirror
        0x141: (_LANE & ~7) + 7 - (_LANE & 7),  # row_half_mirror
        0x142: np.where(_LANE >= 16, _ROW_START - 1, -1),  # row_bcast:15 (last lane of the row before)
        0x143: np.where(_LANE >= 32, 31, -1),  # row_bcast:31
    }
    if ctrl not in fixed:
        raise UnsupportedEncoding(f"DPP control {ctrl:#x}")
    return fixed[ctrl]


class Dpp:
    """The lane movement of one DPP instruction: how its src0 is read, and which lanes it writes.

    A source lane outside the row, or disabled by EXEC, is invalid: with bound_ctrl it reads as 0, else the lane is not written.
    """

    def __init__(self, encoded: Encoded):
        lanes = dpp_lanes(encoded.dpp_ctrl)
        self.source = np.maximum(lanes, 0)
        self.in_range = lanes >= 0
        self.zero_invalid = bool(encoded.bound_ctrl)
        self.enabled = (encoded.row_mask >> (_LANE >> 4) & 1).astype(np.bool_) & (encoded.bank_mask >> (_LANE >> 2 & 3) & 1).astype(np.bool_)
        self.writes_all = bool(self.enabled.all()) and (self.zero_invalid or bool(self.in_range.all()))

    def valid(self, group: Group) -> np.ndarray:
        return self.in_range if group.exec_full else self.in_range & group.mask[:, self.source]

    def reader(self, code: int) -> Reader:
        """uint32 [waves, 64]: the register's lanes, moved."""
        register = code - FIRST_VGPR

        def read(group: Group) -> np.ndarray:
            moved = group.read_vgpr(register)[:, self.source]
            return np.where(self.valid(group), moved, np.uint32(0)) if self.zero_invalid else moved

        return read

    def write_mask(self, group: Group) -> np.ndarray | None:
        """bool [waves, 64], or None where it is EXEC."""
        if self.writes_all and (group.exec_full or self.zero_invalid):
            return None
        mask = group.mask & self.enabled
        return mask if self.zero_invalid else mask & self.valid(group)


def sdwa_select(value: np.ndarray, select: int, sign_extend: bool) -> np.ndarray:
    """A byte (0-3), word (4, 5) or the whole (6) of a uint32 array, extended to 32 bits."""
    if select == SDWA_DWORD:
        return value
    bits, shift = (8, 8 * select) if select < 4 else (16, 16 * (select - 4))
    if sign_extend:
        return ((value << np.uint32(32 - bits - shift)).view(np.int32) >> np.int32(32 - bits)).view(np.uint32)
    return value >> np.uint32(shift) & np.uint32((1 << bits) - 1)


def sdwa_merge(value: np.ndarray, old: np.ndarray, select: int, unused: int) -> np.ndarray:
    """Place the low bits of `value` into a byte or word of the destination; the rest is zero (0), sign (1) or the old value (2)."""
    if select == SDWA_DWORD:
        return value
    bits, shift = (8, 8 * select) if select < 4 else (16, 16 * (select - 4))
    field = np.uint32((1 << bits) - 1)
    placed = (value & field) << np.uint32(shift)
    if unused == 1:  # zeros below the field, its sign above
        return ((value << np.uint32(32 - bits)).view(np.int32) >> np.int32(32 - bits)).view(np.uint32) << np.uint32(shift)
    if unused == 2:
        return (old & ~(field << np.uint32(shift))) | placed
    return placed


def check_sdwa_select(select: int) -> int:
    if select > SDWA_DWORD:
        raise UnsupportedEncoding(f"SDWA select {select}")
    return select


def _readfirstlane(encoded: Encoded) -> Run:
    if encoded.encoding != "VOP1":
        raise UnsupportedEncoding("readfirstlane with SDWA or DPP")
    source = vgpr_reader(vgpr_number(encoded.src0), KINDS["u32"])
    destination = check_scalar_destination(encoded.vdst)

    def run(group: Group) -> None:
        value = np.broadcast_to(source(group), (group.n, LANES))
        if group.exec_full:
            group.write_sgpr(destination, value[:, 0])
        else:  # argmax of an all-false row is 0: lane 0 when EXEC is 0
            group.write_sgpr(destination, value[np.arange(group.n), group.mask.argmax(axis=1)])

    return run


def _lane_number(group: Group, select: np.ndarray) -> np.ndarray:
    return np.broadcast_to(select & np.uint32(63), (group.n,)).astype(np.intp)


def _readlane(encoded: Encoded) -> Run:
    refuse_modifiers(encoded, "neg", "abs", "clamp", "omod", "op_sel")
    source, select = vgpr_reader(vgpr_number(encoded.src0), KINDS["u32"]), scalar_u32(encoded.src1)
    destination = check_scalar_destination(encoded.vdst)

    def run(group: Group) -> None:
        value = np.broadcast_to(source(group), (group.n, LANES))
        group.write_sgpr(destination, value[np.arange(group.n), _lane_number(group, select(group))])

    return run


def _writelane(encoded: Encoded) -> Run:
    refuse_modifiers(encoded, "neg", "abs", "clamp", "omod", "op_sel")
    source, select, register = scalar_u32(encoded.src0), scalar_u32(encoded.src1), encoded.vdst

    def run(group: Group) -> None:
        lane = _lane_number(group, select(group))[:, None] == _LANE
        group.write_vgpr(register, source(group)[:, None], lane)

    return run


def _permlane_swap(mnemonic: str, row: int) -> Row:
    """Of each pair of rows of `row` lanes: the destination's odd row and the source's even row change places."""

    def bind(encoded: Encoded) -> Run:
        if encoded.encoding not in ("VOP1", "VOP3"):
            raise UnsupportedEncoding(f"{mnemonic} with SDWA or DPP")
        refuse_modifiers(encoded, "neg", "abs", "clamp", "omod")
        if encoded.fields.get("op_sel", 0) > 3:  # fetch-inactive and bound_ctrl, which say nothing while EXEC is full
            raise UnsupportedEncoding(f"op_sel {encoded.op_sel:#x}")
        first, second = encoded.vdst, vgpr_number(encoded.src0)
        shape = (-1, LANES // (2 * row), 2, row)

        def run(group: Group) -> None:
            a, b = group.read_vgpr(first).reshape(shape), group.read_vgpr(second).reshape(shape)
            new_a, new_b = a.copy(), b.copy()
            new_a[:, :, 1], new_b[:, :, 0] = b[:, :, 0], a[:, :, 1]
            group.write_vgpr(first, new_a.reshape(-1, LANES))
            group.write_vgpr(second, new_b.reshape(-1, LANES))

        return run

    return Row(mnemonic, bind)


def _swap(encoded: Encoded) -> Run:
    if encoded.encoding != "VOP1":
        raise UnsupportedEncoding("v_swap_b32 with SDWA or DPP")
    first, second = encoded.vdst, vgpr_number(encoded.src0)

    def run(group: Group) -> None:
        old = group.read_vgpr(first).copy()
        group.write_vgpr(first, group.read_vgpr(second))
        group.write_vgpr(second, old)

    return run


def _mbcnt(mnemonic: str, low: bool) -> Row:
    """Count of the mask's bits below this lane, in the low or the high half of the wave, added to src1."""

    def bind(encoded: Encoded) -> Run:
        refuse_modifiers(encoded, "neg", "abs", "clamp", "omod", "op_sel")
        check_constant_bus(encoded.src0, encoded.src1)
        mask, addend = vector_source(encoded.src0, KINDS["u32"]), vector_source(encoded.src1, KINDS["u32"])
        lane = np.minimum(_LANE, 32) if low else np.maximum(_LANE - 32, 0)
        below = ((np.uint64(1) << lane.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)

        def run(group: Group) -> None:
            masked = mask(group) & below
            count = np.unpackbits(np.ascontiguousarray(masked).view(np.uint8).reshape(*masked.shape, 4), axis=-1).sum(axis=-1, dtype=np.uint32)
            group.write_vgpr(encoded.vdst, addend(group) + count)

        return run

    return Row(mnemonic, bind)


Bind = Callable[[Encoded], Run]
LANES_VOP1 = {
    2: Row("v_readfirstlane_b32", _readfirstlane),
    81: Row("v_swap_b32", _swap),
    89: _permlane_swap("v_permlane16_swap_b32", 16),
    90: _permlane_swap("v_permlane32_swap_b32", 32),
}
LANES_VOP3 = {
    649: Row("v_readlane_b32", _readlane),
    650: Row("v_writelane_b32", _writelane),
    652: _mbcnt("v_mbcnt_lo_u32_b32", low=True),
    653: _mbcnt("v_mbcnt_hi_u32_b32", low=False),
}
