"""merge(): parts of a cache put together again, against the reference over the whole."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_rt.merge import merge
from mla_rt.reference import mla_decode


@settings(max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_parts_merge_to_the_whole(lengths, seed):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(1, 2, 12)) * rng.choice([0.1, 1, 30])  # up to logits whose exp overflows
    parts = [rng.normal(size=(n, 12)) * 10 for n in lengths]
    options = {"qo_indptr": [0, 1], "sm_scale": 1.0, "kv_lora_rank": 8}
    results = [mla_decode(q, part, kv_indptr=[0, len(part)], **options) for part in parts]
    out, lse = merge([r[0] for r in results], [r[1] for r in results])
    whole = np.concatenate(parts)
    expected_out, expected_lse = mla_decode(q, whole, kv_indptr=[0, len(whole)], **options)
    np.testing.assert_allclose(out, expected_out, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


def test_a_part_without_tokens_changes_no_bit_whatever_it_holds():
    rng = np.random.default_rng(0)
    out, lse = rng.normal(size=(3, 2, 8)).astype(ml_dtypes.bfloat16), rng.normal(size=(3, 2)).astype(np.float32)
    garbage = np.full_like(out, np.nan)
    merged_out, merged_lse = merge([garbage, out], [np.full_like(lse, -np.inf), lse])
    assert merged_out.dtype == out.dtype and merged_lse.dtype == lse.dtype
    assert np.array_equal(merged_out.view(np.uint16), out.view(np.uint16)) and np.array_equal(merged_lse, lse)


def test_no_tokens_anywhere():
    out, lse = merge([np.full((2, 8), np.nan, np.float32)] * 2, [np.full(2, -np.inf, np.float32)] * 2)
    assert not out.any() and np.isneginf(lse).all()


def test_stacked_arrays_are_taken_as_parts():
    outs, lses = np.arange(12.0).reshape(2, 3, 2), np.zeros((2, 3))
    out, lse = merge(outs, lses)
    np.testing.assert_allclose(out, outs.mean(axis=0))
    np.testing.assert_allclose(lse, np.log(2))


def test_bf16_parts_are_rounded_once():
    outs = [np.full((1, 4), x, ml_dtypes.bfloat16) for x in (1.0, 1.0078125)]  # neighbours; the first weighs 3 times as much
    out, _ = merge(outs, [np.log(np.full(1, 3.0)), np.zeros(1)])
    assert (out.astype(float) == 1.0).all()


def test_nan_of_a_part_is_not_hidden():
    out, _ = merge([np.array([[np.nan, 1.0]]), np.ones((1, 2))], [np.zeros(1), np.zeros(1)])
    assert np.isnan(out[0, 0]) and out[0, 1] == 1.0
    assert np.isnan(merge([np.ones((1, 2))], [np.full(1, np.nan)])[1]).all()


INF, NAN = np.inf, np.nan


@pytest.mark.parametrize("values", [0.0, 2.0, INF, NAN])
@pytest.mark.parametrize(("lses", "expected"), [([INF, 800.0], INF), ([INF, INF], INF), ([NAN, INF], NAN), ([-INF, NAN], NAN)])
def test_infinite_and_nan_lse(lses, expected, values):
    """Row 0 is such a row, row 1 is not, and no warning is given (which would be an error here)."""
    outs = [np.full((2, 3), x) for x in (values, 1.0)]
    out, lse = merge(outs, [np.array([each, 0.0]) for each in lses])
    assert np.isnan(out[0]).all() and np.array_equal(lse[0], expected, equal_nan=True)
    assert np.array_equal(out[1], np.full(3, (values + 1.0) / 2), equal_nan=True) and lse[1] == np.log(2)


A, B = np.zeros((2, 8), np.float32), np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        ([], [], ValueError, "outs has length 0, lses 0"),
        (None, None, TypeError, "outs is a NoneType; a sequence of arrays"),
        ([A], 1.5, TypeError, "lses is a float"),
        (np.float32(1), [B], TypeError, "outs is a float32"),
        (np.array(1.0), [B], TypeError, "outs is a ndarray"),
        ([A], [B, B], ValueError, "outs has length 1, lses 2"),
        ([A, A[:1]], [B, B], ValueError, r"\(2, 8\) and \(1, 8\)"),
        ([A, A], [B, B[:1]], ValueError, r"\(2,\) and \(1,\)"),
        ([A, A], [A, A], ValueError, r"need lses of shape \(2,\)"),
        ([A, A.astype(np.float64)], [B, B], TypeError, "float32, float64"),
        ([A.astype(np.uint16)], [B], TypeError, "uint16"),
        ([A], [B.astype(np.int32)], TypeError, "int32"),
    ],
)
def test_bad_arguments(outs, lses, error, message):
    with pytest.raises(error, match=message):
        merge(outs, lses)
