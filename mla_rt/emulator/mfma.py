"""Matrix instructions: one table of shapes, one lane map, one multiplication.

Operands are converted to float64, where the products of all narrow formats are exact; the sum over k runs in float64 too, the accumulator is
added, and the result is rounded to its type once. Hardware's order and width of accumulation are not documented, so the last bits differ
from silicon; infinities and NaNs come out as IEEE arithmetic has them.

EXEC is ignored: every lane takes part and all of D is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .instruction import Encoded, Row, Run, UnsupportedEncoding
from .operands import FIRST_VGPR, KINDS, UNSIGNED, constant_bits
from .small_floats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0_DECODE, SmallFloat, bf16_to_f32, f16_to_f32
from .state import LANES, Group

_CHUNK = 1 << 15  # items of an operand to convert and multiply at once, so that they stay in the processor's cache


@dataclass(frozen=True)
class Element:
    """An input type: bits per item, and decode(uint32 [..., dwords], contiguous) -> float64 [..., items], items in order of their bits."""

    name: str
    bits: int
    decode: Callable[[np.ndarray], np.ndarray]


def _decode_f16(registers: np.ndarray) -> np.ndarray:
    return f16_to_f32(registers.view(np.uint16)).astype(np.float64)


def _decode_bf16(registers: np.ndarray) -> np.ndarray:
    return bf16_to_f32(registers.view(np.uint16)).astype(np.float64)


def _bytes_by_table(small: SmallFloat) -> Element:
    table = small.decode.astype(np.float64)
    # Two items with each look-up: most of the time of a matrix instruction goes into these.
    pairs = np.stack([np.tile(table, 256), np.repeat(table, 256)], axis=-1).view("V16")[:, 0]
    return Element(small.name, 8, lambda registers: pairs.take(registers.view(np.uint16)).view(np.float64))


def _six_bits_by_table(small: SmallFloat) -> Element:
    table = small.decode.astype(np.float64)
    first_bit = np.arange(16) * 6  # of the 16 items in three dwords
    low, shift = first_bit // 32, (first_bit % 32).astype(np.uint64)
    high = np.minimum(low + 1, 2)  # an item that ends with a dword takes nothing from the next

    def decode(dwords: np.ndarray) -> np.ndarray:
        wide = dwords.reshape(*dwords.shape[:-1], -1, 3).astype(np.uint64)
        codes = (wide[..., low] | wide[..., high] << np.uint64(32)) >> shift & np.uint64(63)
        return table.take(codes.astype(np.uint8)).reshape(*dwords.shape[:-1], -1)

    return Element(small.name, 6, decode)


def _nibbles_by_table(small: SmallFloat) -> Element:
    table = small.decode.astype(np.float64)
    pairs = np.stack([table[np.arange(256) & 15], table[np.arange(256) >> 4]], axis=-1)

    def decode(registers: np.ndarray) -> np.ndarray:
        return pairs.take(registers.view(np.uint8), axis=0).reshape(*registers.shape[:-1], -1)

    return Element(small.name, 4, decode)


F32 = Element("f32", 32, lambda registers: registers.view(np.float32).astype(np.float64))
F64 = Element("f64", 64, lambda registers: registers.view(np.float64))
F16 = Element("f16", 16, _decode_f16)
BF16 = Element("bf16", 16, _decode_bf16)
I8 = Element("i8", 8, lambda registers: registers.view(np.int8).astype(np.float64))
FP8, BF8 = _bytes_by_table(E4M3), _bytes_by_table(E5M2)
# The formats that cbsz (A) and blgp (B) of the f8f6f4 instructions select.
F8F6F4 = (FP8, BF8, _six_bits_by_table(E2M3), _six_bits_by_table(E3M2), _nibbles_by_table(E2M1))


@dataclass(frozen=True)
class Shape:
    """D[dim, dim] = A[dim, depth] @ B[depth, dim] + C, for `blocks` independent blocks; result: the type of C and D."""

    dim: int
    depth: int
    result: type = np.float32
    blocks: int = 1

    @property
    def lane_groups(self) -> int:
        """Groups of dim * blocks lanes, each of which holds its own range of k."""
        return LANES // (self.dim * self.blocks)

    @property
    def items(self) -> int:
        """Items of A, and of B, that a lane holds."""
        return self.depth // self.lane_groups

    @property
    def result_registers(self) -> int:
        return self.dim * self.dim * self.blocks // LANES * (np.dtype(self.result).itemsize // 4)


def is_split(shape: Shape, bits: int) -> bool:
    """Whether a lane's items are two runs of 16 k values, half the depth apart, instead of one run.

    So the ISA guide's register tables lay out the 8-bit operands of the f8f6f4 instructions; its general formula, taken literally, does not.
    """
    return bits == 8 and shape.items == 32


def words_of_operand(shape: Shape, bits: int, registers: Sequence[np.ndarray]) -> np.ndarray:
    """The lane map of A, and of B transposed: registers [waves, 64] each -> dwords [waves, blocks, dim, dwords of a row], items in order of k.

    Lane l holds row l % dim of block l // dim % blocks and the k range number l // (dim * blocks).
    """
    runs = 2 if is_split(shape, bits) else 1
    in_run = len(registers) // runs
    words = np.empty((len(registers[0]), shape.blocks, shape.dim, runs, shape.lane_groups, in_run), np.uint32)
    by_register = words.transpose(3, 5, 0, 4, 1, 2)
    for i, register in enumerate(registers):
        by_register[i // in_run, i % in_run] = register.reshape(-1, shape.lane_groups, shape.blocks, shape.dim)
    return words.reshape(*words.shape[:3], -1)


def registers_of_result(shape: Shape, matrix: np.ndarray) -> np.ndarray:
    """The lane map of C and D: matrix [waves, blocks, dim, dim] -> [values a lane, waves, 64].

    A lane holds one column. Of its rows, runs of 4 lie in consecutive registers (float64: runs of 1), and the lane groups take runs in turn.
    """
    waves, run = matrix.shape[0], 1 if np.dtype(shape.result).itemsize == 8 else 4
    in_lanes = min(LANES // shape.dim, shape.dim // run)  # lane groups that share a block's rows
    lane_blocks = LANES // shape.dim // in_lanes  # blocks side by side in the lanes; further blocks follow in the registers
    parts = matrix.reshape(waves, -1, lane_blocks, shape.dim // run // in_lanes, in_lanes, run, shape.dim)
    return parts.transpose(1, 3, 5, 0, 4, 2, 6).reshape(-1, waves, LANES)


def matrix_of_result(shape: Shape, values: np.ndarray) -> np.ndarray:
    """The inverse of `registers_of_result`."""
    waves, run = values.shape[1], 1 if np.dtype(shape.result).itemsize == 8 else 4
    in_lanes = min(LANES // shape.dim, shape.dim // run)
    lane_blocks = LANES // shape.dim // in_lanes
    parts = values.reshape(-1, shape.dim // run // in_lanes, run, waves, in_lanes, lane_blocks, shape.dim)
    return parts.transpose(3, 0, 5, 1, 4, 2, 6).reshape(waves, shape.blocks, shape.dim, shape.dim)


def block_scales(shape: Shape, registers: np.ndarray, byte: int) -> np.ndarray:
    """The lane map of the E8M0 scales: uint32 [waves, 64] -> factors, float64 [waves, dim, blocks of 32 k].

    The scale of row r and block b is the chosen byte of lane r + dim * b, whichever lanes hold the block's data.
    """
    factors = E8M0_DECODE.take(registers >> np.uint32(8 * byte) & np.uint32(0xFF))
    return factors.reshape(registers.shape[0], shape.depth // 32, shape.dim).swapaxes(1, 2)


Factors = Callable[[Group], np.ndarray]
ReadChunk = Callable[[slice], np.ndarray]


def _operand(
    encoded: Encoded, source: int, accumulator: int, shape: Shape, element: Element, factors: Factors | None
) -> Callable[[Group], ReadChunk]:
    """Reader of A, or of B transposed: of a group, then of a slice of its waves: float64 [waves, blocks, dim, depth]."""
    if source < FIRST_VGPR:
        raise UnsupportedEncoding(f"matrix operand code {source}")
    first = source - FIRST_VGPR + (encoded.accum_offset if accumulator else 0)
    count = shape.items * element.bits // 32

    def read(group: Group) -> ReadChunk:
        registers = [group.read_vgpr(first + i) for i in range(count)]
        scale = None if factors is None else factors(group)

        def read_chunk(waves: slice) -> np.ndarray:
            matrix = element.decode(words_of_operand(shape, element.bits, [register[waves] for register in registers]))
            if scale is not None:
                in_blocks = matrix.reshape(len(matrix), shape.dim, -1, 32)
                in_blocks *= scale[waves, :, :, None]
            return matrix

        return read_chunk

    return read


def _accumulator(encoded: Encoded, shape: Shape) -> Callable[[Group], np.ndarray]:
    """Reader of C as it lies in the registers: [values a lane, waves, 64] of the result's type, or a constant that broadcasts to it."""
    dtype = np.dtype(shape.result)
    if encoded.src2 < FIRST_VGPR:
        kind = KINDS[f"{dtype.kind}{8 * dtype.itemsize}"]
        bits = constant_bits(encoded.src2, kind, None)
        if bits is None:
            raise UnsupportedEncoding(f"accumulator operand code {encoded.src2}")
        constant = np.array([bits], UNSIGNED[kind.bits]).view(dtype)
        return lambda group: constant
    first = encoded.src2 - FIRST_VGPR + (encoded.accum_offset if encoded.acc_cd else 0)

    def read(group: Group) -> np.ndarray:
        if dtype.itemsize == 4:
            return np.stack([group.read_vgpr(first + i) for i in range(shape.result_registers)]).view(dtype)
        pairs = [np.stack([group.read_vgpr(first + i), group.read_vgpr(first + i + 1)], axis=-1) for i in range(0, shape.result_registers, 2)]
        return np.stack(pairs).view(dtype)[..., 0]

    return read


def _multiply_add(encoded: Encoded, shape: Shape, a: Element, b: Element, factors: tuple[Factors | None, Factors | None] = (None, None)) -> Run:
    read_a = _operand(encoded, encoded.src0, encoded.acc & 1, shape, a, factors[0])
    read_b = _operand(encoded, encoded.src1, encoded.acc >> 1, shape, b, factors[1])
    read_c = _accumulator(encoded, shape)
    destination = encoded.vdst + (encoded.accum_offset if encoded.acc_cd else 0)
    waves_at_once = max(1, _CHUNK // (shape.dim * shape.depth * shape.blocks))

    def run(group: Group) -> None:
        chunk_of_a, chunk_of_b = read_a(group), read_b(group)
        product = np.empty((group.n, shape.blocks, shape.dim, shape.dim))
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, group.n, waves_at_once):
                waves = slice(start, start + waves_at_once)
                np.matmul(chunk_of_a(waves), chunk_of_b(waves).swapaxes(2, 3), out=product[waves])
            values = _add_to(read_c(group), registers_of_result(shape, product))
        words = values.view(np.uint32)
        if values.dtype.itemsize == 4:
            for i in range(shape.result_registers):
                group.write_vgpr_all_lanes(destination + i, words[i])
        else:
            for i in range(shape.result_registers):
                group.write_vgpr_all_lanes(destination + i, words[i // 2, :, i % 2 :: 2])

    return run


def _add_to(accumulator: np.ndarray, product: np.ndarray) -> np.ndarray:
    if accumulator.dtype.kind == "i":  # exact: |product| < 2**31; the sum wraps
        return accumulator + product.astype(np.int32)
    return (accumulator.astype(np.float64) + product).astype(accumulator.dtype)


def _plain(shape: Shape, a: Element, b: Element) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        if encoded.cbsz or encoded.abid or encoded.blgp:
            raise UnsupportedEncoding("broadcast (cbsz, abid), lane permutation or negation (blgp) of a matrix operand")
        return _multiply_add(encoded, shape, a, b)

    return bind


def _f8f6f4(shape: Shape) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        if encoded.cbsz >= len(F8F6F4) or encoded.blgp >= len(F8F6F4):
            raise UnsupportedEncoding(f"operand format cbsz {encoded.cbsz}, blgp {encoded.blgp}")
        scaled = encoded.encoding == "VOP3PX2"
        if encoded.abid != (1 if scaled else 0):
            raise UnsupportedEncoding(f"abid {encoded.abid} on a {'scaled' if scaled else 'plain'} f8f6f4 instruction")
        factors = (_scale_reader(encoded, shape, 0), _scale_reader(encoded, shape, 1)) if scaled else (None, None)
        return _multiply_add(encoded, shape, F8F6F4[encoded.cbsz], F8F6F4[encoded.blgp], factors)

    return bind


def _scale_reader(encoded: Encoded, shape: Shape, side: int) -> Factors:
    """Reader of the scale factors of A (side 0) or B (side 1)."""
    code = encoded.scale_src1 if side else encoded.scale_src0
    byte = (encoded.scale_op_sel >> side & 1) | (encoded.scale_op_sel_hi >> side & 1) << 1
    if code >= FIRST_VGPR:
        register = code - FIRST_VGPR
        return lambda group: block_scales(shape, group.read_vgpr(register), byte)
    # The guide allows a floating-point inline constant, of which the exponent is taken; LLVM's assembler does not emit it.
    bits = constant_bits(code, KINDS["f32"], None)
    if bits is None or not 240 <= code <= 248:
        raise UnsupportedEncoding(f"matrix scale operand code {code}")
    factor = E8M0_DECODE[bits >> 23 & 0xFF]
    return lambda group: np.broadcast_to(factor, (group.n, shape.dim, shape.depth // 32))


def _shapes() -> dict[int, tuple[str, Shape, Element, Element]]:
    """Opcode -> mnemonic, shape, types of A and B, of the instructions without a choice of formats."""
    i32, f64 = np.int32, np.float64
    rows: dict[int, tuple[str, Shape, Element, Element]] = {}

    def add(opcode: int, name: str, shape: Shape, a: Element, b: Element | None = None) -> None:
        rows[opcode] = (f"v_mfma_{name}", shape, a, b or a)

    add(0x35, "f32_16x16x32_bf16", Shape(16, 32), BF16)
    add(0x36, "i32_16x16x64_i8", Shape(16, 64, i32), I8)
    add(0x37, "f32_32x32x16_bf16", Shape(32, 16), BF16)
    add(0x38, "i32_32x32x32_i8", Shape(32, 32, i32), I8)
    add(0x40, "f32_32x32x1_2b_f32", Shape(32, 1, blocks=2), F32)
    add(0x41, "f32_16x16x1_4b_f32", Shape(16, 1, blocks=4), F32)
    add(0x42, "f32_4x4x1_16b_f32", Shape(4, 1, blocks=16), F32)
    add(0x44, "f32_32x32x2_f32", Shape(32, 2), F32)
    add(0x45, "f32_16x16x4_f32", Shape(16, 4), F32)
    add(0x48, "f32_32x32x4_2b_f16", Shape(32, 4, blocks=2), F16)
    add(0x49, "f32_16x16x4_4b_f16", Shape(16, 4, blocks=4), F16)
    add(0x4A, "f32_4x4x4_16b_f16", Shape(4, 4, blocks=16), F16)
    add(0x4C, "f32_32x32x8_f16", Shape(32, 8), F16)
    add(0x4D, "f32_16x16x16_f16", Shape(16, 16), F16)
    add(0x50, "i32_32x32x4_2b_i8", Shape(32, 4, i32, blocks=2), I8)
    add(0x51, "i32_16x16x4_4b_i8", Shape(16, 4, i32, blocks=4), I8)
    add(0x52, "i32_4x4x4_16b_i8", Shape(4, 4, i32, blocks=16), I8)
    add(0x54, "f32_16x16x32_f16", Shape(16, 32), F16)
    add(0x55, "f32_32x32x16_f16", Shape(32, 16), F16)
    add(0x56, "i32_32x32x16_i8", Shape(32, 16, i32), I8)
    add(0x57, "i32_16x16x32_i8", Shape(16, 32, i32), I8)
    add(0x5D, "f32_32x32x4_2b_bf16", Shape(32, 4, blocks=2), BF16)
    add(0x5E, "f32_16x16x4_4b_bf16", Shape(16, 4, blocks=4), BF16)
    add(0x5F, "f32_4x4x4_16b_bf16", Shape(4, 4, blocks=16), BF16)
    add(0x60, "f32_32x32x8_bf16", Shape(32, 8), BF16)
    add(0x61, "f32_16x16x16_bf16", Shape(16, 16), BF16)
    add(0x6E, "f64_16x16x4_f64", Shape(16, 4, f64), F64)
    add(0x6F, "f64_4x4x4_4b_f64", Shape(4, 4, f64, blocks=4), F64)
    for first, size, shape in ((0x70, "16x16x32", Shape(16, 32)), (0x74, "32x32x16", Shape(32, 16))):
        for i, (a, b) in enumerate(((BF8, BF8), (BF8, FP8), (FP8, BF8), (FP8, FP8))):
            add(first + i, f"f32_{size}_{a.name}_{b.name}", shape, a, b)
    return rows


_SHAPES = _shapes()
_F8F6F4_SHAPES = {0x2D: Shape(16, 128), 0x2E: Shape(32, 64)}
# The f8f6f4 rows serve the plain instruction and the 16-byte scaled one (VOP3PX2), whose opcode is that of its second half.
MFMA: dict[int, Row] = {
    0x2D: Row("v_mfma_f32_16x16x128_f8f6f4", _f8f6f4(_F8F6F4_SHAPES[0x2D])),
    0x2E: Row("v_mfma_f32_32x32x64_f8f6f4", _f8f6f4(_F8F6F4_SHAPES[0x2E])),
    **{opcode: Row(name, _plain(shape, a, b)) for opcode, (name, shape, a, b) in _SHAPES.items()},
}
MFMA_SCALED: dict[int, Row] = {opcode: Row(MFMA[opcode].mnemonic.replace("mfma_", "mfma_scale_"), MFMA[opcode].bind) for opcode in (0x2D, 0x2E)}


def layout_of(encoded: Encoded) -> tuple[Shape, Element, Element]:
    """Shape and operand types of a matrix instruction."""
    if encoded.op in _F8F6F4_SHAPES:
        return _F8F6F4_SHAPES[encoded.op], F8F6F4[encoded.cbsz], F8F6F4[encoded.blgp]
    _, shape, a, b = _SHAPES[encoded.op]
    return shape, a, b
