"""The facts: what the kernels take for granted about the machine, where it is written, and the experiment that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from . import lds, matrix, numbers
from .experiment import Experiment


@dataclass(frozen=True)
class Fact:
    """assumed: what the kernels take for granted, in words; source: where it is written."""

    name: str
    assumed: str
    source: str
    experiment: Callable[[], Experiment]


GUIDE = "CDNA4 ISA guide"
FACTS = (
    Fact("k_of_8bit_a", "A, 8-bit: a lane holds k = 16g .. 16g+15 and 64+16g .. 64+16g+15",
         f"{GUIDE} 7.1.4, register tables", partial(matrix.k_order, "a")),
    Fact("k_of_8bit_b", "B, 8-bit: the same",
         f"{GUIDE} 7.1.4, register tables", partial(matrix.k_order, "b")),
    Fact("scale_lane_4bit_a", "A, 4-bit: row r's scale of k = 32b .. 32b+31 is that of lane r + 16b",
         f"{GUIDE} 7.2.1", partial(matrix.scale_lane, "a", 4)),
    Fact("scale_lane_4bit_b", "B, 4-bit: the same for column r",
         f"{GUIDE} 7.2.1", partial(matrix.scale_lane, "b", 4)),
    Fact("scale_lane_8bit_a", "A, 8-bit: the same, though other lanes hold the items",
         f"{GUIDE} 7.2.1", partial(matrix.scale_lane, "a", 8)),
    Fact("scale_lane_8bit_b", "B, 8-bit: the same for column r",
         f"{GUIDE} 7.2.1", partial(matrix.scale_lane, "b", 8)),
    Fact("scale_bytes", "op_sel and op_sel_hi pick the byte of a scale register, low bit first",
         f"{GUIDE} 7.2.1", matrix.scale_bytes),
    Fact("scale_codes", "E8M0 code c is 2^(c - 127), for c = 1 .. 254",
         f"{GUIDE} 7.2; OCP MX 1.0, 5.4.1", matrix.scale_codes),
    Fact("scale_code_0", "E8M0 code 0 is 2^-127",
         f"{GUIDE} 7.2; OCP MX 1.0, 5.4.1", matrix.scale_code_0),
    Fact("scale_nan", "E8M0 code 255 makes all results NaN that use the block, zeros in it too",
         f"{GUIDE} 7.2; OCP MX 1.0, 6.1", matrix.scale_nan),
    Fact("mfma_e4m3_values", "E4M3 operands are OCP's: bias 7, NaN 0x7f and 0xff, subnormals",
         f"{GUIDE} 7.3; OCP FP8", partial(matrix.mfma_values, 8)),
    Fact("mfma_e2m1_values", "E2M1 operands are OCP's: 0 0.5 1 1.5 2 3 4 6",
         f"{GUIDE} 7.3; OCP MX 1.0, 5.3.3", partial(matrix.mfma_values, 4)),
    Fact("mfma_denormals", "bf16 matrix products keep denormal operands, accumulators and results",
         f"{GUIDE} 7", matrix.mfma_denormals),
    Fact("mfma_nonfinite", "infinities and NaNs of bf16 matrix products are those of IEEE arithmetic",
         f"{GUIDE} 7; IEEE 754", matrix.mfma_nonfinite),
    Fact("transposed_16", "ds_read_b64_tr_b16: lane t gets elements t + 16j of its 16 lanes",
         f"{GUIDE} 11, LDS", partial(lds.transposed, 16)),
    Fact("transposed_8", "ds_read_b64_tr_b8: the same",
         f"{GUIDE} 11, LDS", partial(lds.transposed, 8)),
    Fact("transposed_6", "ds_read_b96_tr_b6: the same",
         f"{GUIDE} 11, LDS", partial(lds.transposed, 6)),
    Fact("transposed_4", "ds_read_b64_tr_b4: the same",
         f"{GUIDE} 11, LDS", partial(lds.transposed, 4)),
    Fact("dma_immediate", "global_load_lds: the immediate counts in memory and in LDS",
         f"{GUIDE} 10; LLVM, AMDGPU LDS DMA", partial(lds.dma_immediate, "probe_dma_immediate")),
    Fact("buffer_dma_immediate", "buffer_load lds: the same",
         f"{GUIDE} 9.1.9; LLVM, AMDGPU LDS DMA", partial(lds.dma_immediate, "probe_buffer_dma_immediate")),
    Fact("buffer_dma_bounds", "buffer_load lds: dwords out of range become 0 in LDS",
         f"{GUIDE} 8 and 9", lds.dma_bounds),
    Fact("dma_2", "global_load_lds of 2 bytes fills a dword a lane, its high half with 0",
         f"{GUIDE} 10", lds.dma_2),
    Fact("e4m3_rounding", "f32 to E4M3 up to 448 rounds to nearest even; the other half is kept",
         f"{GUIDE}, v_cvt_pk_fp8_f32", numbers.e4m3_rounding),
    Fact("e4m3_overflow", "f32 to E4M3: from 480 on, infinities and NaNs become NaN",
         f"{GUIDE} 7.3, with FP16_OVFL = 0", numbers.e4m3_overflow),
    Fact("f32_from_e4m3", "E4M3 to f32 is exact, in the order of the bytes",
         f"{GUIDE}, v_cvt_pk_f32_fp8; OCP FP8", numbers.f32_from_e4m3),
    Fact("bf16_from_e4m3", "E4M3 to bf16 is exact, in the order of the bytes",
         f"{GUIDE}, v_cvt_scalef32_pk_bf16_fp8; OCP FP8", numbers.bf16_from_e4m3),
    Fact("bf16_from_e2m1", "E2M1 to bf16 is exact: times 2^(e - 127), e the scale's exponent field",
         f"{GUIDE}, v_cvt_scalef32_pk_bf16_fp4", partial(numbers.bf16_from_e2m1, (1, 2, 64, 127, 128, 200, 252))),
    Fact("bf16_from_e2m1_scale_0", "E2M1 to bf16: exponent field 0 is 2^-127; denormal results are kept",
         f"{GUIDE} 7.3", partial(numbers.bf16_from_e2m1, (0,))),
    Fact("bf16_from_e2m1_scale_255", "E2M1 to bf16: exponent field 255 makes NaN",
         f"{GUIDE} 7.3; OCP MX 1.0, 6.1", partial(numbers.bf16_from_e2m1, (255,))),
    Fact("e2m1_from_f32", "f32 to E2M1 rounds to nearest even and saturates at 6; other bytes are kept",
         f"{GUIDE} 7.3, v_cvt_scalef32_pk_fp4_f32", partial(numbers.e2m1_from_f32, 127)),
    Fact("e2m1_from_f32_scaled", "f32 to E2M1 divides by 2^(e - 127) first",
         f"{GUIDE} 7.3", partial(numbers.e2m1_from_f32, 100)),
    Fact("bf16_from_f32", "f32 to bf16 rounds to nearest even; denormals, infinities and NaNs stay",
         f"{GUIDE}, v_cvt_pk_bf16_f32", numbers.bf16_from_f32),
    Fact("exp2", "v_exp_f32 is within 1 ulp; denormals are 0, specials exact",
         f"{GUIDE}, v_exp_f32", partial(numbers.function, "exp2")),
    Fact("log2", "v_log_f32 is within 1 ulp or 2^-24; denormals are 0, specials exact",
         f"{GUIDE}, v_log_f32", partial(numbers.function, "log2")),
    Fact("reciprocal", "v_rcp_f32 is within 1 ulp; denormals are 0, specials exact",
         f"{GUIDE}, v_rcp_f32", partial(numbers.function, "reciprocal")),
)  # fmt: skip
