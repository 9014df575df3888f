"""Conversions between number formats, and the functions that the guide promises to 1 ulp."""

from __future__ import annotations

from typing import Any

import numpy as np

from .experiment import E2M1_VALUES, E4M3_VALUES, LANES, Experiment, unpack

BF16_LARGEST_CODE = 0x7F7F


def _bf16_values(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _nearest_code(value: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Code of the nearest of `values` (positive, ascending, by code); in the middle the even code; beyond the largest, the largest."""
    distance = np.abs(np.abs(value)[..., None] - values)
    low = distance.argmin(axis=-1)  # the first: of two equally near, the lower
    tie = np.isclose(distance, distance.min(axis=-1, keepdims=True), rtol=0, atol=0).sum(axis=-1) == 2
    return low + (tie & (low % 2 == 1))


def _f32_around(values: np.ndarray) -> np.ndarray:
    """Values and the middles between neighbours, each with the next float32 below and above, both signs."""
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])
    return np.concatenate([points, -points])


def _pairs(x: np.ndarray) -> np.ndarray:
    """[grid, 64, 2], filled up with zeros; [..., 1] are the values in reverse order, so that the two halves differ."""
    grid = -(-len(x) // LANES)
    padded = np.concatenate([x, np.zeros(grid * LANES - len(x), x.dtype)])
    return np.stack([padded, padded[::-1]], axis=-1).reshape(grid, LANES, 2)


def _pair_launch(kernel: str, pairs: np.ndarray, words: int, **arrays: np.ndarray) -> dict[str, Any]:
    return {"kernel": kernel, "grid": len(pairs), "arrays": {"x": pairs.astype(np.float32), **arrays}, "result": (len(pairs), LANES, words)}


def _one_nan(code: np.ndarray) -> np.ndarray:
    """Whichever NaN of E4M3 it is, 0x7F."""
    return np.where(code & 0x7F == 0x7F, 0x7F, code)


def _e4m3_from_f32(x: np.ndarray, alternatives: bool = False) -> Experiment:
    pairs = _pairs(x)
    finite = np.where(np.isfinite(pairs), pairs, 0.0)
    codes = _nearest_code(finite, E4M3_VALUES[:0x7F]) | np.signbit(pairs) << 7
    beyond = ~(np.abs(pairs) < 464)
    assumed = np.where(beyond, 0x7F, codes)

    def read(words: np.ndarray) -> np.ndarray:
        low, high = unpack(words[..., 0, None], 8, 4), unpack(words[..., 1, None], 8, 4)
        kept = (low[..., 2:] == 0).all(axis=-1, keepdims=True) & (high[..., :2] == [0x34, 0x12]).all(axis=-1, keepdims=True)
        return np.where(kept & (low[..., :2] == high[..., 2:]), _one_nan(low[..., :2]), -1)

    saturated = np.where(np.isnan(pairs), 0x7F, np.where(beyond, 0x7E | np.signbit(pairs) << 7, codes))
    return Experiment(
        **_pair_launch("probe_e4m3_from_f32", pairs, 2), read=read, assumed=assumed.astype(np.int64), axes=("64 lanes", "lane", "half"),
        alternatives={"saturates at 448": saturated} if alternatives else {},
    )  # fmt: skip


def e4m3_rounding() -> Experiment:
    return _e4m3_from_f32(_f32_around(E4M3_VALUES[:0x7F]))


def e4m3_overflow() -> Experiment:
    """From where the next code would be (480) on. Between 448 and 480 the guide is not explicit, and the kernels stay out of it."""
    return _e4m3_from_f32(np.array([480, 481, 500, 1e4, 1e30, 3.4e38, np.inf, np.nan, -480, -1e4, -np.inf, -np.nan], np.float32), True)


def _all_e4m3() -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view("<u4").reshape(1, LANES)


def f32_from_e4m3() -> Experiment:
    return Experiment(
        kernel="probe_f32_from_e4m3", grid=1, arrays={"codes": _all_e4m3()}, result=(1, LANES, 4),
        read=lambda words: words.view(np.float32).reshape(-1), assumed=E4M3_VALUES.astype(np.float32), axes=("code",),
    )  # fmt: skip


def bf16_from_e4m3() -> Experiment:
    return Experiment(
        kernel="probe_bf16_from_e4m3", grid=1, arrays={"codes": _all_e4m3()}, result=(1, LANES, 2),
        read=lambda words: _bf16_values(words.view(np.uint16)).reshape(-1), assumed=E4M3_VALUES.astype(np.float32), axes=("code",),
    )  # fmt: skip


def bf16_from_e2m1(scales: tuple[int, ...]) -> Experiment:
    """Every pair of codes, so that each byte is tried with each code, times 2**(scale - 127)."""
    codes = np.tile(np.arange(256, dtype=np.uint8).view("<u4"), len(scales)).reshape(-1, LANES)
    scale = np.repeat(np.array(scales, np.uint32), LANES).reshape(-1, LANES)
    nibbles = unpack(codes[..., None], 4, 8)
    with np.errstate(over="ignore", invalid="ignore"):
        factor = np.where(scale == 255, np.nan, np.ldexp(1.0, scale.astype(np.int64) - 127))
        assumed = (E2M1_VALUES[nibbles] * factor[..., None]).astype(np.float32)
    return Experiment(
        kernel="probe_bf16_from_e2m1", grid=len(codes), arrays={"codes": codes, "scale": scale}, result=(len(codes), LANES, 4),
        read=lambda words: _bf16_values(words.view(np.uint16)), assumed=assumed, axes=("scale", "lane", "element"),
    )  # fmt: skip


def e2m1_from_f32(scale: int) -> Experiment:
    """Codes, the middles between them and their neighbours, and values beyond the largest, all times 2**(scale - 127)."""
    beyond = [6.5, 7, 8, 100, 1e6, np.inf]
    relative = np.concatenate([_f32_around(E2M1_VALUES[:8]), beyond, -np.array(beyond)])
    pairs = _pairs((relative * 2.0 ** (scale - 127)).astype(np.float32))
    exact = np.where(np.isinf(pairs), 1e9, np.abs(pairs.astype(np.float64)) * 2.0 ** (127 - scale))
    assumed = _nearest_code(exact, E2M1_VALUES[:8]) | np.signbit(pairs) << 3

    def read(words: np.ndarray) -> np.ndarray:
        first, second = unpack(words[..., 0, None], 4, 8), unpack(words[..., 1, None], 4, 8)
        kept = (first[..., 2:] == 0).all(axis=-1) & (second[..., [0, 1, 2, 3, 6, 7]] == [8, 7, 6, 5, 2, 1]).all(axis=-1)
        return np.where(kept[..., None] & (first[..., :2] == second[..., 4:6]), first[..., :2], -1)

    launch = _pair_launch("probe_e2m1_from_f32", pairs, 2, scale=np.full(pairs.shape[:2], scale, np.uint32))
    return Experiment(**launch, read=read, assumed=assumed.astype(np.int64), axes=("64 lanes", "lane", "nibble"))


def bf16_from_f32() -> Experiment:
    """Numbers, middles between them and their neighbours, denormal ones included, and what overflows."""
    codes = np.concatenate([np.arange(0, 6), np.arange(0x7E, 0x83), [0x3F80, 0x3F81, 0x3FFF, 0x4000], np.arange(0x7F7C, 0x7F80)]).astype(np.uint32)
    bits = np.concatenate([codes << np.uint32(16) | np.uint32(rest) for rest in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    bits = np.concatenate([bits, [0x7F800000, 0x7FC00000, 0x7FFFFFFF]]).astype(np.uint32)
    pairs = _pairs(np.concatenate([bits, bits | np.uint32(0x80000000)]).view(np.float32))
    numbers = _bf16_values(np.arange(BF16_LARGEST_CODE + 2, dtype=np.uint32)).astype(np.float64)
    numbers[-1] = 2.0**128  # where the code after the largest would be: rounding to it is an infinity
    magnitude = np.abs(np.where(np.isfinite(pairs), pairs, 0)).astype(np.float64)
    above = np.searchsorted(numbers, magnitude)
    below = np.maximum(above - 1, 0)
    to_above = numbers[above] - magnitude < magnitude - numbers[below]
    tie = (numbers[above] - magnitude == magnitude - numbers[below]) & (above % 2 == 0)
    rounded = np.where(to_above | tie | (magnitude == numbers[above]), above, below)
    values = np.where(rounded == len(numbers) - 1, np.inf, numbers[rounded])
    assumed = np.where(np.isfinite(pairs), np.copysign(values, pairs), pairs).astype(np.float32)
    return Experiment(
        **_pair_launch("probe_bf16_from_f32", pairs, 1), read=lambda words: _bf16_values(words.view(np.uint16)), assumed=assumed,
        axes=("64 lanes", "lane", "half"),
    )  # fmt: skip


def function(name: str) -> Experiment:
    """exp2, log2 or reciprocal: exact at special points; within 1 ulp (log2: or 2**-24, where it passes through 0) elsewhere; denormals are 0."""
    rng = np.random.default_rng(11)
    uniform = rng.uniform(0, 1, 500)
    tiny, special = 2.0**-140, [0.0, -0.0, np.inf, -np.inf, np.nan]
    with np.errstate(all="ignore"):
        if name == "exp2":
            x = np.concatenate([-126 + 253.9 * uniform, 2 * uniform - 1, np.arange(-126, 128), special, [-127, -130, -500, 128, 500, tiny, -tiny]])
            exact = np.exp2(np.where(np.abs(x) == tiny, 0.0, x).astype(np.float32).astype(np.float64))
            index = 0
        elif name == "log2":
            x = np.concatenate([2.0 ** (-126 + 253.9 * uniform), 0.5 + uniform, 2.0 ** np.arange(-126, 128), special, [-1, -5, tiny, -tiny]])
            exact = np.log2(np.where(np.abs(x) == tiny, 0.0, x).astype(np.float32).astype(np.float64))
            index = 1
        else:
            x = np.concatenate([2.0 ** (-125 + 250 * uniform), 1 + uniform, 2.0 ** np.arange(-126, 128), special, [tiny, -tiny]])
            x = np.concatenate([x, -x])
            exact = 1.0 / np.where(np.abs(x) == tiny, np.copysign(0.0, x), x).astype(np.float32).astype(np.float64)
            index = 2
        exact = np.where(np.abs(exact) < 2.0**-126, np.copysign(0.0, exact), exact)
        exact = np.where(np.abs(exact) >= 2.0**128, np.copysign(np.inf, exact), exact)
    grid = -(-len(x) // LANES)
    pad = grid * LANES - len(x)
    padding_value = {"exp2": 1.0, "log2": 0.0, "reciprocal": 1.0}[name]
    padding_input = {"exp2": 0.0, "log2": 1.0, "reciprocal": 1.0}[name]
    inputs = np.concatenate([x, np.full(pad, padding_input)]).astype(np.float32).reshape(grid, LANES)
    exact = np.concatenate([exact, np.full(pad, padding_value)]).reshape(grid, LANES)
    finite = np.isfinite(exact) & (exact != 0)
    ulp = np.spacing(np.abs(np.where(finite, exact, 1.0)).astype(np.float32)).astype(np.float64)
    tolerance = np.where(finite, np.maximum(ulp, 2.0**-24 if name == "log2" else 0.0), 0.0)
    return Experiment(
        kernel="probe_functions", grid=grid, arrays={"x": inputs}, result=(grid, LANES, 4),
        read=lambda words: words.view(np.float32)[..., index].astype(np.float64), assumed=exact, axes=("64 lanes", "lane"), tolerance=tolerance,
    )  # fmt: skip
