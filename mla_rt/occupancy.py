"""How many waves of a kernel a compute unit holds at once, from its registers and LDS.

Source: AMD Instinct CDNA4 ISA guide (register file, LDS allocation) and LLVM's AMDGPU backend (waves per SIMD).
"""

from __future__ import annotations

from dataclasses import dataclass

SIMDS_PER_CU = 4
MAX_WAVES_PER_SIMD = 8
VGPRS_PER_SIMD = 512  # a lane's, AGPRs included
VGPR_GRANULE = 8
LDS_BYTES_PER_CU = 160 * 1024
LDS_GRANULE_BYTES = 1280


@dataclass(frozen=True)
class Occupancy:
    """waves_per_simd may be a fraction where a workgroup's waves do not spread evenly; limited_by: what allows no further workgroup."""

    workgroups_per_cu: int
    waves_per_simd: float
    limited_by: str


def occupancy(*, num_vgprs: int, lds_bytes: int, block_size: int, wavefront_size: int = 64) -> Occupancy:
    """Of a kernel on gfx950. num_vgprs counts AGPRs too; lds_bytes of a workgroup; block_size in threads."""
    waves_per_workgroup = -(-block_size // wavefront_size)
    allocated_vgprs = max(-(-num_vgprs // VGPR_GRANULE), 1) * VGPR_GRANULE
    waves_by_registers = min(VGPRS_PER_SIMD // allocated_vgprs, MAX_WAVES_PER_SIMD) * SIMDS_PER_CU
    limits = {"registers" if waves_by_registers < MAX_WAVES_PER_SIMD * SIMDS_PER_CU else "waves": waves_by_registers // waves_per_workgroup}
    if lds_bytes:
        limits["LDS"] = LDS_BYTES_PER_CU // (-(-lds_bytes // LDS_GRANULE_BYTES) * LDS_GRANULE_BYTES)
    limited_by = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limited_by], limits[limited_by] * waves_per_workgroup / SIMDS_PER_CU, limited_by)
