"""Arrays on a device, ours and other people's: where they are and how they are laid out, without a copy.

A DeviceArray is what `Plan.run` and PagedKVCache see of any array. `as_array` makes one of a Buffer, of an object with DLPack (`__dlpack__`) or with
`__cuda_array_interface__` (which CuPy has on ROCm too); a DeviceArray has both itself, so that others can take it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from . import dlpack
from .device import Buffer, Device, Stream
from .errors import DeviceError


class DeviceArray:
    """An array in a device's memory. Frozen.

    address   of its first element
    shape     of any number of axes; strides: in elements, as many
    dtype     numpy's, or one of ml_dtypes (bfloat16, float8_e4m3fn, …)
    device    the Device whose memory it is
    readonly  whether whoever made it forbids writing
    owner     kept alive as long as the array; a Buffer has to stay open besides
    """

    __slots__ = ("address", "device", "dtype", "owner", "readonly", "shape", "strides")

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    device: Device
    readonly: bool
    owner: Any

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        device: Device,
        *,
        strides: tuple[int, ...] | None = None,
        readonly: bool = False,
        owner: Any = None,
    ):
        """strides None: packed, in C order."""
        values = (address, device, np.dtype(dtype), owner, readonly, shape, packed_strides(shape) if strides is None else strides)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a DeviceArray does not change: {name} stays {getattr(self, name, None)!r}")

    @property
    def nbytes(self) -> int:
        """Of its elements, without the gaps between them."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_packed(self) -> bool:
        """Whether its elements follow each other in C order. The stride of an axis of length 1 does not matter."""
        packed = packed_strides(self.shape)
        return 0 in self.shape or all(length == 1 or given == needed for length, given, needed in zip(self.shape, self.strides, packed, strict=True))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, on a GPU only. AttributeError on the emulator, and for dtypes that numpy has no letter for: take the bits (`as_array`)."""
        if self.device.kind != "hip":
            raise AttributeError("__cuda_array_interface__ is for a GPU's memory; this array is on the emulator")
        if self.dtype.isbuiltin != 1:
            raise AttributeError(
                f"__cuda_array_interface__ cannot carry {self.dtype}; its bits can: as_array(…, dtype='uint{8 * self.dtype.itemsize}')"
            )
        self.require_open()
        strides = None if self.is_packed else tuple(stride * self.dtype.itemsize for stride in self.strides)
        data = (self.address, self.readonly)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "strides": strides, "version": 3, "stream": None}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.ROCM if self.device.kind == "hip" else dlpack.CPU), 0

    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None, **options: Any) -> Any:
        """A capsule of the array. Work that was given to the device before is not waited for: order the streams, or synchronize.

        BufferError for a copy or a change of device, and for what DLPack cannot say (a read-only array to a consumer of DLPack before 1.0).
        """
        self.require_open()
        if options.pop("copy", None) or options.pop("dl_device", self.__dlpack_device__()) not in (None, self.__dlpack_device__()):
            raise BufferError("a DeviceArray is exported without a copy, on its own device")
        return dlpack.export(self, self.__dlpack_device__(), versioned=max_version is not None and max_version[0] >= 1)

    def require_open(self) -> None:
        """DeviceError if its device was closed or its Buffer freed."""
        if isinstance(self.owner, Buffer):
            self.owner.handle  # noqa: B018 - raises
        elif self.device.closed:
            raise DeviceError("DeviceArray used after its device was closed")

    def __repr__(self) -> str:
        return f"<DeviceArray {list(self.shape)} {self.dtype}{'' if self.is_packed else f', strides {list(self.strides)}'} on {self.device!r}>"


def as_array(
    obj: Any, *, dtype: DTypeLike | None = None, shape: tuple[int, ...] | None = None, device: Device | None = None, stream: Stream | None = None
) -> DeviceArray:
    """The array that an object is on a device, without a copy.

    obj     a DeviceArray; a Buffer (shape and dtype say what is in it, packed); an object with `__dlpack__`, or with `__cuda_array_interface__`
    dtype   takes the elements' bits as this dtype, of the same size: for bfloat16 and float8, where the object's library has only uint16 and uint8
    shape   of a Buffer; None: one axis
    device  on which it has to be; required for what is not of ours
    stream  on which it will be used, which an object with DLPack is told so that it orders its own work before; None: the default stream

    Raises TypeError for what is no device array, ValueError if it lies elsewhere, or has not the shape or size, DeviceError if it was freed.
    """
    wanted = None if dtype is None else np.dtype(dtype)
    if isinstance(obj, Buffer):
        return _of_buffer(obj, np.dtype(np.uint8) if wanted is None else wanted, shape, device)
    if isinstance(obj, DeviceArray):
        array = obj
        if device is not None and array.device is not device:
            raise ValueError(f"the array is on another device, {array.device}; {device} is needed")
    elif device is None:
        raise TypeError(f"a {type(obj).__name__} does not say which of our devices it is on: device= is needed")
    elif hasattr(obj, "__dlpack__"):
        array = _of_dlpack(obj, device, stream)
    elif hasattr(obj, "__cuda_array_interface__"):
        array = _of_interface(obj, device)
    else:
        raise TypeError(f"a {type(obj).__name__} is no device array: a Buffer, a DeviceArray, __dlpack__ or __cuda_array_interface__ is needed")
    array.require_open()
    if shape is not None and array.shape != tuple(shape):
        raise ValueError(f"the array has shape {list(array.shape)}; {list(shape)} is needed")
    if wanted is None or wanted == array.dtype:
        return array
    if wanted.itemsize != array.dtype.itemsize:
        raise ValueError(f"the bits of {array.dtype} are no {wanted}: {array.dtype.itemsize} and {wanted.itemsize} bytes")
    return DeviceArray(array.address, array.shape, wanted, array.device, strides=array.strides, readonly=array.readonly, owner=array.owner)


def packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements, of C order."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


def _of_buffer(buffer: Buffer, dtype: np.dtype, shape: tuple[int, ...] | None, device: Device | None) -> DeviceArray:
    address = buffer.address
    if device is not None and buffer.device is not device:
        raise ValueError(f"the buffer is on another device, {buffer.device}; {device} is needed")
    shape = (buffer.nbytes // dtype.itemsize,) if shape is None else tuple(shape)
    if math.prod(shape) * dtype.itemsize != buffer.nbytes or min(shape, default=0) < 0:
        raise ValueError(f"a buffer of {buffer.nbytes} bytes is no {dtype} array{'' if shape is None else f' of shape {list(shape)}'}")
    return DeviceArray(address, shape, dtype, buffer.device, owner=buffer)


def _of_dlpack(obj: Any, device: Device, stream: Stream | None) -> DeviceArray:
    place = tuple(int(part) for part in obj.__dlpack_device__())
    needed = (dlpack.ROCM, 0) if device.kind == "hip" else (dlpack.CPU, 0)
    if place != needed:
        raise ValueError(f"the {type(obj).__name__} is on DLPack device {place}; {device} is {needed}")
    on_stream = None if device.kind != "hip" else 0 if stream is None else device.stream_address(stream)
    view = dlpack.take(obj, on_stream)
    _require_within(device, view.address, view.shape, view.strides, view.dtype)
    return DeviceArray(view.address, view.shape, view.dtype, device, strides=view.strides, readonly=view.readonly, owner=view)


def _of_interface(obj: Any, device: Device) -> DeviceArray:
    if device.kind != "hip":
        raise ValueError(f"a {type(obj).__name__} with __cuda_array_interface__ is in a GPU's memory, not in that of {device}")
    interface = obj.__cuda_array_interface__
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    address, readonly = interface["data"]
    nbytes = interface.get("strides")
    if nbytes is not None and any(step % dtype.itemsize for step in nbytes):
        raise ValueError(f"the {type(obj).__name__} has strides of {nbytes} bytes, no whole numbers of elements of {dtype}")
    strides = None if nbytes is None else tuple(step // dtype.itemsize for step in nbytes)
    return DeviceArray(address or 0, shape, dtype, device, strides=strides, readonly=bool(readonly), owner=obj)


def _require_within(device: Device, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> None:
    """ValueError if the emulator's memory does not hold the array: any memory of the host has its DLPack device."""
    if device.kind == "hip" or 0 in shape:
        return
    reach = [step * (length - 1) * dtype.itemsize for length, step in zip(shape, strides, strict=True)]
    begin, end = address + sum(min(part, 0) for part in reach), address + sum(max(part, 0) for part in reach) + dtype.itemsize
    if not device.holds(begin, end - begin):
        raise ValueError(f"the array at {address:#x} is memory of the host, not of {device}: to_device uploads it")
