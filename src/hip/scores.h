// QK: the query rows as matrix operands, and the scores of 16 tokens against them.
//
// Scores come as K * Q^T: a lane's four scores are tokens 4 * (lane / 16) .. + 3 of one query row, lane % 16, so that a row's softmax needs
// only the lanes that are equal modulo 16.
#pragma once
#include "kv_tile.h"

// The operand of one K = 128 step: `at(first, column)` is where 16 8-bit numbers of a row of 576 are in LDS, from `first` + `column` on, `first` the
// same for all lanes; 0 past the row's end.
template <class At> DEVICE vec<i32, 8> load_8bit_operand(At at, i32 step, i32 group) {
    vec<i32, 8> operand = {};
#pragma unroll
    for (i32 half = 0; half < 2; half++) {
        const i32 first = step * MX_K + mfma_k_of_8bit(0, half), column = mfma_k_of_8bit(group, half) - mfma_k_of_8bit(0, half);
        if (first + column >= QK_COLUMNS) continue;
        const auto four = *(const LDS vec<i32, 4>*)at(first, column);
#pragma unroll
        for (i32 n = 0; n < 4; n++) operand[half * 4 + n] = four[n];
    }
    return operand;
}

// Where the threads pass the query's E4M3 terms round.
struct QueryTile {
    static constexpr int TERMS = 2, ROW_BYTES = QK_COLUMNS + 16;  // padded against bank conflicts
    alignas(16) u8 term[TERMS][ROWS * ROW_BYTES];
    u32 largest[NUM_WAVES][ROWS];
};

// A workgroup's query rows. fetch() starts the loads of the row of this lane, lane % 16 (576 bf16 at `q`), share() makes operands of them together with
// the other threads, by way of `tile`; then scores() are those of 16 tokens, of which `token` is this lane's in the tile; `group` = lane / 16.
template <class Format> struct Query;

// bf16: q as it is.
template <> struct Query<Bf16> {
    static constexpr int K = 32, STEPS = QK_COLUMNS / K;
    vec<bf16, 8> part[STEPS];

    DEVICE_MEMBER void fetch(const bf16* q, i32, i32 lane) {
#pragma unroll
        for (i32 step = 0; step < STEPS; step++) part[step] = *(const vec<bf16, 8>*)(q + step * K + lane / 16 * 8);
    }
    DEVICE_MEMBER void share(LDS QueryTile*, i32, i32) {}
    DEVICE_MEMBER vec<f32, 4> scores(const LDS KvTile<Bf16>* tile, i32 token, i32 group) const {
        vec<f32, 4> sum = {};
#pragma unroll
        for (i32 step = 0; step < STEPS; step++) {
            const auto k = *(const LDS vec<bf16, 8>*)byte_of(tile, token, step / 2 * (4 * K), step % 2 * (2 * K) + group * 16);
            sum = mfma_bf16(k, part[step], sum);
        }
        return sum;
    }
    DEVICE_MEMBER f32 scale() const { return 1.0f; }
};

// FP8 matrix instructions take E4M3 operands, 4 significant bits; a bf16 number has 8. With power-of-two scales it is exactly the sum of a
// high E4M3 term and a low one 16 times finer (elements below some 2^-14 of their row's largest aside), so two FP8 products give the very
// scores of the bf16 query.
struct SplitQuery {
    static constexpr int STEPS = (QK_COLUMNS + MX_K - 1) / MX_K;  // the last one is half empty: its operands are 0 there
    vec<i32, 8> term[QueryTile::TERMS][STEPS];
    f32 row_scale;

    DEVICE_MEMBER f32 scale() const { return row_scale; }

    DEVICE_MEMBER void fetch(const bf16* q, i32 wave, i32 lane) {
#pragma unroll
        for (i32 round = 0; round < ROUNDS; round++) {
            const i32 column = min(first_chunk(wave, lane) + round * AT_ONCE, CHUNKS - 1) * CHUNK;
#pragma unroll
            for (i32 half = 0; half < 2; half++) pairs[round][half] = *(const vec<u32, 4>*)(q + column + half * 8);
        }
    }
    DEVICE_MEMBER void share(LDS QueryTile* tile, i32 wave, i32 lane) {
        const i32 row = lane % ROWS, group = lane / ROWS;
        u32 largest = 0;  // of the absolute values, whose bit patterns order as they do
#pragma unroll
        for (i32 round = 0; round < ROUNDS; round++)
#pragma unroll
            for (i32 n = 0; n < 8; n++) {
                const u32 pair = pairs[round][n / 4][n % 4];
                largest = max(max(largest, (pair << 16) & 0x7fffffff), pair & 0x7fff0000);
            }
        largest = max_over_lane_groups(largest);
        if (group == 0) tile->largest[wave][row] = largest;
        lds_barrier();
#pragma unroll
        for (i32 w = 0; w < NUM_WAVES; w++) largest = max(largest, tile->largest[w][row]);
        // 2^ceil(log2(largest / 448)): 448 = 1.75 * 2^8, so a mantissa above 1.75 carries into the exponent. Scale and inverse stay normal numbers.
        const i32 exponent = clamp(i32((largest + 0x1fffff) >> 23) - 8, 1, 253);
        row_scale = __builtin_bit_cast(f32, exponent << 23);
        const f32 inverse = __builtin_bit_cast(f32, (254 - exponent) << 23);

#pragma unroll
        for (i32 round = 0; round < ROUNDS; round++) {
            const i32 chunk = first_chunk(wave, lane) + round * AT_ONCE;
            if (chunk >= CHUNKS) continue;
            vec<u32, 4> codes[QueryTile::TERMS];
#pragma unroll
            for (i32 n = 0; n < 4; n++) {
                const u32 first = pairs[round][n / 2][n % 2 * 2], second = pairs[round][n / 2][n % 2 * 2 + 1];
                vec<f32, 4> rest = vec<f32, 4>{from_bf16(first << 16), from_bf16(first), from_bf16(second << 16), from_bf16(second)} * inverse;
#pragma unroll
                for (i32 t = 0; t < QueryTile::TERMS; t++) {
                    codes[t][n] = e4m3_from_f32_high(rest[2], rest[3], e4m3_from_f32(rest[0], rest[1]));
                    const auto t01 = f32_from_e4m3<false>(codes[t][n]), t23 = f32_from_e4m3<true>(codes[t][n]);
                    rest = (rest - vec<f32, 4>{t01[0], t01[1], t23[0], t23[1]}) * E4M3_TERM_GAIN;
                }
            }
#pragma unroll
            for (i32 t = 0; t < QueryTile::TERMS; t++) *(LDS vec<u32, 4>*)(tile->term[t] + row * QueryTile::ROW_BYTES + chunk * CHUNK) = codes[t];
        }
        lds_barrier();
#pragma unroll
        for (i32 t = 0; t < QueryTile::TERMS; t++)
#pragma unroll
            for (i32 step = 0; step < STEPS; step++)
                term[t][step] = load_8bit_operand([&](i32 first, i32 column) { return tile->term[t] + row * QueryTile::ROW_BYTES + first + column; }, step, group);
    }

  private:
    // The rows are split a chunk of 16 columns a lane at a time.
    static constexpr int CHUNK = 16, CHUNKS = QK_COLUMNS / CHUNK, AT_ONCE = NUM_THREADS / ROWS, ROUNDS = (CHUNKS + AT_ONCE - 1) / AT_ONCE;
    vec<u32, 4> pairs[ROUNDS][2];  // bf16 numbers, two each

    DEVICE_MEMBER static i32 first_chunk(i32 wave, i32 lane) { return wave * (LANES / ROWS) + lane / ROWS; }
    // The upper half of a dword as bf16; what is below it is cut off.
    DEVICE_MEMBER static f32 from_bf16(u32 upper) { return __builtin_bit_cast(f32, upper & 0xffff0000); }
    DEVICE_MEMBER static i32 clamp(i32 x, i32 low, i32 high) { return x < low ? low : x > high ? high : x; }
};

template <> struct Query<Fp8E4m3fn> : SplitQuery {
    DEVICE_MEMBER vec<f32, 4> scores(const LDS KvTile<Fp8E4m3fn>* tile, i32 token, i32 group) const {
        vec<f32, 4> sum = {};
#pragma unroll
        for (i32 step = 0; step < STEPS; step++) {
            const auto k = load_8bit_operand([&](i32 first, i32 column) { return byte_of(tile, token, first, column); }, step, group);
#pragma unroll
            for (i32 t = 0; t < QueryTile::TERMS; t++) sum = mfma_scaled<E4M3, E4M3>(k, term[t][step], sum, E8M0_ONE, e4m3_term_scale(t));
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
            if (step * MX_K + mfma_k_of_4bit(group) < QK_COLUMNS) {
                const auto codes = *(const LDS vec<i32, 4>*)byte_of(tile, token, step * (MX_K / 2), mfma_k_of_4bit(group) / 2);
#pragma unroll
                for (i32 n = 0; n < 4; n++) k[n] = codes[n];
            }
            constexpr int BLOCKS = MX_K / MX_BLOCK;
            if (step * BLOCKS + mfma_scale_block(group) < Mxfp4::SCALES_PER_ROW)
                scale = tile->scale_pairs[KvTile<Mxfp4>::scale_offset(token, step * BLOCKS, mfma_scale_block(group))];
#pragma unroll
            for (i32 t = 0; t < QueryTile::TERMS; t++) sum = mfma_scaled<E2M1, E4M3>(k, term[t][step], sum, scale, e4m3_term_scale(t));
        }
        return sum;
    }
};
