"""docs/performance.md is of these kernels: it names their code object, and what it says of a few shapes is what counting them now says.

AITER's side of it is compared in peers/test_peer_speed.py, where AITER's kernels are at hand.
"""

from __future__ import annotations

import re

import pytest

import count_cache
import performance_counts
import write_performance
from build_kernels import find_hipcc
from mla_rt.speed import Shape

PAGE = write_performance.PAGE.read_text(encoding="utf-8")
CHEAP = [(4, 1024), (256, 1024)]


@pytest.fixture(autouse=True)
def of_the_same_compiler():
    if find_hipcc():
        pytest.skip("docs/performance.md is of the kernels as the clang of ziglang compiles them; these are hipcc's")


@pytest.fixture
def counted_now(tmp_path, monkeypatch):
    """Nothing that was counted before is taken again."""
    monkeypatch.setattr(count_cache, "FOLDER", tmp_path)
    performance_counts.ours.cache_clear()


def line_of(cells):
    return f"| {' | '.join(cells)} |"


def test_the_page_is_of_these_kernels():
    (named,) = re.findall(r"`mla_decode.co`, sha256\n`(\w+)…`", PAGE)
    assert named == performance_counts.kernels_hash(), "the kernels have changed: run `make performance`"


@pytest.mark.parametrize("kv_format", performance_counts.FORMATS)
def test_cheap_rows_are_what_counting_says(kv_format, counted_now):
    for batch, kv_len in CHEAP:
        assert line_of(write_performance.parts(Shape(batch, kv_len, kv_format))) in PAGE.splitlines(), "run `make performance`"


def test_the_rows_of_mxfp4_and_bytes_too(counted_now):
    lines = PAGE.splitlines()
    assert all(line_of(write_performance.mxfp4_row(shape)) in lines for shape in CHEAP)
    assert line_of(write_performance.bytes_row("mxfp4", 16, 16)) in lines


def test_everything_is_labelled_modelled():
    """No table of times without the word beside it, and what is asked of the kernels is answered one by one."""
    assert "**Nothing was measured on a card.**" in PAGE
    headings = [line for line in PAGE.splitlines() if "µs" in line and not line.startswith(("|", "-"))]
    assert [line for line in headings if line.endswith(":")] and all("modelled" in line for line in headings if line.endswith(":"))
    met = re.findall(r"^\| .* \| (yes|\*\*no\*\*) \|$", PAGE, re.MULTILINE)
    assert len(met) == 16
