"""Undefined bits through bitwise operations, shifts, sums and selections of vector instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import vector_integer as vi
from .shadow import ALL
from .state import VCC, bits_to_lanes
from .undefined_sources import U32, U64, ZERO, Mask, Masks, Rule, Sources

# Bitwise operations: value a with mask ma, and so on.


def bitwise_and(a: Any, ma: Any, b: Any, mb: Any) -> tuple[Any, Any]:
    return a & b, (ma & (b | mb)) | (mb & (a | ma))


def bitwise_or(a: Any, ma: Any, b: Any, mb: Any) -> tuple[Any, Any]:
    return a | b, (ma & (~b | mb)) | (mb & (~a | ma))


def bitwise_xor(a: Any, ma: Any, b: Any, mb: Any) -> tuple[Any, Any]:
    return a ^ b, ma | mb


def _chain(*operations: Callable[..., tuple[Any, Any]]) -> Rule:
    """v_op1_op2: op2(op1(src0, src1), src2)."""

    def rule(sources: Sources) -> Masks:
        codes = sources.codes(len(operations) + 1)
        value, mask = sources.value(codes[0]), sources.mask(codes[0])
        for operation, code in zip(operations, codes[1:], strict=True):
            value, mask = operation(value, mask, sources.value(code), sources.mask(code))
        return np.asarray(mask)

    return rule


def _shifted_left(a: Any, ma: Any, b: Any, mb: Any) -> tuple[Any, Any]:
    """An undefined amount makes all undefined."""
    amount = b & U32(31)
    return a << amount, np.where(mb & U32(31) != 0, ALL, ma << amount)


def _xnor(a: Any, ma: Any, b: Any, mb: Any) -> tuple[Any, Any]:
    return ~(a ^ b), ma | mb


def _through(count: int, compute: Callable[..., Any], deciding: tuple[int, ...], wide: tuple[int, ...] = ()) -> Rule:
    """A function that only moves bits, applied to the masks. deciding: sources that say how (their values are used, and must be defined);
    wide: those of 64 bits."""

    def rule(sources: Sources) -> Masks:
        codes = sources.codes(count)
        arguments, unknown = [], np.zeros((1, 1), np.bool_)
        for i, code in enumerate(codes):
            if i in deciding:
                unknown = unknown | (sources.mask(code) != 0)
                arguments.append(sources.value(code))
            else:
                arguments.append(sources.pair(code) if i in wide else sources.mask(code))
        found = compute(*arguments)
        if found.dtype.itemsize == 8:
            found = np.ascontiguousarray(found).view(U64)
            parts = [found.astype(U32), (found >> U64(32)).astype(U32)]
            return [np.where(unknown, ALL, part) for part in parts]
        return np.where(unknown, ALL, np.ascontiguousarray(found).view(U32))

    return rule


def _permute_bytes(a: Any, b: Any, selector: Any) -> Any:
    """v_perm_b32 of masks: the constant bytes (selector 12 and above) are defined."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    choice = np.minimum(np.ascontiguousarray(selector).view(np.uint8), 12).view(U32)
    return vi._perm(a, b, choice)


def _choose(sources: Sources) -> Masks:
    """v_cndmask: an undefined condition leaves defined what is the same on both sides."""
    fields = sources.encoded.fields
    if fields.get("neg") or fields.get("abs"):
        return sources.whole()
    codes = sources.codes(3)
    condition = codes[2] if len(codes) > 2 else VCC
    group = sources.group
    lanes = bits_to_lanes(_pair_of_waves(sources, sources.value, condition))
    unknown = bits_to_lanes(_pair_of_waves(sources, sources.mask, condition))
    (a, ma), (b, mb) = ((sources.value(code), sources.mask(code)) for code in codes[:2])
    return np.broadcast_to(np.where(unknown, ma | mb | (a ^ b), np.where(lanes, mb, ma)), group.mask.shape)


def _pair_of_waves(sources: Sources, read: Callable[[int, int], np.ndarray], code: int) -> np.ndarray:
    pair = np.empty((sources.group.n, 2), U32)
    for half in range(2):
        pair[:, half] = np.ravel(read(code, half))
    return pair


def _insert_bits(sources: Sources) -> Masks:
    """v_bfi: (a & b) | (~a & c)."""
    (a, ma), (b, mb), (c, mc) = ((sources.value(code), sources.mask(code)) for code in sources.codes(3))
    return (a & mb) | (~a & mc) | (ma & ((b ^ c) | mb | mc))


def upwards(mask: Any) -> Any:
    """Sums and products modulo 2**n: an undefined bit spoils itself and those above it."""
    return mask | (~mask + mask.dtype.type(1))


def _sum(count: int, shifted: int | None = None) -> Rule:
    """A sum or product of 32 bits. shifted: the place of the source by whose value the sources before it are shifted left."""

    def rule(sources: Sources) -> Masks:
        found, unknown = np.zeros((1, 1), U32), np.zeros((1, 1), np.bool_)
        for i, code in enumerate(sources.codes(count)):
            if i == shifted:
                found, unknown = found << (sources.value(code) & U32(31)), sources.mask(code) != 0
            else:
                found = found | sources.mask(code)
        return np.where(unknown, ALL, upwards(found))

    return rule


def _halves_of(wide: Any) -> list[Mask]:
    return [wide.astype(U32), (wide >> U64(32)).astype(U32)]


def _multiply_add_64(sources: Sources) -> Masks:
    """v_mad_u64_u32, v_mad_i64_i32. Compilers leave the high half of the addend undefined where they want the low half of the result, which it does
    not reach. After the result comes the carry, a bit for each lane of an SGPR pair."""
    a, b, c = sources.codes(3)
    found = upwards(sources.mask(a).astype(U64) | sources.mask(b) | sources.pair(c))
    lanes = np.where(found != 0, ALL, ZERO)
    return [*_halves_of(found), lanes, lanes]


def _shift_add_64(sources: Sources) -> Masks:
    a, shift, c = sources.codes(3)
    found = upwards(sources.pair(a) << (sources.value(shift) & U32(7)).astype(U64) | sources.pair(c))
    return [np.where(sources.mask(shift) != 0, ALL, half) for half in _halves_of(found)]


def _move(sources: Sources) -> Masks:
    return sources.mask(sources.codes()[0])


def _accumulator_move(sources: Sources) -> Masks:
    return sources.mask(sources.encoded.src0 + sources.encoded.accum_offset)


BIT_RULES: dict[str, Rule] = {
    "v_mov_b32": _move,
    "v_not_b32": _move,
    "v_accvgpr_write_b32": _move,
    "v_accvgpr_read_b32": _accumulator_move,
    "v_accvgpr_mov_b32": _accumulator_move,
    "v_mov_b64": lambda sources: [np.array(sources.mask(sources.codes()[0], half)) for half in range(2)],
    "v_and_b32": _chain(bitwise_and),
    "v_or_b32": _chain(bitwise_or),
    "v_xor_b32": _chain(bitwise_xor),
    "v_xnor_b32": _chain(_xnor),
    "v_and_or_b32": _chain(bitwise_and, bitwise_or),
    "v_or3_b32": _chain(bitwise_or, bitwise_or),
    "v_lshl_or_b32": _chain(_shifted_left, bitwise_or),
    "v_bfi_b32": _insert_bits,
    "v_cndmask_b32": _choose,
    **{f"v_{name}_u32": _sum(2) for name in ("add", "sub", "subrev", "mul_lo")},
    "v_add3_u32": _sum(3),
    "v_lshl_add_u32": _sum(3, shifted=1),
    "v_mad_u64_u32": _multiply_add_64,
    "v_mad_i64_i32": _multiply_add_64,
    "v_lshl_add_u64": _shift_add_64,
    "v_lshlrev_b32": _through(2, vi._shift_left, (0,)),
    "v_lshrrev_b32": _through(2, vi._shift_right, (0,)),
    "v_ashrrev_i32": _through(2, lambda amount, mask: vi._shift_right(amount, mask.view(np.int32)), (0,)),
    "v_lshlrev_b64": _through(2, lambda amount, mask: mask << (amount & U32(63)).astype(U64), (0,), (1,)),
    "v_lshrrev_b64": _through(2, lambda amount, mask: mask >> (amount & U32(63)).astype(U64), (0,), (1,)),
    "v_bfe_u32": _through(3, vi._bfe_u32, (1, 2)),
    "v_bfe_i32": _through(3, lambda mask, offset, width: vi._bfe_i32(mask.view(np.int32), offset, width), (1, 2)),
    "v_alignbit_b32": _through(3, vi._align(1), (2,)),
    "v_alignbyte_b32": _through(3, vi._align(8), (2,)),
    "v_perm_b32": _through(3, _permute_bytes, (2,)),
}
