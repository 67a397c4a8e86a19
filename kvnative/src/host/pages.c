/* Reads how memory is backed by pages, and makes the kernel back it by huge ones. */
#include "host/pages.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core/thread.h"

#define STEP_NBYTES ((uint64_t)512 << 10) /* populated in some 50 us */
#define NAP_NS 50000
#define MPOL_PREFERRED 1
#define MAX_NODES 1024

/* Bytes of one call, which waits until every processor has flushed its lists: some ms if they are busy. */
#define COLLAPSED_NBYTES ((uint64_t)128 << 20)
#define MAX_HUGE_FAILURES 4 /* in a row: memory is fragmented, and each failure costs a compaction */

static uint64_t page_nbytes(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

/* ---- walks ---- */

static uint64_t nbytes_of_chunk(const kvn_walk *walk, uint64_t chunk)
{
    const uint64_t left = walk->nbytes - chunk * walk->chunk_nbytes;
    return left < walk->chunk_nbytes ? left : walk->chunk_nbytes;
}

static uint64_t num_pages(uint64_t nbytes) { return (nbytes + page_nbytes() - 1) / page_nbytes(); }

static bool makes_huge(void) { return page_nbytes() == KVN_SMALL_NBYTES; }

/* A chunk smaller than a huge page cannot be collapsed. */
static bool is_done(const kvn_walk *walk, uint64_t chunk)
{
    const uint64_t nbytes = nbytes_of_chunk(walk, chunk);
    return walk->seen[chunk] == num_pages(nbytes) ||
           (walk->kind == KVN_WALK_COLLAPSE && (nbytes < KVN_HUGE_NBYTES || !makes_huge()));
}

static void count_left(kvn_walk *walk)
{
    walk->left = 0;
    for (uint64_t chunk = 0; chunk < walk->num_chunks; chunk++)
        walk->left += !is_done(walk, chunk);
}

int kvn_walk_begin(kvn_walk *walk, uint64_t nbytes, kvn_walk_kind kind, kvn_failure *failure)
{
    *walk = (kvn_walk){.nbytes = nbytes, .kind = kind};
    walk->chunk_nbytes = kind == KVN_WALK_MAP ? STEP_NBYTES : KVN_HUGE_NBYTES;
    walk->num_chunks = nbytes / walk->chunk_nbytes + (nbytes % walk->chunk_nbytes != 0);
    walk->seen = calloc(walk->num_chunks ? walk->num_chunks : 1, sizeof *walk->seen);
    if (!walk->seen)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory to look at %" PRIu64 " bytes",
                        nbytes);
    count_left(walk);
    return KVN_OK;
}

void kvn_walk_end(kvn_walk *walk)
{
    free(walk->seen);
    walk->seen = NULL;
}

void kvn_walk_again(kvn_walk *walk)
{
    walk->next = 0;
    count_left(walk);
}

static void nap(int64_t nanoseconds)
{
    const struct timespec length = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    nanosleep(&length, NULL); /* a signal may end it early, which is harmless */
}

/* Populates runs of existing pages, and leaves holes. Returns 0, or errno. */
static int map_pages(char *address, const unsigned char *there, uint64_t count)
{
    const uint64_t size = page_nbytes();
    for (uint64_t from = 0, to; from < count; from = to) {
        for (to = from + 1; to < count && (there[to] & 1) == (there[from] & 1); to++)
            ;
        if ((there[from] & 1) &&
            madvise(address + from * size, (to - from) * size, MADV_POPULATE_READ) != 0)
            return errno;
    }
    return 0;
}

/* Takes a step, of less than 1 ms if it only maps. Returns the number of done pages, or -errno. */
static int64_t look_at(kvn_walk *walk, char *address, uint64_t chunk)
{
    unsigned char there[KVN_HUGE_NBYTES / KVN_SMALL_NBYTES];
    const uint64_t nbytes = nbytes_of_chunk(walk, chunk), count = num_pages(nbytes);
    char *start = address + chunk * walk->chunk_nbytes;
    uint64_t present = 0;

    if (count > sizeof there || mincore(start, nbytes, there) != 0)
        return -EINVAL;
    for (uint64_t i = 0; i < count; i++)
        present += there[i] & 1;
    if (present == walk->seen[chunk])
        return (int64_t)present;
    if (walk->kind == KVN_WALK_COLLAPSE) {
        if (present < count)
            return 0;
        return madvise(start, nbytes, MADV_COLLAPSE) == 0 ? (int64_t)present : -errno;
    }
    const int error = map_pages(start, there, count);
    if (error)
        return -error;
    return (int64_t)present;
}

int kvn_walk_advance(kvn_walk *walk, char *address, int64_t budget_ns, uint64_t *advanced,
                     kvn_failure *failure)
{
    const int64_t end = kvn_now_ns() + budget_ns;
    int64_t now = end - budget_ns, worked = 0;

    *advanced = 0;
    while (walk->next < walk->num_chunks && now < end &&
           !atomic_load_explicit(&walk->stopped, memory_order_relaxed)) {
        const uint64_t chunk = walk->next++;
        if (is_done(walk, chunk))
            continue;
        const int64_t began = kvn_now_ns(), done = look_at(walk, address, chunk);
        if (done == -EINVAL) { /* the kernel is older, or was built without huge pages */
            walk->next = walk->num_chunks;
            walk->left = 0;
            return kvn_fail(failure, KVN_UNSUPPORTED, EINVAL,
                            "this kernel cannot prepare pages before their use");
        }
        /* Otherwise no huge page is free now, or pages were swapped out. The next pass tries again. */
        if (done > walk->seen[chunk])
            *advanced += ((uint64_t)done - walk->seen[chunk]) * page_nbytes();
        if (done >= 0)
            walk->seen[chunk] = (uint16_t)done;
        walk->left -= is_done(walk, chunk);
        now = kvn_now_ns();
        worked += now - began;
        if (worked >= NAP_NS) { /* shorter naps would take longer than requested */
            nap(worked);
            worked = 0;
        }
    }
    return KVN_OK;
}

/* ---- page use ---- */

/* From linux/fs.h since 6.7, for older headers. */
struct region {
    uint64_t start, end, categories;
};

struct scan {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

#define SCAN _IOWR('f', 16, struct scan)
#define IS_PRESENT (1u << 3)
#define IS_HUGE (1u << 6)

static int scan_mapped(uint64_t start, uint64_t end, kvn_page_use *out)
{
    struct region found[128];
    const int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    long count = 0;

    if (file < 0)
        return -1;
    while (start < end) {
        struct scan asked = {.size = sizeof asked,
                             .start = start,
                             .end = end,
                             .vec = (uint64_t)(uintptr_t)found,
                             .vec_len = sizeof found / sizeof *found,
                             .category_mask = IS_PRESENT,
                             .return_mask = IS_PRESENT | IS_HUGE};
        count = ioctl(file, SCAN, &asked);
        if (count < 0)
            break;
        for (long i = 0; i < count; i++) {
            const uint64_t nbytes = found[i].end - found[i].start;
            out->mapped += nbytes;
            out->huge += found[i].categories & IS_HUGE ? nbytes : 0;
        }
        start = asked.walk_end > start ? asked.walk_end : end;
    }
    close(file);
    return count < 0 ? -1 : 0;
}

static int not_mapped(uint64_t address, uint64_t nbytes, int error, kvn_failure *failure)
{
    return kvn_fail(failure, KVN_UNMAPPED, error,
                    "%" PRIu64 " bytes at 0x%" PRIx64 ": not all of it is mapped", nbytes,
                    address);
}

int kvn_pages_look(uint64_t address, uint64_t nbytes, kvn_page_use *out, kvn_failure *failure)
{
    unsigned char there[4096];
    const uint64_t size = page_nbytes(), start = address / size * size;
    const uint64_t end = start + num_pages(address + nbytes - start) * size;

    *out = (kvn_page_use){0};
    if (nbytes > UINT64_MAX - size - address || address > UINT64_MAX - size) /* `end` wraps */
        return not_mapped(address, nbytes, ENOMEM, failure);
    for (uint64_t at = start, next; at < end; at = next) {
        next = end - at < sizeof there * size ? end : at + sizeof there * size;
        if (mincore((void *)(uintptr_t)at, next - at, there) != 0)
            return not_mapped(address, nbytes, errno, failure);
        for (uint64_t i = 0; i < (next - at) / size; i++)
            out->present += there[i] & 1 ? size : 0;
    }
    out->has_mapped = scan_mapped(start, end, out) == 0;
    return KVN_OK;
}

/* ---- where, and how large ---- */

int kvn_pages_prefer_node(void *address, uint64_t nbytes, unsigned node, kvn_failure *failure)
{
    unsigned long mask[MAX_NODES / (8 * sizeof(unsigned long))] = {0};
    const unsigned bits = 8 * sizeof *mask;

    if (node >= MAX_NODES)
        return kvn_fail(failure, KVN_INVALID, 0, "node is %u; it must be in [0, %d)", node,
                        MAX_NODES);
    mask[node / bits] = 1ul << node % bits;
    /* The kernel uses one bit less than this count. */
    if (syscall(SYS_mbind, address, nbytes, MPOL_PREFERRED, mask, MAX_NODES + 1ul, 0) == 0)
        return KVN_OK;
    return kvn_fail(failure, errno == EINVAL ? KVN_INVALID : KVN_FAILED, errno,
                    "memory of NUMA node %u: %s", node,
                    errno == EINVAL ? "this machine has no such node" : strerror(errno));
}

static uint64_t at_most(uint64_t value, uint64_t limit) { return value < limit ? value : limit; }

void kvn_pages_make_huge(char *address, uint64_t nbytes)
{
    const uint64_t before = -(uint64_t)(uintptr_t)address % KVN_HUGE_NBYTES;
    unsigned failures = 0;

    if (nbytes < before + KVN_HUGE_NBYTES || !makes_huge())
        return;
    address += before;
    nbytes = (nbytes - before) / KVN_HUGE_NBYTES * KVN_HUGE_NBYTES;
    for (uint64_t from = 0, size; from < nbytes && failures < MAX_HUGE_FAILURES; from += size) {
        size = at_most(nbytes - from, COLLAPSED_NBYTES);
        /* The kernel makes a huge page only if one of its small pages exists; it clears the others. */
        for (uint64_t at = from; at < from + size; at += KVN_HUGE_NBYTES) {
            if (madvise(address + at, page_nbytes(), MADV_POPULATE_WRITE) != 0)
                return; /* populating the rest reports the reason */
        }
        if (madvise(address + from, size, MADV_COLLAPSE) == 0)
            failures = 0;
        else if (errno == EINVAL)
            return;
        else
            failures++;
    }
}
