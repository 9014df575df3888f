// Accesses outside of what a kernel was given.
#include "faulty.h"

// One past the end of `out`, [256].
template <bool MENDED> DEVICE void body_past_the_end(const i32* x, i32* out) {
    const i32 thread = thread_idx();
    out[thread + (MENDED ? 0 : 1)] = x[thread];
}
FAULTY(past_the_end, (const i32* x, i32* out), (x, out))

// The LDS of a workgroup ends behind `row`.
template <bool MENDED> DEVICE void body_past_lds(const i32* x, i32* out) {
    SHARED i32 row[THREADS];
    volatile LDS i32* lds = (volatile LDS i32*)row;
    const i32 thread = thread_idx();
    lds[thread + (MENDED ? 0 : 2)] = x[thread];
    out[thread] = lds[thread];
}
FAULTY(past_lds, (const i32* x, i32* out), (x, out))

template <bool MENDED> DEVICE void body_misaligned_atomic(i32* out) {
    i32* place = (i32*)((u8*)(out + thread_idx() % 8) + (MENDED ? 0 : 2));
    asm volatile("global_atomic_add %0, %1, off" : : "v"(place), "v"(1) : "memory");
    wait_for_memory();
}
FAULTY(misaligned_atomic, (i32* out), (out))

// Reads through a pointer that lies in memory; the fault is the caller's, who has freed what it points to.
KERNEL(THREADS) after_free(const i32* const* table, i32* out) { out[thread_idx()] = table[0][thread_idx()]; }
