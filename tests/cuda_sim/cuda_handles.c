/*
 * Handles of memory without an address: creation, release, and export to other processes as a memfd. The name of the
 * memfd has the device and the types of handles.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda_virtual.h"

typedef struct {
    int type; /* 1: CU_MEM_ALLOCATION_TYPE_PINNED */
    int handle_types;
    location where;
    void *windows;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} allocation; /* CUmemAllocationProp */

CUDA cuMemGetAllocationGranularity(size_t *nbytes, const allocation *properties, int which);
CUDA cuMemCreate(cuda_address *handle, size_t nbytes, const allocation *properties,
                 unsigned long long flags);
CUDA cuMemRelease(cuda_address handle);
CUDA cuMemExportToShareableHandle(void *out, cuda_address handle, int type, unsigned long long flags);
CUDA cuMemImportFromShareableHandle(cuda_address *handle, void *descriptor, int type);

#define NAME "kvsim-cuda-device-"
#define DESCRIPTOR 1 /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */

pthread_mutex_t cuda_virtual_mutex = PTHREAD_MUTEX_INITIALIZER;
static cuda_memory *physicals;

int cuda_virtual_enter(sim_call *call, const char *name) {
    int code = cuda_enter(call, name);
    if (!code && !sim_settings_now().cuda_virtual) {
        code = sim_error(NOT_SUPPORTED, "%s: the device has no virtual memory", name);
    }
    return code;
}

void *cuda_grown(size_t nbytes) {
    void *made = calloc(1, nbytes);
    if (!made) {
        abort();
    }
    return made;
}

/* ---- creation and release ---- */

static int check_properties(const allocation *wanted, int *device) {
    static const unsigned char ZEROS[4];
    *device = -1;
    if (wanted->type != 1 || wanted->where.type != 1 || wanted->windows || wanted->compression ||
        wanted->usage || memcmp(wanted->reserved, ZEROS, sizeof ZEROS)) {
        return sim_error(INVALID_VALUE, "memory of type %d at a location of type %d", wanted->type,
                         wanted->where.type);
    }
    if (wanted->rdma > 1) {
        return sim_error(INVALID_VALUE, "gpuDirectRDMACapable=%d", wanted->rdma);
    }
    if (wanted->handle_types & ~DESCRIPTOR ||
        (wanted->handle_types && sim_settings_now().cuda_virtual != 1)) {
        return sim_error(NOT_SUPPORTED, "requestedHandleTypes=%d", wanted->handle_types);
    }
    *device = cuda_physical(wanted->where.id);
    return *device < 0 ? sim_error(INVALID_DEVICE, "device %d", wanted->where.id) : 0;
}

CUDA cuMemGetAllocationGranularity(size_t *nbytes, const allocation *properties, int which) {
    sim_call call;
    int device;
    int code = cuda_virtual_enter(&call, __func__);
    code = CUDA_CHECK(code, nbytes);
    code = CUDA_CHECK(code, properties);
    code = code ? code : check_properties(properties, &device);
    if (!code && (which < 0 || which > 1)) {
        code = sim_error(INVALID_VALUE, "option=%d", which);
    }
    if (!code) {
        *nbytes = PAGE_2M;
    }
    return cuda_leave(&call, code, "%s", "");
}

cuda_memory *cuda_physical_find(uint64_t handle) {
    cuda_memory *memory = physicals;
    while (memory && (memory->handle != handle || !memory->num_handles)) {
        memory = memory->next;
    }
    return memory;
}

static uint64_t add_physical(int device, int fd, int handle_types, uint64_t nbytes, int is_imported) {
    cuda_memory *memory = cuda_grown(sizeof *memory);
    *memory = (cuda_memory){.handle = (uint64_t)(uintptr_t)sim_handle_new(), .device = device, .fd = fd,
                         .handle_types = handle_types, .nbytes = nbytes, .is_imported = is_imported,
                         .num_handles = 1};
    pthread_mutex_lock(&cuda_virtual_mutex);
    memory->next = physicals;
    physicals = memory;
    pthread_mutex_unlock(&cuda_virtual_mutex);
    sim_count(SIM_COUNT_HANDLES, 1);
    return memory->handle;
}

void cuda_physical_drop(cuda_memory *memory) {
    if (memory->num_handles || memory->num_mappings) {
        return;
    }
    cuda_memory **link = &physicals;
    while (*link != memory) {
        link = &(*link)->next;
    }
    *link = memory->next;
    if (!memory->is_imported) {
        sim_hbm_change(memory->device, -(int64_t)memory->nbytes, 0, NULL);
    }
    close(memory->fd);
    free(memory);
}

/* Hardware does not zero new memory. Only the beginning is filled, because a cache may have hundreds of handles. */
static int make_file(int device, int handle_types, uint64_t nbytes) {
    char name[64];
    snprintf(name, sizeof name, NAME "%d-%d", device, handle_types);
    int fd = memfd_create(name, MFD_CLOEXEC);
    size_t filled = nbytes < 1 << 16 ? nbytes : 1 << 16;
    unsigned char *dirt = cuda_grown(filled);
    memset(dirt, 0xA5, filled);
    if (fd >= 0 && (ftruncate(fd, (off_t)nbytes) || pwrite(fd, dirt, filled, 0) != (ssize_t)filled)) {
        close(fd);
        fd = -1;
    }
    free(dirt);
    return fd;
}

CUDA cuMemCreate(cuda_address *handle, size_t nbytes, const allocation *properties,
                 unsigned long long flags) {
    sim_call call;
    int device = -1;
    uint64_t used;
    int code = cuda_virtual_enter(&call, __func__);
    code = CUDA_CHECK(code, handle);
    code = CUDA_CHECK(code, properties);
    code = code ? code : check_properties(properties, &device);
    if (!code && (!nbytes || nbytes % PAGE_2M || flags)) {
        code = sim_error(INVALID_VALUE, "size=%zu is not whole granules, or flags=%llu", nbytes, flags);
    }
    if (!code && sim_hbm_change(device, (int64_t)nbytes, sim_settings_now().hbm_bytes, &used)) {
        code = sim_error(OUT_OF_MEMORY, "%zu bytes of device %d", nbytes, device);
    }
    if (!code) {
        int fd = make_file(device, properties->handle_types, nbytes);
        if (fd < 0) {
            sim_hbm_change(device, -(int64_t)nbytes, 0, NULL);
            code = sim_error(OUT_OF_MEMORY, "%zu bytes of a memfd", nbytes);
        } else {
            *handle = add_physical(device, fd, properties->handle_types, nbytes, 0);
        }
    }
    return cuda_leave(&call, code, "\"bytes\":%zu,\"handle\":%llu,\"device\":%d", nbytes,
                      code ? 0 : *handle, device);
}

CUDA cuMemRelease(cuda_address handle) {
    sim_call call;
    int code = cuda_virtual_enter(&call, __func__);
    if (!code) {
        pthread_mutex_lock(&cuda_virtual_mutex);
        cuda_memory *memory = cuda_physical_find(handle);
        if (memory) {
            memory->num_handles--;
            cuda_physical_drop(memory);
        }
        pthread_mutex_unlock(&cuda_virtual_mutex);
        sim_count(SIM_COUNT_HANDLES, memory ? -1 : 0);
        if (!memory) {
            sim_violation("0x%llx is released, but is not a handle of memory", handle);
            code = sim_error(INVALID_VALUE, "0x%llx is not a handle of memory", handle);
        }
    }
    return cuda_leave(&call, code, "\"handle\":%llu", handle);
}

/* ---- other processes ---- */

CUDA cuMemExportToShareableHandle(void *out, cuda_address handle, int type, unsigned long long flags) {
    sim_call call;
    int fd = -1;
    int code = cuda_virtual_enter(&call, __func__);
    code = CUDA_CHECK(code, out);
    if (!code && (type != DESCRIPTOR || flags)) {
        code = sim_error(INVALID_VALUE, "handleType=%d, flags=%llu", type, flags);
    }
    if (!code) {
        pthread_mutex_lock(&cuda_virtual_mutex);
        const cuda_memory *memory = cuda_physical_find(handle);
        if (!memory || !(memory->handle_types & DESCRIPTOR)) {
            code = sim_error(INVALID_VALUE, "0x%llx is %s", handle,
                             memory ? "not made to be exported" : "no handle of memory");
        } else if ((fd = fcntl(memory->fd, F_DUPFD, 0)) < 0) { /* exec() may close it or not: not documented */
            code = sim_error(OUT_OF_MEMORY, "no more descriptors");
        }
        pthread_mutex_unlock(&cuda_virtual_mutex);
    }
    if (!code) {
        *(int *)out = fd;
    }
    return cuda_leave(&call, code, "\"handle\":%llu,\"fd\":%d", handle, fd);
}

/* Reads an exported handle, of this process or another, from the name of its memfd. Returns 0, or an error. */
static int read_descriptor(int fd, int *device, int *handle_types, uint64_t *nbytes) {
    char path[64], name[128];
    struct stat status;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(path, name, sizeof name - 1);
    name[length < 0 ? 0 : length] = '\0';
    if (fstat(fd, &status) || sscanf(name, "/memfd:" NAME "%d-%d", device, handle_types) != 2 ||
        !(*handle_types & DESCRIPTOR)) {
        return sim_error(INVALID_VALUE, "descriptor %d is none of exported memory", fd);
    }
    *nbytes = (uint64_t)status.st_size;
    return cuda_is_mappable(*device)
               ? 0
               : sim_error(INVALID_DEVICE, "memory of a device that is not visible here");
}

CUDA cuMemImportFromShareableHandle(cuda_address *handle, void *descriptor, int type) {
    sim_call call;
    int fd = (int)(intptr_t)descriptor;
    int device = -1, handle_types, own;
    uint64_t nbytes = 0;
    int code = cuda_virtual_enter(&call, __func__);
    code = CUDA_CHECK(code, handle);
    if (!code && type != DESCRIPTOR) {
        code = sim_error(INVALID_VALUE, "shHandleType=%d", type);
    }
    code = code ? code : read_descriptor(fd, &device, &handle_types, &nbytes);
    if (!code && (own = fcntl(fd, F_DUPFD_CLOEXEC, 0)) < 0) {
        code = sim_error(OUT_OF_MEMORY, "no more descriptors");
    } else if (!code) {
        *handle = add_physical(device, own, handle_types, nbytes, 1);
    }
    return cuda_leave(&call, code, "\"fd\":%d,\"bytes\":%llu,\"device\":%d,\"handle\":%llu", fd,
                      (unsigned long long)nbytes, device, code ? 0 : *handle);
}
