/* A producer in plain C, which knows the Arrow C Device data interface and OpenCL, and nothing of arrow-device.
   Functions return 0, or the number of the line that went wrong. */
#define CL_TARGET_OPENCL_VERSION 200
#include <CL/cl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ARROW_DEVICE_OPENCL 4

struct ArrowArray {
  int64_t length;
  int64_t null_count;
  int64_t offset;
  int64_t n_buffers;
  int64_t n_children;
  const void** buffers;
  struct ArrowArray** children;
  struct ArrowArray* dictionary;
  void (*release)(struct ArrowArray*);
  void* private_data;
};

struct ArrowDeviceArray {
  struct ArrowArray array;
  int64_t device_id;
  int32_t device_type;
  void* sync_event;
  int64_t reserved[3];
};

#define CHECK(condition) do { if (!(condition)) return __LINE__; } while (0)

/* cl_intel_unified_shared_memory */
typedef cl_int(CL_API_CALL* memcpy_intel)(cl_command_queue, cl_bool, void*, const void*, size_t, cl_uint, const cl_event*, cl_event*);
typedef void*(CL_API_CALL* alloc_intel)(cl_context, cl_device_id, const cl_ulong*, size_t, cl_uint, cl_int*);
typedef cl_int(CL_API_CALL* free_intel)(cl_context, void*);

struct producer {
  cl_context context;
  cl_command_queue queue;
  void* memory;
  /* NULL if it is shared virtual memory. */
  free_intel free_usm;
  /* What the copy waits for, and what the consumer waits for. */
  cl_event gate, event;
  const void* buffers[2];
  int64_t* values;
};

/* When the producer releases its queue. */
enum { WITH_ARRAY, WHILE_PENDING, WHEN_FINISHED };

static int releases;

int peer_releases(void) { return __atomic_load_n(&releases, __ATOMIC_SEQ_CST); }

static void release(struct ArrowArray* array) {
  struct producer* p = array->private_data;
  clWaitForEvents(1, &p->event);
  clReleaseEvent(p->event);
  clReleaseEvent(p->gate);
  if (p->free_usm) {
    p->free_usm(p->context, p->memory);
  } else {
    clSVMFree(p->context, p->memory);
  }
  if (p->queue) clReleaseCommandQueue(p->queue);
  clReleaseContext(p->context);
  free(p->values);
  free(p);
  array->release = NULL;
  __atomic_add_fetch(&releases, 1, __ATOMIC_SEQ_CST);
}

/* Produces the int64 values 0, 3, 6... in a context of its own, in unified shared memory or in shared virtual memory, by a copy
   that runs once *gate completes. The queue is not flushed. WHEN_FINISHED opens the gate itself. */
int peer_produce(struct ArrowDeviceArray* out, int64_t device_id, int64_t rows, int usm, int release_queue,
                 cl_event* gate) {
  cl_platform_id platform;
  cl_device_id device;
  cl_int code;
  CHECK(clGetPlatformIDs(1, &platform, NULL) == CL_SUCCESS);
  CHECK(clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL) == CL_SUCCESS);
  struct producer* p = calloc(1, sizeof *p);
  p->context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
  CHECK(code == CL_SUCCESS);
  p->queue = clCreateCommandQueue(p->context, device, 0, &code);
  CHECK(code == CL_SUCCESS);
  size_t bytes = rows * sizeof(int64_t);
  memcpy_intel copy = NULL;
  if (usm) {
    alloc_intel alloc = (alloc_intel)clGetExtensionFunctionAddressForPlatform(platform, "clDeviceMemAllocINTEL");
    copy = (memcpy_intel)clGetExtensionFunctionAddressForPlatform(platform, "clEnqueueMemcpyINTEL");
    p->free_usm = (free_intel)clGetExtensionFunctionAddressForPlatform(platform, "clMemFreeINTEL");
    CHECK(alloc && copy && p->free_usm);
    p->memory = alloc(p->context, device, NULL, bytes, 0, &code);
  } else {
    p->memory = clSVMAlloc(p->context, CL_MEM_READ_WRITE, bytes, 0);
  }
  CHECK(p->memory != NULL);
  p->values = malloc(bytes);
  for (int64_t i = 0; i < rows; i++) p->values[i] = 3 * i;
  p->gate = clCreateUserEvent(p->context, &code);
  CHECK(code == CL_SUCCESS);
  CHECK(clEnqueueBarrierWithWaitList(p->queue, 1, &p->gate, NULL) == CL_SUCCESS);
  if (usm) {
    CHECK(copy(p->queue, CL_FALSE, p->memory, p->values, bytes, 0, NULL, &p->event) == CL_SUCCESS);
  } else {
    CHECK(clEnqueueSVMMemcpy(p->queue, CL_FALSE, p->memory, p->values, bytes, 0, NULL, &p->event) == CL_SUCCESS);
  }
  p->buffers[1] = p->memory;
  if (release_queue == WHEN_FINISHED) {
    CHECK(clSetUserEventStatus(p->gate, CL_COMPLETE) == CL_SUCCESS);
    CHECK(clFinish(p->queue) == CL_SUCCESS);
  }
  if (release_queue != WITH_ARRAY) {
    CHECK(clReleaseCommandQueue(p->queue) == CL_SUCCESS);
    p->queue = NULL;
  }

  memset(out, 0, sizeof *out);
  out->array.length = rows;
  out->array.n_buffers = 2;
  out->array.buffers = p->buffers;
  out->array.release = release;
  out->array.private_data = p;
  out->device_id = device_id;
  out->device_type = ARROW_DEVICE_OPENCL;
  out->sync_event = &p->event;
  *gate = p->gate;
  return 0;
}

int peer_open(cl_event gate) { return clSetUserEventStatus(gate, CL_COMPLETE); }
