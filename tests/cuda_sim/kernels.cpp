/* Compiles the sources of kernels for the host, and runs launches of them. */
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda_sim.h"
#include "kernel_host.h"

#if __has_include("cuda/copy.cu")
#include "cuda/copy.cu"
#endif
#include "example.cu"

namespace {

/* Checks memory in advance that kernels access by pointers in their parameters, without kvn_cuda_at. */
void check_array(const void *start, uint64_t count, unsigned each, bool is_store) {
    for (uint64_t i = 0; i < count; i++) {
        kvn_cuda_at((unsigned long long)(uintptr_t)start + i * each, each, is_store);
    }
}

template <class Parameter> void check_pointers(const Parameter &) {}

#if __has_include("cuda/copy.cu")
void check_pointers(const kvn_copy_work &work) {
    check_array(&work.control->begun, 1, sizeof work.control->begun, true);
    check_array(&work.control->stop, 1, sizeof work.control->stop, false);
}

void check_pointers(const kvn_copy_few &columns) { check_pointers(columns.work); }

void check_pointers(const kvn_copy_many &columns) {
    const unsigned count = columns.work.count;
    check_pointers(columns.work);
    check_array(columns.dst, count, sizeof *columns.dst, false);
    check_array(columns.src, count, sizeof *columns.src, false);
    if (!columns.work.nbytes_each) {
        check_array(columns.nbytes, count, sizeof *columns.nbytes, false);
        check_array(columns.first_piece, count, sizeof *columns.first_piece, false);
    }
}
#endif

/* ---- the table of kernels ---- */

template <class... Parameters, size_t... I>
void check(void *const *values, std::index_sequence<I...>) {
    (check_pointers(*static_cast<std::decay_t<Parameters> *>(values[I])), ...);
}

template <class... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), void *const *values, std::index_sequence<I...>) {
    kernel(*static_cast<std::decay_t<Parameters> *>(values[I])...);
}

template <auto kernel> struct row_of;

template <class... Parameters, void (*kernel)(Parameters...)> struct row_of<kernel> {
    static constexpr size_t SIZES[] = {sizeof(std::decay_t<Parameters>)...};

    static void block(void *const *values) {
        call(kernel, values, std::index_sequence_for<Parameters...>());
    }

    static void check_all(void *const *values) {
        check<Parameters...>(values, std::index_sequence_for<Parameters...>());
    }

    static constexpr cuda_kernel named(const char *name) {
        return {name, sizeof...(Parameters), SIZES, check_all, block};
    }
};

#define KERNEL(name) row_of<name>::named(#name)

const cuda_kernel KERNELS[] = {
#if __has_include("cuda/copy.cu")
    KERNEL(kvn_copy_few_kernel),
    KERNEL(kvn_copy_many_kernel),
#endif
    KERNEL(kvsim_example),
};

/* ---- memory accesses of a launch ---- */

constexpr uint64_t TIMED = 64 << 10;

struct fault {
    int code;
    char what[120];
};

[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(int code, const char *format, ...) {
    fault it{code, ""};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(it.what, sizeof it.what, format, arguments);
    va_end(arguments);
    throw it;
}

/* Recent lookups of this thread; each holds a reference. */
struct lookups {
    struct entry {
        sim_memory *memory;
        bool may_store;
    };
    const cuda_context *context = nullptr;
    uint64_t epoch = 0;
    entry entries[8] = {};
    unsigned next = 0;
    uint64_t bandwidth = 0;
    uint64_t stored = 0; /* bytes since the last take_time */

    void clear() {
        for (entry &it : entries) {
            sim_memory_release(it.memory);
            it = {};
        }
    }
};

thread_local lookups found;

bool holds(const sim_memory *memory, uint64_t address, unsigned nbytes) {
    return memory && memory->address <= address &&
           address + nbytes <= memory->address + memory->nbytes;
}

const sim_memory *look_up(uint64_t address, unsigned nbytes, bool is_store) {
    sim_memory *memory = sim_find(address, nbytes);
    if (memory && !cuda_kernel_may(found.context, memory, is_store)) {
        sim_memory_release(memory);
        fail(ILLEGAL_ADDRESS, "a kernel touches memory that its context has no access to: 0x%llx",
             (unsigned long long)address);
    }
    if (memory && sim_memory_traits(memory).origin == CUDA_OPENED &&
        cuda_ipc_is_freed(memory->address)) {
        sim_memory_release(memory);
        fail(ILLEGAL_ADDRESS, "a kernel touches memory of another process, which has freed it");
    }
    if (!memory) {
        fail(ILLEGAL_ADDRESS, "a kernel touches memory that is not mapped, or was freed: 0x%llx",
             (unsigned long long)address);
    }
    lookups::entry &replaced = found.entries[found.next++ % 8];
    sim_memory_release(replaced.memory);
    replaced = {memory, is_store};
    return memory;
}

/* ---- launches ---- */

struct launch {
    const cuda_kernel *kernel;
    const cuda_context *context;
    void *const *parameters;
    unsigned num_threads;
    uint64_t bandwidth; /* of each thread */
    std::vector<unsigned> order;
    std::atomic<size_t> next{0};
    std::atomic<int> code{0};

    /* Counts one violation for a launch, even if several threads or blocks fail. */
    void end(const fault &it) {
        int none = 0;
        if (code.compare_exchange_strong(none, it.code)) {
            sim_violation("%s", it.what);
        }
    }
};

void shuffle(std::vector<unsigned> &order) {
    static std::atomic<uint64_t> num_launches{0};
    uint64_t state = (sim_settings_now().seed + ++num_launches) * 0x9E3779B97F4A7C15U + 1;
    for (size_t left = order.size(); left > 1; left--) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        std::swap(order[left - 1], order[state % left]);
    }
}

/* Sleeps for stored bytes, in steps, so that a test can stop a long launch in the middle. */
void take_time(uint64_t at_least) {
    if (found.bandwidth && found.stored >= at_least) {
        const uint64_t us = found.stored * 1000000 / found.bandwidth;
        std::this_thread::sleep_for(std::chrono::microseconds(us));
        found.stored = 0;
    }
}

void check_parameters(launch *all) {
    found.context = all->context;
    try {
        all->kernel->check(all->parameters);
    } catch (const fault &it) {
        all->end(it);
    }
    found.clear();
}

void run_blocks(launch *all) {
    found.context = all->context;
    found.bandwidth = all->bandwidth;
    found.stored = 0;
    kvn_cuda_num_blocks = (unsigned)all->order.size();
    kvn_cuda_num_threads = all->num_threads;
    try {
        for (size_t i; !all->code && (i = all->next++) < all->order.size();) {
            kvn_cuda_block = all->order[i];
            all->kernel->block(all->parameters);
            take_time(1);
        }
    } catch (const fault &it) {
        all->end(it);
    }
    found.clear();
}

} // namespace

extern "C" void *kvn_cuda_at(unsigned long long address, unsigned nbytes, bool is_store) {
    if (address % nbytes) {
        fail(716, "a kernel touches %u bytes at 0x%llx, which is not aligned to them", nbytes,
             address);
    }
    if (is_store) {
        take_time(TIMED);
        found.stored += nbytes;
    }
    const uint64_t epoch = sim_memory_epoch();
    if (epoch != found.epoch) {
        found.clear();
        found.epoch = epoch;
    }
    const sim_memory *memory = nullptr;
    for (const lookups::entry &it : found.entries) {
        if (holds(it.memory, address, nbytes) && (it.may_store || !is_store)) {
            memory = it.memory;
            break;
        }
    }
    memory = memory ? memory : look_up(address, nbytes, is_store);
    return memory->view + (address - memory->address);
}

const cuda_kernel *cuda_kernel_find(const char *name) {
    for (const cuda_kernel &it : KERNELS) {
        if (!strcmp(it.name, name)) {
            return &it;
        }
    }
    return nullptr;
}

int cuda_kernel_run(const cuda_kernel *kernel, const cuda_context *context, unsigned num_blocks,
                    unsigned num_threads, void *const *parameters) {
    launch all;
    all.kernel = kernel;
    all.context = context;
    all.parameters = parameters;
    all.num_threads = num_threads;
    const sim_settings settings = sim_settings_now();
    const int64_t threads = num_blocks > 1 && settings.cuda_threads > 1 ? settings.cuda_threads : 1;
    all.bandwidth = settings.bandwidth ? settings.bandwidth / (uint64_t)threads + 1 : 0;
    all.order.resize(num_blocks);
    for (unsigned i = 0; i < num_blocks; i++) {
        all.order[i] = i;
    }
    shuffle(all.order);
    check_parameters(&all);
    std::vector<std::thread> helpers;
    for (int64_t i = 1; i < threads && !all.code; i++) {
        helpers.emplace_back(run_blocks, &all);
    }
    run_blocks(&all);
    for (std::thread &it : helpers) {
        it.join();
    }
    return all.code;
}
