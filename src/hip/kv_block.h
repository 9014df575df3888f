// Blocks of KV rows on their way from the paged cache into LDS: what a wave loads at once.
#pragma once
#include "formats.h"

constexpr int ROWS = 16;  // query rows of a wave: those of one matrix instruction
constexpr int NUM_WAVES = 4;
constexpr int NUM_THREADS = NUM_WAVES * LANES;

// A block as it lies in LDS: packed rows in token order, each row swizzled. `row_of` and `offset_of` say where in the block, and where in its row of the
// cache, the 16 bytes lie that a lane moves by DMA `dma`, which is a constant: a unit of 9 DMAs holds whole rows, and the second is like the first.
template <class Format> struct KvBlock {
    static constexpr int CHUNKS_PER_ROW = Format::ROW_BYTES / DMA_BYTES;
    static constexpr int DMAS_PER_UNIT = 9, UNIT_ROWS = Format::TOKENS / 2;
    static_assert(Format::TOKENS * Format::ROW_BYTES == BLOCK_BYTES && UNIT_ROWS * CHUNKS_PER_ROW == DMAS_PER_UNIT * LANES);

    DEVICE_MEMBER static i32 row_of(i32 dma, i32 lane) { return dma / DMAS_PER_UNIT * UNIT_ROWS + row_of_unit(dma, lane); }
    DEVICE_MEMBER static i32 offset_of(i32 dma, i32 lane) {
        const i32 in_first_unit = (chunk(dma, lane) % CHUNKS_PER_ROW ^ Format::swizzle(row_of_unit(dma, lane))) * DMA_BYTES;
        return in_first_unit ^ Format::swizzle(dma / DMAS_PER_UNIT * UNIT_ROWS) * DMA_BYTES;
    }
    // Of a block whose rows lie one after another: from its first byte on, in two parts, the second the same for all lanes.
    DEVICE_MEMBER static i32 lane_byte_of(i32 dma, i32 lane) { return row_of_unit(dma, lane) * Format::ROW_BYTES + offset_of(dma, lane); }
    DEVICE_MEMBER static i32 unit_byte_of(i32 dma) { return dma / DMAS_PER_UNIT * (UNIT_ROWS * Format::ROW_BYTES); }
    // How far a DMA is from the one that the target register is set for: up to four share it, apart by what the instruction says itself, on both sides.
    DEVICE_MEMBER static constexpr i32 ahead_of(i32 dma) { return dma % DMAS_PER_UNIT % 4 * DMA_CHUNK; }

  private:
    DEVICE_MEMBER static i32 chunk(i32 dma, i32 lane) { return dma % DMAS_PER_UNIT * LANES + lane; }
    DEVICE_MEMBER static i32 row_of_unit(i32 dma, i32 lane) { return chunk(dma, lane) / CHUNKS_PER_ROW; }
};

// Where a lane finds bytes of a token's row in `rows`: of token 16 * `tokens` + `token`, from byte `first` + (`offset` ^ `lane_offset`) on. `tokens`, `first`
// and `offset` are constants, so that swizzling costs no instruction but for a few addresses that hold for all reads: `first` is a whole number of the
// bytes that it stays within, and the swizzle of a token is that of its multiple of 16 ^ that of the rest.
template <class Format> DEVICE const LDS u8* byte_of(const LDS u8* rows, i32 tokens, i32 token, i32 first, i32 offset, i32 lane_offset) {
    const i32 of_lane = lane_offset ^ Format::swizzle(token) * DMA_BYTES, constant = offset ^ Format::swizzle(tokens * 16) * DMA_BYTES;
    return rows + token * Format::ROW_BYTES + (of_lane ^ constant) + (tokens * 16 * Format::ROW_BYTES + first);
}

// Where one request's tokens lie, up to the end of what the workgroup reads. Tokens past it stand for its last one: what no request owns is never
// read, and a weight of 0 meets a finite value.
struct TokenTable {
    const i32* page_indices;  // [pages of the request]
    i32 page_size_log2;
    i32 end;

    DEVICE_MEMBER i32 owned(i32 token) const { return min(token, end - 1); }
    DEVICE_MEMBER i32 page_of(i32 token) const { return owned(token) >> page_size_log2; }
    // A token's place in its page.
    DEVICE_MEMBER i32 place_of(i32 token) const { return owned(token) & page_mask(); }
    // Whether `count` tokens from `token` on lie one after another, and before the end.
    DEVICE_MEMBER bool contiguous(i32 token, i32 count) const { return token + count <= end && (token & page_mask()) + count <= page_mask() + 1; }

  private:
    DEVICE_MEMBER i32 page_mask() const { return (1 << page_size_log2) - 1; }
};

// 64 entries of a request's page table from entry `first` on, one a lane: enough for a block. They are loaded a block ahead, and only when the block
// goes beyond those that are there.
struct PageWindow {
    i32 first = 0, page = 0;

    DEVICE_MEMBER void load(const TokenTable& tokens, i32 token, i32 lane) {
        first = uniform(tokens.page_of(token));
        page = tokens.page_indices[min(first + lane, tokens.page_of(tokens.end))];
    }
    // To the pages of `count` tokens from `token` on.
    DEVICE_MEMBER void move_to(const TokenTable& tokens, i32 token, i32 count, i32 lane) {
        if (tokens.page_of(token + count - 1) >= first + LANES) load(tokens, token, lane);
    }
    // Where each lane's own token lies: its page, and from the cache's begin to its row. 64 bits: a cache may be larger than 4 GiB.
    DEVICE_MEMBER i32 page_of(const TokenTable& tokens, i32 token) const { return shuffle(page, tokens.page_of(token) - first); }
};
DEVICE u64 byte_of_row(const TokenTable& tokens, i32 page, i32 token, i32 row_bytes) {
    return u64(u32(page)) * (u32(row_bytes) << tokens.page_size_log2) + u32(tokens.place_of(token) * row_bytes);
}

// Starts the DMAs that bring the rows of the block's tokens, from `token` on, to `target`. `page` is that of each lane's token, token + lane % TOKENS.
template <class Format> DEVICE void load_rows(LDS u8* target, const u8* kv, const TokenTable& tokens, i32 page, i32 token, i32 lane) {
    using Block = KvBlock<Format>;
    const u8* const row = kv + byte_of_row(tokens, page, token + lane % Format::TOKENS, Format::ROW_BYTES);
    if (tokens.contiguous(token, Format::TOKENS)) {
        const u8* const first_row = uniform(row);
        keep_order();
        unroll<DMAS_PER_BLOCK>([&](auto dma) {
            constexpr i32 AHEAD = Block::ahead_of(dma);
            buffer_dma_16_to_lds<AHEAD>(first_row, BLOCK_BYTES, Block::lane_byte_of(dma, lane) - AHEAD, Block::unit_byte_of(dma), target + dma * DMA_CHUNK - AHEAD);
        });
        keep_order();
        return;
    }
    const u8* sources[DMAS_PER_BLOCK];
#pragma unroll
    for (i32 dma = 0; dma < DMAS_PER_BLOCK; dma++) sources[dma] = shuffle(row, Block::row_of(dma, lane));
    // There are tokens. But a branch keeps the shuffles before begin_dmas(), which alone does not: of what touches no memory it says nothing to the compiler.
    if (tokens.end <= 0) return;
    begin_dmas();
    unroll<DMAS_PER_BLOCK>([&](auto dma) {
        constexpr i32 AHEAD = Block::ahead_of(dma);
        dma_16_to_lds<AHEAD>(sources[dma] + (Block::offset_of(dma, lane) - AHEAD), target + dma * DMA_CHUNK - AHEAD);
    });
    end_dmas();
}
