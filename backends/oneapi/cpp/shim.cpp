// What shim.h declares, over SYCL. A plain C++17 compiler compiles it: there is no device code.
#define CL_TARGET_OPENCL_VERSION 300
#include "shim.h"

#include <sycl/backend/opencl.hpp>
#include <sycl/sycl.hpp>

#include <CL/cl.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace {

// An error that a queue has reported.
struct Reported {
    int code;
    std::string message;
};

// The first error of a queue. Its handler outlives the queue object, so it is shared.
struct Errors {
    std::mutex mutex;
    std::optional<Reported> first;
    std::atomic<bool> is_set{false};

    void keep(int code, const char *message) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!first) first.emplace(Reported{code, message});
        is_set = true;
    }
};

// Without a destructor, which would run before those of the thread's other values, and they may call this crate.
thread_local char message[AD_MESSAGE_BYTES];

int fail(int code, const char *what) noexcept {
    auto bytes = std::min(std::strlen(what), sizeof message - 1);
    std::memmove(message, what, bytes);
    message[bytes] = 0;
    return code == 0 ? -1 : code;
}

template <class Call> int caught(Call call) noexcept {
    try {
        return call();
    } catch (const sycl::exception &e) {
        // Even the code is computed by functions that may throw.
        try {
            return fail(e.code().value(), e.what());
        } catch (...) {
            return fail(-1, "an error of SYCL's without a code");
        }
    } catch (const std::exception &e) {
        return fail(-1, e.what());
    } catch (...) {
        return fail(-1, "an exception of an unknown type");
    }
}

template <class Call> int run(Call call) noexcept {
    return caught([&] {
        call();
        return 0;
    });
}

template <class Object> void drop(Object *object) noexcept {
    run([&] { delete object; });
}

const sycl::device &of(const ad_device *device) { return *reinterpret_cast<const sycl::device *>(device); }
const sycl::context &of(const ad_context *context) { return *reinterpret_cast<const sycl::context *>(context); }
const sycl::event &of(const ad_event *event) { return *reinterpret_cast<const sycl::event *>(event); }
const sycl::queue &queue_at(const void *queue) { return *static_cast<const sycl::queue *>(queue); }
sycl::queue &queue_at(void *queue) { return *static_cast<sycl::queue *>(queue); }

void set(ad_device **to, sycl::device device) { *to = reinterpret_cast<ad_device *>(new sycl::device(std::move(device))); }
void set(ad_context **to, sycl::context context) { *to = reinterpret_cast<ad_context *>(new sycl::context(std::move(context))); }
void set(ad_event **to, sycl::event event) { *to = reinterpret_cast<ad_event *>(new sycl::event(std::move(event))); }

bool is_opencl(const sycl::device &device) { return device.get_backend() == sycl::backend::opencl; }

void barrier_after(sycl::queue &queue, const sycl::event &event) {
    // `queue::ext_oneapi_submit_barrier(events)` would make this thread wait for an event behind a host task.
    queue.submit([&](sycl::handler &handler) {
        handler.depends_on(event);
        handler.ext_oneapi_barrier();
    });
}

// The functions of OpenCL that gates and waits need, of the loader that SYCL has loaded.
struct OpenCl {
    decltype(&clCreateUserEvent) create_user_event = nullptr;
    decltype(&clSetUserEventStatus) set_user_event_status = nullptr;
    decltype(&clReleaseEvent) release_event = nullptr;
    decltype(&clFinish) finish = nullptr;

    OpenCl() {
        void *library = nullptr;
        for (auto name : {"libOpenCL.so.1", "libOpenCL.so"})
            if (!library) library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
        if (!library) throw std::runtime_error("SYCL runs on OpenCL, but libOpenCL.so.1 is not loaded");
        find(library, "clCreateUserEvent", create_user_event);
        find(library, "clSetUserEventStatus", set_user_event_status);
        find(library, "clReleaseEvent", release_event);
        find(library, "clFinish", finish);
    }

    template <class Function> static void find(void *library, const char *name, Function &function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (!function) throw std::runtime_error(std::string("libOpenCL.so.1 lacks ") + name);
    }

    static const OpenCl &get() {
        static const OpenCl functions;
        return functions;
    }
};

void check(cl_int code, const char *call) {
    if (code != CL_SUCCESS) throw std::runtime_error(std::string(call) + " failed with code " + std::to_string(code));
}

} // namespace

struct ad_queue {
    sycl::queue queue;
    // Null for a queue of the program's.
    std::shared_ptr<Errors> errors;
};

// A user event of OpenCL's, with a reference of its own.
struct ad_gate {
    cl_event event;
};

uint64_t ad_version() { return AD_VERSION; }

const char *ad_message() { return message; }

int ad_device_count(size_t *count) {
    return run([&] { *count = sycl::device::get_devices().size(); });
}

int ad_device_new(size_t index, ad_device **device) {
    return run([&] { set(device, sycl::device::get_devices().at(index)); });
}

int ad_device_of(const void *sycl_queue, ad_device **device, size_t *index) {
    return run([&] {
        auto found = queue_at(sycl_queue).get_device();
        auto all = sycl::device::get_devices();
        auto place = std::find(all.begin(), all.end(), found);
        if (place == all.end()) throw std::runtime_error("the queue's device is none of those that SYCL lists, a sub-device for example");
        *index = static_cast<size_t>(place - all.begin());
        set(device, std::move(found));
    });
}

int ad_device_properties(const ad_device *device, ad_properties *properties) {
    return run([&] {
        auto &asked = of(device);
        properties->is_cpu = asked.is_cpu();
        properties->device_memory = asked.has(sycl::aspect::usm_device_allocations);
        properties->shared_memory = asked.has(sycl::aspect::usm_shared_allocations);
        properties->host_memory = asked.has(sycl::aspect::usm_host_allocations);
    });
}

int ad_device_name(const ad_device *device, void (*take)(void *, const char *, size_t), void *to) {
    return run([&] {
        auto name = of(device).get_info<sycl::info::device::name>();
        take(to, name.data(), name.size());
    });
}

void ad_device_delete(ad_device *device) { drop(reinterpret_cast<sycl::device *>(device)); }

int ad_context_new(const ad_device *device, int own, ad_context **context) {
    return run([&] {
        auto &owner = of(device);
        // What it reports belongs to no queue; the operation that failed says so itself. Without a handler the process would end.
        auto ignored = [](sycl::exception_list) {};
        set(context, own ? sycl::context(owner, ignored) : sycl::queue(owner).get_context());
    });
}

int ad_context_of(const void *sycl_queue, ad_context **context) {
    return run([&] { set(context, queue_at(sycl_queue).get_context()); });
}

int ad_context_is(const ad_context *context, const ad_context *other) { return of(context) == of(other); }

void ad_context_delete(ad_context *context) { drop(reinterpret_cast<sycl::context *>(context)); }

int ad_queue_new(const ad_context *context, const ad_device *device, ad_queue **queue) {
    return run([&] {
        auto errors = std::make_shared<Errors>();
        auto handler = [errors](sycl::exception_list list) {
            for (auto &one : list) {
                int code = run([&] { std::rethrow_exception(one); });
                run([&] { errors->keep(code, message); });
            }
        };
        sycl::queue made(of(context), of(device), handler, sycl::property::queue::in_order());
        *queue = new ad_queue{std::move(made), std::move(errors)};
    });
}

int ad_queue_adopt(const void *sycl_queue, ad_queue **queue) {
    return run([&] { *queue = new ad_queue{queue_at(sycl_queue), nullptr}; });
}

int ad_queue_is_in_order(const void *sycl_queue, int *in_order) {
    return run([&] { *in_order = queue_at(sycl_queue).is_in_order(); });
}

void *ad_queue_sycl(ad_queue *queue) { return &queue->queue; }

int ad_queue_check(ad_queue *queue) {
    return caught([&] {
        // Not `throw_asynchronous`: that reports the errors of all queues of the device, and ends the process if one of a program's
        // queues has an error and no handler.
        if (!queue->errors || !queue->errors->is_set) return 0;
        std::lock_guard<std::mutex> lock(queue->errors->mutex);
        auto &first = queue->errors->first;
        return first ? fail(first->code, first->message.c_str()) : 0;
    });
}

int ad_queue_copy(ad_queue *queue, void *to, const void *from, size_t bytes) {
    return run([&] { queue->queue.memcpy(to, from, bytes); });
}

int ad_queue_fill(ad_queue *queue, void *to, int byte, size_t bytes) {
    return run([&] { queue->queue.memset(to, byte, bytes); });
}

int ad_queue_record(ad_queue *queue, ad_event **event) {
    return run([&] {
        auto recorded = queue->queue.ext_oneapi_submit_barrier();
        queue->queue.ext_oneapi_prod();
        set(event, std::move(recorded));
    });
}

int ad_queue_finish(ad_queue *queue) {
    return run([&] {
        // SYCL stops waiting at the first work that has failed, and forgets what it has waited for: that is done twice.
        bool ended = false;
        for (int round = 0; round < 2; round++) ended = run([&] { queue->queue.wait(); }) == 0;
        if (is_opencl(queue->queue.get_device()))
            check(OpenCl::get().finish(sycl::get_native<sycl::backend::opencl>(queue->queue)), "clFinish");
        else if (!ended)
            throw std::runtime_error(message);
    });
}

void ad_queue_delete(ad_queue *queue) { drop(queue); }

int ad_wait(void *sycl_queue, const ad_event *event) {
    return run([&] { barrier_after(queue_at(sycl_queue), of(event)); });
}

int ad_gate_new(void *sycl_queue, ad_gate **gate) {
    return run([&] {
        *gate = nullptr;
        auto &queue = queue_at(sycl_queue);
        if (!is_opencl(queue.get_device())) return;
        auto &opencl = OpenCl::get();
        auto context = queue.get_context();
        cl_int code = CL_SUCCESS;
        auto made = std::make_unique<ad_gate>();
        made->event = opencl.create_user_event(sycl::get_native<sycl::backend::opencl>(context), &code);
        check(code, "clCreateUserEvent");
        try {
            barrier_after(queue, sycl::make_event<sycl::backend::opencl>(std::vector<cl_event>{made->event}, context));
        } catch (...) {
            ad_gate_open(made.release());
            throw;
        }
        *gate = made.release();
    });
}

int ad_gate_open(ad_gate *gate) {
    return run([&] {
        std::unique_ptr<ad_gate> owned(gate);
        auto &opencl = OpenCl::get();
        auto set = opencl.set_user_event_status(owned->event, CL_COMPLETE);
        opencl.release_event(owned->event);
        check(set, "clSetUserEventStatus");
    });
}

int ad_event_copy(const ad_event *event, ad_event **copy) {
    return run([&] { set(copy, of(event)); });
}

int ad_event_state(const ad_event *event, int *state) {
    return run([&] {
        using sycl::info::event_command_status;
        auto status = of(event).get_info<sycl::info::event::command_execution_status>();
        if (status == event_command_status::submitted || status == event_command_status::running || static_cast<int>(status) == UR_EVENT_STATUS_QUEUED) {
            *state = AD_PENDING;
            return;
        }
        // It has ended, so this returns at once, or throws what it failed with. Asking for the status orders no memory; this does. Never
        // `wait_and_throw`: without a handler of the program's for the queue that ends the process.
        sycl::event(of(event)).wait();
        if (status != event_command_status::complete) throw std::runtime_error("the work has failed");
        *state = AD_COMPLETE;
    });
}

void ad_event_delete(ad_event *event) { drop(reinterpret_cast<sycl::event *>(event)); }

int ad_allocate(const ad_context *context, const ad_device *device, int memory, size_t align, size_t bytes, void **base) {
    return run([&] {
        switch (memory) {
        case AD_DEVICE: *base = sycl::aligned_alloc_device(align, bytes, of(device), of(context)); break;
        case AD_SHARED: *base = sycl::aligned_alloc_shared(align, bytes, of(device), of(context)); break;
        default: *base = sycl::aligned_alloc_host(align, bytes, of(context)); break;
        }
    });
}

int ad_free(const ad_context *context, void *base) {
    return run([&] { sycl::free(base, of(context)); });
}

int ad_memory_of(const ad_context *context, const void *address, int *memory) {
    return run([&] {
        switch (sycl::get_pointer_type(address, of(context))) {
        case sycl::usm::alloc::device: *memory = AD_DEVICE; break;
        case sycl::usm::alloc::shared: *memory = AD_SHARED; break;
        case sycl::usm::alloc::host: *memory = AD_HOST; break;
        default: *memory = AD_UNKNOWN; break;
        }
    });
}
