"""Wait states that gfx950 needs between two instructions and does not insert itself.

The numbers are those of the CDNA4 ISA guide (the table of manually inserted wait states and that of matrix instructions) and of LLVM's
GCNHazardRecognizer, which puts s_nop where they are needed. Every instruction between the two is one wait state, s_nop N is N + 1.

Matrix instructions: *XDL* are those that run on the matrix core proper, that is, all but the f32 and f64 ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from .completion import is_matrix, memory_kind, passes
from .footprint import SGPR, footprint
from .instruction import Instruction
from .lanes import SDWA_DWORD
from .operands import FIRST_VGPR, LAST_SGPR
from .state import EXEC, M0, VCC

_TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
_EXEC = frozenset({SGPR + EXEC, SGPR + EXEC + 1})
_VCC = frozenset({SGPR + VCC, SGPR + VCC + 1})
_S_NOP = 0
_SCALAR_HORIZON = 5  # of a vector instruction that writes scalar registers
_CACHE_LIMIT = 16384
_cache: dict[tuple[bytes, int], Facts] = {}


@dataclass(frozen=True)
class Facts:
    """What hazards depend on, of one instruction. Registers are numbered as in `footprint`.

    states: wait states that it is worth; accumulator: C of a matrix instruction, as (first register, count), None if it is a constant;
    factors: all that a matrix instruction reads but C; is_partial: it writes a part of its destination; store_data: of stores wider than 8 bytes.
    horizon: how many wait states later it can still be a hazard to another instruction.
    """

    mnemonic: str
    states: int
    reads: frozenset[int]
    writes: frozenset[int]
    is_valu: bool
    is_matrix: bool
    is_transcendental: bool
    is_partial: bool
    is_dpp: bool
    memory: str | None
    passes: int = 0
    is_xdl: bool = False
    accumulator: tuple[int, int] | None = None
    factors: frozenset[int] = frozenset()
    store_data: frozenset[int] = frozenset()
    is_lds_dma: bool = False
    horizon: int = 0

    @property
    def result(self) -> tuple[int, int]:
        """D of a matrix instruction: (first register, count)."""
        return min(self.writes), len(self.writes)


def facts_of(instruction: Instruction) -> Facts:
    key = instruction.encoded.raw, instruction.encoded.accum_offset
    found = _cache.get(key)
    if found is None:
        if len(_cache) >= _CACHE_LIMIT:
            _cache.clear()
        facts = _find_facts(instruction)
        found = _cache[key] = replace(facts, horizon=_horizon(facts))
    return found


def _find_facts(instruction: Instruction) -> Facts:
    encoded, name = instruction.encoded, instruction.mnemonic
    registers = footprint(instruction)
    matrix = is_matrix(instruction)
    valu = encoded.encoding.startswith("VOP") and not matrix
    memory = memory_kind(instruction)
    facts: dict[str, Any] = {}
    if matrix:
        facts = _matrix_facts(instruction, registers.reads, len(registers.writes))
    elif memory in ("vmem", "flat"):
        facts = {"store_data": _wide_store_data(instruction), "is_lds_dma": bool(encoded.fields.get("lds")) or "_lds_" in name}
    return Facts(
        mnemonic=name,
        states=encoded.simm16 + 1 if encoded.encoding == "SOPP" and encoded.op == _S_NOP else 1,
        reads=frozenset(registers.reads),
        writes=registers.writes,
        is_valu=valu,
        is_matrix=matrix,
        is_transcendental=valu and name.startswith(_TRANSCENDENTAL),
        is_partial=valu and _writes_part(instruction),
        is_dpp=encoded.encoding.endswith("_DPP"),
        memory=memory,
        **facts,
    )


def _horizon(facts: Facts) -> int:
    if facts.is_matrix:
        return max(_result_states(facts, memory=True), _result_states(facts, memory=False))
    if facts.is_valu:
        return _SCALAR_HORIZON if facts.writes and max(facts.writes) >= SGPR else 3
    return 2 if facts.store_data else 1 if SGPR + M0 in facts.writes else 0


def _matrix_facts(instruction: Instruction, reads: tuple[int, ...], count: int) -> dict[str, Any]:
    encoded = instruction.encoded
    accumulator, factors = None, reads
    if encoded.src2 >= FIRST_VGPR:
        accumulator = (encoded.src2 - FIRST_VGPR + (encoded.accum_offset if encoded.acc_cd else 0), count)
        factors = reads[:-count]  # C is read last
    xdl = not instruction.mnemonic.endswith(("_f32", "_f64"))
    return {"passes": passes(instruction), "is_xdl": xdl, "accumulator": accumulator, "factors": frozenset(factors)}


def _wide_store_data(instruction: Instruction) -> frozenset[int]:
    """The data registers of a store of 12 or 16 bytes, which it reads late; a buffer store with an SGPR offset reads them in time."""
    encoded, name = instruction.encoded, instruction.mnemonic
    if "_store_" not in name or not name.endswith(("x3", "x4")):
        return frozenset()
    if encoded.encoding == "MUBUF" and encoded.soffset <= LAST_SGPR:
        return frozenset()
    data = encoded.vdata if encoded.encoding == "MUBUF" else encoded.data
    first = data + (encoded.accum_offset if encoded.acc else 0)
    return frozenset(range(first, first + int(name[-1])))


def _writes_part(instruction: Instruction) -> bool:
    encoded = instruction.encoded
    if encoded.encoding.endswith("_SDWA"):
        return encoded.fields.get("dst_sel", SDWA_DWORD) != SDWA_DWORD
    return encoded.encoding == "VOP3" and bool(encoded.op_sel & 8)


Need = tuple[int, frozenset[int], str]  # wait states, the registers that the two share, why


def needs(first: Facts, then: Facts) -> Iterable[Need]:
    """What hazards `then` has with `first` when it follows: those with wait states to keep."""
    if first.is_matrix:
        yield from _after_matrix(first, then)
    if first.is_valu and (first.horizon == _SCALAR_HORIZON or not first.writes.isdisjoint(then.reads | then.writes)):
        yield from _after_valu(first, then)
    if first.store_data and (then.is_valu or then.is_matrix):
        yield 2, first.store_data & then.writes, f"{then.mnemonic} overwrites the data that {first.mnemonic} stores"
    if SGPR + M0 in first.writes and not first.is_valu and then.is_lds_dma:
        yield 1, frozenset({SGPR + M0}), f"{then.mnemonic} takes M0 from {first.mnemonic}"


def _result_states(first: Facts, memory: bool) -> int:
    """From a matrix instruction to whatever reads or overwrites its result."""
    if first.mnemonic.endswith("f64"):
        big = first.passes == 16
        return (18 if big else 9) if memory else (19 if big else 6)
    return first.passes + (3 + (first.passes != 2) if first.is_xdl else 2)


def _after_matrix(first: Facts, then: Facts) -> Iterable[Need]:
    if then.is_matrix:
        yield _result_states(first, False), first.writes & then.factors, f"{then.mnemonic} multiplies the result of {first.mnemonic}"
        if then.accumulator == first.result:
            same_4x4_f64 = first.mnemonic == then.mnemonic and first.mnemonic.endswith("f64") and first.passes == 4
            states = 4 if same_4x4_f64 else 2 if first.passes == 2 else 0
            yield states, first.writes, f"{then.mnemonic} accumulates on the result of {first.mnemonic}"
        elif then.accumulator is not None:
            start, count = then.accumulator
            states = 0 if then.is_xdl and not first.is_xdl else first.passes + (2 if first.is_xdl else 0)
            shared = first.writes.intersection(range(start, start + count))
            yield states, shared, f"{then.mnemonic} accumulates on a part of the result of {first.mnemonic}"
    elif then.is_valu or then.memory in ("vmem", "flat", "lds"):
        states = _result_states(first, then.memory is not None)
        yield states, first.writes & then.reads, f"{then.mnemonic} reads the result of {first.mnemonic}"
        yield states, first.writes & then.writes, f"{then.mnemonic} overwrites the result of {first.mnemonic}"
        if first.accumulator is not None and first.is_xdl:
            start, count = first.accumulator
            states = {2: 1, 4: 3, 8: 7, 16: 15}[first.passes]
            yield states, then.writes.intersection(range(start, start + count)), f"{then.mnemonic} overwrites what {first.mnemonic} accumulates on"


def _after_valu(first: Facts, then: Facts) -> Iterable[Need]:
    reads = first.writes & then.reads
    vectors, scalars = frozenset(r for r in reads if r < SGPR), frozenset(r for r in reads if r >= SGPR)
    wrote = f"that {first.mnemonic} wrote"
    writes_exec = first.writes & _EXEC
    if then.is_matrix:
        yield 2, vectors, f"{then.mnemonic} reads a register {wrote}"
        yield 4, writes_exec, f"{then.mnemonic} follows {first.mnemonic}, which writes EXEC"
        return
    if then.memory in ("vmem", "flat"):
        yield 5, scalars, f"{then.mnemonic} reads a scalar register {wrote}"
    if not then.is_valu:
        return
    lane_access = then.mnemonic.startswith(("v_readlane", "v_readfirstlane", "v_writelane"))
    yield (4 if lane_access else 2), scalars, f"{then.mnemonic} reads a scalar register {wrote}"
    if lane_access:
        yield 4, writes_exec, f"{then.mnemonic} follows {first.mnemonic}, which writes EXEC"
        if "read" in then.mnemonic:
            yield 1, vectors, f"{then.mnemonic} reads a register {wrote}"
    if then.mnemonic.startswith("v_div_fmas"):
        yield 4, first.writes & _VCC, f"{then.mnemonic} uses VCC {wrote}"
    if then.is_dpp:
        yield 2, vectors, f"{then.mnemonic} reads across lanes a register {wrote}"
        yield 5, writes_exec, f"{then.mnemonic} reads across lanes after {first.mnemonic}, which writes EXEC"
    if then.mnemonic.startswith("v_permlane"):
        yield 2, vectors, f"{then.mnemonic} swaps a register {wrote}"
    if first.is_transcendental and not then.is_transcendental:
        yield 1, vectors, f"{then.mnemonic} reads a register {wrote}"
    if first.is_partial and not then.is_partial:
        yield 1, vectors, f"{then.mnemonic} reads a register {wrote} a part of"
    if first.mnemonic.startswith("v_dot") and first.mnemonic != then.mnemonic:
        yield 3, vectors | (first.writes & then.writes), f"{then.mnemonic} reads or overwrites a register {wrote}"
