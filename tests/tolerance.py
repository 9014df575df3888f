"""What a decode result may differ by. The promise itself (numbers and reasons) is that of the package, `mla_rt.accuracy`; here it becomes assertions.

Judged per (query token, head) against that row's own magnitude, and in this order: shape and dtype, the places of NaN and infinities, the
rows that must be zero, RMS errors, log-sum-exps. A later check is only as good as the earlier ones.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from mla_rt.accuracy import KERNEL_ERROR_FACTOR, Accuracy

# Parts that were themselves rounded to bf16 before they were merged: their errors and that of rounding the merge add up. Values of a part are up
# to sqrt(2) larger than those of the whole of two, so that two parts leave about 1.4 times one rounding where one result leaves 1.
MERGED_ERROR_FACTOR = 2.5
BF16_ULP_AT_ONE = 2.0**-7


def assert_decoded(out, lse, exact_out, exact_lse, *, factor=1.0):
    """`factor` times the promise. exact_*: float64 from the reference."""
    assert out.dtype == ml_dtypes.bfloat16 and lse.dtype == np.float32
    assert out.shape == exact_out.shape and lse.shape == exact_lse.shape
    values = out.astype(np.float64)
    for kind, test in (("NaN", np.isnan), ("infinity", np.isinf)):
        for name, got, expected in (("out", values, exact_out), ("lse", lse, exact_lse)):
            misplaced = np.argwhere(test(got) != test(expected))
            assert len(misplaced) == 0, f"{name}: {kind} in other places than expected, {len(misplaced)} of them, first at {misplaced[0]}"
    assert np.array_equal(np.sign(lse[np.isinf(lse)]), np.sign(exact_lse[np.isinf(exact_lse)])), "lse: infinities of the wrong sign"
    must_be_zero = ~exact_out.any(axis=-1)
    assert not values[must_be_zero].any(), f"out: rows that are exactly zero are not, first at {np.argwhere(must_be_zero & values.any(axis=-1))[0]}"

    accuracy = Accuracy.of(out, lse, exact_out, exact_lse)
    for name, error, limit in (
        ("out: RMS error / RMS value", accuracy.kernel_error, factor * accuracy.kernel_limit),
        ("lse: error", accuracy.lse_error, factor * accuracy.lse_limit),
    ):
        beyond = ~(error <= limit)
        if beyond.any():
            worst = np.unravel_index(np.argmax(np.where(beyond, error / limit, 0.0)), error.shape)
            place = "query token {}, head {}".format(*worst)
            numbers = f"{error[worst]:.3g}, the limit is {limit[worst]:.3g}"
            raise AssertionError(f"{name} beyond its limit in {beyond.sum()} of {error.size} rows; at {place} it is {numbers}")


def assert_merged(out, lse, exact_out, exact_lse):
    """A merge of decode results over disjoint parts of the KV."""
    assert_decoded(out, lse, exact_out, exact_lse, factor=MERGED_ERROR_FACTOR / KERNEL_ERROR_FACTOR)


def assert_same_bits(got, expected):
    """Two (out, lse) pairs are equal in every bit, NaN payloads and signs of zero included."""
    for name, a, b, bits in (("out", got[0], expected[0], np.uint16), ("lse", got[1], expected[1], np.uint32)):
        assert a.shape == b.shape and a.dtype == b.dtype
        different = np.argwhere(a.view(bits) != b.view(bits))
        assert len(different) == 0, f"{name}: {len(different)} of {a.size} elements differ, first at {different[0]}"
