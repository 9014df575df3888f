"""The device arrays of a run, checked against what its plan expects, in as few steps as a call for each layer and token allows."""

from __future__ import annotations

from typing import Any

import numpy as np

from .device import Buffer, Device


class Operand:
    """What an array of a run has to be.

    name: in messages; shape, dtype; nbytes: of the packed array; alignment: of its address, in bytes
    """

    __slots__ = ("alignment", "dtype", "name", "nbytes", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype, *, alignment: int):
        self.name, self.shape, self.dtype, self.alignment = name, shape, dtype, alignment
        self.nbytes = int(np.prod(shape)) * dtype.itemsize

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}] {self.dtype}"

    def address_of(self, array: Any, device: Device) -> int:
        """Of an array that is as it has to be. TypeError or ValueError, naming value and limit, if it is not; DeviceError if it was freed."""
        if type(array) is Buffer:
            if array.device is not device:
                raise _on_another_device(self.name, array.device, device)
            if array.nbytes != self.nbytes:
                raise ValueError(f"{self.name} has {array.nbytes} bytes; the plan needs {self.nbytes}: {self}")
            address = array.address
        else:
            raise _no_buffer(self.name, array)
        if address % self.alignment:
            raise _misaligned(self.name, address, self.alignment)
        return address


def packed_address(name: str, array: Any, nbytes: int, device: Device) -> int:
    """Of a packed array of so many bytes of any dtype and shape, aligned to 16 bytes."""
    if type(array) is Buffer:
        if array.device is not device:
            raise _on_another_device(name, array.device, device)
        address = array.address
    else:
        raise _no_buffer(name, array)
    if array.nbytes != nbytes:
        raise ValueError(f"{name} has {array.nbytes} bytes; {nbytes} are needed for its pages")
    if address % 16:
        raise _misaligned(name, address, 16)
    return int(address)


def overlap(spans: dict[str, tuple[int, int]], written: tuple[str, ...]) -> ValueError:
    """The error that names the first of the written arrays that overlaps another one. spans: (first address, end) of all."""
    for name in written:
        begin, end = spans[name]
        for other, (other_begin, other_end) in spans.items():
            if other != name and begin < other_end and other_begin < end:
                where = f"{name} at {begin:#x} to {end:#x}, {other} at {other_begin:#x} to {other_end:#x}"
                return ValueError(f"{name} overlaps {other}: {where}")
    raise AssertionError("no two arrays overlap")


def _on_another_device(name: str, its: Device, needed: Device) -> ValueError:
    return ValueError(f"{name} is on another device, {its}; the plan is for {needed}")


def _misaligned(name: str, address: int, alignment: int) -> ValueError:
    return ValueError(f"{name} is at address {address:#x}; it has to be a multiple of {alignment}")


def _no_buffer(name: str, array: Any) -> TypeError:
    return TypeError(f"{name} is a {type(array).__name__}; a Buffer of the plan's device is needed")
