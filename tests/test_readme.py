"""What the README shows works as it is shown."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from mla_rt.batch_file import made_batch

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
SHELL_LINES = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
COMMANDS = [line for line in SHELL_LINES if line.startswith(".venv/bin/mla-rt ")]


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("example", [text for language, text in BLOCKS if language == "python"], ids=["decode", "serving"])
def test_python_example(example, tmp_path):
    printed = run(["-c", example], tmp_path)
    promised = re.search(r"print\(.*# (.*)", example)
    assert promised and printed.strip() == promised[1]


def test_every_shell_line_is_run_somewhere():
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert COMMANDS
    assert [line for line in SHELL_LINES if line not in COMMANDS and f"step {line}" not in ci] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    batch = made_batch()
    bits = {name: batch[name].view(np.uint16) for name in ("q", "kv")}
    np.savez(folder / "batch.npz", **{**batch, **bits})
    np.save(folder / "kv.npy", np.random.default_rng(0).standard_normal((10, 576), np.float32))
    return folder


@pytest.mark.parametrize("line", COMMANDS)
def test_shell_command(line, folder):
    """After those before it that write what it reads: they may have been run in another process."""
    words = shlex.split(line)
    for earlier in map(shlex.split, COMMANDS[: COMMANDS.index(line)]):
        if "-o" in earlier and earlier[earlier.index("-o") + 1] in words:
            run(["-m", "mla_rt", *earlier[1:]], folder)
    run(["-m", "mla_rt", *words[1:]], folder)
