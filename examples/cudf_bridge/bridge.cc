// Between the C functions of bridge.h and cuDF. `run` has everything that matters here; an operation more is a function of ten lines.

#include "bridge.h"

#include <cerrno>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>  // before cuDF 26.10's headers, which use it and do not include it
#include <vector>

#include <cudf/aggregation.hpp>
#include <cudf/groupby.hpp>
#include <cudf/interop.hpp>
#include <cudf/sorting.hpp>
#include <cudf/table/table.hpp>
#include <rmm/cuda_device.hpp>

namespace {

using Names = std::vector<cudf::column_metadata>;

// In memory of its own, so that reporting a failure cannot fail.
thread_local char last_error[1024];

int fail(int code, char const* text) noexcept
{
  std::snprintf(last_error, sizeof last_error, "%s", text);
  return code;
}

// An array that was taken over: the caller's struct is marked as released, and this one releases the content, once.
class Taken {
 public:
  explicit Taken(ArrowDeviceArray* from) noexcept : array_(*from) { from->array.release = nullptr; }
  ~Taken()
  {
    if (array_.array.release != nullptr) { array_.array.release(&array_.array); }
  }
  Taken(Taken const&)            = delete;
  Taken& operator=(Taken const&) = delete;

  ArrowDeviceArray const* get() const noexcept { return &array_; }

 private:
  ArrowDeviceArray array_;
};

// cuDF's stream, which has finished when this ends. cuDF only enqueues its work: where it returns, and where it throws, its kernels may
// still read the batch.
class Finished {
 public:
  explicit Finished(cuda::stream_ref stream) noexcept : stream_(stream) {}
  ~Finished() { cudaStreamSynchronize(stream_.get()); }
  Finished(Finished const&)            = delete;
  Finished& operator=(Finished const&) = delete;

 private:
  cuda::stream_ref stream_;
};

// The names of a batch's columns, which a table of cuDF does not have.
Names names_of(ArrowSchema const* schema)
{
  Names names;
  for (int64_t i = 0; i < schema->n_children; ++i) {
    auto const* child = schema->children[i];
    auto& name        = names.emplace_back(child->name == nullptr ? "" : child->name);
    name.children_meta = names_of(child);
  }
  return names;
}

void check_column(cudf::table_view const& table, int32_t column)
{
  if (column < 0 || column >= table.num_columns()) {
    throw std::invalid_argument("the batch has no column " + std::to_string(column));
  }
}

// Hands a batch to `work` as a table, and what that returns back as a batch.
template <typename Work>
int run(ArrowDeviceArray* batch, ArrowSchema const* schema, ArrowDeviceArray* out, ArrowSchema* out_schema, Work work) noexcept
{
  // Declared first, so that it is released last.
  Taken const taken{batch};
  *out        = ArrowDeviceArray{};
  *out_schema = ArrowSchema{};
  try {
    // The caller may have made another device current, and finds it again.
    rmm::cuda_set_device_raii const device{rmm::cuda_device_id{static_cast<int>(taken.get()->device_id)}};
    auto const stream = cudf::get_default_stream();
    Finished const finished{stream};

    // A view of the batch's own memory. The stream waits for the batch's event.
    auto const table = cudf::from_arrow_device(schema, taken.get(), stream);
    Names names      = names_of(schema);
    auto result      = work(*table, names, stream);

    // The array owns the columns of the result from here on. Its event is that of the work on the stream.
    auto described = cudf::to_arrow_schema(result->view(), names);
    auto exported  = cudf::to_arrow_device(std::move(*result), stream);
    *out           = *exported;
    *out_schema    = *described;
    // Moved out of what `unique_ptr` deletes.
    exported->array.release = nullptr;
    described->release      = nullptr;
    return 0;
  } catch (std::bad_alloc const& e) {
    return fail(ENOMEM, e.what());
  } catch (std::invalid_argument const& e) {
    return fail(EINVAL, e.what());
  } catch (std::exception const& e) {
    return fail(EIO, e.what());
  } catch (...) {
    return fail(EIO, "an exception of unknown type");
  }
}

}  // namespace

extern "C" int cudf_bridge_sort(ArrowDeviceArray* batch, ArrowSchema const* schema, int32_t by,
                                ArrowDeviceArray* out, ArrowSchema* out_schema)
{
  return run(batch, schema, out, out_schema, [=](cudf::table_view const& table, Names&, cuda::stream_ref stream) {
    check_column(table, by);
    return cudf::sort_by_key(table, table.select({by}), {cudf::order::ASCENDING}, {cudf::null_order::AFTER}, stream);
  });
}

extern "C" int cudf_bridge_sum(ArrowDeviceArray* batch, ArrowSchema const* schema, int32_t key, int32_t values,
                               ArrowDeviceArray* out, ArrowSchema* out_schema)
{
  return run(batch, schema, out, out_schema, [=](cudf::table_view const& table, Names& names, cuda::stream_ref stream) {
    check_column(table, key);
    check_column(table, values);
    std::vector<cudf::groupby::aggregation_request> requests(1);
    requests[0].values = table.column(values);
    requests[0].aggregations.push_back(cudf::make_sum_aggregation<cudf::groupby_aggregation>());
    cudf::groupby::groupby groups{table.select({key}), cudf::null_policy::INCLUDE};
    auto [keys, sums] = groups.aggregate(requests, stream);

    auto columns = keys->release();
    columns.push_back(std::move(sums[0].results[0]));
    names = Names{names[key], cudf::column_metadata{"sum"}};
    return std::make_unique<cudf::table>(std::move(columns));
  });
}

extern "C" char const* cudf_bridge_error(void) { return last_error; }
