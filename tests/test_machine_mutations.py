"""A few mutants of scripts/mutate_kernels.py: the machinery works, and barriers and operand formats cannot be wrong unnoticed."""

from __future__ import annotations

import itertools

import pytest

from mla_rt.code_object import CodeObject, code_object_path
from mla_rt.device import open_device
from mutate_kernels import KINDS, batches, choose, judge, mutants, noticed, sites

BARRIERS = [mutant for mutant in mutants() if mutant.kind == "barrier" and mutant.site.kernel == "mla_decode_fp8_e4m3fn_narrow"]
FORMATS = choose([mutant for mutant in mutants() if mutant.kind == "format"], 2, seed=1)


@pytest.mark.parametrize("mutant", BARRIERS + FORMATS, ids=str)
def test_mutant_is_noticed(mutant):
    assert noticed(mutant)


def test_kernels_as_they_are_pass_all_that_judges_mutants():
    from decode_cases import run

    for batch in batches("mla_decode_fp8_e4m3fn_narrow")[1::3]:
        with open_device("emulator", timing="latest", checks="strict") as device:
            judge(run(batch, device), batch.exact())


def test_every_kind_has_mutants_that_change_only_their_instruction():
    everything = mutants()
    assert {mutant.kind for mutant in everything} == set(KINDS)
    image = code_object_path("mla_decode", "gfx950").read_bytes()
    for mutant in choose(everything, 33, seed=2):
        changed = mutant.image()
        end = mutant.site.offset + len(mutant.code)
        assert len(changed) == len(image) and changed != image
        assert changed[: mutant.site.offset] == image[: mutant.site.offset] and changed[end:] == image[end:]


def test_all_instructions_of_all_kernels_are_sites():
    found = list(sites())
    assert {site.kernel for site in found} == set(CodeObject.load(code_object_path("mla_decode", "gfx950")).kernels)
    for before, after in itertools.pairwise(found):
        assert before.kernel != after.kernel or after.pc == before.pc + before.instruction.encoded.size
