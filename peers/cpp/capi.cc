// The C library, driven by Arrow C++ through its header.

#include "../../capi/arrow_device.h"
#include "shim.h"

using arrow::Status;
using shim::Batch;
using shim::Reader;

namespace {

Status Check(int code) {
  return code == 0 ? Status::OK() : Status::IOError("errno ", code, ": ", arrow_device_last_error());
}

/// To the device and back to the CPU; both times the structs are replaced by those of the copy.
arrow::Result<Batch> ThereAndBack(const Batch& batch, const char* device) {
  ArrowDeviceArray array{};
  ArrowSchema schema{};
  ARROW_RETURN_NOT_OK(arrow::ExportDeviceRecordBatch(*batch, nullptr, &array, &schema));
  ARROW_RETURN_NOT_OK(Check(arrow_device_copy(&array, &schema, device, &array, &schema)));
  ARROW_RETURN_NOT_OK(Check(arrow_device_copy(&array, &schema, "cpu", &array, &schema)));
  return arrow::ImportDeviceRecordBatch(&array, &schema);
}

}  // namespace

extern "C" {

// Reads a file, sends each batch to the device and back, compares it, and writes all of them to another file. Answers
// how many batches there were.
int shim_capi_there_and_back(const char* from, const char* device, const char* to, int64_t* batches) {
  return shim::Run([&]() -> Status {
    ArrowDeviceArrayStream stream{};
    ARROW_RETURN_NOT_OK(Check(arrow_device_open(from, "cpu", &stream)));
    ARROW_ASSIGN_OR_RAISE(Reader reader, arrow::ImportDeviceRecordBatchReader(&stream));
    arrow::RecordBatchVector back;
    for (;;) {
      ARROW_ASSIGN_OR_RAISE(Batch batch, reader->Next());
      if (batch == nullptr) break;
      ARROW_ASSIGN_OR_RAISE(Batch same, ThereAndBack(batch, device));
      ARROW_RETURN_NOT_OK(same->ValidateFull());
      if (!same->Equals(*batch, /*check_metadata=*/true)) return Status::Invalid("other values came back");
      back.push_back(std::move(same));
    }
    *batches = static_cast<int64_t>(back.size());
    ARROW_ASSIGN_OR_RAISE(reader, arrow::RecordBatchReader::Make(std::move(back), reader->schema()));
    ARROW_RETURN_NOT_OK(arrow::ExportDeviceRecordBatchReader(reader, &stream));
    return Check(arrow_device_write_ipc(&stream, to));
  });
}

}  // extern "C"
