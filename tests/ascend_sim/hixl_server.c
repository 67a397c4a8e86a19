/* Servers: each sends the list of its memory to clients at a TCP port, without authentication. */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "hixl_sim.h"

#define HANDLE_BASE UINT64_C(0x00c4000000000000)
#define MAX_CLIENTS 256
#define BOARD_BYTES (HIXL_MAX_MEMORIES * sizeof(uint64_t))

typedef struct server {
    struct server *next;
    uint64_t handle;
    int device, listener, stop, board_fd, num_endpoints, num_clients;
    char ip[64];
    uint32_t port;
    EndpointDesc endpoints[16];
    registration memories[HIXL_MAX_MEMORIES];
    _Atomic uint64_t *board; /* the handle of each registration, or 0 */
    int clients[MAX_CLIENTS];
    pthread_t thread;
} server;

static server *servers;
static uint64_t last_handle;

static HixlStatus find(hixl_call *call, void *handle, server **out)
{
    for (*out = servers; *out; *out = (*out)->next)
        if ((*out)->handle == (uint64_t)(uintptr_t)handle)
            return HIXL_SUCCESS;
    return hixl_refuse(call, HIXL_PARAM_INVALID, "no such server");
}

static HixlStatus create(hixl_call *call, const HixlServerDesc *desc, const HixlConfig *config, int device,
                         void **out)
{
    if (!out || !desc || !desc->server_ip || !config || !desc->endpoint_list)
        return hixl_refuse(call, HIXL_PARAM_INVALID, "an argument is NULL");
    if (desc->server_port > 65535 || desc->endpoint_list_num < 1 || desc->endpoint_list_num > 16)
        return hixl_refuse(call, HIXL_PARAM_INVALID, "port %u, %u endpoints", desc->server_port,
                           desc->endpoint_list_num);
    for (uint32_t i = 0; i < desc->endpoint_list_num; i++)
        if (hixl_check_endpoint(&desc->endpoint_list[i], device))
            return hixl_refuse(call, HIXL_FAILED, "endpoint %u is none of device %d", i, device);
    server *made = calloc(1, sizeof *made);
    made->board_fd = memfd_create("kvsim-hixl-board", MFD_CLOEXEC);
    if (ftruncate(made->board_fd, BOARD_BYTES))
        abort();
    made->board = mmap(NULL, BOARD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, made->board_fd, 0);
    made->device = device;
    made->listener = -1;
    made->port = desc->server_port;
    made->num_endpoints = (int)desc->endpoint_list_num;
    memcpy(made->endpoints, desc->endpoint_list, desc->endpoint_list_num * sizeof *made->endpoints);
    strncpy(made->ip, desc->server_ip, sizeof made->ip - 1);
    pthread_mutex_lock(&hixl_mutex);
    made->handle = HANDLE_BASE | ++last_handle << 8;
    made->next = servers;
    servers = made;
    pthread_mutex_unlock(&hixl_mutex);
    sim_count(SIM_COUNT_COMMS, 1);
    *out = (void *)(uintptr_t)made->handle;
    return HIXL_SUCCESS;
}

HixlStatus HixlCSServerCreate(const HixlServerDesc *desc, const HixlConfig *config, void **out)
{
    hixl_call call;
    int device = -1;
    HixlStatus code = hixl_enter(&call, "HixlCSServerCreate", &device);
    if (!code)
        code = create(&call, desc, config, device, out);
    return hixl_leave(&call, code, "\"device\":%d", device);
}

/* ---- memory ---- */

HixlStatus HixlCSServerRegMem(void *handle, const char *tag, const CommMem *mem, void **out)
{
    hixl_call call;
    server *s;
    (void)tag;
    HixlStatus code = hixl_enter(&call, "HixlCSServerRegMem", NULL);
    pthread_mutex_lock(&hixl_mutex);
    if (!code)
        code = find(&call, handle, &s);
    if (!code)
        code = hixl_register(&call, s->memories, s->device, mem, out);
    for (int i = 0; !code && i < HIXL_MAX_MEMORIES; i++)
        atomic_store(&s->board[i], s->memories[i].handle);
    pthread_mutex_unlock(&hixl_mutex);
    return hixl_leave(&call, code, "\"address\":%llu", mem ? (unsigned long long)(uintptr_t)mem->addr : 0);
}

HixlStatus HixlCSServerUnregMem(void *handle, void *memory)
{
    hixl_call call;
    server *s = NULL;
    int index = -1, num_clients = 0;
    HixlStatus code = hixl_enter(&call, "HixlCSServerUnregMem", NULL);
    pthread_mutex_lock(&hixl_mutex);
    if (!code)
        code = find(&call, handle, &s);
    if (!code)
        code = hixl_unregister(&call, s->memories, memory, &index);
    if (!code) {
        atomic_store(&s->board[index], 0);
        num_clients = s->num_clients;
    }
    pthread_mutex_unlock(&hixl_mutex);
    return hixl_leave(&call, code, "\"clients\":%d", num_clients);
}

/* ---- the port ---- */

static socklen_t address_of(const server *s, struct sockaddr_storage *out)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)out;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;
    memset(out, 0, sizeof *out);
    if (inet_pton(AF_INET, s->ip, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons((uint16_t)s->port);
        return sizeof *v4;
    }
    if (inet_pton(AF_INET6, s->ip, &v6->sin6_addr) != 1)
        return 0;
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons((uint16_t)s->port);
    return sizeof *v6;
}

/* Call with hixl_mutex held. */
static void answer(server *s, int fd, const wire_request *request)
{
    static wire_memory told[HIXL_MAX_MEMORIES];
    wire_answer head = {.magic = HIXL_MAGIC, .status = HIXL_PARAM_INVALID, .pid = getpid(), .board_fd = s->board_fd};
    for (int i = 0; i < s->num_endpoints; i++)
        if (hixl_is_same_endpoint(&s->endpoints[i], &request->wanted))
            head.status = HIXL_SUCCESS;
    for (int i = 0; i < HIXL_MAX_MEMORIES; i++) {
        const registration *r = &s->memories[i];
        if (r->handle)
            told[head.num_memories++] = (wire_memory){.address = r->address, .nbytes = r->nbytes,
                                                      .fd_offset = r->address - r->memory->address,
                                                      .slot = (uint64_t)i, .fd = r->memory->fd};
    }
    if (send(fd, &head, sizeof head, MSG_NOSIGNAL) == sizeof head)
        (void)!send(fd, told, head.num_memories * sizeof *told, MSG_NOSIGNAL);
}

static void admit(server *s)
{
    wire_request request;
    const int fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC);
    const struct timeval patience = {.tv_sec = 2};
    if (fd < 0)
        return;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    const ssize_t got = recv(fd, &request, sizeof request, MSG_WAITALL);
    pthread_mutex_lock(&hixl_mutex);
    if (got == sizeof request && request.magic == HIXL_MAGIC && s->num_clients < MAX_CLIENTS) {
        answer(s, fd, &request);
        s->clients[s->num_clients++] = fd;
    } else {
        close(fd);
    }
    pthread_mutex_unlock(&hixl_mutex);
}

static void *listen_for_clients(void *argument)
{
    server *s = argument;
    for (;;) {
        struct pollfd waited[MAX_CLIENTS + 2] = {{.fd = s->stop, .events = POLLIN},
                                                 {.fd = s->listener, .events = POLLIN}};
        const int num = s->num_clients; /* only this thread changes it */
        for (int i = 0; i < num; i++)
            waited[i + 2] = (struct pollfd){.fd = s->clients[i], .events = POLLRDHUP};
        poll(waited, (nfds_t)(num + 2), -1);
        if (waited[0].revents)
            return NULL;
        pthread_mutex_lock(&hixl_mutex);
        for (int i = num - 1; i >= 0; i--)
            if (waited[i + 2].revents) {
                close(s->clients[i]);
                s->clients[i] = s->clients[--s->num_clients];
            }
        pthread_mutex_unlock(&hixl_mutex);
        if (waited[1].revents)
            admit(s);
    }
}

static HixlStatus start(hixl_call *call, server *s, uint32_t backlog)
{
    struct sockaddr_storage address;
    const socklen_t size = address_of(s, &address);
    const int on = 1, listener = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!s->port || !size || listener < 0 || setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) ||
        bind(listener, (struct sockaddr *)&address, size) || listen(listener, (int)backlog)) {
        const HixlStatus code = hixl_refuse(call, HIXL_FAILED, "%s:%u: %s", s->ip, s->port, strerror(errno));
        if (listener >= 0)
            close(listener);
        return code;
    }
    s->listener = listener;
    s->stop = eventfd(0, EFD_CLOEXEC);
    if (pthread_create(&s->thread, NULL, listen_for_clients, s))
        abort();
    return HIXL_SUCCESS;
}

HixlStatus HixlCSServerListen(void *handle, uint32_t backlog)
{
    hixl_call call;
    server *s = NULL;
    HixlStatus code = hixl_enter(&call, "HixlCSServerListen", NULL);
    pthread_mutex_lock(&hixl_mutex);
    if (!code)
        code = find(&call, handle, &s);
    pthread_mutex_unlock(&hixl_mutex);
    if (!code)
        code = start(&call, s, backlog);
    return hixl_leave(&call, code, "\"ip\":\"%s\",\"port\":%u", s ? s->ip : "", s ? s->port : 0);
}

HixlStatus HixlCSServerDestroy(void *handle)
{
    hixl_call call;
    server *s = NULL, **at = &servers;
    HixlStatus code = hixl_enter(&call, "HixlCSServerDestroy", NULL);
    pthread_mutex_lock(&hixl_mutex);
    if (!code && !(code = find(&call, handle, &s))) {
        while (*at != s)
            at = &(*at)->next;
        *at = s->next;
    }
    pthread_mutex_unlock(&hixl_mutex);
    if (s) {
        if (s->listener >= 0) {
            eventfd_write(s->stop, 1);
            pthread_join(s->thread, NULL);
            close(s->listener);
            close(s->stop);
        }
        for (int i = 0; i < s->num_clients; i++)
            close(s->clients[i]);
        for (int i = 0; i < HIXL_MAX_MEMORIES; i++)
            atomic_store(&s->board[i], 0);
        hixl_unregister_all(s->memories);
        munmap((void *)(uintptr_t)s->board, BOARD_BYTES);
        close(s->board_fd);
        free(s);
        sim_count(SIM_COUNT_COMMS, -1);
    }
    return hixl_leave(&call, code, "%s", "");
}
