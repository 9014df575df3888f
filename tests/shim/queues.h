/* What the stand-in runtime keeps: the backend it calls, which memory is live, and streams as queues with the order they promise. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Values of hipError_t, hipMemcpyKind, hipDeviceAttribute_t and the launch parameter tags, from hip_runtime_api.h of ROCm 6 and later. */
enum {
  hipSuccess = 0, hipErrorInvalidValue = 1, hipErrorOutOfMemory = 2, hipErrorInvalidConfiguration = 9, hipErrorInvalidDevice = 101,
  hipErrorNoBinaryForGpu = 209, hipErrorFileNotFound = 301, hipErrorInvalidHandle = 400, hipErrorNotFound = 500, hipErrorNotReady = 600,
  hipErrorLaunchFailure = 719, hipErrorStreamCaptureUnsupported = 900, hipErrorStreamCaptureImplicit = 906,
};
enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3 };
enum { ATTRIBUTE_COMPUTE_UNITS = 63, ATTRIBUTE_LDS_BYTES = 74 };
enum { CAPTURE_MODE_THREAD_LOCAL = 1 };
enum { STREAM_NON_BLOCKING = 1 };
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
  int is_asked; /* whether what it is ordered after was run ahead of its turn */
};

/* Captured operations: a graph, or an executable one. */
struct graph { struct graph *next; int executable; struct operation *head, **tail; };
struct stream { struct stream *next; int live; struct operation *head, **tail; struct graph *capturing; int apart; };
static struct stream *streams;
static struct stream default_stream = {NULL, 1, NULL, &default_stream.head, NULL, 0};
static struct stream *captured; /* the stream that is being captured, or NULL */
static struct graph *graphs;
static struct event *events;
static uint64_t last_number;
static int others_first;
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

static void run_until(struct stream *stream, uint64_t last);

/* Run what the stream's operation is ordered after in other streams: for the default stream all earlier work, for the others the default stream's
 * earlier work, but for non-blocking streams, which stand apart. */
static void run_before(struct stream *stream, const struct operation *op) {
  if (stream == &default_stream)
    for (struct stream *other = streams; other; other = other->next) {
      if (!other->apart) run_until(other, op->number - 1);
    }
  else if (!stream->apart)
    run_until(&default_stream, op->number - 1);
  if (op->kind == WAIT) run_until(op->other, op->until);
}

/* Run the stream's operations numbered up to `last`, and before each what it is ordered after. The recursion ends because it asks for ever smaller
 * numbers.
 *
 * Two orders that HIP allows. Other streams as late as may be: what is waited for runs just before the operation that needs it, behind this stream's
 * earlier work. Others first: what any of the operations needs runs ahead of all of them, as if this stream were slow. A missing order shows in the
 * one or the other. */
static void run_until(struct stream *stream, uint64_t last) {
  for (struct operation *op = others_first ? stream->head : NULL; op && op->number <= last; op = op->next)
    if (!op->is_asked) {
      op->is_asked = 1;
      run_before(stream, op); /* and of this stream only what comes before it */
    }
  while (stream->head && stream->head->number <= last) {
    struct operation *op = stream->head;
    run_before(stream, op);
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

static void append(struct operation ***tail, struct operation given) {
  struct operation *op = malloc(sizeof *op);
  *op = given;
  op->next = NULL;
  **tail = op;
  *tail = &op->next;
}

/* Append to the stream, or to the graph that it is captured into; the operation's number is returned. */
static uint64_t give(struct stream *stream, struct operation given) {
  if (stream->capturing) {
    append(&stream->capturing->tail, given);
    return 0;
  }
  given.number = ++last_number;
  append(&stream->tail, given);
  return given.number;
}

/* A copy of the operation that owns what it owns. */
static struct operation copy_of(const struct operation *op) {
  struct operation copy = *op;
  if (op->kind == LAUNCH) {
    void *kernarg = malloc(op->bytes ? op->bytes : 1);
    memcpy(kernarg, op->from, op->bytes);
    copy.from = kernarg;
  }
  return copy;
}

static struct graph *new_graph(int executable) {
  struct graph *graph = malloc(sizeof *graph);
  *graph = (struct graph){graphs, executable, NULL, &graph->head};
  return graphs = graph;
}

static struct graph *graph_of(void *handle, int executable) {
  for (struct graph *graph = graphs; graph; graph = graph->next)
    if (graph == handle && graph->executable == executable) return graph;
  return NULL;
}

static hipError_t destroy_graph(void *handle, int executable) {
  struct graph *graph = graph_of(handle, executable), **link = &graphs;
  if (!graph) return hipErrorInvalidValue;
  while (*link != graph) link = &(*link)->next;
  *link = graph->next;
  while (graph->head) {
    struct operation *op = graph->head;
    graph->head = op->next;
    if (op->kind == LAUNCH) free((void *)op->from);
    free(op);
  }
  free(graph);
  return hipSuccess;
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
