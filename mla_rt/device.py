"""Device, which makes what running kernels takes (resources.py); and `open_device`.

Every check lives here and in resources.py, once. A backend (`hip_device`, `emulator_device`) subclasses Device and fills in the few `_…`
operations on raw addresses and handles, so that a mistake in an argument is found alike on a GPU and on the emulator.

Order. Work on one stream runs in the order given. A call without `stream` uses the device's default stream, which waits for all work given
before on any stream of ours and holds back all work given later. Two other streams are ordered only by events.

Threads. A device and what it made may be used from several threads: each call is whole, and work on one stream runs in the order in which the calls
were made. A PreparedLaunch is for one thread at a time, and so is closing.
"""

from __future__ import annotations

import numbers
import operator
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import NDArray

from .code_object import CodeObject, KernelInfo, code_object_path, pack_arguments, packaged_archs
from .errors import DeviceError, UnsupportedArch
from .resources import Buffer, Event, ForeignStream, Kernel, Module, PreparedLaunch, Resource, Stream, require_ndarray, require_same_device

if TYPE_CHECKING:
    from .graph import Graph

Grid = int | tuple[int, ...]
_DEFAULT_STREAMS = (0, 1)  # HIP's number, and that of __cuda_stream__ and __cuda_array_interface__
MAX_WORK_ITEMS = 1 << 32  # HIP takes fewer than this many work-items in each dimension of a grid


class Device(ABC):
    """A GPU, or the emulator of one. Made by `open_device`; a context manager that closes it.

    kind: "hip" or "emulator"; arch: "gfx950", …; name: for people; reason: why `open_device` took it; num_compute_units: how many workgroups
    can run side by side at one a compute unit; max_lds_bytes: the most LDS that a workgroup may have; closed: whether it was closed.
    """

    kind: Literal["hip", "emulator"]

    def __init__(self, *, arch: str, name: str, num_compute_units: int, max_lds_bytes: int):
        self.arch, self.name = arch, name
        self.num_compute_units, self.max_lds_bytes = num_compute_units, max_lds_bytes
        self.reason = "asked for"
        self.closed = False
        self._ended = "closed"  # what was done to it, for messages, once `closed` is set
        self._closing = threading.Lock()
        # Every open resource: they live as long as the device, and the device releases at its end what its user did not.
        self._resources: dict[int, Resource] = {}
        self._packaged: dict[str, Module] = {}
        self._capture: tuple[Stream, Graph] | None = None
        _at_fork.opened(self)

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes` bytes (0 is allowed), 256-byte aligned, with undefined contents. DeviceError if there is no room."""
        self._require_open()
        self._require_no_capture("allocate")
        if nbytes < 0:
            raise ValueError(f"allocate({nbytes}): a size is not negative")
        return Buffer(self, self._allocate(nbytes) if nbytes else 0, nbytes)

    def to_device(self, array: NDArray[Any]) -> Buffer:
        """A new buffer that holds the array's elements in C order."""
        require_ndarray(array)
        buffer = self.allocate(array.nbytes)
        try:
            buffer.upload(array)
        except BaseException:
            buffer.free()
            raise
        return buffer

    def load(self, code_object: str | Path | bytes) -> Module:
        """Load a code object, given as a path or as its bytes. UnsupportedArch, naming both, if it is for another arch; ValueError if it is none."""
        self._require_open()
        self._require_no_capture("load")
        parsed = CodeObject.parse(code_object) if isinstance(code_object, bytes) else CodeObject.load(code_object)
        if parsed.arch != self.arch:
            what = "the code object" if isinstance(code_object, bytes) else str(code_object)
            raise UnsupportedArch(f"{what} is for {parsed.arch}, this device ({self.name}) is {self.arch}")
        return Module(self, self._load(parsed), parsed)

    def packaged(self, stem: str) -> Module:
        """The package's own code object of this name (`mla_decode`, …) for this arch, loaded at the first call and kept until the device is closed.

        FileNotFoundError if the package has none.
        """
        module = self._packaged.get(stem)
        if module is None or not module._open:
            module = self._packaged[stem] = self.load(code_object_path(stem, self.arch))
        return module

    def stream(self) -> Stream:
        """A new stream."""
        self._require_open()
        return Stream(self, self._create_stream())

    def stream_at(self, stream: Any) -> Stream:
        """Another library's stream as one of ours: to be given wherever a Stream can, to be waited for, captured, and ordered by events.

        stream  the address of its hipStream_t, or an object with `__cuda_stream__`; None, 0 and 1 name the default stream

        It stays the other library's: closing the Stream or the device does not destroy it, and until then it has to be there. If it was made as
        non-blocking, calls on the default stream, those without `stream`, are not ordered with it.

        TypeError for another type. ValueError for what is no address; for 2, the default stream of each thread, which would be another one in every
        thread; and on the emulator, where no other library has streams, for all but the default stream.
        """
        self._require_open()
        address = _address_of(stream)
        return ForeignStream(self, None if address in _DEFAULT_STREAMS else self._foreign_stream(address))

    def event(self) -> Event:
        """A new event."""
        self._require_open()
        return Event(self, self._create_event())

    def launch(self, kernel: Kernel, grid: Grid, /, *, stream: Stream | None = None, dynamic_lds_bytes: int = 0, **arguments: Any) -> None:
        """Queue the kernel on the stream over `grid` workgroups (an int, or up to three), with the block size that its code object states.

        arguments: by the names in the kernel's signature; Buffers of this device or None for pointers, numpy scalars for values (see
        `code_object.pack_arguments`: TypeError). ValueError for an impossible grid, too much LDS, or a kernel or buffer of another device.
        DeviceError if HIP refuses the launch. Faults found while it runs: at the launch on the emulator (KernelFault), at a wait on HIP.
        """
        self.prepare(kernel, grid, dynamic_lds_bytes=dynamic_lds_bytes, **arguments).launch(stream)

    def prepare(self, kernel: Kernel, grid: Grid, /, *, dynamic_lds_bytes: int = 0, **arguments: Any) -> PreparedLaunch:
        """What `launch` does, but for the launch: the arguments are checked (with the same errors) and packed once for many launches."""
        self._require_open()
        info = kernel.info
        if kernel.module.device is not self:
            raise ValueError(f"{info.name} was loaded on another device")
        kernel.module.handle  # noqa: B018 - raises if the module was closed
        groups = _grid3(info, grid)
        if dynamic_lds_bytes < 0 or info.lds_bytes + dynamic_lds_bytes > self.max_lds_bytes:
            raise ValueError(f"{info.name}: {info.lds_bytes} + {dynamic_lds_bytes} bytes of LDS, at most {self.max_lds_bytes} are there")
        for name, value in arguments.items():
            if isinstance(value, Buffer) and value.device is not self:
                raise ValueError(f"{info.name}: argument {name} is a buffer of another device")
        buffers = tuple(value for value in arguments.values() if isinstance(value, Buffer))
        return PreparedLaunch(kernel, groups, dynamic_lds_bytes, pack_arguments(info, arguments), buffers)

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[Graph]:
        """Within it, launches and fills given to the stream are not queued but become a graph, which can be launched when the context is left.

        One capture at a time; until it ends nothing else may be done on the device but launches on other streams: what allocates, frees, copies,
        waits or uses the default stream raises DeviceError, and so does `Graph.launch`. If the context is left by an exception there is no graph.
        The arguments are those of the capture: what changes has to be in memory. The graph keeps the buffers and modules that launches were given;
        what a launch reaches by other means is to be named to `Graph.keep`, as `Plan.run` does.
        """
        from .graph import capture

        with capture(self, stream) as graph:
            yield graph

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are the device's: on the emulator, inside one live allocation; of a GPU's memory the caller has to know."""
        return True

    def stream_address(self, stream: Stream | None) -> int:
        """The stream as HIP knows it, for other libraries; 0: the default stream, and every stream of the emulator."""
        return 0

    def follow(self, stream_address: int, stream: Stream | None = None) -> None:
        """Hold back work given to the stream from now on until what another library has queued on its stream (0: the default one) is done.

        On the emulator, whose work is done when a call returns, nothing; so with `precede`.
        """
        return

    def precede(self, stream_address: int) -> None:
        """Hold back what another library queues on its stream (0: the default one) from now on until all work given so far to this device is done."""
        return

    def synchronize(self) -> None:
        """Wait for all work of the device. DeviceError if any of it failed."""
        self._require_open()
        self._require_no_capture("synchronize")
        self._synchronize()

    def close(self) -> None:
        """Release everything that is still open on the device, then the device. Closing again does nothing. DeviceError if work failed.

        No other thread may be in a call of the device by then.
        """
        if self.closed:  # asked without the lock too: in a forked child its holder may be gone
            return
        with self._closing:
            if self.closed:
                return
            errors = []
            # Graphs first: they hold the others.
            for resource in sorted(self._resources.values(), key=lambda resource: type(resource).__name__ != "Graph"):
                try:
                    resource.close()
                except DeviceError as error:  # the rest has to be released all the same
                    errors.append(error)
            self.closed = True
            self._close()
        if errors:
            raise errors[0]

    def __enter__(self) -> Device:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.kind} device {self.name} ({self.arch}){', closed' if self.closed else ''}>"

    def _require_no_capture(self, what: str) -> None:
        if self._capture is not None:
            raise DeviceError(f"{what} during a capture, which takes launches and fills on its stream alone")

    def _captured(self, stream: Stream | None, *uses: Any) -> None:
        """Work is given to the stream during a capture: its graph keeps what the work uses, if it is its stream."""
        if stream is None or stream.handle is None:
            self._require_no_capture("work on the default stream")
        elif self._capture is not None and self._captures(stream):
            self._capture[1].keep(*uses)

    def _captures(self, stream: Stream | None) -> bool:
        """Whether it is the stream of the capture that is under way. Two Streams that were made of one foreign stream have one handle."""
        return self._capture is not None and stream is not None and self._capture[0]._handle is stream._handle

    def _require_open(self) -> None:
        if self.closed:
            raise DeviceError(f"device used after it was {self._ended}")

    def _stream_handle(self, stream: Stream | None) -> Any:
        self._require_open()
        if stream is None:
            return None
        require_same_device(self, stream)
        return stream.handle

    # What a backend provides. Addresses are device addresses; a stream is a handle that _create_stream returned, or None for the default stream.
    @abstractmethod
    def _allocate(self, nbytes: int) -> int: ...
    @abstractmethod
    def _free(self, address: int) -> None: ...
    @abstractmethod
    def _upload(self, address: int, array: NDArray[Any], stream: Any) -> None:
        """Copy a C-contiguous array in. The array's memory may be reused after the call; with stream None the copy is done by then."""

    @abstractmethod
    def _download(self, array: NDArray[Any], address: int, stream: Any) -> None:
        """Fill a C-contiguous array from `address` once the stream's work is done (None: all work)."""

    @abstractmethod
    def _fill(self, address: int, byte: int, nbytes: int, stream: Any) -> None: ...
    @abstractmethod
    def _load(self, code_object: CodeObject) -> Any: ...
    @abstractmethod
    def _unload(self, module: Any) -> None: ...
    @abstractmethod
    def _function(self, module: Any, name: str) -> Any: ...
    @abstractmethod
    def _launch(self, function: Any, grid: tuple[int, int, int], block_size: int, dynamic_lds_bytes: int, stream: Any, arguments: Any) -> None:
        """Queue a launch; `arguments` is the packed ctypes.Structure, whose bytes are taken now."""

    @abstractmethod
    def _create_stream(self) -> Any: ...
    @abstractmethod
    def _destroy_stream(self, stream: Any) -> None: ...
    @abstractmethod
    def _foreign_stream(self, address: int) -> Any:
        """The handle of another library's stream: one for one address, whoever made it. ValueError if there are none."""

    @abstractmethod
    def _release_foreign_stream(self, stream: Any) -> None:
        """Once for each `_foreign_stream`."""

    @abstractmethod
    def _synchronize_stream(self, stream: Any) -> None: ...
    @abstractmethod
    def _create_event(self) -> Any: ...
    @abstractmethod
    def _destroy_event(self, event: Any) -> None: ...
    @abstractmethod
    def _record_event(self, event: Any, stream: Any) -> None: ...
    @abstractmethod
    def _wait_event(self, stream: Any, event: Any) -> None: ...
    @abstractmethod
    def _synchronize_event(self, event: Any) -> None: ...
    @abstractmethod
    def _begin_capture(self, stream: Any) -> None: ...
    @abstractmethod
    def _end_capture(self, stream: Any) -> Any:
        """The handle of what was captured, ready to be launched."""

    @abstractmethod
    def _launch_graph(self, graph: Any, stream: Any) -> None: ...
    @abstractmethod
    def _destroy_graph(self, graph: Any) -> None: ...
    @abstractmethod
    def _elapsed_ms(self, start: Any, end: Any) -> float: ...
    @abstractmethod
    def _synchronize(self) -> None: ...
    @abstractmethod
    def _close(self) -> None: ...


def open_device(
    kind: Literal["auto", "hip", "emulator"] = "auto",
    *,
    arch: str | None = None,
    seed: int | None = None,
    timing: Literal["earliest", "latest", "hardware"] = "earliest",
    checks: Literal["off", "strict"] = "off",
) -> Device:
    """Open the first GPU ("hip"), the emulator ("emulator"), or ("auto") a GPU if one answers for which there are code objects, else the emulator.

    arch: which architecture it must be (None: any for "hip"; gfx950 is all that the emulator knows). `Device.reason` says why that one was taken.

    Of the emulator only: seed: given, waves run in random pieces between barriers and workgroups in a random order, which the seed draws.
    timing: when loads complete: at issue ("earliest"), at the wait that covers them ("latest"), or in between as on a GPU ("hardware").
    checks: "strict": what hardware does not promise is a KernelFault too, such as a race or a missing wait.

    Forks. A device belongs to the process that opened it. In a forked child it counts as closed, for good, and what the parent has on it is left
    alone; the child may open devices of its own. But HIP does not survive a fork: in the child of a process that has opened a GPU, even if it has
    closed it again, "hip" and "auto" raise DeviceError. Processes started by "spawn" open what they like.

    The interpreter's exit waits for nothing: work that is still queued then may or may not run. Close the device, or synchronize, to have it done.

    DeviceError if "hip" cannot be opened, with what to install; UnsupportedArch if the device is not of `arch`; ValueError for another kind, timing
    or checks, a negative seed, and for an option of the emulator with another kind; TypeError for a kind, arch or seed of another type.
    """
    if not isinstance(kind, str):
        raise TypeError(f"device kind is {kind!r}; it is 'auto', 'hip' or 'emulator'")
    if not isinstance(arch, str | None):
        raise TypeError(f"arch is {arch!r}; a str is needed, or None")
    if kind not in ("auto", "hip", "emulator"):
        raise ValueError(f"device kind {kind!r}: it is 'auto', 'hip' or 'emulator'")
    if seed is not None:
        _check_seed(seed)
    if kind == "emulator":
        return _open_emulator(arch, seed, timing, checks)
    _at_fork.require_no_lost_hip()
    for name, value, plain in (("seed", seed, None), ("timing", timing, "earliest"), ("checks", checks, "off")):
        if value != plain:
            raise ValueError(f"{name} is an option of the emulator: open_device('emulator', {name}=…)")
    if kind == "hip":
        return _open_hip(arch)
    wanted = [arch] if arch else packaged_archs() or ["gfx950"]
    try:
        device = _open_hip(None)
    except DeviceError as error:
        why = f"no GPU: {error.brief}"
    else:
        if device.arch in wanted:
            device.reason = f"a {device.arch} GPU answers"
            return device
        why = f"no {' or '.join(wanted)} GPU: {device.name} is {device.arch}"
        device.close()
    emulator = _open_emulator(arch)
    emulator.reason = why
    return emulator


def _address_of(stream: Any) -> int:
    """Of another library's stream, as `Device.stream_at` takes it."""
    if hasattr(stream, "__cuda_stream__"):
        version, stream = stream.__cuda_stream__()
        if version != 0:
            raise ValueError(f"__cuda_stream__ is of version {version}; 0 is understood")
    if stream is None:
        return 0
    if isinstance(stream, bool) or not isinstance(stream, numbers.Integral):
        raise TypeError(f"stream is {stream!r}; an address (an int), an object with __cuda_stream__ or None is needed")
    address = int(stream)
    if address == 2:
        raise ValueError("stream is 2, the default stream of each thread, which would be another one in every thread: give a stream's address")
    if not 0 <= address < 1 << 64:
        raise ValueError(f"stream is {address}, which is no address: 0 to 2**64 - 1")
    return address


def _check_seed(seed: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed is {seed!r}; an integer is needed, or None")
    if seed < 0:
        raise ValueError(f"seed is {seed}; 0 or more is needed")


class _AtFork:
    """What a forked child must not touch: the devices that its parent had opened, and HIP if one of them was a GPU."""

    def __init__(self) -> None:
        self._devices: weakref.WeakSet[Device] = weakref.WeakSet()
        self._hip_in_use = self._hip_lost = False

    def opened(self, device: Device) -> None:
        self._devices.add(device)
        self._hip_in_use |= device.kind == "hip"

    def in_child(self) -> None:
        self._hip_lost |= self._hip_in_use
        for device in self._devices:
            if not device.closed:
                device.closed, device._ended = True, "left to the parent process by a fork; open another one here"

    def require_no_lost_hip(self) -> None:
        if self._hip_lost:
            brief = "HIP was in use when this process was forked"
            raise DeviceError(f"{brief}, which it does not survive: open GPUs in the child alone, or start it by 'spawn'", brief=brief)


_at_fork = _AtFork()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_at_fork.in_child)


# A backend is imported only when it is opened: importing this package must work, and be quick, where there is no ROCm.
def _open_hip(arch: str | None) -> Device:
    from .hip_device import HipDevice

    device = HipDevice()
    if arch is not None and device.arch != arch:
        device.close()
        raise UnsupportedArch(f"the GPU {device.name} is {device.arch}, asked for was {arch}")
    return device


def _open_emulator(arch: str | None, seed: int | None = None, timing: str = "earliest", checks: str = "off") -> Device:
    from .emulator_device import ARCH, EmulatorDevice

    if arch not in (None, ARCH):
        raise UnsupportedArch(f"the emulator is of {ARCH}, asked for was {arch}")
    return EmulatorDevice(seed=seed, timing=timing, checks=checks)


def _grid3(info: KernelInfo, grid: Grid) -> tuple[int, int, int]:
    dims = [operator.index(dim) for dim in (grid if isinstance(grid, tuple) else (grid,))]
    if not 1 <= len(dims) <= 3 or min(dims) < 1:
        raise ValueError(f"{info.name}: grid {grid}: one to three counts of workgroups, each at least 1")
    x, y, z = (dims + [1, 1])[:3]
    if x * info.block_size >= MAX_WORK_ITEMS or max(y, z) >= MAX_WORK_ITEMS:
        raise ValueError(f"{info.name}: grid {grid} x block {info.block_size} work-items: each dimension must stay below 2**32")
    return x, y, z
