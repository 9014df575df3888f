"""Where the command line writes: outputs that cannot be written are refused before the work, and standard output may be any kind of file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mla_rt
from mla_rt import cli
from mla_rt.decode import decode

ROOT = Path(__file__).resolve().parent.parent
BF16 = ml_dtypes.bfloat16


def bits(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(BF16).view(np.uint16)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a batch, a float array and a quantized cache."""
    monkeypatch.chdir(tmp_path)
    np.savez("batch.npz", q=bits(2, 16, 576), kv=bits(20, 576), kv_indptr=[0, 8, 20], sm_scale=576**-0.5)
    np.save("kv.npy", bits(20, 576))
    mla_rt.quantize_mxfp4(bits(20, 576).view(BF16)).save("kv.npz")
    return tmp_path


def never(*_arguments):
    raise AssertionError("worked first")


COMMANDS = [("decode", "batch.npz", "--kv", "kv.npz"), ("quantize", "kv.npy", "--to", "mxfp4"), ("dequantize", "kv.npz")]


def refused(capsys, *arguments):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def nothing_is_read(monkeypatch):
    for name in ("load_batch", "load_array"):
        monkeypatch.setattr(cli.batch_file, name, never)
    monkeypatch.setattr(cli, "load_record", never)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.usefixtures("nothing_is_read")
def test_outputs_that_cannot_be_written_are_refused_first(capsys, folder, command, monkeypatch):
    (folder / "sub").mkdir()
    (folder / "there").write_text("x")
    assert refused(capsys, *command, "-o", "sub") == "mla-rt: cannot write sub: it is a folder\n"
    assert refused(capsys, *command, "-o", "no/such") == "mla-rt: cannot write no/such: No such folder as no\n"
    assert refused(capsys, *command, "-o", "kv.npy/x") == "mla-rt: cannot write kv.npy/x: No such folder as kv.npy\n"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root, as whom tests may run, has every permission
    assert refused(capsys, *command, "-o", "there") == "mla-rt: cannot write there: no permission\n"
    assert refused(capsys, *command, "-o", "sub/new") == "mla-rt: cannot write sub/new: no permission to make files in sub\n"


@pytest.mark.usefixtures("nothing_is_read")
def test_an_input_is_not_overwritten(capsys, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    os.link("kv.npz", "other_name")
    for command in COMMANDS:
        for name in {"batch.npz", "kv.npy", "kv.npz"} & set(command):
            assert "it is the input" in refused(capsys, *command, "-o", f"../{folder.name}/{name}")
    assert "cannot write other_name: it is the input" in refused(capsys, "dequantize", "kv.npz", "-o", "other_name")
    assert before.items() <= {path.name: path.read_bytes() for path in folder.iterdir()}.items()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this machine has no /dev/full")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_full_disk_is_named(capsys, folder, command):
    assert cli.main([*command, "-o", "/dev/full"]) == 2
    assert capsys.readouterr().err == "mla-rt: cannot write /dev/full: No space left on device\n"


def test_decode_says_whether_anything_came_of_it(capsys, folder):
    for options, end in (((), "neither written (-o) nor checked (--check)"), (("-o", "out"), ", written to out"), (("--check",), " s")):
        assert cli.main(["decode", "batch.npz", "--device", "emulator", *options]) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("done")]
        assert line.endswith(end)


@pytest.mark.parametrize("num_nan", [1, 2])
def test_rows_of_nan_are_told(capsys, folder, num_nan):
    """The kernel owes NaN where the mathematics has it; but then nothing was compared, which must not look like a good result."""
    q = bits(2, 16, 576).view(BF16)
    q[:num_nan] = np.nan
    np.savez("nan.npz", q=q.view(np.uint16), kv=bits(20, 576), kv_indptr=[0, 8, 20], sm_scale=576**-0.5)
    assert cli.main(["decode", "nan.npz", "--check", "--device", "emulator"]) == 0
    out = capsys.readouterr().out
    assert f"bf16: {16 * num_nan} of 32 rows (query token, head) hold NaN, here and in float64" in out
    assert ("kept: " in out) == (num_nan == 1) and ("nothing was compared" in out) == (num_nan == 2)


def test_the_line_that_makes_a_batch_makes_one(capsys, tmp_path, monkeypatch):
    """As the help shows it."""
    monkeypatch.chdir(tmp_path)
    [line] = [line for line in cli.BATCH.splitlines() if line.startswith("  np.savez")]
    q, kv, kv_indptr = bits(2, 4, 576).view(BF16), bits(9, 576).view(BF16), [0, 4, 9]
    exec(line.strip(), {"np": np, "q": q, "kv": kv, "kv_indptr": kv_indptr})
    assert cli.main(["decode", "batch.npz", "--device", "emulator", "-o", "out.npz"]) == 0
    capsys.readouterr()
    out, lse = decode(q, kv, kv_indptr=kv_indptr, sm_scale=576**-0.5, device="emulator")
    with np.load("out.npz") as written:
        assert np.array_equal(written["out"], out.view(np.uint16)) and np.array_equal(written["lse"], lse)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mla-rt {mla_rt.__version__}\n"


def in_a_process(stdout, *arguments, **environment):
    """(exit code, stderr) of the command with `stdout`, buffered as it is for users."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "mla_rt", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=inherited | environment, stdout=stdout, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


def test_a_pipe_that_nobody_reads_ends_the_command_quietly():
    for command, environment in ((["info"], {}), (["--help"], {}), (["info"], {"PYTHONUNBUFFERED": "1"})):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            assert in_a_process(writing, *command, **environment) == (141, "")
        finally:
            os.close(writing)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this machine has no /dev/full")
def test_a_full_disk_behind_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        assert in_a_process(full, "info") == (2, "mla-rt: cannot write to standard output: No space left on device\n")


def test_standard_output_may_be_ascii_or_closed(folder):
    arguments = ["decode", str(folder / "batch.npz"), "--device", "emulator"]
    with open(folder / "text", "w+b") as text:
        assert in_a_process(text, *arguments, PYTHONIOENCODING="ascii") == (0, "")
        assert b"2 query tokens \\xd7 16 heads" in (folder / "text").read_bytes()
    close_and_run = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'mla_rt', 'info'])"
    assert subprocess.run([sys.executable, "-c", close_and_run], cwd=ROOT).returncode == 0
