"""The nouns of running kernels: Buffer, Stream, Event, Module, Kernel, PreparedLaunch. A Device (device.py) makes them.

Lifetime. Buffers, streams, events and modules live until they are closed (`Buffer.free`, `close`, leaving a `with` block) or their device is
closed; dropping the last reference releases nothing, so no buffer can vanish under a kernel that is still running. Closing twice is
allowed; using what is closed raises DeviceError.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .code_object import CodeObject, KernelInfo, argument_bytes
from .errors import DeviceError

if TYPE_CHECKING:
    from .device import Device

Self = TypeVar("Self", bound="Resource")


class Resource(ABC):
    """Something that a device made and that must be closed. `handle` is the backend's; reading it checks that both are still open."""

    def __init__(self, device: Device, handle: Any):
        self.device = device
        self._handle = handle
        self._open = True
        self._num_graphs = 0  # open ones that use it
        device._resources[id(self)] = self

    @property
    def handle(self) -> Any:
        if self.device.closed:
            raise DeviceError(f"{type(self).__name__} used after its device was {self.device._ended}")
        if not self._open:
            raise DeviceError(f"{type(self).__name__} used after it was closed")
        return self._handle

    def close(self) -> None:
        """Release it. Closing again, or after the device, does nothing. DeviceError while an open graph uses it."""
        if self._open and not self.device.closed:
            self.device._require_no_capture("close")
            if self._num_graphs:
                raise DeviceError(f"{type(self).__name__} closed while a graph uses it; close the graph first")
            if self.device._resources.pop(id(self), None) is None:  # another thread closes it
                return
            self._open = False
            self._release()

    @abstractmethod
    def _release(self) -> None: ...

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Buffer(Resource):
    """`nbytes` bytes of device memory at `address`. An empty buffer has address 0. Its contents are undefined until written."""

    def __init__(self, device: Device, address: int, nbytes: int):
        super().__init__(device, address)
        self.nbytes = nbytes

    @property
    def address(self) -> int:
        """Device address of the first byte. DeviceError if the buffer was freed."""
        if self._open and not self.device.closed:  # as `handle` says, but quicker: each run of a plan asks for a few
            return int(self._handle)
        return int(self.handle)

    def upload(self, array: NDArray[Any], stream: Stream | None = None, *, offset: int | None = None) -> None:
        """Copy the array (any shape and dtype, of exactly `nbytes` bytes, else ValueError; taken in C order) into the buffer.

        offset: in bytes: the array goes there and need not fill the buffer, only fit (else ValueError).
        Without a stream the copy is done on return. On a stream it is queued; the array may be changed at once, for its bytes are taken now.
        """
        address = self.address
        self.device._require_no_capture("upload")
        require_ndarray(array)
        if offset is None and array.nbytes != self.nbytes:
            raise ValueError(f"upload of {array.nbytes} bytes (shape {array.shape}, {array.dtype}) into a buffer of {self.nbytes}")
        if offset is not None and not 0 <= offset <= self.nbytes - array.nbytes:
            raise ValueError(f"upload of {array.nbytes} bytes at byte {offset} of a buffer of {self.nbytes}")
        if array.nbytes:
            self.device._upload(address + (offset or 0), np.ascontiguousarray(array), self.device._stream_handle(stream))

    def download(self, shape: int | tuple[int, ...], dtype: DTypeLike, stream: Stream | None = None) -> NDArray[Any]:
        """The buffer's bytes as a new array of this shape and dtype, which must take exactly `nbytes` (else ValueError).

        Waits for the work given before on the stream; without one, for all work of the device.
        """
        address = self.address
        self.device._require_no_capture("download")
        array: NDArray[Any] = np.empty(shape, dtype)
        if array.nbytes != self.nbytes:
            raise ValueError(f"download of {array.nbytes} bytes (shape {array.shape}, {array.dtype}) from a buffer of {self.nbytes}")
        if self.nbytes:
            self.device._download(array, address, self.device._stream_handle(stream))
        return array

    def fill(self, byte: int, stream: Stream | None = None) -> None:
        """Set every byte of the buffer to `byte` (0..255, else ValueError), in the stream's order."""
        address = self.address
        if not 0 <= byte <= 255:
            raise ValueError(f"fill with {byte}: a byte is 0..255")
        if self.device._capture is not None:
            self.device._captured(stream, self)
        if self.nbytes:
            self.device._fill(address, byte, self.nbytes, self.device._stream_handle(stream))

    def free(self) -> None:
        """Give the memory back, after all work given before. Freeing again does nothing; any other use raises DeviceError."""
        self.close()

    def _release(self) -> None:
        if self.nbytes:
            self.device._free(self._handle)

    def __repr__(self) -> str:
        return f"<Buffer of {self.nbytes} bytes{'' if self._open else ', freed'}>"


class Stream(Resource):
    """A queue of work, run in order."""

    def synchronize(self) -> None:
        """Wait for all work given to this stream. DeviceError if any of it failed."""
        self.device._require_no_capture("synchronize")
        self.device._synchronize_stream(self.handle)

    def wait(self, event: Event) -> None:
        """Hold back work given to this stream from now on until the event's last record is reached. An event never recorded holds back nothing."""
        require_same_device(self.device, event)
        self.device._require_no_capture("wait")
        self.device._wait_event(self.handle, event.handle)

    def _release(self) -> None:
        self.device._destroy_stream(self._handle)


class ForeignStream(Stream):
    """Another library's stream (`Device.stream_at`), which is never destroyed here. Its handle is None if it is the default stream."""

    def _release(self) -> None:
        if self._handle is not None:
            self.device._release_foreign_stream(self._handle)


class Event(Resource):
    """A mark in a stream: to wait for, and to take times between."""

    def __init__(self, device: Device, handle: Any):
        super().__init__(device, handle)
        self._recorded = False

    def record(self, stream: Stream | None = None) -> None:
        """Mark the present end of the stream (None: the default stream)."""
        self.device._require_no_capture("record")
        self.device._record_event(self.handle, self.device._stream_handle(stream))
        self._recorded = True

    def synchronize(self) -> None:
        """Wait until the mark is reached. Returns at once if it was never recorded."""
        self.device._require_no_capture("synchronize")
        self.device._synchronize_event(self.handle)

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds from the mark `since` to this one; waits for both. DeviceError unless both were recorded. The emulator's are the host's."""
        require_same_device(self.device, since)
        if not (self._recorded and since._recorded):
            raise DeviceError("elapsed_ms between events of which one was never recorded")
        since.synchronize()
        self.synchronize()
        return self.device._elapsed_ms(since.handle, self.handle)

    def _release(self) -> None:
        self.device._destroy_event(self._handle)


class Module(Resource):
    """A code object on a device. constants: the int32 values that it exports by name; kernels: what it says of each kernel, by name."""

    def __init__(self, device: Device, handle: Any, code_object: CodeObject):
        super().__init__(device, handle)
        self.code_object = code_object
        self.constants: Mapping[str, int] = code_object.constants
        self.kernels: Mapping[str, KernelInfo] = code_object.kernels
        self._functions: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        """The kernel of this name. ValueError, naming those there are, if it has none such."""
        handle = self.handle
        if name not in self.kernels:
            raise ValueError(f"no kernel {name!r} in this code object; it has {', '.join(self.kernels) or 'none'}")
        if name not in self._functions:
            self._functions[name] = Kernel(self, self.kernels[name], self.device._function(handle, name))
        return self._functions[name]

    def _release(self) -> None:
        self.device._unload(self._handle)


class Kernel:
    """A kernel ready to launch. info: its arguments, sizes and block size."""

    def __init__(self, module: Module, info: KernelInfo, function: Any):
        self.module, self.info, self._function = module, info, function

    def __repr__(self) -> str:
        return f"<Kernel {self.info.name}({', '.join(arg.name for arg in self.info.args)})>"


class PreparedLaunch:
    """A launch that `Device.prepare` checked and packed, to be queued again and again. kernel: what it launches.

    One thread at a time may use it. Buffers given to `prepare` have to stay open, and so has the memory whose address was set.
    """

    def __init__(self, kernel: Kernel, grid: tuple[int, int, int], dynamic_lds_bytes: int, packed: ctypes.Structure, buffers: tuple[Buffer, ...]):
        self.kernel = kernel
        self._uses = (kernel.module, *buffers)
        self._grid, self._dynamic_lds_bytes, self._packed = grid, dynamic_lds_bytes, packed
        self._bytes = memoryview(packed).cast("B")
        self._words = self._bytes[: len(self._bytes) // 8 * 8].cast("Q")
        self._arguments = {arg.name: arg for arg in kernel.info.args}
        self._word_of = {arg.name: arg.offset // 8 for arg in kernel.info.args if arg.kind == "global_buffer"}

    def set_address(self, name: str, address: int) -> None:
        """Let the pointer argument of this name (else KeyError) be a device address, which is taken as it is; 0: null."""
        self._words[self._word_of[name]] = address

    def set_value(self, name: str, value: np.generic) -> None:
        """Let the by-value argument of this name be a numpy scalar of its size (else TypeError)."""
        arg = self._arguments[name]
        self._bytes[arg.offset : arg.offset + arg.size] = argument_bytes(self.kernel.info, arg, value)

    def launch(self, stream: Stream | None = None) -> None:
        """Queue it with the arguments as they are now. DeviceError as for `Device.launch`."""
        kernel = self.kernel
        device = kernel.module.device
        kernel.module.handle  # noqa: B018 - raises if the module or the device was closed
        if device._capture is not None:
            device._captured(stream, *self._uses)
        device._launch(kernel._function, self._grid, kernel.info.block_size, self._dynamic_lds_bytes, device._stream_handle(stream), self._packed)


def require_ndarray(array: Any) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"a numpy array is needed, not {type(array).__name__}")


def require_same_device(device: Device, resource: Resource) -> None:
    if getattr(resource, "device", None) is not device:
        if not isinstance(resource, Resource):  # not asked first: of an abstract class the answer takes long
            raise TypeError(f"a {type(resource).__name__} is no stream or event of ours; Device.stream_at takes other libraries' streams")
        raise ValueError(f"this {type(resource).__name__.lower()} belongs to another device")
