/* Clients: each has a thread, which copies its batches in order. A batch never ends after its server has gone or has
 * unregistered the memory, because 9.1 reports no error for endpoints of devices. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "hixl_sim.h"

#define HANDLE_BASE UINT64_C(0x00c5000000000000)
#define BATCH_BASE UINT64_C(0x00c6000000000000)
#define MAX_BATCHES 4096

typedef struct {
    unsigned char *local;
    uint64_t address, nbytes;
    int remote;
} piece;

typedef struct batch {
    struct batch *next;
    uint64_t handle;
    int is_put, status;
    sim_fault fault;
    uint32_t num_pieces, num_done;
    uint64_t nbytes;
    piece pieces[];
} batch;

typedef struct client {
    struct client *next;
    uint64_t handle;
    int device, fd, is_failed, is_stopped, busy;
    EndpointDesc remote;
    char ip[64];
    uint32_t port;
    registration memories[HIXL_MAX_MEMORIES];
    wire_memory *remotes;
    int *files; /* the memfd of each of `remotes` */
    uint64_t num_remotes;
    const _Atomic uint64_t *board;
    uint64_t *lives; /* handle of each of `remotes`, from the board */
    batch *batches;
    unsigned num_batches;
    pthread_cond_t changed;
    pthread_t thread;
} client;

static client *clients;
static uint64_t last_handle;

static HixlStatus find(hixl_call *call, void *handle, client **out)
{
    for (*out = clients; *out; *out = (*out)->next)
        if ((*out)->handle == (uint64_t)(uintptr_t)handle)
            return HIXL_SUCCESS;
    return hixl_refuse(call, HIXL_PARAM_INVALID, "no such client");
}

HixlStatus HixlCSClientCreate(const HixlClientDesc *desc, const HixlConfig *config, void **out)
{
    hixl_call call;
    int device = -1;
    HixlStatus code = hixl_enter(&call, "HixlCSClientCreate", &device);
    if (!code && (!out || !desc || !config || !desc->server_ip || !desc->local_endpoint || !desc->remote_endpoint ||
                  desc->server_port < 1 || desc->server_port > 65535))
        code = hixl_refuse(&call, HIXL_PARAM_INVALID, "an argument is NULL, or the port is none");
    if (!code && (hixl_check_endpoint(desc->local_endpoint, device) || hixl_check_endpoint(desc->remote_endpoint, -1)))
        code = hixl_refuse(&call, HIXL_FAILED, "the local endpoint is none of device %d", device);
    if (!code) {
        client *made = calloc(1, sizeof *made);
        made->device = device;
        made->fd = -1;
        made->remote = *desc->remote_endpoint;
        made->port = desc->server_port;
        strncpy(made->ip, desc->server_ip, sizeof made->ip - 1);
        pthread_cond_init(&made->changed, NULL);
        pthread_mutex_lock(&hixl_mutex);
        made->handle = HANDLE_BASE | ++last_handle << 8;
        made->next = clients;
        clients = made;
        pthread_mutex_unlock(&hixl_mutex);
        sim_count(SIM_COUNT_COMMS, 1);
        *out = (void *)(uintptr_t)made->handle;
    }
    return hixl_leave(&call, code, "\"tc\":%u,\"sl\":%u", desc ? desc->tc : 0, desc ? desc->sl : 0);
}

HixlStatus HixlCSClientRegMem(void *handle, const char *tag, const CommMem *mem, void **out)
{
    hixl_call call;
    client *c;
    (void)tag;
    HixlStatus code = hixl_enter(&call, "HixlCSClientRegMem", NULL);
    pthread_mutex_lock(&hixl_mutex);
    if (!code)
        code = find(&call, handle, &c);
    if (!code && c->fd >= 0)
        code = hixl_refuse(&call, HIXL_FAILED, "the client is connected: register before");
    if (!code)
        code = hixl_register(&call, c->memories, c->device, mem, out);
    pthread_mutex_unlock(&hixl_mutex);
    return hixl_leave(&call, code, "\"address\":%llu", mem ? (unsigned long long)(uintptr_t)mem->addr : 0);
}

HixlStatus HixlCSClientUnregMem(void *handle, void *memory)
{
    hixl_call call;
    client *c;
    int index, is_connected = 0;
    HixlStatus code = hixl_enter(&call, "HixlCSClientUnregMem", NULL);
    pthread_mutex_lock(&hixl_mutex);
    if (!code)
        code = find(&call, handle, &c);
    if (!code) {
        code = hixl_unregister(&call, c->memories, memory, &index);
        is_connected = c->fd >= 0;
    }
    pthread_mutex_unlock(&hixl_mutex);
    return hixl_leave(&call, code, "\"connected\":%d", is_connected);
}

/* ---- the thread ---- */

static int copy(const client *c, const piece *p, int is_put)
{
    const wire_memory *r = &c->remotes[p->remote];
    struct pollfd server = {.fd = c->fd, .events = POLLRDHUP};
    if (poll(&server, 1, 0) || atomic_load(&c->board[r->slot]) != c->lives[p->remote])
        return -1;
    for (uint64_t done = 0; done < p->nbytes;) {
        const off_t at = (off_t)(r->fd_offset + p->address - r->address + done);
        const ssize_t moved = is_put ? pwrite(c->files[p->remote], p->local + done, p->nbytes - done, at)
                                     : pread(c->files[p->remote], p->local + done, p->nbytes - done, at);
        if (moved <= 0)
            return -1;
        done += (uint64_t)moved;
    }
    return 0;
}

/* Returns 1 if the client was destroyed meanwhile. Call with hixl_mutex held; releases it while it sleeps. */
static int pause_for(client *c, int64_t microseconds)
{
    const int64_t until = hixl_now_us() + microseconds;
    while (!c->is_stopped && hixl_now_us() < until) {
        pthread_mutex_unlock(&hixl_mutex);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
        pthread_mutex_lock(&hixl_mutex);
    }
    return c->is_stopped;
}

static void do_batch(client *c, batch *b)
{
    if (b->fault.kind != SIM_FAULT_NONE || pause_for(c, sim_duration_us(b->nbytes)))
        return;
    int stuck = 0;
    pthread_mutex_unlock(&hixl_mutex);
    /* From the end, because the order inside a batch is unspecified. */
    for (; b->num_done < b->num_pieces && !stuck; b->num_done += !stuck)
        stuck = copy(c, &b->pieces[b->num_pieces - 1 - b->num_done], b->is_put);
    pthread_mutex_lock(&hixl_mutex);
    if (!stuck)
        b->status = HIXL_COMPLETE_STATUS_COMPLETED;
}

static void *work(void *argument)
{
    client *c = argument;
    pthread_mutex_lock(&hixl_mutex);
    while (!c->is_stopped) {
        batch *b = c->batches;
        while (b && b->status != HIXL_COMPLETE_STATUS_WAITING)
            b = b->next;
        if (b)
            do_batch(c, b);
        if (!c->is_stopped && (!b || b->status == HIXL_COMPLETE_STATUS_WAITING))
            pthread_cond_wait(&c->changed, &hixl_mutex); /* for a batch, or after a stuck one for the end */
    }
    pthread_mutex_unlock(&hixl_mutex);
    return NULL;
}

/* ---- connections ---- */

static int dial(const client *c, uint32_t timeout_ms)
{
    struct sockaddr_storage address = {0};
    struct sockaddr_in *v4 = (struct sockaddr_in *)&address;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&address;
    const struct timeval patience = {timeout_ms / 1000, timeout_ms % 1000 * 1000};
    socklen_t size = sizeof *v4;
    if (inet_pton(AF_INET, c->ip, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons((uint16_t)c->port);
    } else {
        inet_pton(AF_INET6, c->ip, &v6->sin6_addr);
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons((uint16_t)c->port);
        size = sizeof *v6;
    }
    const int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (connect(fd, (struct sockaddr *)&address, size) == 0)
        return fd;
    close(fd);
    return -1;
}

static int open_of(int pid, int fd, int flags)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    return open(path, flags | O_CLOEXEC);
}

static HixlStatus learn(hixl_call *call, client *c, int fd)
{
    const wire_request request = {.magic = HIXL_MAGIC, .wanted = c->remote};
    wire_answer head;
    if (send(fd, &request, sizeof request, MSG_NOSIGNAL) != sizeof request ||
        recv(fd, &head, sizeof head, MSG_WAITALL) != sizeof head)
        return hixl_refuse(call, errno == EAGAIN ? HIXL_TIMEOUT : HIXL_FAILED, "no answer of the server");
    if (head.magic != HIXL_MAGIC || head.status || head.num_memories > HIXL_MAX_MEMORIES)
        return hixl_refuse(call, HIXL_PARAM_INVALID, "the server has no such endpoint");
    c->remotes = calloc(head.num_memories + 1, sizeof *c->remotes);
    c->files = calloc(head.num_memories + 1, sizeof *c->files);
    c->lives = calloc(head.num_memories + 1, sizeof *c->lives);
    const size_t nbytes = head.num_memories * sizeof *c->remotes;
    if (nbytes && recv(fd, c->remotes, nbytes, MSG_WAITALL) != (ssize_t)nbytes)
        return hixl_refuse(call, HIXL_TIMEOUT, "no answer of the server");
    const int board = open_of(head.pid, head.board_fd, O_RDONLY);
    c->board = mmap(NULL, HIXL_MAX_MEMORIES * sizeof *c->board, PROT_READ, MAP_SHARED, board, 0);
    close(board);
    for (uint64_t i = 0; i < head.num_memories; i++) {
        c->files[i] = open_of(head.pid, c->remotes[i].fd, O_RDWR);
        c->lives[i] = atomic_load(&c->board[c->remotes[i].slot]);
    }
    c->num_remotes = head.num_memories;
    return HIXL_SUCCESS;
}

HixlStatus HixlCSClientConnect(void *handle, uint32_t timeout_ms)
{
    hixl_call call;
    client *c = NULL;
    HixlStatus code = hixl_enter(&call, "HixlCSClientConnect", NULL);
    pthread_mutex_lock(&hixl_mutex);
    if (!code)
        code = find(&call, handle, &c);
    if (c)
        c->busy++;
    pthread_mutex_unlock(&hixl_mutex);
    if (!code && c->fd >= 0)
        code = hixl_refuse(&call, HIXL_FAILED, "it is connected");
    if (!code) {
        const int fd = dial(c, timeout_ms);
        code = fd < 0 ? hixl_refuse(&call, HIXL_TIMEOUT, "%s:%u: %s", c->ip, c->port, strerror(errno))
                      : learn(&call, c, fd);
        if (code && fd >= 0)
            close(fd);
        pthread_mutex_lock(&hixl_mutex);
        c->fd = code ? -1 : fd;
        if (!code && pthread_create(&c->thread, NULL, work, c))
            abort();
        pthread_mutex_unlock(&hixl_mutex);
    }
    pthread_mutex_lock(&hixl_mutex);
    if (c)
        c->busy--;
    pthread_mutex_unlock(&hixl_mutex);
    return hixl_leave(&call, code, "\"timeout\":%u,\"remotes\":%llu", timeout_ms,
                      c && !code ? (unsigned long long)c->num_remotes : 0);
}

/* ---- batches ---- */

static int holds(uint64_t address, uint64_t nbytes, uint64_t wanted, uint64_t size)
{
    return wanted >= address && size <= nbytes && wanted - address <= nbytes - size;
}

static HixlStatus resolve(hixl_call *call, const client *c, const HixlOneSideOpDesc *desc, uint32_t i, piece *out)
{
    const uint64_t local = (uint64_t)(uintptr_t)desc->local_buf, remote = (uint64_t)(uintptr_t)desc->remote_buf;
    *out = (piece){.address = remote, .nbytes = desc->len, .remote = -1};
    for (int k = 0; k < HIXL_MAX_MEMORIES && !out->local; k++) {
        const registration *r = &c->memories[k];
        if (r->handle && desc->len && holds(r->address, r->nbytes, local, desc->len))
            out->local = r->memory->view + (local - r->memory->address);
    }
    for (uint64_t k = 0; k < c->num_remotes && out->remote < 0; k++)
        if (holds(c->remotes[k].address, c->remotes[k].nbytes, remote, desc->len))
            out->remote = (int)k;
    if (!out->local || out->remote < 0)
        return hixl_refuse(call, HIXL_PARAM_INVALID, "descriptor %u: %s memory %#llx, +%llu is not registered", i,
                           out->local ? "server" : "client", (unsigned long long)(out->local ? remote : local),
                           (unsigned long long)desc->len);
    sim_linger_check(out->local, out->nbytes, "transferred");
    return HIXL_SUCCESS;
}

/* Records that pending operations continue: kernels of the AICPU outlive the abort of their stream. */
static void linger(batch *b, int64_t microseconds)
{
    for (uint32_t i = b->num_done; b->status == HIXL_COMPLETE_STATUS_WAITING && i < b->num_pieces; i++) {
        const piece *p = &b->pieces[b->num_pieces - 1 - i];
        sim_linger(p->local, p->nbytes, hixl_now_us() + microseconds);
    }
}

/* Call with hixl_mutex held. */
static HixlStatus issue(hixl_call *call, void *handle, int is_put, uint32_t num, const HixlOneSideOpDesc *list,
                        void **out)
{
    client *c;
    HixlStatus code = find(call, handle, &c);
    if (code)
        return code;
    if (!num || !list || !out)
        return hixl_refuse(call, HIXL_PARAM_INVALID, "%u descriptors, or an argument is NULL", num);
    if (c->is_failed || c->fd < 0)
        return hixl_refuse(call, HIXL_FAILED, c->fd < 0 ? "it is not connected" : "a batch has failed before");
    if (c->num_batches == MAX_BATCHES)
        return hixl_refuse(call, HIXL_RESOURCE_EXHAUSTED, "%u batches were not queried", c->num_batches);
    batch *b = calloc(1, sizeof *b + num * sizeof *b->pieces), **at = &c->batches;
    b->is_put = is_put;
    b->fault = call->call.fault;
    for (; b->num_pieces < num && !code; b->num_pieces += !code) {
        code = resolve(call, c, &list[b->num_pieces], b->num_pieces, &b->pieces[b->num_pieces]);
        b->nbytes += list[b->num_pieces].len;
    }
    if (code) {
        free(b);
        return code;
    }
    b->handle = BATCH_BASE | ++last_handle << 8;
    while (*at)
        at = &(*at)->next;
    *at = b;
    c->num_batches++;
    if (b->fault.kind == SIM_FAULT_PARTIAL) { /* as if the launch of its second kernel failed */
        b->num_pieces = (num + 1) / 2;
        linger(b, HIXL_UNSTOPPED_US);
        return hixl_refuse(call, (HixlStatus)b->fault.code, "%u of %u descriptors were launched", b->num_pieces, num);
    }
    *out = (void *)(uintptr_t)b->handle;
    pthread_cond_broadcast(&c->changed);
    return HIXL_SUCCESS;
}

static HixlStatus issue_call(const char *name, void *handle, int is_put, uint32_t num, const HixlOneSideOpDesc *list,
                             void **out)
{
    hixl_call call;
    client *c;
    HixlStatus code = hixl_enter(&call, name, NULL);
    pthread_mutex_lock(&hixl_mutex);
    if (!code)
        code = issue(&call, handle, is_put, num, list, out);
    if ((code == HIXL_FAILED || code == HIXL_TIMEOUT) && !find(&call, handle, &c))
        c->is_failed = 1;
    pthread_mutex_unlock(&hixl_mutex);
    return hixl_leave(&call, code, "\"descriptors\":%u", num);
}

HixlStatus HixlCSClientBatchPutAsync(void *handle, uint32_t num, const HixlOneSideOpDesc *list, void **out)
{
    return issue_call("HixlCSClientBatchPutAsync", handle, 1, num, list, out);
}

HixlStatus HixlCSClientBatchGetAsync(void *handle, uint32_t num, const HixlOneSideOpDesc *list, void **out)
{
    return issue_call("HixlCSClientBatchGetAsync", handle, 0, num, list, out);
}

#if KVSIM_CANN >= 901
/* kvplan only looks this name up, to tell 9.1 from 9.0. */
HixlStatus HixlCSClientBatchPutSync(void *handle, uint32_t num, const HixlOneSideOpDesc *list, uint32_t timeout_ms)
{
    hixl_call call;
    (void)handle, (void)list, (void)timeout_ms;
    hixl_enter(&call, "HixlCSClientBatchPutSync", NULL);
    return hixl_leave(&call, hixl_refuse(&call, HIXL_FAILED, "not simulated"), "\"descriptors\":%u", num);
}
#endif

HixlStatus HixlCSClientQueryCompleteStatus(void *handle, void *queried, int32_t *status)
{
    hixl_call call;
    client *c;
    batch **at = NULL;
    HixlStatus code = hixl_enter(&call, "HixlCSClientQueryCompleteStatus", NULL);
    pthread_mutex_lock(&hixl_mutex);
    if (!code)
        code = find(&call, handle, &c);
    for (at = code ? NULL : &c->batches; at && *at && (*at)->handle != (uint64_t)(uintptr_t)queried;)
        at = &(*at)->next;
    if (!code && (!*at || !status))
        code = hixl_refuse(&call, HIXL_PARAM_INVALID, "no such batch, or it was queried to its end before");
    if (!code) {
        batch *b = *at;
        *status = b->status;
        if (b->status != HIXL_COMPLETE_STATUS_WAITING) {
            *at = b->next;
            c->num_batches--;
            free(b);
        }
    }
    pthread_mutex_unlock(&hixl_mutex);
    return hixl_leave(&call, code, "\"status\":%d", code ? -1 : *status);
}

/* ---- destruction ---- */

HixlStatus HixlCSClientDestroy(void *handle)
{
    hixl_call call;
    client *c = NULL, **at = &clients;
    unsigned num_batches = 0;
    HixlStatus code = hixl_enter(&call, "HixlCSClientDestroy", NULL);
    pthread_mutex_lock(&hixl_mutex);
    if (!code && !(code = find(&call, handle, &c))) {
        while (*at != c)
            at = &(*at)->next;
        *at = c->next;
        c->is_stopped = 1;
        num_batches = c->num_batches;
        pthread_cond_broadcast(&c->changed);
        if (c->busy)
            sim_violation("a client was destroyed during another call");
    }
    pthread_mutex_unlock(&hixl_mutex);
    if (c) {
        if (c->fd >= 0) {
            pthread_join(c->thread, NULL);
            close(c->fd);
            munmap((void *)(uintptr_t)c->board, HIXL_MAX_MEMORIES * sizeof *c->board);
        }
        for (batch *b = c->batches, *next; b; b = next) {
            next = b->next;
            linger(b, HIXL_LINGER_US);
            free(b);
        }
        for (uint64_t i = 0; i < c->num_remotes; i++)
            close(c->files[i]);
        hixl_unregister_all(c->memories);
        free(c->remotes);
        free(c->files);
        free(c->lives);
        pthread_cond_destroy(&c->changed);
        free(c);
        sim_count(SIM_COUNT_COMMS, -1);
    }
    return hixl_leave(&call, code, "\"batches\":%u", num_batches);
}
