"""Another library's GPU arrays, as CuPy has them: HIP memory, a stream of its own apart from the default stream, and both protocols."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from mla_rt import dlpack


class Library:
    """stream: the address of the one it works on; asked: the streams that consumers of its DLPack arrays named. A context manager."""

    def __init__(self) -> None:
        from hip import hip

        self.hip = hip
        self.stream = self.call("hipStreamCreateWithFlags", hip.hipStreamNonBlocking)
        self.asked: list[Any] = []
        self._memory: list[int] = []

    def call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self.hip, name)(*arguments)
        assert error == self.hip.hipError_t.hipSuccess, (name, error)
        return results[0] if results else None

    def array(self, values: np.ndarray) -> Array:
        """A device array whose values its stream is still to write: until then it is 0xFF."""
        kinds = self.hip.hipMemcpyKind
        source, target = (int(self.call("hipMalloc", max(values.nbytes, 1))) for _ in range(2))
        self._memory += [source, target]
        self.call("hipMemcpy", source, np.ascontiguousarray(values), values.nbytes, kinds.hipMemcpyHostToDevice)
        self.call("hipMemsetAsync", target, 0xFF, values.nbytes, None)
        self.call("hipDeviceSynchronize")
        self.call("hipMemcpyAsync", target, source, values.nbytes, kinds.hipMemcpyDeviceToDevice, self.stream)
        return Array(self, target, values.shape, values.dtype)

    def read(self, array: Any) -> np.ndarray:
        """A packed array of any library, copied to the host on this library's stream, which it waits for and for nothing else."""
        values = np.empty(array.shape, array.dtype)
        self.call("hipMemcpyAsync", values, array.address, values.nbytes, self.hip.hipMemcpyKind.hipMemcpyDeviceToHost, self.stream)
        self.call("hipStreamSynchronize", self.stream)
        return values

    def order(self, first: int, second: int) -> None:
        """Hold back one stream until what is queued on another is done."""
        event = self.call("hipEventCreate")
        self.call("hipEventRecord", event, first or None)
        self.call("hipStreamWaitEvent", second or None, event, 0)
        self.call("hipEventDestroy", event)

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *error: Any) -> None:
        self.call("hipDeviceSynchronize")
        self.call("hipStreamDestroy", self.stream)
        for address in self._memory:
            self.call("hipFree", address)


class Array:
    """Has DLPack and nothing else, like CuPy's on ROCm; `interface()` is the same array with __cuda_array_interface__."""

    def __init__(self, library: Library, address: int, shape: tuple[int, ...], dtype: np.dtype):
        self.library, self.address, self.shape, self.dtype = library, address, shape, dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.ROCM, 0

    def __dlpack__(self, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
        library = self.library
        library.asked.append(stream)
        if stream != -1:
            library.order(int(library.stream), stream or 0)
        code_and_bits = dlpack._TYPES[self.dtype]
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        tensor = dlpack._Tensor(self.address, dlpack.ROCM, 0, len(self.shape), *code_and_bits, 1, shape, None, 0)
        self.managed = dlpack._Managed(tensor, None)  # no deleter: the library frees its memory at its end
        self._kept = shape
        return _new_capsule(ctypes.addressof(self.managed), b"dltensor", None)

    def interface(self) -> Any:
        values = {"shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "version": 3, "stream": int(self.library.stream)}
        return type("Interface", (), {"__cuda_array_interface__": values})()


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
