/* The kernels, and how one runs: their sources are compiled here for the host. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include <atomic>
#include <exception>
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

/* ---- the table ---- */

namespace {

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

    static constexpr cuda_kernel named(const char *name) {
        return {name, sizeof...(Parameters), SIZES, block};
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

/* ---- memory, as the blocks of a launch see it ---- */

struct fault {
    int code;
};

/* What this thread has found of late, with references. */
struct lookups {
    struct entry {
        sim_memory *memory;
        bool may_store;
    };
    const cuda_context *context = nullptr;
    uint64_t epoch = 0;
    entry entries[8] = {};
    unsigned next = 0;

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
        sim_violation("a kernel touches memory that its context has no access to: 0x%llx",
                      (unsigned long long)address);
        sim_memory_release(memory);
        throw fault{ILLEGAL_ADDRESS};
    }
    if (memory && sim_memory_traits(memory).origin == CUDA_OPENED &&
        cuda_ipc_is_freed(memory->address)) {
        sim_violation("a kernel touches memory of another process, which has freed it");
        sim_memory_release(memory);
        throw fault{ILLEGAL_ADDRESS};
    }
    if (!memory) {
        sim_violation("a kernel touches memory that is not mapped, or was freed: 0x%llx",
                      (unsigned long long)address);
        throw fault{ILLEGAL_ADDRESS};
    }
    lookups::entry &replaced = found.entries[found.next++ % 8];
    sim_memory_release(replaced.memory);
    replaced = {memory, is_store};
    return memory;
}

/* ---- a launch ---- */

struct launch {
    const cuda_kernel *kernel;
    const cuda_context *context;
    void *const *parameters;
    unsigned num_threads;
    std::vector<unsigned> order;
    std::atomic<size_t> next{0};
    std::atomic<int> code{0};
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

void run_blocks(launch *all) {
    found.context = all->context;
    kvn_cuda_num_blocks = (unsigned)all->order.size();
    kvn_cuda_num_threads = all->num_threads;
    for (size_t i; !all->code && (i = all->next++) < all->order.size();) {
        kvn_cuda_block = all->order[i];
        try {
            all->kernel->block(all->parameters);
        } catch (const fault &it) {
            int none = 0;
            all->code.compare_exchange_strong(none, it.code);
        }
    }
    found.clear();
}

} // namespace

extern "C" void *kvn_cuda_at(unsigned long long address, unsigned nbytes, bool is_store) {
    if (address % nbytes) {
        sim_violation("a kernel touches %u bytes at 0x%llx, which is not aligned to them", nbytes,
                      address);
        throw fault{716};
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
    all.order.resize(num_blocks);
    for (unsigned i = 0; i < num_blocks; i++) {
        all.order[i] = i;
    }
    shuffle(all.order);
    std::vector<std::thread> helpers;
    for (int64_t i = 1; i < sim_settings_now().cuda_threads && num_blocks > 1; i++) {
        helpers.emplace_back(run_blocks, &all);
    }
    run_blocks(&all);
    for (std::thread &it : helpers) {
        it.join();
    }
    return all.code;
}
