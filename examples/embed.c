/* Decode from C, without Python: the program loads the code object itself and launches the kernel as docs/embedding.md says.
 *
 *   cc -std=c11 -D__HIP_PLATFORM_AMD__ -I/opt/rocm/include embed.c -o embed -L/opt/rocm/lib -lamdhip64
 *   ./embed mla_decode.co FOLDER NUM_HEADS PAGE_SIZE SM_SCALE SPLITS
 *
 * FOLDER holds a batch in files of nothing but elements: q.bin and kv.bin (bfloat16), qo_indptr.bin, kv_indptr.bin, kv_indices.bin and
 * kv_last_page_len.bin (int32). out.bin (bfloat16) and lse.bin (float) are written there. SPLITS: 1 to 4 parts that the tokens of a request are cut
 * into, which are decoded side by side. The batch is taken as it is: where a wrong one reads or writes is not checked. */
#include <hip/hip_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mla_decode.h"

enum { ROWS = MLA_DECODE_BF16_ROWS, WORDS = MLA_DECODE_WORK_WORDS, RANK = MLA_DECODE_KV_LORA_RANK, MAX_SPLITS = 4 };

static void check(hipError_t error, const char *call) {
  if (error == hipSuccess) return;
  fprintf(stderr, "embed: %s: %s\n", call, hipGetErrorString(error));
  exit(1);
}
#define CHECK(call) check(call, #call)

static FILE *open_file(const char *folder, const char *name, const char *mode) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.bin", folder, name);
  FILE *file = fopen(path, mode);
  if (file) return file;
  perror(path);
  exit(1);
}

/* A file's bytes. */
static void *read_file(const char *folder, const char *name, size_t *bytes) {
  FILE *file = open_file(folder, name, "rb");
  fseek(file, 0, SEEK_END);
  *bytes = (size_t)ftell(file);
  rewind(file);
  void *data = malloc(*bytes + 1);
  if (!data || fread(data, 1, *bytes, file) != *bytes) {
    fprintf(stderr, "embed: cannot read %s/%s.bin\n", folder, name);
    exit(1);
  }
  fclose(file);
  return data;
}

static void *to_device(const void *data, size_t bytes) {
  void *address = NULL;
  if (bytes) {
    CHECK(hipMalloc(&address, bytes));
    CHECK(hipMemcpy(address, data, bytes, hipMemcpyHostToDevice));
  }
  return address;
}

/* A file's bytes on the device. */
static void *upload(const char *folder, const char *name) {
  size_t bytes;
  void *data = read_file(folder, name, &bytes), *address = to_device(data, bytes);
  free(data);
  return address;
}

static void *allocate(size_t bytes) {
  void *address = NULL;
  if (bytes) CHECK(hipMalloc(&address, bytes));
  return address;
}

static void download(const char *folder, const char *name, const void *address, size_t bytes) {
  void *data = malloc(bytes + 1);
  if (bytes) CHECK(hipMemcpy(data, address, bytes, hipMemcpyDeviceToHost));
  FILE *file = open_file(folder, name, "wb");
  if (fwrite(data, 1, bytes, file) != bytes || fclose(file)) {
    fprintf(stderr, "embed: cannot write %s/%s.bin\n", folder, name);
    exit(1);
  }
  free(data);
}

struct work_list {
  int32_t *items; /* [count, WORDS] */
  int count, counters, partials;
};

static struct work_list make_work_list(const int32_t *qo_indptr, const int32_t *kv_indptr, const int32_t *kv_last_page_len, int requests,
                                       int num_heads, int page_size, int max_splits) {
  struct work_list list = {NULL, 0, 0, 0};
  for (int request = 0; request < requests; request++) {
    int rows = (qo_indptr[request + 1] - qo_indptr[request]) * num_heads, pages = kv_indptr[request + 1] - kv_indptr[request];
    int tokens = pages ? (pages - 1) * page_size + kv_last_page_len[request] : 0;
    int splits = tokens < max_splits ? tokens : max_splits; /* none may be empty, */
    if (!splits) splits = 1;                                /* but for a request without tokens, which has one */
    for (int row = 0; row < rows; row += ROWS) {
      list.items = realloc(list.items, sizeof(int32_t) * WORDS * (size_t)(list.count + splits));
      for (int split = 0; split < splits; split++) {
        const int32_t item[WORDS] = {
            request,
            row,
            (int32_t)((int64_t)tokens * split / splits),       /* first token, */
            (int32_t)((int64_t)tokens * (split + 1) / splits), /* and the one behind the last */
            splits > 1 ? list.counters : -1,                   /* of arrivals */
            splits > 1 ? list.partials : 0,                    /* first slot of this row tile's partial results */
            split,
            splits,
        };
        memcpy(list.items + WORDS * list.count++, item, sizeof item);
      }
      if (splits > 1) list.counters += 1, list.partials += splits;
    }
  }
  return list;
}

int main(int argc, char **argv) {
  if (argc != 7) {
    fprintf(stderr, "usage: %s mla_decode.co FOLDER NUM_HEADS PAGE_SIZE SM_SCALE SPLITS\n", argv[0]);
    return 2;
  }
  const char *code_object = argv[1], *folder = argv[2];
  const int num_heads = atoi(argv[3]), page_size = atoi(argv[4]), splits = atoi(argv[6]);
  if (num_heads < 1 || num_heads > 128 || page_size < 1 || page_size > 128 || page_size & (page_size - 1) || splits < 1 || splits > MAX_SPLITS) {
    fprintf(stderr, "embed: 1 to 128 heads, pages of 1, 2, 4, … 128 tokens, 1 to %d splits\n", MAX_SPLITS);
    return 2;
  }
  int devices = 0;
  CHECK(hipGetDeviceCount(&devices));
  if (!devices) {
    fprintf(stderr, "embed: no GPU\n");
    return 1;
  }

  size_t bytes;
  int32_t *qo_indptr = read_file(folder, "qo_indptr", &bytes), *kv_indptr = read_file(folder, "kv_indptr", &bytes);
  int32_t *kv_last_page_len = read_file(folder, "kv_last_page_len", &bytes);
  const int requests = (int)(bytes / sizeof(int32_t));
  struct work_list list = make_work_list(qo_indptr, kv_indptr, kv_last_page_len, requests, num_heads, page_size, splits);
  const size_t rows = (size_t)qo_indptr[requests] * (size_t)num_heads;
  const size_t out_bytes = rows * RANK * sizeof(uint16_t), lse_bytes = rows * sizeof(float), partial_rows = (size_t)list.partials * ROWS;
  uint32_t *no_arrivals = calloc((size_t)list.counters + 1, sizeof(uint32_t));

  hipModule_t module;
  hipFunction_t kernel;
  CHECK(hipModuleLoad(&module, code_object));
  CHECK(hipModuleGetFunction(&kernel, module, MLA_DECODE_BF16));

  /* By the fields' names, so that a newer header may order them otherwise. What is not named is null. */
  struct mla_decode_arguments arguments = {
      .q = upload(folder, "q"),
      .kv = upload(folder, "kv"),
      .qo_indptr = to_device(qo_indptr, sizeof(int32_t) * (size_t)(requests + 1)),
      .kv_indptr = to_device(kv_indptr, sizeof(int32_t) * (size_t)(requests + 1)),
      .kv_indices = upload(folder, "kv_indices"),
      .kv_last_page_len = to_device(kv_last_page_len, sizeof(int32_t) * (size_t)requests),
      .work = to_device(list.items, sizeof(int32_t) * WORDS * (size_t)list.count),
      .out = allocate(out_bytes),
      .lse = allocate(lse_bytes),
      .partial_out = allocate(partial_rows * RANK * sizeof(float)),
      .partial_lse = allocate(partial_rows * sizeof(float)),
      .arrivals = to_device(no_arrivals, (size_t)list.counters * sizeof(uint32_t)),
      .num_heads = num_heads,
      .page_size_log2 = __builtin_ctz((unsigned)page_size),
      .causal = 1,
      .sm_scale = strtof(argv[5], NULL),
      .kv_scale = 1.0f,
  };
  size_t argument_bytes = MLA_DECODE_ARGUMENT_BYTES;
  void *extra[] = {HIP_LAUNCH_PARAM_BUFFER_POINTER, &arguments, HIP_LAUNCH_PARAM_BUFFER_SIZE, &argument_bytes, HIP_LAUNCH_PARAM_END};
  if (list.count) /* a launch of nothing is an error */
    CHECK(hipModuleLaunchKernel(kernel, (unsigned)list.count, 1, 1, MLA_DECODE_BLOCK_SIZE, 1, 1, 0, NULL, NULL, extra));
  CHECK(hipDeviceSynchronize());

  download(folder, "out", arguments.out, out_bytes);
  download(folder, "lse", arguments.lse, lse_bytes);
  printf("%d requests, %zu query rows, %d workgroups\n", requests, rows, list.count);
  void *memory[] = {(void *)arguments.q,          (void *)arguments.kv,               (void *)arguments.qo_indptr, (void *)arguments.kv_indptr,
                    (void *)arguments.kv_indices, (void *)arguments.kv_last_page_len, (void *)arguments.work,      arguments.out,
                    arguments.lse,                arguments.partial_out,              arguments.partial_lse,       arguments.arrivals};
  for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) CHECK(hipFree(memory[i]));
  CHECK(hipModuleUnload(module));
  free(list.items), free(no_arrivals), free(qo_indptr), free(kv_indptr), free(kv_last_page_len);
  return 0;
}
