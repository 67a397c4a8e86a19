/*
 * Virtual memory: memory without addresses, addresses without memory, and mappings of one at the other.
 * Memory is there as long as a handle or a mapping is; shared with other processes it is a memfd, whose name
 * says which device it is of.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda_sim.h"

typedef struct {
    int type; /* CUmemLocationType: 1 a device */
    int id;
} location;

typedef struct {
    int type; /* 1 pinned */
    int handle_types;
    location where;
    void *windows;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} allocation; /* CUmemAllocationProp */

typedef struct {
    location where;
    int flags; /* 0 none, 1 read, 3 read and write */
} access_of; /* CUmemAccessDesc */

CUDA cuMemGetAllocationGranularity(size_t *nbytes, const allocation *properties, int which);
CUDA cuMemCreate(cuda_address *handle, size_t nbytes, const allocation *properties,
                 unsigned long long flags);
CUDA cuMemRelease(cuda_address handle);
CUDA cuMemAddressReserve(cuda_address *address, size_t nbytes, size_t alignment, cuda_address wanted,
                         unsigned long long flags);
CUDA cuMemAddressFree(cuda_address address, size_t nbytes);
CUDA cuMemMap(cuda_address address, size_t nbytes, size_t offset, cuda_address handle,
              unsigned long long flags);
CUDA cuMemUnmap(cuda_address address, size_t nbytes);
CUDA cuMemSetAccess(cuda_address address, size_t nbytes, const access_of *accesses, size_t count);
CUDA cuMemGetAccess(unsigned long long *flags, const location *where, cuda_address address);
CUDA cuMemRetainAllocationHandle(cuda_address *handle, void *mapped);
CUDA cuMemExportToShareableHandle(void *out, cuda_address handle, int type, unsigned long long flags);
CUDA cuMemImportFromShareableHandle(cuda_address *handle, void *descriptor, int type);

#define NAME "kvsim-cuda-device-"
#define NEIGHBOURS ((uint64_t)1 << 30) /* address space of ranges without gaps */
#define DESCRIPTOR 1 /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */

typedef struct physical {
    uint64_t handle;
    int device;
    int fd;
    int handle_types;
    unsigned num_handles; /* that were not released */
    int is_imported; /* who made it has counted it */
    unsigned num_mappings;
    uint64_t nbytes;
    struct physical *next;
} physical;

typedef struct mapping {
    uint64_t address;
    uint64_t nbytes;
    physical *memory;
    struct mapping *next;
} mapping;

typedef struct reservation {
    uint64_t address;
    uint64_t nbytes;
    struct reservation *next;
} reservation;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static physical *physicals;
static mapping *mappings;
static reservation *reservations;

static int enter(sim_call *call, const char *name) {
    int code = cuda_enter(call, name);
    if (!code && !sim_settings_now().cuda_virtual) {
        code = sim_error(NOT_SUPPORTED, "%s: the device has no virtual memory", name);
    }
    return code;
}

static void *grown(size_t nbytes) {
    void *made = calloc(1, nbytes);
    if (!made) {
        abort();
    }
    return made;
}

/* ---- memory ---- */

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
    int code = enter(&call, __func__);
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

/* With the mutex. */
static physical *find_physical(uint64_t handle) {
    physical *memory = physicals;
    while (memory && (memory->handle != handle || !memory->num_handles)) {
        memory = memory->next;
    }
    return memory;
}

static uint64_t add_physical(int device, int fd, int handle_types, uint64_t nbytes, int is_imported) {
    physical *memory = grown(sizeof *memory);
    *memory = (physical){.handle = (uint64_t)(uintptr_t)sim_handle_new(), .device = device, .fd = fd,
                         .handle_types = handle_types, .nbytes = nbytes, .is_imported = is_imported,
                         .num_handles = 1};
    pthread_mutex_lock(&mutex);
    memory->next = physicals;
    physicals = memory;
    pthread_mutex_unlock(&mutex);
    sim_count(SIM_COUNT_HANDLES, 1);
    return memory->handle;
}

/* With the mutex: the memory goes with its last handle or mapping. */
static void drop_physical(physical *memory) {
    if (memory->num_handles || memory->num_mappings) {
        return;
    }
    physical **link = &physicals;
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

/* New memory is not zero on hardware; of large ones only the beginning, as a cache may have hundreds. */
static int make_file(int device, int handle_types, uint64_t nbytes) {
    char name[64];
    snprintf(name, sizeof name, NAME "%d-%d", device, handle_types);
    int fd = memfd_create(name, MFD_CLOEXEC);
    size_t filled = nbytes < 1 << 16 ? nbytes : 1 << 16;
    unsigned char *dirt = grown(filled);
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
    int code = enter(&call, __func__);
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
    int code = enter(&call, __func__);
    if (!code) {
        pthread_mutex_lock(&mutex);
        physical *memory = find_physical(handle);
        if (memory) {
            memory->num_handles--;
            drop_physical(memory);
        }
        pthread_mutex_unlock(&mutex);
        sim_count(SIM_COUNT_HANDLES, memory ? -1 : 0);
        if (!memory) {
            sim_violation("0x%llx is released, but is no handle of memory", handle);
            code = sim_error(INVALID_VALUE, "0x%llx is no handle of memory", handle);
        }
    }
    return cuda_leave(&call, code, "\"handle\":%llu", handle);
}

/* ---- addresses ---- */

/* With the mutex: the reservation that has all of the range. */
static reservation *find_reservation(uint64_t address, uint64_t nbytes) {
    reservation *it = reservations;
    while (it && !(it->address <= address && address + nbytes <= it->address + it->nbytes)) {
        it = it->next;
    }
    return it;
}

int cuda_reservation_find(uint64_t address, uint64_t *start, uint64_t *nbytes) {
    pthread_mutex_lock(&mutex);
    const reservation *it = find_reservation(address, 1);
    if (it) {
        *start = it->address;
        *nbytes = it->nbytes;
    }
    pthread_mutex_unlock(&mutex);
    return it != NULL;
}

static uint64_t adjacent_space(uint64_t nbytes) {
    static uint64_t at, end;
    uint64_t given = 0;
    pthread_mutex_lock(&mutex);
    if (end - at < nbytes && nbytes <= NEIGHBOURS) {
        at = sim_space_take(NEIGHBOURS, PAGE_2M);
        end = at ? at + NEIGHBOURS : 0;
    }
    if (end - at >= nbytes) {
        given = at;
        at += nbytes;
    }
    pthread_mutex_unlock(&mutex);
    return given;
}

CUDA cuMemAddressReserve(cuda_address *address, size_t nbytes, size_t alignment, cuda_address wanted,
                         unsigned long long flags) {
    sim_call call;
    uint64_t start = 0;
    int code = enter(&call, __func__);
    code = CUDA_CHECK(code, address);
    if (!code && (!nbytes || nbytes % PAGE_2M || alignment & (alignment - 1) || flags)) {
        code = sim_error(INVALID_VALUE, "size=%zu, alignment=%zu, flags=%llu", nbytes, alignment, flags);
    }
    if (!code) {
        start = sim_settings_now().cuda_adjacent && alignment <= PAGE_2M
                    ? adjacent_space(nbytes)
                    : sim_space_take(nbytes, alignment > PAGE_2M ? alignment : PAGE_2M);
        code = start ? 0 : sim_error(OUT_OF_MEMORY, "no address space for %zu bytes", nbytes);
    }
    if (!code) {
        reservation *made = grown(sizeof *made);
        pthread_mutex_lock(&mutex);
        *made = (reservation){start, nbytes, reservations};
        reservations = made;
        pthread_mutex_unlock(&mutex);
        sim_count(SIM_COUNT_RANGES, 1);
        *address = start;
    }
    return cuda_leave(&call, code, "\"bytes\":%zu,\"address\":%llu,\"wanted\":%llu", nbytes,
                      (unsigned long long)start, wanted);
}

CUDA cuMemAddressFree(cuda_address address, size_t nbytes) {
    sim_call call;
    int code = enter(&call, __func__);
    if (!code) {
        pthread_mutex_lock(&mutex);
        reservation **link = &reservations;
        while (*link && ((*link)->address != address || (*link)->nbytes != nbytes)) {
            link = &(*link)->next;
        }
        reservation *freed = *link;
        if (freed && !sim_overlaps_memory(address, nbytes)) {
            *link = freed->next;
            free(freed);
        } else {
            code = sim_error(INVALID_VALUE, "[0x%llx, +%zu) %s", address, nbytes,
                             freed ? "is mapped" : "is not what was reserved");
        }
        pthread_mutex_unlock(&mutex);
        sim_count(SIM_COUNT_RANGES, code ? 0 : -1);
        if (code) {
            sim_violation("addresses are freed that are mapped, or were not reserved so");
        }
    }
    return cuda_leave(&call, code, "\"address\":%llu,\"bytes\":%zu", address, nbytes);
}

/* ---- mappings ---- */

/* With the mutex. */
static int map(uint64_t address, uint64_t nbytes, uint64_t handle) {
    physical *memory = find_physical(handle);
    if (!memory) {
        sim_violation("0x%llx is mapped, but is no handle of memory", (unsigned long long)handle);
        return sim_error(INVALID_VALUE, "0x%llx is no handle of memory", (unsigned long long)handle);
    }
    if (!nbytes || address % PAGE_2M || nbytes % PAGE_2M || nbytes > memory->nbytes) {
        return sim_error(INVALID_VALUE, "[0x%llx, +%llu): whole granules, of at most %llu",
                         (unsigned long long)address, (unsigned long long)nbytes,
                         (unsigned long long)memory->nbytes);
    }
    if (!find_reservation(address, nbytes) || sim_overlaps_memory(address, nbytes)) {
        return sim_error(INVALID_VALUE, "[0x%llx, +%llu) is not reserved, or mapped before",
                         (unsigned long long)address, (unsigned long long)nbytes);
    }
    int code = sim_memory_attach(memory->device, address, nbytes, memory->fd, 0);
    if (!code) {
        sim_memory_describe(address, (sim_traits){.origin = CUDA_MAPPED,
                                                  .flags = (unsigned)memory->handle_types});
        mapping *made = grown(sizeof *made);
        *made = (mapping){address, nbytes, memory, mappings};
        mappings = made;
        memory->num_mappings++;
    }
    return code;
}

CUDA cuMemMap(cuda_address address, size_t nbytes, size_t offset, cuda_address handle,
              unsigned long long flags) {
    sim_call call;
    int code = enter(&call, __func__);
    if (!code && (offset || flags)) {
        code = sim_error(INVALID_VALUE, "offset=%zu, flags=%llu: both 0", offset, flags);
    }
    if (!code) {
        pthread_mutex_lock(&mutex);
        code = map(address, nbytes, handle);
        pthread_mutex_unlock(&mutex);
    }
    return cuda_leave(&call, code, "\"address\":%llu,\"bytes\":%zu,\"handle\":%llu", address, nbytes,
                      handle);
}

/* With the mutex: the mapping that begins there, if it ends in the range. */
static mapping **find_mapping(uint64_t address, uint64_t nbytes) {
    mapping **link = &mappings;
    while (*link && (*link)->address != address) {
        link = &(*link)->next;
    }
    return *link && (*link)->nbytes <= nbytes ? link : NULL;
}

/* With the mutex. Whole mappings, side by side. */
static int check_mapped(uint64_t address, uint64_t nbytes) {
    uint64_t done = 0;
    while (done < nbytes) {
        mapping **found = find_mapping(address + done, nbytes - done);
        if (!found) {
            return sim_error(INVALID_VALUE, "[0x%llx, +%llu) is not one or more whole mappings",
                             (unsigned long long)address, (unsigned long long)nbytes);
        }
        done += (*found)->nbytes;
    }
    return nbytes ? 0 : sim_error(INVALID_VALUE, "size=0");
}

static void unmap(uint64_t address, uint64_t nbytes) {
    for (uint64_t done = 0; done < nbytes;) {
        mapping **link = find_mapping(address + done, nbytes - done);
        mapping *freed = *link;
        *link = freed->next;
        if (sim_memory_is_used(freed->address)) {
            sim_violation("memory is unmapped while work uses it: 0x%llx",
                          (unsigned long long)freed->address);
        }
        sim_memory_free(SIM_MEMORY_DEVICE, freed->address);
        freed->memory->num_mappings--;
        drop_physical(freed->memory);
        done += freed->nbytes;
        free(freed);
    }
}

CUDA cuMemUnmap(cuda_address address, size_t nbytes) {
    sim_call call;
    int code = enter(&call, __func__);
    if (!code) {
        pthread_mutex_lock(&mutex);
        code = check_mapped(address, nbytes);
        if (!code) {
            unmap(address, nbytes);
        }
        pthread_mutex_unlock(&mutex);
    }
    return cuda_leave(&call, code, "\"address\":%llu,\"bytes\":%zu", address, nbytes);
}

static int check_access(const access_of *wanted, int device) {
    int peer = wanted->where.type == 1 ? cuda_physical(wanted->where.id) : -1;
    if (wanted->where.type != 1 || (wanted->flags != 0 && wanted->flags != 1 && wanted->flags != 3)) {
        return sim_error(INVALID_VALUE, "location of type %d, flags %d", wanted->where.type,
                         wanted->flags);
    }
    if (peer < 0 || (peer != device && !cuda_can_reach(peer, device))) {
        return sim_error(INVALID_DEVICE, "device %d is not there, or cannot reach device %d",
                         wanted->where.id, device);
    }
    return 0;
}

static void give_access(uint64_t address, const access_of *wanted) {
    sim_memory *memory = sim_find(address, 1);
    sim_traits traits = sim_memory_traits(memory);
    uint64_t bit = (uint64_t)1 << cuda_physical(wanted->where.id);
    traits.readable = wanted->flags & 1 ? traits.readable | bit : traits.readable & ~bit;
    traits.writable = wanted->flags & 2 ? traits.writable | bit : traits.writable & ~bit;
    sim_memory_describe(memory->address, traits);
    sim_memory_release(memory);
}

CUDA cuMemSetAccess(cuda_address address, size_t nbytes, const access_of *accesses, size_t count) {
    sim_call call;
    int code = enter(&call, __func__);
    code = CUDA_CHECK(code, accesses);
    if (!code && !count) {
        code = sim_error(INVALID_VALUE, "count=0");
    }
    if (!code) {
        pthread_mutex_lock(&mutex);
        code = check_mapped(address, nbytes);
        for (int is_checked = 0; is_checked < 2; is_checked++) {
            for (uint64_t done = 0; done < nbytes && !code;) {
                const mapping *it = *find_mapping(address + done, nbytes - done);
                for (size_t i = 0; i < count && !code; i++) {
                    code = check_access(&accesses[i], it->memory->device);
                    if (is_checked) {
                        give_access(it->address, &accesses[i]);
                    }
                }
                done += it->nbytes;
            }
        }
        pthread_mutex_unlock(&mutex);
    }
    return cuda_leave(&call, code, "\"address\":%llu,\"bytes\":%zu", address, nbytes);
}

CUDA cuMemGetAccess(unsigned long long *flags, const location *where, cuda_address address) {
    sim_call call;
    int code = enter(&call, __func__);
    code = CUDA_CHECK(code, flags);
    code = CUDA_CHECK(code, where);
    int device = code ? -1 : cuda_physical(where->id);
    if (!code && (where->type != 1 || device < 0)) {
        code = sim_error(INVALID_VALUE, "device %d at a location of type %d", where->id, where->type);
    }
    sim_memory *memory = code ? NULL : sim_find(address, 1);
    sim_traits traits = memory ? sim_memory_traits(memory) : (sim_traits){0};
    sim_memory_release(memory);
    if (!code && traits.origin != CUDA_MAPPED) {
        code = sim_error(INVALID_VALUE, "0x%llx is not mapped memory", address);
    }
    if (!code) {
        uint64_t bit = (uint64_t)1 << device;
        *flags = traits.writable & bit ? 3 : traits.readable & bit ? 1 : 0;
    }
    return cuda_leave(&call, code, "\"address\":%llu", address);
}

/* ---- other processes ---- */

/* A handle of what is mapped there, to be released like any other; of memory that was released, the old one again. */
CUDA cuMemRetainAllocationHandle(cuda_address *handle, void *mapped) {
    sim_call call;
    uint64_t address = (uint64_t)(uintptr_t)mapped;
    int code = enter(&call, __func__);
    code = CUDA_CHECK(code, handle);
    if (!code) {
        pthread_mutex_lock(&mutex);
        const mapping *it = mappings;
        while (it && address - it->address >= it->nbytes) {
            it = it->next;
        }
        if (it) {
            it->memory->num_handles++;
            *handle = it->memory->handle;
        } else {
            code = sim_error(INVALID_VALUE, "0x%llx is not mapped memory", (unsigned long long)address);
        }
        pthread_mutex_unlock(&mutex);
        sim_count(SIM_COUNT_HANDLES, code ? 0 : 1);
    }
    return cuda_leave(&call, code, "\"address\":%llu,\"handle\":%llu", (unsigned long long)address,
                      code ? 0 : *handle);
}

CUDA cuMemExportToShareableHandle(void *out, cuda_address handle, int type, unsigned long long flags) {
    sim_call call;
    int fd = -1;
    int code = enter(&call, __func__);
    code = CUDA_CHECK(code, out);
    if (!code && (type != DESCRIPTOR || flags)) {
        code = sim_error(INVALID_VALUE, "handleType=%d, flags=%llu", type, flags);
    }
    if (!code) {
        pthread_mutex_lock(&mutex);
        const physical *memory = find_physical(handle);
        if (!memory || !(memory->handle_types & DESCRIPTOR)) {
            code = sim_error(INVALID_VALUE, "0x%llx is %s", handle,
                             memory ? "not made to be exported" : "no handle of memory");
        } else if ((fd = fcntl(memory->fd, F_DUPFD, 0)) < 0) { /* whether exec closes it is not documented */
            code = sim_error(OUT_OF_MEMORY, "no more descriptors");
        }
        pthread_mutex_unlock(&mutex);
    }
    if (!code) {
        *(int *)out = fd;
    }
    return cuda_leave(&call, code, "\"handle\":%llu,\"fd\":%d", handle, fd);
}

/* Whether it is one that was exported, here or in another process: its name says so. */
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
    int code = enter(&call, __func__);
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
