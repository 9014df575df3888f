"""What only the emulator device does: faults at the launch, schedules drawn from a seed, progress and reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mla_rt.device import open_device
from mla_rt.emulator_device import EmulatorDevice
from mla_rt.errors import KernelFault


def ramp(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


def test_faults_are_raised_at_the_launch(emulator_device: EmulatorDevice, sample: Path) -> None:
    with emulator_device.load(sample) as module, emulator_device.to_device(ramp(64)) as short, emulator_device.allocate(1024) as out:
        with pytest.raises(KernelFault, match=r"reverse.*wave 1, lane 0"):  # lane 64 of the workgroup is the first to read past 64 elements
            emulator_device.launch(module.kernel("reverse"), 1, x=short, out=out)
        short.free()
        with pytest.raises(KernelFault, match="follow"):  # the null pointer
            emulator_device.launch(module.kernel("follow"), 1, out=None)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_schedules_do_not_change_a_right_kernel(seed: int | None, sample: Path) -> None:
    x = ramp(1024).reshape(4, 256)
    with open_device("emulator", seed=seed) as device, device.to_device(x) as dx, device.allocate(4096) as out:
        assert isinstance(device, EmulatorDevice) and device.seed == seed
        device.launch(device.load(sample).kernel("reverse"), 4, x=dx, out=out)
        assert np.array_equal(out.download((4, 256), np.float32), x[:, ::-1])


def test_progress_and_reports(sample: Path) -> None:
    with open_device("emulator") as device, device.to_device(ramp(512)) as x, device.allocate(2048) as out:
        assert isinstance(device, EmulatorDevice) and not device.reports
        kernel = device.load(sample).kernel("reverse")
        calls: list[tuple[int, int]] = []
        device.progress = lambda done, total: calls.append((done, total))
        device.launch(kernel, 2, x=x, out=out)
        device.progress = None
        device.launch(kernel, 1, x=x, out=out)
        assert calls and all(0 <= done <= total for done, total in calls)
        two, one = device.reports
        assert two.num_instructions == 2 * one.num_instructions > 0
        assert one.seconds > 0


def test_memory_is_poisoned_and_given_back(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_device("emulator") as device:
        assert isinstance(device, EmulatorDevice)
        memory = device.memory
        allocate, free, live = memory.allocate, memory.free, {}

        def count_allocate(nbytes: int, name: str = "") -> int:
            address = allocate(nbytes, name)
            live[address] = name
            return address

        def count_free(address: int) -> None:
            free(address)
            del live[address]

        monkeypatch.setattr(memory, "allocate", count_allocate)
        monkeypatch.setattr(memory, "free", count_free)
        with device.load(sample) as module, device.to_device(ramp(256)) as x, device.allocate(64) as buffer:
            assert np.isnan(buffer.download(16, np.float32)).all()
            device.launch(module.kernel("reverse"), 1, x=x, out=x)
            with pytest.raises(KernelFault):
                device.launch(module.kernel("reverse"), 2, x=x, out=x)
            assert sorted(live.values()) == ["", "", "code object"]  # and no kernarg segment of a launch that is over
        assert not live
