; Reverses 64 dwords through LDS. Faulty: of the two reads, the wait covers only the first, which is not the one that is used.
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
v_sub_u32 v2, 252, v1
s_waitcnt lgkmcnt(0)
global_load_dword v3, v1, s[4:5]
s_waitcnt vmcnt(0)
ds_write_b32 v1, v3
s_waitcnt lgkmcnt(0)
ds_read_b32 v5, v1
ds_read_b32 v4, v2
.if FAULTY
s_waitcnt lgkmcnt(1)
.else
s_waitcnt lgkmcnt(0)
.endif
global_store_dword v1, v4, s[4:5]
s_endpgm
