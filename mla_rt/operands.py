"""The device arrays of a run, checked against what its plan expects, in as few steps as a call for each layer and token allows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .arrays import DeviceArray, as_array, packed_strides
from .device import Device
from .resources import Buffer, Stream


class Operand:
    """What an array of a run has to be.

    name: in messages; shape, dtype; nbytes: of the packed array; alignment: of its address, in bytes; written: whether the run writes it
    """

    __slots__ = ("alignment", "dtype", "name", "nbytes", "shape", "written")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype, *, alignment: int, written: bool = False):
        self.name, self.shape, self.dtype, self.alignment, self.written = name, shape, dtype, alignment, written
        self.nbytes = math.prod(shape) * dtype.itemsize

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}] {self.dtype}"

    def address_of(self, array: Any, device: Device, stream: Stream | None) -> int:
        """Of an array that is as it has to be. TypeError or ValueError, naming value and limit, if it is not; DeviceError if it was freed."""
        if type(array) is Buffer:
            if array.device is device and array.nbytes == self.nbytes:
                return array.address  # of an allocation: aligned
            require_on(self.name, array.device, device)
            raise ValueError(f"{self.name} has {array.nbytes} bytes; the plan needs {self.nbytes}: {self}")
        view = as_device_array(self.name, array, device, stream)
        if view.dtype != self.dtype:
            bits = view.dtype.kind in "uiV" and view.dtype.itemsize == self.dtype.itemsize
            advice = f" (if these are its bits: as_array(…, dtype={self.dtype.name!r}))" if bits else ""
            raise TypeError(f"{self.name} has dtype {view.dtype}; the plan needs {self}{advice}")
        if view.shape != self.shape:
            raise ValueError(f"{self.name} has shape {list(view.shape)}; the plan needs {self}")
        require_packed(self.name, view, self.alignment)
        if self.written and view.readonly:
            raise ValueError(f"{self.name} is read-only; a run writes it")
        return view.address


def packed_address(name: str, array: Any, nbytes: int, device: Device, stream: Stream | None) -> int:
    """Of a packed array of so many bytes of any dtype and shape, aligned to 16 bytes."""
    if type(array) is Buffer and array.device is device and array.nbytes == nbytes:
        return array.address
    if type(array) is not Buffer:
        array = as_device_array(name, array, device, stream)
        require_packed(name, array, 16)
    require_on(name, array.device, device)
    if array.nbytes != nbytes:
        raise ValueError(f"{name} has {array.nbytes} bytes; {nbytes} are needed for its pages")
    return int(array.address)


def as_device_array(name: str, array: Any, device: Device, stream: Stream | None) -> DeviceArray:
    """`as_array`, whose errors then name the array."""
    if type(array) is DeviceArray:
        require_on(name, array.device, device)
    try:
        return as_array(array, device=device, stream=stream)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def require_on(name: str, its: Device, needed: Device) -> None:
    if its is not needed:
        raise ValueError(f"{name} is on another device, {its}; the plan is for {needed}")


def require_packed(name: str, array: DeviceArray, alignment: int) -> None:
    if not array.is_packed:
        needed = f"packed, {list(packed_strides(array.shape))}, is needed"
        raise ValueError(f"{name} of shape {list(array.shape)} has strides {list(array.strides)} in elements; {needed}")
    if array.address % alignment:
        raise ValueError(f"{name} is at address {array.address:#x}; a multiple of {alignment} is needed")


def overlap(spans: dict[str, tuple[int, int]], written: tuple[str, ...]) -> ValueError:
    """The error that names the first of the written arrays that overlaps another one. spans: (first address, end) of all."""
    for name in written:
        begin, end = spans[name]
        for other, (other_begin, other_end) in spans.items():
            if other != name and begin < other_end and other_begin < end:
                where = f"{name} at {begin:#x} to {end:#x}, {other} at {other_begin:#x} to {other_end:#x}"
                return ValueError(f"{name} overlaps {other}: {where}")
    raise AssertionError("no two arrays overlap")
