// What the files of the shim share. Functions `shim_...` are for Python's ctypes: they answer with 0 or the code of an
// arrow::Status, and shim_last_error has its text. Handles are made with `new`; whoever gets one drops it.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <arrow/api.h>
#include <arrow/c/abi.h>
#include <arrow/c/bridge.h>
#include <arrow/device.h>

// The simulated device of the Rust side: see peers/rust/sim.rs.
extern "C" {
struct PeersSim;
struct PeersQueue;
void peers_sim_hold(const PeersSim*);
void peers_sim_drop(const PeersSim*);
int64_t peers_sim_id(const PeersSim*);
int peers_sim_queue_new(const PeersSim*, PeersQueue** out);
void peers_sim_queue_drop(PeersQueue*);
int peers_sim_allocate(const PeersQueue*, size_t bytes, void** out);
int peers_sim_free(const PeersQueue*, void* address, size_t bytes);
int peers_sim_copy(const PeersQueue*, void* dst, const void* src, size_t bytes, int how);
int peers_sim_record(const PeersQueue*, void** out);
int peers_sim_queue_wait(const PeersQueue*, void* event);
int peers_sim_queue_finish(const PeersQueue*);
int peers_sim_wait(const PeersSim*, void* event);
int peers_sim_event_drop(const PeersSim*, void* event);
const char* peers_cpp_last_error();
}

namespace shim {

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

/// The event that the buffers of imported data carry; null if there is none.
Event EventOf(const arrow::ArrayData& data);
Event EventOf(const arrow::RecordBatch& batch);

/// Which event an export carries.
enum class Carry : int { kNone = 0, kOwn = 1, kNew = 2 };

}  // namespace shim
