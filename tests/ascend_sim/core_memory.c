/* The registry of device memory and pinned memory: the owner of each address, and the place of its bytes. */
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core.h"
#include "core_log.h"

#define PAGE 4096
#define HUGE_PAGE ((uint64_t)2 << 20)
#define FILLED ((uint64_t)1 << 20)

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static sim_memory **memories; /* ascending, disjoint */
static size_t num_memories;
static size_t capacity;
static uint64_t next_serial = 1;
static uint64_t num_removed;

/* Returns the index of the first memory that ends after the address. Call with the mutex held. */
static size_t first_behind(uint64_t address) {
    size_t low = 0;
    size_t high = num_memories;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (memories[middle]->address + memories[middle]->nbytes <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static int overlaps(size_t index, uint64_t address, uint64_t nbytes) {
    return index < num_memories && memories[index]->address < address + nbytes;
}

static void insert(sim_memory *memory) {
    if (num_memories == capacity) {
        capacity = capacity ? 2 * capacity : 64;
        memories = realloc(memories, capacity * sizeof *memories);
        if (!memories) {
            sim_die("no host memory");
        }
    }
    size_t index = first_behind(memory->address);
    memmove(memories + index + 1, memories + index, (num_memories - index) * sizeof *memories);
    memories[index] = memory;
    num_memories++;
    memory->serial = next_serial++;
    memory->references = 1;
}

static uint64_t round_up(uint64_t nbytes, uint64_t unit) {
    return (nbytes + unit - 1) / unit * unit;
}

/* Leaves a view mapped that a test has taken: its arrays may outlive the memory. */
static void destroy(sim_memory *memory) {
    if (memory->fd >= 0) {
        if (!memory->keep_view) {
            munmap(memory->view, round_up(memory->nbytes, PAGE));
        }
        close(memory->fd);
    }
    free(memory);
}

static sim_memory *make_bytes(sim_memory_kind kind, int device, uint64_t nbytes) {
    sim_memory *memory = calloc(1, sizeof *memory);
    uint64_t mapped = round_up(nbytes, PAGE);
    int fd = memfd_create(kind == SIM_MEMORY_DEVICE ? "kvsim-device" : "kvsim-pinned", MFD_CLOEXEC);
    if (!memory || fd < 0 || ftruncate(fd, (off_t)mapped)) {
        sim_die("memfd of %llu bytes: more files are open than the limit?",
                (unsigned long long)nbytes);
    }
    void *view = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (view == MAP_FAILED) {
        close(fd);
        free(memory);
        return NULL;
    }
    /* Hardware does not zero new memory. Only the beginning is filled, because large memory may stay unused. */
    memset(view, 0xA5, nbytes < FILLED ? nbytes : FILLED);
    *memory = (sim_memory){.kind = kind, .device = device, .nbytes = nbytes, .view = view, .fd = fd};
    return memory;
}

int sim_memory_allocate(sim_memory_kind kind, int device, uint64_t nbytes, uint64_t *address) {
    return sim_memory_allocate_in(kind, device, nbytes, 0, 0, address);
}

int sim_memory_allocate_in(sim_memory_kind kind, int device, uint64_t nbytes, int huge,
                           uint64_t padding, uint64_t *address) {
    int on_device = kind == SIM_MEMORY_DEVICE;
    uint64_t page = on_device && (huge || nbytes >= HUGE_PAGE / 2) ? HUGE_PAGE : PAGE;
    uint64_t counted = round_up(nbytes + padding, page);
    sim_settings settings = sim_settings_now();
    uint64_t used;
    if (nbytes > (uint64_t)1 << 46 ||
        (on_device && sim_hbm_change(device, (int64_t)counted, settings.hbm_bytes, &used))) {
        return sim_error(SIM_NO_MEMORY, "%llu bytes of memory of device %d: it has %llu",
                         (unsigned long long)nbytes, device, (unsigned long long)settings.hbm_bytes);
    }
    sim_memory *memory = make_bytes(kind, device, nbytes);
    if (memory && on_device) {
        memory->address = sim_space_take(round_up(nbytes, page), page);
    } else if (memory) {
        memory->address = (uint64_t)(uintptr_t)memory->view;
    }
    if (!memory || !memory->address) {
        return sim_error(SIM_NO_MEMORY, "no address space for %llu bytes",
                         (unsigned long long)nbytes);
    }
    memory->page = page;
    memory->counted = counted;
    pthread_mutex_lock(&mutex);
    insert(memory);
    pthread_mutex_unlock(&mutex);
    *address = memory->address;
    return 0;
}

int sim_memory_attach(int device, uint64_t address, uint64_t nbytes, int fd, uint64_t offset) {
    sim_memory *memory = calloc(1, sizeof *memory);
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    void *view = own < 0 ? MAP_FAILED
                         : mmap(NULL, round_up(nbytes, PAGE), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_NORESERVE, own, (off_t)offset);
    if (!memory || view == MAP_FAILED) {
        free(memory);
        if (own >= 0) {
            close(own);
        }
        return sim_error(SIM_NO_MEMORY, "%llu bytes of a file", (unsigned long long)nbytes);
    }
    *memory = (sim_memory){.kind = SIM_MEMORY_DEVICE, .device = device, .address = address,
                           .nbytes = nbytes, .page = HUGE_PAGE, .view = view, .fd = own};
    pthread_mutex_lock(&mutex);
    insert(memory);
    pthread_mutex_unlock(&mutex);
    return 0;
}

static sim_memory *beginning_at(uint64_t address) {
    size_t index = first_behind(address);
    sim_memory *memory = index < num_memories ? memories[index] : NULL;
    return memory && memory->address == address ? memory : NULL;
}

void sim_memory_describe(uint64_t address, sim_traits traits) {
    pthread_mutex_lock(&mutex);
    sim_memory *memory = beginning_at(address);
    if (memory) {
        memory->traits = traits;
    }
    __atomic_add_fetch(&num_removed, 1, __ATOMIC_RELEASE); /* the traits may forbid an access */
    pthread_mutex_unlock(&mutex);
}

sim_traits sim_memory_traits(const sim_memory *memory) {
    pthread_mutex_lock(&mutex);
    sim_traits traits = memory->traits;
    pthread_mutex_unlock(&mutex);
    return traits;
}

uint64_t sim_memory_owned(const void *owner, sim_memory_kind *kind) {
    uint64_t address = 0;
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < num_memories && !address; i++) {
        if (memories[i]->traits.owner == owner) {
            address = memories[i]->address;
            *kind = memories[i]->kind;
        }
    }
    pthread_mutex_unlock(&mutex);
    return address;
}

int sim_memory_is_used(uint64_t address) {
    pthread_mutex_lock(&mutex);
    sim_memory *memory = beginning_at(address);
    int used = memory && memory->references > 1;
    pthread_mutex_unlock(&mutex);
    return used;
}

uint64_t sim_memory_epoch(void) { return __atomic_load_n(&num_removed, __ATOMIC_ACQUIRE); }

static int check_whole_pages(uint64_t address, uint64_t nbytes) {
    uint64_t page = sim_settings_now().page_bytes;
    if (address % page || nbytes % page) {
        return sim_error(SIM_DRIVER, "[0x%llx, +%llu) is not whole pages of %llu",
                         (unsigned long long)address, (unsigned long long)nbytes,
                         (unsigned long long)page);
    }
    return 0;
}

static sim_memory *new_registered(int device, uint64_t address, uint64_t nbytes, int mapped) {
    sim_memory *memory = calloc(1, sizeof *memory);
    if (!memory) {
        sim_die("no host memory");
    }
    *memory = (sim_memory){.kind = SIM_MEMORY_REGISTERED, .device = device, .address = address,
                           .nbytes = nbytes, .view = (unsigned char *)(uintptr_t)address, .fd = -1,
                           .mapped = mapped};
    return memory;
}

int sim_memory_register(int device, uint64_t address, uint64_t nbytes, int mapped) {
    if (sim_is_device_space(address, nbytes)) {
        return sim_error(SIM_PARAM, "0x%llx is a device address", (unsigned long long)address);
    }
    int code = mapped ? check_whole_pages(address, nbytes) : 0;
    if (code) {
        return code;
    }
    sim_memory *memory = new_registered(device, address, nbytes, mapped);
    pthread_mutex_lock(&mutex);
    int taken = overlaps(first_behind(address), address, nbytes);
    if (!taken) {
        insert(memory);
    }
    pthread_mutex_unlock(&mutex);
    if (taken) {
        free(memory);
        return sim_error(SIM_ALREADY_REGISTERED, "[0x%llx, +%llu) overlaps pinned memory",
                         (unsigned long long)address, (unsigned long long)nbytes);
    }
    return 0;
}

/* ---- host memory that HCCL has mapped ---- */

typedef struct host_map {
    int device;
    uint64_t address;
    uint64_t nbytes;
    unsigned references;
    int is_alone; /* the mapping has registered the memory */
    struct host_map *next;
} host_map;

static host_map *maps;

/* Returns the mapping that contains the range, or NULL; sets *is_partial if a mapping only overlaps it. Call with the
 * mutex held. */
static host_map **find_map(int device, uint64_t address, uint64_t nbytes, int *is_partial) {
    *is_partial = 0;
    for (host_map **at = &maps; *at; at = &(*at)->next) {
        host_map *map = *at;
        if (map->device != device || map->address >= address + nbytes ||
            address >= map->address + map->nbytes) {
            continue;
        }
        if (map->address <= address && address + nbytes <= map->address + map->nbytes) {
            return at;
        }
        *is_partial = 1;
    }
    return NULL;
}

/* Returns 1 if the range is unknown, or lies in one host memory that is not mapped. Call with the mutex held. */
static int can_map(uint64_t address, uint64_t nbytes, int *is_alone) {
    size_t index = first_behind(address);
    *is_alone = !overlaps(index, address, nbytes);
    if (*is_alone) {
        return 1;
    }
    sim_memory *memory = memories[index];
    uint64_t page = sim_settings_now().page_bytes;
    return memory->kind != SIM_MEMORY_DEVICE && !memory->mapped && memory->address <= address &&
           address + nbytes <= memory->address + round_up(memory->nbytes, page);
}

int sim_host_map(int device, uint64_t address, uint64_t nbytes) {
    int is_partial;
    int is_alone;
    int code = check_whole_pages(address, nbytes);
    if (code) {
        return code;
    }
    pthread_mutex_lock(&mutex);
    host_map **known = find_map(device, address, nbytes, &is_partial);
    if (known) {
        (*known)->references++;
    } else if (is_partial || !can_map(address, nbytes, &is_alone)) {
        code = SIM_DRIVER;
    } else {
        host_map *map = calloc(1, sizeof *map);
        *map = (host_map){device, address, nbytes, 1, is_alone, maps};
        maps = map;
        if (is_alone) {
            insert(new_registered(device, address, nbytes, 1));
        }
    }
    pthread_mutex_unlock(&mutex);
    return code ? sim_error(code, "[0x%llx, +%llu) overlaps what is mapped for device %d",
                            (unsigned long long)address, (unsigned long long)nbytes, device)
                : 0;
}

void sim_host_unmap(int device, uint64_t address, uint64_t nbytes) {
    int is_partial;
    uint64_t alone = 0;
    pthread_mutex_lock(&mutex);
    host_map **at = find_map(device, address, nbytes, &is_partial);
    if (at && !--(*at)->references) {
        host_map *map = *at;
        *at = map->next;
        alone = map->is_alone ? map->address : 0;
        free(map);
    }
    pthread_mutex_unlock(&mutex);
    if (alone) {
        sim_memory_free(SIM_MEMORY_REGISTERED, alone);
    }
}

static void remove_at(size_t index) {
    memmove(memories + index, memories + index + 1, (num_memories - index - 1) * sizeof *memories);
    num_memories--;
    __atomic_add_fetch(&num_removed, 1, __ATOMIC_RELEASE);
}

int sim_memory_free(sim_memory_kind kind, uint64_t address) {
    pthread_mutex_lock(&mutex);
    size_t index = first_behind(address);
    sim_memory *memory = index < num_memories ? memories[index] : NULL;
    if (!memory || memory->address != address || memory->kind != kind) {
        pthread_mutex_unlock(&mutex);
        return sim_error(kind == SIM_MEMORY_REGISTERED ? SIM_NOT_REGISTERED : SIM_PARAM,
                         "0x%llx is not the beginning of such memory, or it was freed before",
                         (unsigned long long)address);
    }
    remove_at(index);
    pthread_mutex_unlock(&mutex);
    sim_linger_check(memory->view, memory->nbytes, "freed");
    if (kind == SIM_MEMORY_DEVICE) {
        sim_hbm_change(memory->device, -(int64_t)memory->counted, 0, NULL);
    }
    sim_memory_release(memory);
    return 0;
}

void sim_memory_free_device(int device) {
    for (;;) {
        uint64_t address = 0;
        pthread_mutex_lock(&mutex);
        for (size_t i = 0; i < num_memories && !address; i++) {
            if (memories[i]->kind == SIM_MEMORY_DEVICE && memories[i]->device == device) {
                address = memories[i]->address;
            }
        }
        pthread_mutex_unlock(&mutex);
        if (!address || sim_memory_free(SIM_MEMORY_DEVICE, address)) {
            return;
        }
    }
}

static sim_memory *find(uint64_t address, uint64_t nbytes, int to_page_end) {
    pthread_mutex_lock(&mutex);
    size_t index = first_behind(address);
    sim_memory *memory = NULL;
    if (index < num_memories && memories[index]->address <= address) {
        uint64_t room = memories[index]->nbytes;
        if (to_page_end && memories[index]->page) {
            room = round_up(room, memories[index]->page);
        }
        uint64_t left = room - (address - memories[index]->address);
        memory = nbytes <= left ? memories[index] : NULL;
    }
    if (memory) {
        memory->references++;
    }
    pthread_mutex_unlock(&mutex);
    return memory;
}

sim_memory *sim_find(uint64_t address, uint64_t nbytes) { return find(address, nbytes, 0); }

sim_memory *sim_find_pages(uint64_t address, uint64_t nbytes) { return find(address, nbytes, 1); }

int sim_overlaps_memory(uint64_t address, uint64_t nbytes) {
    pthread_mutex_lock(&mutex);
    int found = overlaps(first_behind(address), address, nbytes);
    pthread_mutex_unlock(&mutex);
    return found;
}

void sim_memory_release(sim_memory *memory) {
    pthread_mutex_lock(&mutex);
    int last = memory && !--memory->references;
    pthread_mutex_unlock(&mutex);
    if (last) {
        destroy(memory);
    }
}

void *kvsim_host_view(uint64_t address) {
    sim_memory *memory = sim_find(address, 1);
    if (!memory) {
        return NULL;
    }
    pthread_mutex_lock(&mutex);
    memory->keep_view = 1;
    pthread_mutex_unlock(&mutex);
    void *view = memory->view + (address - memory->address);
    sim_memory_release(memory);
    return view;
}

void sim_memory_totals(uint64_t *device_bytes, uint64_t *pinned, uint64_t *registered) {
    *device_bytes = *pinned = *registered = 0;
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < num_memories; i++) {
        *device_bytes += memories[i]->kind == SIM_MEMORY_DEVICE ? memories[i]->nbytes : 0;
        *pinned += memories[i]->kind == SIM_MEMORY_PINNED;
        *registered += memories[i]->kind == SIM_MEMORY_REGISTERED;
    }
    pthread_mutex_unlock(&mutex);
}
