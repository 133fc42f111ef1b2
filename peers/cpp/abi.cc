// The C structs as the header of the wheel has them, against the numbers of the specification; src/abi/layout/tests.rs compares
// those with this crate's.

#include <cstddef>

#include <arrow/c/abi.h>

static_assert(sizeof(ArrowSchema) == 72 && alignof(ArrowSchema) == 8);
static_assert(offsetof(ArrowSchema, format) == 0);
static_assert(offsetof(ArrowSchema, name) == 8);
static_assert(offsetof(ArrowSchema, metadata) == 16);
static_assert(offsetof(ArrowSchema, flags) == 24);
static_assert(offsetof(ArrowSchema, n_children) == 32);
static_assert(offsetof(ArrowSchema, children) == 40);
static_assert(offsetof(ArrowSchema, dictionary) == 48);
static_assert(offsetof(ArrowSchema, release) == 56);
static_assert(offsetof(ArrowSchema, private_data) == 64);
static_assert(sizeof(ArrowArray) == 80 && alignof(ArrowArray) == 8);
static_assert(offsetof(ArrowArray, length) == 0);
static_assert(offsetof(ArrowArray, null_count) == 8);
static_assert(offsetof(ArrowArray, offset) == 16);
static_assert(offsetof(ArrowArray, n_buffers) == 24);
static_assert(offsetof(ArrowArray, n_children) == 32);
static_assert(offsetof(ArrowArray, buffers) == 40);
static_assert(offsetof(ArrowArray, children) == 48);
static_assert(offsetof(ArrowArray, dictionary) == 56);
static_assert(offsetof(ArrowArray, release) == 64);
static_assert(offsetof(ArrowArray, private_data) == 72);
static_assert(sizeof(ArrowDeviceArray) == 128 && alignof(ArrowDeviceArray) == 8);
static_assert(offsetof(ArrowDeviceArray, array) == 0);
static_assert(offsetof(ArrowDeviceArray, device_id) == 80);
static_assert(offsetof(ArrowDeviceArray, device_type) == 88);
static_assert(offsetof(ArrowDeviceArray, sync_event) == 96);
static_assert(offsetof(ArrowDeviceArray, reserved) == 104);
static_assert(sizeof(ArrowDeviceArrayStream) == 48 && alignof(ArrowDeviceArrayStream) == 8);
static_assert(offsetof(ArrowDeviceArrayStream, device_type) == 0);
static_assert(offsetof(ArrowDeviceArrayStream, get_schema) == 8);
static_assert(offsetof(ArrowDeviceArrayStream, get_next) == 16);
static_assert(offsetof(ArrowDeviceArrayStream, get_last_error) == 24);
static_assert(offsetof(ArrowDeviceArrayStream, release) == 32);
static_assert(offsetof(ArrowDeviceArrayStream, private_data) == 40);
static_assert(sizeof(ArrowAsyncTask) == 16 && alignof(ArrowAsyncTask) == 8);
static_assert(offsetof(ArrowAsyncTask, extract_data) == 0);
static_assert(offsetof(ArrowAsyncTask, private_data) == 8);
static_assert(sizeof(ArrowAsyncProducer) == 40 && alignof(ArrowAsyncProducer) == 8);
static_assert(offsetof(ArrowAsyncProducer, device_type) == 0);
static_assert(offsetof(ArrowAsyncProducer, request) == 8);
static_assert(offsetof(ArrowAsyncProducer, cancel) == 16);
static_assert(offsetof(ArrowAsyncProducer, additional_metadata) == 24);
static_assert(offsetof(ArrowAsyncProducer, private_data) == 32);
static_assert(sizeof(ArrowAsyncDeviceStreamHandler) == 48 && alignof(ArrowAsyncDeviceStreamHandler) == 8);
static_assert(offsetof(ArrowAsyncDeviceStreamHandler, on_schema) == 0);
static_assert(offsetof(ArrowAsyncDeviceStreamHandler, on_next_task) == 8);
static_assert(offsetof(ArrowAsyncDeviceStreamHandler, on_error) == 16);
static_assert(offsetof(ArrowAsyncDeviceStreamHandler, release) == 24);
static_assert(offsetof(ArrowAsyncDeviceStreamHandler, producer) == 32);
static_assert(offsetof(ArrowAsyncDeviceStreamHandler, private_data) == 40);
static_assert(sizeof(ArrowDeviceType) == 4);
static_assert(ARROW_FLAG_DICTIONARY_ORDERED == 1 && ARROW_FLAG_NULLABLE == 2 && ARROW_FLAG_MAP_KEYS_SORTED == 4);
static_assert(ARROW_DEVICE_CPU == 1 && ARROW_DEVICE_CUDA == 2 && ARROW_DEVICE_CUDA_HOST == 3);
static_assert(ARROW_DEVICE_OPENCL == 4 && ARROW_DEVICE_VULKAN == 7 && ARROW_DEVICE_METAL == 8);
static_assert(ARROW_DEVICE_VPI == 9 && ARROW_DEVICE_ROCM == 10 && ARROW_DEVICE_ROCM_HOST == 11);
static_assert(ARROW_DEVICE_EXT_DEV == 12 && ARROW_DEVICE_CUDA_MANAGED == 13 && ARROW_DEVICE_ONEAPI == 14);
static_assert(ARROW_DEVICE_WEBGPU == 15 && ARROW_DEVICE_HEXAGON == 16);
