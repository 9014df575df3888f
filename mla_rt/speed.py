"""Counting launches, and timing a decode of a given shape: what `mla-rt speed` and `mla-rt emulate` report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .batch import MAX_NUM_HEADS, QK_WIDTH, Batch, make_batch
from .decode import prepared_decode
from .decode_kernel import kernel_for
from .device import Device
from .emulator.counters import Counters, LaunchCounts
from .emulator.machine import Dispatch
from .emulator_device import EmulatorDevice
from .formats import FP8, MXFP4, quantize_fp8, quantize_mxfp4
from .requests import MAX_Q_LEN
from .resources import Kernel
from .speed_report import Tiles, marginal
from .work_list import make_work_list

BYTES_PER_TOKEN = {"bf16": 1152, "fp8_e4m3fn": 576, "mxfp4": 306}
EXACT_TOKENS = 1 << 17  # tokens times row tiles that are emulated unasked: some seconds
SHORT_TILES, LONG_TILES = 4, 8  # of the two launches whose difference is the cost of a tile; the shorter is shown as a timeline
_POOL_ROWS = 4096  # distinct cache rows; a large cache repeats them, each at its own address
WARM_UPS, REPETITIONS = 3, 30  # of a measurement


@dataclass(frozen=True)
class Shape:
    """A batch of equal requests. ValueError for a number that no decode takes."""

    batch: int
    kv_len: int
    kv_format: str
    num_heads: int = 16
    q_len: int = 1
    num_splits: int | None = None
    page_size: int = 64

    def __post_init__(self) -> None:
        for name, limit in (("batch", 65536), ("kv_len", 1 << 20), ("num_heads", MAX_NUM_HEADS), ("q_len", MAX_Q_LEN)):
            if not 1 <= getattr(self, name) <= limit:
                raise ValueError(f"{name.replace('_', '-')} is {getattr(self, name)}; 1 to {limit} is supported")
        if self.kv_format not in BYTES_PER_TOKEN:
            raise ValueError(f"kv-format is {self.kv_format!r}; one of {', '.join(BYTES_PER_TOKEN)} is needed")

    @property
    def kv_bytes(self) -> int:
        """Of the cache, each token once."""
        return self.batch * self.kv_len * BYTES_PER_TOKEN[self.kv_format]

    def __str__(self) -> str:
        splits = "" if self.num_splits is None else f", {self.num_splits} splits"
        size = f"batch {self.batch}, kv {self.kv_len}, {self.num_heads} heads, q {self.q_len}, pages of {self.page_size}"
        return f"MLA decode, {self.kv_format}: {size}{splits}"


@dataclass(frozen=True)
class CountedDecode:
    """launches: of the shape, in order; tiles: what a tile costs; sample: one workgroup over SHORT_TILES tiles, with its trace."""

    launches: tuple[LaunchCounts, ...]
    tiles: Tiles
    sample: LaunchCounts


def count_decode(shape: Shape, device: EmulatorDevice, *, exact: bool = False) -> CountedDecode:
    """Count a decode of this shape on the emulator: its launches (`count_launches`), and what a tile costs."""
    tokens_per_tile = kernel_for(device, shape.kv_format, shape.q_len * shape.num_heads).tokens_per_tile
    launches = count_launches(shape, device, exact=exact)
    short, long, split = (
        count_batch(_make_batch(shape, 1, tiles * tokens_per_tile, splits), device, 1, keep_trace=True)[0]
        for tiles, splits in ((SHORT_TILES, 1), (LONG_TILES, 1), (2 * SHORT_TILES, 2))
    )
    return CountedDecode(launches, marginal(short, SHORT_TILES, long, LONG_TILES, split, tokens_per_tile), short)


def count_launches(shape: Shape, device: EmulatorDevice, *, exact: bool = False, max_tokens: int = EXACT_TOKENS) -> tuple[LaunchCounts, ...]:
    """The launches of a decode of this shape.

    A shape of more than max_tokens (times row tiles) is counted on some of its requests, cut as in the whole batch, and taken times the rest
    (`LaunchCounts.sampled` says so): equal requests do equal work, but for branches on the numbers. exact: emulate all of it whatever it takes.
    """
    requests = shape.batch if exact else _requests_to_count(shape, device, max_tokens)
    batch = _make_batch(shape, requests, shape.kv_len, shape.num_splits)
    launches = count_batch(batch, device, max(device.num_compute_units * requests // shape.batch, 1))
    return tuple(launches if requests == shape.batch else (counts.repeated(shape.batch // requests) for counts in launches))


def _requests_to_count(shape: Shape, device: Device, max_tokens: int) -> int:
    """How many of the requests to emulate: a divisor of the batch which, on its share of the compute units, is cut as the whole batch is."""
    num_cus, num_rows = device.num_compute_units, shape.q_len * shape.num_heads
    kernel = kernel_for(device, shape.kv_format, num_rows)
    tokens_of_request = shape.kv_len * -(-num_rows // kernel.rows_per_tile)
    if shape.batch * tokens_of_request <= max_tokens:
        return shape.batch

    def lengths(requests: int) -> np.ndarray:
        """Tokens of each workgroup, as so many requests are cut."""
        work = make_work_list(
            np.arange(requests + 1) * shape.q_len,
            np.full(requests, shape.kv_len),
            num_heads=shape.num_heads,
            num_splits=shape.num_splits,
            num_cus=max(num_cus * requests // shape.batch, 1),
            rows_per_tile=kernel.rows_per_tile,
            tokens_per_tile=kernel.tokens_per_tile,
            tile_cost=kernel.tile_cost,
        ).work
        return np.asarray(work[:, 3] - work[:, 2])

    whole = lengths(shape.batch)
    divisors = [n for n in range(1, shape.batch + 1) if shape.batch % n == 0]
    alike = [n for n in divisors if np.array_equal(np.repeat(lengths(n), shape.batch // n), whole)]
    few_enough = [n for n in alike if n * tokens_of_request <= max_tokens]
    return few_enough[-1] if few_enough else alike[0]


def count_batch(batch: Batch, device: EmulatorDevice, num_cus: int | None = None, *, keep_trace: bool = False) -> list[LaunchCounts]:
    """The launches of a decode of this batch, all of it. num_cus: compute units that the work is cut for; None: those of the device."""
    with _counted(device, keep_trace) as seen, prepared_decode(batch, device, num_cus=num_cus) as prepared:
        prepared.launch()
    return [counters.counts() for counters in seen]


def count_launch(
    kernel: Kernel, device: EmulatorDevice, grid: tuple[int, int, int], block: tuple[int, int, int], *, dynamic_lds_bytes: int = 0, **arguments: Any
) -> LaunchCounts:
    """Run any kernel and count it, with the trace of its first workgroup."""
    with _counted(device, keep_trace=True) as seen:
        device.launch_block(kernel, grid, block, dynamic_lds_bytes=dynamic_lds_bytes, **arguments)
    return seen[0].counts()


@contextmanager
def _counted(device: EmulatorDevice, keep_trace: bool) -> Iterator[list[Counters]]:
    """Counters of the launches within the context, as they come."""
    seen: list[Counters] = []

    def observe(dispatch: Dispatch) -> list[Counters]:
        seen.append(Counters(dispatch, keep_trace=keep_trace))
        return seen[-1:]

    before, device.observe = device.observe, observe
    try:
        yield seen
    finally:
        device.observe = before


def measure_decode(shape: Shape, device: Device, repetitions: int = REPETITIONS) -> np.ndarray:
    """`measure_batch` of a batch of this shape."""
    return measure_batch(_make_batch(shape, shape.batch, shape.kv_len, shape.num_splits), device, repetitions)


def measure_batch(batch: Batch, device: Device, repetitions: int = REPETITIONS, between: Callable[[], None] | None = None) -> np.ndarray:
    """Seconds of each of so many decodes on the device: by events before and after all launches, after some that are not timed.

    between: called before each timed decode, for what is to happen on the device outside of the time.
    """
    with prepared_decode(batch, device) as prepared, device.event() as begin, device.event() as end:
        for _ in range(WARM_UPS):
            prepared.launch()
        seconds = []
        for _ in range(repetitions):
            if between is not None:
                between()
            begin.record()
            prepared.launch()
            end.record()
            seconds.append(end.elapsed_ms(begin) * 1e-3)
        return np.array(seconds)


def _make_batch(shape: Shape, requests: int, kv_len: int, num_splits: int | None) -> Batch:
    return random_batch(
        np.full(requests, kv_len), shape.kv_format, num_heads=shape.num_heads, q_len=shape.q_len, num_splits=num_splits, page_size=shape.page_size
    )


def random_batch(
    kv_lens: np.ndarray, kv_format: str, *, num_heads: int = 16, q_len: int = 1, num_splits: int | None = None, page_size: int = 64
) -> Batch:
    """Requests of these lengths, [batch] integers > 0, of random, finite numbers; their pages lie in the cache in random order."""
    rng = np.random.default_rng(0)
    kv_lens = np.asarray(kv_lens, np.int64)
    q = rng.standard_normal((len(kv_lens) * q_len, num_heads, QK_WIDTH), np.float32).astype(ml_dtypes.bfloat16)
    kv_indptr = np.concatenate([[0], np.cumsum(-(-kv_lens // page_size))])
    pool = rng.standard_normal((_POOL_ROWS, QK_WIDTH), np.float32)
    rows = rng.integers(0, _POOL_ROWS, (kv_indptr[-1], page_size))
    kv: Any
    if kv_format == "mxfp4":
        blocks = quantize_mxfp4(pool, scale_rule="even")
        kv = MXFP4(blocks.codes[rows], blocks.scales[rows])
    elif kv_format == "bf16":
        kv = pool.astype(ml_dtypes.bfloat16)[rows]
    else:
        scaled = quantize_fp8(pool, dtype="e4m3fn")
        kv = FP8(scaled.codes[rows], scaled.scale, scaled.dtype)
    return make_batch(
        q,
        kv,
        sm_scale=np.float32(QK_WIDTH**-0.5),
        qo_indptr=np.arange(len(kv_lens) + 1) * q_len,
        kv_indptr=kv_indptr,
        kv_indices=rng.permutation(kv_indptr[-1]),
        kv_last_page_len=(kv_lens - 1) % page_size + 1,
        page_size=page_size,
        num_splits=num_splits,
    )
