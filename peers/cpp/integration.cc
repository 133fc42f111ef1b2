// Arrow C++'s side of capi/arrow_device_integration.h: the same functions, with its name. libarrow has no reader of the
// integration files in JSON, so these take the files in Arrow IPC with the same content.

#include "shim.h"

#include <string_view>

#include <arrow/compare.h>
#include <arrow/io/file.h>
#include <arrow/ipc/reader.h>
#include <arrow/memory_pool.h>

using arrow::Result;
using arrow::Status;
using shim::Batch;
using shim::DeviceHandle;
using shim::Reader;

extern "C" {
int shim_device_new(int64_t number, DeviceHandle** out);
int shim_device_settle(const DeviceHandle* device);
}

namespace {

struct Case {
  std::shared_ptr<arrow::Schema> schema;
  arrow::RecordBatchVector batches;

  Result<Batch> At(int number) const {
    if (number < 0 || number >= static_cast<int>(batches.size())) return Status::Invalid("no batch ", number);
    return batches[number];
  }
};

Result<Case> Read(std::string_view path) {
  if (path.ends_with(".json")) return Status::NotImplemented("libarrow does not read integration files in JSON");
  ARROW_ASSIGN_OR_RAISE(auto file, arrow::io::ReadableFile::Open(std::string(path)));
  if (path.ends_with(".arrow_file")) {
    ARROW_ASSIGN_OR_RAISE(auto reader, arrow::ipc::RecordBatchFileReader::Open(file));
    ARROW_ASSIGN_OR_RAISE(auto batches, reader->ToRecordBatches());
    return Case{reader->schema(), std::move(batches)};
  }
  ARROW_ASSIGN_OR_RAISE(auto reader, arrow::ipc::RecordBatchStreamReader::Open(file));
  ARROW_ASSIGN_OR_RAISE(auto batches, reader->ToRecordBatches());
  return Case{reader->schema(), std::move(batches)};
}

/// The device of a label: null for the CPU, else a device over the simulated one of the other side, kept for ever.
Result<DeviceHandle*> DeviceOf(int32_t type) {
  if (type == ARROW_DEVICE_CPU) return nullptr;
  if (type != ARROW_DEVICE_EXT_DEV) return Status::NotImplemented("device type ", type);
  static DeviceHandle* device = nullptr;
  if (!device && shim_device_new(0, &device) != 0) return Status::IOError("no simulated device");
  return device;
}

Result<Batch> To(const DeviceHandle* device, const Batch& batch) {
  if (!device) return batch;
  ARROW_ASSIGN_OR_RAISE(auto copy, batch->CopyTo(shim::MemoryOf(device)));
  if (copy->device_type() != arrow::DeviceAllocationType::kEXT_DEV) {
    return Status::NotImplemented("Arrow C++ labels data without any buffer as the CPU's");
  }
  ARROW_ASSIGN_OR_RAISE(auto event, shim::Record(*device));
  return arrow::RecordBatch::Make(copy->schema(), copy->num_rows(), copy->columns(), std::move(event));
}

Status Compare(const Batch& got, int32_t type, const arrow::RecordBatch& expected) {
  if (static_cast<int32_t>(got->device_type()) != type && expected.num_rows() > 0) {
    return Status::Invalid("device type: expected ", type, ", got ", static_cast<int>(got->device_type()));
  }
  ARROW_ASSIGN_OR_RAISE(auto there, got->CopyTo(arrow::default_cpu_memory_manager()));
  ARROW_RETURN_NOT_OK(there->Validate());
  if (there->Equals(expected, true, arrow::EqualOptions::Defaults().nans_equal(true))) return Status::OK();
  return Status::Invalid("batch: expected ", expected.ToString(), ", got ", there->ToString());
}

/// Arrow C++ reads offsets of strings before it waits for the event, so this waits.
Result<Batch> Import(ArrowDeviceArray* array, std::shared_ptr<arrow::Schema> schema) {
  if (array->sync_event && peers_sim_wait(array->device_id, array->sync_event) != 0) {
    return Status::IOError(peers_last_error());
  }
  return arrow::ImportDeviceRecordBatch(array, std::move(schema), shim::Map);
}

Status ImportStream(const Case& given, int32_t type, ArrowDeviceArrayStream* stream) {
  arrow::RecordBatchVector batches;
  std::shared_ptr<arrow::Schema> schema;
  if (type == ARROW_DEVICE_CPU) {
    ARROW_ASSIGN_OR_RAISE(auto reader, arrow::ImportDeviceRecordBatchReader(stream));
    schema = reader->schema();
    ARROW_ASSIGN_OR_RAISE(batches, reader->ToRecordBatches());
  } else {
    // As above, which a reader does not allow.
    std::unique_ptr<ArrowDeviceArrayStream, void (*)(ArrowDeviceArrayStream*)> kept(stream, [](auto* s) { s->release(s); });
    ArrowSchema c_schema{};
    if (stream->get_schema(stream, &c_schema) != 0) return Status::IOError(stream->get_last_error(stream));
    ARROW_ASSIGN_OR_RAISE(schema, arrow::ImportSchema(&c_schema));
    for (;;) {
      ArrowDeviceArray array{};
      if (stream->get_next(stream, &array) != 0) return Status::IOError(stream->get_last_error(stream));
      if (!array.array.release) break;
      ARROW_ASSIGN_OR_RAISE(auto batch, Import(&array, schema));
      batches.push_back(std::move(batch));
    }
  }
  if (!schema->Equals(given.schema, true)) return Status::Invalid("schema: got ", schema->ToString(true));
  if (batches.size() != given.batches.size()) return Status::Invalid(batches.size(), " batches came");
  for (size_t i = 0; i < batches.size(); ++i) ARROW_RETURN_NOT_OK(Compare(batches[i], type, *given.batches[i]));
  return Status::OK();
}

/// Null, or what is wrong.
template <typename Body>
const char* Text(Body&& body) {
  thread_local std::string text;
  Status status;
  shim::Run([&] { return status = body(); });
  if (status.ok()) return nullptr;
  text = (status.IsNotImplemented() ? "not supported: " : "") + status.ToString();
  return text.c_str();
}

}  // namespace

extern "C" {

const char* ArrowCpp_CDeviceIntegration_ExportSchemaFromJson(const char* path, ArrowSchema* out) {
  return Text([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto given, Read(path));
    return arrow::ExportSchema(*given.schema, out);
  });
}

const char* ArrowCpp_CDeviceIntegration_ImportSchemaAndCompareToJson(const char* path, ArrowSchema* schema) {
  return Text([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto imported, arrow::ImportSchema(schema));
    ARROW_ASSIGN_OR_RAISE(auto given, Read(path));
    if (imported->Equals(given.schema, true)) return Status::OK();
    return Status::Invalid("expected ", given.schema->ToString(true), ", got ", imported->ToString(true));
  });
}

const char* ArrowCpp_CDeviceIntegration_ExportBatchFromJson(const char* path, int number, int32_t type,
                                                            ArrowDeviceArray* out) {
  return Text([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto device, DeviceOf(type));
    ARROW_ASSIGN_OR_RAISE(auto given, Read(path));
    ARROW_ASSIGN_OR_RAISE(auto batch, given.At(number));
    ARROW_ASSIGN_OR_RAISE(batch, To(device, batch));
    return arrow::ExportDeviceRecordBatch(*batch, batch->GetSyncEvent(), out);
  });
}

const char* ArrowCpp_CDeviceIntegration_ImportBatchAndCompareToJson(const char* path, int number, int32_t type,
                                                                    ArrowDeviceArray* array) {
  return Text([&]() -> Status {
    ARROW_RETURN_NOT_OK(DeviceOf(type));
    ARROW_ASSIGN_OR_RAISE(auto given, Read(path));
    ARROW_ASSIGN_OR_RAISE(auto imported, Import(array, given.schema));
    ARROW_ASSIGN_OR_RAISE(auto expected, given.At(number));
    return Compare(imported, type, *expected);
  });
}

const char* ArrowCpp_CDeviceIntegration_ExportStreamFromJson(const char* path, int32_t type,
                                                             ArrowDeviceArrayStream* out) {
  return Text([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto device, DeviceOf(type));
    ARROW_ASSIGN_OR_RAISE(auto given, Read(path));
    for (auto& batch : given.batches) {
      ARROW_ASSIGN_OR_RAISE(batch, To(device, batch));
    }
    const auto label = static_cast<arrow::DeviceAllocationType>(type);
    ARROW_ASSIGN_OR_RAISE(auto reader, arrow::RecordBatchReader::Make(given.batches, given.schema, label));
    return arrow::ExportDeviceRecordBatchReader(reader, out);
  });
}

const char* ArrowCpp_CDeviceIntegration_ImportStreamAndCompareToJson(const char* path, int32_t type,
                                                                     ArrowDeviceArrayStream* stream) {
  return Text([&]() -> Status {
    ARROW_RETURN_NOT_OK(DeviceOf(type));
    ARROW_ASSIGN_OR_RAISE(auto given, Read(path));
    return ImportStream(given, type, stream);
  });
}

// Without the memory of the simulated device, which the other side counts.
int64_t ArrowCpp_CDeviceIntegration_BytesAllocated() {
  if (auto device = DeviceOf(ARROW_DEVICE_EXT_DEV); device.ok()) shim_device_settle(*device);
  return arrow::default_memory_pool()->bytes_allocated();
}

}  // extern "C"
