"""The assembly kernels of tests/faulty: each has one fault where FAULTY is 1, and none where it is 0."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from asm import assemble, launch

from mla_rt.emulator.memory import Memory

FOLDER = Path(__file__).parents[1] / "faulty"


def run(name: str, faulty: bool, values: np.ndarray, **options: object) -> np.ndarray:
    """Run a kernel of tests/faulty as `run_source` does."""
    return run_source(f".set FAULTY, {int(faulty)}\n" + Path(FOLDER, f"{name}.s").read_text(), values, **options)  # type: ignore[arg-type]


def run_source(source: str, values: np.ndarray, *, workgroups: int = 1, items: int = 64, **options: object) -> np.ndarray:
    """Run assembly, strictly checked if not said otherwise, on `values` (uint32 [n]) in a buffer; what is in it then.

    Kernel arguments: the buffer's address, the number 5.
    """
    memory = Memory()
    try:
        buffer = memory.allocate(values.nbytes)
        memory.bytes_at(buffer, values.nbytes)[:] = values.astype(np.uint32).view(np.uint8)
        options = {"lds_bytes": 256, "checks": "strict"} | options
        launch(assemble(source), struct.pack("<QI", buffer, 5), memory, grid=(workgroups, 1, 1), block=(items, 1, 1), **options)  # type: ignore[arg-type]
        return memory.bytes_at(buffer, values.nbytes).view(np.uint32).copy()
    finally:
        memory.close()
