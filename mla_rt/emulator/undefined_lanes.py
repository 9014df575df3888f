"""Undefined bits through instructions that work across lanes: lane reads, exchanges, DPP, matrices."""

from __future__ import annotations

import numpy as np

from . import mfma
from .instruction import Encoded
from .lanes import Dpp
from .operands import FIRST_VGPR
from .shadow import ALL
from .state import LANES
from .undefined_sources import U32, ZERO, Masks, Rule, Sources


def _read_first_lane(sources: Sources) -> Masks:
    group = sources.group
    mask = np.broadcast_to(sources.mask(sources.codes()[0]), group.mask.shape)
    return mask[np.arange(group.n), group.mask.argmax(axis=1)]


def _read_lane(sources: Sources) -> Masks:
    code, select = sources.codes(2)
    group = sources.group
    lane = np.broadcast_to(np.ravel(sources.value(select)) & U32(63), (group.n,)).astype(np.intp)
    found = np.broadcast_to(sources.mask(code), group.mask.shape)[np.arange(group.n), lane]
    return np.where(np.ravel(sources.mask(select)) != 0, ALL, found)


def _permlane_swap(row: int) -> Rule:
    def rule(sources: Sources) -> Masks:
        shape = (sources.group.n, LANES // (2 * row), 2, row)
        a, b = (
            np.broadcast_to(sources.mask(code), sources.group.mask.shape).reshape(shape).copy()
            for code in (sources.encoded.vdst + FIRST_VGPR, sources.encoded.src0)
        )
        a[:, :, 1], b[:, :, 0] = b[:, :, 0].copy(), a[:, :, 1].copy()
        return [a.reshape(-1, LANES), b.reshape(-1, LANES)]

    return rule


def _swap(sources: Sources) -> Masks:
    return [np.array(sources.mask(code)) for code in (sources.encoded.src0, sources.encoded.vdst + FIRST_VGPR)]


def _backward_permute(sources: Sources) -> Masks:
    """ds_bpermute: the mask of the lane that the address names; nothing is undefined in a lane that EXEC disables."""
    encoded, group = sources.encoded, sources.group
    offset = U32(encoded.offset0 | encoded.offset1 << 8)
    lane = (sources.value(encoded.addr + FIRST_VGPR) + offset >> U32(2) & U32(63)).astype(np.intp)
    offered = np.where(group.mask, sources.mask(encoded.data0 + FIRST_VGPR), ZERO)
    return np.where(sources.mask(encoded.addr + FIRST_VGPR) & U32(0xFC) != 0, ALL, np.take_along_axis(offered, lane, axis=1))


def _any_lane(sources: Sources) -> Masks:
    """An exchange that is not followed lane by lane: one undefined active lane makes all undefined."""
    found = (np.broadcast_to(sources.lanes(), sources.group.mask.shape) & sources.group.mask).any(axis=1, keepdims=True)
    return np.broadcast_to(np.where(found, ALL, ZERO), sources.group.mask.shape)


def dpp_rule(encoded: Encoded) -> Rule:
    """src0 comes from other lanes; where it comes from none, it is 0 or nothing is written."""
    dpp = Dpp(encoded)
    move = encoded.op == 1 and encoded.encoding == "VOP1_DPP"

    def rule(sources: Sources) -> Masks:
        moved = sources.mask(encoded.src0)
        if moved.shape[1] > 1:
            moved = np.where(dpp.valid(sources.group), moved[:, dpp.source], ZERO)
        if move:
            return np.broadcast_to(moved, sources.group.mask.shape)
        found = moved != 0
        if "vsrc1" in encoded.fields:
            found = found | (sources.mask(encoded.vsrc1 + FIRST_VGPR) != 0)
        for register in sources.vector_reads:
            if register not in (encoded.src0 - FIRST_VGPR, encoded.fields.get("vsrc1")):
                found = found | (sources.mask(register + FIRST_VGPR) != 0)
        return np.broadcast_to(np.where(found, ALL, ZERO), sources.group.mask.shape)

    return rule


def matrix_rule(sources: Sources) -> Masks:
    """A row of A or a column of B with an undefined element, or an undefined scale, makes its row or column of D undefined; C counts by element."""
    encoded = sources.encoded
    shape, a, b = mfma.layout_of(encoded)
    rows = _undefined_lines(sources, shape, a, encoded.src0, encoded.acc & 1)
    columns = _undefined_lines(sources, shape, b, encoded.src1, encoded.acc >> 1)
    if "scale_src0" in encoded.fields:
        rows = rows | _undefined_scales(sources, shape, encoded.scale_src0, 0)
        columns = columns | _undefined_scales(sources, shape, encoded.scale_src1, 1)
    product = np.broadcast_to(rows[..., :, None] | columns[..., None, :], (sources.group.n, shape.blocks, shape.dim, shape.dim))
    values = mfma.registers_of_result(shape, np.ascontiguousarray(product))
    per_value = shape.result_registers // len(values)
    results = [np.where(values[i // per_value], ALL, ZERO) for i in range(shape.result_registers)]
    if encoded.src2 >= FIRST_VGPR:
        first = encoded.src2 + (encoded.accum_offset if encoded.acc_cd else 0)
        addends = [sources.mask(first + i) for i in range(shape.result_registers)]
        if per_value == 2:
            addends = [addends[i] | addends[i ^ 1] for i in range(shape.result_registers)]
        results = [result | np.where(addend != 0, ALL, ZERO) for result, addend in zip(results, addends, strict=True)]
    return list(results)


def _undefined_lines(sources: Sources, shape: mfma.Shape, element: mfma.Element, code: int, accumulator: int) -> np.ndarray:
    """bool [waves, blocks, dim]"""
    first = code + (sources.encoded.accum_offset if accumulator else 0)
    count = shape.items * element.bits // 32
    registers = [np.broadcast_to(sources.mask(first + i), sources.group.mask.shape) for i in range(count)]
    return np.asarray(mfma.words_of_operand(shape, element.bits, registers).any(axis=-1))


def _undefined_scales(sources: Sources, shape: mfma.Shape, code: int, side: int) -> np.ndarray:
    if code < FIRST_VGPR:
        return np.zeros((1, 1, 1), np.bool_)
    encoded = sources.encoded
    byte = (encoded.scale_op_sel >> side & 1) | (encoded.scale_op_sel_hi >> side & 1) << 1
    mask = np.broadcast_to(sources.mask(code), sources.group.mask.shape) >> U32(8 * byte) & U32(0xFF)
    return np.asarray((mask.reshape(-1, shape.depth // 32, shape.dim) != 0).any(axis=1)[:, None, :])


LANE_RULES: dict[str, Rule] = {
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_permlane16_swap_b32": _permlane_swap(16),
    "v_permlane32_swap_b32": _permlane_swap(32),
    "v_swap_b32": _swap,
    "ds_bpermute_b32": _backward_permute,
    "ds_permute_b32": _any_lane,
    "ds_swizzle_b32": _any_lane,
}
