"""Work of other libraries and ours in order: the shim runs each stream as late as HIP allows, so a missing order shows as old data, every time."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from decode_cases import Case, make
from foreign import Library
from mla_rt import plan
from mla_rt.arrays import DeviceArray, as_array
from mla_rt.errors import DeviceError
from plan_cases import Arrays, options_of, table_of
from tolerance import assert_same_bits

VALUES = np.arange(1, 25, dtype=np.float32)
OLD = np.full(24, 0xFFFFFFFF, np.uint32).view(np.float32)


@pytest.fixture
def library(hip_device):
    with Library() as library:
        yield library


@pytest.fixture
def stream(hip_device):
    with hip_device.stream() as stream:
        yield stream


def read(array, stream, device):
    """A device array, read on that stream alone."""
    with device.allocate(array.nbytes) as copy:
        hip = device._hip
        device._call("hipMemcpyAsync", copy.address, array.address, array.nbytes, hip.hipMemcpyKind.hipMemcpyDeviceToDevice, stream.handle.handle)
        return copy.download(array.shape, array.dtype, stream)


@pytest.mark.parametrize("protocol", ["dlpack", "interface"])
def test_what_is_taken_is_used_behind_its_librarys_work(protocol, library, stream, hip_device):
    foreign = library.array(VALUES)
    given = foreign if protocol == "dlpack" else foreign.interface()
    array = as_array(given, device=hip_device, stream=stream)
    assert np.array_equal(read(array, stream, hip_device), VALUES)
    if protocol == "dlpack":
        assert library.asked == [hip_device.stream_address(stream)] and library.asked[0] > 2


def test_the_default_stream_is_meant_if_none_is_named(library, hip_device, shim):
    for given in (library.array(VALUES), library.array(VALUES).interface()):
        array = as_array(given, device=hip_device)
        with hip_device.allocate(array.nbytes) as copy, hip_device.event() as event:
            to_device = hip_device._hip.hipMemcpyKind.hipMemcpyDeviceToDevice
            hip_device._call("hipMemcpyAsync", copy.address, array.address, array.nbytes, to_device, None)
            event.record()
            event.synchronize()  # waits for the default stream alone, unlike a download
            assert shim.emulator.memory.bytes_at(copy.address, copy.nbytes).tobytes() == VALUES.tobytes()
    assert library.asked == [0]


def test_without_that_order_old_data_is_read(library, stream, hip_device):
    """What makes the other tests here tests: an array that is taken in silence is read before it is written."""
    foreign = library.array(VALUES)
    silent = DeviceArray(foreign.address, (24,), "f4", hip_device)
    assert read(silent, stream, hip_device).tobytes() == OLD.tobytes()


@pytest.mark.parametrize(("protocol", "waits"), [("dlpack", True), ("dlpack, no order", False), ("interface", True)])
def test_what_is_given_is_used_behind_our_work(protocol, waits, library, stream, hip_device):
    with hip_device.to_device(OLD) as buffer:
        array = as_array(buffer, dtype="f4")
        buffer.upload(VALUES, stream)  # queued
        if protocol == "interface":
            behind = array.__cuda_array_interface__["stream"]
            assert behind == 1  # the protocol's number for the default stream
            library.order(0, int(library.stream))
        else:
            capsule = array.__dlpack__(stream=int(library.stream) if waits else -1, max_version=(1, 0))
            assert capsule is not None
        assert library.read(array).tobytes() == (VALUES if waits else OLD).tobytes()


def test_streams_are_numbered_as_the_standard_says(library, emulator_device, hip_device):
    with hip_device.allocate(4) as buffer:
        array = as_array(buffer)
        for stream in (None, 0, -1, int(library.stream)):
            assert array.__dlpack__(stream=stream)
        for stream in (1, 2, -2):  # CUDA's default streams, which the standard does not allow for ROCm
            with pytest.raises(ValueError, match=rf"stream is {stream}; on kDLROCM:0 it is an address, 0, -1 or None"):
                array.__dlpack__(stream=stream)
        foreign = library.array(VALUES).interface()
        foreign.__cuda_array_interface__["stream"] = 0
        with pytest.raises(ValueError, match=r"stream 0 .* ambiguous"):
            as_array(foreign, device=hip_device)
    with emulator_device.allocate(4) as buffer:
        array = as_array(buffer)
        assert array.__dlpack__(stream=None) and array.__dlpack__(stream=-1)
        for stream in (0, 1, 94022825490272):
            with pytest.raises(ValueError, match=rf"stream is {stream}; on kDLCPU:0 it is -1 or None"):
                array.__dlpack__(stream=stream)


@pytest.mark.parametrize("protocol", ["dlpack", "interface"])
def test_a_plan_runs_on_arrays_that_are_still_being_written(protocol, library, stream, hip_device):
    """On one stream, and captured: there its caller orders the launch of the graph."""
    made = make(Case((5, 20), (1, 2), num_heads=2, page_size=4))
    q = made.arguments["q"]
    with Arrays(hip_device, made) as arrays, plan(hip_device, **table_of(made), **options_of(made)) as a_plan:
        expected = arrays.run_for_results(a_plan)

        def given(values):
            array = library.array(values)
            if protocol == "dlpack":
                return array
            return SimpleNamespace(__cuda_array_interface__={**array.interface().__cuda_array_interface__, "typestr": "<u2"})

        def run(queries):
            array = queries if protocol == "dlpack" else as_array(queries, dtype=ml_dtypes.bfloat16, device=hip_device, stream=stream)
            a_plan.run(array, arrays.cache, out=arrays.out, lse=arrays.lse, stream=stream)

        arrays.poison()
        run(given(q))
        assert_same_bits(arrays.results(stream), expected)
        arrays.poison()
        queries = given(q)
        library.asked.clear()
        with hip_device.capture(stream) as graph:
            run(queries)
        with graph:
            assert library.asked == ([-1] if protocol == "dlpack" else [])
            library.order(int(library.stream), hip_device.stream_address(stream))
            graph.launch(stream)
            assert_same_bits(arrays.results(stream), expected)


def test_an_array_is_not_given_away_during_a_capture(stream, hip_device):
    with hip_device.allocate(4) as buffer:
        array = as_array(buffer)
        with hip_device.capture(stream) as graph:
            assert array.__dlpack__(stream=-1)
            with pytest.raises(DeviceError, match="work of another library behind this device's during a capture"):
                array.__dlpack__(stream=hip_device.stream_address(stream))
        graph.close()
