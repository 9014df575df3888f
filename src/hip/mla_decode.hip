// Absorbed MLA decode over a paged KV cache: 16 query rows of one request against a range of its tokens.
//
// A workgroup takes one item of the work list. Its four waves share a tile of tokens (128, or 64 of bf16):
//   load     the tile's rows go from the cache to LDS by DMA, one tile ahead. (Clang 22.1 waits for them before the transposed reads of PV: until
//            then they have QK and softmax to arrive.)
//   QK       each wave scores a quarter of the tokens against all 16 rows
//   softmax  row maxima cross the waves through LDS; weights go to LDS
//   PV       each wave adds up 128 of the 512 value columns over all tokens
// A request that is split leaves partial results, which the last of its workgroups to arrive merges.
#include "merge.h"
#include "output.h"
#include "scores.h"

EXPORTED ROWS_PER_TILE = ROWS;
EXPORTED TOKENS_PER_TILE = 128;  // a whole number of tiles in every format
EXPORTED WORK_WORDS = 8;
EXPORTED KV_LORA_RANK = KV_LORA_RANK_COLUMNS;
EXPORTED QK_WIDTH = QK_COLUMNS;

// ---- LDS plan
struct CrossWave {
    f32 logit_max[NUM_WAVES][ROWS], weight_sum[NUM_WAVES][ROWS];
    u32 arrival;
};
template <class Format> struct LdsPlan {
    KvTile<Format> kv[2];
    typename Output<Format>::Weights weights;
    CrossWave rows;
};
static_assert(sizeof(QueryTile) <= sizeof(KvTile<Fp8E4m3fn>) && sizeof(QueryTile) <= sizeof(KvTile<Mxfp4>));
constexpr int LDS_LIMIT = 160 * 1024;
static_assert(sizeof(LdsPlan<Bf16>) <= LDS_LIMIT && sizeof(LdsPlan<Fp8E4m3fn>) <= LDS_LIMIT && sizeof(LdsPlan<Mxfp4>) <= LDS_LIMIT);

// ---- the kernel
template <class Format>
DEVICE void mla_decode(LDS LdsPlan<Format>* lds, const bf16* q, const u8* kv, const u8* kv_scales, const i32* qo_indptr, const i32* kv_indptr,
                       const i32* kv_indices, const i32* kv_last_page_len, const i32* work, bf16* out, f32* lse, f32* partial_out, f32* partial_lse,
                       u32* arrivals, i32 num_heads, i32 page_size_log2, i32 causal, f32 sm_scale, f32 kv_scale) {
    // A logit is rounded once, for the maximum and for its weight alike: a fused multiply-add would put large logits beyond their own maximum.
#pragma clang fp contract(off)
    constexpr int TOKENS = Format::TOKENS, TOKENS_PER_WAVE = TOKENS / NUM_WAVES;
    constexpr int SCORE_BLOCKS = TOKENS_PER_WAVE / 16;  // 16 x 16 results a wave and tile
    const i32 thread = thread_idx(), wave = wave_idx(), lane = thread % LANES, row = lane % 16, group = lane / 16;

    const i32* item = work + i64(workgroup_idx()) * WORK_WORDS;
    const i32 request = item[0], row_begin = item[1], merge_idx = item[4], first_partial = item[5], split = item[6], num_splits = item[7];
    const i32 q_begin = qo_indptr[request], q_len = qo_indptr[request + 1] - q_begin;
    const i32 page_begin = kv_indptr[request], num_pages = kv_indptr[request + 1] - page_begin;
    const i32 kv_len = num_pages == 0 ? 0 : ((num_pages - 1) << page_size_log2) + kv_last_page_len[request];
    // The work list may be made for longer requests than there are when it is run.
    const i32 kv_end = min(item[3], kv_len), kv_begin = min(item[2], kv_end);
    const TokenTable tokens = {kv_indices + page_begin, page_size_log2, kv_end};

    // Rows past the request's last one compute that row again and are not stored.
    const i32 num_rows = min(ROWS, q_len * num_heads - row_begin), request_row = row_begin + min(row, num_rows - 1);
    const i64 global_row = i64(q_begin) * num_heads + request_row;
    // Query tokens are the last q_len of the request's tokens; a row sees those up to its own.
    const i32 visible_end = causal ? min(kv_end, kv_len - q_len + request_row / num_heads + 1) : kv_end;
    const i32 visible_to_all = uniform(visible_end);  // the first row sees least

    Query<Format> query = {};
    if (kv_begin < kv_end) {
        query.fetch(q + global_row * QK_COLUMNS, wave, lane);  // before the tile: loads return in order
        load_tile(&lds->kv[0], kv, kv_scales, tokens, kv_begin, wave, lane);
        query.share((LDS QueryTile*)&lds->kv[1], wave, lane);  // free until the next tile comes
    }
    const f32 logit_scale = query.scale() * kv_scale * sm_scale * LOG2_E;

    using Out = Output<Format>;
    OnlineSoftmax softmax;
    Out output;

    i32 buffer = 0;
    for (i32 tile_begin = kv_begin; tile_begin < kv_end; tile_begin += TOKENS, buffer ^= 1) {
        // Behind this barrier the tile is whole, and nobody reads the other buffer or the weights of the tile before.
        wait_for_memory();
        lds_barrier();
        if (tile_begin + TOKENS < kv_end) load_tile(&lds->kv[buffer ^ 1], kv, kv_scales, tokens, tile_begin + TOKENS, wave, lane);
        Out::prepare(&lds->weights, &lds->kv[buffer], thread);

        const i32 first_token = wave * TOKENS_PER_WAVE + group * 4;
        vec<f32, 4> logit[SCORE_BLOCKS];
#pragma unroll
        for (i32 b = 0; b < SCORE_BLOCKS; b++)
            logit[b] = query.scores(&lds->kv[buffer], wave * TOKENS_PER_WAVE + b * 16 + row, group) * logit_scale;
        if (tile_begin + TOKENS > visible_to_all)
#pragma unroll
            for (i32 n = 0; n < SCORE_BLOCKS * 4; n++)
                if (tile_begin + first_token + n / 4 * 16 + n % 4 >= visible_end) logit[n / 4][n % 4] = -INFINITE;

        f32 logit_max = -INFINITE;
#pragma unroll
        for (i32 n = 0; n < SCORE_BLOCKS * 4; n++) logit_max = max(logit_max, logit[n / 4][n % 4]);
        logit_max = max_over_lane_groups(logit_max);
        if (group == 0) lds->rows.logit_max[wave][row] = logit_max;
        lds_barrier();
#pragma unroll
        for (i32 w = 0; w < NUM_WAVES; w++) logit_max = max(logit_max, lds->rows.logit_max[w][row]);

        const f32 tile_base = softmax.base_for(logit_max);
        const f32 factor = softmax.rescale_for(tile_base);
        if (any_lane(factor != 1.0f)) output.rescale(factor);  // seldom, after the first tiles
        const f32 weight_base = Out::WEIGHTS_RELATIVE_TO_TILE ? tile_base : softmax.base, shift = weight_base - softmax.base;
        f32 sum = 0.0f;
#pragma unroll
        for (i32 b = 0; b < SCORE_BLOCKS; b++) {
            vec<f32, 4> weight;
#pragma unroll
            for (i32 r = 0; r < 4; r++) {
                weight[r] = exp2(logit[b][r] - weight_base);
                sum += weight[r];
            }
            Out::store_weights(&lds->weights, weight, row, first_token + b * 16);
        }
        softmax.sum += Out::WEIGHTS_RELATIVE_TO_TILE ? sum * exp2(shift) : sum;
        lds_barrier();

        output.add(&lds->kv[buffer], &lds->weights, shift, wave * COLUMNS_PER_WAVE, lane);
    }

    const f32 wave_sum = sum_over_lane_groups(softmax.sum);
    if (group == 0) lds->rows.weight_sum[wave][row] = wave_sum;
    lds_barrier();
    f32 sum = 0.0f;
#pragma unroll
    for (i32 w = 0; w < NUM_WAVES; w++) sum += lds->rows.weight_sum[w][row];
    output.rescale(reciprocal_or_zero(sum) * kv_scale);

    const i64 first_row = i64(q_begin) * num_heads + row_begin;
    const i32 first_column = wave * COLUMNS_PER_WAVE + group * 4;
    bf16* const tile_out = out + first_row * KV_LORA_RANK_COLUMNS;
    if (merge_idx < 0) {
        if (row < num_rows) output.store(tile_out + row * KV_LORA_RANK_COLUMNS + first_column);
        if (wave == 0 && lane < num_rows) lse[first_row + lane] = lse_of(softmax.base, sum);
        return;
    }
    const i64 partial = i64(first_partial) + split;
    if (row < num_rows) output.store(partial_out + (partial * ROWS + row) * KV_LORA_RANK_COLUMNS + first_column);
    if (wave == 0 && lane < num_rows) partial_lse[partial * ROWS + lane] = lse_of(softmax.base, sum);
    if (arrives_last(&lds->rows.arrival, arrivals + merge_idx, num_splits, thread))
        merge_partials(partial_out + i64(first_partial) * ROWS * KV_LORA_RANK_COLUMNS, partial_lse + i64(first_partial) * ROWS, num_splits, num_rows,
                       tile_out, lse + first_row, wave, lane);
}

#define MLA_DECODE(name, Format)                                                                                                                   \
    KERNEL(NUM_THREADS) name(const bf16* __restrict__ q,               /* [total_q, num_heads, 576] */                                             \
                             const u8* __restrict__ kv,                /* [num_pages, page_size, Format::ROW_BYTES] */                             \
                             const u8* __restrict__ kv_scales,         /* [num_pages, page_size, 18] E8M0; null unless mxfp4 */                    \
                             const i32* __restrict__ qo_indptr,        /* [batch + 1] */                                                           \
                             const i32* __restrict__ kv_indptr,        /* [batch + 1], in pages */                                                 \
                             const i32* __restrict__ kv_indices,       /* [kv_indptr[batch]] physical pages */                                     \
                             const i32* __restrict__ kv_last_page_len, /* [batch], 1 .. page_size */                                               \
                             const i32* __restrict__ work,             /* [num_work, 8]: see work_list.py */                                       \
                             bf16* __restrict__ out,                   /* [total_q, num_heads, 512] */                                             \
                             f32* __restrict__ lse,                    /* [total_q, num_heads], natural log */                                     \
                             f32* partial_out,                         /* [num_partials, 16, 512]; null if nothing is split */                     \
                             f32* partial_lse,                         /* [num_partials, 16]; null if nothing is split */                          \
                             u32* arrivals,                            /* [num_merges], 0 before and after; null if nothing is split */            \
                             i32 num_heads, i32 page_size_log2, i32 causal, f32 sm_scale, f32 kv_scale) {                                          \
        SHARED LdsPlan<Format> lds;                                                                                                                \
        mla_decode<Format>((LDS LdsPlan<Format>*)&lds, q, kv, kv_scales, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, work, out, lse,        \
                           partial_out, partial_lse, arrivals, num_heads, page_size_log2, causal, sm_scale, kv_scale);                             \
    }

MLA_DECODE(mla_decode_bf16, Bf16)
MLA_DECODE(mla_decode_fp8_e4m3fn, Fp8E4m3fn)
MLA_DECODE(mla_decode_mxfp4, Mxfp4)
