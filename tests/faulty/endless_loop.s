; Counts to 10. Faulty: the counter never gets there.
s_mov_b32 s6, 0
again:
.if !FAULTY
s_add_u32 s6, s6, 1
.endif
s_cmp_lt_u32 s6, 10
s_cbranch_scc1 again
s_endpgm
