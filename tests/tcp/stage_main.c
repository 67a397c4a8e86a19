/* The staging slots of a connection, with a simulated device whose copies last from `submit` to `wait`. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tcp/stage.h"

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);             \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

#define PIECE (512u << 10) /* bytes of a slot */
#define SOME 1000u

static uint8_t memory[2 * PIECE], sent[2 * PIECE]; /* memory of the simulated device */
static int ends[2];
static unsigned begun, waited;
static int unread_at_wait[4];
static void (*on_begin)(void);

/* ---- the device ---- */

static void *get_context(const kvn_device *device) { return device->context; }

static int allocate_host(const kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure)
{
    (void)device, (void)failure;
    return posix_memalign(out, 4096, nbytes) ? KVN_NO_MEMORY : KVN_OK;
}

static int free_host(const kvn_device *device, void *address, kvn_failure *failure)
{
    (void)device, (void)failure;
    free(address);
    return KVN_OK;
}

static const kvn_device_ops ops = {
    .name = "own", .get_context = get_context, .allocate_host = allocate_host, .free_host = free_host};
static kvn_device device = {.ops = &ops, .context = &device, .mutex = PTHREAD_MUTEX_INITIALIZER};

static int submit(kvn_backend *self, const kvn_columns *batch, kvn_request **out, kvn_report *report)
{
    (void)self;
    report->status = KVN_OK;
    for (size_t i = 0; i < batch->count; i++)
        memcpy((void *)(uintptr_t)batch->dst[i], (void *)(uintptr_t)batch->src[i], batch->nbytes[i]);
    CHECK(begun == waited); /* one copy at a time */
    begun++;
    if (on_begin)
        on_begin();
    *out = (kvn_request *)&begun;
    return KVN_OK;
}

static int wait_for(kvn_backend *self, kvn_request *it, int64_t deadline_ns)
{
    (void)self, (void)it;
    CHECK(deadline_ns == KVN_FOREVER);
    CHECK(ioctl(ends[1], FIONREAD, &unread_at_wait[waited++]) == 0);
    return KVN_OK;
}

static void release(kvn_backend *self, kvn_request *it) { (void)self, (void)it; }

static const kvn_backend_vtable vtable = {.submit = submit, .wait = wait_for, .release = release};
static kvn_backend backend = {&vtable};
static kvn_copier copier = {.device = &device, .backends = {&backend, &backend}};

/* ---- checks ---- */

static kvn_tcp_stream begin(kvn_tcp_parts *parts)
{
    kvn_tcp_stream stream = {.fd = -1};
    kvn_failure failure;

    device.pid = getpid();
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    CHECK(kvn_tcp_stage_create(&copier, &stream.stage, &failure) == KVN_OK);
    for (size_t i = 0; i < sizeof sent; i++)
        sent[i] = (uint8_t)(i * 31 >> 3);
    kvn_tcp_parts_begin(parts);
    kvn_tcp_parts_add_of(parts, &device, (uintptr_t)memory, sizeof memory);
    return stream;
}

static void more_comes(void)
{
    if (begun == 1)
        CHECK(write(ends[0], sent + PIECE, SOME) == SOME);
}

static void reads_beside_a_copy(void)
{
    kvn_tcp_parts parts;
    kvn_tcp_stream stream = begin(&parts);

    stream.fd = ends[1];
    on_begin = more_comes;
    for (size_t at = 0; at < PIECE;) {
        const ssize_t some = write(ends[0], sent + at, PIECE - at);
        CHECK(some > 0);
        at += (size_t)some;
        CHECK(kvn_tcp_receive(&stream, &parts) == (at < PIECE ? -EAGAIN : (ssize_t)PIECE));
    }
    CHECK(begun == 1 && waited == 1);
    CHECK(unread_at_wait[0] == 0); /* the service read arriving bytes before it waited for the copy */
    CHECK(memcmp(memory, sent, PIECE) == 0);
    CHECK(kvn_tcp_has_received(&stream));
    kvn_tcp_close(&stream);
}

static void sends_beside_a_copy(void)
{
    static uint8_t got[2 * PIECE];
    kvn_tcp_parts parts;
    kvn_tcp_stream stream = begin(&parts);
    size_t at = 0;

    stream.fd = ends[0];
    memcpy(memory, sent, sizeof sent);
    CHECK(kvn_tcp_send(&stream, &parts) == 2 * PIECE - 1); /* one byte is left, because the socket was full */
    CHECK(begun == 2 && waited == 2);
    CHECK(unread_at_wait[0] == 0 && unread_at_wait[1] > 0); /* first slot was sent during the second copy */
    memset(memory, 0, sizeof memory);
    kvn_tcp_parts_begin(&parts);
    kvn_tcp_parts_add_of(&parts, &device, (uintptr_t)memory + 2 * PIECE - 1, 1);
    for (ssize_t taken = 0; at < sizeof got;) {
        const ssize_t some = read(ends[1], got + at, sizeof got - at);
        CHECK(some > 0);
        at += (size_t)some;
        if (taken == 0)
            taken = kvn_tcp_send(&stream, &parts);
        CHECK(taken == 0 || taken == 1);
    }
    CHECK(memcmp(got, sent, sizeof sent) == 0);
    CHECK(begun == 2);
    kvn_tcp_close(&stream);
}

static void peer_goes(void)
{
    if (begun == 2)
        close(ends[1]), ends[1] = dup(ends[0]);
}

static void waits_after_a_failed_send(void)
{
    kvn_tcp_parts parts;
    kvn_tcp_stream stream = begin(&parts);

    stream.fd = ends[0];
    on_begin = peer_goes;
    CHECK(kvn_tcp_send(&stream, &parts) == -EPIPE);
    CHECK(begun == 2 && waited == 2);
    kvn_tcp_close(&stream);
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";

    if (strcmp(name, "reads_beside_a_copy") == 0)
        reads_beside_a_copy();
    else if (strcmp(name, "sends_beside_a_copy") == 0)
        sends_beside_a_copy();
    else
        waits_after_a_failed_send();
    return 0;
}
