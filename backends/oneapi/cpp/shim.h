/* The C interface over SYCL that this crate calls.
 *
 * Every function may be called from any thread and lets no exception out. Those that return an int return 0, or the code of the
 * exception, which is never 0; ad_message() then returns its message on the same thread. Objects are pointers to the C++ object of
 * the same name on the heap, which the matching `_delete` deletes. Nothing here waits for a device, except ad_free and
 * ad_queue_finish.
 */
#ifndef ARROW_DEVICE_SYCL_SHIM_H
#define ARROW_DEVICE_SYCL_SHIM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct ad_device ad_device;   /* sycl::device */
typedef struct ad_context ad_context; /* sycl::context */
typedef struct ad_event ad_event;     /* sycl::event */
typedef struct ad_queue ad_queue;     /* a sycl::queue, and what has failed there */
typedef struct ad_gate ad_gate;       /* what holds up a queue until it is opened */

enum ad_memory { AD_UNKNOWN, AD_DEVICE, AD_SHARED, AD_HOST };
enum ad_state { AD_PENDING, AD_COMPLETE };

typedef struct {
    int32_t is_cpu;
    /* Whether the device allocates memory of each kind. */
    int32_t device_memory, shared_memory, host_memory;
} ad_properties;

/* A number of the sources from which this was compiled. */
uint64_t ad_version(void);

/* The message of the last function that failed on this thread, of which AD_MESSAGE_BYTES - 1 bytes are kept; valid until the next one
 * fails. */
#define AD_MESSAGE_BYTES 4096
const char *ad_message(void);

/* Devices are numbered as in sycl::device::get_devices(). */
int ad_device_count(size_t *count);
int ad_device_new(size_t index, ad_device **device);
int ad_device_of(const void *sycl_queue, ad_device **device, size_t *index);
int ad_device_properties(const ad_device *device, ad_properties *properties);
/* Calls `take` once with the device's name. */
int ad_device_name(const ad_device *device, void (*take)(void *to, const char *name, size_t bytes), void *to);
void ad_device_delete(ad_device *device);

/* The default context of the device's platform, which queues of programs have, or with `own` a new one. */
int ad_context_new(const ad_device *device, int own, ad_context **context);
int ad_context_of(const void *sycl_queue, ad_context **context);
/* Whether both are the same context: 1 or 0. */
int ad_context_is(const ad_context *context, const ad_context *other);
void ad_context_delete(ad_context *context);

/* A new queue, in order, which keeps the first error that SYCL reports. */
int ad_queue_new(const ad_context *context, const ad_device *device, ad_queue **queue);
/* A queue of the program's, whose errors are the program's too. */
int ad_queue_adopt(const void *sycl_queue, ad_queue **queue);
int ad_queue_is_in_order(const void *sycl_queue, int *in_order);
void *ad_queue_sycl(ad_queue *queue);
/* Fails with the first error that SYCL has reported for work of a queue of ad_queue_new. SYCL reports the exceptions of host tasks
 * when a program asks for them. */
int ad_queue_check(ad_queue *queue);
int ad_queue_copy(ad_queue *queue, void *to, const void *from, size_t bytes);
int ad_queue_fill(ad_queue *queue, void *to, int byte, size_t bytes);
/* An event after all work so far, which is handed to the device. */
int ad_queue_record(ad_queue *queue, ad_event **event);
/* Waits until no work so far runs any more, whether it has failed or not. An error says that this cannot be known. */
int ad_queue_finish(ad_queue *queue);
void ad_queue_delete(ad_queue *queue);

/* Makes later work of the queue wait for an event of the same context. */
int ad_wait(void *sycl_queue, const ad_event *event);
/* Makes later work of the queue wait until the gate is opened. Sets null, and does nothing, where SYCL has no such thing. */
int ad_gate_new(void *sycl_queue, ad_gate **gate);
/* Opens a gate, which is deleted. */
int ad_gate_open(ad_gate *gate);

int ad_event_copy(const ad_event *event, ad_event **copy);
/* The state. Fails if the work has failed. The memory that complete work has written is visible to the host. */
int ad_event_state(const ad_event *event, int *state);
void ad_event_delete(ad_event *event);

/* Sets null if there is not enough memory. */
int ad_allocate(const ad_context *context, const ad_device *device, int memory, size_t align, size_t bytes, void **base);
/* May wait for the device's work. */
int ad_free(const ad_context *context, void *base);
/* Of which kind the memory at an address is, AD_UNKNOWN for that of another context too. */
int ad_memory_of(const ad_context *context, const void *address, int *memory);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
