"""Each part of the kernels that must not be missing is taken out once, and the checks that all decode tests use must notice.

A kernel test that cannot fail proves nothing. Here the sources are changed, compiled and run on batches built for what the part is for.
"""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path

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
WIDE_LONG = LONG.but(q_lens=(4,))


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
    checks: str = "off"


def barrier(what: str, before: str, file: str = "mla_decode.hip", cases: tuple[Case, ...] = (RAGGED,), **options) -> Mutation:
    return Mutation(f"barrier {what}", file, before + "lds_barrier();", before, cases, seeds=(0, 1), **options)


SMALL = {"kv_formats": ("fp8_e4m3fn", "mxfp4")}  # that split the query
STRICT = {"checks": "strict"}
FP8 = {"kv_formats": ("fp8_e4m3fn",)}
MXFP4 = {"kv_formats": ("mxfp4",)}
ONE_A_PAGE = LONG.but(page_size=1)
VISIBLE = "return min(kv_end, last_visible + (row_begin + row) / num_heads + 1);"
MUTATIONS = (
    barrier("before the query's maxima are read", "tile->largest[wave][row] = largest;\n            ", "scores.h", (LONG,), **SMALL),
    barrier("before the query's terms are read", "        if constexpr (SHARERS > 1) {\n            ", "scores.h", (LONG,), **SMALL),
    Mutation(
        "barrier before the query's place is used again", "mla_decode.hip", "if constexpr (!WIDE) lds_barrier();", "", (LONG,), **SMALL, seeds=(0, 1)
    ),
    Mutation("barrier before a tile is read", "mla_decode.hip", "if constexpr (WIDE) lds_barrier();", "", (WIDE_LONG,), seeds=(0, 1)),
    barrier("before the streams' ends are written", "const i32 row = lane % ROWS;\n    ", "join.h", (LONG,)),
    barrier("before the streams' ends are read", "= output.block[n];\n    ", "join.h", (LONG,)),
    barrier("before the count of arrivals is read", "if (thread == 0) *broadcast = atomic_add(arrivals, 1);\n    ", "merge.h", (SPLIT,)),
    Mutation("tail mask", "mla_decode.hip", VISIBLE, "return last_visible + (row_begin + row) / num_heads + 1;", (FULL,)),
    Mutation("tail mask of a split", "mla_decode.hip", VISIBLE, VISIBLE.replace("min(kv_end, ", "min(kv_end + 64, "), (SPLIT,)),
    Mutation("causal mask", "mla_decode.hip", "causal ? kv_len - q_len : kv_len", "causal ? kv_len : kv_len"),
    # In the other formats a rescale is wanted beyond 2^16 only, which these logits do not reach.
    Mutation("rescale of the running sum", "softmax.h", "        sum *= factor;\n", "", (LONG,), **MXFP4),
    Mutation(
        "rescale of the running output", "mla_decode.hip", "if (any_lane(factor != 1.0f)) output.rescale(factor);", "(void)factor;", (LONG,), **MXFP4
    ),
    Mutation("scale of a step's weights", "output.h", " : i) + exponent", " : i) + 0 * exponent", **FP8),
    Mutation("scale of a step's sum", "mla_decode.hip", "sum * exp2(shift) : sum", "sum : sum", (LONG,), **FP8),
    Mutation("weights of the join", "join.h", "exp2(base[w] - softmax.base)", "1.0f", (LONG,)),
    Mutation("weights of the merge", "merge.h", "exp2((other_lse[n] - base) * LOG2_E)", "1.0f", (SPLIT,)),
    Mutation("last part of the merge", "merge.h", "present[n] = other < count;", "present[n] = other < count - 1;", (SPLIT,)),
    Mutation("second level of the merge", "merge.h", "stride *= MERGED_AT_ONCE", "stride *= 1", (SPLIT.but(num_splits=6),), **STRICT),
    Mutation("wait for what is stored through", "merge.h", "wait_for_memory();  // of each wave", "// of each wave", (SPLIT,), **STRICT),
    Mutation("way of partials to memory", "gfx9.h", "DEVICE_SCOPE = 1 << 4", "DEVICE_SCOPE = 0", (SPLIT,), **STRICT),
    Mutation("acquire", "merge.h", "acquire_from_device();", "", (SPLIT,), **STRICT),
    # MXFP4 cannot be without: its scales come through registers, for which the compiler waits.
    Mutation("wait for a block", "mla_decode.hip", "    do {\n        wait_for_memory();\n", "    do {\n", (LONG,), ("bf16", "fp8_e4m3fn"), **STRICT),
    Mutation("wait for the last to arrive", "merge.h", "!= count - 1) return false;", "!= count - 2) return false;", (SPLIT,), **STRICT),
    Mutation("page lookup", "kv_block.h", "tokens.page_indices[min(first + lane, tokens.page_of(tokens.end))]", "first + lane"),
    Mutation("end of a page", "kv_block.h", " && (token & page_mask()) + count <= page_mask() + 1", "", (RAGGED.but(page_size=4),)),
    Mutation(
        "next pages", "kv_block.h", "if (tokens.page_of(token + count - 1) >= first + LANES) load", "if (token + count < 0) load", (ONE_A_PAGE,)
    ),
    Mutation("scale of V in mxfp4", "mx_scales.h", "__builtin_bit_cast(vec<u16, 2>, two) <<", "((void)two, vec<u16, 2>(127)) <<", **MXFP4),
    Mutation("scale of V in fp8", "mla_decode.hip", "reciprocal_or_zero(softmax.sum) * scale_of_kv", "reciprocal_or_zero(softmax.sum)", **FP8),
    Mutation("low term of the query", "scores.h", "TERMS = 2, ROW_BYTES", "TERMS = 1, ROW_BYTES", **SMALL),
    Mutation("low terms of the weights", "output.h", "static constexpr int TERMS = 3;", "static constexpr int TERMS = 1;", **FP8),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_missing_part_is_noticed(mutation, tmp_path, monkeypatch):
    sources = tmp_path / "hip"
    shutil.copytree(ROOT / "src" / "hip", sources)
    text = (sources / mutation.file).read_text()
    assert text.count(mutation.old) == 1, "the mutation no longer fits the source"
    (sources / mutation.file).write_text(text.replace(mutation.old, mutation.new))
    keep_only(sources / "mla_decode.hip", {kernel_of(case, kv_format) for case in mutation.cases for kv_format in mutation.kv_formats})
    build_kernels.build(sources / "mla_decode.hip", tmp_path / "mla_decode.co", "gfx950")
    monkeypatch.setattr(importlib.import_module("mla_rt.device"), "code_object_path", lambda stem, arch: tmp_path / f"{stem}.co")

    for kv_format in mutation.kv_formats:
        unnoticed = [case for case in mutation.cases if not is_noticed(case.but(kv_format=kv_format), mutation.seeds, mutation.checks)]
        assert not unnoticed, f"without the {mutation.what}, {kv_format} passes all checks"


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3fn", "mxfp4"])
def test_the_kernels_as_they_are_pass(kv_format):
    for case in (RAGGED, SPLIT, FULL, LONG, WIDE_LONG):
        assert not is_noticed(case.but(kv_format=kv_format), (0,), "off")
    assert not is_noticed(SPLIT.but(kv_format=kv_format), (None,), "strict")


def kernel_of(case: Case, kv_format: str) -> str:
    rows = max(case.q_lens or (1,)) * case.num_heads
    return f"mla_decode_{kv_format}_{'narrow' if rows <= 16 else 'wide'}"


def keep_only(source: Path, kernels: set[str]) -> None:
    """Leave the other kernels out: a compiler takes a second for each."""
    lines = source.read_text().splitlines()
    made = {line: line.split("(")[1].split(",")[0] for line in lines if line.startswith("MLA_DECODE(")}
    assert kernels <= set(made.values())
    source.write_text("\n".join(line for line in lines if made.get(line, "") in {"", *kernels}) + "\n")


def is_noticed(case: Case, seeds: tuple[int | None, ...], checks: str) -> bool:
    made = make(case)
    for seed in seeds:
        with open_device("emulator", seed=seed, checks=checks) as device:
            try:
                assert_decoded(*run(made, device), *made.exact())
            except (AssertionError, KernelFault):
                return True
    return False
