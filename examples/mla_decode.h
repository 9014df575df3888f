/* The decode kernels' arguments (docs/embedding.md). Written by scripts/write_embedding.py from mla_decode.co; do not edit. */
#ifndef MLA_DECODE_H
#define MLA_DECODE_H
#include <stddef.h>
#include <stdint.h>

#define MLA_DECODE_BLOCK_SIZE 256
#define MLA_DECODE_ARGUMENT_BYTES 128
#define MLA_DECODE_WORK_WORDS 8
#define MLA_DECODE_QK_WIDTH 576
#define MLA_DECODE_KV_LORA_RANK 512

/* Of each cache format, the kernel with the fewest query rows a workgroup, which serves any batch. */
#define MLA_DECODE_BF16 "mla_decode_bf16_narrow"
#define MLA_DECODE_BF16_ROWS 16
#define MLA_DECODE_FP8_E4M3FN "mla_decode_fp8_e4m3fn_narrow"
#define MLA_DECODE_FP8_E4M3FN_ROWS 16
#define MLA_DECODE_MXFP4 "mla_decode_mxfp4_narrow"
#define MLA_DECODE_MXFP4_ROWS 16

struct mla_decode_arguments {
  const int32_t *work;             /* [num_work, 8]: see work_list.py */
  const int32_t *qo_indptr;        /* [batch + 1] */
  const int32_t *kv_indptr;        /* [batch + 1], in pages */
  const int32_t *kv_last_page_len; /* [batch], 1 .. page_size */
  const int32_t *kv_indices;       /* [kv_indptr[batch]] physical pages */
  const uint16_t *q;               /* [total_q, num_heads, 576] */
  const uint8_t *kv;               /* [num_pages, page_size, Format::ROW_BYTES] */
  uint32_t *arrivals;              /* [num_counters], 0 before and after; null if nothing is split */
  uint16_t *out;                   /* [total_q, num_heads, 512] */
  float *lse;                      /* [total_q, num_heads], natural log */
  float *partial_out;              /* [num_partials, TILE_ROWS, 512]; null if nothing is split */
  float *partial_lse;              /* [num_partials, TILE_ROWS]; null if nothing is split */
  int32_t num_heads;
  int32_t page_size_log2;
  int32_t causal;
  float sm_scale;
  float kv_scale;
  const uint8_t *kv_scales;        /* [num_pages, page_size, 18] E8M0; null unless mxfp4 */
};
_Static_assert(offsetof(struct mla_decode_arguments, work) == 0, "work");
_Static_assert(offsetof(struct mla_decode_arguments, qo_indptr) == 8, "qo_indptr");
_Static_assert(offsetof(struct mla_decode_arguments, kv_indptr) == 16, "kv_indptr");
_Static_assert(offsetof(struct mla_decode_arguments, kv_last_page_len) == 24, "kv_last_page_len");
_Static_assert(offsetof(struct mla_decode_arguments, kv_indices) == 32, "kv_indices");
_Static_assert(offsetof(struct mla_decode_arguments, q) == 40, "q");
_Static_assert(offsetof(struct mla_decode_arguments, kv) == 48, "kv");
_Static_assert(offsetof(struct mla_decode_arguments, arrivals) == 56, "arrivals");
_Static_assert(offsetof(struct mla_decode_arguments, out) == 64, "out");
_Static_assert(offsetof(struct mla_decode_arguments, lse) == 72, "lse");
_Static_assert(offsetof(struct mla_decode_arguments, partial_out) == 80, "partial_out");
_Static_assert(offsetof(struct mla_decode_arguments, partial_lse) == 88, "partial_lse");
_Static_assert(offsetof(struct mla_decode_arguments, num_heads) == 96, "num_heads");
_Static_assert(offsetof(struct mla_decode_arguments, page_size_log2) == 100, "page_size_log2");
_Static_assert(offsetof(struct mla_decode_arguments, causal) == 104, "causal");
_Static_assert(offsetof(struct mla_decode_arguments, sm_scale) == 108, "sm_scale");
_Static_assert(offsetof(struct mla_decode_arguments, kv_scale) == 112, "kv_scale");
_Static_assert(offsetof(struct mla_decode_arguments, kv_scales) == 120, "kv_scales");
#endif
