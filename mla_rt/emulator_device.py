"""The Device protocol over the emulator: the same code objects, run instruction by instruction on the CPU.

Everything happens at once: a copy, fill or launch is done when the call returns, which is one of the orders that streams allow. So calls of other
threads wait meanwhile.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .code_object import CodeObject, KernelInfo, pack_arguments
from .device import Device
from .emulator.completion import TIMINGS
from .emulator.machine import CHECKS, Descriptor, Dispatch, LaunchReport, require_choice, run
from .emulator.memory import Memory
from .emulator.observer import Observer
from .emulator.undefined_memory import UndefinedMemory
from .errors import DeviceError
from .resources import Kernel

ARCH = "gfx950"
NUM_COMPUTE_UNITS = 256  # of an MI350X or MI355X
MAX_LDS_BYTES = 160 << 10
NUM_REPORTS = 64  # launches whose report is kept


@dataclass(frozen=True)
class _Image:
    """A code object in the emulator's memory: virtual address 0 of the file lies at `base`."""

    base: int
    kernels: dict[str, tuple[KernelInfo, Descriptor]]


@dataclass(frozen=True)
class _Function:
    image: _Image
    info: KernelInfo
    descriptor: Descriptor


@dataclass
class _Mark:
    """When an event was recorded, in seconds of the host's clock."""

    seconds: float = 0.0


class EmulatorDevice(Device):
    """A gfx950 GPU emulated on the CPU.

    seed: None: all waves advance together; an int: they run in random pieces between barriers, workgroups in a random order, drawn from it.
    timing: when loads complete: "earliest" (at issue), "latest" (at the wait that covers them) or "hardware". checks: "off", or "strict": what
    hardware does not promise is a KernelFault too. num_processes: how many worker processes may share a launch without seed, checks and observers and
    with timing "earliest"; None: one for each core if the launch is large. All four may be set at any time and hold for later launches.
    progress: called as progress(done, total) during launches, None for silence; may be set at any time. observe: called with each launch, whose
    run the observers that it returns watch. reports: of the last launches, the latest last. memory: the emulator's.
    """

    kind: Literal["hip", "emulator"] = "emulator"

    def __init__(self, *, seed: int | None = None, timing: str = "earliest", checks: str = "off", num_processes: int | None = None):
        for name, value, known in (("timing", timing, TIMINGS), ("checks", checks, CHECKS)):
            require_choice(name, value, known)
        super().__init__(arch=ARCH, name=f"{ARCH} emulator", num_compute_units=NUM_COMPUTE_UNITS, max_lds_bytes=MAX_LDS_BYTES)
        self.seed, self.timing, self.checks, self.num_processes = seed, timing, checks, num_processes
        self.progress: Callable[[int, int], None] | None = None
        self.observe: Callable[[Dispatch], Sequence[Observer]] | None = None
        self.reports: deque[LaunchReport] = deque(maxlen=NUM_REPORTS)
        self.memory = Memory()
        self._lock = threading.RLock()  # around all that touches `memory`, which is for one thread at a time
        self._recorded_stream: object = None
        self._recorded: list[Callable[[], None]] = []

    def holds(self, address: int, nbytes: int) -> bool:
        with self._lock:
            return self.memory.holds(address, nbytes)

    def _allocate(self, nbytes: int, name: str = "") -> int:
        with self._lock:
            if self.checks == "strict" and self.memory.undefined is None:
                self.memory.undefined = UndefinedMemory()
            try:
                return self.memory.allocate(nbytes, name)
            except MemoryError as error:
                raise DeviceError(f"allocate({nbytes}): {error}") from None

    def _free(self, address: int) -> None:
        with self._lock:
            self.memory.free(address)

    def _upload(self, address: int, array: NDArray[Any], stream: None) -> None:
        with self._lock:
            self.memory.bytes_at(address, array.nbytes)[:] = array.reshape(-1).view(np.uint8)
            self.memory.define(address, array.nbytes)

    def _download(self, array: NDArray[Any], address: int, stream: None) -> None:
        with self._lock:
            array.reshape(-1).view(np.uint8)[:] = self.memory.bytes_at(address, array.nbytes)

    def _fill(self, address: int, byte: int, nbytes: int, stream: object) -> None:
        if stream is not None and stream is self._recorded_stream:
            self._recorded.append(lambda: self._fill(address, byte, nbytes, None))
            return
        with self._lock:
            self.memory.bytes_at(address, nbytes)[:] = byte
            self.memory.define(address, nbytes)

    def _load(self, code_object: CodeObject) -> _Image:
        end = max(segment.vaddr + segment.memsz for segment in code_object.segments)
        with self._lock:
            base = self._allocate(end, "code object")
            for segment in code_object.segments:
                loaded = self.memory.bytes_at(base + segment.vaddr, segment.memsz)
                loaded[: len(segment.data)] = np.frombuffer(segment.data, np.uint8)
                loaded[len(segment.data) :] = 0
            self.memory.define(base, end)
            for vaddr, addend in code_object.relocations:
                self.memory.bytes_at(base + vaddr, 8).view(np.uint64)[0] = base + addend
        return _Image(base, {name: (info, Descriptor.parse(info.descriptor)) for name, info in code_object.kernels.items()})

    def _unload(self, module: _Image) -> None:
        self._free(module.base)

    def _function(self, module: _Image, name: str) -> _Function:
        return _Function(module, *module.kernels[name])

    def _launch(
        self, function: _Function, grid: tuple[int, int, int], block_size: int, dynamic_lds_bytes: int, stream: object, arguments: ctypes.Structure
    ) -> None:
        if stream is not None and stream is self._recorded_stream:
            taken = bytes(arguments)
            self._recorded.append(lambda: self._run(function, grid, (block_size, 1, 1), dynamic_lds_bytes, taken))
        else:
            self._run(function, grid, (block_size, 1, 1), dynamic_lds_bytes, bytes(arguments))

    def launch_block(
        self, kernel: Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], /, *, dynamic_lds_bytes: int = 0, **arguments: Any
    ) -> None:
        """`launch` with a block of any shape in place of the one that the code object states."""
        self._run(kernel._function, grid, block, dynamic_lds_bytes, bytes(pack_arguments(kernel.info, arguments)))

    def _run(self, function: _Function, grid: tuple[int, int, int], block: tuple[int, int, int], dynamic_lds_bytes: int, arguments: bytes) -> None:
        with self._lock:
            self._run_alone(function, grid, block, dynamic_lds_bytes, arguments)

    def _run_alone(
        self, function: _Function, grid: tuple[int, int, int], block: tuple[int, int, int], dynamic_lds_bytes: int, arguments: bytes
    ) -> None:
        if self.checks != "strict":
            self.memory.undefined = None  # nobody would say what this launch stores
        kernarg = np.frombuffer(arguments, np.uint8)
        # A kernel without parameters still gets a pointer, and may load nothing through it.
        address = self._allocate(kernarg.nbytes, "kernarg")
        try:
            self.memory.bytes_at(address, kernarg.nbytes)[:] = kernarg
            self.memory.define(address, kernarg.nbytes)
            dispatch = Dispatch(
                kernel=function.info.name,
                entry=function.image.base + function.info.entry,
                image_base=function.image.base,
                descriptor=function.descriptor,
                grid=grid,
                block=block,
                kernarg=address,
                dynamic_lds_bytes=dynamic_lds_bytes,
            )
            observers = () if self.observe is None else self.observe(dispatch)
            report = run(
                dispatch,
                self.memory,
                seed=self.seed,
                timing=self.timing,
                checks=self.checks,
                progress=self.progress,
                observers=observers,
                num_processes=self.num_processes,
            )
            self.reports.append(report)
        finally:
            self.memory.free(address)

    def _create_stream(self) -> object:
        return object()

    def _destroy_stream(self, stream: object) -> None:
        pass

    def _foreign_stream(self, address: int) -> object:
        raise ValueError(f"stream is {address:#x}; on the emulator there are no streams of other libraries, only the default one: None, 0 or 1")

    def _release_foreign_stream(self, stream: object) -> None:
        pass

    def _synchronize_stream(self, stream: object) -> None:
        pass

    def _create_event(self) -> _Mark:
        return _Mark()

    def _destroy_event(self, event: _Mark) -> None:
        pass

    def _record_event(self, event: _Mark, stream: object) -> None:
        event.seconds = time.perf_counter()

    def _wait_event(self, stream: object, event: _Mark) -> None:
        pass

    def _synchronize_event(self, event: _Mark) -> None:
        pass

    def _begin_capture(self, stream: object) -> None:
        self._recorded_stream, self._recorded = stream, []

    def _end_capture(self, stream: object) -> list[Callable[[], None]]:
        self._recorded_stream = None
        return self._recorded

    def _launch_graph(self, graph: list[Callable[[], None]], stream: object) -> None:
        for work in graph:
            work()

    def _destroy_graph(self, graph: list[Callable[[], None]]) -> None:
        pass

    def _elapsed_ms(self, start: _Mark, end: _Mark) -> float:
        return (end.seconds - start.seconds) * 1e3

    def _synchronize(self) -> None:
        pass

    def _close(self) -> None:
        with self._lock:
            self.memory.close()
