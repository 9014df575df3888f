"""Every kind of wrong argument is refused with its name, its value and the limit, before a device is even opened."""

from __future__ import annotations

import importlib

import ml_dtypes
import numpy as np
import pytest

from mla_rt.batch import make_batch
from mla_rt.decode import decode
from mla_rt.decode_kernel import require_format
from mla_rt.errors import UnsupportedArch
from mla_rt.formats import FP8, MXFP4

BF16 = ml_dtypes.bfloat16


def q(total_q=2, num_heads=4, width=576, dtype=BF16):
    return np.zeros((total_q, num_heads, width), dtype)


def kv(*shape, dtype=BF16):
    return np.zeros((*(shape or (10,)), 576), dtype)


def mxfp4(*shape):
    return MXFP4(np.zeros((*shape, 288), np.uint8), np.zeros((*shape, 18), np.uint8))


GOOD = {"q": q(), "kv": kv(), "kv_indptr": [0, 3, 8], "sm_scale": 0.1}
TABLE = {"q": q(), "kv": kv(5, 4), "page_size": 4, "kv_indptr": None, "block_table": [[0, 1], [2, -1]], "kv_lens": [8, 3], "sm_scale": 0.1}
PAGED = {"q": q(), "kv": kv(5, 4), "page_size": 4, "kv_indptr": [0, 2, 3], "sm_scale": 0.1}
NO_QUERIES = {"q": q(total_q=0, num_heads=4), "kv_indptr": [0]}

BAD = [
    # q
    ({"q": q(dtype=np.float32)}, TypeError, r"q has dtype float32; bfloat16 is needed: q\.astype\(ml_dtypes\.bfloat16\)$"),
    ({"q": q(dtype=np.uint16)}, TypeError, r"q has dtype uint16; bfloat16 is needed \(its bits: q\.view\(ml_dtypes\.bfloat16\)\)$"),
    ({"q": q(dtype=">u2")}, TypeError, "q has dtype >u2; bfloat16 is needed$"),
    ({"q": q(dtype=np.uint8)}, TypeError, "q has dtype uint8; bfloat16 is needed$"),
    ({"q": q().view("V2")}, TypeError, r"q has dtype \|V2; .*loses that dtype.* better save q\.view\(np\.uint16\)"),
    ({"q": [[1.0]]}, TypeError, "q has dtype float64"),
    ({"q": None}, TypeError, "q is a NoneType"),
    ({"q": [[1.0], [1.0, 2.0]]}, TypeError, "q is no array"),
    ({"q": q(width=512)}, ValueError, r"q has shape \(2, 4, 512\); \[total_q, num_heads, 576\]"),
    ({"q": q()[0]}, ValueError, r"q has shape \(4, 576\)"),
    ({"q": q(num_heads=0)}, ValueError, "q has 0 heads; 1 to 128"),
    ({"q": q(num_heads=129)}, ValueError, "q has 129 heads; 1 to 128"),
    # kv
    ({"kv": kv(dtype=np.float32)}, TypeError, r"kv has dtype float32; .*: kv\.astype\(ml_dtypes\.bfloat16\)$"),
    ({"kv": kv(dtype=np.uint16)}, TypeError, r"kv has dtype uint16; .*its bits: kv\.view\(ml_dtypes\.bfloat16\)"),
    ({"kv": kv(dtype=np.uint8)}, TypeError, r"kv has dtype uint8; .*mla_rt\.FP8\(codes, scale, dtype\) or mla_rt\.MXFP4\(codes, scales\)"),
    ({"kv": kv(dtype=ml_dtypes.float8_e4m3fn)}, TypeError, r"kv has .*mla_rt\.FP8\(kv\.view\(np\.uint8\), scale, 'e4m3fn'\)"),
    ({"kv": kv().tolist()}, TypeError, "kv is a list"),
    ({"kv": np.zeros((10, 512), BF16)}, ValueError, r"kv has shape \(10, 512\); \[total_kv, 576\]"),
    ({"kv": np.zeros(576, BF16)}, ValueError, r"kv has shape \(576,\)"),
    ({"kv": kv(2, 5, 1)}, ValueError, r"kv has shape \(2, 5, 1, 576\)"),
    ({"kv": FP8(np.zeros((10, 288), np.uint8), 1.0, "e4m3fn")}, ValueError, r"kv.codes has shape \(10, 288\)"),
    ({"kv": MXFP4(np.zeros((10, 256), np.uint8), np.zeros((10, 16), np.uint8))}, ValueError, r"kv.codes has shape \(10, 256\)"),
    # page size
    ({"page_size": 0}, ValueError, "page_size is 0; a power of two from 1 to 128"),
    ({"page_size": -1}, ValueError, "page_size is -1"),
    ({"page_size": 48}, ValueError, "page_size is 48"),
    ({"page_size": 256}, ValueError, "page_size is 256"),
    ({"page_size": 4.0}, TypeError, "page_size is 4.0; an integer"),
    ({"page_size": True}, TypeError, "page_size is True"),
    ({"page_size": 4}, ValueError, "kv has 10 rows: no whole number of pages of page_size 4"),
    ({"kv": kv(5, 2)}, ValueError, "kv has 2 tokens a page, but page_size is 1"),
    ({"kv": mxfp4(5, 2), "page_size": 4}, ValueError, "kv.codes has 2 tokens a page, but page_size is 4"),
    # kv_indptr
    ({"kv_indptr": None}, ValueError, "kv_indptr is missing"),
    ({"kv_indptr": []}, ValueError, "kv_indptr starts with nothing"),
    ({"kv_indptr": [1, 3, 8]}, ValueError, "kv_indptr starts with 1"),
    ({"kv_indptr": [0, -3, 8]}, ValueError, "kv_indptr falls from 0 to -3 at entry 1"),
    ({"kv_indptr": [0, 5, 3]}, ValueError, "kv_indptr falls from 5 to 3 at entry 2"),
    ({"kv_indptr": [0, 3, 11]}, ValueError, "kv_indptr ends at 11 pages; kv has 10"),
    ({"kv_indptr": [0.0, 3.0, 8.0]}, TypeError, "kv_indptr has dtype float64"),
    ({"kv_indptr": [[0, 3, 8]]}, ValueError, r"kv_indptr has shape \(1, 3\); 1 dimension is needed"),
    ({"kv_indptr": [0, 3, 2**31]}, ValueError, "kv_indptr holds 2147483648; the limit is 2147483647"),
    ({"kv_indptr": [0, -(2**40), 8]}, ValueError, "kv_indptr holds -1099511627776"),
    ({"kv_indptr": np.array([0, 3, 2**64 - 1], np.uint64)}, ValueError, "kv_indptr holds 18446744073709551615"),
    ({"kv_indptr": [0, 2**70]}, ValueError, "kv_indptr holds 1180591620717411303424; the limit is 2147483647$"),
    ({"kv_indptr": [0, None]}, TypeError, "kv_indptr is a list that numpy makes no numeric array of"),
    ({"kv_indptr": [0, 3]}, ValueError, "q has 2 tokens for 1 request;"),
    # qo_indptr
    ({"qo_indptr": [0, 2]}, ValueError, "qo_indptr has 2 entries; 3 are needed"),
    ({"qo_indptr": [0, 1, 3]}, ValueError, "qo_indptr ends at 3; q has 2"),
    ({"qo_indptr": [0, 1, 1]}, ValueError, "qo_indptr ends at 1; q has 2"),
    ({"qo_indptr": [1, 1, 2]}, ValueError, "qo_indptr starts with 1"),
    ({"qo_indptr": [0, 3, 2]}, ValueError, "qo_indptr falls from 3 to 2"),
    ({"qo_indptr": np.array([False, True, True])}, TypeError, "qo_indptr has dtype bool"),
    ({"q": q(total_q=10), "qo_indptr": [0, 9, 10]}, ValueError, "request 0 has 9 query tokens; the limit is 8"),
    # kv_indices
    ({"kv_indices": np.arange(7)}, ValueError, "kv_indices has 7 entries; kv_indptr ends at 8"),
    ({"kv_indices": np.arange(9)}, ValueError, "kv_indices has 9 entries; kv_indptr ends at 8"),
    ({"kv_indices": np.arange(3, 11)}, ValueError, r"kv_indices\[7\] is 10; kv has pages 0 to 9"),
    ({"kv_indices": np.arange(-1, 7)}, ValueError, r"kv_indices\[0\] is -1"),
    ({"kv_indices": np.full(8, 2**40)}, ValueError, r"kv_indices\[0\] is 1099511627776"),
    ({"kv_indices": [*range(7), 2**70]}, ValueError, "kv_indices holds 1180591620717411303424; the limit is 9223372036854775807"),
    ({"q": q(total_q=1), "kv": kv(0), "kv_indptr": [0, 1], "kv_indices": [0]}, ValueError, r"kv_indices\[0\] is 0; kv has no pages"),
    ({"kv_indices": np.arange(8.0)}, TypeError, "kv_indices has dtype float64"),
    # kv_last_page_len
    ({"kv_last_page_len": [1]}, ValueError, "kv_last_page_len has 1 entry; kv_indptr describes 2 requests"),
    ({"kv_last_page_len": [1, 0]}, ValueError, r"kv_last_page_len\[1\] is 0; 1 to page_size 1 is allowed for 5 pages"),
    ({"kv_last_page_len": [2, 1]}, ValueError, r"kv_last_page_len\[0\] is 2"),
    ({**PAGED, "kv_last_page_len": [4, 5]}, ValueError, r"kv_last_page_len\[1\] is 5; 1 to page_size 4"),
    ({**PAGED, "kv_indptr": [0, 2, 2], "kv_last_page_len": [4, -1]}, ValueError, r"kv_last_page_len\[1\] is -1; 0 to page_size 4"),
    ({**PAGED, "kv_last_page_len": [4, 1.5]}, TypeError, "kv_last_page_len has dtype float64"),
    # block_table, kv_lens
    ({**TABLE, "kv_lens": None}, ValueError, ".*kv_lens is missing"),
    ({**TABLE, "block_table": None}, ValueError, ".*block_table is missing"),
    ({**TABLE, "kv_indptr": [0, 2, 3]}, ValueError, ".*give one or the other"),
    ({**TABLE, "kv_last_page_len": [4, 3]}, ValueError, ".*give one or the other"),
    ({**TABLE, "kv_lens": [8, 9]}, ValueError, r"kv_lens\[1\] is 9; a row of block_table holds 0 to 8 tokens"),
    ({**TABLE, "kv_lens": [-1, 3]}, ValueError, r"kv_lens\[0\] is -1"),
    ({**TABLE, "kv_lens": [8]}, ValueError, "block_table has 2 requests, kv_lens 1"),
    ({**TABLE, "kv_lens": [8, 5]}, ValueError, r"block_table\[1, 1\] is -1; kv has pages 0 to 4"),
    ({**TABLE, "block_table": [[0, 5], [2, -1]]}, ValueError, r"block_table\[0, 1\] is 5; kv has pages 0 to 4"),
    ({**TABLE, "block_table": [0, 1]}, ValueError, r"block_table has shape \(2,\)"),
    ({**TABLE, "block_table": [[0.0, 1.0], [2.0, 0.0]]}, TypeError, "block_table has dtype float64"),
    # numbers
    ({"sm_scale": None}, TypeError, "sm_scale is None; a number"),
    ({"sm_scale": "0.1"}, TypeError, "sm_scale is '0.1'"),
    ({"sm_scale": True}, TypeError, "sm_scale is True"),
    ({"sm_scale": float("nan")}, ValueError, "sm_scale is nan; a positive number"),
    ({"sm_scale": float("inf")}, ValueError, "sm_scale is inf"),
    ({"sm_scale": -0.1}, ValueError, "sm_scale is -0.1"),
    ({"sm_scale": 0}, ValueError, "sm_scale is 0"),
    ({"sm_scale": 1e-60}, ValueError, "sm_scale is 1e-60"),
    ({"sm_scale": 1e60}, ValueError, r"sm_scale is 1e\+60"),
    ({"sm_scale": 2**2000}, ValueError, "sm_scale is 1148.*; a positive number within float32"),
    ({"sm_scale": np.ones(2)}, TypeError, "sm_scale is array"),
    ({"num_splits": 0}, ValueError, "num_splits is 0; 1 to"),
    ({"num_splits": -2}, ValueError, "num_splits is -2"),
    ({"num_splits": 2.0}, TypeError, "num_splits is 2.0"),
    ({"num_splits": 2**31}, ValueError, "num_splits is 2147483648"),
    ({"causal": 1}, TypeError, "causal is 1; True or False"),
    ({"causal": None}, TypeError, "causal is None"),
]


@pytest.fixture
def no_device(monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("a device was opened")

    # Not by its dotted name: mla_rt.decode is also the function.
    monkeypatch.setattr(importlib.import_module("mla_rt.decode"), "open_device", refuse)


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_arguments_are_refused(no_device, changes, error, message):
    arguments = {**GOOD, **changes}
    with pytest.raises(error, match=f"^{message}"):
        decode(arguments.pop("q"), arguments.pop("kv"), **arguments)


def test_there_is_no_default_scale():
    with pytest.raises(TypeError, match="sm_scale"):
        decode(q(), kv(), kv_indptr=[0, 3, 8])


def test_good_arguments_reach_the_device(no_device):
    """The base of the cases above is sound: only the one change makes each of them wrong."""
    for arguments in (GOOD, TABLE, PAGED, {**GOOD, **NO_QUERIES}):
        with pytest.raises(AssertionError, match="a device was opened"):
            decode(**arguments)


def test_unknown_device_kind():
    for device, error in (("cuda", ValueError), (None, TypeError), (0, TypeError)):
        with pytest.raises(error, match="device kind"):
            decode(**GOOD, device=device)


def test_fnuz_is_not_read_as_fn():
    with pytest.raises(ValueError, match=r"kv_format 'fp8_e4m3fnuz' cannot be decoded on gfx950; it reads bf16, fp8_e4m3fn, mxfp4"):
        decode(**{**GOOD, "kv": FP8(np.zeros((10, 576), np.uint8), 1.0, "e4m3fnuz")}, device="emulator")


def test_an_arch_without_kernels():
    with pytest.raises(UnsupportedArch, match=r"gfx90a.*gfx950"):
        require_format("bf16", "gfx90a")


def test_defaults_are_those_of_the_documentation():
    batch = make_batch(**GOOD)
    assert batch.qo_indptr.tolist() == [0, 1, 2] and batch.kv_indices.tolist() == list(range(8))
    assert batch.kv_last_page_len.tolist() == [1, 1] and batch.kv_lens.tolist() == [3, 5]
    paged = make_batch(**PAGED)
    assert paged.kv_last_page_len.tolist() == [4, 4] and paged.kv_lens.tolist() == [8, 4]
    for array in (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len):
        assert array.dtype == np.int32


def test_a_request_without_pages_takes_any_last_page_len():
    for last in (0, 3, 4):
        batch = make_batch(**{**PAGED, "kv_indptr": [0, 2, 2], "kv_last_page_len": [3, last]})
        assert batch.kv_lens.tolist() == [7, 0]
        assert batch.kv_last_page_len.tolist() == [3, 4]  # (0 - 1) * 4 + 4 = 0 tokens


def test_block_table_becomes_page_lists():
    batch = make_batch(**{**TABLE, "q": q(total_q=3), "block_table": [[3, 1], [2**40, -7], [0, 2**40]], "kv_lens": np.array([5, 0, 4], np.uint64)})
    assert batch.kv_indptr.tolist() == [0, 2, 2, 3] and batch.kv_indices.tolist() == [3, 1, 0]
    assert batch.kv_last_page_len.tolist() == [1, 4, 4] and batch.kv_lens.tolist() == [5, 0, 4]


def test_flat_and_paged_layouts_are_the_same_bytes():
    rng = np.random.default_rng(0)
    flat = rng.standard_normal((20, 576)).astype(BF16)
    a, b = (make_batch(**{**PAGED, "kv": x}).cache.rows for x in (flat, flat.reshape(5, 4, 576)))
    assert a.shape == (5, 4, 1152) and np.array_equal(a, b) and a.tobytes() == flat.tobytes()


def test_strided_arrays_are_taken_by_value():
    """A slice of a wider array, a transposed q, every second index: the bytes that reach the device are those that numpy shows."""
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((10, 640)).astype(BF16)
    heads_first = rng.standard_normal((4, 2, 576)).astype(BF16)
    indices = np.arange(16)[::2]
    indptr = np.array([0, 9, 3, 9, 8])[::2]
    batch = make_batch(heads_first.transpose(1, 0, 2), wide[:, :576], kv_indptr=indptr, kv_indices=indices % 10, sm_scale=1.0)
    assert batch.cache.rows.tobytes() == np.ascontiguousarray(wide[:, :576]).tobytes()
    assert batch.q.tobytes() == np.ascontiguousarray(heads_first.transpose(1, 0, 2)).tobytes()
    assert batch.kv_indptr.tolist() == [0, 3, 8] and batch.kv_indices.tolist() == (indices % 10).tolist()
    for array in (batch.q, batch.cache.rows, batch.kv_indptr, batch.kv_indices):
        assert array.flags.c_contiguous


def test_big_endian_indices():
    assert make_batch(**{**GOOD, "kv_indptr": np.array([0, 3, 8], ">i4")}).kv_indptr.tolist() == [0, 3, 8]


def test_token_slots_follow_the_pages():
    batch = make_batch(**{**PAGED, "kv_indptr": [0, 2, 3], "kv_indices": [4, 1, 0], "kv_last_page_len": [2, 4]})
    slots, indptr = batch.token_slots()
    assert slots.tolist() == [16, 17, 18, 19, 4, 5, 0, 1, 2, 3] and indptr.tolist() == [0, 6, 10]
