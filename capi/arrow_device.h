// What the example library `capi` offers to any language that can call C.
//
// Structs are those of the Arrow C data, C stream and C Device data interfaces; include "arrow/c/abi.h", or the
// definitions of the specification, before this header.
//
// Devices have names: "cpu", "sim", "sim:1", "cuda", "cuda:1", "cuda-host", "cuda-managed", ...
// Every function but the last returns 0 or an errno: EINVAL for what breaks a rule, ENOTSUP for a device that is not
// there, ENOMEM, EIO, or the errno that a foreign producer answered with. After a failure what would have been written
// is released (its `release` is null). Values that come in are checked in full. Any function may be called on any
// thread; nothing is thrown.

#ifndef ARROW_DEVICE_CAPI_H
#define ARROW_DEVICE_CAPI_H

#ifdef __cplusplus
extern "C" {
#endif

struct ArrowSchema;
struct ArrowDeviceArray;
struct ArrowDeviceArrayStream;

// A file (Arrow IPC file or stream, Parquet, CSV with a header) as a stream of record batches on the device.
int arrow_device_open(const char* path, const char* device, struct ArrowDeviceArrayStream* out);

// Writes the batches of any device stream to an Arrow IPC stream file. The stream is consumed, whatever happens. A
// file appears when it is whole; until then its parts are in a file beside it. Pipes and devices are written to directly.
int arrow_device_write_ipc(struct ArrowDeviceArrayStream* stream, const char* path);

// Moves a record batch to the device; nothing is copied if it is there. Array and schema are consumed, whatever
// happens; `out` and `out_schema` may be the same structs. The batch may come with an event, which the consumer waits
// for.
int arrow_device_copy(struct ArrowDeviceArray* array, struct ArrowSchema* schema, const char* device,
                      struct ArrowDeviceArray* out, struct ArrowSchema* out_schema);

// The text of this thread's last error, in UTF-8, valid until the next failure on this thread. Null if there was none.
const char* arrow_device_last_error(void);

#ifdef __cplusplus
}
#endif

#endif  // ARROW_DEVICE_CAPI_H
