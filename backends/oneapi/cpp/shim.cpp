// The C interface over SYCL that this crate calls. A plain C++17 compiler compiles it: there is no device code.
//
// Every function may be called from any thread and lets no exception out. Those that return an int return 0, or the code of the exception,
// which is never 0; ad_message() then returns its message on the same thread. Nothing here waits for a device, except ad_free and ad_finish.
#define CL_TARGET_OPENCL_VERSION 300
#include <sycl/backend/opencl.hpp>
#include <sycl/sycl.hpp>

#include <CL/cl.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

// The code of an argument that this crate refuses.
constexpr int REFUSED = -2;

struct Refused : std::runtime_error {
    using runtime_error::runtime_error;
};

// The first error that SYCL has reported for work of a queue. The queue's handler outlives the queue, so it is shared.
class Errors {
    std::mutex mutex;
    std::exception_ptr first;

  public:
    void keep(std::exception_ptr error) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!first) first = error;
    }

    void check() {
        std::lock_guard<std::mutex> lock(mutex);
        if (first) std::rethrow_exception(first);
    }
};

// Without a destructor, which would run before those of the thread's other values, and they may call this crate.
thread_local char message[4096];

int fail(int code, const char *what) noexcept {
    auto bytes = std::min(std::strlen(what), sizeof message - 1);
    std::memmove(message, what, bytes);
    message[bytes] = 0;
    return code == 0 ? -1 : code;
}

template <class Call> int run(Call call) noexcept {
    try {
        call();
        return 0;
    } catch (const Refused &e) {
        return fail(REFUSED, e.what());
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

const sycl::queue &adopted(const sycl::queue *queue) {
    if (!queue) throw Refused("a queue cannot be adopted: the pointer is null; pass the address of a sycl::queue");
    if (!queue->is_in_order())
        throw Refused("a queue cannot be adopted: it is out of order, and arrow-device needs one that runs its work in order; make it with "
                      "sycl::property::queue::in_order");
    return *queue;
}

bool is_opencl(const sycl::queue &queue) { return queue.get_backend() == sycl::backend::opencl; }

void barrier_after(sycl::queue &queue, const sycl::event &event) {
    // `queue::ext_oneapi_submit_barrier(events)` would make this thread wait for an event behind a host task.
    queue.submit([&](sycl::handler &handler) {
        handler.depends_on(event);
        handler.ext_oneapi_barrier();
    });
}

// A function of the loader of OpenCL that SYCL has loaded: this library starts without it.
template <class Function> Function *opencl(Function *, const char *name) {
    static void *const library = dlopen("libOpenCL.so.1", RTLD_NOW | RTLD_NOLOAD);
    auto found = library ? dlsym(library, name) : nullptr;
    if (!found) throw std::runtime_error(std::string("SYCL runs on OpenCL, but libOpenCL.so.1 is not loaded, or lacks ") + name);
    return reinterpret_cast<Function *>(found);
}
#define OPENCL(name) opencl(static_cast<decltype(&name)>(nullptr), #name)

void check(cl_int code, const char *call) {
    if (code != CL_SUCCESS) throw std::runtime_error(std::string(call) + " failed with code " + std::to_string(code));
}

} // namespace

#pragma GCC visibility push(default)
extern "C" {

// A device, and the context in which it is used.
struct ad_device {
    sycl::device device;
    sycl::context context;
};

struct ad_properties {
    size_t index;
    int32_t is_cpu;
    // Whether the device allocates memory of each kind, from AD_DEVICE on.
    int32_t memory[3];
    char name[256];
};

// The errors are null where they are the program's to handle: of its own queues, and their events.
struct ad_queue {
    sycl::queue queue;
    std::shared_ptr<Errors> errors;
};

struct ad_event {
    sycl::event event;
    std::shared_ptr<Errors> errors;
};

// What holds up a queue: a user event of OpenCL's, with a reference of its own.
struct ad_gate {
    cl_event event;
};

enum ad_memory { AD_UNKNOWN, AD_DEVICE, AD_SHARED, AD_HOST };

// The message of the last function that failed on this thread, cut if it is long; valid until the next one fails.
const char *ad_message() { return message; }

// Devices are numbered as in sycl::device::get_devices().
int ad_device_count(size_t *count) {
    return run([&] { *count = sycl::device::get_devices().size(); });
}

static void describe(size_t index, sycl::device device, sycl::context context, ad_device **to, ad_properties *properties) {
    properties->index = index;
    properties->is_cpu = device.is_cpu();
    properties->memory[0] = device.has(sycl::aspect::usm_device_allocations);
    properties->memory[1] = device.has(sycl::aspect::usm_shared_allocations);
    properties->memory[2] = device.has(sycl::aspect::usm_host_allocations);
    auto name = device.get_info<sycl::info::device::name>();
    properties->name[name.copy(properties->name, sizeof properties->name - 1)] = 0;
    *to = new ad_device{std::move(device), std::move(context)};
}

// The default context of the device's platform, which queues of programs have, or with `own` a new one.
int ad_device_new(size_t index, int own, ad_device **to, ad_properties *properties) {
    return run([&] {
        auto device = sycl::device::get_devices().at(index);
        // What a context reports belongs to no queue; the operation that failed says so itself. Without a handler the process would end.
        auto ignored = [](sycl::exception_list) {};
        describe(index, device, own ? sycl::context(device, ignored) : sycl::queue(device).get_context(), to, properties);
    });
}

// Those of a program's queue.
int ad_device_of(const sycl::queue *queue, ad_device **to, ad_properties *properties) {
    return run([&] {
        auto &theirs = adopted(queue);
        auto all = sycl::device::get_devices();
        auto place = std::find(all.begin(), all.end(), theirs.get_device());
        if (place == all.end()) throw std::runtime_error("the queue's device is none of those that SYCL lists, a sub-device for example");
        describe(place - all.begin(), *place, theirs.get_context(), to, properties);
    });
}

int ad_device_is_beside(const ad_device *device, const ad_device *other) { return device->context == other->context; }

void ad_device_delete(ad_device *device) {
    run([&] { delete device; });
}

// A new queue, in order, which keeps the first error that SYCL reports. SYCL reports the exceptions of host tasks when a program asks for
// them.
int ad_queue_new(const ad_device *device, ad_queue **to) {
    return run([&] {
        auto errors = std::make_shared<Errors>();
        auto handler = [errors](sycl::exception_list list) {
            for (auto &one : list) errors->keep(one);
        };
        sycl::queue made(device->context, device->device, handler, sycl::property::queue::in_order());
        *to = new ad_queue{std::move(made), std::move(errors)};
    });
}

// A copy of a program's queue, as C++ copies it.
int ad_queue_adopt(const ad_device *device, const sycl::queue *queue, ad_queue **to) {
    return run([&] {
        auto &theirs = adopted(queue);
        if (theirs.get_context() != device->context)
            throw Refused("a queue cannot be adopted: it is of another context than the device; open one with OneApiConfig::adopt");
        *to = new ad_queue{theirs, nullptr};
    });
}

sycl::queue *ad_queue_sycl(ad_queue *queue) { return &queue->queue; }

void ad_queue_delete(ad_queue *queue) {
    run([&] { delete queue; });
}

int ad_copy(ad_queue *queue, void *to, const void *from, size_t bytes) {
    return run([&] { queue->queue.memcpy(to, from, bytes); });
}

int ad_fill(ad_queue *queue, void *to, int byte, size_t bytes) {
    return run([&] { queue->queue.memset(to, byte, bytes); });
}

// An event after all work so far, which is handed to the device.
int ad_record(ad_queue *queue, ad_event **to) {
    return run([&] {
        auto recorded = queue->queue.ext_oneapi_submit_barrier();
        queue->queue.ext_oneapi_prod();
        *to = new ad_event{std::move(recorded), queue->errors};
    });
}

// Waits until no work so far runs any more, whether it has failed or not. An error says that this cannot be known.
int ad_finish(ad_queue *queue) {
    return run([&] {
        // SYCL stops waiting at the first work that has failed, and forgets what it has waited for: that is done twice.
        bool ended = false;
        for (int round = 0; round < 2; round++) ended = run([&] { queue->queue.wait(); }) == 0;
        if (is_opencl(queue->queue))
            check(OPENCL(clFinish)(sycl::get_native<sycl::backend::opencl>(queue->queue)), "clFinish");
        else if (!ended)
            throw std::runtime_error(message);
    });
}

// Makes later work of the queue wait for an event of the same context.
int ad_wait(ad_queue *queue, const ad_event *event) {
    return run([&] { barrier_after(queue->queue, event->event); });
}

// Opens a gate, and deletes it.
void ad_gate_open(ad_gate *gate) {
    run([&] {
        std::unique_ptr<ad_gate> owned(gate);
        OPENCL(clSetUserEventStatus)(gate->event, CL_COMPLETE);
        OPENCL(clReleaseEvent)(gate->event);
    });
}

// Makes later work of the queue wait until the gate is opened. Sets null, and does nothing, where SYCL has no such thing.
int ad_gate_new(ad_queue *queue, ad_gate **to) {
    return run([&] {
        *to = nullptr;
        if (!is_opencl(queue->queue)) return;
        auto context = queue->queue.get_context();
        cl_int code = CL_SUCCESS;
        auto event = OPENCL(clCreateUserEvent)(sycl::get_native<sycl::backend::opencl>(context), &code);
        check(code, "clCreateUserEvent");
        auto gate = new ad_gate{event};
        try {
            barrier_after(queue->queue, sycl::make_event<sycl::backend::opencl>(std::vector<cl_event>{event}, context));
        } catch (...) {
            ad_gate_open(gate);
            throw;
        }
        *to = gate;
    });
}

// A copy of a program's event.
int ad_event_copy(const sycl::event *event, ad_event **to) {
    return run([&] { *to = new ad_event{*event, nullptr}; });
}

sycl::event *ad_event_sycl(ad_event *event) { return &event->event; }

// Whether the work has completed: what it has written is then visible to the host. Fails if work has failed.
int ad_event_is_complete(ad_event *event, int *is_complete) {
    return run([&] {
        using sycl::info::event_command_status;
        auto status = event->event.get_info<sycl::info::event::command_execution_status>();
        *is_complete = 0;
        if (status == event_command_status::submitted || status == event_command_status::running || static_cast<int>(status) == UR_EVENT_STATUS_QUEUED)
            return;
        // It has ended, so this returns at once, or throws what it failed with. Asking for the status orders no memory; this does. Never
        // `wait_and_throw`: without a handler of the program's for the queue that ends the process.
        event->event.wait();
        if (status != event_command_status::complete) throw std::runtime_error("the work has failed");
        // Not `throw_asynchronous`: that reports the errors of all queues of the device, and ends the process if one of a program's queues
        // has an error and no handler.
        if (event->errors) event->errors->check();
        *is_complete = 1;
    });
}

void ad_event_delete(ad_event *event) {
    run([&] { delete event; });
}

// Aligned to 64 bytes. Sets null if there is not enough memory.
int ad_allocate(const ad_device *device, int memory, size_t bytes, void **base) {
    return run([&] {
        switch (memory) {
        case AD_DEVICE: *base = sycl::aligned_alloc_device(64, bytes, device->device, device->context); break;
        case AD_SHARED: *base = sycl::aligned_alloc_shared(64, bytes, device->device, device->context); break;
        default: *base = sycl::aligned_alloc_host(64, bytes, device->context); break;
        }
    });
}

// May wait for the device's work.
int ad_free(const ad_device *device, void *base) {
    return run([&] { sycl::free(base, device->context); });
}

// Of which kind the memory at an address is, AD_UNKNOWN for that of another context too.
int ad_memory_of(const ad_device *device, const void *address, int *memory) {
    return run([&] {
        switch (sycl::get_pointer_type(address, device->context)) {
        case sycl::usm::alloc::device: *memory = AD_DEVICE; break;
        case sycl::usm::alloc::shared: *memory = AD_SHARED; break;
        case sycl::usm::alloc::host: *memory = AD_HOST; break;
        default: *memory = AD_UNKNOWN; break;
        }
    });
}

} // extern "C"
#pragma GCC visibility pop
