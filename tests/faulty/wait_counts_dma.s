; Moves 64 dwords one lane down, with an LDS-DMA in between. Faulty: takes it that the DMA counts in lgkmcnt, as clang 22.1 does.
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
v_add_u32 v2, 4, v1
s_mov_b32 m0, 0
s_waitcnt lgkmcnt(0)
global_load_dword v3, v1, s[4:5]
s_waitcnt vmcnt(0)
ds_bpermute_b32 v4, v2, v3
global_load_lds_dword v1, s[4:5]
.if FAULTY
s_waitcnt lgkmcnt(1)
.else
s_waitcnt lgkmcnt(0)
.endif
global_store_dword v1, v4, s[4:5]
s_endpgm
