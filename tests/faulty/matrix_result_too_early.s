; Stores the first register of a product of zeros. Faulty: a matrix instruction of 4 passes needs 8 wait states before its result is read.
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
v_mov_b32 v4, 0
v_mov_b32 v5, 0
v_mov_b32 v6, 0
v_mov_b32 v7, 0
s_nop 1
v_mfma_f32_16x16x32_bf16 v[8:11], v[4:7], v[4:7], 0
.if FAULTY
s_nop 5
.else
s_nop 6
.endif
s_waitcnt lgkmcnt(0)
global_store_dword v1, v8, s[4:5]
s_endpgm
