/* Exchange a request of 64 bytes and an answer of 4 KiB over one TCP connection: the limit of a small pull.
 *
 *     exchange serve ADDRESS PORT     prints {"port": N}; PORT 0: any free port
 *     exchange follow ADDRESS PORT    for each line "blocking TIMES" or "spinning TIMES" (how both ends wait),
 *                                     prints the median of so many exchanges
 *
 * Each end has one thread, which neither looks up, checks nor copies anything. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { REQUEST = 64, ANSWER = 4096, MAX_TIMES = 100000 };

static char request[REQUEST], answer[ANSWER]; /* request[0]: 1: the server polls for the next request */

static _Noreturn void fail(const char *what)
{
    fprintf(stderr, "exchange: %s: %s\n", what, strerror(errno ? errno : ECONNRESET));
    exit(1);
}

static void give(int peer, const char *from, size_t nbytes)
{
    if (send(peer, from, nbytes, 0) != (ssize_t)nbytes) /* blocks until the kernel has taken all bytes */
        fail("send");
}

/* Return false if the peer has closed the connection. */
static int take(int peer, char *into, size_t nbytes, int spins)
{
    for (size_t got = 0; got < nbytes;) {
        const ssize_t some = recv(peer, into + got, nbytes - got, spins ? MSG_DONTWAIT : 0);
        if (some == 0)
            return 0;
        if (some < 0 && errno != EAGAIN)
            fail("recv");
        got += some > 0 ? (size_t)some : 0;
    }
    return 1;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(int server, int spins, int times)
{
    static double seconds[MAX_TIMES];

    for (int i = 0; i < times; i++) {
        struct timespec start, end;
        request[0] = spins && i + 1 < times; /* after the last one the server sleeps until the next line */
        clock_gettime(CLOCK_MONOTONIC, &start);
        give(server, request, REQUEST);
        if (!take(server, answer, ANSWER, spins))
            fail("recv");
        clock_gettime(CLOCK_MONOTONIC, &end);
        seconds[i] = end.tv_sec - start.tv_sec + 1e-9 * (end.tv_nsec - start.tv_nsec);
    }
    qsort(seconds, times, sizeof *seconds, by_size);
    return seconds[times / 2];
}

static void follow(int server)
{
    char word[9];
    int times;

    while (scanf("%8s %d", word, &times) == 2 && times > 0 && times <= MAX_TIMES) {
        printf("{\"seconds\": %.9f}\n", median_of(server, strcmp(word, "spinning") == 0, times));
        fflush(stdout);
    }
}

static void serve(struct sockaddr_in here)
{
    const int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    socklen_t size = sizeof here;

    if (bind(listener, (void *)&here, size) != 0 || listen(listener, 1) != 0 ||
        getsockname(listener, (void *)&here, &size) != 0)
        fail("listen");
    printf("{\"port\": %d}\n", ntohs(here.sin_port));
    fflush(stdout);
    const int client = accept(listener, NULL, NULL);
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    while (take(client, request, REQUEST, request[0]))
        give(client, answer, ANSWER);
}

int main(int argc, char **argv)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    const int on = 1;

    if (argc != 4 || inet_pton(AF_INET, argv[2], &address.sin_addr) != 1) {
        fputs("usage: exchange serve|follow ADDRESS PORT\n", stderr);
        return 2;
    }
    address.sin_port = htons(atoi(argv[3]));
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (strcmp(argv[1], "serve") == 0) {
        serve(address);
        return 0;
    }
    const int server = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(server, (void *)&address, sizeof address) != 0)
        fail("connect");
    follow(server);
    return 0;
}
