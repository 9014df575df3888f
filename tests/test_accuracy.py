"""The measure of errors: it must see what a tolerance for a whole tensor hides."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mla_rt import decode
from mla_rt.accuracy import KERNEL_ERROR_FACTOR, KERNEL_ERROR_FLOOR, LSE_ABSOLUTE, LSE_RELATIVE, Accuracy, lse_errors, row_errors
from tolerance import assert_decoded, assert_same_bits

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("result", "exact", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([0.0, 0.0], [3.0, 4.0], 1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, -0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-30], [0.0, 0.0], INF),
        ([3e-200, 4.5e-200], [3e-200, 4e-200], 0.1),
        ([3e200, 4.5e200], [3e200, 4e200], 0.1),
        ([3.0, NAN], [3.0, 4.0], INF),
        ([3.0, 4.0], [3.0, NAN], INF),
        ([3.0, INF], [3.0, 4.0], INF),
        ([3.0, INF], [3.0, -INF], INF),
        ([3.0, INF], [3.0, NAN], INF),
        ([3.3, INF, NAN], [3.0, INF, NAN], 0.1),
    ],
)
def test_row_errors(result, exact, expected):
    assert row_errors(np.array([result]), np.array([exact]))[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lse", "exact", "expected"),
    [(1.5, 1.0, 0.5), (-INF, -INF, 0.0), (INF, -INF, INF), (0.0, -INF, INF), (-INF, 0.0, INF), (NAN, 0.0, INF), (NAN, NAN, 0.0)],
)
def test_lse_errors(lse, exact, expected):
    assert lse_errors(np.array([lse]), np.array([exact]))[0] == expected


def rows(seed=0, n=6):
    """Exact values as a long context leaves them: small, and rows of very different magnitude."""
    rng = np.random.default_rng(seed)
    exact = rng.normal(size=(n, 2, 512)) * 10.0 ** -np.arange(n)[:, None, None]
    exact[n - 1] = 0.0
    return exact, rng.normal(size=(n, 2)) * 100


def test_a_rounded_exact_result_is_accepted():
    exact, lse = rows()
    assert_decoded(exact.astype(ml_dtypes.bfloat16), lse.astype(np.float32), exact, lse)


def corrupted():
    def one_row_off(out, lse):
        out[4, 1] *= 1.01  # a thousandth of the tensor's largest row: invisible to a common tolerance

    def all_zero(out, lse):
        out[3:] = 0

    def zero_row_not_zero(out, lse):
        out[5, 0, 7] = 1e-20

    def nan(out, lse):
        out[2, 1, 0] = NAN

    def lse_base_two(out, lse):
        lse[...] = lse / np.log(2)

    def lse_sign(out, lse):
        lse[0, 0] = INF

    def two_heads_swapped(out, lse):
        out[1] = out[1, ::-1].copy()

    return [one_row_off, all_zero, zero_row_not_zero, nan, lse_base_two, lse_sign, two_heads_swapped]


@pytest.mark.parametrize("corrupt", corrupted(), ids=lambda corrupt: corrupt.__name__)
def test_what_is_wrong_in_one_row_is_refused(corrupt):
    exact, lse = rows()
    lse[0, 0] = -INF
    exact[0, 0] = 0.0
    out, got_lse = exact.astype(ml_dtypes.bfloat16), lse.astype(np.float32)
    assert_decoded(out, got_lse, exact, lse)
    corrupt(out, got_lse)
    with pytest.raises(AssertionError):
        assert_decoded(out, got_lse, exact, lse)
    if corrupt.__name__ != "lse_sign":
        assert not Accuracy.of(out, got_lse, exact, lse).promise_kept


def test_same_bits_sees_the_sign_of_zero():
    out, lse = np.zeros((1, 1, 512), ml_dtypes.bfloat16), np.zeros((1, 1), np.float32)
    assert_same_bits((out, lse), (out.copy(), lse.copy()))
    with pytest.raises(AssertionError):
        assert_same_bits((out, lse), (out, -lse))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shape"):
        row_errors(np.zeros((2, 4)), np.zeros((1, 4)))


def test_nothing_to_measure():
    accuracy = Accuracy.of(np.zeros((0, 4, 512)), np.zeros((0, 4)), np.zeros((0, 4, 512)), np.zeros((0, 4)))
    assert accuracy.worst is None and accuracy.promise_kept


def test_the_documentation_of_decode_promises_the_same():
    promise = " ".join(decode.__doc__.split())
    assert f"at most {KERNEL_ERROR_FACTOR:g} times that of rounding the exact out to bfloat16, plus {KERNEL_ERROR_FLOOR * 1e4:g}e-4 of" in promise
    assert f"lse is within {LSE_ABSOLUTE * 1e4:g}e-4 or {LSE_RELATIVE * 1e5:g}e-5 of its value" in promise
