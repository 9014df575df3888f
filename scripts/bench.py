"""Measure on a GPU what docs/performance.md models: bench.py [--warm] [--repetitions N] [--json FILE] [--format F ..] [--batch N ..] [--kv-len N ..]

Prints a row a shape: the median, fastest and slowest time between events around a decode, and the bytes of cache, q and out over the median. Unless
--warm is given, 512 MB are overwritten before each decode, so that the cache is read from memory rather than from the Infinity Cache.
Exit code 0 if all was measured, 2 if there is no GPU that the kernels are made for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from mla_rt.batch import Batch
from mla_rt.device import Device, open_device
from mla_rt.errors import DeviceError, UnsupportedArch
from mla_rt.speed import BYTES_PER_TOKEN, REPETITIONS, Shape, measure_batch, random_batch
from performance_counts import BATCHES, EIGHT, FORMATS, KV_LENS, RAGGED_REQUESTS, WIDER, least_bytes, ragged_lengths

OVERWRITTEN_BYTES = 512 << 20  # twice the Infinity Cache
HEADER = f"{'format':<12} {'heads':>5} {'q':>2} {'batch':>5} {'KV':>7} {'median µs':>10} {'fastest':>9} {'slowest':>9} {'TB/s':>7}"


def cases(formats: list[str], batches: list[int], kv_lens: list[int]) -> Iterator[tuple[Shape, np.ndarray]]:
    """The shapes of docs/performance.md with these formats, batches and lengths, and the lengths of their requests; then the ragged batch, if
    neither batches nor lengths are left out."""
    sizes = [(16, 1, *shape) for shape in EIGHT] + WIDER
    for kv_format in formats:
        for num_heads, q_len, batch, kv_len in sizes:
            if batch in batches and kv_len in kv_lens:
                yield Shape(batch, kv_len, kv_format, num_heads, q_len), np.full(batch, kv_len)
        if set(batches) >= set(BATCHES) and set(kv_lens) >= set(KV_LENS):
            yield Shape(RAGGED_REQUESTS, int(ragged_lengths().max()), kv_format), ragged_lengths()


def measure(device: Device, shape: Shape, kv_lens: np.ndarray, repetitions: int, warm: bool) -> np.ndarray:
    """Seconds of each repetition."""
    batch: Batch = random_batch(kv_lens, shape.kv_format, num_heads=shape.num_heads, q_len=shape.q_len)
    with nullcontext() if warm else device.allocate(OVERWRITTEN_BYTES) as other:
        return measure_batch(batch, device, repetitions, None if other is None else lambda: other.fill(0))


def row(shape: Shape, kv_lens: np.ndarray, seconds: np.ndarray) -> str:
    median = float(np.median(seconds))
    rate = least_bytes(shape, int(kv_lens.sum())) / median / 1e12 if median else float("inf")
    ragged = f"≤{shape.kv_len}" if len(set(kv_lens.tolist())) > 1 else f"{shape.kv_len}"
    times = "{:>10.2f} {:>9.2f} {:>9.2f}".format(*(1e6 * value for value in (median, seconds.min(), seconds.max())))
    return f"{shape.kv_format:<12} {shape.num_heads:>5} {shape.q_len:>2} {shape.batch:>5} {ragged:>7} {times} {rate:>7.3f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure on a GPU what docs/performance.md models.")
    parser.add_argument("--warm", action="store_true", help="leave the caches as the decode before left them")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every time measured")
    parser.add_argument("--format", nargs="+", default=list(FORMATS), choices=list(BYTES_PER_TOKEN))
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES), choices=BATCHES)
    parser.add_argument("--kv-len", nargs="+", type=int, default=list(KV_LENS), choices=KV_LENS)
    options = parser.parse_args(arguments)
    if options.repetitions < 1:
        parser.error(f"--repetitions is {options.repetitions}; 1 or more are needed")
    try:
        device = open_device("hip", arch="gfx950")
    except (DeviceError, UnsupportedArch) as error:
        print(f"bench: nothing measured, there is no GPU to measure on: {error}", file=sys.stderr)
        return 2
    measured = []
    with device:
        state = "caches as the decode before left them" if options.warm else f"{OVERWRITTEN_BYTES >> 20} MB overwritten before each decode"
        print(f"measured on {device.name} ({device.arch}), events around a decode, {options.repetitions} repetitions, {state}\n\n{HEADER}")
        for shape, kv_lens in cases(options.format, options.batch, options.kv_len):
            seconds = measure(device, shape, kv_lens, options.repetitions, options.warm)
            print(row(shape, kv_lens, seconds), flush=True)
            measured.append({"shape": str(shape), "kv_lens": kv_lens.tolist(), "seconds": seconds.tolist()})
    if options.json is not None:
        report = {"label": "measured", "device": f"{device.name} ({device.arch})", "warm": options.warm, "measured": measured}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
