"""An independent trace: waves one after another, one instruction at a time, named by LLVM's assembler and classified by its mnemonics alone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from mla_rt.emulator.decoder import decode
from mla_rt.emulator.machine import Dispatch, _initial_state
from mla_rt.emulator.memory import Memory
from mla_rt.emulator.state import Group

_LABEL = re.compile(r"^([A-Za-z_][\w.]*):")
_LINE = re.compile(r"^\t([a-z]\w*)(.*?)[;/]* encoding: \[([^\]]*)\]")


def mnemonics(assembly: Path, kernel: str) -> dict[int, str]:
    """LLVM's mnemonic of each instruction of a kernel, by its distance in bytes from the first."""
    options = ["-triple", "amdgcn-amd-amdhsa", "-target-cpu", "gfx950", "-filetype", "asm", "-show-encoding", "-o", "-"]
    done = subprocess.run([sys.executable, "-m", "ziglang", "clang", "-cc1as", *options, str(assembly)], capture_output=True, text=True, check=True)
    found: dict[int, str] = {}
    inside, offset = False, 0
    for line in done.stdout.splitlines():
        if label := _LABEL.match(line):
            inside = label[1] == kernel or (inside and label[1].startswith((".L", "BB")))
        elif inside and (instruction := _LINE.match(line)):
            found[offset] = instruction[1].removesuffix("_e32").removesuffix("_e64").removesuffix("_sdwa").removesuffix("_dpp")
            offset += instruction[3].count(",") + 1
    return found


def class_of_mnemonic(name: str) -> str:
    if name.startswith("v_mfma_"):
        return "mfma"
    if re.match(r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_f\d+$", name):
        return "transcendental"
    if name.startswith("v_"):
        return "valu"
    if name.startswith("ds_"):
        return "lds"
    if name.startswith(("global_", "buffer_", "flat_")):
        return "vmem"
    if name.startswith(("s_load_", "s_buffer_", "s_dcache_", "s_memtime", "s_memrealtime")):
        return "smem"
    if name.startswith(("s_branch", "s_cbranch_", "s_setpc", "s_swappc", "s_call")):
        return "branch"
    known = {"s_waitcnt": "wait", "s_barrier": "barrier", "s_nop": "other", "s_endpgm": "other", "s_sleep": "other", "s_setprio": "other"}
    return known.get(name, "salu")


def single_step(dispatch: Dispatch, memory: Memory, names: dict[int, str]) -> list[list[Counter[str]]]:
    """Run the launch; how often each wave executed each mnemonic, by workgroup and wave. `names`: of `mnemonics`."""
    x, y, z = dispatch.grid
    with np.errstate(all="ignore"):  # infinities and NaNs are results here
        return [_workgroup(dispatch, memory, names, number) for number in range(x * y * z)]


def _workgroup(dispatch: Dispatch, memory: Memory, names: dict[int, str], number: int) -> list[Counter[str]]:
    state = _initial_state(dispatch, memory, np.array([number]))
    counts: list[Counter[str]] = [Counter() for _ in range(state.num_waves)]
    live = set(range(state.num_waves))
    while live:
        for wave in sorted(live):
            stop = None
            while stop is None:
                pc = int(state.pc[wave])
                counts[wave][names[pc - dispatch.entry]] += 1
                instruction = decode(memory.bytes_at(pc, 16).tobytes(), pc, dispatch.descriptor.accum_offset)
                group = Group(state, np.array([wave]))
                group.pc, group.next_pc = pc, pc + instruction.encoded.size
                instruction.run(group)
                state.pc[wave] = group.next_pc if isinstance(group.next_pc, int) else group.next_pc[0]
                stop = group.stop
            if stop == "end":
                live.remove(wave)
    return counts
