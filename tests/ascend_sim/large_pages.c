/*
 * A library for LD_PRELOAD. It gives a process pages of 64 KiB, as kernels of aarch64 may have: the page size is
 * reported as 64 KiB, and mappings begin at multiples of it.
 */
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE ((size_t)1 << 16)
#define API __attribute__((visibility("default")))

API long sysconf(int name);
API int getpagesize(void);
API void *mmap(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset);
API void *mmap64(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset);
extern long __sysconf(int name);

long sysconf(int name) { return name == _SC_PAGESIZE ? (long)PAGE : __sysconf(name); }

int getpagesize(void) { return (int)PAGE; }

static void *map(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    return (void *)syscall(SYS_mmap, address, nbytes, protection, flags, fd, offset);
}

/* Reserves a page more, and maps at the first multiple of 64 KiB in that range. */
void *mmap(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    if (address || !nbytes) {
        return map(address, nbytes, protection, flags, fd, offset);
    }
    const size_t length = (nbytes + PAGE - 1) / PAGE * PAGE;
    char *room = map(NULL, length + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
        return MAP_FAILED;
    }
    char *start = (char *)(((uintptr_t)room + PAGE - 1) / PAGE * PAGE);
    if (start > room) {
        munmap(room, (size_t)(start - room));
    }
    munmap(start + length, (size_t)(room + PAGE - start));
    return map(start, nbytes, protection, flags | MAP_FIXED, fd, offset);
}

void *mmap64(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    return mmap(address, nbytes, protection, flags, fd, offset);
}
