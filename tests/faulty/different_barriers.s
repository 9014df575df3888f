; Two waves. Faulty: each waits at a barrier of its own.
v_readfirstlane_b32 s6, v0
s_cmp_lt_u32 s6, 64
.if FAULTY
s_cbranch_scc0 second
s_barrier
s_endpgm
second:
.endif
s_barrier
s_endpgm
