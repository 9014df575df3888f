"""Device memory of the emulator: one sparse host mapping, an allocator with guard gaps, and vectorized checked access.

A device address is the host's virtual address of the same byte, so code that copies with raw pointers works on device buffers. What lies
between allocations is never legal to touch: an access outside one live allocation is a fault of the kernel. Processes forked while it is open see
the same bytes, and `exclusive` is there to keep them apart.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .state import Group
    from .undefined_memory import UndefinedMemory

PAGE = mmap.PAGESIZE
GUARD = 4096  # bytes, at least, between two allocations: an overrun of up to this much hits nothing
POISON_LIMIT = 256 << 20  # larger allocations stay untouched pages that read as zero, or they would need all their memory at once
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named by the module only from Python 3.13 on; Linux's value on x86 and Arm
_CAPACITIES = (4 << 40, 512 << 30, 64 << 30, 16 << 30)  # bytes of address space to ask for, best first


class Cells:
    """A byte array seen as 1-, 2-, 4-, 8- and 16-byte cells, with gathers and scatters at byte offsets (int64 arrays of any shape).

    Offsets must be inside: callers check first. Any alignment works, the natural one is fast. Scatters take one-dimensional arrays in
    lane order; where several lanes write one byte, the last wins.
    """

    def __init__(self, data: np.ndarray):
        self.u8 = data
        self.u16, self.u32, self.u64 = data.view(np.uint16), data.view(np.uint32), data.view(np.uint64)
        self.rows = data.view("V16")

    def load_u8(self, offset: np.ndarray) -> np.ndarray:
        return self.u8.take(offset).astype(np.uint32)

    def load_u16(self, offset: np.ndarray) -> np.ndarray:
        if _alignment_bits(offset) & 1:
            return self.load_u8(offset) | self.load_u8(offset + 1) << np.uint32(8)
        return self.u16.take(offset >> 1).astype(np.uint32)

    def load_dwords(self, offset: np.ndarray, count: int) -> list[np.ndarray]:
        """`count` consecutive dwords from each offset: uint32 arrays of offset's shape, lowest address first."""
        low = _alignment_bits(offset)
        if low & 3:
            parts = self.u8.take(offset[..., None] + np.arange(4 * count)).view(np.uint32)
        elif count == 4 and not low & 15:
            parts = self.rows.take(offset >> 4)[..., None].view(np.uint32)
        elif count % 2 == 0 and not low & 7:
            parts = self.u64.take((offset >> 3)[..., None] + np.arange(count // 2)).view(np.uint32)
        else:
            index = offset >> 2
            return [self.u32.take(index + i) for i in range(count)]
        return [parts[..., i] for i in range(count)]

    def store_u8(self, offset: np.ndarray, value: np.ndarray) -> None:
        self.u8[offset] = value.astype(np.uint8)

    def store_u16(self, offset: np.ndarray, value: np.ndarray) -> None:
        if _alignment_bits(offset) & 1:
            self._store_bytes(offset, value.astype(np.uint16)[:, None].view(np.uint8))
        else:
            self.u16[offset >> 1] = value.astype(np.uint16)

    def store_dwords(self, offset: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Store values[i] (uint32, one-dimensional) at offset + 4*i."""
        low, count = _alignment_bits(offset), len(values)
        if count == 1 and not low & 3:
            self.u32[offset >> 2] = values[0]
            return
        # All dwords of a lane before those of the next, so that a higher lane's overlapping store wins as a whole.
        packed = np.stack(values, axis=-1)
        if count == 4 and not low & 15:
            self.rows[offset >> 4] = packed.view("V16")[:, 0]
        elif count == 2 and not low & 7:
            self.u64[offset >> 3] = packed.view(np.uint64)[:, 0]
        elif not low & 3:
            self.u32[((offset >> 2)[:, None] + np.arange(count)).ravel()] = packed.ravel()
        else:
            self._store_bytes(offset, packed.view(np.uint8))

    def _store_bytes(self, offset: np.ndarray, data: np.ndarray) -> None:
        self.u8[(offset[:, None] + np.arange(data.shape[1])).ravel()] = data.ravel()


def _alignment_bits(offset: np.ndarray) -> int:
    return int(np.bitwise_or.reduce(offset, axis=None))


class Memory:
    """The device's memory. `capacity`: bytes of address space to reserve (no memory is used before it is touched); None: as the system allows.

    Raises MemoryError if the system refuses the reservation.
    """

    def __init__(self, capacity: int | None = None):
        self._mapping = _reserve(_CAPACITIES if capacity is None else (_round_up(capacity, PAGE),))
        self.capacity = len(self._mapping)
        self.cells = Cells(np.frombuffer(self._mapping, np.uint8))
        self.base = int(self.cells.u8.ctypes.data)
        self._starts: list[int] = []  # offsets from base, ascending; _ends and _names run parallel
        self._ends: list[int] = []
        self._names: list[str] = []
        self._next = PAGE  # offset 0 is never allocated: inactive lanes are sent there
        self.exclusive: AbstractContextManager[None] = nullcontext()  # held around an atomic; in a worker of several processes, a lock
        self.undefined: UndefinedMemory | None = None  # set before the first allocation to know which bytes were never written
        self._refresh()

    def allocate(self, nbytes: int, name: str = "") -> int:
        """Address (a multiple of the page size) of `nbytes` new bytes. Up to 256 MiB they are all 0xFF, NaN in every format we use; above, zero.

        `name` is what faults call it. Address space is not used again before all of it was used once, so stale pointers keep faulting.
        Raises ValueError for a negative size and MemoryError if no gap is large enough.
        """
        if nbytes < 0:
            raise ValueError(f"allocation of {nbytes} bytes")
        size = _round_up(max(nbytes, 1), PAGE) + _round_up(GUARD, PAGE)
        start = self._next if self._next + size <= self.capacity else self._first_gap(size)
        self._next = start + size
        where = bisect.bisect_left(self._starts, start)
        self._starts.insert(where, start)
        self._ends.insert(where, start + nbytes)
        self._names.insert(where, name)
        self._refresh()
        if nbytes <= POISON_LIMIT:
            self.cells.u8[start : start + nbytes] = 0xFF
            if self.undefined is not None:
                self.undefined.allocated(start, nbytes)
        return self.base + start

    def free(self, address: int) -> None:
        """Give the pages of the allocation at `address` back; any later access faults. Raises ValueError if none starts there."""
        start = address - self.base
        where = bisect.bisect_left(self._starts, start)
        if where == len(self._starts) or self._starts[where] != start:
            raise ValueError(f"no allocation at {address:#x}")
        self._mapping.madvise(mmap.MADV_REMOVE, start, _round_up(max(self._ends[where] - start, 1), PAGE))
        del self._starts[where], self._ends[where], self._names[where]
        self._refresh()
        if self.undefined is not None:
            self.undefined.freed(start)

    def bytes_at(self, address: int, nbytes: int) -> np.ndarray:
        """Writable uint8 view [nbytes]. Raises ValueError if the range is not inside one live allocation."""
        start = address - self.base
        if nbytes < 0 or not self._inside(start, start + nbytes):
            raise ValueError(f"{nbytes} bytes at {address:#x} are not inside one live allocation")
        return self.cells.u8[start : start + nbytes]

    def extent_at(self, address: int) -> tuple[int, int]:
        """First address and bytes of the live allocation that holds this address. Raises ValueError if none does."""
        where = bisect.bisect_right(self._starts, address - self.base) - 1
        if where < 0 or address - self.base >= self._ends[where]:
            raise ValueError(f"no allocation holds {address:#x}")
        return self.base + self._starts[where], self._ends[where] - self._starts[where]

    def define(self, address: int, nbytes: int) -> None:
        """These bytes, inside one live allocation, have a value now."""
        if self.undefined is not None and nbytes:
            start, size = self.extent_at(address)
            self.undefined.define(start - self.base, address - start, nbytes, size)

    def close(self) -> None:
        """Give all pages back. Views handed out earlier stay mapped (and read as zero) as long as they are held."""
        if self._starts:
            self._mapping.madvise(mmap.MADV_REMOVE, 0, self.capacity)
        self._starts, self._ends, self._names = [], [], []
        self._refresh()

    def check(self, group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str = "read", align: int = 1) -> np.ndarray:
        """Offsets into `cells` (int64, address's shape; 0 where not `mask`) of accesses of `nbytes` at `address` (uint64).

        mask: bool of address's shape, [waves, 64] or [waves, 1] for one access a wave. Raises KernelFault if an access is not inside one live
        allocation or not a multiple of `align`; `access` is the verb of the message.
        """
        offset = (address - np.uint64(self.base)).view(np.int64)
        everywhere = bool(mask.all())
        active = offset if everywhere else offset[mask]
        if active.size == 0:
            return np.zeros_like(offset)
        if not self._inside(int(active.min()), int(active.max()) + nbytes):
            bad = mask & ~self._inside_each(offset, nbytes)
            if bad.any():
                raise group.fault(f"{access} of {nbytes} bytes outside live memory{self._neighbour(int(offset[bad][0]))}", bad, address)
        if align > 1 and _alignment_bits(active) & (align - 1):
            raise group.fault(f"{access} of {nbytes} bytes not aligned to {align}", mask & (offset & (align - 1) != 0), address)
        for observer in group.state.observers:
            observer.memory(group, address, mask, nbytes, access)
        return offset if everywhere else np.where(mask, offset, 0)

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes lie in one live allocation."""
        return self._inside(address - self.base, address - self.base + nbytes)

    def _inside(self, start: int, end: int) -> bool:
        where = bisect.bisect_right(self._starts, start) - 1
        return where >= 0 and end <= self._ends[where]

    def _inside_each(self, offset: np.ndarray, nbytes: int) -> np.ndarray:
        if not self._starts:
            return np.zeros(offset.shape, np.bool_)
        where = np.searchsorted(self._start_array, offset, "right") - 1
        return (where >= 0) & (offset + nbytes <= self._end_array[where])

    def _neighbour(self, offset: int) -> str:
        where = bisect.bisect_right(self._starts, offset) - 1
        if where < 0:
            return ""
        name = repr(self._names[where]) if self._names[where] else f"at {self.base + self._starts[where]:#x}"
        return f" (allocation {name} of {self._ends[where] - self._starts[where]} bytes begins {offset - self._starts[where]} bytes below)"

    def _first_gap(self, size: int) -> int:
        floor = PAGE
        for start, end in zip(self._starts + [self.capacity], self._ends + [self.capacity], strict=True):
            if start - floor >= size:
                return floor
            floor = _round_up(max(end, start + 1), PAGE) + _round_up(GUARD, PAGE)
        raise MemoryError(f"no {size} bytes of address space left of {self.capacity}")

    def _refresh(self) -> None:
        self._start_array, self._end_array = np.array(self._starts, np.int64), np.array(self._ends, np.int64)


def _reserve(capacities: Sequence[int]) -> mmap.mmap:
    for capacity in capacities:
        try:
            # Shared with the worker processes of a launch.
            return mmap.mmap(-1, capacity, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, OverflowError):
            continue
    raise MemoryError(f"the system refuses to reserve {capacities[-1]} bytes of address space for device memory (see ulimit -v)")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
