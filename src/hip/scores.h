// QK: the query rows as matrix operands, and the scores of a wave's 16 tokens against them.
//
// Scores come as K * Q^T: a lane's four scores are tokens 4 * (lane / 16) .. + 3 of one query row, lane % 16, so that a row's softmax needs
// only the lanes that are equal modulo 16.
#pragma once
#include "kv_tile.h"

// bf16: q as it is.
template <class Format> struct Query {
    static constexpr int K = 32, STEPS = QK_COLUMNS / K;
    vec<bf16, 8> part[STEPS];

    // `q`: this lane's query row, 576 bf16; `group` = lane / 16.
    DEVICE_MEMBER void load(const bf16* q, i32 group) {
#pragma unroll
        for (i32 step = 0; step < STEPS; step++) part[step] = *(const vec<bf16, 8>*)(q + step * K + group * 8);
    }
    // `token`: this lane's token in the tile.
    DEVICE_MEMBER vec<f32, 4> scores(const LDS KvTile<Bf16>* tile, i32 token, i32 group) const {
        vec<f32, 4> sum = {};
#pragma unroll
        for (i32 step = 0; step < STEPS; step++) {
            const auto k = *(const LDS vec<bf16, 8>*)(tile->rows + token * Bf16::ROW_BYTES + step * (K * 2) + group * 16);
            sum = mfma_bf16(k, part[step], sum);
        }
        return sum;
    }
    DEVICE_MEMBER f32 scale() const { return 1.0f; }
};

// FP8 matrix instructions take E4M3 operands, 4 significant bits; a bf16 number has 8. With power-of-two scales it is exactly the sum of a
// high E4M3 term and a low one 16 times finer (elements below 2^-14 of their row's largest aside), so two FP8 products give the very
// scores of the bf16 query.
constexpr u32 HIGH_TERM_SCALE = E8M0_ONE, LOW_TERM_SCALE = E8M0_ONE - 4;
constexpr f32 LOW_TERM_GAIN = 16.0f;

struct SplitQuery {
    static constexpr int STEPS = (QK_COLUMNS + MX_K - 1) / MX_K;  // the last one is half empty: its operands are 0 there
    vec<i32, 8> high[STEPS], low[STEPS];
    f32 row_scale;

    DEVICE_MEMBER f32 scale() const { return row_scale; }

    DEVICE_MEMBER void load(const bf16* q, i32 group) {
        // bf16 of one sign order as integers do.
        u32 largest = 0;
#pragma unroll
        for (i32 half_step = 0; half_step < 2 * STEPS; half_step++)
#pragma unroll
            for (i32 n = 0; n < 8; n++) {
                const u32 pair = load_pair(q, group, half_step, n);
                largest = max(max(largest, (pair << 16) & 0x7fffffff), pair & 0x7fff0000);
            }
        largest = max_over_lane_groups(largest);
        // 2^ceil(log2(largest / 448)): 448 = 1.75 * 2^8, so a mantissa above 1.75 carries into the exponent. Scale and inverse
        // stay normal numbers.
        const i32 exponent = clamp(i32((largest + 0x1fffff) >> 23) - 8, 1, 253);
        row_scale = __builtin_bit_cast(f32, exponent << 23);
        const f32 inverse = __builtin_bit_cast(f32, (254 - exponent) << 23);
#pragma unroll
        for (i32 half_step = 0; half_step < 2 * STEPS; half_step++)
#pragma unroll
            for (i32 n = 0; n < 4; n++) {
                const u32 first = load_pair(q, group, half_step, 2 * n), second = load_pair(q, group, half_step, 2 * n + 1);
                const f32 x0 = from_bf16(first << 16) * inverse, x1 = from_bf16(first & 0xffff0000) * inverse;
                const f32 x2 = from_bf16(second << 16) * inverse, x3 = from_bf16(second & 0xffff0000) * inverse;
                const u32 four = e4m3_from_f32_high(x2, x3, e4m3_from_f32(x0, x1));
                const auto h01 = f32_from_e4m3<false>(four), h23 = f32_from_e4m3<true>(four);
                const u32 rest = e4m3_from_f32((x0 - h01[0]) * LOW_TERM_GAIN, (x1 - h01[1]) * LOW_TERM_GAIN);
                high[half_step / 2][half_step % 2 * 4 + n] = i32(four);
                low[half_step / 2][half_step % 2 * 4 + n] =
                    i32(e4m3_from_f32_high((x2 - h23[0]) * LOW_TERM_GAIN, (x3 - h23[1]) * LOW_TERM_GAIN, rest));
            }
    }

  private:
    DEVICE_MEMBER static f32 from_bf16(u32 high_half) { return __builtin_bit_cast(f32, high_half); }
    DEVICE_MEMBER static i32 clamp(i32 x, i32 low, i32 high) { return x < low ? low : x > high ? high : x; }
    // Items 2n and 2n + 1 of this lane's 16 in one half of one step, as two bf16 bit patterns; 0 past the row's end.
    DEVICE_MEMBER static u32 load_pair(const bf16* q, i32 group, i32 half_step, i32 n) {
        const i32 column = half_step / 2 * MX_K + mfma_k_of_8bit(group, half_step % 2);
        return column < QK_COLUMNS ? *(const u32*)(q + column + 2 * n) : 0;
    }
};

template <> struct Query<Fp8E4m3fn> : SplitQuery {
    DEVICE_MEMBER vec<f32, 4> scores(const LDS KvTile<Fp8E4m3fn>* tile, i32 token, i32 group) const {
        vec<f32, 4> sum = {};
#pragma unroll
        for (i32 step = 0; step < STEPS; step++) {
            vec<i32, 8> k = {};
#pragma unroll
            for (i32 half = 0; half < 2; half++) {
                const i32 column = step * MX_K + mfma_k_of_8bit(group, half);
                if (column < QK_COLUMNS) {
                    const auto four = *(const LDS vec<i32, 4>*)(tile->rows + token * Fp8E4m3fn::ROW_BYTES + column);
#pragma unroll
                    for (i32 n = 0; n < 4; n++) k[half * 4 + n] = four[n];
                }
            }
            sum = mfma_scaled<E4M3, E4M3>(k, high[step], sum, E8M0_ONE, HIGH_TERM_SCALE);
            sum = mfma_scaled<E4M3, E4M3>(k, low[step], sum, E8M0_ONE, LOW_TERM_SCALE);
        }
        return sum;
    }
};

template <> struct Query<Mxfp4> : SplitQuery {
    DEVICE_MEMBER vec<f32, 4> scores(const LDS KvTile<Mxfp4>* tile, i32 token, i32 group) const {
        vec<f32, 4> sum = {};
#pragma unroll
        for (i32 step = 0; step < STEPS; step++) {
            vec<i32, 8> k = {};
            u32 scale = E8M0_ONE;
            const i32 column = step * MX_K + mfma_k_of_4bit(group);
            if (column < QK_COLUMNS) {
                const auto codes = *(const LDS vec<i32, 4>*)(tile->rows + token * Mxfp4::ROW_BYTES + column / 2);
#pragma unroll
                for (i32 n = 0; n < 4; n++) k[n] = codes[n];
            }
            const i32 block = step * (MX_K / MX_BLOCK) + mfma_scale_block(group);
            if (block < Mxfp4::SCALES_PER_ROW) scale = tile->scale_pairs[KvTile<Mxfp4>::scale_offset(token, block)];
            sum = mfma_scaled<E2M1, E4M3>(k, high[step], sum, scale, HIGH_TERM_SCALE);
            sum = mfma_scaled<E2M1, E4M3>(k, low[step], sum, scale, LOW_TERM_SCALE);
        }
        return sum;
    }
};
