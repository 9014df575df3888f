"""Changes the machine code of the kernels, one small mistake at a time, and sees whether anything notices: mutate_kernels.py [--count N]

Each mutant is a copy of mla_decode.co with one instruction changed: a wait weakened, a barrier gone, an offset, a shift, a
compare, a constant, a scale byte, a format, a lane exchange or a lane mask wrong. It decodes batches of tests/decode_cases.py on the emulator
with strict checks, late loads and random schedules, and is compared with float64. What nothing notices changes nothing that can be observed, or
is a hole in the checks or in the tests. Instructions that the batches never reach are counted, not changed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


from decode_cases import Case, make, run  # type: ignore[import-not-found] # noqa: E402
from mla_rt import emulator_device, open_device  # noqa: E402
from mla_rt.code_object import CodeObject, code_object_path  # noqa: E402
from mla_rt.emulator import encodings  # noqa: E402
from mla_rt.emulator.decoder import TABLES, Block, decode  # noqa: E402
from mla_rt.emulator.descriptor import Descriptor  # noqa: E402
from mla_rt.emulator.instruction import Instruction  # noqa: E402
from mla_rt.emulator.machine import run as run_launch  # noqa: E402
from mla_rt.emulator.observer import Observer  # noqa: E402
from mla_rt.emulator.state import Group  # noqa: E402
from mla_rt.errors import KernelFault  # noqa: E402
from tolerance import assert_decoded  # type: ignore[import-not-found] # noqa: E402

ARCH = "gfx950"
COLUMNS_AT_ONCE = 16
Results = tuple[np.ndarray, np.ndarray]
STEM = "mla_decode"
INSTRUCTION_LIMIT = 100_000  # of one launch's group of waves: ten times what the cases need
LAYOUTS = {layout.name: layout for layout in vars(encodings).values() if isinstance(layout, encodings.Format)}
OPCODES = {name: {row.mnemonic: opcode for opcode, row in table.items()} for name, table in TABLES.items()}

RAGGED = Case(kv_lens=(5, 0, 200, 77), q_lens=(1, 1, 2, 4), num_heads=4, page_size=16, num_splits=1)
# Pages of one token, requests of fewer rows than a tile, no causal mask, splits that end within a tile.
SPLIT = Case(kv_lens=(131, 70, 3), q_lens=(1, 3, 1), num_heads=5, page_size=1, num_splits=3, causal=False, seed=1)
EXTREME = Case(kv_lens=(150, 64), q_lens=(1, 1), num_heads=16, page_size=4, num_splits=2, values="bytes", seed=2)
# Merges of more splits than a row of lanes, and than a wave, has lanes.
MERGE = Case(kv_lens=(150, 40), num_heads=3, num_splits=70, seed=3)
# Of kernels for up to 16 rows a request, and for more.
CASES = {
    "narrow": (RAGGED, SPLIT, EXTREME, MERGE),
    "wide": (RAGGED.but(num_heads=16), SPLIT.but(num_heads=24), EXTREME.but(num_heads=20), MERGE.but(num_heads=40)),
}
# One batch again with logits so much larger that every bit of a query's low term counts.
SHARPER = 8.0
# timing, checks, seed
RUNS: tuple[tuple[Any, Any, int | None], ...] = (
    ("earliest", "off", None), ("latest", "strict", None), ("latest", "off", 0), ("earliest", "off", 1),
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """An instruction of a kernel: where its bytes stand in the code object's file."""

    kernel: str
    pc: int
    offset: int
    instruction: Instruction


@dataclass(frozen=True)
class Mutant:
    """what: the change, in words; code: the new bytes of the site's instruction."""

    kind: str
    site: Site
    what: str
    code: bytes

    def __str__(self) -> str:
        return f"{self.kind:<9} {self.site.kernel:<22} {self.site.pc:#07x}  {self.site.instruction.mnemonic}: {self.what}"

    def image(self) -> bytes:
        image = bytearray(original().image)
        end = self.site.offset + len(self.code)
        assert image[self.site.offset : end] == self.site.instruction.encoded.raw
        image[self.site.offset : end] = self.code
        return bytes(image)


@functools.cache
def original() -> CodeObject:
    """The packaged code object, read once: it may be rebuilt during a long run."""
    return CodeObject.load(code_object_path(STEM, ARCH))


def sites() -> Iterator[Site]:
    """Every instruction of every kernel of the packaged code object, up to its s_endpgm."""
    code_object = original()
    for info in code_object.kernels.values():
        (segment,) = (s for s in code_object.segments if s.vaddr <= info.entry < s.vaddr + len(s.data))
        in_file = code_object.image.find(segment.data) - segment.vaddr
        accum_offset, pc = Descriptor.parse(info.descriptor).accum_offset, info.entry
        while True:
            start = pc - segment.vaddr
            instruction = decode(segment.data[start : start + 16], pc, accum_offset)
            yield Site(info.name, pc, in_file + pc, instruction)
            if instruction.mnemonic == "s_endpgm":
                break
            pc += instruction.encoded.size


# ---- kinds of mutation: of an instruction, (what changes in words, the new bytes)
Changes = Iterator[tuple[str, bytes]]


def with_fields(instruction: Instruction, **values: int) -> bytes:
    """The instruction's bytes with these fields of its format changed."""
    encoded = instruction.encoded
    word = int.from_bytes(encoded.raw, "little")
    for name, value in values.items():
        low, width = LAYOUTS[encoded.encoding].fields[name]
        mask = (1 << width) - 1
        word = word & ~(mask << low) | (value & mask) << low
    return word.to_bytes(encoded.size, "little")


def waits(instruction: Instruction) -> Changes:
    if instruction.mnemonic == "s_waitcnt":
        value = instruction.encoded.simm16
        for name, mask in (("vmcnt", 0xC00F), ("lgkmcnt", 0x0F00)):
            if value & mask != mask:
                yield f"{name} is not waited for", with_fields(instruction, simm16=value | mask)


def barriers(instruction: Instruction) -> Changes:
    if instruction.mnemonic == "s_barrier":
        yield "gone (s_nop 0)", with_fields(instruction, op=OPCODES["SOPP"]["s_nop"], simm16=0)


def states(instruction: Instruction) -> Changes:
    if instruction.mnemonic == "s_nop" and instruction.encoded.simm16 > 0:
        yield f"s_nop {instruction.encoded.simm16} becomes s_nop 0", with_fields(instruction, simm16=0)


def offsets(instruction: Instruction) -> Changes:
    encoded = instruction.encoded
    if encoded.encoding == "DS" and "permute" not in instruction.mnemonic:
        step = 1 if "2" in instruction.mnemonic.split("_")[1] or instruction.mnemonic.endswith("u8") else 16
        yield f"offset0 + {step}", with_fields(instruction, offset0=encoded.offset0 + step)
    elif encoded.encoding == "FLAT":
        yield "offset + 16", with_fields(instruction, offset=encoded.offset + 16)
    elif encoded.encoding == "SMEM":
        yield "offset + 4", with_fields(instruction, offset=encoded.offset + 4)


def masks(instruction: Instruction) -> Changes:
    if instruction.mnemonic == "s_and_saveexec_b64":
        yield "all lanes stay (s_or_saveexec_b64)", with_fields(instruction, op=OPCODES["SOP1"]["s_or_saveexec_b64"])
    elif instruction.mnemonic == "v_cndmask_b32" and instruction.encoded.encoding == "VOP2":
        encoded = instruction.encoded
        if encoded.src0 != encoded.vsrc1 + 256:
            yield "vcc counts as all ones", with_fields(instruction, src0=encoded.vsrc1 + 256)
    elif instruction.mnemonic == "s_and_b64":
        yield "s_or_b64", with_fields(instruction, op=OPCODES["SOP2"]["s_or_b64"])


def compares(instruction: Instruction) -> Changes:
    swapped = {"_lt_": "_le_", "_le_": "_lt_", "_gt_": "_ge_", "_ge_": "_gt_", "_eq_": "_lg_", "_lg_": "_eq_", "_ne_": "_eq_"}
    if instruction.mnemonic.startswith(("v_cmp_", "s_cmp_", "s_cmpk_")):
        for old, new in (*swapped.items(), ("_eq_", "_ne_")):
            other = OPCODES[instruction.encoded.encoding].get(instruction.mnemonic.replace(old, new))
            if old in instruction.mnemonic and other is not None:
                yield f"{new.strip('_')} for {old.strip('_')}", with_fields(instruction, op=other)


def constants(instruction: Instruction) -> Changes:
    encoded = instruction.encoded
    if "literal" in encoded.fields:
        step = 16 if encoded.literal % 16 == 0 else 1  # an offset in LDS counts in units of a load
        changed = (encoded.literal + step & 0xFFFFFFFF).to_bytes(4, "little")
        yield f"literal {encoded.literal:#x} + {step}", encoded.raw[:-4] + changed
    elif "shl" not in instruction.mnemonic and "shr" not in instruction.mnemonic:
        for name in ("ssrc0", "ssrc1", "src0", "src1"):
            if 129 <= encoded.fields.get(name, 0) < 192:
                yield f"{name} {encoded.fields[name] - 128} + 1", with_fields(instruction, **{name: encoded.fields[name] + 1})


def shifts(instruction: Instruction) -> Changes:
    encoded = instruction.encoded
    name = "src0" if instruction.mnemonic.startswith("v_") else "ssrc1"
    if ("shl" in instruction.mnemonic or "shr" in instruction.mnemonic) and 129 <= encoded.fields.get(name, 0) < 190:
        yield f"by {encoded.fields[name] - 127}, not {encoded.fields[name] - 128}", with_fields(instruction, **{name: encoded.fields[name] + 1})


def scales(instruction: Instruction) -> Changes:
    encoded = instruction.encoded
    if encoded.encoding == "VOP3PX2":
        for side in (0, 1):
            yield f"byte 1 of scale {'AB'[side]}", with_fields(instruction, scale_op_sel=encoded.scale_op_sel ^ 1 << side)
    elif "scalef32" in instruction.mnemonic:
        yield "another part of the source", with_fields(instruction, op_sel=encoded.op_sel ^ 1)


def formats(instruction: Instruction) -> Changes:
    encoded = instruction.encoded
    if encoded.encoding == "VOP3PX2":
        yield "cbsz: E5M2 or E3M2", with_fields(instruction, cbsz={0: 1, 4: 3}[encoded.cbsz])
        yield "blgp: E5M2", with_fields(instruction, blgp=1)


def exchanges(instruction: Instruction) -> Changes:
    other = {"v_permlane16_swap_b32": "v_permlane32_swap_b32", "v_permlane32_swap_b32": "v_permlane16_swap_b32"}.get(instruction.mnemonic)
    if other is not None:
        yield other, with_fields(instruction, op=OPCODES[instruction.encoded.encoding][other])
    elif instruction.mnemonic == "ds_bpermute_b32":
        yield "a lane further", with_fields(instruction, offset0=instruction.encoded.offset0 + 4)


KINDS: dict[str, Callable[[Instruction], Changes]] = {
    "wait": waits, "barrier": barriers, "states": states, "offset": offsets, "mask": masks, "compare": compares, "constant": constants,
    "shift": shifts, "scale": scales, "format": formats, "exchange": exchanges,
}  # fmt: skip


def mutants() -> list[Mutant]:
    """All of them, in the order of the code."""
    return [Mutant(kind, site, what, code) for site in sites() for kind, change in KINDS.items() for what, code in change(site.instruction)]


def choose(among: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, drawn alike from every kind and, within a kind, from every kernel."""
    rng = random.Random(seed)
    piles: dict[str, dict[str, list[Mutant]]] = {kind: {} for kind in KINDS}
    for mutant in among:
        piles[mutant.kind].setdefault(mutant.site.kernel, []).append(mutant)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(kernels for kernels in piles.values()):
        for kernels in piles.values():
            if kernels and len(chosen) < count:
                name = rng.choice(sorted(kernels))
                chosen.append(kernels[name].pop(rng.randrange(len(kernels[name]))))
                if not kernels[name]:
                    del kernels[name]
    return chosen


# ---- running


class Reached(Observer):
    """pcs: (kernel, pc in the code object) of every instruction that ran."""

    def __init__(self) -> None:
        self.pcs: set[tuple[str, int]] = set()

    def block(self, group: Group, block: Block) -> None:
        state = group.state
        self.pcs.update((state.kernel, pc - state.image_base) for pc, _ in block.steps)


def reached() -> set[tuple[str, int]]:
    """What the cases reach of the kernels as they are. AssertionError or KernelFault if these do not pass: nothing could be said of mutants."""
    seen = Reached()
    for kernel in dict.fromkeys(site.kernel for site in sites()):
        for batch in batches(kernel):
            for timing, checks, run_seed in RUNS:
                with open_device("emulator", seed=run_seed, timing=timing, checks=checks) as device:
                    assert isinstance(device, emulator_device.EmulatorDevice)
                    device.observe = lambda dispatch: (seen,)
                    judge(run(batch, device), batch.exact())
    return seen.pcs


def judge(result: Results, exact: Results) -> None:
    """AssertionError unless the result keeps the promise in every 16 columns of every row: one matrix instruction makes no more of a row."""
    (out, lse), (exact_out, exact_lse) = result, exact
    blocks = (out.shape[0], -1, COLUMNS_AT_ONCE)
    per_row = out.shape[-1] // COLUMNS_AT_ONCE
    lse, exact_lse = (np.repeat(values, per_row, axis=1) for values in (lse, exact_lse))
    assert_decoded(out.reshape(blocks), lse, exact_out.reshape(blocks), exact_lse)


@functools.cache
def batches(kernel: str) -> list[Any]:
    """The batches for mutants of a kernel."""
    kv_format, _, shape = kernel.removeprefix(f"{STEM}_").rpartition("_")
    made = [make(case.but(kv_format=kv_format, values="smooth" if kv_format == "bf16" else case.values)) for case in CASES[shape]]
    return [*made, replace(made[0], arguments={**made[0].arguments, "sm_scale": made[0].arguments["sm_scale"] * SHARPER})]


def noticed(mutant: Mutant) -> str:
    """By what the mutant is caught: a fault or a wrong result; "" if by nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mutant.co")
        path.write_bytes(mutant.image())

        def where(stem: str, arch: str) -> Path:
            return path if stem == STEM else code_object_path(stem, arch)

        loading, running = (vars(importlib.import_module(f"mla_rt.{name}")) for name in ("device", "emulator_device"))
        original = loading["code_object_path"], running["run"]
        loading["code_object_path"] = where
        running["run"] = functools.partial(run_launch, max_group_instructions=INSTRUCTION_LIMIT)
        try:
            return _noticed(batches(mutant.site.kernel))
        finally:
            loading["code_object_path"], running["run"] = original


def _noticed(made: list[Any]) -> str:
    # The quick run finds most; strict checks find what happened to come out right; the others what depends on when loads land and who runs first.
    for timing, checks, seed in RUNS:
        for batch in made:
            with open_device("emulator", seed=seed, timing=timing, checks=checks) as device:
                try:
                    result = run(batch, device)
                except KernelFault as error:
                    return f"{'check' if checks == 'strict' else 'fault'}: {str(error).partition(': ')[2]}"
                try:
                    judge(result, batch.exact())
                except AssertionError as error:
                    return f"result: {str(error).splitlines()[0]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run kernels with one instruction changed, and see whether anything notices.")
    parser.add_argument("--count", type=int, default=44, help="mutants to run (default: 44)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--kind", choices=tuple(KINDS), help="only of this kind")
    options = parser.parse_args()
    everything, pcs = mutants(), reached()
    usable = [mutant for mutant in everything if (mutant.site.kernel, mutant.site.pc) in pcs and options.kind in (None, mutant.kind)]
    all_sites = [(site.kernel, site.pc) for site in sites()]
    print(f"{len(all_sites)} instructions, {len(pcs & set(all_sites))} of them reached; {len(usable)} possible mutants\n", flush=True)
    chosen, survivors = choose(usable, options.count, options.seed), []
    for mutant in chosen:
        begin = time.perf_counter()
        by = noticed(mutant)
        print(f"{mutant}\n{'':10}{by or 'SURVIVED'}  ({time.perf_counter() - begin:.1f} s)", flush=True)
        if not by:
            survivors.append(mutant)
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
