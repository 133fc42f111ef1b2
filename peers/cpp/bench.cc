// What is measured of Arrow C++ and of nanoarrow, for benches/python: a library of its own. Functions answer with nanoseconds or
// 0, and with -1 after an error, of which bench_peer_error has the text.

#include <dlfcn.h>
#include <malloc.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <arrow/api.h>
#include <arrow/c/abi.h>
#include <arrow/c/bridge.h>
#include <arrow/util/async_generator.h>
#include <arrow/util/future.h>
#include <arrow/util/thread_pool.h>

using arrow::Result;
using arrow::Status;

namespace {

std::string error;

template <typename Body>
int64_t Run(Body&& body) noexcept {
  try {
    Result<int64_t> result = body();
    if (result.ok()) return *result;
    error = result.status().ToString();
  } catch (const std::exception& e) {
    error = e.what();
  }
  return -1;
}

template <typename Body>
Result<int64_t> Timed(int64_t n, Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < n; ++i) ARROW_RETURN_NOT_OK(body(i));
  const auto took = std::chrono::steady_clock::now() - start;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
}

using Batch = std::shared_ptr<arrow::RecordBatch>;

/// The same batch some times.
class Repeat : public arrow::RecordBatchReader {
 public:
  Repeat(Batch batch, int64_t n) : batch_(std::move(batch)), left_(n) {}
  std::shared_ptr<arrow::Schema> schema() const override { return batch_->schema(); }
  Status ReadNext(Batch* out) override {
    *out = left_-- > 0 ? batch_ : nullptr;
    return Status::OK();
  }

 private:
  Batch batch_;
  int64_t left_;
};

Result<int64_t> Export(const Batch& batch, int64_t n) {
  return Timed(n, [&](int64_t) -> Status {
    ArrowDeviceArray out;
    ARROW_RETURN_NOT_OK(arrow::ExportDeviceRecordBatch(*batch, nullptr, &out));
    out.array.release(&out.array);
    return Status::OK();
  });
}

Result<int64_t> Import(const Batch& batch, int64_t n) {
  std::vector<ArrowDeviceArray> arrays(n);
  for (auto& array : arrays) ARROW_RETURN_NOT_OK(arrow::ExportDeviceRecordBatch(*batch, nullptr, &array));
  std::vector<Batch> kept(n);
  return Timed(n, [&](int64_t i) { return arrow::ImportDeviceRecordBatch(&arrays[i], batch->schema()).Value(&kept[i]); });
}

/// From the reader to each batch that comes out.
Result<int64_t> Stream(const Batch& batch, int64_t n) {
  return Timed(1, [&](int64_t) -> Status {
    ArrowDeviceArrayStream stream;
    ARROW_RETURN_NOT_OK(arrow::ExportDeviceRecordBatchReader(std::make_shared<Repeat>(batch, n), &stream));
    ARROW_ASSIGN_OR_RAISE(auto reader, arrow::ImportDeviceRecordBatchReader(&stream));
    Batch out;
    for (int64_t left = n + 1; left > 0; --left) {
      ARROW_RETURN_NOT_OK(reader->ReadNext(&out));
      if (!out != (left == 1)) return Status::Invalid("not as many batches as went in");
    }
    return Status::OK();
  });
}

/// The same by way of an async stream: the producer on a thread of its own, where it waits for requests; the consumer
/// here, over its pool of one thread. The end comes when all batches were read: the consumer requests one more for each
/// that it reads, and the producer is gone after the end.
Result<int64_t> Async(const Batch& batch, int64_t n, uint64_t queue) {
  ARROW_ASSIGN_OR_RAISE(auto pool, arrow::internal::ThreadPool::Make(1));
  return Timed(1, [&](int64_t) -> Status {
    ArrowAsyncDeviceStreamHandler handler{};
    auto opening = arrow::CreateAsyncDeviceStreamHandler(&handler, pool.get(), queue);
    Status produced;
    auto end = arrow::Future<Batch>::Make();
    std::thread producer([&] {
      auto next = [&batch, end, left = n]() mutable {
        return left-- > 0 ? arrow::Future<Batch>::MakeFinished(batch) : end;
      };
      const auto device_type = arrow::DeviceAllocationType::kCPU;
      produced = arrow::ExportAsyncRecordBatchReader(batch->schema(), next, device_type, &handler).status();
    });
    const auto consume = [&]() -> Status {
      ARROW_ASSIGN_OR_RAISE(auto stream, opening.result());
      for (int64_t left = n + 1; left > 0; --left) {
        if (left == 1) end.MarkFinished(Batch());
        const auto next = stream.generator();
        ARROW_ASSIGN_OR_RAISE(auto out, next.result());
        if (!out.batch != (left == 1)) return Status::Invalid("not as many batches as went in");
      }
      return Status::OK();
    };
    const Status consumed = consume();
    producer.join();
    return consumed & produced;
  });
}

/// Functions of nanoarrow's wheel, which declares them in no header. The first member of an ArrowDeviceArrayView is a pointer to
/// its device, the second its ArrowArrayView.
struct Nanoarrow {
  struct View {
    alignas(16) char bytes[8192];
    void* array_view() { return bytes + sizeof(void*); }
  };

  void* (*cpu)();
  void (*init)(View*);
  int (*from_schema)(void* array_view, const ArrowSchema*, void* error);
  int (*set_array)(View*, ArrowDeviceArray*, void* stream, void* error);
  int (*copy)(View*, void* device, ArrowDeviceArray* out, void* stream);
  void (*reset)(View*);

  static Result<Nanoarrow> Open(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return Status::IOError(dlerror());
    Nanoarrow it;
    const auto find = [&](const char* name, auto& function) {
      void* found = dlsym(library, (std::string("PythonPkgArrow") + name).c_str());
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
      return found ? Status::OK() : Status::KeyError(name);
    };
    ARROW_RETURN_NOT_OK(find("DeviceCpu", it.cpu));
    ARROW_RETURN_NOT_OK(find("DeviceArrayViewInit", it.init));
    ARROW_RETURN_NOT_OK(find("ArrayViewInitFromSchema", it.from_schema));
    ARROW_RETURN_NOT_OK(find("DeviceArrayViewSetArrayAsync", it.set_array));
    ARROW_RETURN_NOT_OK(find("DeviceArrayViewCopyAsync", it.copy));
    ARROW_RETURN_NOT_OK(find("DeviceArrayViewReset", it.reset));
    return it;
  }
};

Status Check(int code, const char* what) { return code ? Status::IOError(what, ": ", code) : Status::OK(); }

struct Peer {
  Batch batch;
  Nanoarrow nano;
  Nanoarrow::View view;
  /// What the view is of, and its schema.
  ArrowDeviceArray array;
  ArrowSchema schema;

  Result<ArrowDeviceArray> Copy() {
    ArrowDeviceArray copy;
    ARROW_RETURN_NOT_OK(Check(nano.copy(&view, nano.cpu(), &copy, nullptr), "copy"));
    return copy;
  }

  Status SetArray(Nanoarrow::View* to) { return Check(nano.set_array(to, &array, nullptr, nullptr), "view"); }

  /// Views of their own, which are kept: each is made for the schema and then set to the array, which nanoarrow leaves where it
  /// is. `again`: one view that is there already is set to the array.
  Result<int64_t> Views(int64_t n, bool again) {
    if (again) return Timed(n, [&](int64_t) { return SetArray(&view); });
    std::vector<Nanoarrow::View> kept(n);
    for (auto& one : kept) nano.init(&one);
    auto took = Timed(n, [&](int64_t i) -> Status {
      ARROW_RETURN_NOT_OK(Check(nano.from_schema(kept[i].array_view(), &schema, nullptr), "schema"));
      return SetArray(&kept[i]);
    });
    for (auto& one : kept) nano.reset(&one);
    return took;
  }

  Result<int64_t> Copies(int64_t n, bool cold) {
    int64_t took = 0;
    for (int64_t i = 0; i < (cold ? n : 1); ++i) {
      if (cold) malloc_trim(0);
      ArrowDeviceArray kept{};
      ARROW_ASSIGN_OR_RAISE(auto some, Timed(cold ? 1 : n, [&](int64_t) -> Status {
        ARROW_ASSIGN_OR_RAISE(kept, Copy());
        if (!cold) kept.array.release(&kept.array);
        return Status::OK();
      }));
      took += some;
      if (cold) kept.array.release(&kept.array);
    }
    return took;
  }
};

}  // namespace

extern "C" {

const char* bench_peer_error() { return error.c_str(); }

// Consumes both structs. `nanoarrow`: the path of its library.
int64_t bench_peer_new(const char* nanoarrow, ArrowDeviceArray* array, ArrowSchema* schema, Peer** out) {
  return Run([&]() -> Result<int64_t> {
    auto peer = std::make_unique<Peer>();
    ARROW_ASSIGN_OR_RAISE(peer->nano, Nanoarrow::Open(nanoarrow));
    peer->nano.init(&peer->view);
    ARROW_RETURN_NOT_OK(Check(peer->nano.from_schema(peer->view.array_view(), schema, nullptr), "schema"));
    ARROW_ASSIGN_OR_RAISE(peer->batch, arrow::ImportDeviceRecordBatch(array, schema));
    ARROW_RETURN_NOT_OK(arrow::ExportDeviceRecordBatch(*peer->batch, nullptr, &peer->array, &peer->schema));
    ARROW_RETURN_NOT_OK(peer->SetArray(&peer->view));
    *out = peer.release();
    return 0;
  });
}

void bench_peer_drop(Peer* peer) {
  peer->nano.reset(&peer->view);
  peer->array.array.release(&peer->array.array);
  peer->schema.release(&peer->schema);
  delete peer;
}

// Nanoseconds of `n` times.
int64_t bench_peer_run(Peer* peer, const char* name, int64_t n) {
  return Run([&]() -> Result<int64_t> {
    const std::string_view which = name;
    if (which == "cpp.export") return Export(peer->batch, n);
    if (which == "cpp.import") return Import(peer->batch, n);
    if (which == "cpp.stream") return Stream(peer->batch, n);
    if (which == "cpp.async") return Async(peer->batch, n, 5);
    if (which == "cpp.async_single") return Async(peer->batch, n, 1);
    if (which == "nanoarrow.view") return peer->Views(n, false);
    if (which == "nanoarrow.view_again") return peer->Views(n, true);
    if (which == "nanoarrow.copy") return peer->Copies(n, false);
    if (which == "nanoarrow.copy_cold") return peer->Copies(n, true);
    return Status::KeyError(which);
  });
}

// A result of either library, to look at its values: an export, or nanoarrow's copy.
int64_t bench_peer_give(Peer* peer, const char* name, ArrowDeviceArray* out) {
  return Run([&]() -> Result<int64_t> {
    if (std::string_view(name).starts_with("nanoarrow")) {
      ARROW_ASSIGN_OR_RAISE(*out, peer->Copy());
      return 0;
    }
    ARROW_RETURN_NOT_OK(arrow::ExportDeviceRecordBatch(*peer->batch, nullptr, out));
    return 0;
  });
}

}  // extern "C"
