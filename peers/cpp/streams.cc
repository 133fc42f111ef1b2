// Record batch readers: in and out.

#include "shim.h"

using arrow::Status;
using shim::Batch;
using shim::Reader;
using shim::Run;

namespace {

/// What a reader does.
struct Script {
  std::shared_ptr<arrow::Schema> schema;
  arrow::RecordBatchVector batches;
  arrow::DeviceAllocationType device_type;
  /// The place of the failure, or -1; it comes again and again.
  int64_t fail_at;
  Status failure;
};

class ScriptedReader : public arrow::RecordBatchReader {
 public:
  explicit ScriptedReader(Script script) : script_(std::move(script)) {}

  std::shared_ptr<arrow::Schema> schema() const override { return script_.schema; }
  arrow::DeviceAllocationType device_type() const override { return script_.device_type; }

  Status ReadNext(Batch* out) override {
    if (next_ == script_.fail_at) return script_.failure;
    const bool more = next_ < static_cast<int64_t>(script_.batches.size());
    *out = more ? script_.batches[next_++] : nullptr;
    return Status::OK();
  }

 private:
  Script script_;
  int64_t next_ = 0;
  shim::Live live_;
};

}  // namespace

extern "C" {

// The device of its arrays is found with RegisterDeviceMapper.
int shim_reader_import(ArrowDeviceArrayStream* stream, Reader** out) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto reader, arrow::ImportDeviceRecordBatchReader(stream));
    *out = new Reader(std::move(reader));
    return Status::OK();
  });
}

int shim_reader_export(const Reader* reader, ArrowDeviceArrayStream* out) {
  return Run([&] { return arrow::ExportDeviceRecordBatchReader(*reader, out); });
}

// `out` is null at the end.
int shim_reader_next(const Reader* reader, Batch** out) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto batch, (*reader)->Next());
    *out = batch ? new Batch(std::move(batch)) : nullptr;
    return Status::OK();
  });
}

int shim_reader_close(const Reader* reader) {
  return Run([&] { return (*reader)->Close(); });
}

int shim_reader_device_type(const Reader* reader) { return static_cast<int>((*reader)->device_type()); }

void shim_reader_drop(Reader* reader) { delete reader; }

// A reader of these batches, with the schema of `like`. In place of batch `fail_at`, unless that is negative, it fails
// with this code and text.
int shim_reader_new(const Batch* like, Batch* const* batches, int64_t count, int device_type, int64_t fail_at, int code,
                    const char* text, Reader** out) {
  return Run([&]() -> Status {
    Script script{(*like)->schema(), {}, static_cast<arrow::DeviceAllocationType>(device_type), fail_at, Status::OK()};
    for (int64_t i = 0; i < count; ++i) script.batches.push_back(*batches[i]);
    if (fail_at >= 0) script.failure = Status(static_cast<arrow::StatusCode>(code), text);
    *out = new Reader(std::make_shared<ScriptedReader>(std::move(script)));
    return Status::OK();
  });
}

}  // extern "C"
