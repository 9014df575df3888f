"""Every kind of fault that is known from public MLA decode libraries: each has a test of its name that makes its situation.

The tests go through the public calls, on every device at hand. Some kinds are tested at length elsewhere; here each is seen at one place. KINDS, at
the end, is the list.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from pytest import approx

from conftest import ROOT
from decode_cases import FORMATS, Case, make, permuted, run
from far_cases import decode_far
from mla_rt import FP8, MXFP4, DeviceError, PagedKVCache, UnsupportedArch, decode, merge, open_device, plan, quantize_fp8, quantize_mxfp4
from mla_rt.arrays import DeviceArray
from mla_rt.decode_kernel import KV_FORMATS
from mla_rt.emulator.observer import Observer
from plan_cases import Arrays, options_of, table_of
from tolerance import assert_decoded, assert_merged, assert_same_bits

BF16 = np.dtype(ml_dtypes.bfloat16)
MIXED = Case((5, 0, 150, 64, 1), (2, 1, 4, 1, 8), num_heads=2, page_size=16, num_splits=2)

in_every_format = pytest.mark.parametrize("kv_format", FORMATS)


def in_format(kv_format, rows):
    """float32 rows [n, 576] as a cache; in FP8 of scale 1."""
    if kv_format == "bf16":
        return rows.astype(BF16)
    return quantize_mxfp4(rows) if kv_format == "mxfp4" else quantize_fp8(rows, scale=1.0)


def planned(device, made, **options):
    return plan(device, **table_of(made), **{**options_of(made), **options})


def assert_right(made, device):
    result = run(made, device)
    assert_decoded(*result, *made.exact())
    return result


def one_token(kv, device, q=0.0, column=0):
    """out [512] of a query that is q in one column and 0 elsewhere, over a cache of one token."""
    queries = np.zeros((1, 1, 576), BF16)
    queries[..., column] = q
    out, lse = decode(queries, kv, kv_indptr=[0, 1], sm_scale=1.0, device=device)
    return out[0, 0].astype(np.float64), float(lse[0, 0])


@in_every_format
def test_softmax_weight_cast_to_fp8_without_scale(kv_format, device):
    """One logit at 0, 2047 at -7, V = 1: in E4M3 the weights of 2^-10 vanish, which are two thirds of the sum."""
    rows = np.zeros((2048, 576), np.float32)
    rows[:, :512] = 1.0
    rows[np.arange(2048) != 1234, 512] = -1.0
    q = np.zeros((1, 1, 576), BF16)
    q[..., 512] = 7.0
    out, lse = decode(q, in_format(kv_format, rows), kv_indptr=[0, 2048], sm_scale=1.0, num_splits=16, device=device)
    assert (out.astype(np.float64) == 1.0).all()
    np.testing.assert_allclose(lse, np.log(1 + 2047 * np.exp(-7.0)), atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 128])
@in_every_format
def test_32_bit_offsets(kv_format, page_size, device):
    """Pages on both sides of 2^31 and 2^32 bytes, far from each other. (test_large_caches.py has all else that can be so far.)"""
    made = make(Case((4 * page_size + 1,), kv_format=kv_format, num_heads=1, page_size=page_size, num_splits=1))
    page_bytes = {"bf16": 1152, "fp8_e4m3fn": 576, "mxfp4": 288}[kv_format] * page_size
    pages = [border // page_bytes + step for step in (1, -1) for border in (1 << 31, 1 << 32)] + [0]
    assert_same_bits(decode_far(device, made, pages), run(made, device))


@in_every_format
def test_page_size_ignored(kv_format, device):
    case = Case((70, 5, 32), kv_format=kv_format, num_heads=3, num_splits=2)
    flat = run(make(case), device)
    for page_size in (2, 16, 64, 128):
        assert_same_bits(run(make(case.but(page_size=page_size)), device), flat)
    made = make(case)
    with pytest.raises(ValueError, match="page_size is 48; a power of two from 1 to 128"):
        decode(**{**made.arguments, "page_size": 48}, device=device)


@in_every_format
def test_last_page_length_semantics(kv_format, device):
    """It is a count from 1 to page_size: not a remainder, which is 0 where pages are full."""
    for page_size, kv_lens in ((1, (1, 40)), (16, (16, 32, 33, 15))):
        made = make(Case(kv_lens, kv_format=kv_format, num_heads=3, page_size=page_size, num_splits=1))
        last = made.arguments["kv_last_page_len"]
        assert last.tolist() == {1: [1, 1], 16: [16, 16, 1, 15]}[page_size]
        assert_right(made, device)
        for wrong in (0, page_size + 1, -1):
            arguments = {**made.arguments, "kv_last_page_len": np.where(np.arange(len(last)) == 1, wrong, last)}
            message = rf"kv_last_page_len\[1\] is {wrong}; 1 to page_size {page_size} is allowed"
            with pytest.raises(ValueError, match=message):
                decode(**arguments, device=device)
            with pytest.raises(ValueError, match=message):
                plan(device, **{**table_of(made), "kv_last_page_len": arguments["kv_last_page_len"]}, **options_of(made))


TAILS = tuple(whole + tail for whole in (64, 128) for tail in (1, 2, 3, 15, 17))


@pytest.mark.parametrize(("kv_lens", "num_splits"), [(TAILS, 1), ((1, 2, 3, 15, 16, 17, 33), 32)], ids=["tails", "short"])
@in_every_format
def test_short_tail(kv_format, kv_lens, num_splits, device):
    assert_right(make(Case(kv_lens, kv_format=kv_format, num_heads=1, page_size=2, num_splits=num_splits)), device)


@in_every_format
def test_empty_split_empty_request(kv_format, device):
    """Alone, first, last and between others; and splits that find no token, for the work was cut for longer requests."""
    for kv_lens, options in (((0,), {}), ((0, 5, 0, 3, 0), {}), ((0, 5, 0, 65, 0), {"max_kv_len": 300})):
        made = make(Case(kv_lens, (2,) * len(kv_lens), kv_format=kv_format, num_heads=3, page_size=16, num_splits=4))
        with Arrays(device, made) as arrays, planned(device, made, **options) as a_plan:
            out, lse = arrays.run_for_results(a_plan)
        empty = np.repeat(np.array(kv_lens) == 0, 2)
        assert (out[empty].view(np.uint16) == 0).all() and np.isneginf(lse[empty]).all()
        assert_decoded(out, lse, *made.exact())


@in_every_format
def test_a_split_wholly_masked_for_early_query_tokens(kv_format, device):
    """Splits of 4 to 7 tokens: the last ones lie behind all that the first queries see."""
    case = Case((256, 388), (8, 8), kv_format=kv_format, num_heads=1, page_size=16, num_splits=64)
    out, lse = assert_right(make(case), device)
    assert not np.isnan(out.astype(np.float64)).any() and np.isfinite(lse).all()


@in_every_format
def test_unowned_memory_used(kv_format, device):
    """NaN, then numbers, in every slot, partial result and page that no request owns, and in what a result is written over."""
    case = MIXED.but(kv_format=kv_format, page_size=128)
    expected = run(make(case), device)
    assert np.isfinite(expected[0].astype(np.float64)).all()
    assert_same_bits(run(make(case.but(unowned="finite")), device, poison=0x3C), expected)


@in_every_format
def test_table_entries_past_the_length(kv_format, device):
    """-1, 2147480000 and -2^31 in a block_table, and in the table that is on the device."""
    case = MIXED.but(kv_format=kv_format)
    expected = run(make(case), device)
    assert_same_bits(run(make(case.but(table="block_table")), device), expected)
    made = make(case.but(num_splits=1))
    with Arrays(device, made) as arrays, planned(device, made, max_kv_len=200) as a_plan:
        expected = arrays.run_for_results(a_plan)
        used = int(made.arguments["kv_indptr"][-1])
        garbage = np.resize(np.array([-1, 2147480000, -(2**31)], np.int32), a_plan.kv_indices.nbytes // 4 - used)
        a_plan.kv_indices.upload(garbage, offset=used * 4)
        assert_same_bits(arrays.run_for_results(a_plan), expected)


@in_every_format
def test_partials_not_written(kv_format, device):
    """NaN in all partial results before each run; some splits find no token."""
    made = make(MIXED.but(kv_format=kv_format, num_splits=5))
    with Arrays(device, made) as arrays, planned(device, made, max_kv_len=170) as a_plan:
        assert a_plan.work_list.num_partials > 0
        for _ in range(2):
            for name, buffer in a_plan._buffers.items():
                if name.startswith("partial"):
                    buffer.fill(0xFF)
            assert_decoded(*arrays.run_for_results(a_plan), *made.exact())


@pytest.mark.parametrize(("num_splits", "kv_format"), [(1, "mxfp4"), (2, "fp8_e4m3fn"), (8, "bf16"), (16, "bf16"), (32, "bf16")])
def test_not_reproducible(num_splits, kv_format, device):
    """A request a hundred times, twenty times in a launch that is run five times; eight times with strict checks and where the emulator takes long.
    (test_decode_heads.py has a hundred times in all these splits.)"""
    copies, launches = (20, 5) if device.kind == "hip" and num_splits <= 8 else (4, 2)
    made = make(Case((40,), kv_format=kv_format, num_heads=1, num_splits=num_splits))
    table = {
        "qo_indptr": np.arange(copies + 1),
        "kv_indptr": np.arange(copies + 1) * 40,
        "kv_indices": np.tile(made.arguments["kv_indices"], copies),
        "kv_last_page_len": np.ones(copies, int),
    }
    many = SimpleNamespace(case=made.case, arguments={**made.arguments, **table, "q": np.tile(made.arguments["q"], (copies, 1, 1))})
    with Arrays(device, many) as arrays, planned(device, many) as a_plan:
        results = [arrays.run_for_results(a_plan) for _ in range(launches)]
    out, lse = (np.concatenate(parts) for parts in zip(*results, strict=True))
    assert_decoded(out[:1], lse[:1], *made.exact())
    assert_same_bits((out, lse), (np.repeat(out[:1], len(out), axis=0), np.repeat(lse[:1], len(lse), axis=0)))


@pytest.mark.parametrize("num_heads", [1, 3, 8, 12, 16, 24, 32, 48, 64, 96, 128])
def test_heads_folded_wrongly(num_heads, device):
    kv_format = FORMATS[num_heads % 3]
    made = make(Case((9, 33), (2, 1), kv_format=kv_format, num_heads=num_heads, page_size=16, num_splits=1, seed=num_heads))
    out, lse = assert_right(made, device)
    arguments, tokens = permuted(made, [1, 0])
    assert_same_bits(decode(**arguments, device=device), (out[tokens], lse[tokens]))


def test_plan_and_run_disagree(device, monkeypatch):
    """Arrays of another batch, dtype, format or page size than planned."""
    made = make(Case((5, 17), (1, 2), num_heads=2, page_size=16))
    others = {
        "batch": Case((5, 17, 3), (1, 2, 1), num_heads=2, page_size=16),
        "heads": Case((5, 17), (1, 2), num_heads=3, page_size=16),
        "format": Case((5, 17), (1, 2), kv_format="mxfp4", num_heads=2, page_size=16),
        "page_size": Case((5, 17), (1, 2), num_heads=2, page_size=8),
    }
    launched = []
    with planned(device, made) as a_plan, Arrays(device, made) as arrays:
        expected = arrays.run_for_results(a_plan)
        arrays.poison()
        launch = device._launch
        monkeypatch.setattr(device, "_launch", lambda *arguments: launched.append(arguments) or launch(*arguments))
        for what, case in others.items():
            with Arrays(device, make(case)) as wrong:
                taken = {"q": wrong.q, "out": wrong.out, "lse": wrong.lse} if what in ("batch", "heads") else {"cache": wrong.cache}
                with pytest.raises(ValueError, match=r"the plan (needs|is for|reads)"):
                    a_plan.run(**{"q": arrays.q, "cache": arrays.cache, "out": arrays.out, "lse": arrays.lse, **taken})
        q = DeviceArray(arrays.q.address, (3, 2, 576), np.float16, device, owner=arrays.q)
        with pytest.raises(TypeError, match=r"q has dtype float16; the plan needs \[3, 2, 576\] bfloat16"):
            a_plan.run(q, arrays.cache, out=arrays.out, lse=arrays.lse)
        assert not launched and np.isnan(arrays.results()[1]).all()
        assert_same_bits(arrays.run_for_results(a_plan), expected)
        assert len(launched) == 1


def test_freed_plan_memory_in_a_captured_graph(device):
    """Capture, evict, replay: the graph keeps what it needs, and nobody else gets its memory."""
    made, other = make(MIXED), make(MIXED.but(seed=1))
    a_plan, arrays = planned(device, made), Arrays(device, made)
    with device.stream() as stream, device.capture(stream) as graph:
        arrays.run(a_plan, stream)
    with pytest.raises(DeviceError, match="Plan closed while a graph uses it"):
        a_plan.close()
    buffers = list(a_plan._buffers.values())
    del a_plan
    gc.collect()
    with planned(device, other) as another, Arrays(device, other) as of_other:
        of_other.run(another)
        arrays.poison()
        graph.launch()
        assert_decoded(*arrays.results(), *made.exact())
    graph.close()
    for resource in (arrays, *buffers):
        resource.close()


@in_every_format
def test_base_of_the_logarithm(kv_format, device):
    """Two tokens of equal logits have log 2, and shards merge to the whole."""
    _, lse = decode(np.zeros((1, 1, 576), BF16), in_format(kv_format, np.ones((2, 576), np.float32)), kv_indptr=[0, 2], sm_scale=1.0, device=device)
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)
    made = make(Case((90,), (2,), kv_format=kv_format, num_heads=3, causal=False, num_splits=2))
    tokens = made.arguments["kv_indices"]
    shards = [
        decode(**{**made.arguments, "kv_indptr": [0, len(part)], "kv_indices": part, "kv_last_page_len": [1]}, device=device)
        for part in (tokens[:20], tokens[20:])
    ]
    assert_merged(*merge(*zip(*shards, strict=True)), *made.exact())


@in_every_format
def test_strided_input_taken_as_packed(kv_format, device):
    """On the host any strides are right; on the device what is not packed is refused."""
    made = make(Case((40, 9), kv_format=kv_format, num_heads=3, num_splits=1))
    expected = run(made, device)

    def part_of_larger(array):
        larger = np.full((*array.shape[:-1], array.shape[-1] + 64), 0x7F, np.uint8).view(np.uint8)
        larger = larger.astype(array.dtype)
        larger[..., : array.shape[-1]] = array
        return larger[..., : array.shape[-1]]

    kv, q = made.arguments["kv"], made.arguments["q"]
    if kv_format == "bf16":
        strided = part_of_larger(kv)
    elif kv_format == "mxfp4":
        strided = MXFP4(part_of_larger(kv.codes), part_of_larger(kv.scales))
    else:
        strided = FP8(part_of_larger(kv.codes), kv.scale, kv.dtype)
    transposed = np.ascontiguousarray(q.transpose(1, 0, 2)).transpose(1, 0, 2)
    assert not transposed.flags.c_contiguous
    assert_same_bits(decode(**{**made.arguments, "kv": strided, "q": transposed}, device=device), expected)

    with planned(device, made) as a_plan, Arrays(device, made) as arrays:
        rows = arrays.cache.rows
        strides = {"q": (576, 2 * 576, 1), "out": (512, 2 * 512, 1), "lse": (1, 2)}
        for name, width in (("q", (576,)), ("out", (512,)), ("lse", ())):
            buffer, dtype = getattr(arrays, name), np.dtype(np.float32) if name == "lse" else BF16
            view = DeviceArray(buffer.address, (2, 3, *width), dtype, device, strides=strides[name], owner=buffer)
            with pytest.raises(ValueError, match=rf"{name} of shape .* has strides .*; packed, .*, is needed"):
                a_plan.run(**{"q": arrays.q, "cache": arrays.cache, "out": arrays.out, "lse": arrays.lse, name: view})
        row_bytes = rows.nbytes // arrays.cache.num_pages
        pages = DeviceArray(rows.address, (arrays.cache.num_pages // 2, row_bytes), np.uint8, device, strides=(2 * row_bytes, 1), owner=rows)
        with pytest.raises(ValueError, match=r"cache.rows of shape .* has strides .*; packed, .*, is needed"):
            a_plan.run(arrays.q, SimpleNamespace(**{**vars(arrays.cache), "rows": pages}), out=arrays.out, lse=arrays.lse)


def test_fnuz_read_as_fn(device):
    """The dtype travels with the bytes: 0x38 is 1.0 or 0.5, 0x80 is -0 or NaN, which fnuz never gets for what is too small."""
    codes = np.full((1, 576), 0x38, np.uint8)
    assert (FP8(codes, 1.0, "e4m3fn").dequantize() == 1.0).all() and (FP8(codes, 1.0, "e4m3fnuz").dequantize() == 0.5).all()
    minus_zero, nan = (FP8(np.array([0x80], np.uint8), 1.0, dtype).dequantize()[0] for dtype in ("e4m3fn", "e4m3fnuz"))
    assert minus_zero == 0 and np.signbit(minus_zero) and np.isnan(nan)
    tiny = np.array([-1e-9, -(2.0**-12), -0.0], np.float32)
    assert quantize_fp8(tiny, "e4m3fnuz", scale=1.0).codes.tolist() == [0, 0, 0]
    assert quantize_fp8(tiny, "e4m3fn", scale=1.0).codes.tolist() == [0x80] * 3
    assert (one_token(FP8(codes, 1.0, "e4m3fn"), device)[0] == 1.0).all()
    if "fp8_e4m3fnuz" not in KV_FORMATS[device.arch]:
        with pytest.raises(ValueError, match="kv_format 'fp8_e4m3fnuz' cannot be decoded on gfx950"):
            one_token(FP8(codes, 1.0, "e4m3fnuz"), device)
        with pytest.raises(ValueError, match="kv_format is 'fp8_e4m3fnuz'"):
            PagedKVCache(device, 1, 1, "fp8_e4m3fnuz")
    with PagedKVCache(device, 1, 1, "fp8_e4m3fn") as cache, pytest.raises(ValueError, match="the record is fp8_e4m3fnuz, the cache fp8_e4m3fn"):
        cache.load(FP8(codes, 1.0, "e4m3fnuz"))


def appended_on(device, x, scale_rule="even"):
    """The MXFP4 record of rows [n, 576] that the device's append makes."""
    with PagedKVCache(device, len(x), 1, "mxfp4", scale_rule=scale_rule) as cache:
        cache.append(x, np.arange(len(x)))
        return cache.to_numpy()


def quantized_by_both(device, x, scale_rule="even"):
    """(codes, scales) of rows [n, 576], which the host and the device make alike."""
    host, there = quantize_mxfp4(x, scale_rule), appended_on(device, x, scale_rule)
    np.testing.assert_array_equal(there.codes.reshape(host.codes.shape), host.codes)
    np.testing.assert_array_equal(there.scales.reshape(host.scales.shape), host.scales)
    return host.codes, host.scales


@pytest.mark.parametrize(("scale_rule", "expected"), [("floor", [127, 127, 127]), ("ceil", [128, 128, 127]), ("even", [127, 128, 127])])
def test_mx_scale_rule(scale_rule, expected, device):
    x = np.ones((3, 576), np.float32)
    x[:, 7::32] = [[-6.5], [7.0], [4.0]]  # the largest of each block
    _, scales = quantized_by_both(device, x, scale_rule)
    np.testing.assert_array_equal(scales, np.repeat(np.array([expected]).T, 18, axis=1))


def test_ties_in_e2m1(device):
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}  # to the even code
    x = np.zeros((2, 576), np.float32)
    x[:, 0::32] = 6.0  # makes the scale 1
    for place, tie in enumerate(ties, 1):
        x[:, place::32] = [[tie], [-tie]]
    codes, scales = quantized_by_both(device, x)
    assert (scales == 127).all()
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(2, 576)
    for place, code in enumerate(ties.values(), 1):
        assert (nibbles[0, place::32] == code).all() and (nibbles[1, place::32] == code + 8).all()


def test_e8m0_ends(device):
    """0 is 2^-127, no zero; 255 is NaN, no infinity."""
    codes = np.full((1, 288), 0x22, np.uint8)  # 1.0 everywhere
    scales = np.full((1, 18), 127, np.uint8)
    scales[0, 17] = 0
    assert (MXFP4(codes, scales).dequantize()[0, 544:] == 2.0**-127).all()
    out, lse = one_token(MXFP4(codes, scales), device, q=2.0**127, column=575)
    assert lse == approx(1.0) and (out == 1.0).all()
    scales[0, 17] = 254
    out, lse = one_token(MXFP4(codes, scales), device, q=2.0**-126, column=575)
    assert lse == approx(2.0) and (out == 1.0).all()
    scales[0, 17] = 255
    assert np.isnan(MXFP4(codes, scales).dequantize()[0, 544:]).all()
    out, lse = one_token(MXFP4(codes, scales), device)
    assert np.isnan(out).all() and np.isnan(lse)


def test_zero_block(device):
    x = np.zeros((2, 576), np.float32)
    codes, scales = quantized_by_both(device, x)
    assert not codes.any() and (scales < 255).all()
    out, lse = decode(np.ones((1, 1, 576), BF16), MXFP4(codes, scales), kv_indptr=[0, 2], sm_scale=1.0, device=device)
    assert not out.astype(np.float64).any()
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)


def test_nibble_order(device):
    """Codes 1 and 2, which are 0.5 and 1.0, are the byte 0x21."""
    x = np.zeros((1, 576), np.float32)
    x[:, 0::32], x[:, 1::32], x[:, 2::32] = 0.5, 1.0, 6.0
    codes, _ = quantized_by_both(device, x)
    assert (codes[0, 0::16] == 0x21).all()
    values = np.tile(np.array([0.5, 1.0]), 288)
    record = MXFP4(np.full((1, 288), 0x21, np.uint8), np.full((1, 18), 127, np.uint8))
    np.testing.assert_array_equal(record.dequantize()[0], values)
    out, lse = one_token(record, device, q=1.0, column=575)
    np.testing.assert_array_equal(out, values[:512])
    assert lse == approx(1.0) and one_token(record, device, q=1.0, column=574)[1] == approx(0.5)


@pytest.mark.parametrize("scale", [0.5, 2.0, 1e-3])
def test_scale_applied_to_k_but_not_to_v(scale, device):
    """Logits that are 0 by any scale leave V's mean, which is to be scaled; then both together."""
    codes = np.repeat(np.array([[0x38], [0x40]], np.uint8), 576, axis=1)  # 1.0 and 2.0
    out, _ = decode(np.zeros((1, 3, 576), BF16), FP8(codes, scale, "e4m3fn"), kv_indptr=[0, 2], sm_scale=1.0, device=device)
    np.testing.assert_array_equal(out.astype(np.float64), np.float64(BF16.type(np.float32(1.5) * np.float32(scale))))
    assert_right(make(Case((70,), kv_format="fp8_e4m3fn", num_heads=3, values="bytes", fp8_scale=scale, num_splits=2)), device)


def test_wrong_arch(device, compile_sample, monkeypatch):
    """A code object for another GPU, and a GPU for which there is none."""
    monkeypatch.setattr(device, "_launch", None)
    with pytest.raises(UnsupportedArch, match=r"is for gfx942, this device .* is gfx950"):
        device.load(compile_sample("gfx942"))
    made = make(Case((5,), num_heads=1))
    monkeypatch.setattr(device, "arch", "gfx942")
    for call in (lambda: run(made, device), lambda: planned(device, made), lambda: PagedKVCache(device, 1, 1, "bf16")):
        with pytest.raises(UnsupportedArch, match="for gfx942, only for gfx950"):
            call()


WITHOUT_HIP = """
import sys
from types import SimpleNamespace
import mla_rt

def dlopen_fails():
    raise RuntimeError("failed to dlopen libamdhip64.so: b'libamdhip64.so: cannot open shared object file: No such file or directory'")
def dlsym_fails():
    raise RuntimeError("failed to dlsym hipGetDeviceCount")

for hip in (None, *(SimpleNamespace(hip=SimpleNamespace(hipGetDeviceCount=fails)) for fails in (dlopen_fails, dlsym_fails))):
    sys.modules["hip"] = hip
    try:
        mla_rt.open_device("hip")
    except mla_rt.DeviceError as error:
        print(error)
    with mla_rt.open_device("auto") as device:
        print(device.kind, device.reason)
"""


def test_missing_library_stale_library():
    """The package can be imported all the same; what opens the GPU says what to install, and "auto" takes the emulator and says why."""
    found = subprocess.run([sys.executable, "-c", WITHOUT_HIP], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for cause, install, error, auto in zip(
        ("hip-python cannot be imported", "no HIP runtime (libamdhip64.so: cannot open shared", "no HIP runtime (failed to dlsym hipGetDeviceCount)"),
        ("pip install hip-python", *["install ROCm (7.0 or later for gfx950)"] * 2),
        found[0::2],
        found[1::2],
        strict=True,
    ):
        assert cause in error and error.endswith(install)
        assert auto.startswith("emulator no GPU: ")


def test_default_stream_used_instead_of_the_given_one(device, shim):
    """The queries come late on a stream; the run is given to it behind them, and what follows on it comes behind the run."""
    made = make(MIXED)
    with planned(device, made) as a_plan, Arrays(device, made) as arrays, device.stream() as stream, device.stream() as other:
        scratch = arrays.allocate(4)
        arrays.q.fill(0xFF)
        device.synchronize()
        arrays.q.upload(made.arguments["q"], stream)
        arrays.run(a_plan, stream)
        arrays.q.fill(0xFF, stream)
        if device.kind == "hip":  # the default stream would have held this back until all before it had run
            scratch.fill(0, other)
            other.synchronize()
            assert shim.pending() == 3
        assert_decoded(*arrays.results(stream), *made.exact())


class DmaLanes(Observer):
    """Counts the lanes of LDS-DMAs, and those that read nothing: out of their buffer's range they write zeros wherever they are sent."""

    watches_registers = True  # for `instruction`

    def __init__(self):
        self.lanes = self.lanes_that_read_nothing = 0

    def instruction(self, group, instruction):
        self._read = np.zeros((1, 1), bool)

    def memory(self, group, address, mask, nbytes, access):
        if access == "read":
            self._read = self._read | mask

    def lds(self, group, address, mask, nbytes, access):
        if access == "DMA write":
            self.lanes += int(mask.sum())
            self.lanes_that_read_nothing += int((mask & ~self._read).sum())


@pytest.mark.parametrize("page_size", [2, 128])
@in_every_format
def test_lds_dma_past_the_end_of_its_tile(kv_format, page_size, device, monkeypatch, shim):
    """Several tiles and tails of each length: no lane of a DMA is out of range, and none is sent past the workgroup's LDS (the emulator checks)."""
    made = make(Case((129, 130, 191, 257, 300), kv_format=kv_format, num_heads=1, page_size=page_size, num_splits=1))
    emulator, lanes = shim.emulator if device.kind == "hip" else device, DmaLanes()
    monkeypatch.setattr(emulator, "observe", lambda dispatch: (lanes,))
    assert_right(made, device)
    assert lanes.lanes > 0 and lanes.lanes_that_read_nothing == 0


def test_an_error_hidden_by_tolerance():
    """Outputs over 8192 tokens are small: zeros pass a fixed tolerance in many elements; they, and one wrong row of 128, are refused."""
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((1, 128, 512)) * np.sqrt(np.e / 8192)
    exact_lse = np.full((1, 128), 9.5)
    lse, zeros, rounded = exact_lse.astype(np.float32), np.zeros(exact.shape, BF16), exact.astype(BF16)
    assert np.isclose(zeros.astype(np.float64), exact, rtol=1e-2, atol=1e-2).mean() > 0.3
    assert_decoded(rounded, lse, exact, exact_lse)
    one_row = rounded.copy()
    one_row[0, 77] = rounded[0, 78]
    slightly = (exact * (1 + 0.01 * rng.standard_normal(exact.shape))).astype(BF16)
    for wrong in (zeros, one_row, slightly):
        with pytest.raises(AssertionError, match="RMS error / RMS value beyond its limit"):
            assert_decoded(wrong, lse, exact, exact_lse)


@in_every_format
def test_hand_scheduled_code_that_depends_on_timing(kv_format, emulator_device):
    """Loads land as early or as late as they may, waves run in any order, and nothing is used before the wait that covers it (strict checks)."""
    made = make(Case((300, 5), (2, 1), kv_format=kv_format, num_heads=3, page_size=16, num_splits=2))
    expected = run(made, emulator_device)
    for seed, timing in ((None, "latest"), (1, "hardware")):
        with open_device("emulator", seed=seed, timing=timing, checks="strict") as device:
            assert_same_bits(run(made, device), expected)


KINDS = (
    "softmax weight cast to fp8 without scale",
    "32-bit offsets",
    "page size ignored",
    "last page length semantics",
    "short tail",
    "empty split, empty request",
    "a split wholly masked for early query tokens",
    "unowned memory used",
    "table entries past the length",
    "partials not written",
    "not reproducible",
    "heads folded wrongly",
    "plan and run disagree",
    "freed plan memory in a captured graph",
    "base of the logarithm",
    "strided input taken as packed",
    "fnuz read as fn",
    "MX scale rule",
    "ties in E2M1",
    "E8M0 ends",
    "zero block",
    "nibble order",
    "scale applied to K but not to V",
    "wrong arch",
    "missing library, stale library",
    "default stream used instead of the given one",
    "LDS DMA past the end of its tile",
    "an error hidden by tolerance",
    "hand-scheduled code that depends on timing",
)


def test_every_kind_has_its_test_and_every_test_its_kind():
    wanted = ["test_" + re.sub(r"\W+", "_", kind.lower()) for kind in KINDS]
    own = test_every_kind_has_its_test_and_every_test_its_kind.__name__
    assert [name for name in globals() if name.startswith("test_") and name != own] == wanted
