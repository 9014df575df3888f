"""MLA decode in float64: what every kernel is judged against. It knows no kernel, page, tile or cache format."""

from __future__ import annotations

from typing import Any

import numpy as np


def mla_decode(
    q: Any,
    kv: Any,
    *,
    qo_indptr: Any,
    kv_indptr: Any,
    sm_scale: float,
    causal: bool = True,
    kv_lora_rank: int = 512,
) -> tuple[np.ndarray, np.ndarray]:
    """Absorbed MLA decode of a ragged batch over a flat cache.

    q          [total_q, num_heads, width], any float dtype: absorbed queries, request by request
    kv         [total_kv, width], any float dtype: the tokens of request 0, then of request 1, …; K is a whole row, V its first
               `kv_lora_rank` columns
    qo_indptr  [batch + 1] integers: request r owns the query tokens qo_indptr[r] : qo_indptr[r + 1]
    kv_indptr  [batch + 1] integers: request r owns the **tokens** kv_indptr[r] : kv_indptr[r + 1]
    sm_scale   multiplies the logits
    causal     the queries are the last tokens of their request: the last query sees all of the KV, the one before it one token less, …

    Returns out [total_q, num_heads, kv_lora_rank] and lse [total_q, num_heads], both float64; lse is the natural logarithm of the sum of
    exp of the scaled logits. A query that sees no token has out 0 and lse -inf. What a query does not see is not touched: NaN may lie there.
    """
    q = np.asarray(q)
    kv = np.asarray(kv)
    total_q, num_heads, width = q.shape
    if kv.ndim != 2 or kv.shape[1] != width:
        raise ValueError(f"kv has shape {kv.shape}; the reference takes [total_kv, {width}] for q of shape {q.shape}")
    qo_bounds = [int(x) for x in qo_indptr]
    kv_bounds = [int(x) for x in kv_indptr]
    if len(qo_bounds) != len(kv_bounds):
        raise ValueError(f"qo_indptr has {len(qo_bounds)} entries, kv_indptr {len(kv_bounds)}: both are [batch + 1]")
    if qo_bounds[-1] != total_q or kv_bounds[-1] > len(kv):
        raise ValueError(f"the indptr arrays end at {qo_bounds[-1]} and {kv_bounds[-1]}, but there are {total_q} queries and {len(kv)} tokens")

    out = np.zeros((total_q, num_heads, kv_lora_rank))
    lse = np.full((total_q, num_heads), -np.inf)
    for q_begin, q_end, kv_begin, kv_end in zip(qo_bounds[:-1], qo_bounds[1:], kv_bounds[:-1], kv_bounds[1:], strict=True):
        keys = kv[kv_begin:kv_end].astype(np.float64)
        for q_token in range(q_begin, q_end):
            num_visible = len(keys) - (q_end - 1 - q_token) if causal else len(keys)
            if num_visible > 0:
                out[q_token], lse[q_token] = _attend(q[q_token].astype(np.float64), keys[:num_visible], float(sm_scale), kv_lora_rank)
    return out, lse


def _attend(q: np.ndarray, keys: np.ndarray, sm_scale: float, kv_lora_rank: int) -> tuple[np.ndarray, np.ndarray]:
    """q [num_heads, width], keys [n >= 1, width] -> out [num_heads, kv_lora_rank], lse [num_heads]."""
    logits = sm_scale * (q @ keys.T)
    maximum = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - maximum)
    total = weights.sum(axis=1, keepdims=True)
    return (weights / total) @ keys[:, :kv_lora_rank], (maximum + np.log(total))[:, 0]
