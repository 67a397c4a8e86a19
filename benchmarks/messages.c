/* What a small pull cannot do without: a question of 64 bytes and an answer of 4 KiB, as messages of UCX between two
 * processes, each with a worker that sends and one that receives, both able to sleep and both spinning, and
 * with acknowledgements that are delayed as kvplan does. No checks, no copies of ours, no Python. Prints the median
 * in microseconds.
 *
 *     messages LIBUCP TIMES     (UCX_TLS, UCX_NET_DEVICES, ... are UCX's own)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "../include/kvnative/ucx.h"

#define QUESTION 64
#define ANSWER 4096
#define WARM_UP 500
#define DELAY_EVERY 500 /* messages: before the timers of the system go off, after 40 ms */
#define MOST_FILES 256
#define LINGER_US 200000 /* until the server takes its connection away */

static kvn_ucx ucx;
static kvn_ucp_worker_h sender, receiver;
static kvn_ucp_ep_h ep;
static unsigned arrived, sending;

static void check(kvn_ucs_status status, const char *what)
{
    if (status != KVN_UCS_OK) {
        fprintf(stderr, "%s: %s\n", what, ucx.ucs_status_string(status));
        _exit(1);
    }
}

static void open_library(const char *path)
{
    void *ucp = dlopen(path, RTLD_NOW | RTLD_GLOBAL);

    if (!ucp) {
        fprintf(stderr, "%s\n", dlerror());
        _exit(1);
    }
#define LOOK_UP(result, name, parameters) *(void **)&ucx.name = dlsym(ucp, #name);
    KVN_UCP_REQUIRED(LOOK_UP)
    KVN_UCS_REQUIRED(LOOK_UP)
#undef LOOK_UP
}

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e6 * (double)now.tv_sec + (double)now.tv_nsec / 1e3;
}

static kvn_ucs_status on_message(void *context, const void *header, size_t header_nbytes, void *data,
                                 size_t nbytes, const kvn_ucp_am_recv_param *param)
{
    (void)context, (void)header, (void)header_nbytes, (void)data, (void)nbytes, (void)param;
    arrived++;
    return KVN_UCS_OK;
}

static void on_sent(void *request, kvn_ucs_status status, void *context)
{
    (void)context;
    check(status, "sending");
    sending--;
    ucx.ucp_request_free(request);
}

static void on_error(void *context, kvn_ucp_ep_h broken, kvn_ucs_status status)
{
    (void)context, (void)broken, (void)status; /* at the end: the other one has gone */
}

static kvn_ucp_worker_h make_worker(kvn_ucp_context_h context, int events)
{
    const kvn_ucp_worker_params params = {.field_mask = KVN_UCP_WORKER_PARAM_THREAD_MODE,
                                          .thread_mode = KVN_UCS_THREAD_MODE_SERIALIZED};
    struct epoll_event watch = {.events = EPOLLIN};
    kvn_ucp_worker_h worker;
    int file;

    check(ucx.ucp_worker_create(context, &params, &worker), "ucp_worker_create");
    check(ucx.ucp_worker_get_efd(worker, &file), "ucp_worker_get_efd");
    epoll_ctl(events, EPOLL_CTL_ADD, file, &watch);
    return worker;
}

static void open_workers(void)
{
    const kvn_ucp_params params = {.field_mask = KVN_UCP_PARAM_FEATURES,
                                   .features = KVN_UCP_FEATURE_AM | KVN_UCP_FEATURE_WAKEUP};
    const kvn_ucp_am_handler_param handler = {
        .field_mask = KVN_UCP_AM_HANDLER_PARAM_ID | KVN_UCP_AM_HANDLER_PARAM_CB, .cb = on_message};
    const int events = epoll_create1(0), sleeper = epoll_create1(0);
    struct epoll_event watch = {.events = EPOLLIN};
    kvn_ucp_context_h context;
    kvn_ucp_config *config;

    check(ucx.ucp_config_read(NULL, NULL, &config), "ucp_config_read");
    check(ucx.ucp_init_version(KVN_UCP_API_MAJOR, KVN_UCP_API_MINOR, &params, config, &context),
          "ucp_init");
    sender = make_worker(context, events);
    receiver = make_worker(context, events);
    epoll_ctl(sleeper, EPOLL_CTL_ADD, events, &watch);
    check(ucx.ucp_worker_set_am_recv_handler(receiver, &handler), "ucp_worker_set_am_recv_handler");
}

static void give(int peer, const void *from, size_t nbytes)
{
    if (write(peer, from, nbytes) != (ssize_t)nbytes)
        _exit(1);
}

static void take(int peer, void *to, size_t nbytes)
{
    if (recv(peer, to, nbytes, MSG_WAITALL) != (ssize_t)nbytes)
        _exit(1);
}

static void connect_to(int peer)
{
    kvn_ucp_ep_params params = {.field_mask = KVN_UCP_EP_PARAM_REMOTE_ADDRESS |
                                              KVN_UCP_EP_PARAM_ERR_HANDLING_MODE |
                                              KVN_UCP_EP_PARAM_ERR_HANDLER,
                                .err_mode = KVN_UCP_ERR_HANDLING_MODE_PEER,
                                .err_handler = {.cb = on_error}};
    kvn_ucp_address *ours;
    size_t nbytes;

    check(ucx.ucp_worker_get_address(receiver, &ours, &nbytes), "ucp_worker_get_address");
    give(peer, &nbytes, sizeof nbytes);
    give(peer, ours, nbytes);
    take(peer, &nbytes, sizeof nbytes);
    void *theirs = malloc(nbytes);
    take(peer, theirs, nbytes);
    params.address = theirs;
    check(ucx.ucp_ep_create(sender, &params, &ep), "ucp_ep_create");
}

static void step(void)
{
    ucx.ucp_worker_progress(receiver);
    if (sending)
        ucx.ucp_worker_progress(sender);
}

static void send_message(size_t nbytes)
{
    static char header[48], payload[ANSWER];
    const kvn_ucp_request_param param = {.op_attr_mask = KVN_UCP_OP_ATTR_CALLBACK, .send = on_sent};
    void *request = ucx.ucp_am_send_nbx(ep, 0, header, sizeof header, payload, nbytes, &param);

    if (KVN_UCS_IS_ERROR(request))
        check(KVN_UCS_POINTER_STATUS(request), "ucp_am_send_nbx");
    sending += request != NULL;
}

static void await_message(void)
{
    while (!arrived)
        step();
    arrived--;
}

/* Whatever is no TCP socket says so. */
static void delay_acknowledgements(void)
{
    static const int quick = 1, slow = 0;

    for (int file = 0; file < MOST_FILES; file++)
        if (setsockopt(file, IPPROTO_TCP, TCP_QUICKACK, &quick, sizeof quick) == 0)
            setsockopt(file, IPPROTO_TCP, TCP_QUICKACK, &slow, sizeof slow);
}

static int compare(const void *a, const void *b)
{
    const double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

int main(int argc, char **argv)
{
    const int times = argc == 3 ? atoi(argv[2]) : 0;
    double *taken = calloc((size_t)times + 1, sizeof *taken);
    int peer[2];

    if (times < 1 || !taken || socketpair(AF_UNIX, SOCK_STREAM, 0, peer) != 0) {
        fprintf(stderr, "usage: %s LIBUCP TIMES\n", argv[0]);
        return 2;
    }
    const pid_t client = getpid(), server = fork();
    const int is_serving = server == 0;
    if (server < 0) {
        perror("fork");
        return 1;
    }
    /* Who waits spins: a server whose client has gone would do so for ever. */
    if (is_serving && (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != client))
        _exit(1);
    close(peer[!is_serving]);
    open_library(argv[1]);
    open_workers();
    connect_to(peer[is_serving]);
    for (int i = -WARM_UP; i < times; i++) {
        if (i % DELAY_EVERY == 0)
            delay_acknowledgements();
        const double began = now_us();
        if (is_serving)
            await_message();
        send_message(is_serving ? ANSWER : QUESTION);
        if (!is_serving)
            await_message();
        if (i >= 0)
            taken[i] = now_us() - began;
    }
    for (const double end = now_us() + LINGER_US; is_serving && now_us() < end;)
        step();
    if (!is_serving) {
        qsort(taken, (size_t)times, sizeof *taken, compare);
        printf("%.2f\n", taken[times / 2]);
        fflush(stdout);
    }
    _exit(0); /* its worker is never taken down: nothing is left to say to anybody */
}
