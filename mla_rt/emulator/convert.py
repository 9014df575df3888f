"""Conversions between float32, float16, bfloat16 and the narrow formats: the plain ones and the v_cvt_scalef32_* family.

MODE.FP16_OVFL is taken as 0: beyond the largest value fp8 becomes NaN, bf8 infinity; fp6, bf6 and fp4 have neither and saturate.
A scale is the exponent field of a float32 operand, 2**(e - 127): widening multiplies by it, narrowing divides by it and then rounds.
Stochastic rounding adds the random operand, from its top bit down, below the last bit that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .instruction import Encoded, Row, Run, UnsupportedEncoding
from .operands import FIRST_VGPR, KINDS, Reader
from .small_floats import E2M1, E2M3, E3M2, E4M3, E5M2, SmallFloat, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, scale_of_f32
from .state import Group
from .vector_binding import bind_sources, row

Bind = Callable[[Encoded], Run]


@dataclass(frozen=True)
class Wide:
    """A 16- or 32-bit format: decode(patterns) -> float32 values; encode(float64 values) -> patterns (uint32)."""

    name: str
    bits: int
    decode: Callable[[np.ndarray], np.ndarray]
    encode: Callable[[np.ndarray], np.ndarray]


def _f32_bits(value: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return value.astype(np.float32).view(np.uint32)


F32 = Wide("f32", 32, lambda patterns: patterns.view(np.float32), _f32_bits)
F16 = Wide("f16", 16, lambda patterns: f16_to_f32(patterns & np.uint32(0xFFFF)), lambda value: f32_to_f16(_f32_bits(value)))
BF16 = Wide("bf16", 16, bf16_to_f32, lambda value: f32_to_bf16(_f32_bits(value)))


def _write_field(group: Group, register: int, value: np.ndarray, low: int, bits: int) -> None:
    """Write `bits` bits of a register from bit `low` up, keeping the others."""
    field = np.uint32(((1 << bits) - 1) << low)
    group.write_vgpr(register, group.read_vgpr(register) & ~field | value << np.uint32(low))


def _sources(encoded: Encoded, kinds: str) -> list[Reader]:
    """Readers of src0, src1, … with neg and abs applied; op_sel is left to the caller, for it selects parts of registers in its own way here."""
    if encoded.fields.get("omod") or encoded.fields.get("clamp"):
        raise UnsupportedEncoding("omod or clamp on a conversion")
    return bind_sources(replace(encoded, fields={**encoded.fields, "op_sel": 0}), [KINDS[kind] for kind in kinds.split()])


def _settle(encoded: Encoded, wide: Wide) -> Callable[[np.ndarray], np.ndarray]:
    """What the mode does to f32 elements; those of 16 bits keep their denormals."""
    return encoded.mode.settle(KINDS["f32" if wide is F32 else "u32"])


def _op_sel(encoded: Encoded, allowed: int) -> int:
    if encoded.op_sel & ~allowed:
        raise UnsupportedEncoding(f"op_sel {encoded.op_sel:#x} on a conversion")
    return encoded.op_sel


def _register(code: int) -> int:
    if code < FIRST_VGPR:
        raise UnsupportedEncoding(f"operand code {code} where a tuple of vector registers is needed")
    return code - FIRST_VGPR


def _noise_of_next(noise: np.ndarray) -> np.ndarray:
    """The random operand of a pack's next element, as v_prng_b32 computes it."""
    return noise << np.uint32(1) ^ np.where(noise >> np.uint32(31), np.uint32(197), np.uint32(0))


# Plain conversions -----------------------------------------------------------------------------------------------------------------------


def _from_byte(small: SmallFloat) -> Callable[[np.ndarray], np.ndarray]:
    return lambda source: small.decode.take(source & np.uint32(0xFF))


def _from_two_bytes(small: SmallFloat) -> Callable[[np.ndarray], np.ndarray]:
    pairs = np.stack([small.decode[np.arange(1 << 16) & 0xFF], small.decode[np.arange(1 << 16) >> 8]], axis=-1).view(np.uint64)[:, 0]
    return lambda source: pairs.take(source & np.uint32(0xFFFF))


def _pack_bytes(small: SmallFloat) -> Bind:
    """Two float32 to two bytes, in the half of the destination that op_sel[3] names."""

    def bind(encoded: Encoded) -> Run:
        low, high = _sources(encoded, "f32 f32")
        shift = 16 * (_op_sel(encoded, 8) >> 3)

        def run(group: Group) -> None:
            first, second = small.encode(low(group).view(np.uint32)), small.encode(high(group).view(np.uint32))
            _write_field(group, encoded.vdst, first | second << np.uint32(8), shift, 16)

        return run

    return bind


def _stochastic_byte(small: SmallFloat) -> Bind:
    """One float32 to one byte, the one that op_sel[3:2] names, rounded stochastically."""

    def bind(encoded: Encoded) -> Run:
        value, noise = _sources(encoded, "f32 u32")
        shift = 8 * (_op_sel(encoded, 12) >> 2)

        def run(group: Group) -> None:
            _write_field(group, encoded.vdst, small.encode(value(group).view(np.uint32), noise=noise(group)), shift, 8)

        return run

    return bind


def _pack_halves(wide: Wide) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Two float32 to two 16-bit values; the first in the low half."""
    encode_bits = f32_to_bf16 if wide is BF16 else f32_to_f16
    return lambda low, high: encode_bits(low.view(np.uint32)) | encode_bits(high.view(np.uint32)) << np.uint32(16)


def _stochastic_half(wide: Wide) -> Bind:
    """One float32 to one 16-bit value in the half that op_sel[3] names, rounded stochastically: towards zero after adding the noise."""
    drop = 16 if wide is BF16 else 13

    def bind(encoded: Encoded) -> Run:
        value, noise = _sources(encoded, "f32 u32")
        shift = 16 * (_op_sel(encoded, 8) >> 3)

        def run(group: Group) -> None:
            bits = value(group).view(np.uint32)
            finite = (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
            noisy = (bits + (noise(group) >> np.uint32(32 - drop))) & ~np.uint32((1 << drop) - 1)
            bits = np.where(finite, noisy, bits)
            _write_field(group, encoded.vdst, f32_to_bf16(bits) if wide is BF16 else f32_to_f16(bits), shift, 16)

        return run

    return bind


# Scaled conversions of one or two elements -----------------------------------------------------------------------------------------------


def _widen(small: SmallFloat, wide: Wide, count: int) -> Bind:
    """`count` narrow elements of one register, times the scale.

    op_sel picks the source: a byte (bits 1:0) for one byte or two nibbles, a half (bit 0) for two bytes. One 16-bit result goes to the half
    that op_sel[3] names; two fill a register; float32 results take a register each.
    """
    by_half = count * small.bits == 16
    one_half = wide.bits == 16 and count == 1

    def bind(encoded: Encoded) -> Run:
        source, scale = _sources(encoded, "u32 u32")
        selected = _op_sel(encoded, (1 if by_half else 3) | (8 if one_half else 0))
        shift = 16 * (selected & 1) if by_half else 8 * (selected & 3)

        settle = _settle(encoded, wide)

        def run(group: Group) -> None:
            factor, packed = scale_of_f32(scale(group)), source(group) >> np.uint32(shift)
            results = []
            for i in range(count):
                code = packed >> np.uint32(i * small.bits) & np.uint32((1 << small.bits) - 1)
                with np.errstate(invalid="ignore"):
                    results.append(wide.encode(settle(small.decode.take(code) * factor)))
            if wide.bits == 32:
                for i, result in enumerate(results):
                    group.write_vgpr(encoded.vdst + i, result)
            elif one_half:
                _write_field(group, encoded.vdst, results[0], 16 * (selected >> 3), 16)
            else:
                group.write_vgpr(encoded.vdst, results[0] | results[1] << np.uint32(16))

        return run

    return bind


def _narrow(small: SmallFloat, wide: Wide, count: int, *, stochastic: bool = False) -> Bind:
    """`count` wide elements divided by the scale, packed into the byte (op_sel[3:2]) or half (op_sel[3]) of the destination that op_sel names.

    Two float32 are two operands, or one register pair if the rounding is stochastic; two 16-bit elements are one register.
    """
    width = count * small.bits
    pair = wide.bits == 32 and count == 2 and stochastic
    if wide.bits == 16:
        kinds = "u32"
    elif pair:
        kinds = "u64"
    else:
        kinds = " ".join(["f32"] * count)
    kinds += " u32 u32" if stochastic else " u32"

    def bind(encoded: Encoded) -> Run:
        *values, scale = _sources(encoded, kinds)
        noise = values.pop() if stochastic else None
        shift = 16 * (_op_sel(encoded, 8) >> 3) if width == 16 else 8 * (_op_sel(encoded, 12) >> 2)

        settle = _settle(encoded, wide)

        def elements(group: Group) -> list[np.ndarray]:
            if pair:
                both = values[0](group)
                return [settle((both >> np.uint64(32 * i)).astype(np.uint32).view(np.float32)) for i in range(2)]
            if wide.bits == 32:
                return [value(group) for value in values]
            both = values[0](group)
            return [wide.decode(both >> np.uint32(16 * i)) for i in range(count)]

        def run(group: Group) -> None:
            factor, packed = scale_of_f32(scale(group)), np.uint32(0)
            random = noise(group) if noise is not None else None
            for i, element in enumerate(elements(group)):
                with np.errstate(invalid="ignore"):
                    code = small.encode_scaled(element / factor, noise=random)
                packed = packed | code << np.uint32(i * small.bits)
                random = None if random is None else _noise_of_next(random)
            _write_field(group, encoded.vdst, packed, shift, width)

        return run

    return bind


# Scaled conversions of 32 six-bit elements -----------------------------------------------------------------------------------------------


def _unpack_six(registers: list[np.ndarray]) -> np.ndarray:
    """Six registers as 32 six-bit codes, [waves, 64, 32]."""
    bits = np.unpackbits(np.stack(registers, axis=-1).view(np.uint8), axis=-1, bitorder="little")
    return np.packbits(bits.reshape(*bits.shape[:-1], 32, 6), axis=-1, bitorder="little")[..., 0]


def _pack_six(codes: np.ndarray) -> np.ndarray:
    """32 six-bit codes [waves, 64, 32] as six registers, [waves, 64, 6]."""
    bits = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :6]
    return np.packbits(np.ascontiguousarray(bits).reshape(*codes.shape[:-1], 192), axis=-1, bitorder="little").view(np.uint32)


def _widen32(small: SmallFloat, wide: Wide) -> Bind:
    def bind(encoded: Encoded) -> Run:
        source = _register(encoded.src0)
        _, scale = _sources(encoded, "u32 u32")
        _op_sel(encoded, 0)
        settle = _settle(encoded, wide)

        def run(group: Group) -> None:
            codes = _unpack_six([group.read_vgpr(source + i) for i in range(6)])
            patterns = wide.encode(settle(small.decode.take(codes) * scale_of_f32(scale(group))[..., None]))
            if wide.bits == 16:
                patterns = patterns[..., 0::2] | patterns[..., 1::2] << np.uint32(16)
            for i in range(patterns.shape[-1]):
                group.write_vgpr(encoded.vdst + i, patterns[..., i])

        return run

    return bind


def _narrow32(small: SmallFloat, wide: Wide, *, stochastic: bool = False, interleaved: bool = False) -> Bind:
    """32 elements of consecutive registers; `interleaved`: of two tuples of 16 registers, taken in turn."""

    def bind(encoded: Encoded) -> Run:
        first = _register(encoded.src0)
        if interleaved:
            second = _register(encoded.src1)
            registers = [start + i for i in range(16) for start in (first, second)]
        else:
            registers = [first + i for i in range(wide.bits)]
        *others, scale = _sources(encoded, "u32 u32 u32" if stochastic or interleaved else "u32 u32")
        noise = others[1] if stochastic else None
        _op_sel(encoded, 0)
        settle = _settle(encoded, wide)

        def run(group: Group) -> None:
            words = np.stack([group.read_vgpr(register) for register in registers], axis=-1)
            values = settle(wide.decode(words if wide.bits == 32 else words.view(np.uint16).astype(np.uint32)))
            random = None
            if noise is not None:
                random = np.empty(values.shape, np.uint32)
                state = noise(group)
                for i in range(32):
                    random[..., i] = state
                    state = _noise_of_next(state)
            with np.errstate(invalid="ignore"):
                codes = small.encode_scaled(values / scale_of_f32(scale(group))[..., None], noise=random)
            packed = _pack_six(codes)
            for i in range(6):
                group.write_vgpr(encoded.vdst + i, packed[..., i])

        return run

    return bind


# Tables ----------------------------------------------------------------------------------------------------------------------------------

VOP1_CONVERT: dict[int, Row] = {
    84: row("v_cvt_f32_fp8", "f32 = u32", _from_byte(E4M3)),
    85: row("v_cvt_f32_bf8", "f32 = u32", _from_byte(E5M2)),
    86: row("v_cvt_pk_f32_fp8", "u64 = u32", _from_two_bytes(E4M3)),
    87: row("v_cvt_pk_f32_bf8", "u64 = u32", _from_two_bytes(E5M2)),
    91: row("v_cvt_f32_bf16", "f32 = u32", bf16_to_f32),
}

_FP8, _BF8, _FP4, _FP6, _BF6 = E4M3, E5M2, E2M1, E2M3, E3M2
_SCALED: tuple[tuple[int, str, Bind], ...] = (
    *((565 + i, f"pk_{small.name}_f32", _narrow(small, F32, 2)) for i, small in enumerate((_FP8, _BF8))),
    *((567 + i, f"sr_{small.name}_f32", _narrow(small, F32, 1, stochastic=True)) for i, small in enumerate((_FP8, _BF8))),
    *((569 + i, f"pk_f32_{small.name}", _widen(small, F32, 2)) for i, small in enumerate((_FP8, _BF8))),
    *((571 + i, f"f32_{small.name}", _widen(small, F32, 1)) for i, small in enumerate((_FP8, _BF8))),
    (573, "pk_fp4_f32", _narrow(_FP4, F32, 2)),
    (574, "sr_pk_fp4_f32", _narrow(_FP4, F32, 2, stochastic=True)),
    (575, "pk_f32_fp4", _widen(_FP4, F32, 2)),
    *((576 + i, f"pk_{small.name}_f16", _narrow(small, F16, 2)) for i, small in enumerate((_FP8, _BF8))),
    *((578 + i, f"sr_{small.name}_f16", _narrow(small, F16, 1, stochastic=True)) for i, small in enumerate((_FP8, _BF8))),
    *((580 + i, f"pk_{small.name}_bf16", _narrow(small, BF16, 2)) for i, small in enumerate((_FP8, _BF8))),
    *((582 + i, f"sr_{small.name}_bf16", _narrow(small, BF16, 1, stochastic=True)) for i, small in enumerate((_FP8, _BF8))),
    *((584 + i, f"pk_f16_{small.name}", _widen(small, F16, 2)) for i, small in enumerate((_FP8, _BF8))),
    *((586 + i, f"f16_{small.name}", _widen(small, F16, 1)) for i, small in enumerate((_FP8, _BF8))),
    *((588 + i, f"pk_fp4_{wide.name}", _narrow(_FP4, wide, 2)) for i, wide in enumerate((F16, BF16))),
    *((590 + i, f"sr_pk_fp4_{wide.name}", _narrow(_FP4, wide, 2, stochastic=True)) for i, wide in enumerate((F16, BF16))),
    *((592 + i, f"pk_{wide.name}_fp4", _widen(_FP4, wide, 2)) for i, wide in enumerate((F16, BF16))),
    *((594 + i, f"2xpk16_{small.name}_f32", _narrow32(small, F32, interleaved=True)) for i, small in enumerate((_FP6, _BF6))),
    *((596 + i, f"sr_pk32_{small.name}_f32", _narrow32(small, F32, stochastic=True)) for i, small in enumerate((_FP6, _BF6))),
    *((598 + i, f"pk32_f32_{small.name}", _widen32(small, F32)) for i, small in enumerate((_FP6, _BF6))),
    *((600 + 2 * i + j, f"pk32_{s.name}_{w.name}", _narrow32(s, w)) for i, s in enumerate((_FP6, _BF6)) for j, w in enumerate((F16, BF16))),
    *(
        (604 + 2 * i + j, f"sr_pk32_{s.name}_{w.name}", _narrow32(s, w, stochastic=True))
        for i, s in enumerate((_FP6, _BF6))
        for j, w in enumerate((F16, BF16))
    ),
    *((608 + 2 * i + j, f"pk32_{w.name}_{s.name}", _widen32(s, w)) for i, s in enumerate((_FP6, _BF6)) for j, w in enumerate((F16, BF16))),
    *((617 + i, f"pk_bf16_{small.name}", _widen(small, BF16, 2)) for i, small in enumerate((_FP8, _BF8))),
)

VOP3_CONVERT: dict[int, Row] = {
    **{320 + opcode: entry for opcode, entry in VOP1_CONVERT.items()},
    **{opcode: Row(f"v_cvt_scalef32_{name}", bind) for opcode, name, bind in _SCALED},
    615: row("v_cvt_pk_f16_f32", "u32 = f32 f32", _pack_halves(F16)),
    616: row("v_cvt_pk_bf16_f32", "u32 = f32 f32", _pack_halves(BF16)),
    674: Row("v_cvt_pk_fp8_f32", _pack_bytes(E4M3)),
    675: Row("v_cvt_pk_bf8_f32", _pack_bytes(E5M2)),
    676: Row("v_cvt_sr_fp8_f32", _stochastic_byte(E4M3)),
    677: Row("v_cvt_sr_bf8_f32", _stochastic_byte(E5M2)),
    678: Row("v_cvt_sr_f16_f32", _stochastic_half(F16)),
    679: Row("v_cvt_sr_bf16_f32", _stochastic_half(BF16)),
}
