/* A stand-in for the HIP runtime, for tests: memory, streams, events, modules and launches, as far as mla_rt/hip_device.py uses them.
 *
 * Device memory and kernels are those of the emulator: allocation, module loading and launches call back into Python (library.py). A device
 * address is the host's address of the same byte, so copies are memcpy, after a check that they stay inside one live allocation.
 *
 * Work given to a stream runs as late as HIP allows: at a wait, or when later work is ordered after it. So a missing wait, an event that was
 * not waited for, or the default stream used in place of the one given shows as old data, every time. What the latest order would hide, the other one
 * shows (others_first).
 *
 * One call at a time: others wait, callbacks included. Streams and events are never freed, for queued work may still name them. A process that was
 * forked after the first call must make none: it is ended. */
#define _GNU_SOURCE /* for the initializer of a recursive mutex */
#include <pthread.h>
#include <unistd.h>

#include "queues.h"

#define EXPORT __attribute__((visibility("default")))

static int device_count;

/* ---- one call at a time. A thread that waits here does not hold Python's lock, which callbacks take: hip-python and ctypes release it. ---- */

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP; /* hipModuleLoad calls hipModuleLoadData */
static pid_t process;

static int lock(void) {
  if (!process) process = getpid();
  if (process != getpid()) {
    fputs("hip_shim: called in a forked process\n", stderr);
    _exit(86);
  }
  return pthread_mutex_lock(&mutex);
}
static void unlock(int *locked) {
  (void)locked;
  pthread_mutex_unlock(&mutex);
}
#define LOCK() __attribute__((cleanup(unlock), unused)) int locked = lock()

/* ---- calls: counted by name, failed on request, and the streams that they were given ---- */

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

static struct { const char *name; void *stream; } named[4096];
static unsigned num_named;

/* The queue that a handle names, which is noted with the function's name. */
static struct stream *note(const char *name, void *handle) {
  named[num_named % 4096].name = name;
  named[num_named++ % 4096].stream = handle;
  return stream_of(handle);
}
#define STREAM(handle) note(__func__, handle)

/* The function that named a stream as the number-th, and the stream; NULL once there is none, or if it was too long ago. */
EXPORT const char *shim_named(unsigned number, void **stream) {
  LOCK();
  if (number >= num_named || num_named - number > 4096) return NULL;
  *stream = named[number % 4096].stream;
  return named[number % 4096].name;
}
EXPORT unsigned shim_num_named(void) { return num_named; }

static hipError_t enter(const char *name) {
  struct call *call = call_named(name);
  hipError_t fail = call->fail;
  call->count++;
  call->fail = hipSuccess;
  return fail;
}
#define ENTER() \
  LOCK(); \
  hipError_t refused = enter(__func__); \
  if (refused) return refused

/* What HIP refuses while a stream is captured: all that may wait for the device, or that uses the default stream. */
#define REFUSE_DURING_CAPTURE() do { if (captured) return hipErrorStreamCaptureUnsupported; } while (0)
#define REFUSE_DEFAULT_STREAM_DURING_CAPTURE(stream) do { if (captured && (stream) == &default_stream) return hipErrorStreamCaptureImplicit; } while (0)

EXPORT unsigned long shim_count(const char *name) { return call_named(name)->count; }
EXPORT void shim_fail_next(const char *name, hipError_t error) { call_named(name)->fail = error; }
EXPORT void shim_set_backend(const struct backend *given) { backend = *given; }
EXPORT void shim_set_others_first(int given) { others_first = given; }
EXPORT void shim_set_device_count(int count) { device_count = count; }

/* How many operations wait to run. */
EXPORT int shim_pending(void) {
  LOCK();
  int count = 0;
  for (struct operation *op = default_stream.head; op; op = op->next) count++;
  for (struct stream *stream = streams; stream; stream = stream->next)
    for (struct operation *op = stream->head; op; op = op->next) count++;
  return count;
}

/* Forget queued work, failures and injected errors, so that a failed test leaves nothing to the next. */
EXPORT void shim_reset(void) {
  LOCK();
  while (default_stream.head) discard_head(&default_stream);
  for (struct stream *stream = streams; stream; stream = stream->next)
    while (stream->head) discard_head(stream);
  for (struct call *call = calls; call; call = call->next) call->fail = hipSuccess;
  failed_work = hipSuccess;
  if (captured) captured->capturing = NULL;
  captured = NULL;
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
  case hipErrorFileNotFound: return "hipErrorFileNotFound";
  case hipErrorNotReady: return "hipErrorNotReady";
  case hipErrorLaunchFailure: return "hipErrorLaunchFailure";
  case hipErrorStreamCaptureUnsupported: return "hipErrorStreamCaptureUnsupported";
  case hipErrorStreamCaptureImplicit: return "hipErrorStreamCaptureImplicit";
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
  case hipErrorFileNotFound: return "file not found";
  case hipErrorNotReady: return "device not ready";
  case hipErrorLaunchFailure: return "unspecified launch failure";
  case hipErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
  case hipErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing blocking stream";
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
  REFUSE_DURING_CAPTURE();
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
  REFUSE_DURING_CAPTURE();
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
  REFUSE_DURING_CAPTURE();
  int pageable;
  if (!bytes) return hipSuccess;
  hipError_t error = give_copy(STREAM(NULL), to, from, bytes, kind, &pageable);
  if (error) return error;
  run_until(&default_stream, last_number);
  return report_failed_work();
}

EXPORT hipError_t hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *handle) {
  ENTER();
  REFUSE_DURING_CAPTURE();
  struct stream *stream = STREAM(handle);
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
  struct stream *stream = STREAM(handle);
  if (!stream) return hipErrorInvalidHandle;
  REFUSE_DEFAULT_STREAM_DURING_CAPTURE(stream);
  if (!is_device(to, bytes)) return hipErrorInvalidValue;
  give(stream, (struct operation){.kind = FILL, .to = to, .byte = byte, .bytes = bytes});
  return hipSuccess;
}

EXPORT hipError_t hipStreamCreateWithFlags(void **handle, unsigned flags) {
  ENTER();
  if (flags & ~STREAM_NON_BLOCKING) return hipErrorInvalidValue;
  struct stream *stream = calloc(1, sizeof *stream);
  *stream = (struct stream){streams, 1, NULL, &stream->head, NULL, flags == STREAM_NON_BLOCKING};
  *handle = streams = stream;
  return hipSuccess;
}

EXPORT hipError_t hipStreamDestroy(void *handle) {
  ENTER();
  struct stream *stream = STREAM(handle);
  if (!stream || stream == &default_stream) return hipErrorInvalidHandle;
  run_until(stream, last_number);
  stream->live = 0;
  return hipSuccess;
}

EXPORT hipError_t hipStreamSynchronize(void *handle) {
  ENTER();
  REFUSE_DURING_CAPTURE();
  struct stream *stream = STREAM(handle);
  if (!stream) return hipErrorInvalidHandle;
  run_until(stream, last_number);
  return report_failed_work();
}

EXPORT hipError_t hipStreamWaitEvent(void *handle, void *event_handle, unsigned flags) {
  ENTER();
  REFUSE_DURING_CAPTURE();
  struct stream *stream = STREAM(handle);
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
  REFUSE_DURING_CAPTURE();
  struct event *event = event_of(handle);
  struct stream *stream = STREAM(stream_handle);
  if (!event || !stream) return hipErrorInvalidHandle;
  event->stream = stream;
  event->recorded = give(stream, (struct operation){.kind = RECORD, .event = event});
  return hipSuccess;
}

EXPORT hipError_t hipEventSynchronize(void *handle) {
  ENTER();
  REFUSE_DURING_CAPTURE();
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
  REFUSE_DURING_CAPTURE();
  run_all();
  return report_failed_work();
}

/* ---- graphs: modes and flags other than those that hip_device.py uses are not modelled ---- */

EXPORT hipError_t hipStreamBeginCapture(void *handle, int mode) {
  ENTER();
  struct stream *stream = STREAM(handle);
  if (!stream || stream == &default_stream) return hipErrorInvalidHandle;
  if (mode != CAPTURE_MODE_THREAD_LOCAL || captured) return hipErrorInvalidValue;
  captured = stream;
  stream->capturing = new_graph(0);
  return hipSuccess;
}

EXPORT hipError_t hipStreamEndCapture(void *handle, void **graph) {
  ENTER();
  struct stream *stream = STREAM(handle);
  if (!stream || captured != stream) return hipErrorInvalidHandle;
  *graph = stream->capturing;
  captured = NULL;
  stream->capturing = NULL;
  return hipSuccess;
}

EXPORT hipError_t hipGraphInstantiateWithFlags(void **executable, void *handle, unsigned long long flags) {
  ENTER();
  struct graph *graph = graph_of(handle, 0);
  if (!graph || flags) return hipErrorInvalidValue;
  struct graph *made = new_graph(1);
  for (struct operation *op = graph->head; op; op = op->next) append(&made->tail, copy_of(op));
  *executable = made;
  return hipSuccess;
}

EXPORT hipError_t hipGraphLaunch(void *handle, void *stream_handle) {
  ENTER();
  struct graph *graph = graph_of(handle, 1);
  struct stream *stream = STREAM(stream_handle);
  if (!graph || !stream) return hipErrorInvalidHandle;
  REFUSE_DURING_CAPTURE();
  for (struct operation *op = graph->head; op; op = op->next) give(stream, copy_of(op));
  return hipSuccess;
}

EXPORT hipError_t hipGraphDestroy(void *graph) {
  ENTER();
  return destroy_graph(graph, 0);
}

EXPORT hipError_t hipGraphExecDestroy(void *executable) {
  ENTER();
  return destroy_graph(executable, 1);
}

struct function { struct function *next; uint64_t id; uint32_t kernarg_bytes, block_size; };
static struct function *functions;

EXPORT hipError_t hipModuleLoadData(void **handle, const void *image) {
  ENTER();
  REFUSE_DURING_CAPTURE();
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

EXPORT hipError_t hipModuleLoad(void **handle, const char *path) {
  ENTER();
  FILE *file = fopen(path, "rb");
  if (!file) return hipErrorFileNotFound;
  fseek(file, 0, SEEK_END);
  long bytes = ftell(file);
  rewind(file);
  void *image = malloc(bytes > 64 ? bytes : 64);
  size_t read = fread(image, 1, bytes, file);
  fclose(file);
  hipError_t error = read < 64 ? hipErrorInvalidValue : hipModuleLoadData(handle, image);
  free(image);
  return error;
}

EXPORT hipError_t hipModuleUnload(void *module) {
  ENTER();
  REFUSE_DURING_CAPTURE();
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
  struct stream *stream = STREAM(stream_handle);
  struct function *function = functions;
  while (function && function != handle) function = function->next;
  if (!stream || !function) return hipErrorInvalidHandle;
  REFUSE_DEFAULT_STREAM_DURING_CAPTURE(stream);
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
