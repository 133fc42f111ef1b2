// Arrays and record batches: in, out, and what is done with them between.

#include "shim.h"

#include <arrow/c/helpers.h>

using arrow::Result;
using arrow::Status;

namespace shim {
namespace {

thread_local std::string last_error;

arrow::EqualOptions Strict() {
  return arrow::EqualOptions::Defaults().nans_equal(true).signed_zeros_equal(false);
}

/// The start of a text, for an error.
std::string Start(std::string text) {
  constexpr size_t kMost = 600;
  if (text.size() > kMost) text.replace(kMost, text.npos, "...");
  return text;
}

template <typename T>
Status Same(const T& expected, const T& actual, bool equal) {
  if (equal) return Status::OK();
  return Status::UnknownError("expected ", Start(expected.ToString()), "\nactual ", Start(actual.ToString()));
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

Status WaitFor(const Event& event) { return event ? event->Wait() : Status::OK(); }

Result<std::shared_ptr<arrow::Array>> ImportHost(ArrowArray* array, ArrowSchema* schema,
                                                 std::shared_ptr<arrow::Field>* field) {
  ARROW_ASSIGN_OR_RAISE(*field, arrow::ImportField(schema));
  return arrow::ImportArray(array, (*field)->type());
}

}  // namespace

int Answer(const Status& status) {
  if (!status.ok()) last_error = status.ToString();
  return static_cast<int>(status.code());
}

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

}  // namespace shim

using shim::Array;
using shim::Batch;
using shim::DeviceHandle;
using shim::Run;

extern "C" {

const char* shim_last_error() { return shim::last_error.c_str(); }

int64_t shim_pool_bytes() { return arrow::default_memory_pool()->bytes_allocated(); }

// ---- Arrays ----

int shim_array_import(ArrowDeviceArray* array, ArrowSchema* schema, Array** out) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto field, arrow::ImportField(schema));
    ARROW_ASSIGN_OR_RAISE(auto imported, arrow::ImportDeviceArray(array, field->type(), shim::Map));
    *out = new Array{std::move(field), std::move(imported)};
    return Status::OK();
  });
}

// From the plain host structs.
int shim_array_import_host(ArrowArray* array, ArrowSchema* schema, Array** out) {
  return Run([&]() -> Status {
    std::shared_ptr<arrow::Field> field;
    ARROW_ASSIGN_OR_RAISE(auto imported, shim::ImportHost(array, schema, &field));
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

// For data that the host can read.
int shim_array_validate(const Array* array) {
  return Run([&] { return array->array->ValidateFull(); });
}

// Types, names, metadata and values. For data that the host can read.
int shim_array_same(const Array* expected, const Array* actual) {
  return Run([&]() -> Status {
    const auto &e = *expected, &a = *actual;
    ARROW_RETURN_NOT_OK(shim::Same(*e.field, *a.field, e.field->Equals(*a.field, /*check_metadata=*/true)));
    return shim::Same(*e.array, *a.array, e.array->Equals(*a.array, shim::Strict()));
  });
}

int shim_array_slice(const Array* array, int64_t offset, int64_t length, Array** out) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto slice, array->array->SliceSafe(offset, length));
    *out = new Array{array->field, std::move(slice)};
    return Status::OK();
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

// Makes this thread wait for the event that came with the array, if one did.
int shim_array_wait(const Array* array) {
  return Run([&] { return shim::WaitFor(shim::EventOf(*array->array->data())); });
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

int shim_batch_import_host(ArrowArray* array, ArrowSchema* schema, Batch** out) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto batch, arrow::ImportRecordBatch(array, schema));
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

int shim_batch_validate(const Batch* batch) {
  return Run([&] { return (*batch)->ValidateFull(); });
}

int shim_batch_same(const Batch* expected, const Batch* actual) {
  return Run([&]() -> Status {
    const auto &e = **expected, &a = **actual;
    ARROW_RETURN_NOT_OK(shim::Same(*e.schema(), *a.schema(), e.schema()->Equals(*a.schema(), /*check_metadata=*/true)));
    return shim::Same(e, a, e.Equals(a, /*check_metadata=*/true, shim::Strict()));
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

int shim_batch_wait(const Batch* batch) {
  return Run([&] { return shim::WaitFor(shim::EventOf(**batch)); });
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

int shim_batch_select(const Batch* batch, const int* columns, int count, Batch** out) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto selected, (*batch)->SelectColumns({columns, columns + count}));
    *out = new Batch(std::move(selected));
    return Status::OK();
  });
}

void shim_batch_drop(Batch* batch) { delete batch; }

int64_t shim_batch_rows(const Batch* batch) { return (*batch)->num_rows(); }

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
