/* Checks that ranges of memory are mapped, by ioctl or by the text of /proc/self/maps. */
#include "process/mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The kernel's struct procmap_query (uapi/linux/fs.h, 6.11), which Debian 12's headers lack. */
typedef struct procmap_query {
    uint64_t size;
    uint64_t query_flags;
    uint64_t query_addr;
    uint64_t vma_start;
    uint64_t vma_end;
    uint64_t vma_flags;
    uint64_t vma_page_size;
    uint64_t vma_offset;
    uint64_t inode;
    uint32_t dev_major;
    uint32_t dev_minor;
    uint32_t vma_name_size;
    uint32_t build_id_size;
    uint64_t vma_name_addr;
    uint64_t build_id_addr;
} procmap_query;

_Static_assert(sizeof(procmap_query) == 104, "the kernel refuses other sizes");

#define PROCMAP_QUERY_CALL _IOWR('f', 17, procmap_query)
#define PROCMAP_READABLE 0x01u
#define PROCMAP_WRITABLE 0x02u
#define PROCMAP_COVERING_OR_NEXT 0x10u

typedef struct mapping {
    uint64_t start, end;
    int readable, writable;
    int anonymous; /* not backed by a file, which could be shorter than the mapping */
} mapping;

/* A walk upwards through the mappings; `next` returns the one that covers `address`, or the first above it. */
typedef struct walk {
    int fd;
    int by_query;
    FILE *text; /* KVN_MAPS_TEXT only */
    mapping current;
} walk;

static int next_by_query(walk *walk, uint64_t address)
{
    procmap_query query = {
        .size = sizeof query,
        .query_flags = PROCMAP_COVERING_OR_NEXT,
        .query_addr = address,
    };
    if (ioctl(walk->fd, PROCMAP_QUERY_CALL, &query) != 0)
        return errno;
    walk->current =
        (mapping){query.vma_start, query.vma_end, !!(query.vma_flags & PROCMAP_READABLE),
                  !!(query.vma_flags & PROCMAP_WRITABLE),
                  query.inode == 0 && query.dev_major == 0 && query.dev_minor == 0};
    return 0;
}

static int next_by_text(walk *walk, uint64_t address)
{
    while (walk->current.end <= address) {
        char permissions[5];
        mapping *found = &walk->current;
        if (fscanf(walk->text, "%" SCNx64 "-%" SCNx64 " %4s%*[^\n]", &found->start, &found->end,
                   permissions) != 3)
            return ENOENT;
        found->readable = permissions[0] == 'r';
        found->writable = permissions[1] == 'w';
    }
    return 0;
}

static int next(walk *walk, uint64_t address)
{
    return walk->by_query ? next_by_query(walk, address) : next_by_text(walk, address);
}

static int open_walk(walk *walk, kvn_maps_source source)
{
    procmap_query probe = {.size = sizeof probe, .query_flags = PROCMAP_COVERING_OR_NEXT};
    walk->text = NULL;
    walk->current = (mapping){0};
    /* Opened again for each check: after a fork an old descriptor would still show the parent. */
    walk->fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (walk->fd < 0)
        return errno;
    walk->by_query = source != KVN_MAPS_TEXT && ioctl(walk->fd, PROCMAP_QUERY_CALL, &probe) == 0;
    if (walk->by_query)
        return 0;
    int error = source == KVN_MAPS_QUERY ? ENOTTY : 0;
    if (!error && !(walk->text = fdopen(walk->fd, "r")))
        error = errno;
    if (error)
        close(walk->fd);
    return error;
}

static void close_walk(walk *walk)
{
    if (walk->text)
        fclose(walk->text);
    else
        close(walk->fd);
}

/* Asks the kernel to read the byte: a load here could raise SIGBUS. */
static int is_present(uint64_t address)
{
    char byte;
    struct iovec local = {&byte, 1}, remote = {(void *)(uintptr_t)address, 1};
    if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1)
        return 1;
    if (errno != EPERM && errno != ENOSYS)
        return 0;
    /* A sandbox may refuse that call. This one is always permitted and changes nothing: it first reads the 8 bytes of
     * the mask (EFAULT), and then refuses the invalid `how` (EINVAL). */
    return syscall(SYS_rt_sigprocmask, ~0, (void *)(uintptr_t)(address & ~UINT64_C(7)), NULL, 8) ==
               0 ||
           errno != EFAULT;
}

/* Rewinds the text for a lower address, because reading proceeds towards higher ones. */
static void begin_at(walk *walk, uint64_t address)
{
    if (walk->text && address < walk->current.start) {
        rewind(walk->text);
        walk->current = (mapping){0};
    }
}

static int check_range(walk *walk, uint64_t address, uint64_t nbytes, int writable,
                       kvn_failure *failure)
{
    if (nbytes == 0)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "nbytes is 0 at address 0x%" PRIx64 "; it must be at least 1", address);
    if (address + nbytes < address)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "address 0x%" PRIx64 " + nbytes %" PRIu64
                        " is past the end of the address space",
                        address, nbytes);
    begin_at(walk, address);
    const uint64_t end = address + nbytes;
    int status = KVN_OK;
    for (uint64_t at = address; status == KVN_OK && at < end; at = walk->current.end) {
        int error = next(walk, at);
        const uint64_t stop = error || walk->current.end > end ? end : walk->current.end;
        const char *flaw = NULL;
        uint64_t hole_end = stop;
        if (error || walk->current.start > at) {
            flaw = "not mapped";
            hole_end = error || walk->current.start > end ? end : walk->current.start;
        } else if (!walk->current.readable)
            flaw = "not readable";
        else if (writable && !walk->current.writable)
            flaw = "not writable";
        else if (!walk->current.anonymous && (!is_present(at) || !is_present(stop - 1)))
            flaw = "mapped, but not all of it can be reached (a file mapping past the file's end?)";
        if (flaw)
            status = kvn_fail(failure, KVN_UNMAPPED, EFAULT,
                              "address 0x%" PRIx64 ", nbytes %" PRIu64 ": 0x%" PRIx64 "-0x%" PRIx64
                              " is %s",
                              address, nbytes, at, hole_end, flaw);
    }
    return status;
}

int kvn_mapping_check_all(const uint64_t *addresses, const uint64_t *nbytes, uint64_t count,
                          int writable, kvn_maps_source source, uint64_t *failed,
                          kvn_failure *failure)
{
    walk walk;
    int error = open_walk(&walk, source), status = KVN_OK;

    *failed = 0;
    if (error)
        return kvn_fail(failure, KVN_UNSUPPORTED, error, "/proc/self/maps cannot be %s",
                        error == ENOTTY   ? "queried by this kernel"
                        : error == ENOENT ? "opened: is /proc mounted?"
                                          : "opened");
    for (uint64_t i = 0; status == KVN_OK && i < count; i++) {
        *failed = i;
        status = check_range(&walk, addresses[i], nbytes[i], writable, failure);
    }
    close_walk(&walk);
    return status;
}

int kvn_mapping_check(uint64_t address, uint64_t nbytes, int writable, kvn_maps_source source,
                      kvn_failure *failure)
{
    uint64_t failed;

    return kvn_mapping_check_all(&address, &nbytes, 1, writable, source, &failed, failure);
}
