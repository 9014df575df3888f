"""How undefined bits pass through the instructions whose result needs only a part of its sources.

A rule takes the sources of one execution and gives the mask of each register that the instruction writes, in the order of writing (a list), or
one mask for all. Masks are uint32 [waves, 64] or [waves] with a 1 for each undefined bit, None where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import mfma
from . import vector_integer as vi
from .instruction import Encoded, Instruction
from .lanes import Dpp, sdwa_merge, sdwa_select
from .operands import FIRST_VGPR, KINDS, SCC, constant_bits
from .shadow import ALL, Shadow
from .state import EXEC, LANES, VCC, Group, bits_to_lanes

Mask = Any  # uint32 array or None
Masks = list[Mask] | np.ndarray | None
U32, U64 = np.uint32, np.uint64
ZERO = U32(0)
# Instructions that read an SGPR pair as one bit a lane, VCC unless the encoding names another.
_MASK_READERS = ("v_cndmask", "v_addc_co", "v_subb_co", "v_subbrev_co", "v_div_fmas")


class Sources:
    """The sources of an instruction that is being executed, by what it has read so far and by the fields of its encoding."""

    def __init__(self, shadow: Shadow, group: Group, instruction: Instruction, vector: list[int], scalar: list[int]):
        self.shadow, self.group, self.encoded, self.mnemonic = shadow, group, instruction.encoded, instruction.mnemonic
        self._vector, self._scalar = vector, scalar

    def any(self) -> bool:
        """Whether anything undefined was read at all."""
        waves = self.group.waves
        return any(self.shadow.read_vector(register, waves) is not None for register in self._vector) or any(
            self.shadow.read_scalar(register, waves) is not None for register in self._scalar
        )

    def lanes(self, skip_last: int | None = None) -> np.ndarray:
        """Lanes that have read something undefined: bool, broadcastable to [waves, 64]. skip_last: a register whose last read does not count."""
        found = np.zeros((self.group.n, 1), np.bool_)
        registers = self._vector
        if skip_last is not None and registers and registers[-1] == skip_last:
            registers = registers[:-1]
        for register in registers:
            mask = self.shadow.read_vector(register, self.group.waves)
            if mask is not None:
                found = found | (mask != 0)
        by_lane = self.mnemonic.startswith(_MASK_READERS)
        for register in self._scalar:
            mask = self.shadow.read_scalar(register, self.group.waves)
            if mask is not None and by_lane:
                pair = np.zeros((self.group.n, 2), U32)
                pair[:, register & 1] = mask
                found = found | bits_to_lanes(pair)
            elif mask is not None:
                found = found | (mask != 0)[:, None]
        return found

    def whole(self, skip_last: int | None = None) -> np.ndarray:
        """The result that any undefined source makes undefined as a whole."""
        found = np.where(self.lanes(skip_last), ALL, ZERO)
        return found[:, 0] if self.encoded.encoding.startswith("SOP") or (found.shape[1] == 1 and self.is_scalar) else found

    @property
    def is_scalar(self) -> bool:
        return self.mnemonic.startswith("s_")

    def mask(self, code: int, half: int = 0) -> np.ndarray:
        """Mask of an operand code (`half`: the second register of a pair), broadcastable to [waves, 64] ([waves] in scalar instructions)."""
        found: Mask = None
        if code >= FIRST_VGPR:
            found = self.shadow.read_vector(code - FIRST_VGPR + half, self.group.waves)
        elif code <= EXEC + 1:
            found = self.shadow.read_scalar(code + half, self.group.waves)
        elif code == SCC and not half:
            found = self.shadow.read_scalar(SCC, self.group.waves)
        if found is None:
            return np.zeros((1,) if self.is_scalar else (1, 1), U32)
        return found if self.is_scalar or code >= FIRST_VGPR else found[:, None]

    def value(self, code: int, half: int = 0, bits: int = 32) -> np.ndarray:
        """Value of an operand code, likewise. bits: of the operand, which decides how a constant is widened."""
        state, waves = self.group.state, self.group.waves
        if code >= FIRST_VGPR:
            return state.vgpr[code - FIRST_VGPR + half, waves]
        if code <= EXEC + 1:
            found = state.sgpr[code + half, waves]
        elif code == SCC:
            found = state.scc[waves].astype(U32)
        else:
            constant = constant_bits(code, KINDS["u64" if bits == 64 else "u32"], self.encoded.fields.get("literal")) or 0
            found = np.array([constant >> 32 * half & 0xFFFFFFFF], U32)
        return found if self.is_scalar else found[:, None]

    def codes(self, count: int = 1) -> list[int]:
        """Operand codes of the first `count` sources of a vector instruction."""
        fields = self.encoded.fields
        found = [fields["src0"]]
        if "vsrc1" in fields:
            found.append(fields["vsrc1"] + FIRST_VGPR)
        return (found + [fields[name] for name in ("src1", "src2") if name in fields])[:count]

    def pair(self, code: int) -> np.ndarray:
        """Mask of a 64-bit operand: uint64."""
        return self.mask(code).astype(U64) | self.mask(code, 1).astype(U64) << U64(32)


Rule = Callable[[Sources], Masks]


def rule_for(instruction: Instruction) -> Rule | None:
    """The rule of an instruction; None for the general one."""
    encoded, name = instruction.encoded, instruction.mnemonic
    if encoded.encoding in ("VOP3P-MAI", "VOP3PX2"):
        return _matrix
    if encoded.encoding.endswith("_DPP"):
        return _dpp(encoded)
    if encoded.encoding.endswith("_SDWA"):
        return _sdwa
    if name.startswith(_PACKED) and encoded.encoding == "VOP3P":
        return _packed(encoded, name)
    if name in _FIELDS:
        return _field(encoded, name)
    if name in _HALF_SELECT and encoded.encoding == "VOP3":
        return _half_select
    if name.startswith(("v_cmp_", "v_cmpx_")):
        return lambda sources: np.broadcast_to(sources.whole(), sources.group.mask.shape)
    return None if encoded.fields.get("clamp") else _RULES.get(name)


# ---- bitwise: value a with mask ma, and so on


def _and(a: Any, ma: Any, b: Any, mb: Any) -> tuple[Any, Any]:
    return a & b, (ma & (b | mb)) | (mb & (a | ma))


def _or(a: Any, ma: Any, b: Any, mb: Any) -> tuple[Any, Any]:
    return a | b, (ma & (~b | mb)) | (mb & (~a | ma))


def _xor(a: Any, ma: Any, b: Any, mb: Any) -> tuple[Any, Any]:
    return a ^ b, ma | mb


def _chain(*operations: Callable[..., tuple[Any, Any]]) -> Rule:
    """v_op1_op2: op2(op1(src0, src1), src2)."""

    def rule(sources: Sources) -> Masks:
        codes = sources.codes(len(operations) + 1)
        value, mask = sources.value(codes[0]), sources.mask(codes[0])
        for operation, code in zip(operations, codes[1:], strict=True):
            value, mask = operation(value, mask, sources.value(code), sources.mask(code))
        return np.asarray(mask)

    return rule


def _shifted_left(a: Any, ma: Any, b: Any, mb: Any) -> tuple[Any, Any]:
    """An undefined amount makes all undefined."""
    amount = b & U32(31)
    return a << amount, np.where(mb & U32(31) != 0, ALL, ma << amount)


def _xnor(a: Any, ma: Any, b: Any, mb: Any) -> tuple[Any, Any]:
    return ~(a ^ b), ma | mb


def _through(count: int, compute: Callable[..., Any], deciding: tuple[int, ...], wide: tuple[int, ...] = ()) -> Rule:
    """A function that only moves bits, applied to the masks. deciding: sources that say how (their values are used, and must be defined);
    wide: those of 64 bits."""

    def rule(sources: Sources) -> Masks:
        codes = sources.codes(count)
        arguments, unknown = [], np.zeros((1, 1), np.bool_)
        for i, code in enumerate(codes):
            if i in deciding:
                unknown = unknown | (sources.mask(code) != 0)
                arguments.append(sources.value(code))
            else:
                arguments.append(sources.pair(code) if i in wide else sources.mask(code))
        found = compute(*arguments)
        if found.dtype.itemsize == 8:
            found = np.ascontiguousarray(found).view(U64)
            parts = [found.astype(U32), (found >> U64(32)).astype(U32)]
            return [np.where(unknown, ALL, part) for part in parts]
        return np.where(unknown, ALL, np.ascontiguousarray(found).view(U32))

    return rule


def _permute_bytes(a: Any, b: Any, selector: Any) -> Any:
    """v_perm_b32 of masks: the constant bytes (selector 12 and above) are defined."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    choice = np.minimum(np.ascontiguousarray(selector).view(np.uint8), 12).view(U32)
    return vi._perm(a, b, choice)


def _choose(sources: Sources) -> Masks:
    """v_cndmask: an undefined condition leaves defined what is the same on both sides."""
    fields = sources.encoded.fields
    if fields.get("neg") or fields.get("abs"):
        return sources.whole()
    codes = sources.codes(3)
    condition = codes[2] if len(codes) > 2 else VCC
    group = sources.group
    lanes = bits_to_lanes(_pair_of_waves(sources, sources.value, condition))
    unknown = bits_to_lanes(_pair_of_waves(sources, sources.mask, condition))
    (a, ma), (b, mb) = ((sources.value(code), sources.mask(code)) for code in codes[:2])
    return np.broadcast_to(np.where(unknown, ma | mb | (a ^ b), np.where(lanes, mb, ma)), group.mask.shape)


def _pair_of_waves(sources: Sources, read: Callable[[int, int], np.ndarray], code: int) -> np.ndarray:
    pair = np.empty((sources.group.n, 2), U32)
    for half in range(2):
        pair[:, half] = np.ravel(read(code, half))
    return pair


def _insert_bits(sources: Sources) -> Masks:
    """v_bfi: (a & b) | (~a & c)."""
    (a, ma), (b, mb), (c, mc) = ((sources.value(code), sources.mask(code)) for code in sources.codes(3))
    return (a & mb) | (~a & mc) | (ma & ((b ^ c) | mb | mc))


def _upwards(mask: Any) -> Any:
    """Sums and products modulo 2**n: an undefined bit spoils itself and those above it."""
    return mask | (~mask + mask.dtype.type(1))


def _sum(count: int, shifted: int | None = None) -> Rule:
    """A sum or product of 32 bits. shifted: the place of the source by whose value the sources before it are shifted left."""

    def rule(sources: Sources) -> Masks:
        found, unknown = np.zeros((1, 1), U32), np.zeros((1, 1), np.bool_)
        for i, code in enumerate(sources.codes(count)):
            if i == shifted:
                found, unknown = found << (sources.value(code) & U32(31)), sources.mask(code) != 0
            else:
                found = found | sources.mask(code)
        return np.where(unknown, ALL, _upwards(found))

    return rule


def _halves_of(wide: Any) -> list[Mask]:
    return [wide.astype(U32), (wide >> U64(32)).astype(U32)]


def _multiply_add_64(sources: Sources) -> Masks:
    """v_mad_u64_u32: compilers leave the upper half of src2 undefined where they want the lower half of the result. Then the carry, for each lane."""
    a, b, c = sources.codes(3)
    found = _upwards(sources.mask(a).astype(U64) | sources.mask(b) | sources.pair(c))
    lanes = np.where(found != 0, ALL, ZERO)
    return [*_halves_of(found), lanes, lanes]


def _shift_add_64(sources: Sources) -> Masks:
    a, shift, c = sources.codes(3)
    found = _upwards(sources.pair(a) << (sources.value(shift) & U32(7)).astype(U64) | sources.pair(c))
    return [np.where(sources.mask(shift) != 0, ALL, half) for half in _halves_of(found)]


def _pack_of_two(sources: Sources) -> Masks:
    """A 16-bit result from each source."""
    low, high = (sources.mask(code) for code in sources.codes(2))
    return np.where(low != 0, U32(0xFFFF), ZERO) | np.where(high != 0, U32(0xFFFF0000), ZERO)


def _pack_halves(sources: Sources) -> Masks:
    """v_pack_b32_f16: the half of each source that op_sel names."""
    select = sources.encoded.fields.get("op_sel", 0)
    low, high = (sources.mask(code) >> U32(16 * (select >> i & 1)) & U32(0xFFFF) for i, code in enumerate(sources.codes(2)))
    return np.where(low != 0, U32(0xFFFF), ZERO) | np.where(high != 0, U32(0xFFFF0000), ZERO)


def _of_part(low: int, bits: int, registers: int = 1) -> Rule:
    """Only some bits of the source count."""

    def rule(sources: Sources) -> Masks:
        part = sources.mask(sources.codes()[0]) >> U32(low) & U32((1 << bits) - 1)
        if registers == 1:
            return np.where(part != 0, ALL, ZERO)
        width = bits // registers
        return [np.where(part >> U32(i * width) & U32((1 << width) - 1) != 0, ALL, ZERO) for i in range(registers)]

    return rule


def _multiply_add_64(sources: Sources) -> Masks:
    """v_mad_u64_u32, v_mad_i64_i32: sums carry upwards only, so the high half of the addend does not reach the low half of the result. (Compilers
    leave it undefined where they want a 32-bit result.) Then the carry, a bit for each lane of an SGPR pair."""
    first, second, addend = sources.codes()[:3]
    low = (sources.mask(first) | sources.mask(second) | sources.mask(addend)) != 0
    high = low | (sources.mask(addend, 1) != 0)
    low, high = (np.broadcast_to(np.where(part, ALL, ZERO), sources.group.mask.shape) for part in (low, high))
    return [low, high, high, high]


# ---- across lanes


def _read_first_lane(sources: Sources) -> Masks:
    group = sources.group
    mask = np.broadcast_to(sources.mask(sources.codes()[0]), group.mask.shape)
    return mask[np.arange(group.n), group.mask.argmax(axis=1)]


def _read_lane(sources: Sources) -> Masks:
    code, select = sources.codes(2)
    group = sources.group
    lane = np.broadcast_to(np.ravel(sources.value(select)) & U32(63), (group.n,)).astype(np.intp)
    found = np.broadcast_to(sources.mask(code), group.mask.shape)[np.arange(group.n), lane]
    return np.where(np.ravel(sources.mask(select)) != 0, ALL, found)


def _permlane_swap(row: int) -> Rule:
    def rule(sources: Sources) -> Masks:
        shape = (sources.group.n, LANES // (2 * row), 2, row)
        a, b = (
            np.broadcast_to(sources.mask(code), sources.group.mask.shape).reshape(shape).copy()
            for code in (sources.encoded.vdst + FIRST_VGPR, sources.encoded.src0)
        )
        a[:, :, 1], b[:, :, 0] = b[:, :, 0].copy(), a[:, :, 1].copy()
        return [a.reshape(-1, LANES), b.reshape(-1, LANES)]

    return rule


def _swap(sources: Sources) -> Masks:
    return [np.array(sources.mask(code)) for code in (sources.encoded.src0, sources.encoded.vdst + FIRST_VGPR)]


def _backward_permute(sources: Sources) -> Masks:
    """ds_bpermute: the mask of the lane that the address names; nothing is undefined in a lane that EXEC disables."""
    encoded, group = sources.encoded, sources.group
    offset = U32(encoded.offset0 | encoded.offset1 << 8)
    lane = (sources.value(encoded.addr + FIRST_VGPR) + offset >> U32(2) & U32(63)).astype(np.intp)
    offered = np.where(group.mask, sources.mask(encoded.data0 + FIRST_VGPR), ZERO)
    return np.where(sources.mask(encoded.addr + FIRST_VGPR) & U32(0xFC) != 0, ALL, np.take_along_axis(offered, lane, axis=1))


def _any_lane(sources: Sources) -> Masks:
    """An exchange that is not followed lane by lane: one undefined active lane makes all undefined."""
    found = (np.broadcast_to(sources.lanes(), sources.group.mask.shape) & sources.group.mask).any(axis=1, keepdims=True)
    return np.broadcast_to(np.where(found, ALL, ZERO), sources.group.mask.shape)


def _dpp(encoded: Encoded) -> Rule:
    """src0 comes from other lanes; where it comes from none, it is 0 or nothing is written."""
    dpp = Dpp(encoded)
    move = encoded.op == 1 and encoded.encoding == "VOP1_DPP"

    def rule(sources: Sources) -> Masks:
        moved = sources.mask(encoded.src0)
        if moved.shape[1] > 1:
            moved = np.where(dpp.valid(sources.group), moved[:, dpp.source], ZERO)
        if move:
            return np.broadcast_to(moved, sources.group.mask.shape)
        found = moved != 0
        if "vsrc1" in encoded.fields:
            found = found | (sources.mask(encoded.vsrc1 + FIRST_VGPR) != 0)
        for register in sources._vector:
            if register not in (encoded.src0 - FIRST_VGPR, encoded.fields.get("vsrc1")):
                found = found | (sources.mask(register + FIRST_VGPR) != 0)
        return np.broadcast_to(np.where(found, ALL, ZERO), sources.group.mask.shape)

    return rule


# ---- parts of registers


def _sdwa(sources: Sources) -> Masks:
    """Selected bytes or words of the sources, and of the destination."""
    encoded = sources.encoded
    fields = encoded.fields
    found = sdwa_select(sources.mask(encoded.src0), encoded.src0_sel, False) != 0
    if "vsrc1" in fields:
        code = fields["vsrc1"] + (0 if fields["s1"] else FIRST_VGPR)
        found = found | (sdwa_select(sources.mask(code), fields["src1_sel"], False) != 0)
    found = np.broadcast_to(found, sources.group.mask.shape)
    if "dst_sel" not in fields:  # a compare
        return np.where(found, ALL, ZERO)
    if encoded.encoding == "VOP1_SDWA" and sources.mnemonic == "v_mov_b32":
        value = sdwa_select(sources.mask(encoded.src0), encoded.src0_sel, bool(encoded.src0_sext))
    else:
        value = np.where(found, ALL, ZERO)
    unused = encoded.dst_unused
    if (unused == 0 and encoded.dst_sel < 6) or unused == 2:
        return sdwa_merge(value, sources.mask(encoded.vdst + FIRST_VGPR), encoded.dst_sel, unused)
    return value


def _keep_field(low: int, bits: int) -> Rule:
    """The sources decide one field of the destination; the rest stays. (The last register read is the destination's old value.)"""
    field = U32(((1 << bits) - 1) << low)

    def rule(sources: Sources) -> Masks:
        register = sources.encoded.vdst
        old = sources.mask(register + FIRST_VGPR)
        return (old & ~field) | (sources.whole(skip_last=register) & field)

    return rule


def _half_select(sources: Sources) -> Masks:
    return _keep_field(16 * (sources.encoded.op_sel >> 3 & 1), 16)(sources)


_HALF_SELECT = frozenset(
    [f"v_{name}{kind}" for name in ("min3_", "max3_", "med3_") for kind in ("i16", "u16", "f16")]
    + ["v_mad_u16", "v_mad_i16", "v_add_i16", "v_sub_i16", "v_fma_f16", "v_div_fixup_f16"]
    + ["v_ashr_pk_i8_i32", "v_ashr_pk_u8_i32", "v_bitop3_b16"]
)
_SCALED = "v_cvt_scalef32_"
# Conversions into a part of the destination -> its bits.
_FIELDS = {
    **{f"v_cvt_pk_{small}_f32": 16 for small in ("fp8", "bf8")},
    **{f"v_cvt_sr_{small}_f32": 8 for small in ("fp8", "bf8")},
    **{f"v_cvt_sr_{wide}_f32": 16 for wide in ("f16", "bf16")},
    **{f"{_SCALED}pk_{small}_{wide}": 16 for small in ("fp8", "bf8") for wide in ("f32", "f16", "bf16")},
    **{f"{_SCALED}sr_{small}_{wide}": 8 for small in ("fp8", "bf8") for wide in ("f32", "f16", "bf16")},
    **{f"{_SCALED}{prefix}pk_fp4_{wide}": 8 for prefix in ("", "sr_") for wide in ("f32", "f16", "bf16")},
    **{f"{_SCALED}f16_{small}": 16 for small in ("fp8", "bf8")},
}


def _field(encoded: Encoded, name: str) -> Rule:
    bits = _FIELDS[name]
    return _keep_field(16 * (encoded.op_sel >> 3) if bits == 16 else 8 * (encoded.op_sel >> 2), bits)


def _widen(bits: int, registers: int) -> Rule:
    """v_cvt_scalef32_pk_*: one element of `bits` for each half (registers 1) or each register; op_sel says where they begin."""

    def rule(sources: Sources) -> Masks:
        source, scale = sources.codes(2)
        select = sources.encoded.op_sel
        part = sources.mask(source) >> U32(16 * (select & 1) if bits == 8 else 8 * (select & 3))
        low, high = (part >> U32(i * bits) & U32((1 << bits) - 1) | sources.mask(scale) & U32(0x7F800000) for i in range(2))
        if registers == 2:
            return [np.where(each != 0, ALL, ZERO) for each in (low, high)]
        return np.where(low != 0, U32(0xFFFF), ZERO) | np.where(high != 0, U32(0xFFFF0000), ZERO)

    return rule


_PACKED = ("v_pk_",)


def _packed(encoded: Encoded, name: str) -> Rule:
    """Two results: of halves, or of registers of a pair."""
    select = encoded.op_sel, encoded.op_sel_hi
    move, wide = name == "v_pk_mov_b32", name in ("v_pk_mov_b32", "v_pk_fma_f32", "v_pk_mul_f32", "v_pk_add_f32")

    def rule(sources: Sources) -> Masks:
        count = 3 if any(part in name for part in ("fma", "mad", "3_")) else 2
        codes = sources.codes(count)
        if move:
            return [np.array(sources.mask(code, select[0] >> i & 1)) for i, code in enumerate(codes)]
        results = []
        for which in select:
            found = np.zeros((1, 1), np.bool_)
            for i, code in enumerate(codes):
                half = which >> i & 1
                mask = (
                    sources.mask(code, half if code < 128 or code >= FIRST_VGPR else 0)
                    if wide
                    else sources.mask(code) >> U32(16 * half) & U32(0xFFFF)
                )
                found = found | (mask != 0)
            results.append(found)
        if wide:
            return [np.where(found, ALL, ZERO) for found in results]
        return np.where(results[0], U32(0xFFFF), ZERO) | np.where(results[1], U32(0xFFFF0000), ZERO)

    return rule


# ---- matrices


def _matrix(sources: Sources) -> Masks:
    """A row of A or a column of B with an undefined element, or an undefined scale, makes its row or column of D undefined; C counts by element."""
    encoded = sources.encoded
    shape, a, b = mfma.layout_of(encoded)
    rows = _undefined_lines(sources, shape, a, encoded.src0, encoded.acc & 1)
    columns = _undefined_lines(sources, shape, b, encoded.src1, encoded.acc >> 1)
    if "scale_src0" in encoded.fields:
        rows = rows | _undefined_scales(sources, shape, encoded.scale_src0, 0)
        columns = columns | _undefined_scales(sources, shape, encoded.scale_src1, 1)
    product = np.broadcast_to(rows[..., :, None] | columns[..., None, :], (sources.group.n, shape.blocks, shape.dim, shape.dim))
    values = mfma.registers_of_result(shape, np.ascontiguousarray(product))
    per_value = shape.result_registers // len(values)
    results = [np.where(values[i // per_value], ALL, ZERO) for i in range(shape.result_registers)]
    if encoded.src2 >= FIRST_VGPR:
        first = encoded.src2 + (encoded.accum_offset if encoded.acc_cd else 0)
        addends = [sources.mask(first + i) for i in range(shape.result_registers)]
        if per_value == 2:
            addends = [addends[i] | addends[i ^ 1] for i in range(shape.result_registers)]
        results = [result | np.where(addend != 0, ALL, ZERO) for result, addend in zip(results, addends, strict=True)]
    return list(results)


def _undefined_lines(sources: Sources, shape: mfma.Shape, element: mfma.Element, code: int, accumulator: int) -> np.ndarray:
    """bool [waves, blocks, dim]"""
    first = code + (sources.encoded.accum_offset if accumulator else 0)
    count = shape.items * element.bits // 32
    registers = [np.broadcast_to(sources.mask(first + i), sources.group.mask.shape) for i in range(count)]
    return np.asarray(mfma.words_of_operand(shape, element.bits, registers).any(axis=-1))


def _undefined_scales(sources: Sources, shape: mfma.Shape, code: int, side: int) -> np.ndarray:
    if code < FIRST_VGPR:
        return np.zeros((1, 1, 1), np.bool_)
    encoded = sources.encoded
    byte = (encoded.scale_op_sel >> side & 1) | (encoded.scale_op_sel_hi >> side & 1) << 1
    mask = np.broadcast_to(sources.mask(code), sources.group.mask.shape) >> U32(8 * byte) & U32(0xFF)
    return np.asarray((mask.reshape(-1, shape.depth // 32, shape.dim) != 0).any(axis=1)[:, None, :])


# ---- scalar


def _scalar_bitwise(operation: Callable[..., tuple[Any, Any]], bits: int, invert_second: bool = False) -> Rule:
    """Results in the order of writing: the register or pair, then SCC, which tells whether the value is zero."""

    def rule(sources: Sources) -> Masks:
        encoded = sources.encoded
        results: list[Mask] = []
        for half in range(bits // 32):
            (a, ma), (b, mb) = ((sources.value(code, half, bits), sources.mask(code, half)) for code in (encoded.ssrc0, encoded.ssrc1))
            results.append(operation(a, ma, ~b if invert_second else b, mb)[1])
        return [*results, _any_bit(results)]

    return rule


def _any_bit(masks: list[Mask]) -> np.ndarray:
    found = np.logical_or.reduce(np.broadcast_arrays(*(mask != 0 for mask in masks)))
    return np.where(found, ALL, ZERO)


def _scalar_move(bits: int) -> Rule:
    return lambda sources: [np.array(sources.mask(sources.encoded.ssrc0, half)) for half in range(bits // 32)]


def _scalar_not(bits: int) -> Rule:
    def rule(sources: Sources) -> Masks:
        results = [sources.mask(sources.encoded.ssrc0, half) for half in range(bits // 32)]
        return [*results, _any_bit(results)]

    return rule


def _scalar_shift(left: bool) -> Rule:
    def rule(sources: Sources) -> Masks:
        encoded = sources.encoded
        amount, mask = sources.value(encoded.ssrc1) & U32(31), sources.mask(encoded.ssrc0)
        moved = mask << amount if left else mask >> amount
        result = np.where(sources.mask(encoded.ssrc1) & U32(31) != 0, ALL, moved)
        return [result, _any_bit([result])]

    return rule


def _scalar_sum(flag: bool) -> Rule:
    def rule(sources: Sources) -> Masks:
        result = _upwards(sources.mask(sources.encoded.ssrc0) | sources.mask(sources.encoded.ssrc1))
        return [result, _any_bit([result])] if flag else result

    return rule


def _scalar_choose(bits: int) -> Rule:
    def rule(sources: Sources) -> Masks:
        encoded, taken = sources.encoded, sources.value(SCC) != 0
        unknown = sources.mask(SCC) != 0
        return [
            np.where(unknown, ALL, np.where(taken, sources.mask(encoded.ssrc0, half), sources.mask(encoded.ssrc1, half)))
            for half in range(bits // 32)
        ]

    return rule


def _save_exec_and(sources: Sources) -> Masks:
    """s_and_saveexec: the old EXEC, then source & EXEC, then SCC."""
    source = sources.encoded.ssrc0
    results = [sources.mask(source, half) & sources.value(EXEC, half) for half in range(2)]
    return [None, None, *results, _any_bit(results)]


def _scalar_pack(low_shift: int, high_shift: int) -> Rule:
    def rule(sources: Sources) -> Masks:
        low, high = sources.mask(sources.encoded.ssrc0), sources.mask(sources.encoded.ssrc1)
        return (low >> U32(low_shift) & U32(0xFFFF)) | (high >> U32(high_shift)) << U32(16)

    return rule


def _move(sources: Sources) -> Masks:
    return sources.mask(sources.codes()[0])


def _accumulator_move(sources: Sources) -> Masks:
    return sources.mask(sources.encoded.src0 + sources.encoded.accum_offset)


_RULES: dict[str, Rule] = {
    "v_mad_u64_u32": _multiply_add_64,
    "v_mad_i64_i32": _multiply_add_64,
    "v_mov_b32": _move,
    "v_not_b32": _move,
    "v_accvgpr_write_b32": _move,
    "v_accvgpr_read_b32": _accumulator_move,
    "v_accvgpr_mov_b32": _accumulator_move,
    "v_mov_b64": lambda sources: [np.array(sources.mask(sources.codes()[0], half)) for half in range(2)],
    "v_and_b32": _chain(_and),
    "v_or_b32": _chain(_or),
    "v_xor_b32": _chain(_xor),
    "v_xnor_b32": _chain(_xnor),
    "v_and_or_b32": _chain(_and, _or),
    "v_or3_b32": _chain(_or, _or),
    "v_lshl_or_b32": _chain(_shifted_left, _or),
    "v_bfi_b32": _insert_bits,
    "v_cndmask_b32": _choose,
    **{f"v_{name}_u32": _sum(2) for name in ("add", "sub", "subrev", "mul_lo")},
    "v_add3_u32": _sum(3),
    "v_lshl_add_u32": _sum(3, shifted=1),
    "v_mad_u64_u32": _multiply_add_64,
    "v_lshl_add_u64": _shift_add_64,
    "v_lshlrev_b32": _through(2, vi._shift_left, (0,)),
    "v_lshrrev_b32": _through(2, vi._shift_right, (0,)),
    "v_ashrrev_i32": _through(2, lambda amount, mask: vi._shift_right(amount, mask.view(np.int32)), (0,)),
    "v_lshlrev_b64": _through(2, lambda amount, mask: mask << (amount & U32(63)).astype(U64), (0,), (1,)),
    "v_lshrrev_b64": _through(2, lambda amount, mask: mask >> (amount & U32(63)).astype(U64), (0,), (1,)),
    "v_bfe_u32": _through(3, vi._bfe_u32, (1, 2)),
    "v_bfe_i32": _through(3, lambda mask, offset, width: vi._bfe_i32(mask.view(np.int32), offset, width), (1, 2)),
    "v_alignbit_b32": _through(3, vi._align(1), (2,)),
    "v_alignbyte_b32": _through(3, vi._align(8), (2,)),
    "v_perm_b32": _through(3, _permute_bytes, (2,)),
    "v_pack_b32_f16": _pack_halves,
    **{f"v_cvt_pk_{name}": _pack_of_two for name in ("bf16_f32", "f16_f32", "u16_u32", "i16_i32")},
    "v_cvt_pkrtz_f16_f32": _pack_of_two,
    **{f"v_cvt_f32_ubyte{i}": _of_part(8 * i, 8) for i in range(4)},
    **{f"v_cvt_f32_{small}": _of_part(0, 8) for small in ("fp8", "bf8")},
    **{f"v_cvt_pk_f32_{small}": _of_part(0, 16, 2) for small in ("fp8", "bf8")},
    "v_cvt_f32_bf16": _of_part(0, 16),
    **{f"{_SCALED}pk_{wide}_{small}": _widen(8, 1) for wide in ("f16", "bf16") for small in ("fp8", "bf8")},
    **{f"{_SCALED}pk_{wide}_fp4": _widen(4, 1) for wide in ("f16", "bf16")},
    **{f"{_SCALED}pk_f32_{small}": _widen(8, 2) for small in ("fp8", "bf8")},
    f"{_SCALED}pk_f32_fp4": _widen(4, 2),
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_permlane16_swap_b32": _permlane_swap(16),
    "v_permlane32_swap_b32": _permlane_swap(32),
    "v_swap_b32": _swap,
    "ds_bpermute_b32": _backward_permute,
    "ds_permute_b32": _any_lane,
    "ds_swizzle_b32": _any_lane,
    **{f"s_and_b{bits}": _scalar_bitwise(_and, bits) for bits in (32, 64)},
    **{f"s_or_b{bits}": _scalar_bitwise(_or, bits) for bits in (32, 64)},
    **{f"s_xor_b{bits}": _scalar_bitwise(_xor, bits) for bits in (32, 64)},
    **{f"s_andn2_b{bits}": _scalar_bitwise(_and, bits, invert_second=True) for bits in (32, 64)},
    **{f"s_mov_b{bits}": _scalar_move(bits) for bits in (32, 64)},
    "s_movk_i32": lambda sources: None,  # the emulator reads the old value, as other instructions of the format need it
    **{f"s_not_b{bits}": _scalar_not(bits) for bits in (32, 64)},
    **{f"s_cselect_b{bits}": _scalar_choose(bits) for bits in (32, 64)},
    **{f"s_{name}": _scalar_sum(True) for name in ("add_u32", "add_i32", "sub_u32", "sub_i32")},
    "s_mul_i32": _scalar_sum(False),
    "s_lshl_b32": _scalar_shift(True),
    "s_lshr_b32": _scalar_shift(False),
    "s_and_saveexec_b64": _save_exec_and,
    "s_pack_ll_b32_b16": _scalar_pack(0, 0),
    "s_pack_lh_b32_b16": _scalar_pack(0, 16),
    "s_pack_hh_b32_b16": _scalar_pack(16, 16),
}
