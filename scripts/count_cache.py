"""Counts of launches, kept under build/: what the emulator counts of a code object does not change until the code object or the emulator does."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path

import mla_rt.emulator
from mla_rt.emulator.counters import LaunchCounts

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "counts"
_EMULATOR = tuple(sorted(Path(mla_rt.emulator.__path__[0]).glob("*.py")))


def counted(what: str, files: Iterable[Path], count: Callable[[], list[LaunchCounts]]) -> list[LaunchCounts]:
    """count(), or what it gave when called for the same `what` with the same contents of `files` and of the emulator's."""
    key = hashlib.sha256(what.encode())
    for file in (*files, *_EMULATOR):
        key.update(hashlib.sha256(file.read_bytes()).digest())
    kept = FOLDER / f"{key.hexdigest()[:32]}.pickle"
    if kept.is_file():
        found: list[LaunchCounts] = pickle.loads(kept.read_bytes())
        return found
    counts = count()
    FOLDER.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}")
    partial.write_bytes(pickle.dumps(counts))
    partial.replace(kept)
    return counts
