"""How many bytes a decode moves, from the counts of its launch: little more than cache, q and out, each once, whatever the number of heads."""

from __future__ import annotations

import pytest

from mla_rt import work_list
from mla_rt.device import open_device
from mla_rt.emulator import counters
from mla_rt.emulator.counters import LINE_BYTES
from mla_rt.speed import BYTES_PER_TOKEN, Shape, count_launches
from mla_rt.speed_model import speed_of_light
from performance_counts import Moved, least_bytes

FORMATS = tuple(BYTES_PER_TOKEN)
LIMIT = 1.02
PARTIAL_ROW_BYTES = 512 * 4


@pytest.fixture(scope="module")
def plain_device():
    with open_device("emulator") as device:
        yield device


def counts_of(shape, device):
    (counts,) = count_launches(shape, device, exact=True)
    return counts


def moved(shape, device):
    return Moved.of(shape, speed_of_light([counts_of(shape, device)]))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_unsplit_requests_move_what_they_must(kv_format, page_size, plain_device):
    """Pages of 16 tokens or more, in random order. Index arrays, log-sum-exps and parts of lines are the rest; workgroups share next to nothing."""
    found = moved(Shape(4, 1024, kv_format, num_splits=1, page_size=page_size), plain_device)
    assert 1 <= found.distinct <= LIMIT and found.by_workgroup <= LIMIT


@pytest.mark.parametrize(("kv_format", "least", "most"), [("bf16", 1.0, 1.01), ("fp8_e4m3fn", 1.0, 1.02), ("mxfp4", 1.0, 1.05)])
def test_what_a_gather_of_single_tokens_costs(kv_format, least, most, plain_device):
    """All tokens of the cache, in random order: four bytes of index a token, and lines that hold parts of two tokens count once as long as the L2
    cache keeps them. (What no cache keeps: the lines that each workgroup touches.)"""
    found = moved(Shape(4, 1024, kv_format, num_splits=1, page_size=1), plain_device)
    assert least <= found.distinct <= most


@pytest.mark.parametrize("kv_format", FORMATS)
def test_split_requests_move_their_partials_besides(kv_format, plain_device):
    """Each is written once and read once, in float32."""
    shape = Shape(2, 1024, kv_format, num_splits=4)
    counts = counts_of(shape, plain_device)
    partials = shape.batch * 4 * shape.num_heads * (PARTIAL_ROW_BYTES + 4)
    assert LINE_BYTES * (counts.lines_read + counts.lines_written) <= LIMIT * (least_bytes(shape) + 2 * partials)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_each_byte_is_read_once_at_128_heads(kv_format, plain_device):
    """Two row tiles of 64: each token comes to LDS twice, but once from memory, to the die on which both run."""
    shape = Shape(8, 1024, kv_format, 128, num_splits=1, page_size=64)
    found = moved(shape, plain_device)
    assert 1 <= found.by_die <= LIMIT and found.by_workgroup > 1.5


def test_the_plan_knows_the_dies():
    assert work_list.NUM_DIES == counters.NUM_DIES
