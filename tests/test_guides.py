"""The guides in docs/: the blocks of a page are pasted into one interactive session, and print what the page says; no block of any page is left out.

The pages with tests of their own: emulator.md (test_docs.py) and embedding.md (test_embed.py).
"""

from __future__ import annotations

import code
import inspect
import itertools
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mla_rt
import test_docs
import test_embed
from conftest import ROOT

GUIDES = ("index", "getting_started", "formats", "layouts", "serving", "errors", "api", "performance")
TESTED_ELSEWHERE = {"emulator": test_docs.BLOCKS, "embedding": test_embed.BLOCKS}
DIRECTIVES = {"{toctree}", "{include}", "{eval-rst}"}  # for Sphinx, nothing that a reader would run
AUTODOC = re.compile(r"\.\. auto\w+:: \S+|   :[\w-]+:.*|")
FENCED = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each, in order."""
    return FENCED.findall(PAGES[page])


def run_command(line: str, folder: Path) -> None:
    """mla-rt of this checkout; anything else has to be a step of .ci/run."""
    if line.startswith(".venv/bin/mla-rt "):
        done = subprocess.run([sys.executable, "-m", "mla_rt", *shlex.split(line)[1:]], cwd=folder, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert f"step {line}" in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("page", GUIDES)
def test_guide(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    session = code.InteractiveConsole()
    printed = None  # by the last program, if that was the last block
    for number, (language, text) in enumerate(blocks(page)):
        if language == "python":
            *_, incomplete = [session.push(line) for line in [*text.splitlines(), ""]]
            printed, errors = capsys.readouterr()
            assert not (errors or incomplete), f"block {number} of {page}.md: {errors or 'incomplete'}"
        elif language == "text":
            assert printed == text, f"block {number} of {page}.md"
            printed = None
        elif language == "sh":
            for line in text.splitlines():
                run_command(line, tmp_path)
        else:
            assert language in DIRECTIVES, f"block {number} of {page}.md is of {language or 'no language'}"


def test_no_block_is_left_out():
    for page, text in PAGES.items():
        outside = re.sub(FENCED, "", text)
        assert not re.search(r"```|~~~|<pre|^(?: {4}|\t)", outside, re.MULTILINE), f"{page}.md has a block that is not understood"
        for (before, _), (language, text) in itertools.pairwise([("", ""), *blocks(page)]):
            assert language != "text" or before == "python", f"{page}.md shows text that no program before it prints: {text}"
            assert language != "{eval-rst}" or all(map(AUTODOC.fullmatch, text.splitlines())), f"{page}.md hides something in {text}"
        if page not in GUIDES:
            assert blocks(page) == TESTED_ELSEWHERE.get(page, []), f"no test runs all blocks of {page}.md"


def test_the_reference_has_every_public_name():
    entries = re.findall(r"^\.\. auto(?:function|class|exception):: mla_rt\.([\w.]+)", PAGES["api"], re.MULTILINE)
    assert set(mla_rt.__all__) - {"__version__", "reference"} <= set(entries)
    assert "reference.mla_decode" in entries and "mla_rt.__version__" in PAGES["api"]


def test_the_reference_leaves_out_no_method():
    """As autodoc would, without a word, where there is no docstring; attributes may be in that of their class."""
    names = re.findall(r"^\.\. autoclass:: ([\w.]+)", PAGES["api"], re.MULTILINE)
    assert names
    for name in names:
        documented = pkgutil.resolve_name(name)
        for member, value in inspect.getmembers(documented):
            if member.startswith("_") or member == "handle":  # what a backend keeps there
                continue
            of_class = not callable(value) and re.search(rf"\b{member}(?:[:,]|  )", documented.__doc__)
            assert inspect.getdoc(value) or of_class, f"{name}.{member} has no docstring"


def test_every_page_is_in_the_table_of_contents():
    (toctree,) = [text for language, text in blocks("index") if language == "{toctree}"]
    assert set(toctree.split()) - {":hidden:"} == set(PAGES) - {"index"}
