"""Every example's command is run. (embed.c: test_embed.py)

Serving also runs on the stand-in HIP runtime, where whatever is not ordered reads old data.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT

EXAMPLES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))}
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "JAX_PLATFORMS": "cpu"}


def command_of(name):
    """The line of its docstring that says how it is run, without `python` and what is to be installed before."""
    (line,) = re.findall(rf"^(?:pip install \S+ && )?python (examples/{name}.*)$", EXAMPLES[name], re.MULTILINE)
    return shlex.split(line)


def run(*arguments):
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_shim(*arguments):
    return run("tests/run_on_shim.py", *arguments)


def test_every_example_is_here():
    tested = {"numpy_decode.py", "serving.py", "jax_decode.py", "cupy_decode.py", "embed.c", "mla_decode.h"}
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} == tested


def test_numpy_decode():
    printed = run(*command_of("numpy_decode.py"))
    assert re.search(r"^on gfx950 emulator: .*\n(\w+ +\d+ bytes of cache, RMS error 0.00\d\d .*\n){3}two shards merged", printed)


@pytest.mark.parametrize("runner", [run, on_shim], ids=["emulator", "hip"])
def test_serving(runner):
    steps = re.findall(
        r"^step (\d+): \[([ \d]+)\] tokens, (\d+) pages free, differs from decode by at most 0.0000$", runner(*command_of("serving.py")), re.M
    )
    assert [int(step) for step, _, _ in steps] == list(range(10))
    lengths = [[int(length) for length in step.split()] for _, step, _ in steps]
    assert any(before and now < before for a, b in itertools.pairwise(lengths) for before, now in zip(a, b, strict=True))  # one left
    assert max(max(step) for step in lengths) > 8  # over pages of 4
    assert [int(free) for _, _, free in steps] == [12 - sum(-(-length // 4) for length in step) for step in lengths]  # no page is lost


def test_jax_decode():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed: make examples")
    assert run(*command_of("jax_decode.py")).startswith("bfloat16[2, 16, 512] on gfx950 emulator and cpu, differs from JAX by at most 0.00")


def test_cupy_decode_on_a_stand_in():
    printed = on_shim(*command_of("cupy_decode.py"))
    assert printed == "bfloat16[2, 16, 512] on shim over the emulator, differs from decode by at most 0.0000\n"


def test_cupy_decode():
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed: pip install cupy-rocm-7-0, on a machine with a gfx950 GPU and ROCm 7")
    assert "differs from decode by at most 0.0000" in run(*command_of("cupy_decode.py"))
