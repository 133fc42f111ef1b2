// What the files of the shim share. Functions `shim_...` are for Python's ctypes: they answer with 0 or the code of an
// arrow::Status, and shim_last_error has its text. Handles are made with `new`; whoever gets one drops it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <arrow/array.h>
#include <arrow/c/abi.h>
#include <arrow/c/bridge.h>
#include <arrow/device.h>
#include <arrow/record_batch.h>
#include <arrow/result.h>
#include <arrow/status.h>
#include <arrow/type.h>

// Simulated devices of the Rust side, by number: see peers/rust/sim.rs.
extern "C" {
struct PeersQueue;
int peers_sim_queue_new(int64_t device, PeersQueue** out);
void peers_sim_queue_drop(PeersQueue*);
int peers_sim_allocate(const PeersQueue*, size_t bytes, void** out);
int peers_sim_free(const PeersQueue*, void* address, size_t bytes);
int peers_sim_copy(const PeersQueue*, void* dst, const void* src, size_t bytes, bool to_device);
int peers_sim_record(const PeersQueue*, void** out);
int peers_sim_queue_wait(const PeersQueue*, void* event);
int peers_sim_queue_finish(const PeersQueue*);
int peers_sim_wait(int64_t device, void* event);
int peers_sim_event_drop(int64_t device, void* event);
const char* peers_last_error();
}

namespace shim {

/// Buffers, events, readers, consumers and exports that were made here and have not ended.
inline std::atomic<int64_t> live{0};

/// Counts one thing as long as it lives.
struct Live {
  Live() { ++live; }
  ~Live() { --live; }
  Live(const Live&) = delete;
};

/// Keeps the text for shim_last_error, and gives the code.
int Answer(const arrow::Status& status);

/// Runs a function's body, which answers with a Status. Nothing is thrown out of it.
template <typename Body>
int Run(Body&& body) noexcept {
  try {
    return Answer(body());
  } catch (const std::exception& e) {
    return Answer(arrow::Status::UnknownError("exception: ", e.what()));
  } catch (...) {
    return Answer(arrow::Status::UnknownError("exception of an unknown type"));
  }
}

/// An array, and the field that it came as.
struct Array {
  std::shared_ptr<arrow::Field> field;
  std::shared_ptr<arrow::Array> array;
};
using Batch = std::shared_ptr<arrow::RecordBatch>;
using Reader = std::shared_ptr<arrow::RecordBatchReader>;
using Event = std::shared_ptr<arrow::Device::SyncEvent>;

/// An arrow::Device over a simulated one.
class SimDevice;
using DeviceHandle = std::shared_ptr<SimDevice>;

/// Finds the CPU, and the devices of shim_device_new.
arrow::Result<std::shared_ptr<arrow::MemoryManager>> Map(ArrowDeviceType type, int64_t id);

/// The memory of a device, or of the CPU if there is none.
std::shared_ptr<arrow::MemoryManager> MemoryOf(const DeviceHandle* device);

/// A new event after the device's work so far.
arrow::Result<Event> Record(const DeviceHandle& device);

/// Which event an export carries.
enum class Carry : int { kNone = 0, kOwn = 1, kNew = 2 };

}  // namespace shim
