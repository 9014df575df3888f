; Doubles 64 dwords in place. Faulty: uses the loaded value without waiting for it.
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
s_waitcnt lgkmcnt(0)
global_load_dword v2, v1, s[4:5]
.if FAULTY
s_nop 7
.else
s_waitcnt vmcnt(0)
.endif
v_add_u32 v2, v2, v2
global_store_dword v1, v2, s[4:5]
s_endpgm
