"""Compiled matrix products, one for each matrix instruction and choice of formats, against numpy.

The operands are laid out here lane by lane, and the result is read lane by lane, as the ISA guide's chapter on matrix instructions says.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from asm import instructions_of
from compiled import FOLDER, compiled_module

from mla_rt.emulator.mfma import MFMA, MFMA_SCALED

STEPS = 3
LANES = 64
# Items of each type: numpy or ml_dtypes type and bits.
TYPES: dict[str, tuple[type, int]] = {
    "f32": (np.float32, 32), "f64": (np.float64, 64), "f16": (np.float16, 16), "bf16": (ml_dtypes.bfloat16, 16), "i8": (np.int8, 8),
    "fp8": (ml_dtypes.float8_e4m3fn, 8), "bf8": (ml_dtypes.float8_e5m2, 8), "fp6": (ml_dtypes.float6_e2m3fn, 6),
    "bf6": (ml_dtypes.float6_e3m2fn, 6), "fp4": (ml_dtypes.float4_e2m1fn, 4),
}  # fmt: skip
CHOICES = ("fp8", "bf8", "fp6", "bf6", "fp4")  # by the number in the kernel's name
BYTES_A, BYTES_B = (1, 0, 3, 2, 3), (3, 2, 1, 0, 2)  # of the scales, by that number


@dataclass(frozen=True)
class Product:
    """What the name of a kernel says: D[blocks, dim, dim] = A[blocks, dim, depth] B[blocks, depth, dim]."""

    result: str
    dim: int
    depth: int
    blocks: int
    a: str
    b: str
    chosen: bool  # formats are a choice: operands are 8 registers

    @classmethod
    def parse(cls, name: str) -> Product:
        found = re.fullmatch(r"(?:product|scaled)_(?:(f32|f64|i32)_)?(\d+)x\d+x(\d+)(?:_(\d+)b)?_(\w+)", name)
        assert found, name
        result, dim, depth, blocks, types = found.groups()
        a, _, b = types.partition("_")
        chosen = a.isdigit()
        if chosen:
            a, b = CHOICES[int(a)], CHOICES[int(b)]
        return cls(result or "f32", int(dim), int(depth), int(blocks or 1), a, b or a, chosen)

    def row(self, lane: int) -> tuple[int, int]:
        """Of A (column of B): block and row of which a lane holds items."""
        return lane // self.dim % self.blocks, lane % self.dim

    def k(self, lane: int, bits: int) -> list[int]:
        """The k values of a lane's items, in order of their bits."""
        group = lane // (self.dim * self.blocks)
        items = self.depth * self.dim * self.blocks // LANES
        if self.chosen and bits == 8:  # two runs of 16, half the depth apart
            return [16 * group + i for i in range(16)] + [self.depth // 2 + 16 * group + i for i in range(16)]
        return [items * group + i for i in range(items)]

    def place(self, lane: int, item: int) -> tuple[int, int, int]:
        """Block, row and column of a lane's result item."""
        if self.result == "f64":
            return (lane // 4 % 4, lane // 16, lane % 4) if self.dim == 4 else (0, lane // 16 + 4 * item, lane % 16)
        if self.dim == 4:
            return lane // 4, item, lane % 4
        if self.dim == 16:
            return item // 4, 4 * (lane // 16) + item % 4, lane % 16
        return item // 16, 8 * (item % 16 // 4) + 4 * (lane // 32) + item % 4, lane % 32


def random_codes(random: np.random.Generator, type_name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bit patterns of finite numbers whose products neither overflow nor vanish in f32."""
    dtype, bits = TYPES[type_name]
    if bits >= 16:
        values = random.standard_normal(shape) * 2.0 ** random.integers(-3, 4, shape)
        return values.astype(dtype).view(f"u{bits // 8}")
    codes = random.integers(0, 1 << bits, shape, dtype=np.uint8)
    if type_name == "i8":
        return codes
    return np.where(np.isfinite(codes.view(dtype).astype(np.float64)), codes, codes & 0x3F)


def decoded(codes: np.ndarray, type_name: str) -> np.ndarray:
    return codes.view(TYPES[type_name][0]).astype(np.float64)


def operand_bytes(product: Product, codes: np.ndarray, type_name: str) -> np.ndarray:
    """codes [steps, blocks, dim, depth] (of B: transposed) as the 64 lanes' registers, uint8 [steps, 64, bytes]."""
    bits = TYPES[type_name][1]
    lanes = []
    for lane in range(LANES):
        block, row = product.row(lane)
        items = codes[:, block, row][:, product.k(lane, bits)]
        as_bits = np.unpackbits(np.ascontiguousarray(items)[..., None].view(np.uint8), axis=-1, bitorder="little")[..., :bits]
        lanes.append(np.packbits(as_bits.reshape(STEPS, -1), axis=-1, bitorder="little"))
    registers = np.stack(lanes, axis=1)
    if product.chosen:  # what a narrow format leaves unused must not matter
        registers = np.concatenate([registers, np.full((STEPS, LANES, 32 - registers.shape[2]), 0xFF, np.uint8)], axis=2)
    return registers


def scale_dwords(random: np.random.Generator, product: Product, scales: np.ndarray, byte: int) -> np.ndarray:
    """E8M0 codes [steps, dim, depth / 32] in the chosen byte of the lane that supplies each; uint32 [steps, 64], other bytes at random."""
    dwords = random.integers(0, 256, (STEPS, LANES, 4), dtype=np.uint8)
    for lane in range(LANES):
        dwords[:, lane, byte] = scales[:, lane % product.dim, lane // product.dim]
    return dwords.view(np.uint32)[..., 0]


def result_of(product: Product, raw: np.ndarray) -> np.ndarray:
    """[64, items] -> [blocks, dim, dim]; every element is in exactly one place."""
    matrix = np.full((product.blocks, product.dim, product.dim), np.nan)
    for lane in range(LANES):
        for item in range(raw.shape[1]):
            place = product.place(lane, item)
            assert np.isnan(matrix[place])
            matrix[place] = raw[lane, item]
    assert not np.isnan(matrix).any()
    return matrix


module = compiled_module("matrix")


NAMES = tuple(
    [f"product_{name}" for name in re.findall(r"^PRODUCT\((\w+),", (FOLDER / "matrix.hip").read_text(), re.MULTILINE)]
    + [f"{kind}_{shape}_{a}_{b}" for kind in ("product", "scaled") for shape in ("16x16x128", "32x32x64") for a in range(5) for b in range(5)]
)


def test_every_instruction_and_choice_is_tested(module):
    assert set(module.kernels) == set(NAMES)
    found = Counter()
    for instruction in instructions_of(module.code_object):
        if instruction.mnemonic.startswith("v_mfma"):
            encoded = instruction.encoded
            found[instruction.mnemonic, encoded.cbsz, encoded.blgp] += 1
    wanted = {(row.mnemonic, 0, 0) for row in MFMA.values()}
    wanted |= {(row.mnemonic, a, b) for row in (*MFMA_SCALED.values(), MFMA[0x2D], MFMA[0x2E]) for a in range(5) for b in range(5)}
    assert set(found) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_product(module, name):
    product, device = Product.parse(name), module.device
    random = np.random.default_rng(NAMES.index(name))
    shape = (STEPS, product.blocks, product.dim, product.depth)
    a_codes, b_codes = random_codes(random, product.a, shape), random_codes(random, product.b, shape)
    a, b = decoded(a_codes, product.a), decoded(b_codes, product.b)
    buffers = {
        "a": device.to_device(operand_bytes(product, a_codes, product.a)),
        "b": device.to_device(operand_bytes(product, b_codes, product.b)),
    }
    if name.startswith("scaled"):
        bytes_a, bytes_b = BYTES_A[CHOICES.index(product.a)], BYTES_B[CHOICES.index(product.b)]
        a_scales, b_scales = (random.integers(117, 137, (STEPS, product.dim, product.depth // 32)) for _ in range(2))
        buffers["scale_a"] = device.to_device(scale_dwords(random, product, a_scales, bytes_a))
        buffers["scale_b"] = device.to_device(scale_dwords(random, product, b_scales, bytes_b))
        a = a * np.repeat(2.0 ** (a_scales - 127), 32, axis=2)[:, None]
        b = b * np.repeat(2.0 ** (b_scales - 127), 32, axis=2)[:, None]
    dtype = np.dtype({"f32": np.float32, "f64": np.float64, "i32": np.int32}[product.result])
    items = product.blocks * product.dim**2 // LANES
    buffers["d"] = device.allocate(LANES * items * dtype.itemsize)
    try:
        device.launch(module.kernel(name), 1, **buffers, steps=np.int32(STEPS))
        got = result_of(product, buffers["d"].download((LANES, items), dtype))
    finally:
        for buffer in buffers.values():
            buffer.free()
    exact = np.einsum("sbik,sbjk->bij", a, b)
    magnitude = np.einsum("sbik,sbjk->bij", np.abs(a), np.abs(b))
    unit = {"f32": 2.0**-23, "f64": 2.0**-50, "i32": 0.0}[product.result]
    assert (np.abs(got - exact) <= STEPS * unit * magnitude).all()
