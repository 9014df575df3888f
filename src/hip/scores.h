// QK: the query rows as matrix operands, and the scores of 16 tokens against them.
//
// Scores come as K * Q^T: a lane's four scores are tokens 4 * (lane / 16) .. + 3 of one query row, lane % 16, so that a row's softmax needs
// only the lanes that are equal modulo 16.
#pragma once
#include "mx_scales.h"

// The operand of one K = 128 step: `at(first, column)` is where 16 8-bit numbers of a row of 576 are in LDS, from `first` + `column` on, `first` the
// same for all lanes. Of the last step, only the first half is there: the second repeats it if REPEAT, else it is 0.
template <bool REPEAT, class At> DEVICE vec<i32, 8> load_8bit_operand(At at, i32 step, i32 group) {
    vec<i32, 8> operand = {};
#pragma unroll
    for (i32 half = 0; half < 2; half++) {
        const bool is_there = step * MX_K + mfma_k_of_8bit(0, half) < QK_COLUMNS;
        if (!REPEAT && !is_there) continue;
        const i32 taken = is_there ? half : 0;
        const auto four = *(const LDS vec<i32, 4>*)at(step * MX_K + mfma_k_of_8bit(0, taken), mfma_k_of_8bit(group, taken) - mfma_k_of_8bit(0, taken));
#pragma unroll
        for (i32 n = 0; n < 4; n++) operand[half * 4 + n] = four[n];
    }
    return operand;
}

// Where the waves pass the E4M3 terms of 16 query rows round.
struct QueryTile {
    static constexpr int TERMS = 2, ROW_BYTES = QK_COLUMNS + 16;  // padded against bank conflicts
    alignas(16) u8 term[TERMS][ROWS * ROW_BYTES];
    u32 largest[NUM_WAVES][ROWS];
};

// 16 query rows of a wave, which SHARERS waves prepare together. fetch() starts the loads of the row of this lane, lane % 16 (576 bf16 at `q`), share()
// makes operands of them, by way of `tile` if there are others. Then, of 16 tokens from 16 * `tokens` on in `rows`, load() reads what scores() scores.
template <class Format, int SHARERS> struct Query;

// bf16: q as it is.
template <int SHARERS> struct Query<Bf16, SHARERS> {
    static constexpr int K = 32, STEPS = QK_COLUMNS / K;
    vec<bf16, 8> part[STEPS];

    DEVICE_MEMBER void fetch(const bf16* q, i32, i32 lane) {
#pragma unroll
        for (i32 step = 0; step < STEPS; step++) part[step] = *(const vec<bf16, 8>*)(q + step * K + lane / 16 * 8);
    }
    DEVICE_MEMBER void share(LDS QueryTile*, i32, i32) {}
    struct Keys {
        vec<bf16, 8> k[STEPS];
    };
    DEVICE_MEMBER static Keys load(const LDS u8* rows, const LDS BlockScales<Bf16>::Shared*, i32 tokens, i32 lane) {
        Keys keys;
#pragma unroll
        for (i32 step = 0; step < STEPS; step++)
            keys.k[step] = *(const LDS vec<bf16, 8>*)byte_of<Bf16>(rows, tokens, lane % 16, step / 2 * (4 * K), step % 2 * (2 * K), lane / 16 * 16);
        return keys;
    }
    DEVICE_MEMBER vec<f32, 4> scores(const Keys& keys) const {
        vec<f32, 4> sum = {};
#pragma unroll
        for (i32 step = 0; step < STEPS; step++) sum = mfma_bf16(keys.k[step], part[step], sum);
        return sum;
    }
    DEVICE_MEMBER f32 scale() const { return 1.0f; }
};

// FP8 matrix instructions take E4M3 operands, 4 significant bits; a bf16 number has 8. With power-of-two scales it is exactly the sum of a
// high E4M3 term and a low one 16 times finer (elements below some 2^-14 of their row's largest aside), so two FP8 products give the very
// scores of the bf16 query.
template <int SHARERS> struct SplitQuery {
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
        if constexpr (SHARERS > 1) {
            if (group == 0) tile->largest[wave][row] = largest;
            lds_barrier();
#pragma unroll
            for (i32 w = 0; w < SHARERS; w++) largest = max(largest, tile->largest[w][row]);
        }
        if constexpr (SHARERS == 1)
#pragma unroll
            for (i32 t = 0; t < QueryTile::TERMS; t++) term[t][STEPS - 1] = {};
        // 2^ceil(log2(largest / 448)): 448 = 1.75 * 2^8, so a mantissa above 1.75 carries into the exponent. Scale and inverse stay normal numbers.
        const i32 exponent = clamp(i32((largest + 0x1fffff) >> 23) - 8, 1, 253);
        row_scale = __builtin_bit_cast(f32, exponent << 23);
        const f32 inverse = __builtin_bit_cast(f32, (254 - exponent) << 23);

#pragma unroll
        for (i32 round = 0; round < ROUNDS; round++) {
            const i32 chunk = first_chunk(wave, lane) + round * AT_ONCE;
            if (SHARERS > 1 && chunk >= CHUNKS) continue;
            vec<u32, 4> codes[QueryTile::TERMS];
#pragma unroll
            for (i32 n = 0; n < 4; n++) {
                const u32 first = pairs[round][n / 2][n % 2 * 2], second = pairs[round][n / 2][n % 2 * 2 + 1];
                vec<f32, 4> rest = vec<f32, 4>{from_bf16(first << 16), from_bf16(first), from_bf16(second << 16), from_bf16(second)} * inverse;
#pragma unroll
                for (i32 t = 0; t < QueryTile::TERMS; t++) codes[t][n] = split_e4m3_term(rest);
            }
#pragma unroll
            for (i32 t = 0; t < QueryTile::TERMS; t++) {
                if constexpr (SHARERS > 1) {
                    *(LDS vec<u32, 4>*)(tile->term[t] + row * QueryTile::ROW_BYTES + chunk * CHUNK) = codes[t];
                } else {
#pragma unroll
                    for (i32 n = 0; n < 4; n++) term[t][round / 2][round % 2 * 4 + n] = i32(codes[t][n]);
                }
            }
        }
        if constexpr (SHARERS > 1) {
            lds_barrier();
#pragma unroll
            for (i32 t = 0; t < QueryTile::TERMS; t++)
#pragma unroll
                for (i32 step = 0; step < STEPS; step++)
                    term[t][step] =
                        load_8bit_operand<false>([&](i32 first, i32 column) { return tile->term[t] + row * QueryTile::ROW_BYTES + first + column; }, step, group);
        }
    }

  private:
    // The rows are split a chunk of 16 columns a lane at a time. A wave by itself splits in each round what is its lanes' half of an operand.
    static constexpr int CHUNK = 16, CHUNKS = QK_COLUMNS / CHUNK, AT_ONCE = SHARERS * LANES / ROWS, ROUNDS = (CHUNKS + AT_ONCE - 1) / AT_ONCE;
    static_assert(SHARERS > 1 || (AT_ONCE * CHUNK * 2 == MX_K && CHUNKS % AT_ONCE == 0 && mfma_k_of_8bit(1, 1) == (AT_ONCE + 1) * CHUNK));
    vec<u32, 4> pairs[ROUNDS][2];  // bf16 numbers, two each

    DEVICE_MEMBER static i32 first_chunk(i32 wave, i32 lane) { return (SHARERS > 1 ? wave * (LANES / ROWS) : 0) + lane / ROWS; }
    // The upper half of a dword as bf16; what is below it is cut off.
    DEVICE_MEMBER static f32 from_bf16(u32 upper) { return __builtin_bit_cast(f32, upper & 0xffff0000); }
    DEVICE_MEMBER static i32 clamp(i32 x, i32 low, i32 high) { return x < low ? low : x > high ? high : x; }
};

template <int SHARERS> struct Query<Fp8E4m3fn, SHARERS> : SplitQuery<SHARERS> {
    static constexpr int STEPS = SplitQuery<SHARERS>::STEPS;
    struct Keys {
        vec<i32, 8> k[STEPS];
    };
    DEVICE_MEMBER static Keys load(const LDS u8* rows, const LDS BlockScales<Fp8E4m3fn>::Shared*, i32 tokens, i32 lane) {
        Keys keys;
#pragma unroll
        for (i32 step = 0; step < STEPS; step++)
            keys.k[step] = load_8bit_operand<true>(
                [&](i32 first, i32 column) { return byte_of<Fp8E4m3fn>(rows, tokens, lane % 16, first, 0, column); }, step, lane / 16);
        return keys;
    }
    DEVICE_MEMBER vec<f32, 4> scores(const Keys& keys) const {
        vec<f32, 4> sum = {};
#pragma unroll
        for (i32 step = 0; step < STEPS; step++)
#pragma unroll
            for (i32 t = 0; t < QueryTile::TERMS; t++) sum = mfma_scaled<E4M3, E4M3>(keys.k[step], this->term[t][step], sum, E8M0_ONE, e4m3_term_scale(t));
        return sum;
    }
};

template <int SHARERS> struct Query<Mxfp4, SHARERS> : SplitQuery<SHARERS> {
    static constexpr int STEPS = SplitQuery<SHARERS>::STEPS;
    struct Keys {
        vec<i32, 8> k[STEPS];
        vec<u32, 2> scales;
    };
    DEVICE_MEMBER static Keys load(const LDS u8* rows, const LDS MxScales* scales, i32 tokens, i32 lane) {
        const i32 token = lane % 16, group = lane / 16;
        Keys keys = {.k = {}, .scales = *(const LDS vec<u32, 2>*)scales->of_k[tokens * 16 + token][group]};
#pragma unroll
        for (i32 step = 0; step < STEPS; step++) {
            // Past the row's end the query is 0; what is read there instead is K all the same, and finite if the row is.
            const i32 column = step == STEPS - 1 ? mfma_k_of_4bit(group % 2) : mfma_k_of_4bit(group);
            const auto codes = *(const LDS vec<i32, 4>*)byte_of<Mxfp4>(rows, tokens, token, step * (MX_K / 2), 0, column / 2);
#pragma unroll
            for (i32 n = 0; n < 4; n++) keys.k[step][n] = codes[n];
        }
        return keys;
    }
    DEVICE_MEMBER vec<f32, 4> scores(const Keys& keys) const {
        vec<f32, 4> sum = {};
        unroll<STEPS>([&](auto step) {
#pragma unroll
            for (i32 t = 0; t < QueryTile::TERMS; t++)
                sum = mfma_scaled<E2M1, E4M3, step % 4>(keys.k[step], this->term[t][step], sum, keys.scales[step / 4], e4m3_term_scale(t));
        });
        return sum;
    }
};
