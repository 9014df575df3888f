"""`mla-rt demo`: one batch in all three cache formats, and how exact the kernels were."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from .accuracy import KERNEL_ERROR_FACTOR, KERNEL_ERROR_FLOOR, LSE_ABSOLUTE, LSE_RELATIVE
from .arguments import counted
from .batch import Batch, make_batch
from .batch_file import quantize
from .check import Check, check
from .decode import decode_batch, kernel_name
from .decode_kernel import KV_FORMATS
from .device import Device

PROMISE = (
    f"RMS error at most {KERNEL_ERROR_FACTOR} × that of rounding the exact result to bf16 + {KERNEL_ERROR_FLOOR:g} in every (row, head), "
    f"lse within {LSE_ABSOLUTE:g} or {LSE_RELATIVE:g} of its value"
)
LEGEND = """\
error         RMS error / RMS value of the kernel's result against float64 on the same stored bytes; the worst (row, head)
rounding      the same of the exact result rounded to bf16, in that row: the error that nobody can avoid
quantization  of the exact result on the stored bytes against the exact result on the given cache, apart from the kernel; the worst (row, head)
seconds       of the whole call; on the emulator they say nothing of a GPU"""


def describe(batch: Batch) -> str:
    """One line: requests, queries, tokens."""
    lengths = batch.kv_lens
    layout = []
    if len(lengths) > 1:
        layout.append(f"{lengths[0]} each" if (lengths == lengths[0]).all() else f"{lengths.min()} to {lengths.max()} a request")
    if batch.page_size > 1:
        layout.append(f"pages of {batch.page_size}")
    queries = f"{counted(len(batch.q), 'query token')} × {counted(batch.num_heads, 'head')}"
    line = f"{counted(len(lengths), 'request')}, {queries}, {counted(int(lengths.sum()), 'token')} of KV"
    return f"{line} ({', '.join(layout)})" if layout else line


def describe_device(device: Device) -> str:
    """Which device, and why that one."""
    return f"device  {device.name} ({device.reason})"


def demo(arguments: dict[str, Any], source: str, device: Device) -> bool:
    """Decode the batch (arguments of `decode`, kv as floats) in every format of the device; print a table. Returns whether PROMISE is kept."""
    formats = KV_FORMATS[device.arch]
    original = arguments["kv"]
    batch = make_batch(**{**arguments, "kv": quantize(original, "bf16")})
    print(f"batch   {source}: {describe(batch)}")
    print(f"{describe_device(device)}\n", flush=True)
    print(TABLE_HEAD, flush=True)
    results = {}
    for kv_format in formats:
        stored = quantize(original, kv_format)
        batch = make_batch(**{**arguments, "kv": stored})
        begin = time.perf_counter()
        out, lse = decode_batch(batch, device)
        seconds = time.perf_counter() - begin
        results[kv_format] = check(batch, stored, original, out, lse)
        print(table_row(batch, results[kv_format], kernel_name(batch, device), seconds), flush=True)
    print(f"\n{LEGEND}\n")
    kept, lines = verdict(results)
    print(*lines, sep="\n")
    return kept


_ROW = "{:<11} {:<22} {:>11} {:>9} {:>9} {:>12} {:>10} {:>8}"
TABLE_HEAD = _ROW.format("kv format", "kernel", "cache bytes", "error", "rounding", "quantization", "lse error", "seconds")


def table_row(batch: Batch, result: Check, kernel: str, seconds: float) -> str:
    """One line under TABLE_HEAD. seconds: of the whole call, on the emulator the host's."""
    accuracy, worst = result.accuracy, result.accuracy.worst
    error, rounding = (accuracy.kernel_error[worst], accuracy.rounding_error[worst]) if worst else (0.0, 0.0)
    quantization = result.quantization_errors.max(initial=0.0)
    return _ROW.format(
        batch.cache.kv_format,
        kernel,
        f"{batch.cache.nbytes:,}",
        f"{error:.2e}",
        f"{rounding:.2e}",
        f"{quantization:.2e}" if quantization else "none",
        f"{accuracy.lse_error.max(initial=0.0):.2e}",
        f"{seconds:.2f}",
    )


def verdict(results: Mapping[str, Check]) -> tuple[bool, list[str]]:
    """Of the results by kv format: whether PROMISE is kept, and the lines that say so or what is broken."""
    broken = [f"{kv_format}: {line}" for kv_format, result in results.items() for line in _complaints(result)]
    lines = []
    for kv_format, result in results.items():
        nan = result.accuracy.nan_in_both
        if nan.any():
            lines.append(f"{kv_format}: {nan.sum()} of {counted(nan.size, 'row')} (query token, head) hold NaN, here and in float64")
    compared = not lines or not all(result.accuracy.nan_in_both.all() for result in results.values())
    return not broken, lines + (broken or [f"kept: {PROMISE}" if compared else "nothing was compared: every row holds NaN"])


def _complaints(result: Check) -> list[str]:
    """What of the promise is broken, the worst place of each kind; empty: nothing."""
    accuracy = result.accuracy
    lines = []
    for what, error, limit in (
        ("RMS error", accuracy.kernel_error, accuracy.kernel_limit),
        ("lse error", accuracy.lse_error, accuracy.lse_limit),
    ):
        excess = np.where(error <= limit, 0.0, error / limit)
        if excess.any():
            token, head = (int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))
            lines.append(f"BROKEN: {what} {error[token, head]:.3g} at query token {token}, head {head}; the limit there is {limit[token, head]:.3g}")
    return lines
