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
// MXFP4 scales are 18 bytes a row, a row at any even address: they come as 2-byte DMAs, which LDS gets 4 bytes apart, 64 rows at a time.
template <> struct KvTile<Mxfp4> : KvRows<Mxfp4> {
    static constexpr int PAIRS_PER_ROW = Mxfp4::SCALES_PER_ROW / 2;
    static constexpr int PART_ROWS = LANES, NUM_PARTS = Mxfp4::TOKENS / PART_ROWS, DMAS_PER_PART = PAIRS_PER_ROW;
    alignas(16) u8 scale_pairs[Mxfp4::TOKENS * PAIRS_PER_ROW * 4];

    // Of block `first` + `block`; `first` is even.
    DEVICE_MEMBER static i32 scale_offset(i32 token, i32 first, i32 block) { return (token * PAIRS_PER_ROW + block / 2) * 4 + block % 2 + first * 2; }
};

// Where byte `first` + `offset` of a token's row is in the tile. `first` is a whole number of the bytes that swizzling stays within, so that, where it
// is a constant, the compiler can put it into the instruction.
template <class Format> DEVICE const LDS u8* byte_of(const LDS KvTile<Format>* tile, i32 token, i32 first, i32 offset) {
    return tile->rows + token * Format::ROW_BYTES + (offset ^ Format::swizzle(token) * DMA_BYTES) + first;
}

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

// DMAs first, first + STRIDE, .. of a unit, which begins at the request's token `token` and the tile's row `unit_row`.
template <class Format, int STRIDE>
DEVICE void load_unit(LDS KvRows<Format>* tile, const u8* kv, const TokenTable& tokens, i32 token, i32 unit_row, i32 first, i32 lane) {
    using Rows = KvRows<Format>;
    LDS u8* const target = tile->rows + unit_row * Format::ROW_BYTES;
    const auto start = [&](i32 dma, const u8* source) { dma_16_to_lds(source, target + dma * DMA_CHUNK); };
    // Row of the unit that the lane's 16 bytes of a DMA lie in, and where in the row they come from.
    const auto unit_row_of = [&](i32 dma) { return (dma * LANES + lane) / Rows::CHUNKS_PER_ROW; };
    const auto offset_of = [&](i32 dma) {
        return ((dma * LANES + lane) % Rows::CHUNKS_PER_ROW ^ Format::swizzle(unit_row + unit_row_of(dma))) * DMA_BYTES;
    };
    if (tokens.contiguous(token, Rows::UNIT_ROWS)) {
        const u8* rows = kv + tokens.row_of(token) * Format::ROW_BYTES;
        begin_dmas();
        for_every<Rows::DMAS_PER_UNIT, STRIDE>(first, [&](i32, i32 dma) {
            buffer_dma_16_to_lds(rows, Rows::UNIT_BYTES, unit_row_of(dma) * Format::ROW_BYTES + offset_of(dma), target + dma * DMA_CHUNK);
        });
        end_dmas();
    } else {
        const i64 row = tokens.row_of(token + lane % Rows::UNIT_ROWS);
        start_dmas<Rows::DMAS_PER_UNIT, STRIDE>(
            first, [&](i32 dma) { return kv + shuffle(row, unit_row_of(dma)) * Format::ROW_BYTES + offset_of(dma); }, start);
    }
}

// Starts this wave's share of the tile's DMAs: whole units where there are enough, else a part of one.
template <class Format> DEVICE void load_rows(LDS KvRows<Format>* tile, const u8* kv, const TokenTable& tokens, i32 tile_begin, i32 wave, i32 lane) {
    using Rows = KvRows<Format>;
    constexpr int WAVES_PER_UNIT = Rows::NUM_UNITS < NUM_WAVES ? NUM_WAVES / Rows::NUM_UNITS : 1;
    for_every<Rows::NUM_UNITS, NUM_WAVES / WAVES_PER_UNIT>(wave / WAVES_PER_UNIT, [&](i32, i32 unit) {
        const i32 unit_row = unit * Rows::UNIT_ROWS;
        load_unit<Format, WAVES_PER_UNIT>(tile, kv, tokens, tile_begin + unit_row, unit_row, wave % WAVES_PER_UNIT, lane);
    });
}
template <class Format>
DEVICE void load_tile(LDS KvTile<Format>* tile, const u8* kv, const u8*, const TokenTable& tokens, i32 tile_begin, i32 wave, i32 lane) {
    load_rows<Format>(tile, kv, tokens, tile_begin, wave, lane);
}
template <>
DEVICE_MEMBER void load_tile(LDS KvTile<Mxfp4>* tile, const u8* kv, const u8* kv_scales, const TokenTable& tokens, i32 tile_begin, i32 wave, i32 lane) {
    using Tile = KvTile<Mxfp4>;
    load_rows<Mxfp4>(tile, kv, tokens, tile_begin, wave, lane);
    constexpr int WAVES_PER_PART = NUM_WAVES / Tile::NUM_PARTS;
    const i32 part_row = wave / WAVES_PER_PART * Tile::PART_ROWS, token = tile_begin + part_row;
    LDS u8* const target = tile->scale_pairs + part_row * (Tile::PAIRS_PER_ROW * 4);
    const auto start = [&](i32 dma, const u8* source) { dma_2_to_lds(source, target + dma * (LANES * 4)); };
    if (tokens.contiguous(token, Tile::PART_ROWS)) {
        const u8* scales = kv_scales + tokens.row_of(token) * Mxfp4::SCALES_PER_ROW;
        begin_dmas();
        for_every<Tile::DMAS_PER_PART, WAVES_PER_PART>(wave % WAVES_PER_PART, [&](i32, i32 dma) {
            buffer_dma_2_to_lds(scales, Tile::PART_ROWS * Mxfp4::SCALES_PER_ROW, (dma * LANES + lane) * 2, target + dma * (LANES * 4));
        });
        end_dmas();
    } else {
        const i64 row = tokens.row_of(token + lane);
        const auto source = [&](i32 dma) {
            const i32 pair = dma * LANES + lane;
            return kv_scales + shuffle(row, pair / Tile::PAIRS_PER_ROW) * Mxfp4::SCALES_PER_ROW + pair % Tile::PAIRS_PER_ROW * 2;
        };
        start_dmas<Tile::DMAS_PER_PART, WAVES_PER_PART>(wave % WAVES_PER_PART, source, start);
    }
}
