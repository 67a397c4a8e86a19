/* A library that tests/native/test_allocations.py preloads. It makes the n-th allocation of libkvn.so fail, and counts
 * the allocations that are not freed. */
#define _GNU_SOURCE
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern void *__libc_malloc(size_t nbytes);
extern void *__libc_calloc(size_t count, size_t nbytes);
extern void *__libc_realloc(void *memory, size_t nbytes);
extern void *__libc_memalign(size_t alignment, size_t nbytes);
extern void __libc_free(void *memory);

#define PLACES (UINT64_C(1) << 16)
#define EMPTY 0
#define FREED 1

static _Atomic(uintptr_t) begin, end; /* of the library's code */
static atomic_long calls, failing;    /* failing: number of the call that fails; 0: none */

static uintptr_t kept[PLACES]; /* allocations of the library since the first begin */
static atomic_flag busy = ATOMIC_FLAG_INIT;
static atomic_long num_kept;

/* Returns the place of an allocation, or the first free one. The caller holds the flag. */
static uintptr_t *place_of(uintptr_t memory)
{
    uintptr_t *free_place = NULL;
    for (uintptr_t at = memory >> 4, tries = 0; tries < PLACES; at++, tries++) {
        uintptr_t *place = &kept[at % PLACES];
        if (*place == memory) {
            return place;
        }
        if (*place <= FREED && !free_place) {
            free_place = place;
        }
        if (*place == EMPTY) {
            break;
        }
    }
    return free_place;
}

static void *keep(void *memory)
{
    if (memory) {
        while (atomic_flag_test_and_set(&busy)) {
        }
        *place_of((uintptr_t)memory) = (uintptr_t)memory;
        num_kept++;
        atomic_flag_clear(&busy);
    }
    return memory;
}

static void forget(const void *memory)
{
    if (memory && begin) {
        while (atomic_flag_test_and_set(&busy)) {
        }
        uintptr_t *place = place_of((uintptr_t)memory);
        if (place && *place == (uintptr_t)memory) {
            *place = FREED;
            num_kept--;
        }
        atomic_flag_clear(&busy);
    }
}

static int find(struct dl_phdr_info *info, size_t size, void *unused)
{
    (void)size;
    (void)unused;
    if (strstr(info->dlpi_name, "libkvn.so") == NULL) {
        return 0;
    }
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_LOAD && (header->p_flags & PF_X)) {
            begin = info->dlpi_addr + header->p_vaddr;
            end = begin + header->p_memsz;
        }
    }
    return 1;
}

/* Counts calls from now on, and makes call `number` fail. Returns 1 if libkvn.so is loaded. */
int failing_allocations_begin(long number)
{
    dl_iterate_phdr(find, NULL);
    failing = number;
    calls = 0;
    return begin != 0;
}

/* Returns the number of calls since the begin. Later calls do not fail. */
long failing_allocations_end(void)
{
    failing = 0;
    return calls;
}

/* Returns the number of allocations of the library that are not freed. */
long failing_allocations_kept(void)
{
    return num_kept;
}

static int is_ours(const void *caller)
{
    const uintptr_t at = (uintptr_t)caller;
    return at >= begin && at < end;
}

static int fails(void)
{
    if (++calls != failing) {
        return 0;
    }
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t nbytes)
{
    if (!is_ours(__builtin_return_address(0))) {
        return __libc_malloc(nbytes);
    }
    return fails() ? NULL : keep(__libc_malloc(nbytes));
}

void *calloc(size_t count, size_t nbytes)
{
    if (!is_ours(__builtin_return_address(0))) {
        return __libc_calloc(count, nbytes);
    }
    return fails() ? NULL : keep(__libc_calloc(count, nbytes));
}

void *realloc(void *memory, size_t nbytes)
{
    if (!is_ours(__builtin_return_address(0))) {
        return __libc_realloc(memory, nbytes);
    }
    if (fails()) {
        return NULL;
    }
    forget(memory);
    return keep(__libc_realloc(memory, nbytes));
}

void *aligned_alloc(size_t alignment, size_t nbytes)
{
    if (!is_ours(__builtin_return_address(0))) {
        return __libc_memalign(alignment, nbytes);
    }
    return fails() ? NULL : keep(__libc_memalign(alignment, nbytes));
}

void free(void *memory)
{
    forget(memory);
    __libc_free(memory);
}
