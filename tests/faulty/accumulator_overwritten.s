; A product of zeros accumulates on v[8:11], into v[12:15]. Faulty: the accumulator is overwritten while the matrix core still reads it.
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
.irp register, 4, 5, 6, 7, 8, 9, 10, 11
v_mov_b32 v\register, 0
.endr
s_nop 1
v_mfma_f32_16x16x32_bf16 v[12:15], v[4:7], v[4:7], v[8:11]
.if FAULTY
s_nop 1
.else
s_nop 2
.endif
v_mov_b32 v8, 7
s_waitcnt lgkmcnt(0)
s_nop 7
global_store_dword v1, v12, s[4:5]
s_endpgm
