// Arrays and record batches: in, out, and what is done with them between.

#include "shim.h"

#include <arrow/c/helpers.h>

using arrow::Result;
using arrow::Status;

namespace shim {
namespace {

thread_local std::string last_error;

/// The event that the buffers of imported data carry; null if there is none.
Event EventOf(const arrow::ArrayData& data) {
  for (const auto& buffer : data.buffers) {
    if (Event event = buffer ? buffer->device_sync_event() : nullptr) return event;
  }
  for (const auto& child : data.child_data) {
    if (Event event = EventOf(*child)) return event;
  }
  return data.dictionary ? EventOf(*data.dictionary) : nullptr;
}

Event EventOf(const arrow::RecordBatch& batch) {
  if (batch.GetSyncEvent()) return batch.GetSyncEvent();
  for (int i = 0; i < batch.num_columns(); ++i) {
    if (Event event = EventOf(*batch.column_data(i))) return event;
  }
  return nullptr;
}

Result<Event> Choose(int carry, const Event& own, const DeviceHandle* device) {
  switch (static_cast<Carry>(carry)) {
    case Carry::kNone:
      return nullptr;
    case Carry::kOwn:
      return own;
    case Carry::kNew:
      return device ? Record(*device) : Status::Invalid("no device to record an event on");
  }
  return Status::Invalid("no such choice of an event");
}

}  // namespace

int Answer(const Status& status) {
  if (!status.ok()) last_error = status.ToString();
  return static_cast<int>(status.code());
}

}  // namespace shim

using shim::Array;
using shim::Batch;
using shim::DeviceHandle;
using shim::Run;

extern "C" {

const char* shim_last_error() { return shim::last_error.c_str(); }

// What was made here and lives.
int64_t shim_live() { return shim::live; }

// ---- Arrays ----

int shim_array_import(ArrowDeviceArray* array, ArrowSchema* schema, Array** out) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto field, arrow::ImportField(schema));
    ARROW_ASSIGN_OR_RAISE(auto imported, arrow::ImportDeviceArray(array, field->type(), shim::Map));
    *out = new Array{std::move(field), std::move(imported)};
    return Status::OK();
  });
}

int shim_array_export(const Array* array, int carry, const DeviceHandle* device, ArrowDeviceArray* out,
                      ArrowSchema* out_schema) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto event, shim::Choose(carry, shim::EventOf(*array->array->data()), device));
    ARROW_RETURN_NOT_OK(arrow::ExportDeviceArray(*array->array, std::move(event), out));
    return arrow::ExportField(*array->field, out_schema);
  });
}

// A copy of all buffers on the device, or on the CPU if there is none.
int shim_array_copy(const Array* array, const DeviceHandle* device, Array** out) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto copy, array->array->CopyTo(shim::MemoryOf(device)));
    *out = new Array{array->field, std::move(copy)};
    return Status::OK();
  });
}

void shim_array_drop(Array* array) { delete array; }

// ---- Batches ----

int shim_batch_import(ArrowDeviceArray* array, ArrowSchema* schema, Batch** out) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto batch, arrow::ImportDeviceRecordBatch(array, schema, shim::Map));
    *out = new Batch(std::move(batch));
    return Status::OK();
  });
}

int shim_batch_export(const Batch* batch, int carry, const DeviceHandle* device, ArrowDeviceArray* out,
                      ArrowSchema* out_schema) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto event, shim::Choose(carry, shim::EventOf(**batch), device));
    return arrow::ExportDeviceRecordBatch(**batch, std::move(event), out, out_schema);
  });
}

// As shim_array_copy. What is copied to a device carries an event after the copies.
int shim_batch_copy(const Batch* batch, const DeviceHandle* device, Batch** out) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto copy, (*batch)->CopyTo(shim::MemoryOf(device)));
    if (device) {
      ARROW_ASSIGN_OR_RAISE(auto event, shim::Record(*device));
      copy = arrow::RecordBatch::Make(copy->schema(), copy->num_rows(), copy->columns(), std::move(event));
    }
    *out = new Batch(std::move(copy));
    return Status::OK();
  });
}

// The first column of one batch, and the others of another of the same schema.
int shim_batch_mix(const Batch* first, const Batch* others, Batch** out) {
  return Run([&]() -> Status {
    auto columns = (*others)->columns();
    columns[0] = (*first)->column(0);
    *out = new Batch(arrow::RecordBatch::Make((*others)->schema(), (*others)->num_rows(), std::move(columns)));
    return Status::OK();
  });
}

void shim_batch_drop(Batch* batch) { delete batch; }

int shim_batch_device_type(const Batch* batch) { return static_cast<int>((*batch)->device_type()); }

// Moves columns out of the struct, as a consumer may; releases the rest, and only then imports the columns.
int shim_move_columns(ArrowDeviceArray* array, ArrowSchema* c_schema, const int* columns, int count, Batch** out) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto schema, arrow::ImportSchema(c_schema));
    std::vector<ArrowDeviceArray> moved(count);
    for (int i = 0; i < count; ++i) {
      moved[i] = *array;  // The device and the event are the parent's.
      ArrowArrayMove(array->array.children[columns[i]], &moved[i].array);
    }
    const int64_t rows = array->array.length;
    ArrowArrayRelease(&array->array);
    std::vector<std::shared_ptr<arrow::Field>> fields;
    std::vector<std::shared_ptr<arrow::Array>> arrays;
    for (int i = 0; i < count; ++i) {
      fields.push_back(schema->field(columns[i]));
      ARROW_ASSIGN_OR_RAISE(auto column, arrow::ImportDeviceArray(&moved[i], fields.back()->type(), shim::Map));
      arrays.push_back(std::move(column));
    }
    *out = new Batch(arrow::RecordBatch::Make(arrow::schema(fields, schema->metadata()), rows, arrays));
    return Status::OK();
  });
}

}  // extern "C"
