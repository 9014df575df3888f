"""Conversion instructions: values worked out by hand, and exhaustive or random packs against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from waves import execute, get_v, make_group, random_bytes, set_v

LANE = np.arange(64)
NARROW = {
    "fp8": (8, ml_dtypes.float8_e4m3fn),
    "bf8": (8, ml_dtypes.float8_e5m2),
    "fp6": (6, ml_dtypes.float6_e2m3fn),
    "bf6": (6, ml_dtypes.float6_e3m2fn),
    "fp4": (4, ml_dtypes.float4_e2m1fn),
}
WIDE = {"f32": (32, np.float32), "f16": (16, np.float16), "bf16": (16, ml_dtypes.bfloat16)}


def f32_bits(values) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def decoded(name: str, codes: np.ndarray) -> np.ndarray:
    return codes.astype(np.uint8).view(NARROW[name][1]).astype(np.float32)


def codes_of(name: str, values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32).astype(NARROW[name][1]).view(np.uint8).astype(np.uint32)


def spread(seed: int, *shape: int) -> np.ndarray:
    """Normal values that reach from subnormals to overflow of the narrow formats."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, shape)).astype(np.float32)


@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_single_bytes_to_f32_with_byte_selects(name):
    group = make_group(workgroups=4)
    packed = random_bytes(1, 1024).view(np.uint32).reshape(4, 64)
    set_v(group, 1, packed)
    text = [f"v_cvt_f32_{name} v2, v1", *(f"v_cvt_f32_{name}_sdwa v{2 + i}, v1 src0_sel:BYTE_{i}" for i in (1, 2, 3)), f"v_cvt_f32_{name}_e64 v6, v1"]
    execute(group, "\n".join(text))
    for i, byte in enumerate((0, 1, 2, 3, 0)):
        np.testing.assert_array_equal(get_v(group, 2 + i, np.float32), decoded(name, packed >> 8 * byte & 0xFF))


@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_pairs_of_bytes_to_f32(name):
    group = make_group()
    packed = random_bytes(2, 256).view(np.uint32)
    set_v(group, 1, packed)
    execute(group, f"v_cvt_pk_f32_{name} v[2:3], v1\nv_cvt_pk_f32_{name}_sdwa v[4:5], v1 src0_sel:WORD_1")
    for i in range(4):
        np.testing.assert_array_equal(get_v(group, 2 + i, np.float32)[0], decoded(name, packed >> 8 * i & 0xFF))


@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_f32_to_packed_bytes(name):
    group = make_group()
    low, high = spread(3, 64), spread(4, 64)
    set_v(group, 1, f32_bits(low), f32_bits(high))
    set_v(group, 3, 0xAAAAAAAA, 0xAAAAAAAA)
    execute(group, f"v_cvt_pk_{name}_f32 v3, v1, v2\nv_cvt_pk_{name}_f32 v4, v1, v2 op_sel:[0,0,1]")
    packed = codes_of(name, low) | codes_of(name, high) << 8
    np.testing.assert_array_equal(get_v(group, 3)[0], 0xAAAA0000 | packed)
    np.testing.assert_array_equal(get_v(group, 4)[0], 0xAAAA | packed << 16)


def test_f32_to_packed_bytes_modifiers_scalars_and_limits():
    group = make_group(active=0b11)
    group.state.sgpr[4] = f32_bits(2.0)
    set_v(group, 1, f32_bits(-448.0))
    set_v(group, 3, 0)
    execute(group, "v_cvt_pk_fp8_f32 v3, -v1, s4")
    assert get_v(group, 3)[0, :3].tolist() == [0x407E, 0x407E, 0]
    set_v(group, 1, f32_bits(1e6), f32_bits(np.nan))
    execute(group, "v_cvt_pk_fp8_f32 v3, -|v1|, v2\nv_cvt_pk_bf8_f32 v3, -|v1|, v2 op_sel:[0,0,1]")
    assert get_v(group, 3)[0, 0] == 0x7FFC7FFF


def test_f32_to_packed_halves():
    group = make_group()
    low, high = spread(5, 64) * np.float32(1e30), -spread(6, 64)
    low[:3] = [np.inf, -0.0, 1 + 2**-8]
    set_v(group, 1, f32_bits(low), f32_bits(high))
    execute(group, "v_cvt_pk_bf16_f32 v3, v1, v2\nv_cvt_pk_f16_f32 v4, v1, v2\nv_cvt_pk_bf16_f32 v5, |v1|, -v2")
    with np.errstate(over="ignore"):
        for register, a, b, dtype in ((3, low, high, ml_dtypes.bfloat16), (4, low, high, np.float16), (5, abs(low), -high, ml_dtypes.bfloat16)):
            expected = a.astype(dtype).view(np.uint16).astype(np.uint32) | b.astype(dtype).view(np.uint16).astype(np.uint32) << 16
            np.testing.assert_array_equal(get_v(group, register)[0], expected)


def test_bf16_to_f32():
    group = make_group()
    set_v(group, 1, LANE * 0x01010000 + 0x3F80 + LANE)
    execute(group, "v_cvt_f32_bf16 v2, v1\nv_cvt_f32_bf16_sdwa v3, v1 src0_sel:WORD_1")
    np.testing.assert_array_equal(get_v(group, 2)[0], (0x3F80 + LANE) << 16)
    np.testing.assert_array_equal(get_v(group, 3)[0], LANE * 0x01010000 & 0xFFFF0000)


def test_stochastic_rounding_places_and_limits():
    group = make_group()
    noise = np.array([0, 0xBFFFFFFF, 0xC0000000, 0xFFFFFFFF], np.uint32)[LANE % 4]
    set_v(group, 1, f32_bits(1.03125), noise)  # a quarter of the way from 1 to 1.125
    set_v(group, 3, 0)
    execute(group, "v_cvt_sr_fp8_f32 v3, v1, v2 op_sel:[0,0,0,1]\nv_cvt_sr_fp8_f32 v3, v1, v2 op_sel:[0,0,1,1]")
    assert get_v(group, 3)[0, :4].tolist() == [0x38380000, 0x38380000, 0x39390000, 0x39390000]
    set_v(group, 1, f32_bits(1 + 2**-9))  # a quarter of the way from 1 to the next bf16
    execute(group, "v_cvt_sr_bf16_f32 v3, v1, v2\nv_cvt_sr_bf16_f32 v3, v1, v2 op_sel:[0,0,1]")
    assert get_v(group, 3)[0, :4].tolist() == [0x3F803F80, 0x3F803F80, 0x3F813F81, 0x3F813F81]
    set_v(group, 1, f32_bits(-1 - 2**-12))
    execute(group, "v_cvt_sr_f16_f32 v3, v1, v2")
    assert (get_v(group, 3)[0, :4] & 0xFFFF).tolist() == [0xBC00, 0xBC00, 0xBC01, 0xBC01]


SCALES = np.array([0.5, 1.0, 2.0, 8.0], np.float32)[LANE % 4]


def set_scale(group, register: int) -> None:
    """Only the exponent of a scale counts."""
    set_v(group, register, f32_bits(SCALES) | (LANE.astype(np.uint32) << 8) | np.uint32(0x80000000) * (LANE % 2 == 0))


@pytest.mark.parametrize("wide", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("narrow", ["fp8", "bf8", "fp4"])
def test_scaled_widening_of_pairs(narrow, wide):
    bits = NARROW[narrow][0]
    selects = ["[0,0]", "[1,0]"] if bits == 8 else ["[0,0]", "[1,0]", "[0,1]", "[1,1]"]
    group = make_group()
    packed = random_bytes(7, 256).view(np.uint32)
    if narrow != "fp4":
        packed &= 0x7B7B7B7B | 0x80808080  # no infinities and NaNs
    set_v(group, 1, packed)
    set_scale(group, 2)
    for part, select in enumerate(selects):
        execute(group, f"v_cvt_scalef32_pk_{wide}_{narrow} {'v[4:5]' if wide == 'f32' else 'v4'}, v1, v2 op_sel:{select}")
        for element in range(2):
            codes = packed >> (part * 2 * bits + element * bits) & ((1 << bits) - 1)
            expected = decoded(narrow, codes) * SCALES
            if wide == "f32":
                np.testing.assert_array_equal(get_v(group, 4 + element, np.float32)[0], expected)
            else:
                with np.errstate(over="ignore"):
                    pattern = expected.astype(WIDE[wide][1]).view(np.uint16)
                np.testing.assert_array_equal(get_v(group, 4)[0] >> 16 * element & 0xFFFF, pattern)


@pytest.mark.parametrize("narrow", ["fp8", "bf8"])
def test_scaled_widening_of_single_bytes(narrow):
    group = make_group()
    packed = random_bytes(8, 256).view(np.uint32) & 0xFBFBFBFB
    set_v(group, 1, packed)
    set_scale(group, 2)
    for byte, select in enumerate(("0,0", "1,0", "0,1", "1,1")):
        expected = decoded(narrow, packed >> 8 * byte & 0xFF) * SCALES
        set_v(group, 5, 0x11112222)
        execute(group, f"v_cvt_scalef32_f32_{narrow} v4, v1, v2 op_sel:[{select}]\nv_cvt_scalef32_f16_{narrow} v5, v1, v2 op_sel:[{select},1]")
        np.testing.assert_array_equal(get_v(group, 4, np.float32)[0], expected)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(get_v(group, 5)[0], 0x2222 | expected.astype(np.float16).view(np.uint16).astype(np.uint32) << 16)


def test_scaled_widening_of_special_codes_and_scales():
    group = make_group()
    set_v(group, 1, 0x7F3801, f32_bits(np.nan), 0, f32_bits(2.0**-127))
    execute(
        group,
        "v_cvt_scalef32_pk_f32_fp8 v[10:11], v1, v2\nv_cvt_scalef32_pk_f32_fp8 v[12:13], v1, v3\nv_cvt_scalef32_f32_fp8 v14, v1, 2.0 op_sel:[0,1]",
    )
    assert np.isnan(get_v(group, 10, np.float32)).all() and np.isnan(get_v(group, 11, np.float32)).all()
    assert get_v(group, 12, np.float32)[0, 0] == 2.0**-136 and get_v(group, 13, np.float32)[0, 0] == 2.0**-127  # exponent 0 is 2^-127
    assert np.isnan(get_v(group, 14, np.float32)).all()


@pytest.mark.parametrize("wide", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("narrow", ["fp8", "bf8", "fp4"])
def test_scaled_narrowing_of_pairs(narrow, wide):
    bits, dtype = NARROW[narrow][0], WIDE[wide][1]
    group = make_group()
    values = spread(9, 2, 64).astype(dtype)
    if wide == "f32":
        set_v(group, 1, *f32_bits(values))
        sources, ops = "v1, v2", ["0,0,0,0", "0,0,0,1"] if bits == 8 else ["0,0,0,0", "0,0,1,0", "0,0,0,1", "0,0,1,1"]
    else:
        patterns = values.view(np.uint16).astype(np.uint32)
        set_v(group, 1, patterns[0] | patterns[1] << 16)
        sources, ops = "v1", ["0,0,0", "0,0,1"] if bits == 8 else ["0,0,0,0", "0,0,1,0", "0,0,0,1", "0,0,1,1"]
    set_scale(group, 3)
    expected = [codes_of(narrow, value.astype(np.float32) / SCALES) for value in values]
    pack = expected[0] | expected[1] << bits
    for part, op_sel in enumerate(ops):
        set_v(group, 4, 0x5A5A5A5A)
        execute(group, f"v_cvt_scalef32_pk_{narrow}_{wide} v4, {sources}, v3 op_sel:[{op_sel}]")
        field = ((1 << 2 * bits) - 1) << 2 * bits * part
        np.testing.assert_array_equal(get_v(group, 4)[0], 0x5A5A5A5A & ~field & 0xFFFFFFFF | pack << 2 * bits * part)


def test_scaled_narrowing_takes_sign_modifiers_of_f32():
    group = make_group()
    set_v(group, 1, f32_bits(-3.0), f32_bits(2.0))
    set_v(group, 4, 0)
    execute(group, "v_cvt_scalef32_pk_fp4_f32 v4, |v1|, -v2, 1.0")
    assert get_v(group, 4)[0, 0] == 0xC5


def test_scaled_narrowing_limits():
    """fp8 overflows to NaN, bf8 to infinity, fp4 saturates; division by a small scale may leave float32's range."""
    group = make_group()
    set_v(group, 1, f32_bits(3e38), f32_bits(-1e-3), f32_bits(2.0**-126))
    set_v(group, 5, 0, 0, 0)
    execute(group, "v_cvt_scalef32_pk_fp8_f32 v5, v1, v2, v3\nv_cvt_scalef32_pk_bf8_f32 v6, v1, v2, v3\nv_cvt_scalef32_pk_fp4_f32 v7, v1, v2, v3")
    assert [int(get_v(group, 5 + i)[0, 0]) for i in range(3)] == [0xFF7F, 0xFC7C, 0xF7]


def prng(state: int) -> int:
    return (state << 1 ^ (197 if state >> 31 else 0)) & 0xFFFFFFFF


@pytest.mark.parametrize("wide", ["f32", "f16", "bf16"])
def test_scaled_stochastic_narrowing(wide):
    """A quarter of a step above a code: up if the noise's top two bits are both set. The second element's noise is the generator's next."""
    group = make_group()
    noise = np.array([0x3FFFFFFF, 0x7FFFFFFF, 0xC0000000, 0xFFFFFFFF, 0x60000000, 0xE0000000], np.uint32)[LANE % 6]
    dtype = WIDE[wide][1]
    byte_value, nibble_values = np.array([2.0625], dtype), np.array([2.25, 4.5], dtype)  # over scale 2: 1.03125; 1.125 and 2.25
    if wide == "f32":
        set_v(group, 1, byte_value.view(np.uint32)[0])
        set_v(group, 2, *nibble_values.view(np.uint32))
        pair = "v[2:3]"
    else:
        set_v(group, 1, byte_value.view(np.uint16)[0])
        patterns = nibble_values.view(np.uint16).astype(np.uint32)
        set_v(group, 2, patterns[0] | patterns[1] << 16)
        pair = "v2"
    set_v(group, 4, noise, f32_bits(2.0))
    set_v(group, 6, 0, 0)
    execute(
        group, f"v_cvt_scalef32_sr_fp8_{wide} v6, v1, v4, v5 op_sel:[0,0,0,1]\nv_cvt_scalef32_sr_pk_fp4_{wide} v7, {pair}, v4, v5 op_sel:[0,0,1,1]"
    )
    for lane in range(64):
        state = int(noise[lane])
        first, second = state >> 30 == 3, prng(state) >> 30 == 3
        assert get_v(group, 6)[0, lane] == (0x39 if first else 0x38) << 16
        # 1.125 lies a quarter of the way from 1.0 (2) to 1.5 (3), 2.25 a quarter from 2 (4) to 3 (5).
        assert get_v(group, 7)[0, lane] == ((3 if first else 2) | (5 if second else 4) << 4) << 24


def six_bit_registers(codes: np.ndarray) -> list[np.ndarray]:
    """32 codes of each lane ([32, 64]) as a dense little-endian string of 192 bits."""
    strings = [sum(int(codes[i, lane]) << 6 * i for i in range(32)) for lane in range(64)]
    return [np.array([string >> 32 * word & 0xFFFFFFFF for string in strings], np.uint32) for word in range(6)]


@pytest.mark.parametrize("wide", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("narrow", ["fp6", "bf6"])
def test_packs_of_32(narrow, wide):
    group = make_group()
    rng = np.random.default_rng(10)
    bits, dtype = WIDE[wide]
    codes = rng.integers(0, 64, (32, 64))
    set_v(group, 0, *six_bit_registers(codes))
    set_scale(group, 6)
    last = 10 + bits - 1
    execute(group, f"v_cvt_scalef32_pk32_{wide}_{narrow} v[10:{last}], v[0:5], v6")
    expected = (decoded(narrow, codes) * SCALES).astype(dtype)
    if bits == 32:
        found = np.stack([get_v(group, 10 + i, np.float32)[0] for i in range(32)])
    else:
        words = np.stack([get_v(group, 10 + i)[0] for i in range(16)])
        found = np.stack([words & 0xFFFF, words >> 16], axis=1).reshape(32, 64).astype(np.uint16).view(dtype)
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))

    values = spread(11, 32, 64).astype(dtype)
    if bits == 32:
        set_v(group, 10, *values.view(np.uint32))
    else:
        patterns = values.view(np.uint16).astype(np.uint32)
        set_v(group, 10, *(patterns[0::2] | patterns[1::2] << 16))
    with np.errstate(over="ignore"):
        wanted = codes_of(narrow, values.astype(np.float32) / SCALES)
    if bits == 16:
        execute(group, f"v_cvt_scalef32_pk32_{narrow}_{wide} v[60:65], v[10:{last}], v6")
        for i, word in enumerate(six_bit_registers(wanted)):
            np.testing.assert_array_equal(get_v(group, 60 + i)[0], word)
    else:
        execute(group, f"v_cvt_scalef32_2xpk16_{narrow}_f32 v[60:65], v[10:25], v[26:41], v6")
        interleaved = wanted.reshape(2, 16, 64).swapaxes(0, 1).reshape(32, 64)
        for i, word in enumerate(six_bit_registers(interleaved)):
            np.testing.assert_array_equal(get_v(group, 60 + i)[0], word)
    # Exact values are not moved by stochastic rounding, whatever the noise.
    exact = (decoded(narrow, codes) * SCALES).astype(dtype)
    if bits == 32:
        set_v(group, 10, *exact.view(np.uint32))
    else:
        patterns = exact.view(np.uint16).astype(np.uint32)
        set_v(group, 10, *(patterns[0::2] | patterns[1::2] << 16))
    set_v(group, 7, random_bytes(12, 256).view(np.uint32))
    execute(group, f"v_cvt_scalef32_sr_pk32_{narrow}_{wide} v[60:65], v[10:{last}], v7, v6")
    for i, word in enumerate(six_bit_registers(codes)):
        np.testing.assert_array_equal(get_v(group, 60 + i)[0], word)
