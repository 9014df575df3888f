"""A decode result against float64 mathematics on the same stored bytes, and what storing them in fewer bits cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .accuracy import Accuracy, row_errors
from .batch import QK_WIDTH, Batch
from .formats import FP8, MXFP4
from .reference import mla_decode


def exact_decode(batch: Batch, kv: Any) -> tuple[np.ndarray, np.ndarray]:
    """The float64 out and lse of a batch over `kv` in its cache's place: a float array, FP8 or MXFP4 of the same layout."""
    values = kv.dequantize() if isinstance(kv, FP8 | MXFP4) else np.asarray(kv)
    slots, token_indptr = batch.token_slots()
    return mla_decode(
        batch.q,
        values.reshape(-1, QK_WIDTH)[slots],
        qo_indptr=batch.qo_indptr,
        kv_indptr=token_indptr,
        sm_scale=float(batch.sm_scale),
        causal=batch.causal,
    )


@dataclass(frozen=True)
class Check:
    """accuracy: of the kernel, apart from what storing cost; quantization_errors: [total_q, num_heads], of the exact result for storing."""

    accuracy: Accuracy
    quantization_errors: np.ndarray


def check(batch: Batch, stored: Any, original: Any, out: np.ndarray, lse: np.ndarray) -> Check:
    """Judge out and lse of a batch whose cache is `stored`, quantized from `original` (both as `exact_decode` takes them)."""
    exact_out, exact_lse = exact_decode(batch, stored)
    original_out, _ = exact_decode(batch, original)
    return Check(Accuracy.of(out, lse, exact_out, exact_lse), row_errors(exact_out, original_out))
