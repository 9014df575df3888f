"""decode() on the compiled kernels against float64 on the same stored bytes.

Every case runs on the emulator and through real hip-python on the stand-in runtime; the two must agree in every bit. Outputs, partials and
all that no request owns are NaN before each run, and the kernel runs before the reference. Many lengths share a batch: the emulator runs
all workgroups of a launch side by side, so one large launch costs far less than many small ones.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from decode_cases import FORMATS, Case, make, permuted, prefix_sums, run
from mla_rt.decode import decode, decode_batch
from mla_rt.device import open_device
from mla_rt.errors import DeviceError, UnsupportedArch
from mla_rt.formats import FP8, MXFP4, quantize_fp8, quantize_mxfp4
from mla_rt.merge import merge
from tolerance import BF16_ULP_AT_ONE, assert_decoded, assert_merged, assert_same_bits

# Around tile (64), MFMA (16, 32) and page boundaries, and long.
LENGTHS = (1, 15, 16, 17, 31, 33, 127, 129, 1000)
Q_LENS = (1, 2, 3, 4, 8, 2, 3, 4, 8)


def rolled(values, by):
    return (*values[by:], *values[:by])


def covering():
    """Formats x (q_len by length, page size, splits, causal): each pair of values of any two of them occurs, not each combination."""
    pages, splits = (1, 2, 16, 64, 128), (1, 2, 7, 32, None)
    for f, kv_format in enumerate(FORMATS):
        for i in range(5):
            yield Case(
                LENGTHS,
                rolled(Q_LENS, (2 * i + f) % len(Q_LENS)),
                kv_format=kv_format,
                page_size=pages[(i + 2 * f) % 5],
                num_splits=splits[(3 * i + f) % 5],
                causal=(i + f) % 2 == 0,
                table="block_table" if i == 2 else "indptr",
                values="bytes" if i == 3 and kv_format != "bf16" else "smooth",
                seed=10 * f + i,
            )


HEADS = [
    # Rows of several query tokens in one tile, tiles that are not full, and many tiles.
    Case(kv_lens, q_lens, kv_format=kv_format, num_heads=num_heads, page_size=16, num_splits=splits, seed=num_heads)
    for num_heads, kv_format, splits, kv_lens, q_lens in [
        (1, "bf16", 2, (70, 3, 200), (8, 2, 1)),
        (3, "mxfp4", 1, (70, 3, 200), (8, 2, 1)),
        (8, "fp8_e4m3fn", 7, (70, 3, 200), (8, 2, 1)),
        (12, "bf16", None, (70, 3, 200), (8, 2, 1)),
        (20, "mxfp4", 2, (70, 3, 200), (8, 2, 1)),
        (24, "fp8_e4m3fn", 1, (70, 3, 200), (8, 2, 1)),
        (32, "bf16", 1, (70, 3, 200), (8, 2, 1)),
        (48, "mxfp4", None, (70, 3, 200), (8, 2, 1)),
        (64, "bf16", 2, (70, 3), (3, 1)),
        (96, "fp8_e4m3fn", 2, (70, 3), (3, 1)),
        (128, "mxfp4", 2, (70, 3), (3, 1)),
    ]
]

EMPTIES = [
    Case(kv_lens, q_lens, kv_format=kv_format, page_size=page_size, num_splits=splits, causal=causal, seed=7)
    for kv_lens, q_lens, kv_format, page_size, splits, causal in [
        ((0,), None, "bf16", 1, 1, True),
        ((0,), (8,), "mxfp4", 64, None, False),
        ((0, 5), None, "fp8_e4m3fn", 2, 7, True),
        ((0, 5), (3, 8), "bf16", 16, 2, True),  # more queries than tokens: the first see nothing
        ((5, 0, 3), None, "mxfp4", 1, 32, True),
        ((5, 0, 3), (2, 0, 4), "fp8_e4m3fn", 128, None, True),  # a request without queries
        ((5, 0, 3), (0, 0, 1), "bf16", 64, 2, False),
        ((65, 64, 1, 2), (8, 8, 8, 8), "mxfp4", 16, 2, True),
    ]
]

# Each row of these is checked against its own exact value, so a split that early queries do not see at all shows.
SPLITS_BEHIND_THE_MASK = [
    Case((256, 257, 320, 388), (8, 7, 5, 2), kv_format="bf16", page_size=64, num_splits=64, seed=1),
    Case((3, 8, 64, 65), (8, 8, 8, 8), kv_format="fp8_e4m3fn", num_heads=4, page_size=1, num_splits=32, seed=2),
]
EVERY_SHORT_LENGTH = [
    Case(tuple(range(1, 65)), kv_format=kv_format, page_size=2, num_splits=splits, seed=3)
    for kv_format, splits in [("bf16", 32), ("fp8_e4m3fn", 1), ("mxfp4", 32)]
]
SCALES = [Case((100, 33), kv_format="fp8_e4m3fn", values=v, fp8_scale=s, seed=4) for s in (0.5, 2.0, 1e-3) for v in ("smooth", "bytes")]
CASES = [*covering(), *HEADS, *EMPTIES, *SPLITS_BEHIND_THE_MASK, *EVERY_SHORT_LENGTH, *SCALES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case}-{case.seed}")
def test_accurate_and_the_same_bits_through_hip(case, emulator_device, hip_device):
    made = make(case)
    result = run(made, emulator_device)
    through_hip = run(made, hip_device)
    assert_decoded(*result, *made.exact())
    assert_same_bits(through_hip, result)


def test_the_cases_cover_what_they_claim():
    """Every pair of (format, one other option) occurs among the cases over LENGTHS, and every q_len meets the longest length."""
    cases = list(covering())
    assert {(c.kv_format, c.page_size) for c in cases} == {(f, p) for f in FORMATS for p in (1, 2, 16, 64, 128)}
    assert {(c.kv_format, c.num_splits) for c in cases} == {(f, s) for f in FORMATS for s in (1, 2, 7, 32, None)}
    assert {(c.kv_format, c.causal) for c in cases} == {(f, c) for f in FORMATS for c in (True, False)}
    assert {(c.q_lens[-1], c.causal) for c in cases} >= {(q, True) for q in (1, 2, 3, 4, 8)}


MIXED = Case((5, 0, 200, 64, 1), (2, 1, 4, 1, 8), page_size=16, num_splits=2)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_what_no_request_owns_changes_no_bit(kv_format, emulator_device):
    case = MIXED.but(kv_format=kv_format)
    assert_same_bits(run(make(case), emulator_device), run(make(case.but(unowned="finite")), emulator_device))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_block_table_and_flat_pages_give_the_same_bits(kv_format, emulator_device):
    case = MIXED.but(kv_format=kv_format)
    expected = run(make(case), emulator_device)
    assert_same_bits(run(make(case.but(table="block_table")), emulator_device), expected)
    assert_same_bits(run(make(case.but(page_size=1)), emulator_device), expected)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_same_call_gives_the_same_bits_in_any_order_of_waves(kv_format, emulator_device):
    """Waves and workgroups run in drawn pieces and orders, loads land as early or as late as they may: what counts on luck differs."""
    made = make(MIXED.but(kv_format=kv_format))
    expected = run(made, emulator_device)
    assert_same_bits(run(made, emulator_device), expected)
    for seed, timing in enumerate(("earliest", "latest", "hardware") * 2):
        with open_device("emulator", seed=seed, timing=timing, checks="strict") as device:
            assert_same_bits(run(made, device), expected)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_permuted_batch_gives_a_permuted_result(kv_format, emulator_device):
    made = make(MIXED.but(kv_format=kv_format))
    out, lse = run(made, emulator_device)
    arguments, tokens = permuted(made, [3, 1, 4, 0, 2])
    assert_same_bits(decode(**arguments, device=emulator_device), (out[tokens], lse[tokens]))


@pytest.mark.parametrize("splits", [1, 8, None])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_one_high_logit_among_2047(kv_format, splits, emulator_device):
    """One logit at 0, 2047 at -7, V = 1. The many small weights are two thirds of the sum: in unscaled FP8 they would vanish."""
    rows = np.zeros((2048, 576), np.float32)
    rows[:, :512] = 1.0
    rows[np.arange(2048) != 1234, 512] = -1.0
    q = np.zeros((1, 16, 576), ml_dtypes.bfloat16)
    q[..., 512] = 7.0
    kv = {"bf16": rows.astype(ml_dtypes.bfloat16), "fp8_e4m3fn": quantize_fp8(rows, scale=1.0), "mxfp4": quantize_mxfp4(rows)}[kv_format]
    out, lse = decode(q, kv, kv_indptr=[0, 2048], sm_scale=1.0, num_splits=splits, device=emulator_device)
    assert np.abs(out.astype(np.float64) - 1.0).max() <= BF16_ULP_AT_ONE
    np.testing.assert_allclose(lse, np.log(1 + 2047 * np.exp(-7.0)), atol=1e-5)


@pytest.mark.parametrize("kv_format", ["bf16", "mxfp4"])
def test_shards_merge_to_the_whole(kv_format, emulator_device):
    """The halves of a cache, decoded apart: right only if lse is the natural logarithm."""
    case = Case((200, 97), (2, 1), kv_format=kv_format, causal=False)
    made = make(case)
    arguments = dict(made.arguments)
    parts = []
    for part in (0, 1):
        # Page size 1: a list of tokens for each request.
        tokens = [arguments["kv_indices"][begin:end] for begin, end in [(0, 200), (200, 297)]]
        halves = [t[: len(t) // 2] if part == 0 else t[len(t) // 2 :] for t in tokens]
        lists = {"kv_indptr": prefix_sums([len(h) for h in halves]), "kv_indices": np.concatenate(halves), "kv_last_page_len": None}
        parts.append(decode(**{**arguments, **lists}, device=emulator_device))
    assert_merged(*merge(*zip(*parts, strict=True)), *made.exact())


def test_nan_in_one_request_stays_there(emulator_device):
    made = make(MIXED)
    out, lse = run(made, emulator_device)
    kv = made.arguments["kv"].copy()
    kv[made.arguments["kv_indices"][1], 3] = np.nan  # token 3 of request 2's second page
    first = made.arguments["kv_indptr"][2]
    kv[made.arguments["kv_indices"][first], 3] = np.nan
    got_out, got_lse = decode(**{**made.arguments, "kv": kv}, device=emulator_device)
    of_request_2 = slice(*made.qo_indptr[2:4])
    assert np.isnan(got_out[of_request_2].astype(float)).all() and np.isnan(got_lse[of_request_2]).all()
    keep = np.ones(len(out), bool)
    keep[of_request_2] = False
    assert_same_bits((got_out[keep], got_lse[keep]), (out[keep], lse[keep]))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_scales_whose_product_vanishes(kv_format, emulator_device):
    """q of 0 under a tiny sm_scale: all logits are 0, and the hidden tokens of a short tile stay hidden."""
    made = make(Case((70, 3), (2, 1), kv_format=kv_format, fp8_scale=1e-6, num_splits=1))
    made.arguments["q"][:] = 0
    made.arguments["sm_scale"] = 1e-30
    assert_decoded(*run(made, emulator_device), *made.exact())


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("sm_scale", [1e3, 1e9, 1e25])
def test_logits_far_beyond_what_float32_resolves(kv_format, sm_scale, emulator_device):
    """One token wins by far in each row; it must not become NaN on the way."""
    made = make(Case((150, 3), kv_format=kv_format, num_splits=1))
    made.arguments["sm_scale"] = sm_scale
    out, lse = run(made, emulator_device)
    exact_out, exact_lse = made.exact()
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-5)
    np.testing.assert_allclose(out.astype(np.float64), exact_out, rtol=2**-7, atol=1e-30)


def test_a_hidden_token_with_a_far_larger_scale_stays_hidden(emulator_device):
    rng = np.random.default_rng(0)
    scales = np.repeat(np.array([[60], [200]], np.uint8), 18, axis=1)
    cache = MXFP4(rng.integers(0, 256, (2, 288), np.uint8), scales)
    q = rng.standard_normal((2, 16, 576)).astype(ml_dtypes.bfloat16)
    out, _ = decode(q, cache, kv_indptr=[0, 2], qo_indptr=[0, 2], sm_scale=1e-30, device=emulator_device)
    np.testing.assert_allclose(out[0].astype(np.float64), np.broadcast_to(cache.dequantize()[0, :512], out[0].shape), rtol=2**-8)


def test_no_queries_and_no_requests(emulator_device):
    q, kv = np.zeros((0, 16, 576), ml_dtypes.bfloat16), np.zeros((0, 576), ml_dtypes.bfloat16)
    for batch, options in [(0, {}), (2, {"qo_indptr": [0, 0, 0]})]:
        out, lse = decode(q, kv, kv_indptr=[0] * (batch + 1), sm_scale=1.0, device=emulator_device, **options)
        assert out.shape == (0, 16, 512) and lse.shape == (0, 16) and out.dtype == ml_dtypes.bfloat16 and lse.dtype == np.float32


def test_an_empty_cache(emulator_device):
    """No page at all: the kernel gets a null pointer and must not follow it."""
    q = np.ones((2, 16, 576), ml_dtypes.bfloat16)
    for kv in (np.zeros((0, 576), ml_dtypes.bfloat16), FP8(np.zeros((0, 576), np.uint8), 1.0, "e4m3fn")):
        out, lse = decode(q, kv, kv_indptr=[0, 0, 0], sm_scale=1.0, device=emulator_device)
        assert not out.astype(float).any() and np.isneginf(lse).all()


@pytest.mark.parametrize(("operation", "calls_before"), [("_upload", 0), ("_upload", 5), ("_launch", 0), ("_download", 0)])
def test_device_memory_is_given_back_on_errors(operation, calls_before, device, monkeypatch):
    """And on success. (The code object stays loaded: the first run is before the count.)"""
    made = make(Case((100,), num_splits=2))
    run(made, device)
    before = len(device._resources)
    run(made, device)
    assert len(device._resources) == before
    original, calls = getattr(device, operation), []

    def fail(*arguments):
        if len(calls) == calls_before:
            raise RuntimeError("made to fail")
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(device, operation, fail)
    with pytest.raises(RuntimeError, match="made to fail"):
        decode_batch(made.batch(), device)
    assert len(device._resources) == before


def test_a_device_of_another_arch_is_refused_before_anything_is_launched(emulator_device, monkeypatch):
    monkeypatch.setattr(emulator_device, "arch", "gfx942")
    monkeypatch.setattr(emulator_device, "load", None)
    with pytest.raises(UnsupportedArch, match="gfx942"):
        decode_batch(make(Case((5,))).batch(), emulator_device)


def test_a_closed_device_is_an_error_and_a_named_one_is_closed():
    made = make(Case((3,)))
    with open_device("emulator") as device:
        expected = decode(**made.arguments, device=device)
    assert_same_bits(decode(**made.arguments, device="emulator"), expected)
    with pytest.raises(DeviceError):
        decode(**made.arguments, device=device)
