// Races between the waves of a workgroup on LDS, and LDS-DMA used too early.
#include "faulty.h"

// A value is read that another wave writes, with no barrier between.
template <bool MENDED> DEVICE void body_missing_barrier(const i32* x, i32* out) {
    SHARED i32 row[THREADS];
    const i32 thread = thread_idx();
    volatile LDS i32* lds = (volatile LDS i32*)row;
    lds[thread] = 0;
    lds_barrier();
    lds[thread] = x[thread];
    if (MENDED) lds_barrier();
    out[thread] = lds[THREADS - 1 - thread];
}
FAULTY(missing_barrier, (const i32* x, i32* out), (x, out))

// The barrier is there, but the store may be under way when the wave arrives at it.
template <bool MENDED> DEVICE void body_barrier_without_wait(const i32* x, i32* out) {
    SHARED i32 row[THREADS];
    volatile LDS i32* lds = (volatile LDS i32*)row;
    const i32 thread = thread_idx();
    lds[thread] = x[thread];
    if (MENDED) __builtin_amdgcn_s_waitcnt(0xc07f);  // lgkmcnt(0)
    __builtin_amdgcn_s_barrier();
    out[thread] = lds[THREADS - 1 - thread];
}
FAULTY(barrier_without_wait, (const i32* x, i32* out), (x, out))

// A value is overwritten that another wave may not have read.
template <bool MENDED> DEVICE void body_early_overwrite(const i32* x, i32* out) {
    SHARED i32 row[THREADS];
    volatile LDS i32* lds = (volatile LDS i32*)row;
    const i32 thread = thread_idx();
    lds[thread] = x[thread];
    lds_barrier();
    const i32 mirrored = lds[THREADS - 1 - thread];
    if (MENDED) lds_barrier();
    lds[thread] = mirrored + 1;
    out[thread] = mirrored;
}
FAULTY(early_overwrite, (const i32* x, i32* out), (x, out))

// Atomics of all waves at one address are no race; a plain read beside them is.
template <bool MENDED> DEVICE void body_atomic_and_read(const i32* x, i32* out) {
    SHARED i32 sum;
    LDS i32* lds = (LDS i32*)&sum;
    const i32 thread = thread_idx();
    if (thread == 0) *lds = 0;
    lds_barrier();
    __hip_atomic_fetch_add(lds, x[thread], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    if (MENDED) lds_barrier();
    out[thread] = *(volatile LDS i32*)lds;
}
FAULTY(atomic_and_read, (const i32* x, i32* out), (x, out))

// Waves may write bytes of one dword side by side, but not the same byte.
template <bool MENDED> DEVICE void body_same_byte(const i32* x, i32* out) {
    SHARED u8 bytes[THREADS];
    volatile LDS u8* lds = (volatile LDS u8*)bytes;
    const i32 thread = thread_idx(), wave = wave_idx(), lane = thread % LANES;
    lds[lane * 4 + (MENDED ? wave : wave / 2)] = u8(x[thread]);
    lds_barrier();
    out[thread] = lds[lane * 4];
}
FAULTY(same_byte, (const i32* x, i32* out), (x, out))

// A wave reads what its own LDS-DMA brings before it has waited for it.
template <bool MENDED> DEVICE void body_dma_without_wait(const i32* x, i32* out) {
    SHARED i32 tile[THREADS * 4];
    const i32 thread = thread_idx(), wave = wave_idx();
    LDS i32* mine = (LDS i32*)tile + wave * LANES * 4;
    dma_16_to_lds((const u8*)(x + thread * 4), (LDS u8*)mine);
    if (MENDED) wait_for_memory();
    out[thread] = ((volatile LDS i32*)mine)[thread % LANES * 4];
}
FAULTY(dma_without_wait, (const i32* x, i32* out), (x, out))

// A wave writes where its own LDS-DMA still does.
template <bool MENDED> DEVICE void body_dma_overwritten(const i32* x, i32* out) {
    SHARED i32 tile[THREADS * 4];
    const i32 thread = thread_idx(), wave = wave_idx();
    volatile LDS i32* mine = (volatile LDS i32*)tile + wave * LANES * 4;
    dma_16_to_lds((const u8*)(x + thread * 4), (LDS u8*)mine);
    if (MENDED) wait_for_memory();
    mine[thread % LANES * 4] = thread;
    wait_for_memory();
    out[thread] = mine[thread % LANES * 4];
}
FAULTY(dma_overwritten, (const i32* x, i32* out), (x, out))

// Another wave's tile is read after that wave's wait, but with no barrier behind the wait.
template <bool MENDED> DEVICE void body_dma_without_barrier(const i32* x, i32* out) {
    SHARED i32 tile[THREADS * 4];
    const i32 thread = thread_idx(), wave = wave_idx();
    volatile LDS i32* lds = (volatile LDS i32*)tile;
    lds[thread * 4] = 0;
    lds_barrier();
    dma_16_to_lds((const u8*)(x + thread * 4), (LDS u8*)((LDS i32*)tile + wave * LANES * 4));
    wait_for_memory();
    if (MENDED) lds_barrier();
    out[thread] = lds[(THREADS - 1 - thread) * 4];
}
FAULTY(dma_without_barrier, (const i32* x, i32* out), (x, out))

// The barrier comes before the wait, so it says nothing of the DMA.
template <bool MENDED> DEVICE void body_dma_late_wait(const i32* x, i32* out) {
    SHARED i32 tile[THREADS * 4];
    const i32 thread = thread_idx(), wave = wave_idx();
    LDS i32* lds = (LDS i32*)tile;
    dma_16_to_lds((const u8*)(x + thread * 4), (LDS u8*)(lds + wave * LANES * 4));
    if (MENDED) wait_for_memory();
    lds_barrier();
    wait_for_memory();
    out[thread] = ((volatile LDS i32*)lds)[(THREADS - 1 - thread) * 4];
}
FAULTY(dma_late_wait, (const i32* x, i32* out), (x, out))
