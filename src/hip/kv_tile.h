// One tile of KV rows on its way from the paged cache into LDS.
#pragma once
#include "formats.h"

constexpr int ROWS = 16;  // query rows of a workgroup: those of one matrix instruction
constexpr int NUM_WAVES = 4;
constexpr int NUM_THREADS = NUM_WAVES * LANES;
constexpr int DMA_BYTES = 16;                   // a lane
constexpr int DMA_CHUNK = LANES * DMA_BYTES;    // an instruction

// One tile as it lies in the cache: packed rows, in token order. It is loaded in units, the fewest rows that fill whole DMAs: a DMA that is
// not full would run past the tile, into what another stage reads.
template <class Format> struct KvRows {
    static constexpr int DMAS_PER_UNIT = 9;
    static constexpr int UNIT_BYTES = DMAS_PER_UNIT * DMA_CHUNK;
    static constexpr int UNIT_ROWS = UNIT_BYTES / Format::ROW_BYTES;
    static constexpr int NUM_UNITS = Format::TOKENS / UNIT_ROWS;
    static constexpr int CHUNKS_PER_ROW = Format::ROW_BYTES / DMA_BYTES;
    static_assert(UNIT_BYTES % Format::ROW_BYTES == 0 && Format::TOKENS % UNIT_ROWS == 0 && Format::ROW_BYTES % DMA_BYTES == 0);
    alignas(16) u8 rows[Format::TOKENS * Format::ROW_BYTES];
};
template <class Format> struct KvTile : KvRows<Format> {};
// MXFP4 scales are 18 bytes a row, a row at any even address: they come as 2-byte DMAs, which LDS gets 4 bytes apart.
template <> struct KvTile<Mxfp4> : KvRows<Mxfp4> {
    static constexpr int PAIRS_PER_ROW = Mxfp4::SCALES_PER_ROW / 2;
    static constexpr int NUM_SCALE_DMAS = Mxfp4::TOKENS * PAIRS_PER_ROW / LANES;
    static_assert(Mxfp4::TOKENS * PAIRS_PER_ROW % LANES == 0 && Mxfp4::TOKENS == LANES);
    alignas(16) u8 scale_pairs[Mxfp4::TOKENS * PAIRS_PER_ROW * 4];

    DEVICE_MEMBER static i32 scale_offset(i32 token, i32 block) { return (token * PAIRS_PER_ROW + block / 2) * 4 + block % 2; }
};

// Where one request's tokens lie, up to the end of the split. Tokens past it stand for its last one: what no request owns is never read, and
// a weight of 0 meets a finite value.
struct TokenTable {
    const i32* page_indices;  // [pages of the request]
    i32 page_size_log2;
    i32 kv_end;

    // Cache row of a token. 64 bits: pages * page_size may pass 2^31.
    DEVICE_MEMBER i64 row_of(i32 token) const {
        const i32 owned = min(token, kv_end - 1);
        const i64 page = page_indices[owned >> page_size_log2];
        return (page << page_size_log2) + (owned & page_mask());
    }
    // Whether `count` tokens from `token` on lie one after another, and before the end.
    DEVICE_MEMBER bool contiguous(i32 token, i32 count) const {
        return token + count <= kv_end && (token & page_mask()) + count <= page_mask() + 1;
    }

  private:
    DEVICE_MEMBER i32 page_mask() const { return (1 << page_size_log2) - 1; }
};

// Calls body(round, i) for i = first, first + STRIDE, .. below COUNT; first < STRIDE is the same in all lanes, `round` constant after unrolling.
template <int COUNT, int STRIDE, class Body> DEVICE void for_every(i32 first, Body body) {
#pragma unroll
    for (i32 round = 0; round < COUNT / STRIDE; round++) body(round, round * STRIDE + first);
    if constexpr (COUNT % STRIDE != 0)
        if (first < COUNT % STRIDE) body(COUNT / STRIDE, COUNT / STRIDE * STRIDE + first);
}

// Starts DMAs first, first + STRIDE, .. below COUNT: source(i) is where each lane reads for DMA i, start(i, source) starts it.
template <int COUNT, int STRIDE, class Source, class Start> DEVICE void start_dmas(i32 first, Source source, Start start) {
    const u8* sources[COUNT / STRIDE + 1];
    for_every<COUNT, STRIDE>(first, [&](i32 round, i32 dma) { sources[round] = source(dma); });
    begin_dmas();
    for_every<COUNT, STRIDE>(first, [&](i32 round, i32 dma) { start(dma, sources[round]); });
    end_dmas();
}

// One unit's DMAs first, first + STRIDE, ..
template <class Format, int STRIDE> DEVICE void load_unit(LDS u8* unit_rows, const u8* kv, const TokenTable& tokens, i32 token, i32 first, i32 lane) {
    using Rows = KvRows<Format>;
    const auto start = [&](i32 dma, const u8* source) { dma_16_to_lds(source, unit_rows + dma * DMA_CHUNK); };
    if (tokens.contiguous(token, Rows::UNIT_ROWS)) {
        const u8* rows = kv + tokens.row_of(token) * Format::ROW_BYTES;
        start_dmas<Rows::DMAS_PER_UNIT, STRIDE>(first, [&](i32 dma) { return rows + u32(dma * DMA_CHUNK + lane * DMA_BYTES); }, start);
    } else {
        const i64 row = tokens.row_of(token + lane % Rows::UNIT_ROWS);
        const auto source = [&](i32 dma) {
            const i32 chunk = dma * LANES + lane;
            return kv + shuffle(row, chunk / Rows::CHUNKS_PER_ROW) * Format::ROW_BYTES + chunk % Rows::CHUNKS_PER_ROW * DMA_BYTES;
        };
        start_dmas<Rows::DMAS_PER_UNIT, STRIDE>(first, source, start);
    }
}

// Starts this wave's share of the tile's DMAs: whole units where there are enough, else a part of one.
template <class Format> DEVICE void load_rows(LDS KvRows<Format>* tile, const u8* kv, const TokenTable& tokens, i32 tile_begin, i32 wave, i32 lane) {
    using Rows = KvRows<Format>;
    constexpr int WAVES_PER_UNIT = Rows::NUM_UNITS < NUM_WAVES ? NUM_WAVES / Rows::NUM_UNITS : 1;
    for_every<Rows::NUM_UNITS, NUM_WAVES / WAVES_PER_UNIT>(wave / WAVES_PER_UNIT, [&](i32, i32 unit) {
        load_unit<Format, WAVES_PER_UNIT>(tile->rows + unit * Rows::UNIT_BYTES, kv, tokens, tile_begin + unit * Rows::UNIT_ROWS,
                                          wave % WAVES_PER_UNIT, lane);
    });
}
template <class Format>
DEVICE void load_tile(LDS KvTile<Format>* tile, const u8* kv, const u8*, const TokenTable& tokens, i32 tile_begin, i32 wave, i32 lane) {
    load_rows<Format>(tile, kv, tokens, tile_begin, wave, lane);
}
template <>
DEVICE_SPECIAL void load_tile(LDS KvTile<Mxfp4>* tile, const u8* kv, const u8* kv_scales, const TokenTable& tokens, i32 tile_begin, i32 wave, i32 lane) {
    using Tile = KvTile<Mxfp4>;
    load_rows<Mxfp4>(tile, kv, tokens, tile_begin, wave, lane);
    const i64 row = tokens.row_of(tile_begin + lane);
    start_dmas<Tile::NUM_SCALE_DMAS, NUM_WAVES>(
        wave,
        [&](i32 dma) {
            const i32 pair = dma * LANES + lane;
            return kv_scales + shuffle(row, pair / Tile::PAIRS_PER_ROW) * Mxfp4::SCALES_PER_ROW + pair % Tile::PAIRS_PER_ROW * 2;
        },
        [&](i32 dma, const u8* source) { dma_2_to_lds(source, tile->scale_pairs + dma * (LANES * 4)); });
}

// V of an MXFP4 tile as bf16, which holds every value exactly. Rows are padded against bank conflicts of the transposed reads.
struct ValueTile {
    static constexpr int ROW_BYTES = KV_LORA_RANK_COLUMNS * 2 + 16;
    alignas(16) u8 rows[Mxfp4::TOKENS * ROW_BYTES];
};

// Each thread takes pieces of one MX block.
DEVICE void expand_values(LDS ValueTile* values, const LDS KvTile<Mxfp4>* tile, i32 thread) {
    constexpr int PIECES_PER_ROW = KV_LORA_RANK_COLUMNS / MX_BLOCK;
#pragma unroll
    for (i32 i = 0; i < Mxfp4::TOKENS * PIECES_PER_ROW / NUM_THREADS; i++) {
        const i32 piece = i * NUM_THREADS + thread, token = piece / PIECES_PER_ROW, block = piece % PIECES_PER_ROW;
        LDS vec<bf16, 8>* target = (LDS vec<bf16, 8>*)(values->rows + token * ValueTile::ROW_BYTES + block * (MX_BLOCK * 2));
        const auto codes = *(const LDS vec<u32, 4>*)(tile->rows + token * Mxfp4::ROW_BYTES + block * (MX_BLOCK / 2));
        const f32 scale = e8m0_as_exponent(tile->scale_pairs[KvTile<Mxfp4>::scale_offset(token, block)]);
#pragma unroll
        for (i32 n = 0; n < 4; n++) {
            const auto a = bf16_from_e2m1<0>(codes[n], scale), b = bf16_from_e2m1<1>(codes[n], scale);
            const auto c = bf16_from_e2m1<2>(codes[n], scale), d = bf16_from_e2m1<3>(codes[n], scale);
            target[n] = vec<bf16, 8>{a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]};
        }
    }
}
