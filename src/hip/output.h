// PV: softmax weights as matrix operands, and what they add up to.
//
// QK leaves a lane the weights of tokens 16 b + 4 g + r of one query row (b: block of scores; g = lane / 16; r = 0 .. 3). PV may add up tokens in any
// order, as long as weights and values agree: it takes them as they lie, and the transposed reads of V follow. So weights do not leave their wave.
//
// Weights are the sum of terms, two of bf16 (16 significant bits) or three of E4M3 (12, for weights above 2^-14 of their tile's largest): rounding
// them to one would show beside the rounding of the result. If a wave has fewer tokens than a matrix instruction adds up, it takes several terms at once:
// V, repeated, against one term after the other.
#pragma once
#include "mx_scales.h"
#include "softmax.h"

constexpr int NUM_COLUMN_BLOCKS = KV_LORA_RANK_COLUMNS / 16;

// O^T, so that a lane holds columns of one query row (lane % 16), the row of its softmax state: columns 16 n + 4 g .. + 3 in block n.
struct OutputBlocks {
    vec<f32, 4> block[NUM_COLUMN_BLOCKS] = {};

    DEVICE_MEMBER void rescale(f32 factor) {
#pragma unroll
        for (i32 n = 0; n < NUM_COLUMN_BLOCKS; n++) block[n] *= factor;
    }
};

// Calls add(n, values) for n = 0 .. COUNT - 1 with what read(n) returned, some n later: READS reads from LDS, of which those of the next few n are
// under way while the present ones are used: up to IN_FLIGHT reads for each wait, and twice that in registers.
template <int COUNT, int READS, int IN_FLIGHT, class Read, class Add> DEVICE void read_ahead(Read read, Add add) {
    constexpr int AT_ONCE = IN_FLIGHT / READS;
    decltype(read(0)) values[2][AT_ONCE];
#pragma unroll
    for (i32 n = 0; n < AT_ONCE; n++) values[0][n] = read(n);
    keep_order();
#pragma unroll
    for (i32 first = 0; first < COUNT; first += AT_ONCE) {
        const i32 now = first / AT_ONCE % 2;
        if (first + AT_ONCE < COUNT) {
#pragma unroll
            for (i32 n = 0; n < AT_ONCE; n++) values[now ^ 1][n] = read(first + AT_ONCE + n);
            wait_for_lds<min(AT_ONCE * READS, 14)>();  // the most that can be said: of 16, two of the next have come then too
        } else {
            wait_for_lds<0>();
        }
#pragma unroll
        for (i32 n = 0; n < AT_ONCE; n++) add(first + n, values[now][n]);
    }
}

// Output of a format, for TOKENS tokens at a time. Each has
//   RELATIVE_TO_STEP            whether weights are relative to the step's own base, or to the running one
//   SLACK                       log2 of how large a weight may be: see OnlineSoftmax
//   Weights                     of a row's TOKENS tokens, each at most 2^SLACK, as they come from QK
//   add                         PV of these tokens, which lie in `rows`; `shift`: log2 of what the weights are to be multiplied with, whole and at most SLACK
template <class Format, int TOKENS> struct Output;

// bf16 weights and values. Their exponents reach as far as those of f32, so that weights may be relative to the running maximum.
template <int TOKENS> struct Output<Bf16, TOKENS> : OutputBlocks {
    static constexpr bool RELATIVE_TO_STEP = false;
    static constexpr f32 SLACK = 16.0f;
    static constexpr int K = 32;  // tokens one matrix instruction adds up
    static constexpr int TERMS = 2;
    static constexpr bool BOTH_TERMS = TOKENS < K;  // at once
    static constexpr int STEPS = BOTH_TERMS ? 1 : TOKENS / K, TERMS_AT_ONCE = BOTH_TERMS ? 2 : 1;
    static_assert(TOKENS * TERMS_AT_ONCE == STEPS * K);

    struct Weights {
        vec<u32, 4> operand[STEPS][TERMS / TERMS_AT_ONCE];

        DEVICE_MEMBER Weights(const vec<f32, 4>* weight) {
            vec<u32, 2> term[TERMS][TOKENS / 16];
#pragma unroll
            for (i32 b = 0; b < TOKENS / 16; b++) {
                auto rest = weight[b];
#pragma unroll
                for (i32 t = 0; t < TERMS; t++) {
                    const auto rounded = __builtin_convertvector(rest, vec<bf16, 4>);
                    rest -= __builtin_convertvector(rounded, vec<f32, 4>);
                    term[t][b] = __builtin_bit_cast(vec<u32, 2>, rounded);
                }
            }
            if constexpr (BOTH_TERMS) {
                // Lane groups 0 and 1 get the high terms, 2 and 3 the low ones, of 8 tokens each.
#pragma unroll
                for (i32 n = 0; n < 2; n++) {
                    u32 high = term[0][0][n], low = term[1][0][n];
                    swap_halves(high, low);
                    operand[0][0][n] = high, operand[0][0][2 + n] = low;
                }
            } else {
#pragma unroll
                for (i32 s = 0; s < STEPS; s++)
#pragma unroll
                    for (i32 t = 0; t < TERMS; t++)
                        operand[s][t] = {term[t][2 * s][0], term[t][2 * s][1], term[t][2 * s + 1][0], term[t][2 * s + 1][1]};
            }
        }
    };

    INLINED_WITH_SCOPES void add(const LDS u8* __restrict__ rows, const LDS BlockScales<Bf16>::Shared*, const Weights& weights, f32, i32 lane) {
        // Lane 4j + i of a group reads columns 4i .. 4i + 3 of the first four tokens' j-th, and of the second four's.
        const i32 row = lane % 16, group = lane / 16, token = (BOTH_TERMS ? group % 2 : group) * 4 + row / 4;
        constexpr int READS = 2 * STEPS;
        struct Values {
            vec<bf16, 4> part[READS];
        };
        read_ahead<NUM_COLUMN_BLOCKS, READS, BOTH_TERMS ? 16 : 8>(
            [&](i32 n) {
                Values v;
#pragma unroll
                for (i32 i = 0; i < READS; i++)
                    v.part[i] = ds_read_transposed(byte_of<Bf16>(rows + (BOTH_TERMS ? i * 8 * Bf16::ROW_BYTES : 0), BOTH_TERMS ? 0 : i, token, n / 4 * 128,
                                                                 n % 4 * 32, row % 4 * 8));
                return v;
            },
            [&](i32 n, const Values& v) {
#pragma unroll
                for (i32 s = 0; s < STEPS; s++)
#pragma unroll
                    for (i32 i = 0; i < TERMS / TERMS_AT_ONCE; i++)
                        block[n] = mfma_bf16(__builtin_shufflevector(v.part[2 * s], v.part[2 * s + 1], 0, 1, 2, 3, 4, 5, 6, 7),
                                             __builtin_bit_cast(vec<bf16, 8>, weights.operand[s][i]), block[n]);
            });
    }
};

// E4M3 weights and values. E4M3 reaches from 2^8 down to 2^-9, so weights are stored 2^8 too large and relative to their own tile's maximum; the
// scale operand of the matrix instruction takes back the one and brings them to the running maximum.
//
// Of 32 tokens only, a quarter of what an instruction adds up, one operand holds the values of two column blocks, in its two halves of registers; the other
// one, two terms of the weights against one half (lane groups 0 and 1 have the first, 2 and 3 the second) and zeros against the other.
template <int TOKENS> struct Output<Fp8E4m3fn, TOKENS> : OutputBlocks {
    static constexpr bool RELATIVE_TO_STEP = true;
    static constexpr f32 SLACK = 16.0f;
    static constexpr i32 GAIN_LOG2 = 8;
    static constexpr int TERMS = 3;
    static constexpr bool FEW_TOKENS = TOKENS < MX_K;
    static constexpr int HALVES = FEW_TOKENS ? 2 : 1, TERMS_AT_ONCE = FEW_TOKENS ? 2 : 1;
    static constexpr int INSTRUCTIONS = (TERMS + TERMS_AT_ONCE - 1) / TERMS_AT_ONCE;
    static_assert(TOKENS * HALVES * TERMS_AT_ONCE == MX_K);

    struct Weights {
        vec<i32, 8> operand[INSTRUCTIONS][HALVES] = {};

        DEVICE_MEMBER Weights(const vec<f32, 4>* weight) {
#pragma unroll
            for (i32 b = 0; b < TOKENS / 16; b++) {
                auto rest = weight[b] * f32(1 << GAIN_LOG2);
                u32 term[INSTRUCTIONS * TERMS_AT_ONCE] = {};
#pragma unroll
                for (i32 t = 0; t < TERMS; t++) term[t] = split_e4m3_term(rest);
#pragma unroll
                for (i32 i = 0; i < INSTRUCTIONS; i++) {
                    if constexpr (FEW_TOKENS) {
                        swap_halves(term[2 * i], term[2 * i + 1]);
#pragma unroll
                        for (i32 half = 0; half < HALVES; half++)
#pragma unroll
                            for (i32 n = 0; n < 2; n++) operand[i][half][half * 4 + b * 2 + n] = i32(term[2 * i + n]);
                    } else {
                        operand[i][0][b] = i32(term[i]);
                    }
                }
            }
        }
    };

    INLINED_WITH_SCOPES void add(const LDS u8* __restrict__ rows, const LDS BlockScales<Fp8E4m3fn>::Shared*, const Weights& weights, f32 shift, i32 lane) {
        // A scale ends at 2^-127: a tile further below the others than 2^-100 counts as 2^-100 of them.
        const u32 exponent = u32(i32(max(shift, -100.0f)) - GAIN_LOG2);
        const i32 group = lane / 16, j = lane % 16 / 2;
        // Lanes 2j and 2j + 1 of a group read columns 0 .. 7 and 8 .. 15 of the j-th of eight tokens: the four of one block of scores, and of the
        // next; or, where lane groups 2 and 3 read the same as 0 and 1, eight of one block.
        const i32 token = FEW_TOKENS ? j / 4 * 8 + group % 2 * 4 + j % 4 : group * 4 + j % 4;
        const LDS u8* const lane_rows = rows + (FEW_TOKENS ? 0 : j / 4 * 16 * Fp8E4m3fn::ROW_BYTES);
        const i32 lane_offset = lane % 2 * 8 ^ (FEW_TOKENS ? 0 : Fp8E4m3fn::swizzle(j / 4 * 16) * DMA_BYTES);
        constexpr int READS = 4;
        struct Values {
            i64 eight[READS];
        };
        read_ahead<NUM_COLUMN_BLOCKS / HALVES, READS, FEW_TOKENS ? 16 : 8>(
            [&](i32 n) {
                Values v;
#pragma unroll
                for (i32 i = 0; i < READS; i++) {
                    const i32 column_block = FEW_TOKENS ? 2 * n + i / 2 : n, tokens = FEW_TOKENS ? i % 2 : 2 * i;
                    const auto* address = byte_of<Fp8E4m3fn>(lane_rows, tokens, token, column_block / 4 * 64, column_block % 4 * 16, lane_offset);
                    v.eight[i] = __builtin_bit_cast(i64, ds_read_transposed_8(address));
                }
                return v;
            },
            [&](i32 n, const Values& v) {
                const auto values = __builtin_bit_cast(vec<i32, 8>, v);
#pragma unroll
                for (i32 half = 0; half < HALVES; half++)
#pragma unroll
                    for (i32 i = 0; i < INSTRUCTIONS; i++)
                        block[n * HALVES + half] = mfma_scaled<E4M3, E4M3>(values, weights.operand[i][half], block[n * HALVES + half], E8M0_ONE,
                                                                           e4m3_term_scale(FEW_TOKENS ? 2 * i + group % 2 : i) + exponent);
            });
    }
};

DEVICE vec<bf16, 8> eight_bf16_from_e2m1(u32 eight) {
    const auto a = bf16_from_e2m1<0>(eight, 1.0f), b = bf16_from_e2m1<1>(eight, 1.0f), c = bf16_from_e2m1<2>(eight, 1.0f), d = bf16_from_e2m1<3>(eight, 1.0f);
    return {a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]};
}

// bf16 weights, and E2M1 values that become bf16 in registers. The scale of a token's 32 columns goes into its weights, two an instruction: as it is a
// power of two, it adds to a weight's exponent field. So that nothing has to be added to a weight of 0, weights are stored 2^127 too large and a scale
// as what is to be subtracted from their bits, which stops at 0. (What that makes of scales below 2^-115 is too small for bf16.)
template <int TOKENS> struct Output<Mxfp4, TOKENS> : OutputBlocks {
    static constexpr bool RELATIVE_TO_STEP = false;
    static constexpr f32 SLACK = 0.0f;  // weights are as large as bf16 can be
    static constexpr int TERMS = 2, K = 32, STEPS = TOKENS / K;
    static_assert(TOKENS == Mxfp4::TOKENS && TOKENS == LANES, "one transposed read brings 16 columns of all tokens");

    struct Weights {
        vec<u16, 8> term[TERMS][STEPS];

        DEVICE_MEMBER Weights(const vec<f32, 4>* weight) {
#pragma unroll
            for (i32 b = 0; b < TOKENS / 16; b++) {
                auto rest = weight[b] * 0x1p127f;
#pragma unroll
                for (i32 t = 0; t < TERMS; t++) {
                    // Cut off, not rounded: then no term is negative.
                    const auto bits = __builtin_bit_cast(vec<u32, 4>, rest);
                    rest -= __builtin_bit_cast(vec<f32, 4>, bits & 0xffff0000);
                    const auto four = __builtin_convertvector(bits >> 16, vec<u16, 4>);
#pragma unroll
                    for (i32 r = 0; r < 4; r++) term[t][b / 2][b % 2 * 4 + r] = four[r];
                }
            }
        }
    };

    INLINED_WITH_SCOPES void add(const LDS u8* __restrict__ rows, const LDS MxScales* scales, const Weights& weights, f32, i32 lane) {
        // Lane j of a group reads 16 columns of the group's j-th token, and gets one column of its 16 tokens.
        const i32 row = lane % 16, group = lane / 16, token = row / 4 * 16 + group * 4 + row % 4;
        vec<bf16, 8> scaled[TERMS][STEPS];
        struct Values {
            vec<i32, 2> sixteen;
            vec<u16, 8> exponent[STEPS];  // of the MX block, with its first column block
        };
        read_ahead<NUM_COLUMN_BLOCKS, 2, 8>(
            [&](i32 n) {
                Values v;
                if (n % 2 == 0)
#pragma unroll
                    for (i32 s = 0; s < STEPS; s++) v.exponent[s] = *(const LDS vec<u16, 8>*)&scales->of_v[n / 2][group * 16 + s * 8];
                v.sixteen = ds_read_transposed_4(byte_of<Mxfp4>(rows, 0, token, n / 4 * 32 + n % 2 * 8, n / 2 % 2 * 16, 0));
                return v;
            },
            [&](i32 n, const Values& v) {
#pragma unroll
                for (i32 s = 0; s < STEPS; s++) {
                    const auto values = eight_bf16_from_e2m1(u32(v.sixteen[s]));
#pragma unroll
                    for (i32 t = 0; t < TERMS; t++) {
                        if (n % 2 == 0) scaled[t][s] = __builtin_bit_cast(vec<bf16, 8>, __builtin_elementwise_sub_sat(weights.term[t][s], v.exponent[s]));
                        block[n] = mfma_bf16(values, scaled[t][s], block[n]);
                    }
                }
            });
    }
};
