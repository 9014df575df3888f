"""Floating-point vector instructions of VOP1, VOP2 and VOP3, and conversions between the standard types. Arithmetic: `float_math.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import float_math as fm
from .instruction import Row
from .vector_binding import row

Array = Any
F16, F32 = np.float16, np.float32


def _three(function: Any) -> Any:
    return lambda a, b, c: function(function(a, b), c)


def _byte_to_f32(byte: int) -> Any:
    return lambda a: (a >> np.uint32(8 * byte) & np.uint32(255)).astype(F32)


def _pack_f16(convert: Any) -> Any:
    return lambda a, b: convert(a).view(np.uint16).astype(np.uint32) | convert(b).view(np.uint16).astype(np.uint32) << np.uint32(16)


def _pack_normalized(dtype: type) -> Any:
    """Two values in -1..1 (0..1) scaled to the largest int16 (uint16), nearest even, packed."""
    largest = np.iinfo(dtype).max
    lowest = 0.0 if dtype is np.uint16 else -1.0

    def scale(a: Array) -> Array:
        wide = np.nan_to_num(np.clip(a.astype(np.float64), lowest, 1.0), nan=0.0)
        return np.rint(wide * largest).astype(np.int32).astype(np.uint32) & np.uint32(0xFFFF)

    return lambda a, b: scale(a) | scale(b) << np.uint32(16)


def _multiply_legacy(a: Array, b: Array) -> Array:
    return np.where((a == 0) | (b == 0), F32(0), a * b)


def _byte_into(a: Array, byte: Array, old: Array) -> Array:
    shift = (byte & np.uint32(3)) * np.uint32(8)
    return (old & ~(np.uint32(255) << shift)) | np.rint(np.nan_to_num(np.clip(a, 0, 255), nan=0.0)).astype(np.uint32) << shift


_to_i32, _to_u32 = fm.to_integer(np.int32), fm.to_integer(np.uint32)


def _to_f16(a: Array) -> Array:
    return a.astype(F16)


FLOAT_VOP1: dict[int, Row] = {
    3: row("v_cvt_i32_f64", "i32 = f64", _to_i32),
    4: row("v_cvt_f64_i32", "f64 = i32", lambda a: a.astype(np.float64)),
    5: row("v_cvt_f32_i32", "f32 = i32", lambda a: a.astype(F32)),
    6: row("v_cvt_f32_u32", "f32 = u32", lambda a: a.astype(F32)),
    7: row("v_cvt_u32_f32", "u32 = f32", _to_u32),
    8: row("v_cvt_i32_f32", "i32 = f32", _to_i32),
    10: row("v_cvt_f16_f32", "f16 = f32", _to_f16),
    11: row("v_cvt_f32_f16", "f32 = f16", lambda a: a.astype(F32)),
    12: row("v_cvt_rpi_i32_f32", "i32 = f32", lambda a: _to_i32(np.floor(a.astype(np.float64) + 0.5))),
    13: row("v_cvt_flr_i32_f32", "i32 = f32", lambda a: _to_i32(np.floor(a))),
    14: row("v_cvt_off_f32_i4", "f32 = u32", lambda a: ((a << np.uint32(28)).view(np.int32) >> np.int32(28)).astype(F32) / F32(16)),
    15: row("v_cvt_f32_f64", "f32 = f64", lambda a: a.astype(F32)),
    16: row("v_cvt_f64_f32", "f64 = f32", lambda a: a.astype(np.float64)),
    17: row("v_cvt_f32_ubyte0", "f32 = u32", _byte_to_f32(0)),
    18: row("v_cvt_f32_ubyte1", "f32 = u32", _byte_to_f32(1)),
    19: row("v_cvt_f32_ubyte2", "f32 = u32", _byte_to_f32(2)),
    20: row("v_cvt_f32_ubyte3", "f32 = u32", _byte_to_f32(3)),
    21: row("v_cvt_u32_f64", "u32 = f64", _to_u32),
    22: row("v_cvt_f64_u32", "f64 = u32", lambda a: a.astype(np.float64)),
    23: row("v_trunc_f64", "f64 = f64", np.trunc),
    24: row("v_ceil_f64", "f64 = f64", np.ceil),
    25: row("v_rndne_f64", "f64 = f64", np.rint),
    26: row("v_floor_f64", "f64 = f64", np.floor),
    27: row("v_fract_f32", "f32 = f32", fm.fract),
    28: row("v_trunc_f32", "f32 = f32", np.trunc),
    29: row("v_ceil_f32", "f32 = f32", np.ceil),
    30: row("v_rndne_f32", "f32 = f32", np.rint),
    31: row("v_floor_f32", "f32 = f32", np.floor),
    32: row("v_exp_f32", "f32 = f32", fm.flushing(np.exp2)),
    33: row("v_log_f32", "f32 = f32", fm.flushing(np.log2)),
    34: row("v_rcp_f32", "f32 = f32", fm.flushing(fm.reciprocal)),
    35: row("v_rcp_iflag_f32", "f32 = f32", fm.flushing(fm.reciprocal)),
    36: row("v_rsq_f32", "f32 = f32", fm.flushing(fm.reciprocal_root)),
    37: row("v_rcp_f64", "f64 = f64", fm.reciprocal),
    38: row("v_rsq_f64", "f64 = f64", fm.reciprocal_root),
    39: row("v_sqrt_f32", "f32 = f32", fm.flushing(np.sqrt)),
    40: row("v_sqrt_f64", "f64 = f64", np.sqrt),
    41: row("v_sin_f32", "f32 = f32", fm.flushing(fm.sine_of_turns)),
    42: row("v_cos_f32", "f32 = f32", fm.flushing(fm.cosine_of_turns)),
    48: row("v_frexp_exp_i32_f64", "i32 = f64", fm.frexp_exponent),
    49: row("v_frexp_mant_f64", "f64 = f64", fm.frexp_mantissa),
    50: row("v_fract_f64", "f64 = f64", fm.fract),
    51: row("v_frexp_exp_i32_f32", "i32 = f32", fm.frexp_exponent),
    52: row("v_frexp_mant_f32", "f32 = f32", fm.frexp_mantissa),
    57: row("v_cvt_f16_u16", "f16 = u16", lambda a: a.astype(F32).astype(F16)),
    58: row("v_cvt_f16_i16", "f16 = i16", lambda a: a.astype(F32).astype(F16)),
    59: row("v_cvt_u16_f16", "u16 = f16", fm.to_integer(np.uint16)),
    60: row("v_cvt_i16_f16", "i16 = f16", fm.to_integer(np.int16)),
    61: row("v_rcp_f16", "f16 = f16", fm.rounding(fm.reciprocal)),
    62: row("v_sqrt_f16", "f16 = f16", fm.rounding(np.sqrt)),
    63: row("v_rsq_f16", "f16 = f16", fm.rounding(fm.reciprocal_root)),
    64: row("v_log_f16", "f16 = f16", fm.rounding(np.log2)),
    65: row("v_exp_f16", "f16 = f16", fm.rounding(np.exp2)),
    66: row("v_frexp_mant_f16", "f16 = f16", fm.frexp_mantissa),
    67: row("v_frexp_exp_i16_f16", "i16 = f16", lambda a: fm.frexp_exponent(a).astype(np.int16)),
    68: row("v_floor_f16", "f16 = f16", np.floor),
    69: row("v_ceil_f16", "f16 = f16", np.ceil),
    70: row("v_trunc_f16", "f16 = f16", np.trunc),
    71: row("v_rndne_f16", "f16 = f16", np.rint),
    72: row("v_fract_f16", "f16 = f16", fm.fract),
    73: row("v_sin_f16", "f16 = f16", fm.rounding(fm.sine_of_turns)),
    74: row("v_cos_f16", "f16 = f16", fm.rounding(fm.cosine_of_turns)),
    75: row("v_exp_legacy_f32", "f32 = f32", fm.flushing(np.exp2)),
    76: row("v_log_legacy_f32", "f32 = f32", fm.flushing(np.log2)),
}

FLOAT_VOP2: dict[int, Row] = {
    1: row("v_add_f32", "f32 = f32 f32", np.add),
    2: row("v_sub_f32", "f32 = f32 f32", np.subtract),
    3: row("v_subrev_f32", "f32 = f32 f32", lambda a, b: b - a),
    4: row("v_fmac_f64", "f64 = f64 f64 f64", fm.fma_f64, accumulates=True),
    5: row("v_mul_f32", "f32 = f32 f32", np.multiply),
    10: row("v_min_f32", "f32 = f32 f32", fm.minimum),
    11: row("v_max_f32", "f32 = f32 f32", fm.maximum),
    31: row("v_add_f16", "f16 = f16 f16", np.add),
    32: row("v_sub_f16", "f16 = f16 f16", np.subtract),
    33: row("v_subrev_f16", "f16 = f16 f16", lambda a, b: b - a),
    34: row("v_mul_f16", "f16 = f16 f16", np.multiply),
    45: row("v_max_f16", "f16 = f16 f16", fm.maximum),
    46: row("v_min_f16", "f16 = f16 f16", fm.minimum),
    51: row("v_ldexp_f16", "f16 = f16 i16", fm.ldexp),
    59: row("v_fmac_f32", "f32 = f32 f32 f32", fm.fma_f32, accumulates=True),
}

FLOAT_VOP3: dict[int, Row] = {
    459: row("v_fma_f32", "f32 = f32 f32 f32", fm.fma_f32),
    460: row("v_fma_f64", "f64 = f64 f64 f64", fm.fma_f64),
    464: row("v_min3_f32", "f32 = f32 f32 f32", fm.minimum3),
    467: row("v_max3_f32", "f32 = f32 f32 f32", fm.maximum3),
    470: row("v_med3_f32", "f32 = f32 f32 f32", fm.median),
    477: row("v_cvt_pk_u8_f32", "u32 = f32 u32 u32", _byte_into),
    494: row("v_fma_legacy_f16", "f16 = f16 f16 f16", fm.fma_f16),
    500: row("v_min3_f16", "f16 = f16 f16 f16", fm.minimum3, half_select=True),
    503: row("v_max3_f16", "f16 = f16 f16 f16", fm.maximum3, half_select=True),
    506: row("v_med3_f16", "f16 = f16 f16 f16", fm.median, half_select=True),
    518: row("v_fma_f16", "f16 = f16 f16 f16", fm.fma_f16, half_select=True),
    640: row("v_add_f64", "f64 = f64 f64", np.add),
    641: row("v_mul_f64", "f64 = f64 f64", np.multiply),
    642: row("v_min_f64", "f64 = f64 f64", fm.minimum),
    643: row("v_max_f64", "f64 = f64 f64", fm.maximum),
    644: row("v_ldexp_f64", "f64 = f64 i32", fm.ldexp),
    648: row("v_ldexp_f32", "f32 = f32 i32", fm.ldexp),
    660: row("v_cvt_pknorm_i16_f32", "u32 = f32 f32", _pack_normalized(np.int16)),
    661: row("v_cvt_pknorm_u16_f32", "u32 = f32 f32", _pack_normalized(np.uint16)),
    662: row("v_cvt_pkrtz_f16_f32", "u32 = f32 f32", _pack_f16(fm.to_f16_toward_zero)),
    665: row("v_cvt_pknorm_i16_f16", "u32 = f16 f16", _pack_normalized(np.int16), half_select=True),
    666: row("v_cvt_pknorm_u16_f16", "u32 = f16 f16", _pack_normalized(np.uint16), half_select=True),
    672: row("v_pack_b32_f16", "u32 = f16 f16", _pack_f16(lambda a: a), half_select=True),
    673: row("v_mul_legacy_f32", "f32 = f32 f32", _multiply_legacy),
    680: row("v_minimum3_f32", "f32 = f32 f32 f32", _three(fm.propagating_minimum)),
    681: row("v_maximum3_f32", "f32 = f32 f32 f32", _three(fm.propagating_maximum)),
}
