// Functions through which tests exchange device data between implementations of Arrow, each with each: docs/integration.md.
//
// Every implementation offers them in a library of its own, with its name in place of `ArrowDevice`. They are those of
// Arrow's tool archery for the C data interface, and take a device type besides: ARROW_DEVICE_CPU (1) or
// ARROW_DEVICE_EXT_DEV (12), which is a device for tests. The structs are those of the specification; "arrow/c/abi.h"
// may be included before this header or after it.
//
// `path` is an integration file in JSON, or, for implementations that do not read these, one of Arrow IPC with the same
// content. Every function except the last returns null, or what is wrong: a text in UTF-8 that is valid until the next
// call on the same thread. A text that begins with "not supported: " is no failure; the file is skipped.
//
// An `Export` writes `out` only if it returns null. An `Import` consumes its struct, whatever happens, and compares
// schema, device type and values with the file.

#ifndef ARROW_DEVICE_INTEGRATION_H
#define ARROW_DEVICE_INTEGRATION_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ArrowSchema;
struct ArrowDeviceArray;
struct ArrowDeviceArrayStream;

const char* ArrowDevice_CDeviceIntegration_ExportSchemaFromJson(const char* path, struct ArrowSchema* out);

const char* ArrowDevice_CDeviceIntegration_ImportSchemaAndCompareToJson(const char* path, struct ArrowSchema* schema);

// A batch is a struct array. Batches are counted from 0.
const char* ArrowDevice_CDeviceIntegration_ExportBatchFromJson(const char* path, int num_batch, int32_t device_type,
                                                               struct ArrowDeviceArray* out);

const char* ArrowDevice_CDeviceIntegration_ImportBatchAndCompareToJson(const char* path, int num_batch,
                                                                       int32_t device_type,
                                                                       struct ArrowDeviceArray* batch);

const char* ArrowDevice_CDeviceIntegration_ExportStreamFromJson(const char* path, int32_t device_type,
                                                                struct ArrowDeviceArrayStream* out);

const char* ArrowDevice_CDeviceIntegration_ImportStreamAndCompareToJson(const char* path, int32_t device_type,
                                                                        struct ArrowDeviceArrayStream* stream);

// Returns the bytes that exports and imports hold, on the host and on the device for tests, after all work of the device.
int64_t ArrowDevice_CDeviceIntegration_BytesAllocated(void);

#ifdef __cplusplus
}
#endif

#endif  // ARROW_DEVICE_INTEGRATION_H
