// cuDF's functions for a program that speaks C: batches go in and come out as device arrays of the Arrow C Device data interface.
//
// Every function consumes `batch`, whatever happens, and borrows `schema`. It returns 0, or an errno and a text (`cudf_bridge_error`); `out`
// and `out_schema` are released then. It waits for cuDF, so `batch` is no longer read when it returns. Any thread may call. None throws.

#ifndef CUDF_BRIDGE_H
#define CUDF_BRIDGE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The structs as the specification has them, with its guards.

#ifndef ARROW_C_DATA_INTERFACE
#define ARROW_C_DATA_INTERFACE

struct ArrowSchema {
  const char* format;
  const char* name;
  const char* metadata;
  int64_t flags;
  int64_t n_children;
  struct ArrowSchema** children;
  struct ArrowSchema* dictionary;
  void (*release)(struct ArrowSchema*);
  void* private_data;
};

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

#endif  // ARROW_C_DATA_INTERFACE

#ifndef ARROW_C_DEVICE_DATA_INTERFACE
#define ARROW_C_DEVICE_DATA_INTERFACE

typedef int32_t ArrowDeviceType;

struct ArrowDeviceArray {
  struct ArrowArray array;
  int64_t device_id;
  ArrowDeviceType device_type;
  void* sync_event;
  int64_t reserved[3];
};

#endif  // ARROW_C_DEVICE_DATA_INTERFACE

// Sorts the rows by a column, nulls last.
int cudf_bridge_sort(struct ArrowDeviceArray* batch, const struct ArrowSchema* schema, int32_t by,
                     struct ArrowDeviceArray* out, struct ArrowSchema* out_schema);

// Sums the values of each key, in no particular order. The rows without a key are one group.
int cudf_bridge_sum(struct ArrowDeviceArray* batch, const struct ArrowSchema* schema, int32_t key, int32_t values,
                    struct ArrowDeviceArray* out, struct ArrowSchema* out_schema);

// The text of this thread's last failure, until its next one.
const char* cudf_bridge_error(void);

#ifdef __cplusplus
}
#endif

#endif  // CUDF_BRIDGE_H
