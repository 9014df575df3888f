"""As much of CuPy's face as examples/cupy_decode.py uses, over HIP itself: CuPy for ROCm is not to be had where the tests run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from foreign import Array, Library
from mla_rt import dlpack

_library = Library()


def asarray(values: np.ndarray) -> Array:
    return _named(_library.array(values))


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    return _named(_library.array(np.zeros(shape, dtype)))


def from_dlpack(array: Any) -> Array:
    assert array.__dlpack_device__() == (dlpack.ROCM, 0)
    view = dlpack.take(array, int(_library.stream))
    taken = _named(Array(_library, view.address, view.shape, view.dtype))
    taken.view = view
    return taken


def asnumpy(array: Array) -> np.ndarray:
    return _library.read(array)


def _named(array: Array) -> Any:
    array.data = SimpleNamespace(ptr=array.address)
    return array
