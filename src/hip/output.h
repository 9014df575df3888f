// Softmax weights on their way through LDS, and PV: what one wave accumulates, 128 columns of V over all tokens.
//
// Weights are the sum of terms, two of bf16 (16 significant bits) or three of E4M3 (12): rounding them to one would show beside the rounding of
// the result.
#pragma once
#include "kv_tile.h"
#include "softmax.h"

constexpr int COLUMNS_PER_WAVE = KV_LORA_RANK_COLUMNS / NUM_WAVES;

// 64 tokens of 2 bytes or 128 of 1, in rows padded against bank conflicts.
template <int NUM_TERMS> struct WeightTile {
    static constexpr int TERMS = NUM_TERMS, ROW_BYTES = 128 + 16;
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

// bf16 weights and values. Their exponents reach as far as those of f32, so that weights may be relative to the running maximum.
template <class Format> struct Output : OutputBlocks {
    using Softmax = OnlineSoftmax<0>;
    using Weights = WeightTile<2>;
    static constexpr bool WEIGHTS_RELATIVE_TO_TILE = false;
    static constexpr int K = 32;  // tokens one matrix instruction adds up

    DEVICE_MEMBER static void store_weights(LDS Weights* weights, vec<f32, 4> weight, i32 row, i32 first_token) {
#pragma unroll
        for (i32 t = 0; t < Weights::TERMS; t++) {
            const auto term = __builtin_convertvector(weight, vec<bf16, 4>);
            weight -= __builtin_convertvector(term, vec<f32, 4>);
            *(LDS vec<bf16, 4>*)(weights->term[t] + row * Weights::ROW_BYTES + first_token * 2) = term;
        }
    }
    template <int VALUE_ROW_BYTES> DEVICE_MEMBER void add(const LDS u8* value_rows, const LDS Weights* weights, f32, i32 first_column, i32 lane) {
        const i32 row = lane % 16, group = lane / 16;
#pragma unroll
        for (i32 step = 0; step < Format::TOKENS / K; step++) {
            const i32 token = step * K + group * 8;
            vec<bf16, 8> weight[Weights::TERMS];
#pragma unroll
            for (i32 t = 0; t < Weights::TERMS; t++)
                weight[t] = *(const LDS vec<bf16, 8>*)(weights->term[t] + row * Weights::ROW_BYTES + token * 2);
            // Lane 4j + i of a group reads columns 4i .. 4i + 3 of the group's j-th token.
            const LDS u8* source = value_rows + (token + row / 4) * VALUE_ROW_BYTES + (first_column + row % 4 * 4) * 2;
#pragma unroll
            for (i32 b = 0; b < BLOCKS; b++) {
                const auto first = ds_read_transposed(source + b * 32), second = ds_read_transposed(source + b * 32 + 4 * VALUE_ROW_BYTES);
                const auto v = __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7);
#pragma unroll
                for (i32 t = 0; t < Weights::TERMS; t++) block[b] = mfma_bf16(v, weight[t], block[b]);
            }
        }
    }
};

// E4M3 weights and values. E4M3 reaches from 2^8 down to 2^-9, so weights are relative to their own tile's maximum, and the scale operand of the
// matrix instruction brings them to the running one.
template <> struct Output<Fp8E4m3fn> : OutputBlocks {
    using Softmax = OnlineSoftmax<8>;
    using Weights = WeightTile<3>;
    static constexpr bool WEIGHTS_RELATIVE_TO_TILE = true;
    static_assert(Fp8E4m3fn::TOKENS == MX_K, "one matrix instruction adds up the tile");

    DEVICE_MEMBER static void store_weights(LDS Weights* weights, vec<f32, 4> weight, i32 row, i32 first_token) {
#pragma unroll
        for (i32 t = 0; t < Weights::TERMS; t++) {
            const u32 term = e4m3_from_f32_high(weight[2], weight[3], e4m3_from_f32(weight[0], weight[1]));
            const auto t01 = f32_from_e4m3<false>(term), t23 = f32_from_e4m3<true>(term);
            weight = (weight - vec<f32, 4>{t01[0], t01[1], t23[0], t23[1]}) * E4M3_TERM_GAIN;
            *(LDS u32*)(weights->term[t] + row * Weights::ROW_BYTES + first_token) = term;
        }
    }
    // `shift`: log2 of what the tile's weights are to be multiplied with, whole and at most 0.
    template <int VALUE_ROW_BYTES> DEVICE_MEMBER void add(const LDS u8* value_rows, const LDS Weights* weights, f32 shift, i32 first_column, i32 lane) {
        const i32 row = lane % 16, group = lane / 16;
        // Below 2^-100 of the rest a tile adds nothing that f32 could hold.
        const u32 exponent = u32(i32(max(shift, -100.0f)));
        vec<i32, 8> weight[Weights::TERMS];
        const LDS u8* source[2];
#pragma unroll
        for (i32 half = 0; half < 2; half++) {
            const i32 token = mfma_k_of_8bit(group, half);
#pragma unroll
            for (i32 t = 0; t < Weights::TERMS; t++) {
                const auto four = *(const LDS vec<i32, 4>*)(weights->term[t] + row * Weights::ROW_BYTES + token);
#pragma unroll
                for (i32 n = 0; n < 4; n++) weight[t][half * 4 + n] = four[n];
            }
            // Lanes 2j and 2j + 1 of a group read columns 0 .. 7 and 8 .. 15 of the group's j-th token.
            source[half] = value_rows + (token + row / 2) * VALUE_ROW_BYTES + first_column + row % 2 * 8;
        }
#pragma unroll
        for (i32 b = 0; b < BLOCKS; b++) {
            vec<i32, 8> v;
#pragma unroll
            for (i32 n = 0; n < 4; n++) {
                const auto eight = ds_read_transposed_8(source[n / 2] + b * 16 + n % 2 * 8 * VALUE_ROW_BYTES);
                v[2 * n] = eight[0], v[2 * n + 1] = eight[1];
            }
#pragma unroll
            for (i32 t = 0; t < Weights::TERMS; t++)
                block[b] = mfma_scaled<E4M3, E4M3>(v, weight[t], block[b], E8M0_ONE, e4m3_term_scale(t) + exponent);
        }
    }
};
