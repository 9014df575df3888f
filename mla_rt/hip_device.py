"""The Device protocol over hip-python: the only module that imports it, and only when a GPU is opened.

hip-python reports errors in its results and never raises for them; it finds the HIP runtime at its first call. Releases from 6.2 on serve:
where they differ (how device properties are returned, text as str or bytes), what a call returns is looked at, not the version.
"""

from __future__ import annotations

import ctypes
import re
import threading
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from numpy.typing import NDArray

from .code_object import CodeObject
from .device import Device
from .errors import DeviceError
from .resources import Stream

_RUNTIME = "libamdhip64.so"

# Pinned bytes that a stream's queued uploads may hold before an upload waits for the stream and takes them back.
STAGING_LIMIT = 64 << 20


@dataclass(eq=False)
class _Stream:
    """A HIP stream and the pinned blocks (address, bytes) that its queued copies read; they are free for others once it was waited for.

    is_ours: whether it is ours to destroy; num_foreign: how many ForeignStreams are of it.
    """

    handle: Any
    is_ours: bool = True
    num_foreign: int = 0
    staging: list[tuple[int, int]] = field(default_factory=list)

    @property
    def staging_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.staging)


class HipDevice(Device):
    """The first AMD GPU that HIP shows (HIP_VISIBLE_DEVICES chooses). DeviceError, saying what to install, if there is none."""

    kind: Literal["hip", "emulator"] = "hip"

    def __init__(self) -> None:
        (count,) = self._call("hipGetDeviceCount")
        if count < 1:
            raise DeviceError("hipGetDeviceCount: HIP finds no GPU", brief="HIP finds none")
        properties = self._properties()
        attribute = self._hip.hipDeviceAttribute_t
        super().__init__(
            arch=_text(properties.gcnArchName).split(":")[0],  # "gfx950:sramecc+:xnack-": the features do not matter to our code objects
            name=_text(properties.name) or "AMD GPU",
            num_compute_units=self._call("hipDeviceGetAttribute", attribute.hipDeviceAttributeMultiprocessorCount, 0)[0],
            max_lds_bytes=self._call("hipDeviceGetAttribute", attribute.hipDeviceAttributeMaxSharedMemoryPerBlock, 0)[0],
        )
        self._lock = threading.Lock()  # around what must be whole in the lists of streams and of pinned blocks
        self._free_staging: list[tuple[int, int]] = []
        self._streams: list[_Stream] = []

    @cached_property
    def _hip(self) -> Any:
        try:
            from hip import hip
        except ImportError as error:
            brief = "hip-python cannot be imported"
            raise DeviceError(f"{brief} ({error}): pip install hip-python", brief=brief) from None
        return hip

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        """What the HIP function returns after its error code. DeviceError, with the function's name and HIP's text, if it is not success."""
        hip = self._hip
        try:
            error, *results = getattr(hip, name)(*args)
        except RuntimeError as loading:
            # Raised by hip-python alone, when it cannot load the runtime or this function of it.
            details = re.sub(r"b?'+", "", str(loading)).removeprefix(f"failed to dlopen {_RUNTIME}: ")  # it shows bytes objects
            missing = details == f"{_RUNTIME}: cannot open shared object file: No such file or directory"
            raise DeviceError(
                f"{name}: no HIP runtime ({details}); for a GPU, install ROCm (7.0 or later for gfx950)",
                brief=f"{_RUNTIME} is not there" if missing else f"no HIP runtime ({details})",
            ) from None
        except ValueError as unknown:  # an error code of a runtime newer than hip-python's list of them
            raise DeviceError(f"{name}: {unknown}") from None
        if error != hip.hipError_t.hipSuccess:
            text = _text(hip.hipGetErrorString(error)[1])
            raise DeviceError(f"{name}: {error.name} ({int(error)}): {text}")
        return tuple(results)

    def _properties(self) -> Any:
        try:
            return self._call("hipGetDeviceProperties", 0)[0]
        except TypeError:  # releases up to 6.4 fill a structure that the caller brings
            properties = self._hip.hipDeviceProp_t()
            self._call("hipGetDeviceProperties", properties, 0)
            return properties

    def stream_address(self, stream: Stream | None) -> int:
        handle = self._stream_handle(stream)
        return 0 if handle is None else int(handle.handle)

    def follow(self, stream_address: int, stream: Stream | None = None) -> None:
        self._order("work behind another library's stream", stream_address, self.stream_address(stream))

    def precede(self, stream_address: int) -> None:
        what = "work of another library behind this device's"
        if stream_address:
            self._order(what, 0, stream_address)  # the default stream is behind all of ours
        for stream in list(self._streams):
            if stream.num_foreign and int(stream.handle) != stream_address:  # it may be non-blocking: apart from the default stream
                self._order(what, int(stream.handle), stream_address)

    def _order(self, what: str, first: int, second: int) -> None:
        self._require_open()
        self._require_no_capture(what)
        event = self._create_event()
        try:
            self._call("hipEventRecord", event, first or None)
            self._call("hipStreamWaitEvent", second or None, event, 0)
        finally:
            self._destroy_event(event)  # HIP keeps it until the wait is over

    def _allocate(self, nbytes: int) -> int:
        return int(self._call("hipMalloc", nbytes)[0])

    def _free(self, address: int) -> None:
        self._call("hipFree", address)

    def _upload(self, address: int, array: NDArray[Any], stream: _Stream | None) -> None:
        source, nbytes = array.ctypes.data, array.nbytes
        to_device = self._hip.hipMemcpyKind.hipMemcpyHostToDevice
        if stream is None:
            self._call("hipMemcpy", address, source, nbytes, to_device)
            return
        # From pageable memory HIP would wait for the stream; a pinned block is queued, and the caller keeps his array.
        if stream.staging_bytes + nbytes > STAGING_LIMIT:
            self._synchronize_stream(stream)
        block = self._take_staging(nbytes)
        ctypes.memmove(block[0], source, nbytes)
        try:
            self._call("hipMemcpyAsync", address, block[0], nbytes, to_device, stream.handle)
        except DeviceError:  # it was not queued
            self._free_staging.append(block)
            raise
        stream.staging.append(block)  # not before: another thread that waits for the stream would take it for free

    def _download(self, array: NDArray[Any], address: int, stream: _Stream | None) -> None:
        to_host = self._hip.hipMemcpyKind.hipMemcpyDeviceToHost
        if stream is None:
            self._synchronize()
            self._call("hipMemcpy", array.ctypes.data, address, array.nbytes, to_host)
        else:
            self._call("hipMemcpyAsync", array.ctypes.data, address, array.nbytes, to_host, stream.handle)
            self._synchronize_stream(stream)

    def _fill(self, address: int, byte: int, nbytes: int, stream: _Stream | None) -> None:
        self._call("hipMemsetAsync", address, byte, nbytes, _handle(stream))

    def _load(self, code_object: CodeObject) -> Any:
        return self._call("hipModuleLoadData", code_object.image)[0]

    def _unload(self, module: Any) -> None:
        self._call("hipModuleUnload", module)

    def _function(self, module: Any, name: str) -> Any:
        return self._call("hipModuleGetFunction", module, name.encode())[0]

    def _launch(
        self, function: Any, grid: tuple[int, int, int], block_size: int, dynamic_lds_bytes: int, stream: _Stream | None, arguments: ctypes.Structure
    ) -> None:
        # As the only entry of `extra`, hip-python passes the structure's bytes as they are; its packing of separate values cannot be relied on.
        self._call("hipModuleLaunchKernel", function, *grid, block_size, 1, 1, dynamic_lds_bytes, _handle(stream), None, (arguments,))

    def _create_stream(self) -> _Stream:
        # A stream that is ordered with the default stream, as `device` promises.
        stream = _Stream(self._call("hipStreamCreateWithFlags", self._hip.hipStreamDefault)[0])
        self._streams.append(stream)
        return stream

    def _destroy_stream(self, stream: _Stream) -> None:
        self._synchronize_stream(stream)
        self._streams.remove(stream)
        self._call("hipStreamDestroy", stream.handle)

    def _foreign_stream(self, address: int) -> _Stream:
        with self._lock:
            stream = next((stream for stream in self._streams if int(stream.handle) == address), None)
            if stream is None:
                stream = _Stream(address, is_ours=False)
                self._streams.append(stream)
            stream.num_foreign += 1
            return stream

    def _release_foreign_stream(self, stream: _Stream) -> None:
        with self._lock:
            stream.num_foreign -= 1
            if stream.num_foreign or stream.is_ours:
                return
            self._streams.remove(stream)
        if stream.staging:  # its owner may have destroyed it by now: the device is waited for in its place
            self._wait("hipDeviceSynchronize", streams=[stream])

    def _synchronize_stream(self, stream: _Stream | None) -> None:
        self._wait("hipStreamSynchronize", _handle(stream), streams=[] if stream is None else [stream])

    def _create_event(self) -> Any:
        return self._call("hipEventCreate")[0]

    def _destroy_event(self, event: Any) -> None:
        self._call("hipEventDestroy", event)

    def _record_event(self, event: Any, stream: _Stream | None) -> None:
        self._call("hipEventRecord", event, _handle(stream))

    def _wait_event(self, stream: _Stream | None, event: Any) -> None:
        self._call("hipStreamWaitEvent", _handle(stream), event, 0)

    def _synchronize_event(self, event: Any) -> None:
        self._call("hipEventSynchronize", event)

    def _begin_capture(self, stream: _Stream) -> None:
        # Of this thread alone: another thread's allocation is not to spoil the capture.
        self._call("hipStreamBeginCapture", stream.handle, self._hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal)

    def _end_capture(self, stream: _Stream) -> Any:
        graph = self._call("hipStreamEndCapture", stream.handle)[0]
        try:
            return self._call("hipGraphInstantiateWithFlags", graph, 0)[0]
        finally:
            self._call("hipGraphDestroy", graph)

    def _launch_graph(self, graph: Any, stream: _Stream | None) -> None:
        self._call("hipGraphLaunch", graph, _handle(stream))

    def _destroy_graph(self, graph: Any) -> None:
        self._call("hipGraphExecDestroy", graph)

    def _elapsed_ms(self, start: Any, end: Any) -> float:
        return float(self._call("hipEventElapsedTime", start, end)[0])

    def _synchronize(self) -> None:
        self._wait("hipDeviceSynchronize", streams=list(self._streams))

    def _close(self) -> None:
        for address, _ in self._free_staging:
            self._call("hipHostFree", address)
        self._free_staging.clear()

    def _take_staging(self, nbytes: int) -> tuple[int, int]:
        """A pinned block of at least `nbytes`: the smallest free one that fits without wasting more than half, or a new one."""
        with self._lock:
            fitting = [block for block in self._free_staging if nbytes <= block[1] <= 2 * nbytes]
            if fitting:
                block = min(fitting, key=lambda block: block[1])
                self._free_staging.remove(block)
                return block
        return int(self._call("hipHostMalloc", nbytes, self._hip.hipHostMallocDefault)[0]), nbytes

    def _wait(self, name: str, *args: Any, streams: list[_Stream]) -> None:
        """Call the HIP function, which waits for these streams: the blocks of what they have copied by now are free after it."""
        with self._lock:  # of two threads that wait, one takes them
            taken = [(stream, stream.staging) for stream in streams]
            for stream in streams:
                stream.staging = []
        try:
            self._call(name, *args)
        except BaseException:
            for stream, blocks in taken:
                stream.staging += blocks
            raise
        for _, blocks in taken:
            self._free_staging += blocks


def _handle(stream: _Stream | None) -> Any:
    return None if stream is None else stream.handle


def _text(value: Any) -> str:
    """HIP's text as hip-python gives it: bytes, or what `str` understands, by release."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
