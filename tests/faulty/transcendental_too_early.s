; Stores 2 ** lane + 1. Faulty: the result of v_exp_f32 needs a wait state before another kind of vector instruction reads it.
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
v_cvt_f32_u32 v2, v0
v_exp_f32 v2, v2
.if !FAULTY
s_nop 0
.endif
v_add_f32 v2, 1.0, v2
s_waitcnt lgkmcnt(0)
global_store_dword v1, v2, s[4:5]
s_endpgm
