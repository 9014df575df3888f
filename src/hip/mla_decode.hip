// Absorbed MLA decode over a paged KV cache: a tile of one request's query rows against a range of its tokens.
//
// A workgroup takes one item of the work list. Each of its four waves scores 16 rows against tokens, keeps their softmax state and all 512 columns of
// their output; nothing crosses the waves on the way. Kernels come in two shapes:
//   narrow   16 rows, the same for all waves; each wave has a quarter of the tokens to itself, and at the end the four results are joined
//   wide     64 rows, 16 a wave; all waves go through all tokens
// Tokens come in blocks of 18 KB. Each wave brings one at a time from the cache to LDS by DMA, a block ahead: 72 KB or more are in flight in a
// workgroup while it works on the 72 KB before. In wide kernels the waves' four blocks are one tile, which all read, and a barrier separates tiles.
// A request that is split leaves partial results, which its workgroups merge as they arrive (merge.h).
#include "merge.h"
#include "output.h"
#include "scores.h"

EXPORTED NARROW_ROWS = ROWS;
EXPORTED WIDE_ROWS = ROWS * NUM_WAVES;
// Tokens that the waves of a workgroup take at a time.
EXPORTED TOKENS_PER_TILE_BF16 = NUM_WAVES * Bf16::TOKENS;
EXPORTED TOKENS_PER_TILE_FP8_E4M3FN = NUM_WAVES * Fp8E4m3fn::TOKENS;
EXPORTED TOKENS_PER_TILE_MXFP4 = NUM_WAVES * Mxfp4::TOKENS;
EXPORTED WORK_WORDS = 8;
EXPORTED MERGE_WIDTH = MERGED_AT_ONCE;
EXPORTED KV_LORA_RANK = KV_LORA_RANK_COLUMNS;
EXPORTED QK_WIDTH = QK_COLUMNS;

// ---- LDS plan. What is needed before and after the tokens lies where their blocks do.
template <class Format> struct LdsPlan {
    alignas(16) u8 kv[2][NUM_WAVES][BLOCK_BYTES];
    alignas(16) typename BlockScales<Format>::Shared scales[NUM_WAVES];  // and in the end the count of arrivals
};
static_assert(sizeof(QueryTile) <= NUM_WAVES * BLOCK_BYTES && sizeof(StreamEnds) <= 2 * NUM_WAVES * BLOCK_BYTES);
constexpr int LDS_LIMIT = 160 * 1024;
static_assert(sizeof(LdsPlan<Bf16>) <= LDS_LIMIT && sizeof(LdsPlan<Fp8E4m3fn>) <= LDS_LIMIT && sizeof(LdsPlan<Mxfp4>) <= LDS_LIMIT);

// ---- the kernel
// The part of a batch that a workgroup takes: a tile of one request's query rows (row = query token * num_heads + head) and a range of its tokens.
struct Part {
    TokenTable tokens;
    i32 kv_begin, kv_end;  // kv_begin < kv_end, unless there is no token
    i64 first_row;         // of the tile, among the rows of the batch
    i32 row_begin, num_rows, num_heads;
    i32 last_visible;  // token that the request's first query token sees last; one more for each query token after it

    // A row sees the tokens below this.
    DEVICE_MEMBER i32 visible_end(i32 row) const { return min(kv_end, last_visible + (row_begin + row) / num_heads + 1); }
};

// Goes through the part's tokens. `block`: the columns of this wave's rows that it is to store, from the sum of `softmax` not yet divided.
template <class Format, bool WIDE, int COLUMN_BLOCKS>
DEVICE void attend(LDS LdsPlan<Format>* lds, const Part& part, const bf16* q, const u8* kv, const u8* kv_scales, f32 sm_scale, OnlineSoftmax& softmax,
                   vec<f32, 4> (&block)[COLUMN_BLOCKS]) {
    // A logit is rounded once, for the maximum and for its weight alike: a fused multiply-add would put large logits beyond their own maximum.
#pragma clang fp contract(off)
    // From one block of a wave to its next; what a wave goes through between them, of which it takes STEP_TOKENS at a time.
    constexpr int TILE_TOKENS = WIDE ? NUM_WAVES * Format::TOKENS : Format::TOKENS;
    constexpr int STEP_TOKENS = min(TILE_TOKENS, Format::MAX_STEP_TOKENS);
    constexpr int SCORE_BLOCKS = STEP_TOKENS / 16;  // 16 x 16 results
    const i32 wave = wave_idx(), lane = thread_idx() % LANES, group = lane / 16;
    const TokenTable& tokens = part.tokens;

    // Rows past the last one compute that row again and are not stored.
    const i32 wave_row = WIDE ? wave * ROWS : 0, row = min(wave_row + lane % 16, part.num_rows - 1);
    const i32 visible_end = part.visible_end(row), visible_to_all = uniform(visible_end);  // the first row sees least

    // The wave's tokens; of a tile, it loads the block from `own` on. A wave that is left without tokens goes through one tile of hidden ones.
    const i32 num_blocks = (part.kv_end - part.kv_begin + Format::TOKENS - 1) / Format::TOKENS;
    const i32 wave_tokens = (num_blocks + NUM_WAVES - 1) / NUM_WAVES * Format::TOKENS;
    const i32 begin = WIDE ? part.kv_begin : min(part.kv_begin + wave * wave_tokens, part.kv_end);
    const i32 end = WIDE ? part.kv_end : min(begin + wave_tokens, part.kv_end), own = WIDE ? wave * Format::TOKENS : 0;

    Query<Format, WIDE ? 1 : NUM_WAVES> query;
    BlockScales<Format> scales;
    PageWindow window;
    window.load(tokens, begin + own, lane);
    query.fetch(q + (part.first_row + row) * QK_COLUMNS, wave, lane);
    wait_for_memory();
    // Starts the loads of the block at `token`, and before them that of the pages of the one after it.
    const auto start_block = [&](i32 buffer, i32 token) {
        const i32 own_token = token + lane % Format::TOKENS, page = window.page_of(tokens, own_token);
        window.move_to(tokens, token + TILE_TOKENS, Format::TOKENS, lane);
        scales.fetch(kv_scales, tokens, page, own_token);
        load_rows<Format>(lds->kv[buffer][wave], kv, tokens, page, token, lane);
    };
    start_block(0, begin + own);
    query.share((LDS QueryTile*)&lds->kv[1], wave, lane);
    if constexpr (!WIDE) lds_barrier();  // the next block may go there
    const f32 logit_scale = query.scale() * sm_scale * LOG2_E;

    using Out = Output<Format, STEP_TOKENS>;
    Out output;
    i32 buffer = 0, tile_begin = begin;
    do {
        wait_for_memory();
        if constexpr (WIDE) lds_barrier();  // the rows of the tile are whole, and nobody reads the other buffer any more, nor scales
        scales.spread(&lds->scales[wave], lane);
        if (tile_begin + TILE_TOKENS < end) start_block(buffer ^ 1, tile_begin + TILE_TOKENS + own);
        if constexpr (WIDE && BlockScales<Format>::NUM_LOADS > 0) lds_barrier();

        for (i32 step = 0; step < TILE_TOKENS / STEP_TOKENS; step++) {
            if (wave_row >= part.num_rows) break;
            const LDS u8* const rows = lds->kv[buffer][0] + (WIDE ? 0 : wave * BLOCK_BYTES) + step * (STEP_TOKENS * Format::ROW_BYTES);
            const auto* const step_scales = &lds->scales[WIDE ? step : wave];
            const i32 step_begin = tile_begin + step * STEP_TOKENS;

            vec<f32, 4> logit[SCORE_BLOCKS];
            auto keys = query.load(rows, step_scales, 0, lane);
#pragma unroll
            for (i32 b = 0; b < SCORE_BLOCKS; b++) {
                wait_for_lds<0>();
                const auto present = keys;
                if (b + 1 < SCORE_BLOCKS) keys = query.load(rows, step_scales, b + 1, lane);
                logit[b] = query.scores(present) * logit_scale;
            }
            if (step_begin + STEP_TOKENS > visible_to_all)
#pragma unroll
                for (i32 n = 0; n < SCORE_BLOCKS * 4; n++)
                    if (step_begin + group * 4 + n / 4 * 16 + n % 4 >= visible_end) logit[n / 4][n % 4] = -INFINITE;

            f32 logit_max = -INFINITE;
#pragma unroll
            for (i32 n = 0; n < SCORE_BLOCKS * 4; n++) logit_max = max(logit_max, logit[n / 4][n % 4]);
            const f32 step_base = softmax.base_for(max_over_lane_groups(logit_max));
            const f32 factor = softmax.rescale_for(step_base, Out::SLACK);
            if (any_lane(factor != 1.0f)) output.rescale(factor);  // seldom, after the first tiles
            const f32 weight_base = Out::RELATIVE_TO_STEP ? step_base : softmax.base, shift = weight_base - softmax.base;
            f32 sum = 0.0f;
#pragma unroll
            for (i32 n = 0; n < SCORE_BLOCKS * 4; n++) {
                logit[n / 4][n % 4] = exp2(logit[n / 4][n % 4] - weight_base);
                sum += logit[n / 4][n % 4];
            }
            softmax.sum += Out::RELATIVE_TO_STEP ? sum * exp2(shift) : sum;
            output.add(rows, step_scales, typename Out::Weights(logit), shift, lane);
        }
        tile_begin += TILE_TOKENS, buffer ^= 1;
    } while (tile_begin < end);

    softmax.sum = sum_over_lane_groups(softmax.sum);
    if constexpr (WIDE) {
#pragma unroll
        for (i32 n = 0; n < COLUMN_BLOCKS; n++) block[n] = output.block[n];
    } else {
        join_streams((LDS StreamEnds*)&lds->kv, output, softmax, block, wave, lane);
    }
}

template <class Format, bool WIDE>
DEVICE void mla_decode(LDS LdsPlan<Format>* lds, const bf16* q, const u8* kv, const u8* kv_scales, const i32* qo_indptr, const i32* kv_indptr,
                       const i32* kv_indices, const i32* kv_last_page_len, const i32* work, bf16* out, f32* lse, f32* partial_out, f32* partial_lse,
                       u32* arrivals, i32 num_heads, i32 page_size_log2, i32 causal, f32 sm_scale, f32 kv_scale) {
    constexpr int TILE_ROWS = WIDE ? NUM_WAVES * ROWS : ROWS;
    constexpr int COLUMN_BLOCKS = WIDE ? NUM_COLUMN_BLOCKS : NUM_COLUMN_BLOCKS / NUM_WAVES;  // that a wave stores, of its rows
    const i32 thread = thread_idx(), wave = wave_idx(), lane = thread % LANES;

    // All that is looked up is looked up at once, needed or not: a branch in between would cost one more round trip to memory.
    const auto item = ((const vec<i32, WORK_WORDS>*)work)[workgroup_idx()];
    const i32 request = item[0], row_begin = item[1], merge_idx = item[4], first_partial = item[5], split = item[6], num_splits = item[7];
    const i32 q_begin = qo_indptr[request], q_end = qo_indptr[request + 1], page_begin = kv_indptr[request], page_end = kv_indptr[request + 1];
    const i32 last_page_len = kv_last_page_len[request], num_pages = page_end - page_begin, q_len = q_end - q_begin;
    const i32 kv_len = max(0, ((num_pages - 1) << page_size_log2) + last_page_len);  // no pages: 0, whatever the length of the last
    const i32 kv_end = min(item[3], kv_len);  // the work list may be made for longer requests than there are when it is run
    const Part part = {
        .tokens = {kv_indices + page_begin, page_size_log2, kv_end},
        .kv_begin = item[2],
        .kv_end = kv_end,
        .first_row = i64(q_begin) * num_heads + row_begin,
        .row_begin = row_begin,
        .num_rows = min(TILE_ROWS, q_len * num_heads - row_begin),
        .num_heads = num_heads,
        // Query tokens are the last q_len of the request's tokens; a row sees those up to its own.
        .last_visible = causal ? kv_len - q_len : kv_len,
    };

    const f32 scale_of_kv = Format::ONE_SCALE ? kv_scale : 1.0f;
    all_loaded_by_now(kv_indices, q, kv, arrivals, out, lse, partial_out, partial_lse);
    if constexpr (BlockScales<Format>::NUM_LOADS > 0) loaded_by_now(kv_scales);

    OnlineSoftmax softmax;
    vec<f32, 4> block[COLUMN_BLOCKS] = {};
    if (part.kv_begin < part.kv_end) attend<Format, WIDE>(lds, part, q, kv, kv_scales, scale_of_kv * sm_scale, softmax, block);

    const f32 scale = reciprocal_or_zero(softmax.sum) * scale_of_kv;
    PartialResult<TILE_ROWS, COLUMN_BLOCKS> result;
#pragma unroll
    for (i32 n = 0; n < COLUMN_BLOCKS; n++) result.block[n] = block[n] * scale;
    result.lse = lse_of(softmax.base, softmax.sum);

    const i32 row = (WIDE ? wave * ROWS : 0) + lane % 16, column = (WIDE ? 0 : wave * COLUMN_BLOCKS * 16) + lane / 16 * 4;
    const bool stores_lse = lane < ROWS && (WIDE || wave == 0);
    if (merge_idx >= 0) {
        const i64 first_row = i64(first_partial) * TILE_ROWS;
        const Partials partials = {partial_out + first_row * KV_LORA_RANK_COLUMNS, partial_lse + first_row};
        if (!merge_splits(result, partials, (LDS u32*)&lds->scales, arrivals + merge_idx, split, num_splits, row, part.num_rows - 1, column, stores_lse, thread))
            return;
    }
    if (row >= part.num_rows) return;
    store_blocks(out + (part.first_row + row) * KV_LORA_RANK_COLUMNS + column, result.block);
    if (stores_lse) lse[part.first_row + row] = result.lse;
}

// Arguments stand such that few loads bring them.
#define MLA_DECODE(name, Format, WIDE, TILE_ROWS)                                                                                                      \
    KERNEL(NUM_THREADS) name(const i32* __restrict__ work,             /* [num_work, 8]: see work_list.py */                                           \
                             const i32* __restrict__ qo_indptr,        /* [batch + 1] */                                                               \
                             const i32* __restrict__ kv_indptr,        /* [batch + 1], in pages */                                                     \
                             const i32* __restrict__ kv_last_page_len, /* [batch], 1 .. page_size */                                                   \
                             const i32* __restrict__ kv_indices,       /* [kv_indptr[batch]] physical pages */                                         \
                             const bf16* __restrict__ q,               /* [total_q, num_heads, 576] */                                                 \
                             const u8* __restrict__ kv,                /* [num_pages, page_size, Format::ROW_BYTES] */                                 \
                             u32* arrivals,                            /* [num_counters], 0 before and after; null if nothing is split */              \
                             bf16* __restrict__ out,                   /* [total_q, num_heads, 512] */                                                 \
                             f32* __restrict__ lse,                    /* [total_q, num_heads], natural log */                                         \
                             f32* partial_out,                         /* [num_partials, TILE_ROWS, 512]; null if nothing is split */                  \
                             f32* partial_lse,                         /* [num_partials, TILE_ROWS]; null if nothing is split */                       \
                             i32 num_heads, i32 page_size_log2, i32 causal, f32 sm_scale, f32 kv_scale,                                                \
                             const u8* __restrict__ kv_scales) {       /* [num_pages, page_size, 18] E8M0; null unless mxfp4 */                        \
        SHARED LdsPlan<Format> lds;                                                                                                                    \
        mla_decode<Format, WIDE>((LDS LdsPlan<Format>*)&lds, q, kv, kv_scales, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, work, out, lse,     \
                                 partial_out, partial_lse, arrivals, num_heads, page_size_log2, causal, sm_scale, kv_scale);                           \
    }

MLA_DECODE(mla_decode_bf16_narrow, Bf16, false, 16)
MLA_DECODE(mla_decode_bf16_wide, Bf16, true, 64)
MLA_DECODE(mla_decode_fp8_e4m3fn_narrow, Fp8E4m3fn, false, 16)
MLA_DECODE(mla_decode_fp8_e4m3fn_wide, Fp8E4m3fn, true, 64)
MLA_DECODE(mla_decode_mxfp4_narrow, Mxfp4, false, 16)
MLA_DECODE(mla_decode_mxfp4_wide, Mxfp4, true, 64)
