"""Which decode kernel serves a cache, and what it wants."""

from __future__ import annotations

from dataclasses import dataclass

from .device import Device
from .errors import UnsupportedArch
from .resources import Kernel

# The cache formats that each architecture's matrix instructions read. fnuz is the FP8 of gfx942: gfx950 reads the same bytes as other numbers.
KV_FORMATS = {"gfx950": ("bf16", "fp8_e4m3fn", "mxfp4")}


# µs of a tile in the upper bound of the speed reports: what work is cut by.
_TILE_COST = {"bf16": 2.6, "fp8_e4m3fn": 4.2, "mxfp4": 6.5}


@dataclass(frozen=True)
class DecodeKernel:
    """rows_per_tile: query rows of a workgroup; tokens_per_tile: tokens that its waves take at a time; tile_cost: µs, modelled, for them."""

    kernel: Kernel
    rows_per_tile: int
    tokens_per_tile: int
    tile_cost: float


def require_format(kv_format: str, arch: str) -> None:
    """UnsupportedArch or ValueError if the architecture's kernels do not read caches of that format."""
    if arch not in KV_FORMATS:
        raise UnsupportedArch(f"there are no decode kernels for {arch}, only for {', '.join(KV_FORMATS)}")
    if kv_format not in KV_FORMATS[arch]:
        raise ValueError(f"kv_format {kv_format!r} cannot be decoded on {arch}; it reads {', '.join(KV_FORMATS[arch])}")


def kernel_for(device: Device, kv_format: str, max_rows: int) -> DecodeKernel:
    """The decode kernel for a format and for requests of at most so many query rows (query tokens times heads), loaded on the device.

    Raises UnsupportedArch or ValueError if its architecture has none.
    """
    require_format(kv_format, device.arch)
    module = device.packaged("mla_decode")
    constants = module.constants
    shape = "narrow" if max_rows <= constants["NARROW_ROWS"] else "wide"
    kernel = module.kernel(f"mla_decode_{kv_format}_{shape}")
    return DecodeKernel(kernel, constants[f"{shape.upper()}_ROWS"], constants[f"TOKENS_PER_TILE_{kv_format.upper()}"], _TILE_COST[kv_format])
