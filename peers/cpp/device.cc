// An arrow::Device over a simulated device of the Rust side. The host cannot read its memory, and its queue runs later:
// only what is waited for has happened.

#include "shim.h"

#include <map>
#include <mutex>

#include <arrow/buffer.h>

using arrow::Result;
using arrow::Status;

namespace shim {

namespace {

Status Check(int code, const char* what) {
  if (code == 0) return Status::OK();
  return Status::IOError(what, ": ", peers_last_error(), " (", code, ")");
}

class SimStream : public arrow::Device::Stream {
 public:
  SimStream(PeersQueue* queue, release_fn_t release) : Stream(queue, std::move(release)) {}

  PeersQueue* queue() const { return static_cast<PeersQueue*>(stream_.get()); }

  Status WaitEvent(const arrow::Device::SyncEvent& event) override {
    // get_raw only reads, but says otherwise.
    auto& readable = const_cast<arrow::Device::SyncEvent&>(event);
    return Check(peers_sim_queue_wait(queue(), readable.get_raw()), "queue wait");
  }

  Status Synchronize() const override;
};

}  // namespace

class SimDevice : public arrow::Device {
 public:
  static Result<std::shared_ptr<SimDevice>> Make(int64_t id) {
    PeersQueue* queue = nullptr;
    ARROW_RETURN_NOT_OK(Check(peers_sim_queue_new(id, &queue), "queue"));
    return std::shared_ptr<SimDevice>(new SimDevice(id, queue));
  }

  ~SimDevice() override {
    // Copies that were not waited for still read their sources.
    (void)stream_->Synchronize();
  }

  const char* type_name() const override { return "shim::SimDevice"; }
  std::string ToString() const override { return "SimDevice(" + std::to_string(device_id()) + ")"; }
  bool Equals(const Device& other) const override {
    const auto* same = dynamic_cast<const SimDevice*>(&other);
    return same && same->id_ == id_;
  }
  int64_t device_id() const override { return id_; }
  arrow::DeviceAllocationType device_type() const override { return arrow::DeviceAllocationType::kEXT_DEV; }
  std::shared_ptr<arrow::MemoryManager> default_memory_manager() override;
  Result<std::shared_ptr<Stream>> MakeStream() override { return stream_; }
  Result<std::shared_ptr<Stream>> MakeStream(unsigned int) override { return stream_; }
  Result<std::shared_ptr<Stream>> WrapStream(void* stream, Stream::release_fn_t release) override {
    return std::make_shared<SimStream>(static_cast<PeersQueue*>(stream), std::move(release));
  }

  SimStream& stream() { return *stream_; }

  /// Keeps the source of a copy until Settle.
  void Keep(std::shared_ptr<arrow::Buffer> source) {
    std::lock_guard lock(mutex_);
    sources_.push_back(std::move(source));
  }

  /// Runs all work.
  Status Settle() {
    ARROW_RETURN_NOT_OK(stream_->Synchronize());
    std::lock_guard lock(mutex_);
    sources_.clear();
    return Status::OK();
  }

  /// Whether copies to the host wait for the event of what they read. Without, they race.
  std::atomic<bool> waits{true};

 private:
  SimDevice(int64_t id, PeersQueue* queue)
      : id_(id), stream_(std::make_shared<SimStream>(queue, [](void* queue) {
          peers_sim_queue_drop(static_cast<PeersQueue*>(queue));
        })) {}

  const int64_t id_;
  std::shared_ptr<SimStream> stream_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<arrow::Buffer>> sources_;
};

namespace {

class SimEvent : public arrow::Device::SyncEvent {
 public:
  SimEvent(std::shared_ptr<SimDevice> device, void* event, release_fn_t release)
      : SyncEvent(event, std::move(release)), device_(std::move(device)) {}
  ~SimEvent() override { sync_event_.reset(); }  // While there is a device.

  Status Wait() override { return Check(peers_sim_wait(device_->device_id(), get_raw()), "wait"); }

  /// The event is made by recording it.
  Status Record(const arrow::Device::Stream& stream) override {
    auto* queue = static_cast<const PeersQueue*>(stream.get_raw());
    void* event = nullptr;
    ARROW_RETURN_NOT_OK(Check(peers_sim_record(queue, &event), "record"));
    sync_event_.reset(event);
    return Status::OK();
  }

 private:
  std::shared_ptr<SimDevice> device_;
  Live live_;
};

/// Memory of the device that this side allocated.
class SimBuffer : public arrow::Buffer {
 public:
  SimBuffer(std::shared_ptr<SimDevice> device, void* address, int64_t size)
      : Buffer(static_cast<const uint8_t*>(address), size, device->default_memory_manager()),
        device_(std::move(device)) {}
  ~SimBuffer() override {
    if (address()) peers_sim_free(device_->stream().queue(), reinterpret_cast<void*>(address()), size());
  }

 private:
  std::shared_ptr<SimDevice> device_;
  Live live_;
};

class SimMemory : public arrow::MemoryManager {
 public:
  explicit SimMemory(const std::shared_ptr<arrow::Device>& device) : MemoryManager(device) {}

  Result<std::shared_ptr<arrow::io::RandomAccessFile>> GetBufferReader(std::shared_ptr<arrow::Buffer>) override {
    return Status::NotImplemented("no reader of simulated memory");
  }
  Result<std::shared_ptr<arrow::io::OutputStream>> GetBufferWriter(std::shared_ptr<arrow::Buffer>) override {
    return Status::NotImplemented("no writer of simulated memory");
  }

  Result<std::unique_ptr<arrow::Buffer>> AllocateBuffer(int64_t size) override {
    void* address = nullptr;  // The device has no memory of 0 bytes.
    if (size > 0) ARROW_RETURN_NOT_OK(Check(peers_sim_allocate(Sim()->stream().queue(), size, &address), "allocate"));
    return std::make_unique<SimBuffer>(Sim(), address, size);
  }

  Result<Event> MakeDeviceSyncEvent() override {
    auto release = [id = device_->device_id()](void* event) { peers_sim_event_drop(id, event); };
    return std::make_shared<SimEvent>(Sim(), nullptr, std::move(release));
  }

  Result<Event> WrapDeviceSyncEvent(void* event, arrow::Device::SyncEvent::release_fn_t release) override {
    return std::make_shared<SimEvent>(Sim(), event, std::move(release));
  }

 protected:
  Result<std::shared_ptr<arrow::Buffer>> CopyBufferFrom(const std::shared_ptr<arrow::Buffer>& source,
                                                        const std::shared_ptr<MemoryManager>& from) override {
    if (!from->is_cpu()) return nullptr;
    ARROW_ASSIGN_OR_RAISE(auto copy, AllocateBuffer(source->size()));
    if (source->size() > 0) {
      auto* to = reinterpret_cast<void*>(copy->address());
      Sim()->Keep(source);
      const int code = peers_sim_copy(Sim()->stream().queue(), to, source->data(), source->size(), true);
      ARROW_RETURN_NOT_OK(Check(code, "copy to the device"));
    }
    return std::shared_ptr<arrow::Buffer>(std::move(copy));
  }

  Result<std::shared_ptr<arrow::Buffer>> CopyBufferTo(const std::shared_ptr<arrow::Buffer>& source,
                                                      const std::shared_ptr<MemoryManager>& to) override {
    if (!to->is_cpu()) return nullptr;
    ARROW_ASSIGN_OR_RAISE(auto copy, to->AllocateBuffer(source->size()));
    if (source->size() > 0) ARROW_RETURN_NOT_OK(CopyDown(*source, copy->mutable_data()));
    return std::shared_ptr<arrow::Buffer>(std::move(copy));
  }

 private:
  std::shared_ptr<SimDevice> Sim() const { return std::static_pointer_cast<SimDevice>(device_); }

  Status CopyDown(const arrow::Buffer& source, uint8_t* to) {
    auto device = Sim();
    auto& stream = device->stream();
    if (Event event = source.device_sync_event(); event && device->waits) {
      ARROW_RETURN_NOT_OK(stream.WaitEvent(*event));
    }
    const auto* from = reinterpret_cast<const void*>(source.address());
    ARROW_RETURN_NOT_OK(Check(peers_sim_copy(stream.queue(), to, from, source.size(), false), "copy to the host"));
    return stream.Synchronize();
  }
};

Status SimStream::Synchronize() const { return Check(peers_sim_queue_finish(queue()), "synchronize"); }

/// Live devices by id.
std::mutex devices_mutex;
std::map<int64_t, std::weak_ptr<SimDevice>> devices;

Result<std::shared_ptr<arrow::MemoryManager>> Find(int64_t id) {
  std::lock_guard lock(devices_mutex);
  auto found = devices.find(id);
  auto device = found == devices.end() ? nullptr : found->second.lock();
  if (!device) return Status::KeyError("no simulated device ", id);
  return device->default_memory_manager();
}

}  // namespace

std::shared_ptr<arrow::MemoryManager> SimDevice::default_memory_manager() {
  return std::make_shared<SimMemory>(shared_from_this());
}

Result<std::shared_ptr<arrow::MemoryManager>> Map(ArrowDeviceType type, int64_t id) {
  return type == ARROW_DEVICE_EXT_DEV ? Find(id) : arrow::DefaultDeviceMemoryMapper(type, id);
}

std::shared_ptr<arrow::MemoryManager> MemoryOf(const DeviceHandle* device) {
  return device ? (*device)->default_memory_manager() : arrow::default_cpu_memory_manager();
}

Result<Event> Record(const DeviceHandle& device) {
  ARROW_ASSIGN_OR_RAISE(auto event, device->default_memory_manager()->MakeDeviceSyncEvent());
  ARROW_RETURN_NOT_OK(event->Record(device->stream()));
  return event;
}

}  // namespace shim

using shim::DeviceHandle;
using shim::Run;

extern "C" {

int shim_device_new(int64_t number, DeviceHandle** out) {
  return Run([&]() -> Status {
    // For readers, which are given no mapper of their own here; once in a process.
    static const Status registered =
        arrow::RegisterDeviceMapper(arrow::DeviceAllocationType::kEXT_DEV, shim::Find);
    ARROW_RETURN_NOT_OK(registered);
    ARROW_ASSIGN_OR_RAISE(auto device, shim::SimDevice::Make(number));
    std::lock_guard lock(shim::devices_mutex);
    shim::devices[device->device_id()] = device;
    *out = new DeviceHandle(std::move(device));
    return Status::OK();
  });
}

void shim_device_drop(DeviceHandle* device) { delete device; }

// Runs all work of the device's queue, and lets go of what it read.
int shim_device_settle(const DeviceHandle* device) {
  return Run([&] { return (*device)->Settle(); });
}

// Whether copies to the host wait for the event of what they read.
void shim_device_waits(const DeviceHandle* device, bool waits) { (*device)->waits = waits; }

}  // extern "C"
