"""DLPack's structures and capsules, by ctypes: the protocol of arrays between libraries (dmlc.github.io/dlpack, versions 0 and 1)."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

CPU, ROCM = 1, 10  # of DLDeviceType
_DEVICE_NAMES = {
    **{CPU: "kDLCPU", 2: "kDLCUDA", 3: "kDLCUDAHost", 4: "kDLOpenCL", 7: "kDLVulkan", 8: "kDLMetal", 9: "kDLVPI", ROCM: "kDLROCM"},
    **{11: "kDLROCMHost", 12: "kDLExtDev", 13: "kDLCUDAManaged", 14: "kDLOneAPI", 15: "kDLWebGPU", 16: "kDLHexagon", 17: "kDLMAIA"},
}
READ_ONLY, IS_COPIED = 1, 2  # flags of a versioned tensor

_NUMPY_IS_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # else its arrays are exported as before DLPack 1.0, to every consumer

_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")  # codes from 7 on, since DLPack 1.1
_TYPES = {  # (DLDataTypeCode, bits)
    np.dtype(np.bool_): (_BOOL, 8),
    **{np.dtype(f"{kind}{bits // 8}"): (code, bits) for kind, code in (("i", _INT), ("u", _UINT)) for bits in (8, 16, 32, 64)},
    **{np.dtype(f"f{bits // 8}"): (_FLOAT, bits) for bits in (16, 32, 64)},
    np.dtype(ml_dtypes.bfloat16): (_BFLOAT, 16),
    **{np.dtype(getattr(ml_dtypes, f"float8_{name}")): (7 + position, 8) for position, name in enumerate(_FLOAT8)},
}
_DTYPES = {code_and_bits: dtype for dtype, code_and_bits in _TYPES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.restype, _rename.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)

# What a capsule is called before it is used, and after; it keeps the pointer, not the text.
_KINDS: dict[bytes, tuple[bytes, Any]] = {
    b"dltensor": (b"used_dltensor", _Managed),
    b"dltensor_versioned": (b"used_dltensor_versioned", _Versioned),
}


class View:
    """A tensor taken from a capsule: address, shape, strides (in elements), dtype, readonly, place. It gives the tensor back when it is dropped."""

    def __init__(self, managed: Any, flags: int):
        # First: what follows may raise, and then the tensor is given back.
        self._deleter, self._managed = managed.deleter, ctypes.addressof(managed)
        tensor = managed.tensor
        if tensor.lanes != 1 or (tensor.code, tensor.bits) not in _DTYPES:
            raise TypeError(f"DLPack type (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes) has no numpy dtype here")
        if flags & IS_COPIED:
            raise ValueError("it would only give a copy of its array")
        self.place = tensor.device_type, tensor.device_id
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.dtype = _DTYPES[tensor.code, tensor.bits]
        self.shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
        self.strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else None
        self.readonly = bool(flags & READ_ONLY)

    def __del__(self) -> None:
        if self._deleter:
            self._deleter(self._managed)


def device_name(place: tuple[int, int]) -> str:
    """For people: kDLROCM:0."""
    kind, number = place
    return f"{_DEVICE_NAMES.get(kind, f'DLPack device type {kind}')}:{number}"


def take(obj: Any, stream: int | None) -> View:
    """The tensor of an object with `__dlpack__`, which is told the stream (None: not). strides None: packed.

    Its errors (BufferError) are ValueErrors; TypeError for what it gives that is no tensor.
    """
    options = {} if stream is None else {"stream": stream}
    try:
        try:
            capsule = obj.__dlpack__(max_version=(1, 1), copy=False, **options)
        except TypeError:  # a library from before DLPack 1.0 does not know these arguments
            capsule = obj.__dlpack__(**options)
    except BufferError as error:
        raise ValueError(str(error)) from None
    name = _name_of(capsule) if type(capsule).__name__ == "PyCapsule" else None
    if name not in _KINDS:
        raise TypeError(f"the __dlpack__ of a {type(obj).__name__} gave {name!r}, which is no DLPack tensor that was not used before")
    used, kind = _KINDS[name]
    managed = kind.from_address(_pointer(capsule, name))
    if kind is _Versioned and managed.major != 1:
        raise ValueError(f"the {type(obj).__name__} speaks DLPack {managed.major}.{managed.minor}; 1 is understood")
    _rename(capsule, used)
    return View(managed, managed.flags if kind is _Versioned else 0)


class _Memory:
    """What numpy makes an array of: of the right shape and size of elements, and without looking at the memory."""

    def __init__(self, array: Any):
        self.array = array  # kept alive
        itemsize = array.dtype.itemsize
        strides = tuple(stride * itemsize for stride in array.strides)
        data = (array.address or 1, array.readonly)  # numpy makes none of null, which an array without elements may have
        self.__array_interface__ = {"data": data, "shape": array.shape, "strides": strides, "typestr": np.dtype(f"u{itemsize}").str, "version": 3}


def export(array: Any, place: tuple[int, int], max_version: tuple[int, int] | None) -> Any:
    """A capsule of a DeviceArray, for a consumer of DLPack up to max_version (None: before 1.0). BufferError for what the protocol cannot say.

    numpy makes the capsule, and what is no memory of the host or no unsigned integer is written into it afterwards. One made here would have to be
    released by Python code, which a consumer that fails may call while its exception is set: the exception would be lost.
    """
    if array.dtype not in _TYPES:
        raise BufferError(f"DLPack has no {array.dtype}; its bits can be exported: as_array(…, dtype='uint{8 * array.dtype.itemsize}')")
    memory = np.asarray(_Memory(array))
    capsule = memory.__dlpack__() if max_version is None or max_version[0] < 1 or not _NUMPY_IS_VERSIONED else memory.__dlpack__(max_version=(1, 0))
    name = _name_of(capsule)
    kind = _KINDS[name][1]
    managed = kind.from_address(_pointer(capsule, name))
    tensor = managed.tensor
    tensor.data = array.address
    (tensor.device_type, tensor.device_id), (tensor.code, tensor.bits) = place, _TYPES[array.dtype]
    if kind is _Versioned and tensor.code > _BOOL:
        managed.minor = max(managed.minor, 1)
    return capsule
