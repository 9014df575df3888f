"""Rates of a card: what turns counts into time. One table a card, every figure with its source.

Sources: MAN = "AMD Instinct MI300/CDNA4 ISA Reference Guide"; SCHED = LLVM, llvm/lib/Target/AMDGPU/SISchedule.td;
GLUON = ROCm/gfx950-gluon-tutorials, docs/{lds_throughput,tcp_bound_tile_model,memory_bandwidth_model}.md; DATA = AMD Instinct MI355X data sheet;
LAUNCH = the fixed cost of a kernel launch seen in published MLA decode benchmarks on MI355X.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

# 4 clocks a pass; passes from MAN (table 28) and SCHED. By mnemonic behind "v_mfma_"; f8f6f4 by whether an operand has 8 bits.
_MFMA_CLOCKS = {
    8: "f32_4x4x1_16b_f32 f32_4x4x4_16b_f16 f32_4x4x4_16b_bf16 i32_4x4x4_16b_i8",
    16: "f32_16x16x32_bf16 f32_16x16x32_f16 f32_16x16x16_bf16 f32_16x16x16_f16 i32_16x16x64_i8 i32_16x16x32_i8 f64_4x4x4_4b_f64 "
    "f32_16x16x32_fp8_fp8 f32_16x16x32_fp8_bf8 f32_16x16x32_bf8_fp8 f32_16x16x32_bf8_bf8 f32_16x16x128_f8f6f4/narrow",
    32: "f32_32x32x16_bf16 f32_32x32x16_f16 f32_32x32x8_bf16 f32_32x32x8_f16 i32_32x32x32_i8 i32_32x32x16_i8 f32_16x16x4_f32 f32_16x16x1_4b_f32 "
    "f32_16x16x4_4b_f16 f32_16x16x4_4b_bf16 i32_16x16x4_4b_i8 f32_32x32x16_fp8_fp8 f32_32x32x16_fp8_bf8 f32_32x32x16_bf8_fp8 "
    "f32_32x32x16_bf8_bf8 f32_16x16x128_f8f6f4/8-bit f32_32x32x64_f8f6f4/narrow",
    64: "f32_32x32x2_f32 f32_32x32x1_2b_f32 f32_32x32x4_2b_f16 f32_32x32x4_2b_bf16 i32_32x32x4_2b_i8 f64_16x16x4_f64 f32_32x32x64_f8f6f4/8-bit",
}


@dataclass(frozen=True)
class Rates:
    """A card. Clocks are of the shader clock; per-instruction clocks are those of a whole wave.

    hbm_bytes_per_second: peak of device memory. valu_clocks, transcendental_clocks: an instruction holds its SIMD; issue_clocks: between two
    instructions of one wave. mfma_clocks: by kind. vmem_clocks: a compute unit's vector memory pipe, by bytes a lane. lds_exchange_clocks: of the
    lane exchanges that use the LDS crossbar without an address in LDS. bytes_in_flight: of vector memory, a compute unit.
    vmem_latency_clocks, smem_latency_clocks, lds_latency_clocks: round trips. launch_seconds: fixed cost of a launch.
    sources: of each field.
    """

    name: str
    num_cus: int
    simds_per_cu: int
    clock_hz: float
    hbm_bytes_per_second: float
    valu_clocks: int
    transcendental_clocks: int
    issue_clocks: int
    mfma_clocks: Mapping[str, int]
    vmem_clocks: Mapping[int, int]
    lds_exchange_clocks: int
    bytes_in_flight: int
    vmem_latency_clocks: int
    smem_latency_clocks: int
    lds_latency_clocks: int
    launch_seconds: float
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        names = {field.name for field in fields(self)} - {"name", "sources"}
        if names != set(self.sources):
            raise ValueError(f"rates of {self.name}: every figure has a source, but {', '.join(sorted(names ^ set(self.sources)))} do not agree")

    def mfma(self, kind: str) -> int:
        """Clocks of a matrix instruction, by its `kind_of`. ValueError if the card's table has none such."""
        mnemonic, _, formats = kind.removeprefix("v_mfma_").removeprefix("scale_").partition(" ")
        key = f"{mnemonic}/{'8-bit' if '8' in formats else 'narrow'}" if formats else mnemonic
        if key not in self.mfma_clocks:
            raise ValueError(f"no rate for {kind} on {self.name}")
        return self.mfma_clocks[key]


MI355X = Rates(
    name="MI355X",
    num_cus=256,
    simds_per_cu=4,
    clock_hz=2.4e9,
    hbm_bytes_per_second=8e12,
    valu_clocks=4,
    transcendental_clocks=16,
    issue_clocks=4,
    mfma_clocks={name: clocks for clocks, names in _MFMA_CLOCKS.items() for name in names.split()},
    vmem_clocks={4: 4, 8: 16, 12: 16, 16: 16},
    lds_exchange_clocks=1,
    bytes_in_flight=32 << 10,
    vmem_latency_clocks=1000,
    smem_latency_clocks=1000,
    lds_latency_clocks=64,
    launch_seconds=4.5e-6,
    sources={
        "num_cus": "DATA: 8 XCDs of 32 compute units",
        "simds_per_cu": "MAN",
        "clock_hz": "DATA: peak engine clock",
        "hbm_bytes_per_second": "DATA: peak of HBM3E (the best seen in a public MLA kernel is 5.96e12)",
        "valu_clocks": "GLUON: 64 lanes on a SIMD of 16",
        "transcendental_clocks": "GLUON: quarter rate",
        "issue_clocks": "MAN: the four SIMDs take turns, a wave issues at its SIMD's turn",
        "mfma_clocks": "MAN, table 28, and SCHED",
        "vmem_clocks": "GLUON: tcp_bound_tile_model.md; narrower accesses as dwords, 12 bytes as 16",
        "lds_exchange_clocks": "assumed: as a dword read without conflicts",
        "bytes_in_flight": "GLUON: memory_bandwidth_model.md, about 32 KB",
        "vmem_latency_clocks": "GLUON: round trip from cache under load, about 1000; a miss to HBM takes more",
        "smem_latency_clocks": "assumed: as vector memory",
        "lds_latency_clocks": "GLUON: lds_throughput.md, first data after 50 to 70 clocks",
        "launch_seconds": "LAUNCH: about 4.5 µs",
    },
)
