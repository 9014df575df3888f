"""decode(): numpy in, numpy out, through the packaged kernels of whichever device is there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from .batch import KV_LORA_RANK, Batch, make_batch
from .decode_kernel import kernel_for
from .device import Device, open_device
from .plan import Plan
from .resources import Buffer


def decode(
    q: Any,
    kv: Any,
    *,
    sm_scale: float,
    kv_indptr: Any = None,
    qo_indptr: Any = None,
    kv_indices: Any = None,
    kv_last_page_len: Any = None,
    page_size: int = 1,
    block_table: Any = None,
    kv_lens: Any = None,
    causal: bool = True,
    num_splits: int | None = None,
    device: Literal["auto", "hip", "emulator"] | Device = "auto",
) -> tuple[np.ndarray, np.ndarray]:
    """Absorbed MLA decode of a ragged batch over a (paged, quantized) cache.

    q                 [total_q, num_heads, 576] bfloat16, 1 to 128 heads
    kv                the cache: a bfloat16 array [.., 576], FP8 or MXFP4; laid out [total_kv, ..] (pages in a row, whole pages only) or
                      [num_pages, page_size, ..]. V is the first 512 columns of K.
    sm_scale          multiplies the logits; positive
    kv_indptr         [batch + 1] integers, prefix sums of **pages** of the requests; required unless block_table is given
    qo_indptr         [batch + 1] integers, prefix sums of query tokens, 0 to 8 a request; None: one query token a request
    kv_indices        [kv_indptr[-1]] integers, physical pages; None: the pages in order
    kv_last_page_len  [batch] integers, tokens in a request's last page, 1 to page_size (a request without pages: anything from 0 to page_size);
                      None: all pages are full
    page_size         tokens a page, a power of two from 1 to 128
    block_table, kv_lens   [batch, max_pages] and [batch] (tokens) integers in place of the three arrays above; entries past a request's
                      length are never read
    causal            a request's queries are its last tokens: each sees the tokens up to its own. False: each sees all tokens.
    num_splits        cut the tokens of every request into so many parts (fewer if it has fewer tokens), decoded side by side and merged;
                      None: as the device is filled best. The result depends on it only in rounding; for one value it is reproducible bit for bit.
    device            "auto", "hip", "emulator", or a device that `open_device` opened (kept open)

    Arrays need not be contiguous; what is not is copied. Returns out [total_q, num_heads, 512] bfloat16 and lse [total_q, num_heads] float32,
    the natural log of the sum of exp of the scaled logits. A query that sees no token has out 0, lse -inf.

    Accuracy. Against the exact result on the stored bytes, each (query token, head) has an RMS error of at most 1.5 times that of rounding the
    exact out to bfloat16, plus 2e-4 of the row's RMS value; lse is within 1e-4 or 2e-5 of its value. That holds for finite q and caches where
      - the logits are within float32 before they are multiplied by sm_scale, and up to about 3000 after: of larger ones float32 does not resolve the
        differences;
      - the largest |V| times the number of tokens is within float32, and no MXFP4 scale of V that matters is below 2^-115;
      - V does not cancel: out is not smaller than 1e-4 of what the same sum of |V| gives;
      - with FP8 and MXFP4 caches, no element of q that matters is below 2^-14 of the largest of its row: such an element counts with an absolute
        error of 2^-23 of the largest. So an outlier of 2^10 times the rest or more, on a column where the cache is zero, can cost the rest its
        accuracy, in lse first.
    A NaN or infinity in q or in the tokens of a request reaches the results of that request only.

    Raises TypeError or ValueError for arguments, before anything is launched; UnsupportedArch for a GPU without code objects; DeviceError for
    a HIP error; KernelFault for a fault that the emulator finds.
    """
    batch = make_batch(
        q,
        kv,
        sm_scale=sm_scale,
        kv_indptr=kv_indptr,
        qo_indptr=qo_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=kv_last_page_len,
        page_size=page_size,
        block_table=block_table,
        kv_lens=kv_lens,
        causal=causal,
        num_splits=num_splits,
    )
    if isinstance(device, Device):
        return decode_batch(batch, device)
    with open_device(device) as opened:
        return decode_batch(batch, opened)


def decode_batch(batch: Batch, device: Device) -> tuple[np.ndarray, np.ndarray]:
    """`decode` of a checked batch on an open device. What it takes of the device is given back, whether it succeeds or raises; only the code object
    stays loaded."""
    with prepared_decode(batch, device) as prepared:
        prepared.launch()
        return prepared.results()


def kernel_name(batch: Batch, device: Device) -> str:
    """The kernel that decodes a batch. UnsupportedArch or ValueError if the device's architecture has none."""
    q_lens = batch.qo_indptr[1:] - batch.qo_indptr[:-1]
    return kernel_for(device, batch.cache.kv_format, int(q_lens.max(initial=0)) * batch.num_heads).kernel.info.name


@dataclass(frozen=True)
class DeviceCache:
    """A cache on the device, for `Plan.run`: as PagedKVCache, but whoever made it keeps the memory."""

    device: Device
    kv_format: str
    num_pages: int
    page_size: int
    rows: Buffer
    scales: Buffer | None
    kv_scale: np.float32


@dataclass(frozen=True)
class PreparedDecode:
    """A batch on the device, planned, ready to run."""

    plan: Plan
    _q: Buffer
    _cache: DeviceCache
    _out: Buffer
    _lse: Buffer

    def launch(self) -> None:
        """Queue the launch; again if called again."""
        self.plan.run(self._q, self._cache, out=self._out, lse=self._lse)

    def results(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the launch; out and lse as `decode` returns them."""
        shape = (self.plan.total_q, self.plan.num_heads)
        out_bits = self._out.download((*shape, KV_LORA_RANK), np.uint16)
        return out_bits.view(ml_dtypes.bfloat16), self._lse.download(shape, np.float32)


@contextmanager
def prepared_decode(batch: Batch, device: Device, *, num_cus: int | None = None) -> Iterator[PreparedDecode]:
    """A checked batch, uploaded and planned, for as long as the context lasts.

    num_cus: compute units that the work is cut for; None: those of the device.
    """
    with ExitStack() as resources:
        plan = resources.enter_context(
            Plan(
                device,
                batch,
                num_heads=batch.num_heads,
                kv_format=batch.cache.kv_format,
                sm_scale=batch.sm_scale,
                causal=batch.causal,
                num_splits=batch.num_splits,
                num_cus=num_cus,
            )
        )

        def allocate(*shape: int, itemsize: int) -> Buffer:
            return resources.enter_context(device.allocate(math.prod(shape) * itemsize))

        def upload(array: np.ndarray) -> Buffer:
            return resources.enter_context(device.to_device(array))

        rows, scales = batch.cache.rows, batch.cache.scales
        yield PreparedDecode(
            plan,
            upload(batch.q),
            DeviceCache(
                device,
                batch.cache.kv_format,
                len(rows),
                batch.page_size,
                upload(rows),
                None if scales is None else upload(scales),
                batch.cache.kv_scale,
            ),
            allocate(batch.total_q, batch.num_heads, KV_LORA_RANK, itemsize=2),
            allocate(batch.total_q, batch.num_heads, itemsize=4),
        )
