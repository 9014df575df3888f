// Bit layouts of the KV formats: how one cache row (a token's 576 numbers; V is the first 512 of them) lies in memory.
#pragma once
#include "gfx9.h"

constexpr int KV_LORA_RANK_COLUMNS = 512;
constexpr int QK_COLUMNS = 576;
constexpr int MX_BLOCK = 32;   // elements that share one E8M0 scale (OCP MX 1.0)
constexpr u32 E8M0_ONE = 127;  // E8M0 code of 2^0

// What a wave loads at once: as many whole rows in every format, by 18 DMAs of 64 lanes and 16 bytes.
constexpr int DMA_BYTES = 16;                 // a lane
constexpr int DMA_CHUNK = LANES * DMA_BYTES;  // an instruction
constexpr int DMAS_PER_BLOCK = 18;
constexpr int BLOCK_BYTES = DMAS_PER_BLOCK * DMA_CHUNK;

// TOKENS: of a block. MAX_STEP_TOKENS: that a wave takes at a time, from scores to output. ONE_SCALE: whether one scale multiplies the whole cache.
// swizzle(token): in LDS, chunk c (16 bytes) of a row lies where chunk c ^ swizzle would. Rows are a multiple of 32 bytes long, so that without it
// the same columns of many tokens would lie in the same banks; with it the reads of K do not conflict, nor the transposed ones of V (MXFP4: two
// tokens share their banks, as 8 bytes of each are read and 16 move together). It stays within the aligned 128 bytes (FP8: 64, MXFP4: 32) of a chunk.
struct Bf16 {
    static constexpr int ROW_BYTES = QK_COLUMNS * 2;
    static constexpr int TOKENS = BLOCK_BYTES / ROW_BYTES;
    static constexpr int MAX_STEP_TOKENS = 64;
    static constexpr bool ONE_SCALE = false;
    DEVICE_MEMBER static constexpr i32 swizzle(i32 token) { return token & 6; }
};
struct Fp8E4m3fn {
    static constexpr int ROW_BYTES = QK_COLUMNS;
    static constexpr int TOKENS = BLOCK_BYTES / ROW_BYTES;
    static constexpr int MAX_STEP_TOKENS = 128;
    static constexpr bool ONE_SCALE = true;
    DEVICE_MEMBER static constexpr i32 swizzle(i32 token) { return (-(token >> 2) & 3) ^ (token >> 4 & 1); }
};
// Two E2M1 codes a byte, low nibble first; the scales lie in an array of their own.
struct Mxfp4 {
    static constexpr int ROW_BYTES = QK_COLUMNS / 2;
    static constexpr int TOKENS = BLOCK_BYTES / ROW_BYTES;
    static constexpr int MAX_STEP_TOKENS = 64;
    static constexpr bool ONE_SCALE = false;
    static constexpr int SCALES_PER_ROW = QK_COLUMNS / MX_BLOCK;
    DEVICE_MEMBER static constexpr i32 swizzle(i32 token) { return token >> 4 & 1; }
};
static_assert(Bf16::TOKENS == 16 && Fp8E4m3fn::TOKENS == 32 && Mxfp4::TOKENS == 64);

// The f32 number of an E8M0 code as v_cvt_scalef32 takes it: by its exponent field alone (code 0 counts as 2^-127 there).
DEVICE f32 e8m0_as_exponent(u32 code) { return __builtin_bit_cast(f32, code << 23); }

// A number as the sum of E4M3 terms, each 16 times finer than the one before it: four more significant bits a term.
constexpr f32 E4M3_TERM_GAIN = 16.0f;
DEVICE constexpr u32 e4m3_term_scale(i32 term) { return E8M0_ONE - 4 * u32(term); }
// The next term of four numbers, as codes; `rest` becomes what is left, times the gain. Nothing is rounded but the term.
DEVICE u32 split_e4m3_term(vec<f32, 4>& rest) {
    const u32 codes = four_e4m3_from_f32(rest);
    const auto t01 = f32_from_e4m3<false>(codes, E4M3_TERM_GAIN), t23 = f32_from_e4m3<true>(codes, E4M3_TERM_GAIN);
    rest = __builtin_elementwise_fma(rest, vec<f32, 4>(E4M3_TERM_GAIN), -vec<f32, 4>{t01[0], t01[1], t23[0], t23[1]});
    return codes;
}
