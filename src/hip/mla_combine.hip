// Merge of split-KV partials: out = sum of weight * partial, weight = exp(lse - lse of the whole). One workgroup a query row.
#include "softmax.h"

constexpr int ROWS = 16;
constexpr int COLUMNS = 512;
constexpr int NUM_THREADS = COLUMNS / 4;

EXPORTED ROWS_PER_TILE = ROWS;
EXPORTED MERGE_WORDS = 4;

KERNEL(NUM_THREADS) mla_combine(const f32* __restrict__ partial_out, /* [num_partials, 16, 512] */
                                const f32* __restrict__ partial_lse, /* [num_partials, 16], natural log */
                                const i32* __restrict__ merge,       /* [num_merges, 4]: row_begin, num_rows, partial_begin, num_splits */
                                bf16* __restrict__ out,              /* [total_q, num_heads, 512] */
                                f32* __restrict__ lse) {             /* [total_q, num_heads], natural log */
    const i32* item = merge + i64(workgroup_idx()) * MERGE_WORDS;
    const i32 row_begin = item[0], num_rows = item[1], partial_begin = item[2], num_splits = item[3];
    const i32 row = workgroup_idx_y(), column = thread_idx() * 4;
    if (row >= num_rows) return;

    // Partials of one row stand 16 rows apart, in the order of the splits, which is the order of addition.
    const i64 first = i64(partial_begin) * ROWS + row;
    f32 max_lse = -INFINITE;
    for (i32 split = 0; split < num_splits; split++) max_lse = max(max_lse, partial_lse[first + split * ROWS]);
    // All splits empty: weights of 0 are wanted, not exp(-inf - -inf).
    const f32 base = max_lse == -INFINITE ? 0.0f : max_lse;

    f32 sum = 0.0f;
    vec<f32, 4> total = {};
    for (i32 split = 0; split < num_splits; split++) {
        const i64 partial_row = first + split * ROWS;
        const f32 weight = exp2((partial_lse[partial_row] - base) * LOG2_E);
        sum += weight;
        total += *(const vec<f32, 4>*)(partial_out + partial_row * COLUMNS + column) * weight;
    }
    const i64 global_row = i64(row_begin) + row;
    *(vec<bf16, 4>*)(out + global_row * COLUMNS + column) = __builtin_convertvector(total * reciprocal_or_zero(sum), vec<bf16, 4>);
    if (column == 0) lse[global_row] = lse_of(base * LOG2_E, sum);
}
