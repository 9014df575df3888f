"""Batches as npz files, for the command line: the arguments of `decode` under their own names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .batch import QK_WIDTH
from .formats import FP8, MXFP4, UNREADABLE, quantize_fp8, quantize_mxfp4, why_unreadable

REQUIRED = ("q", "kv", "sm_scale")
OPTIONAL = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "page_size", "block_table", "kv_lens", "causal")
# How the two kinds of file begin. numpy would take anything else for a pickle, and advise to allow that.
_NPY, _ZIP = b"\x93NUMPY", b"PK"
CACHE_FORMATS = ("bf16", "fp8_e4m3fn", "fp8_e4m3fnuz", "mxfp4")


def load_batch(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Arguments of `decode` from an npz file; q as bfloat16, kv as bfloat16 or float32.

    uint16 arrays are bfloat16 bits. Floats other than bfloat16 are rounded to it in q, and to float32 in kv (which is quantized from there).
    Raises OSError if the file cannot be read, ValueError if it is no such file or lacks an array or holds an unknown one.
    """
    arrays = _load(path)
    if not isinstance(arrays, dict):
        raise ValueError(f"{os.fspath(path)}: a single array, not an npz file of {', '.join(REQUIRED)}")
    if missing := [name for name in REQUIRED if name not in arrays]:
        raise ValueError(f"{os.fspath(path)}: lacks {', '.join(missing)}")
    if unknown := [name for name in arrays if name not in REQUIRED + OPTIONAL]:
        raise ValueError(f"{os.fspath(path)}: unknown array {', '.join(unknown)}; known are {', '.join(REQUIRED + OPTIONAL)}")
    q = as_floats("q", arrays["q"]).astype(ml_dtypes.bfloat16)
    return {**arrays, "q": q, "kv": as_floats("kv", arrays["kv"])}


def load_array(path: str | os.PathLike[str]) -> np.ndarray:
    """The floats of an npy file, bfloat16 (from uint16 bits) or float32. Raises OSError, or ValueError if it is no such file."""
    array = _load(path)
    if isinstance(array, dict):
        raise ValueError(f"{os.fspath(path)}: an npz file of {', '.join(array)}; one array in an npy file is needed")
    return as_floats(os.fspath(path), array)


def as_floats(name: str, array: np.ndarray) -> np.ndarray:
    """bfloat16 of uint16 bits; float32 of other floats, infinite where they are beyond it."""
    if array.dtype.newbyteorder("=") == np.uint16:
        return array.astype(np.uint16, copy=False).view(ml_dtypes.bfloat16)
    if array.dtype.kind != "f":
        advice = " (np.save loses bfloat16: save its .view(np.uint16))" if array.dtype == np.dtype("V2") else ""
        raise ValueError(f"{name} has dtype {array.dtype}; floats, or bfloat16 bits as uint16, are needed{advice}")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def quantize(kv: np.ndarray, kv_format: str, *, scale_rule: str = "even", scale: float | None = None) -> np.ndarray | FP8 | MXFP4:
    """kv [.., 576] floats in one of CACHE_FORMATS. scale_rule: mxfp4's; scale: fp8's, None: from the largest value."""
    if kv_format == "bf16":
        return kv.astype(ml_dtypes.bfloat16)
    if kv_format == "mxfp4":
        return quantize_mxfp4(kv, scale_rule=scale_rule)
    return quantize_fp8(kv, dtype=kv_format.removeprefix("fp8_"), scale=scale)


def made_batch() -> dict[str, Any]:
    """A small batch for where there is none: ragged, one request empty, shuffled pages of 16, up to two query tokens, heads from flat to peaky."""
    rng = np.random.default_rng(0)
    page_size, num_heads = 16, 16
    kv_lens, q_lens = np.array([500, 0, 311, 97, 1]), np.array([1, 1, 2, 1, 1])
    num_pages = -(-kv_lens // page_size)
    kv_indptr, qo_indptr = (np.concatenate([[0], np.cumsum(counts)]) for counts in (num_pages, q_lens))
    kv = rng.standard_normal((kv_indptr[-1], page_size, QK_WIDTH), np.float32) * np.exp2(rng.integers(-1, 2, QK_WIDTH)).astype(np.float32)
    q = rng.standard_normal((qo_indptr[-1], num_heads, QK_WIDTH), np.float32) * np.exp2(rng.integers(-4, 1, (1, num_heads, 1))).astype(np.float32)
    return {
        "q": q.astype(ml_dtypes.bfloat16),
        "kv": kv.astype(ml_dtypes.bfloat16),
        "sm_scale": 576**-0.5,
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": rng.permutation(kv_indptr[-1]),
        "kv_last_page_len": kv_lens - np.maximum(num_pages - 1, 0) * page_size,
        "page_size": page_size,
    }


def _load(path: str | os.PathLike[str]) -> dict[str, np.ndarray] | np.ndarray:
    with Path(path).open("rb") as file:
        if not file.peek(len(_NPY)).startswith((_NPY, _ZIP)):
            raise ValueError(f"{os.fspath(path)}: no npz or npy file")
        try:
            content = np.load(file, allow_pickle=False)
            return content if isinstance(content, np.ndarray) else dict(content)
        except UNREADABLE as error:
            raise ValueError(f"{os.fspath(path)}: no npz or npy file of plain arrays ({why_unreadable(error)})") from None
