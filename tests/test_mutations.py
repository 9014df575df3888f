"""Each part of the kernels that must not be missing is taken out once, and the checks that all decode tests use must notice.

A kernel test that cannot fail proves nothing. Here the sources are changed, compiled and run on batches built for what the part is for.
"""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass

import pytest

import build_kernels
from conftest import ROOT
from decode_cases import Case, make, run
from mla_rt import KernelFault, open_device
from tolerance import assert_decoded

# In one piece: left to itself the plan would cut these few tokens into single tiles, and nothing would run from tile to tile.
RAGGED = Case(kv_lens=(5, 0, 200, 77), q_lens=(1, 1, 2, 4), page_size=16, num_splits=1)
SPLIT = RAGGED.but(num_splits=3)
FULL = RAGGED.but(causal=False)
LONG = RAGGED.but(kv_lens=(600,), q_lens=(1,))  # more tiles than there are buffers, in every format
UNEVEN = RAGGED.but(kv_lens=(193, 385), q_lens=(1, 1), num_splits=3)  # the last part is one tile longer than the others


@dataclass(frozen=True)
class Mutation:
    """`old` stands once in src/hip/`file`; with `new` in its place, one of `cases` must fail, on waves in lockstep or (`seeds`) in other orders."""

    what: str
    file: str
    old: str
    new: str
    cases: tuple[Case, ...] = (RAGGED,)
    kv_formats: tuple[str, ...] = ("bf16", "fp8_e4m3fn", "mxfp4")
    seeds: tuple[int | None, ...] = (None,)


def barrier(what: str, before: str, file: str = "mla_decode.hip", cases: tuple[Case, ...] = (RAGGED,), **options) -> Mutation:
    return Mutation(f"barrier {what}", file, before + "lds_barrier();", before, cases, seeds=(0, 1), **options)


NARROW = {"kv_formats": ("fp8_e4m3fn", "mxfp4")}  # that split the query
FP8 = {"kv_formats": ("fp8_e4m3fn",)}
VISIBLE = "causal ? min(kv_end, kv_len - q_len + request_row / num_heads + 1) : kv_end"
MUTATIONS = (
    barrier("before the query's maxima are read", "tile->largest[wave][row] = largest;\n        ", "scores.h", **NARROW),
    barrier("before the query's terms are read", "codes[t];\n        }\n        ", "scores.h", **NARROW),
    barrier("before a tile is read", "wait_for_memory();\n        ", cases=(LONG,)),
    barrier("before the maxima are read", "logit_max[wave][row] = logit_max;\n        "),
    barrier("before the weights are read", "sum * exp2(shift) : sum;\n        "),
    barrier("before the sums are read", "weight_sum[wave][row] = wave_sum;\n    "),
    barrier("before the count of arrivals is read", "*broadcast = atomic_add(arrivals, 1);\n    }\n    ", "merge.h", (SPLIT,)),
    Mutation("tail mask", "mla_decode.hip", VISIBLE, "causal ? kv_len - q_len + request_row / num_heads + 1 : kv_end + TOKENS", (FULL,)),
    Mutation("tail mask of a split", "mla_decode.hip", VISIBLE, VISIBLE.replace("min(kv_end, ", "min(kv_end + TOKENS, "), (SPLIT,)),
    Mutation("causal mask", "mla_decode.hip", VISIBLE, "causal ? min(kv_end, kv_len + request_row) : kv_end"),
    Mutation("rescale of the running sum", "softmax.h", "        sum *= factor;\n", ""),
    Mutation("rescale of the running output", "mla_decode.hip", "if (any_lane(factor != 1.0f)) output.rescale(factor);", "(void)factor;"),
    Mutation("scale of a tile's weights", "output.h", "e4m3_term_scale(t) + exponent", "e4m3_term_scale(t) + 0 * exponent", **FP8),
    Mutation("scale of a tile's sum", "mla_decode.hip", "sum * exp2(shift) : sum", "sum : sum", **FP8),
    Mutation("weights of the merge", "merge.h", "exp2((lse_of_split(first + lane) - base) * LOG2_E)", "1.0f", (SPLIT,)),
    Mutation("last part of the merge", "merge.h", "split < min(first + LANES, num_splits)", "split < min(first + LANES, num_splits - 1)", (SPLIT,)),
    Mutation("wait for the last to arrive", "merge.h", "!= count - 1) return false;", "!= count - 2) return false;", (UNEVEN,)),
    Mutation("page lookup", "kv_tile.h", "page_indices[owned >> page_size_log2]", "owned >> page_size_log2"),
    Mutation("end of a page", "kv_tile.h", " && (token & page_mask()) + count <= page_mask() + 1", "", (RAGGED.but(page_size=4),)),
    Mutation(
        "scale of V in mxfp4",
        "output.h",
        "*(const LDS u32*)(tile->scale_pairs + KvTile<Mxfp4>::scale_offset(token, 2 * n, first_block))",
        "((void)tile, 0x7f7f)",
        kv_formats=("mxfp4",),
    ),
    Mutation("scale of V in fp8", "mla_decode.hip", "reciprocal_or_zero(sum) * kv_scale", "reciprocal_or_zero(sum)", **FP8),
    Mutation("low term of the query", "scores.h", "TERMS = 2, ROW_BYTES", "TERMS = 1, ROW_BYTES", **NARROW),
    Mutation("low terms of the weights", "output.h", "WeightTile<3, ", "WeightTile<1, ", **FP8),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_missing_part_is_noticed(mutation, tmp_path, monkeypatch):
    sources = tmp_path / "hip"
    shutil.copytree(ROOT / "src" / "hip", sources)
    text = (sources / mutation.file).read_text()
    assert text.count(mutation.old) == 1, "the mutation no longer fits the source"
    (sources / mutation.file).write_text(text.replace(mutation.old, mutation.new))
    build_kernels.build(sources / "mla_decode.hip", tmp_path / "mla_decode.co", "gfx950")
    monkeypatch.setattr(importlib.import_module("mla_rt.device"), "code_object_path", lambda stem, arch: tmp_path / f"{stem}.co")

    for kv_format in mutation.kv_formats:
        unnoticed = [case for case in mutation.cases if not is_noticed(case.but(kv_format=kv_format), mutation.seeds)]
        assert not unnoticed, f"without the {mutation.what}, {kv_format} passes all checks"


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3fn", "mxfp4"])
def test_the_kernels_as_they_are_pass(kv_format):
    for case in (RAGGED, SPLIT, FULL, LONG, UNEVEN):
        assert not is_noticed(case.but(kv_format=kv_format), (None, 0, 1))


def is_noticed(case: Case, seeds: tuple[int | None, ...]) -> bool:
    made = make(case)
    for seed in seeds:
        with open_device("emulator", seed=seed) as device:
            try:
                assert_decoded(*run(made, device), *made.exact())
            except (AssertionError, KernelFault):
                return True
    return False
