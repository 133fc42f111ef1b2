// The functions of libarrow_device_capi, for any language that can call C.
//
// The structs are those of the Arrow C data, C stream and C Device data interfaces. Include "arrow/c/abi.h", or the
// definitions of the specification, before this header.
//
// Devices are given by name: "cpu", "sim", "sim:1", "cuda", "cuda:1", "cuda-host", "cuda-managed", ...
//
// Every function except the last returns 0 or an errno: EINVAL for invalid arguments and data, ENOTSUP for a device that is
// not available, ENOMEM, EIO, or the errno of a foreign producer. After a failure the output structs are released (their
// `release` is null). All values of the input are checked. Any function may be called on any thread. None throws.

#ifndef ARROW_DEVICE_CAPI_H
#define ARROW_DEVICE_CAPI_H

#ifdef __cplusplus
extern "C" {
#endif

struct ArrowSchema;
struct ArrowDeviceArray;
struct ArrowDeviceArrayStream;

// Opens a file (Arrow IPC file or stream, Parquet, CSV with a header) as a stream of record batches on the device.
int arrow_device_open(const char* path, const char* device, struct ArrowDeviceArrayStream* out);

// Writes the batches of any device stream to an Arrow IPC stream file. The stream is consumed, whatever happens. The file
// appears once it is complete; until then it is written to a temporary file next to it. Pipes and device files are written to
// directly.
int arrow_device_write_ipc(struct ArrowDeviceArrayStream* stream, const char* path);

// Moves a record batch to the device. A batch that is already there is not copied. `array` and `schema` are consumed,
// whatever happens; `out` and `out_schema` may be the same structs. The result may have an event (`sync_event`), which the
// caller must wait for before it reads the data.
int arrow_device_copy(struct ArrowDeviceArray* array, struct ArrowSchema* schema, const char* device,
                      struct ArrowDeviceArray* out, struct ArrowSchema* out_schema);

// Returns the text of this thread's last error in UTF-8, or null if there was none. It is valid until the next failure on this
// thread.
const char* arrow_device_last_error(void);

#ifdef __cplusplus
}
#endif

#endif  // ARROW_DEVICE_CAPI_H
