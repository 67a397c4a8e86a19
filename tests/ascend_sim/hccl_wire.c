/*
 * Sockets with a deadline. The two ranks, in one process or two, meet at an abstract socket with the name of the
 * communicator: rank 0 listens, and rank 1 connects.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "hccl_sim.h"

#define RETRY_US 2000

static int milliseconds_left(int64_t deadline_us)
{
    if (deadline_us == INT64_MAX)
        return 1000;
    const int64_t left = deadline_us - hccl_now_us();
    return left <= 0 ? 0 : left > 1000000 ? 1000 : (int)((left + 999) / 1000);
}

static socklen_t address_of(const char *name, const char *directory, struct sockaddr_un *out)
{
    char key[400];
    const int length = snprintf(key, sizeof key, "%u/%s/%s", getuid(), directory, name);
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    const int written =
        snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "kvsim-hccl-%016llx-%.60s",
                 (unsigned long long)table_hash(key, (size_t)length), name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)written);
}

static int is_over(int64_t deadline_us) { return hccl_now_us() >= deadline_us; }

static void pause_until(int64_t deadline_us)
{
    const int64_t soon = hccl_now_us() + RETRY_US;
    hccl_wait_until(soon < deadline_us ? soon : deadline_us);
}

static int accept_one(int listener, int64_t deadline_us)
{
    struct pollfd waited = {.fd = listener, .events = POLLIN};
    do {
        if (poll(&waited, 1, milliseconds_left(deadline_us)) == 1) {
            const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
            if (fd >= 0)
                return fd;
        }
    } while (!is_over(deadline_us));
    errno = ETIMEDOUT;
    return -1;
}

/* Waits for the address, which an earlier attempt may still use. */
static int listen_and_accept(const struct sockaddr_un *address, socklen_t size, int64_t deadline_us)
{
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int fd = -1;
    if (listener < 0)
        return -1;
    while (bind(listener, (const struct sockaddr *)address, size)) {
        if (errno != EADDRINUSE || is_over(deadline_us)) {
            close(listener);
            return -1;
        }
        pause_until(deadline_us);
    }
    if (listen(listener, 64) == 0)
        fd = accept_one(listener, deadline_us);
    const int saved = errno;
    close(listener);
    errno = saved;
    return fd;
}

static int connect_to(const struct sockaddr_un *address, socklen_t size, int64_t deadline_us)
{
    for (;;) {
        const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0 || connect(fd, (const struct sockaddr *)address, size) == 0)
            return fd;
        close(fd);
        if (is_over(deadline_us)) {
            errno = ETIMEDOUT;
            return -1;
        }
        pause_until(deadline_us);
    }
}

int wire_meet(const char *name, uint32_t rank, const char *directory, int64_t deadline_us)
{
    struct sockaddr_un address;
    const socklen_t size = address_of(name, directory, &address);
    return rank == 0 ? listen_and_accept(&address, size, deadline_us)
                     : connect_to(&address, size, deadline_us);
}

static int transfer(int fd, void *bytes, size_t nbytes, int64_t deadline_us, int is_send)
{
    char *at = bytes;
    while (nbytes) {
        const ssize_t done = is_send ? send(fd, at, nbytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                                     : recv(fd, at, nbytes, MSG_DONTWAIT);
        if (done > 0) {
            at += done;
            nbytes -= (size_t)done;
        } else if (done == 0 || (errno != EAGAIN && errno != EINTR)) {
            errno = EPIPE;
            return -1;
        } else {
            struct pollfd waited = {.fd = fd, .events = is_send ? POLLOUT : POLLIN};
            poll(&waited, 1, milliseconds_left(deadline_us));
            if (!(waited.revents) && is_over(deadline_us)) {
                errno = ETIMEDOUT;
                return -1;
            }
        }
    }
    return 0;
}

int wire_send(int fd, const void *bytes, size_t nbytes, int64_t deadline_us)
{
    return transfer(fd, (void *)(uintptr_t)bytes, nbytes, deadline_us, 1);
}

int wire_receive(int fd, void *bytes, size_t nbytes, int64_t deadline_us)
{
    return transfer(fd, bytes, nbytes, deadline_us, 0);
}
