"""Vector instructions that read or write a lane mask: compares, conditional selection, carry arithmetic, and the steps of a division.

A lane mask is an SGPR pair with one bit a lane; in the short encodings it is VCC.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import float_math as fm
from .instruction import Encoded, Row, Run, UnsupportedEncoding
from .lanes import Dpp
from .operands import KINDS, Reader, check_constant_bus, check_scalar_destination, mask_source
from .state import EXEC, VCC, Group
from .vector_binding import bind_sources, result_writer, row

Array = Any
U32, U64 = np.uint32, np.uint64


# ---- compares ----


def _compare(mnemonic: str, kinds: list[str], test: Callable[[Array, Array], Array], writes_exec: bool, *, exact: bool = False) -> Row:
    """exact: a test of the bits, whatever the mode says of denormals."""

    def bind(encoded: Encoded) -> Run:
        if encoded.encoding == "VOPC":
            destination = VCC
        elif encoded.encoding == "VOP3":
            destination = encoded.vdst
            if encoded.omod or encoded.clamp:
                raise UnsupportedEncoding("clamp or omod on a compare")
        else:
            destination = encoded.sdst if encoded.sd else VCC
        check_scalar_destination(destination, 2)
        first, second = bind_sources(encoded, [KINDS[name] for name in kinds], exact=exact)

        def run(group: Group) -> None:
            lanes = test(first(group), second(group))
            group.write_mask(destination, lanes)
            if writes_exec and destination != EXEC:
                group.write_mask(EXEC, lanes)

        return run

    return Row(mnemonic, bind)


def _always(value: bool) -> Callable[[Array, Array], Array]:
    return lambda a, b: np.full((1, 1), value)


def _unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


_Tests = list[tuple[str, Callable[[Array, Array], Array]]]
_ORDERED: _Tests = [
    ("lt", np.less),
    ("eq", np.equal),
    ("le", np.less_equal),
    ("gt", np.greater),
    ("lg", lambda a, b: (a < b) | (a > b)),
    ("ge", np.greater_equal),
    ("o", lambda a, b: ~_unordered(a, b)),
]
_FLOAT_TESTS: _Tests = [
    ("f", _always(False)),
    *_ORDERED,
    ("u", _unordered),
    ("nge", lambda a, b: ~(a >= b)),
    ("nlg", lambda a, b: ~((a < b) | (a > b))),
    ("ngt", lambda a, b: ~(a > b)),
    ("nle", lambda a, b: ~(a <= b)),
    ("neq", np.not_equal),
    ("nlt", lambda a, b: ~(a < b)),
    ("tru", _always(True)),
]
_INTEGER_TESTS: _Tests = [
    ("f", _always(False)),
    ("lt", np.less),
    ("eq", np.equal),
    ("le", np.less_equal),
    ("gt", np.greater),
    ("ne", np.not_equal),
    ("ge", np.greater_equal),
    ("t", _always(True)),
]

VOPC: dict[int, Row] = {}
for _base, _kind in ((0x20, "f16"), (0x40, "f32"), (0x60, "f64")):
    for _i, (_name, _test) in enumerate(_FLOAT_TESTS):
        VOPC[_base + _i] = _compare(f"v_cmp_{_name}_{_kind}", [_kind, _kind], _test, False)
        VOPC[_base + 16 + _i] = _compare(f"v_cmpx_{_name}_{_kind}", [_kind, _kind], _test, True)
for _base, _kind in ((0xA0, "i16"), (0xA8, "u16"), (0xC0, "i32"), (0xC8, "u32"), (0xE0, "i64"), (0xE8, "u64")):
    for _i, (_name, _test) in enumerate(_INTEGER_TESTS):
        VOPC[_base + _i] = _compare(f"v_cmp_{_name}_{_kind}", [_kind, _kind], _test, False)
        VOPC[_base + 16 + _i] = _compare(f"v_cmpx_{_name}_{_kind}", [_kind, _kind], _test, True)
for _i, _kind in enumerate(("f32", "f64", "f16")):
    VOPC[0x10 + 2 * _i] = _compare(f"v_cmp_class_{_kind}", [_kind, "u32"], fm.in_class, False, exact=True)
    VOPC[0x11 + 2 * _i] = _compare(f"v_cmpx_class_{_kind}", [_kind, "u32"], fm.in_class, True, exact=True)


# ---- selection and carry ----


def _dpp_of(encoded: Encoded) -> Dpp | None:
    return Dpp(encoded) if encoded.encoding.endswith("_DPP") else None


def _reject_modifiers(encoded: Encoded, *names: str) -> None:
    for name in names:
        if encoded.fields.get(name):
            raise UnsupportedEncoding(name)


def _check_mask(encoded: Encoded, mask: int) -> None:
    """A mask in SGPRs takes the constant bus from the sources; a pair is another value than its halves, for which the complement stands here."""
    codes = [encoded.src0] if encoded.encoding in ("VOP2", "VOP2_SDWA") else []
    if encoded.encoding.startswith("VOP3"):
        codes = [encoded.src0, encoded.src1]
    if encoded.fields.get("s1"):
        codes.append(encoded.vsrc1)
    check_constant_bus(*codes, *([~mask] if mask <= EXEC else []))


def _cndmask(encoded: Encoded) -> Run:
    _reject_modifiers(encoded, "clamp", "omod")
    dpp = _dpp_of(encoded)
    mask_code = encoded.src2 if encoded.encoding == "VOP3" else VCC
    _check_mask(encoded, mask_code)
    mask = mask_source(mask_code)
    u32 = KINDS["u32"]
    false, true = bind_sources(encoded, [u32, u32], on_bits=True, dpp=dpp)
    write = result_writer(encoded, u32, dpp=dpp)
    return lambda group: write(group, np.where(mask(group), true(group), false(group)))


def _add(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    total = a.astype(U64) + b + carry
    return total.astype(U32), total >> U64(32) != 0


def _subtract(a: Array, b: Array, borrow: Array) -> tuple[Array, Array]:
    subtrahend = b.astype(U64) + borrow
    return (a - subtrahend).astype(U32), subtrahend > a


def _reverse_subtract(a: Array, b: Array, borrow: Array) -> tuple[Array, Array]:
    return _subtract(b, a, borrow)


_NO_CARRY = np.zeros((1, 1), np.bool_)


def _carry(mnemonic: str, compute: Callable[[Array, Array, Array], tuple[Array, Array]], carry_in: bool) -> Row:
    """With clamp the 32-bit result saturates: all ones after a carry, zero after a borrow."""

    def bind(encoded: Encoded) -> Run:
        _reject_modifiers(encoded, "omod", "neg")
        long_form = encoded.encoding == "VOP3SD"
        destination = check_scalar_destination(encoded.sdst if long_form else VCC, 2)
        carry: Reader = lambda group: _NO_CARRY  # noqa: E731
        if carry_in:
            carry_code = encoded.src2 if long_form else VCC
            _check_mask(encoded, carry_code)
            carry = mask_source(carry_code)
        dpp = _dpp_of(encoded)
        first, second = bind_sources(encoded, [KINDS["u32"], KINDS["u32"]], dpp=dpp)
        write = result_writer(encoded, KINDS["u32"], dpp=dpp)
        saturated = None
        if encoded.fields.get("clamp"):
            saturated = U32(0xFFFFFFFF if compute is _add else 0)

        def run(group: Group) -> None:
            value, carries = compute(first(group), second(group), carry(group))
            write(group, value if saturated is None else np.where(carries, saturated, value))
            group.write_mask(destination, carries)

        return run

    return Row(mnemonic, bind)


MASK_VOP2: dict[int, Row] = {
    0: Row("v_cndmask_b32", _cndmask),
    25: _carry("v_add_co_u32", _add, False),
    26: _carry("v_sub_co_u32", _subtract, False),
    27: _carry("v_subrev_co_u32", _reverse_subtract, False),
    28: _carry("v_addc_co_u32", _add, True),
    29: _carry("v_subb_co_u32", _subtract, True),
    30: _carry("v_subbrev_co_u32", _reverse_subtract, True),
}


# ---- multiply-add to 64 bits ----


def _mad64(mnemonic: str, source: str, wide: str) -> Row:
    """src0 * src1 + src2 in 64 bits, with the carry (signed: overflow) out."""

    def bind(encoded: Encoded) -> Run:
        _reject_modifiers(encoded, "omod", "neg", "clamp")
        destination = check_scalar_destination(encoded.sdst, 2)
        first, second, third = bind_sources(encoded, [KINDS[source], KINDS[source], KINDS[wide]])
        write = result_writer(encoded, KINDS[wide])
        dtype = KINDS[wide].dtype

        def run(group: Group) -> None:
            a, b, c = first(group), second(group), third(group)
            product: Array = a.astype(dtype) * b.astype(dtype)
            total = product + c
            carries = total < product if wide == "u64" else ((product ^ total) & (c ^ total)) < 0
            write(group, total)
            group.write_mask(destination, carries)

        return run

    return Row(mnemonic, bind)


# ---- division ----


def _exponent(value: Array) -> Array:
    """The biased exponent field."""
    if value.dtype == np.float64:
        return (value.view(U64) >> U64(52) & U64(0x7FF)).astype(np.int32)
    return (value.view(U32) >> U32(23) & U32(0xFF)).astype(np.int32)


def _div_scale(mnemonic: str, kind_name: str, near_overflow: int, step: int, tiny_numerator: int) -> Row:
    """Scale a numerator (src0 = src2) or denominator (src0 = src1) so that the division's Newton steps neither overflow nor lose bits."""

    def scale(value: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
        value, denominator, numerator = np.broadcast_arrays(value, denominator, numerator)
        smallest = np.finfo(value.dtype).tiny

        def denormal(x: Array) -> Array:
            return (x != 0) & (np.abs(x) < smallest)

        reciprocal_denormal, quotient_denormal = denormal(1 / denominator), denormal(numerator / denominator)
        is_denominator, is_numerator = value == denominator, value == numerator
        up, down = np.full(value.shape, step, np.int32), np.full(value.shape, -step, np.int32)
        none = np.zeros(value.shape, np.int32)
        cases: list[tuple[Array, Array, bool]] = [  # condition, power of two, mask bit
            (_exponent(numerator) - _exponent(denominator) >= near_overflow, np.where(is_denominator, up, none), True),
            (denormal(denominator), up, False),
            # The ISA guide's text scales the denominator up here, which would overflow; only down gives the division's quotient.
            (reciprocal_denormal & quotient_denormal, np.where(is_denominator, down, none), True),
            (reciprocal_denormal, down, False),
            (quotient_denormal, np.where(is_numerator, up, none), True),
            (_exponent(numerator) <= tiny_numerator, up, False),
        ]
        conditions = [case[0] for case in cases]
        power = np.select(conditions, [case[1] for case in cases], none)
        mask = np.select(conditions, [np.full(value.shape, case[2]) for case in cases], np.zeros(value.shape, np.bool_))
        undefined = (numerator == 0) | (denominator == 0)
        return np.where(undefined, value.dtype.type(np.nan), fm.ldexp(value, power)), mask & ~undefined

    def bind(encoded: Encoded) -> Run:
        _reject_modifiers(encoded, "omod", "clamp")
        destination = check_scalar_destination(encoded.sdst, 2)
        kind = KINDS[kind_name]
        first, second, third = bind_sources(encoded, [kind, kind, kind])
        write = result_writer(encoded, kind)

        def run(group: Group) -> None:
            value, mask = scale(first(group), second(group), third(group))
            write(group, value)
            group.write_mask(destination, mask)

        return run

    return Row(mnemonic, bind)


def _div_fmas(mnemonic: str, kind_name: str, fma: Callable[..., Array], step: int) -> Row:
    """Fused multiply-add that undoes div_scale where VCC is set: up if the quotient so far (src2) is at least 2, else down."""

    def bind(encoded: Encoded) -> Run:
        _reject_modifiers(encoded, "omod", "clamp")
        kind = KINDS[kind_name]
        first, second, third = bind_sources(encoded, [kind, kind, kind])
        check_constant_bus(~VCC, encoded.src0, encoded.src1, encoded.src2)
        write, mask = result_writer(encoded, kind), mask_source(VCC)

        def run(group: Group) -> None:
            a, b, c = first(group), second(group), third(group)
            scaled = mask(group)
            plain = fma(a, b, c)
            if scaled.any():
                power = np.where(np.abs(c) >= 2, step, -step).astype(np.int32)
                plain = np.where(scaled, fm.ldexp(plain, power), plain)
            write(group, plain)

        return run

    return Row(mnemonic, bind)


def _div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The special cases of a division, and the sign."""
    dtype = quotient.dtype.type
    sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), dtype(-1), dtype(1))
    infinity, nan = dtype(np.inf), dtype(np.nan)
    result = np.copysign(quotient, sign)
    if dtype is not np.float16:
        # A quotient beyond the format: the steps before this one may have made it infinite or NaN.
        result = np.where(np.isfinite(quotient), result, np.copysign(infinity, sign))
        underflow = _exponent(numerator) - _exponent(denominator) < (-150 if dtype is np.float32 else -1075)
        result = np.where(underflow, np.copysign(dtype(0), sign), result)
    result = np.where(np.isinf(denominator) | (numerator == 0), np.copysign(dtype(0), sign), result)
    result = np.where((denominator == 0) | np.isinf(numerator), np.copysign(infinity, sign), result)
    invalid = ((denominator == 0) & (numerator == 0)) | (np.isinf(denominator) & np.isinf(numerator))
    return np.where(invalid | np.isnan(denominator) | np.isnan(numerator), nan, result)


MASK_VOP3: dict[int, Row] = {
    478: row("v_div_fixup_f32", "f32 = f32 f32 f32", _div_fixup),
    479: row("v_div_fixup_f64", "f64 = f64 f64 f64", _div_fixup),
    480: _div_scale("v_div_scale_f32", "f32", 96, 64, 23),
    481: _div_scale("v_div_scale_f64", "f64", 768, 128, 53),
    482: _div_fmas("v_div_fmas_f32", "f32", fm.fma_f32, 64),
    483: _div_fmas("v_div_fmas_f64", "f64", fm.fma_f64, 128),
    488: _mad64("v_mad_u64_u32", "u32", "u64"),
    489: _mad64("v_mad_i64_i32", "i32", "i64"),
    519: row("v_div_fixup_f16", "f16 = f16 f16 f16", _div_fixup, half_select=True),
}
