"""DeviceArray and as_array: views of Buffers and of other people's arrays, with numpy and its like as the other side."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from mla_rt import dlpack
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


def test_numpy_takes_an_array_of_the_emulator(emulator_device):
    """numpy speaks DLPack: the emulator's memory is the host's."""
    with emulator_device.to_device(np.arange(24, dtype=np.float32)) as buffer:
        array = as_array(buffer, dtype="f4", shape=(4, 6))
        taken = np.from_dlpack(array)
        assert taken.ctypes.data == buffer.address and np.array_equal(taken, np.arange(24, dtype=np.float32).reshape(4, 6))
        back = as_array(taken[::2, 1:], device=emulator_device)
        assert (back.address, back.shape, back.strides) == (buffer.address + 4, (2, 5), (12, 1)) and not back.is_packed
        before = len(dlpack._exported)
        assert before >= 1
        del taken, back
        gc.collect()
        assert len(dlpack._exported) == before - 1
        array.__dlpack__()  # dropped untaken
        gc.collect()
        assert len(dlpack._exported) == before - 1


def test_a_round_trip_keeps_all(device, buffer):
    for dtype, shape in ((BF16, (6, 8)), (ml_dtypes.float8_e4m3fn, (96,)), ("i8", (3, 4)), ("f4", (24, 1)), ("f4", ())):
        if shape == ():
            array = DeviceArray(buffer.address, (), dtype, device, owner=buffer)
        else:
            array = as_array(buffer, dtype=dtype, shape=shape)
        got = as_array(SimpleNamespace(__dlpack__=array.__dlpack__, __dlpack_device__=array.__dlpack_device__), device=device)
        assert (got.address, got.shape, got.strides, got.dtype) == (array.address, array.shape, array.strides, array.dtype)
    array = DeviceArray(buffer.address, (22,), "f4", device, owner=buffer)
    capsule = array.__dlpack__()
    managed = list(dlpack._exported.values())[-1][0]
    managed.tensor.byte_offset = 8  # as some libraries say where a part begins
    got = as_array(SimpleNamespace(__dlpack__=lambda **options: capsule, __dlpack_device__=array.__dlpack_device__), shape=(22,), device=device)
    assert got.address == buffer.address + 8
    readonly = DeviceArray(buffer.address, (24,), "f4", device, readonly=True, owner=buffer)
    got = as_array(SimpleNamespace(__dlpack__=readonly.__dlpack__, __dlpack_device__=readonly.__dlpack_device__), device=device)
    assert got.readonly
    with pytest.raises(BufferError, match="read-only"):
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
    with pytest.raises(ValueError, match=r"the ndarray is on DLPack device \(1, 0\); <hip device .*> is \(10, 0\)"):
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


def test_dlpack_is_told_the_stream(hip_device):
    seen = []
    with hip_device.allocate(4) as buffer, hip_device.stream() as stream:
        array = as_array(buffer)

        class Other:
            __dlpack_device__ = array.__dlpack_device__

            def __dlpack__(self, *, stream=None):  # from before DLPack 1.0
                seen.append(stream)
                return array.__dlpack__()

        as_array(Other(), device=hip_device, stream=stream)
        as_array(Other(), device=hip_device)
        assert seen == [hip_device.stream_address(stream), 0] and seen[0] != 0
