// Races between workgroups on device memory, and data that cross from one workgroup to another without release and acquire.
#include "faulty.h"

constexpr int AGENT = __HIP_MEMORY_SCOPE_AGENT;

// Two workgroups write one place.
template <bool MENDED> DEVICE void body_write_write(i32* out) {
    const i32 thread = thread_idx(), workgroup = workgroup_idx();
    out[thread + (MENDED ? workgroup * THREADS : 0)] = workgroup;
}
FAULTY(write_write, (i32* out), (out))

// A workgroup reads what another one writes.
template <bool MENDED> DEVICE void body_read_other(i32* out) {
    const i32 thread = thread_idx(), workgroup = workgroup_idx();
    volatile i32* data = out;
    data[workgroup * THREADS + thread] = thread;
    const i32 other = data[(MENDED ? workgroup : workgroup ^ 1) * THREADS + thread];
    data[workgroup * THREADS + thread] = other;
}
FAULTY(read_other, (i32* out), (out))

// A wave reads what another one of its workgroup writes.
template <bool MENDED> DEVICE void body_read_other_wave(i32* out) {
    const i32 thread = thread_idx(), wave = thread / LANES;
    i32* mine = out + workgroup_idx() * THREADS;
    mine[thread] = thread;
    if (MENDED) full_barrier();
    const i32 other = mine[(wave ^ 1) * LANES + thread % LANES];
    if (MENDED) full_barrier();
    mine[thread] = other;
}
FAULTY(read_other_wave, (i32* out), (out))

// The last workgroup to arrive adds up what all have stored: `out` holds the partials, [grid][256]; `counter` counts arrivals.
template <bool RELEASE, bool ACQUIRE, bool BARRIER> DEVICE void last_arriver(i32* counter, i32* out, i32* total) {
    SHARED i32 arrived;
    const i32 thread = thread_idx(), workgroup = workgroup_idx(), count = 4;
    out[workgroup * THREADS + thread] = workgroup + thread;
    if (BARRIER) full_barrier();
    if (thread == 0) {
        if (RELEASE) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
        *(LDS i32*)&arrived = __hip_atomic_fetch_add(counter, 1, __ATOMIC_RELAXED, AGENT);
    }
    lds_barrier();
    if (*(LDS i32*)&arrived != count - 1) return;
    if (ACQUIRE) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    i32 sum = 0;
    for (i32 i = 0; i < count; i++) sum += ((volatile i32*)out)[i * THREADS + thread];
    total[thread] = sum;
}
template <bool MENDED> DEVICE void body_no_release(i32* counter, i32* out, i32* total) { last_arriver<MENDED, true, true>(counter, out, total); }
FAULTY(no_release, (i32* counter, i32* out, i32* total), (counter, out, total))
template <bool MENDED> DEVICE void body_no_acquire(i32* counter, i32* out, i32* total) { last_arriver<true, MENDED, true>(counter, out, total); }
FAULTY(no_acquire, (i32* counter, i32* out, i32* total), (counter, out, total))
// The other waves may not have come to their stores when one wave releases.
template <bool MENDED> DEVICE void body_no_barrier(i32* counter, i32* out, i32* total) { last_arriver<true, true, MENDED>(counter, out, total); }
FAULTY(no_barrier, (i32* counter, i32* out, i32* total), (counter, out, total))

// What is stored through needs no release, but every wave has to wait for its own stores before the barrier.
template <bool MENDED> DEVICE void body_stored_through(i32* counter, i32* out, i32* total) {
    SHARED i32 arrived;
    const i32 thread = thread_idx(), workgroup = workgroup_idx(), count = 4;
    store_through((f32*)out + workgroup * THREADS + thread, f32(workgroup + thread));
    if (MENDED) wait_for_memory();
    lds_barrier();
    if (thread == 0) *(LDS i32*)&arrived = atomic_add((u32*)counter, 1);
    lds_barrier();
    if (*(LDS i32*)&arrived != count - 1) return;
    acquire_from_device();
    f32 sum = 0;
    for (i32 i = 0; i < count; i++) sum += ((f32*)out)[i * THREADS + thread];
    total[thread] = i32(sum);
}
FAULTY(stored_through, (i32* counter, i32* out, i32* total), (counter, out, total))

// Two of them add up two partials each, in the place of the first, the last to arrive their results, in the place of both. `counter`: [3].
template <bool MENDED> DEVICE void body_overwritten_too_early(i32* counter, i32* out) {
    SHARED i32 arrived;
    const i32 thread = thread_idx(), workgroup = workgroup_idx();
    i32* const slot = out + thread;
    slot[workgroup * THREADS] = thread;
    for (i32 level = 0; level < 2; level++) {
        full_barrier();
        if (thread == 0) {
            __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
            *(LDS i32*)&arrived = __hip_atomic_fetch_add(counter + (level == 0 ? workgroup / 2 : 2), 1, __ATOMIC_RELAXED, AGENT);
        }
        lds_barrier();
        if (*(LDS i32*)&arrived != 1) return;
        if (MENDED || level == 0) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
        const i32 first = level == 0 ? workgroup & 2 : 0;
        const i32 sum = MENDED || level == 0 ? slot[first * THREADS] + slot[(first + level + 1) * THREADS] : 0;
        slot[first * THREADS] = sum;
        if (level == 1) slot[2 * THREADS] = sum;
    }
}
FAULTY(overwritten_too_early, (i32* counter, i32* out), (counter, out))

// Scalar loads go through a cache that sees no stores.
template <bool MENDED> DEVICE void body_scalar_load(i32* out) {
    const i32 thread = thread_idx(), workgroup = workgroup_idx();
    i32* mine = out + workgroup * THREADS;
    if (thread < LANES) mine[thread] = 7;
    full_barrier();
    i32 value;
    const i32* source = MENDED ? mine + LANES : mine;
    asm volatile("s_load_dword %0, %1, 0x0\n s_waitcnt lgkmcnt(0)" : "=s"(value) : "s"(source));
    if (thread < LANES) mine[2 * LANES + thread] = value;
}
FAULTY(scalar_load, (i32* out), (out))
