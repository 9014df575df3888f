/* A stand-in for the HIP runtime, for tests: memory, streams, events, modules and launches, as far as mla_rt/hip_device.py uses them.
 *
 * Device memory and kernels are those of the emulator: allocation, module loading and launches call back into Python (library.py). A device
 * address is the host's address of the same byte, so copies are memcpy, after a check that they stay inside one live allocation.
 *
 * Work given to a stream runs as late as HIP allows: at a wait, or when later work is ordered after it. So a missing wait, an event that was
 * not waited for, or the default stream used in place of the one given shows as old data, every time.
 *
 * Called from one thread. Streams and events are never freed, for queued work may still name them. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

/* Values of hipError_t, hipMemcpyKind, hipDeviceAttribute_t and the launch parameter tags, from hip_runtime_api.h of ROCm 6 and later. */
enum {
  hipSuccess = 0, hipErrorInvalidValue = 1, hipErrorOutOfMemory = 2, hipErrorInvalidConfiguration = 9, hipErrorInvalidDevice = 101,
  hipErrorNoBinaryForGpu = 209, hipErrorInvalidHandle = 400, hipErrorNotFound = 500, hipErrorNotReady = 600, hipErrorLaunchFailure = 719,
};
enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3 };
enum { ATTRIBUTE_COMPUTE_UNITS = 63, ATTRIBUTE_LDS_BYTES = 74 };
enum { LAUNCH_BUFFER_POINTER = 1, LAUNCH_BUFFER_SIZE = 2, LAUNCH_END = 3 };
/* Offset in hipDeviceProp_tR0600; the name is its first member. */
enum { OFFSET_GCN_ARCH_NAME = 1160, NAME_BYTES = 256 };

typedef int hipError_t;

/* What library.py brings. Each function returns a hipError_t. A module's handle is the address of its image. */
struct backend {
  const char *name, *arch;
  int compute_units, lds_bytes;
  hipError_t (*allocate)(size_t bytes, uint64_t *address);
  hipError_t (*release)(uint64_t address);
  hipError_t (*load)(const void *image, size_t bytes, uint64_t *module, size_t *loaded_bytes);
  hipError_t (*unload)(uint64_t module);
  hipError_t (*function)(uint64_t module, const char *name, uint64_t *function, uint32_t *kernarg_bytes, uint32_t *block_size);
  hipError_t (*global_)(uint64_t module, const char *name, uint64_t *address, size_t *bytes);
  hipError_t (*launch)(uint64_t function, uint32_t x, uint32_t y, uint32_t z, uint32_t block, uint32_t lds_bytes, const void *kernarg, size_t bytes);
};
static struct backend backend;
static int device_count;

/* ---- calls: counted by name, failed on request ---- */

struct call { char name[64]; unsigned long count; hipError_t fail; struct call *next; };
static struct call *calls;

static struct call *call_named(const char *name) {
  struct call *call = calls;
  while (call && strcmp(call->name, name)) call = call->next;
  if (!call) {
    call = calloc(1, sizeof *call);
    strncpy(call->name, name, sizeof call->name - 1);
    call->next = calls;
    calls = call;
  }
  return call;
}

static hipError_t enter(const char *name) {
  struct call *call = call_named(name);
  hipError_t fail = call->fail;
  call->count++;
  call->fail = hipSuccess;
  return fail;
}
#define ENTER() do { hipError_t failed = enter(__func__); if (failed) return failed; } while (0)

EXPORT unsigned long shim_count(const char *name) { return call_named(name)->count; }
EXPORT void shim_fail_next(const char *name, hipError_t error) { call_named(name)->fail = error; }
EXPORT void shim_set_backend(const struct backend *given) { backend = *given; }
EXPORT void shim_set_device_count(int count) { device_count = count; }

/* ---- memory: which addresses are live ---- */

struct range { uintptr_t start; size_t bytes; int pinned; struct range *next; };
static struct range *ranges;

static void add_range(uintptr_t start, size_t bytes, int pinned) {
  struct range *range = malloc(sizeof *range);
  *range = (struct range){start, bytes, pinned, ranges};
  ranges = range;
}

static int remove_range(const void *address, int pinned) {
  for (struct range **link = &ranges; *link; link = &(*link)->next) {
    struct range *range = *link;
    if (range->start == (uintptr_t)address && range->pinned == pinned) {
      *link = range->next;
      free(range);
      return 1;
    }
  }
  return 0;
}

/* The live range that overlaps [address, address + bytes), or NULL. */
static struct range *overlapping(const void *address, size_t bytes) {
  uintptr_t start = (uintptr_t)address;
  for (struct range *range = ranges; range; range = range->next)
    if (start < range->start + range->bytes && range->start < start + bytes) return range;
  return NULL;
}

static int is_inside(struct range *range, const void *address, size_t bytes, int pinned) {
  uintptr_t start = (uintptr_t)address;
  return range && range->pinned == pinned && start >= range->start && bytes <= range->bytes && start - range->start <= range->bytes - bytes;
}

static int is_device(const void *address, size_t bytes) { return is_inside(overlapping(address, bytes), address, bytes, 0); }
static int is_pinned(const void *address, size_t bytes) { return is_inside(overlapping(address, bytes), address, bytes, 1); }
static int is_host(const void *address, size_t bytes) { return address && (!overlapping(address, bytes) || is_pinned(address, bytes)); }

/* ---- streams: queues of operations ---- */

struct stream;
struct event { struct event *next; int live; struct stream *stream; uint64_t recorded, reached; double seconds; };
struct function { struct function *next; uint64_t id; uint32_t kernarg_bytes, block_size; };

struct operation {
  struct operation *next;
  uint64_t number; /* position in the order in which all work was given; 0 is before all */
  enum { COPY, FILL, LAUNCH, RECORD, WAIT } kind;
  void *to;
  const void *from; /* for LAUNCH, the kernarg bytes, owned */
  size_t bytes;
  int byte;
  uint64_t function;
  uint32_t grid[3], block, lds_bytes;
  struct event *event;
  struct stream *other; /* for WAIT: where the event was recorded, and as which operation */
  uint64_t until;
};

struct stream { struct stream *next; int live; struct operation *head, **tail; };
static struct stream *streams;
static struct stream default_stream = {NULL, 1, NULL, &default_stream.head};
static struct event *events;
static uint64_t last_number;
static hipError_t failed_work; /* the first failure of work that ran, until a wait reports it */

static hipError_t execute(struct operation *op) {
  switch (op->kind) {
  case COPY: memmove(op->to, op->from, op->bytes); return hipSuccess;
  case FILL: memset(op->to, op->byte, op->bytes); return hipSuccess;
  case LAUNCH: return backend.launch(op->function, op->grid[0], op->grid[1], op->grid[2], op->block, op->lds_bytes, op->from, op->bytes);
  case RECORD: {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    op->event->seconds = now.tv_sec + now.tv_nsec * 1e-9;
    op->event->reached = op->number;
    return hipSuccess;
  }
  case WAIT: return hipSuccess;
  }
  return hipSuccess;
}

static void discard_head(struct stream *stream) {
  struct operation *op = stream->head;
  stream->head = op->next;
  if (!stream->head) stream->tail = &stream->head;
  if (op->kind == LAUNCH) free((void *)op->from);
  free(op);
}

/* Run the stream's operations numbered up to `last`, and before each what it is ordered after: for the default stream all earlier work, for
 * the others the default stream's earlier work. The recursion ends because it asks for ever smaller numbers. */
static void run_until(struct stream *stream, uint64_t last) {
  while (stream->head && stream->head->number <= last) {
    struct operation *op = stream->head;
    if (stream == &default_stream)
      for (struct stream *other = streams; other; other = other->next) run_until(other, op->number - 1);
    else
      run_until(&default_stream, op->number - 1);
    if (op->kind == WAIT) run_until(op->other, op->until);
    hipError_t error = execute(op);
    if (error && !failed_work) failed_work = error;
    discard_head(stream);
  }
}

static void run_all(void) {
  for (struct stream *stream = streams; stream; stream = stream->next) run_until(stream, last_number);
  run_until(&default_stream, last_number);
}

static hipError_t report_failed_work(void) {
  hipError_t error = failed_work;
  failed_work = hipSuccess;
  return error;
}

/* Append to the stream; the operation's number is returned. */
static uint64_t give(struct stream *stream, struct operation given) {
  struct operation *op = malloc(sizeof *op);
  *op = given;
  op->next = NULL;
  op->number = ++last_number;
  *stream->tail = op;
  stream->tail = &op->next;
  return op->number;
}

/* The queue that a handle names; NULL if none. */
static struct stream *stream_of(void *handle) {
  if (!handle) return &default_stream;
  for (struct stream *stream = streams; stream; stream = stream->next)
    if (stream == handle && stream->live) return stream;
  return NULL;
}

static struct event *event_of(void *handle) {
  for (struct event *event = events; event; event = event->next)
    if (event == handle && event->live) return event;
  return NULL;
}

/* How many operations wait to run. */
EXPORT int shim_pending(void) {
  int count = 0;
  for (struct operation *op = default_stream.head; op; op = op->next) count++;
  for (struct stream *stream = streams; stream; stream = stream->next)
    for (struct operation *op = stream->head; op; op = op->next) count++;
  return count;
}

/* Forget queued work, failures and injected errors, so that a failed test leaves nothing to the next. */
EXPORT void shim_reset(void) {
  while (default_stream.head) discard_head(&default_stream);
  for (struct stream *stream = streams; stream; stream = stream->next)
    while (stream->head) discard_head(stream);
  for (struct call *call = calls; call; call = call->next) call->fail = hipSuccess;
  failed_work = hipSuccess;
}

/* ---- the HIP functions ---- */

EXPORT const char *hipGetErrorName(hipError_t error) {
  switch (error) {
  case hipSuccess: return "hipSuccess";
  case hipErrorInvalidValue: return "hipErrorInvalidValue";
  case hipErrorOutOfMemory: return "hipErrorOutOfMemory";
  case hipErrorInvalidConfiguration: return "hipErrorInvalidConfiguration";
  case hipErrorInvalidDevice: return "hipErrorInvalidDevice";
  case hipErrorNoBinaryForGpu: return "hipErrorNoBinaryForGpu";
  case hipErrorInvalidHandle: return "hipErrorInvalidHandle";
  case hipErrorNotFound: return "hipErrorNotFound";
  case hipErrorNotReady: return "hipErrorNotReady";
  case hipErrorLaunchFailure: return "hipErrorLaunchFailure";
  default: return "hipErrorUnknown";
  }
}

EXPORT const char *hipGetErrorString(hipError_t error) {
  switch (error) {
  case hipErrorInvalidValue: return "invalid argument";
  case hipErrorOutOfMemory: return "out of memory";
  case hipErrorInvalidConfiguration: return "invalid configuration argument";
  case hipErrorInvalidDevice: return "invalid device ordinal";
  case hipErrorNoBinaryForGpu: return "no kernel image is available for execution on the device";
  case hipErrorInvalidHandle: return "invalid resource handle";
  case hipErrorNotFound: return "named symbol not found";
  case hipErrorNotReady: return "device not ready";
  case hipErrorLaunchFailure: return "unspecified launch failure";
  default: return hipGetErrorName(error);
  }
}

EXPORT hipError_t hipGetDeviceCount(int *count) {
  ENTER();
  *count = device_count;
  return hipSuccess;
}

EXPORT hipError_t hipGetDevicePropertiesR0600(void *properties, int device) {
  ENTER();
  if (device < 0 || device >= device_count) return hipErrorInvalidDevice;
  strncpy(properties, backend.name, NAME_BYTES - 1);
  strncpy((char *)properties + OFFSET_GCN_ARCH_NAME, backend.arch, NAME_BYTES - 1);
  return hipSuccess;
}

EXPORT hipError_t hipDeviceGetAttribute(int *value, int attribute, int device) {
  ENTER();
  if (device < 0 || device >= device_count) return hipErrorInvalidDevice;
  switch (attribute) {
  case ATTRIBUTE_COMPUTE_UNITS: *value = backend.compute_units; return hipSuccess;
  case ATTRIBUTE_LDS_BYTES: *value = backend.lds_bytes; return hipSuccess;
  default: return hipErrorInvalidValue;
  }
}

EXPORT hipError_t hipMalloc(void **address, size_t bytes) {
  ENTER();
  *address = NULL;
  if (!bytes) return hipSuccess;
  uint64_t allocated;
  hipError_t error = backend.allocate(bytes, &allocated);
  if (error) return error;
  add_range(allocated, bytes, 0);
  *address = (void *)(uintptr_t)allocated;
  return hipSuccess;
}

EXPORT hipError_t hipFree(void *address) {
  ENTER();
  if (!address) return hipSuccess;
  run_all(); /* hipFree waits for the device */
  if (!remove_range(address, 0)) return hipErrorInvalidValue;
  hipError_t error = backend.release((uintptr_t)address);
  return error ? error : report_failed_work();
}

EXPORT hipError_t hipHostMalloc(void **address, size_t bytes, unsigned flags) {
  ENTER();
  *address = malloc(bytes ? bytes : 1);
  if (!*address) return hipErrorOutOfMemory;
  add_range((uintptr_t)*address, bytes, 1);
  return flags ? hipErrorInvalidValue : hipSuccess;
}

EXPORT hipError_t hipHostFree(void *address) {
  ENTER();
  if (!remove_range(address, 1)) return hipErrorInvalidValue;
  free(address);
  return hipSuccess;
}

/* Queue a copy; hipErrorInvalidValue if a side is not of the kind it is said to be. *pageable: whether the host's side is not pinned. */
static hipError_t give_copy(struct stream *stream, void *to, const void *from, size_t bytes, int kind, int *pageable) {
  int to_device = kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE, from_device = kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE;
  if (!to_device && !from_device) return hipErrorInvalidValue;
  if (to_device ? !is_device(to, bytes) : !is_host(to, bytes)) return hipErrorInvalidValue;
  if (from_device ? !is_device(from, bytes) : !is_host(from, bytes)) return hipErrorInvalidValue;
  *pageable = !(to_device && from_device) && !is_pinned(to_device ? from : to, bytes);
  give(stream, (struct operation){.kind = COPY, .to = to, .from = from, .bytes = bytes});
  return hipSuccess;
}

EXPORT hipError_t hipMemcpy(void *to, const void *from, size_t bytes, int kind) {
  ENTER();
  int pageable;
  if (!bytes) return hipSuccess;
  hipError_t error = give_copy(&default_stream, to, from, bytes, kind, &pageable);
  if (error) return error;
  run_until(&default_stream, last_number);
  return report_failed_work();
}

EXPORT hipError_t hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *handle) {
  ENTER();
  struct stream *stream = stream_of(handle);
  int pageable;
  if (!stream) return hipErrorInvalidHandle;
  if (!bytes) return hipSuccess;
  hipError_t error = give_copy(stream, to, from, bytes, kind, &pageable);
  if (error || !pageable) return error;
  run_until(stream, last_number); /* HIP copies from and to pageable memory while the caller waits */
  return report_failed_work();
}

EXPORT hipError_t hipMemsetAsync(void *to, int byte, size_t bytes, void *handle) {
  ENTER();
  struct stream *stream = stream_of(handle);
  if (!stream) return hipErrorInvalidHandle;
  if (!is_device(to, bytes)) return hipErrorInvalidValue;
  give(stream, (struct operation){.kind = FILL, .to = to, .byte = byte, .bytes = bytes});
  return hipSuccess;
}

EXPORT hipError_t hipStreamCreateWithFlags(void **handle, unsigned flags) {
  ENTER();
  if (flags) return hipErrorInvalidValue; /* streams not ordered with the default stream are not modelled */
  struct stream *stream = calloc(1, sizeof *stream);
  *stream = (struct stream){streams, 1, NULL, &stream->head};
  *handle = streams = stream;
  return hipSuccess;
}

EXPORT hipError_t hipStreamDestroy(void *handle) {
  ENTER();
  struct stream *stream = stream_of(handle);
  if (!stream || stream == &default_stream) return hipErrorInvalidHandle;
  run_until(stream, last_number);
  stream->live = 0;
  return hipSuccess;
}

EXPORT hipError_t hipStreamSynchronize(void *handle) {
  ENTER();
  struct stream *stream = stream_of(handle);
  if (!stream) return hipErrorInvalidHandle;
  run_until(stream, last_number);
  return report_failed_work();
}

EXPORT hipError_t hipStreamWaitEvent(void *handle, void *event_handle, unsigned flags) {
  ENTER();
  struct stream *stream = stream_of(handle);
  struct event *event = event_of(event_handle);
  if (!stream || !event) return hipErrorInvalidHandle;
  if (flags) return hipErrorInvalidValue;
  if (event->recorded) give(stream, (struct operation){.kind = WAIT, .other = event->stream, .until = event->recorded});
  return hipSuccess;
}

EXPORT hipError_t hipEventCreate(void **handle) {
  ENTER();
  struct event *event = calloc(1, sizeof *event);
  event->live = 1;
  event->next = events;
  *handle = events = event;
  return hipSuccess;
}

EXPORT hipError_t hipEventDestroy(void *handle) {
  ENTER();
  struct event *event = event_of(handle);
  if (!event) return hipErrorInvalidHandle;
  event->live = 0;
  return hipSuccess;
}

EXPORT hipError_t hipEventRecord(void *handle, void *stream_handle) {
  ENTER();
  struct event *event = event_of(handle);
  struct stream *stream = stream_of(stream_handle);
  if (!event || !stream) return hipErrorInvalidHandle;
  event->stream = stream;
  event->recorded = give(stream, (struct operation){.kind = RECORD, .event = event});
  return hipSuccess;
}

EXPORT hipError_t hipEventSynchronize(void *handle) {
  ENTER();
  struct event *event = event_of(handle);
  if (!event) return hipErrorInvalidHandle;
  if (event->recorded) run_until(event->stream, event->recorded);
  return report_failed_work();
}

EXPORT hipError_t hipEventElapsedTime(float *milliseconds, void *start_handle, void *stop_handle) {
  ENTER();
  struct event *start = event_of(start_handle), *stop = event_of(stop_handle);
  if (!start || !stop || !start->recorded || !stop->recorded) return hipErrorInvalidHandle;
  if (start->reached != start->recorded || stop->reached != stop->recorded) return hipErrorNotReady;
  *milliseconds = (float)((stop->seconds - start->seconds) * 1e3);
  return hipSuccess;
}

EXPORT hipError_t hipDeviceSynchronize(void) {
  ENTER();
  run_all();
  return report_failed_work();
}

static struct function *functions;

EXPORT hipError_t hipModuleLoadData(void **handle, const void *image) {
  ENTER();
  uint64_t shoff, module;
  size_t loaded_bytes;
  uint16_t shentsize, shnum;
  const unsigned char *elf = image;
  *handle = NULL;
  if (memcmp(elf, "\177ELF\2\1", 6)) return hipErrorInvalidValue;
  /* The caller gives no size: a code object ends with its section headers. */
  memcpy(&shoff, elf + 40, 8);
  memcpy(&shentsize, elf + 58, 2);
  memcpy(&shnum, elf + 60, 2);
  hipError_t error = backend.load(image, shoff + (size_t)shentsize * shnum, &module, &loaded_bytes);
  if (error) return error;
  add_range(module, loaded_bytes, 0);
  *handle = (void *)(uintptr_t)module;
  return hipSuccess;
}

EXPORT hipError_t hipModuleUnload(void *module) {
  ENTER();
  run_all();
  if (!remove_range(module, 0)) return hipErrorInvalidHandle;
  return backend.unload((uintptr_t)module);
}

EXPORT hipError_t hipModuleGetFunction(void **handle, void *module, const char *name) {
  ENTER();
  struct function *function = calloc(1, sizeof *function);
  hipError_t error = backend.function((uintptr_t)module, name, &function->id, &function->kernarg_bytes, &function->block_size);
  if (error) {
    free(function);
    return error;
  }
  function->next = functions;
  *handle = functions = function;
  return hipSuccess;
}

EXPORT hipError_t hipModuleGetGlobal(void **address, size_t *bytes, void *module, const char *name) {
  ENTER();
  uint64_t found;
  hipError_t error = backend.global_((uintptr_t)module, name, &found, bytes);
  if (error) return error;
  *address = (void *)(uintptr_t)found;
  return hipSuccess;
}

EXPORT hipError_t hipModuleLaunchKernel(void *handle, uint32_t x, uint32_t y, uint32_t z, uint32_t block_x, uint32_t block_y, uint32_t block_z,
                                        uint32_t lds_bytes, void *stream_handle, void **parameters, void **extra) {
  ENTER();
  struct stream *stream = stream_of(stream_handle);
  struct function *function = functions;
  while (function && function != handle) function = function->next;
  if (!stream || !function) return hipErrorInvalidHandle;
  /* One contiguous kernarg buffer, tagged as the HIP programming guide says; parameters one by one would need each one's size. */
  if (parameters || !extra || (uintptr_t)extra[0] != LAUNCH_BUFFER_POINTER || (uintptr_t)extra[2] != LAUNCH_BUFFER_SIZE ||
      (uintptr_t)extra[4] != LAUNCH_END)
    return hipErrorInvalidValue;
  size_t bytes = *(size_t *)extra[3];
  if (bytes != function->kernarg_bytes) return hipErrorInvalidValue;
  if (!x || !y || !z || block_x != function->block_size || block_y != 1 || block_z != 1 || lds_bytes > (uint32_t)backend.lds_bytes)
    return hipErrorInvalidConfiguration;
  void *kernarg = malloc(bytes ? bytes : 1);
  memcpy(kernarg, extra[1], bytes);
  give(stream, (struct operation){.kind = LAUNCH, .function = function->id, .grid = {x, y, z}, .block = block_x, .lds_bytes = lds_bytes,
                                  .from = kernarg, .bytes = bytes});
  return hipSuccess;
}
