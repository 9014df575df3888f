"""Builds the stand-in HIP runtime (hip_shim.c, queues.h), loads it where hip-python finds it, and serves its callbacks with the emulator.

hip-python opens `libamdhip64.so` at its first call and gets a library of that SONAME which the process has loaded already. So real hip-python
and the real `mla_rt.hip_device` run on a machine with no GPU and no ROCm.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mla_rt.code_object import CodeObject
from mla_rt.emulator_device import EmulatorDevice
from mla_rt.errors import DeviceError

SOURCE = Path(__file__).with_name("hip_shim.c")
BUILD = Path(__file__).resolve().parents[2] / "build" / "hip_shim"
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NO_BINARY_FOR_GPU, INVALID_HANDLE, NOT_FOUND, LAUNCH_FAILURE = 0, 1, 2, 209, 400, 500, 719

u32, u64, size_t, void_p, char_p = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
CALLBACKS = {
    "allocate": (size_t, ctypes.POINTER(u64)),
    "release": (u64,),
    "load": (void_p, size_t, ctypes.POINTER(u64), ctypes.POINTER(size_t)),
    "unload": (u64,),
    "function": (u64, char_p, ctypes.POINTER(u64), ctypes.POINTER(u32), ctypes.POINTER(u32)),
    "global_": (u64, char_p, ctypes.POINTER(u64), ctypes.POINTER(size_t)),
    "launch": (u64, u32, u32, u32, u32, u32, void_p, size_t),
}
CALLBACK_TYPES = {name: ctypes.CFUNCTYPE(ctypes.c_int, *arguments) for name, arguments in CALLBACKS.items()}


class Backend(ctypes.Structure):
    """`struct backend` of queues.h."""

    _fields_ = [
        *[("name", char_p), ("arch", char_p), ("compute_units", ctypes.c_int), ("lds_bytes", ctypes.c_int)],
        *CALLBACK_TYPES.items(),
    ]


def build() -> Path:
    """The library, compiled if these sources were not yet compiled here: build/hip_shim/<digest>/lib/libamdhip64.so."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]")))).hexdigest()[:16]
    library = BUILD / digest / "lib" / "libamdhip64.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-shared", f"-Wl,-soname,{library.name}"]
            # zig cannot do without a cache directory, and its own choice needs a home directory.
            environment = {"ZIG_GLOBAL_CACHE_DIR": str(BUILD / "zig_cache")} | os.environ
            subprocess.run([sys.executable, "-m", "ziglang", "cc", *flags, SOURCE, "-o", made], check=True, env=environment)
            made.replace(library)  # whole, or not at all: other test processes may be looking
    return library


class Shim:
    """The loaded runtime. emulator: the device that runs its launches; fault: the exception that the last failing callback met."""

    def __init__(self) -> None:
        self.path = build()
        self._library = ctypes.CDLL(str(self.path), mode=ctypes.RTLD_GLOBAL)
        self._library.shim_count.restype = ctypes.c_ulong
        self._library.shim_named.restype = ctypes.c_char_p
        self.emulator = EmulatorDevice()
        self.fault: BaseException | None = None
        self._modules: dict[int, tuple[CodeObject, Any]] = {}
        self._functions: list[Any] = []  # by handle
        # The structure keeps the callbacks alive, and this object the structure.
        callbacks = {name: CALLBACK_TYPES[name](self._guarded(getattr(self, f"_{name}"))) for name in CALLBACKS}
        arch = f"{self.emulator.arch}:sramecc+:xnack-"  # as a GPU names itself
        self._backend = Backend(b"shim over the emulator", arch.encode(), self.emulator.num_compute_units, self.emulator.max_lds_bytes, **callbacks)
        self._library.shim_set_backend(ctypes.byref(self._backend))

    @contextmanager
    def one_gpu(self) -> Iterator[None]:
        """While inside, HIP shows one GPU, else none; a device opened inside stays usable outside.

        RuntimeError if hip-python has loaded another HIP runtime than this one.
        """
        from hip import hip

        before = self.count("hipGetDeviceCount")
        rocm_path = os.environ.get("ROCM_PATH")
        os.environ["ROCM_PATH"] = str(self.path.parent.parent)  # hip-python looks there first: an installed ROCm must not come before us
        try:
            hip.hipGetDeviceCount()
        finally:
            if rocm_path is None:
                del os.environ["ROCM_PATH"]
            else:
                os.environ["ROCM_PATH"] = rocm_path
        if self.count("hipGetDeviceCount") != before + 1:
            raise RuntimeError("hip-python uses another HIP runtime than the tests' stand-in")
        self._library.shim_set_device_count(1)
        try:
            yield
        finally:
            self._library.shim_set_device_count(0)

    def count(self, name: str) -> int:
        """How often the HIP function was called."""
        return int(self._library.shim_count(name.encode()))

    @contextmanager
    def streams_named(self) -> Iterator[list[tuple[str, int]]]:
        """When left, the list holds the calls made inside that are given a stream: the HIP function's name and the stream, 0 for the default one."""
        calls: list[tuple[str, int]] = []
        stream, number = ctypes.c_void_p(), self._library.shim_num_named()
        yield calls
        while name := self._library.shim_named(number, ctypes.byref(stream)):
            calls.append((name.decode(), stream.value or 0))
            number += 1

    def fail_next(self, name: str, error: int) -> None:
        """Let the next call of the HIP function do nothing and return this error code."""
        self._library.shim_fail_next(name.encode(), error)

    @contextmanager
    def others_first(self) -> Iterator[None]:
        """While inside, what a stream waits for runs ahead of that stream's own earlier work: see run_until in queues.h."""
        self._library.shim_set_others_first(1)
        try:
            yield
        finally:
            self._library.shim_set_others_first(0)

    def pending(self) -> int:
        """How many operations of all streams have not run yet."""
        return int(self._library.shim_pending())

    def reset(self) -> None:
        """Forget queued work, failures and injected errors."""
        self._library.shim_reset()
        self.fault = None

    def _guarded(self, callback: Callable[..., int]) -> Callable[..., int]:
        def guarded(*arguments: Any) -> int:
            try:
                return callback(*arguments)
            except BaseException as error:  # no exception can pass through C
                self.fault = error
                traceback.print_exc()
                return LAUNCH_FAILURE

        return guarded

    def _allocate(self, nbytes: int, address: Any) -> int:
        try:
            address[0] = self.emulator._allocate(nbytes)
        except DeviceError:
            return OUT_OF_MEMORY
        return SUCCESS

    def _release(self, address: int) -> int:
        self.emulator._free(address)
        return SUCCESS

    def _load(self, image: int, nbytes: int, handle: Any, loaded_bytes: Any) -> int:
        try:
            code_object = CodeObject.parse(ctypes.string_at(image, nbytes))
        except ValueError:
            return INVALID_VALUE
        if code_object.arch != self.emulator.arch:
            return NO_BINARY_FOR_GPU
        loaded = self.emulator._load(code_object)
        handle[0], loaded_bytes[0] = loaded.base, max(segment.vaddr + segment.memsz for segment in code_object.segments)
        self._modules[loaded.base] = (code_object, loaded)
        return SUCCESS

    def _unload(self, handle: int) -> int:
        self.emulator._unload(self._modules.pop(handle)[1])
        return SUCCESS

    def _function(self, module: int, name: bytes, handle: Any, kernarg_bytes: Any, block_size: Any) -> int:
        if module not in self._modules:
            return INVALID_HANDLE
        code_object, image = self._modules[module]
        info = code_object.kernels.get(name.decode())
        if info is None:
            return NOT_FOUND
        self._functions.append(self.emulator._function(image, info.name))
        handle[0], kernarg_bytes[0], block_size[0] = len(self._functions) - 1, info.kernarg_bytes, info.block_size
        return SUCCESS

    def _global_(self, module: int, name: bytes, address: Any, nbytes: Any) -> int:
        if module not in self._modules:
            return INVALID_HANDLE
        code_object, image = self._modules[module]
        if name.decode() not in code_object.symbols:
            return NOT_FOUND
        vaddr, nbytes[0] = code_object.symbols[name.decode()]
        address[0] = image.base + vaddr
        return SUCCESS

    def _launch(self, function: int, x: int, y: int, z: int, block: int, lds_bytes: int, kernarg: int, nbytes: int) -> int:
        arguments = (ctypes.c_uint8 * nbytes).from_address(kernarg)
        self.emulator._launch(self._functions[function], (x, y, z), block, lds_bytes, None, arguments)
        return SUCCESS
