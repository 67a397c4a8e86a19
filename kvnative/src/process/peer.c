/* Identifies another process of this host, so that neither a reused pid nor a new program is mistaken for it. */
#include "process/peer.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438 /* the same number on all processors; Linux 5.6 */
#endif

static int gone(const kvn_peer *peer, kvn_failure *failure)
{
    return kvn_fail(failure, KVN_PEER_GONE, ESRCH, "process %d has exited", peer->pid);
}

static int has_exited(const kvn_peer *peer)
{
    struct pollfd exit = {.fd = peer->pidfd, .events = POLLIN};
    int ready;
    do /* a signal to this process says nothing about the peer */
        ready = poll(&exit, 1, 0);
    while (ready < 0 && errno == EINTR);
    return ready != 0; /* readable once it is dead, reaped or not */
}

int kvn_peer_open(int pid, kvn_peer *out, kvn_failure *failure)
{
    char path[32];
    *out = (kvn_peer){.pid = pid, .pidfd = -1, .proc = -1, .generations.memory.fd = -1};
    if (pid < 1)
        return kvn_fail(failure, KVN_INVALID, 0, "pid is %d; it must be at least 1", pid);
    out->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (out->pidfd < 0) {
        if (errno == ESRCH)
            return gone(out, failure);
        return kvn_fail(failure, errno == ENOSYS ? KVN_UNSUPPORTED : KVN_FAILED, errno,
                        "pidfd_open of process %d: %s", pid, strerror(errno));
    }
    snprintf(path, sizeof path, "/proc/%d", pid);
    out->proc = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    const int error = errno;
    /* If the process is still alive, the directory that was opened before belongs to it. */
    const int dead = has_exited(out);
    if (!dead && out->proc >= 0)
        return KVN_OK;
    kvn_peer_close(out);
    if (dead)
        return gone(out, failure);
    return kvn_fail(failure, KVN_DENIED, error, "%s of a living process cannot be opened: %s", path,
                    strerror(error));
}

static int refuse_exec(const kvn_peer *peer, kvn_failure *failure)
{
    return kvn_fail(failure, KVN_PEER_GONE, ESRCH,
                    "process %d has closed its transport, or executes another program by now",
                    peer->pid);
}

int kvn_peer_attach(kvn_peer *peer, int generations_fd, uint64_t inode, uint64_t num_slots,
                    kvn_failure *failure)
{
    peer->generations_fd = generations_fd;
    int status = kvn_generations_import(peer->pid, generations_fd, inode, num_slots,
                                        &peer->generations, failure);
    if (has_exited(peer))
        status = gone(peer, failure);
    /* The descriptor does not exist or refers to another file: the peer, or an exec, has closed the table. */
    else if (status != KVN_OK && failure->code == ENOENT)
        status = refuse_exec(peer, failure);
    return status;
}

int kvn_peer_check(const kvn_peer *peer, kvn_failure *failure)
{
    char name[32];
    struct stat facts;
    const int life =
        peer->generations.memory.address ? kvn_generations_owner(&peer->generations) : KVN_LIFE_UNKNOWN;
    if (life == KVN_LIVES)
        return KVN_OK;
    snprintf(name, sizeof name, "fd/%d", peer->generations_fd);
    const int error = fstatat(peer->proc, name, &facts, 0) ? errno : 0;
    /* Check this last: a process that is alive now was also alive when its directory was read. */
    if (has_exited(peer))
        return gone(peer, failure);
    if (error == EACCES || error == EPERM)
        return kvn_fail(failure, KVN_DENIED, error, "/proc/%d/%s: %s", peer->pid, name,
                        strerror(error));
    if (error || facts.st_ino != peer->generations.memory.inode ||
        facts.st_dev != peer->generations.memory.device)
        return refuse_exec(peer, failure);
    if (life == KVN_LIFE_ENDED) /* the table says so before /proc does */
        return kvn_fail(failure, KVN_PEER_GONE, ESRCH,
                        "process %d ends, or begins to execute another program", peer->pid);
    return KVN_OK;
}

int kvn_peer_probe(const kvn_peer *peer, uint64_t address, kvn_failure *failure)
{
    char byte;
    const char *call = "process_vm_readv";
    struct iovec local = {&byte, 1}, remote = {(void *)(uintptr_t)address, 1};
    if (process_vm_readv(peer->pid, &local, 1, &remote, 1, 0) == 1) {
        call = "process_vm_writev"; /* of no bytes: only a system call filter refuses that */
        if (process_vm_writev(peer->pid, NULL, 0, NULL, 0, 0) == 0)
            return KVN_OK;
    }
    const int error = errno;
    if (error == ESRCH)
        return gone(peer, failure);
    const int status = error == EPERM    ? KVN_DENIED
                       : error == ENOSYS ? KVN_UNSUPPORTED
                                         : KVN_UNMAPPED;
    return kvn_fail(failure, status, error,
                    "%s of address 0x%" PRIx64 " in process %d: %s", call, address, peer->pid,
                    strerror(error));
}

int kvn_peer_take_descriptor(const kvn_peer *peer, int fd, int *out, kvn_failure *failure)
{
    *out = (int)syscall(SYS_pidfd_getfd, peer->pidfd, fd, 0); /* exec closes it */
    if (*out >= 0)
        return KVN_OK;
    const int error = errno;
    if (error == ESRCH)
        return gone(peer, failure);
    return kvn_fail(failure,
                    error == EPERM    ? KVN_DENIED
                    : error == EBADF  ? KVN_UNMAPPED
                    : error == ENOSYS ? KVN_UNSUPPORTED
                                      : KVN_FAILED,
                    error, "pidfd_getfd of descriptor %d of process %d: %s", fd, peer->pid,
                    strerror(error));
}

void kvn_peer_close(kvn_peer *peer)
{
    kvn_generations_close(&peer->generations);
    if (peer->proc >= 0)
        close(peer->proc);
    if (peer->pidfd >= 0)
        close(peer->pidfd);
    peer->proc = peer->pidfd = -1;
}
