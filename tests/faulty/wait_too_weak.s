; Adds the dwords 0..63 and 64..127, the sum replaces 0..63. Faulty: waits for the first of the two loads only.
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
s_waitcnt lgkmcnt(0)
global_load_dword v2, v1, s[4:5]
global_load_dword v3, v1, s[4:5] offset:256
.if FAULTY
s_waitcnt vmcnt(1)
.else
s_waitcnt vmcnt(0)
.endif
v_add_u32 v2, v2, v3
global_store_dword v1, v2, s[4:5]
s_endpgm
