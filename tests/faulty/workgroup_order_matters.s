; Each workgroup stores its number. Faulty: all of them to one dword, so that it holds the number of the last.
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_mov_b32 v1, 0
.if !FAULTY
s_lshl_b32 s6, s2, 2
v_mov_b32 v1, s6
.endif
v_mov_b32 v2, s2
s_waitcnt lgkmcnt(0)
global_store_dword v1, v2, s[4:5]
s_endpgm
