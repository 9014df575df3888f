"""Launching AITER's MLA decode kernels as its host code does, and putting their partial results together in float64.

The kernel arguments lie at multiples of 16 bytes, whatever names the code object's note gives them; names and meaning here follow AITER's host
code (csrc/py_itfs_cu/asm_mla.cu) and Python wrapper (aiter/mla.py) of the release that `aiter_wheel` fetches. There, all caches have pages of one
token.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from mla_rt.code_object import Argument
from mla_rt.emulator.counters import Counters, LaunchCounts
from mla_rt.emulator.machine import LaunchReport
from mla_rt.emulator_device import EmulatorDevice
from mla_rt.reference import mla_decode
from mla_rt.resources import Buffer

FP8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
WIDTH, V_WIDTH = 576, 512
WORK_BLOCK = 128  # tokens: a work begins at a multiple
UNUSED_ROWS = 37  # of the cache, between and behind those of the requests
POOL_ROWS = 1 << 16  # distinct ones; a larger cache repeats them, each at its own address
COST_OF_A_WORK = 2  # blocks: what a work costs beside its tokens, where works are balanced

_POINTERS = {
    "partial_out": 0, "lse": 16, "q": 32, "kv": 48, "kv_indptr": 64, "kv_indices": 80, "kv_last_page_len": 96, "qo_indptr": 208,
    "split_indptr_or_work": 224, "out": 240, "q_scale": 256, "kv_scale": 272,
}  # fmt: skip
_VALUES = {"sm_scale": 112, "rows": 128, "num_splits": 144, "q_stride": 160, "page_stride": 176, "page_size_log2": 192, "final_if_one": 288}
ARGUMENTS = tuple(Argument(name, offset, 8, "global_buffer") for name, offset in _POINTERS.items()) + tuple(
    Argument(name, offset, 4, "by_value") for name, offset in _VALUES.items()
)
KERNARG_BYTES = 304


@dataclass(frozen=True)
class Case:
    """One launch.

    rows_per_workgroup: rows (query tokens × heads) of one workgroup in the grid; persistent: work comes from a list, over num_workgroups
    workgroups; balanced: of a persistent launch, requests are cut where a workgroup has its share, whatever num_splits; final: the kernel writes the
    bf16 result itself where a request is not split.
    """

    kernel: str
    q_dtype: type
    kv_dtype: type
    num_heads: int = 16
    q_len: int = 1
    kv_lens: tuple[int, ...] = (300, 600)
    num_splits: int = 1
    rows_per_workgroup: int = 128
    persistent: bool = False
    balanced: bool = False
    final: bool = True
    num_workgroups: int = 3

    def __str__(self) -> str:
        return f"{self.kernel}-q{self.q_len}-{self.num_splits}splits"


@dataclass(frozen=True)
class Outcome:
    """out [total_q, num_heads, 512], lse [total_q, num_heads] (NaN where the kernel writes none), the float64 reference of both, and what the
    launch did."""

    out: np.ndarray
    lse: np.ndarray
    exact_out: np.ndarray
    exact_lse: np.ndarray
    report: LaunchReport
    counts: LaunchCounts

    @property
    def relative_error(self) -> float:
        """L2 norm of the difference over that of the exact result."""
        return float(np.linalg.norm(self.out - self.exact_out) / np.linalg.norm(self.exact_out))

    @property
    def cosine_distance(self) -> float:
        """The measure of AITER's own tests."""
        return float(1 - 2 * (self.out * self.exact_out).sum() / (self.out**2 + self.exact_out**2).sum())


@dataclass(frozen=True)
class Work:
    """Of a persistent launch: one workgroup's share of a request. partial_row: where its partial result goes, -1: it is the whole result."""

    request: int
    partial_row: int
    kv_begin: int  # first and last + 1 of the request's tokens
    kv_end: int


def plan_work(case: Case) -> list[list[Work]]:
    """The works of each workgroup, in order. They begin at whole blocks; a request's last one may be short."""
    cuts = _balanced_cuts(case) if case.balanced else _even_cuts(case)
    parts_of = Counter(request for workgroup in cuts for request, _, _ in workgroup)
    works: list[list[Work]] = []
    partial_row = 0
    for workgroup in cuts:
        works.append([])
        for request, begin, end in workgroup:
            split = parts_of[request] > 1
            works[-1].append(Work(request, partial_row if split else -1, begin, end))
            partial_row += case.q_len * split
    return works


def _even_cuts(case: Case) -> list[list[tuple[int, int, int]]]:
    """(request, begin, end): every request in num_splits runs of equally many blocks, dealt out in runs of equally many works."""
    cuts = []
    for request, kv_len in enumerate(case.kv_lens):
        step = math.ceil(math.ceil(kv_len / WORK_BLOCK) / case.num_splits) * WORK_BLOCK
        cuts += [(request, begin, min(begin + step, kv_len)) for begin in range(0, kv_len, step)]
    each = math.ceil(len(cuts) / case.num_workgroups)
    return [cuts[i * each : (i + 1) * each] for i in range(case.num_workgroups)]


def _balanced_cuts(case: Case) -> list[list[tuple[int, int, int]]]:
    """(request, begin, end): request after request, a workgroup takes blocks until it has its share: the least with which all blocks find a place."""
    blocks = [math.ceil(kv_len / WORK_BLOCK) for kv_len in case.kv_lens]
    share = math.ceil((sum(blocks) + COST_OF_A_WORK * len(blocks)) / case.num_workgroups)
    while True:
        cuts, left = [[]], share
        for request, kv_len in enumerate(case.kv_lens):
            block = 0
            while block < blocks[request]:
                if left <= COST_OF_A_WORK:
                    cuts, left = [*cuts, []], share
                taken = min(left - COST_OF_A_WORK, blocks[request] - block)
                cuts[-1].append((request, block * WORK_BLOCK, min((block + taken) * WORK_BLOCK, kv_len)))
                block, left = block + taken, left - COST_OF_A_WORK - taken
        if len(cuts) <= case.num_workgroups:
            return cuts + [[] for _ in range(case.num_workgroups - len(cuts))]
        share += 1


def merge(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """(out [..., 512], lse [...]) of disjoint parts of the tokens -> that of all, in float64."""
    outs, lses = (np.stack([part[i] for part in parts]).astype(np.float64) for i in range(2))
    highest = lses.max(axis=0)
    weights = np.exp(lses - highest)
    return (weights[..., None] * outs).sum(axis=0) / weights.sum(axis=0)[..., None], highest + np.log(weights.sum(axis=0))


class _Inputs:
    """Random normal queries and cache, tokens scattered over the cache's rows; outputs full of NaN."""

    def __init__(self, case: Case, device: EmulatorDevice, seed: int):
        random = np.random.default_rng(seed)
        self.batch = len(case.kv_lens)
        self.total_q = self.batch * case.q_len
        self.kv_indptr = np.concatenate([[0], np.cumsum(case.kv_lens)]).astype(np.int32)
        self.qo_indptr = np.arange(self.batch + 1, dtype=np.int32) * case.q_len
        num_rows = int(self.kv_indptr[-1]) + UNUSED_ROWS
        self.kv_indices = random.permutation(num_rows)[: self.kv_indptr[-1]].astype(np.int32)
        self.q = random.standard_normal((self.total_q, case.num_heads, WIDTH)).astype(case.q_dtype)
        pool = random.standard_normal((min(num_rows, POOL_ROWS), WIDTH)).astype(case.kv_dtype)
        self.kv = pool[np.arange(num_rows) % len(pool)]
        unused = np.setdiff1d(np.arange(num_rows), self.kv_indices)
        self.kv.view(np.uint8).reshape(num_rows, -1)[unused] = 0xFF  # NaN: whoever reads them shows it
        self.sm_scale = 1 / math.sqrt(WIDTH)
        self.device = device

    def upload(self, array: np.ndarray) -> Buffer:
        narrow = {1: np.uint8, 2: np.uint16}.get(array.itemsize)
        return self.device.to_device(array if narrow is None else array.view(narrow))

    def arguments(self, case: Case) -> dict[str, object]:
        """Those that do not depend on how the tokens are divided among workgroups."""
        one = self.upload(np.ones(1, np.float32))
        return {
            "q": self.upload(self.q),
            "kv": self.upload(self.kv),
            "kv_indptr": self.upload(self.kv_indptr),
            "kv_indices": self.upload(self.kv_indices),
            "kv_last_page_len": self.upload(np.ones(self.batch, np.int32)),
            "qo_indptr": self.upload(self.qo_indptr),
            "q_scale": one,
            "kv_scale": one,
            "sm_scale": np.float32(self.sm_scale),
            "rows": np.uint32(case.num_heads * case.q_len),
            "q_stride": np.uint32(case.num_heads * WIDTH * self.q.itemsize * case.q_len),
            "page_stride": np.uint32(WIDTH * self.kv.itemsize),
            "page_size_log2": np.uint32(0),
        }


@dataclass(frozen=True)
class _Launched:
    """What a launch left on the device; collect: (out, lse) of it, as in Outcome."""

    inputs: _Inputs
    collect: Callable[[], tuple[np.ndarray, np.ndarray]]
    report: LaunchReport
    counts: LaunchCounts


def run(case: Case, path: Path, device: EmulatorDevice, *, seed: int = 0) -> Outcome:
    """Launch the kernel, gather its result and compute the exact one."""
    launched = _launch(case, path, device, seed)
    inputs, (out, out_lse) = launched.inputs, launched.collect()
    tokens = inputs.kv.astype(np.float64)[inputs.kv_indices]
    bounds = {"qo_indptr": inputs.qo_indptr, "kv_indptr": inputs.kv_indptr}
    exact = mla_decode(inputs.q.astype(np.float64), tokens, sm_scale=inputs.sm_scale, causal=True, **bounds)
    return Outcome(out, out_lse, *exact, launched.report, launched.counts)


def count(case: Case, path: Path, device: EmulatorDevice) -> LaunchCounts:
    """Launch the kernel for what it does rather than what it finds."""
    return _launch(case, path, device, 0).counts


def _launch(case: Case, path: Path, device: EmulatorDevice, seed: int) -> _Launched:
    inputs = _Inputs(case, device, seed)
    (name,) = (module := device.load(path)).kernels
    kernel = module.kernel(name)
    kernel.info = dataclasses.replace(kernel.info, args=ARGUMENTS, kernarg_bytes=KERNARG_BYTES)
    result = device.allocate(inputs.total_q * case.num_heads * V_WIDTH * 2)
    rows = case.num_heads * V_WIDTH * 4

    collect: Callable[[], tuple[np.ndarray, np.ndarray]]
    if case.persistent:
        works = plan_work(case)
        num_partials = max(case.q_len * sum(work.partial_row >= 0 for workgroup in works for work in workgroup), 1)
        partial, lse = device.allocate(num_partials * rows), device.allocate(num_partials * case.num_heads * 4)
        grid, divided = _divide_by_list(case, inputs, works)
        arguments = {"partial_out": partial, "num_splits": np.uint32(1), "split_indptr_or_work": divided, "final_if_one": np.uint32(1)}
        collect = lambda: _collect_list(case, inputs, works, result, partial, lse)  # noqa: E731
    else:
        final = case.num_splits == 1 and case.final
        partial = result if final else device.allocate(inputs.total_q * case.num_splits * rows)
        lse = device.allocate(inputs.total_q * case.num_splits * case.num_heads * 4)
        grid = (math.ceil(case.q_len * case.num_heads / case.rows_per_workgroup), inputs.batch, case.num_splits)
        arguments = {
            "partial_out": partial,
            "num_splits": np.uint32(case.num_splits),
            "split_indptr_or_work": inputs.upload(np.arange(inputs.batch + 1, dtype=np.int32) * case.num_splits),
            "final_if_one": np.uint32(case.num_splits),
        }
        collect = lambda: _collect_final(case, inputs, result) if final else _collect_splits(case, inputs, partial, lse)  # noqa: E731

    counters: list[Counters] = []
    device.observe = lambda dispatch: counters.append(Counters(dispatch)) or counters
    device.launch(kernel, grid, **inputs.arguments(case), **arguments, lse=lse, out=result)
    return _Launched(inputs, collect, device.reports[-1], counters[0].counts())


def _divide_by_list(case: Case, inputs: _Inputs, works: Sequence[Sequence[Work]]) -> tuple[tuple[int, int, int], Buffer]:
    """The grid, and the work list in AITER's form: the addresses of the bounds of each workgroup's works and of the works."""
    bounds = np.cumsum([0, *map(len, works)]).astype(np.int32)
    table = np.zeros((bounds[-1], 8), np.int32)
    for row, work in zip(table, itertools.chain(*works), strict=True):
        q_begin, kv_begin = work.request * case.q_len, int(inputs.kv_indptr[work.request])
        left = case.kv_lens[work.request] - work.kv_end
        row[:7] = work.request, work.partial_row, q_begin, q_begin + case.q_len, kv_begin + work.kv_begin, kv_begin + work.kv_end, left
    addresses = np.array([inputs.upload(bounds).address, inputs.upload(table).address] + [0] * 8, np.uint64)
    return (case.num_workgroups, 1, 1), inputs.upload(addresses)


def _collect_final(case: Case, inputs: _Inputs, result: Buffer) -> tuple[np.ndarray, np.ndarray]:
    out = result.download((inputs.total_q, case.num_heads, V_WIDTH), np.uint16).view(BF16).astype(np.float64)
    return out, np.full(out.shape[:2], np.nan)


def _collect_splits(case: Case, inputs: _Inputs, partial: Buffer, lse: Buffer) -> tuple[np.ndarray, np.ndarray]:
    outs = partial.download((inputs.total_q, case.num_splits, case.num_heads, V_WIDTH), np.float32)
    lses = lse.download((inputs.total_q, case.num_splits, case.num_heads), np.float32)
    return merge([(outs[:, split], lses[:, split]) for split in range(case.num_splits)])


def _collect_list(
    case: Case, inputs: _Inputs, works: Sequence[Sequence[Work]], result: Buffer, partial: Buffer, lse: Buffer
) -> tuple[np.ndarray, np.ndarray]:
    out, out_lse = _collect_final(case, inputs, result)
    num_partials = partial.nbytes // (case.num_heads * V_WIDTH * 4)
    outs = partial.download((num_partials, case.num_heads, V_WIDTH), np.float32)
    lses = lse.download((num_partials, case.num_heads), np.float32)
    for request in range(inputs.batch):
        rows = [work.partial_row for work in itertools.chain(*works) if work.request == request and work.partial_row >= 0]
        if rows:
            queries = slice(request * case.q_len, (request + 1) * case.q_len)
            out[queries], out_lse[queries] = merge([(outs[row : row + case.q_len], lses[row : row + case.q_len]) for row in rows])
    return out, out_lse
