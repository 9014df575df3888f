"""Wrong calls of the whole public face: each raises its type with the value and the limit, launches nothing, and leaves all as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from decode_cases import Case, Made, make
from mla_rt import decode, open_device, plan
from mla_rt.arrays import DeviceArray, as_array
from mla_rt.cache import PagedKVCache
from mla_rt.device import Device
from mla_rt.errors import DeviceError, UnsupportedArch
from mla_rt.plan import Plan
from mla_rt.resources import Stream
from plan_cases import Arrays, options_of, table_of
from tolerance import assert_decoded

# Two requests in pages of 4 tokens; the second has 2 pages.
CASE = Case((3, 6), (1, 2), "mxfp4", num_heads=2, page_size=4, num_splits=1)
BF16 = ml_dtypes.bfloat16


@dataclass
class Setup:
    """What a call needs, all of it right."""

    device: Device
    other_device: Device
    made: Made
    plan: Plan
    fixed: Plan
    closed_plan: Plan
    arrays: Arrays
    cache: PagedKVCache
    stream: Stream

    def planned(self, device: Any = None, **changes: Any) -> Any:
        arguments = {**table_of(self.made), **options_of(self.made), **changes}
        return plan(self.device if device is None else device, **arguments)

    def run(self, a_plan: Plan | None = None, **changes: Any) -> None:
        arrays = self.arrays
        arguments = {"q": arrays.q, "cache": arrays.cache, "out": arrays.out, "lse": arrays.lse, **changes}
        (a_plan or self.plan).run(**arguments)

    def with_cache(self, **changes: Any) -> None:
        self.run(cache=SimpleNamespace(**{**vars(self.arrays.cache), **changes}))

    def update(self, **changes: Any) -> None:
        self.fixed.update(**{**table_of(self.made), **changes})

    def decode(self, **changes: Any) -> None:
        decode(**{**self.made.arguments, "device": self.device, **changes})

    def freed(self, nbytes: int) -> Any:
        buffer = self.device.allocate(nbytes)
        buffer.free()
        return buffer

    def view(self, of: str, dtype: Any, shape: tuple[int, ...], *, offset: int = 0, **options: Any) -> DeviceArray:
        """Of one of the arrays, or of the cache's, `offset` bytes after its beginning."""
        buffer = getattr(self.arrays, of, None) or getattr(self.arrays.cache, of)
        return DeviceArray(buffer.address + offset, shape, dtype, self.device, owner=buffer, **options)

    def cache_without(self, name: str) -> Any:
        attributes = dict(vars(self.arrays.cache))
        del attributes[name]
        return SimpleNamespace(**attributes)


@pytest.fixture(scope="module", params=["emulator", "hip"])
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    device = request.getfixturevalue(f"{request.param}_device")
    made = make(CASE)
    with ExitStack() as stack:
        enter = stack.enter_context
        other = enter(open_device("emulator"))
        tables, options = table_of(made), options_of(made)
        closed = plan(device, **tables, **options)
        closed.close()
        yield Setup(
            device,
            other,
            made,
            enter(plan(device, **tables, **options)),
            enter(plan(device, **tables, **options, max_kv_len=8)),
            closed,
            enter(Arrays(device, made)),
            enter(PagedKVCache(device, num_pages=2, page_size=4, kv_format="mxfp4")),
            enter(device.stream()),
        )


NAN, INF = float("nan"), float("inf")
NO_REQUEST = {"qo_indptr": [0], "kv_indptr": [0], "kv_indices": [], "kv_last_page_len": []}

BAD = {
    # plan
    "plan without a device": (lambda s: plan("hip", **table_of(s.made), **options_of(s.made)), TypeError, "device is a str; one that open_device"),
    "unknown format": (lambda s: s.planned(kv_format="fp4"), ValueError, "kv_format 'fp4' cannot be decoded on gfx950; it reads bf16, fp8"),
    "fnuz": (lambda s: s.planned(kv_format="fp8_e4m3fnuz"), ValueError, "kv_format 'fp8_e4m3fnuz' cannot be decoded on gfx950"),
    "format of no text": (lambda s: s.planned(kv_format=4), TypeError, "kv_format is 4; a str is needed"),
    "no heads": (lambda s: s.planned(num_heads=0), ValueError, "num_heads is 0; 1 to 128 is allowed"),
    "too many heads": (lambda s: s.planned(num_heads=129), ValueError, "num_heads is 129; 1 to 128 is allowed"),
    "half a head": (lambda s: s.planned(num_heads=1.5), TypeError, "num_heads is 1.5; an integer is needed"),
    "true heads": (lambda s: s.planned(num_heads=True), TypeError, "num_heads is True; an integer is needed"),
    "page size of 3": (lambda s: s.planned(page_size=3), ValueError, "page_size is 3; a power of two from 1 to 128"),
    "page size of 256": (lambda s: s.planned(page_size=256), ValueError, "page_size is 256; a power of two from 1 to 128"),
    "page size as text": (lambda s: s.planned(page_size="4"), TypeError, "page_size is '4'; an integer is needed"),
    "sm_scale 0": (lambda s: s.planned(sm_scale=0), ValueError, "sm_scale is 0; a positive number within float32"),
    "negative sm_scale": (lambda s: s.planned(sm_scale=-0.5), ValueError, "sm_scale is -0.5; a positive number within float32"),
    "sm_scale NaN": (lambda s: s.planned(sm_scale=NAN), ValueError, "sm_scale is nan; a positive number within float32"),
    "sm_scale infinite": (lambda s: s.planned(sm_scale=INF), ValueError, "sm_scale is inf; a positive number within float32"),
    "sm_scale beyond float32": (lambda s: s.planned(sm_scale=1e39), ValueError, r"sm_scale is 1e\+39; a positive number within float32"),
    "sm_scale None": (lambda s: s.planned(sm_scale=None), TypeError, "sm_scale is None; a number is needed"),
    "causal 1": (lambda s: s.planned(causal=1), TypeError, "causal is 1; True or False is needed"),
    "no splits": (lambda s: s.planned(num_splits=0), ValueError, "num_splits is 0; 1 to 2147483647 is allowed"),
    "half a split": (lambda s: s.planned(num_splits=0.5), TypeError, "num_splits is 0.5; an integer is needed"),
    "max_kv_len 0": (lambda s: s.planned(max_kv_len=0), ValueError, "max_kv_len is 0; 1 to 2147483520 is allowed"),
    "max_kv_len beyond int32": (lambda s: s.planned(max_kv_len=2**31), ValueError, "max_kv_len is 2147483648; 1 to 2147483520"),
    "max_kv_len too short": (lambda s: s.planned(max_kv_len=5), ValueError, "request 1 has 6 tokens; the plan is for at most max_kv_len 5"),
    "max_kv_len of too many pages": (
        lambda s: s.planned(max_kv_len=2**31 - 128, page_size=1, qo_indptr=None, kv_indptr=[0, 1, 2], kv_indices=None, kv_last_page_len=None),
        ValueError,
        "2 requests of max_kv_len 2147483520 have 4294967040 pages of page_size 1; the limit is 2147483647",
    ),
    "qo_indptr begins with 1": (lambda s: s.planned(qo_indptr=[1, 1, 3]), ValueError, "qo_indptr starts with 1; prefix sums start with 0"),
    "qo_indptr falls": (lambda s: s.planned(qo_indptr=[0, 3, 1]), ValueError, "qo_indptr falls from 3 to 1 at entry 2"),
    "qo_indptr of one request": (lambda s: s.planned(qo_indptr=[0, 3]), ValueError, "qo_indptr has 2 entries; 3 are needed for 2 requests"),
    "9 query tokens": (lambda s: s.planned(qo_indptr=[0, 9, 9]), ValueError, "request 0 has 9 query tokens; the limit is 8"),
    "qo_indptr of floats": (lambda s: s.planned(qo_indptr=[0.0, 1.0, 3.0]), TypeError, "qo_indptr has dtype float64; integers are needed"),
    "no kv_indptr": (lambda s: s.planned(kv_indptr=None), TypeError, "kv_indptr is a NoneType"),
    "empty kv_indptr": (lambda s: s.planned(kv_indptr=[]), ValueError, "kv_indptr starts with nothing; prefix sums start with 0"),
    "kv_indptr falls": (lambda s: s.planned(kv_indptr=[0, 2, 1]), ValueError, "kv_indptr falls from 2 to 1 at entry 2"),
    "negative kv_indptr": (lambda s: s.planned(kv_indptr=[0, -1, 3]), ValueError, "kv_indptr falls from 0 to -1 at entry 1"),
    "kv_indptr beyond int32": (lambda s: s.planned(kv_indptr=[0, 1, 2**31]), ValueError, "kv_indptr holds 2147483648; the limit is 2147483647"),
    "kv_indptr beyond int64": (lambda s: s.planned(kv_indptr=[0, 1, 2**70]), ValueError, "kv_indptr holds 1180591620717411303424; the limit is"),
    "kv_indptr of 2 axes": (lambda s: s.planned(kv_indptr=[[0, 1, 3]]), ValueError, r"kv_indptr has shape \(1, 3\); 1 dimension is needed"),
    "kv_indptr of text": (lambda s: s.planned(kv_indptr="0 1 3"), TypeError, "kv_indptr has dtype <U5; integers are needed"),
    "too few pages": (lambda s: s.planned(kv_indices=[0, 1]), ValueError, "kv_indices has 2 entries; kv_indptr ends at 3"),
    "negative page": (lambda s: s.planned(kv_indices=[0, -1, 2]), ValueError, r"kv_indices\[1\] is -1; 0 to 2147483647 is allowed"),
    "page beyond int32": (lambda s: s.planned(kv_indices=[0, 1, 2**31]), ValueError, r"kv_indices\[2\] is 2147483648; 0 to 2147483647 is allowed"),
    "page of uint64": (
        lambda s: s.planned(kv_indices=np.array([0, 1, 2**64 - 1], np.uint64)),
        ValueError,
        r"kv_indices\[2\] is 18446744073709551615; 0 to 2147483647 is allowed",
    ),
    "pages of floats": (lambda s: s.planned(kv_indices=np.zeros(3, np.float32)), TypeError, "kv_indices has dtype float32; integers are needed"),
    "last page of 0": (lambda s: s.planned(kv_last_page_len=[0, 2]), ValueError, r"kv_last_page_len\[0\] is 0; 1 to page_size 4 is allowed for 1"),
    "last page of 5": (lambda s: s.planned(kv_last_page_len=[3, 5]), ValueError, r"kv_last_page_len\[1\] is 5; 1 to page_size 4 is allowed"),
    "negative last page": (lambda s: s.planned(kv_last_page_len=[3, -1]), ValueError, r"kv_last_page_len\[1\] is -1; 1 to page_size 4"),
    "one last page": (lambda s: s.planned(kv_last_page_len=[3]), ValueError, "kv_last_page_len has 1 entry; kv_indptr describes 2 requests"),
    # run: the arrays
    "q too small": (lambda s: s.run(q=s.arrays.out), ValueError, r"q has 6144 bytes; the plan needs 6912: \[3, 2, 576\] bfloat16"),
    "out too large": (lambda s: s.run(out=s.arrays.q), ValueError, r"out has 6912 bytes; the plan needs 6144: \[3, 2, 512\] bfloat16"),
    "lse too large": (lambda s: s.run(lse=s.arrays.q), ValueError, r"lse has 6912 bytes; the plan needs 24: \[3, 2\] float32"),
    "freed q": (lambda s: s.run(q=s.freed(6912)), DeviceError, "Buffer used after it was closed"),
    "freed out": (lambda s: s.run(out=s.freed(6144)), DeviceError, "Buffer used after it was closed"),
    "q on another device": (lambda s: s.run(q=s.other_device.allocate(6912)), ValueError, "q is on another device, <emulator .*; the plan is for <"),
    "lse on another device": (lambda s: s.run(lse=s.other_device.allocate(24)), ValueError, "lse is on another device, <emulator device "),
    "lse is out's memory": (lambda s: s.run(lse=s.arrays.out), ValueError, "lse has 6144 bytes"),
    # run: views
    "q of float32": (lambda s: s.run(q=s.view("q", "f4", (3, 2, 288))), TypeError, r"q has dtype float32; the plan needs \[3, 2, 576\] bfloat16$"),
    "q of bits": (
        lambda s: s.run(q=s.view("q", "u2", (3, 2, 576))),
        TypeError,
        r"q has dtype uint16; the plan needs \[3, 2, 576\] bfloat16 \(if these are its bits: as_array\(…, dtype='bfloat16'\)\)",
    ),
    "lse of bfloat16": (lambda s: s.run(lse=s.view("lse", BF16, (3, 2))), TypeError, r"lse has dtype bfloat16; the plan needs \[3, 2\] float32"),
    "q of 2 requests": (lambda s: s.run(q=s.view("q", BF16, (2, 2, 576))), ValueError, r"q has shape \[2, 2, 576\]; the plan needs \[3, 2, 576\]"),
    "q of one axis": (lambda s: s.run(q=s.view("q", BF16, (3456,))), ValueError, r"q has shape \[3456\]; the plan needs \[3, 2, 576\] bfloat16"),
    "q of every second head": (
        lambda s: s.run(q=s.view("rows", BF16, (3, 2, 576), strides=(1728, 1152, 1))),
        ValueError,
        r"q of shape \[3, 2, 576\] has strides \[1728, 1152, 1\] in elements; packed, \[1152, 576, 1\], is needed",
    ),
    "q transposed": (lambda s: s.run(q=s.view("q", BF16, (3, 2, 576), strides=(576, 1728, 1))), ValueError, r"q of .* has strides \[576, 1728, 1\]"),
    "out with gaps": (lambda s: s.run(out=s.view("q", BF16, (3, 2, 512), strides=(1152, 576, 1))), ValueError, r"out of .* strides \[1152, 576, 1\]"),
    "q at an odd address": (
        lambda s: s.run(q=s.view("rows", BF16, (3, 2, 576), offset=8)),
        ValueError,
        "q is at address 0x[0-9a-f]+8; a multiple of 16 is needed",
    ),
    "lse at an odd address": (
        lambda s: s.run(lse=s.view("q", "f4", (3, 2), offset=2)),
        ValueError,
        "lse is at address 0x[0-9a-f]+2; a multiple of 4",
    ),
    "read-only out": (lambda s: s.run(out=s.view("out", BF16, (3, 2, 512), readonly=True)), ValueError, "out is read-only; a run writes it"),
    "read-only lse": (lambda s: s.run(lse=s.view("lse", "f4", (3, 2), readonly=True)), ValueError, "lse is read-only; a run writes it"),
    "out over q": (lambda s: s.run(out=s.view("q", BF16, (3, 2, 512), offset=768)), ValueError, "out overlaps q: out at 0x.* to 0x.*, q at 0x"),
    "lse over q": (lambda s: s.run(lse=s.view("q", "f4", (3, 2), offset=6888)), ValueError, "lse overlaps q: lse at 0x"),
    "lse over out": (lambda s: s.run(lse=s.view("out", "f4", (3, 2))), ValueError, "out overlaps lse: out at 0x"),
    "out over rows": (lambda s: s.run(out=s.view("rows", BF16, (3, 2, 512), offset=16)), ValueError, "out overlaps cache.rows: out at 0x"),
    "lse over rows": (lambda s: s.run(lse=s.view("rows", "f4", (3, 2), offset=6888)), ValueError, "lse overlaps cache.rows: lse at 0x"),
    "lse over scales": (lambda s: s.run(lse=s.view("scales", "f4", (3, 2))), ValueError, "lse overlaps cache.scales: lse at 0x"),
    "q nowhere": (lambda s: s.run(q=None), TypeError, "q: a NoneType is no device array: a Buffer, a DeviceArray, __dlpack__ or"),
    "q on the host": (
        lambda s: s.run(q=np.zeros((3, 2, 576), np.float32)),
        ValueError,
        "q: the (array at 0x.* is memory of the host|ndarray is on (DLPack|kDLCPU))",
    ),
    "view of a freed buffer": (
        lambda s: s.run(q=DeviceArray(4096, (3, 2, 576), BF16, s.device, owner=s.freed(4))),
        DeviceError,
        "Buffer used after it was closed",
    ),
    "view on another device": (
        lambda s: s.run(q=as_array(s.other_device.allocate(6912), dtype=BF16, shape=(3, 2, 576))),
        ValueError,
        "q is on another device, <emulator",
    ),
    "rows with gaps": (
        lambda s: s.with_cache(rows=s.view("rows", "u1", (6, 4, 144), strides=(1152, 288, 1))),
        ValueError,
        r"cache.rows of shape \[6, 4, 144\] has strides \[1152, 288, 1\]",
    ),
    "rows as a list": (lambda s: s.with_cache(rows=[1]), TypeError, "cache.rows: a list is no device array"),
    # run: the cache
    "no cache": (lambda s: s.run(cache=None), TypeError, "cache is a NoneType, which is no cache: .* 'kv_format'"),
    "cache without rows": (lambda s: s.run(cache=s.cache_without("rows")), TypeError, "cache is a SimpleNamespace, which is no cache: .* 'rows'"),
    "cache of another format": (lambda s: s.with_cache(kv_format="bf16"), ValueError, "cache has kv_format 'bf16'; the plan is for 'mxfp4'"),
    "cache of another page size": (lambda s: s.with_cache(page_size=8), ValueError, "cache has page_size 8; the plan is for 4"),
    "cache on another device": (lambda s: s.with_cache(device=s.other_device), ValueError, "cache is on another device, <emulator"),
    "cache too small": (lambda s: s.run(cache=s.cache), ValueError, r"the plan reads page \d; the cache has 2 pages"),
    "cache one page too small": (
        lambda s: s.with_cache(num_pages=max(s.made.arguments["kv_indices"][:3].tolist())),
        ValueError,
        r"the plan reads page (\d); the cache has \1 pages",
    ),
    "cache with half a page": (lambda s: s.with_cache(num_pages=6.5), TypeError, "cache.num_pages is 6.5; an int is needed"),
    "cache of more pages than rows": (lambda s: s.with_cache(num_pages=7), ValueError, "cache.rows has 6912 bytes; 8064 are needed for its pages"),
    "cache of freed rows": (lambda s: s.with_cache(rows=s.freed(6912)), DeviceError, "Buffer used after it was closed"),
    "rows on another device": (lambda s: s.with_cache(rows=s.other_device.allocate(6912)), ValueError, "cache.rows is on another device"),
    "mxfp4 without scales": (lambda s: s.with_cache(scales=None), ValueError, "cache.scales is None; a cache of mxfp4 has scales"),
    "scales too small": (lambda s: s.with_cache(scales=s.arrays.lse), ValueError, "cache.scales has 24 bytes; 432 are needed for its pages"),
    "kv_scale NaN": (lambda s: s.with_cache(kv_scale=NAN), ValueError, "cache.kv_scale is nan; a positive number within float32"),
    "negative kv_scale": (lambda s: s.with_cache(kv_scale=-1.0), ValueError, "cache.kv_scale is -1.0; a positive number within float32"),
    "kv_scale beyond float32": (lambda s: s.with_cache(kv_scale=1e300), ValueError, r"cache.kv_scale is 1e\+300; a positive number within float32"),
    "kv_scale of mxfp4": (lambda s: s.with_cache(kv_scale=2), ValueError, "cache.kv_scale is 2; a cache of mxfp4 has none, which is 1"),
    "kv_scale as text": (lambda s: s.with_cache(kv_scale="1"), TypeError, "cache.kv_scale is '1'; a number is needed"),
    "out in the cache": (lambda s: s.run(out=s.arrays.cache.rows), ValueError, "out has 6912 bytes"),
    # run: stream, plan
    "stream of no kind": (lambda s: s.run(stream=7), TypeError, "stream is a int; a Stream of the plan's device is needed, or None"),
    "closed plan": (lambda s: s.run(s.closed_plan), DeviceError, "Plan used after it was closed"),
    # update
    "another number of requests": (lambda s: s.update(**NO_REQUEST), ValueError, "kv_indptr describes 0 requests; the plan with max_kv_len is for 2"),
    "other query tokens": (lambda s: s.update(qo_indptr=[0, 2, 3]), ValueError, r"qo_indptr\[1\] is 2; the plan with max_kv_len is for 1 there"),
    "longer than max_kv_len": (
        lambda s: s.update(kv_indptr=[0, 3, 3], kv_last_page_len=[1, 1]),
        ValueError,
        "request 0 has 9 tokens; the plan is for at most max_kv_len 8",
    ),
    "update on no stream": (lambda s: s.update(stream="default"), TypeError, "stream is a str; a Stream of the plan's device is needed, or None"),
    "update of a closed plan": (lambda s: s.closed_plan.update(**table_of(s.made)), DeviceError, "Plan used after it was closed"),
    # decode
    "decode of float32": (lambda s: s.decode(q=np.zeros((3, 2, 576), np.float32)), TypeError, "q has dtype float32; bfloat16 is needed"),
    "decode of 512 columns": (lambda s: s.decode(q=np.zeros((3, 2, 512), BF16)), ValueError, r"q has shape \(3, 2, 512\); \[total_q, num_heads, 57"),
    "decode of no cache": (lambda s: s.decode(kv=None), TypeError, "kv is a NoneType; a bfloat16 array, FP8 or MXFP4 is needed"),
    "decode with sm_scale NaN": (lambda s: s.decode(sm_scale=NAN), ValueError, "sm_scale is nan; a positive number within float32"),
    "decode of a page there is not": (lambda s: s.decode(kv_indices=[0, 1, 99]), ValueError, r"kv_indices\[2\] is 99; kv has pages 0 to 5"),
    "decode of pages of 8": (lambda s: s.decode(page_size=8), ValueError, "kv.codes has 4 tokens a page, but page_size is 8"),
    "decode of a table and lists": (lambda s: s.decode(block_table=[[0]], kv_lens=[3]), ValueError, "block_table and kv_lens replace kv_indptr"),
    "decode on what": (lambda s: s.decode(device="cuda"), ValueError, "device kind 'cuda': it is 'auto', 'hip' or 'emulator'"),
    # cache
    "cache of pages of 3": (lambda s: PagedKVCache(s.device, 4, 3, "bf16"), ValueError, "page_size is 3; a power of two from 1 to 128"),
    "cache of fp4": (lambda s: PagedKVCache(s.device, 4, 4, "fp4"), ValueError, "kv_format is 'fp4'; it is one of bf16, fp8_e4m3fn, mxfp4"),
    "cache of no pages": (lambda s: PagedKVCache(s.device, 0, 4, "bf16"), ValueError, "num_pages is 0; 1 to 2147483647 is allowed"),
    "cache of a scale NaN": (lambda s: PagedKVCache(s.device, 1, 4, "fp8_e4m3fn", scale=NAN), ValueError, "scale is nan; a positive number"),
    "append of 512 columns": (lambda s: s.cache.append(np.zeros((1, 512), BF16), [0]), ValueError, r"new_kv has shape \(1, 512\); \[num_tokens, 57"),
    "append of float64": (lambda s: s.cache.append(np.zeros((1, 576)), [0]), TypeError, "new_kv has dtype float64; bfloat16 or float32 is needed"),
    "append to slot 8": (lambda s: s.cache.append(np.zeros((1, 576), BF16), [8]), ValueError, r"slot_mapping\[0\] is 8; the cache has slots 0 to 7"),
    "append to slot -2": (lambda s: s.cache.append(np.zeros((1, 576), BF16), [-2]), ValueError, r"slot_mapping\[0\] is -2; the cache has slots 0 to"),
    "append to two slots": (lambda s: s.cache.append(np.zeros((1, 576), BF16), [0, 1]), ValueError, "new_kv has 1 token, slot_mapping 2 slots"),
    "gather of slot 8": (lambda s: s.cache.gather([8]), ValueError, r"slots\[0\] is 8; the cache has slots 0 to 7"),
}


class Launches:
    """How many launches there were on the device."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
        self.count = 0
        if device.kind == "hip":
            shim = request.getfixturevalue("shim")
            before = shim.count("hipModuleLaunchKernel")
            self.of_device = lambda: shim.count("hipModuleLaunchKernel") - before
        else:
            monkeypatch.setattr(device, "observe", self._observe)
            self.of_device = lambda: self.count

    def _observe(self, dispatch: Any) -> list[Any]:
        self.count += 1
        return []


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_and_launches_nothing(name, setup, monkeypatch, request):
    call, error, message = BAD[name]
    launches, resources = Launches(setup.device, monkeypatch, request), set(setup.device._resources)
    with pytest.raises(error, match=message) as raised:
        call(setup)
    assert type(raised.value) is error
    assert launches.of_device() == 0
    assert set(setup.device._resources) == resources


def test_there_are_many():
    assert len(BAD) >= 60 and len({message for _, _, message in BAD.values()}) >= 60


def test_after_all_bad_calls_good_ones_work(setup, monkeypatch, request):
    for call, error, _ in BAD.values():
        with pytest.raises(error):
            call(setup)
    launches = Launches(setup.device, monkeypatch, request)
    for a_plan in (setup.plan, setup.fixed):
        assert_decoded(*setup.arrays.run_for_results(a_plan, setup.stream), *setup.made.exact())
    assert launches.of_device() == 2
    assert_decoded(*decode(**setup.made.arguments, device=setup.device), *setup.made.exact())


def test_a_device_without_kernels_is_refused(monkeypatch):
    made = make(CASE)
    with open_device("emulator") as device:
        monkeypatch.setattr(device, "arch", "gfx90a")
        with pytest.raises(UnsupportedArch, match="there are no decode kernels for gfx90a, only for gfx950"):
            plan(device, **table_of(made), **options_of(made))


def test_nothing_works_on_a_closed_device():
    made = make(CASE)
    with open_device("emulator") as device:
        a_plan, arrays = plan(device, **table_of(made), **options_of(made)), Arrays(device, made)
    for call in (
        lambda: arrays.run(a_plan),
        lambda: a_plan.update(**table_of(made)),
        lambda: plan(device, **table_of(made), **options_of(made)),
        lambda: decode(**made.arguments, device=device),
    ):
        with pytest.raises(DeviceError, match="closed"):
            call()
    a_plan.close()  # does nothing


def test_wrong_caches_of_bfloat16_are_refused(setup, monkeypatch, request):
    """Among them one whose rows are the memory of out: 18 rows of out are as many bytes as 16 pages."""
    launches = Launches(setup.device, monkeypatch, request)
    with (
        plan(setup.device, None, [0, 1, 2], num_heads=9, kv_format="bf16", sm_scale=1.0) as a_plan,
        setup.device.allocate(18 * 1024) as rows,
        setup.device.allocate(18 * 1152) as q,
        setup.device.allocate(18 * 4) as lse,
    ):
        cache = {"device": setup.device, "kv_format": "bf16", "page_size": 1, "num_pages": 16, "rows": rows, "scales": None, "kv_scale": 1.0}
        with pytest.raises(ValueError, match=f"out overlaps cache.rows: out at {rows.address:#x} to {rows.address + rows.nbytes:#x}, cache.rows at"):
            a_plan.run(q, SimpleNamespace(**cache), out=rows, lse=lse)
        with pytest.raises(ValueError, match=r"cache\.scales is a Buffer; a cache of bf16 has none"):
            a_plan.run(q, SimpleNamespace(**{**cache, "scales": lse}), out=rows, lse=lse)
    assert launches.of_device() == 0
