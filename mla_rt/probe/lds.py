"""LDS: transposed reads, and DMA from memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .experiment import LANES, Experiment, pack, unpack

# As in probe.hip, which exports them.
WORDS, MARKER, IMMEDIATE = 512, 0xA5A5A5A5, 256
SOURCE = 0x1000 + np.arange(WORDS, dtype=np.uint32)  # what the source of a DMA holds


def transposed(bits: int) -> Experiment:
    """Every element carries its number, `bits` bits of it a workgroup."""
    count = {16: 4, 8: 8, 6: 16, 4: 16}[bits]
    number = np.arange(LANES * count).reshape(LANES, count)
    passes = -(-10 // bits)
    words = np.stack([pack(number >> bits * i & ((1 << bits) - 1), bits, 4) for i in range(passes)])

    def read(shown: np.ndarray) -> np.ndarray:
        parts = [unpack(shown[i], bits, count) << bits * i for i in range(passes)]
        return np.bitwise_or.reduce(parts)

    lane, item = np.arange(LANES)[:, None], np.arange(count)
    return Experiment(
        kernel=f"probe_read_transposed_{bits}", grid=passes, arrays={"words": words.view(np.int32)}, result=(passes, LANES, 4), read=read,
        assumed=lane // 16 * 16 * count + 16 * item + lane % 16, axes=("lane", "element"), alternatives={"nothing is exchanged": number},
    )  # fmt: skip


def _dma(kernel: str, assumed: np.ndarray, alternatives: Mapping[str, np.ndarray], source: np.ndarray = SOURCE, **values: Any) -> Experiment:
    """assumed: what LDS must hold in the end, uint32 [512]."""
    return Experiment(
        kernel=kernel, grid=1, arrays={"source": source.view(np.uint8)}, result=(WORDS,), read=lambda words: words, assumed=assumed,
        axes=("LDS dword",), values=values, alternatives=alternatives,
    )  # fmt: skip


def _lds(first: int, words: np.ndarray) -> np.ndarray:
    """LDS that holds the marker but for `words` from dword `first` on."""
    shown = np.full(WORDS, MARKER, np.uint32)
    shown[first : first + len(words)] = words
    return shown


def dma_immediate(kernel: str) -> Experiment:
    step, count = IMMEDIATE // 4, LANES * 4
    from_offset, from_start = SOURCE[step : step + count], SOURCE[:count]
    alternatives = {"on the side of memory only": _lds(0, from_offset), "on the side of LDS only": _lds(step, from_start)}
    return _dma(kernel, _lds(step, from_offset), alternatives)


def dma_bounds() -> Experiment:
    """The range ends in the middle of lane 40's 16 bytes."""
    num_bytes = 40 * 16 + 8
    word, words = np.arange(LANES * 4), SOURCE[: LANES * 4]
    inside = word < num_bytes // 4
    alternatives = {
        "LDS keeps what it held": _lds(0, np.where(inside, words, np.uint32(MARKER))),
        "a lane that is partly out of range gets 0 everywhere": _lds(0, np.where(word < 40 * 4, words, np.uint32(0))),
        "there is no bound": _lds(0, words),
    }
    return _dma("probe_buffer_dma_bounds", _lds(0, np.where(inside, words, np.uint32(0))), alternatives, num_bytes=np.int32(num_bytes))


def dma_2() -> Experiment:
    """Lane l takes the high half of source dword l, whose top bit is set: it must not be taken for a sign."""
    halves = 0x9000 + np.arange(LANES, dtype=np.uint32)
    alternatives = {
        "the dword's high half keeps what it held": _lds(0, halves | np.uint32(MARKER & 0xFFFF0000)),
        "the dword's high half is the sign": _lds(0, halves | np.uint32(0xFFFF0000)),
    }
    return _dma("probe_dma_2", _lds(0, halves), alternatives, source=halves << np.uint32(16) | np.uint32(0x7777))
