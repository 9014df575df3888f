// Merge of split-KV partials in the launch that makes them.
#pragma once
#include "join.h"

// True in all threads of the last of `count` workgroups to call it: what the others stored through to memory before is visible to it. `arrivals` is 0
// before the first call and after the last; `broadcast` is the workgroup's own.
DEVICE bool arrives_last(LDS u32* broadcast, u32* arrivals, i32 count, i32 thread) {
    wait_for_memory();  // of each wave, before the barrier: its stores have reached memory
    lds_barrier();
    if (thread == 0) *broadcast = atomic_add(arrivals, 1);
    lds_barrier();
    if (uniform(i32(*broadcast)) != count - 1) return false;
    acquire_from_device();
    if (thread == 0) atomic_store(arrivals, 0);
    return true;
}

constexpr int MERGED_AT_ONCE = 4;  // partial results that are added up at a time

// The partial results of one row tile: a slot for each split. out [slots, TILE_ROWS, 512] and lse [slots, TILE_ROWS].
struct Partials {
    f32* out;
    f32* lse;
};

// What a lane holds of a tile's result: blocks of four columns, 16 columns apart, of one row, and the row's log-sum-exp.
template <int TILE_ROWS, int COUNT> struct PartialResult {
    vec<f32, 4> block[COUNT];
    f32 lse;

    // To a slot. `row`, `column`: where the lane's first block lies. Of a row's log-sum-exp, one lane stores.
    DEVICE_MEMBER void store(const Partials& partials, i32 slot, i32 row, i32 column, bool stores, bool stores_lse) const {
        constexpr i32 ROW_BYTES = KV_LORA_RANK_COLUMNS * sizeof(f32);
        f32* const target = partials.out + i64(slot) * TILE_ROWS * KV_LORA_RANK_COLUMNS;
        if (stores)
#pragma unroll
            for (i32 n = 0; n < COUNT; n++)
                store_16_through(target, TILE_ROWS * ROW_BYTES, row * ROW_BYTES + (column + n * 16) * i32(sizeof(f32)), __builtin_bit_cast(vec<u32, 4>, block[n]));
        if (stores && stores_lse) store_through(partials.lse + i64(slot) * TILE_ROWS + row, lse);
    }

    // Adds up this result, which is that of slot first + own * stride, and the others of slots first + n * stride, n < count: weight of each =
    // exp(its lse - lse of all). Sums are of two at a time, own with its neighbour first, so that they are the same to the bit whoever makes them.
    DEVICE_MEMBER void add(const Partials& partials, i32 first, i32 stride, i32 own, i32 count, i32 row, i32 column) {
#pragma clang fp contract(off)
        constexpr int OTHERS = MERGED_AT_ONCE - 1, AT_ONCE = min(COUNT, 16);
        static_assert(MERGED_AT_ONCE == 4 && COUNT % AT_ONCE == 0);
        const f32* source[OTHERS];
        f32 other_lse[OTHERS], weight[OTHERS];
        bool present[OTHERS];
#pragma unroll
        for (i32 n = 0; n < OTHERS; n++) {
            const i32 other = own ^ (n + 1);
            present[n] = other < count;
            const i64 slot = first + i64(present[n] ? other : own) * stride;  // own again, where there is none, with a weight of 0
            source[n] = partials.out + (slot * TILE_ROWS + row) * KV_LORA_RANK_COLUMNS + column;
            other_lse[n] = partials.lse[slot * TILE_ROWS + row];
        }
        f32 own_weight, scale;
#pragma unroll
        for (i32 at = 0; at < COUNT; at += AT_ONCE) {
            vec<f32, 4> part[OTHERS][AT_ONCE];
#pragma unroll
            for (i32 n = 0; n < OTHERS; n++)
#pragma unroll
                for (i32 i = 0; i < AT_ONCE; i++) part[n][i] = *(const vec<f32, 4>*)(source[n] + (at + i) * 16);
            wait_for_memory();
            // Never. But a branch keeps the sums of what was loaded behind the one wait for all of it.
            if (own >= count) return;
            if (at == 0) {
                f32 base = max(max(lse, other_lse[0]), max(other_lse[1], other_lse[2]));
                if (base == -INFINITE) base = 0.0f;  // all are empty: weights of 0 are wanted, not exp(-inf - -inf)
                own_weight = exp2((lse - base) * LOG2_E);
#pragma unroll
                for (i32 n = 0; n < OTHERS; n++) weight[n] = present[n] ? exp2((other_lse[n] - base) * LOG2_E) : 0.0f;
                const f32 sum = (own_weight + weight[0]) + (weight[1] + weight[2]);
                scale = reciprocal_or_zero(sum);
                lse = lse_of(base * LOG2_E, sum);
            }
#pragma unroll
            for (i32 i = 0; i < AT_ONCE; i++)
                block[at + i] = ((block[at + i] * own_weight + part[0][i] * weight[0]) + (part[1][i] * weight[1] + part[2][i] * weight[2])) * scale;
        }
    }
};

// To be called by each of a row tile's workgroups with its own result. The last of four neighbours to arrive adds up theirs; the last of four such,
// those; and so on: a tree, so that no compute unit has to read many partial results. True in the last of all, whose result is then that of the row
// tile. `arrivals`: a counter for each node of the tree, level by level.
template <int TILE_ROWS, int COUNT>
DEVICE bool merge_splits(PartialResult<TILE_ROWS, COUNT>& result, const Partials& partials, LDS u32* broadcast, u32* arrivals, i32 split, i32 num_splits,
                         i32 row, i32 last_row, i32 column, bool stores_lse, i32 thread) {
    for (i32 stride = 1; num_splits > 1; stride *= MERGED_AT_ONCE) {
        const i32 node = split / MERGED_AT_ONCE, num_nodes = (num_splits + MERGED_AT_ONCE - 1) / MERGED_AT_ONCE;
        const i32 count = min(MERGED_AT_ONCE, num_splits - node * MERGED_AT_ONCE);
        result.store(partials, split * stride, row, column, row <= last_row, stores_lse);
        if (!arrives_last(broadcast, arrivals + node, count, thread)) return false;
        result.add(partials, node * MERGED_AT_ONCE * stride, stride, split % MERGED_AT_ONCE, count, min(row, last_row), column);
        arrivals += num_nodes, split = node, num_splits = num_nodes;
        lds_barrier();  // all waves have read what one of them overwrites next: the log-sum-exps
    }
    return true;
}
