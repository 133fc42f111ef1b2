// The async device stream: Arrow C++ as the consumer of a producer of ours, and as a producer for a handler of ours.

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <functional>
#include <optional>
#include <string_view>
#include <thread>

#include <arrow/util/async_generator.h>
#include <arrow/util/future.h>
#include <arrow/util/key_value_metadata.h>
#include <arrow/util/thread_pool.h>

#include "shim.h"

using arrow::Future;
using arrow::Result;
using arrow::Status;
using arrow::internal::ThreadPool;
using shim::Batch;
using shim::Run;

namespace {

Status TooLate(const char* what) { return Status::Cancelled(what, ": did not happen in time"); }

/// Waits, but not for ever: Arrow C++ may.
template <typename T>
Result<T> Get(const Future<T>& future, double seconds, const char* what) {
  if (!future.Wait(seconds)) return TooLate(what);
  return future.result();
}

/// What came with an error, after the code of the Status.
struct Detail {
  int code = 0;
  std::string text;
  /// As it came: the wheel does not have the function that reads it.
  std::string metadata;
};

/// Keeps the detail of an error.
Status Noted(Status status, std::optional<Detail>* detail) {
  if (status.detail() && std::string_view(status.detail()->type_id()) == "AsyncErrorDetail") {
    const auto& found = static_cast<const arrow::AsyncErrorDetail&>(*status.detail());
    detail->emplace(Detail{found.code(), found.ToString(), found.ErrorMetadataString()});
  }
  return status;
}

struct Consumer {
  /// Its own: a producer and a consumer on one pool of one thread wait for each other.
  std::shared_ptr<ThreadPool> pool;
  /// Of a producer that calls it in place; whoever moves it out leaves the struct as it is.
  ArrowAsyncDeviceStreamHandler handler;
  Future<arrow::AsyncRecordBatchGenerator> opening;
  std::optional<arrow::AsyncRecordBatchGenerator> stream;
  std::optional<Detail> detail;
  /// Of the last batch.
  std::shared_ptr<const arrow::KeyValueMetadata> metadata;

  shim::Live live;

  // Waits for the pool's thread, and that for a batch or an end.
  ~Consumer() { stream.reset(); }

  Status Open(double seconds) {
    if (stream) return Status::OK();
    auto opened = Get(opening, seconds, "the schema");
    ARROW_RETURN_NOT_OK(Noted(opened.status(), &detail));
    stream = *std::move(opened);
    return Status::OK();
  }

  /// Null at the end.
  Result<Batch> Next(double seconds) {
    ARROW_RETURN_NOT_OK(Open(seconds));
    auto next = Get(stream->generator(), seconds, "a batch");
    ARROW_RETURN_NOT_OK(Noted(next.status(), &detail));
    metadata = next->custom_metadata;
    return next->batch;
  }
};

/// An export on a thread of its own: it waits there while nobody requests anything.
struct Export {
  std::future<Status> done;
};

using Generator = arrow::AsyncGenerator<Batch>;

Export* Start(std::shared_ptr<arrow::Schema> schema, Generator generator, int device_type,
              ArrowAsyncDeviceStreamHandler* handler, std::shared_ptr<void> kept = nullptr) {
  std::promise<Status> promise;
  auto it = std::make_unique<Export>(Export{promise.get_future()});
  auto running = std::make_shared<shim::Live>();
  std::thread([schema = std::move(schema), generator = std::move(generator), device_type, handler,
               kept = std::move(kept), running = std::move(running), promise = std::move(promise)]() mutable {
    Status status;
    try {
      const auto type = static_cast<arrow::DeviceAllocationType>(device_type);
      auto future = arrow::ExportAsyncRecordBatchReader(std::move(schema), std::move(generator), type, handler);
      status = future.status();
    } catch (const std::exception& e) {
      status = Status::UnknownError("exception: ", e.what());
    }
    generator = {};
    kept.reset();
    running.reset();
    promise.set_value(std::move(status));
  }).detach();
  return it.release();
}

/// What an export gives: a failure in place of batch `fail_at`, unless that is negative.
struct Source {
  int64_t count;
  std::function<Result<Batch>(int64_t)> make;
  int64_t fail_at;
  Status failure;
  int64_t next = 0;

  Result<Batch> Next() {
    if (next == fail_at) return failure;
    return next < count ? make(next++) : Batch();
  }
};

/// In the call; or on one thread of Arrow's pool after the other, which call the handler then.
Generator Generate(Source source, bool pooled) {
  auto shared = std::make_shared<Source>(std::move(source));
  if (!pooled) return [shared] { return Future<Batch>::MakeFinished(shared->Next()); };
  return [shared]() -> Future<Batch> {
    return arrow::DeferNotOk(arrow::internal::GetCpuThreadPool()->Submit([shared] { return shared->Next(); }));
  };
}

Status Failure(int64_t fail_at, int code, const char* text) {
  return fail_at < 0 ? Status::OK() : Status(static_cast<arrow::StatusCode>(code), text);
}

}  // namespace

extern "C" {

// ---- Consumer ----

// Its handler has garbage where a producer is to be: only the producer sets that.
int shim_async_new(uint64_t queue_size, Consumer** out) {
  return Run([&]() -> Status {
    auto it = std::make_unique<Consumer>();
    ARROW_ASSIGN_OR_RAISE(it->pool, ThreadPool::Make(1));
    std::memset(&it->handler, 0xAB, sizeof(it->handler));
    it->opening = arrow::CreateAsyncDeviceStreamHandler(&it->handler, it->pool.get(), queue_size, shim::Map);
    *out = it.release();
    return Status::OK();
  });
}

// Valid as long as the consumer is.
ArrowAsyncDeviceStreamHandler* shim_async_handler(Consumer* consumer) { return &consumer->handler; }

// `out` is null at the end.
int shim_async_next(Consumer* consumer, double seconds, Batch** out) {
  return Run([&]() -> Status {
    ARROW_ASSIGN_OR_RAISE(auto batch, consumer->Next(seconds));
    *out = batch ? new Batch(std::move(batch)) : nullptr;
    return Status::OK();
  });
}

// The metadata of the last batch: number of entries, -1 if there is none; and the value of a key, or null.
int64_t shim_async_metadata(const Consumer* consumer) { return consumer->metadata ? consumer->metadata->size() : -1; }

const char* shim_async_metadata_of(const Consumer* consumer, const char* key) {
  const int at = consumer->metadata ? consumer->metadata->FindKey(key) : -1;
  return at < 0 ? nullptr : consumer->metadata->value(at).c_str();
}

// The last error's AsyncErrorDetail: its code, or 0 if there was none; its text; the bytes of its metadata.
int shim_async_detail(const Consumer* consumer, const char** text, const char** metadata, int64_t* bytes) {
  const auto& detail = consumer->detail;
  *text = detail ? detail->text.c_str() : nullptr;
  *metadata = detail ? detail->metadata.data() : nullptr;
  *bytes = detail ? static_cast<int64_t>(detail->metadata.size()) : 0;
  return detail ? detail->code : 0;
}

// If something was read, waits for one more batch or the end.
void shim_async_drop(Consumer* consumer) { delete consumer; }

// ---- Producer ----

// `count` batches: these, one after the other and again; with the schema of `like`. In place of batch `fail_at`, unless that is negative, it fails with this
// code and text. `pooled`: batches come from Arrow's pool of threads.
int shim_async_produce(ArrowAsyncDeviceStreamHandler* handler, const Batch* like, Batch* const* batches, int64_t n,
                       int64_t count, int device_type, int64_t fail_at, int code, const char* text, bool pooled,
                       Export** out) {
  return Run([&]() -> Status {
    auto given = std::make_shared<arrow::RecordBatchVector>();
    for (int64_t i = 0; i < n; ++i) given->push_back(*batches[i]);
    auto make = [given](int64_t i) -> Result<Batch> { return (*given)[i % given->size()]; };
    Source source{count, std::move(make), fail_at, Failure(fail_at, code, text)};
    given.reset();
    *out = Start((*like)->schema(), Generate(std::move(source), pooled), device_type, handler);
    return Status::OK();
  });
}

// What a consumer of the shim's gets, which is taken and dropped in the end.
int shim_async_relay(Consumer* consumer, double seconds, ArrowAsyncDeviceStreamHandler* handler, Export** out) {
  return Run([&]() -> Status {
    std::shared_ptr<Consumer> from(consumer);
    ARROW_RETURN_NOT_OK(from->Open(seconds));
    auto generator = [from]() -> Future<Batch> {
      // On a thread of another pool: the consumer must not be dropped on one of its own.
      auto next = arrow::internal::GetCpuThreadPool()->TransferAlways(from->stream->generator());
      return next.Then([](const arrow::RecordBatchWithMetadata& next) { return next.batch; });
    };
    const int device_type = static_cast<int>(from->stream->device_type);
    auto schema = from->stream->schema;
    *out = Start(std::move(schema), std::move(generator), device_type, handler, from);
    return Status::OK();
  });
}

// Waits for the end of an export: its Status.
int shim_async_produced(Export* it, double seconds) {
  return Run([&]() -> Status {
    if (it->done.wait_for(std::chrono::duration<double>(seconds)) != std::future_status::ready) {
      return TooLate("the end of the export");
    }
    return it->done.get();
  });
}

// Of one that goes on, the thread stays.
void shim_export_drop(Export* it) { delete it; }

}  // extern "C"
