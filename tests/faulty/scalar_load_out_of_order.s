; Stores the second kernel argument to 64 dwords. Faulty: scalar loads come back in any order, so lgkmcnt(1) covers neither of two.
s_load_dwordx2 s[4:5], s[0:1], 0x0
s_load_dword s6, s[0:1], 0x8
v_lshlrev_b32 v1, 2, v0
.if FAULTY
s_waitcnt lgkmcnt(1)
.else
s_waitcnt lgkmcnt(0)
.endif
v_mov_b32 v2, s6
s_waitcnt lgkmcnt(0)
global_store_dword v1, v2, s[4:5]
s_endpgm
