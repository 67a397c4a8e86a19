/*
 * The other rank of a communicator. Its memory is accessed through its memfds, opened once through /proc, or
 * by process_vm_* if the program had allocated the memory. The socket stays open, because its end
 * shows that the other rank has gone.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "hccl_sim.h"

#define HELLO_MAGIC UINT64_C(0x6b7673696d003031)
#define MAX_REGIONS 4096u
#define MAX_BLOCK (16u << 20)
#define PROC_PATH "/proc/%d/fd/%d"

typedef struct {
    uint64_t magic;
    uint64_t table_hash;
    char name[128];
    uint32_t rank, kind, product, num_regions, tls;
    int32_t pid, board_fd;
    uint64_t board_bytes;
} hello;

struct peer {
    int fd, pid;
    const _Atomic uint64_t *slots;
    uint64_t board_bytes;
};

static int open_of(int pid, int fd, int flags)
{
    char path[64];
    snprintf(path, sizeof path, PROC_PATH, pid, fd);
    return open(path, flags | O_CLOEXEC);
}

static int map_board(peer *p, const hello *theirs)
{
    const int fd = open_of(theirs->pid, theirs->board_fd, O_RDONLY);
    if (fd < 0)
        return -1;
    void *mapped = mmap(NULL, theirs->board_bytes, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED)
        return -1;
    p->slots = mapped;
    p->board_bytes = theirs->board_bytes;
    return 0;
}

static HcclResult compare(hccl_call *call, const hello *mine, const hello *theirs)
{
    if (theirs->magic != mine->magic || strcmp(theirs->name, mine->name) ||
        theirs->num_regions > MAX_REGIONS)
        return hccl_refuse(call, HCCL_E_INTERNAL, "the other end speaks otherwise");
    if (theirs->rank == mine->rank)
        return hccl_refuse(call, HCCL_E_PARA, "both ends are rank %u", mine->rank);
    if (theirs->table_hash != mine->table_hash)
        return hccl_refuse(call, HCCL_E_PARA, "the rank tables of the two ends differ");
    if (theirs->product != mine->product)
        return hccl_refuse(call, HCCL_E_PARA, "the products of the two ends differ");
    if (theirs->tls != mine->tls)
        return hccl_refuse(call, HCCL_E_TIMEOUT, "no connection in time");
    if (theirs->kind != mine->kind)
        return hccl_refuse(call, HCCL_E_PARA, "one end prepares, the other exchanges descriptors");
    return HCCL_SUCCESS;
}

/* Exchanges verdicts: each rank reports whether it accepts the other's data. */
static HcclResult agree(hccl_call *call, int fd, HcclResult mine, int64_t deadline_us)
{
    int32_t verdict = (int32_t)mine;
    if (wire_send(fd, &verdict, sizeof verdict, deadline_us) ||
        wire_receive(fd, &verdict, sizeof verdict, deadline_us))
        return mine ? mine : HCCL_E_AGAIN;
    if (!mine && verdict)
        return hccl_refuse(call, (HcclResult)verdict, "the other end refused with %d", verdict);
    return mine;
}

/* Returns HCCL_E_AGAIN if the other rank leaves too early; it may connect again. */
static HcclResult greet(hccl_call *call, peer *p, const hello *mine, const wire_region *my_regions,
                        int64_t deadline_us, wire_region **regions, uint32_t *num_regions)
{
    hello theirs;
    HcclResult code;
    if (wire_send(p->fd, mine, sizeof *mine, deadline_us) ||
        wire_send(p->fd, my_regions, mine->num_regions * sizeof *my_regions, deadline_us) ||
        wire_receive(p->fd, &theirs, sizeof theirs, deadline_us))
        return HCCL_E_AGAIN;
    theirs.name[sizeof theirs.name - 1] = '\0';
    if ((code = compare(call, mine, &theirs)))
        return agree(call, p->fd, code, deadline_us);
    *regions = calloc(theirs.num_regions + 1, sizeof **regions);
    if (!*regions)
        return hccl_refuse(call, HCCL_E_MEMORY, "no memory for %u regions", theirs.num_regions);
    if (wire_receive(p->fd, *regions, theirs.num_regions * sizeof **regions, deadline_us))
        return HCCL_E_AGAIN;
    *num_regions = theirs.num_regions;
    p->pid = theirs.pid;
    if (map_board(p, &theirs))
        code = hccl_refuse(call, HCCL_E_INTERNAL, "cannot reach process %d: %s", theirs.pid,
                           strerror(errno));
    return agree(call, p->fd, code, deadline_us);
}

HcclResult peer_meet(hccl_call *call, const comm *c, meet_kind kind, const wire_region *mine,
                     uint32_t num_mine, int64_t deadline_us, peer **out, wire_region **regions,
                     uint32_t *num_regions)
{
    const sim_settings settings = sim_settings_now();
    hello me = {.magic = HELLO_MAGIC, .table_hash = c->table.hash, .rank = c->rank, .kind = kind,
                .product = c->product, .tls = !nic_is_hccs(c) && settings.tls >> c->device & 1, .num_regions = num_mine, .pid = getpid(),
                .board_fd = board_fd(), .board_bytes = 1 << 17};
    memcpy(me.name, c->name, sizeof me.name);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* Yama may restrict process_vm_* */
    for (;;) {
        peer *p = calloc(1, sizeof *p);
        if (!p)
            return hccl_refuse(call, HCCL_E_MEMORY, "no memory");
        *regions = NULL;
        *num_regions = 0;
        p->fd = wire_meet(c->name, c->rank, settings.directory, deadline_us);
        HcclResult code = HCCL_E_TIMEOUT;
        if (p->fd >= 0) {
            code = greet(call, p, &me, mine, deadline_us, regions, num_regions);
            if (code == HCCL_E_AGAIN && hccl_now_us() >= deadline_us)
                code = HCCL_E_TIMEOUT;
        }
        if (!code) {
            *out = p;
            return HCCL_SUCCESS;
        }
        free(*regions);
        peer_close(p);
        if (code == HCCL_E_TIMEOUT)
            return hccl_refuse(call, code, "rank %u did not come in time", 1 - c->rank);
        if (code != HCCL_E_AGAIN)
            return code;
    }
}

HcclResult peer_swap(hccl_call *call, peer *p, const void *mine, uint32_t nbytes,
                     int64_t deadline_us, void **theirs, uint32_t *num_theirs)
{
    *theirs = NULL;
    if (wire_send(p->fd, &nbytes, sizeof nbytes, deadline_us) ||
        wire_send(p->fd, mine, nbytes, deadline_us) ||
        wire_receive(p->fd, num_theirs, sizeof *num_theirs, deadline_us))
        goto failed;
    if (*num_theirs > MAX_BLOCK)
        return hccl_refuse(call, HCCL_E_INTERNAL, "the other end sends %u bytes", *num_theirs);
    *theirs = malloc(*num_theirs + 1u);
    if (!*theirs)
        return hccl_refuse(call, HCCL_E_MEMORY, "no memory for %u bytes", *num_theirs);
    if (wire_receive(p->fd, *theirs, *num_theirs, deadline_us) == 0)
        return HCCL_SUCCESS;
failed:
    free(*theirs);
    *theirs = NULL;
    return errno == ETIMEDOUT
               ? hccl_refuse(call, HCCL_E_TIMEOUT, "the other end did not come in time")
               : hccl_refuse(call, HCCL_E_TCP_TRANSFER, "the other end is gone");
}

int peer_pid(const peer *p) { return p->pid; }

int peer_is_alive(const peer *p)
{
    struct pollfd waited = {.fd = p->fd, .events = POLLRDHUP};
    return poll(&waited, 1, 0) == 0;
}

int peer_region_is_live(const peer *p, const wire_region *range)
{
    return (range->place.slot + 1) * sizeof *p->slots <= p->board_bytes &&
           atomic_load(&p->slots[range->place.slot]) == range->place.generation;
}

int peer_open(const peer *p, const wire_region *range, int *fd)
{
    *fd = -1;
    if (range->fd < 0)
        return 0;
    *fd = open_of(p->pid, range->fd, O_RDWR);
    return *fd < 0 ? -1 : 0;
}

static ssize_t copy_through_file(const remote_region *remote, uint64_t address, void *local,
                                 uint64_t nbytes, int is_put)
{
    const off_t offset = (off_t)(address - remote->range.address + remote->range.fd_offset);
    return is_put ? pwrite(remote->fd, local, nbytes, offset)
                  : pread(remote->fd, local, nbytes, offset);
}

static ssize_t copy_through_process(const remote_region *remote, uint64_t address, void *local,
                                    uint64_t nbytes, int is_put)
{
    const struct iovec here = {local, nbytes}, there = {(void *)(uintptr_t)address, nbytes};
    return is_put ? process_vm_writev(remote->range.pid, &here, 1, &there, 1, 0)
                  : process_vm_readv(remote->range.pid, &here, 1, &there, 1, 0);
}

int peer_copy(const remote_region *remote, uint64_t address, void *local, uint64_t nbytes,
              int is_put)
{
    char *at = local;
    while (nbytes) {
        const ssize_t done = remote->fd >= 0
                                 ? copy_through_file(remote, address, at, nbytes, is_put)
                                 : copy_through_process(remote, address, at, nbytes, is_put);
        if (done <= 0)
            return -1;
        at += done;
        address += (uint64_t)done;
        nbytes -= (uint64_t)done;
    }
    return 0;
}

void peer_close(peer *p)
{
    if (!p)
        return;
    if (p->fd >= 0)
        close(p->fd);
    if (p->slots)
        munmap((void *)(uintptr_t)p->slots, p->board_bytes);
    free(p);
}
