"""Schedules: random interleavings of waves and workgroups, barriers and limits; the product kernels under all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from asm import assemble, descriptor

from decode_cases import FORMATS, Case, make
from decode_cases import run as decode
from faulty import run, run_source
from mla_rt.device import open_device
from mla_rt.emulator.completion import TIMINGS
from mla_rt.emulator.machine import Dispatch
from mla_rt.emulator.machine import run as run_dispatch
from mla_rt.emulator.memory import Memory
from mla_rt.errors import KernelFault
from tolerance import assert_same_bits

SEEDS = range(20)
ZEROS = np.zeros(64, np.uint32)


# ---- kernels whose result depends on the order


def test_missing_barrier_shows_in_the_result():
    """Whoever comes first decides; with the barrier nobody does."""
    results = {int(run("order_matters", True, ZEROS, items=128, seed=seed, checks="off")[0]) for seed in SEEDS}
    assert len(results) > 1
    assert {int(run("order_matters", False, ZEROS, items=128, seed=seed)[0]) for seed in SEEDS} == {7}


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_missing_barrier_is_a_race(seed):
    """The checks need no luck: they find it in every order, as a race or, if the read came first, as a value that was never written."""
    with pytest.raises(KernelFault, match=r"LDS|undefined"):
        run("order_matters", True, ZEROS, items=128, seed=seed)


def test_order_of_workgroups_shows_in_the_result():
    results = {int(run("workgroup_order_matters", True, ZEROS, workgroups=8, seed=seed, checks="off")[0]) for seed in SEEDS}
    assert len(results) > 3
    for seed in SEEDS:
        assert np.array_equal(run("workgroup_order_matters", False, ZEROS, workgroups=8, seed=seed)[:8], np.arange(8))


def test_waves_interleave_within_a_phase():
    """Two waves each add their bit to a word ten times without an atomic: the sums that are lost differ from seed to seed, as they could not if
    waves ran one after another."""
    source = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_readfirstlane_b32 s6, v0
v_mov_b32 v1, 0
s_lshr_b32 s6, s6, 6
s_mov_b32 s7, 0
s_lshl_b32 s6, 1, s6
s_mov_b64 exec, 1
s_waitcnt lgkmcnt(0)
again:
global_load_dword v2, v1, s[4:5]
s_waitcnt vmcnt(0)
v_add_u32 v2, s6, v2
global_store_dword v1, v2, s[4:5]
s_add_u32 s7, s7, 1
s_cmp_lt_u32 s7, 10
s_cbranch_scc1 again
s_endpgm
"""
    results = {int(run_source(source, ZEROS, items=128, seed=seed, checks="off")[0]) for seed in range(40)}
    assert 30 in results  # one after the other
    assert len(results) > 3
    assert results <= set(range(10, 31))


def test_same_seed_same_order():
    for seed in range(5):
        first, second = (run("workgroup_order_matters", True, ZEROS, workgroups=8, seed=seed, checks="off")[0] for _ in range(2))
        assert first == second


# ---- barriers, loops, scratch


BARRIERS = {
    "wave_ends_before_barrier": r"wave 1 ended without reaching the barrier at which this wave waits \(pc 0xc, workgroup \(\d, 0, 0\), wave 0\)$",
    "different_barriers": r"wave 1 waits at another barrier, at pc 0x14, than this wave \(pc 0xc, workgroup \(\d, 0, 0\), wave 0\)$",
}


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", BARRIERS)
def test_barriers(name, seed):
    with pytest.raises(KernelFault, match=f"^test_kernel: {BARRIERS[name]}"):
        run(name, True, ZEROS, items=128, workgroups=2, seed=seed)
    run(name, False, ZEROS, items=128, workgroups=2, seed=seed)
    run(name, True, ZEROS, items=128, workgroups=2, seed=seed, checks="off")  # hardware goes on


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("seed", [None, 0])
def test_endless_loop(seed, timing):
    with pytest.raises(KernelFault, match=r"^test_kernel: more than 1000 instructions without an end \(pc 0x\w+, workgroup \(0, 0, 0\), wave 0\)$"):
        run("endless_loop", True, ZEROS, seed=seed, timing=timing, max_group_instructions=1000)
    run("endless_loop", False, ZEROS, seed=seed, timing=timing, max_group_instructions=1000)


def test_scratch():
    """The compiler says in the descriptor that a kernel spills: it is not started, with or without checks."""
    memory = Memory()
    code = assemble("s_endpgm")
    image = memory.allocate(len(code))
    memory.bytes_at(image, len(code))[:] = np.frombuffer(code, np.uint8)
    for checks in ("off", "strict"):
        spilling = Dispatch("spills", image, image, replace(descriptor(), scratch_bytes=16), (1, 1, 1), (64, 1, 1), image)
        with pytest.raises(KernelFault, match=r"^spills: the kernel uses 16 bytes of scratch memory a work-item"):
            run_dispatch(spilling, memory, checks=checks)
        run_dispatch(replace(spilling, descriptor=descriptor()), memory, checks=checks)
    memory.close()


# ---- the product kernels


@pytest.mark.parametrize("kv_format", FORMATS)
def test_product_kernels_are_strictly_right_in_every_order(kv_format):
    """Decode and combine, all completion models, 20 random schedules: no fault, and the same bits. Three tiles a workgroup reach all of the loop."""
    made = make(Case((330,), kv_format=kv_format, page_size=16, num_splits=2))
    with open_device("emulator", checks="strict") as device:
        expected = decode(made, device)
        for timing in TIMINGS:
            device.timing = timing
            assert_same_bits(decode(made, device), expected)
        for seed in SEEDS:
            device.seed, device.timing = seed, TIMINGS[seed % len(TIMINGS)]
            assert_same_bits(decode(made, device), expected)
