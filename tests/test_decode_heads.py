"""Every number of heads and of query tokens in every format, batches in another order, and the same launch a hundred times."""

from __future__ import annotations

import numpy as np
import pytest

from decode_cases import FORMATS, Case, make, permuted, run
from mla_rt.batch import make_batch
from mla_rt.decode import decode, prepared_decode
from mla_rt.device import open_device
from tolerance import assert_decoded, assert_same_bits

HEADS = (1, 3, 8, 12, 16, 24, 32, 48, 64, 96, 128)
Q_LENS = (1, 2, 3, 4, 5, 6, 7, 8)
PERMUTED = (3, 24, 128)  # heads: of a tile that is not full, of one and a half, and many
LAUNCHES, COPIES = 4, 25


@pytest.fixture(scope="module")
def plain_device():
    """Without the strict checks, which test_decode.py has over most of this: ten times as fast."""
    with open_device("emulator") as device:
        yield device


def mixed(kv_format, num_heads):
    """Requests of 1 to 8 query tokens, or, of most numbers of heads, of those whose turn it is: over the formats all.

    Some have fewer tokens than queries, some more than a tile, and every other batch is split.
    """
    turn = HEADS.index(num_heads) + FORMATS.index(kv_format)
    q_lens = Q_LENS if num_heads in (1, 12, 16) else Q_LENS[turn % 3 :: 3]
    kv_lens = (9, 140, 3, 65, 5, 33, 18, 8)[: len(q_lens)]
    return Case(kv_lens, q_lens, kv_format=kv_format, num_heads=num_heads, page_size=16, num_splits=1 + turn % 2, seed=num_heads)


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_heads_and_query_tokens(kv_format, num_heads, plain_device):
    """Right, and in another order of the requests the same bits."""
    made = make(mixed(kv_format, num_heads))
    out, lse = run(made, plain_device)
    assert_decoded(out, lse, *made.exact())
    if num_heads in PERMUTED:
        order = np.random.default_rng(num_heads).permutation(len(made.case.kv_lens))
        arguments, tokens = permuted(made, order)
        assert_same_bits(decode(**arguments, device=plain_device), (out[tokens], lse[tokens]))


def test_the_cases_cover_what_they_claim():
    cases = [mixed(kv_format, num_heads) for kv_format in FORMATS for num_heads in HEADS]
    assert {(case.num_heads, q_len) for case in cases for q_len in case.q_lens} == {(heads, q_len) for heads in HEADS for q_len in Q_LENS}
    many = [case for case in cases if case.num_heads > 16]
    assert {(case.kv_format, q_len) for case in many for q_len in case.q_lens} == {(f, q_len) for f in FORMATS for q_len in Q_LENS}
    assert {(case.kv_format, case.num_splits) for case in many} == {(f, splits) for f in FORMATS for splits in (1, 2)}


@pytest.mark.parametrize(("num_splits", "kv_format"), [(1, "mxfp4"), (2, "fp8_e4m3fn"), (8, "bf16"), (16, "bf16"), (32, "bf16")])
def test_a_hundred_decodes_give_the_same_bits(num_splits, kv_format, plain_device):
    """Of one request: copies side by side in a launch, and the launch again and again. A counter that a launch leaves wrong, a partial of the launch
    before, or what depends on the place among the workgroups would show. (test_decode.py has the order in which waves run.)"""
    made = make(Case((70,), kv_format=kv_format, num_splits=num_splits))
    one = dict(made.arguments)
    copies = {name: np.tile(one[name], (COPIES, *[1] * (one[name].ndim - 1))) for name in ("q", "kv_indices", "kv_last_page_len")}
    indptrs = {"qo_indptr": np.arange(COPIES + 1), "kv_indptr": np.arange(COPIES + 1) * 70}
    exact_out, exact_lse = made.exact()
    with prepared_decode(make_batch(**{**one, **copies, **indptrs}), plain_device) as prepared:
        expected = None
        for _ in range(LAUNCHES):
            for result in (prepared._out, prepared._lse):  # what the launch before found would pass for what this one finds
                result.fill(0xFF)
            prepared.launch()
            out, lse = prepared.results()
            expected = expected or (out[:1], lse[:1])
            assert_same_bits((out, lse), tuple(np.repeat(array, COPIES, axis=0) for array in expected))
    assert_decoded(*expected, exact_out, exact_lse)
