"""Addresses beyond 2^31 and 2^32, of bytes, elements and rows, in everything that can be that large.

The emulator reserves address space without using memory, so that a cache of a terabyte costs what is written of it. Each test uses what lies on both
sides of a border. An offset that was cut to 32 bits reads zeros there, writes elsewhere, or faults.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from decode_cases import FORMATS, Case, make, run
from far_cases import decode_far
from mla_rt import FP8, MXFP4, PagedKVCache, open_device, plan, quantize_mxfp4
from mla_rt.arrays import DeviceArray
from mla_rt.batch import ROW_BYTES, SCALES_PER_ROW
from mla_rt.reference import mla_decode
from plan_cases import Arrays, options_of, table_of
from test_cache import FP8_SCALE, hard_values, quantized_bytes
from tolerance import assert_decoded, assert_same_bits

BF16 = ml_dtypes.bfloat16
BORDERS = (1 << 31, 1 << 32)
REACHES = ("bytes and elements", "scales and rows")


def border_rows(device, kv_format: str, reach: str) -> list[int]:
    """Rows of a cache in which borders lie. Skips if the emulator got too little address space for a cache that has them.

    2^31 is the last border of rows: 2^32 of bf16 would be more bytes than there is address space.
    """
    if reach == "bytes and elements":
        rows = {border // size for border in BORDERS for size in (ROW_BYTES[kv_format], 576)}
    else:
        rows = {1 << 31, *(border // SCALES_PER_ROW for border in BORDERS if kv_format == "mxfp4")}
    needed = max(rows) * (ROW_BYTES[kv_format] + SCALES_PER_ROW) + (1 << 30)
    if device.memory.capacity < needed:
        pytest.skip(f"{needed} bytes of address space are needed; the system gives {device.memory.capacity}")
    return sorted(rows)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("page_size", [1, 128])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_decode(kv_format, page_size, reach, emulator_device):
    """A request at each border, and one whose pages come from all borders and from the cache's start."""
    borders = np.array(border_rows(emulator_device, kv_format, reach)) // page_size
    # The largest page id is 2^31 - 1, of the row in front of the border.
    borders -= 3 * (borders == 1 << 31)
    requests = [[border, border + 1, border - 1] for border in borders] + [[*(borders + 2), 0]]
    kv_lens = tuple((len(pages) - 1) * page_size + 1 for pages in requests)
    made = make(Case(kv_lens, kv_format=kv_format, num_heads=3, page_size=page_size, num_splits=1))
    assert_same_bits(decode_far(emulator_device, made, np.concatenate(requests)), run(made, emulator_device))


@pytest.fixture(scope="module")
def plain_device():
    """Without strict checks, which keep a mark of every dword of an allocation that is written to."""
    with open_device("emulator") as device:
        yield device


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_append_and_gather(kv_format, reach, plain_device):
    """What is appended around the borders lies where it has to, as the host computes it, and gather finds it; what is beside it stays."""
    rows = border_rows(plain_device, kv_format, reach)
    slots = np.array([0, *(row + step for row in rows for step in (0, -1, 2)), rows[-1] | 127])
    x = hard_values(len(slots), 12)
    with PagedKVCache(plain_device, int(slots[-1]) // 128 + 1, 128, kv_format, scale=FP8_SCALE if kv_format == "fp8_e4m3fn" else 1.0) as cache:
        cache.append(x, slots)
        codes, scales = quantized_bytes(cache, x)
        for buffer, expected in ((cache.rows, codes), (cache.scales, scales))[: 2 if kv_format == "mxfp4" else 1]:
            row_bytes = expected.shape[1]
            for slot, row in zip(slots.tolist(), expected, strict=True):
                np.testing.assert_array_equal(bytes_of(plain_device, buffer, slot * row_bytes, row_bytes), row, err_msg=f"slot {slot}")
            untouched = {slot + 1 for slot in slots[:-1].tolist()} - {*slots.tolist()}
            assert untouched and not any(bytes_of(plain_device, buffer, slot * row_bytes, row_bytes).any() for slot in untouched)
        values = {"bf16": lambda: codes.view(BF16).astype(np.float32), "fp8_e4m3fn": lambda: FP8(codes, FP8_SCALE, "e4m3fn").dequantize()}
        expected = values.get(kv_format, lambda: MXFP4(codes, scales).dequantize())()
        np.testing.assert_array_equal(cache.gather(slots[::-1].copy()), expected[::-1])


def bytes_of(device, buffer, offset, nbytes):
    return device.memory.bytes_at(buffer.address + offset, nbytes)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_append_of_rows_far_apart(dtype, plain_device):
    """new_kv as a part of something larger: its rows begin beyond 2^31 and 2^32 bytes and elements."""
    stride = (3 << 28) + 576  # elements
    x = np.random.default_rng(3).standard_normal((9, 576)).astype(dtype)
    with plain_device.allocate(9 * stride * x.itemsize) as wide, PagedKVCache(plain_device, 9, 1, "mxfp4") as cache:
        for i, row in enumerate(x):
            wide.upload(row, offset=i * stride * x.itemsize)
        new_kv = DeviceArray(wide.address, x.shape, np.dtype(dtype), plain_device, strides=(stride, 1), owner=wide)
        cache.append(new_kv, np.arange(9))
        np.testing.assert_array_equal(cache.gather(np.arange(9)), quantize_mxfp4(x).dequantize())


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_queries_and_results(kv_format, num_splits, plain_device, monkeypatch):
    """q, out and partial results beyond the borders: a launch of 8 million query rows, of which only the workgroups at the borders are run."""
    num_requests, q_len, num_heads = 8400, 8, 128
    rows_a_request = q_len * num_heads
    rows = sorted({border // size for border in BORDERS for size in (576 * 2, 576, 512 * 2, 512)})
    assert rows[-1] < num_requests * rows_a_request
    tiles = []  # (first row, last row + 1) of what is run, of all rows

    def at_the_borders(*arguments, rows_per_tile, **options):
        whole = make_work_list(*arguments, rows_per_tile=rows_per_tile, **options)
        first = whole.work[:, 0].astype(np.int64) * rows_a_request + whole.work[:, 1]
        begins = {row // rows_per_tile * rows_per_tile for border in rows for row in (border, border - 1)}
        tiles.extend((begin, begin + rows_per_tile) for begin in sorted(begins))
        return replace(whole, work=np.ascontiguousarray(whole.work[np.isin(first, list(begins))]))

    plan_module = importlib.import_module("mla_rt.plan")
    make_work_list = plan_module.make_work_list
    monkeypatch.setattr(plan_module, "make_work_list", at_the_borders)

    made = make(Case((5,), (0,), kv_format=kv_format, num_heads=num_heads, causal=False, page_size=16, num_splits=num_splits))
    table = {
        "qo_indptr": np.arange(num_requests + 1) * q_len,
        "kv_indptr": np.arange(num_requests + 1),
        "kv_indices": np.repeat(made.arguments["kv_indices"], num_requests),
        "kv_last_page_len": np.full(num_requests, 5),
    }
    total = num_requests * rows_a_request
    with Arrays(plain_device, made) as arrays, plan(plain_device, **table, **options_of(made)) as a_plan:
        assert all(begin // rows_a_request == (end - 1) // rows_a_request for begin, end in tiles)
        assert (num_splits == 1) == (a_plan.work_list.num_partials == 0)
        q, out, lse = (arrays.allocate(total * size) for size in (576 * 2, 512 * 2, 4))
        rng = np.random.default_rng(0)
        queries = {begin: rng.standard_normal((end - begin, 1, 576)).astype(BF16) for begin, end in tiles}
        for begin, rows_of_tile in queries.items():
            q.upload(rows_of_tile, offset=begin * 576 * 2)
        a_plan.run(q, arrays.cache, out=out, lse=lse)
        for begin, end in tiles:
            found_out = bytes_of(plain_device, out, begin * 1024, (end - begin) * 1024).view(BF16).reshape(-1, 1, 512)
            found_lse = bytes_of(plain_device, lse, begin * 4, (end - begin) * 4).view(np.float32).reshape(-1, 1)
            exact = mla_decode(queries[begin], made.flat, qo_indptr=[0, end - begin], kv_indptr=[0, 5], sm_scale=float(a_plan.sm_scale), causal=False)
            assert_decoded(found_out, found_lse, *exact)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_page_tables(kv_format, emulator_device):
    """A request whose entries of kv_indices begin beyond 2^32 bytes: behind those of two that have as many tokens, and no query."""
    made = make(Case((0, 0, 70), (0, 0, 1), kv_format=kv_format, num_heads=3, num_splits=1))
    longest = (1 << 29) + 5
    with Arrays(emulator_device, made) as arrays, plan(emulator_device, **table_of(made), **options_of(made), max_kv_len=longest) as a_plan:
        expected = arrays.run_for_results(a_plan)
        a_plan.kv_indptr.upload(np.array([0, longest, 2 * longest, 2 * longest + 70], np.int32))
        a_plan.kv_indices.upload(made.arguments["kv_indices"].astype(np.int32), offset=2 * longest * 4)
        a_plan.kv_indices.upload(np.zeros(70, np.int32), offset=0)  # an offset that was cut off finds something else
        assert_same_bits(arrays.run_for_results(a_plan), expected)
