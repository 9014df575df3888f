"""Check of undefined values: what depends on registers, LDS or device memory that nothing has written.

An undefined value may be moved and computed with; it is a fault where it decides something: an address, a branch, EXEC, or what device memory
holds. Unless `undefined_rules.py` knows better, an undefined bit in a source makes the whole result of its lane undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .instruction import Instruction
from .memory import Cells
from .observer import SCC, Observer
from .shadow import ALL, Shadow, any_set
from .state import EXEC, LANES, Group, State
from .transfer import data_register
from .undefined_rules import rule_for
from .undefined_sources import Masks, Sources


class UndefinedValues(Observer):
    watches_registers = True

    def begin(self, state: State) -> None:
        self._shadow = Shadow(state)
        self._rules: dict[int, Callable[[Sources], Masks] | None] = {}
        self._instruction: Instruction | None = None
        self._vector_reads: list[int] = []
        self._scalar_reads: list[int] = []
        self._results: Masks | None = None
        self._computed = False
        self._written = 0
        self._loaded: list[np.ndarray | None] = []
        self._num_loads = 0
        self._storing: tuple[np.ndarray, np.uint32] | None = None  # lanes and bits of the registers whose values go to device memory

    def instruction(self, group: Group, instruction: Instruction) -> None:
        self._instruction = instruction
        if self._vector_reads:
            self._vector_reads = []
        if self._scalar_reads:
            self._scalar_reads = []
        self._computed, self._written, self._num_loads, self._storing = False, 0, 0, None
        if self._loaded:
            self._loaded = []

    # ---- registers

    def vgpr_read(self, group: Group, register: int) -> None:
        if self._shadow.vector[register] is None:
            return
        if self._storing is not None:
            self._check_stored(group, register)
        else:
            self._vector_reads.append(register)

    def sgpr_read(self, group: Group, register: int) -> None:
        if not self._shadow.scalar_flags[register]:
            return
        assert self._instruction is not None
        if self._instruction.ends_block:
            mask = self._shadow.read_scalar(register, group.waves)
            if mask is not None:
                name = "SCC" if register == SCC else f"s{register}" if register < 102 else "VCC or another special register"
                raise group.fault(f"{self._instruction.mnemonic} depends on an undefined value ({name})", _of_waves(mask != 0))
        self._scalar_reads.append(register)

    def vgpr_write(self, group: Group, register: int, value: np.ndarray, mask: np.ndarray | None) -> None:
        result = self._next_result(group)
        if result is not None or self._shadow.vector[register] is not None:
            if result is not None and result.ndim == 1:
                result = result[:, None]
            self._shadow.write_vector(register, group.waves, group.n, result, mask)

    def sgpr_write(self, group: Group, register: int, value: np.ndarray | int) -> None:
        result = self._next_result(group)
        if result is not None:
            if result.ndim == 2:
                result = self._of_scalar(group, register, result)
            result = np.broadcast_to(result, (group.n,))
            if not result.any():
                result = None
        if result is not None and register in (EXEC, EXEC + 1):
            raise group.fault("EXEC depends on an undefined value", _of_waves(result != 0))
        if result is not None or self._shadow.scalar_flags[register]:
            self._shadow.write_scalar(register, group.waves, result)

    def _of_scalar(self, group: Group, register: int, lanes: np.ndarray) -> np.ndarray:
        """A vector instruction's result to an SGPR pair: a bit for each lane."""
        packed = np.packbits((np.broadcast_to(lanes, group.mask.shape) != 0) & group.mask, axis=1, bitorder="little").view(np.uint32)
        return packed[:, register & 1]

    def _next_result(self, group: Group) -> np.ndarray | None:
        """The mask of what the instruction writes now."""
        place, self._written = self._written, self._written + 1
        if self._num_loads:
            return self._loaded_result(group, place)
        if not self._computed:
            self._computed = True
            self._results = self._compute(group) if self._vector_reads or self._scalar_reads else None
        if self._results is None:
            return None
        return self._results[place] if isinstance(self._results, list) else self._results

    def _compute(self, group: Group) -> Masks | None:
        assert self._instruction is not None
        sources = Sources(self._shadow, group, self._instruction, self._vector_reads, self._scalar_reads)
        if not sources.any():
            return None
        pc = group.pc
        if pc not in self._rules:
            self._rules[pc] = rule_for(self._instruction)
        rule = self._rules[pc]
        return sources.whole() if rule is None else rule(sources)

    # ---- memory and LDS

    def memory(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> None:
        self._check_address(group, address, mask, f"{access} of {nbytes} bytes at an address that depends on an undefined value")
        memory = group.state.memory
        if access != "write":
            if access == "scalar read" and nbytes == 12:
                nbytes = 16  # of a load of 4 dwords the last may lie past the end, and only then is it undefined
            if memory.undefined is not None:
                self._loaded += self._load_memory(group, address, mask, nbytes)
            self._num_loads += 1
        if access in ("write", "atomic"):
            assert self._instruction is not None
            if access == "atomic" and any(part is not None for part in self._loaded):
                lanes = np.logical_or.reduce([part != 0 for part in self._loaded if part is not None])
                raise group.fault("an atomic on bytes that nothing has written", lanes & mask, address)
            self._storing = np.broadcast_to(mask, group.mask.shape), _stored_bits(self._instruction.mnemonic, nbytes)
            if memory.undefined is not None:
                self._define_memory(group, address, mask, nbytes)

    def lds(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> None:
        self._check_address(group, address, mask, f"LDS {access} of {nbytes} bytes at an address that depends on an undefined value")
        cells, where = self._shadow.lds, address + (group.workgroup * (group.state.lds.shape[1] * 4))[:, None]
        if access == "DMA write":
            self._store_lds(cells, where, mask, self._of_dma(group, nbytes // 4))
        elif access == "write":
            self._write_lds(group, cells, where, mask, nbytes)
        else:
            self._loaded += self._load(cells, np.where(mask, where, 0), mask, nbytes)
            self._num_loads += 1
            if access == "atomic":
                self._atomic_lds(group, cells, where, mask, nbytes)

    def _check_address(self, group: Group, address: np.ndarray, mask: np.ndarray, what: str) -> None:
        if not (self._vector_reads or self._scalar_reads):
            return
        assert self._instruction is not None
        sources = Sources(self._shadow, group, self._instruction, self._vector_reads, self._scalar_reads)
        if sources.any():
            bad = np.broadcast_to(sources.lanes(), group.mask.shape) & (mask if mask.shape == group.mask.shape else True)
            if bad.any():
                raise group.fault(what, bad, address)
        self._vector_reads, self._scalar_reads = [], []

    def _load(self, cells: Cells, where: np.ndarray, mask: np.ndarray, nbytes: int) -> list[np.ndarray | None]:
        """The masks of what is loaded: a dword each, or one of 8 or 16 bits."""
        if nbytes < 4:
            parts = [cells.load_u8(where) if nbytes == 1 else cells.load_u16(where)]
        else:
            parts = cells.load_dwords(where, nbytes // 4)
        base = parts[0].base if len(parts) > 1 and parts[0].base is not None else parts[0]
        if not any_set(base.view(parts[0].dtype)):
            return [None] * len(parts)
        return [np.where(mask, part, np.uint32(0)) for part in parts]

    def _load_memory(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int) -> list[np.ndarray | None]:
        parts: list[np.ndarray | None] = [None] * max(nbytes // 4, 1)
        for cells, where, inside in _of_allocations(group, address, mask):
            if cells is not None:
                parts = [y if x is None else x if y is None else x | y for x, y in zip(parts, self._load(cells, where, inside, nbytes), strict=True)]
        return parts

    def _define_memory(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int) -> None:
        for cells, where, inside in _of_allocations(group, address, mask):
            if cells is not None:
                offsets = where[inside]
                if nbytes < 4:
                    cells.u8[(offsets[:, None] + np.arange(nbytes)).ravel()] = 0
                else:
                    cells.store_dwords(offsets, [np.zeros(offsets.shape, np.uint32)] * (nbytes // 4))

    def _of_dma(self, group: Group, count: int) -> Sequence[np.ndarray | None]:
        loaded = self._loaded
        return list(loaded) if len(loaded) == count else [_combined(loaded)] * count

    def _store_lds(self, cells: Cells, where: np.ndarray, mask: np.ndarray, parts: Sequence[np.ndarray | None]) -> None:
        offsets = where[mask]
        zeros = np.zeros(offsets.shape, np.uint32)
        cells.store_dwords(offsets, [zeros if part is None else _bytewise(np.broadcast_to(part, mask.shape)[mask]) for part in parts])

    def _data_masks(self, group: Group, field: str, count: int) -> list[np.ndarray | None]:
        assert self._instruction is not None
        first = data_register(self._instruction.encoded, self._instruction.encoded.fields[field])
        return [self._shadow.read_vector(first + i, group.waves) for i in range(count)]

    def _write_lds(self, group: Group, cells: Cells, where: np.ndarray, mask: np.ndarray, nbytes: int) -> None:
        assert self._instruction is not None
        field = "data1" if self._written else "data0"  # the second half of a write2
        self._written = 1
        if nbytes >= 4:
            self._store_lds(cells, where, mask, self._data_masks(group, field, nbytes // 4))
        else:
            (part,) = self._data_masks(group, field, 1)
            offsets = where[mask]
            value = np.zeros(offsets.shape, np.uint32) if part is None else part[mask] >> np.uint32(16 * self._instruction.mnemonic.endswith("_hi"))
            value = _bytewise(value)
            (cells.store_u8 if nbytes == 1 else cells.store_u16)(offsets, value)
        self._storing = np.zeros(group.mask.shape, np.bool_), ALL  # reading the data decides nothing

    def _atomic_lds(self, group: Group, cells: Cells, where: np.ndarray, mask: np.ndarray, nbytes: int) -> None:
        parts = [part for part in self._data_masks(group, "data0", nbytes // 4) if part is not None]
        if parts:
            lanes = np.logical_or.reduce([part != 0 for part in parts]) & mask
            offsets = where[lanes]
            cells.store_dwords(offsets, [np.full(offsets.shape, ALL)] * (nbytes // 4))
        self._storing = np.zeros(group.mask.shape, np.bool_), ALL

    def _check_stored(self, group: Group, register: int) -> None:
        assert self._storing is not None
        lanes, bits = self._storing
        mask = self._shadow.read_vector(register, group.waves)
        if mask is not None:
            bad = lanes & (mask & bits != 0)
            if bad.any():
                raise group.fault(f"a store to device memory of an undefined value (register {register})", bad)

    def _loaded_result(self, group: Group, place: int) -> np.ndarray | None:
        assert self._instruction is not None
        loaded, name = self._loaded, self._instruction.mnemonic
        if not loaded:
            result = None
        elif self._num_loads > 1 and "read2" not in name:
            result = _combined(loaded)  # a load dword by dword, some lanes of it out of range
        else:
            result = loaded[place] if place < len(loaded) else np.full((1, 1), ALL)
        if "d16" in name:
            return self._merge_d16(group, result, name.endswith("_hi"))
        if result is not None and any(part in name for part in ("sbyte", "sshort", "read_i8", "read_i16")):
            return np.where(result != 0, ALL, np.uint32(0))
        if result is not None and name.startswith("s_"):
            return result[:, 0]
        return result

    def _merge_d16(self, group: Group, half: np.ndarray | None, high: bool) -> np.ndarray | None:
        assert self._instruction is not None
        encoded = self._instruction.encoded
        register = data_register(encoded, encoded.fields["vdata" if encoded.encoding == "MUBUF" else "vdst"])
        old = self._shadow.read_vector(register, group.waves)
        if half is None and old is None:
            return None
        full = np.zeros(1, np.uint32) if half is None else np.where(half != 0, np.uint32(0xFFFF), np.uint32(0))
        kept = np.uint32(0) if old is None else old & np.uint32(0xFFFF if high else 0xFFFF0000)
        return np.asarray(kept | full << np.uint32(16 * high))


def _of_waves(waves: np.ndarray) -> np.ndarray:
    lanes = np.zeros((len(waves), LANES), np.bool_)
    lanes[:, 0] = waves
    return lanes


def _bytewise(mask: np.ndarray) -> np.ndarray:
    """Whole bytes for bits: LDS is followed byte by byte."""
    return np.where(np.ascontiguousarray(mask).view(np.uint8) != 0, np.uint8(0xFF), np.uint8(0)).view(np.uint32)


def _combined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    known = [part != 0 for part in parts if part is not None]
    return np.where(np.logical_or.reduce(known), ALL, np.uint32(0)) if known else None


def _stored_bits(mnemonic: str, nbytes: int) -> np.uint32:
    """The bits of a register that a store of `nbytes` takes."""
    if nbytes >= 4:
        return ALL
    return np.uint32(((1 << 8 * nbytes) - 1) << (16 if mnemonic.endswith("_hi") else 0))


def _of_allocations(group: Group, address: np.ndarray, mask: np.ndarray) -> list[tuple[Cells | None, np.ndarray, np.ndarray]]:
    """Marks of each allocation that the lanes of `mask` access, offsets into them (0 elsewhere), and the lanes."""
    memory, left, found = group.state.memory, mask.copy(), []
    assert memory.undefined is not None
    while left.any():
        active = address[left]
        start, nbytes = memory.extent_at(int(active.min()))
        inside = left
        if int(active.max()) >= start + nbytes:
            inside = left & (address < np.uint64(start + nbytes))
        cells = memory.undefined.cells(start - memory.base)
        where = address if cells is None else np.where(inside, (address - np.uint64(start)).view(np.int64), 0)
        found.append((cells, where, inside))
        left = left & ~inside
    return found
