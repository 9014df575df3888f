"""`stream=`, ours and other libraries': that stream is used and no other, and the order with what is before and behind it holds.

The shim runs each stream as late as HIP allows, so work that is not ordered shows as old data, every time. What the protocols of arrays order is in
test_interop_streams.py.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack, nullcontext
from functools import partial

import numpy as np
import pytest

import mla_rt
from decode_cases import Case, make
from foreign import Library
from mla_rt import Plan, plan
from mla_rt.arrays import DeviceArray, as_array
from mla_rt.cache import PagedKVCache
from mla_rt.device import Device, open_device
from mla_rt.errors import DeviceError
from mla_rt.graph import Graph
from mla_rt.resources import Buffer, Event, PreparedLaunch
from plan_cases import Arrays, options_of, table_of
from tolerance import assert_same_bits

SMALL = Case((5, 20), (1, 2), num_heads=2, page_size=4, num_splits=2)
LARGER = Case((20,) * 6, (1,) * 6, num_heads=2, page_size=4, num_splits=2)
ROWS = np.arange(3 * 576, dtype=np.float32).reshape(3, 576)
BF16 = "bfloat16"


@pytest.fixture
def library(hip_device):
    with Library() as library:
        yield library


@pytest.fixture
def foreign(library, hip_device):
    """The library's stream, which is apart from the default stream, as one of ours."""
    with hip_device.stream_at(int(library.stream)) as stream:
        yield stream


@pytest.fixture(params=["ours", "foreign"])
def stream(request, hip_device):
    if request.param == "foreign":
        yield request.getfixturevalue("foreign")
        return
    with hip_device.stream() as stream:
        yield stream


# ---- that stream and no other ----


class Calls:
    """Every public call with a `stream`: `table` has one or more for each, which take the stream."""

    def __init__(self, device, sample, stack):
        self.device = device
        enter = stack.enter_context
        made = make(SMALL)
        arrays, event, module = enter(Arrays(device, made)), enter(device.event()), enter(device.load(sample))
        a_plan, growing = (enter(plan(device, **table_of(made), **options_of(made))) for _ in range(2))
        fixed = enter(plan(device, **table_of(made), **options_of(made), max_kv_len=30))
        cache = enter(PagedKVCache(device, 2, 4, "mxfp4"))
        x, y, rows, slots = (enter(device.to_device(array)) for array in (ROWS, ROWS, ROWS, np.arange(3)))
        reverse = module.kernel("reverse")
        prepared = device.prepare(reverse, 1, x=x, out=y)
        with enter(device.stream()) as other, device.capture(other) as graph:
            y.fill(1, other)
        enter(graph)
        record = cache.to_numpy()
        rows_on_device = as_array(rows, dtype="f4", shape=(3, 576))
        device.synchronize()
        self.table = {
            "Buffer.upload": [lambda s: x.upload(ROWS, s), lambda s: x.upload(ROWS[0], s, offset=0)],
            "Buffer.download": [lambda s: x.download(ROWS.shape, "f4", s)],
            "Buffer.fill": [lambda s: y.fill(0, s)],
            "Event.record": [event.record],
            "Stream.synchronize": [lambda s: s.synchronize()],
            "Stream.wait": [lambda s: s.wait(event)],
            "PreparedLaunch.launch": [prepared.launch],
            "Graph.launch": [graph.launch],
            "Device.launch": [lambda s: device.launch(reverse, 1, stream=s, x=x, out=y)],
            "Device.capture": [self.capture],
            "Plan.run": [lambda s: arrays.run(a_plan, s), partial(self.interrupted, a_plan, arrays)],
            "Plan.update": [lambda s: fixed.update(**table_of(made), stream=s), partial(self.grow, growing, make(LARGER))],
            "PagedKVCache.append": [lambda s: cache.append(ROWS, [0, -1, 2], s), lambda s: cache.append(rows_on_device, slots, s)],
            "PagedKVCache.gather": [lambda s: cache.gather([1], s)],
            "PagedKVCache.to_numpy": [cache.to_numpy],
            "PagedKVCache.load": [lambda s: cache.load(record, s)],
        }

    @staticmethod
    def grow(a_plan, larger, stream):
        before = {name: buffer.nbytes for name, buffer in a_plan._buffers.items()}
        a_plan.update(**table_of(larger), stream=stream)
        assert all(buffer.nbytes > before[name] for name, buffer in a_plan._buffers.items())

    def capture(self, stream):
        with self.device.capture(stream) as graph:
            pass
        graph.close()

    @staticmethod
    def interrupted(a_plan, arrays, stream):
        """What a run does when it cannot know whether it was queued."""
        launch = a_plan._launch.launch
        a_plan._launch.launch = lambda stream: 1 / 0
        with pytest.raises(ZeroDivisionError):
            arrays.run(a_plan, stream)
        a_plan._launch.launch = launch


ORDER = {"Device.follow", "as_array", "DeviceArray.__dlpack__", "Device.stream_address", "Device.stream_at"}  # name two streams, or none


def test_the_stream_that_is_given_is_used_and_no_other(stream, hip_device, sample, shim):
    address = hip_device.stream_address(stream)
    with ExitStack() as stack:
        calls = Calls(hip_device, sample, stack)
        for name, variants in calls.table.items():
            for number, call in enumerate(variants):
                with shim.streams_named() as named:
                    call(stream)
                assert named and {given for _, given in named} == {address}, (name, number, named)
        hip_device.synchronize()
    has_stream = {
        f"{owner.__name__}.{name}"
        for owner in (Buffer, Event, PreparedLaunch, Graph, Device, Plan, PagedKVCache, DeviceArray)
        for name, member in inspect.getmembers(owner, inspect.isfunction)
        if "stream" in inspect.signature(member).parameters and (name == "__dlpack__" or not name.startswith("_"))
    }
    functions = [getattr(mla_rt, name) for name in mla_rt.__all__ if inspect.isfunction(getattr(mla_rt, name))]
    has_stream |= {function.__name__ for function in functions if "stream" in inspect.signature(function).parameters}
    assert has_stream == calls.table.keys() - {"Stream.synchronize", "Stream.wait"} | ORDER


def test_ordering_names_both_streams(stream, hip_device, shim):
    with Library() as another:
        ours, theirs = hip_device.stream_address(stream), int(another.stream)
        with shim.streams_named() as named:
            hip_device.follow(theirs, stream)
        assert named == [("hipEventRecord", theirs), ("hipStreamWaitEvent", ours)]
        given = another.array(ROWS)
        with shim.streams_named() as named:
            as_array(given, device=hip_device, stream=stream)
        assert another.asked == [ours] and named == [("hipEventRecord", theirs), ("hipStreamWaitEvent", ours)]


def test_a_foreign_stream_stays_its_librarys(library, sample, shim):
    """It outlives our Stream and our device, with a queued copy that still reads a pinned block of ours when the Stream is closed."""
    with shim.one_gpu(), open_device("hip") as device:
        address = int(library.stream)
        with shim.streams_named() as named, device.to_device(ROWS) as buffer:
            with device.stream_at(address) as first, device.stream_at(address) as second:
                buffer.upload(-ROWS, first)
                second.close()
                assert shim.pending() == 1  # the other Stream of it is open: nobody waited
            waits = shim.count("hipDeviceSynchronize")
            first.close()
            assert shim.pending() == 0 and shim.count("hipDeviceSynchronize") == waits
            with pytest.raises(DeviceError, match="ForeignStream used after it was closed"):
                first.synchronize()
            assert np.array_equal(buffer.download(ROWS.shape, "f4"), -ROWS)
            assert not device._streams and len(device._free_staging) == 1
        assert ("hipStreamSynchronize", address) not in named  # it need not be there any more by then
        left_open = device.stream_at(address)
        ours = device.stream()
        again = device.stream_at(device.stream_address(ours))
        again.close()
        ours.synchronize()
        destroyed = shim.count("hipStreamDestroy")
    assert shim.count("hipStreamDestroy") == destroyed + 1
    with pytest.raises(DeviceError, match="ForeignStream used after its device was closed"):
        left_open.synchronize()
    array = library.array(ROWS)
    assert np.array_equal(library.read(array), ROWS)


class CudaStream:
    """As cuda.core and others give their streams."""

    def __init__(self, version, address):
        self.given = version, address

    def __cuda_stream__(self):
        return self.given


def test_streams_are_named_by_address_or_protocol(library, hip_device, emulator_device):
    address = int(library.stream)
    for given, expected in ((address, address), (np.uint64(address), address), (CudaStream(0, address), address), (CudaStream(0, 1), 0)):
        with hip_device.stream_at(given) as stream:
            assert hip_device.stream_address(stream) == expected
    for device in (hip_device, emulator_device):
        for default in (None, 0, 1, CudaStream(0, 0)):
            with device.stream_at(default) as stream:
                assert device.stream_address(stream) == 0
        for wrong, error, message in (
            (2, ValueError, "stream is 2, the default stream of each thread"),
            (CudaStream(0, 2), ValueError, "stream is 2, the default stream of each thread"),
            (-1, ValueError, r"stream is -1, which is no address: 0 to 2\*\*64 - 1"),
            (1 << 64, ValueError, "stream is 18446744073709551616, which is no address"),
            (CudaStream(1, address), ValueError, "__cuda_stream__ is of version 1; 0 is understood"),
            (True, TypeError, "stream is True; an address"),
            (4096.0, TypeError, "stream is 4096.0; an address"),
            ("cuda:0", TypeError, "stream is 'cuda:0'; an address"),
        ):
            with pytest.raises(error, match=message):
                device.stream_at(wrong)
    with pytest.raises(ValueError, match=f"stream is {address:#x}; on the emulator there are no streams of other libraries"):
        emulator_device.stream_at(address)


def test_what_is_no_stream_of_ours_is_refused(device):
    with device.allocate(4) as buffer, device.event() as event, device.stream() as stream:
        for call in (lambda: buffer.fill(0, 4096), lambda: event.record(4096), lambda: stream.wait(4096)):
            with pytest.raises(TypeError, match=r"a int is no stream or event of ours; Device.stream_at takes other libraries' streams"):
                call()


def test_the_default_stream_by_its_number_is_the_default_stream(device):
    with device.stream() as stream, device.stream_at(0) as default, device.event() as event, device.to_device(ROWS) as buffer:
        buffer.fill(0, stream)
        buffer.upload(ROWS, default)
        event.record(default)
        default.wait(event)
        default.synchronize()
        assert np.array_equal(buffer.download(ROWS.shape, "f4", default), ROWS)
        with pytest.raises(ValueError, match="capture on the default stream, which cannot be captured"), device.capture(default):
            pass
        with device.capture(stream) as graph, pytest.raises(DeviceError, match="work on the default stream during a capture"):
            buffer.fill(0, default)
        graph.close()


def test_a_foreign_stream_is_captured_whichever_stream_of_ours_it_is_given_by(foreign, library, hip_device):
    with hip_device.stream_at(int(library.stream)) as again, hip_device.allocate(4) as buffer:
        with hip_device.capture(foreign) as graph:
            buffer.fill(7, again)
        with graph:
            with pytest.raises(DeviceError, match="Buffer closed while a graph uses it"):
                buffer.close()
            buffer.fill(0)
            graph.launch(foreign)
            assert (buffer.download(4, np.uint8, again) == 7).all()


# ---- a slow writer before, a reader behind, both on the caller's stream ----


@pytest.fixture(params=["as late as may be", "others first"])
def order(request, shim):
    """Both orders that the shim has: right results must be right in both."""
    with shim.others_first() if request.param == "others first" else nullcontext():
        yield request.param


@pytest.fixture
def decoded(hip_device):
    """(made, arrays, plan, results) of a small batch."""
    made = make(SMALL)
    with Arrays(hip_device, made) as arrays, plan(hip_device, **table_of(made), **options_of(made)) as a_plan:
        expected = arrays.run_for_results(a_plan)
        arrays.poison()
        hip_device.synchronize()
        yield made, arrays, a_plan, expected


def views(arrays):
    """out and lse as arrays that the library can read."""
    return as_array(arrays.out, dtype=BF16, shape=(*arrays.shape, 512)), as_array(arrays.lse, dtype="f4", shape=arrays.shape)


def test_a_run_on_the_callers_stream_comes_between(order, decoded, foreign, library):
    made, arrays, a_plan, expected = decoded
    q = library.array(made.arguments["q"])  # queued
    a_plan.run(silent(q, arrays), arrays.cache, out=arrays.out, lse=arrays.lse, stream=foreign)
    assert_same_bits([library.read(array) for array in views(arrays)], expected)


def silent(array, arrays):
    """The library's array without its protocol, which would order the streams."""
    return DeviceArray(array.address, array.shape, array.dtype, arrays.device, owner=array)


@pytest.mark.parametrize("left_out", [None, "before", "behind"])
@pytest.mark.parametrize("by", ["address", "event"])
def test_a_run_on_another_stream_is_ordered_by_two_calls(by, left_out, order, decoded, foreign, library, hip_device):
    made, arrays, a_plan, expected = decoded
    theirs = int(library.stream)
    q = library.array(made.arguments["q"])
    with hip_device.stream() as ours, hip_device.event() as written, hip_device.event() as done:
        if left_out != "before":
            if by == "address":
                hip_device.follow(theirs, ours)
            else:
                written.record(foreign)
                ours.wait(written)
        a_plan.run(silent(q, arrays), arrays.cache, out=arrays.out, lse=arrays.lse, stream=ours)
        if left_out != "behind":
            if by == "address":
                hip_device.precede(theirs)
            else:
                done.record(ours)
                foreign.wait(done)
        out, lse = (library.read(array) for array in views(arrays))
    if left_out is None or (left_out == "before" and order == "as late as may be"):
        assert_same_bits([out, lse], expected)  # without the order before: by chance, for the run is as late as its reader
    else:  # the queries were still NaN, or the results what they had been poisoned with
        assert np.isnan(lse).all() and np.isnan(out.astype(np.float32)).all()
        assert (lse.view(np.uint32) == 0xFFFFFFFF).all() == (left_out == "behind")


@pytest.mark.parametrize("ordered", [True, False])
def test_an_append_comes_between_too(ordered, order, foreign, library, hip_device):
    with PagedKVCache(hip_device, 1, 4, "bf16") as cache, hip_device.to_device(np.arange(3)) as slots, hip_device.stream() as other:
        hip_device.synchronize()
        rows = library.array(ROWS)  # queued
        new_kv = DeviceArray(rows.address, ROWS.shape, "f4", hip_device, owner=rows)
        cache.append(new_kv, slots, foreign if ordered else other)
        stored = library.read(as_array(cache.rows, dtype=BF16, shape=(4, 576)))
        other.synchronize()
        assert np.array_equal(stored[:3], ROWS.astype(stored.dtype)) == ordered


def test_a_new_plan_is_ready_for_any_stream(foreign, library, hip_device):
    """What `plan` itself gives the default stream is done when it returns: a stream apart from that one does not wait for it."""
    made = make(SMALL)
    with Arrays(hip_device, made) as arrays:
        hip_device.synchronize()
        with plan(hip_device, **table_of(made), **options_of(made)) as a_plan:
            arrays.run(a_plan, foreign)
            results = arrays.results(foreign)
            assert_same_bits(results, arrays.run_for_results(a_plan))


@pytest.mark.parametrize("protocol", ["dlpack", "interface", "precede"])
def test_what_is_given_away_is_behind_work_on_foreign_streams_too(protocol, order, foreign, hip_device):
    """They may be apart from the default stream, which is behind all others."""
    with Library() as reader, hip_device.to_device(np.zeros_like(ROWS)) as buffer:
        array = as_array(buffer, dtype="f4", shape=ROWS.shape)
        hip_device.synchronize()
        buffer.upload(ROWS, foreign)  # queued
        if protocol == "dlpack":
            assert array.__dlpack__(stream=int(reader.stream))
        elif protocol == "interface":
            assert array.__cuda_array_interface__["stream"] == 1
            reader.order(0, int(reader.stream))
        else:
            hip_device.precede(int(reader.stream))
        assert np.array_equal(reader.read(array), ROWS)


def test_on_the_emulator_the_same_calls_order_what_is_done_at_once(emulator_device):
    made = make(SMALL)
    device = emulator_device
    with Arrays(device, made) as arrays, plan(device, **table_of(made), **options_of(made)) as a_plan, device.event() as written:
        expected = arrays.run_for_results(a_plan)
        arrays.poison()
        arrays.q.fill(0xFF)
        with device.stream() as theirs, device.stream() as ours:
            arrays.q.upload(made.arguments["q"], theirs)
            written.record(theirs)
            ours.wait(written)
            device.follow(0, ours)
            arrays.run(a_plan, ours)
            device.precede(0)
            assert_same_bits(arrays.results(theirs), expected)
