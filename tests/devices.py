"""Fixtures: both kinds of device, the hip one through real hip-python on the stand-in runtime of `shim`, and a sample code object for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from build_kernels import compile_with_ziglang
from mla_rt import dlpack
from mla_rt.device import Device, open_device

if TYPE_CHECKING:
    from shim.library import Shim

# numpy before 2.1 exports its own arrays, and for us ours, as before DLPack 1.0.
needs_dlpack_1 = pytest.mark.skipif(not dlpack._NUMPY_IS_VERSIONED, reason="numpy before 2.1 has no DLPack 1.0")
SAMPLE = Path(__file__).parent / "kernels" / "sample.hip"


@pytest.fixture(scope="session")
def shim() -> Shim:
    """The stand-in HIP runtime. It shows a GPU only inside `shim.one_gpu()`, so that other tests see a machine without one."""
    from shim.library import Shim  # only where it is used: it brings the whole emulator

    return Shim()


@pytest.fixture(scope="session")
def hip_device(shim: Shim) -> Iterator[Device]:
    """A HIP device whose launches the emulator runs, deferred as far as streams allow."""
    with shim.one_gpu():
        device = open_device("hip")
    yield device
    shim.reset()
    device.close()


@pytest.fixture(scope="session")
def emulator_device() -> Iterator[Device]:
    """The emulator with strict checks, all waves advancing together."""
    with open_device("emulator", checks="strict") as device:
        yield device


@pytest.fixture(params=["emulator", "hip"])
def device(request: pytest.FixtureRequest) -> Device:
    """Each kind of device in turn."""
    found: Device = request.getfixturevalue(f"{request.param}_device")
    return found


@pytest.fixture(scope="session")
def compile_sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """compile_sample(arch): the code object of kernels/sample.hip for that arch, compiled once."""
    made: dict[str, Path] = {}

    def compile_for(arch: str) -> Path:
        if arch not in made:
            output = tmp_path_factory.mktemp("sample") / f"sample-{arch}.co"
            compile_with_ziglang(SAMPLE, output, arch)
            made[arch] = output
        return made[arch]

    return compile_for


@pytest.fixture(scope="session")
def sample(compile_sample: Callable[[str], Path]) -> Path:
    """The code object of kernels/sample.hip for gfx950."""
    return compile_sample("gfx950")
