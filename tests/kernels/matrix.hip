// One matrix product for each matrix instruction: D = sum over steps of A[step] B[step], with the operands of each lane as they lie in its registers.
// The test lays the operands out and reads the result's layout; here nothing is known of either.
typedef unsigned int u32;
typedef long i64;
typedef _Float16 f16;
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

#define KERNEL extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64))) void

// a, b: [steps][64 lanes] operands; d: [64 lanes] results.
#define PRODUCT(NAME, BUILTIN, OPERAND, RESULT)                                                                  \
    KERNEL product_##NAME(const OPERAND* a, const OPERAND* b, RESULT* d, int steps) {                            \
        const int lane = __builtin_amdgcn_workitem_id_x();                                                       \
        RESULT sum = {};                                                                                         \
        for (int i = 0; i < steps; ++i) sum = __builtin_amdgcn_mfma_##BUILTIN(a[64 * i + lane], b[64 * i + lane], sum, 0, 0, 0); \
        d[lane] = sum;                                                                                           \
    }

using f32x4 = vec<float, 4>;
using f32x16 = vec<float, 16>;
using f32x32 = vec<float, 32>;
using i32x4 = vec<int, 4>;
using i32x16 = vec<int, 16>;
using i32x32 = vec<int, 32>;
using f16x4 = vec<f16, 4>;
using f16x8 = vec<f16, 8>;
using s16x4 = vec<short, 4>;
using bf16x8 = vec<__bf16, 8>;

PRODUCT(f32_32x32x1_2b_f32, f32_32x32x1f32, float, f32x32)
PRODUCT(f32_16x16x1_4b_f32, f32_16x16x1f32, float, f32x16)
PRODUCT(f32_4x4x1_16b_f32, f32_4x4x1f32, float, f32x4)
PRODUCT(f32_32x32x2_f32, f32_32x32x2f32, float, f32x16)
PRODUCT(f32_16x16x4_f32, f32_16x16x4f32, float, f32x4)
PRODUCT(f32_32x32x4_2b_f16, f32_32x32x4f16, f16x4, f32x32)
PRODUCT(f32_16x16x4_4b_f16, f32_16x16x4f16, f16x4, f32x16)
PRODUCT(f32_4x4x4_16b_f16, f32_4x4x4f16, f16x4, f32x4)
PRODUCT(f32_32x32x8_f16, f32_32x32x8f16, f16x4, f32x16)
PRODUCT(f32_16x16x16_f16, f32_16x16x16f16, f16x4, f32x4)
PRODUCT(f32_32x32x16_f16, f32_32x32x16_f16, f16x8, f32x16)
PRODUCT(f32_16x16x32_f16, f32_16x16x32_f16, f16x8, f32x4)
PRODUCT(f32_32x32x4_2b_bf16, f32_32x32x4bf16_1k, s16x4, f32x32)
PRODUCT(f32_16x16x4_4b_bf16, f32_16x16x4bf16_1k, s16x4, f32x16)
PRODUCT(f32_4x4x4_16b_bf16, f32_4x4x4bf16_1k, s16x4, f32x4)
PRODUCT(f32_32x32x8_bf16, f32_32x32x8bf16_1k, s16x4, f32x16)
PRODUCT(f32_16x16x16_bf16, f32_16x16x16bf16_1k, s16x4, f32x4)
PRODUCT(f32_32x32x16_bf16, f32_32x32x16_bf16, bf16x8, f32x16)
PRODUCT(f32_16x16x32_bf16, f32_16x16x32_bf16, bf16x8, f32x4)
PRODUCT(i32_32x32x4_2b_i8, i32_32x32x4i8, int, i32x32)
PRODUCT(i32_16x16x4_4b_i8, i32_16x16x4i8, int, i32x16)
PRODUCT(i32_4x4x4_16b_i8, i32_4x4x4i8, int, i32x4)
PRODUCT(i32_32x32x16_i8, i32_32x32x16_i8, i64, i32x16)
PRODUCT(i32_16x16x32_i8, i32_16x16x32_i8, i64, i32x4)
PRODUCT(i32_32x32x32_i8, i32_32x32x32_i8, i32x4, i32x16)
PRODUCT(i32_16x16x64_i8, i32_16x16x64_i8, i32x4, i32x4)
using f64x4 = vec<double, 4>;
PRODUCT(f64_16x16x4_f64, f64_16x16x4f64, double, f64x4)
PRODUCT(f64_4x4x4_4b_f64, f64_4x4x4f64, double, double)
PRODUCT(f32_32x32x16_fp8_fp8, f32_32x32x16_fp8_fp8, i64, f32x16)
PRODUCT(f32_32x32x16_fp8_bf8, f32_32x32x16_fp8_bf8, i64, f32x16)
PRODUCT(f32_32x32x16_bf8_fp8, f32_32x32x16_bf8_fp8, i64, f32x16)
PRODUCT(f32_32x32x16_bf8_bf8, f32_32x32x16_bf8_bf8, i64, f32x16)
PRODUCT(f32_16x16x32_fp8_fp8, f32_16x16x32_fp8_fp8, i64, f32x4)
PRODUCT(f32_16x16x32_fp8_bf8, f32_16x16x32_fp8_bf8, i64, f32x4)
PRODUCT(f32_16x16x32_bf8_fp8, f32_16x16x32_bf8_fp8, i64, f32x4)
PRODUCT(f32_16x16x32_bf8_bf8, f32_16x16x32_bf8_bf8, i64, f32x4)

// The instructions with a choice of formats A and B (0 E4M3, 1 E5M2, 2 E2M3, 3 E3M2, 4 E2M1): plain, and with the block scales that byte BYTE_A
// of scale_a and byte BYTE_B of scale_b, [steps][64 lanes], hold. Operands are 8 registers, of which narrower formats use the first 6 or 4.
using i32x8 = vec<int, 8>;
#define CHOICE(SHAPE, RESULT, A, B, BYTE_A, BYTE_B)                                                                                      \
    KERNEL product_##SHAPE##_##A##_##B(const i32x8* a, const i32x8* b, RESULT* d, int steps) {                                           \
        const int lane = __builtin_amdgcn_workitem_id_x();                                                                               \
        RESULT sum = {};                                                                                                                 \
        for (int i = 0; i < steps; ++i)                                                                                                  \
            sum = __builtin_amdgcn_mfma_scale_f32_##SHAPE##_f8f6f4(a[64 * i + lane], b[64 * i + lane], sum, A, B, 0, 0, 0, 0);           \
        d[lane] = sum;                                                                                                                   \
    }                                                                                                                                    \
    KERNEL scaled_##SHAPE##_##A##_##B(const i32x8* a, const i32x8* b, const int* scale_a, const int* scale_b, RESULT* d, int steps) {    \
        const int lane = __builtin_amdgcn_workitem_id_x();                                                                               \
        RESULT sum = {};                                                                                                                 \
        for (int i = 0; i < steps; ++i)                                                                                                  \
            sum = __builtin_amdgcn_mfma_scale_f32_##SHAPE##_f8f6f4(a[64 * i + lane], b[64 * i + lane], sum, A, B, BYTE_A,                \
                                                                   scale_a[64 * i + lane], BYTE_B, scale_b[64 * i + lane]);              \
        d[lane] = sum;                                                                                                                   \
    }
#define CHOICES_B(SHAPE, RESULT, A, BYTE_A)  \
    CHOICE(SHAPE, RESULT, A, 0, BYTE_A, 3)   \
    CHOICE(SHAPE, RESULT, A, 1, BYTE_A, 2)   \
    CHOICE(SHAPE, RESULT, A, 2, BYTE_A, 1)   \
    CHOICE(SHAPE, RESULT, A, 3, BYTE_A, 0)   \
    CHOICE(SHAPE, RESULT, A, 4, BYTE_A, 2)
#define CHOICES(SHAPE, RESULT)        \
    CHOICES_B(SHAPE, RESULT, 0, 1)    \
    CHOICES_B(SHAPE, RESULT, 1, 0)    \
    CHOICES_B(SHAPE, RESULT, 2, 3)    \
    CHOICES_B(SHAPE, RESULT, 3, 2)    \
    CHOICES_B(SHAPE, RESULT, 4, 3)
CHOICES(16x16x128, f32x4)
CHOICES(32x32x64, f32x16)
