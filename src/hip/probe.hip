// Tiny kernels, each of which shows one fact that no public source confirms on silicon. `mla-rt probe` runs them and compares what they show
// with what the kernels assume. A workgroup is one wave, and has its own slice of every array.
#include "formats.h"

constexpr int NUM_THREADS = LANES;

// This lane's item of an array [grid, 64].
template <class T> DEVICE T* mine(T* array) { return array + (i64(workgroup_idx()) * LANES + thread_idx()); }

// ---- matrix instructions
#define PROBE_MFMA(name, A, B)                                                                    \
    KERNEL(NUM_THREADS) name(const vec<i32, 8>* __restrict__ a, /* [grid, 64, 8] */               \
                             const vec<i32, 8>* __restrict__ b, /* [grid, 64, 8] */               \
                             const u32* __restrict__ scale_a,   /* [grid, 64] E8M0, low byte */   \
                             const u32* __restrict__ scale_b,   /* [grid, 64] E8M0, low byte */   \
                             vec<f32, 4>* __restrict__ result) { /* [grid, 64, 4] */              \
        *mine(result) = mfma_scaled<A, B>(*mine(a), *mine(b), {}, *mine(scale_a), *mine(scale_b)); \
    }

PROBE_MFMA(probe_mfma_e4m3_e2m1, E4M3, E2M1)
PROBE_MFMA(probe_mfma_e2m1_e4m3, E2M1, E4M3)
PROBE_MFMA(probe_mfma_e2m1_e2m1, E2M1, E2M1)

// Each byte of the scales in turn.
KERNEL(NUM_THREADS) probe_scale_bytes(const vec<i32, 8>* __restrict__ a, // [grid, 64, 8] E2M1
                                      const vec<i32, 8>* __restrict__ b, // [grid, 64, 8] E2M1
                                      const u32* __restrict__ scale_a,   // [grid, 64] four E8M0
                                      const u32* __restrict__ scale_b,   // [grid, 64] four E8M0
                                      vec<f32, 4>* __restrict__ result) { // [grid, 64, 4 (byte of A; of B: 3 - byte), 4]
    vec<f32, 4>* target = result + (i64(workgroup_idx()) * LANES + thread_idx()) * 4;
    target[0] = mfma_scaled<E2M1, E2M1, 0, 3>(*mine(a), *mine(b), {}, *mine(scale_a), *mine(scale_b));
    target[1] = mfma_scaled<E2M1, E2M1, 1, 2>(*mine(a), *mine(b), {}, *mine(scale_a), *mine(scale_b));
    target[2] = mfma_scaled<E2M1, E2M1, 2, 1>(*mine(a), *mine(b), {}, *mine(scale_a), *mine(scale_b));
    target[3] = mfma_scaled<E2M1, E2M1, 3, 0>(*mine(a), *mine(b), {}, *mine(scale_a), *mine(scale_b));
}

KERNEL(NUM_THREADS) probe_mfma_bf16(const vec<bf16, 8>* __restrict__ a, // [grid, 64, 8]
                                    const vec<bf16, 8>* __restrict__ b, // [grid, 64, 8]
                                    const vec<f32, 4>* __restrict__ c,  // [grid, 64, 4]
                                    vec<f32, 4>* __restrict__ result) { // [grid, 64, 4]
    *mine(result) = mfma_bf16(*mine(a), *mine(b), *mine(c));
}

// ---- transposed LDS reads
// Each lane writes its words to LDS and reads from the same address; 16 bytes a lane, aligned for every element width.
DEVICE vec<i32, 4> padded(vec<i32, 2> words) { return {words[0], words[1], 0, 0}; }
DEVICE vec<i32, 4> padded(vec<i32, 3> words) { return {words[0], words[1], words[2], 0}; }
typedef vec<i32, 2> vec2i;  // a type without a comma, for the builtin
DEVICE vec<i32, 2> read_transposed_16(const LDS u8* address) { return __builtin_bit_cast(vec2i, ds_read_transposed(address)); }

#define PROBE_READ_TRANSPOSED(name, read)                                         \
    KERNEL(NUM_THREADS) name(const vec<i32, 4>* __restrict__ words, /* [grid, 64, 4] */ \
                             vec<i32, 4>* __restrict__ result) {    /* [grid, 64, 4] */ \
        SHARED vec<i32, 4> lds[LANES];                                            \
        LDS u8* address = (LDS u8*)&lds[thread_idx()];                            \
        *(LDS vec<i32, 4>*)address = *mine(words);                                \
        lds_barrier();                                                            \
        *mine(result) = padded(read(address));                                    \
    }

PROBE_READ_TRANSPOSED(probe_read_transposed_16, read_transposed_16)
PROBE_READ_TRANSPOSED(probe_read_transposed_8, ds_read_transposed_8)
PROBE_READ_TRANSPOSED(probe_read_transposed_6, ds_read_transposed_6)
PROBE_READ_TRANSPOSED(probe_read_transposed_4, ds_read_transposed_4)

// ---- DMA to LDS: into LDS that holds a marker, all of which is then shown
constexpr u32 MARKER = 0xa5a5a5a5;
constexpr int SHOWN_WORDS = 512;
constexpr int IMMEDIATE = 256;
EXPORTED DMA_MARKER = i32(MARKER);
EXPORTED DMA_SHOWN_WORDS = SHOWN_WORDS;
EXPORTED DMA_IMMEDIATE = IMMEDIATE;

// `start`(target) begins the DMAs.
template <class Start> DEVICE void show_dma(LDS u32* lds, u32* result, Start start) {
    for (i32 word = thread_idx(); word < SHOWN_WORDS; word += LANES) lds[word] = MARKER;
    lds_barrier();
    start((LDS u8*)lds);
    wait_for_memory();
    for (i32 word = thread_idx(); word < SHOWN_WORDS; word += LANES) result[word] = lds[word];
}

KERNEL(NUM_THREADS) probe_dma_immediate(const u8* source, // [2048]
                                        u32* result) {    // [512]
    SHARED u32 lds[SHOWN_WORDS];
    show_dma((LDS u32*)lds, result, [&](LDS u8* target) { dma_16_to_lds<IMMEDIATE>(source + thread_idx() * 16, target); });
}

KERNEL(NUM_THREADS) probe_buffer_dma_immediate(const u8* source, // [2048]
                                               u32* result) {    // [512]
    SHARED u32 lds[SHOWN_WORDS];
    show_dma((LDS u32*)lds, result, [&](LDS u8* target) { buffer_dma_16_to_lds<IMMEDIATE>(source, SHOWN_WORDS * 4, thread_idx() * 16, 0, target); });
}

KERNEL(NUM_THREADS) probe_buffer_dma_bounds(const u8* source, // [2048]
                                            u32* result,      // [512]
                                            i32 num_bytes) {  // of `source` that are in range
    SHARED u32 lds[SHOWN_WORDS];
    show_dma((LDS u32*)lds, result, [&](LDS u8* target) { buffer_dma_16_to_lds(source, num_bytes, thread_idx() * 16, 0, target); });
}

// Lane l takes the two bytes at 4 * l + 2: no dword begins there.
KERNEL(NUM_THREADS) probe_dma_2(const u8* source, // [256]
                                u32* result) {    // [512]
    SHARED u32 lds[SHOWN_WORDS];
    show_dma((LDS u32*)lds, result, [&](LDS u8* target) { dma_2_to_lds(source + thread_idx() * 4 + 2, target); });
}

// ---- conversions
KERNEL(NUM_THREADS) probe_e4m3_from_f32(const vec<f32, 2>* __restrict__ x, // [grid, 64, 2]
                                        vec<u32, 2>* __restrict__ result) { // [grid, 64, 2]: low half; high half with 0x1234 below it
    const vec<f32, 2> pair = *mine(x);
    *mine(result) = {e4m3_from_f32(pair[0], pair[1]), e4m3_from_f32_high(pair[0], pair[1], 0x1234)};
}

KERNEL(NUM_THREADS) probe_f32_from_e4m3(const u32* __restrict__ codes,       // [grid, 64] four codes
                                        vec<f32, 4>* __restrict__ result) { // [grid, 64, 4]
    const vec<f32, 2> low = f32_from_e4m3<0>(*mine(codes)), high = f32_from_e4m3<1>(*mine(codes));
    *mine(result) = {low[0], low[1], high[0], high[1]};
}

KERNEL(NUM_THREADS) probe_bf16_from_e4m3(const u32* __restrict__ codes,        // [grid, 64] four codes
                                         vec<bf16, 4>* __restrict__ result) { // [grid, 64, 4]
    const vec<bf16, 2> low = bf16_from_e4m3<0>(*mine(codes)), high = bf16_from_e4m3<1>(*mine(codes));
    *mine(result) = {low[0], low[1], high[0], high[1]};
}

KERNEL(NUM_THREADS) probe_bf16_from_e2m1(const u32* __restrict__ codes,        // [grid, 64] eight codes
                                         const u32* __restrict__ scale,        // [grid, 64] E8M0
                                         vec<bf16, 8>* __restrict__ result) { // [grid, 64, 8]
    const u32 eight = *mine(codes);
    const f32 factor = e8m0_as_exponent(*mine(scale));
    const auto a = bf16_from_e2m1<0>(eight, factor), b = bf16_from_e2m1<1>(eight, factor);
    const auto c = bf16_from_e2m1<2>(eight, factor), d = bf16_from_e2m1<3>(eight, factor);
    *mine(result) = {a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]};
}

KERNEL(NUM_THREADS) probe_e2m1_from_f32(const vec<f32, 2>* __restrict__ x, // [grid, 64, 2]
                                        const u32* __restrict__ scale,     // [grid, 64] E8M0
                                        vec<u32, 2>* __restrict__ result) { // [grid, 64, 2]: byte 0 over 0; byte 2 over 0x12345678
    const vec<f32, 2> pair = *mine(x);
    const f32 divisor = e8m0_as_exponent(*mine(scale));
    *mine(result) = {e2m1_from_f32<0>(pair[0], pair[1], divisor, 0), e2m1_from_f32<2>(pair[0], pair[1], divisor, 0x12345678)};
}

KERNEL(NUM_THREADS) probe_bf16_from_f32(const vec<f32, 2>* __restrict__ x,    // [grid, 64, 2]
                                        vec<bf16, 2>* __restrict__ result) { // [grid, 64, 2]
    *mine(result) = __builtin_convertvector(*mine(x), vec<bf16, 2>);
}

// ---- functions that the guide promises to 1 ulp
KERNEL(NUM_THREADS) probe_functions(const f32* __restrict__ x,            // [grid, 64]
                                    vec<f32, 4>* __restrict__ result) { // [grid, 64, 4]: exp2, log2, 1 / x, 0
    const f32 value = *mine(x);
    *mine(result) = {exp2(value), log2(value), reciprocal(value), 0.0f};
}
