"""Graphs: what is captured is launched again as a whole, in its stream's order, and stays alive as long as the graph."""

from __future__ import annotations

import numpy as np
import pytest

from mla_rt.device import Device
from mla_rt.errors import DeviceError


@pytest.fixture
def doubling(device: Device, sample):
    """(prepared launch of out = 2 * x, x, out) on 256 floats."""
    with device.load(sample) as module, device.allocate(1024) as x, device.allocate(1024) as out:
        values = {"n": np.int32(256), "scale": np.float32(2), "flag": np.uint8(0), "shift": np.float64(0)}
        yield device.prepare(module.kernel("scale_add"), 1, x=x, y=None, out=out, **values), x, out


def ramp(start: float) -> np.ndarray:
    return np.arange(start, start + 256, dtype=np.float32)


def test_a_graph_runs_on_what_memory_holds_when_it_is_launched(device, doubling):
    prepared, x, out = doubling
    with device.stream() as stream:
        x.upload(ramp(0))
        out.fill(0)
        with device.capture(stream) as graph:
            out.fill(0xFF, stream)
            prepared.launch(stream)
        assert not out.download(256, np.float32).any()  # nothing ran yet
        with graph:
            for start in (0, 1000):
                x.upload(ramp(start), stream)
                graph.launch(stream)
                assert np.array_equal(out.download(256, np.float32, stream), 2 * ramp(start))


def test_a_graph_has_the_arguments_of_its_capture(device, doubling):
    prepared, x, out = doubling
    with device.stream() as stream, device.capture(stream) as graph:
        prepared.launch(stream)
        prepared.set_value("scale", np.float32(3))
        prepared.launch(stream)  # the second writes over the first
        prepared.set_value("scale", np.float32(5))
    with graph:
        x.upload(ramp(1))
        graph.launch()
        assert np.array_equal(out.download(256, np.float32), 3 * ramp(1))


def test_a_graph_keeps_what_it_uses(device, doubling):
    prepared, x, out = doubling
    with device.stream() as stream:
        with device.capture(stream) as graph:
            prepared.launch(stream)
        x.upload(ramp(2))
        for used in (x, out, prepared.kernel.module):
            with pytest.raises(DeviceError, match=f"{type(used).__name__} closed while a graph uses it; close the graph first"):
                used.close()
        with device.allocate(4):  # what it does not use is closed as ever
            pass
    graph.launch()  # its stream is gone: a graph does not need it
    assert np.array_equal(out.download(256, np.float32), 2 * ramp(2))
    graph.close()
    graph.close()
    with pytest.raises(DeviceError, match="Graph used after it was closed"):
        graph.launch()
    x.close()


def test_launches_on_other_streams_are_not_captured(device, doubling):
    prepared, x, out = doubling
    x.upload(ramp(3))
    with device.stream() as stream, device.stream() as other:
        with device.capture(stream) as graph:
            prepared.launch(other)
        assert not graph._kept
        assert np.array_equal(out.download(256, np.float32, other), 2 * ramp(3))
        out.fill(0)
        with graph:
            graph.launch(stream)
            assert not out.download(256, np.float32, stream).any()


def test_what_cannot_be_captured_is_refused_and_the_capture_goes_on(device, doubling, sample):
    prepared, x, out = doubling
    x.upload(ramp(4))
    with device.stream() as stream, device.stream() as other, device.event() as event:
        event.record(other)
        with device.capture(stream) as graph:
            for call in (
                lambda: device.allocate(4),
                lambda: device.to_device(ramp(0)),
                lambda: device.load(sample),
                lambda: x.upload(ramp(0), stream),
                lambda: x.upload(ramp(0), other),
                lambda: out.download(256, np.float32, stream),
                lambda: x.fill(0),
                lambda: prepared.launch(),
                x.close,
                stream.synchronize,
                other.synchronize,
                device.synchronize,
                lambda: event.record(stream),
                lambda: stream.wait(event),
                event.synchronize,
                graph.launch,
            ):
                with pytest.raises(DeviceError, match=r"during a capture|before its capture has ended"):
                    call()
            with pytest.raises(DeviceError, match="a capture is under way"), device.capture(other):
                pass
            prepared.launch(stream)
        with graph:
            graph.launch(stream)
            assert np.array_equal(out.download(256, np.float32, stream), 2 * ramp(4))


def test_a_capture_that_fails_leaves_nothing(device, doubling):
    prepared, x, out = doubling
    before = len(device._resources)
    with device.stream() as stream:
        with pytest.raises(ZeroDivisionError), device.capture(stream) as graph:
            prepared.launch(stream)
            1 / 0  # noqa: B018 - the failure
        with pytest.raises(DeviceError, match="Graph used after it was closed"):
            graph.launch(stream)
        x.upload(ramp(5), stream)
        prepared.launch(stream)  # the stream is one as before
        assert np.array_equal(out.download(256, np.float32, stream), 2 * ramp(5))
    assert len(device._resources) == before


def test_the_default_stream_cannot_be_captured(device):
    with pytest.raises(TypeError, match="capture on a NoneType; a Stream is needed"), device.capture(None):
        pass


def test_a_device_is_closed_with_its_graphs(sample):
    from mla_rt import open_device

    with open_device("emulator") as device:
        stream, buffer = device.stream(), device.allocate(4)
        with device.capture(stream) as graph:
            buffer.fill(1, stream)
    with pytest.raises(DeviceError, match="Graph used after its device was closed"):
        graph.launch()


def test_a_graph_waits_its_turn_on_the_stream(hip_device, shim):
    with hip_device.stream() as stream, hip_device.allocate(4) as buffer:
        hip_device.synchronize()
        with hip_device.capture(stream) as graph:
            buffer.fill(2, stream)
        buffer.fill(1, stream)
        with graph:
            graph.launch(stream)
            assert shim.pending() == 2
            assert (buffer.download(4, np.uint8, stream) == 2).all()


@pytest.mark.parametrize("name", ["hipStreamBeginCapture", "hipStreamEndCapture", "hipGraphInstantiateWithFlags", "hipGraphLaunch"])
def test_errors_of_hip_are_named(name, hip_device, shim):
    with hip_device.stream() as stream, hip_device.allocate(4) as buffer:
        shim.fail_next(name, 1)

        def use():
            with hip_device.capture(stream) as graph:
                buffer.fill(0, stream)
            with graph:
                graph.launch(stream)

        with pytest.raises(DeviceError, match=name):
            use()
        shim.reset()
        use()
