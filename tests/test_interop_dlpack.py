"""DLPack by the letter: who releases a tensor and when, what its fields may say, and what is refused."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from devices import needs_dlpack_1
from mla_rt import dlpack
from mla_rt.arrays import DeviceArray, as_array

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = [np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e8m0fnu")]
INT64 = ctypes.c_int64

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Producer:
    """Another library's array, of which every field can be said. released: how often its deleter was called; asked: what `__dlpack__` was given."""

    def __init__(
        self, address, shape, *, strides=None, code=2, bits=32, lanes=1, place=(1, 0), byte_offset=0, version=None, flags=0, said=None, **renamed
    ):
        self.released, self.asked = 0, []
        self.said = place if said is None else said
        self.shape = (INT64 * len(shape))(*shape)
        self.strides = None if strides is None else (INT64 * len(strides))(*strides)
        tensor = dlpack._Tensor(address, *place, len(shape), code, bits, lanes, self.shape, self.strides, byte_offset)
        self.deleter = dlpack._Deleter(self._release)
        self.managed = (
            dlpack._Managed(tensor, None, self.deleter) if version is None else dlpack._Versioned(*version, None, self.deleter, flags, tensor)
        )
        self.name = renamed.get("name", b"dltensor" if version is None else b"dltensor_versioned")

    def _release(self, address):
        assert address == ctypes.addressof(self.managed)
        self.released += 1

    def __dlpack_device__(self):
        return self.said

    def __dlpack__(self, **options):
        self.asked.append(options)
        return new_capsule(ctypes.addressof(self.managed), self.name, None)


class OlderProducer(Producer):
    """Of a library from before DLPack 1.0."""

    def __dlpack__(self, *, stream=None):
        return super().__dlpack__(stream=stream)


@pytest.fixture
def buffer(emulator_device):
    with emulator_device.to_device(np.arange(24, dtype=np.float32)) as buffer:
        yield buffer


@pytest.mark.parametrize("version", [None, (1, 0), (1, 3)])
def test_a_tensor_is_given_back_once_and_not_before(version, buffer, emulator_device):
    producer = Producer(buffer.address, (4, 6), version=version)
    array = as_array(producer, device=emulator_device)
    again = as_array(array, dtype=np.uint32)  # lives on the same tensor
    del array
    gc.collect()
    assert producer.released == 0 and again.strides == (6, 1)
    del again
    gc.collect()
    assert producer.released == 1


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"code": 5, "bits": 64}, TypeError, r"code 5, 64 bits, 1 lanes\) has no numpy dtype"),
        ({"code": 17, "bits": 4}, TypeError, "code 17, 4 bits"),
        ({"lanes": 4}, TypeError, "4 lanes"),
        ({"version": (1, 0), "flags": dlpack.IS_COPIED}, ValueError, "only give a copy"),
        ({"said": (1, 0), "place": (10, 0)}, ValueError, "said that it is on kDLCPU:0, but gave kDLROCM:0"),
        ({"byte_offset": 4}, ValueError, "is memory of the host, not of"),
        ({"strides": (6, 2)}, ValueError, "is memory of the host, not of"),
        ({"strides": (-6, 1)}, ValueError, "is memory of the host, not of"),
        ({"address": 0}, ValueError, r"shape \[4, 6\] at address 0 cannot be"),
    ],
    ids=str,
)
def test_a_tensor_that_is_refused_is_given_back_too(fields, error, message, buffer, emulator_device):
    producer = Producer(**{"address": buffer.address, "shape": (4, 6), **fields})
    with pytest.raises(error, match=message):
        as_array(producer, device=emulator_device)
    gc.collect()
    assert producer.released == 1


def test_what_was_not_taken_stays_the_producers(buffer, emulator_device, hip_device):
    """A tensor of an unknown major version, or in an unknown capsule, is for its own destructor."""
    for fields, error, message in (
        ({"version": (2, 0)}, ValueError, r"speaks DLPack 2\.0; 1 is understood"),
        ({"name": b"used_dltensor"}, TypeError, "gave b'used_dltensor', which is no DLPack tensor that was not used before"),
    ):
        producer = Producer(buffer.address, (4, 6), **fields)
        with pytest.raises(error, match=message):
            as_array(producer, device=emulator_device)
        assert producer.released == 0
    with pytest.raises(TypeError, match="gave None, which is no DLPack tensor"):
        as_array(SimpleNamespace(__dlpack__=lambda **options: 7, __dlpack_device__=lambda: (1, 0)), device=emulator_device)
    for place, name in (((2, 0), "kDLCUDA:0"), ((10, 1), "kDLROCM:1"), ((3, 0), "kDLCUDAHost:0"), ((99, 0), "DLPack device type 99:0")):
        producer = Producer(buffer.address, (4, 6), place=place)
        for device, needed in ((emulator_device, "kDLCPU:0"), (hip_device, "kDLROCM:0")):
            with pytest.raises(ValueError, match=f"the Producer is on {name}; .* takes {needed} only"):
                as_array(producer, device=device)
        assert not producer.asked
    with pytest.raises(ValueError, match=r"the Producer is on kDLROCM:0; <emulator device .* takes kDLCPU:0 only"):
        as_array(Producer(buffer.address, (4, 6), place=(10, 0)), device=emulator_device)

    class Unwilling(Producer):
        def __dlpack__(self, **options):
            raise BufferError("not today")

    with pytest.raises(ValueError, match="not today"):
        as_array(Unwilling(buffer.address, (4, 6)), device=emulator_device)


def test_what_the_fields_say_is_honoured(buffer, emulator_device):
    def taken(shape, **fields):
        return as_array(Producer(buffer.address, shape, **fields), device=emulator_device)

    assert taken((22,), byte_offset=8).address == buffer.address + 8
    assert taken((2, 3, 4)).strides == (12, 4, 1)  # null: packed
    assert (taken(()).shape, taken(()).strides, taken(()).nbytes) == ((), (), 4)
    assert taken((2, 3), strides=(12, 2)).strides == (12, 2)
    backwards = taken((4, 6), strides=(6, -1), byte_offset=20)
    assert (backwards.address, backwards.strides, backwards.is_packed) == (buffer.address + 20, (6, -1), False)
    assert taken((3, 1, 5), strides=(5, 99, 1)).is_packed
    empty = as_array(Producer(0, (0, 576), code=4, bits=16), device=emulator_device)  # no memory is needed for no elements
    assert (empty.shape, empty.dtype, empty.nbytes, empty.is_packed) == ((0, 576), BF16, 0, True)
    assert not taken((4,)).readonly and not taken((4,), version=(1, 0)).readonly
    assert taken((4,), version=(1, 0), flags=dlpack.READ_ONLY).readonly
    odd = taken((23,), byte_offset=1)  # allowed by the protocol; a plan refuses the address
    assert odd.address == buffer.address + 1
    for dtype in (BF16, *FLOAT8, np.dtype(np.bool_), np.dtype("i8"), np.dtype("u2"), np.dtype("f2")):
        code, bits = dlpack._TYPES[dtype]
        assert taken((3,), code=code, bits=bits).dtype == dtype


def test_a_producer_is_asked_for_the_newest_and_for_no_copy(buffer, emulator_device):
    producer, older = (kind(buffer.address, (4, 6)) for kind in (Producer, OlderProducer))
    as_array(producer, device=emulator_device)
    as_array(older, device=emulator_device)
    assert producer.asked == [{"max_version": (1, 1), "copy": False}]
    assert older.asked == [{"stream": None}]


# ---- export


def fields_of(capsule):
    """(version, flags, tensor) of a capsule that was not taken."""
    used, kind = dlpack._KINDS[dlpack._name_of(capsule)]
    managed = kind.from_address(dlpack._pointer(capsule, used.removeprefix(b"used_")))
    return (None, 0, managed.tensor) if kind is dlpack._Managed else ((managed.major, managed.minor), managed.flags, managed.tensor)


@needs_dlpack_1
def test_export_says_what_there_is(device):
    with device.allocate(96) as buffer:
        for dtype in (BF16, *FLOAT8, np.dtype(np.bool_), np.dtype("f4"), np.dtype("i8")):
            array = as_array(buffer, dtype=dtype)
            for max_version, version in (
                (None, None),
                ((0, 8), None),
                ((1, 0), (1, 1 if dtype in FLOAT8 else 0)),
                ((2, 5), (1, 1 if dtype in FLOAT8 else 0)),
            ):
                capsule = array.__dlpack__(max_version=max_version)
                found, flags, tensor = fields_of(capsule)
                assert (found, flags) == (version, 0)
                assert (tensor.data, tensor.device_type, tensor.device_id) == (buffer.address, 10 if device.kind == "hip" else 1, 0)
                assert (tensor.code, tensor.bits, tensor.lanes) == (*dlpack._TYPES[dtype], 1)
                assert (tensor.ndim, tensor.shape[0], tensor.byte_offset) == (1, 96 // dtype.itemsize, 0)
        assert dlpack._TYPES[BF16] == (4, 16) and [dlpack._TYPES[dtype] for dtype in FLOAT8] == [(10, 8), (11, 8), (12, 8), (14, 8)]
        readonly = DeviceArray(buffer.address, (2, 3), "f4", device, strides=(-3, 2), readonly=True, owner=buffer)
        capsule = readonly.__dlpack__(max_version=(1, 0))
        _, flags, tensor = fields_of(capsule)
        assert flags == dlpack.READ_ONLY and [tensor.strides[axis] for axis in range(2)] == [-3, 2]
        empty = DeviceArray(0, (0, 4), BF16, device).__dlpack__()
        assert (fields_of(empty)[2].shape[0], fields_of(empty)[2].ndim, fields_of(empty)[2].data) == (0, 2, None)
        with pytest.raises(BufferError, match="without a copy"):
            as_array(buffer).__dlpack__(copy=True)
        with pytest.raises(BufferError, match="is exported there"):
            as_array(buffer).__dlpack__(dl_device=(2, 0))
        assert as_array(buffer).__dlpack__(dl_device=as_array(buffer).__dlpack_device__(), copy=False)
        with pytest.raises(BufferError, match=r"DLPack has no int4; its bits can be exported: as_array\(…, dtype='uint8'\)"):
            as_array(buffer, dtype=ml_dtypes.int4).__dlpack__()


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_an_exported_array_lives_until_it_is_given_back(max_version, device):
    class Owner:
        pass

    def exported():
        owner = Owner()
        gone.append(weakref.ref(owner))
        return DeviceArray(buffer.address, (24,), "f4", device, owner=owner).__dlpack__(max_version=max_version)

    gone = []
    with device.allocate(96) as buffer:
        capsule = exported()
        gc.collect()
        assert gone[0]() is not None
        del capsule  # nobody took it
        gc.collect()
        assert gone[0]() is None
        view = dlpack.take(SimpleNamespace(__dlpack__=lambda **options: exported()), None)
        gc.collect()
        assert gone[1]() is not None  # though its capsule is no more
        del view
        gc.collect()
        assert gone[1]() is None


def test_a_consumer_that_fails_keeps_its_exception(emulator_device):
    """It drops the capsule with the exception set: releasing the tensor must not disturb that."""
    with emulator_device.allocate(96) as buffer:
        array = as_array(buffer, dtype=BF16)
        before = sys.getrefcount(array)
        with pytest.raises((BufferError, RuntimeError, TypeError), match="dtype"):
            np.from_dlpack(array)  # numpy has no bfloat16
        assert sys.getrefcount(array) == before
