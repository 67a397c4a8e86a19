/* Move the bytes of a paged transfer over one TCP connection, with writev and readv: the limit of tcp.
 *
 *     sockets serve ADDRESS PORT               prints {"port": N}; PORT 0: any free port
 *     sockets pull|push ADDRESS PORT BLOCKS    prints the median of 7 transfers
 *     sockets follow ADDRESS PORT              a transfer for each line "pull BLOCKS" or "push BLOCKS"
 *
 * BLOCKS random blocks of 32 KiB of each of 64 tensors go from random places of one process to
 * random places of the other: pools of 1,536 blocks a tensor, every page touched before. Requests,
 * frames and wake-ups are left out: both sides know the work before the clock starts. The clock stops
 * with the last byte (pull), or with the answer to that byte (push). Before the first transfer of a
 * direction, each side tries how many blocks to give to one call; the fastest number counts. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { TENSORS = 64, POOL = 1536, BLOCK = 32 << 10, ROUNDS = 7 };
enum { TRIALS = 3, TRIAL_BLOCKS = 256 };
enum direction { PULL, PUSH };
enum seed { SERVER = 5, CLIENT = 7 };

static const uint32_t COUNTS[] = {4, 8, 16, 64}; /* blocks a call to try */
enum { NUM_COUNTS = sizeof COUNTS / sizeof *COUNTS };

typedef struct order { /* the request of the client before a transfer */
    uint32_t direction, blocks, at_once; /* blocks of each call of the server */
} order;

typedef struct choice {
    uint32_t sender, receiver; /* blocks a call; 0: not tried out yet */
} choice;

static char *pool;
static struct iovec work[TENSORS * POOL];

static _Noreturn void fail(const char *what)
{
    fprintf(stderr, "sockets: %s: %s\n", what, strerror(errno ? errno : ECONNRESET));
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void make_pool(void)
{
    const size_t nbytes = (size_t)TENSORS * POOL * BLOCK;
    pool = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pool == MAP_FAILED)
        fail("memory for the pool");
    memset(pool, 1, nbytes);
}

static void shuffle(uint32_t *items, uint32_t count, uint32_t seed)
{
    for (uint32_t i = count - 1; i > 0; i--) {
        seed = seed * 1664525u + 1013904223u;
        const uint32_t j = (uint64_t)seed * (i + 1) >> 32, item = items[i];
        items[i] = items[j];
        items[j] = item;
    }
}

/* Write `work`: random distinct blocks, equal for all tensors, different on each side. */
static size_t lay_out(uint32_t blocks, enum seed side)
{
    uint32_t ids[POOL];
    for (uint32_t i = 0; i < POOL; i++)
        ids[i] = i;
    shuffle(ids, POOL, side);
    for (size_t i = 0; i < (size_t)TENSORS * blocks; i++)
        work[i] = (struct iovec){pool + (i / blocks * POOL + ids[i % blocks]) * BLOCK, BLOCK};
    return (size_t)TENSORS * blocks;
}

/* Move all of `work`, whose entries are changed. */
static void move(int peer, ssize_t call(int, const struct iovec *, int), size_t count,
                 size_t at_once)
{
    for (size_t i = 0; i < count;) {
        ssize_t moved = call(peer, work + i, count - i < at_once ? count - i : at_once);
        if (moved <= 0)
            fail(call == readv ? "readv" : "writev");
        for (; i < count && (size_t)moved >= work[i].iov_len; i++)
            moved -= work[i].iov_len;
        if (moved) {
            work[i].iov_base = (char *)work[i].iov_base + moved;
            work[i].iov_len -= moved;
        }
    }
}

static void say(int peer, char byte)
{
    if (write(peer, &byte, 1) != 1)
        fail("write");
}

static void hear(int peer)
{
    char byte;
    if (read(peer, &byte, 1) != 1)
        fail("read");
}

static struct sockaddr_in address_of(const char *address, const char *port)
{
    struct sockaddr_in it = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
    if (inet_pton(AF_INET, address, &it.sin_addr) != 1) {
        fprintf(stderr, "sockets: address=%s: expected an IPv4 address\n", address);
        exit(2);
    }
    return it;
}

static void without_delay(int peer)
{
    const int on = 1;
    if (setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0)
        fail("TCP_NODELAY");
}

static void serve_client(int client)
{
    order next;
    while (recv(client, &next, sizeof next, MSG_WAITALL) == sizeof next) {
        const size_t count = lay_out(next.blocks, SERVER);
        say(client, 'r');
        if (next.direction == PULL) {
            hear(client);
            move(client, writev, count, next.at_once);
        } else {
            move(client, readv, count, next.at_once);
            say(client, 'a');
        }
    }
}

static _Noreturn void serve(struct sockaddr_in here)
{
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    socklen_t size = sizeof here;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    make_pool();
    if (bind(listener, (void *)&here, size) != 0 || listen(listener, 1) != 0 ||
        getsockname(listener, (void *)&here, &size) != 0)
        fail("listen");
    printf("{\"port\": %d}\n", ntohs(here.sin_port));
    fflush(stdout);
    for (;;) {
        const int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (client < 0)
            fail("accept4");
        without_delay(client);
        serve_client(client);
        close(client);
    }
}

static int connected(struct sockaddr_in server)
{
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (void *)&server, sizeof server) != 0)
        fail("connect");
    without_delay(fd);
    return fd;
}

static double transfer(int server, enum direction direction, uint32_t blocks, choice by)
{
    const order next = {direction, blocks, direction == PULL ? by.sender : by.receiver};
    const size_t count = lay_out(blocks, CLIENT);
    if (write(server, &next, sizeof next) != sizeof next)
        fail("write");
    hear(server);
    const double start = now();
    if (direction == PULL) {
        say(server, 'g');
        move(server, readv, count, by.receiver);
    } else {
        move(server, writev, count, by.sender);
        hear(server);
    }
    return now() - start;
}

/* Push blocks of distinct words, clear them here, pull them back, and compare. */
static void check(int server, uint32_t blocks)
{
    const choice any = {8, 8};
    const size_t words = BLOCK / sizeof(uint64_t);
    const size_t count = lay_out(blocks, CLIENT);
    for (size_t i = 0; i < count * words; i++)
        ((uint64_t *)work[i / words].iov_base)[i % words] = i;
    transfer(server, PUSH, blocks, any);
    lay_out(blocks, CLIENT);
    for (size_t i = 0; i < count; i++)
        memset(work[i].iov_base, 0xff, BLOCK);
    transfer(server, PULL, blocks, any);
    lay_out(blocks, CLIENT);
    for (size_t i = 0; i < count * words; i++)
        if (((uint64_t *)work[i / words].iov_base)[i % words] != i) {
            fprintf(stderr, "sockets: block %zu of %zu came back changed\n", i / words, count);
            exit(1);
        }
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(int server, enum direction direction, uint32_t blocks, choice by,
                        int rounds)
{
    double seconds[ROUNDS];
    for (int i = 0; i < rounds; i++)
        seconds[i] = transfer(server, direction, blocks, by);
    qsort(seconds, rounds, sizeof *seconds, by_size);
    return seconds[rounds / 2];
}

static choice try_out(int server, enum direction direction)
{
    choice best = {0, 0};
    double least = 0;
    for (int i = 0; i < NUM_COUNTS * NUM_COUNTS; i++) {
        const choice by = {COUNTS[i / NUM_COUNTS], COUNTS[i % NUM_COUNTS]};
        const double seconds = median_of(server, direction, TRIAL_BLOCKS, by, TRIALS);
        if (!best.sender || seconds < least) {
            least = seconds;
            best = by;
        }
    }
    return best;
}

/* Print the median of some transfers. Checks and trials come first, once for each size and direction. */
static void answer(int server, const char *word, uint32_t blocks, int rounds)
{
    static choice chosen[2];
    static char checked[POOL + 1];
    const enum direction direction = strcmp(word, "push") == 0 ? PUSH : PULL;
    choice *by = &chosen[direction];
    if (blocks < 1 || blocks > POOL) {
        fprintf(stderr, "sockets: blocks=%u: expected 1 to %u\n", blocks, POOL);
        exit(2);
    }
    if (!checked[blocks])
        check(server, blocks);
    checked[blocks] = 1;
    if (!by->sender)
        *by = try_out(server, direction);
    const double seconds = median_of(server, direction, blocks, *by, rounds);
    printf("{\"seconds\": %.9f, \"GB/s\": %.3f, \"settings\": \"%u blocks a writev, %u a readv\"}\n",
           seconds, 1e-9 * TENSORS * blocks * BLOCK / seconds, by->sender, by->receiver);
    fflush(stdout);
}

static void follow(int server)
{
    char word[5];
    unsigned blocks;
    while (scanf("%4s %u", word, &blocks) == 2)
        answer(server, word, blocks, 1);
}

int main(int argc, char **argv)
{
    const char *what = argc > 3 ? argv[1] : "";
    const int once = argc == 5 && (strcmp(what, "pull") == 0 || strcmp(what, "push") == 0);
    if (!once && (argc != 4 || (strcmp(what, "serve") != 0 && strcmp(what, "follow") != 0))) {
        fputs("usage: sockets serve|follow ADDRESS PORT, or pull|push ADDRESS PORT BLOCKS\n", stderr);
        return 2;
    }
    const struct sockaddr_in address = address_of(argv[2], argv[3]);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* frees 3 GiB if the benchmark is killed */
    make_pool();
    if (strcmp(what, "serve") == 0)
        serve(address);
    if (once)
        answer(connected(address), what, atoi(argv[4]), ROUNDS);
    else
        follow(connected(address));
    return 0;
}
