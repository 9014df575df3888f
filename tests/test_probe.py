"""`mla-rt probe`: that the emulator, and the HIP path over it, do what the documents say; and that a machine which does not is found out."""

from __future__ import annotations

import numpy as np
import pytest

from mla_rt import cli
from mla_rt.emulator import global_memory, lds, mfma, small_floats
from mla_rt.probe import FACTS, compare_bits, probe, report
from mla_rt.probe.experiment import E2M1_VALUES, E4M3_VALUES, pack, unpack
from mla_rt.probe.lds import IMMEDIATE, MARKER, WORDS


def facts(*names):
    chosen = tuple(fact for fact in FACTS if fact.name in names)
    assert len(chosen) == len(names)
    return chosen


def contradicted(device, *names):
    return {finding.fact.name: finding.shown for finding in probe(device, facts(*names)) if not finding.confirmed}


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.name)
def test_fact(device, fact):
    (finding,) = probe(device, (fact,))
    assert finding.confirmed, finding.shown
    assert finding.num_values > 0 and finding.fact.source


def test_both_devices_give_the_same_bits(emulator_device, hip_device):
    assert compare_bits(probe(emulator_device), probe(hip_device)) == "the same bits everywhere"


def test_other_bits_are_named(emulator_device):
    first, second = probe(emulator_device, facts("exp2", "log2")), probe(emulator_device, facts("exp2", "log2"))
    second[0].raw[0, 0] ^= 1
    assert compare_bits(first, second) == "other bits in exp2"


def test_command(capsys):
    assert cli.main(["probe", "--device", "emulator"]) == 0
    out = capsys.readouterr().out
    assert all(fact.name in out and fact.assumed in out for fact in FACTS)
    assert f"{len(FACTS)} of {len(FACTS)} facts confirmed by gfx950 emulator" in out and "CONTRADICTS" not in out


def test_command_on_a_gpu_compares_with_the_emulator(capsys, shim):
    with shim.one_gpu():
        assert cli.main(["probe", "--device", "hip"]) == 0
    assert "the emulator gives the same bits everywhere" in capsys.readouterr().out


@pytest.fixture
def other_machine(monkeypatch):
    """other_machine(module, name, value): the emulator with another rule; instructions are bound anew, now and afterwards."""
    from mla_rt.emulator.decoder import _decode

    def change(module, name, value):
        monkeypatch.setattr(module, name, value)
        _decode.cache_clear()

    yield change
    monkeypatch.undo()
    _decode.cache_clear()


def test_another_k_order_is_named(capsys, emulator_device, other_machine):
    other_machine(mfma, "is_split", lambda shape, bits: False)
    names = ("k_of_8bit_a", "k_of_8bit_b", "scale_lane_8bit_a", "scale_lane_8bit_b", "scale_lane_4bit_a", "mfma_e4m3_values")
    found = contradicted(emulator_device, *names)
    assert set(found) == set(names[:4])
    assert found["k_of_8bit_a"].startswith("lane group g holds k = 32g .. 32g + 31 in one run (96 of 128 values differ")
    assert "position" in found["k_of_8bit_b"] and found["scale_lane_8bit_a"].startswith("a lane's own scale counts for its own items")
    assert cli.main(["probe", "--device", "emulator"]) == 1
    out = capsys.readouterr().out
    assert "contradicted: k_of_8bit_a, k_of_8bit_b, scale_lane_8bit_a, scale_lane_8bit_b\n" in out
    assert "it does: lane group g holds" in out and "written in: CDNA4 ISA guide" in out


def test_another_scale_lane_is_found(emulator_device, other_machine):
    block_scales = mfma.block_scales
    other_machine(mfma, "block_scales", lambda shape, registers, byte: block_scales(shape, registers, byte)[:, :, [1, 0, 2, 3]])
    assert set(contradicted(emulator_device, "scale_lane_4bit_a", "scale_lane_4bit_b", "scale_bytes", "k_of_8bit_a")) == {
        "scale_lane_4bit_a",
        "scale_lane_4bit_b",
    }


def test_other_scale_bytes_are_found(emulator_device, other_machine):
    block_scales = mfma.block_scales
    other_machine(mfma, "block_scales", lambda shape, registers, byte: block_scales(shape, registers, [0, 2, 1, 3][byte]))
    assert set(contradicted(emulator_device, "scale_bytes", "scale_lane_4bit_a")) == {"scale_bytes"}


@pytest.mark.parametrize(("code", "value", "expected"), [(0, 0.0, "scale_code_0"), (200, 2.0**74, "scale_codes"), (255, 2.0**128, "scale_nan")])
def test_another_scale_code_is_found(emulator_device, other_machine, code, value, expected):
    table = small_floats.E8M0_DECODE.copy()
    table[code] = value
    other_machine(mfma, "E8M0_DECODE", table)
    found = contradicted(emulator_device, "scale_code_0", "scale_codes", "scale_nan", "scale_bytes")
    assert set(found) == {expected}
    assert code or found["scale_code_0"].startswith("code 0 is the number 0")


def test_flushed_denormals_are_found(emulator_device, other_machine):
    add_to = mfma._add_to

    def flushing(accumulator, product):
        result = add_to(accumulator, product)
        return np.where(np.abs(result) < 2.0**-126, result * np.float32(0), result)

    other_machine(mfma, "_add_to", flushing)
    assert set(contradicted(emulator_device, "mfma_denormals", "mfma_nonfinite", "mfma_e4m3_values")) == {"mfma_denormals"}


def test_lost_infinities_are_found(emulator_device, other_machine):
    add_to = mfma._add_to
    other_machine(mfma, "_add_to", lambda accumulator, product: np.nan_to_num(add_to(accumulator, product), nan=np.nan))
    assert set(contradicted(emulator_device, "mfma_denormals", "mfma_nonfinite")) == {"mfma_nonfinite"}


def test_an_immediate_on_one_side_is_named(emulator_device, other_machine):
    dma_store = lds.dma_store
    other_machine(global_memory, "dma_store", lambda group, immediate, values, mask: dma_store(group, 0, values, mask))
    found = contradicted(emulator_device, "dma_immediate", "buffer_dma_immediate", "dma_2")
    assert set(found) == {"dma_immediate"} and found["dma_immediate"].startswith("on the side of memory only")


def test_a_kept_half_is_named(emulator_device, other_machine):
    dma_store = lds.dma_store

    def keeping(group, immediate, values, mask):
        narrow = len(values) == 1
        dma_store(group, immediate, [values[0] | np.uint32(MARKER & 0xFFFF0000)] if narrow else values, mask)

    other_machine(global_memory, "dma_store", keeping)
    found = contradicted(emulator_device, "dma_immediate", "dma_2")
    assert set(found) == {"dma_2"} and found["dma_2"].startswith("the dword's high half keeps what it held")


def test_report_shows_what_the_device_does(emulator_device, other_machine):
    other_machine(mfma, "is_split", lambda shape, bits: False)
    text = report(probe(emulator_device, facts("k_of_8bit_a", "exp2"))).splitlines()
    assert text[1].startswith("k_of_8bit_a") and "CONTRADICTS" in text[1] and "it does:" in text[2] and "written in:" in text[3]
    assert text[4].startswith("exp2") and "confirms" in text[4]


def test_a_saturating_conversion_is_named(emulator_device):
    """The experiment against an answer that no device here gives."""
    (fact,) = facts("e4m3_overflow")
    experiment = fact.experiment()
    (saturating,) = experiment.alternatives.values()
    assert experiment.differs(saturating, experiment.assumed).any() and set(np.unique(saturating & 0x7F)) == {0, 0x7E, 0x7F}


@pytest.mark.parametrize("name", ["exp2", "log2", "reciprocal"])
def test_an_inexact_function_is_found(emulator_device, name):
    (fact,) = facts(name)
    experiment = fact.experiment()
    exact = experiment.assumed
    assert not experiment.differs(exact.astype(np.float32).astype(np.float64), exact).any()
    off = np.where(np.isfinite(exact), exact * (1 + 2.0**-21), exact)
    assert experiment.differs(off, exact).sum() > exact.size / 2


def test_tables_of_the_formats():
    assert E4M3_VALUES[[0x00, 0x01, 0x08, 0x38, 0x7E, 0xB8]].tolist() == [0, 2.0**-9, 2.0**-6, 1, 448, -1]
    assert np.isnan(E4M3_VALUES[[0x7F, 0xFF]]).all()
    assert E2M1_VALUES[[1, 7, 15]].tolist() == [0.5, 6, -6]


@pytest.mark.parametrize("bits", [4, 6, 8, 16])
def test_packing(bits):
    items = np.random.default_rng(bits).integers(0, 1 << bits, (3, 96 // bits))
    assert np.array_equal(unpack(pack(items, bits, 3), bits, 96 // bits), items)
    assert pack(np.array([[1, 2]]), 6, 1)[0, 0] == 0x81


def test_constants_are_those_of_the_kernels(emulator_device):
    from mla_rt.code_object import code_object_path

    with emulator_device.load(code_object_path("probe", "gfx950")) as module:
        exported = {name: value & 0xFFFFFFFF for name, value in module.constants.items()}
        assert exported == {"DMA_SHOWN_WORDS": WORDS, "DMA_MARKER": MARKER, "DMA_IMMEDIATE": IMMEDIATE}
        unused = set(module.kernels) - {fact.experiment().kernel for fact in FACTS}
        assert not unused
