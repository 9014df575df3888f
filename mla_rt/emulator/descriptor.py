"""The kernel descriptor: 64 bytes in which the compiler tells the launcher what a kernel needs (AMDGPU ABI, code object v3 and later)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

# Bits of kernel_code_properties -> number of user SGPRs, in the order in which they are laid out.
_USER_SGPRS = (
    ("private_segment_buffer", 0, 4),
    ("dispatch_ptr", 1, 2),
    ("queue_ptr", 2, 2),
    ("kernarg_segment_ptr", 3, 2),
    ("dispatch_id", 4, 2),
    ("flat_scratch_init", 5, 2),
    ("private_segment_size", 6, 1),
)
# Bits that are read below, or say nothing about how a kernel runs here: (offset, bytes, mask). All others must be zero.
_KNOWN_BITS = (
    (0, 12, (1 << 96) - 1),  # LDS, scratch and kernarg sizes
    (12, 4, 0),
    (16, 8, (1 << 64) - 1),  # entry offset
    (24, 20, 0),
    (44, 4, 0x3F),  # rsrc3: accum_offset
    (48, 4, 0x00AFF3FF),  # rsrc1: VGPRs, SGPRs, float mode, dx10_clamp, ieee
    (52, 4, 0x1FBF),  # rsrc2: scratch, user SGPRs, workgroup ids and info, work-item id dimensions
    (56, 2, 0x7F),  # properties: user SGPRs
    (58, 2, 0xFFFF),  # kernarg preload
    (60, 4, 0),
)


@dataclass(frozen=True)
class Descriptor:
    """Sizes in bytes; entry_offset: from the descriptor to the first instruction; num_vgprs: unified registers (AGPRs included).

    user_sgprs: the values wanted in the first SGPRs, in order, by name and number of registers; kernarg_preload: (first dword, count) of kernel
    arguments that follow them; workgroup_ids: which of x, y, z come next; workitem_id_dims: 1 to 3 dimensions packed in v0.
    """

    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    entry_offset: int
    num_vgprs: int
    accum_offset: int
    float_mode: int
    ieee: bool
    dx10_clamp: bool
    user_sgprs: tuple[tuple[str, int], ...]
    num_user_sgprs: int
    kernarg_preload: tuple[int, int]
    workgroup_ids: tuple[bool, bool, bool]
    workgroup_info: bool
    workitem_id_dims: int

    @classmethod
    def parse(cls, raw: bytes) -> Descriptor:
        """From the 64 bytes of symbol `<kernel>.kd`. Raises ValueError for any other length, and for bits whose meaning is not emulated."""
        if len(raw) != 64:
            raise ValueError(f"a kernel descriptor has 64 bytes, not {len(raw)}")
        for offset, size, mask in _KNOWN_BITS:
            if unknown := int.from_bytes(raw[offset : offset + size], "little") & ~mask:
                raise ValueError(f"the kernel descriptor has bits set that are not emulated: {unknown:#x} of the {size} bytes at {offset}")
        lds, scratch, kernarg, _, entry_offset = struct.unpack_from("<IIIIq", raw)
        rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", raw, 44)
        return cls(
            lds_bytes=lds,
            scratch_bytes=scratch,
            kernarg_bytes=kernarg,
            entry_offset=entry_offset,
            num_vgprs=8 * ((rsrc1 & 0x3F) + 1),
            accum_offset=4 * ((rsrc3 & 0x3F) + 1),
            float_mode=rsrc1 >> 12 & 0xFF,
            ieee=bool(rsrc1 >> 23 & 1),
            dx10_clamp=bool(rsrc1 >> 21 & 1),
            user_sgprs=tuple((name, count) for name, bit, count in _USER_SGPRS if properties >> bit & 1),
            num_user_sgprs=rsrc2 >> 1 & 0x1F,
            kernarg_preload=(preload >> 7, preload & 0x7F),
            workgroup_ids=(bool(rsrc2 >> 7 & 1), bool(rsrc2 >> 8 & 1), bool(rsrc2 >> 9 & 1)),
            workgroup_info=bool(rsrc2 >> 10 & 1),
            workitem_id_dims=(rsrc2 >> 11 & 3) + 1,
        )
