/* Calls that kvplan needs and qemu-user lacks, preloaded into every program that tools/arm64 starts.
 *
 * process_vm_readv and process_vm_writev: an emulated process has its memory at its own addresses, so that
 * /proc/PID/mem shows that memory. The file ignores the protection of pages, so the protection is checked first.
 * /proc/PID/stat: qemu replaces the file of the process itself, with the start time of the thread. Another
 * spelling of the path opens the system's file, as peers see it. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* Return how many bytes from `address` on may be moved, up to the first address that may not. */
static size_t reach(int pid, uint64_t address, size_t nbytes, int is_write)
{
    char path[32], line[512];
    uint64_t at = address, start, end;
    char readable, writable;

    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "re");
    while (maps && at < address + nbytes && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %c%c", &start, &end, &readable, &writable) != 4 || end <= at)
            continue;
        if (start > at || readable != 'r' || (is_write && writable != 'w'))
            break;
        at = end;
    }
    if (maps)
        fclose(maps);
    return at < address + nbytes ? at - address : nbytes;
}

static ssize_t move(int pid, const struct iovec *local, unsigned long num_local, const struct iovec *remote,
                    unsigned long num_remote, unsigned long flags, int is_write)
{
    char path[32];
    ssize_t moved = 0;
    size_t skip = 0; /* of the first local range */
    int error = 0;

    if (flags || num_local > IOV_MAX || num_remote > IOV_MAX) {
        errno = EINVAL;
        return -1;
    }
    snprintf(path, sizeof path, "/proc/%d/mem", pid);
    const int file = open(path, (is_write ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (file < 0) {
        errno = errno == ENOENT ? ESRCH : errno == EACCES ? EPERM : errno;
        return -1;
    }
    for (unsigned long i = 0; i < num_remote && num_local > 0 && !error; i++) {
        const uint64_t address = (uintptr_t)remote[i].iov_base;
        const size_t wanted = remote[i].iov_len, there = reach(pid, address, wanted, is_write);
        for (size_t at = 0; at < there && num_local > 0 && !error;) {
            const size_t left = local->iov_len - skip, count = left < there - at ? left : there - at;
            char *own = (char *)local->iov_base + skip;
            const ssize_t got = is_write ? pwrite(file, own, count, (off_t)(address + at))
                                         : pread(file, own, count, (off_t)(address + at));
            if (got <= 0 && count > 0)
                error = EFAULT; /* of ours, or a page beyond the end of a file */
            else
                at += (size_t)got, skip += (size_t)got, moved += got;
            if (skip == local->iov_len)
                local++, num_local--, skip = 0;
        }
        if (there < wanted)
            error = EFAULT;
    }
    close(file);
    errno = error;
    return moved > 0 || !error ? moved : -1;
}

ssize_t process_vm_readv(pid_t pid, const struct iovec *local, unsigned long num_local, const struct iovec *remote,
                         unsigned long num_remote, unsigned long flags)
{
    return move(pid, local, num_local, remote, num_remote, flags, 0);
}

ssize_t process_vm_writev(pid_t pid, const struct iovec *local, unsigned long num_local,
                          const struct iovec *remote, unsigned long num_remote, unsigned long flags)
{
    return move(pid, local, num_local, remote, num_remote, flags, 1);
}

/* Return `path`, or another spelling of the path in `room`. */
static const char *real_stat(const char *path, char room[64])
{
    int length = 0;

    if (sscanf(path, "/proc/%*[0-9a-z]/stat%n", &length) != 0 || length == 0 || path[length])
        return path;
    snprintf(room, 64, "/proc//%s", path + strlen("/proc/"));
    return room;
}

FILE *fopen(const char *path, const char *mode)
{
    static FILE *(*next)(const char *, const char *);
    char room[64];

    if (!next)
        next = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, "fopen");
    return next(real_stat(path, room), mode);
}

int open64(const char *path, int flags, ...)
{
    char room[64];
    va_list more;

    va_start(more, flags);
    const unsigned mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, unsigned) : 0;
    va_end(more);
    return openat(AT_FDCWD, real_stat(path, room), flags, mode);
}

int open(const char *path, int flags, ...) __attribute__((alias("open64")));
