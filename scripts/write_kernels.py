"""Write docs/kernels.md: what each kernel takes of a compute unit, read from the code objects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mla_rt.code_object import CODE_OBJECTS, NT_AMDGPU_METADATA, CodeObject, KernelInfo
from mla_rt.elf import Elf
from mla_rt.msgpack import unpack
from mla_rt.occupancy import Occupancy, occupancy

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "kernels.md"
NOTE = (b"AMDGPU\0", NT_AMDGPU_METADATA)  # owner and kind

BEFORE = """\
# Kernels

Written by `scripts/write_kernels.py` from the code objects that the clang of ziglang compiles; do not edit. (hipcc may allocate other registers; no
kernel may use scratch memory or spill registers with either.)

A compute unit has four SIMDs with 512 vector registers a lane, AGPRs among them, and 160 KB of LDS. One workgroup that uses most of either has the
unit to itself: then its own loads, issued a tile ahead, hide the latency of memory, not other workgroups.
"""
COLUMNS = (
    "kernel", "VGPRs", "AGPRs", "SGPRs", "LDS bytes", "scratch bytes", "spills",
    "work-items", "waves a SIMD", "workgroups a unit", "limited by",
)  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """Of one kernel. num_spills: registers, vector and scalar, that the compiler stored elsewhere for want of room."""

    stem: str
    info: KernelInfo
    num_spills: int

    @property
    def fit(self) -> Occupancy:
        info = self.info
        return occupancy(num_vgprs=info.num_vgprs, lds_bytes=info.lds_bytes, block_size=info.block_size, wavefront_size=info.wavefront_size)


def resources_of(path: Path) -> Iterator[Resources]:
    """Of every kernel of a code object, in its order."""
    (note,) = [content for owner, kind, content in Elf(path.read_bytes()).notes() if (owner, kind) == NOTE]
    spills = {entry[".name"]: entry[".vgpr_spill_count"] + entry[".sgpr_spill_count"] for entry in unpack(note)["amdhsa.kernels"]}
    for name, info in CodeObject.load(path).kernels.items():
        yield Resources(path.stem, info, spills[name])


def resources(arch: str = "gfx950") -> list[Resources]:
    """Of every kernel of the package."""
    return [of for path in sorted(CODE_OBJECTS.glob(f"{arch}/*.co")) for of in resources_of(path)]


def row(of: Resources) -> str:
    info, fit = of.info, of.fit
    numbers = (info.num_vgprs, info.num_agprs, info.num_sgprs, info.lds_bytes, info.scratch_bytes, of.num_spills, info.block_size)
    cells = (f"`{info.name}`", *map(str, numbers), f"{fit.waves_per_simd:g}", str(fit.workgroups_per_cu), fit.limited_by)
    return f"| {' | '.join(cells)} |"


def page() -> str:
    lines = [BEFORE.rstrip()]
    stem = ""
    for of in resources():
        if of.stem != stem:
            stem = of.stem
            lines += ["", f"## {stem}.co", "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        lines.append(row(of))
    return "\n".join(lines) + "\n"


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
