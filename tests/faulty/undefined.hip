// Values that nothing has written, where they decide something.
#include "faulty.h"

template <bool MENDED> DEVICE void body_undefined_address(const i32* x, i32* out) {
    const i32 thread = thread_idx();
    out[thread] = x[(MENDED ? thread : undefined()) & 255];
}
FAULTY(undefined_address, (const i32* x, i32* out), (x, out))

template <bool MENDED> DEVICE void body_undefined_branch(const i32* x, i32* out) {
    const i32 thread = thread_idx();
    const i32 uniform = __builtin_amdgcn_readfirstlane(MENDED ? x[0] : undefined());
    if (uniform > 5) {
        out[thread] = 1;
    } else {
        asm volatile("s_nop 0");
        out[thread] = x[thread];
    }
}
FAULTY(undefined_branch, (const i32* x, i32* out), (x, out))

// Lanes that part on it.
template <bool MENDED> DEVICE void body_undefined_exec(const i32* x, i32* out) {
    const i32 thread = thread_idx();
    out[thread] = 0;
    if ((MENDED ? x[thread] : undefined()) > 5) out[thread] = x[255 - thread];
}
FAULTY(undefined_exec, (const i32* x, i32* out), (x, out))

template <bool MENDED> DEVICE void body_undefined_store(const i32* x, i32* out) {
    const i32 thread = thread_idx();
    out[thread] = (MENDED ? 3 : undefined()) + x[thread];
}
FAULTY(undefined_store, (const i32* x, i32* out), (x, out))

// Only some bits of the value are undefined, and the mended kernel masks them away.
template <bool MENDED> DEVICE void body_undefined_bits(const i32* x, i32* out) {
    const i32 thread = thread_idx();
    const u32 high = u32(undefined()) << 16;
    out[thread] = i32((high | (u32(x[thread]) & 0xffff)) & (MENDED ? 0xffff : 0x1ffff));
}
FAULTY(undefined_bits, (const i32* x, i32* out), (x, out))

// `fresh` was never written.
template <bool MENDED> DEVICE void body_undefined_memory(const i32* x, const i32* fresh, i32* out) {
    const i32 thread = thread_idx();
    out[thread] = (MENDED ? x : fresh)[thread];
}
FAULTY(undefined_memory, (const i32* x, const i32* fresh, i32* out), (x, fresh, out))

template <bool MENDED> DEVICE void body_undefined_lds(const i32* x, i32* out) {
    SHARED i32 row[2 * THREADS];
    volatile LDS i32* lds = (volatile LDS i32*)row;
    const i32 thread = thread_idx();
    lds[thread] = x[thread];
    lds_barrier();
    out[thread] = lds[MENDED ? THREADS - 1 - thread : thread + 1];
}
FAULTY(undefined_lds, (const i32* x, i32* out), (x, out))

// Of an undefined row of a matrix only its own row of the result is undefined.
template <bool MENDED> DEVICE void body_undefined_matrix_row(const i32* x, i32* out) {
    const i32 thread = thread_idx(), lane = thread % LANES, row = lane % 16;
    vec<i32, 4> a, b = *(const vec<i32, 4>*)(x + lane * 4 % 128);
    const i32 unknown = row == 5 ? undefined() : x[lane];
    a = vec<i32, 4>{unknown, x[lane], x[lane], x[lane]};
    const auto d = mfma_bf16(__builtin_bit_cast(vec<bf16, 8>, a), __builtin_bit_cast(vec<bf16, 8>, b), vec<f32, 4>{});
    // Row 5 is item 1 of the lanes 16 to 31.
    if (!MENDED || lane / 16 != 1) out[thread] = __builtin_bit_cast(i32, f32(d[1]));
}
FAULTY(undefined_matrix_row, (const i32* x, i32* out), (x, out))

// An atomic on memory that nothing has set.
template <bool MENDED> DEVICE void body_undefined_counter(i32* fresh, i32* out) {
    const i32 thread = thread_idx();
    __hip_atomic_fetch_add((MENDED ? out : fresh) + thread, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
FAULTY(undefined_counter, (i32* fresh, i32* out), (fresh, out))
