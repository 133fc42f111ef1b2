// What tests need of SYCL, as programs use it: nothing here knows of arrow-device. Compiled by a plain C++17 compiler.
#define CL_TARGET_OPENCL_VERSION 300
#include <sycl/backend/opencl.hpp>
#include <sycl/sycl.hpp>

#include <CL/cl.h>
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

// The C structs of the specification.
struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    ArrowArray **children;
    ArrowArray *dictionary;
    void (*release)(ArrowArray *);
    void *private_data;
};
struct ArrowDeviceArray {
    ArrowArray array;
    int64_t device_id;
    int32_t device_type;
    void *sync_event;
    int64_t reserved[3];
};
constexpr int32_t ARROW_DEVICE_ONEAPI = 14;

namespace {

template <class Call> int run(Call call) {
    try {
        call();
        return 0;
    } catch (const std::exception &e) {
        std::fprintf(stderr, "SYCL: %s\n", e.what());
        return 1;
    }
}

// A function of the loader of OpenCL that SYCL has loaded.
template <class Function> Function *opencl(Function *, const char *name) {
    return reinterpret_cast<Function *>(dlsym(dlopen("libOpenCL.so.1", RTLD_NOW | RTLD_NOLOAD), name));
}
#define OPENCL(name) opencl(static_cast<decltype(&name)>(nullptr), #name)

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

} // namespace

extern "C" {

// Opens a gate: 1. It goes with its host task.
typedef std::atomic<int> Gate;

Gate *gate_new() { return new Gate(0); }
void gate_open(Gate *gate) { *gate = 1; }

// A host task that ends when the gate is open, and then throws if `fails`. SYCL runs one host task at a time.
int hold_by_host_task(sycl::queue *queue, Gate *gate, int fails) {
    return run([&] {
        queue->submit([&](sycl::handler &handler) {
            handler.host_task([gate, fails] {
                while (!*gate) sleep_ms(1);
                delete gate;
                if (fails) throw std::runtime_error("the host task has failed");
            });
        });
    });
}

// An event that ends when `end_event` is called with what `*held` is set to.
sycl::event *event_held(sycl::queue *queue, cl_event *held) {
    sycl::event *event = nullptr;
    run([&] {
        auto context = queue->get_context();
        cl_int code = 0;
        *held = OPENCL(clCreateUserEvent)(sycl::get_native<sycl::backend::opencl>(context), &code);
        event = new sycl::event(sycl::make_event<sycl::backend::opencl>(std::vector<cl_event>{*held}, context));
    });
    return event;
}

void event_delete(sycl::event *event) { delete event; }

// Work of OpenCL's own that ends when the event that this returns is set.
cl_event hold_by_event(sycl::queue *queue) {
    cl_event held = nullptr;
    auto event = event_held(queue, &held);
    run([&] {
        queue->submit([&](sycl::handler &handler) {
            handler.depends_on(*event);
            handler.ext_oneapi_barrier();
        });
    });
    event_delete(event);
    return held;
}

// Work of OpenCL's own that runs until the gate is open.
int hold_by_kernel(sycl::queue *queue, Gate *gate) {
    auto kernel = [](void *args) {
        auto gate = *static_cast<Gate **>(args);
        while (!*gate) sleep_ms(1);
        delete gate;
    };
    auto native = sycl::get_native<sycl::backend::opencl>(*queue);
    return OPENCL(clEnqueueNativeKernel)(native, kernel, &gate, sizeof gate, 0, nullptr, nullptr, 0, nullptr, nullptr);
}

void end_event(cl_event held, int status) {
    OPENCL(clSetUserEventStatus)(held, status);
    OPENCL(clReleaseEvent)(held);
}


// How a queue is made, and what a producer does there.
enum {
    OWN_CONTEXT = 1,     // in a context of its own
    OUT_OF_ORDER = 2,    // on a queue out of order
    FAILS = 4,           // with a host task that throws
    SHARED = 8,          // in shared memory
    EVENT_OF_HOST = 16,  // with the event of a host task
    NO_HANDLER = 32,     // on a queue without a handler of errors
};

static sycl::queue make_queue(int64_t number, int how) {
    auto device = sycl::device::get_devices().at(number);
    auto order = how & OUT_OF_ORDER ? sycl::property_list{} : sycl::property_list{sycl::property::queue::in_order()};
    auto ignore = [](sycl::exception_list) {};
    auto context = how & OWN_CONTEXT ? sycl::context(device) : sycl::queue(device).get_context();
    return how & NO_HANDLER ? sycl::queue(context, device, order) : sycl::queue(context, device, ignore, order);
}

struct Produced {
    sycl::queue queue;
    std::vector<int64_t> values;
    void *memory;
    sycl::event event;
    const void *buffers[2];
};

static std::atomic<int> live{0};
int producer_live() { return live; }

static void release(ArrowArray *array) {
    auto produced = static_cast<Produced *>(array->private_data);
    run([&] {
        produced->queue.wait();
        sycl::free(produced->memory, produced->queue);
    });
    delete produced;
    array->release = nullptr;
    live--;
}

// An array of int64, 3 * i, whose event is pending until the gate is open.
int produce(ArrowDeviceArray *out, int64_t number, int64_t rows, int how, Gate *gate) {
    return run([&] {
        auto queue = make_queue(number, how);
        auto bytes = rows * sizeof(int64_t);
        auto produced = new Produced{queue};
        for (int64_t i = 0; i < rows; i++) produced->values.push_back(3 * i);
        produced->memory = how & SHARED ? sycl::malloc_shared(bytes, queue) : sycl::malloc_device(bytes, queue);
        queue.memset(produced->memory, 0xEE, bytes).wait();
        auto held = queue.submit([&](sycl::handler &handler) {
            bool fails = how & FAILS;
            handler.host_task([gate, fails] {
                while (!*gate) sleep_ms(1);
                delete gate;
                if (fails) throw std::runtime_error("the host task has failed");
            });
        });
        produced->event = queue.memcpy(produced->memory, produced->values.data(), bytes, held);
        if (how & EVENT_OF_HOST)
            produced->event = queue.submit([&](sycl::handler &handler) {
                handler.depends_on(produced->event);
                handler.host_task([] {});
            });
        produced->buffers[0] = nullptr;
        produced->buffers[1] = produced->memory;
        *out = ArrowDeviceArray{};
        out->array = ArrowArray{rows, 0, 0, 2, 0, produced->buffers, nullptr, nullptr, release, produced};
        out->device_id = number;
        out->device_type = ARROW_DEVICE_ONEAPI;
        out->sync_event = &produced->event;
        live++;
    });
}

// A consumer's queue, in the context of `queue`, copies after an event. (For a barrier SYCL waits within the call.)
sycl::event *consume(sycl::queue *queue, sycl::event *event, void *to, const void *from, size_t bytes) {
    sycl::event *behind = nullptr;
    run([&] {
        sycl::queue own(queue->get_context(), queue->get_device());
        behind = new sycl::event(own.memcpy(to, from, bytes, *event));
    });
    return behind;
}

// Whether the consumer's queue has waited. Then nothing is left of it.
int has_consumed(sycl::event *behind) {
    if (behind->get_info<sycl::info::event::command_execution_status>() != sycl::info::event_command_status::complete) return 0;
    delete behind;
    return 1;
}

sycl::queue *queue_new(int64_t number, int how) {
    sycl::queue *queue = nullptr;
    run([&] { queue = new sycl::queue(make_queue(number, how)); });
    return queue;
}

void queue_delete(sycl::queue *queue) {
    queue->wait();
    delete queue;
}

// Writes `values[i] = factor * i` after the work of the queue so far, in a host task.
int scale_by_host_task(sycl::queue *queue, int64_t *values, int64_t rows, int64_t factor) {
    return run([&] {
        queue->submit([&](sycl::handler &handler) {
            handler.host_task([=] {
                for (int64_t i = 0; i < rows; i++) values[i] *= factor;
            });
        });
    });
}

// Asks SYCL for the exceptions of host tasks: of those of all queues of the device.
int ask_for_exceptions(sycl::queue *queue) {
    return run([&] { queue->throw_asynchronous(); });
}

} // extern "C"
