"""Scalar instructions: SOP1, SOP2, SOPK, SOPC and the arithmetic-free part of SOPP. Branches are in `branches.py`.

An instruction is a function of arrays over waves (uint32 or uint64, one element a wave, or one element for a constant) that returns its
result and the new SCC, either of which may be None (not written). Signed arithmetic views the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .branches import BRANCH_SOP1, BRANCH_SOPK, BRANCH_SOPP
from .indexed import INDEX_SOP1, INDEX_SOPC, INDEX_SOPP
from .instruction import Encoded, Row, Run, UnsupportedEncoding
from .operands import LAST_SGPR, Reader, check_scalar_destination, scalar_u32, scalar_u64
from .state import EXEC, M0, Group

Value = np.ndarray
Result = tuple[Any, Any]  # (value or None, scc or None)
U32, U64 = np.uint32, np.uint64


def _signed(value: Value) -> Value:
    return value.view(np.int64 if value.dtype == np.uint64 else np.int32)


def _unsigned(value: Value) -> Value:
    return value.view(np.uint64 if value.dtype == np.int64 else np.uint32)


def _reader(code: int, bits: int, encoded: Encoded, *, signed: bool = False) -> Reader:
    literal = encoded.fields.get("literal")
    return scalar_u32(code, literal) if bits == 32 else scalar_u64(code, literal, signed=signed)


def _writer(code: int, bits: int) -> Callable[[Group, Value], None]:
    register = check_scalar_destination(code, bits // 32)
    if bits == 32:
        return lambda group, value: group.write_sgpr(register, value)
    return lambda group, value: group.write_sgpr64(register, value)


def _finish(write: Callable[[Group, Value], None], group: Group, result: Result) -> None:
    value, scc = result
    if value is not None:
        write(group, value)
    if scc is not None:
        group.scc = scc


def _sop2(mnemonic: str, compute: Callable[[Group, Value, Value], Result], bits: int = 32, second_bits: int = 0, signed: bool = False) -> Row:
    """bits: of the result and the sources; second_bits: of the second source where it differs."""

    def bind(encoded: Encoded) -> Run:
        first, second = _reader(encoded.ssrc0, bits, encoded, signed=signed), _reader(encoded.ssrc1, second_bits or bits, encoded, signed=signed)
        write = _writer(encoded.sdst, bits)
        return lambda group: _finish(write, group, compute(group, first(group), second(group)))

    return Row(mnemonic, bind)


def _sop1(mnemonic: str, compute: Callable[[Group, Value], Result], bits: int = 32, result_bits: int = 0, signed: bool = False) -> Row:
    def bind(encoded: Encoded) -> Run:
        source, write = _reader(encoded.ssrc0, bits, encoded, signed=signed), _writer(encoded.sdst, result_bits or bits)
        return lambda group: _finish(write, group, compute(group, source(group)))

    return Row(mnemonic, bind)


def _logic(compute: Callable[..., Value]) -> Callable[..., Result]:
    """SCC tells whether the result is not zero."""

    def run(group: Group, *sources: Value) -> Result:
        value = compute(*sources)
        return value, value != 0

    return run


def _plain(compute: Callable[..., Value]) -> Callable[..., Result]:
    return lambda group, *sources: (compute(*sources), None)


def _add_u32(group: Group, a: Value, b: Value) -> Result:
    total = a + b
    return total, total < a


def _sub_u32(group: Group, a: Value, b: Value) -> Result:
    return a - b, b > a


def _add_i32(group: Group, a: Value, b: Value) -> Result:
    total = a + b
    return total, ((a ^ total) & (b ^ total)) >> U32(31) != 0


def _sub_i32(group: Group, a: Value, b: Value) -> Result:
    difference = a - b
    return difference, ((a ^ b) & (a ^ difference)) >> U32(31) != 0


def _addc_u32(group: Group, a: Value, b: Value) -> Result:
    total = a.astype(U64) + b + group.scc
    return total.astype(U32), total >> U64(32) != 0


def _subb_u32(group: Group, a: Value, b: Value) -> Result:
    subtrahend = b.astype(U64) + group.scc
    return (a - subtrahend).astype(U32), subtrahend > a


def _lshl_add(shift: int) -> Callable[..., Result]:
    def run(group: Group, a: Value, b: Value) -> Result:
        total = (a.astype(U64) << U64(shift)) + b
        return total.astype(U32), total >> U64(32) != 0

    return run


def _choose(first: Callable[[Value, Value], Value], signed: bool) -> Callable[..., Result]:
    def run(group: Group, a: Value, b: Value) -> Result:
        scc = first(_signed(a), _signed(b)) if signed else first(a, b)
        return np.where(scc, a, b), scc

    return run


def _bfe(bits: int, signed: bool) -> Callable[[Value, Value], Value]:
    """Bit field extract; the second source holds the offset (low bits) and the width (bits 22:16), which may exceed the register."""
    dtype: Any = U32 if bits == 32 else U64

    def run(a: Value, b: Value) -> Value:
        offset, width = (b & U32(bits - 1)).astype(dtype), (b >> U32(16) & U32(127)).astype(dtype)
        shifted = _unsigned(_signed(a) >> _signed(offset)) if signed else a >> offset
        unused = np.maximum(dtype(bits), width) - width  # bits above the field
        clipped = shifted << np.minimum(unused, dtype(bits - 1))
        amount = np.minimum(unused, dtype(bits - 1))
        field = _unsigned(_signed(clipped) >> _signed(amount)) if signed else clipped >> amount
        return np.where(width == 0, dtype(0), field)

    return run


def _bfm(bits: int) -> Callable[[Value, Value], Value]:
    dtype: Any = U32 if bits == 32 else U64

    def run(a: Value, b: Value) -> Value:
        return ((dtype(1) << (a & U32(bits - 1)).astype(dtype)) - dtype(1)) << (b & U32(bits - 1)).astype(dtype)

    return run


def _mul_hi(signed: bool) -> Callable[[Value, Value], Value]:
    def run(a: Value, b: Value) -> Value:
        if signed:
            return (_signed(a).astype(np.int64) * _signed(b) >> np.int64(32)).astype(U32)
        return (a.astype(U64) * b >> U64(32)).astype(U32)

    return run


def _pack(low_shift: int, high_shift: int) -> Callable[[Value, Value], Value]:
    return lambda a, b: (a >> U32(low_shift) & U32(0xFFFF)) | (b >> U32(high_shift)) << U32(16)


def _shift_left(a: Value, b: Value) -> Value:
    return a << (b & U32(8 * a.itemsize - 1)).astype(a.dtype)


def _shift_right(a: Value, b: Value) -> Value:
    return a >> (b & U32(8 * a.itemsize - 1)).astype(a.dtype)


def _shift_right_signed(a: Value, b: Value) -> Value:
    return _unsigned(_signed(a) >> _signed((b & U32(8 * a.itemsize - 1)).astype(a.dtype)))


def _select(group: Group, a: Value, b: Value) -> Result:
    return np.where(group.scc, a, b), None


def _absdiff(a: Value, b: Value) -> Value:
    difference = _signed(a - b)
    return _unsigned(np.where(difference < 0, -difference, difference))


_BITWISE: list[tuple[str, Callable[[Value, Value], Value]]] = [
    ("and", lambda a, b: a & b),
    ("or", lambda a, b: a | b),
    ("xor", lambda a, b: a ^ b),
    ("andn2", lambda a, b: a & ~b),
    ("orn2", lambda a, b: a | ~b),
    ("nand", lambda a, b: ~(a & b)),
    ("nor", lambda a, b: ~(a | b)),
    ("xnor", lambda a, b: ~(a ^ b)),
]

SOP2: dict[int, Row] = {
    0: _sop2("s_add_u32", _add_u32),
    1: _sop2("s_sub_u32", _sub_u32),
    2: _sop2("s_add_i32", _add_i32),
    3: _sop2("s_sub_i32", _sub_i32),
    4: _sop2("s_addc_u32", _addc_u32),
    5: _sop2("s_subb_u32", _subb_u32),
    6: _sop2("s_min_i32", _choose(np.less, True)),
    7: _sop2("s_min_u32", _choose(np.less, False)),
    8: _sop2("s_max_i32", _choose(np.greater_equal, True)),
    9: _sop2("s_max_u32", _choose(np.greater_equal, False)),
    10: _sop2("s_cselect_b32", _select),
    11: _sop2("s_cselect_b64", _select, 64),
    28: _sop2("s_lshl_b32", _logic(_shift_left)),
    29: _sop2("s_lshl_b64", _logic(_shift_left), 64, 32),
    30: _sop2("s_lshr_b32", _logic(_shift_right)),
    31: _sop2("s_lshr_b64", _logic(_shift_right), 64, 32),
    32: _sop2("s_ashr_i32", _logic(_shift_right_signed)),
    33: _sop2("s_ashr_i64", _logic(_shift_right_signed), 64, 32, signed=True),
    34: _sop2("s_bfm_b32", _plain(_bfm(32))),
    36: _sop2("s_mul_i32", _plain(np.multiply)),
    37: _sop2("s_bfe_u32", _logic(_bfe(32, False))),
    38: _sop2("s_bfe_i32", _logic(_bfe(32, True))),
    39: _sop2("s_bfe_u64", _logic(_bfe(64, False)), 64, 32),
    40: _sop2("s_bfe_i64", _logic(_bfe(64, True)), 64, 32, signed=True),
    42: _sop2("s_absdiff_i32", _logic(_absdiff)),
    44: _sop2("s_mul_hi_u32", _plain(_mul_hi(False))),
    45: _sop2("s_mul_hi_i32", _plain(_mul_hi(True))),
    50: _sop2("s_pack_ll_b32_b16", _plain(_pack(0, 0))),
    51: _sop2("s_pack_lh_b32_b16", _plain(_pack(0, 16))),
    52: _sop2("s_pack_hh_b32_b16", _plain(_pack(16, 16))),
}
for _i, (_name, _compute) in enumerate(_BITWISE):
    SOP2[12 + 2 * _i] = _sop2(f"s_{_name}_b32", _logic(_compute))
    SOP2[13 + 2 * _i] = _sop2(f"s_{_name}_b64", _logic(_compute), 64)
for _shift in range(1, 5):
    SOP2[45 + _shift] = _sop2(f"s_lshl{_shift}_add_u32", _lshl_add(_shift))


def _bfm_b64() -> Row:
    def bind(encoded: Encoded) -> Run:
        first, second = _reader(encoded.ssrc0, 32, encoded), _reader(encoded.ssrc1, 32, encoded)
        write, compute = _writer(encoded.sdst, 64), _bfm(64)
        return lambda group: write(group, compute(first(group), second(group)))

    return Row("s_bfm_b64", bind)


SOP2[35] = _bfm_b64()


def _popcount(value: Value) -> Value:
    return np.bitwise_count(value).astype(U32) if hasattr(np, "bitwise_count") else _bits(value).sum(axis=1).astype(U32)


def _bits(value: Value) -> Value:
    """The bits of each element, lowest first: uint8 [n, 32 or 64]."""
    return np.unpackbits(np.ascontiguousarray(value)[:, None].view(np.uint8), axis=1, bitorder="little")


def _join_bits(bits: Value, dtype: Any) -> Value:
    return np.ascontiguousarray(np.packbits(bits, axis=1, bitorder="little")).view(dtype)[:, 0]


def _first_set(bits: Value) -> Value:
    """Index of the first 1 along each row, 0xFFFFFFFF if there is none."""
    return np.where(bits.any(axis=1), bits.argmax(axis=1), -1).astype(np.int32).view(U32)


def _leading_change(value: Value) -> Value:
    bits = _bits(value)[:, ::-1]
    return _first_set(bits != bits[:, :1])


def _any_of_four(value: Value) -> Value:
    return np.asarray(_bits(value).reshape(len(value), -1, 4).any(axis=2))


def _sign_extend(bits: int) -> Callable[[Value], Value]:
    return lambda a: _unsigned(_signed(a << U32(32 - bits)) >> np.int32(32 - bits))


def _abs(a: Value) -> Value:
    return _unsigned(np.abs(_signed(a)))


def _conditional_move(group: Group, sources: Value) -> Value:
    return np.where(group.scc, sources, U32(0))


def _quad_mask(dtype: Any) -> Callable[[Value], Value]:
    def run(a: Value) -> Value:
        quads = _any_of_four(a)
        bits = np.zeros((len(a), 8 * a.itemsize), np.bool_)
        bits[:, : quads.shape[1]] = quads
        return _join_bits(bits, dtype)

    return run


def _both_widths(opcode: int, name: str, compute: Callable[[Value], Value], scc: bool = True, result_bits: int = 0) -> None:
    wrap = _logic if scc else _plain
    prefix, suffix = name.split("*")
    SOP1[opcode] = _sop1(f"{prefix}b32{suffix}", wrap(compute), 32, result_bits)
    SOP1[opcode + 1] = _sop1(f"{prefix}b64{suffix}", wrap(compute), 64, result_bits)


SOP1: dict[int, Row] = {
    20: _sop1("s_flbit_i32", _plain(_leading_change)),
    21: _sop1("s_flbit_i32_i64", _plain(_leading_change), 64, 32),
    22: _sop1("s_sext_i32_i8", _plain(_sign_extend(8))),
    23: _sop1("s_sext_i32_i16", _plain(_sign_extend(16))),
    48: _sop1("s_abs_i32", _logic(_abs)),
    55: _sop1("s_bitreplicate_b64_b32", _plain(lambda a: _join_bits(np.repeat(_bits(a), 2, axis=1), U64)), 32, 64),
    **BRANCH_SOP1,
    **INDEX_SOP1,
}
_both_widths(0, "s_mov_*", lambda a: a, scc=False)
_both_widths(4, "s_not_*", lambda a: ~a)
_both_widths(6, "s_wqm_*", lambda a: _join_bits(np.repeat(_any_of_four(a), 4, axis=1), a.dtype))
_both_widths(8, "s_brev_*", lambda a: _join_bits(_bits(a)[:, ::-1], a.dtype), scc=False)
_both_widths(10, "s_bcnt0_i32_*", lambda a: _popcount(~a), result_bits=32)
_both_widths(12, "s_bcnt1_i32_*", _popcount, result_bits=32)
_both_widths(14, "s_ff0_i32_*", lambda a: _first_set(_bits(~a)), scc=False, result_bits=32)
_both_widths(16, "s_ff1_i32_*", lambda a: _first_set(_bits(a)), scc=False, result_bits=32)
_both_widths(18, "s_flbit_i32_*", lambda a: _first_set(_bits(a)[:, ::-1]), scc=False, result_bits=32)
SOP1[40] = _sop1("s_quadmask_b32", _logic(_quad_mask(U32)))
SOP1[41] = _sop1("s_quadmask_b64", _logic(_quad_mask(U64)), 64)


def _read_modify_sop1(mnemonic: str, compute: Callable[[Group, Value, Value], Value], bits: int, source_bits: int) -> Row:
    """The destination is also a source: compute(group, old destination, source)."""

    def bind(encoded: Encoded) -> Run:
        source = _reader(encoded.ssrc0, source_bits, encoded)
        old, write = _reader(encoded.sdst, bits, encoded), _writer(encoded.sdst, bits)
        return lambda group: write(group, compute(group, old(group), source(group)))

    return Row(mnemonic, bind)


def _bit(old: Value, index: Value) -> Value:
    return old.dtype.type(1) << (index & U32(8 * old.itemsize - 1)).astype(old.dtype)


for _opcode, _bits_of in ((2, 32), (3, 64)):
    SOP1[_opcode] = _read_modify_sop1(f"s_cmov_b{_bits_of}", lambda group, old, a: np.where(group.scc, a, old), _bits_of, _bits_of)
for _opcode, _bits_of in ((24, 32), (25, 64)):
    SOP1[_opcode] = _read_modify_sop1(f"s_bitset0_b{_bits_of}", lambda group, old, a: old & ~_bit(old, a), _bits_of, 32)
    SOP1[_opcode + 2] = _read_modify_sop1(f"s_bitset1_b{_bits_of}", lambda group, old, a: old | _bit(old, a), _bits_of, 32)


def _exec_sop1(mnemonic: str, compute: Callable[[Value, Value], Value], save_old: bool) -> Row:
    """EXEC becomes compute(source, EXEC); the destination gets the old EXEC (saveexec) or the new one (wrexec)."""

    def bind(encoded: Encoded) -> Run:
        source, destination = _reader(encoded.ssrc0, 64, encoded), check_scalar_destination(encoded.sdst, 2)

        def run(group: Group) -> None:
            old = group.read_sgpr64(EXEC)
            new = compute(source(group), old)
            group.write_sgpr64(destination, old if save_old else new)
            group.write_sgpr64(EXEC, new)
            group.scc = new != 0

        return run

    return Row(mnemonic, bind)


for _i, (_name, _compute) in enumerate(_BITWISE):
    SOP1[32 + _i] = _exec_sop1(f"s_{_name}_saveexec_b64", _compute, True)
SOP1[51] = _exec_sop1("s_andn1_saveexec_b64", lambda a, old: ~a & old, True)
SOP1[52] = _exec_sop1("s_orn1_saveexec_b64", lambda a, old: ~a | old, True)
SOP1[53] = _exec_sop1("s_andn1_wrexec_b64", lambda a, old: ~a & old, False)
SOP1[54] = _exec_sop1("s_andn2_wrexec_b64", lambda a, old: a & ~old, False)


def _move_relative(mnemonic: str, bits: int, source_relative: bool) -> Row:
    """SGPR indexed by M0. The index must be the same in all waves that execute together, else the waves take turns."""

    def bind(encoded: Encoded) -> Run:
        for code in (encoded.ssrc0, encoded.sdst):
            if check_scalar_destination(code, bits // 32) > LAST_SGPR:
                raise UnsupportedEncoding(f"operand code {code}, which cannot be indexed")

        def run(group: Group) -> None:
            state, waves = group.state, group.indices
            offset = state.sgpr[M0, waves].astype(np.int64)
            source = encoded.ssrc0 + (offset if source_relative else 0)
            target = encoded.sdst + (0 if source_relative else offset)
            if np.any(np.maximum(source, target) + bits // 32 > 102):
                raise group.fault(f"{mnemonic} indexes past the last SGPR")
            for i in range(bits // 32):
                state.sgpr[target + i, waves] = state.sgpr[source + i, waves]

        return run

    return Row(mnemonic, bind)


SOP1[42] = _move_relative("s_movrels_b32", 32, True)
SOP1[43] = _move_relative("s_movrels_b64", 64, True)
SOP1[44] = _move_relative("s_movreld_b32", 32, False)
SOP1[45] = _move_relative("s_movreld_b64", 64, False)


def _sopc(mnemonic: str, compare: Callable[[Value, Value], Value], bits: int = 32, second_bits: int = 0, signed: bool = False) -> Row:
    def bind(encoded: Encoded) -> Run:
        first, second = _reader(encoded.ssrc0, bits, encoded), _reader(encoded.ssrc1, second_bits or bits, encoded)

        def run(group: Group) -> None:
            a, b = first(group), second(group)
            group.scc = compare(_signed(a), _signed(b)) if signed else compare(a, b)

        return run

    return Row(mnemonic, bind)


_COMPARISONS = [("eq", np.equal), ("lg", np.not_equal), ("gt", np.greater), ("ge", np.greater_equal), ("lt", np.less), ("le", np.less_equal)]
SOPC: dict[int, Row] = {
    **INDEX_SOPC,
    18: _sopc("s_cmp_eq_u64", np.equal, 64),
    19: _sopc("s_cmp_lg_u64", np.not_equal, 64),
    12: _sopc("s_bitcmp0_b32", lambda a, b: _shift_right(a, b) & U32(1) == 0),
    13: _sopc("s_bitcmp1_b32", lambda a, b: _shift_right(a, b) & U32(1) != 0),
    14: _sopc("s_bitcmp0_b64", lambda a, b: _shift_right(a, b) & U64(1) == 0, 64, 32),
    15: _sopc("s_bitcmp1_b64", lambda a, b: _shift_right(a, b) & U64(1) != 0, 64, 32),
}
for _i, (_name, _compare) in enumerate(_COMPARISONS):
    SOPC[_i] = _sopc(f"s_cmp_{_name}_i32", _compare, signed=True)
    SOPC[6 + _i] = _sopc(f"s_cmp_{_name}_u32", _compare)


def _constant16(encoded: Encoded, signed: bool = True) -> Value:
    value = encoded.simm16
    return np.array([value - 0x10000 if signed and value & 0x8000 else value], np.int64).astype(U32)


def _sopk(mnemonic: str, compute: Callable[[Group, Value, Value], Result], signed: bool = True) -> Row:
    """compute(group, old destination, constant)."""

    def bind(encoded: Encoded) -> Run:
        constant, register = _constant16(encoded, signed), check_scalar_destination(encoded.sdst)
        write = _writer(register, 32)
        return lambda group: _finish(write, group, compute(group, group.read_sgpr(register), constant))

    return Row(mnemonic, bind)


def _compare_constant(compare: Callable[[Value, Value], Value], signed: bool) -> Callable[..., Result]:
    return lambda group, old, k: (None, compare(_signed(old), _signed(k)) if signed else compare(old, k))


SOPK: dict[int, Row] = {
    0: _sopk("s_movk_i32", lambda group, old, k: (k, None)),
    1: _sopk("s_cmovk_i32", lambda group, old, k: (np.where(group.scc, k, old), None)),
    14: _sopk("s_addk_i32", _add_i32),
    15: _sopk("s_mulk_i32", lambda group, old, k: (old * k, None)),
    **BRANCH_SOPK,
}
for _i, (_name, _compare) in enumerate(_COMPARISONS):
    SOPK[2 + _i] = _sopk(f"s_cmpk_{_name}_i32", _compare_constant(_compare, True))
    SOPK[8 + _i] = _sopk(f"s_cmpk_{_name}_u32", _compare_constant(_compare, False), signed=False)


def _no_effect(mnemonic: str) -> Row:
    """Waits, priorities and hints: instructions complete in order here, so there is nothing to wait for."""
    return Row(mnemonic, lambda encoded: lambda group: None)


def _trap(encoded: Encoded) -> Run:
    def run(group: Group) -> None:
        raise group.fault(f"s_trap {encoded.simm16}")

    return run


def _bind_sethalt(encoded: Encoded) -> Run:
    if encoded.simm16 & 1:
        raise UnsupportedEncoding("s_sethalt 1 stops the wave for a debugger")
    return lambda group: None


SOPP: dict[int, Row] = {
    0: _no_effect("s_nop"),
    12: _no_effect("s_waitcnt"),
    13: Row("s_sethalt", _bind_sethalt),
    14: _no_effect("s_sleep"),
    15: _no_effect("s_setprio"),
    18: Row("s_trap", _trap),
    19: _no_effect("s_icache_inv"),
    20: _no_effect("s_incperflevel"),
    21: _no_effect("s_decperflevel"),
    22: _no_effect("s_ttracedata"),
    **BRANCH_SOPP,
    **INDEX_SOPP,
}
