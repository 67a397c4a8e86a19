/* The limits of this machine: bare loops over the descriptors that kvplan gets, without executor, Python
 * and scheduling. limits.py compiles this file when a benchmark runs.
 *
 * The clock starts when all threads are awake, and stops with the last byte. Threads take the next
 * few descriptors from one counter, so that a thread without a processor does not delay the others. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef struct columns {
    const uint64_t *dst, *src, *nbytes;
    size_t count;
} columns;

enum how { MEMCPY, STREAM, MOVSB, READV };

#define RANGES 1024                /* of one process_vm_readv: IOV_MAX */
#define TAKE_NBYTES ((size_t)128 << 10) /* about the bytes that a thread takes from the counter at once */

typedef struct team {
    int threads;
    pthread_t *workers;
    pthread_barrier_t gate; /* workers sleep here between runs */
    atomic_int at_start, at_end;
    int how, closing;
    pid_t peer;
    columns work;
    size_t take; /* descriptors at once */
    atomic_size_t next, done;
    atomic_int failed; /* an errno */
} team;

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void pause_cpu(void)
{
#if defined(__x86_64__)
    _mm_pause();
#endif
}

static void stream(char *dst, const char *src, size_t nbytes)
{
    size_t i = 0;
#if defined(__AVX512F__)
    for (; (uintptr_t)dst % 64 == 0 && i + 256 <= nbytes; i += 256)
        for (size_t j = i; j < i + 256; j += 64)
            _mm512_stream_si512((void *)(dst + j), _mm512_loadu_si512(src + j));
#elif defined(__AVX2__)
    for (; (uintptr_t)dst % 32 == 0 && i + 128 <= nbytes; i += 128)
        for (size_t j = i; j < i + 128; j += 32)
            _mm256_stream_si256((void *)(dst + j), _mm256_loadu_si256((const void *)(src + j)));
#elif defined(__SSE2__)
    for (; (uintptr_t)dst % 16 == 0 && i + 64 <= nbytes; i += 64)
        for (size_t j = i; j < i + 64; j += 16)
            _mm_stream_si128((void *)(dst + j), _mm_loadu_si128((const void *)(src + j)));
#endif
    memcpy(dst + i, src + i, nbytes - i);
}

static void movsb(char *dst, const char *src, size_t nbytes)
{
#if defined(__x86_64__)
    __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(nbytes) : : "memory");
#else
    memcpy(dst, src, nbytes);
#endif
}

static void copy(int how, const columns *work, size_t first, size_t last)
{
    for (size_t i = first; i < last; i++) {
        char *dst = (char *)(uintptr_t)work->dst[i];
        const char *src = (const char *)(uintptr_t)work->src[i];
        if (how == STREAM)
            stream(dst, src, work->nbytes[i]);
        else if (how == MOVSB)
            movsb(dst, src, work->nbytes[i]);
        else
            memcpy(dst, src, work->nbytes[i]);
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* Return 0 or an errno. At most RANGES descriptors. */
static int readv_peer(pid_t peer, const columns *work, size_t first, size_t last)
{
    struct iovec here[RANGES], there[RANGES];
    ssize_t nbytes = 0;
    for (size_t i = first; i < last; i++) {
        here[i - first] = (struct iovec){(void *)(uintptr_t)work->dst[i], work->nbytes[i]};
        there[i - first] = (struct iovec){(void *)(uintptr_t)work->src[i], work->nbytes[i]};
        nbytes += work->nbytes[i];
    }
    const ssize_t moved =
        process_vm_readv(peer, here, last - first, there, last - first, 0);
    return moved == nbytes ? 0 : moved < 0 ? errno : EIO;
}

static void take_part(team *team)
{
    const size_t count = team->work.count;
    size_t first;
    atomic_fetch_add(&team->at_start, 1);
    while (atomic_load(&team->at_start) < team->threads)
        pause_cpu();
    while ((first = atomic_fetch_add(&team->next, team->take)) < count) {
        const size_t last = count - first < team->take ? count : first + team->take;
        int failed = 0;
        if (team->how == READV)
            failed = readv_peer(team->peer, &team->work, first, last);
        else
            copy(team->how, &team->work, first, last);
        if (failed)
            atomic_store(&team->failed, failed);
        atomic_fetch_add(&team->done, last - first);
    }
    atomic_fetch_add(&team->at_end, 1);
}

static void *serve(void *argument)
{
    team *team = argument;
    for (;;) {
        pthread_barrier_wait(&team->gate);
        if (team->closing)
            return NULL;
        take_part(team);
    }
}

void limit_close(team *team)
{
    team->closing = 1;
    pthread_barrier_wait(&team->gate);
    for (int i = 1; i < team->threads; i++)
        pthread_join(team->workers[i], NULL);
    pthread_barrier_destroy(&team->gate);
    free(team->workers);
    free(team);
}

/* Start the threads; the caller is thread 0. Abort if the system has no more threads. */
team *limit_open(int threads)
{
    team *self = calloc(1, sizeof *self);
    self->threads = threads;
    self->workers = calloc(threads, sizeof *self->workers);
    pthread_barrier_init(&self->gate, NULL, threads);
    for (int i = 1; i < threads; i++)
        if (pthread_create(&self->workers[i], NULL, serve, self) != 0)
            abort();
    return self;
}

static size_t descriptors_at_once(const columns *work)
{
    uint64_t total = 0;
    for (size_t i = 0; i < work->count; i++)
        total += work->nbytes[i];
    const size_t take = total ? TAKE_NBYTES * work->count / total : 1;
    return take ? take : 1;
}

/* Return nanoseconds, or minus an errno. `peer` is a process id if `how` is READV. */
int64_t limit_run(team *team, int how, int peer, const uint64_t *dst, const uint64_t *src,
                  const uint64_t *nbytes, size_t count)
{
    team->how = how;
    team->peer = peer;
    team->work = (columns){dst, src, nbytes, count};
    team->take = how == READV ? RANGES : descriptors_at_once(&team->work);
    atomic_store(&team->next, 0);
    atomic_store(&team->done, 0);
    atomic_store(&team->at_start, 0);
    atomic_store(&team->at_end, 0);
    atomic_store(&team->failed, 0);
    pthread_barrier_wait(&team->gate);
    while (atomic_load(&team->at_start) < team->threads - 1)
        sched_yield();
    const int64_t start = now_ns();
    take_part(team);
    while (atomic_load(&team->done) < count)
        pause_cpu();
    const int64_t elapsed = now_ns() - start;
    while (atomic_load(&team->at_end) < team->threads) /* before the next run is set up */
        sched_yield();
    const int failed = atomic_load(&team->failed);
    return failed ? -failed : elapsed;
}

/* Return the nanoseconds of `repeats` copies of one descriptor, one after the other, by the calling thread. */
int64_t limit_repeat(int how, uint64_t dst, uint64_t src, uint64_t nbytes, int repeats)
{
    const columns work = {&dst, &src, &nbytes, 1};
    const int64_t start = now_ns();
    for (int i = 0; i < repeats; i++)
        copy(how, &work, 0, 1);
    return now_ns() - start;
}
