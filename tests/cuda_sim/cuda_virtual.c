/*
 * Address space: reserved addresses, memory (cuda_handles.c) mapped at them, and access rights.
 */
#include <stdlib.h>

#include "cuda_virtual.h"

typedef struct {
    location where;
    int flags; /* 0 none, 1 read, 3 read and write */
} access_of; /* CUmemAccessDesc */

CUDA cuMemAddressReserve(cuda_address *address, size_t nbytes, size_t alignment, cuda_address wanted,
                         unsigned long long flags);
CUDA cuMemAddressFree(cuda_address address, size_t nbytes);
CUDA cuMemMap(cuda_address address, size_t nbytes, size_t offset, cuda_address handle,
              unsigned long long flags);
CUDA cuMemUnmap(cuda_address address, size_t nbytes);
CUDA cuMemSetAccess(cuda_address address, size_t nbytes, const access_of *accesses, size_t count);
CUDA cuMemGetAccess(unsigned long long *flags, const location *where, cuda_address address);
CUDA cuMemRetainAllocationHandle(cuda_address *handle, void *mapped);

#define NEIGHBOURS ((uint64_t)1 << 30) /* address space for ranges without gaps */

typedef struct mapping {
    uint64_t address;
    uint64_t nbytes;
    cuda_memory *memory;
    struct mapping *next;
} mapping;

typedef struct reservation {
    uint64_t address;
    uint64_t nbytes;
    struct reservation *next;
} reservation;

static mapping *mappings;
static reservation *reservations;

/* ---- addresses ---- */

/* Finds the reservation that contains the range. Call with the mutex held. */
static reservation *find_reservation(uint64_t address, uint64_t nbytes) {
    reservation *it = reservations;
    while (it && !(it->address <= address && address + nbytes <= it->address + it->nbytes)) {
        it = it->next;
    }
    return it;
}

int cuda_reservation_find(uint64_t address, uint64_t *start, uint64_t *nbytes) {
    pthread_mutex_lock(&cuda_virtual_mutex);
    const reservation *it = find_reservation(address, 1);
    if (it) {
        *start = it->address;
        *nbytes = it->nbytes;
    }
    pthread_mutex_unlock(&cuda_virtual_mutex);
    return it != NULL;
}

static uint64_t adjacent_space(uint64_t nbytes) {
    static uint64_t at, end;
    uint64_t given = 0;
    pthread_mutex_lock(&cuda_virtual_mutex);
    if (end - at < nbytes && nbytes <= NEIGHBOURS) {
        at = sim_space_take(NEIGHBOURS, PAGE_2M);
        end = at ? at + NEIGHBOURS : 0;
    }
    if (end - at >= nbytes) {
        given = at;
        at += nbytes;
    }
    pthread_mutex_unlock(&cuda_virtual_mutex);
    return given;
}

CUDA cuMemAddressReserve(cuda_address *address, size_t nbytes, size_t alignment, cuda_address wanted,
                         unsigned long long flags) {
    sim_call call;
    uint64_t start = 0;
    int code = cuda_virtual_enter(&call, __func__);
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
        reservation *made = cuda_grown(sizeof *made);
        pthread_mutex_lock(&cuda_virtual_mutex);
        *made = (reservation){start, nbytes, reservations};
        reservations = made;
        pthread_mutex_unlock(&cuda_virtual_mutex);
        sim_count(SIM_COUNT_RANGES, 1);
        *address = start;
    }
    return cuda_leave(&call, code, "\"bytes\":%zu,\"address\":%llu,\"wanted\":%llu", nbytes,
                      (unsigned long long)start, wanted);
}

CUDA cuMemAddressFree(cuda_address address, size_t nbytes) {
    sim_call call;
    int code = cuda_virtual_enter(&call, __func__);
    if (!code) {
        pthread_mutex_lock(&cuda_virtual_mutex);
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
        pthread_mutex_unlock(&cuda_virtual_mutex);
        sim_count(SIM_COUNT_RANGES, code ? 0 : -1);
        if (code) {
            sim_violation("addresses are freed that are mapped, or were not reserved so");
        }
    }
    return cuda_leave(&call, code, "\"address\":%llu,\"bytes\":%zu", address, nbytes);
}

/* ---- mappings ---- */

/* Call with the mutex held. */
static int map(uint64_t address, uint64_t nbytes, uint64_t handle) {
    cuda_memory *memory = cuda_physical_find(handle);
    if (!memory) {
        sim_violation("0x%llx is mapped, but is not a handle of memory", (unsigned long long)handle);
        return sim_error(INVALID_VALUE, "0x%llx is not a handle of memory", (unsigned long long)handle);
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
        mapping *made = cuda_grown(sizeof *made);
        *made = (mapping){address, nbytes, memory, mappings};
        mappings = made;
        memory->num_mappings++;
    }
    return code;
}

CUDA cuMemMap(cuda_address address, size_t nbytes, size_t offset, cuda_address handle,
              unsigned long long flags) {
    sim_call call;
    int code = cuda_virtual_enter(&call, __func__);
    if (!code && (offset || flags)) {
        code = sim_error(INVALID_VALUE, "offset=%zu, flags=%llu: both 0", offset, flags);
    }
    if (!code) {
        pthread_mutex_lock(&cuda_virtual_mutex);
        code = map(address, nbytes, handle);
        pthread_mutex_unlock(&cuda_virtual_mutex);
    }
    return cuda_leave(&call, code, "\"address\":%llu,\"bytes\":%zu,\"handle\":%llu", address, nbytes,
                      handle);
}

/* Finds the mapping that begins at the address and ends in the range. Call with the mutex held. */
static mapping **find_mapping(uint64_t address, uint64_t nbytes) {
    mapping **link = &mappings;
    while (*link && (*link)->address != address) {
        link = &(*link)->next;
    }
    return *link && (*link)->nbytes <= nbytes ? link : NULL;
}

/* Refuses a range that is not one or more whole, adjacent mappings. Call with the mutex held. */
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
        cuda_physical_drop(freed->memory);
        done += freed->nbytes;
        free(freed);
    }
}

CUDA cuMemUnmap(cuda_address address, size_t nbytes) {
    sim_call call;
    int code = cuda_virtual_enter(&call, __func__);
    if (!code) {
        pthread_mutex_lock(&cuda_virtual_mutex);
        code = check_mapped(address, nbytes);
        if (!code) {
            unmap(address, nbytes);
        }
        pthread_mutex_unlock(&cuda_virtual_mutex);
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
    int code = cuda_virtual_enter(&call, __func__);
    code = CUDA_CHECK(code, accesses);
    if (!code && !count) {
        code = sim_error(INVALID_VALUE, "count=0");
    }
    if (!code) {
        pthread_mutex_lock(&cuda_virtual_mutex);
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
        pthread_mutex_unlock(&cuda_virtual_mutex);
    }
    return cuda_leave(&call, code, "\"address\":%llu,\"bytes\":%zu", address, nbytes);
}

CUDA cuMemGetAccess(unsigned long long *flags, const location *where, cuda_address address) {
    sim_call call;
    int code = cuda_virtual_enter(&call, __func__);
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

/* The program must release the returned handle. If it has released all handles of the memory, the old one is valid
 * again. */
CUDA cuMemRetainAllocationHandle(cuda_address *handle, void *mapped) {
    sim_call call;
    uint64_t address = (uint64_t)(uintptr_t)mapped;
    int code = cuda_virtual_enter(&call, __func__);
    code = CUDA_CHECK(code, handle);
    if (!code) {
        pthread_mutex_lock(&cuda_virtual_mutex);
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
        pthread_mutex_unlock(&cuda_virtual_mutex);
        sim_count(SIM_COUNT_HANDLES, code ? 0 : 1);
    }
    return cuda_leave(&call, code, "\"address\":%llu,\"handle\":%llu", (unsigned long long)address,
                      code ? 0 : *handle);
}
