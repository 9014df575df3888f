// The E8M0 scales of an MXFP4 block: 18 bytes a token, at any even address, from the cache through registers into LDS, where QK and PV each find
// them in the order in which they take them.
#pragma once
#include "kv_block.h"

// Of one block in LDS.
struct MxScales {
    static constexpr u32 WEIGHT_BIAS = 127;  // log2 of what PV's weights are too large by: see Output<Mxfp4>

    // Of K, [tokens][lane groups][8]: byte s belongs to step s of QK. (A quarter of a K = 128 step is one MX block.)
    alignas(16) u8 of_k[Mxfp4::TOKENS][4][8];
    // Of V, [MX blocks][tokens, those of a lane group together]: what is to be subtracted from the bits of a bf16 weight of the token.
    alignas(16) u16 of_v[KV_LORA_RANK_COLUMNS / MX_BLOCK][Mxfp4::TOKENS];

    // Where `of_v` has the 16 tokens of a lane group; the order in which matrix results hold tokens (see scores.h).
    DEVICE_MEMBER static constexpr i32 place_of(i32 token) { return (token >> 2 & 3) * 16 + (token >> 4) * 4 + token % 4; }
};
static_assert(mfma_scale_block(1) == 1 && MX_K == 4 * MX_BLOCK);

// What a lane holds between fetch() and spread(): the scales of one token, or nothing.
template <class Format> struct BlockScales {
    struct Shared {};
    static constexpr int NUM_LOADS = 0;
    DEVICE_MEMBER void fetch(const u8*, const TokenTable&, i32, i32) {}
    DEVICE_MEMBER void spread(LDS Shared*, i32) const {}
};
template <> struct BlockScales<Mxfp4> {
    using Shared = MxScales;
    static constexpr int NUM_LOADS = 2;
    static_assert(Mxfp4::TOKENS == LANES && Mxfp4::SCALES_PER_ROW == 18);

    DEVICE_MEMBER void fetch(const u8* kv_scales, const TokenTable& tokens, i32 page, i32 token) {
        const u8* row = kv_scales + byte_of_row(tokens, page, token, Mxfp4::SCALES_PER_ROW);
        first_16 = *(const Unaligned<vec<u32, 4>>*)row;
        last_4 = *(const Unaligned<u32>*)(row + 14);
    }
    DEVICE_MEMBER void spread(LDS MxScales* scales, i32 lane) const {
        // Scales 4s + g, s = 0 .. 3, of lane group g.
        const u32 a = select_bytes<0, 4, 1, 5>(first_16[0], first_16[1]), b = select_bytes<0, 4, 1, 5>(first_16[2], first_16[3]);
        const u32 c = select_bytes<2, 6, 3, 7>(first_16[0], first_16[1]), d = select_bytes<2, 6, 3, 7>(first_16[2], first_16[3]);
        auto* of_k = (LDS vec<u32, 4>*)scales->of_k[lane];
        // The last step is half empty; its scale must be a number.
        of_k[0] = {select_bytes<0, 1, 4, 5>(a, b), last_4 >> 16 & 0xff, select_bytes<2, 3, 6, 7>(a, b), last_4 >> 24};
        of_k[1] = {select_bytes<0, 1, 4, 5>(c, d), E8M0_ONE, select_bytes<2, 3, 6, 7>(c, d), E8M0_ONE};

        // A weight of 1 is 2^WEIGHT_BIAS, and is to become 2^(scale - 127). (A NaN scale has made the scores NaN.)
        constexpr u16 ONE = (MxScales::WEIGHT_BIAS + E8M0_ONE) << 7;
        unroll<KV_LORA_RANK_COLUMNS / MX_BLOCK / 2>([&](auto pair) {
            constexpr int BYTE = pair % 2 * 2;
            const u32 two = select_bytes<BYTE, 12, BYTE + 1, 12>(first_16[pair / 2], 0);
            const auto exponents = vec<u16, 2>(ONE) - (__builtin_bit_cast(vec<u16, 2>, two) << vec<u16, 2>(7));
            scales->of_v[pair * 2][MxScales::place_of(lane)] = exponents[0];
            scales->of_v[pair * 2 + 1][MxScales::place_of(lane)] = exponents[1];
        });
    }

  private:
    vec<u32, 4> first_16;
    u32 last_4;  // two of them again
};
