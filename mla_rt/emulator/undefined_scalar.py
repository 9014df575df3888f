"""Undefined bits through scalar instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .operands import SCC
from .shadow import ALL
from .state import EXEC
from .undefined_bits import bitwise_and, bitwise_or, bitwise_xor, upwards
from .undefined_sources import U32, ZERO, Mask, Masks, Rule, Sources


def _scalar_bitwise(operation: Callable[..., tuple[Any, Any]], bits: int, invert_second: bool = False) -> Rule:
    """Results in the order of writing: the register or pair, then SCC, which tells whether the value is zero."""

    def rule(sources: Sources) -> Masks:
        encoded = sources.encoded
        results: list[Mask] = []
        for half in range(bits // 32):
            (a, ma), (b, mb) = ((sources.value(code, half, bits), sources.mask(code, half)) for code in (encoded.ssrc0, encoded.ssrc1))
            results.append(operation(a, ma, ~b if invert_second else b, mb)[1])
        return [*results, _any_bit(results)]

    return rule


def _any_bit(masks: list[Mask]) -> np.ndarray:
    found = np.logical_or.reduce(np.broadcast_arrays(*(mask != 0 for mask in masks)))
    return np.where(found, ALL, ZERO)


def _scalar_move(bits: int) -> Rule:
    return lambda sources: [np.array(sources.mask(sources.encoded.ssrc0, half)) for half in range(bits // 32)]


def _scalar_not(bits: int) -> Rule:
    def rule(sources: Sources) -> Masks:
        results = [sources.mask(sources.encoded.ssrc0, half) for half in range(bits // 32)]
        return [*results, _any_bit(results)]

    return rule


def _scalar_shift(left: bool) -> Rule:
    def rule(sources: Sources) -> Masks:
        encoded = sources.encoded
        amount, mask = sources.value(encoded.ssrc1) & U32(31), sources.mask(encoded.ssrc0)
        moved = mask << amount if left else mask >> amount
        result = np.where(sources.mask(encoded.ssrc1) & U32(31) != 0, ALL, moved)
        return [result, _any_bit([result])]

    return rule


def _scalar_sum(flag: bool) -> Rule:
    def rule(sources: Sources) -> Masks:
        result = upwards(sources.mask(sources.encoded.ssrc0) | sources.mask(sources.encoded.ssrc1))
        return [result, _any_bit([result])] if flag else result

    return rule


def _scalar_choose(bits: int) -> Rule:
    def rule(sources: Sources) -> Masks:
        encoded, taken = sources.encoded, sources.value(SCC) != 0
        unknown = sources.mask(SCC) != 0
        return [
            np.where(unknown, ALL, np.where(taken, sources.mask(encoded.ssrc0, half), sources.mask(encoded.ssrc1, half)))
            for half in range(bits // 32)
        ]

    return rule


def _save_exec_and(sources: Sources) -> Masks:
    """s_and_saveexec: the old EXEC, then source & EXEC, then SCC."""
    source = sources.encoded.ssrc0
    results = [sources.mask(source, half) & sources.value(EXEC, half) for half in range(2)]
    return [None, None, *results, _any_bit(results)]


def _scalar_pack(low_shift: int, high_shift: int) -> Rule:
    def rule(sources: Sources) -> Masks:
        low, high = sources.mask(sources.encoded.ssrc0), sources.mask(sources.encoded.ssrc1)
        return (low >> U32(low_shift) & U32(0xFFFF)) | (high >> U32(high_shift)) << U32(16)

    return rule


SCALAR_RULES: dict[str, Rule] = {
    **{f"s_and_b{bits}": _scalar_bitwise(bitwise_and, bits) for bits in (32, 64)},
    **{f"s_or_b{bits}": _scalar_bitwise(bitwise_or, bits) for bits in (32, 64)},
    **{f"s_xor_b{bits}": _scalar_bitwise(bitwise_xor, bits) for bits in (32, 64)},
    **{f"s_andn2_b{bits}": _scalar_bitwise(bitwise_and, bits, invert_second=True) for bits in (32, 64)},
    **{f"s_mov_b{bits}": _scalar_move(bits) for bits in (32, 64)},
    "s_movk_i32": lambda sources: None,  # the emulator reads the old value, as other instructions of the format need it
    **{f"s_not_b{bits}": _scalar_not(bits) for bits in (32, 64)},
    **{f"s_cselect_b{bits}": _scalar_choose(bits) for bits in (32, 64)},
    **{f"s_{name}": _scalar_sum(True) for name in ("add_u32", "add_i32", "sub_u32", "sub_i32")},
    "s_mul_i32": _scalar_sum(False),
    "s_lshl_b32": _scalar_shift(True),
    "s_lshr_b32": _scalar_shift(False),
    "s_and_saveexec_b64": _save_exec_and,
    "s_pack_ll_b32_b16": _scalar_pack(0, 0),
    "s_pack_lh_b32_b16": _scalar_pack(0, 16),
    "s_pack_hh_b32_b16": _scalar_pack(16, 16),
}
