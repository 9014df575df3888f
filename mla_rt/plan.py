"""plan(): from the lengths of a batch to what runs it again and again: a work list, workspaces and a packed launch, all on the device.

A serving loop plans once a step and runs the plan once a layer.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from .arguments import INT32_MAX, as_count, as_flag, as_positive, counted
from .arrays import DeviceArray
from .batch import KV_LORA_RANK, MAX_NUM_HEADS, QK_WIDTH, ROW_BYTES, SCALES_PER_ROW
from .decode_kernel import DecodeKernel, kernel_for, require_format
from .device import Device
from .errors import DeviceError
from .operands import Operand, overlap, packed_address
from .requests import MAX_KV_LEN, Requests, as_page_size, make_requests
from .resources import Buffer, PreparedLaunch, Stream
from .work_list import WorkList, make_work_list

_BF16, _F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def plan(
    device: Device,
    qo_indptr: Any,
    kv_indptr: Any,
    kv_indices: Any = None,
    kv_last_page_len: Any = None,
    *,
    num_heads: int,
    page_size: int = 1,
    kv_format: str,
    sm_scale: float | np.float32,
    causal: bool = True,
    num_splits: int | None = None,
    max_kv_len: int | None = None,
) -> Plan:
    """Plan the decode of a batch.

    device            that `open_device` opened
    qo_indptr         [batch + 1] integers, prefix sums of query tokens, 0 to 8 a request; None: one query token a request
    kv_indptr         [batch + 1] integers, prefix sums of **pages** of the requests
    kv_indices        [kv_indptr[-1]] integers, physical pages; None: the pages in order
    kv_last_page_len  [batch] integers, tokens in a request's last page, 1 to page_size (a request without pages: anything from 0 to page_size);
                      None: all pages are full
    num_heads         1 to 128
    page_size         tokens a page, a power of two from 1 to 128
    kv_format         of the caches that it will be run with: "bf16", "fp8_e4m3fn" or "mxfp4"
    sm_scale          multiplies the logits; positive
    causal            a request's queries are its last tokens: each sees the tokens up to its own. False: each sees all tokens.
    num_splits        cut the tokens of every request into so many parts, decoded side by side and merged; None: as the device is filled best
    max_kv_len        tokens; given, the work is cut for requests of that length once and for all, and holds for all lengths up to it: what a
                      captured graph needs (`Plan.update`). None: cut for the lengths that are given.

    The four arrays are on the host, and may be changed once this returns. Raises TypeError or ValueError for an argument, UnsupportedArch for a GPU
    without kernels, DeviceError if there is no room. Nothing is launched.
    """
    if not isinstance(device, Device):
        raise TypeError(f"device is a {type(device).__name__}; one that open_device opened is needed")
    if not isinstance(kv_format, str):
        raise TypeError(f"kv_format is {kv_format!r}; a str is needed")
    requests = make_requests(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size=as_page_size(page_size))
    return Plan(
        device,
        requests,
        num_heads=as_count("num_heads", num_heads, MAX_NUM_HEADS),
        kv_format=kv_format,
        sm_scale=as_positive("sm_scale", sm_scale),
        causal=as_flag("causal", causal),
        num_splits=None if num_splits is None else as_count("num_splits", num_splits),
        max_kv_len=None if max_kv_len is None else as_count("max_kv_len", max_kv_len, MAX_KV_LEN),
    )


class Plan:
    """A planned batch. Made by `plan`; a context manager that closes it.

    device, num_heads, page_size, kv_format, sm_scale, causal, num_splits, max_kv_len: as planned; total_q, num_requests: of the batch
    work_list   what a run launches; kernel: the name of its kernel; nbytes: device memory that the plan owns
    kv_indptr, kv_indices, kv_last_page_len   Buffers of int32: the lengths on the device, which the kernel reads at each run. With max_kv_len, work
                on a stream may rewrite them in place of `update`; it must keep to what `update` would accept.

    Workspaces. What the plan owns is allocated by `plan`, is used again by `update`, and grows there only. Of its partial results (2 KiB for a query
    row) splits chosen automatically need at most 32 tiles of rows a compute unit; a given num_splits needs one for each split of each tile.

    Streams. Runs of one plan share its workspaces: they must be ordered, by one stream or by events. Plans on two streams are independent. A plan
    may be used from several threads; a call holds the others off for as long as it takes to queue it.

    Graphs. `run` can be captured. The graph keeps what the plan has on the device: while it is open, `close` raises DeviceError, and so does an
    `update` of a plan without max_kv_len, whose launch would no longer fit its work list. A plan that is merely dropped stays on its device.
    """

    def __init__(
        self,
        device: Device,
        requests: Requests,
        *,
        num_heads: int,
        kv_format: str,
        sm_scale: np.float32,
        causal: bool,
        num_splits: int | None,
        max_kv_len: int | None = None,
        num_cus: int | None = None,
    ):
        """Use `plan`, which checks. num_cus: compute units that the work is cut for; None: those of the device."""
        require_format(kv_format, device.arch)
        self.device, self.num_heads, self.page_size, self.kv_format = device, num_heads, requests.page_size, kv_format
        self.sm_scale, self.causal, self.num_splits, self.max_kv_len = sm_scale, causal, num_splits, max_kv_len
        self._num_cus = device.num_compute_units if num_cus is None else num_cus
        self._page_bytes = self.page_size * ROW_BYTES[kv_format]
        self._page_scale_bytes = self.page_size * SCALES_PER_ROW if kv_format == "mxfp4" else 0
        self._kv_scale = np.float32(1)  # in the packed launch
        self._fewest_pages = INT32_MAX  # of the caches that it was run with
        self._lock = threading.Lock()
        self._buffers: dict[str, Buffer] = {}
        self._open = self._usable = True
        try:
            self._take(requests, self._divide(requests), None)
        except BaseException:
            self._free()
            raise

    @property
    def total_q(self) -> int:
        return self._requests.total_q

    @property
    def num_requests(self) -> int:
        return self._requests.num_requests

    @property
    def kernel(self) -> str:
        return self._kernel.kernel.info.name

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def kv_indptr(self) -> Buffer:
        return self._buffers["kv_indptr"]

    @property
    def kv_indices(self) -> Buffer:
        return self._buffers["kv_indices"]

    @property
    def kv_last_page_len(self) -> Buffer:
        return self._buffers["kv_last_page_len"]

    def run(self, q: Any, cache: Any, *, out: Any, lse: Any, stream: Stream | None = None) -> None:
        """Queue the decode on the stream (None: the device's default stream): one launch; no allocation, no copy, no waiting.

        q      [total_q, num_heads, 576] bfloat16
        cache  a PagedKVCache, or any object with kv_format, page_size, num_pages, device, rows, scales and kv_scale like it: rows are
               [num_pages, page_size, row bytes], scales [num_pages, page_size, 18] (None unless mxfp4), kv_scale a positive number (1 unless fp8)
        out    [total_q, num_heads, 512] bfloat16; is written
        lse    [total_q, num_heads] float32; is written: natural log of the sum of exp of the scaled logits

        Arrays are Buffers of exactly that size, DeviceArrays, or anything with DLPack or __cuda_array_interface__ (`as_array`), on the plan's device,
        packed, and aligned to 16 bytes (lse: 4). All must stay until the launch has run. What is written may overlap nothing else. Accuracy is as
        `decode` promises. A query that sees no token has out 0, lse -inf.

        Raises, before anything is launched, TypeError or ValueError for what does not fit the plan, DeviceError for what was closed or if HIP refuses
        the launch. On the emulator a KernelFault of the launch is raised here; the plan stays usable, as after a KeyboardInterrupt.
        """
        if self.device.closed:  # before the lock: in a forked child, it may be held by a thread that is gone
            self._require_open()
        with self._lock:
            if not (self._open and self._usable) or self.device.closed:
                self._require_usable()
            if stream is not None and not isinstance(stream, Stream):
                raise TypeError(f"stream is a {type(stream).__name__}; a Stream of the plan's device is needed, or None")
            device = self.device
            q_begin = self._q.address_of(q, device, stream)
            out_begin = self._out.address_of(out, device, stream)
            lse_begin = self._lse.address_of(lse, device, stream)
            rows_begin, scales_begin, kv_scale = self._check_cache(cache, stream)
            q_end, out_end, lse_end = q_begin + self._q.nbytes, out_begin + self._out.nbytes, lse_begin + self._lse.nbytes
            rows_end, scales_end = rows_begin + cache.num_pages * self._page_bytes, scales_begin + cache.num_pages * self._page_scale_bytes
            if (
                (out_begin < q_end and q_begin < out_end)
                or (out_begin < lse_end and lse_begin < out_end)
                or (out_begin < rows_end and rows_begin < out_end)
                or (out_begin < scales_end and scales_begin < out_end)
                or (lse_begin < q_end and q_begin < lse_end)
                or (lse_begin < rows_end and rows_begin < lse_end)
                or (lse_begin < scales_end and scales_begin < lse_end)
            ):
                spans = {"out": (out_begin, out_end), "lse": (lse_begin, lse_end), "q": (q_begin, q_end), "cache.rows": (rows_begin, rows_end)}
                raise overlap(spans | {"cache.scales": (scales_begin, scales_end)}, written=("out", "lse"))
            launch = self._launch
            if type(kv_scale) is not np.float32 or kv_scale != self._kv_scale:  # others numpy would compare by rounding them, with a warning
                checked = self._check_kv_scale(kv_scale)
                if launch is not None:
                    launch.set_value("kv_scale", checked)
                self._kv_scale = checked  # last: after an interrupt it is still what the launch holds, or is set again
            if launch is None:  # no query tokens: a grid of no workgroups is an error in HIP
                return
            launch.set_address("q", q_begin)
            launch.set_address("kv", rows_begin)
            launch.set_address("kv_scales", scales_begin)
            launch.set_address("out", out_begin)
            launch.set_address("lse", lse_begin)
            if device._capture is not None:
                arrays = (q, out, lse, cache.rows, cache.scales)
                device._captured(stream, *arrays, *(array.owner for array in arrays if isinstance(array, DeviceArray)))
            if cache.num_pages < self._fewest_pages:
                self._fewest_pages = cache.num_pages
            try:
                launch.launch(stream)
            except DeviceError:  # it was not queued
                raise
            except BaseException:
                # The emulator stopped midway, by a fault or Ctrl-C: workgroups that did not run left the counters of their row tiles as they were.
                self._buffers["arrivals"].fill(0, stream)
                raise

    def update(self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any = None, kv_last_page_len: Any = None, *, stream: Stream | None = None) -> None:
        """Plan another batch in place of this one; the arrays and errors are those of `plan`.

        Without max_kv_len everything but num_heads, page_size, kv_format, sm_scale, causal and num_splits may change. Workspaces that are too small
        grow, which allocates.

        With max_kv_len only the lengths on the device are rewritten: requests and their query tokens must be as many as planned, no request longer,
        and no page beyond the smallest cache that the plan was run with. Nothing is allocated, the work list stays, and a graph that captured `run`
        decodes these lengths when it is launched next.

        stream  on which the arrays are copied to the device, behind what was given to it before; None: copied when this returns, behind everything.
                Runs and graphs that are to use the new lengths must be ordered behind it, those of the old lengths before.

        If it raises TypeError or ValueError the plan is as before; after a DeviceError or KeyboardInterrupt it may have to be updated again before it
        is run, which a run then says.
        """
        requests = make_requests(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size=self.page_size)
        if stream is not None and not isinstance(stream, Stream):
            raise TypeError(f"stream is a {type(stream).__name__}; a Stream of the plan's device is needed, or None")
        self._require_open()  # before the lock too, as in `run`
        with self._lock:
            self._require_open()
            if self.max_kv_len is None:
                self._require_in_no_graph("updated", "; a plan with max_kv_len can be")
                self._take(requests, self._divide(requests), stream)
            else:
                self._require_fits(requests)
                self._take(requests, None, stream)

    def close(self) -> None:
        """Free what the plan owns, behind all work given before. Closing again does nothing. DeviceError while a graph uses it."""
        if self.device.closed:  # in a forked child, the lock may be held by a thread that is gone
            return
        with self._lock:
            if self._open and not self.device.closed:
                self._require_in_no_graph("closed")
                self._free()
                self._open = False

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        size = f"{counted(self.num_requests, 'request')}, {counted(self.num_heads, 'head')}, {counted(len(self.work_list.work), 'workgroup')}"
        return f"<Plan of {size}, {self.kv_format}{'' if self._open else ', closed'}>"

    def _require_open(self) -> None:
        if self.device.closed:
            raise DeviceError(f"Plan used after its device was {self.device._ended}")
        if not self._open:
            raise DeviceError("Plan used after it was closed")

    def _require_in_no_graph(self, done: str, but: str = "") -> None:
        if self._buffers["work"]._num_graphs:
            raise DeviceError(f"Plan {done} while a graph uses it; close the graph first{but}")

    def _require_usable(self) -> None:
        self._require_open()
        if not self._usable:
            raise DeviceError("Plan used after an update that failed midway; update it again")

    def _check_cache(self, cache: Any, stream: Stream | None) -> tuple[int, int, Any]:
        """Addresses of rows and scales (0 if there are none), and the scale of the whole."""
        try:
            kv_format, page_size, num_pages, kv_scale = cache.kv_format, cache.page_size, cache.num_pages, cache.kv_scale
            device, rows, scales = cache.device, cache.rows, cache.scales
        except AttributeError as error:
            raise TypeError(f"cache is a {type(cache).__name__}, which is no cache: {error}") from None
        if kv_format != self.kv_format:
            raise ValueError(f"cache has kv_format {kv_format!r}; the plan is for {self.kv_format!r}")
        if page_size != self.page_size:
            raise ValueError(f"cache has page_size {page_size!r}; the plan is for {self.page_size}")
        if device is not self.device:
            raise ValueError(f"cache is on another device, {device}; the plan is for {self.device}")
        if type(num_pages) is not int:
            raise TypeError(f"cache.num_pages is {num_pages!r}; an int is needed")
        if num_pages <= self._last_page:
            raise ValueError(f"the plan reads page {self._last_page}; the cache has {counted(num_pages, 'page')}")
        rows_address = packed_address("cache.rows", rows, num_pages * self._page_bytes, device, stream)
        if not self._page_scale_bytes:
            if scales is not None:
                raise ValueError(f"cache.scales is a {type(scales).__name__}; a cache of {kv_format} has none")
            return rows_address, 0, kv_scale
        if scales is None:
            raise ValueError("cache.scales is None; a cache of mxfp4 has scales")
        return rows_address, packed_address("cache.scales", scales, num_pages * self._page_scale_bytes, device, stream), kv_scale

    def _check_kv_scale(self, kv_scale: Any) -> np.float32:
        checked = as_positive("cache.kv_scale", kv_scale)
        if checked != 1 and not self.kv_format.startswith("fp8"):
            raise ValueError(f"cache.kv_scale is {kv_scale}; a cache of {self.kv_format} has none, which is 1")
        return checked

    def _divide(self, requests: Requests) -> tuple[DecodeKernel, WorkList]:
        """The kernel for these requests, and their work cut for it."""
        kv_lens, q_lens = requests.kv_lens, requests.qo_indptr[1:] - requests.qo_indptr[:-1]
        kernel = kernel_for(self.device, self.kv_format, int(q_lens.max(initial=0)) * self.num_heads)
        if self.max_kv_len is not None:
            self._require_no_longer(requests)
            kv_lens = np.full(len(kv_lens), self.max_kv_len)
        return kernel, make_work_list(
            requests.qo_indptr,
            kv_lens,
            num_heads=self.num_heads,
            num_splits=self.num_splits,
            num_cus=self._num_cus,
            rows_per_tile=kernel.rows_per_tile,
            tokens_per_tile=kernel.tokens_per_tile,
            tile_cost=kernel.tile_cost,
        )

    def _require_no_longer(self, requests: Requests) -> None:
        if requests.kv_lens.max(initial=0) > self.max_kv_len:
            longest = int(requests.kv_lens.argmax())
            raise ValueError(f"request {longest} has {requests.kv_lens[longest]} tokens; the plan is for at most max_kv_len {self.max_kv_len}")

    def _require_fits(self, requests: Requests) -> None:
        """ValueError for requests that the work list made for max_kv_len does not serve."""
        if requests.num_requests != self.num_requests:
            raise ValueError(f"kv_indptr describes {counted(requests.num_requests, 'request')}; the plan with max_kv_len is for {self.num_requests}")
        differ = requests.qo_indptr != self._requests.qo_indptr
        if differ.any():
            entry = int(differ.argmax())
            planned = self._requests.qo_indptr[entry]
            raise ValueError(f"qo_indptr[{entry}] is {requests.qo_indptr[entry]}; the plan with max_kv_len is for {planned} there")
        self._require_no_longer(requests)
        last_page = int(requests.kv_indices.max(initial=-1))
        if last_page >= self._fewest_pages:
            raise ValueError(f"kv_indices holds {last_page}; a cache that the plan was run with has {counted(self._fewest_pages, 'page')}")

    def _take(self, requests: Requests, divided: tuple[DecodeKernel, WorkList] | None, stream: Stream | None) -> None:
        """Bring the requests to the device. divided: how; None: as before."""
        arrays = {
            "kv_indptr": requests.kv_indptr,
            "kv_indices": requests.kv_indices,
            "kv_last_page_len": requests.kv_last_page_len,
        }
        if divided is not None:
            kernel, work_list = divided
            arrays |= {"qo_indptr": requests.qo_indptr, "work": work_list.work}
            self._grow(self._bytes_needed(requests, kernel, work_list), stream)
        self._usable = False
        for name, array in arrays.items():
            self._buffers[name].upload(array, stream, offset=0)
        if divided is not None:
            self._kernel, self.work_list = kernel, work_list
            self._launch = self._prepare()
            rows = (requests.total_q, self.num_heads)
            self._q = Operand("q", (*rows, QK_WIDTH), _BF16, alignment=16)
            self._out = Operand("out", (*rows, KV_LORA_RANK), _BF16, alignment=16, written=True)
            self._lse = Operand("lse", rows, _F32, alignment=4, written=True)
        self._requests = requests
        self._last_page = int(requests.kv_indices.max(initial=-1))
        self._usable = True

    def _bytes_needed(self, requests: Requests, kernel: DecodeKernel, work_list: WorkList) -> dict[str, int]:
        """Of each workspace."""
        num_pages = requests.kv_indices.size
        if self.max_kv_len is not None:
            num_pages = requests.num_requests * -(-self.max_kv_len // self.page_size)
            if num_pages > INT32_MAX:
                lengths = f"{counted(requests.num_requests, 'request')} of max_kv_len {self.max_kv_len}"
                raise ValueError(f"{lengths} have {num_pages} pages of page_size {self.page_size}; the limit is {INT32_MAX}")
        partial_rows = work_list.num_partials * kernel.rows_per_tile
        return {
            "qo_indptr": requests.qo_indptr.nbytes,
            "kv_indptr": requests.kv_indptr.nbytes,
            "kv_indices": num_pages * requests.kv_indices.itemsize,
            "kv_last_page_len": requests.kv_last_page_len.nbytes,
            "work": work_list.work.nbytes,
            "partial_out": partial_rows * KV_LORA_RANK * _F32.itemsize,
            "partial_lse": partial_rows * _F32.itemsize,
            "arrivals": work_list.num_counters * 4,
        }

    def _grow(self, bytes_needed: dict[str, int], stream: Stream | None) -> None:
        """Make the workspaces at least as large. They are as before if it raises."""
        grown = {}
        with ExitStack() as undo:
            for name, nbytes in bytes_needed.items():
                before = self._buffers.get(name)
                if before is None or before.nbytes < nbytes:
                    # A batch that grows a little each step is not to allocate at each.
                    grown[name] = undo.enter_context(self.device.allocate(nbytes if before is None else nbytes + nbytes // 4))
            if "arrivals" in grown:
                grown["arrivals"].fill(0, stream)
            self._usable = False
            undo.pop_all()
        # The new ones take their places first: an interrupt may cost memory, but never leaves a freed one behind.
        outgrown = [self._buffers[name] for name in grown if name in self._buffers]
        self._buffers |= grown
        for buffer in outgrown:
            buffer.free()

    def _prepare(self) -> PreparedLaunch | None:
        """The launch, but for the arrays of a run; None if there are no query tokens."""
        if not len(self.work_list.work):
            return None
        arrays: dict[str, Any] = {**dict.fromkeys(("q", "kv", "kv_scales", "out", "lse")), **self._buffers}
        return self.device.prepare(
            self._kernel.kernel,
            len(self.work_list.work),
            **arrays,
            num_heads=np.int32(self.num_heads),
            page_size_log2=np.int32(self.page_size.bit_length() - 1),
            causal=np.int32(self.causal),
            sm_scale=self.sm_scale,
            kv_scale=self._kv_scale,
        )

    def _free(self) -> None:
        for buffer in self._buffers.values():
            buffer.free()
