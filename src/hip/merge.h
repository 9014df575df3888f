// Merge of split-KV partials in the launch that makes them: the last of a row tile's workgroups to arrive adds them up, in the order of the splits.
#pragma once
#include "kv_tile.h"
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

// out = sum of weight * partial, weight = exp(lse - lse of the whole). Each wave takes every fourth row, a lane 8 columns.
// partial_out [num_splits, ROWS, 512], partial_lse [num_splits, ROWS]; out [num_rows, 512], lse [num_rows].
DEVICE void merge_partials(const f32* partial_out, const f32* partial_lse, i32 num_splits, i32 num_rows, bf16* out, f32* lse, i32 wave, i32 lane) {
    constexpr int COLUMNS = KV_LORA_RANK_COLUMNS / LANES;
    for (i32 row = wave; row < num_rows; row += NUM_WAVES) {
        // A lane a split, 64 at a time.
        const auto lse_of_split = [&](i32 split) { return split < num_splits ? partial_lse[i64(split) * ROWS + row] : -INFINITE; };
        f32 max_lse = -INFINITE;
        for (i32 first = 0; first < num_splits; first += LANES) max_lse = max(max_lse, lse_of_split(first + lane));
        max_lse = max_over_wave(max_lse);
        // All splits empty: weights of 0 are wanted, not exp(-inf - -inf).
        const f32 base = max_lse == -INFINITE ? 0.0f : max_lse;

        f32 sum = 0.0f;
        vec<f32, 4> total[COLUMNS / 4] = {};
        for (i32 first = 0; first < num_splits; first += LANES) {
            const f32 weights = exp2((lse_of_split(first + lane) - base) * LOG2_E);
            for (i32 split = first; split < min(first + LANES, num_splits); split++) {
                const f32 weight = value_of_lane(weights, split - first);
                sum += weight;
                const auto* partial = (const vec<f32, 4>*)(partial_out + (i64(split) * ROWS + row) * KV_LORA_RANK_COLUMNS + lane * COLUMNS);
#pragma unroll
                for (i32 n = 0; n < COLUMNS / 4; n++) total[n] += partial[n] * weight;
            }
        }
        auto* target = (vec<bf16, 4>*)(out + i64(row) * KV_LORA_RANK_COLUMNS + lane * COLUMNS);
#pragma unroll
        for (i32 n = 0; n < COLUMNS / 4; n++) target[n] = __builtin_convertvector(total[n] * reciprocal_or_zero(sum), vec<bf16, 4>);
        if (lane == 0) lse[row] = lse_of(base * LOG2_E, sum);
    }
}
