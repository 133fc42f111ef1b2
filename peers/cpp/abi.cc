// The C structs as the header of the wheel has them: checked here against the numbers of the specification, and told
// to the tests, which compare them with those of the Rust side.

#include "shim.h"

#include <cstddef>
#include <sstream>

static_assert(sizeof(ArrowSchema) == 72 && alignof(ArrowSchema) == 8);
static_assert(sizeof(ArrowArray) == 80 && alignof(ArrowArray) == 8);
static_assert(sizeof(ArrowDeviceArray) == 128 && alignof(ArrowDeviceArray) == 8);
static_assert(offsetof(ArrowDeviceArray, device_id) == 80);
static_assert(offsetof(ArrowDeviceArray, device_type) == 88);
static_assert(offsetof(ArrowDeviceArray, sync_event) == 96);
static_assert(offsetof(ArrowDeviceArray, reserved) == 104);
static_assert(sizeof(ArrowDeviceArrayStream) == 48);
static_assert(offsetof(ArrowDeviceArrayStream, device_type) == 0);
static_assert(offsetof(ArrowDeviceArrayStream, get_schema) == 8);
static_assert(offsetof(ArrowDeviceArrayStream, release) == 32);
static_assert(sizeof(ArrowAsyncTask) == 16);
static_assert(sizeof(ArrowAsyncProducer) == 40);
static_assert(sizeof(ArrowAsyncDeviceStreamHandler) == 48);
static_assert(sizeof(ArrowDeviceType) == 4);
static_assert(ARROW_FLAG_DICTIONARY_ORDERED == 1 && ARROW_FLAG_NULLABLE == 2 && ARROW_FLAG_MAP_KEYS_SORTED == 4);
static_assert(ARROW_DEVICE_CPU == 1 && ARROW_DEVICE_CUDA == 2 && ARROW_DEVICE_CUDA_HOST == 3);
static_assert(ARROW_DEVICE_OPENCL == 4 && ARROW_DEVICE_VULKAN == 7 && ARROW_DEVICE_METAL == 8);
static_assert(ARROW_DEVICE_VPI == 9 && ARROW_DEVICE_ROCM == 10 && ARROW_DEVICE_ROCM_HOST == 11);
static_assert(ARROW_DEVICE_EXT_DEV == 12 && ARROW_DEVICE_CUDA_MANAGED == 13 && ARROW_DEVICE_ONEAPI == 14);
static_assert(ARROW_DEVICE_WEBGPU == 15 && ARROW_DEVICE_HEXAGON == 16);

namespace {

// As many members as a struct here has at most, and more.
#define EXPAND(...) EXPAND_2(EXPAND_2(EXPAND_2(__VA_ARGS__)))
#define EXPAND_2(...) EXPAND_1(EXPAND_1(EXPAND_1(__VA_ARGS__)))
#define EXPAND_1(...) __VA_ARGS__
#define PARENTHESES ()
#define MEMBERS(name, first, ...)                                              \
  out << "member " #name "." #first " " << offsetof(name, first) << '\n';      \
  __VA_OPT__(MEMBERS_AGAIN PARENTHESES(name, __VA_ARGS__))
#define MEMBERS_AGAIN() MEMBERS
// The structured binding must have a name for every member: with a header that has others this is not compiled.
#define STRUCT(name, ...)                                                      \
  do {                                                                         \
    const name s{};                                                            \
    [[maybe_unused]] const auto& [__VA_ARGS__] = s;                            \
    out << "struct " #name " " << sizeof(name) << ' ' << alignof(name) << '\n'; \
    EXPAND(MEMBERS(name, __VA_ARGS__))                                         \
  } while (false)
#define CONSTANT(name) out << "constant " #name " " << static_cast<int64_t>(name) << '\n'

std::string Text() {
  std::ostringstream out;
  STRUCT(ArrowSchema, format, name, metadata, flags, n_children, children, dictionary, release, private_data);
  STRUCT(ArrowArray, length, null_count, offset, n_buffers, n_children, buffers, children, dictionary, release,
         private_data);
  STRUCT(ArrowDeviceArray, array, device_id, device_type, sync_event, reserved);
  STRUCT(ArrowDeviceArrayStream, device_type, get_schema, get_next, get_last_error, release, private_data);
  STRUCT(ArrowAsyncTask, extract_data, private_data);
  STRUCT(ArrowAsyncProducer, device_type, request, cancel, additional_metadata, private_data);
  STRUCT(ArrowAsyncDeviceStreamHandler, on_schema, on_next_task, on_error, release, producer, private_data);
  CONSTANT(ARROW_FLAG_DICTIONARY_ORDERED);
  CONSTANT(ARROW_FLAG_NULLABLE);
  CONSTANT(ARROW_FLAG_MAP_KEYS_SORTED);
  CONSTANT(ARROW_DEVICE_CPU);
  CONSTANT(ARROW_DEVICE_CUDA);
  CONSTANT(ARROW_DEVICE_CUDA_HOST);
  CONSTANT(ARROW_DEVICE_OPENCL);
  CONSTANT(ARROW_DEVICE_VULKAN);
  CONSTANT(ARROW_DEVICE_METAL);
  CONSTANT(ARROW_DEVICE_VPI);
  CONSTANT(ARROW_DEVICE_ROCM);
  CONSTANT(ARROW_DEVICE_ROCM_HOST);
  CONSTANT(ARROW_DEVICE_EXT_DEV);
  CONSTANT(ARROW_DEVICE_CUDA_MANAGED);
  CONSTANT(ARROW_DEVICE_ONEAPI);
  CONSTANT(ARROW_DEVICE_WEBGPU);
  CONSTANT(ARROW_DEVICE_HEXAGON);
  return out.str();
}

}  // namespace

// In the form of the Rust side's peers_cpp_abi.
extern "C" const char* shim_abi() {
  static const std::string text = Text();
  return text.c_str();
}
