"""Compiled transposes through LDS, one for each transposed read, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from asm import instructions_of
from compiled import compiled_module

COLUMNS = 16
BYTES_A_LANE = {4: 8, 6: 12, 8: 8, 16: 8}  # by bits of an element


module = compiled_module("transpose")


def as_bytes(matrix: np.ndarray, bits: int) -> np.ndarray:
    """Elements in order, each in its `bits` bits, lowest first."""
    every_bit = np.unpackbits(np.ascontiguousarray(matrix, np.uint16).reshape(-1, 1).view(np.uint8), axis=1, bitorder="little")
    return np.packbits(every_bit[:, :bits].reshape(-1), bitorder="little")


def test_every_transposed_read_is_tested(module):
    found = {instruction.mnemonic for instruction in instructions_of(module.code_object) if "_tr_" in instruction.mnemonic}
    assert found == {"ds_read_b64_tr_b4", "ds_read_b96_tr_b6", "ds_read_b64_tr_b8", "ds_read_b64_tr_b16"}


@pytest.mark.parametrize("bits", BYTES_A_LANE)
@pytest.mark.parametrize("seed", [0, 1])
def test_transpose(module, bits, seed):
    nbytes = 64 * BYTES_A_LANE[bits]
    rows = nbytes * 8 // bits // COLUMNS
    matrix = np.random.default_rng(seed).integers(0, 1 << bits, (rows, COLUMNS), dtype=np.uint16)
    assert (matrix[:COLUMNS, :COLUMNS] != matrix[:COLUMNS, :COLUMNS].T).any()
    device = module.device
    source, result = device.to_device(as_bytes(matrix, bits)), device.allocate(nbytes)
    device.launch(module.kernel(f"transpose_b{bits}"), 1, **{"in": source, "out": result})
    got = result.download(nbytes, np.uint8)
    source.free()
    result.free()
    np.testing.assert_array_equal(got, as_bytes(matrix.T, bits))
