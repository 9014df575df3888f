"""Random decode batches in which everything that must not be used is NaN or garbage.

Built from the flat rows of each request, which are also what the reference gets: the paging below is the only place where a token's slot is
decided for a test, and it shares no code with the package.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from mla_rt.batch import Batch, make_batch
from mla_rt.decode import decode_batch
from mla_rt.device import Device
from mla_rt.formats import FP8, MXFP4, quantize_fp8, quantize_mxfp4
from mla_rt.reference import mla_decode

WIDTH = 576
SPARE_PAGES = 3  # that no request owns
FORMATS = ("bf16", "fp8_e4m3fn", "mxfp4")


@dataclass(frozen=True)
class Case:
    """A batch to be made.

    kv_lens, q_lens  [batch] tokens and query tokens
    values           "smooth": normal numbers, columns and heads of different magnitude; "bytes": every finite code of the format alike
    fp8_scale        of fp8 caches; None: from the largest value
    unowned          "nan" or "finite": what the slots hold that no request owns; results must not differ in a bit
    table            "indptr" or "block_table" (garbage past the lengths)
    """

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    kv_format: str = "bf16"
    num_heads: int = 16
    page_size: int = 1
    num_splits: int | None = None
    causal: bool = True
    values: str = "smooth"
    fp8_scale: float | None = None
    unowned: str = "nan"
    table: str = "indptr"
    seed: int = 0

    def __str__(self) -> str:
        parts = [self.kv_format, f"h{self.num_heads}", f"p{self.page_size}", f"s{self.num_splits or 'auto'}", "causal" if self.causal else "full"]
        return "-".join(parts + [self.values] * (self.values != "smooth") + [f"n{len(self.kv_lens)}"])

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


@dataclass(frozen=True)
class Made:
    """arguments: of `decode`; flat: float [total_kv, 576], the dequantized tokens of request 0, 1, …"""

    case: Case
    arguments: dict[str, Any]
    flat: np.ndarray
    qo_indptr: np.ndarray

    def batch(self) -> Batch:
        return make_batch(**self.arguments)

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """Call it after the kernel has run: nothing of the reference may lie in memory that a kernel could pick up."""
        return mla_decode(
            self.arguments["q"],
            self.flat,
            qo_indptr=self.qo_indptr,
            kv_indptr=prefix_sums(self.case.kv_lens),
            sm_scale=float(np.float32(self.arguments["sm_scale"])),
            causal=self.case.causal,
        )


def prefix_sums(counts: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def make(case: Case) -> Made:
    rng = np.random.default_rng(case.seed)
    q_lens = case.q_lens or (1,) * len(case.kv_lens)
    qo_indptr = prefix_sums(q_lens)
    sm_scale = WIDTH**-0.5
    head_magnitude = np.exp2(rng.integers(-3, 3, (1, case.num_heads, 1)))
    q = (rng.standard_normal((qo_indptr[-1], case.num_heads, WIDTH)) * head_magnitude).astype(ml_dtypes.bfloat16)
    flat = stored_rows(rng, case)
    values = flat.dequantize() if isinstance(flat, FP8 | MXFP4) else flat
    if values.size:
        sm_scale /= max(float(np.sqrt(np.mean(values.astype(np.float64) ** 2))), 1e-30)  # logits of a few units, whatever the cache holds
    kv, table = paged(rng, case, flat)
    arguments = {"q": q, "kv": kv, "sm_scale": sm_scale, "qo_indptr": qo_indptr, "page_size": case.page_size, **table}
    return Made(case, {**arguments, "causal": case.causal, "num_splits": case.num_splits}, values, qo_indptr)


def stored_rows(rng: np.random.Generator, case: Case) -> Any:
    """The tokens of all requests, in the format of the cache: [total_kv, 576]."""
    shape = (sum(case.kv_lens), WIDTH)
    if case.values == "bytes" and case.kv_format == "fp8_e4m3fn":
        finite = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
        return FP8(rng.choice(finite, shape), np.float32(case.fp8_scale or 1.0), "e4m3fn")
    if case.values == "bytes" and case.kv_format == "mxfp4":
        # Blocks of 2^-7 to 2^8 in one row: V's scales differ in every 32 columns.
        codes = rng.integers(0, 256, (shape[0], WIDTH // 2), np.uint8)
        return MXFP4(codes, rng.integers(120, 136, (shape[0], WIDTH // 32), np.uint8))
    rows = rng.standard_normal(shape) * np.exp2(rng.integers(-2, 3, (1, WIDTH))) + rng.standard_normal((1, WIDTH)) / 4
    rows = rows.astype(np.float32)
    if case.kv_format == "bf16":
        return rows.astype(ml_dtypes.bfloat16)
    return quantize_mxfp4(rows) if case.kv_format == "mxfp4" else quantize_fp8(rows, scale=case.fp8_scale)


def paged(rng: np.random.Generator, case: Case, flat: Any) -> tuple[Any, dict[str, Any]]:
    """The rows spread over shuffled pages [num_pages, page_size, ..], and the arguments that say where they lie."""
    kv_lens = np.array(case.kv_lens, np.int64)
    num_pages_of = -(-kv_lens // case.page_size)
    num_used = int(num_pages_of.sum())
    num_pages = num_used + SPARE_PAGES
    pages = rng.permutation(num_pages)[:num_used]
    slots, first = [], 0
    for kv_len, count in zip(case.kv_lens, num_pages_of.tolist(), strict=True):
        slots += [pages[first + t // case.page_size] * case.page_size + t % case.page_size for t in range(kv_len)]
        first += count

    def spread(rows: np.ndarray, *, nan: Any, finite: Any) -> np.ndarray:
        cache = np.empty((num_pages * case.page_size, rows.shape[1]), rows.dtype)
        cache[:] = {"nan": nan, "finite": finite}[case.unowned]
        cache[slots] = rows
        return cache.reshape(num_pages, case.page_size, -1)

    if isinstance(flat, MXFP4):
        garbage = rng.integers(0, 256, flat.codes.shape[1], np.uint8)
        kv: Any = MXFP4(spread(flat.codes, nan=garbage, finite=garbage), spread(flat.scales, nan=0xFF, finite=0x80))
    elif isinstance(flat, FP8):
        kv = FP8(spread(flat.codes, nan=0x7F, finite=0x35), flat.scale, flat.dtype)
    else:
        kv = spread(flat, nan=np.nan, finite=3.0)
    if case.table == "block_table":
        width = int(num_pages_of.max(initial=0)) + 2
        table = rng.choice(np.array([-1, 2147480000, -(2**31)]), (len(kv_lens), width))
        for request, (begin, count) in enumerate(zip(prefix_sums(num_pages_of)[:-1], num_pages_of, strict=True)):
            table[request, :count] = pages[begin : begin + count]
        return kv, {"block_table": table, "kv_lens": kv_lens}
    last = np.where(kv_lens > 0, (kv_lens - 1) % case.page_size + 1, 0)
    return kv, {"kv_indptr": prefix_sums(num_pages_of), "kv_indices": pages, "kv_last_page_len": last}


def run(made: Made, device: Device, poison: int = 0xFF) -> tuple[np.ndarray, np.ndarray]:
    """Decode on the device with every byte of the buffers that it allocates (outputs, partials) `poison` before the launch: 0xFF makes them NaN."""
    allocate = device.allocate

    def poisoned(nbytes: int) -> Any:
        buffer = allocate(nbytes)
        buffer.fill(poison)
        return buffer

    device.allocate = poisoned  # type: ignore[method-assign]
    try:
        return decode_batch(made.batch(), device)
    finally:
        del device.allocate


def permuted(made: Made, order: Any) -> tuple[dict[str, Any], np.ndarray]:
    """The arguments of the batch with its requests in this order, and its query tokens in theirs."""
    arguments, indptr, pages = dict(made.arguments), made.qo_indptr, made.arguments["kv_indptr"]
    tokens = np.concatenate([np.arange(indptr[r], indptr[r + 1]) for r in order])
    arguments["q"] = arguments["q"][tokens]
    arguments["qo_indptr"] = prefix_sums(np.diff(indptr)[order])
    arguments["kv_indptr"] = prefix_sums(np.diff(pages)[order])
    arguments["kv_indices"] = np.concatenate([arguments["kv_indices"][pages[r] : pages[r + 1]] for r in order])
    arguments["kv_last_page_len"] = arguments["kv_last_page_len"][order]
    return arguments, tokens
