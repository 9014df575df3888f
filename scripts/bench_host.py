"""What a decode costs the host: bench_host.py [--repetitions N]

Real hip-python and `mla_rt.hip_device` on the tests' stand-in HIP runtime, whose launches do nothing here: what is timed is the caller's thread, from
the call to its return. For comparison a bare hipModuleLaunchKernel of hip-python with the same arguments, in the same run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import mmap
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mla_rt import open_device, plan  # noqa: E402
from mla_rt.decode_kernel import kernel_for  # noqa: E402
from mla_rt.device import Device  # noqa: E402
from mla_rt.errors import DeviceError  # noqa: E402
from shim.library import Shim  # type: ignore[import-not-found] # noqa: E402

NUM_HEADS, PAGE_SIZE, NUM_PAGES = 16, 64, 1 << 16
BATCHES = (64, 256)
PLANNED_BATCH = 1024
ADDRESS_SPACE = 256 << 30
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named by the module only from Python 3.13 on
AT_ONCE = 50  # calls between two looks at the clock
# What a run must never call, besides the launch.
FORBIDDEN = ("hipMalloc", "hipFree", "hipHostMalloc", "hipMemcpy", "hipMemcpyAsync", "hipMemsetAsync", "hipEventRecord", "hipStreamSynchronize")


@dataclass(frozen=True)
class RunCost:
    """Of a prepared run at a batch size. us: median microseconds; kept_bytes: Python memory that stays allocated after a run; peak_bytes: of memory
    that lives only within one; calls: of each HIP function, a run."""

    batch: int
    us: float
    kept_bytes: float
    peak_bytes: int
    calls: dict[str, float]


@dataclass(frozen=True)
class HostCosts:
    """bare_us: of one hipModuleLaunchKernel; plan_us: of a new plan for PLANNED_BATCH requests; update_us: of planning them again in its place."""

    bare_us: float
    runs: tuple[RunCost, ...]
    plan_us: float
    update_us: float


@contextmanager
def empty_runtime(shim: Any) -> Iterator[None]:
    """Within it, the stand-in runtime queues launches as ever and does nothing when their turn comes; and memory that it allocates is not filled with
    NaN, which takes the emulator far longer than a GPU's runtime takes to allocate."""
    memory = Memory()
    names = {"_launch": lambda *arguments: None, "_allocate": memory.allocate, "_free": memory.free}
    before = {name: getattr(shim.emulator, name) for name in names}
    vars(shim.emulator).update(names)
    try:
        yield
    finally:
        vars(shim.emulator).update(before)


class Memory:
    """Memory that takes no room until it is written. A block that was freed is given out again to the next who wants one of its size, so that
    what is timed are not the host's page faults, which a GPU's memory has none of."""

    def __init__(self) -> None:
        self._mapping = mmap.mmap(-1, ADDRESS_SPACE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
        self._next = int(np.frombuffer(self._mapping, np.uint8).ctypes.data)
        self._end = self._next + ADDRESS_SPACE
        self._size_of: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}

    def allocate(self, nbytes: int) -> int:
        size = -(-nbytes // 4096) * 4096
        if self._free.get(size):
            return self._free[size].pop()
        address, self._next = self._next, self._next + size
        if self._next > self._end:
            raise DeviceError(f"allocate({nbytes}): the address space is used up")
        self._size_of[address] = size
        return address

    def free(self, address: int) -> None:
        self._free.setdefault(self._size_of[address], []).append(address)


def measure(device: Device, shim: Any, repetitions: int) -> HostCosts:
    """Medians over so many repetitions (of AT_ONCE runs each)."""
    device.packaged("mla_decode")
    with empty_runtime(shim):
        runs = tuple(_measure_run(device, shim, batch, repetitions) for batch in BATCHES)
        plan_us, update_us = _measure_plan(device, repetitions)
        return HostCosts(_measure_bare(device, repetitions), runs, plan_us, update_us)


def lengths(batch: int, seed: int = 0) -> dict[str, Any]:
    """Log-uniform in 1..32768 tokens, in random pages."""
    rng = np.random.default_rng(seed)
    kv_lens = np.exp(rng.uniform(0, np.log(32768), batch)).astype(np.int32)
    kv_indptr = np.concatenate([[0], np.cumsum(-(-kv_lens // PAGE_SIZE))]).astype(np.int32)
    return {
        "qo_indptr": np.arange(batch + 1, dtype=np.int32),
        "kv_indptr": kv_indptr,
        "kv_indices": rng.integers(0, NUM_PAGES, kv_indptr[-1], np.int32),
        "kv_last_page_len": ((kv_lens - 1) % PAGE_SIZE + 1).astype(np.int32),
    }


OPTIONS: dict[str, Any] = {"num_heads": NUM_HEADS, "page_size": PAGE_SIZE, "kv_format": "mxfp4", "sm_scale": 576**-0.5}


@contextmanager
def ready(device: Device, batch: int) -> Iterator[Callable[[], None]]:
    """A plan and arrays; what is yielded runs it once."""
    with ExitStack() as stack:
        planned = stack.enter_context(plan(device, **lengths(batch), **OPTIONS))
        q, out, lse = (stack.enter_context(device.allocate(batch * NUM_HEADS * nbytes)) for nbytes in (1152, 1024, 4))
        rows, scales = (stack.enter_context(device.allocate(NUM_PAGES * PAGE_SIZE * nbytes)) for nbytes in (288, 18))
        cache = SimpleNamespace(
            kv_format="mxfp4", page_size=PAGE_SIZE, num_pages=NUM_PAGES, device=device, rows=rows, scales=scales, kv_scale=np.float32(1)
        )
        stream = stack.enter_context(device.stream())
        yield lambda: planned.run(q, cache, out=out, lse=lse, stream=stream)


def _measure_run(device: Device, shim: Any, batch: int, repetitions: int) -> RunCost:
    with ready(device, batch) as run:
        us = _median_us(device, run, repetitions, AT_ONCE)
        names = (*FORBIDDEN, "hipModuleLaunchKernel")
        before = [shim.count(name) for name in names]
        for _ in range(AT_ONCE):
            run()
        calls = {name: (shim.count(name) - count) / AT_ONCE for name, count in zip(names, before, strict=True)}
        device.synchronize()
        kept, peak = _memory_of(run)
        device.synchronize()
    return RunCost(batch, us, kept, peak, calls)


def _memory_of(run: Callable[[], None]) -> tuple[float, int]:
    """(bytes kept a run, peak within a run) of Python memory."""
    run()
    gc.disable()
    tracemalloc.start()
    try:
        run()  # the first under tracemalloc fills what is kept for ever
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(AT_ONCE):
            run()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    return (after - before) / AT_ONCE, peak - before


def _measure_plan(device: Device, repetitions: int) -> tuple[float, float]:
    batches = [lengths(PLANNED_BATCH, seed) for seed in range(4)]
    plan_seconds = []
    for number in range(repetitions):
        begin = time.perf_counter()
        planned = plan(device, **batches[number % len(batches)], **OPTIONS)
        plan_seconds.append(time.perf_counter() - begin)
        planned.close()
    numbers = itertools.count()
    with plan(device, **batches[0], **OPTIONS) as planned:
        for batch in batches:
            planned.update(**batch)  # until the workspaces fit all
        update_us = _median_us(device, lambda: planned.update(**batches[next(numbers) % len(batches)]), repetitions)
    return statistics.median(plan_seconds) * 1e6, update_us


def _measure_bare(device: Device, repetitions: int) -> float:
    from hip import hip  # as the device has loaded it

    launch: Any = hip.hipModuleLaunchKernel
    with device.stream() as stream:
        kernel = kernel_for(device, OPTIONS["kv_format"], NUM_HEADS).kernel
        arguments = (kernel.info.arguments_type(),)
        function, handle, block = kernel._function, stream.handle.handle, kernel.info.block_size
        return _median_us(device, lambda: launch(function, 256, 1, 1, block, 1, 1, 0, handle, None, arguments), repetitions, AT_ONCE)


def _median_us(device: Device, call: Callable[[], Any], repetitions: int, at_once: int = 1) -> float:
    call()
    seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        for _ in range(at_once):
            call()
        seconds.append((time.perf_counter() - begin) / at_once)
        device.synchronize()  # or the queue grows without end
    return statistics.median(seconds) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=200)
    options = parser.parse_args()
    shim = Shim()
    with shim.one_gpu(), open_device("hip") as device:
        costs = measure(device, shim, options.repetitions)
    print(f"bare hipModuleLaunchKernel of hip-python   {costs.bare_us:8.1f} µs")
    for cost in costs.runs:
        other = {name: count for name, count in cost.calls.items() if count and name != "hipModuleLaunchKernel"}
        memory = f"{cost.kept_bytes:.0f} bytes of Python memory kept, {cost.peak_bytes} within; HIP calls besides the launch: {other or 'none'}"
        print(f"Plan.run, batch {cost.batch:<4}                       {cost.us:8.1f} µs   {memory}")
    print(f"plan, batch {PLANNED_BATCH}                            {costs.plan_us:8.1f} µs   with its allocations")
    print(f"Plan.update, batch {PLANNED_BATCH}                     {costs.update_us:8.1f} µs")


if __name__ == "__main__":
    main()
