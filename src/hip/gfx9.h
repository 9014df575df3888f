// The machine: every compiler builtin that the kernels use, under names that say what it does. No other file names __builtin_amdgcn_*.
//
// What only silicon can confirm stands in one function each, and probe.hip shows it: mfma_k_of_8bit (K order of 8-bit operands),
// mfma_scale_block and mfma_scaled (which lane and byte supply a block scale), dma_*_to_lds and buffer_dma_*_to_lds (addresses, bounds),
// ds_read_transposed* (lane maps), the conversions (rounding, saturation), exp2, log2 and reciprocal (accuracy).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;
typedef int i32;
typedef long i64;
typedef float f32;
typedef __bf16 bf16;

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
// A T in memory at any even address.
template <class T> using Unaligned = T __attribute__((aligned(2)));

#define DEVICE __attribute__((device, always_inline)) static inline
#define DEVICE_MEMBER __attribute__((device, always_inline)) inline
// Of a function with __restrict__ pointers into LDS that are not those a DMA in flight writes: the compiler does not wait for the DMA before it reads there
// (it does before transposed reads of which it knows nothing). Clang 22.1 loses what __restrict__ says where it inlines by order, not by its own judgement.
#define INLINED_WITH_SCOPES __attribute__((device)) inline
#define SHARED __attribute__((shared))
#define LDS __attribute__((address_space(3)))
#define KERNEL(threads) extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void
// Arguments of a kernel that are wanted later: with this, they are loaded with those that were wanted before, not each where it is first used, at the cost
// of a round trip to memory. (There is no instruction in it: the compiler sees a use.)
template <class Argument> DEVICE void loaded_by_now(Argument argument) { asm volatile("" ::"s"(argument)); }
template <class... Arguments> DEVICE void all_loaded_by_now(Arguments... arguments) { (loaded_by_now(arguments), ...); }
// A constant that the host reads from the code object by name.
#define EXPORTED extern "C" __attribute__((device, used)) const i32

constexpr int LANES = 64;

// Calls body(Index<0>{}), body(Index<1>{}), .. below COUNT: the index is a constant within the body.
template <int VALUE> struct Index {
    DEVICE_MEMBER constexpr operator int() const { return VALUE; }
};
template <int COUNT, int FIRST = 0, class Body> DEVICE void unroll(Body body) {
    if constexpr (FIRST < COUNT) {
        body(Index<FIRST>{});
        unroll<COUNT, FIRST + 1>(body);
    }
}

// ---- who am I
DEVICE i32 thread_idx() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE i32 workgroup_idx() { return __builtin_amdgcn_workgroup_id_x(); }
// A value that is the same in all lanes, as the compiler cannot see: it goes to a scalar register.
DEVICE i32 uniform(i32 value) { return __builtin_amdgcn_readfirstlane(value); }
DEVICE const u8* uniform(const u8* address) {
    const u64 bits = u64(address);
    return (const u8*)(u64(u32(uniform(i32(bits >> 32)))) << 32 | u32(uniform(i32(bits))));
}
DEVICE i32 wave_idx() { return uniform(thread_idx() / LANES); }

// ---- numbers
DEVICE f32 exp2(f32 x) { return __builtin_amdgcn_exp2f(x); }
DEVICE f32 log2(f32 x) { return __builtin_amdgcn_logf(x); }
DEVICE f32 reciprocal(f32 x) { return __builtin_amdgcn_rcpf(x); }
DEVICE f32 max(f32 a, f32 b) { return __builtin_fmaxf(a, b); }
DEVICE f32 min(f32 a, f32 b) { return __builtin_fminf(a, b); }
DEVICE u32 max(u32 a, u32 b) { return a > b ? a : b; }
DEVICE i32 max(i32 a, i32 b) { return a > b ? a : b; }
DEVICE constexpr i32 min(i32 a, i32 b) { return a < b ? a : b; }

// Two f32 to two E4M3 bytes in the low half of a register; nearest even. Beyond 448: NaN, so the caller keeps the range.
DEVICE u32 e4m3_from_f32(f32 low, f32 high) { return u32(__builtin_amdgcn_cvt_pk_fp8_f32(low, high, 0, false)); }
// Four. (What the first conversion leaves of its register is written by the second: nothing has to be put there before.)
DEVICE u32 four_e4m3_from_f32(vec<f32, 4> x) {
    const i32 any = __builtin_nondeterministic_value(i32());
    return u32(__builtin_amdgcn_cvt_pk_fp8_f32(x[2], x[3], __builtin_amdgcn_cvt_pk_fp8_f32(x[0], x[1], any, false), true));
}
// The same into the high half; the low half is kept.
DEVICE u32 e4m3_from_f32_high(f32 low, f32 high, u32 kept) { return u32(__builtin_amdgcn_cvt_pk_fp8_f32(low, high, i32(kept), true)); }
template <bool HIGH_HALF> DEVICE vec<f32, 2> f32_from_e4m3(u32 four) { return __builtin_amdgcn_cvt_pk_f32_fp8(i32(four), HIGH_HALF); }
// Times `scale`, a power of two.
template <bool HIGH_HALF> DEVICE vec<f32, 2> f32_from_e4m3(u32 four, f32 scale) { return __builtin_amdgcn_cvt_scalef32_pk_f32_fp8(four, scale, HIGH_HALF); }
// Exact: every E4M3 number, and every E2M1 number times a power of two, is a bf16 number. `scale` counts by its exponent only.
template <bool HIGH_HALF> DEVICE vec<bf16, 2> bf16_from_e4m3(u32 four) { return __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(four, 1.0f, HIGH_HALF); }
template <int BYTE> DEVICE vec<bf16, 2> bf16_from_e2m1(u32 eight, f32 scale) { return __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(eight, scale, BYTE); }
// Two f32, each divided by `scale`, to the two E2M1 codes of byte BYTE of `kept`; nearest even, saturating.
template <int BYTE> DEVICE u32 e2m1_from_f32(f32 low, f32 high, f32 scale, u32 kept) {
    return __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(kept, low, high, scale, BYTE);
}

// Byte n of the result is byte BYTE_n of {low, high}: 0 .. 3 of `low`, 4 .. 7 of `high`, 12: 0.
template <int BYTE_0, int BYTE_1, int BYTE_2, int BYTE_3> DEVICE u32 select_bytes(u32 low, u32 high) {
    return __builtin_amdgcn_perm(high, low, u32(BYTE_0 | BYTE_1 << 8 | BYTE_2 << 16 | BYTE_3 << 24));
}

// ---- lanes
// `value` of lane `lane` (any lane index, different per lane).
DEVICE i32 shuffle(i32 value, i32 lane) { return __builtin_amdgcn_ds_bpermute(lane * 4, value); }
DEVICE const u8* shuffle(const u8* address, i32 lane) {
    const u64 bits = u64(address);
    return (const u8*)(u64(u32(shuffle(i32(bits >> 32), lane))) << 32 | u32(shuffle(i32(bits), lane)));
}
// The largest of the four lanes that are equal apart from their last two bits; all four get it, and all four must be active.
DEVICE u32 max_over_quad(u32 value) {
    value = max(value, u32(__builtin_amdgcn_mov_dpp(i32(value), 0xb1, 0xf, 0xf, true)));   // quad_perm:[1,0,3,2]
    return max(value, u32(__builtin_amdgcn_mov_dpp(i32(value), 0x4e, 0xf, 0xf, true)));    // quad_perm:[2,3,0,1]
}
DEVICE bool any_lane(bool condition) { return __builtin_amdgcn_ballot_w64(condition) != 0; }
// What op makes of the four lanes that are equal modulo 16; all four get it. Order: (l, l^16) first, then the halves.
template <class Op> DEVICE u32 reduce_over_lane_groups(u32 value, Op op) {
    auto rows = __builtin_amdgcn_permlane16_swap(value, value, false, false);
    value = op(rows[0], rows[1]);
    auto halves = __builtin_amdgcn_permlane32_swap(value, value, false, false);
    return op(halves[0], halves[1]);
}
DEVICE f32 max_over_lane_groups(f32 value) {
    return __builtin_bit_cast(f32, reduce_over_lane_groups(__builtin_bit_cast(u32, value), [](u32 a, u32 b) {
        return __builtin_bit_cast(u32, max(__builtin_bit_cast(f32, a), __builtin_bit_cast(f32, b)));
    }));
}
DEVICE f32 sum_over_lane_groups(f32 value) {
    return __builtin_bit_cast(f32, reduce_over_lane_groups(__builtin_bit_cast(u32, value), [](u32 a, u32 b) {
        return __builtin_bit_cast(u32, __builtin_bit_cast(f32, a) + __builtin_bit_cast(f32, b));
    }));
}
DEVICE u32 max_over_lane_groups(u32 value) {
    return reduce_over_lane_groups(value, [](u32 a, u32 b) { return max(a, b); });
}
// Lanes 32 .. 63 of `a` change places with lanes 0 .. 31 of `b`.
DEVICE void swap_halves(u32& a, u32& b) {
    const auto swapped = __builtin_amdgcn_permlane32_swap(a, b, false, false);
    a = swapped[0], b = swapped[1];
}

// ---- matrix instructions, 16 x 16 results
// A: lane l holds row l % 16; B: lane l holds column l % 16. Result: lane l, item r is row 4 * (l / 16) + r, column l % 16.
// 16-bit operands, K = 32: lane l holds k = 8 * (l / 16) .. + 7.
DEVICE vec<f32, 4> mfma_bf16(vec<bf16, 8> a, vec<bf16, 8> b, vec<f32, 4> c) { return __builtin_amdgcn_mfma_f32_16x16x32_bf16(a, b, c, 0, 0, 0); }

enum MatrixFormat { E4M3 = 0, E2M1 = 4 };
constexpr int MX_K = 128;

// First k of the 16 items in half `half` (registers 0-3 or 4-7) of an 8-bit operand, for lane group `group` = lane / 16.
DEVICE constexpr i32 mfma_k_of_8bit(i32 group, i32 half) { return 64 * half + 16 * group; }
// First k of the 32 items of a 4-bit operand.
DEVICE constexpr i32 mfma_k_of_4bit(i32 group) { return 32 * group; }
// The block of 32 k whose scale (for its own row or column, lane % 16) a lane of lane group `group` supplies.
DEVICE constexpr i32 mfma_scale_block(i32 group) { return group; }

// K = 128 with one E8M0 scale for each row of A and column of B and 32 k, in byte BYTE_A of scale_a and byte BYTE_B of scale_b.
template <MatrixFormat A, MatrixFormat B, int BYTE_A = 0, int BYTE_B = 0>
DEVICE vec<f32, 4> mfma_scaled(vec<i32, 8> a, vec<i32, 8> b, vec<f32, 4> c, u32 scale_a, u32 scale_b) {
    return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, c, A, B, BYTE_A, i32(scale_a), BYTE_B, i32(scale_b));
}

// ---- memory
// What stands before stays before what stands behind.
DEVICE void keep_order() { __builtin_amdgcn_sched_barrier(0); }
// Lane l's 16 bytes at `source` (its own address) go to `target` + 16 * l (`target` is the same in all lanes); counted in vmcnt.
// OFFSET counts on both sides: from `source` + OFFSET to `target` + OFFSET + 16 * l.
template <int OFFSET = 0> DEVICE void dma_16_to_lds(const u8* source, LDS u8* target) {
    __builtin_amdgcn_global_load_lds((__attribute__((address_space(1))) void*)source, (LDS void*)target, 16, OFFSET, 0);
}
// Lane l's 2 bytes at `source` go to the low half of the dword at `target` + 4 * l, whose high half becomes 0.
DEVICE void dma_2_to_lds(const u8* source, LDS u8* target) {
    __builtin_amdgcn_global_load_lds((__attribute__((address_space(1))) void*)source, (LDS void*)target, 2, 0, 0);
}
constexpr i32 RAW_BUFFER = 0x00027000;  // word 3 of a buffer resource: 32-bit data, no stride, no swizzle
// Lane l's 16 bytes at `source` + `lane_offset` + `offset` (each lane its own, and the same for all) go to `target` + 16 * l. `num_bytes` from `source` on
// may be read: of dwords beyond, LDS gets 0. (Whether `offset` counts in that, the manual and others' emulators do not agree; callers stay within.)
// OFFSET counts on both sides.
template <int OFFSET = 0> DEVICE void buffer_dma_16_to_lds(const u8* source, i32 num_bytes, i32 lane_offset, i32 offset, LDS u8* target) {
    const auto resource = __builtin_amdgcn_make_buffer_rsrc((void*)source, 0, num_bytes, RAW_BUFFER);
    __builtin_amdgcn_raw_ptr_buffer_load_lds(resource, (LDS void*)target, 16, lane_offset, offset, OFFSET, 0);
}
// All loads, stores and DMAs of this wave have landed (and its LDS accesses, which costs nothing more). The fence keeps LDS reads behind it: the compiler
// does not know that a DMA writes LDS; and uses of what was loaded do not come before it, with waits of their own.
DEVICE void wait_for_memory() {
    keep_order();
    __builtin_amdgcn_s_waitcnt(0x0070);  // vmcnt(0) lgkmcnt(0)
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
    keep_order();
}
// All LDS reads of this wave but the last COUNT are there. The compiler waits where a result is used; said here, one wait does for several results.
template <int COUNT> DEVICE void wait_for_lds() {
    static_assert(0 <= COUNT && COUNT < 15);  // 15 stands for no wait
    __builtin_amdgcn_sched_barrier(0);
    __builtin_amdgcn_s_waitcnt(0xc07f | COUNT << 8);  // lgkmcnt(COUNT)
    __builtin_amdgcn_sched_barrier(0);
}
// DMAs by address stand between begin_dmas() and end_dmas(). The compiler takes it that global_load_lds counts in lgkmcnt too, which it does not
// (llvm-project pull request 179305, after clang 22.1): its waits for LDS results that are outstanding there come out too weak. So none may be. The wait
// at the end costs nothing, there being nothing to wait for; without it the compiler waits later, on all paths.
DEVICE void begin_dmas() { wait_for_lds<0>(); }
DEVICE void end_dmas() { wait_for_lds<0>(); }
// All waves of the workgroup are here and see each other's LDS writes. Says nothing of memory, so that a DMA stays in flight: a fence of
// workgroup scope would wait for it. Fences of wavefront scope only hold the compiler; the wait for LDS is said outright.
DEVICE void lds_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_s_waitcnt(0xc07f);  // lgkmcnt(0)
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
// Between workgroups, which may be on different XCDs with an L2 each. What is stored through has reached memory when this wave waits for it: whoever sees
// an atomic that comes after, and then acquires, reads it. (Other stores stay in the L2 until a release fence writes all of it back.)
// Cache policy bits of a store: sc1, the scope of the device.
constexpr i32 DEVICE_SCOPE = 1 << 4;
// 16 bytes to `target` + `offset` (each lane its own). `target` is the same in all lanes; offsets from `num_bytes` on are not stored.
DEVICE void store_16_through(void* target, i32 num_bytes, i32 offset, vec<u32, 4> value) {
    __builtin_amdgcn_raw_buffer_store_b128(value, __builtin_amdgcn_make_buffer_rsrc(target, 0, num_bytes, RAW_BUFFER), offset, 0, DEVICE_SCOPE);
}
DEVICE void store_through(f32* target, f32 value) { __hip_atomic_store(target, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
DEVICE void acquire_from_device() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }
DEVICE u32 atomic_add(u32* target, u32 value) { return __hip_atomic_fetch_add(target, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
DEVICE void atomic_store(u32* target, u32 value) { __hip_atomic_store(target, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
// Transposed read: in each group of 16 lanes, lanes 4j .. 4j+3 give the address of 16 elements of row j, four each; lane t gets column t.
DEVICE vec<bf16, 4> ds_read_transposed(const LDS u8* address) { return __builtin_amdgcn_ds_read_tr16_b64_v4bf16((LDS vec<bf16, 4>*)address); }
// The same for 8-, 6- and 4-bit elements, in 8, 12 and 8 bytes a lane: number the elements of a group of 16 lanes in lane order; lane t gets
// elements t, t + 16, t + 32, ...
DEVICE vec<i32, 2> ds_read_transposed_8(const LDS u8* address) { return __builtin_amdgcn_ds_read_tr8_b64_v2i32((LDS vec<i32, 2>*)address); }
DEVICE vec<i32, 3> ds_read_transposed_6(const LDS u8* address) { return __builtin_amdgcn_ds_read_tr6_b96_v3i32((LDS vec<i32, 3>*)address); }
DEVICE vec<i32, 2> ds_read_transposed_4(const LDS u8* address) { return __builtin_amdgcn_ds_read_tr4_b64_v2i32((LDS vec<i32, 2>*)address); }
