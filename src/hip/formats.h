// Bit layouts of the KV formats: how one cache row (a token's 576 numbers; V is the first 512 of them) lies in memory.
#pragma once
#include "gfx9.h"

constexpr int KV_LORA_RANK_COLUMNS = 512;
constexpr int QK_COLUMNS = 576;
constexpr int MX_BLOCK = 32;   // elements that share one E8M0 scale (OCP MX 1.0)
constexpr u32 E8M0_ONE = 127;  // E8M0 code of 2^0

// TOKENS: of a tile. Two tiles fit into LDS beside what else is there.
// swizzle(token): in LDS, chunk c (16 bytes) of a tile's row lies where chunk c ^ swizzle would. Rows are a multiple of 64 or 128 bytes long, so
// that without it the same columns of many tokens would lie in the same banks; with it neither the reads of K nor the transposed ones of V conflict.
// It stays within the aligned 128 bytes (FP8: 64) that a chunk is in.
struct Bf16 {
    static constexpr int ROW_BYTES = QK_COLUMNS * 2;
    static constexpr int TOKENS = 64;
    DEVICE_MEMBER static constexpr i32 swizzle(i32 token) { return (token >> 3 & 1) * 4 + (token >> 1 & 1) * 2; }
};
struct Fp8E4m3fn {
    static constexpr int ROW_BYTES = QK_COLUMNS;
    static constexpr int TOKENS = 128;
    DEVICE_MEMBER static constexpr i32 swizzle(i32 token) { return (-(token >> 2) & 3) ^ (token >> 4 & 1); }
};
// Two E2M1 codes a byte, low nibble first; the scales lie in an array of their own.
struct Mxfp4 {
    static constexpr int ROW_BYTES = QK_COLUMNS / 2;
    static constexpr int TOKENS = 128;
    static constexpr int SCALES_PER_ROW = QK_COLUMNS / MX_BLOCK;
    DEVICE_MEMBER static constexpr i32 swizzle(i32) { return 0; }
};

// The f32 number of an E8M0 code as v_cvt_scalef32 takes it: by its exponent field alone (code 0 counts as 2^-127 there).
DEVICE f32 e8m0_as_exponent(u32 code) { return __builtin_bit_cast(f32, code << 23); }

// A number as the sum of E4M3 terms, each 16 times finer than the one before it: four more significant bits a term.
constexpr f32 E4M3_TERM_GAIN = 16.0f;
DEVICE constexpr u32 e4m3_term_scale(i32 term) { return E8M0_ONE - 4 * u32(term); }
