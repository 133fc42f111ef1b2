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

// Work of OpenCL's own that ends when the event that this returns is set.
cl_event hold_by_event(sycl::queue *queue) {
    cl_event held = nullptr;
    run([&] {
        auto context = queue->get_context();
        cl_int code = 0;
        held = OPENCL(clCreateUserEvent)(sycl::get_native<sycl::backend::opencl>(context), &code);
        auto event = sycl::make_event<sycl::backend::opencl>(std::vector<cl_event>{held}, context);
        queue->submit([&](sycl::handler &handler) {
            handler.depends_on(event);
            handler.ext_oneapi_barrier();
        });
    });
    return held;
}

void end_event(cl_event held, int status) {
    OPENCL(clSetUserEventStatus)(held, status);
    OPENCL(clReleaseEvent)(held);
}

} // extern "C"
