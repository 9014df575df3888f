"""The device arrays of a run, checked against what its plan expects, in as few steps as a call for each layer and token allows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .device import Buffer, Device


class Operand:
    """What an array of a run has to be.

    name: in messages; shape, dtype; nbytes: of the packed array
    """

    __slots__ = ("dtype", "name", "nbytes", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype):
        self.name, self.shape, self.dtype = name, shape, dtype
        self.nbytes = math.prod(shape) * dtype.itemsize

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}] {self.dtype}"

    def address_of(self, array: Any, device: Device) -> int:
        """Of an array that is as it has to be. TypeError or ValueError, naming value and limit, if it is not; DeviceError if it was freed."""
        if type(array) is Buffer and array.device is device and array.nbytes == self.nbytes:
            return array.address  # of an allocation: aligned
        require_buffer(self.name, array, device)
        raise ValueError(f"{self.name} has {array.nbytes} bytes; the plan needs {self.nbytes}: {self}")


def packed_address(name: str, array: Any, nbytes: int, device: Device) -> int:
    """Of a packed array of so many bytes of any dtype and shape, aligned to 16 bytes."""
    if type(array) is Buffer and array.device is device and array.nbytes == nbytes:
        return array.address
    require_buffer(name, array, device)
    raise ValueError(f"{name} has {array.nbytes} bytes; {nbytes} are needed for its pages")


def require_buffer(name: str, array: Any, device: Device) -> None:
    if type(array) is not Buffer:
        raise TypeError(f"{name} is a {type(array).__name__}; a Buffer of the plan's device is needed")
    if array.device is not device:
        raise ValueError(f"{name} is on another device, {array.device}; the plan is for {device}")


def overlap(spans: dict[str, tuple[int, int]], written: tuple[str, ...]) -> ValueError:
    """The error that names the first of the written arrays that overlaps another one. spans: (first address, end) of all."""
    for name in written:
        begin, end = spans[name]
        for other, (other_begin, other_end) in spans.items():
            if other != name and begin < other_end and other_begin < end:
                where = f"{name} at {begin:#x} to {end:#x}, {other} at {other_begin:#x} to {other_end:#x}"
                return ValueError(f"{name} overlaps {other}: {where}")
    raise AssertionError("no two arrays overlap")
