"""The speed-of-light model against numbers worked out by hand, on a card with round rates."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from mla_rt.emulator.completion import is_matrix, passes
from mla_rt.emulator.counters import LaunchCounts
from mla_rt.emulator.decoder import TABLES
from mla_rt.emulator.encodings import MAI_ENCODING
from mla_rt.emulator.instruction import Encoded, Instruction
from mla_rt.emulator.instruction_class import kind_of
from mla_rt.speed_html import as_html
from mla_rt.speed_model import demand, launch_time, speed_of_light
from mla_rt.speed_rates import MI355X, Rates
from mla_rt.speed_report import as_json, as_text, marginal

FIGURES = {
    "num_cus": 4,
    "simds_per_cu": 2,
    "clock_hz": 1e6,  # a clock is a microsecond
    "hbm_bytes_per_second": 64e6,  # 64 bytes a clock, 16 for each of 4 units
    "valu_clocks": 4,
    "transcendental_clocks": 16,
    "issue_clocks": 4,
    "mfma_clocks": {"f32_16x16x32_bf16": 16},
    "vmem_clocks": {4: 4, 8: 16, 12: 16, 16: 16},
    "lds_exchange_clocks": 1,
    "bytes_in_flight": 10000,
    "vmem_latency_clocks": 100,
    "smem_latency_clocks": 50,
    "lds_latency_clocks": 10,
    "launch_seconds": 1e-3,
}
CARD = Rates(name="test card", sources=dict.fromkeys(FIGURES, "made up"), **FIGURES)
KINDS = {
    "v_add_f32": "valu", "v_exp_f32": "transcendental", "v_mfma_f32_16x16x32_bf16": "mfma", "s_add_u32": "salu", "s_load_dword": "smem",
    "ds_read_b64": "lds", "ds_bpermute_b32": "lds", "global_load_dword": "vmem", "global_load_dwordx4": "vmem", "s_waitcnt vmcnt": "wait",
    "s_waitcnt lgkmcnt": "wait", "s_barrier": "barrier", "s_cbranch_scc1": "branch", "s_endpgm": "other",
}  # fmt: skip
# One wave: 10 valu, 2 transcendental, 3 mfma, 5 salu, 1 smem, 4 lds, 1 exchange, 2 + 1 vmem, 1 + 2 waits, 1 barrier, 1 branch, 1 other
WAVE = [10, 2, 3, 5, 1, 4, 1, 2, 1, 1, 2, 1, 1, 1]


def counts(by_kind, *, lds_cycles=8, conflicts=2, lines=10, lines_written=0, shared_lines=None, num_vgprs=512, lds_bytes=0) -> LaunchCounts:
    """by_kind: [workgroups][waves][kinds]; the LDS cycles are of each wave, the lines of each workgroup."""
    by_kind = np.array(by_kind, np.int64)
    workgroups, waves = by_kind.shape[:2]
    each = np.ones((workgroups, waves), np.int64)
    total = workgroups * lines if shared_lines is None else shared_lines
    return LaunchCounts(
        kernel="kernel", grid=(workgroups, 1, 1), block=(64 * waves, 1, 1), num_vgprs=num_vgprs, lds_bytes=lds_bytes,
        kinds=tuple(KINDS), classes=tuple(KINDS.values()), by_kind=by_kind,
        lds_read_bytes=512 * each, lds_written_bytes=0 * each, lds_cycles=lds_cycles * each, lds_conflict_cycles=conflicts * each,
        read_bytes=1280 * each, written_bytes=0 * each, scalar_read_bytes=4 * each, atomics=0 * each,
        workgroup_lines_read=np.full(workgroups, lines), workgroup_lines_written=np.full(workgroups, lines_written),
        die_lines_read=total, die_lines_written=workgroups * lines_written, lines_read=total, lines_written=workgroups * lines_written,
        lds_sites={0x40: ("ds_read_b64", 2 * workgroups * waves, 4 * workgroups * waves)},
    )  # fmt: skip


def test_demand_of_a_workgroup():
    """Three waves on two SIMDs: the first SIMD has two of them."""
    wanted = demand(counts([[WAVE, WAVE, WAVE]]), CARD)
    assert {name: clocks.tolist() for name, clocks in wanted.clocks.items()} == {
        "issue": [4 * 35],
        "valu": [2 * (10 * 4 + 2 * 16)],
        "mfma": [2 * 3 * 16],
        "lds": [3 * (8 + 2 + 1)],
        "vmem": [3 * (2 * 4 + 1 * 16)],
    }
    # A wave: 20 instructions that are not vector ones, vector ones at their length, waits and the scalar load at their latency; then what is shared.
    assert {name: clocks.tolist() for name, clocks in wanted.serial.items()} == {
        "issue": [20 * 4],
        "valu": [40 + 32],
        "mfma": [48],
        "latency": [100 + 2 * 10 + 50],
        "lds": [3 * 11],
        "vmem": [3 * 24],
    }
    # Of the longest wave, not the sum of the longest parts.
    idle, busy = [0] * len(WAVE), [0, 0, 9, *[0] * 11]
    assert demand(counts([[WAVE, busy, idle]]), CARD).serial["mfma"].tolist() == [48]


def test_one_workgroup():
    time = launch_time(counts([[WAVE]]), CARD)
    assert time.occupancy.workgroups_per_cu == 1 * 4  # the card of `occupancy` has four SIMDs
    assert time.resource_seconds == pytest.approx({"hbm": 20e-6, "issue": 140e-6, "valu": 72e-6, "mfma": 48e-6, "lds": 11e-6, "vmem": 24e-6})
    assert time.bound_by == "issue" and time.lower_seconds == pytest.approx(140e-6) and time.hbm_bytes == 1280
    # Alone it has all the memory, 64 bytes a clock, which is less than it can keep in flight.
    serial = 80 + 72 + 48 + 170 + 11 + 24
    assert time.upper_seconds == pytest.approx((serial + 1280 / 64) * 1e-6)
    assert time.upper_parts == pytest.approx(
        {"issue": 80e-6, "valu": 72e-6, "mfma": 48e-6, "lds": 11e-6, "vmem": 24e-6, "latency": 170e-6, "neighbours": 0, "memory": 20e-6}
    )
    assert time.of_cu.tolist() == [1, 0, 0, 0] and time.utilization == pytest.approx(0.25)


def test_memory_bounds_a_launch_and_shared_lines_count_once():
    one = launch_time(counts([[WAVE]] * 4, lines=1000), CARD)
    assert one.bound_by == "hbm" and one.lower_seconds == pytest.approx(4 * 1000 * 128 / 64 * 1e-6)
    assert one.upper_seconds == pytest.approx((405 + 1000 * 128 / 16) * 1e-6)
    shared = launch_time(counts([[WAVE]] * 4, lines=1000, shared_lines=1000), CARD)
    assert shared.resource_seconds["hbm"] == pytest.approx(1000 * 128 / 64 * 1e-6) and shared.upper_seconds == one.upper_seconds
    written = launch_time(counts([[WAVE]] * 4, lines=600, lines_written=400), CARD)
    assert written.resource_seconds == one.resource_seconds
    assert launch_time(counts([[WAVE]] * 4, lines=1000), replace(CARD, bytes_in_flight=800)).upper_seconds == pytest.approx((405 + 128000 / 8) * 1e-6)


def test_tails_and_idle_units_show():
    """Five equal workgroups on four units that hold one each: the fifth runs alone after the others."""
    time = launch_time(counts([[WAVE] * 4] * 5), CARD)
    # Four waves of 512 registers: one workgroup a unit. Its two SIMDs hold two waves each: 144 clocks of vector instructions.
    assert time.occupancy.workgroups_per_cu == 1 and time.of_cu.tolist() == [2, 1, 1, 1]
    assert time.lower_seconds == pytest.approx(2 * 144e-6) and time.utilization == pytest.approx(5 / 8)
    assert time.resource_seconds["valu"] == pytest.approx(2 * 144e-6)
    # The slot that ends last had two of them.
    assert time.upper_seconds == pytest.approx(sum(time.upper_parts.values())) and time.upper_parts["latency"] == pytest.approx(2 * 170e-6)


def test_long_workgroups_first_leave_no_gap():
    """Workgroups of unequal length go in order to the unit that is free first."""
    long, short = [20 * n for n in WAVE], WAVE
    time = launch_time(counts([[long] * 4, *[[short] * 4] * 6]), CARD)
    assert time.of_cu.tolist() == [1, 2, 2, 2]
    assert time.lower_seconds == pytest.approx(20 * 144e-6)


def test_workgroups_side_by_side_share_a_unit():
    """Eight workgroups, two a unit at once: what they share takes twice as long, their issue runs side by side."""
    time = launch_time(counts([[WAVE, WAVE]] * 8, num_vgprs=256, lds_bytes=80 * 1024, lines=1), CARD)
    assert time.occupancy.workgroups_per_cu == 2 and time.of_cu.tolist() == [2, 2, 2, 2]
    assert time.resource_seconds == pytest.approx({"hbm": 16e-6, "issue": 140e-6, "valu": 144e-6, "mfma": 96e-6, "lds": 44e-6, "vmem": 96e-6})
    assert time.lower_seconds == pytest.approx(144e-6)


def test_small_workgroups_take_different_simds():
    """Two workgroups of one wave on a unit of two SIMDs do not stand in each other's way; a third does."""
    two, three = (launch_time(counts([[WAVE]] * 4 * n, num_vgprs=128, lds_bytes=160 * 1024 // n - 1280, lines=1), CARD) for n in (2, 3))
    assert (two.occupancy.workgroups_per_cu, three.occupancy.workgroups_per_cu) == (2, 3)
    assert two.resource_seconds["valu"] == pytest.approx(72e-6) and three.resource_seconds["valu"] == pytest.approx(144e-6)
    assert two.lower_seconds == pytest.approx(140e-6) and three.lower_seconds == pytest.approx(144e-6)


def test_totals_add_up_over_launches():
    launches = [counts([[WAVE]]), counts([[WAVE] * 4] * 5)]
    report = speed_of_light(launches, CARD)
    assert report.fixed_seconds == 2e-3
    assert report.lower_seconds == pytest.approx(2e-3 + 140e-6 + 288e-6)
    assert report.upper_seconds == pytest.approx(2e-3 + sum(launch.upper_seconds for launch in report.launches))
    assert all(launch.lower_seconds <= launch.upper_seconds for launch in report.launches)


def test_what_has_no_rate_or_no_place_is_refused():
    strange = replace(counts([[WAVE]]), kinds=tuple("v_mfma_f32_9x9x9_bf16" if kind.startswith("v_mfma") else kind for kind in KINDS))
    with pytest.raises(ValueError, match="no rate for v_mfma_f32_9x9x9_bf16 on test card"):
        launch_time(strange, CARD)
    with pytest.raises(ValueError, match="does not fit a compute unit"):
        launch_time(counts([[WAVE] * 8]), CARD)
    with pytest.raises(ValueError, match=r"every figure has a source.*clock_hz"):
        Rates(name="x", sources={name: "made up" for name in FIGURES if name != "clock_hz"}, **FIGURES)


def test_peak_rates_of_the_mi355x():
    """The table gives the card's advertised figures: dense Tflop/s of bf16, fp8 and fp4, and bytes a clock and unit."""

    def tflops(kind: str, flop: int) -> float:
        return flop / MI355X.mfma(kind) * MI355X.num_cus * MI355X.simds_per_cu * MI355X.clock_hz / 1e12

    assert tflops("v_mfma_f32_16x16x32_bf16", 2 * 16 * 16 * 32) == pytest.approx(2517, rel=1e-3)
    assert tflops("v_mfma_scale_f32_16x16x128_f8f6f4 fp8×fp4", 2 * 16 * 16 * 128) == pytest.approx(5033, rel=1e-3)
    assert tflops("v_mfma_f32_32x32x64_f8f6f4 fp4×fp6", 2 * 32 * 32 * 64) == pytest.approx(10066, rel=1e-3)
    assert pytest.approx(13.0, abs=0.05) == MI355X.hbm_bytes_per_second / MI355X.clock_hz / MI355X.num_cus


def test_every_matrix_instruction_has_a_rate_that_agrees_with_its_passes():
    for encoding in ("VOP3P-MAI", "VOP3PX2"):
        for opcode, row in TABLES[encoding].items():
            for cbsz, blgp in ((0, 0), (4, 4), (2, 1)) if row.mnemonic.endswith("f8f6f4") else ((0, 0),):
                encoded = Encoded(8, encoding, {"op": opcode, "cbsz": cbsz, "blgp": blgp, "encoding": MAI_ENCODING}, b"", 0)
                instruction = Instruction(encoded, row.mnemonic, lambda group: None)
                assert is_matrix(instruction) and MI355X.mfma(kind_of(instruction)) == 4 * passes(instruction), kind_of(instruction)


def test_marginal_cost_of_a_tile():
    """Launches of two workgroups, 4 and 6 tiles each: 7 vector instructions a tile, 3 once; in the split one, 5 more for both."""
    few, many = ([[[3 + 7 * tiles, *WAVE[1:]]]] * 2 for tiles in (4, 6))
    halves = [[[31, *WAVE[1:]]], [[31 + 5, *WAVE[1:]]]]
    tiles = marginal(counts(few, lds_cycles=40), 4, counts(many, lds_cycles=60), 6, counts(halves, lds_cycles=40), 64)
    assert tiles.merge == {name: 5 if name == "valu" else 0 for name in tiles.merge}
    assert tiles.per_tile["valu"] == 7 and tiles.once["valu"] == 3
    assert tiles.per_tile["LDS cycles"] == 10 and tiles.once["LDS cycles"] == 0
    assert tiles.per_tile["salu"] == 0 and tiles.once["salu"] == 5 and tiles.instructions_per_token == 7 / 64


def test_report_as_text_json_and_page():
    report = speed_of_light([counts([[WAVE] * 4] * 5, lines=1000), counts([[WAVE]] * 3).repeated(2)], CARD)
    tiles = marginal(counts([[WAVE]]), 1, counts([[[2 * n for n in WAVE]]]), 2, counts([[WAVE]] * 2), 64)
    text = as_text(report, "a title", tiles, 123456)
    assert "modelled on test card" in text and "<- bounds it" in text and "counted on 3 of them and scaled" in text and "123,456 bytes" in text
    assert "ds_read_b64 at 0x40: 0.5 more cycles an access, 40 in all" in text
    assert max(map(len, text.splitlines())) < 200
    content = json.loads(json.dumps(as_json(report, "a title", tiles, 123456), default=dict))
    assert content["label"] == "modelled" and content["lower_seconds"] == report.lower_seconds
    first = content["launches"][0]
    assert first["workgroups_of_cu"] == [2, 1, 1, 1] and first["bound_by"] == "hbm" and first["lines_read"] == 5000
    assert content["launches"][1]["counted_workgroups"] == 3 and content["tiles"]["per_tile"]["valu"] == 10
    page = as_html(report, "a <title>", tiles, 123456)
    assert page.startswith("<!doctype html>") and "a &lt;title&gt;" in page and "modelled" in page and "prefers-color-scheme: dark" in page
    assert not any(word in page for word in ("http:", "https:", "src=", "url(", "<script", "@import", "nan"))
