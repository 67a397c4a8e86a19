/* Creates sealed memory files, and maps memory files of other processes. */
#include "host/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "host/pages.h"

#ifndef MFD_NOEXEC_SEAL /* Linux 6.3 */
#define MFD_NOEXEC_SEAL 0x0008U
#endif

#define FIXED_SIZE (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static int status_of(int error)
{
    switch (error) {
    case EFBIG:
    case ENOMEM:
    case ENOSPC: return KVN_NO_MEMORY;
    case EPERM:
    case EACCES: return KVN_DENIED;
    case ESRCH: return KVN_PEER_GONE;
    default: return KVN_FAILED;
    }
}

/* Reserves `nbytes` of address space at a multiple of a huge page, so that a file can be mapped there in huge pages.
 * NULL with errno set on failure. */
static char *reserve(uint64_t nbytes)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    const uint64_t whole = (nbytes + page - 1) / page * page, more = KVN_HUGE_NBYTES;
    char *start = mmap(NULL, whole + more, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                       -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    const uint64_t before = (more - (uint64_t)(uintptr_t)start % more) % more;
    if (before)
        munmap(start, before);
    if (before < more)
        munmap(start + before + whole, more - before);
    return start + before;
}

static int map(kvn_arena *arena, kvn_failure *failure)
{
    const int protection = PROT_READ | (arena->writable ? PROT_WRITE : 0);
    const int hugetlb = arena->pages == KVN_PAGES_HUGETLB;
    char *reserved = NULL;
    if (!hugetlb && arena->nbytes >= KVN_HUGE_NBYTES)
        reserved = reserve(arena->nbytes); /* if that fails, any address will do */
    arena->address = mmap(reserved, arena->nbytes, protection,
                          MAP_SHARED | (hugetlb ? 0 : MAP_NORESERVE) | (reserved ? MAP_FIXED : 0),
                          arena->fd, 0);
    /* Keep the reservation: its addresses may be another thread's mapping by now. */
    if (arena->address == MAP_FAILED) {
        arena->address = NULL;
        return kvn_fail(failure, status_of(errno), errno,
                        "mapping an arena of %" PRIu64 " bytes: %s", arena->nbytes,
                        strerror(errno));
    }
    /* Only a hint: the administrator's shmem_enabled decides if it has an effect. */
    if (!hugetlb)
        (void)madvise(arena->address, arena->nbytes,
                      arena->pages == KVN_PAGES_SMALL ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    return KVN_OK;
}

/* Newer kernels warn without MFD_NOEXEC_SEAL, or require it (vm.memfd_noexec); older ones refuse it. */
static int create_memfd(const char *name, unsigned more)
{
    const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | more;
    const int fd = memfd_create(name, flags | MFD_NOEXEC_SEAL);
    return fd < 0 && errno == EINVAL ? memfd_create(name, flags) : fd;
}

static int too_few_reserved(const kvn_arena *arena, uint64_t page, kvn_failure *failure)
{
    return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM,
                    "an arena of %" PRIu64 " bytes needs %" PRIu64 " huge pages of %" PRIu64
                    " KiB, and the system has fewer that are reserved and free: see HugePages_Free "
                    "in /proc/meminfo; sysctl vm.nr_hugepages reserves more",
                    arena->nbytes, arena->nbytes / page, page >> 10);
}

/* Creates the file with its size, but does not map or seal it. */
static int create_file(const char *name, kvn_arena *out, uint64_t *page, kvn_failure *failure)
{
    struct stat facts;
    const int hugetlb = out->pages == KVN_PAGES_HUGETLB;
    out->fd = create_memfd(name, hugetlb ? MFD_HUGETLB : 0);
    int failed = out->fd < 0 || fstat(out->fd, &facts) != 0;
    if (!failed) {
        *page = (uint64_t)facts.st_blksize;
        if (hugetlb)
            out->nbytes = (out->nbytes + *page - 1) / *page * *page;
        failed = ftruncate(out->fd, (off_t)out->nbytes) != 0;
    }
    if (failed && hugetlb && (errno == ENOENT || errno == ENOSYS || errno == EINVAL))
        return kvn_fail(failure, KVN_INVALID, errno, "this kernel has no huge pages (hugetlbfs)");
    if (failed)
        return kvn_fail(failure, status_of(errno), errno, "creating an arena of %" PRIu64
                        " bytes: %s", out->nbytes, strerror(errno));
    out->inode = facts.st_ino;
    out->device = facts.st_dev;
    return KVN_OK;
}

int kvn_arena_create(const char *name, uint64_t nbytes, int exclusive, kvn_arena_pages pages,
                     int node, kvn_arena *out, kvn_failure *failure)
{
    uint64_t page = 0;
    *out = (kvn_arena){.nbytes = nbytes, .fd = -1, .writable = 1, .pages = pages};
    if (nbytes == 0 || nbytes > INT64_MAX)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "nbytes is %" PRIu64 "; it must be in [1, %" PRId64 "]", nbytes, INT64_MAX);
    int failed = create_file(name, out, &page, failure) != KVN_OK ||
                 map(out, failure) != KVN_OK ||
                 (node >= 0 && kvn_pages_prefer_node(out->address, out->nbytes, (unsigned)node,
                                                     failure) != KVN_OK);
    /* Populate before a peer maps it: a missing reserved page would raise SIGBUS there. */
    if (pages == KVN_PAGES_HUGETLB &&
        ((failed && failure->code == ENOMEM) ||
         (!failed && madvise(out->address, out->nbytes, MADV_POPULATE_WRITE) != 0)))
        failed = too_few_reserved(out, page, failure) != KVN_OK;
    /* Seal after mapping, since the seal refuses later writable mappings. Kernels before 5.1 lack the seal: there,
     * only the peer's own choice makes its mapping read-only. */
    if (!failed && exclusive)
        (void)fcntl(out->fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
    if (!failed && fcntl(out->fd, F_ADD_SEALS, FIXED_SIZE) != 0) {
        failed = 1;
        kvn_fail(failure, KVN_FAILED, errno, "sealing an arena of %" PRIu64 " bytes: %s",
                 out->nbytes, strerror(errno));
    }
    if (!failed)
        return KVN_OK;
    kvn_arena_close(out);
    return failure->status;
}

/* Returns NULL, or the property in which the file differs from the peer's description. */
static const char *mismatch(int fd, uint64_t inode, uint64_t nbytes, kvn_arena *out)
{
    struct stat facts;
    struct statfs filesystem;
    if (fstat(fd, &facts) != 0 || fstatfs(fd, &filesystem) != 0)
        return "fstat or fstatfs failed";
    const int hugetlb = filesystem.f_type == HUGETLBFS_MAGIC;
    if (!S_ISREG(facts.st_mode) || (filesystem.f_type != TMPFS_MAGIC && !hugetlb))
        return "it is not a memfd";
    if ((uint64_t)facts.st_ino != inode)
        return "it is another file now (the inode differs)";
    if ((uint64_t)facts.st_size != nbytes)
        return "its size differs";
    /* This process has no reserved pages, and a missing page would raise SIGBUS. */
    if (hugetlb && (uint64_t)facts.st_blocks * 512 < nbytes)
        return "some of its huge pages are missing";
    out->device = facts.st_dev;
    out->pages = hugetlb ? KVN_PAGES_HUGETLB : KVN_PAGES_AUTO;
    return NULL;
}

int kvn_arena_import(int pid, int fd, uint64_t inode, uint64_t nbytes, int writable, kvn_arena *out,
                     kvn_failure *failure)
{
    char path[64];
    *out = (kvn_arena){.nbytes = nbytes, .inode = inode, .fd = -1, .writable = writable};
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    /* Check before opening: the descriptor's number may name a pipe or a device by now. */
    const int looked_at = open(path, O_PATH | O_CLOEXEC);
    if (looked_at < 0)
        return kvn_fail(failure, status_of(errno), errno, "%s cannot be opened: %s", path,
                        strerror(errno));
    const char *flaw = mismatch(looked_at, inode, nbytes, out);
    if (flaw) {
        close(looked_at);
        return kvn_fail(failure, KVN_INVALID, 0,
                        "%s is not the memfd of inode %" PRIu64 ", %" PRIu64 " bytes: %s", path,
                        inode, nbytes, flaw);
    }
    char again[64];
    snprintf(again, sizeof again, "/proc/self/fd/%d", looked_at);
    out->fd = open(again, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    const int error = errno;
    close(looked_at);
    if (out->fd < 0)
        return kvn_fail(failure, status_of(error), error, "%s cannot be opened: %s", path,
                        strerror(error));
    const int seals = fcntl(out->fd, F_GET_SEALS);
    if (seals < 0 || (seals & FIXED_SIZE) != FIXED_SIZE)
        kvn_fail(failure, KVN_INVALID, 0,
                 "%s is not sealed: its seals are 0x%x, and 0x%x (no shrinking, no growing, no "
                 "more seals) is needed",
                 path, (unsigned)(seals < 0 ? 0 : seals), (unsigned)FIXED_SIZE);
    /* Check the size again: it could change until the seals were known. */
    else if ((flaw = mismatch(out->fd, inode, nbytes, out)))
        kvn_fail(failure, KVN_INVALID, 0, "%s: %s", path, flaw);
    else
        map(out, failure);
    close(out->fd); /* only the mapping keeps the memory */
    out->fd = -1;
    /* All huge pages exist, and are few. If the kernel cannot map them now, the first use does. */
    if (out->address && out->pages == KVN_PAGES_HUGETLB)
        (void)madvise(out->address, out->nbytes, MADV_POPULATE_READ);
    return out->address ? KVN_OK : failure->status;
}

int kvn_arena_populate(const kvn_arena *arena, kvn_failure *failure)
{
    const int advice = arena->writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    if (arena->fd >= 0 && arena->pages == KVN_PAGES_AUTO)
        kvn_pages_make_huge(arena->address, arena->nbytes);
    if (madvise(arena->address, arena->nbytes, advice) == 0)
        return KVN_OK;
    int error = errno;
    /* Before Linux 5.14 fallocate allocates the pages, without mapping them; for a peer, the owner does that. */
    if (error == EINVAL) {
        if (arena->fd < 0)
            return KVN_OK;
        do
            error = fallocate(arena->fd, 0, 0, (off_t)arena->nbytes) == 0 ? 0 : errno;
        while (error == EINTR);
        if (error == 0)
            return KVN_OK;
    }
    /* EFAULT: no page is left, under vm.overcommit_memory 2, so touching one would raise SIGBUS. */
    return kvn_fail(failure, error == EFAULT ? KVN_NO_MEMORY : status_of(error), error,
                    "making %" PRIu64 " bytes of an arena present: %s", arena->nbytes,
                    strerror(error == EFAULT ? ENOMEM : error));
}

void kvn_arena_close(kvn_arena *arena)
{
    if (arena->address)
        munmap(arena->address, arena->nbytes);
    if (arena->fd >= 0)
        close(arena->fd);
    arena->address = NULL;
    arena->fd = -1;
}
