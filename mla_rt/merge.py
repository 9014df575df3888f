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
    Where an lse is +inf (what it stands for is beyond its dtype) or NaN, the row's out is NaN and its lse +inf or NaN; NaN wins.
    Raises ValueError for no parts or unequal shapes, TypeError for other dtypes or what is no sequence.
    """
    parts, weights_log = _arrays("outs", outs), _arrays("lses", lses)
    if not parts or len(parts) != len(weights_log):
        raise ValueError(f"outs has length {len(parts)}, lses {len(weights_log)}; one of each for every part is needed, and at least one part")
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
    # inf - inf is NaN. Measured from 0 instead, a row without any token has the weights exp(-inf) = 0, and +inf stays what it is.
    base = np.where(np.isfinite(maximum), maximum, 0.0)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # of infinities and NaN, whose results are those promised above
        weight = np.exp(lse - base)
        total = weight.sum(axis=0)
        # Not 0 * out: a part without tokens for a row may hold anything there.
        stacked = np.where(np.isneginf(lse)[..., None], 0.0, np.stack(parts).astype(np.float64))
        out = (weight[..., None] * stacked).sum(axis=0) / np.where(total == 0.0, 1.0, total)[..., None]
        merged_lse = np.log(total) + base
        return out.astype(parts[0].dtype), merged_lse.astype(weights_log[0].dtype)


def _arrays(name: str, values: Any) -> list[np.ndarray]:
    try:
        return [np.asarray(value) for value in values]
    except TypeError:
        raise TypeError(f"{name} is a {type(values).__name__}; a sequence of arrays is needed") from None
