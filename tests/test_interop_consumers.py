"""Real other sides: numpy and JAX (on the CPU, over the emulator's memory), hip-python's buffers (over the stand-in HIP runtime's).

JAX is of the extra `examples`, which `make examples` installs; without it its tests are skipped.
"""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest

from decode_cases import Case, make
from devices import needs_dlpack_1
from mla_rt import plan
from mla_rt.arrays import DeviceArray, as_array
from plan_cases import Arrays, options_of, table_of
from tolerance import assert_same_bits

BF16 = np.dtype(ml_dtypes.bfloat16)
VALUES = np.arange(24, dtype=np.float32)


@pytest.fixture
def buffer(emulator_device):
    with emulator_device.to_device(VALUES) as buffer:
        yield buffer


@pytest.fixture(scope="module")
def jax():
    return pytest.importorskip("jax", reason="JAX is not installed: make examples")


# ---- numpy


def test_numpy_sees_the_emulators_memory(buffer, emulator_device):
    array = as_array(buffer, dtype="f4", shape=(4, 6))
    taken = np.from_dlpack(array)
    assert taken.ctypes.data == buffer.address and np.array_equal(taken, VALUES.reshape(4, 6))
    buffer.upload(VALUES + 1)
    assert np.array_equal(taken, VALUES.reshape(4, 6) + 1)  # no copy
    for shape, strides, expected in (
        ((2, 5), (12, 1), VALUES.reshape(4, 6)[::2, :5]),
        ((4, 6), (1, 4), VALUES.reshape(6, 4).T),
        ((3, 2), (0, 1), np.broadcast_to(VALUES[:2], (3, 2))),
        ((), (), VALUES[0]),
        ((0, 6), (6, 1), VALUES[:0].reshape(0, 6)),
    ):
        taken = np.from_dlpack(DeviceArray(buffer.address, shape, "f4", emulator_device, strides=strides, owner=buffer))
        assert taken.shape == shape and np.array_equal(taken, expected + 1)
    backwards = DeviceArray(buffer.address + 5 * 4, (4, 6), "f4", emulator_device, strides=(6, -1), owner=buffer)
    assert np.array_equal(np.from_dlpack(backwards), VALUES.reshape(4, 6)[:, ::-1] + 1)


@needs_dlpack_1
def test_numpy_heeds_what_is_read_only(buffer, emulator_device):
    for readonly in (True, False):
        array = DeviceArray(buffer.address, (24,), "f4", emulator_device, readonly=readonly, owner=buffer)
        assert np.from_dlpack(array).flags.writeable is not readonly


@needs_dlpack_1
def test_numpys_views_of_the_emulators_memory_are_taken_back(buffer, emulator_device):
    memory = np.from_dlpack(as_array(buffer, dtype="f4", shape=(4, 6)))
    for view in (memory, memory[::2, 1:], memory.T, memory[:, ::-1], memory[1:1], memory[1, 2, ...], np.broadcast_to(memory[0], (3, 6))):
        array = as_array(view, device=emulator_device)
        assert (array.shape, array.dtype, array.readonly) == (view.shape, view.dtype, not view.flags.writeable)
        assert 0 in view.shape or array.address == view.ctypes.data
        assert 0 in view.shape or array.strides == tuple(step // 4 for step in view.strides)
    bits = memory.view(np.uint16)
    assert as_array(bits, dtype=BF16, device=emulator_device).shape == (4, 12)
    for other in (np.zeros(3, np.float32), np.zeros((), BF16)):
        with pytest.raises(ValueError, match=r"memory of the host|DLPack only supports"):
            as_array(other, device=emulator_device)


def test_numpy_keeps_what_it_took_alive(buffer, emulator_device):
    taken = np.from_dlpack(as_array(as_array(buffer, dtype="f4"), dtype="i4"))
    gc.collect()
    assert np.array_equal(taken.view(np.float32), VALUES)


@needs_dlpack_1
def test_a_plan_runs_on_numpys_views(emulator_device):
    """Arguments and results as numpy arrays over the emulator's memory: nothing is copied, and what is not packed is refused."""
    made = make(Case((5, 20), (1, 2), num_heads=2, page_size=4))
    with Arrays(emulator_device, made) as arrays, plan(emulator_device, **table_of(made), **options_of(made)) as a_plan:
        expected = arrays.run_for_results(a_plan)
        arrays.poison()
        q = np.from_dlpack(as_array(arrays.q, dtype=np.uint16, shape=(3, 2, 576)))
        out = np.from_dlpack(as_array(arrays.out, dtype=np.uint16, shape=(3, 2, 512)))
        lse = np.from_dlpack(as_array(arrays.lse, dtype=np.float32, shape=(3, 2)))
        as_bf16 = {"dtype": BF16, "device": emulator_device}
        a_plan.run(as_array(q, **as_bf16), arrays.cache, out=as_array(out, **as_bf16), lse=lse)
        assert_same_bits((out.view(BF16), lse), expected)
        with pytest.raises(
            TypeError, match=r"q has dtype uint16; the plan needs .* bfloat16 \(if these are its bits: as_array\(…, dtype='bfloat16'\)\)"
        ):
            a_plan.run(q, arrays.cache, out=as_array(out, **as_bf16), lse=lse)
        with pytest.raises(ValueError, match=r"lse of shape \[3, 2\] has strides \[-2, 1\]"):
            a_plan.run(as_array(q, **as_bf16), arrays.cache, out=as_array(out, **as_bf16), lse=lse[::-1])


# ---- hip-python


def test_hip_pythons_buffers_are_taken(hip_device):
    hip = hip_device._hip
    _, memory = hip.hipMalloc(96)
    try:
        array = as_array(memory.configure(typestr="<f4", shape=(4, 6)), device=hip_device)
        assert (array.address, array.shape, array.dtype) == (int(memory), (4, 6), np.float32)
        with hip_device.to_device(VALUES) as buffer:  # and ours where it takes such an object
            ours = as_array(buffer, dtype="f4", shape=(4, 6))
            (error,) = hip.hipMemcpy(memory, ours, 96, hip.hipMemcpyKind.hipMemcpyDeviceToDevice)
            assert error == hip.hipError_t.hipSuccess
        got = np.empty((4, 6), np.float32)
        hip.hipMemcpy(got, array, 96, hip.hipMemcpyKind.hipMemcpyDeviceToHost)
        assert np.array_equal(got, VALUES.reshape(4, 6))
    finally:
        hip.hipFree(memory)


def interface(**changes):
    values = {"shape": (4, 6), "typestr": "<f4", "data": (4096, False), "version": 3, **changes}
    values = {name: value for name, value in values.items() if value is not ...}
    return type("Other", (), {"__cuda_array_interface__": values})()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"typestr": ...}, TypeError, r"the __cuda_array_interface__ of a Other is none: KeyError\('typestr'\)"),
        ({"typestr": "nonsense"}, TypeError, "is none: TypeError"),
        ({"shape": 4}, TypeError, "is none: TypeError"),
        ({"data": 4096}, TypeError, "is none: TypeError"),
        ({"shape": (-4, 6)}, ValueError, r"shape \[-4, 6\] and strides None cannot be"),
        ({"strides": (24,)}, ValueError, r"shape \[4, 6\] and strides \[6\] cannot be"),
        ({"strides": (26, 4)}, ValueError, r"strides of \(26, 4\) bytes, no whole numbers of elements of float32"),
        ({"typestr": ">f4"}, TypeError, "typestr '>f4'; one of numbers in this machine's byte order"),
        ({"typestr": "|O8"}, TypeError, "typestr '|O8'"),
        ({"mask": "another array"}, ValueError, "has a mask"),
        ({"data": (0, False)}, ValueError, r"shape \[4, 6\] at address 0 cannot be"),
    ],
    ids=str,
)
def test_interfaces_that_are_refused(changes, error, message, hip_device):
    with pytest.raises(error, match=message):
        as_array(interface(**changes), device=hip_device)


def test_what_an_interface_says_is_honoured(hip_device):
    def taken(**changes):
        return as_array(interface(**changes), device=hip_device)

    assert taken().strides == taken(strides=None).strides == taken(strides=(24, 4)).strides == (6, 1)
    assert taken(strides=(-24, 4)).strides == (-6, 1) and not taken(strides=(-24, 4)).is_packed
    assert taken(data=(4096, True)).readonly and not taken().readonly
    assert taken(shape=(), typestr="<f8").nbytes == 8
    assert taken(shape=(0, 6), data=(0, False)).nbytes == 0
    assert as_array(interface(typestr="|V2"), dtype=BF16, device=hip_device).dtype == BF16
    assert as_array(interface(typestr="|u1"), dtype=ml_dtypes.float8_e4m3fn, device=hip_device).dtype == ml_dtypes.float8_e4m3fn
    for dtype in ("V", object, "S0"):
        with pytest.raises(TypeError, match="one of numbers is needed"):
            as_array(interface(), dtype=dtype, device=hip_device)


# ---- JAX


def test_jax_sees_the_emulators_memory(jax, emulator_device):
    bits = np.arange(0x3F80, 0x3F80 + 48, dtype=np.uint16)
    with emulator_device.to_device(bits) as buffer:
        for dtype in (BF16, np.dtype(np.float16), np.dtype(np.int16)):
            taken = jax.dlpack.from_dlpack(as_array(buffer, dtype=dtype, shape=(6, 8)))
            assert (taken.dtype, taken.shape, taken.unsafe_buffer_pointer()) == (dtype, (6, 8), buffer.address)
            assert np.array_equal(np.asarray(taken).view(np.uint16), bits.reshape(6, 8))
        taken = jax.dlpack.from_dlpack(as_array(buffer, dtype=ml_dtypes.float8_e4m3fn))
        assert taken.dtype == ml_dtypes.float8_e4m3fn
        back = as_array(jax.dlpack.from_dlpack(as_array(buffer, dtype=BF16)), device=emulator_device)
        assert (back.address, back.shape, back.dtype, back.is_packed) == (buffer.address, (48,), BF16, True)
        with pytest.raises(ValueError, match="is memory of the host, not of"):
            as_array(jax.numpy.ones(4), device=emulator_device)


def test_a_plan_runs_on_jaxs_arrays(jax, emulator_device):
    made = make(Case((5, 20), (1, 2), num_heads=2, page_size=4))
    with Arrays(emulator_device, made) as arrays, plan(emulator_device, **table_of(made), **options_of(made)) as a_plan:
        expected = arrays.run_for_results(a_plan)
        arrays.poison()
        q = jax.dlpack.from_dlpack(as_array(arrays.q, dtype=BF16, shape=(3, 2, 576)))
        a_plan.run(q, arrays.cache, out=arrays.out, lse=arrays.lse)
        out = jax.dlpack.from_dlpack(as_array(arrays.out, dtype=BF16, shape=(3, 2, 512)))
        lse = jax.dlpack.from_dlpack(as_array(arrays.lse, dtype="f4", shape=(3, 2)))
        assert_same_bits((np.asarray(out), np.asarray(lse)), expected)
