"""The Device protocol, alike on the emulator and, through real hip-python on the stand-in runtime, on HIP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from mla_rt import code_object
from mla_rt.device import Device, open_device
from mla_rt.errors import DeviceError, UnsupportedArch
from mla_rt.resources import Buffer, Module

if TYPE_CHECKING:
    from shim.library import Shim

ROOT = Path(__file__).resolve().parent.parent
POISON = np.float32(-777.0)


@pytest.fixture
def module(device: Device, sample: Path) -> Iterator[Module]:
    with device.load(sample) as loaded:
        yield loaded


@pytest.fixture
def other_device(device: Device, shim: Shim) -> Iterator[Device]:
    """A second device of the same kind."""
    with shim.one_gpu() if device.kind == "hip" else nullcontext():
        opened = open_device(device.kind)
    yield opened
    opened.close()


def scale_add(device: Device, module: Module, x: Buffer, out: Buffer, n: int, *, y: Buffer | None = None, scale: float = 2.0, **rest: Any) -> None:
    """out = x * scale + y over n elements, with whole workgroups of 256."""
    arguments = {"x": x, "y": y, "out": out, "n": np.int32(n), "scale": np.float32(scale), "flag": np.uint8(0), "shift": np.float64(0)}
    device.launch(module.kernel("scale_add"), -(-n // 256), **(arguments | rest))


def ramp(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_upload_and_download(device: Device, dtype: Any) -> None:
    array = np.arange(105).reshape(3, 5, 7).astype(dtype)
    with device.allocate(array.nbytes) as buffer:
        assert buffer.nbytes == array.nbytes and buffer.address % 256 == 0
        buffer.upload(array)
        assert np.array_equal(buffer.download((3, 5, 7), dtype), array)
        assert np.array_equal(buffer.download(array.nbytes, np.uint8), np.frombuffer(array.tobytes(), np.uint8))


def test_strided_arrays_are_uploaded_in_c_order(device: Device) -> None:
    big = ramp(60).reshape(6, 10)
    for array in (big[:, :7], big.T, big[::-2, ::3]):
        with device.to_device(array) as buffer:
            assert np.array_equal(buffer.download(array.shape, np.float32), array)


def test_buffers_do_not_overlap(device: Device) -> None:
    buffers = [device.to_device(np.full(100, i, np.uint8)) for i in range(20)]
    for i, buffer in enumerate(buffers):
        assert (buffer.download(100, np.uint8) == i).all()
        buffer.free()


def test_fill(device: Device) -> None:
    with device.to_device(ramp(100)) as buffer:
        buffer.fill(0xAB)
        assert (buffer.download(400, np.uint8) == 0xAB).all()
        for byte in (-1, 256):
            with pytest.raises(ValueError, match=f"fill with {byte}"):
                buffer.fill(byte)


def test_empty_buffers(device: Device) -> None:
    with device.to_device(np.empty((0, 576), np.float32)) as buffer:
        assert (buffer.nbytes, buffer.address) == (0, 0)
        buffer.fill(1)
        assert buffer.download((0, 3), np.int32).shape == (0, 3)


def test_a_part_of_a_buffer_is_uploaded(device: Device) -> None:
    with device.to_device(ramp(100)) as buffer, device.stream() as stream:
        buffer.upload(np.zeros(3, np.float32), offset=40)
        buffer.upload(np.ones(2, np.float32), stream, offset=392)
        buffer.upload(np.zeros(0, np.float32), offset=400)
        expected = ramp(100)
        expected[10:13], expected[98:] = 0, 1
        assert np.array_equal(buffer.download(100, np.float32, stream), expected)
        for offset in (-4, 396):
            with pytest.raises(ValueError, match=f"upload of 8 bytes at byte {offset} of a buffer of 400"):
                buffer.upload(ramp(2), offset=offset)


def test_wrong_sizes_and_types_are_refused(device: Device) -> None:
    with device.allocate(400) as buffer:
        for n in (99, 101, 0):
            with pytest.raises(ValueError, match=f"upload of {4 * n} bytes .* into a buffer of 400"):
                buffer.upload(ramp(n))
            with pytest.raises(ValueError, match=f"download of {4 * n} bytes .* from a buffer of 400"):
                buffer.download(n, np.float32)
        with pytest.raises(TypeError, match="a numpy array is needed, not list"):
            buffer.upload([0.0] * 100)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a numpy array is needed"):
        device.to_device(1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not negative"):
        device.allocate(-1)


def test_no_room_is_a_device_error(device: Device) -> None:
    with pytest.raises(DeviceError, match="alloc"):
        device.allocate(1 << 60)


def test_use_after_free(device: Device, module: Module) -> None:
    buffer, out = device.to_device(ramp(256)), device.allocate(1024)
    buffer.free()
    buffer.free()  # again: nothing
    uses: list[Callable[[], Any]] = [
        lambda: buffer.address,
        lambda: buffer.upload(ramp(256)),
        lambda: buffer.download(256, np.float32),
        lambda: buffer.fill(0),
        lambda: scale_add(device, module, buffer, out, 256),
    ]
    for use in uses:
        with pytest.raises(DeviceError, match="Buffer used after it was closed"):
            use()
    assert "freed" in repr(buffer)
    out.free()


def test_use_after_close_of_the_device(other_device: Device, sample: Path) -> None:
    device = other_device
    buffer, stream, event = device.to_device(ramp(256)), device.stream(), device.event()
    module = device.load(sample)
    kernel = module.kernel("reverse")
    with device:
        pass
    device.close()  # again: nothing
    assert device.closed and "closed" in repr(device)
    uses: list[Callable[[], Any]] = [
        lambda: device.allocate(1),
        lambda: device.to_device(ramp(1)),
        lambda: device.load(sample),
        device.stream,
        device.event,
        device.synchronize,
        lambda: device.launch(kernel, 1, x=buffer, out=buffer),
        lambda: buffer.address,
        lambda: buffer.fill(0),
        stream.synchronize,
        lambda: stream.wait(event),
        event.record,
        event.synchronize,
        lambda: module.kernel("reverse"),
    ]
    for use in uses:
        with pytest.raises(DeviceError, match=r"used after (it|its device) was closed"):
            use()
    for resource in (buffer, stream, event, module):
        resource.close()  # the device has released it: nothing


def test_use_after_close_of_its_maker(device: Device, sample: Path) -> None:
    module, stream, event = device.load(sample), device.stream(), device.event()
    kernel = module.kernel("reverse")
    for resource in (module, stream, event):
        resource.close()
    with device.to_device(ramp(256)) as buffer:
        uses: list[Callable[[], Any]] = [
            lambda: device.launch(kernel, 1, x=buffer, out=buffer),
            lambda: buffer.fill(0, stream),
            stream.synchronize,
            event.record,
        ]
        for use in uses:
            with pytest.raises(DeviceError, match="used after it was closed"):
                use()


def test_launch_writes_what_it_should_and_no_more(device: Device, module: Module) -> None:
    n = 1000  # not a multiple of the block of 256: the last workgroup's tail must write nothing
    x, y = ramp(n), np.float32(0.5) * ramp(n)[::-1]
    with device.to_device(x) as dx, device.to_device(y) as dy, device.to_device(np.full(1024, POISON)) as out:
        scale_add(device, module, dx, out, n, y=dy, scale=-3.0)
        result = out.download(1024, np.float32)
        assert np.array_equal(result[:n], x * np.float32(-3) + y)
        assert (result[n:] == POISON).all()
        scale_add(device, module, dx, out, n, y=None, flag=np.uint8(1), shift=np.float64(0.25))
        assert np.array_equal(out.download(1024, np.float32)[:n], x * 2 + np.float32(0.25))


@pytest.mark.parametrize("grid", [3, np.int64(3), (3,), (3, 1), (3, 1, 1)])
def test_lds_barrier_and_shapes_of_grid(grid: Any, device: Device, module: Module) -> None:
    x = ramp(768).reshape(3, 256)
    with device.to_device(x) as dx, device.to_device(np.full_like(x, POISON)) as out:
        device.launch(module.kernel("reverse"), grid, x=dx, out=out)
        assert np.array_equal(out.download((3, 256), np.float32), x[:, ::-1])


def test_the_image_is_relocated_and_zero_filled(device: Device, module: Module) -> None:
    with device.allocate(1024) as out:
        device.launch(module.kernel("follow"), 1, out=out)
        assert (out.download(256, np.int32) == 12345).all()


def test_module(device: Device, module: Module, sample: Path) -> None:
    assert module.constants == {"BLOCK": 256, "NEGATIVE": -7}
    assert sorted(module.kernels) == ["follow", "reverse", "scale_add"]
    kernel = module.kernel("reverse")
    assert module.kernel("reverse") is kernel and kernel.info is module.kernels["reverse"]
    assert repr(kernel) == "<Kernel reverse(x, out)>"
    with pytest.raises(ValueError, match=r"no kernel 'revers' in this code object; it has .*reverse"):
        module.kernel("revers")
    with device.load(sample.read_bytes()) as from_bytes:
        assert from_bytes.constants == module.constants


def test_another_arch_is_refused(device: Device, shim: Shim, compile_sample: Callable[[str], Path]) -> None:
    path = compile_sample("gfx942")
    loads = shim.count("hipModuleLoadData")
    for given in (path, path.read_bytes()):
        with pytest.raises(UnsupportedArch, match=r"gfx942.* is gfx950"):
            device.load(given)
    with pytest.raises(ValueError, match="not a code object"):
        device.load(b"no code object")
    assert shim.count("hipModuleLoadData") == loads


def test_a_prepared_launch_takes_its_arguments_as_they_are_now(device: Device, module: Module) -> None:
    x = ramp(256)
    with device.to_device(x) as dx, device.allocate(1024) as out, device.allocate(1024) as other, device.stream() as stream:
        values = {"n": np.int32(256), "scale": np.float32(2), "flag": np.uint8(0), "shift": np.float64(0)}
        prepared = device.prepare(module.kernel("scale_add"), 1, x=None, y=None, out=out, **values)
        prepared.set_address("x", dx.address)
        prepared.launch(stream)
        prepared.set_address("out", other.address)
        prepared.set_value("scale", np.float32(3))
        prepared.launch(stream)
        prepared.set_value("scale", np.float32(np.nan))  # after the launch: not its business any more
        for buffer, factor in ((out, 2), (other, 3)):
            assert np.array_equal(buffer.download(256, np.float32, stream), factor * x)
        with pytest.raises(TypeError, match="scale is passed by value in 4 bytes"):
            prepared.set_value("scale", np.float64(1))
        with pytest.raises(DeviceError, match="Stream used after it was closed"):
            stream.close()
            prepared.launch(stream)


def test_bad_launches_launch_nothing(device: Device, module: Module, other_device: Device, sample: Path) -> None:
    kernel = module.kernel("reverse")
    x, out, foreign = device.to_device(ramp(256)), device.to_device(np.full(256, POISON)), other_device.to_device(ramp(256))
    good: dict[str, Any] = {"x": x, "out": out}
    for grid in (0, -1, (), (1, 0), (1, 1, 1, 1), 1 << 24):
        with pytest.raises(ValueError, match="reverse: grid"):
            device.launch(kernel, grid, **good)
    with pytest.raises(TypeError):
        device.launch(kernel, 1.0, **good)  # type: ignore[arg-type]
    for dynamic in (-1, device.max_lds_bytes - 1023):
        with pytest.raises(ValueError, match=f"reverse: 1024 . {dynamic} bytes of LDS, at most {device.max_lds_bytes} are there"):
            device.launch(kernel, 1, dynamic_lds_bytes=dynamic, **good)
    with pytest.raises(TypeError, match="reverse: missing argument out"):
        device.launch(kernel, 1, x=x)
    with pytest.raises(TypeError, match="reverse: unknown argument n;"):
        device.launch(kernel, 1, n=np.int32(3), **good)
    with pytest.raises(TypeError, match="argument x is a pointer"):
        device.launch(kernel, 1, x=ramp(256), out=out)
    with pytest.raises(ValueError, match="argument x is a buffer of another device"):
        device.launch(kernel, 1, x=foreign, out=out)
    with pytest.raises(ValueError, match="stream belongs to another device"):
        device.launch(kernel, 1, stream=other_device.stream(), **good)
    with pytest.raises(ValueError, match="reverse was loaded on another device"):
        device.launch(other_device.load(sample).kernel("reverse"), 1, **good)
    assert (out.download(256, np.float32) == POISON).all()
    device.launch(kernel, 1, **good)
    assert np.array_equal(out.download(256, np.float32), ramp(256)[::-1])
    x.free()
    out.free()


def test_a_stream_keeps_its_order(device: Device, module: Module) -> None:
    array = ramp(256)
    with device.stream() as stream, device.allocate(1024) as x, device.allocate(1024) as out:
        x.fill(0xFF, stream)
        x.upload(array, stream)
        array[:] = POISON  # the upload took the bytes
        scale_add(device, module, x, out, 256, stream=stream)
        x.upload(array, stream)
        assert np.array_equal(out.download(256, np.float32, stream), ramp(256) * 2)
        assert (x.download(256, np.float32, stream) == POISON).all()


def test_events_order_streams(device: Device, module: Module) -> None:
    first, second, never, done = device.stream(), device.stream(), device.event(), device.event()
    with device.allocate(1024) as x, device.allocate(1024) as y, device.allocate(1024) as out:
        second.wait(never)  # never recorded: holds back nothing
        x.upload(ramp(256), first)
        scale_add(device, module, x, y, 256, stream=first)
        done.record(first)
        second.wait(done)
        scale_add(device, module, y, out, 256, stream=second, scale=4.0)
        assert np.array_equal(out.download(256, np.float32, second), ramp(256) * 8)
    for resource in (first, second, never, done):
        resource.close()


def test_the_default_stream_is_ordered_with_all(device: Device, module: Module) -> None:
    with device.stream() as stream, device.to_device(ramp(256)) as x, device.allocate(1024) as out:
        scale_add(device, module, x, out, 256, stream=stream)
        scale_add(device, module, out, x, 256)
        scale_add(device, module, x, out, 256, stream=stream)
        assert np.array_equal(out.download(256, np.float32), ramp(256) * 8)
        x.upload(np.full(256, POISON))
        assert np.array_equal(out.download(256, np.float32), ramp(256) * 8)


def test_times(device: Device, module: Module) -> None:
    start, end, never = device.event(), device.event(), device.event()
    with device.stream() as stream, device.to_device(ramp(256)) as x:
        start.record(stream)
        scale_add(device, module, x, x, 256, stream=stream)
        end.record(stream)
        assert 0 < end.elapsed_ms(start) < 60_000
        assert end.elapsed_ms(start) == -start.elapsed_ms(end)
        with pytest.raises(DeviceError, match="never recorded"):
            end.elapsed_ms(never)
        never.synchronize()
    for event in (start, end, never):
        event.close()


def test_opening_by_kind(device: Device) -> None:
    assert device.arch == "gfx950" and device.reason == "asked for"
    assert (device.num_compute_units, device.max_lds_bytes) == (256, 163840)
    assert repr(device) == f"<{device.kind} device {device.name} (gfx950)>"


def test_auto_takes_the_gpu_that_has_code_objects(shim: Shim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shim.one_gpu(), open_device("auto") as found:
        assert found.kind == "hip"
        assert found.reason == "a gfx950 GPU answers"
    (tmp_path / "gfx942").mkdir()
    (tmp_path / "gfx942" / "mla_decode.co").write_bytes(b"")
    monkeypatch.setattr(code_object, "CODE_OBJECTS", tmp_path)
    with shim.one_gpu(), open_device("auto") as found:
        assert found.kind == "emulator"
        assert found.reason == "no gfx942 GPU: shim over the emulator is gfx950"


def test_auto_takes_the_emulator_where_there_is_no_gpu(shim: Shim) -> None:
    with shim.one_gpu():
        pass  # hip-python has this runtime now, which shows no GPU
    with open_device("auto") as found:
        assert found.kind == "emulator"
        assert found.reason == "no GPU: HIP finds none"
    with pytest.raises(DeviceError, match="HIP finds no GPU"):
        open_device("hip")


def test_opening_for_an_arch(shim: Shim) -> None:
    with open_device("emulator", arch="gfx950") as found:
        assert found.arch == "gfx950"
    with pytest.raises(UnsupportedArch, match="the emulator is of gfx950, asked for was gfx942"):
        open_device("emulator", arch="gfx942")
    with shim.one_gpu():
        with open_device("hip", arch="gfx950") as found:
            assert found.kind == "hip"
        with pytest.raises(UnsupportedArch, match="shim over the emulator is gfx950, asked for was gfx942"):
            open_device("hip", arch="gfx942")


def test_opening_wrongly() -> None:
    with pytest.raises(ValueError, match="device kind 'cuda': it is 'auto', 'hip' or 'emulator'"):
        open_device("cuda")  # type: ignore[arg-type]
    for kind in (None, 0, ["auto"]):
        with pytest.raises(TypeError, match=r"device kind is .*; it is 'auto', 'hip' or 'emulator'"):
            open_device(kind)  # type: ignore[arg-type]
    for arch in (950, ["gfx950"]):
        with pytest.raises(TypeError, match=r"arch is .*; a str is needed"):
            open_device("emulator", arch=arch)  # type: ignore[arg-type]
    for seed, error in ((-1, ValueError), (1.0, TypeError), ("1", TypeError), (True, TypeError), ([1], TypeError)):
        with pytest.raises(error, match="seed is "):
            open_device("emulator", seed=seed)  # type: ignore[arg-type]
    for kind in ("auto", "hip"):
        with pytest.raises(ValueError, match="seed is an option of the emulator"):
            open_device(kind, seed=1)  # type: ignore[arg-type]


def in_a_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


OPEN = """
from mla_rt.device import open_device
from mla_rt.errors import DeviceError
try:
    open_device("hip")
except DeviceError as error:
    print(error)
with open_device("auto") as device:
    print(device.kind, device.reason)
"""


def test_without_the_runtime() -> None:
    if in_a_new_process("import ctypes\ntry: ctypes.CDLL('libamdhip64.so'); print(1)\nexcept OSError: pass"):
        pytest.skip("this machine has the HIP runtime")
    error, auto = in_a_new_process(OPEN).splitlines()
    assert "hipGetDeviceCount: no HIP runtime" in error and "libamdhip64.so" in error and error.endswith("install ROCm (7.0 or later for gfx950)")
    assert auto == "emulator no GPU: libamdhip64.so is not there"


def test_without_hip_python() -> None:
    error, auto = in_a_new_process("import sys; sys.modules['hip'] = None" + OPEN).splitlines()
    assert "hip-python cannot be imported" in error and error.endswith("pip install hip-python")
    assert auto == "emulator no GPU: hip-python cannot be imported"


def test_importing_the_device_module_imports_no_backend() -> None:
    loaded = in_a_new_process("import sys, mla_rt, mla_rt.device; print(*sys.modules)").split()
    assert "mla_rt.device" in loaded
    assert not {"hip", "rocm", "torch", "mla_rt.hip_device", "mla_rt.emulator_device", "mla_rt.emulator"} & set(loaded)
