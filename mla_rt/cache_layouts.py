"""KV caches that other programs wrote, as host arrays: each layout has a name, and becomes the array or record that `PagedKVCache` and `decode` take.

    name                    bytes a token   what a token is, in memory order
    bf16_packed             1152            576 bf16
    fp8_packed              576             576 E4M3 (fn) codes; one scale for the tensor
    mxfp4_two_arrays        288 + 18        288 bytes of E2M1 codes, low nibble first; in an array of their own 18 E8M0 scales, not swizzled, padded
                                            or not in columns (to a multiple of 8: 24) and in rows (to a multiple of 256)
    fp8_tile128_bf16_rope   656             512 E4M3 (fn) codes, 4 float32 scales (of 128 codes each, in order), 64 bf16

The last is the FP8 cache of FlashMLA (its README and the docstring of flash_mla_with_kvcache, "FP8 with scale"; vLLM calls it fp8_ds_mla); the scales
multiply. A token's 576 numbers are 512 latent ones and then 64 of rope, in all of them. Little-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .batch import KV_LORA_RANK, QK_ROPE_HEAD_DIM, QK_WIDTH, ROW_BYTES
from .elements import E4M3_FORMATS
from .formats import FP8, MXFP4

_BF16, _E4M3FN, _E8M0 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
_U8 = np.dtype(np.uint8)

TILE = 128  # latent columns that share a scale
_SCALE_BYTES = KV_LORA_RANK // TILE * 4
TILE128_BYTES = KV_LORA_RANK + _SCALE_BYTES + QK_ROPE_HEAD_DIM * 2


def import_cache(layout: str, cache: np.ndarray, *, scales: np.ndarray | None = None, scale: Any = None) -> np.ndarray | FP8 | MXFP4:
    """A cache in one of the layouts above as a bf16 array, FP8 or MXFP4 of [total_kv, ...] or [num_pages, page_size, ...].

    layout  one of LAYOUTS
    cache   [total_kv, n] or [num_pages, page_size, n], or either with an axis of one head before the last (it is dropped): uint8 with n bytes a
            token, or the layout's own dtype: bfloat16 with n = 576, float8_e4m3fn with n = 576 or 656. Strides do not matter; nothing is changed.
    scales  of mxfp4_two_arrays: uint8 or float8_e8m0fnu, [rows, columns] with at least as many rows as tokens and 18 columns, or with the axes of
            `cache`; what is beyond is not looked at
    scale   of fp8_packed: the multiplier that dequantizes

    Exact but for fp8_tile128_bf16_rope, which no kv_format can hold: it becomes bf16, the latent part code times scale, rounded to float32 and then
    to bf16, to nearest even both times. That is exact where scales are powers of two; the rope part always is. For another format, quantize what
    `dequantize_tile128` returns.

    Raises ValueError for a layout that is none of LAYOUTS (with the list), for shapes that do not fit and a missing or unused scale; TypeError for a
    dtype.
    """
    if not isinstance(layout, str):
        raise TypeError(f"layout is {layout!r}; a str is needed, one of {', '.join(LAYOUTS)}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not known; it is one of {', '.join(LAYOUTS)}")
    for name, value, needed_by in (("scales", scales, "mxfp4_two_arrays"), ("scale", scale, "fp8_packed")):
        if (value is not None) != (layout == needed_by):
            raise ValueError(f"{name} is {'missing' if value is None else 'given'}; layout {layout} has {'one' if value is None else 'none'}")
    return LAYOUTS[layout](cache, scales if layout == "mxfp4_two_arrays" else scale)


def dequantize_tile128(cache: np.ndarray) -> np.ndarray:
    """A cache of layout fp8_tile128_bf16_rope as float32 [..., 576]: latent code times scale, rounded once to float32; rope exact."""
    tokens = _tokens(cache, TILE128_BYTES, _U8, _E4M3FN)
    latent, scales, rope = np.split(tokens, [KV_LORA_RANK, KV_LORA_RANK + _SCALE_BYTES], axis=-1)
    values = np.empty((*tokens.shape[:-1], QK_WIDTH), np.float32)
    tiles = E4M3_FORMATS["e4m3fn"].values[latent].reshape(*tokens.shape[:-1], -1, TILE)
    factors = np.ascontiguousarray(scales).view("<f4")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # bytes from elsewhere: NaN and infinity stay what they are
        values[..., :KV_LORA_RANK] = (tiles * factors[..., None]).reshape(*tokens.shape[:-1], KV_LORA_RANK)
    values[..., KV_LORA_RANK:] = np.ascontiguousarray(rope).view(_BF16)
    return values


def _bf16_packed(cache: np.ndarray, _: Any) -> np.ndarray:
    if np.asarray(cache).dtype == _BF16:
        return _tokens(cache, QK_WIDTH, _BF16)
    return _tokens(cache, ROW_BYTES["bf16"], _U8, _BF16).view(_BF16)


def _fp8_packed(cache: np.ndarray, scale: Any) -> FP8:
    return FP8(_tokens(cache, QK_WIDTH, _U8, _E4M3FN).view(np.uint8), scale, "e4m3fn")


def _mxfp4_two_arrays(cache: np.ndarray, scales: Any) -> MXFP4:
    codes = _tokens(cache, ROW_BYTES["mxfp4"], _U8)
    scales = np.asarray(scales)
    if scales.dtype not in (_U8, _E8M0):
        raise TypeError(f"scales has dtype {scales.dtype}; {_U8} or {_E8M0} is needed")
    scales = scales.view(np.uint8)
    if scales.ndim == np.ndim(cache) > codes.ndim and scales.shape[-2] == 1:
        scales = scales[..., 0, :]
    return MXFP4(codes, scales)


def _tile128_as_bf16(cache: np.ndarray, _: Any) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return dequantize_tile128(cache).astype(_BF16)


def _tokens(cache: np.ndarray, width: int, *dtypes: np.dtype) -> np.ndarray:
    """[total_kv, width] or [num_pages, page_size, width], contiguous, without the axis of heads; bytes as uint8."""
    cache = np.asarray(cache)
    if cache.dtype not in dtypes:
        raise TypeError(f"cache has dtype {cache.dtype}; {' or '.join(map(str, dtypes))} is needed")
    shape = cache.shape
    if cache.ndim > 2 and shape[-2] == 1:
        shape = (*shape[:-2], shape[-1])
    if len(shape) not in (2, 3) or shape[-1] != width:
        raise ValueError(f"cache has shape {cache.shape}; [total_kv, {width}] or [num_pages, page_size, {width}] is needed")
    tokens = np.ascontiguousarray(cache).reshape(shape)
    return tokens.view(np.uint8) if cache.dtype == _E4M3FN else tokens


LAYOUTS: dict[str, Callable[[np.ndarray, Any], Any]] = {
    "bf16_packed": _bf16_packed,
    "fp8_packed": _fp8_packed,
    "mxfp4_two_arrays": _mxfp4_two_arrays,
    "fp8_tile128_bf16_rope": _tile128_as_bf16,
}
