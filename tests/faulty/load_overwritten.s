; Stores 7 to 64 dwords, after a load into the same register. Faulty: the load may come back after the 7 was written, and replace it.
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
s_waitcnt lgkmcnt(0)
global_load_dword v2, v1, s[4:5]
.if !FAULTY
s_waitcnt vmcnt(0)
.endif
v_mov_b32 v2, 7
s_waitcnt vmcnt(0)
global_store_dword v1, v2, s[4:5]
s_endpgm
