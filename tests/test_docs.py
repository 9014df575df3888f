"""docs/emulator.md: its kernel is compiled, its commands and programs are run, and what it says that they print is what they print."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

PAGE = (ROOT / "docs" / "emulator.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = [(text, BLOCKS[i + 1][1]) for i, (language, text) in enumerate(BLOCKS) if language == "python"]
COMMANDS = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]


def run(arguments, folder):
    done = subprocess.run([sys.executable, *arguments], cwd=folder, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the kernel of the page, compiled as the page says."""
    folder = tmp_path_factory.mktemp("docs")
    (kernel,) = [text for language, text in BLOCKS if language == "cpp"]
    (folder / "reverse.hip").write_text(kernel)
    (arguments,) = [text for language, text in BLOCKS if language == "json"]
    (folder / "args.json").write_text(arguments)
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (build,) = [line for line in COMMANDS if line.startswith(".venv/bin/python ")]
    run(shlex.split(build)[1:], folder)
    return folder


def test_blocks_are_of_known_kinds():
    assert {language for language, _ in BLOCKS} == {"sh", "cpp", "python", "text", "json"}
    assert len(PROGRAMS) == 2 and all(BLOCKS[i + 1][0] == "text" for i, (language, _) in enumerate(BLOCKS) if language == "python")


@pytest.mark.parametrize("program", range(len(PROGRAMS)))
def test_program_prints_what_the_page_says(folder, program):
    text, printed = PROGRAMS[program]
    assert run(["-c", text], folder) == printed


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith(".venv/bin/mla-rt ")])
def test_command(folder, line):
    run(["-m", "mla_rt", *shlex.split(line)[1:]], folder)


def test_every_command_is_run():
    assert all(line.startswith((".venv/bin/mla-rt ", ".venv/bin/python scripts/build_kernels.py ")) for line in COMMANDS)


def test_files_that_are_named_exist():
    package, tests = ROOT / "mla_rt" / "emulator", ROOT / "tests"
    names = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert names
    assert not [name for name in names if not ((package / name).is_file() or (ROOT / name).is_file())]
    assert (tests / "faulty").is_dir()
