"""Cycles that an LDS access takes: the lanes that take part at once (phases), and what bank conflicts add.

A phase takes a cycle if no two of its lanes want different dwords of one bank; with n different dwords in the fullest bank it takes n. Lanes that
want the same dword share it, except atomics, which take effect one after the other.

Reads of 8, 12 and 16 bytes and writes of 8: phases and number of banks as measured (HipKittens, analysis/paper_experiments/phases); transposed
reads as plain ones of their width. The other widths are not published; for them the peak rates are taken: 256 bytes a cycle read in 64 banks,
128 bytes a cycle written in 32, in phases of consecutive lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .state import LANES


@dataclass(frozen=True)
class Phases:
    """lanes: [phases, lanes of a phase], which lanes go together; banks: over how many banks, one dword wide each, they spread."""

    lanes: np.ndarray
    banks: int


def _consecutive(count: int, banks: int) -> Phases:
    return Phases(np.arange(LANES).reshape(count, -1), banks)


def _ranges(*phases: str) -> np.ndarray:
    def lanes(text: str) -> list[int]:
        return [lane for part in text.split() for first, last in [map(int, part.split("-"))] for lane in range(first, last + 1)]

    half = [lanes(text) for text in phases]
    return np.array(half + [[lane + LANES // 2 for lane in phase] for phase in half])


_READ = {
    4: _consecutive(1, 64),
    8: _consecutive(2, 64),
    12: Phases(_ranges("0-3 20-23", "4-7 16-19", "8-11 28-31", "12-15 24-27"), 32),
    16: Phases(_ranges("0-3 12-15 20-27", "4-11 16-19 28-31"), 64),
}
_WRITE = {4: _consecutive(2, 32), 8: _consecutive(4, 32), 12: _consecutive(8, 32), 16: _consecutive(8, 32)}


def phases_of(nbytes: int, access: str) -> Phases:
    """Of an access of `nbytes` a lane; access as observers hear it. Narrow accesses go by dwords."""
    table = _READ if access in ("read", "transposed read") else _WRITE
    return table[max(nbytes, 4)]


def extra_cycles(address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> np.ndarray:
    """Cycles that conflicts add to an access, int64 [waves]. address: int64 [waves, 64], bytes; mask: bool [waves, 64]."""
    phases = phases_of(nbytes, access)
    waves, (num_phases, _) = len(address), phases.lanes.shape
    dwords = (address[:, phases.lanes, None] + np.arange(0, max(nbytes, 4), 4)) >> 2
    active = np.broadcast_to(mask[:, phases.lanes, None], dwords.shape)
    # One row a wave and phase; where several lanes may share a dword, only the first of equal ones counts.
    dwords, active = dwords.reshape(waves * num_phases, -1), active.reshape(waves * num_phases, -1)
    order = np.argsort(dwords + np.where(active, 0, 1 << 40), axis=1, kind="stable")
    dwords, active = np.take_along_axis(dwords, order, axis=1), np.take_along_axis(active, order, axis=1)
    counted = active.copy()
    if access != "atomic":
        counted[:, 1:] &= dwords[:, 1:] != dwords[:, :-1]
    bank = dwords % phases.banks + phases.banks * np.arange(len(dwords))[:, None]
    in_bank = np.bincount(bank[counted], minlength=phases.banks * len(dwords)).reshape(waves, num_phases, phases.banks)
    return np.maximum(in_bank.max(axis=2) - 1, 0).sum(axis=1)


class ConflictMemo:
    """`extra_cycles` that computes each pattern of addresses once.

    Kernels use few patterns: workgroups address LDS alike, and a shift of all lanes by whole dwords changes nothing.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, bytes], int] = {}
        # Rows of equal hashes are compared, so that any multipliers are right and these are only seldom slow.
        self._multipliers = np.random.default_rng(0).integers(1 << 62, size=LANES, dtype=np.int64) | 1

    def __call__(self, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str) -> np.ndarray:
        if mask.all():
            pattern = address - (address[:, :1] & ~3)
        else:
            first = np.take_along_axis(address, mask.argmax(axis=1)[:, None], axis=1) & ~3
            pattern = np.where(mask, address - first, np.iinfo(np.int64).max)
        _, representatives, which = np.unique(pattern @ self._multipliers, return_index=True, return_inverse=True)
        if not (pattern == pattern[representatives][which]).all():
            return extra_cycles(address, mask, nbytes, access)
        found = [self._lookup(address[i], mask[i], pattern[i], nbytes, access) for i in representatives]
        return np.array(found, np.int64)[which]

    def _lookup(self, address: np.ndarray, mask: np.ndarray, pattern: np.ndarray, nbytes: int, access: str) -> int:
        key = (nbytes, access, pattern.tobytes())
        if key not in self._known:
            self._known[key] = int(extra_cycles(address[None], mask[None], nbytes, access)[0])
        return self._known[key]
