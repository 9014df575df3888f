// The end of a narrow kernel: its waves, each of which has gone through a quarter of the tokens, put their results together.
#pragma once
#include "output.h"

// Where they pass them round.
struct StreamEnds {
    alignas(16) vec<f32, 4> block[NUM_WAVES][NUM_COLUMN_BLOCKS][LANES];
    f32 base[NUM_WAVES][ROWS], sum[NUM_WAVES][ROWS];
};

// `softmax` (its sum being that of the row) becomes that of all waves' tokens, `block` the blocks of columns that are this wave's: a quarter, of all
// tokens. Waves add up in the same order, so that a row has the same sum in all of them.
template <int COUNT>
INLINED_WITH_SCOPES void join_streams(LDS StreamEnds* __restrict__ ends, const OutputBlocks& output, OnlineSoftmax& softmax, vec<f32, 4> (&block)[COUNT],
                                      i32 wave, i32 lane) {
    static_assert(COUNT * NUM_WAVES == NUM_COLUMN_BLOCKS);
    const i32 row = lane % ROWS;
    lds_barrier();  // nobody reads tokens any more
    if (lane < ROWS) ends->base[wave][row] = softmax.base, ends->sum[wave][row] = softmax.sum;
#pragma unroll
    for (i32 n = 0; n < NUM_COLUMN_BLOCKS; n++) ends->block[wave][n][lane] = output.block[n];
    lds_barrier();
    f32 base[NUM_WAVES], sum[NUM_WAVES];
    vec<f32, 4> part[NUM_WAVES][COUNT];
#pragma unroll
    for (i32 w = 0; w < NUM_WAVES; w++) {
        base[w] = ends->base[w][row], sum[w] = ends->sum[w][row];
#pragma unroll
        for (i32 n = 0; n < COUNT; n++) part[w][n] = ends->block[w][wave * COUNT + n][lane];
    }
    wait_for_lds<0>();
#pragma unroll
    for (i32 w = 0; w < NUM_WAVES; w++) softmax.base = max(softmax.base, base[w]);
    softmax.sum = 0.0f;
#pragma unroll
    for (i32 w = 0; w < NUM_WAVES; w++) {
        const f32 factor = exp2(base[w] - softmax.base);
        softmax.sum += sum[w] * factor;
#pragma unroll
        for (i32 n = 0; n < COUNT; n++) block[n] = w == 0 ? part[w][n] * factor : block[n] + part[w][n] * factor;
    }
}

// Columns 16 n .. + 3 of `target` = block[n].
template <int COUNT> DEVICE void store_blocks(bf16* target, const vec<f32, 4> (&block)[COUNT]) {
#pragma unroll
    for (i32 n = 0; n < COUNT; n++) *(vec<bf16, 4>*)(target + n * 16) = __builtin_convertvector(block[n], vec<bf16, 4>);
}
