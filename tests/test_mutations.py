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


def barrier(what: str, before: str) -> Mutation:
    return Mutation(f"barrier {what}", "mla_decode.hip", before + "lds_barrier();", before, seeds=(0, 1))


VISIBLE = "causal ? min(kv_end, kv_len - q_len + request_row / num_heads + 1) : kv_end"
LOW_TERM = "sum = mfma_scaled<{}, E4M3>(k, low[step], sum, {}, LOW_TERM_SCALE);"
MUTATIONS = (
    barrier("before a tile is read", "wait_for_memory();\n        "),
    barrier("before the maxima are read", "logit_max[wave][row] = logit_max;\n        "),
    barrier("before the weights are read", "store_weights(&lds->weights, weight, row, first_token);\n        "),
    barrier("before the sums are read", "weight_sum[wave][row] = wave_sum;\n    "),
    Mutation("tail mask", "mla_decode.hip", VISIBLE, "causal ? kv_len - q_len + request_row / num_heads + 1 : kv_end + TOKENS", (FULL,)),
    Mutation("tail mask of a split", "mla_decode.hip", VISIBLE, VISIBLE.replace("min(kv_end, ", "min(kv_end + TOKENS, "), (SPLIT,)),
    Mutation("causal mask", "mla_decode.hip", VISIBLE, "causal ? min(kv_end, kv_len + request_row) : kv_end"),
    Mutation("rescale of the running sum", "softmax.h", "        sum *= factor;\n", ""),
    Mutation("rescale of the running output", "mla_decode.hip", "output.rescale(softmax.rescale_for(logit_max));", "softmax.rescale_for(logit_max);"),
    Mutation("weights of the split merge", "mla_combine.hip", "exp2((partial_lse[partial_row] - base) * LOG2_E)", "1.0f", (SPLIT,)),
    Mutation("last part of the split merge", "mla_combine.hip", "split < num_splits; split++) {", "split < num_splits - 1; split++) {", (SPLIT,)),
    Mutation("page lookup", "kv_tile.h", "page_indices[token >> page_size_log2]", "token >> page_size_log2"),
    Mutation(
        "scale of V in mxfp4",
        "kv_tile.h",
        "e8m0_as_exponent(tile->scale_pairs[KvTile<Mxfp4>::scale_offset(token, block)])",
        "1.0f",
        kv_formats=("mxfp4",),
    ),
    Mutation("scale of V in fp8", "mla_decode.hip", "reciprocal_or_zero(sum) * kv_scale", "reciprocal_or_zero(sum)", kv_formats=("fp8_e4m3fn",)),
    Mutation("low term of the query, fp8", "scores.h", LOW_TERM.format("E4M3", "E8M0_ONE"), "", kv_formats=("fp8_e4m3fn",)),
    Mutation("low term of the query, mxfp4", "scores.h", LOW_TERM.format("E2M1", "scale"), "", kv_formats=("mxfp4",)),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_missing_part_is_noticed(mutation, tmp_path, monkeypatch):
    sources = tmp_path / "hip"
    shutil.copytree(ROOT / "src" / "hip", sources)
    text = (sources / mutation.file).read_text()
    assert text.count(mutation.old) == 1, "the mutation no longer fits the source"
    (sources / mutation.file).write_text(text.replace(mutation.old, mutation.new))
    for stem in ("mla_decode", "mla_combine"):
        build_kernels.build(sources / f"{stem}.hip", tmp_path / f"{stem}.co", "gfx950")
    # By module name: the package's attribute `decode` is the function.
    monkeypatch.setattr(importlib.import_module("mla_rt.decode"), "code_object_path", lambda stem, arch: tmp_path / f"{stem}.co")

    for kv_format in mutation.kv_formats:
        unnoticed = [case for case in mutation.cases if not is_noticed(case.but(kv_format=kv_format), mutation.seeds)]
        assert not unnoticed, f"without the {mutation.what}, {kv_format} passes all checks"


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3fn", "mxfp4"])
def test_the_kernels_as_they_are_pass(kv_format):
    for case in (RAGGED, SPLIT, FULL):
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
