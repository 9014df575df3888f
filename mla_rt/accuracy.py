"""How far a decode result is from the exact one, and the promise that it keeps.

Errors are measured per (query token, head) against that row's own magnitude: outputs shrink like sqrt(e / n) with the length of the context,
so a tolerance that is fixed for a whole tensor accepts an all-zero result at long contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

# The result is bf16, so rounding it is the error that nobody can avoid; half as much again is left for f32 sums, exp2 and the f32 softmax
# weights being two bf16 terms. The addend covers rows whose values bf16 happens to represent exactly.
KERNEL_ERROR_FACTOR = 1.5
KERNEL_ERROR_FLOOR = 2e-4
# f32 sums of 576 products leave some 1e-6 of the logits' magnitude: near 0 the absolute limit counts, for large logits the relative one.
LSE_ABSOLUTE = 1e-4
LSE_RELATIVE = 2e-5


def row_errors(result: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """RMS error over RMS value of each row: result and exact [.., width] -> float64 [..].

    0 where an exact row of zeros is met exactly; inf where it is not, and where NaN and infinities do not stand in the same places.
    """
    result, exact = np.asarray(result).astype(np.float64), np.asarray(exact).astype(np.float64)
    if result.shape != exact.shape:
        raise ValueError(f"result has shape {result.shape}, exact {exact.shape}")
    misplaced = ~_alike(result, exact).all(axis=-1)
    finite = np.isfinite(result) & np.isfinite(exact)
    value = np.where(finite, exact, 0.0)
    error = np.where(finite, result, 0.0) - value
    rms_value, rms_error = _rms(value), _rms(error)
    relative = np.where(rms_value > 0, rms_error / np.where(rms_value > 0, rms_value, 1.0), np.where(rms_error > 0, np.inf, 0.0))
    return np.where(misplaced, np.inf, relative)


def _rms(values: np.ndarray) -> np.ndarray:
    """Over the last axis. The largest value is taken out first: squares of small or large numbers would leave the range."""
    largest = np.abs(values).max(axis=-1, initial=0.0)
    scaled = values / np.where(largest > 0, largest, 1.0)[..., None]
    return largest * np.sqrt(np.mean(scaled**2, axis=-1))


def lse_errors(lse: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """|lse - exact|, float64; 0 where both are the same infinity or both NaN, inf where only one of them is."""
    lse, exact = np.asarray(lse).astype(np.float64), np.asarray(exact).astype(np.float64)
    finite = np.isfinite(lse) & np.isfinite(exact)
    difference = np.abs(np.where(finite, lse, 0.0) - np.where(finite, exact, 0.0))
    return np.where(_alike(lse, exact), difference, np.inf)


def _alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where both are finite, both NaN or the same infinity."""
    return (np.isfinite(a) & np.isfinite(b)) | (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & (a == b))


@dataclass(frozen=True)
class Accuracy:
    """A decode result beside the exact one of the same stored bytes, all arrays [total_q, num_heads] float64.

    kernel_error    of the result
    rounding_error  of the exact result rounded to bf16
    lse_error       absolute, in nats
    lse_limit       what is promised of it
    nan_in_both     bool: rows that hold NaN, in out or lse, here and in the exact result; where they do so in the same places, no error is seen
    """

    kernel_error: np.ndarray
    rounding_error: np.ndarray
    lse_error: np.ndarray
    lse_limit: np.ndarray
    nan_in_both: np.ndarray

    @classmethod
    def of(cls, out: np.ndarray, lse: np.ndarray, exact_out: np.ndarray, exact_lse: np.ndarray) -> Accuracy:
        """out [total_q, num_heads, 512], lse [total_q, num_heads], and the exact two in float64."""
        rounded = np.asarray(exact_out).astype(ml_dtypes.bfloat16)
        limit = np.maximum(LSE_ABSOLUTE, LSE_RELATIVE * np.abs(np.where(np.isfinite(exact_lse), exact_lse, 0.0)))
        nan, exact_nan = (np.isnan(each_out).any(axis=-1) | np.isnan(each_lse) for each_out, each_lse in ((out, lse), (exact_out, exact_lse)))
        return cls(row_errors(out, exact_out), row_errors(rounded, exact_out), lse_errors(lse, exact_lse), limit, nan & exact_nan)

    @property
    def kernel_limit(self) -> np.ndarray:
        return KERNEL_ERROR_FACTOR * self.rounding_error + KERNEL_ERROR_FLOOR

    @property
    def worst(self) -> tuple[int, int] | None:
        """The (query token, head) whose kernel error is the largest; None if there is no row."""
        if self.kernel_error.size == 0:
            return None
        token, head = np.unravel_index(np.argmax(self.kernel_error), self.kernel_error.shape)
        return int(token), int(head)

    @property
    def promise_kept(self) -> bool:
        return bool((self.kernel_error <= self.kernel_limit).all() and (self.lse_error <= self.lse_limit).all())
