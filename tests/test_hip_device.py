"""What only the HIP device does, seen through the stand-in runtime: errors with HIP's text, streams, pinned staging; and that runtime itself."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hip import hip

from mla_rt import hip_device as hip_device_module
from mla_rt.device import Device, open_device
from mla_rt.errors import DeviceError, KernelFault
from mla_rt.hip_device import HipDevice
from mla_rt.resources import Module

if TYPE_CHECKING:
    from shim.library import Shim

SUCCESS = hip.hipError_t.hipSuccess
INVALID_VALUE = hip.hipError_t.hipErrorInvalidValue


@pytest.fixture
def device(hip_device: Device, shim: Shim) -> Iterator[Device]:
    yield hip_device
    shim.reset()


@pytest.fixture
def module(device: Device, sample: Path) -> Iterator[Module]:
    with device.load(sample) as loaded:
        yield loaded


def ramp(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


def use_everything(device: Device, sample: Path) -> None:
    with device.load(sample) as module, device.stream() as stream, device.event() as start, device.event() as end:
        x, out = device.to_device(ramp(256)), device.allocate(1024)
        start.record(stream)
        x.upload(ramp(256), stream)
        out.fill(0xFF, stream)
        device.launch(module.kernel("reverse"), 1, stream=stream, x=x, out=out)
        end.record(stream)
        stream.wait(end)
        end.elapsed_ms(start)
        out.download(256, np.float32)
        device.synchronize()
        x.free()
        out.free()


USED = [
    *("hipMalloc", "hipFree", "hipHostMalloc", "hipMemcpy", "hipMemcpyAsync", "hipMemsetAsync", "hipModuleLoadData", "hipModuleUnload"),
    *("hipModuleGetFunction", "hipModuleLaunchKernel", "hipStreamCreateWithFlags", "hipStreamDestroy", "hipStreamSynchronize"),
    *("hipStreamWaitEvent", "hipEventCreate", "hipEventDestroy", "hipEventRecord", "hipEventSynchronize", "hipEventElapsedTime"),
    "hipDeviceSynchronize",
]


@pytest.mark.parametrize("name", USED)
def test_every_error_is_a_device_error_with_its_call_and_text(name: str, shim: Shim, sample: Path) -> None:
    with shim.one_gpu():
        device = open_device("hip")
    use_everything(device, sample)
    device._close()  # drops the pinned blocks kept for reuse, so that the next upload needs a new one
    calls = shim.count(name)
    shim.fail_next(name, 1)
    with pytest.raises(DeviceError, match=rf"^{name}: hipErrorInvalidValue \(1\): invalid argument$"):
        use_everything(device, sample)
    assert shim.count(name) == calls + 1 or name in ("hipFree", "hipEventDestroy", "hipStreamDestroy", "hipStreamSynchronize", "hipModuleUnload")
    shim.reset()
    device.close()


@pytest.mark.parametrize("name", ["hipGetDeviceCount", "hipGetDevicePropertiesR0600", "hipDeviceGetAttribute"])
def test_errors_on_opening(name: str, shim: Shim) -> None:
    with shim.one_gpu():
        shim.fail_next(name, 2)
        with pytest.raises(DeviceError, match=r"^hip\w+: hipErrorOutOfMemory \(2\): out of memory$"):
            open_device("hip")


def test_an_error_unknown_to_hip_python(device: Device, shim: Shim) -> None:
    shim.fail_next("hipMalloc", 12345)
    with pytest.raises(DeviceError, match=r"^hipMalloc: .*12345"):
        device.allocate(16)


def test_releases_that_take_the_properties_as_an_argument(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        """hip-python 6.x: the caller brings the structure, and text is bytes."""

        class Properties:
            gcnArchName = name = b""

        hipDeviceProp_t = Properties

        def __getattr__(self, name: str) -> Any:
            return getattr(hip, name)

        def hipGetDeviceProperties(self, properties: Properties, device: int) -> tuple[Any]:
            properties.gcnArchName, properties.name = b"gfx950:sramecc+:xnack-", b"AMD Instinct"
            return (SUCCESS,)

    monkeypatch.setattr(HipDevice, "_hip", Older())
    with shim.one_gpu(), open_device("hip") as device:
        assert (device.arch, device.name) == ("gfx950", "AMD Instinct")


def test_work_waits_in_the_stream_that_was_given(device: Device, module: Module, shim: Shim) -> None:
    """Work put into another stream, the default one too, would still be waiting after this stream was waited for."""
    with device.stream() as stream, device.event() as event, device.allocate(1024) as x, device.allocate(1024) as out:
        operations: list[Callable[[], Any]] = [
            lambda: x.upload(ramp(256), stream),
            lambda: out.fill(0, stream),
            lambda: device.launch(module.kernel("reverse"), 1, stream=stream, x=x, out=out),
            lambda: event.record(stream),
            lambda: stream.wait(event),
        ]
        for operation in operations:
            operation()
            assert shim.pending() == 1
            stream.synchronize()
            assert shim.pending() == 0
        assert np.array_equal(out.download(256, np.float32, stream), ramp(256)[::-1])


def test_waiting_for_one_stream_leaves_another_alone(device: Device, shim: Shim) -> None:
    with device.stream() as first, device.stream() as second, device.allocate(4) as x, device.allocate(4) as y:
        x.fill(1, first)
        y.fill(2, second)
        first.synchronize()
        assert shim.pending() == 1
        device.synchronize()
        assert shim.pending() == 0


def test_an_order_that_was_not_asked_for_is_not_there(device: Device, module: Module, shim: Shim) -> None:
    """The stand-in runs work as late as it may, so a forgotten `wait` always shows."""
    with device.stream() as first, device.stream() as second, device.allocate(1024) as x, device.allocate(1024) as out:
        x.fill(0)
        x.upload(ramp(256), first)
        device.launch(module.kernel("reverse"), 1, stream=second, x=x, out=out)
        assert (out.download(256, np.float32, second) == 0).all()


def test_faults_are_reported_at_the_wait(device: Device, module: Module, shim: Shim) -> None:
    with device.stream() as stream, device.to_device(ramp(64)) as short:
        device.launch(module.kernel("reverse"), 1, stream=stream, x=short, out=short)  # reads 256 elements
        with pytest.raises(DeviceError, match=r"^hipStreamSynchronize: hipErrorLaunchFailure \(719\): unspecified launch failure$"):
            stream.synchronize()
        assert isinstance(shim.fault, KernelFault) and "reverse" in str(shim.fault)
        stream.synchronize()  # reported once


def test_pinned_blocks_are_used_again(device: Device, shim: Shim) -> None:
    with device.stream() as stream, device.allocate(1024) as x:
        x.upload(ramp(256), stream)
        stream.synchronize()
        made = shim.count("hipHostMalloc")
        for _ in range(10):
            x.upload(ramp(256), stream)
            x.download(256, np.float32, stream)
        assert shim.count("hipHostMalloc") == made


def test_pinned_bytes_in_flight_are_limited(device: Device, shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip_device_module, "STAGING_LIMIT", 4096)
    with device.stream() as stream, device.allocate(1024) as x:
        waits = shim.count("hipStreamSynchronize")
        for i in range(20):
            x.upload(ramp(256) + np.float32(i), stream)
        assert shim.count("hipStreamSynchronize") == waits + 4
        assert np.array_equal(x.download(256, np.float32, stream), ramp(256) + np.float32(19))


def test_closing_releases_everything(shim: Shim, sample: Path) -> None:
    def balance() -> list[int]:
        pairs = [("hipMalloc", "hipFree"), ("hipHostMalloc", "hipHostFree"), ("hipModuleLoadData", "hipModuleUnload")]
        pairs += [("hipStreamCreateWithFlags", "hipStreamDestroy"), ("hipEventCreate", "hipEventDestroy")]
        return [shim.count(make) - shim.count(release) for make, release in pairs]

    before = balance()
    with shim.one_gpu(), open_device("hip") as device:
        device.load(sample)
        buffer, stream = device.to_device(ramp(256)), device.stream()
        buffer.upload(ramp(256), stream)
        device.event().record(stream)
        assert balance() == [count + 1 for count in before]
    assert balance() == before
    assert shim.pending() == 0


# The stand-in runtime, called through hip-python without our layer: what it must refuse, or it would hide our mistakes.


def test_copies_must_stay_inside_live_memory(device: Device) -> None:
    host = np.zeros(2048, np.uint8)
    address = host.ctypes.data
    to_device, to_host = hip.hipMemcpyKind.hipMemcpyHostToDevice, hip.hipMemcpyKind.hipMemcpyDeviceToHost
    with device.allocate(1024) as buffer:
        inside = buffer.address
        assert hip.hipMemcpy(inside, address, 1024, to_device) == (SUCCESS,)
        assert hip.hipMemcpy(inside + 1, address, 1024, to_device) == (INVALID_VALUE,)
        assert hip.hipMemcpy(inside, address, 1025, to_device) == (INVALID_VALUE,)
        assert hip.hipMemcpy(address, inside + 1000, 25, to_host) == (INVALID_VALUE,)
        assert hip.hipMemcpy(address, inside, 4, to_device) == (INVALID_VALUE,)  # the host's side named as the device's
        assert hip.hipMemsetAsync(inside, 0, 1025, None) == (INVALID_VALUE,)
        assert hip.hipFree(inside + 256) == (INVALID_VALUE,)
    assert hip.hipMemcpy(inside, address, 4, to_device) == (INVALID_VALUE,)
    assert hip.hipFree(inside) == (INVALID_VALUE,)


def test_launches_must_fit_the_kernel(device: Device, sample: Path) -> None:
    error, module = hip.hipModuleLoadData(sample.read_bytes())
    assert error == SUCCESS
    error, reverse = hip.hipModuleGetFunction(module, b"reverse")
    assert error == SUCCESS
    two, three = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 3)()

    class Pair(ctypes.Structure):
        _fields_ = [("pointers", type(two))]

    class Triple(ctypes.Structure):
        _fields_ = [("pointers", type(three))]

    launch = hip.hipModuleLaunchKernel
    configuration = hip.hipError_t.hipErrorInvalidConfiguration
    assert launch(reverse, 1, 1, 1, 256, 1, 1, 0, None, None, (Triple(),)) == (INVALID_VALUE,)
    assert launch(reverse, 1, 1, 1, 256, 1, 1, 0, None, None, None) == (INVALID_VALUE,)
    assert launch(reverse, 0, 1, 1, 256, 1, 1, 0, None, None, (Pair(),)) == (configuration,)
    assert launch(reverse, 1, 1, 1, 64, 1, 1, 0, None, None, (Pair(),)) == (configuration,)
    assert launch(reverse, 1, 1, 1, 256, 1, 1, 1 << 20, None, None, (Pair(),)) == (configuration,)
    assert hip.hipModuleGetFunction(module, b"none")[0] == hip.hipError_t.hipErrorNotFound
    assert hip.hipModuleUnload(module) == (SUCCESS,)
    assert hip.hipModuleUnload(module) == (hip.hipError_t.hipErrorInvalidHandle,)


def test_globals_lie_in_device_memory(device: Device, sample: Path) -> None:
    _, module = hip.hipModuleLoadData(sample.read_bytes())
    value = np.zeros(1, np.int32)
    for name, expected in (("BLOCK", 256), ("NEGATIVE", -7), ("value", 12345)):
        error, address, nbytes = hip.hipModuleGetGlobal(module, name.encode())
        assert error == SUCCESS and nbytes == 4
        assert hip.hipMemcpy(value.ctypes.data, address, 4, hip.hipMemcpyKind.hipMemcpyDeviceToHost) == (SUCCESS,)
        assert value[0] == expected
    assert hip.hipModuleGetGlobal(module, b"none")[0] == hip.hipError_t.hipErrorNotFound
    hip.hipModuleUnload(module)


def test_images_for_others_are_refused(device: Device, compile_sample: Callable[[str], Path]) -> None:
    assert hip.hipModuleLoadData(compile_sample("gfx942").read_bytes())[0] == hip.hipError_t.hipErrorNoBinaryForGpu
    assert hip.hipModuleLoadData(bytes(64))[0] == INVALID_VALUE
