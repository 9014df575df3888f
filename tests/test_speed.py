"""Counting and timing decodes: `mla-rt speed` and `mla-rt emulate`, the timeline, and scaled counts against whole ones."""

from __future__ import annotations

import itertools
import json
import re
import sys

import numpy as np
import pytest

from mla_rt import cli, speed
from mla_rt.device import open_device
from mla_rt.emulator.instruction_class import CLASSES
from mla_rt.kernel_arguments import make_arguments, read_arguments
from mla_rt.speed import Shape, count_decode, count_launch, count_launches, measure_decode
from mla_rt.speed_html import as_html
from mla_rt.speed_model import speed_of_light
from mla_rt.speed_rates import MI355X
from mla_rt.speed_timeline import timeline


def run(capsys, *arguments):
    """(exit code, stdout, stderr); argparse's own exit included."""
    try:
        code = cli.main([str(a) for a in arguments])
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def counted(emulator_device):
    return count_decode(Shape(batch=2, kv_len=200, kv_format="fp8_e4m3fn", page_size=16), emulator_device)


def test_the_parts_of_a_decode_add_up(emulator_device, counted):
    """Prologue and epilogue plus so many tiles is what a workgroup of another length executes, class by class."""
    tiles = counted.tiles
    (launch,) = count_launches(Shape(batch=1, kv_len=11 * tiles.tokens_per_tile, kv_format="fp8_e4m3fn", num_splits=1, page_size=16), emulator_device)
    for name in CLASSES:
        # Whether a tile raises a row's maximum depends on the numbers: rescaling costs vector instructions behind a branch.
        tolerance = 0.05 if name in ("valu", "branch") else 1e-9
        assert launch.by_class[name] == pytest.approx(tiles.once[name] + 11 * tiles.per_tile[name], rel=tolerance)
    assert [launch.kernel for launch in counted.launches] == ["mla_decode_fp8_e4m3fn_narrow"]
    # A merge of two splits reads what the other one wrote, 16 rows of 512 columns in f32, and its own in place of the two that four would have; 64
    # lanes of four waves read a log-sum-exp of each. The result in bf16 is then written once, not twice.
    partial, result = 16 * 512 * 4, 16 * 512 * 2
    assert 0 <= tiles.merge["bytes read"] - 3 * (partial + 1024) < 512 and 0 <= tiles.merge["bytes written"] - (2 * partial - result) < 512
    # The cache is read once: its bytes lie in so many lines at least, and not in many more. Besides it q, two partials of each request, a few lines.
    besides = 2 * 16 * 576 * 2 + 2 * 2 * (partial + 128)
    assert 2 * 200 * 576 / 128 < counted.launches[0].lines_read < (2 * 208 * 576 + besides) / 128 + 50


@pytest.mark.parametrize(("batch", "num_splits", "few"), [(8, None, 1), (6, 2, 1), (3, None, 1)])
def test_scaled_counts_are_those_of_the_whole_launch(emulator_device, batch, num_splits, few):
    """Some of the requests, taken times the rest, count as all of them do."""
    shape = Shape(batch=batch, kv_len=130, kv_format="mxfp4", num_splits=num_splits)
    whole = count_launches(shape, emulator_device, exact=True)
    for one, other in zip(whole, count_launches(shape, emulator_device, max_tokens=1), strict=True):
        assert one.sampled is None and other.sampled == one.num_workgroups * few // batch
        assert one.by_kind.shape[:2] == other.by_kind.shape[:2]
        for name in ("mfma", "transcendental", "barrier", "lds", "vmem", "smem"):  # not vector and branches: rescaling depends on the numbers
            assert one.by_class[name] == other.by_class[name]
        assert one.num_instructions == pytest.approx(other.num_instructions, rel=0.02)
        assert one.lds_conflict_cycles.sum() == other.lds_conflict_cycles.sum() and one.atomics.sum() == other.atomics.sum()
        # The requests of the whole batch share a few lines of the index arrays, and their pages do not all begin on a line.
        assert one.lines_read == pytest.approx(other.lines_read, rel=0.05) and one.lines_written == pytest.approx(other.lines_written, rel=0.05)
        assert np.allclose(np.sort(one.workgroup_lines_read), np.sort(other.workgroup_lines_read), rtol=0.05)


def test_timeline_of_one_workgroup(counted):
    """All instructions of every wave in order without gaps; barriers hold all waves; no faster than the busiest resource alone allows."""
    sample = counted.sample
    shown = timeline(sample)
    for wave, trace in zip(shown.waves, sample.trace, strict=True):
        assert [segment.name for segment in wave] == [instruction.mnemonic for instruction in trace]
        assert wave[0].start == 0 and all(a.end == b.start and b.end > b.start for a, b in itertools.pairwise(wave))
    ends = [[segment.end for segment in wave if segment.of_class == "barrier"] for wave in shown.waves]
    assert ends[0] and all(end == ends[0] for end in ends)
    (launch,) = speed_of_light([sample]).launches
    assert launch.lower_seconds * MI355X.clock_hz <= shown.clocks + 1e-6 <= launch.upper_seconds * MI355X.clock_hz
    trace = json.loads(json.dumps(shown.chrome_trace()))
    assert trace["otherData"]["label"] == "modelled"
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == sample.num_instructions and {event["tid"] for event in spans} == {0, 1, 2, 3}
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(shown.clocks / 2400, rel=1e-6)
    page = as_html(speed_of_light([sample]), "title", sample=shown)
    assert page.count("wave 3") == 2 and 'fill="var(--mfma)"' in page
    with pytest.raises(ValueError, match="without a trace"):
        timeline(counted.launches[0])


def test_speed_reports_the_model(capsys, tmp_path):
    files = [tmp_path / name for name in ("r.json", "r.html", "r.trace")]
    code, out, err = run(
        capsys, "speed", "--batch", 2, "--kv-len", 100, "--kv-format", "bf16", "--device", "emulator",
        "--json", files[0], "--html", files[1], "--trace", files[2],
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "MLA decode, bf16: batch 2, kv 100, 16 heads" in out and "modelled on MI355X" in out and "measured" not in out.replace("was measured", "")
    for resource in ("hbm", "issue", "valu", "mfma", "lds", "vmem"):
        assert re.search(rf"t_{resource} +[\d.]+ µs +[\d.]+%", out)
    content = json.loads(files[0].read_text())
    assert content["label"] == "modelled" and content["kv_bytes"] == 2 * 100 * 1152
    assert content["lower_seconds"] < content["upper_seconds"] and len(content["launches"]) == 1
    assert files[1].read_text().startswith("<!doctype html>") and json.loads(files[2].read_text())["traceEvents"]


def test_speed_measures_on_a_gpu(capsys, tmp_path, shim, hip_device):
    seconds = measure_decode(Shape(batch=1, kv_len=20, kv_format="mxfp4"), hip_device, repetitions=2)
    assert seconds.shape == (2,) and (seconds > 0).all()
    with shim.one_gpu():
        arguments = ("speed", "--batch", 1, "--kv-len", 20, "--kv-format", "fp8_e4m3fn", "--device", "hip")
        code, out, err = run(capsys, *arguments, "--json", tmp_path / "m.json")
        assert (code, err) == (0, "") and "measured on" in out and "modelled" not in out
        content = json.loads((tmp_path / "m.json").read_text())
        assert content["label"] == "measured" and len(content["seconds"]) == speed.REPETITIONS and content["median_seconds"] > 0
        code, _, err = run(capsys, *arguments, "--html", tmp_path / "m.html")
        assert code == 2 and "belong to the model" in err


def test_mistakes_are_one_line(capsys, tmp_path):
    base = ("speed", "--batch", 1, "--kv-len", 20, "--kv-format", "bf16", "--device", "emulator")
    for arguments, message in [
        (("speed", "--batch", 1), "required: --kv-len, --kv-format"),
        ((*base, "--batch", 0), "batch is 0; 1 to 65536"),
        ((*base, "--kv-len", -1), "kv-len is -1"),
        ((*base, "--num-heads", 129), "num-heads is 129"),
        ((*base, "--page-size", 3), "page_size is 3"),
        ((*base, "--html", tmp_path / "no" / "x.html"), "No such folder"),
    ]:
        code, _, err = run(capsys, *arguments)
        assert code == 2 and message in err and "Traceback" not in err, arguments


@pytest.fixture
def scale_add(tmp_path, sample):
    """The arguments of `emulate` for scale_add over 300 numbers, and what it writes."""
    np.save(tmp_path / "x.npy", np.arange(300, dtype=np.float32))
    tables = {
        "x": {"from": "x.npy"}, "y": {"null": True}, "out": {"size": 1200, "dump": "out.npy", "dtype": "float32", "shape": [3, 100]},
        "n": {"i32": 300}, "scale": {"f32": 2}, "flag": {"u8": 1}, "shift": {"f64": 0.5},
    }  # fmt: skip
    (tmp_path / "args.json").write_text(json.dumps(tables))
    return ("emulate", sample, "scale_add", "--grid", "2", "--args", tmp_path / "args.json"), np.arange(300, dtype=np.float32) * 2 + 0.5


@pytest.mark.parametrize("options", [(), ("--timing", "latest"), ("--timing", "hardware", "--seed", 1), ("--checks", "strict"), ("--block", "256,1")])
def test_emulate_runs_and_counts_any_kernel(capsys, tmp_path, scale_add, options):
    arguments, expected = scale_add
    code, out, err = run(capsys, *arguments, "--json", tmp_path / "r.json", "--html", tmp_path / "r.html", "--trace", tmp_path / "r.trace", *options)
    assert (code, err) == (0, "")
    assert np.array_equal(np.load(tmp_path / "out.npy"), expected.reshape(3, 100))
    assert re.search(r"^done +[\d,]+ instructions of waves in [\d.]+ s, [\d,]+ a second$", out, re.M) and "scale_add" in out and "modelled" in out
    (launch,) = json.loads((tmp_path / "r.json").read_text())["launches"]
    assert launch["num_workgroups"] == 2 and launch["written_bytes"] == 1200 and launch["read_bytes"] == 1200 and launch["lines_written"] == 10


def test_emulate_reports_faults(capsys, tmp_path, scale_add):
    arguments, _ = scale_add
    tables = json.loads((tmp_path / "args.json").read_text())
    (tmp_path / "args.json").write_text(json.dumps({**tables, "out": {"size": 400}}))
    code, _, err = run(capsys, *arguments)
    assert code == 1 and err.startswith("mla-rt: kernel fault: scale_add: write of 4 bytes outside live memory")


def test_arguments_in_toml(tmp_path, emulator_device):
    text = 'n = { i32 = -3 }\nx = { size = 8, fill = 7, dump = "x.npy", dtype = "int32" }\nz = { null = true }\n'
    (tmp_path / "args.toml").write_text(text)
    if sys.version_info < (3, 11):
        with pytest.raises(ValueError, match="reads no TOML"):
            read_arguments(tmp_path / "args.toml")
        return
    values, dumps = make_arguments(read_arguments(tmp_path / "args.toml"), tmp_path, emulator_device)
    assert values["n"] == np.int32(-3) and values["n"].dtype == np.int32 and values["z"] is None
    assert [dump.write() for dump in dumps] == [8] and np.load(tmp_path / "x.npy").tolist() == [0x07070707] * 2
    values["x"].free()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"i32": 2**31}, "2147483648 is no i32"),
        ({"u8": -1}, "-1 is no u8"),
        ({"i32": 1.5}, "1.5 is no i32"),
        ({"i32": True}, "True is no i32"),
        ({"f32": "1"}, "'1' is no f32"),
        ({"i7": 1}, "a scalar type, null = true, or a buffer"),
        ({"size": 8, "from": "x.npy"}, "either from or size"),
        ({"size": 8, "fill": 256}, "fill 0 to 255"),
        ({"size": -1}, "size is a number of bytes"),
        ({"size": 8, "dump": "x", "dtype": "float1"}, "numpy has no dtype 'float1'"),
        ({"size": 8, "dump": "x", "dtype": "float32", "shape": [3]}, "8 bytes are no float32 array of shape (3,)"),
        ({"from": "args.json"}, "args.json is not a readable npy file"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path, emulator_device, table, message):
    (tmp_path / "args.json").write_text(json.dumps({"a": table}))
    with pytest.raises(ValueError, match=re.escape(message)):
        make_arguments(read_arguments(tmp_path / "args.json"), tmp_path, emulator_device)


def test_blocks_of_two_dimensions(emulator_device, sample):
    """A block of another shape than the code object states: `follow` stores at workgroup * 256 + x, so four work-items of each row meet."""
    with emulator_device.load(sample) as module, emulator_device.allocate(4 * 256) as out:
        counts = count_launch(module.kernel("follow"), emulator_device, (1, 1, 1), (16, 4, 1), out=out)
        assert counts.block == (16, 4, 1) and counts.waves_per_workgroup == 1 and counts.written_bytes.sum() == 256
        assert counts.lines_written == 1 and out.download(256, np.uint32)[:17].tolist() == [12345] * 16 + [0xFFFFFFFF]


def test_counting_leaves_the_device_as_it_was():
    with open_device("emulator") as device:
        assert count_launches(Shape(batch=1, kv_len=5, kv_format="bf16"), device)[0].num_workgroups == 1
        assert device.observe is None
