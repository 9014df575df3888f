"""The float64 reference against plain Python: loops, math.exp and math.fsum, and cases whose answer is known without computing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mla_rt.reference import mla_decode


def plain_decode(q, kv, qo_indptr, kv_indptr, sm_scale, causal, kv_lora_rank):
    """Nested lists in, nested lists out. The softmax is written as 1 / (sum of exp of differences), not by shift and divide."""
    outs, lses = [], []
    for r in range(len(qo_indptr) - 1):
        tokens = kv[kv_indptr[r] : kv_indptr[r + 1]]
        q_len = qo_indptr[r + 1] - qo_indptr[r]
        for i in range(q_len):
            visible = [t for n, t in enumerate(tokens) if not causal or n <= len(tokens) - q_len + i]
            row_out, row_lse = [], []
            for head in q[qo_indptr[r] + i]:
                logits = [sm_scale * math.fsum(a * b for a, b in zip(head, token, strict=True)) for token in visible]
                weights = [1 / math.fsum(math.exp(other - logit) for other in logits) for logit in logits]
                row_out.append([math.fsum(w * token[c] for w, token in zip(weights, visible, strict=True)) for c in range(kv_lora_rank)])
                row_lse.append(logits[0] - math.log(weights[0]) if logits else -math.inf)
            outs.append(row_out)
            lses.append(row_lse)
    return outs, lses


@pytest.mark.parametrize("causal", [True, False])
def test_equals_plain_python(causal):
    rng = np.random.default_rng(1)
    qo_indptr, kv_indptr = [0, 1, 4, 4, 6, 7], [0, 5, 9, 12, 13, 13]  # among them: no queries, fewer tokens than queries, no tokens
    q, kv = rng.normal(size=(7, 3, 10)), rng.normal(size=(13, 10))
    expected_out, expected_lse = plain_decode(q.tolist(), kv.tolist(), qo_indptr, kv_indptr, 0.7, causal, 8)
    out, lse = mla_decode(q, kv, qo_indptr=qo_indptr, kv_indptr=kv_indptr, sm_scale=0.7, causal=causal, kv_lora_rank=8)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-14)
    assert np.isneginf(lse[6]).all() and not out[6].any()
    assert np.isneginf(lse[4]).all() == causal  # the first of two queries over one token


def test_equal_logits_average_and_lse_is_log_of_count():
    kv = np.concatenate([np.arange(12.0).reshape(4, 3), np.zeros((4, 1))], axis=1)
    q = np.array([[[0.0, 0.0, 0.0, 1.0]]])
    out, lse = mla_decode(q, kv, qo_indptr=[0, 1], kv_indptr=[0, 4], sm_scale=1.0, kv_lora_rank=3)
    np.testing.assert_allclose(out[0, 0], kv[:, :3].mean(axis=0), rtol=1e-15)
    np.testing.assert_allclose(lse, math.log(4), rtol=1e-15)


def test_one_token_is_returned_and_its_logit_is_the_lse():
    q, kv = np.full((1, 2, 576), 0.5), np.linspace(-3, 3, 576)[None]
    out, lse = mla_decode(q, kv, qo_indptr=[0, 1], kv_indptr=[0, 1], sm_scale=0.25)
    assert np.array_equal(out[0], np.tile(kv[0, :512], (2, 1)))
    np.testing.assert_allclose(lse, 0.25 * 0.5 * kv.sum(), atol=1e-13)


def test_large_logits_do_not_overflow():
    kv = np.array([[1000.0, 0.0], [-1000.0, 0.0], [999.0, 0.0]])
    out, lse = mla_decode(np.array([[[1.0, 0.0]]]), kv, qo_indptr=[0, 1], kv_indptr=[0, 3], sm_scale=1.0, kv_lora_rank=1)
    weight = 1 / (1 + math.exp(-1))
    np.testing.assert_allclose(out[0, 0, 0], weight * 1000 + (1 - weight) * 999, rtol=1e-15)
    np.testing.assert_allclose(lse[0, 0], 1000 + math.log1p(math.exp(-1)), rtol=1e-15)


def test_causal_never_touches_what_lies_behind():
    rng = np.random.default_rng(2)
    q, kv = rng.normal(size=(3, 1, 6)), rng.normal(size=(5, 6))
    kv[3:] = np.nan  # seen by the last two queries only
    out, lse = mla_decode(q, kv, qo_indptr=[0, 3], kv_indptr=[0, 5], sm_scale=1.0, kv_lora_rank=4)
    alone_out, alone_lse = mla_decode(q[:1], kv[:3], qo_indptr=[0, 1], kv_indptr=[0, 3], sm_scale=1.0, kv_lora_rank=4)
    assert np.array_equal(out[:1], alone_out) and np.array_equal(lse[:1], alone_lse)
    assert np.isnan(out[1:]).all() and np.isnan(lse[1:]).all()


@pytest.mark.parametrize(
    ("qo_indptr", "kv_indptr", "kv_shape", "message"),
    [
        ([0, 1], [0, 1, 2], (2, 6), "qo_indptr has 2 entries, kv_indptr 3"),
        ([0, 2], [0, 2], (2, 6), "end at 2 and 2, but there are 1 queries and 2 tokens"),
        ([0, 1], [0, 3], (2, 6), "end at 1 and 3, but there are 1 queries and 2 tokens"),
        ([0, 1], [0, 2], (2, 5), r"kv has shape \(2, 5\)"),
        ([0, 1], [0, 2], (2, 1, 6), r"kv has shape \(2, 1, 6\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(qo_indptr, kv_indptr, kv_shape, message):
    with pytest.raises(ValueError, match=message):
        mla_decode(np.zeros((1, 1, 6)), np.zeros(kv_shape), qo_indptr=qo_indptr, kv_indptr=kv_indptr, sm_scale=1.0)
