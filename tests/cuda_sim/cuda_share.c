/* IPC handles: a process opens a whole allocation of another process's cuMemAlloc. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda_sim.h"

typedef struct {
    char bytes[64];
} ipc_handle; /* CUipcMemHandle, passed by value */

CUDA cuIpcGetMemHandle(ipc_handle *handle, cuda_address address);
CUDA cuIpcOpenMemHandle_v2(cuda_address *address, ipc_handle handle, unsigned flags);
CUDA cuIpcCloseMemHandle(cuda_address address);

#define MAGIC UINT64_C(0x6b7673696d637564)

typedef struct {
    uint64_t magic;
    int32_t pid;
    int32_t fd;
    uint64_t inode;
    uint64_t nbytes;
    int32_t device;
} content;

_Static_assert(sizeof(content) <= sizeof(ipc_handle), "64 bytes");

typedef struct opened {
    content of;
    const cuda_context *context;
    uint64_t address;
    unsigned references;
    struct opened *next;
} opened;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static opened *all;

static int enter(sim_call *call, const char *name, cuda_context **context) {
    int code = cuda_enter_context(call, name, context);
    if (!code && !sim_settings_now().cuda_ipc) {
        code = sim_error(NOT_SUPPORTED, "%s: the processes are isolated", name);
    }
    return code;
}

CUDA cuIpcGetMemHandle(ipc_handle *handle, cuda_address address) {
    sim_call call;
    cuda_context *context;
    int code = enter(&call, __func__, &context);
    code = CUDA_CHECK(code, handle);
    sim_memory *memory = code ? NULL : sim_find(address, 1);
    sim_traits traits = memory ? sim_memory_traits(memory) : (sim_traits){0};
    struct stat status;
    if (!code && (traits.origin != CUDA_ALLOCATED || memory->address != address)) {
        code = sim_error(INVALID_VALUE, "0x%llx is not the beginning of memory of cuMemAlloc", address);
    } else if (!code && (traits.owner != context || fstat(memory->fd, &status))) {
        sim_violation("memory of one context is exported in another");
        code = sim_error(INVALID_CONTEXT, "0x%llx belongs to another context", address);
    }
    if (!code) {
        const content made = {MAGIC, getpid(), memory->fd, status.st_ino, memory->nbytes,
                              memory->device};
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &made, sizeof made);
    }
    sim_memory_release(memory);
    return cuda_leave(&call, code, "\"address\":%llu", address);
}

/* Returns the memfd of the allocation, or -1 after it was freed or its process has ended. */
static int open_file(const content *of) {
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", of->pid, of->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && (fstat(fd, &status) || status.st_ino != of->inode)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Returns 1 also for a zombie process, which has no /proc/PID/exe. */
static int has_ended(int pid) {
    char path[64], target[8];
    snprintf(path, sizeof path, "/proc/%d/exe", pid);
    return (kill(pid, 0) && errno == ESRCH) ||
           (readlink(path, target, sizeof target) < 0 && errno == ENOENT);
}

int cuda_ipc_is_freed(uint64_t address) {
    content of = {0};
    pthread_mutex_lock(&mutex);
    for (const opened *it = all; it; it = it->next) {
        of = it->address == address ? it->of : of;
    }
    pthread_mutex_unlock(&mutex);
    if (!of.pid || has_ended(of.pid)) {
        return 0; /* memory of a dead process stays valid until it is closed */
    }
    int fd = open_file(&of);
    if (fd >= 0) {
        close(fd);
    }
    return fd < 0 && !has_ended(of.pid);
}

/* Call with the mutex held. */
static int check(const content *of, const cuda_context *context, opened **known) {
    *known = NULL;
    if (of->magic != MAGIC) {
        return sim_error(INVALID_HANDLE, "the handle is none of cuIpcGetMemHandle");
    }
    if (of->pid == getpid()) {
        return sim_error(INVALID_CONTEXT, "the handle is of this process");
    }
    if (!cuda_is_mappable(of->device)) {
        return sim_error(INVALID_DEVICE, "memory of a device that is not visible here");
    }
    if (of->device != context->device && !cuda_can_reach(context->device, of->device)) {
        return sim_error(PEER_UNSUPPORTED, "device %d cannot reach device %d", context->device,
                         of->device);
    }
    for (opened *it = all; it; it = it->next) {
        if (it->of.pid == of->pid && it->of.device == of->device && it->context != context &&
            it->context->device == context->device) {
            return sim_error(INVALID_CONTEXT, "another context of the device opens that process's");
        }
        if (it->context == context && it->of.pid == of->pid && it->of.inode == of->inode) {
            *known = it;
        }
    }
    return 0;
}

/* Call with the mutex held. */
static int open_new(const content *of, cuda_context *context, uint64_t *address) {
    int fd = open_file(of);
    if (fd < 0) {
        return sim_error(INVALID_VALUE, "the memory was freed, or its process %d is gone", of->pid);
    }
    *address = sim_space_take(of->nbytes + PAGE_2M, PAGE_2M);
    int code = *address ? sim_memory_attach(of->device, *address, of->nbytes, fd, 0) : MAP_FAILED_CODE;
    close(fd);
    if (!code) {
        sim_memory_describe(*address, (sim_traits){.owner = context, .origin = CUDA_OPENED});
        opened *made = malloc(sizeof *made);
        if (!made) {
            abort();
        }
        *made = (opened){*of, context, *address, 1, all};
        all = made;
    }
    return code;
}

CUDA cuIpcOpenMemHandle_v2(cuda_address *out, ipc_handle handle, unsigned flags) {
    sim_call call;
    cuda_context *context;
    content of;
    uint64_t address = 0;
    memcpy(&of, &handle, sizeof of);
    int code = enter(&call, __func__, &context);
    code = CUDA_CHECK(code, out);
    if (!code && flags != 1) {
        code = sim_error(INVALID_VALUE, "Flags=%u: CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, 1", flags);
    }
    if (!code) {
        opened *known;
        pthread_mutex_lock(&mutex);
        code = check(&of, context, &known);
        if (!code && known) {
            known->references++;
            address = known->address;
        } else if (!code) {
            code = open_new(&of, context, &address);
        }
        pthread_mutex_unlock(&mutex);
    }
    if (!code) {
        *out = address;
    }
    return cuda_leave(&call, code, "\"of\":%d,\"bytes\":%llu,\"address\":%llu", of.pid,
                      (unsigned long long)of.nbytes, (unsigned long long)address);
}

CUDA cuIpcCloseMemHandle(cuda_address address) {
    sim_call call;
    cuda_context *context;
    int code = enter(&call, __func__, &context);
    if (!code) {
        pthread_mutex_lock(&mutex);
        opened **link = &all;
        while (*link && (*link)->address != address) {
            link = &(*link)->next;
        }
        opened *closed = *link;
        if (!closed || closed->context != context) {
            sim_violation("0x%llx is closed, but was not opened in this context", address);
            code = sim_error(INVALID_VALUE, "0x%llx was not opened in this context", address);
        } else if (!--closed->references) {
            *link = closed->next;
            if (sim_memory_is_used(address)) {
                sim_violation("opened memory is closed while work uses it: 0x%llx", address);
            }
            code = sim_memory_free(SIM_MEMORY_DEVICE, address);
            free(closed);
        }
        pthread_mutex_unlock(&mutex);
    }
    return cuda_leave(&call, code, "\"address\":%llu", address);
}

void cuda_ipc_drop(const cuda_context *context) {
    pthread_mutex_lock(&mutex);
    for (opened **link = &all; *link;) {
        opened *it = *link;
        if (it->context == context) {
            *link = it->next;
            free(it);
        } else {
            link = &it->next;
        }
    }
    pthread_mutex_unlock(&mutex);
}
