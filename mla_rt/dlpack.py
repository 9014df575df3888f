"""DLPack's structures and capsules, by ctypes: the protocol of arrays between libraries (dmlc.github.io/dlpack, versions 0 and 1)."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

CPU, ROCM = 1, 10  # DLDeviceType
READ_ONLY = 1  # of the flags of a versioned tensor

_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_TYPES = {  # (DLDataTypeCode, bits)
    np.dtype(np.bool_): (_BOOL, 8),
    **{np.dtype(f"{kind}{bits // 8}"): (code, bits) for kind, code in (("i", _INT), ("u", _UINT)) for bits in (8, 16, 32, 64)},
    **{np.dtype(f"f{bits // 8}"): (_FLOAT, bits) for bits in (16, 32, 64)},
    np.dtype(ml_dtypes.bfloat16): (_BFLOAT, 16),
    np.dtype(ml_dtypes.float8_e4m3fn): (10, 8),
    np.dtype(ml_dtypes.float8_e4m3fnuz): (11, 8),
    np.dtype(ml_dtypes.float8_e8m0fnu): (14, 8),
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


_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.restype, _rename.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
# Of a capsule that is being destroyed only its address may be handed on.
_is_named = ctypes.pythonapi.PyCapsule_IsValid
_is_named.restype, _is_named.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_pointer_at = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))

# A capsule keeps the pointer to its name.
_NAMES = {False: (b"dltensor", b"used_dltensor"), True: (b"dltensor_versioned", b"used_dltensor_versioned")}
_exported: dict[int, tuple[Any, ...]] = {}  # what exported tensors point to, by their address, until their deleter is called


def _forget(address: int) -> None:
    _exported.pop(address, None)


def _drop(capsule: int) -> None:
    """A capsule that nobody took is destroyed: its tensor goes with it."""
    for fresh, _ in _NAMES.values():
        if _is_named(capsule, fresh):
            _forget(_pointer_at(capsule, fresh))


_DELETER, _DESTRUCTOR = _Deleter(_forget), _Destructor(_drop)


class View:
    """A tensor taken from a capsule: address, shape, strides (in elements), dtype, readonly. It gives the tensor back when it is dropped."""

    def __init__(self, managed: Any, readonly: bool):
        self._managed = managed  # first: what follows may raise, and then the tensor is given back
        tensor = managed.tensor
        if tensor.lanes != 1 or (tensor.code, tensor.bits) not in _DTYPES:
            raise TypeError(f"DLPack type (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes) has no numpy dtype here")
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.dtype = _DTYPES[tensor.code, tensor.bits]
        self.shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
        self.readonly = readonly
        if tensor.strides:
            self.strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim))
        else:
            steps = np.cumprod((1, *self.shape[:0:-1]), dtype=np.int64)[: tensor.ndim]
            self.strides = tuple(int(step) for step in steps[::-1])

    def __del__(self) -> None:
        if self._managed.deleter:
            self._managed.deleter(ctypes.addressof(self._managed))


def take(obj: Any, stream: int | None) -> View:
    """The tensor of an object with `__dlpack__`. Its errors (BufferError) are ValueErrors; TypeError for what it gives that is no tensor."""
    options = {} if stream is None else {"stream": stream}
    try:
        try:
            capsule = obj.__dlpack__(max_version=(1, 0), **options)
        except TypeError:  # a library from before DLPack 1.0 does not know the argument
            capsule = obj.__dlpack__(**options)
    except BufferError as error:
        raise ValueError(str(error)) from None
    name = _name_of(capsule) if type(capsule).__name__ == "PyCapsule" else None
    for versioned, (fresh, used) in _NAMES.items():
        if name == fresh:
            kind = _Versioned if versioned else _Managed
            managed = kind.from_address(_pointer(capsule, fresh))
            if versioned and managed.major != 1:
                raise ValueError(f"the {type(obj).__name__} speaks DLPack {managed.major}.{managed.minor}; 1 is understood")
            _rename(capsule, used)
            return View(managed, bool(versioned and managed.flags & READ_ONLY))
    raise TypeError(f"the __dlpack__ of a {type(obj).__name__} gave {name!r}, which is no DLPack tensor that was not used before")


def export(array: Any, place: tuple[int, int], *, versioned: bool) -> Any:
    """A capsule of a DeviceArray. BufferError for what the protocol cannot say."""
    if array.dtype not in _TYPES:
        raise BufferError(f"DLPack has no {array.dtype}")
    if array.readonly and not versioned:
        raise BufferError("DLPack before 1.0 cannot say that an array is read-only")
    ndim = len(array.shape)
    shape, strides = ((ctypes.c_int64 * ndim)(*values) for values in (array.shape, array.strides))
    code, bits = _TYPES[array.dtype]
    tensor = _Tensor(array.address, *place, ndim, code, bits, 1, shape, strides, 0)
    managed: Any
    if versioned:
        managed = _Versioned(1, 0, None, _DELETER, READ_ONLY if array.readonly else 0, tensor)
    else:
        managed = _Managed(tensor, None, _DELETER)
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, strides, array)
    return _new(address, _NAMES[versioned][0], _DESTRUCTOR)
