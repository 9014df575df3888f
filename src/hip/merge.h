// Merge of split-KV partials in the launch that makes them.
#pragma once
#include "kv_block.h"
#include "softmax.h"

// True in all threads of the last of `count` workgroups to call it: what the others stored before is visible to it. `arrivals` is 0 before the
// first call and after the last; `broadcast` is the workgroup's own.
DEVICE bool arrives_last(LDS u32* broadcast, u32* arrivals, i32 count, i32 thread) {
    // Every wave's stores are with the workgroup's L2 before the barrier; one wave then writes that back for all.
    wait_for_memory();
    lds_barrier();
    if (thread == 0) {
        release_to_device();
        *broadcast = atomic_add(arrivals, 1);
    }
    lds_barrier();
    if (uniform(i32(*broadcast)) != count - 1) return false;
    acquire_from_device();
    if (thread == 0) atomic_store(arrivals, 0);
    return true;
}

constexpr int MERGED_AT_ONCE = 4;  // partial results that are added up at a time

// Adds up `count` partial results, the n-th in slot n * `stride`, into `out` and `lse`: weight of each = exp(its lse - lse of all).
// partial_out [slots, TILE_ROWS, 512], partial_lse [slots, TILE_ROWS]; out [num_rows, 512], T = f32 or bf16; lse [num_rows], or all rows of the four that a
// wave takes at a time where they are partial again. `out` and `lse` may be slot 0. A lane has 8 columns of each row.
template <int TILE_ROWS, class T>
DEVICE void merge_slots(const f32* partial_out, const f32* partial_lse, i32 stride, i32 count, i32 num_rows, T* out, f32* lse, i32 wave, i32 lane) {
    constexpr int AT_ONCE = 4, COLUMNS = KV_LORA_RANK_COLUMNS / LANES;
    using Rows = vec<f32, AT_ONCE>;
    using Columns = vec<f32, COLUMNS>;
    for (i32 first_row = wave * AT_ONCE; first_row < num_rows; first_row += NUM_WAVES * AT_ONCE) {
        // All loads are under way together. Slots past the last are it again, with a weight of 0; rows past the last are it again, and not stored.
        Rows lses[MERGED_AT_ONCE];
        Columns partial[MERGED_AT_ONCE][AT_ONCE];
#pragma unroll
        for (i32 n = 0; n < MERGED_AT_ONCE; n++) {
            const i64 slot_row = i64(min(n, count - 1)) * stride * TILE_ROWS;
            lses[n] = *(const Rows*)(partial_lse + slot_row + first_row);
#pragma unroll
            for (i32 r = 0; r < AT_ONCE; r++)
                partial[n][r] = *(const Columns*)(partial_out + (slot_row + min(first_row + r, num_rows - 1)) * KV_LORA_RANK_COLUMNS + lane * COLUMNS);
        }
        wait_for_memory();
#pragma unroll
        for (i32 r = 0; r < AT_ONCE; r++) {
            f32 base = lses[0][r], sum = 0.0f;
#pragma unroll
            for (i32 n = 1; n < MERGED_AT_ONCE; n++) base = max(base, lses[n][r]);
            if (base == -INFINITE) base = 0.0f;  // all are empty: weights of 0 are wanted, not exp(-inf - -inf)
            Columns total = {};
#pragma unroll
            for (i32 n = 0; n < MERGED_AT_ONCE; n++) {
                const f32 weight = n < count ? exp2((lses[n][r] - base) * LOG2_E) : 0.0f;
                sum += weight;
                total += partial[n][r] * weight;
            }
            const bool stored = first_row + r < num_rows;
            if (stored) *(vec<T, COLUMNS>*)(out + i64(first_row + r) * KV_LORA_RANK_COLUMNS + lane * COLUMNS) =
                    __builtin_convertvector(total * reciprocal_or_zero(sum), vec<T, COLUMNS>);
            if (lane == 0 && (stored || sizeof(T) == sizeof(f32))) lse[first_row + r] = lse_of(base * LOG2_E, sum);
        }
    }
}

// To be called by each of a row tile's workgroups when its partial result stands in its slot, `split`. The last of four neighbours to arrive adds them
// up, in the order of their splits, into the slot of the first; the last of four such, those; and so on: a tree, so that no compute unit has to read
// many partial results. The last of all writes the result. `arrivals`: a counter for each node of the tree, level by level.
template <int TILE_ROWS>
DEVICE void arrive_and_merge(LDS u32* broadcast, u32* arrivals, f32* partial_out, f32* partial_lse, i32 split, i32 num_splits, i32 num_rows, bf16* out,
                             f32* lse, i32 wave, i32 lane) {
    for (i32 stride = 1;; stride *= MERGED_AT_ONCE) {
        const i32 node = split / MERGED_AT_ONCE, num_nodes = (num_splits + MERGED_AT_ONCE - 1) / MERGED_AT_ONCE;
        const i32 count = min(MERGED_AT_ONCE, num_splits - node * MERGED_AT_ONCE);
        if (!arrives_last(broadcast, arrivals + node, count, wave * LANES + lane)) return;
        const i64 first_row = i64(node) * MERGED_AT_ONCE * stride * TILE_ROWS;
        f32* const node_out = partial_out + first_row * KV_LORA_RANK_COLUMNS;
        f32* const node_lse = partial_lse + first_row;
        if (num_nodes == 1) return merge_slots<TILE_ROWS>(node_out, node_lse, stride, count, num_rows, out, lse, wave, lane);
        merge_slots<TILE_ROWS>(node_out, node_lse, stride, count, num_rows, node_out, node_lse, wave, lane);
        arrivals += num_nodes, split = node, num_splits = num_nodes;
    }
}
