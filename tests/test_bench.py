"""scripts/bench.py without a GPU: what it says then, and on the stand-in runtime, whose times are the host's and mean nothing, what it prints."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import bench
from mla_rt.speed import Shape


def test_without_a_gpu_it_says_so(capsys):
    assert bench.main([]) == 2
    captured = capsys.readouterr()
    assert (
        captured.out == "" and captured.err.startswith("bench: nothing measured, there is no GPU to measure on: ") and "Traceback" not in captured.err
    )


def test_every_shape_of_the_page_is_measured():
    shapes = [shape for shape, _ in bench.cases(list(bench.FORMATS), list(bench.BATCHES), list(bench.KV_LENS))]
    assert len(shapes) == len(set(shapes)) == 3 * (8 + 4 + 1)
    some = list(bench.cases(["mxfp4"], [4], [8192]))
    assert [(shape.num_heads, shape.q_len) for shape, _ in some] == [(16, 1), (16, 4), (128, 1)]
    assert all(kv_lens.tolist() == [8192] * 4 for _, kv_lens in some)


@pytest.mark.parametrize("warm", [False, True])
def test_on_the_stand_in_runtime(capsys, tmp_path, monkeypatch, shim, warm):
    small = [(Shape(2, 20, "mxfp4"), np.full(2, 20)), (Shape(2, 30, "fp8_e4m3fn"), np.array([3, 30]))]
    monkeypatch.setattr(bench, "cases", lambda *_: iter(small))
    monkeypatch.setattr(bench, "OVERWRITTEN_BYTES", 1 << 20)
    with shim.one_gpu():
        assert bench.main(["--repetitions", "2", "--json", str(tmp_path / "b.json"), *["--warm"] * warm]) == 0
    out = capsys.readouterr().out
    assert out.startswith("measured on ") and "modelled" not in out and ("1 MB overwritten" in out) != warm
    rows = out.splitlines()[3:]
    assert re.fullmatch(r"mxfp4 +16 +1 +2 +20 +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+", rows[0])
    assert re.fullmatch(r"fp8_e4m3fn +16 +1 +2 +≤30 +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+", rows[1])
    report = json.loads((tmp_path / "b.json").read_text())
    assert report["label"] == "measured" and report["warm"] == warm
    assert [len(one["seconds"]) for one in report["measured"]] == [2, 2] and report["measured"][1]["kv_lens"] == [3, 30]


def test_rates_are_of_cache_q_and_out():
    seconds = np.array([2e-6, 1e-6, 4e-6])
    assert bench.row(Shape(4, 1024, "bf16"), np.full(4, 1024), seconds).split() == [
        *("bf16", "16", "1", "4", "1024", "2.00", "1.00", "4.00"),
        f"{(4 * 1024 * 1152 + 4 * 16 * (576 + 512) * 2) / 2e-6 / 1e12:.3f}",
    ]


def test_mistakes_are_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--repetitions", "0"])
    assert stopped.value.code == 2 and "--repetitions is 0; 1 or more" in capsys.readouterr().err
