; Two waves; the second stores what the first has left in LDS. Faulty: without a barrier between the two it depends on who comes first.
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_readfirstlane_b32 s6, v0
v_mov_b32 v1, 0
s_cmp_lt_u32 s6, 64
s_cbranch_scc0 join
v_mov_b32 v2, 7
ds_write_b32 v1, v2
s_waitcnt lgkmcnt(0)
join:
.if !FAULTY
s_barrier
.endif
s_cbranch_scc1 end
ds_read_b32 v2, v1
s_waitcnt lgkmcnt(0)
global_store_dword v1, v2, s[4:5]
end:
s_endpgm
