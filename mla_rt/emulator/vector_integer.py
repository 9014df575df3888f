"""Integer and bitwise vector instructions of VOP1, VOP2 and VOP3. Shift amounts are taken modulo the width, as hardware does."""

from __future__ import annotations

from typing import Any

import numpy as np

from .instruction import Encoded, Row, Run, UnsupportedEncoding
from .operands import KINDS, vector_source
from .vector_binding import result_writer, row

Array = Any
U16, U32, U64 = np.uint16, np.uint32, np.uint64


def _amount(value: Array, dtype: Any) -> Array:
    """A shift amount for values of dtype: modulo its width, in its type."""
    return (value & value.dtype.type(8 * np.dtype(dtype).itemsize - 1)).astype(dtype)


def _shift_left(amount: Array, value: Array) -> Array:
    return value << _amount(amount, value.dtype)


def _shift_right(amount: Array, value: Array) -> Array:
    return value >> _amount(amount, value.dtype)


def _low24(value: Array) -> Array:
    return value & U32(0xFFFFFF)


def _low24_signed(value: Array) -> Array:
    return ((value << np.int32(8)) >> np.int32(8)).astype(np.int64)


def _bfe_u32(a: Array, offset: Array, width: Array) -> Array:
    return a >> (offset & U32(31)) & ((U32(1) << (width & U32(31))) - U32(1))


def _bfe_i32(a: Array, offset: Array, width: Array) -> Array:
    """Sign-extended field; width 0 gives 0."""
    width = width & U32(31)
    unused = (U32(32) - width & U32(31)).view(np.int32)
    field = ((a >> (offset & U32(31)).view(np.int32)) << unused) >> unused
    return np.where(width == 0, np.int32(0), field)


def _align(bits: int) -> Any:
    """{a, b} shifted right by the low bits of c times `bits`, low dword."""

    def run(a: Array, b: Array, c: Array) -> Array:
        shift = ((c & U32(31)) if bits == 1 else (c & U32(3)) * U32(8)).astype(U64)
        return ((a.astype(U64) << U64(32) | b) >> shift).astype(U32)

    return run


def _perm(a: Array, b: Array, selector: Array) -> Array:
    """Each byte of the selector picks a byte of {a, b} (0-7), a sign of b or a repeated over the byte (8-11), 0 (12) or 0xFF (13 and above)."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    table = np.empty((*a.shape, 14), np.uint8)
    table[..., 0:4] = np.ascontiguousarray(b)[..., None].view(np.uint8)
    table[..., 4:8] = np.ascontiguousarray(a)[..., None].view(np.uint8)
    table[..., 8:12] = np.where(table[..., 1:8:2] & 0x80, 0xFF, 0)
    table[..., 12], table[..., 13] = 0, 0xFF
    choice = np.minimum(np.ascontiguousarray(selector)[..., None].view(np.uint8), 13)
    return np.take_along_axis(table, choice.astype(np.intp), axis=-1).view(U32)[..., 0]


def _bytes(value: Array) -> Array:
    return np.ascontiguousarray(value)[..., None].view(np.uint8)


def _sad_u8(a: Array, b: Array) -> Array:
    return np.abs(_bytes(a).astype(np.int32) - _bytes(b)).sum(axis=-1).astype(U32)


def _masked_sad_u8(a: Array, b: Array) -> Array:
    difference = np.abs(_bytes(a).astype(np.int32) - _bytes(b))
    return np.where(_bytes(b) == 0, 0, difference).sum(axis=-1).astype(U32)


def _sad_u16(a: Array, b: Array) -> Array:
    halves = [np.ascontiguousarray(x)[..., None].view(U16).astype(np.int32) for x in (a, b)]
    return np.abs(halves[0] - halves[1]).sum(axis=-1).astype(U32)


def _bit_reverse(value: Array) -> Array:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F)):
        value = (value >> U32(shift) & U32(mask)) | (value & U32(mask)) << U32(shift)
    return value.byteswap()


def _bit_length(value: Array) -> Array:
    """Number of bits up to the highest 1, for uint32: exact, since float64 holds every uint32."""
    return np.frexp(value.astype(np.float64))[1].astype(np.int32)


def _leading_zeros(value: Array) -> Array:
    return np.where(value == 0, np.int32(-1), np.int32(32) - _bit_length(value))


def _leading_sign_bits(value: Array) -> Array:
    """Position of the first bit from the top that differs from the sign; -1 if all are the same."""
    return _leading_zeros((value ^ (value >> np.int32(31))).view(U32))


def _trailing_zeros(value: Array) -> Array:
    lowest = value & (~value + U32(1))
    return np.where(value == 0, np.int32(-1), _bit_length(lowest) - 1)


def _popcount_add(value: Array, addend: Array) -> Array:
    return np.unpackbits(_bytes(value), axis=-1).sum(axis=-1, dtype=U32) + addend


def _pack16(low: Array, high: Array) -> Array:
    return low.astype(U32) & U32(0xFFFF) | (high.astype(U32) & U32(0xFFFF)) << U32(16)


def _shift_pack(low: int, high: int) -> Any:
    """Two i32 shifted right arithmetically, saturated to a byte each, packed into 16 bits."""

    def run(a: Array, b: Array, shift: Array) -> Array:
        shift = (shift & U32(31)).view(np.int32)
        first, second = (np.clip(x >> shift, low, high) & np.int32(255) for x in (a, b))
        return (first | second << np.int32(8)).astype(U16)

    return run


def _saturating_pack(low: int, high: int) -> Any:
    return lambda a, b: _pack16(np.clip(a.astype(np.int64), low, high), np.clip(b.astype(np.int64), low, high))


def _sat_pk_u8_i16(value: Array) -> Array:
    halves = np.clip(np.ascontiguousarray(value)[..., None].view(np.int16), 0, 255).astype(U16)
    return halves[..., 0] | halves[..., 1] << U16(8)


def _lshl_add_u64(a: Array, shift: Array, c: Array) -> Array:
    """The shift is 0..4; larger amounts give no defined product, so the shifted term is dropped as the ISA guide's text has it."""
    shift = (shift & U32(7)).astype(U64)
    return np.where(shift > 4, U64(0), a << shift) + c


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _three(function: Any) -> Any:
    return lambda a, b, c: function(function(a, b), c)


def _multiply_high(dtype: Any) -> Any:
    return lambda a, b: (a.astype(dtype) * b.astype(dtype) >> dtype(32)).astype(U32 if dtype is U64 else np.int32)


def _widened(value: Array) -> Array:
    return value.astype(np.int64)


def _dot(bits: int, signed: bool) -> Any:
    """c plus the products of the packed fields of a and b, wrapping."""

    def fields(value: Array) -> Array:
        bare = value.view(np.int32) if signed else value
        dtype = bare.dtype.type
        return [(bare << dtype(32 - bits - low)) >> dtype(32 - bits) for low in range(0, 32, bits)]

    def run(a: Array, b: Array, c: Array) -> Array:
        products = sum(_widened(x) * _widened(y) for x, y in zip(fields(a), fields(b), strict=True))
        return (products + _widened(c)).astype(c.dtype)

    return run


dot_i32_i16, dot_u32_u16 = _dot(16, True), _dot(16, False)
dot_i32_i8, dot_u32_u8 = _dot(8, True), _dot(8, False)
dot_i32_i4, dot_u32_u4 = _dot(4, True), _dot(4, False)

INTEGER_VOP1: dict[int, Row] = {
    1: row("v_mov_b32", "u32 = u32", lambda a: a),
    43: row("v_not_b32", "u32 = u32", np.invert),
    44: row("v_bfrev_b32", "u32 = u32", _bit_reverse),
    45: row("v_ffbh_u32", "i32 = u32", _leading_zeros),
    46: row("v_ffbl_b32", "i32 = u32", _trailing_zeros),
    47: row("v_ffbh_i32", "i32 = i32", _leading_sign_bits),
    56: row("v_mov_b64", "u64 = u64", lambda a: a),
    79: row("v_sat_pk_u8_i16", "u16 = u32", _sat_pk_u8_i16),
    88: row("v_prng_b32", "u32 = u32", lambda a: (a << U32(1)) ^ np.where(a >> U32(31) != 0, U32(197), U32(0))),
}

INTEGER_VOP2: dict[int, Row] = {
    6: row("v_mul_i32_i24", "i32 = i32 i32", lambda a, b: (_low24_signed(a) * _low24_signed(b)).astype(np.int32)),
    7: row("v_mul_hi_i32_i24", "i32 = i32 i32", lambda a, b: (_low24_signed(a) * _low24_signed(b) >> np.int64(32)).astype(np.int32)),
    8: row("v_mul_u32_u24", "u32 = u32 u32", lambda a, b: _low24(a) * _low24(b)),
    9: row("v_mul_hi_u32_u24", "u32 = u32 u32", lambda a, b: _multiply_high(U64)(_low24(a), _low24(b))),
    12: row("v_min_i32", "i32 = i32 i32", np.minimum),
    13: row("v_max_i32", "i32 = i32 i32", np.maximum),
    14: row("v_min_u32", "u32 = u32 u32", np.minimum),
    15: row("v_max_u32", "u32 = u32 u32", np.maximum),
    16: row("v_lshrrev_b32", "u32 = u32 u32", _shift_right),
    17: row("v_ashrrev_i32", "i32 = u32 i32", _shift_right),
    18: row("v_lshlrev_b32", "u32 = u32 u32", _shift_left),
    19: row("v_and_b32", "u32 = u32 u32", np.bitwise_and),
    20: row("v_or_b32", "u32 = u32 u32", np.bitwise_or),
    21: row("v_xor_b32", "u32 = u32 u32", np.bitwise_xor),
    38: row("v_add_u16", "u16 = u16 u16", np.add, clamped=np.add),
    39: row("v_sub_u16", "u16 = u16 u16", np.subtract, clamped=np.subtract),
    40: row("v_subrev_u16", "u16 = u16 u16", lambda a, b: b - a, clamped=lambda a, b: b - a),
    41: row("v_mul_lo_u16", "u16 = u16 u16", np.multiply),
    42: row("v_lshlrev_b16", "u16 = u16 u16", _shift_left),
    43: row("v_lshrrev_b16", "u16 = u16 u16", _shift_right),
    44: row("v_ashrrev_i16", "i16 = u16 i16", _shift_right),
    47: row("v_max_u16", "u16 = u16 u16", np.maximum),
    48: row("v_max_i16", "i16 = i16 i16", np.maximum),
    49: row("v_min_u16", "u16 = u16 u16", np.minimum),
    50: row("v_min_i16", "i16 = i16 i16", np.minimum),
    52: row("v_add_u32", "u32 = u32 u32", np.add, clamped=np.add),
    53: row("v_sub_u32", "u32 = u32 u32", np.subtract, clamped=np.subtract),
    54: row("v_subrev_u32", "u32 = u32 u32", lambda a, b: b - a, clamped=lambda a, b: b - a),
    56: row("v_dot2c_i32_i16", "i32 = u32 u32 i32", dot_i32_i16, accumulates=True),
    57: row("v_dot4c_i32_i8", "i32 = u32 u32 i32", dot_i32_i8, accumulates=True),
    58: row("v_dot8c_i32_i4", "i32 = u32 u32 i32", dot_i32_i4, accumulates=True),
    61: row("v_xnor_b32", "u32 = u32 u32", lambda a, b: ~(a ^ b)),
}


def _multiply_add(a: Array, b: Array, c: Array) -> Array:
    return a * b + c


def _mad24_signed(a: Array, b: Array, c: Array) -> Array:
    return (_low24_signed(a) * _low24_signed(b) + c).astype(np.int32)


def _mad24_signed_wide(a: Array, b: Array, c: Array) -> Array:
    return ((a << 40) >> 40) * ((b << 40) >> 40) + c


def _mad24_wide(a: Array, b: Array, c: Array) -> Array:
    return (a & 0xFFFFFF) * (b & 0xFFFFFF) + c


INTEGER_VOP3: dict[int, Row] = {
    450: row("v_mad_i32_i24", "i32 = i32 i32 i32", _mad24_signed, clamped=_mad24_signed_wide),
    451: row("v_mad_u32_u24", "u32 = u32 u32 u32", lambda a, b, c: _low24(a) * _low24(b) + c, clamped=_mad24_wide),
    456: row("v_bfe_u32", "u32 = u32 u32 u32", _bfe_u32),
    457: row("v_bfe_i32", "i32 = i32 u32 u32", _bfe_i32),
    458: row("v_bfi_b32", "u32 = u32 u32 u32", lambda a, b, c: (a & b) | (~a & c)),
    462: row("v_alignbit_b32", "u32 = u32 u32 u32", _align(1)),
    463: row("v_alignbyte_b32", "u32 = u32 u32 u32", _align(8)),
    465: row("v_min3_i32", "i32 = i32 i32 i32", _three(np.minimum)),
    466: row("v_min3_u32", "u32 = u32 u32 u32", _three(np.minimum)),
    468: row("v_max3_i32", "i32 = i32 i32 i32", _three(np.maximum)),
    469: row("v_max3_u32", "u32 = u32 u32 u32", _three(np.maximum)),
    471: row("v_med3_i32", "i32 = i32 i32 i32", _median),
    472: row("v_med3_u32", "u32 = u32 u32 u32", _median),
    473: row("v_sad_u8", "u32 = u32 u32 u32", lambda a, b, c: _sad_u8(a, b) + c),
    474: row("v_sad_hi_u8", "u32 = u32 u32 u32", lambda a, b, c: (_sad_u8(a, b) << U32(16)) + c),
    475: row("v_sad_u16", "u32 = u32 u32 u32", lambda a, b, c: _sad_u16(a, b) + c),
    476: row("v_sad_u32", "u32 = u32 u32 u32", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c),
    484: row("v_msad_u8", "u32 = u32 u32 u32", lambda a, b, c: _masked_sad_u8(a, b) + c),
    491: row("v_mad_legacy_u16", "u16 = u16 u16 u16", _multiply_add),
    492: row("v_mad_legacy_i16", "i16 = i16 i16 i16", _multiply_add),
    493: row("v_perm_b32", "u32 = u32 u32 u32", _perm),
    497: row("v_mad_u32_u16", "u32 = u16 u16 u32", lambda a, b, c: a.astype(U32) * b.astype(U32) + c, half_select=True),
    498: row("v_mad_i32_i16", "i32 = i16 i16 i32", lambda a, b, c: a.astype(np.int32) * b.astype(np.int32) + c, half_select=True),
    499: row("v_xad_u32", "u32 = u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    501: row("v_min3_i16", "i16 = i16 i16 i16", _three(np.minimum), half_select=True),
    502: row("v_min3_u16", "u16 = u16 u16 u16", _three(np.minimum), half_select=True),
    504: row("v_max3_i16", "i16 = i16 i16 i16", _three(np.maximum), half_select=True),
    505: row("v_max3_u16", "u16 = u16 u16 u16", _three(np.maximum), half_select=True),
    507: row("v_med3_i16", "i16 = i16 i16 i16", _median, half_select=True),
    508: row("v_med3_u16", "u16 = u16 u16 u16", _median, half_select=True),
    509: row("v_lshl_add_u32", "u32 = u32 u32 u32", lambda a, b, c: (a << (b & U32(31))) + c),
    510: row("v_add_lshl_u32", "u32 = u32 u32 u32", lambda a, b, c: (a + b) << (c & U32(31))),
    511: row("v_add3_u32", "u32 = u32 u32 u32", lambda a, b, c: a + b + c),
    512: row("v_lshl_or_b32", "u32 = u32 u32 u32", lambda a, b, c: (a << (b & U32(31))) | c),
    513: row("v_and_or_b32", "u32 = u32 u32 u32", lambda a, b, c: (a & b) | c),
    514: row("v_or3_b32", "u32 = u32 u32 u32", lambda a, b, c: a | b | c),
    516: row("v_mad_u16", "u16 = u16 u16 u16", _multiply_add, half_select=True, clamped=_multiply_add),
    517: row("v_mad_i16", "i16 = i16 i16 i16", _multiply_add, half_select=True, clamped=_multiply_add),
    520: row("v_lshl_add_u64", "u64 = u64 u32 u64", _lshl_add_u64),
    613: row("v_ashr_pk_i8_i32", "u16 = i32 i32 u32", _shift_pack(-128, 127), half_select=True),
    614: row("v_ashr_pk_u8_i32", "u16 = i32 i32 u32", _shift_pack(0, 255), half_select=True),
    645: row("v_mul_lo_u32", "u32 = u32 u32", np.multiply),
    646: row("v_mul_hi_u32", "u32 = u32 u32", _multiply_high(U64)),
    647: row("v_mul_hi_i32", "i32 = i32 i32", _multiply_high(np.int64)),
    651: row("v_bcnt_u32_b32", "u32 = u32 u32", _popcount_add),
    655: row("v_lshlrev_b64", "u64 = u32 u64", lambda a, b: b << (a & U32(63)).astype(U64)),
    656: row("v_lshrrev_b64", "u64 = u32 u64", lambda a, b: b >> (a & U32(63)).astype(U64)),
    657: row("v_ashrrev_i64", "i64 = u32 i64", lambda a, b: b >> (a & U32(63)).astype(np.int64)),
    659: row("v_bfm_b32", "u32 = u32 u32", lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31))),
    663: row("v_cvt_pk_u16_u32", "u32 = u32 u32", _saturating_pack(0, 0xFFFF)),
    664: row("v_cvt_pk_i16_i32", "u32 = i32 i32", _saturating_pack(-0x8000, 0x7FFF)),
    668: row("v_add_i32", "i32 = i32 i32", np.add, clamped=np.add),
    669: row("v_sub_i32", "i32 = i32 i32", np.subtract, clamped=np.subtract),
    670: row("v_add_i16", "i16 = i16 i16", np.add, half_select=True, clamped=np.add),
    671: row("v_sub_i16", "i16 = i16 i16", np.subtract, half_select=True, clamped=np.subtract),
}


def _bitop3(mnemonic: str, kind_name: str) -> Row:
    """Any bitwise function of three operands: bit 4a + 2b + c of the truth table, which lies in the omod, abs and neg fields."""
    kind = KINDS[kind_name]

    def bind(encoded: Encoded) -> Run:
        table = encoded.omod << 6 | encoded.fields["abs"] << 3 | encoded.neg
        if encoded.clamp or (kind.bits == 32 and encoded.op_sel):
            raise UnsupportedEncoding("a modifier of bitop3")
        codes = (encoded.src0, encoded.src1, encoded.src2)
        first, second, third = (vector_source(code, kind, None, encoded.op_sel >> i & 1) for i, code in enumerate(codes))
        write = result_writer(encoded, kind, half_select=True)
        terms = [i for i in range(8) if table >> i & 1]

        def run(group: Any) -> None:
            a, b, c = first(group), second(group), third(group)
            result: Array = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), kind.dtype)
            for i in terms:
                result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            write(group, result)

        return run

    return Row(mnemonic, bind)


INTEGER_VOP3[563] = _bitop3("v_bitop3_b16", "u16")
INTEGER_VOP3[564] = _bitop3("v_bitop3_b32", "u32")
