// One conversion for each conversion instruction, of 64 lanes: whole registers of narrow elements, so that every select is used.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef _Float16 f16;
typedef __bf16 bf16;
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
using f32x2 = vec<float, 2>;
using f16x2 = vec<f16, 2>;
using bf16x2 = vec<bf16, 2>;
using s16x2 = vec<short, 2>;
using u32x6 = vec<u32, 6>;
using f32x16 = vec<float, 16>;
using f32x32 = vec<float, 32>;
using f16x32 = vec<f16, 32>;
using bf16x32 = vec<bf16, 32>;

#define KERNEL extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64))) void
#define LANE const int lane = __builtin_amdgcn_workitem_id_x()
#define CVT(NAME) __builtin_amdgcn_cvt_scalef32_##NAME

// ---- with a scale, four bytes or eight nibbles of a register
#define BYTES(NARROW, WIDE, PAIR)                                                                    \
    KERNEL widen_##NARROW##_##WIDE(const u32* in, float scale, PAIR* out) {                          \
        LANE;                                                                                        \
        out[2 * lane] = CVT(pk_##WIDE##_##NARROW)(in[lane], scale, false);                           \
        out[2 * lane + 1] = CVT(pk_##WIDE##_##NARROW)(in[lane], scale, true);                        \
    }
#define NIBBLES(WIDE, PAIR)                                                                          \
    KERNEL widen_fp4_##WIDE(const u32* in, float scale, PAIR* out) {                                 \
        LANE;                                                                                        \
        out[4 * lane] = CVT(pk_##WIDE##_fp4)(in[lane], scale, 0);                                    \
        out[4 * lane + 1] = CVT(pk_##WIDE##_fp4)(in[lane], scale, 1);                                \
        out[4 * lane + 2] = CVT(pk_##WIDE##_fp4)(in[lane], scale, 2);                                \
        out[4 * lane + 3] = CVT(pk_##WIDE##_fp4)(in[lane], scale, 3);                                \
    }
#define FOR_WIDE(DO) DO(f32, f32x2) DO(f16, f16x2) DO(bf16, bf16x2)
#define FP8_BYTES(WIDE, PAIR) BYTES(fp8, WIDE, PAIR)
#define BF8_BYTES(WIDE, PAIR) BYTES(bf8, WIDE, PAIR)
FOR_WIDE(FP8_BYTES)
FOR_WIDE(BF8_BYTES)
FOR_WIDE(NIBBLES)

// One byte at a time; f16 results go to either half of a register.
#define SINGLES(NARROW)                                                                              \
    KERNEL single_##NARROW##_f32(const u32* in, float scale, float* out) {                           \
        LANE;                                                                                        \
        out[4 * lane] = CVT(f32_##NARROW)(in[lane], scale, 0);                                       \
        out[4 * lane + 1] = CVT(f32_##NARROW)(in[lane], scale, 1);                                   \
        out[4 * lane + 2] = CVT(f32_##NARROW)(in[lane], scale, 2);                                   \
        out[4 * lane + 3] = CVT(f32_##NARROW)(in[lane], scale, 3);                                   \
    }                                                                                                \
    KERNEL single_##NARROW##_f16(const u32* in, float scale, f16x2* out) {                           \
        LANE;                                                                                        \
        f16x2 low = {}, high = {};                                                                   \
        low = CVT(f16_##NARROW)(low, in[lane], scale, 0, false);                                     \
        low = CVT(f16_##NARROW)(low, in[lane], scale, 1, true);                                      \
        high = CVT(f16_##NARROW)(high, in[lane], scale, 2, false);                                   \
        high = CVT(f16_##NARROW)(high, in[lane], scale, 3, true);                                    \
        out[2 * lane] = low;                                                                         \
        out[2 * lane + 1] = high;                                                                    \
    }
SINGLES(fp8)
SINGLES(bf8)

// The builtins take a pair of f32 as two arguments, of the others as one.
#define SPLIT(PAIR) (PAIR)[0], (PAIR)[1]
#define WHOLE(PAIR) PAIR
#define NARROW_BYTES(NARROW, WIDE, PAIR, AS)                                                         \
    KERNEL narrow_##WIDE##_##NARROW(const PAIR* in, float scale, u32* out) {                         \
        LANE;                                                                                        \
        s16x2 packed = {};                                                                           \
        packed = CVT(pk_##NARROW##_##WIDE)(packed, AS(in[2 * lane]), scale, false);                  \
        packed = CVT(pk_##NARROW##_##WIDE)(packed, AS(in[2 * lane + 1]), scale, true);               \
        out[lane] = __builtin_bit_cast(u32, packed);                                                 \
    }
#define NARROW_NIBBLES(WIDE, PAIR, AS)                                                               \
    KERNEL narrow_##WIDE##_fp4(const PAIR* in, float scale, u32* out) {                              \
        LANE;                                                                                        \
        u32 packed = 0;                                                                              \
        packed = CVT(pk_fp4_##WIDE)(packed, AS(in[4 * lane]), scale, 0);                             \
        packed = CVT(pk_fp4_##WIDE)(packed, AS(in[4 * lane + 1]), scale, 1);                         \
        packed = CVT(pk_fp4_##WIDE)(packed, AS(in[4 * lane + 2]), scale, 2);                         \
        packed = CVT(pk_fp4_##WIDE)(packed, AS(in[4 * lane + 3]), scale, 3);                         \
        out[lane] = packed;                                                                          \
    }
NARROW_BYTES(fp8, f32, f32x2, SPLIT)
NARROW_BYTES(fp8, f16, f16x2, WHOLE)
NARROW_BYTES(fp8, bf16, bf16x2, WHOLE)
NARROW_BYTES(bf8, f32, f32x2, SPLIT)
NARROW_BYTES(bf8, f16, f16x2, WHOLE)
NARROW_BYTES(bf8, bf16, bf16x2, WHOLE)
NARROW_NIBBLES(f32, f32x2, SPLIT)
NARROW_NIBBLES(f16, f16x2, WHOLE)
NARROW_NIBBLES(bf16, bf16x2, WHOLE)

// ---- with a scale and a random operand
#define RANDOM_BYTES(NARROW, WIDE, T)                                                                \
    KERNEL random_##WIDE##_##NARROW(const T* in, const u32* noise, float scale, u32* out) {          \
        LANE;                                                                                        \
        u32 packed = 0;                                                                              \
        packed = CVT(sr_##NARROW##_##WIDE)(packed, in[4 * lane], noise[lane], scale, 0);             \
        packed = CVT(sr_##NARROW##_##WIDE)(packed, in[4 * lane + 1], noise[lane], scale, 1);         \
        packed = CVT(sr_##NARROW##_##WIDE)(packed, in[4 * lane + 2], noise[lane], scale, 2);         \
        packed = CVT(sr_##NARROW##_##WIDE)(packed, in[4 * lane + 3], noise[lane], scale, 3);         \
        out[lane] = packed;                                                                          \
    }
// clang 22 does not keep the other bytes of the destination, so each byte is taken from a conversion of its own.
#define RANDOM_NIBBLES(WIDE, PAIR)                                                                   \
    KERNEL random_##WIDE##_fp4(const PAIR* in, const u32* noise, float scale, u32* out) {            \
        LANE;                                                                                        \
        const u32 first = CVT(sr_pk_fp4_##WIDE)(0, in[4 * lane], noise[lane], scale, 0);             \
        const u32 second = CVT(sr_pk_fp4_##WIDE)(0, in[4 * lane + 1], noise[lane], scale, 1);        \
        const u32 third = CVT(sr_pk_fp4_##WIDE)(0, in[4 * lane + 2], noise[lane], scale, 2);         \
        const u32 fourth = CVT(sr_pk_fp4_##WIDE)(0, in[4 * lane + 3], noise[lane], scale, 3);        \
        out[lane] = (first & 0xFF) | (second & 0xFF00) | (third & 0xFF0000) | (fourth & 0xFF000000); \
    }
RANDOM_BYTES(fp8, f32, float)
RANDOM_BYTES(fp8, f16, f16)
RANDOM_BYTES(fp8, bf16, bf16)
RANDOM_BYTES(bf8, f32, float)
RANDOM_BYTES(bf8, f16, f16)
RANDOM_BYTES(bf8, bf16, bf16)
FOR_WIDE(RANDOM_NIBBLES)

// ---- 32 elements of six bits
#define SIX_BITS(NARROW, WIDE, PACK)                                                                 \
    KERNEL widen_##NARROW##_##WIDE(const u32x6* in, float scale, PACK* out) {                        \
        LANE;                                                                                        \
        out[lane] = CVT(pk32_##WIDE##_##NARROW)(in[lane], scale);                                    \
    }                                                                                                \
    KERNEL random_##WIDE##_##NARROW(const PACK* in, const u32* noise, float scale, u32x6* out) {     \
        LANE;                                                                                        \
        out[lane] = CVT(sr_pk32_##NARROW##_##WIDE)(in[lane], noise[lane], scale);                    \
    }
#define NARROW_SIX_BITS(NARROW, WIDE, PACK)                                                          \
    KERNEL narrow_##WIDE##_##NARROW(const PACK* in, float scale, u32x6* out) {                       \
        LANE;                                                                                        \
        out[lane] = CVT(pk32_##NARROW##_##WIDE)(in[lane], scale);                                    \
    }
// From f32 there is only the form that interleaves two packs of 16.
#define INTERLEAVED(NARROW)                                                                          \
    KERNEL interleaved_f32_##NARROW(const f32x16* in, float scale, u32x6* out) {                     \
        LANE;                                                                                        \
        out[lane] = CVT(2xpk16_##NARROW##_f32)(in[2 * lane], in[2 * lane + 1], scale);               \
    }
SIX_BITS(fp6, f32, f32x32)
SIX_BITS(fp6, f16, f16x32)
SIX_BITS(fp6, bf16, bf16x32)
SIX_BITS(bf6, f32, f32x32)
SIX_BITS(bf6, f16, f16x32)
SIX_BITS(bf6, bf16, bf16x32)
NARROW_SIX_BITS(fp6, f16, f16x32)
NARROW_SIX_BITS(fp6, bf16, bf16x32)
NARROW_SIX_BITS(bf6, f16, f16x32)
NARROW_SIX_BITS(bf6, bf16, bf16x32)
INTERLEAVED(fp6)
INTERLEAVED(bf6)

// ---- without a scale
#define PLAIN_BYTES(NARROW)                                                                          \
    KERNEL plain_f32_##NARROW(const float* in, u32* out) {                                           \
        LANE;                                                                                        \
        u32 packed = u32(__builtin_amdgcn_cvt_pk_##NARROW##_f32(in[4 * lane], in[4 * lane + 1], 0, false));                          \
        out[lane] = u32(__builtin_amdgcn_cvt_pk_##NARROW##_f32(in[4 * lane + 2], in[4 * lane + 3], int(packed), true));              \
    }                                                                                                \
    KERNEL plain_##NARROW##_f32(const int* in, f32x2* out) {                                         \
        LANE;                                                                                        \
        out[2 * lane] = __builtin_amdgcn_cvt_pk_f32_##NARROW(in[lane], false);                       \
        out[2 * lane + 1] = __builtin_amdgcn_cvt_pk_f32_##NARROW(in[lane], true);                    \
    }                                                                                                \
    KERNEL plain_single_##NARROW##_f32(const int* in, float* out) {                                  \
        LANE;                                                                                        \
        out[4 * lane] = __builtin_amdgcn_cvt_f32_##NARROW(in[lane], 0);                              \
        out[4 * lane + 1] = __builtin_amdgcn_cvt_f32_##NARROW(in[lane], 1);                          \
        out[4 * lane + 2] = __builtin_amdgcn_cvt_f32_##NARROW(in[lane], 2);                          \
        out[4 * lane + 3] = __builtin_amdgcn_cvt_f32_##NARROW(in[lane], 3);                          \
    }                                                                                                \
    KERNEL plain_random_f32_##NARROW(const float* in, const int* noise, u32* out) {                  \
        LANE;                                                                                        \
        int packed = 0;                                                                              \
        packed = __builtin_amdgcn_cvt_sr_##NARROW##_f32(in[4 * lane], noise[lane], packed, 0);       \
        packed = __builtin_amdgcn_cvt_sr_##NARROW##_f32(in[4 * lane + 1], noise[lane], packed, 1);   \
        packed = __builtin_amdgcn_cvt_sr_##NARROW##_f32(in[4 * lane + 2], noise[lane], packed, 2);   \
        packed = __builtin_amdgcn_cvt_sr_##NARROW##_f32(in[4 * lane + 3], noise[lane], packed, 3);   \
        out[lane] = u32(packed);                                                                     \
    }
PLAIN_BYTES(fp8)
PLAIN_BYTES(bf8)

KERNEL plain_f32_bf16(const f32x2* in, bf16x2* out) {
    LANE;
    out[lane] = __builtin_convertvector(in[lane], bf16x2);
}
KERNEL plain_f32_f16(const f32x2* in, f16x2* out) {
    LANE;
    out[lane] = __builtin_convertvector(in[lane], f16x2);
}
// Each is of one element of a register, so that the compiler neither packs nor shifts.
KERNEL plain_bf16_f32(const bf16* in, float* out) {
    LANE;
    float wide;
    asm("v_cvt_f32_bf16 %0, %1" : "=v"(wide) : "v"(u32(__builtin_bit_cast(u16, in[lane]))));
    out[lane] = wide;
}
KERNEL plain_random_f32_bf16(const float* in, const u32* noise, bf16x2* out) {
    LANE;
    bf16x2 packed = {};
    packed = __builtin_amdgcn_cvt_sr_bf16_f32(packed, in[2 * lane], noise[lane], false);
    out[lane] = __builtin_amdgcn_cvt_sr_bf16_f32(packed, in[2 * lane + 1], noise[lane], true);
}
KERNEL plain_random_f32_f16(const float* in, const u32* noise, f16x2* out) {
    LANE;
    f16x2 packed = {};
    packed = __builtin_amdgcn_cvt_sr_f16_f32(packed, in[2 * lane], noise[lane], false);
    out[lane] = __builtin_amdgcn_cvt_sr_f16_f32(packed, in[2 * lane + 1], noise[lane], true);
}

// ---- between the standard types
#define STANDARD(FROM, TO, SHORT_FROM, SHORT_TO)                          \
    KERNEL convert_##SHORT_FROM##_##SHORT_TO(const FROM* in, TO* out) {   \
        LANE;                                                             \
        out[lane] = TO(in[lane]);                                         \
    }
STANDARD(float, f16, f32, f16)
STANDARD(f16, float, f16, f32)
STANDARD(float, double, f32, f64)
STANDARD(double, float, f64, f32)
STANDARD(int, float, i32, f32)
STANDARD(u32, float, u32, f32)
STANDARD(float, int, f32, i32)
STANDARD(float, u32, f32, u32)
STANDARD(int, double, i32, f64)
STANDARD(u32, double, u32, f64)
STANDARD(double, int, f64, i32)
STANDARD(double, u32, f64, u32)
STANDARD(short, f16, i16, f16)
STANDARD(u16, f16, u16, f16)
STANDARD(f16, short, f16, i16)
STANDARD(f16, u16, f16, u16)
KERNEL convert_u8_f32(const u32* in, float* out) {
    LANE;
    const u32 four = in[lane];
    out[4 * lane] = float(four & 0xFF);
    out[4 * lane + 1] = float(four >> 8 & 0xFF);
    out[4 * lane + 2] = float(four >> 16 & 0xFF);
    out[4 * lane + 3] = float(four >> 24);
}

// ---- the rest: packs with a rounding or a range of their own, and roundings that C++ has no operator for
KERNEL pack_toward_zero_f16(const f32x2* in, vec<__fp16, 2>* out) {
    LANE;
    out[lane] = __builtin_amdgcn_cvt_pkrtz(in[lane][0], in[lane][1]);
}
KERNEL pack_normalized_i16(const f32x2* in, s16x2* out) {
    LANE;
    out[lane] = __builtin_amdgcn_cvt_pknorm_i16(in[lane][0], in[lane][1]);
}
KERNEL pack_normalized_u16(const f32x2* in, vec<u16, 2>* out) {
    LANE;
    out[lane] = __builtin_amdgcn_cvt_pknorm_u16(in[lane][0], in[lane][1]);
}
KERNEL pack_bytes_u8(const float* in, u32* out) {
    LANE;
    u32 packed = 0;
    for (u32 i = 0; i < 4; ++i) packed = __builtin_amdgcn_cvt_pk_u8_f32(in[4 * lane + i], i, packed);
    out[lane] = packed;
}
#define INSTRUCTION(NAME, MNEMONIC, FROM, TO)                                 \
    KERNEL NAME(const FROM* in, TO* out) {                                    \
        LANE;                                                                 \
        TO result;                                                            \
        asm(MNEMONIC " %0, %1" : "=v"(result) : "v"(in[lane]));               \
        out[lane] = result;                                                   \
    }
#define INSTRUCTION2(NAME, MNEMONIC, PAIR, TO)                                \
    KERNEL NAME(const PAIR* in, TO* out) {                                    \
        LANE;                                                                 \
        TO result;                                                            \
        asm(MNEMONIC " %0, %1, %2" : "=v"(result) : "v"(in[lane][0]), "v"(in[lane][1])); \
        out[lane] = result;                                                   \
    }
INSTRUCTION(round_down_i32, "v_cvt_flr_i32_f32", float, int)
INSTRUCTION(round_half_up_i32, "v_cvt_rpi_i32_f32", float, int)
INSTRUCTION(sixteenths_f32, "v_cvt_off_f32_i4", u32, float)
INSTRUCTION2(pack_normalized_halves_i16, "v_cvt_pknorm_i16_f16", f16x2, s16x2)
INSTRUCTION2(pack_normalized_halves_u16, "v_cvt_pknorm_u16_f16", f16x2, s16x2)
