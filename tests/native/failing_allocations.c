/* Allocations of libkvn.so fail at the n-th call: preloaded by tests/native/test_allocations.py. */
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

static _Atomic(uintptr_t) begin, end; /* of the library's code */
static atomic_long calls, failing;    /* failing: the number of the call; 0: none */

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

/* Count from now on, and let the call of this number fail. Returns whether the library is there. */
int failing_allocations_begin(long number)
{
    dl_iterate_phdr(find, NULL);
    failing = number;
    calls = 0;
    return begin != 0;
}

/* How many calls there were; from now on none fails. */
long failing_allocations_end(void)
{
    failing = 0;
    return calls;
}

static int fails(const void *caller)
{
    const uintptr_t at = (uintptr_t)caller;
    if (at < begin || at >= end) {
        return 0;
    }
    if (++calls != failing) {
        return 0;
    }
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t nbytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(nbytes);
}

void *calloc(size_t count, size_t nbytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(count, nbytes);
}

void *realloc(void *memory, size_t nbytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(memory, nbytes);
}

void *aligned_alloc(size_t alignment, size_t nbytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, nbytes);
}
