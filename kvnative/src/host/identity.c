/* Reads the start times and mappings of processes from /proc. */
#include "host/identity.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PID_BITS 22 /* the kernel's limit of a pid */

/* Start time of process `pid`, in clock ticks since boot; 0 if it cannot be read. */
static uint64_t start_time(int pid)
{
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    const size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    /* The second field, a name in parentheses, may itself hold spaces and parentheses. */
    char *at = strrchr(text, ')');
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

kvn_identity kvn_identity_of(int pid) { return start_time(pid) << PID_BITS | (uint64_t)pid; }

int kvn_identity_pid(kvn_identity process) { return (int)(process & ((1u << PID_BITS) - 1)); }

bool kvn_identity_lives(kvn_identity process)
{
    const int pid = kvn_identity_pid(process);
    const int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pidfd < 0)
        return errno != ESRCH && errno != EINVAL;
    const uint64_t started = start_time(pid);
    struct pollfd exit = {.fd = pidfd, .events = POLLIN};
    const bool dead = poll(&exit, 1, 0) > 0 || (started && started != process >> PID_BITS);
    close(pidfd);
    return !dead;
}

/* The first thread of a process may have ended; then its list of mappings is empty. */
bool kvn_process_has_mapped(int pid, uint64_t inode)
{
    char path[32], line[512];
    uint64_t number;
    bool found = false, is_empty = true;
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *file = fopen(path, "re");
    while (file && !found && fgets(line, sizeof line, file)) {
        is_empty = false;
        found = sscanf(line, "%*s %*s %*s %*s %" SCNu64, &number) == 1 && number == inode;
    }
    if (file)
        fclose(file);
    return found || is_empty;
}
