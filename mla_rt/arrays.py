"""Arrays on a device, ours and other people's: where they are and how they are laid out, without a copy.

A DeviceArray is what `Plan.run` and PagedKVCache see of any array. `as_array` makes one of a Buffer, of an object with DLPack (`__dlpack__`:
JAX, CuPy, numpy) or with `__cuda_array_interface__` (hip-python); a DeviceArray has both itself, so that others can take it.

Both protocols also order work: who gives an array names, or is named, a stream, and behind what is queued there the other side goes on.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from . import dlpack
from .device import Device
from .errors import DeviceError
from .resources import Buffer, Stream

_LEGACY_STREAM = 1  # in __cuda_array_interface__, the default stream, which HIP calls 0


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
        """Version 3, on a GPU only. Its stream is the default one, behind which is all work given to the device before.

        AttributeError on the emulator, and for dtypes that numpy has no letter for: take the bits (`as_array`).
        """
        if self.device.kind != "hip":
            raise AttributeError("__cuda_array_interface__ is for a GPU's memory; this array is on the emulator")
        if self.dtype.isbuiltin != 1:
            raise AttributeError(
                f"__cuda_array_interface__ cannot carry {self.dtype}; its bits can: as_array(…, dtype='uint{8 * self.dtype.itemsize}')"
            )
        self.require_open()
        if self.device._capture is None:
            self.device.precede(0)
        strides = None if self.is_packed else tuple(stride * self.dtype.itemsize for stride in self.strides)
        data = (self.address, self.readonly)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "strides": strides, "version": 3, "stream": _LEGACY_STREAM}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.ROCM if self.device.kind == "hip" else dlpack.CPU), 0

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the array, without a copy; the array and its device have to stay open while it is used.

        stream  the consumer's, as the array API standard numbers ROCm's: None or 0: the default stream; an address: that stream. It is held back
                until all work that was given to the device before is done. -1: it is not. On the emulator, whose work is always done, None or -1.

        BufferError for a copy, another device, and what DLPack cannot say; ValueError for another stream; DeviceError for what was closed.
        """
        self.require_open()
        place = self.__dlpack_device__()
        if copy or (dl_device is not None and tuple(dl_device) != place):
            raise BufferError(f"an array on {dlpack.device_name(place)} is exported there and without a copy")
        on_gpu = self.device.kind == "hip"
        if stream is not None and (stream < -1 or (stream in (1, 2) if on_gpu else stream >= 0)):
            raise ValueError(f"stream is {stream!r}; on {dlpack.device_name(place)} it is {'an address, 0, ' if on_gpu else ''}-1 or None")
        capsule = dlpack.export(self, place, max_version)
        if on_gpu and stream != -1:
            self.device.precede(stream or 0)
        return capsule

    def require_open(self) -> None:
        """DeviceError if its device was closed or its Buffer freed."""
        if isinstance(self.owner, Buffer):
            self.owner.handle  # noqa: B018 - raises
        elif self.device.closed:
            raise DeviceError(f"DeviceArray used after its device was {self.device._ended}")

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
    stream  on which it will be used (None: the default stream): what its library has queued for the array comes before work given to it later

    On a GPU, objects with DLPack are taken from ROCm only; on the emulator, which runs on the CPU, only if the memory is the emulator's own.
    Raises TypeError for what is no device array, ValueError if it lies elsewhere, or has not the shape or size, DeviceError if it was freed.
    """
    wanted = None if dtype is None else np.dtype(dtype)
    if wanted is not None and (wanted.hasobject or wanted.itemsize == 0):
        raise TypeError(f"dtype is {wanted!r}; one of numbers is needed")
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
        array = _of_interface(obj, device, stream)
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
    kind, number = obj.__dlpack_device__()
    place, needed = (int(kind), int(number)), (dlpack.ROCM if device.kind == "hip" else dlpack.CPU, 0)
    if place != needed:
        advice = "; to_device uploads a numpy array" if place[0] == dlpack.CPU else ""
        raise ValueError(f"the {type(obj).__name__} is on {dlpack.device_name(place)}; {device} takes {dlpack.device_name(needed)} only{advice}")
    on_stream = None
    if device.kind == "hip":
        on_stream = -1 if _is_captured(device, stream) else device.stream_address(stream)
    view = dlpack.take(obj, on_stream)
    if view.place != needed:
        raise ValueError(f"the {type(obj).__name__} said that it is on {dlpack.device_name(place)}, but gave {dlpack.device_name(view.place)}")
    return _foreign(view.address, view.shape, view.dtype, device, view.strides, view.readonly, view)


def _of_interface(obj: Any, device: Device, stream: Stream | None) -> DeviceArray:
    name = type(obj).__name__
    if device.kind != "hip":
        raise ValueError(f"a {name} with __cuda_array_interface__ is in a GPU's memory, not in that of {device}")
    interface = obj.__cuda_array_interface__
    try:
        dtype, shape = np.dtype(interface["typestr"]), tuple(int(length) for length in interface["shape"])
        address, readonly = interface["data"]
        steps = None if interface.get("strides") is None else tuple(int(step) for step in interface["strides"])
        mask, behind = interface.get("mask"), interface.get("stream")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TypeError(f"the __cuda_array_interface__ of a {name} is none: {error!r}") from None
    if mask is not None:
        raise ValueError(f"the {name} has a mask, which nothing here would heed")
    if dtype.hasobject or dtype.itemsize == 0 or not dtype.isnative:
        raise TypeError(f"the {name} has typestr {interface['typestr']!r}; one of numbers in this machine's byte order is needed")
    if steps is not None and any(step % dtype.itemsize for step in steps):
        raise ValueError(f"the {name} has strides of {steps} bytes, no whole numbers of elements of {dtype}")
    strides = None if steps is None else tuple(step // dtype.itemsize for step in steps)
    array = _foreign(address or 0, shape, dtype, device, strides, bool(readonly), obj)
    if behind == 0:
        raise ValueError(f"the {name} has stream 0 in its __cuda_array_interface__, which is not allowed for being ambiguous")
    if behind is not None and not _is_captured(device, stream):
        device.follow(0 if behind == _LEGACY_STREAM else behind, stream)
    return array


def _foreign(
    address: int, shape: tuple[int, ...], dtype: np.dtype, device: Device, strides: tuple[int, ...] | None, readonly: bool, owner: Any
) -> DeviceArray:
    """Another library's array, as it described it."""
    if (strides is not None and len(strides) != len(shape)) or min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {list(shape)} and strides {None if strides is None else list(strides)} cannot be")
    if address == 0 and 0 not in shape:
        raise ValueError(f"an array of shape {list(shape)} at address 0 cannot be")
    array = DeviceArray(address, shape, dtype, device, strides=strides, readonly=readonly, owner=owner)
    _require_within(device, address, shape, array.strides, dtype)
    return array


def _is_captured(device: Device, stream: Stream | None) -> bool:
    """What a graph uses cannot be waited for while it is captured: its user orders its launches."""
    return device._capture is not None and device._captures(stream)


def _require_within(device: Device, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> None:
    """ValueError if the emulator's memory does not hold the array: any memory of the host has its DLPack device."""
    if device.kind == "hip" or 0 in shape:
        return
    reach = [step * (length - 1) * dtype.itemsize for length, step in zip(shape, strides, strict=True)]
    begin, end = address + sum(min(part, 0) for part in reach), address + sum(max(part, 0) for part in reach) + dtype.itemsize
    if not device.holds(begin, end - begin):
        raise ValueError(f"the array at {address:#x} is memory of the host, not of {device}: to_device uploads it")
