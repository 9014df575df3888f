"""The command line: what it prints and writes, and that mistakes of its user end in one line and exit code 2."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mla_rt import cli
from mla_rt.batch_file import made_batch
from mla_rt.code_object import CodeObject, code_object_path
from mla_rt.decode import decode
from mla_rt.errors import DeviceError, KernelFault, UnsupportedArch
from mla_rt.formats import FP8, MXFP4, quantize_fp8, quantize_mxfp4
from mla_rt.occupancy import occupancy

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def small_batch():
    rng = np.random.default_rng(5)
    q, kv = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16).view(np.uint16) for shape in ((2, 16, 576), (70, 576)))
    return {"q": q, "kv": kv, "qo_indptr": np.array([0, 1, 2]), "kv_indptr": np.array([0, 65, 70]), "sm_scale": np.float32(0.04)}


@pytest.fixture
def batch_path(tmp_path, small_batch):
    path = tmp_path / "batch.npz"
    np.savez(path, **small_batch)
    return path


def run(capsys, *arguments):
    """(exit code, stdout, stderr); argparse's own exit included."""
    try:
        code = cli.main([str(a) for a in arguments])
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3fn", "mxfp4"])
def test_decode_checks_and_writes(capsys, tmp_path, batch_path, small_batch, kv_format):
    output = tmp_path / "result"  # no suffix: the name is taken as given
    code, out, err = run(capsys, "decode", batch_path, "--kv-format", kv_format, "--check", "--device", "emulator", "--splits", 2, "-o", output)
    assert (code, err) == (0, "")
    assert "2 requests, 2 query tokens × 16 heads, 70 tokens of KV" in out and f"mla_decode_{kv_format}" in out and "kept: RMS error" in out
    with np.load(output) as written:
        q, kv = small_batch["q"].view(ml_dtypes.bfloat16), small_batch["kv"].view(ml_dtypes.bfloat16)
        stored = {"bf16": lambda: kv, "fp8_e4m3fn": lambda: quantize_fp8(kv), "mxfp4": lambda: quantize_mxfp4(kv)}[kv_format]()
        expected_out, expected_lse = decode(q, stored, kv_indptr=[0, 65, 70], sm_scale=np.float32(0.04), num_splits=2, device="emulator")
        assert np.array_equal(written["out"], expected_out.view(np.uint16)) and np.array_equal(written["lse"], expected_lse)


def test_decode_takes_a_cache_that_quantize_wrote(capsys, tmp_path, batch_path, small_batch):
    rows, cache, first, second = (tmp_path / name for name in ("kv.npy", "kv.npz", "first.npz", "second.npz"))
    np.save(rows, small_batch["kv"])
    assert run(capsys, "quantize", rows, "--to", "mxfp4", "--scale-rule", "ceil", "-o", cache)[0] == 0
    assert run(capsys, "decode", batch_path, "--kv", cache, "--device", "emulator", "-o", first)[0] == 0
    assert run(capsys, "decode", batch_path, "--kv-format", "mxfp4", "--scale-rule", "ceil", "--device", "emulator", "-o", second)[0] == 0
    with np.load(first) as a, np.load(second) as b:
        assert all(np.array_equal(a[name], b[name]) for name in ("out", "lse"))


def test_a_broken_promise_is_exit_code_1(capsys, batch_path, monkeypatch):
    """One (row, head) a little off: the command must see it and say where."""

    def slightly_wrong(batch, device):
        out, lse = decode_batch(batch, device)
        out[1, 3] *= ml_dtypes.bfloat16(1.03)
        return out, lse

    decode_batch = cli.decode_batch
    monkeypatch.setattr(cli, "decode_batch", slightly_wrong)
    monkeypatch.setattr("mla_rt.demo.decode_batch", slightly_wrong)
    for command in (["decode", batch_path, "--check"], ["demo", batch_path]):
        code, out, _ = run(capsys, *command, "--device", "emulator")
        assert code == 1 and "BROKEN: RMS error" in out and "query token 1, head 3" in out and "kept:" not in out


def test_demo_shows_three_formats(capsys, batch_path):
    code, out, err = run(capsys, "demo", batch_path, "--device", "emulator")
    assert (code, err) == (0, "")
    rows = {words[0]: words for words in map(str.split, out.splitlines()) if words and words[0] in ("bf16", "fp8_e4m3fn", "mxfp4")}
    assert [row[1] for row in rows.values()] == [f"mla_decode_{kv_format}_narrow" for kv_format in rows]
    assert [row[2] for row in rows.values()] == ["80,640", "40,320", "21,420"]  # 70 rows of 1152, 576 and 306 bytes
    assert rows["bf16"][5] == "none" and 0 < float(rows["fp8_e4m3fn"][5]) < float(rows["mxfp4"][5])
    for row in rows.values():
        assert 0 < float(row[3]) < 0.005 and 0 < float(row[4]) < 0.005 and float(row[6]) < 1e-4
    assert re.search(r"^device  gfx950 emulator", out, re.M) and "kept: RMS error" in out


def test_demo_makes_a_batch_if_none_is_named(capsys, monkeypatch):
    """The batch itself is decoded by `make demo`; here it is cut short, being a test of the command."""
    made = made_batch()
    assert 0 in np.diff(made["kv_indptr"]) and made["page_size"] > 1
    short = {**made, "q": made["q"][:1], "qo_indptr": [0, 1], "kv_indptr": [0, 2], "kv_indices": made["kv_indices"][:2], "kv_last_page_len": [3]}
    monkeypatch.setattr("mla_rt.batch_file.made_batch", lambda: short)
    code, out, _ = run(capsys, "demo", "--device", "emulator")
    assert code == 0 and "made here: 1 request, 1 query token × 16 heads, " in out and "kept:" in out


@pytest.mark.parametrize(("to", "record", "error"), [("mxfp4", MXFP4, 0.2), ("fp8_e4m3fn", FP8, 0.05), ("fp8_e4m3fnuz", FP8, 0.05)])
def test_quantize_and_back(capsys, tmp_path, to, record, error):
    x = np.random.default_rng(0).standard_normal((5, 64), np.float32)
    source, packed, back = (tmp_path / name for name in ("x.npy", "x.packed", "back"))
    np.save(source, x)
    code, out, err = run(capsys, "quantize", source, "--to", to, "-o", packed)
    assert (code, err) == (0, "") and f"{to} (5, 64), {record.load(packed).nbytes} bytes" in out
    code, out, err = run(capsys, "dequantize", packed, "-o", back)
    assert (code, err) == (0, "") and "float32 (5, 64)" in out
    values = np.load(back)
    assert values.dtype == np.float32 and np.array_equal(values, record.load(packed).dequantize())
    assert 0 < np.sqrt(np.mean((values - x) ** 2)) < error


def test_quantize_options(capsys, tmp_path):
    x = np.full((1, 32), 6.5, np.float32)
    source, packed = tmp_path / "x.npy", tmp_path / "x.npz"
    np.save(source, x)
    assert run(capsys, "quantize", source, "--to", "mxfp4", "--scale-rule", "ceil", "-o", packed)[0] == 0
    assert MXFP4.load(packed).scales.tolist() == [[128]]
    assert run(capsys, "quantize", source, "--to", "fp8_e4m3fn", "--scale", "0.5", "-o", packed)[0] == 0
    assert FP8.load(packed).scale == np.float32(0.5)


def test_info_names_devices_and_kernels(capsys):
    code, out, err = run(capsys, "info")
    assert (code, err) == (0, "")
    assert re.search(r"^  emulator +gfx950", out, re.M) and "256 compute units" in out and re.search(r"^  auto +takes ", out, re.M)
    for name in CodeObject.load(code_object_path("mla_decode", "gfx950")).kernels:
        assert len(re.findall(rf"^ +{name} +\d+ +\d+ +\d+ +\d+ +\d+ +\d+ +[\d.]+ +\d+ +\w+$", out, re.M)) == 1


@pytest.mark.parametrize(
    ("num_vgprs", "lds_bytes", "block_size", "expected"),
    [
        (64, 0, 256, (8, 8.0, "waves")),
        (65, 0, 256, (7, 7.0, "registers")),
        (128, 0, 256, (4, 4.0, "registers")),
        (512, 0, 256, (1, 1.0, "registers")),
        (32, 64 * 1024, 256, (2, 2.0, "LDS")),
        (32, 160 * 1024, 256, (1, 1.0, "LDS")),
        (32, 54613, 256, (2, 2.0, "LDS")),  # a third of LDS, but not in granules of 1280 bytes
        (40, 0, 128, (16, 8.0, "waves")),
        (512, 0, 512, (0, 0.0, "registers")),
    ],
)
def test_occupancy(num_vgprs, lds_bytes, block_size, expected):
    fit = occupancy(num_vgprs=num_vgprs, lds_bytes=lds_bytes, block_size=block_size)
    assert (fit.workgroups_per_cu, fit.waves_per_simd, fit.limited_by) == expected


def written(tmp_path, name, content):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        np.savez(path, **content)
    else:
        np.save(path, content)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": None}, "lacks kv"),
        ({"sm_scale": None}, "lacks sm_scale"),
        ({"kv_indice": np.arange(2)}, "unknown array kv_indice; known are q, kv"),
        ({"q": np.zeros((2, 16, 576), np.int64)}, "q has dtype int64"),
        ({"q": np.zeros((2, 16, 576), ml_dtypes.bfloat16)}, "are needed (np.save loses bfloat16: save its .view(np.uint16))"),
        ({"q": np.array([None])}, "it holds Python objects"),
        ({"q": np.zeros((2, 16, 512), np.float32)}, "q has shape (2, 16, 512)"),
        ({"kv_indptr": np.array([0, 65, 71])}, "kv_indptr ends at 71 pages; kv has 70"),
        ({"page_size": np.array(3)}, "page_size is 3"),
    ],
)
def test_a_bad_batch_is_one_line(capsys, tmp_path, small_batch, change, message):
    path = written(tmp_path, "bad.npz", {name: array for name, array in {**small_batch, **change}.items() if array is not None})
    code, out, err = run(capsys, "decode", path, "--device", "emulator")
    assert code == 2 and out == "" and message in err and err.startswith("mla-rt: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "no npz or npy file"),
        (b"not a zip file", "no npz or npy file"),
        (b"PK\x03\x04 cut off", "no npz or npy file"),
        (np.zeros(3), "a single array"),
        (np.array([{}]), "no npz or npy file of plain arrays (it holds Python objects)"),
    ],
)
def test_a_file_that_is_no_batch_is_one_line(capsys, tmp_path, content, message):
    path = tmp_path / "missing.npz" if content is None else written(tmp_path, "bad.npy", content)
    for command in ("decode", "demo"):
        code, out, err = run(capsys, command, path)
        assert code == 2 and out == "" and message in err and str(path) in err and err.count("\n") == 1


def test_bad_options_are_refused(capsys, tmp_path, batch_path):
    rows = written(tmp_path, "kv.npy", np.zeros((2, 576), np.float32))
    quantize_fp8(np.zeros((80, 576), np.float32)).save(tmp_path / "other.npz")
    output = tmp_path / "out.npz"
    for arguments, message in [
        ([], "required: command"),
        (["decode"], "required: batch"),
        (["decode", batch_path, "--kv-format", "fp4"], "invalid choice: 'fp4'"),
        (["decode", batch_path, "--splits", "two"], "invalid int value"),
        (["decode", batch_path, "--splits", "0"], "num_splits is 0"),
        (["decode", batch_path, "--scale", "2"], "--scale is for fp8, not for bf16"),
        (["decode", batch_path, "--scale-rule", "ceil", "--kv-format", "fp8_e4m3fn"], "--scale-rule is for mxfp4, not for fp8_e4m3fn"),
        (["decode", batch_path, "--kv-format", "fp8_e4m3fnuz", "--device", "emulator"], "cannot be decoded on gfx950"),
        (["decode", batch_path, "--kv", batch_path], "holds no array 'format', which names the format; expected 'mxfp4' or 'fp8_e4m3fn' or"),
        (["decode", batch_path, "--kv", rows], "not a readable npz file"),
        (["decode", batch_path, "--kv", tmp_path / "other.npz"], "holds a cache of shape (80, 576)"),
        (["decode", batch_path, "--kv", tmp_path / "other.npz", "--scale", "2"], "--scale is for quantizing"),
        (["decode", batch_path, "--kv", tmp_path / "other.npz", "--scale-rule", "even"], "--scale-rule is for quantizing"),
        (["decode", batch_path, "--kv", tmp_path / "other.npz", "--kv-format", "mxfp4"], "not allowed with argument"),
        (["quantize", rows, "--to", "mxfp4"], "required: -o"),
        (["quantize", rows, "--to", "fp8_e4m3fn", "--scale", "-1", "-o", output], "scale is -1.0"),
        (["quantize", rows, "--to", "mxfp4", "--scale", "1", "-o", output], "--scale is for fp8"),
        (["quantize", batch_path, "--to", "mxfp4", "-o", output], "one array in an npy file is needed"),
        (["dequantize", rows, "-o", output], "not a readable npz file"),
        (["decode", ""], "argument batch: the name of a file is empty"),
        (["decode", batch_path, "-o", ""], "argument -o/--output: the name of a file is empty"),
    ]:
        code, _, err = run(capsys, *arguments)
        assert code == 2 and message in err and "Traceback" not in err, arguments
    assert not output.exists()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DeviceError("hipMalloc: out of memory"), 2, "mla-rt: hipMalloc: out of memory\n"),
        (UnsupportedArch("it is gfx90a"), 2, "mla-rt: it is gfx90a\n"),
        (KernelFault("mla_decode_bf16+0x40: wave 3"), 1, "mla-rt: kernel fault: mla_decode_bf16+0x40: wave 3\n"),
        (KeyboardInterrupt(), 130, "mla-rt: interrupted\n"),
    ],
)
def test_errors_of_the_device_are_one_line(capsys, batch_path, monkeypatch, error, code, line):
    def fail(*_arguments):
        raise error

    monkeypatch.setattr(cli, "decode_batch", fail)
    got, _, err = run(capsys, "decode", batch_path, "--device", "emulator")
    assert (got, err) == (code, line)


def test_the_module_runs_and_bad_input_has_no_traceback(tmp_path):
    command = [sys.executable, "-m", "mla_rt"]
    helped = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(name in helped.stdout for name in ("decode", "demo", "quantize", "dequantize", "info"))
    failed = subprocess.run([*command, "dequantize", str(tmp_path / "nothing.npz"), "-o", "x"], cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1 and "nothing.npz" in failed.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_for_terminals_only(batch_path, monkeypatch):
    def long_run(batch, device):
        if device.progress is not None:
            device.progress(1, 4)
        return decode_batch(batch, device)

    def stderr_of(stream):
        monkeypatch.setattr(sys, "stderr", stream)
        assert cli.main(["decode", str(batch_path), "--device", "emulator"]) == 0
        return stream.getvalue()

    decode_batch = cli.decode_batch
    monkeypatch.setattr(cli, "decode_batch", long_run)
    shown = stderr_of(Terminal())
    assert "emulating: 1 of 4 workgroups done" in shown and shown.endswith("\r\x1b[K")  # nothing of it stays on the screen
    assert stderr_of(io.StringIO()) == ""
