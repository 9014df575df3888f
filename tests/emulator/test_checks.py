"""The strict checks: every kernel of tests/faulty is reported with all that one needs to find the fault, and passes when it is mended."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_kernels import compile_with_ziglang
from mla_rt.device import Device, open_device
from mla_rt.errors import KernelFault
from mla_rt.resources import Buffer, Module

FAULTY = Path(__file__).parents[1] / "faulty"
THREADS = 256
GRID = 4

# File, kernel, workgroups, what the report says.
FAULTS = [
    (
        "lds_races",
        "missing_barrier",
        1,
        r"LDS race: (read|write) of 4 bytes and, with no barrier between, (?!\1)(read|write) of 4 bytes at 0x\w+ by wave \d, lane \d+ at pc",
    ),
    ("lds_races", "barrier_without_wait", 1, r"LDS race: read of 4 bytes and, with no wait for it before the barrier, write of 4 bytes"),
    ("lds_races", "early_overwrite", 1, r"LDS race: (read|write) of 4 bytes and, with no barrier between, (?!\1)(read|write) of 4 bytes"),
    ("lds_races", "atomic_and_read", 1, r"LDS race: (read|atomic) of 4 bytes and, with no barrier between, (?!\1)(read|atomic) of 4 bytes"),
    ("lds_races", "same_byte", 1, r"LDS race: write of 1 bytes and, with no barrier between, write of 1 bytes"),
    ("lds_races", "dma_without_wait", 1, r"read of 4 bytes of LDS that an LDS-DMA of this wave may not have written yet"),
    ("lds_races", "dma_overwritten", 1, r"overwrite of 4 bytes of LDS that an LDS-DMA of this wave may not have written yet"),
    ("lds_races", "dma_without_barrier", 1, r"LDS race: .*read of 4 bytes"),
    ("lds_races", "dma_late_wait", 1, r"LDS race: read of 4 bytes and, with no wait for it before the barrier, DMA write of 16 bytes"),
    ("memory_races", "write_write", GRID, r"race on device memory: write of 4 bytes and a write by workgroup \(\d, 0, 0\), wave \d at pc 0x\w+"),
    ("memory_races", "read_other", GRID, r"race on device memory: read of 4 bytes and a write by workgroup \(\d, 0, 0\).*no release and acquire"),
    ("memory_races", "read_other_wave", 1, r"race on device memory: (read|write) of 4 bytes and a (read|write) by workgroup .*no barrier between"),
    ("memory_races", "no_release", GRID, r"race on device memory: read of 4 bytes and a write by workgroup \(\d, 0, 0\).*no release and acquire"),
    ("memory_races", "no_acquire", GRID, r"race on device memory: read of 4 bytes and a write by workgroup \(\d, 0, 0\).*no release and acquire"),
    ("memory_races", "no_barrier", GRID, r"race on device memory: read of 4 bytes and a write by workgroup \(\d, 0, 0\).*no release and acquire"),
    ("memory_races", "stored_through", GRID, r"race on device memory: read of 4 bytes and a write by workgroup \(\d, 0, 0\).*no release and acquire"),
    (
        "memory_races",
        "overwritten_too_early",
        GRID,
        r"race on device memory: write of 4 bytes and a (read|write) by workgroup .*no release and acquire",
    ),
    ("memory_races", "scalar_load", GRID, r"race on device memory: scalar read of 4 bytes and a write by .*no s_dcache_inv since"),
    ("undefined", "undefined_address", 1, r"read of 4 bytes at an address that depends on an undefined value"),
    ("undefined", "undefined_branch", 1, r"s_cbranch_scc[01] depends on an undefined value"),
    ("undefined", "undefined_exec", 1, r"EXEC depends on an undefined value"),
    ("undefined", "undefined_store", 1, r"a store to device memory of an undefined value"),
    ("undefined", "undefined_bits", 1, r"a store to device memory of an undefined value"),
    ("undefined", "undefined_memory", 1, r"a store to device memory of an undefined value"),
    ("undefined", "undefined_lds", 1, r"a store to device memory of an undefined value"),
    ("undefined", "undefined_matrix_row", 1, r"a store to device memory of an undefined value.*lane 16"),
    ("undefined", "undefined_counter", 1, r"an atomic on bytes that nothing has written"),
    ("bounds", "past_the_end", 1, r"write of 4 bytes outside live memory \(allocation .* of 1024 bytes begins 1024 bytes below\).*lane 63, address"),
    ("bounds", "past_lds", 1, r"LDS write of 4 bytes outside the workgroup's 1024 bytes.*lane 62, address 0x400"),
    ("bounds", "misaligned_atomic", 1, r"atomic of 4 bytes not aligned to 4.*lane 0, address"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """compiled(file): the code object of a file of tests/faulty."""
    folder, made = tmp_path_factory.mktemp("faulty"), {}

    def compile_once(name: str) -> Path:
        if name not in made:
            made[name] = folder / f"{name}.co"
            compile_with_ziglang(FAULTY / f"{name}.hip", made[name], "gfx950")
        return made[name]

    return compile_once


@pytest.fixture(params=[None, 1], ids=["together", "shuffled"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with open_device("emulator", checks="strict", seed=request.param) as device:
        yield device


def arguments(device: Device, module: Module, kernel: str) -> dict[str, Any]:
    """Buffers by the names of the kernel's parameters."""
    made: dict[str, Buffer] = {}
    for argument in module.kernel(kernel).info.args:
        if argument.name == "out":
            made["out"] = device.allocate(4 * THREADS * (1 if kernel.startswith("past") else GRID))
            if kernel.startswith(("undefined_counter", "misaligned", "scalar_load", "read_other_wave")):
                made["out"].fill(0)
        elif argument.name == "counter":
            made["counter"] = device.to_device(np.zeros(3, np.int32))
        elif argument.name == "x":
            made["x"] = device.to_device(np.arange(4 * THREADS, dtype=np.int32))
        else:
            made[argument.name] = device.allocate(4 * THREADS)
    return made


def launch(device: Device, code_object: Path, kernel: str, grid: int) -> dict[str, Any]:
    module = device.load(code_object)
    made = arguments(device, module, kernel)
    device.launch(module.kernel(kernel), grid, **made)
    return made


@pytest.mark.parametrize(("file", "kernel", "grid", "report"), FAULTS, ids=[kernel for _, kernel, _, _ in FAULTS])
def test_fault_is_reported(device: Device, compiled: Callable[[str], Path], file: str, kernel: str, grid: int, report: str) -> None:
    with pytest.raises(KernelFault) as fault:
        launch(device, compiled(file), kernel, grid)
    text = str(fault.value)
    assert re.search(report, text), text
    assert re.match(rf"{kernel}: .*\(pc 0x[0-9a-f]+, workgroup \(\d, 0, 0\), wave \d", text), text
    if "EXEC" not in report and "cbranch" not in report:
        assert re.search(r", lane \d+", text), text


@pytest.mark.parametrize(("file", "kernel", "grid"), [fault[:3] for fault in FAULTS], ids=[kernel for _, kernel, _, _ in FAULTS])
def test_mended_kernel_passes(device: Device, compiled: Callable[[str], Path], file: str, kernel: str, grid: int) -> None:
    launch(device, compiled(file), f"{kernel}_mended", grid)


@pytest.mark.parametrize(("file", "kernel", "grid"), [fault[:3] for fault in FAULTS if fault[0] != "bounds"])
def test_unchecked_run_does_not_fault(compiled: Callable[[str], Path], file: str, kernel: str, grid: int) -> None:
    """The checks add faults; they are not what keeps the emulator from running."""
    with open_device("emulator") as device:
        launch(device, compiled(file), kernel, grid)


@pytest.mark.parametrize("freed", [False, True])
def test_use_after_free(device: Device, compiled: Callable[[str], Path], freed: bool) -> None:
    module = device.load(compiled("bounds"))
    x, out = device.to_device(np.arange(THREADS, dtype=np.int32)), device.allocate(4 * THREADS)
    table = device.to_device(np.array([x.address], np.uint64))
    address = x.address
    if freed:
        x.free()
        with pytest.raises(KernelFault, match=rf"after_free: read of 4 bytes outside live memory.*wave 0, lane 0, address {address:#x}"):
            device.launch(module.kernel("after_free"), 1, table=table, out=out)
    else:
        device.launch(module.kernel("after_free"), 1, table=table, out=out)
        assert (out.download((THREADS,), np.int32) == np.arange(THREADS)).all()


def test_checks_may_be_switched_while_a_device_is_used(compiled: Callable[[str], Path]) -> None:
    """What an unchecked launch stores counts as written; buffers made later are followed again."""
    with open_device("emulator", checks="strict") as device:
        module = device.load(compiled("undefined"))
        x, fresh, out = device.to_device(np.arange(4 * THREADS, dtype=np.int32)), device.allocate(4 * THREADS), device.allocate(4 * THREADS)
        device.checks = "off"  # type: ignore[attr-defined]
        device.launch(module.kernel("undefined_store_mended"), 1, x=x, out=fresh)
        device.checks = "strict"  # type: ignore[attr-defined]
        device.launch(module.kernel("undefined_memory"), 1, x=x, fresh=fresh, out=out)
        with pytest.raises(KernelFault, match="undefined value"):
            device.launch(module.kernel("undefined_memory"), 1, x=x, fresh=device.allocate(4 * THREADS), out=out)


def test_part_of_a_buffer_that_was_filled_is_defined(compiled: Callable[[str], Path]) -> None:
    with open_device("emulator", checks="strict") as device:
        module = device.load(compiled("undefined"))
        x, out = device.to_device(np.arange(4 * THREADS, dtype=np.int32)), device.allocate(4 * THREADS)
        fresh = device.allocate(8 * THREADS)
        device.memory.define(fresh.address, 4 * THREADS - 4)  # type: ignore[attr-defined]
        with pytest.raises(KernelFault, match=r"undefined value.*wave 3, lane 63"):
            device.launch(module.kernel("undefined_memory"), 1, x=x, fresh=fresh, out=out)
        device.memory.define(fresh.address + 4 * THREADS - 4, 4)  # type: ignore[attr-defined]
        device.launch(module.kernel("undefined_memory"), 1, x=x, fresh=fresh, out=out)
