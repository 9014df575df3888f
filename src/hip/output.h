// Softmax weights on their way through LDS, and PV: what one wave accumulates, 128 columns of V over all tokens.
//
// Weights are the sum of terms, two of bf16 (16 significant bits) or three of E4M3 (12, for weights above 2^-14 of their tile's largest): rounding
// them to one would show beside the rounding of the result.
#pragma once
#include "kv_tile.h"
#include "softmax.h"

constexpr int COLUMNS_PER_WAVE = KV_LORA_RANK_COLUMNS / NUM_WAVES;

// [TERMS][ROWS][tokens of the tile], in rows padded against bank conflicts.
template <int NUM_TERMS, int ROW_BYTES_USED> struct WeightTile {
    static constexpr int TERMS = NUM_TERMS, ROW_BYTES = ROW_BYTES_USED + 16;
    alignas(16) u8 term[TERMS][ROWS * ROW_BYTES];
};

// O^T, so that a lane holds columns of one query row (lane % 16), the row of its softmax state.
struct OutputBlocks {
    static constexpr int BLOCKS = COLUMNS_PER_WAVE / 16;
    vec<f32, 4> block[BLOCKS] = {};

    DEVICE_MEMBER void rescale(f32 factor) {
#pragma unroll
        for (i32 b = 0; b < BLOCKS; b++) block[b] *= factor;
    }
    // `target`: where this lane's first column goes, T = bf16 or f32.
    template <class T> DEVICE_MEMBER void store(T* target) const {
#pragma unroll
        for (i32 b = 0; b < BLOCKS; b++) *(vec<T, 4>*)(target + b * 16) = __builtin_convertvector(block[b], vec<T, 4>);
    }
};

// The three formats. Each has
//   Weights                     their place in LDS
//   WEIGHTS_RELATIVE_TO_TILE    or to the running base
//   prepare                     what PV needs of a tile besides, made by all threads together
//   store_weights               four weights, at most 1, of one row and neighbouring tokens
//   add                         PV of one tile; `shift`: log2 of what its weights are to be multiplied with, whole and at most 0
template <class Format> struct Output;

// bf16 weights and values. Their exponents reach as far as those of f32, so that weights may be relative to the running maximum.
template <> struct Output<Bf16> : OutputBlocks {
    using Weights = WeightTile<2, Bf16::TOKENS * 2>;
    static constexpr bool WEIGHTS_RELATIVE_TO_TILE = false;
    static constexpr int K = 32;  // tokens one matrix instruction adds up

    DEVICE_MEMBER static void prepare(LDS Weights*, const LDS KvTile<Bf16>*, i32) {}
    DEVICE_MEMBER static void store_weights(LDS Weights* weights, vec<f32, 4> weight, i32 row, i32 first_token) {
#pragma unroll
        for (i32 t = 0; t < Weights::TERMS; t++) {
            const auto term = __builtin_convertvector(weight, vec<bf16, 4>);
            weight -= __builtin_convertvector(term, vec<f32, 4>);
            *(LDS vec<bf16, 4>*)(weights->term[t] + row * Weights::ROW_BYTES + first_token * 2) = term;
        }
    }
    DEVICE_MEMBER void add(const LDS KvTile<Bf16>* tile, const LDS Weights* weights, f32, i32 first_column, i32 lane) {
        const i32 row = lane % 16, group = lane / 16;
#pragma unroll
        for (i32 step = 0; step < Bf16::TOKENS / K; step++) {
            const i32 token = step * K + group * 8;
            vec<bf16, 8> weight[Weights::TERMS];
#pragma unroll
            for (i32 t = 0; t < Weights::TERMS; t++)
                weight[t] = *(const LDS vec<bf16, 8>*)(weights->term[t] + row * Weights::ROW_BYTES + token * 2);
            // Lane 4j + i of a group reads columns 4i .. 4i + 3 of the group's j-th token, and of the fourth token after it.
            const i32 source_token = token + row / 4;
#pragma unroll
            for (i32 b = 0; b < BLOCKS; b++) {
                const i32 first_byte = (first_column + b / 4 * 64) * 2, offset = (b % 4 * 16 + row % 4 * 4) * 2;
                const auto first = ds_read_transposed(byte_of(tile, source_token, first_byte, offset));
                const auto second = ds_read_transposed(byte_of(tile, source_token + 4, first_byte, offset));
                const auto v = __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7);
#pragma unroll
                for (i32 t = 0; t < Weights::TERMS; t++) block[b] = mfma_bf16(v, weight[t], block[b]);
            }
        }
    }
};

// E4M3 weights and values. E4M3 reaches from 2^8 down to 2^-9, so weights are stored 2^8 too large and relative to their own tile's maximum; the
// scale operand of the matrix instruction takes back the one and brings them to the running maximum.
template <> struct Output<Fp8E4m3fn> : OutputBlocks {
    using Weights = WeightTile<3, Fp8E4m3fn::TOKENS>;
    static constexpr bool WEIGHTS_RELATIVE_TO_TILE = true;
    static constexpr i32 GAIN_LOG2 = 8;
    static_assert(Fp8E4m3fn::TOKENS == MX_K, "one matrix instruction adds up the tile");

    DEVICE_MEMBER static void prepare(LDS Weights*, const LDS KvTile<Fp8E4m3fn>*, i32) {}
    DEVICE_MEMBER static void store_weights(LDS Weights* weights, vec<f32, 4> weight, i32 row, i32 first_token) {
        weight *= f32(1 << GAIN_LOG2);
#pragma unroll
        for (i32 t = 0; t < Weights::TERMS; t++) {
            const u32 term = e4m3_from_f32_high(weight[2], weight[3], e4m3_from_f32(weight[0], weight[1]));
            const auto t01 = f32_from_e4m3<false>(term), t23 = f32_from_e4m3<true>(term);
            weight = (weight - vec<f32, 4>{t01[0], t01[1], t23[0], t23[1]}) * E4M3_TERM_GAIN;
            *(LDS u32*)(weights->term[t] + row * Weights::ROW_BYTES + first_token) = term;
        }
    }
    DEVICE_MEMBER void add(const LDS KvTile<Fp8E4m3fn>* tile, const LDS Weights* weights, f32 shift, i32 first_column, i32 lane) {
        const i32 row = lane % 16, group = lane / 16;
        // A scale ends at 2^-127: a tile further below the others than 2^-100 counts as 2^-100 of them.
        const u32 exponent = u32(i32(max(shift, -100.0f)) - GAIN_LOG2);
        vec<i32, 8> weight[Weights::TERMS];
#pragma unroll
        for (i32 half = 0; half < 2; half++)
#pragma unroll
            for (i32 t = 0; t < Weights::TERMS; t++) {
                const auto four = *(const LDS vec<i32, 4>*)(weights->term[t] + row * Weights::ROW_BYTES + mfma_k_of_8bit(group, half));
#pragma unroll
                for (i32 n = 0; n < 4; n++) weight[t][half * 4 + n] = four[n];
            }
#pragma unroll
        for (i32 b = 0; b < BLOCKS; b++) {
            vec<i32, 8> v;
#pragma unroll
            for (i32 n = 0; n < 4; n++) {
                // Lanes 2j and 2j + 1 of a group read columns 0 .. 7 and 8 .. 15 of the group's j-th token; eight tokens a read.
                const i32 token = mfma_k_of_8bit(group, n / 2) + n % 2 * 8 + row / 2;
                const auto eight = ds_read_transposed_8(byte_of(tile, token, first_column + b / 4 * 64, b % 4 * 16 + row % 2 * 8));
                v[2 * n] = eight[0], v[2 * n + 1] = eight[1];
            }
#pragma unroll
            for (i32 t = 0; t < Weights::TERMS; t++)
                block[b] = mfma_scaled<E4M3, E4M3>(v, weight[t], block[b], E8M0_ONE, e4m3_term_scale(t) + exponent);
        }
    }
};

DEVICE vec<bf16, 8> eight_bf16_from_e2m1(u32 eight) {
    const auto a = bf16_from_e2m1<0>(eight, 1.0f), b = bf16_from_e2m1<1>(eight, 1.0f), c = bf16_from_e2m1<2>(eight, 1.0f), d = bf16_from_e2m1<3>(eight, 1.0f);
    return {a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]};
}

// bf16 weights, and E2M1 values that become bf16 in registers. The scale of a token's 32 columns goes into its weights, two an instruction: as it is a
// power of two, it adds to a weight's exponent field. So that nothing has to be added to a weight of 0, weights are stored 2^127 too large and a scale
// as what is to be subtracted from their bits, which stops at 0. (What that makes of scales below 2^-115 is too small for bf16.)
template <> struct Output<Mxfp4> : OutputBlocks {
    struct Weights : WeightTile<2, Mxfp4::TOKENS * 2> {
        // [V's MX blocks][tokens of the tile]
        alignas(16) u16 exponents[KV_LORA_RANK_COLUMNS / MX_BLOCK][Mxfp4::TOKENS + 8];
    };
    static constexpr bool WEIGHTS_RELATIVE_TO_TILE = false;
    static constexpr u32 BIAS = 127;
    static constexpr int TOKENS_PER_READ = 64;  // of one transposed read: 16 a lane

    DEVICE_MEMBER static void prepare(LDS Weights* weights, const LDS KvTile<Mxfp4>* tile, i32 thread) {
        constexpr int BLOCKS_PER_THREAD = KV_LORA_RANK_COLUMNS / MX_BLOCK * Mxfp4::TOKENS / NUM_THREADS;
        const i32 token = thread % Mxfp4::TOKENS, first_block = thread / Mxfp4::TOKENS * BLOCKS_PER_THREAD;
        u32 scales[BLOCKS_PER_THREAD / 2];  // two each, in the low half
#pragma unroll
        for (i32 n = 0; n < BLOCKS_PER_THREAD / 2; n++)
            scales[n] = *(const LDS u32*)(tile->scale_pairs + KvTile<Mxfp4>::scale_offset(token, 2 * n, first_block));
        // A weight of 1 is 2^127, and is to become 2^(scale - 127). (A NaN scale has made the scores NaN.)
        constexpr u32 ONE = (BIAS + E8M0_ONE) << 7;
#pragma unroll
        for (i32 n = 0; n < BLOCKS_PER_THREAD / 2; n++) {
            weights->exponents[first_block + 2 * n][token] = u16(ONE - (scales[n] << 7 & 0x7f80));
            weights->exponents[first_block + 2 * n + 1][token] = u16(ONE - (scales[n] >> 1 & 0x7f80));
        }
    }
    DEVICE_MEMBER static void store_weights(LDS Weights* weights, vec<f32, 4> weight, i32 row, i32 first_token) {
        weight *= 0x1p127f;
#pragma unroll
        for (i32 t = 0; t < Weights::TERMS; t++) {
            // Cut off, not rounded: then no term is negative.
            const auto bits = __builtin_bit_cast(vec<u32, 4>, weight);
            weight -= __builtin_bit_cast(vec<f32, 4>, bits & 0xffff0000);
            *(LDS vec<u16, 4>*)(weights->term[t] + row * Weights::ROW_BYTES + first_token * 2) = __builtin_convertvector(bits >> 16, vec<u16, 4>);
        }
    }
    DEVICE_MEMBER void add(const LDS KvTile<Mxfp4>* tile, const LDS Weights* weights, f32, i32 first_column, i32 lane) {
        const i32 row = lane % 16, group = lane / 16;
#pragma unroll
        for (i32 first_token = 0; first_token < Mxfp4::TOKENS; first_token += TOKENS_PER_READ) {
            const i32 token = first_token + group * 16;
            vec<u16, 8> weight[Weights::TERMS][2];
#pragma unroll
            for (i32 t = 0; t < Weights::TERMS; t++)
#pragma unroll
                for (i32 k = 0; k < 2; k++)
                    weight[t][k] = *(const LDS vec<u16, 8>*)(weights->term[t] + row * Weights::ROW_BYTES + (token + k * 8) * 2);
#pragma unroll
            for (i32 mx = 0; mx < COLUMNS_PER_WAVE / MX_BLOCK; mx++) {
                const LDS u16* exponents = &weights->exponents[first_column / MX_BLOCK + mx][token];
                vec<bf16, 8> scaled[Weights::TERMS][2];
#pragma unroll
                for (i32 k = 0; k < 2; k++) {
                    const auto exponent = *(const LDS vec<u16, 8>*)(exponents + k * 8);
#pragma unroll
                    for (i32 t = 0; t < Weights::TERMS; t++)
                        scaled[t][k] = __builtin_bit_cast(vec<bf16, 8>, __builtin_elementwise_sub_sat(weight[t][k], exponent));
                }
#pragma unroll
                for (i32 b = mx * 2; b < mx * 2 + 2; b++) {
                    // Lane j of a group reads 16 columns of the group's j-th token, and gets one column of its 16 tokens.
                    const auto sixteen = ds_read_transposed_4(byte_of(tile, token + row, (first_column + b * 16) / 2, 0));
#pragma unroll
                    for (i32 k = 0; k < 2; k++) {
                        const auto v = eight_bf16_from_e2m1(u32(sixteen[k]));
#pragma unroll
                        for (i32 t = 0; t < Weights::TERMS; t++) block[b] = mfma_bf16(v, scaled[t][k], block[b]);
                    }
                }
            }
        }
    }
};
