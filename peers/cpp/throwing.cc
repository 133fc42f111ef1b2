// Structs of a producer in C++ whose callbacks throw. No Arrow library has a part in them.

#include <cerrno>
#include <stdexcept>

#include "shim.h"

namespace {

/// Where an exception is thrown.
enum Where : int { kGetSchema = 0, kGetNext = 1, kGetLastError = 2, kStreamRelease = 3, kArrayRelease = 4 };

const void* no_mask[1] = {nullptr};

void ReleaseSchema(ArrowSchema* schema) { schema->release = nullptr; }

void ReleaseArray(ArrowArray* array) { array->release = nullptr; }

[[noreturn]] void ThrowFromRelease(ArrowArray*) { throw std::runtime_error("the array's release threw"); }

/// A struct without members.
void WriteSchema(ArrowSchema* out) {
  *out = ArrowSchema{};
  out->format = "+s";
  out->name = "";
  out->release = ReleaseSchema;
}

void WriteArray(ArrowDeviceArray* out, bool throws) {
  *out = ArrowDeviceArray{};
  out->array.length = 3;
  out->array.n_buffers = 1;
  out->array.buffers = no_mask;
  out->array.release = throws ? ThrowFromRelease : ReleaseArray;
  out->device_id = -1;
  out->device_type = ARROW_DEVICE_CPU;
}

/// A stream's own data.
struct State {
  Where where;
  int batches = 2;
};

State& StateOf(const ArrowDeviceArrayStream* stream) { return *static_cast<State*>(stream->private_data); }

int GetSchema(ArrowDeviceArrayStream* stream, ArrowSchema* out) {
  if (StateOf(stream).where == kGetSchema) throw std::runtime_error("get_schema threw");
  WriteSchema(out);
  return 0;
}

int GetNext(ArrowDeviceArrayStream* stream, ArrowDeviceArray* out) {
  State& state = StateOf(stream);
  if (state.where == kGetNext) throw std::runtime_error("get_next threw");
  if (state.where == kGetLastError) return EIO;
  *out = ArrowDeviceArray{};
  if (state.batches-- > 0) WriteArray(out, /*throws=*/state.where == kArrayRelease);
  return 0;
}

const char* GetLastError(ArrowDeviceArrayStream* stream) {
  if (StateOf(stream).where == kGetLastError) throw std::runtime_error("get_last_error threw");
  return nullptr;
}

void ReleaseStream(ArrowDeviceArrayStream* stream) {
  const Where where = StateOf(stream).where;
  delete &StateOf(stream);
  if (where == kStreamRelease) throw std::runtime_error("the stream's release threw");
  stream->release = nullptr;
}

}  // namespace

extern "C" {

// Three rows on the CPU; `release` throws.
void shim_throwing_array(ArrowDeviceArray* out, ArrowSchema* schema_out) {
  WriteArray(out, /*throws=*/true);
  WriteSchema(schema_out);
}

// A stream of two such batches; `where` is one of the numbers above.
void shim_throwing_stream(ArrowDeviceArrayStream* out, int where) {
  auto* state = new State{static_cast<Where>(where)};
  *out = ArrowDeviceArrayStream{ARROW_DEVICE_CPU, GetSchema, GetNext, GetLastError, ReleaseStream, state};
}

}  // extern "C"
