/* Unreadable address space for device memory and handles. An address is reused only after sim_space_give. */
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core.h"
#include "core_log.h"

#define CHUNK ((uint64_t)4 << 30)
#define HANDLES ((uint64_t)64 << 20)
#define HANDLE_STEP 64

typedef struct {
    uint64_t start;
    uint64_t used;
    uint64_t nbytes;
} chunk;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static chunk chunks[4096];
static int num_chunks;
static chunk handles;
static uint64_t again, again_nbytes; /* for the next allocation of that size */

/* The kernel chooses the address, because fixed ones collide with the shadow memory of sanitizers. The system call
 * bypasses ThreadSanitizer, which would mark gigabytes of shadow memory. */
static uint64_t reserve(uint64_t nbytes) {
    long address = syscall(SYS_mmap, NULL, nbytes, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == -1 ? 0 : (uint64_t)address;
}

static uint64_t take(chunk *from, uint64_t nbytes, uint64_t alignment) {
    uint64_t at = (from->start + from->used + alignment - 1) / alignment * alignment;
    if (!from->start || at + nbytes > from->start + from->nbytes) {
        return 0;
    }
    from->used = at + nbytes - from->start;
    return at;
}

uint64_t sim_space_take(uint64_t nbytes, uint64_t alignment) {
    uint64_t with_guard = nbytes + alignment; /* the address after the end belongs to no other memory */
    pthread_mutex_lock(&mutex);
    if (again && again_nbytes == nbytes) {
        uint64_t given = again;
        again = 0;
        pthread_mutex_unlock(&mutex);
        return given;
    }
    uint64_t at = num_chunks ? take(&chunks[num_chunks - 1], with_guard, alignment) : 0;
    if (!at) {
        uint64_t wanted = with_guard + alignment > CHUNK ? with_guard + alignment : CHUNK;
        uint64_t start = num_chunks < 4096 ? reserve(wanted) : 0;
        if (start) {
            chunks[num_chunks] = (chunk){start, 0, wanted};
            at = take(&chunks[num_chunks++], with_guard, alignment);
        }
    }
    pthread_mutex_unlock(&mutex);
    return at;
}

void sim_space_give(uint64_t address, uint64_t nbytes) {
    pthread_mutex_lock(&mutex);
    again = address;
    again_nbytes = nbytes;
    pthread_mutex_unlock(&mutex);
}

int sim_is_device_space(uint64_t address, uint64_t nbytes) {
    int found = 0;
    uint64_t last = nbytes ? address + nbytes - 1 : address;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < num_chunks && !found; i++) {
        found = address < chunks[i].start + chunks[i].nbytes && last >= chunks[i].start;
    }
    pthread_mutex_unlock(&mutex);
    return found;
}

void *sim_handle_new(void) {
    pthread_mutex_lock(&mutex);
    if (!handles.start) {
        handles = (chunk){reserve(HANDLES), HANDLE_STEP, HANDLES};
    }
    uint64_t at = take(&handles, HANDLE_STEP, HANDLE_STEP);
    pthread_mutex_unlock(&mutex);
    if (!at) {
        sim_die("more than a million handles in one process");
    }
    return (void *)(uintptr_t)at;
}
