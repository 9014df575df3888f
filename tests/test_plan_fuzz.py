"""Arguments of plan and run at random, right ones and others: a call raises one of the documented types and launches nothing, or its result is right.

PLAN_FUZZ_CASES=2000 tries so many (default: 60).
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decode_cases import Case, make
from mla_rt import open_device, plan
from mla_rt.batch import make_cache
from mla_rt.device import Device
from mla_rt.errors import DeviceError, UnsupportedArch
from mla_rt.formats import FP8, MXFP4
from mla_rt.reference import mla_decode
from plan_cases import options_of, table_of
from tolerance import assert_decoded

NUM_CASES = int(os.environ.get("PLAN_FUZZ_CASES", "60"))
TYPED = (TypeError, ValueError, DeviceError, UnsupportedArch)

JUNK: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 4, 5, 129, 2**31 - 1, 2**31, 2**63, 2**80, 0.5, 1.0, -1.0, float("nan"), float("inf"), 1e-300, 1e300),
    *("", "auto", "bf16", "fp8_e4m3fn", "fp8_e4m3fnuz", "mxfp4", b"mxfp4", 1j, [], (), {}, [0], [0, 1], [0, 2, 2], [[0]], [None], ["0"], object()),
    *(np.int8(1), np.float32(0.5), np.bool_(True), np.array(4), np.zeros(0), np.zeros((0, 2), np.int32), np.arange(3, dtype=np.uint64)),
    *(np.array([0, 1, 2**63], np.uint64), np.array([0, -1, 2], np.int8), np.array([0, 1], object), np.array([0, 1, 2], ">i4"), np.arange(9)[::-4]),
    *(slice(None), Ellipsis, np, int, range(3), lambda: None, np.datetime64("2020-01-01"), np.zeros(3, "V2")),
]
PLAN_ARGUMENTS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "num_heads", "page_size", "kv_format", "sm_scale", "causal")
ARGUMENTS = (*PLAN_ARGUMENTS, "num_splits", "max_kv_len", "device", "q", "out", "lse", "cache", "stream")
CACHE_ATTRIBUTES = ("kv_format", "page_size", "num_pages", "device", "rows", "scales", "kv_scale")

requests = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=0, max_size=3)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    drawn = draw(requests)
    return Case(
        tuple(kv_len for kv_len, _ in drawn),
        tuple(q_len for _, q_len in drawn),
        draw(st.sampled_from(["bf16", "fp8_e4m3fn", "mxfp4"])),
        num_heads=draw(st.integers(1, 6)),
        page_size=draw(st.sampled_from([1, 2, 4])),
        num_splits=draw(st.sampled_from([None, 1, 2, 3])),
        causal=draw(st.booleans()),
        unowned="finite",  # changed arguments may own it
    )


NAMES = (*ARGUMENTS, *(f"cache.{name}" for name in CACHE_ATTRIBUTES))
junk = st.one_of(st.just(JUNK.index(None)), st.integers(0, len(JUNK) - 1))  # None is right for many


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """One or two arguments, seldom none, and what they are changed to."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=draw(st.sampled_from([1, 2, 1, 0])), max_size=2))
    return {name: JUNK[draw(junk)] for name in names}


@settings(max_examples=NUM_CASES, suppress_health_check=list(HealthCheck))
@given(cases(), changes(), st.sampled_from([None, None, 9, 12]))
def test_any_call_is_refused_or_right(case, changed, max_kv_len):
    with open_device("emulator") as device:
        try_call(device, case, changed, max_kv_len)


def try_call(device: Device, case: Case, changed: dict[str, Any], max_kv_len: int | None) -> None:
    made = make(case)
    q, stored = made.arguments["q"], make_cache(made.arguments["kv"], case.page_size)
    rows = len(q) * case.num_heads
    cache = {"kv_format": stored.kv_format, "page_size": case.page_size, "num_pages": len(stored.rows), "device": device, "kv_scale": stored.kv_scale}
    cache |= {"rows": device.to_device(stored.rows), "scales": None if stored.scales is None else device.to_device(stored.scales)}
    cache |= {name.removeprefix("cache."): value for name, value in changed.items() if name.startswith("cache.")}
    good = {"device": device, **table_of(made), **options_of(made), "max_kv_len": max_kv_len}
    arguments = {name: changed.get(name, value) for name, value in good.items()}
    out, lse = device.allocate(rows * 1024), device.allocate(rows * 4)
    out.fill(0xFF), lse.fill(0xFF)
    run = {"q": device.to_device(q), "cache": SimpleNamespace(**cache), "out": out, "lse": lse, "stream": None}
    run = {name: changed.get(name, value) for name, value in run.items()}
    try:
        with plan(arguments.pop("device"), **arguments) as a_plan:
            a_plan.run(run.pop("q"), run.pop("cache"), **run)
    except TYPED as error:
        assert changed, f"a right call is refused: {error}"
        assert len(str(error)) > 10 and not device.reports
        return
    shape = (len(q), case.num_heads)
    result = out.download((*shape, 512), np.uint16).view(ml_dtypes.bfloat16), lse.download(shape, np.float32)
    assert_decoded(*result, *expected(q, made.arguments["kv"], cache, arguments))


def expected(q: np.ndarray, kv: Any, cache: dict[str, Any], arguments: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """By the arguments as they were given in the end, which may differ from those that the batch was made of."""
    page_size, scale = int(arguments["page_size"]), 1.0
    if isinstance(kv, FP8):
        kv, scale = FP8(kv.codes, np.float32(1), kv.dtype), float(np.float32(cache["kv_scale"]))
    values = (kv.dequantize() if isinstance(kv, FP8 | MXFP4) else kv).astype(np.float64).reshape(-1, 576) * scale
    kv_indptr = np.asarray(arguments["kv_indptr"]).astype(int)
    indices, last = arguments["kv_indices"], arguments["kv_last_page_len"]
    indices = np.arange(kv_indptr[-1]) if indices is None else np.asarray(indices).astype(int)
    slots = []
    for request in range(len(kv_indptr) - 1):
        pages = indices[kv_indptr[request] : kv_indptr[request + 1]]
        tokens = (pages[:, None] * page_size + np.arange(page_size)).ravel()
        slots.append(tokens if last is None or not len(pages) else tokens[: len(tokens) - page_size + int(last[request])])
    qo_indptr = arguments["qo_indptr"]
    return mla_decode(
        q,
        values[np.concatenate([*slots, []]).astype(int)],
        qo_indptr=np.arange(len(q) + 1) if qo_indptr is None else np.asarray(qo_indptr).astype(int),
        kv_indptr=np.concatenate([[0], np.cumsum([len(tokens) for tokens in slots])]).astype(int),
        sm_scale=float(np.float32(arguments["sm_scale"])),
        causal=bool(arguments["causal"]),
    )
