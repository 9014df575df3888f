"""AMD's production decode kernels give right results on the emulator.

They are scheduled by hand and count on latencies, so they run under `timing="hardware"`. What each gives is written to build/peers/report.txt.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from aiter_mla import BF16, FP8, Case, Outcome, run
from aiter_wheel import CACHE, code_objects

from mla_rt import open_device
from mla_rt.speed_model import speed_of_light

pytestmark = pytest.mark.peers

# AITER's tests take a cosine distance of 3e-2 where something is FP8, 1e-5 otherwise. Ours is the L2 norm of the error over that of the result:
# FP8 kernels round q and P to FP8; the others round P and, where they write it themselves, the result to bf16.
COSINE_DISTANCE = {FP8: 3e-2, BF16: 1e-5}
RELATIVE_ERROR = {FP8: 3e-2, BF16: 3e-3}
LSE_ERROR = 1e-5

_A8W8, _A16W16 = "mla_a8w8_qh16_qseqlen", "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1"
CASES = [
    Case(f"{_A8W8}1_gqaratio16", FP8, FP8),
    Case(f"{_A8W8}1_gqaratio16", FP8, FP8, num_splits=2),
    Case(f"{_A8W8}1_gqaratio16", FP8, FP8, num_splits=4, kv_lens=(600, 1000)),
    Case(f"{_A8W8}1_gqaratio16_ps", FP8, FP8, persistent=True),
    Case(f"{_A8W8}1_gqaratio16_ps", FP8, FP8, persistent=True, num_splits=3),
    Case(f"{_A8W8}1_gqaratio16_ps", FP8, FP8, persistent=True, balanced=True, kv_lens=(300, 1, 900, 128), num_workgroups=5),
    Case(f"{_A8W8}2_gqaratio16", FP8, FP8, q_len=2),
    Case(f"{_A8W8}2_gqaratio16", FP8, FP8, q_len=2, num_splits=2),
    Case(f"{_A8W8}2_gqaratio16_ps", FP8, FP8, q_len=2, persistent=True, num_splits=3),
    # This build's kernel for four query tokens lets all splits write to the place of the first, so only unsplit requests can be judged. In some
    # lengths it also reads LDS through a register that no longer holds an address, though nothing comes of it; these lengths are not among them.
    Case(f"{_A8W8}4_gqaratio16", FP8, FP8, q_len=4, kv_lens=(300, 150)),
    Case(f"{_A8W8}4_gqaratio16_ps", FP8, FP8, q_len=4, persistent=True),
    Case(f"{_A8W8}4_gqaratio16_ps", FP8, FP8, q_len=4, persistent=True, num_splits=3),
    Case("mla_a8w8_qh128_m32x4_n16x2_msk0", FP8, FP8, num_heads=128, kv_lens=(300,), num_splits=2),
    Case("mla_a8w8_qh128_m32x4_n16x2_msk1", FP8, FP8, num_heads=128, kv_lens=(300,)),
    Case("mla_a8w8_qh128_m32x4_n16x2_msk1", FP8, FP8, num_heads=128, kv_lens=(300,), num_splits=2),
    Case("mla_a8w8_qh128_m32x4_n16x2_msk0_ps", FP8, FP8, num_heads=128, persistent=True, num_splits=3),
    Case("mla_a8w8_qh128_m32x4_n16x2_msk1_ps", FP8, FP8, num_heads=128, kv_lens=(300,), persistent=True, num_splits=3),
    Case("mla_dec_stage1_bf16_a16w16_subQ16_mqa16", BF16, BF16, rows_per_workgroup=16, final=False),
    Case("mla_dec_stage1_bf16_a16w16_subQ16_mqa16", BF16, BF16, rows_per_workgroup=16, num_splits=3),
    Case("mla_dec_stage1_bf16_a16w16_subQ128_mqa128", BF16, BF16, num_heads=128, kv_lens=(300,)),
    Case("mla_dec_stage1_bf16_a16w16_subQ128_mqa128", BF16, BF16, num_heads=128, kv_lens=(300,), num_splits=2),
    Case(_A16W16, BF16, BF16, q_len=4),
    Case(_A16W16, BF16, BF16, q_len=2, kv_lens=(300,), num_splits=2),
    Case("mla_a16w16_qh16_m32x4_n16x1_coex0_mask1", BF16, BF16, q_len=8, kv_lens=(300,), num_splits=2),
    Case(f"{_A16W16}_ps", BF16, BF16, kv_lens=(300,), persistent=True),
    Case(f"{_A16W16}_ps", BF16, BF16, q_len=4, kv_lens=(300,), persistent=True, num_splits=3),
    Case("mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps", BF16, FP8, kv_lens=(300,), persistent=True, num_splits=3),
    Case("mla_pfl_bf16_a16w16_causal_subQ16_mqa16", BF16, BF16, q_len=40, kv_lens=(100,)),
    Case("mla_pfl_bf16_a16w16_causal_subQ128_mqa128", BF16, BF16, num_heads=128, q_len=5, kv_lens=(100,)),
]
# Whole launches of (batch 16, 2048 tokens each, 4 splits): wave-instructions per KV token, counted on another emulator.
COUNTED = [
    (Case(f"{_A8W8}1_gqaratio16", FP8, FP8, num_splits=4, kv_lens=(2048,) * 16), 28.3),
    (Case("mla_dec_stage1_bf16_a16w16_subQ16_mqa16", BF16, BF16, rows_per_workgroup=16, num_splits=4, kv_lens=(2048,) * 16), 33.4),
]


@pytest.fixture(scope="module")
def report() -> Iterator[list[str]]:
    lines = [
        "Time is modelled for an MI355X, launch included: everything overlapped, and nothing overlapped inside a wave.",
        f"{'kernel':43s} {'heads':>5s} {'q_len':>5s} {'kv':>10s} {'splits':>6s} {'error':>8s} {'instr./token':>12s} {'modelled us':>14s}",
    ]
    yield lines
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    (CACHE.parent / "report.txt").write_text("\n".join(lines) + "\n")


def check(case: Case, report: list[str]) -> Outcome:
    path = code_objects()[case.kernel]
    with open_device("emulator", timing="hardware") as device:
        outcome = run(case, path, device)
    assert np.isfinite(outcome.out).all()
    lens = f"{len(case.kv_lens)} x {case.kv_lens[0]}" if len(set(case.kv_lens)) == 1 else ", ".join(map(str, case.kv_lens))
    per_token = outcome.report.num_instructions / sum(case.kv_lens)
    error = outcome.relative_error
    model = speed_of_light([outcome.counts])
    time = f"{model.lower_seconds * 1e6:.1f} to {model.upper_seconds * 1e6:.1f}"
    row = f"{case.kernel:43s} {case.num_heads:5d} {case.q_len:5d} {lens:>10s} {case.num_splits:6d} {error:8.1e} {per_token:12.1f} {time:>14s}"
    report.append(row)
    narrow = FP8 if case.q_dtype is FP8 else BF16
    assert error < RELATIVE_ERROR[narrow]
    assert outcome.cosine_distance < COSINE_DISTANCE[narrow]
    written = ~np.isnan(outcome.lse)
    assert (np.abs(outcome.lse - outcome.exact_lse)[written] < LSE_ERROR).all()
    assert written.all() or case.num_splits == 1, "a split without its log-sum-exp"
    return outcome


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode(case, report):
    check(case, report)


@pytest.mark.parametrize(("case", "counted"), COUNTED, ids=lambda value: str(value) if isinstance(value, Case) else "")
def test_instruction_counts_agree_with_another_emulator(case, counted, report):
    outcome = check(case, report)
    assert round(outcome.report.num_instructions / sum(case.kv_lens), 1) == counted


MARGINAL = [
    Case(f"{_A8W8}1_gqaratio16", FP8, FP8),
    Case(f"{_A8W8}1_gqaratio16_ps", FP8, FP8, persistent=True, num_workgroups=1),
    Case("mla_dec_stage1_bf16_a16w16_subQ16_mqa16", BF16, BF16, rows_per_workgroup=16, final=False),
]


@pytest.mark.parametrize("case", MARGINAL, ids=str)
def test_every_further_token_costs_the_same(case, report):
    """The difference between two lengths is what a token costs without what a launch costs once; a third length must agree."""
    counts = []
    for kv_len in (1024, 2048, 3072):
        with open_device("emulator", timing="hardware") as device:
            counts.append(run(dataclasses.replace(case, kv_lens=(kv_len,)), code_objects()[case.kernel], device).counts.by_class)
    first, second = ({name: longer[name] - shorter[name] for name in longer} for shorter, longer in itertools.pairwise(counts))
    assert first == second
    total = sum(first.values()) / 1024
    assert 10 < total < 100
    classes = ", ".join(f"{name} {number / 1024:.2f}" for name, number in first.items() if number)
    report.append(f"{case.kernel:43s} a further token: {total:.1f} instructions ({classes})")


@pytest.mark.parametrize("timing", ["earliest", "latest"])
def test_hand_scheduled_kernels_count_on_latencies(timing):
    """What the other timings are for: they show that this kernel is right by the clock only, which no kernel of a compiler is."""
    with open_device("emulator", timing=timing) as device:
        outcome = run(CASES[0], code_objects()[CASES[0].kernel], device)
    assert not outcome.relative_error < 10 * RELATIVE_ERROR[FP8]


def test_the_tolerance_would_see_a_wrong_token():
    """One request's tokens in place of another's, as a wrong page index gives."""
    with open_device("emulator", timing="hardware") as device:
        outcome = run(CASES[0], code_objects()[CASES[0].kernel], device)
    swapped = Outcome(outcome.out[::-1], outcome.lse, outcome.exact_out, outcome.exact_lse, outcome.report, outcome.counts)
    assert swapped.relative_error > 10 * RELATIVE_ERROR[FP8]
