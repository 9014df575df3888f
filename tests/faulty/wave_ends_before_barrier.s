; Two waves. Faulty: the second ends where the first waits for it.
v_readfirstlane_b32 s6, v0
s_cmp_lt_u32 s6, 64
.if FAULTY
s_cbranch_scc0 end
.endif
s_barrier
end:
s_endpgm
