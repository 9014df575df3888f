// Absorbed MLA decode over a paged KV cache: 16 query rows of one request against a range of its tokens.
//
// A workgroup takes one item of the work list. Its four waves share a tile of 64 tokens:
//   load     the tile's rows go from the cache to LDS by DMA, one tile ahead
//   expand   V becomes bf16 (FP8 and MXFP4; a bf16 tile serves as it is)
//   QK       each wave scores 16 of the tokens against all 16 rows
//   softmax  row maxima cross the waves through LDS; weights go to LDS
//   PV       each wave adds up 128 of the 512 value columns over all 64 tokens
#include "scores.h"
#include "softmax.h"

constexpr int ROWS = 16;
constexpr int TOKENS_PER_WAVE = TOKENS / NUM_WAVES;
constexpr int COLUMNS_PER_WAVE = KV_LORA_RANK_COLUMNS / NUM_WAVES;
constexpr int PV_K = 32;  // tokens one matrix instruction adds up
static_assert(TOKENS_PER_WAVE == 16, "one 16 x 16 result of scores a wave and tile");

EXPORTED ROWS_PER_TILE = ROWS;
EXPORTED TOKENS_PER_TILE = TOKENS;
EXPORTED WORK_WORDS = 5;
EXPORTED KV_LORA_RANK = KV_LORA_RANK_COLUMNS;
EXPORTED QK_WIDTH = QK_COLUMNS;

// ---- LDS plan
// Softmax weights as two bf16 terms, 16 significant bits: rounding them to one would show beside the rounding of the result.
struct WeightTile {
    static constexpr int ROW_BYTES = TOKENS * 2 + 16;  // padded against bank conflicts
    alignas(16) u8 high[ROWS * ROW_BYTES], low[ROWS * ROW_BYTES];
};
struct CrossWave {
    f32 logit_max[NUM_WAVES][ROWS], weight_sum[NUM_WAVES][ROWS];
};
template <class Format> struct LdsPlan {
    KvTile<Format> kv[2];
    ValueTile values;
    WeightTile weights;
    CrossWave rows;
    DEVICE_MEMBER static const LDS u8* value_rows(LDS LdsPlan* lds, i32) { return lds->values.rows; }
    static constexpr int VALUE_ROW_BYTES = ValueTile::ROW_BYTES;
};
template <> struct LdsPlan<Bf16> {
    KvTile<Bf16> kv[2];
    WeightTile weights;
    CrossWave rows;
    DEVICE_MEMBER static const LDS u8* value_rows(LDS LdsPlan* lds, i32 buffer) { return lds->kv[buffer].rows; }
    static constexpr int VALUE_ROW_BYTES = Bf16::ROW_BYTES;
};
constexpr int LDS_LIMIT = 160 * 1024;
static_assert(sizeof(LdsPlan<Bf16>) <= LDS_LIMIT && sizeof(LdsPlan<Fp8E4m3fn>) <= LDS_LIMIT && sizeof(LdsPlan<Mxfp4>) <= LDS_LIMIT);

// ---- stages
template <class Format> DEVICE void expand(LDS LdsPlan<Format>* lds, i32 buffer, i32 thread) { expand_values(&lds->values, &lds->kv[buffer], thread); }
template <> DEVICE_SPECIAL void expand(LDS LdsPlan<Bf16>*, i32, i32) {}

DEVICE void store_weights(LDS WeightTile* weights, vec<f32, 4> weight, i32 row, i32 first_token) {
    const vec<bf16, 4> high = __builtin_convertvector(weight, vec<bf16, 4>);
    const vec<bf16, 4> low = __builtin_convertvector(weight - __builtin_convertvector(high, vec<f32, 4>), vec<bf16, 4>);
    const i32 offset = row * WeightTile::ROW_BYTES + first_token * 2;
    *(LDS vec<bf16, 4>*)(weights->high + offset) = high;
    *(LDS vec<bf16, 4>*)(weights->low + offset) = low;
}

// What one wave accumulates: O^T, so that a lane holds columns of one query row (lane % 16), the row of its softmax state.
struct Output {
    static constexpr int BLOCKS = COLUMNS_PER_WAVE / 16;
    vec<f32, 4> block[BLOCKS] = {};

    DEVICE_MEMBER void rescale(f32 factor) {
#pragma unroll
        for (i32 b = 0; b < BLOCKS; b++) block[b] *= factor;
    }
    template <int VALUE_ROW_BYTES> DEVICE_MEMBER void add(const LDS u8* value_rows, const LDS WeightTile* weights, i32 first_column, i32 lane) {
        const i32 row = lane % 16, group = lane / 16;
#pragma unroll
        for (i32 step = 0; step < TOKENS / PV_K; step++) {
            const i32 token = step * PV_K + group * 8, offset = row * WeightTile::ROW_BYTES + token * 2;
            const auto high = *(const LDS vec<bf16, 8>*)(weights->high + offset), low = *(const LDS vec<bf16, 8>*)(weights->low + offset);
            // Lane 4j + i of a group reads columns 4i .. 4i + 3 of the group's j-th token.
            const LDS u8* source = value_rows + (token + row / 4) * VALUE_ROW_BYTES + (first_column + row % 4 * 4) * 2;
#pragma unroll
            for (i32 b = 0; b < BLOCKS; b++) {
                const auto first = ds_read_transposed(source + b * 32), second = ds_read_transposed(source + b * 32 + 4 * VALUE_ROW_BYTES);
                const auto v = __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7);
                block[b] = mfma_bf16(v, high, block[b]);
                block[b] = mfma_bf16(v, low, block[b]);
            }
        }
    }
    // `target`: where this lane's first column goes, T = bf16 or f32.
    template <class T> DEVICE_MEMBER void store(T* target) const {
#pragma unroll
        for (i32 b = 0; b < BLOCKS; b++) *(vec<T, 4>*)(target + b * 16) = __builtin_convertvector(block[b], vec<T, 4>);
    }
};

// ---- the kernel
template <class Format>
DEVICE void mla_decode(LDS LdsPlan<Format>* lds, const bf16* q, const u8* kv, const u8* kv_scales, const i32* qo_indptr, const i32* kv_indptr,
                       const i32* kv_indices, const i32* kv_last_page_len, const i32* work, bf16* out, f32* lse, f32* partial_out, f32* partial_lse,
                       i32 num_heads, i32 page_size_log2, i32 causal, f32 sm_scale, f32 kv_scale) {
    const i32 thread = thread_idx(), wave = wave_idx(), lane = thread % LANES, row = lane % 16, group = lane / 16;

    const i32* item = work + i64(workgroup_idx()) * WORK_WORDS;
    const i32 request = item[0], row_begin = item[1], kv_begin = item[2], kv_end = item[3], partial_idx = item[4];
    const i32 q_begin = qo_indptr[request], q_len = qo_indptr[request + 1] - q_begin;
    const i32 page_begin = kv_indptr[request], num_pages = kv_indptr[request + 1] - page_begin;
    const i32 kv_len = num_pages == 0 ? 0 : ((num_pages - 1) << page_size_log2) + kv_last_page_len[request];
    const PageTable pages = {kv_indices + page_begin, page_size_log2};

    // Rows past the request's last one compute that row again and are not stored.
    const i32 num_rows = min(ROWS, q_len * num_heads - row_begin), request_row = row_begin + min(row, num_rows - 1);
    const i64 global_row = i64(q_begin) * num_heads + request_row;
    // Query tokens are the last q_len of the request's tokens; a row sees those up to its own.
    const i32 visible_end = causal ? min(kv_end, kv_len - q_len + request_row / num_heads + 1) : kv_end;

    Query<Format> query;
    query.load(q + global_row * QK_COLUMNS, group);
    const f32 logit_scale = query.scale() * kv_scale * sm_scale * LOG2_E;

    OnlineSoftmax softmax;
    Output output;

    if (kv_begin < kv_end) load_tile<Format>(&lds->kv[0], kv, kv_scales, locate_token(pages, kv_begin, kv_end, lane), wave, lane);
    i32 buffer = 0;
    for (i32 tile_begin = kv_begin; tile_begin < kv_end; tile_begin += TOKENS, buffer ^= 1) {
        // Behind this barrier the tile is whole, and nobody reads the other buffer, the values or the weights of the tile before.
        wait_for_memory();
        lds_barrier();
        if (tile_begin + TOKENS < kv_end)
            load_tile<Format>(&lds->kv[buffer ^ 1], kv, kv_scales, locate_token(pages, tile_begin + TOKENS, kv_end, lane), wave, lane);
        expand<Format>(lds, buffer, thread);

        const vec<f32, 4> logit = query.scores(&lds->kv[buffer], wave * TOKENS_PER_WAVE + row, group) * logit_scale;

        const i32 first_token = wave * TOKENS_PER_WAVE + group * 4;
        f32 logit_max = NO_LOGIT;
#pragma unroll
        for (i32 r = 0; r < 4; r++)
            if (tile_begin + first_token + r < visible_end) logit_max = max(logit_max, logit[r]);
        logit_max = max_over_lane_groups(logit_max);
        if (group == 0) lds->rows.logit_max[wave][row] = logit_max;
        lds_barrier();
#pragma unroll
        for (i32 w = 0; w < NUM_WAVES; w++) logit_max = max(logit_max, lds->rows.logit_max[w][row]);

        output.rescale(softmax.rescale_for(logit_max));
        vec<f32, 4> weight;
#pragma unroll
        for (i32 r = 0; r < 4; r++) {
            weight[r] = tile_begin + first_token + r < visible_end ? softmax.weight(logit[r]) : 0.0f;
            softmax.sum += weight[r];
        }
        store_weights(&lds->weights, weight, row, first_token);
        lds_barrier();

        output.template add<LdsPlan<Format>::VALUE_ROW_BYTES>(LdsPlan<Format>::value_rows(lds, buffer), &lds->weights, wave * COLUMNS_PER_WAVE, lane);
    }

    const f32 wave_sum = sum_over_lane_groups(softmax.sum);
    if (group == 0) lds->rows.weight_sum[wave][row] = wave_sum;
    lds_barrier();
    f32 sum = 0.0f;
#pragma unroll
    for (i32 w = 0; w < NUM_WAVES; w++) sum += lds->rows.weight_sum[w][row];
    output.rescale(reciprocal_or_zero(sum) * kv_scale);
    if (row >= num_rows) return;

    const bool whole = partial_idx < 0;
    const i64 partial_row = i64(partial_idx) * ROWS + row;
    if (wave == 0 && group == 0) (whole ? lse[global_row] : partial_lse[partial_row]) = lse_of(softmax.max, sum);
    const i32 first_column = wave * COLUMNS_PER_WAVE + group * 4;
    if (whole)
        output.store(out + global_row * KV_LORA_RANK_COLUMNS + first_column);
    else
        output.store(partial_out + partial_row * KV_LORA_RANK_COLUMNS + first_column);
}

#define MLA_DECODE(name, Format)                                                                                                                   \
    KERNEL(NUM_THREADS) name(const bf16* __restrict__ q,               /* [total_q, num_heads, 576] */                                             \
                             const u8* __restrict__ kv,                /* [num_pages, page_size, Format::ROW_BYTES] */                             \
                             const u8* __restrict__ kv_scales,         /* [num_pages, page_size, 18] E8M0; null unless mxfp4 */                    \
                             const i32* __restrict__ qo_indptr,        /* [batch + 1] */                                                           \
                             const i32* __restrict__ kv_indptr,        /* [batch + 1], in pages */                                                 \
                             const i32* __restrict__ kv_indices,       /* [kv_indptr[batch]] physical pages */                                     \
                             const i32* __restrict__ kv_last_page_len, /* [batch], 1 .. page_size */                                               \
                             const i32* __restrict__ work,             /* [num_work, 5]: request, row_begin, kv_begin, kv_end, partial_idx or -1 */ \
                             bf16* __restrict__ out,                   /* [total_q, num_heads, 512] */                                             \
                             f32* __restrict__ lse,                    /* [total_q, num_heads], natural log */                                     \
                             f32* __restrict__ partial_out,            /* [num_partials, 16, 512]; null if nothing is split */                     \
                             f32* __restrict__ partial_lse,            /* [num_partials, 16]; null if nothing is split */                          \
                             i32 num_heads, i32 page_size_log2, i32 causal, f32 sm_scale, f32 kv_scale) {                                          \
        SHARED LdsPlan<Format> lds;                                                                                                                \
        mla_decode<Format>((LDS LdsPlan<Format>*)&lds, q, kv, kv_scales, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, work, out, lse,        \
                           partial_out, partial_lse, num_heads, page_size_log2, causal, sm_scale, kv_scale);                                       \
    }

MLA_DECODE(mla_decode_bf16, Bf16)
MLA_DECODE(mla_decode_fp8_e4m3fn, Fp8E4m3fn)
MLA_DECODE(mla_decode_mxfp4, Mxfp4)
