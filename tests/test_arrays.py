"""DeviceArray and as_array: views of Buffers and of other people's arrays. What the protocols demand besides: test_interop_*.py."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from devices import needs_dlpack_1
from mla_rt.arrays import DeviceArray, as_array
from mla_rt.device import Device
from mla_rt.errors import DeviceError

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def buffer(device: Device):
    with device.to_device(np.arange(24, dtype=np.float32)) as buffer:
        yield buffer


def test_a_buffer_with_a_shape(device, buffer):
    array = as_array(buffer, dtype="f4", shape=(2, 3, 4))
    assert (array.address, array.shape, array.strides, array.dtype) == (buffer.address, (2, 3, 4), (12, 4, 1), np.float32)
    assert array.device is device and array.owner is buffer and not array.readonly and array.is_packed and array.nbytes == 96
    assert as_array(buffer).shape == (96,) and as_array(buffer).dtype == np.uint8
    assert as_array(array, dtype="u4").dtype == np.uint32
    with pytest.raises(ValueError, match=r"a buffer of 96 bytes is no float32 array of shape \[5, 5\]"):
        as_array(buffer, dtype="f4", shape=(5, 5))
    with pytest.raises(ValueError, match=r"a buffer of 96 bytes is no \|V5 array"):
        as_array(buffer, dtype="V5")
    with pytest.raises(ValueError, match="the bits of float32 are no bfloat16: 4 and 2 bytes"):
        as_array(array, dtype=BF16)
    strided = DeviceArray(buffer.address, (2, 3), "f4", device, strides=(12, 2), readonly=True, owner=buffer)
    bits = as_array(strided, dtype="u4")
    assert (bits.dtype, bits.strides, bits.readonly, bits.owner, bits.is_packed) == (np.uint32, (12, 2), True, buffer, False)
    with pytest.raises(AttributeError, match="does not change: shape stays"):
        array.shape = (24,)


def test_a_round_trip_keeps_all(device, buffer):
    for dtype, shape in ((BF16, (6, 8)), (ml_dtypes.float8_e4m3fn, (96,)), ("i8", (3, 4)), ("f4", (24, 1)), ("f4", ())):
        if shape == ():
            array = DeviceArray(buffer.address, (), dtype, device, owner=buffer)
        else:
            array = as_array(buffer, dtype=dtype, shape=shape)
        got = as_array(SimpleNamespace(__dlpack__=array.__dlpack__, __dlpack_device__=array.__dlpack_device__), device=device)
        assert (got.address, got.shape, got.strides, got.dtype) == (array.address, array.shape, array.strides, array.dtype)


@needs_dlpack_1
def test_a_round_trip_keeps_that_it_is_read_only(device, buffer):
    readonly = DeviceArray(buffer.address, (24,), "f4", device, readonly=True, owner=buffer)
    got = as_array(SimpleNamespace(__dlpack__=readonly.__dlpack__, __dlpack_device__=readonly.__dlpack_device__), device=device)
    assert got.readonly
    with pytest.raises(BufferError, match="readonly"):
        readonly.__dlpack__()


def test_a_round_trip_by_the_cuda_array_interface(hip_device):
    with hip_device.to_device(np.arange(24, dtype=np.float32)) as buffer:
        array = as_array(buffer, dtype="f4", shape=(4, 6))
        got = as_array(SimpleNamespace(__cuda_array_interface__=array.__cuda_array_interface__), device=hip_device)
        assert (got.address, got.shape, got.strides, got.dtype) == (array.address, array.shape, array.strides, array.dtype)
        strided = DeviceArray(buffer.address, (2, 3), "f4", hip_device, strides=(12, 2), owner=buffer)
        assert strided.__cuda_array_interface__["strides"] == (48, 8)
        got = as_array(SimpleNamespace(__cuda_array_interface__=strided.__cuda_array_interface__), device=hip_device)
        assert got.strides == (12, 2)
        other = SimpleNamespace(__cuda_array_interface__=as_array(buffer, dtype="u2").__cuda_array_interface__)
        bits = as_array(other, device=hip_device, dtype=BF16)
        assert bits.dtype == BF16 and bits.shape == (48,)
        with pytest.raises(AttributeError, match="cannot carry bfloat16; its bits can"):
            bits.__cuda_array_interface__  # noqa: B018


def test_what_is_no_array_of_the_device_is_refused(emulator_device, hip_device):
    host = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"is memory of the host, not of <emulator device .*: to_device uploads it"):
        as_array(host, device=emulator_device)
    with pytest.raises(ValueError, match=r"the ndarray is on kDLCPU:0; <hip device .*> takes kDLROCM:0 only; to_device uploads"):
        as_array(host, device=hip_device)
    with pytest.raises(TypeError, match="a list is no device array"):
        as_array([1.0], device=hip_device)
    with pytest.raises(TypeError, match="does not say which of our devices it is on"):
        as_array(host)
    with pytest.raises(ValueError, match="__cuda_array_interface__ is in a GPU's memory"):
        as_array(SimpleNamespace(__cuda_array_interface__={}), device=emulator_device)
    with emulator_device.allocate(4) as buffer, pytest.raises(ValueError, match="the buffer is on another device"):
        as_array(buffer, device=hip_device)
    array = as_array(buffer0 := hip_device.allocate(4))
    buffer0.free()
    for use in (lambda: as_array(array), array.__dlpack__, lambda: array.__cuda_array_interface__):
        with pytest.raises(DeviceError, match="Buffer used after it was closed"):
            use()
