// Writing to the paged KV cache, and reading single rows of it. A slot is page * page_size + offset: the cache is one array of rows.
//
// Append quantizes new tokens into the slots that a mapping names; each code is that of formats.py to the bit. A thread takes 8 columns of a token,
// 72 threads a row, and 8 rows make whole waves: no lane idles, and loads and stores are 16 contiguous bytes of bf16 a lane. Four neighbouring lanes
// hold an MX block. A slot outside the cache (-1 is the usual one) is skipped. Two tokens for one slot in one launch leave a mixture of both.
//
// Gather copies the bytes of the named rows, one after the other.
#include "formats.h"

constexpr int APPEND_COLUMNS = 8;  // a thread
constexpr int LANES_PER_BLOCK = MX_BLOCK / APPEND_COLUMNS;
constexpr int APPEND_THREADS_PER_ROW = QK_COLUMNS / APPEND_COLUMNS;
constexpr int APPEND_ROWS = 8;  // a workgroup
constexpr int NUM_THREADS = APPEND_ROWS * APPEND_THREADS_PER_ROW;
static_assert(NUM_THREADS % LANES == 0 && LANES % LANES_PER_BLOCK == 0 && APPEND_THREADS_PER_ROW % LANES_PER_BLOCK == 0);

constexpr int GATHER_BYTES = 16;  // a thread
template <class Format> constexpr int GATHER_THREADS_PER_ROW = Format::ROW_BYTES / GATHER_BYTES;
template <class Format> constexpr int GATHER_ROWS = NUM_THREADS / GATHER_THREADS_PER_ROW<Format>;  // a workgroup

EXPORTED APPEND_ROWS_PER_WORKGROUP = APPEND_ROWS;
EXPORTED APPEND_ALIGNMENT = 16;  // bytes, of the first column of every row of new_kv
EXPORTED GATHER_ROWS_PER_WORKGROUP_BF16 = GATHER_ROWS<Bf16>;
EXPORTED GATHER_ROWS_PER_WORKGROUP_FP8_E4M3FN = GATHER_ROWS<Fp8E4m3fn>;
EXPORTED GATHER_ROWS_PER_WORKGROUP_MXFP4 = GATHER_ROWS<Mxfp4>;

// ---- elements
typedef vec<f32, APPEND_COLUMNS> Values;
typedef vec<bf16, APPEND_COLUMNS> Bf16Values;
typedef vec<u16, APPEND_COLUMNS> Bf16Bits;

constexpr u32 MAGNITUDE_BITS = 0x7fffffff, INFINITY_BITS = 0x7f800000;
constexpr u32 MANTISSA_BITS = 23;
constexpr f32 E4M3_MAX = 448.0f;
constexpr u32 E2M1_MAX_EXPONENT = 2;
constexpr u32 E8M0_NAN = 255;

DEVICE u32 bits_of(f32 value) { return __builtin_bit_cast(u32, value); }
DEVICE f32 float_of(u32 bits) { return __builtin_bit_cast(f32, bits); }
DEVICE bool is_nan(f32 value) { return value != value; }

DEVICE Values load_columns(const bf16* source) { return __builtin_convertvector(*(const Bf16Values*)source, Values); }
DEVICE Values load_columns(const f32* source) {
    const auto low = ((const vec<f32, 4>*)source)[0], high = ((const vec<f32, 4>*)source)[1];
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}

// Nearest even; of NaNs only the sign is kept, as ml_dtypes has it (the machine would keep some of the payload).
DEVICE Bf16Bits bf16_bits(Values x) {
    Bf16Bits bits = __builtin_bit_cast(Bf16Bits, __builtin_convertvector(x, Bf16Values));
#pragma unroll
    for (i32 n = 0; n < APPEND_COLUMNS; n++)
        if (is_nan(x[n])) bits[n] = u16((bits_of(x[n]) >> 16 & 0x8000) | 0x7fc0);
    return bits;
}

// What an E4M3 code is made of: beyond the largest value the largest, where the machine would make NaN; NaN without its sign.
DEVICE f32 within_e4m3(f32 x) { return is_nan(x) ? float_of(0x7fc00000) : max(min(x, E4M3_MAX), -E4M3_MAX); }

// ---- one format each: the thread's columns, at byte or element `first_column` of their row, into slot `slot`
DEVICE void store_columns(Bf16, Values x, u8* rows, u8*, i64 slot, i32 first_column, f32, u32) {
    *(Bf16Bits*)(rows + slot * Bf16::ROW_BYTES + first_column * i32(sizeof(bf16))) = bf16_bits(x);
}

DEVICE void store_columns(Fp8E4m3fn, Values x, u8* rows, u8*, i64 slot, i32 first_column, f32 kv_scale, u32) {
#pragma unroll
    for (i32 n = 0; n < APPEND_COLUMNS; n++) x[n] = within_e4m3(x[n] / kv_scale);
    const u32 low = e4m3_from_f32_high(x[2], x[3], e4m3_from_f32(x[0], x[1])), high = e4m3_from_f32_high(x[6], x[7], e4m3_from_f32(x[4], x[5]));
    *(vec<u32, 2>*)(rows + slot * Fp8E4m3fn::ROW_BYTES + first_column) = {low, high};
}

DEVICE void store_columns(Mxfp4, Values x, u8* rows, u8* scales, i64 slot, i32 first_column, f32, u32 scale_rounding) {
    u32 amax = 0;  // as bits, in whose order infinity and NaN come last
#pragma unroll
    for (i32 n = 0; n < APPEND_COLUMNS; n++) amax = max(amax, bits_of(x[n]) & MAGNITUDE_BITS);
    amax = max_over_quad(amax);
    const bool finite = amax < INFINITY_BITS;
    const u32 scale = finite ? max((amax + scale_rounding) >> MANTISSA_BITS, E2M1_MAX_EXPONENT) - E2M1_MAX_EXPONENT : E8M0_NAN;
    // Divided by the scale outside of the conversion, by a product that is exact wherever a code depends on it: whether the conversion itself keeps
    // denormal numbers, and takes exponent field 0 for 2^-127, would be one more thing to trust. A scale is at most 2^126, its reciprocal normal.
    x *= float_of((2 * E8M0_ONE - scale) << MANTISSA_BITS);
    u32 codes = e2m1_from_f32<0>(x[0], x[1], 1.0f, 0);
    codes = e2m1_from_f32<1>(x[2], x[3], 1.0f, codes);
    codes = e2m1_from_f32<2>(x[4], x[5], 1.0f, codes);
    codes = e2m1_from_f32<3>(x[6], x[7], 1.0f, codes);
    *(u32*)(rows + slot * Mxfp4::ROW_BYTES + first_column / 2) = finite ? codes : 0;
    if (first_column % MX_BLOCK == 0) scales[slot * Mxfp4::SCALES_PER_ROW + first_column / MX_BLOCK] = u8(scale);
}

// ---- append
template <class Format, class Element, class Slot>
DEVICE void kv_append(const Element* new_kv, const Slot* slot_mapping, u8* rows, u8* scales, i64 num_slots, i64 new_kv_stride, i32 num_tokens,
                      f32 kv_scale, u32 scale_rounding) {
    const i32 row = thread_idx() / APPEND_THREADS_PER_ROW, first_column = thread_idx() % APPEND_THREADS_PER_ROW * APPEND_COLUMNS;
    const i64 token = i64(workgroup_idx()) * APPEND_ROWS + row;
    if (token >= num_tokens) return;
    const Element* source = new_kv + token * new_kv_stride + first_column;
    const i64 slot = slot_mapping[token];
    if (slot < 0 || slot >= num_slots) return;
    if constexpr (sizeof(Element) * QK_COLUMNS == Format::ROW_BYTES) {  // bf16 as it is, NaNs too
        *(vec<u32, 4>*)(rows + slot * Format::ROW_BYTES + first_column * i32(sizeof(Element))) = *(const vec<u32, 4>*)source;
    } else {
        store_columns(Format(), load_columns(source), rows, scales, slot, first_column, kv_scale, scale_rounding);
    }
}

#define KV_APPEND(name, Format, Element, Slot)                                                                                                     \
    KERNEL(NUM_THREADS) name(const Element* __restrict__ new_kv,    /* [num_tokens, 576], rows new_kv_stride elements apart, 16-byte aligned */     \
                             const Slot* __restrict__ slot_mapping, /* [num_tokens]; outside 0 .. num_slots - 1: skipped */                         \
                             u8* __restrict__ rows,                 /* [num_slots, Format::ROW_BYTES] */                                           \
                             u8* __restrict__ scales,               /* [num_slots, 18] E8M0; null unless mxfp4 */                                  \
                             i64 num_slots, i64 new_kv_stride, i32 num_tokens,                                                                      \
                             f32 kv_scale,         /* dequantizes; of fp8 only */                                                                   \
                             u32 scale_rounding) { /* of mxfp4 only: added to the bits of a block's largest magnitude, see elements.py */           \
        kv_append<Format>(new_kv, slot_mapping, rows, scales, num_slots, new_kv_stride, num_tokens, kv_scale, scale_rounding);                      \
    }
#define KV_APPEND_FORMAT(format, Format)                          \
    KV_APPEND(kv_append_##format##_from_bf16_i32, Format, bf16, i32) \
    KV_APPEND(kv_append_##format##_from_bf16_i64, Format, bf16, i64) \
    KV_APPEND(kv_append_##format##_from_f32_i32, Format, f32, i32)   \
    KV_APPEND(kv_append_##format##_from_f32_i64, Format, f32, i64)

KV_APPEND_FORMAT(bf16, Bf16)
KV_APPEND_FORMAT(fp8_e4m3fn, Fp8E4m3fn)
KV_APPEND_FORMAT(mxfp4, Mxfp4)

// ---- gather
template <class Format>
DEVICE void kv_gather(const u8* rows, const u8* scales, const i64* slots, u8* gathered, u8* gathered_scales, i32 num_rows) {
    constexpr i32 THREADS_PER_ROW = GATHER_THREADS_PER_ROW<Format>;
    const i32 row = thread_idx() / THREADS_PER_ROW, part = thread_idx() % THREADS_PER_ROW;
    const i64 target = i64(workgroup_idx()) * GATHER_ROWS<Format> + row;
    if (target >= num_rows) return;
    const i64 slot = slots[target];
    *(vec<u32, 4>*)(gathered + target * Format::ROW_BYTES + part * GATHER_BYTES) =
        *(const vec<u32, 4>*)(rows + slot * Format::ROW_BYTES + part * GATHER_BYTES);
    if constexpr (requires { Format::SCALES_PER_ROW; }) {
        constexpr i32 SCALES = Format::SCALES_PER_ROW;
        static_assert(SCALES == THREADS_PER_ROW);
        gathered_scales[target * SCALES + part] = scales[slot * SCALES + part];
    }
}

#define KV_GATHER(name, Format)                                                                                          \
    KERNEL(NUM_THREADS) name(const u8* __restrict__ rows,       /* [num_slots, Format::ROW_BYTES] */                     \
                             const u8* __restrict__ scales,     /* [num_slots, 18]; null unless mxfp4 */                 \
                             const i64* __restrict__ slots,     /* [num_rows], each in 0 .. num_slots - 1 */             \
                             u8* __restrict__ gathered,         /* [num_rows, Format::ROW_BYTES] */                      \
                             u8* __restrict__ gathered_scales,  /* [num_rows, 18]; null unless mxfp4 */                  \
                             i32 num_rows) {                                                                             \
        kv_gather<Format>(rows, scales, slots, gathered, gathered_scales, num_rows);                                     \
    }

KV_GATHER(kv_gather_bf16, Bf16)
KV_GATHER(kv_gather_fp8_e4m3fn, Fp8E4m3fn)
KV_GATHER(kv_gather_mxfp4, Mxfp4)
