// What the faulty kernels share. Each fault has a kernel template with a bool MENDED: `name` has the fault, `name_mended` does not.
#pragma once
#include "../../src/hip/gfx9.h"

constexpr int THREADS = 256;

#define FAULTY(name, parameters, arguments)                   \
    KERNEL(THREADS) name parameters { body_##name<false> arguments; } \
    KERNEL(THREADS) name##_mended parameters { body_##name<true> arguments; }

// All waves are here and see each other's stores, to LDS and to memory.
DEVICE void full_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// A value that nothing has written, made from a register that the kernel does not use otherwise.
DEVICE i32 undefined() {
    i32 value;
    asm volatile("v_mov_b32 %0, v60" : "=v"(value) : : "v60");
    return value;
}
