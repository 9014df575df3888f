// Transposes through LDS, one for each transposed read: a matrix of R rows of 16 elements goes in, its transpose comes out.
// Each group of 16 lanes takes the R / 4 rows that its own reads cover.
typedef unsigned char u8;
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
#define LDS __attribute__((address_space(3)))

// in: 64 lanes times the bytes of T; out: [16 columns][4 lane groups] of T, which is the transpose, row after row.
#define TRANSPOSE(NAME, BUILTIN, T)                                                                     \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64))) void NAME(const T* in, T* out) { \
        __attribute__((shared)) static T tile[64];                                                      \
        const int lane = __builtin_amdgcn_workitem_id_x();                                              \
        tile[lane] = in[lane];                                                                          \
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");                                          \
        __builtin_amdgcn_s_waitcnt(0xc07f); /* lgkmcnt(0) */                                            \
        __builtin_amdgcn_wave_barrier();                                                                \
        out[4 * (lane % 16) + lane / 16] = BUILTIN((LDS T*)&tile[lane]);                                \
    }

using i32x2 = vec<int, 2>;
using s16x4 = vec<short, 4>;
struct i32x3_packed { int words[3]; };

TRANSPOSE(transpose_b4, __builtin_amdgcn_ds_read_tr4_b64_v2i32, i32x2)
TRANSPOSE(transpose_b8, __builtin_amdgcn_ds_read_tr8_b64_v2i32, i32x2)
TRANSPOSE(transpose_b16, __builtin_amdgcn_ds_read_tr16_b64_v4i16, s16x4)

// 12 bytes a lane: a vector of three has 16, so it is moved word by word.
extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64))) void transpose_b6(const i32x3_packed* in, i32x3_packed* out) {
    __attribute__((shared)) static i32x3_packed tile[64];
    const int lane = __builtin_amdgcn_workitem_id_x();
    tile[lane] = in[lane];
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_waitcnt(0xc07f);  // lgkmcnt(0)
    __builtin_amdgcn_wave_barrier();
    const vec<int, 3> column = __builtin_amdgcn_ds_read_tr6_b96_v3i32((LDS vec<int, 3>*)&tile[lane]);
    out[4 * (lane % 16) + lane / 16] = {{column[0], column[1], column[2]}};
}
