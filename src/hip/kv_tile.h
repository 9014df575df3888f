// One tile of KV rows on its way from the paged cache into LDS, and from its bytes to bf16 values.
#pragma once
#include "formats.h"

constexpr int TOKENS = 64;  // tokens a tile: one a lane, so that a wave looks up the whole tile's pages at once
constexpr int NUM_WAVES = 4;
constexpr int NUM_THREADS = NUM_WAVES * LANES;
constexpr int DMA_BYTES = 16;  // a lane and instruction
static_assert(TOKENS == LANES);

// One tile as it lies in the cache: packed rows, in token order.
template <class Format> struct KvTile {
    static constexpr int CHUNKS_PER_ROW = Format::ROW_BYTES / DMA_BYTES;
    static constexpr int NUM_DMAS = TOKENS * CHUNKS_PER_ROW / LANES;
    // A DMA that is not full would run past the tile, into what another stage reads.
    static_assert(TOKENS * CHUNKS_PER_ROW % LANES == 0 && Format::ROW_BYTES % DMA_BYTES == 0);
    alignas(16) u8 rows[TOKENS * Format::ROW_BYTES];
};

// MXFP4 scales are 18 bytes a row, a row at any even address: they come as 2-byte DMAs, which LDS gets 4 bytes apart.
template <> struct KvTile<Mxfp4> {
    static constexpr int CHUNKS_PER_ROW = Mxfp4::ROW_BYTES / DMA_BYTES;
    static constexpr int NUM_DMAS = TOKENS * CHUNKS_PER_ROW / LANES;
    static constexpr int PAIRS_PER_ROW = Mxfp4::SCALES_PER_ROW / 2;
    static constexpr int NUM_SCALE_DMAS = TOKENS * PAIRS_PER_ROW / LANES;
    static_assert(TOKENS * CHUNKS_PER_ROW % LANES == 0 && TOKENS * PAIRS_PER_ROW % LANES == 0);
    alignas(16) u8 rows[TOKENS * Mxfp4::ROW_BYTES];
    alignas(16) u8 scale_pairs[TOKENS * PAIRS_PER_ROW * 4];

    DEVICE_MEMBER static i32 scale_offset(i32 token, i32 block) { return (token * PAIRS_PER_ROW + block / 2) * 4 + block % 2; }
};

// Where one request's tokens lie.
struct PageTable {
    const i32* page_indices;  // [pages of the request]
    i32 page_size_log2;

    // Cache row of a token of the request. 64 bits: pages * page_size may pass 2^31.
    DEVICE_MEMBER i64 row_of(i32 token) const {
        const i64 page = page_indices[token >> page_size_log2];
        return (page << page_size_log2) + (token & ((1 << page_size_log2) - 1));
    }
};

// Cache row of tile token `lane`, for each lane. Tokens past the split's end stand for its last one: what no request owns is never read,
// and a weight of 0 meets a finite value.
DEVICE i64 locate_token(const PageTable& pages, i32 tile_begin, i32 kv_end, i32 lane) { return pages.row_of(min(tile_begin + lane, kv_end - 1)); }

// Calls body(round, i) for this wave's share of i = 0 .. COUNT - 1; `round` is a constant after unrolling.
template <int COUNT, class Body> DEVICE void deal_over_waves(i32 wave, Body body) {
#pragma unroll
    for (i32 round = 0; round < COUNT / NUM_WAVES; round++) body(round, round * NUM_WAVES + wave);
    if (wave < COUNT % NUM_WAVES) body(COUNT / NUM_WAVES, COUNT / NUM_WAVES * NUM_WAVES + wave);
}

// Starts DMAs dealt out over the waves: source(i) is where each lane reads for DMA i, start(i, source) starts it.
template <int COUNT, class Source, class Start> DEVICE void start_dmas(i32 wave, Source source, Start start) {
    const u8* sources[COUNT / NUM_WAVES + 1];
    deal_over_waves<COUNT>(wave, [&](i32 round, i32 dma) { sources[round] = source(dma); });
    begin_dmas();
    deal_over_waves<COUNT>(wave, [&](i32 round, i32 dma) { start(dma, sources[round]); });
    end_dmas();
}

// Starts the tile's DMAs; `token_row` is locate_token's.
template <class Format> DEVICE void load_rows(LDS KvTile<Format>* tile, const u8* kv, i64 token_row, i32 wave, i32 lane) {
    using Tile = KvTile<Format>;
    start_dmas<Tile::NUM_DMAS>(
        wave,
        [&](i32 dma) {
            const i32 chunk = dma * LANES + lane, token = chunk / Tile::CHUNKS_PER_ROW, part = chunk % Tile::CHUNKS_PER_ROW;
            return kv + shuffle(token_row, token) * Format::ROW_BYTES + part * DMA_BYTES;
        },
        [&](i32 dma, const u8* source) { dma_16_to_lds(source, tile->rows + dma * (LANES * DMA_BYTES)); });
}
template <class Format> DEVICE void load_tile(LDS KvTile<Format>* tile, const u8* kv, const u8*, i64 token_row, i32 wave, i32 lane) {
    load_rows(tile, kv, token_row, wave, lane);
}
template <> DEVICE_SPECIAL void load_tile(LDS KvTile<Mxfp4>* tile, const u8* kv, const u8* kv_scales, i64 token_row, i32 wave, i32 lane) {
    using Tile = KvTile<Mxfp4>;
    load_rows(tile, kv, token_row, wave, lane);
    start_dmas<Tile::NUM_SCALE_DMAS>(
        wave,
        [&](i32 dma) {
            const i32 pair = dma * LANES + lane, token = pair / Tile::PAIRS_PER_ROW, part = pair % Tile::PAIRS_PER_ROW;
            return kv_scales + shuffle(token_row, token) * Mxfp4::SCALES_PER_ROW + part * 2;
        },
        [&](i32 dma, const u8* source) { dma_2_to_lds(source, tile->scale_pairs + dma * (LANES * 4)); });
}

// V of one tile as bf16, which holds every FP8 and MXFP4 value exactly. Rows are padded against bank conflicts of the transposed reads.
struct ValueTile {
    static constexpr int ROW_BYTES = KV_LORA_RANK_COLUMNS * 2 + 16;
    alignas(16) u8 rows[TOKENS * ROW_BYTES];
};

// Each thread takes pieces of 32 V columns, one MX block.
constexpr int PIECES_PER_ROW = KV_LORA_RANK_COLUMNS / MX_BLOCK;
constexpr int PIECES_PER_THREAD = TOKENS * PIECES_PER_ROW / NUM_THREADS;

// Eight bf16 numbers from eight codes.
DEVICE vec<bf16, 8> join(vec<bf16, 2> a, vec<bf16, 2> b, vec<bf16, 2> c, vec<bf16, 2> d) { return {a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]}; }

DEVICE void expand_values(LDS ValueTile* values, const LDS KvTile<Fp8E4m3fn>* tile, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < PIECES_PER_THREAD; i++) {
        const i32 piece = i * NUM_THREADS + thread, token = piece / PIECES_PER_ROW, column = piece % PIECES_PER_ROW * MX_BLOCK;
        LDS vec<bf16, 8>* target = (LDS vec<bf16, 8>*)(values->rows + token * ValueTile::ROW_BYTES + column * 2);
#pragma unroll
        for (i32 half = 0; half < 2; half++) {
            const auto codes = *(const LDS vec<u32, 4>*)(tile->rows + token * Fp8E4m3fn::ROW_BYTES + column + half * 16);
            target[half * 2 + 0] = join(bf16_from_e4m3<0>(codes[0]), bf16_from_e4m3<1>(codes[0]), bf16_from_e4m3<0>(codes[1]), bf16_from_e4m3<1>(codes[1]));
            target[half * 2 + 1] = join(bf16_from_e4m3<0>(codes[2]), bf16_from_e4m3<1>(codes[2]), bf16_from_e4m3<0>(codes[3]), bf16_from_e4m3<1>(codes[3]));
        }
    }
}

DEVICE void expand_values(LDS ValueTile* values, const LDS KvTile<Mxfp4>* tile, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < PIECES_PER_THREAD; i++) {
        const i32 piece = i * NUM_THREADS + thread, token = piece / PIECES_PER_ROW, block = piece % PIECES_PER_ROW;
        LDS vec<bf16, 8>* target = (LDS vec<bf16, 8>*)(values->rows + token * ValueTile::ROW_BYTES + block * (MX_BLOCK * 2));
        const auto codes = *(const LDS vec<u32, 4>*)(tile->rows + token * Mxfp4::ROW_BYTES + block * (MX_BLOCK / 2));
        const f32 scale = e8m0_as_exponent(tile->scale_pairs[KvTile<Mxfp4>::scale_offset(token, block)]);
#pragma unroll
        for (i32 n = 0; n < 4; n++)
            target[n] = join(bf16_from_e2m1<0>(codes[n], scale), bf16_from_e2m1<1>(codes[n], scale), bf16_from_e2m1<2>(codes[n], scale),
                             bf16_from_e2m1<3>(codes[n], scale));
    }
}
