// Small kernels for the tests of code objects and devices: every kind of parameter, a bounds check, LDS, exported constants.

typedef unsigned char u8;

#define KERNEL extern "C" __attribute__((global, amdgpu_flat_work_group_size(256, 256)))
#define CONSTANT extern "C" __attribute__((device)) const int

CONSTANT BLOCK = 256;
CONSTANT NEGATIVE = -7;

static __attribute__((device)) int thread_idx() { return __builtin_amdgcn_workgroup_id_x() * BLOCK + __builtin_amdgcn_workitem_id_x(); }

KERNEL void scale_add(const float* x,    // [n]
                      const float* y,    // [n], may be null: zeros
                      float* out,        // [n] = x * scale + y + (flag ? shift : 0)
                      int n, float scale, u8 flag, double shift) {
  const int i = thread_idx();
  if (i < n) out[i] = x[i] * scale + (y ? y[i] : 0.0f) + (flag ? static_cast<float>(shift) : 0.0f);
}

KERNEL void reverse(const float* x,  // [grid][256]
                    float* out) {    // [grid][256], each row reversed
  __attribute__((shared)) static float row[BLOCK];
  const int lane = __builtin_amdgcn_workitem_id_x();
  row[lane] = x[thread_idx()];
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  out[thread_idx()] = row[BLOCK - 1 - lane];
}

extern "C" __attribute__((device)) int value = 12345;
extern "C" __attribute__((device)) int zero = 0;
extern "C" __attribute__((device)) int* const table[2] = {&value, nullptr};

KERNEL void follow(int* out) {  // [grid * 256]: what table[0] points to, plus an object that has no bytes in the file
  out[thread_idx()] = *table[0] + zero;
}
