// CUDA's threads on the host. The threads of a block are fibers: each runs until it meets the others, and the next one is chosen
// at random, as are the order of the blocks and the first content of shared memory. A thread that does not come is an error.

#pragma once

#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __device__ static
#define __launch_bounds__(threads)
#define __shared__ static __attribute__((section("shared_memory")))

extern "C" unsigned char __start_shared_memory[], __stop_shared_memory[];

using std::min;

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace threads {

inline std::mt19937_64 chance(1);

inline std::uint64_t below(std::uint64_t n) { return chance() % n; }

[[noreturn]] inline void fail(const char *what) {
    std::fprintf(stderr, "tests/kernels: %s\n", what);
    std::abort();
}

constexpr unsigned WARP_THREADS = 32;
constexpr std::size_t STACK = 64 << 10;

enum class State { Ready, AtWarp, AtBlock, Done };

struct Fiber {
    ucontext_t context;
    State state;
    bool vote;
    unsigned answer;
    void *shadow;
    std::unique_ptr<char[]> stack = std::make_unique<char[]>(STACK);
};

inline std::vector<Fiber> fibers(1024);
inline std::function<void()> kernel;
inline ucontext_t scheduler;
inline void *scheduler_shadow;
inline const void *scheduler_stack;
inline std::size_t scheduler_size;

// Of the fiber that runs: to the scheduler. The last time, its stack is given up.
inline void leave(Fiber &fiber) {
    __sanitizer_start_switch_fiber(fiber.state == State::Done ? nullptr : &fiber.shadow, scheduler_stack, scheduler_size);
    swapcontext(&fiber.context, &scheduler);
    __sanitizer_finish_switch_fiber(fiber.shadow, &scheduler_stack, &scheduler_size);
}

inline void run() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
    unsigned thread = threadIdx.x;
    kernel();
    fibers[thread].state = State::Done;
    leave(fibers[thread]);
}

// Lets a thread wait for the others, and returns what all of them get.
inline unsigned meet(State where, bool vote) {
    Fiber &fiber = fibers[threadIdx.x];
    fiber.state = where;
    fiber.vote = vote;
    leave(fiber);
    return fiber.answer;
}

// Lets the threads from `first` to `end` go on if all of them wait at the same place.
inline void release(unsigned first, unsigned end, State where, std::vector<unsigned> &ready) {
    unsigned answer = 0;
    for (unsigned thread = first; thread < end; ++thread) {
        if (fibers[thread].state != where) {
            return;
        }
        answer += where == State::AtBlock ? fibers[thread].vote : unsigned(fibers[thread].vote) << (thread - first);
    }
    for (unsigned thread = first; thread < end; ++thread) {
        fibers[thread].state = State::Ready;
        fibers[thread].answer = answer;
        ready.push_back(thread);
    }
}

inline void run_block() {
    for (auto *byte = __start_shared_memory; byte < __stop_shared_memory; ++byte) {
        *byte = static_cast<unsigned char>(chance());
    }
    std::vector<unsigned> ready(blockDim.x);
    std::iota(ready.begin(), ready.end(), 0u);
    for (unsigned thread : ready) {
        Fiber &fiber = fibers[thread];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        fiber.state = State::Ready;
        makecontext(&fiber.context, run, 0);
    }
    unsigned done = 0;
    while (!ready.empty()) {
        std::swap(ready[below(ready.size())], ready.back());
        threadIdx.x = ready.back();
        ready.pop_back();
        Fiber &fiber = fibers[threadIdx.x];
        __sanitizer_start_switch_fiber(&scheduler_shadow, fiber.stack.get(), STACK);
        swapcontext(&scheduler, &fiber.context);
        __sanitizer_finish_switch_fiber(scheduler_shadow, nullptr, nullptr);
        unsigned first = threadIdx.x / WARP_THREADS * WARP_THREADS;
        switch (fiber.state) {
        case State::AtWarp: release(first, first + WARP_THREADS, State::AtWarp, ready); break;
        case State::AtBlock: release(0, blockDim.x, State::AtBlock, ready); break;
        default: done += fiber.state == State::Done;
        }
    }
    if (done != blockDim.x) {
        fail("some threads of a block wait for others that do not come");
    }
}

// Runs a kernel: call() is it with its arguments.
inline void launch(unsigned blocks, unsigned block_threads, std::function<void()> call) {
    if (blocks == 0 || block_threads == 0 || block_threads > fibers.size() || block_threads % WARP_THREADS != 0) {
        fail("no such grid");
    }
    std::vector<unsigned> order(blocks);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), chance);
    kernel = std::move(call);
    gridDim.x = blocks;
    blockDim.x = block_threads;
    for (unsigned block : order) {
        blockIdx.x = block;
        run_block();
    }
}

} // namespace threads

static inline void __syncthreads() { threads::meet(threads::State::AtBlock, false); }
static inline int __syncthreads_count(bool mark) { return int(threads::meet(threads::State::AtBlock, mark)); }

static inline unsigned __ballot_sync(unsigned lanes, bool mark) {
    if (lanes != 0xffffffff) {
        threads::fail("a vote of some lanes only");
    }
    return threads::meet(threads::State::AtWarp, mark);
}

static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline void atomicAdd(unsigned long long *to, unsigned long long more) { *to += more; }
