"""Checks of single arguments: each raises TypeError or ValueError with the argument's name, its value and the limit."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


def as_integers(name: str, values: Any, *, ndim: int, limit: int | None = INT32_MAX) -> np.ndarray:
    """An array of some integer dtype; `limit`: the largest magnitude, None where the caller knows a tighter one."""
    array = as_ndarray(name, values, objects=True)
    if array.dtype == object:  # what numpy makes of Python integers beyond 64 bits
        if not all(type(value) is int for value in array.flat):
            raise _no_numbers(name, values)
        raise ValueError(f"{name} holds {max(array.flat, key=abs)}; the limit is {limit or _INT64_MAX}")
    if isinstance(values, list | tuple) and array.size == 0:
        array = array.astype(np.int64)  # numpy makes floats of an empty list
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; integers are needed")
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}; {counted(ndim, 'dimension')} {'are' if ndim > 1 else 'is'} needed")
    if limit is not None and array.size:
        largest = max(int(array.max()), int(array.min()), key=abs)
        if abs(largest) > limit:
            raise ValueError(f"{name} holds {largest}; the limit is {limit}")
    return array


def as_ndarray(name: str, values: Any, *, objects: bool = False) -> np.ndarray:
    """numpy's own view of an argument; what numpy can make nothing of is a TypeError. objects: an array of Python objects is let through."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is no array: {error}") from None
    if array.dtype == object and not objects:
        raise _no_numbers(name, values)
    return array


def as_integer(name: str, value: Any) -> int:
    value = _scalar(value)
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is {value!r}; an integer is needed")
    return int(value)


def as_count(name: str, value: Any, limit: int = INT32_MAX) -> int:
    """An integer from 1 to `limit`."""
    count = as_integer(name, value)
    if not 1 <= count <= limit:
        raise ValueError(f"{name} is {count}; 1 to {limit} is allowed")
    return count


def as_positive(name: str, value: Any) -> np.float32:
    value = _scalar(value)
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; a number is needed")
    with np.errstate(over="ignore", under="ignore"):
        try:
            single = np.float32(value)
        except OverflowError:  # a Python integer beyond float64
            single = np.float32(np.inf)
    if not (np.isfinite(single) and single > 0):
        raise ValueError(f"{name} is {value}; a positive number within float32 is needed")
    return single


def as_flag(name: str, value: Any) -> bool:
    value = _scalar(value)
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}; True or False is needed")
    return bool(value)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: 1 page, 2 pages."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _no_numbers(name: str, values: Any) -> TypeError:
    return TypeError(f"{name} is a {type(values).__name__} that numpy makes no numeric array of")


def _scalar(value: Any) -> Any:
    """What a zero-dimensional array holds, as npz files deliver numbers."""
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value
