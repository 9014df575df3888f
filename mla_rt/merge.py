"""Merge of attention results over disjoint parts of the KV (sharded caches, prefix and suffix), by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

_FLOATS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


def merge(outs: Sequence[Any] | np.ndarray, lses: Sequence[Any] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The result over the union of disjoint KV parts.

    outs  one array a part, all [..., width] of one float dtype (bfloat16, float16, float32, float64)
    lses  one array a part, all [...]: natural log of the sum of exp of the scaled logits, -inf where a part has no token for that row

    Returns out [..., width] in the dtype of the parts and lse [...] in the dtype of the given ones. Computed in float64, rounded once.
    A row that no part has tokens for is out 0, lse -inf. What `outs` holds where its lse is -inf is ignored.
    Raises ValueError for no parts or unequal shapes, TypeError for other dtypes.
    """
    parts = [np.asarray(out) for out in outs]
    weights_log = [np.asarray(lse) for lse in lses]
    if not parts or len(parts) != len(weights_log):
        raise ValueError(f"merge takes one lse for each out and at least one of them, not {len(parts)} outs and {len(weights_log)} lses")
    for name, arrays in (("outs", parts), ("lses", weights_log)):
        for array in arrays:
            if array.dtype not in _FLOATS or array.dtype != arrays[0].dtype:
                found, known = sorted({str(a.dtype) for a in arrays}), ", ".join(map(str, _FLOATS))
                raise TypeError(f"{name} have dtypes {', '.join(found)}; one of {known} for all is needed")
            if array.shape != arrays[0].shape:
                raise ValueError(f"{name} have shapes {arrays[0].shape} and {array.shape}; all parts must agree")
    if parts[0].shape[:-1] != weights_log[0].shape:
        raise ValueError(f"outs of shape {parts[0].shape} need lses of shape {parts[0].shape[:-1]}, not {weights_log[0].shape}")

    lse = np.stack(weights_log).astype(np.float64)
    maximum = lse.max(axis=0)
    # -inf - -inf is NaN: a row without any token is measured from 0 instead, where all its weights are exp(-inf) = 0.
    weight = np.exp(lse - np.where(np.isneginf(maximum), 0.0, maximum))
    total = weight.sum(axis=0)
    # Not 0 * out: a part without tokens for a row may hold anything there.
    stacked = np.where(np.isneginf(lse)[..., None], 0.0, np.stack(parts).astype(np.float64))
    out = (weight[..., None] * stacked).sum(axis=0) / np.where(total == 0.0, 1.0, total)[..., None]
    with np.errstate(divide="ignore"):
        merged_lse = np.log(total) + maximum
    return out.astype(parts[0].dtype), merged_lse.astype(weights_log[0].dtype)
