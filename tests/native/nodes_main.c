/* The pieces of a job by nodes of their destinations, and the cache of the nodes of pages. */
#include "nodes.h"

static kvn_numa *numa_of(unsigned count)
{
    const kvn_numa_node nodes[] = {node_of_one(FIRST, 0), node_of_one(SECOND, 1),
                                   node_of_one(THIRD, 2)};
    kvn_numa *numa = kvn_numa_create(nodes, count);

    CHECK(numa);
    numa->ask = tell;
    return numa;
}

static void start(kvn_job *job, kvn_numa *numa, uint64_t most_descriptors)
{
    static kvn_report report;

    kvn_job_init(job, &batch, NULL, NULL, (kvn_piece_limits){most_descriptors, MIB, true}, &report);
    kvn_job_start(job, total);
    kvn_job_share(job, numa);
}

/* ---- jobs, without threads ---- */

/* A thread takes pieces on its node first, then those without a node, then those of the node with most pieces. */
static void which_piece_is_next(void)
{
    kvn_numa *numa = numa_of(3);
    kvn_job job;
    kvn_piece piece;
    static const int expected[] = {SECOND, ABSENT, ELSEWHERE, THIRD, THIRD, FIRST, THIRD};

    begin_batch(KVN_CALLER_HURRIES);
    add(FIRST, MIN);
    add(THIRD, MIN);
    add(ABSENT, MIN);
    add(SECOND, MIN);
    add(THIRD, MIN);
    add(THIRD, 10);
    add(ELSEWHERE, MIN);
    start(&job, numa, 1);
    CHECK(job.num_open == 4);
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        CHECK(kvn_job_has_unclaimed(&job));
        kvn_job_claim(&job, 1, 1, &piece);
        CHECK(node_at(piece.first) == expected[i] && piece.last == piece.first + 1);
    }
    CHECK(!kvn_job_has_unclaimed(&job) && job.unclaimed == 0);
    kvn_job_unshare(&job);
    free(numa);
}

/* Tiny descriptors that alternate between nodes are moved in pieces of normal size. */
static void alternating_nodes_make_no_tiny_pieces(void)
{
    kvn_numa *numa = numa_of(2);
    unsigned num_pieces = 0;
    kvn_job job;
    kvn_piece piece;

    begin_batch(KVN_CALLER_HURRIES);
    for (int i = 0; i < MOST; i++)
        add(i % 2 ? FIRST : SECOND, 1000);
    start(&job, numa, MOST);
    CHECK(job.shares[0].unclaimed > total / 3 && job.shares[1].unclaimed > total / 3);
    for (; kvn_job_has_unclaimed(&job); num_pieces++)
        kvn_job_claim(&job, 1, 0, &piece);
    CHECK(num_pieces <= 2 * (total / MIN + 1));
    kvn_job_unshare(&job);
    free(numa);
}

static unsigned next_random(unsigned below)
{
    static uint64_t state = 1;

    state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
    return (unsigned)(state >> 33) % below;
}

/* Each byte is claimed once, by pieces inside of one share. Unclaimed bytes are unconfirmed if the job is aborted. */
static void every_byte_is_claimed_once(void)
{
    static const int numbers[] = {FIRST, SECOND, THIRD, ABSENT, ELSEWHERE};
    static uint64_t claimed[MOST];
    char words[80];
    kvn_numa *numa = numa_of(3);

    for (int round = 0; round < 2000; round++) {
        const unsigned count = 1 + next_random(40), give_up = next_random(60);
        kvn_job job;
        kvn_piece piece;

        begin_batch(KVN_CALLER_HURRIES);
        for (unsigned i = 0, node = 0; i < count; i++) {
            node = next_random(2) ? node : next_random(5);
            add(numbers[node], next_random(8) ? next_random(200000) : next_random(2) * 3 * MIB);
        }
        start(&job, numa, 1 + next_random(6));
        memset(claimed, 0, sizeof claimed);
        for (unsigned i = 0; i < give_up && kvn_job_has_unclaimed(&job); i++) {
            uint64_t left, skip;
            kvn_job_claim(&job, 1 + next_random(3), next_random(4), &piece);
            left = piece.nbytes;
            skip = piece.skip;
            CHECK(piece.first < piece.last && piece.last <= batch.count);
            for (uint64_t at = piece.first; at < piece.last; at++, skip = 0) {
                const uint64_t part = left < sizes[at] - skip ? left : sizes[at] - skip;
                CHECK(job.nodes[at] == job.nodes[piece.first] && claimed[at] == skip);
                claimed[at] += part;
                left -= part;
            }
            CHECK(left == 0);
        }
        job.report->status = KVN_CANCELLED;
        kvn_job_abandon(&job);
        CHECK(!kvn_job_has_unclaimed(&job));
        kvn_job_finish(&job);
        snprintf(words, sizeof words, " of %llu bytes were moved, ", (unsigned long long)total);
        CHECK(job.report->status == KVN_OK || strstr(job.report->message, words));
        for (uint64_t at = 0; at < batch.count; at++) {
            bool is_confirmed = true;
            for (uint32_t i = 0; i < job.report->num_unconfirmed; i++)
                is_confirmed &= at < job.report->unconfirmed[i].first || at >= job.report->unconfirmed[i].last;
            CHECK(sizes[at] == 0 || is_confirmed == (claimed[at] == sizes[at]));
        }
        kvn_job_unshare(&job);
    }
    free(numa);
}

/* ---- the cache of the nodes of pages ---- */

static void answers_are_kept_for_a_while(void)
{
    const int64_t second = 1000000000, now = 1000 * second;
    kvn_numa *numa = numa_of(2);

    begin_batch(KVN_CALLER_HURRIES);
    for (uint64_t i = 0; i < 200; i++) {
        add(SECOND, MIN);
        dst[i] = ON(i % 3 ? SECOND : ELSEWHERE, i * 2 * MIB);
    }
    kvn_numa_learn(numa, &batch, 150, now);
    CHECK(num_asked == 150); /* the given maximum */
    kvn_numa_learn(numa, &batch, 150, now);
    CHECK(num_asked == 200);
    num_calls = 0;
    kvn_numa_learn(numa, &batch, 150, now);
    CHECK(num_calls == 0);
    for (uint64_t i = 0; i < 200; i++)
        CHECK(kvn_numa_of(numa, dst[i] + MIB, now) == (i % 3 ? 1 : 2));
    CHECK(kvn_numa_of(numa, dst[199] + 2 * MIB, now) == 2);
    CHECK(kvn_numa_of(numa, dst[1], now + 9 * second) == 2);
    kvn_numa_learn(numa, &batch, 150, now + 9 * second);
    CHECK(kvn_numa_of(numa, dst[1], now + 9 * second) == 1);

    /* Pages in the same 2 MiB are one question. The kernel is asked again for a page that did not exist. */
    begin_batch(KVN_CALLER_HURRIES);
    add(ABSENT, MIN);
    add(ABSENT, MIN);
    dst[0] = ON(ABSENT, 0);
    dst[1] = ON(ABSENT, MIN);
    num_asked = 0;
    kvn_numa_learn(numa, &batch, 100, now);
    kvn_numa_learn(numa, &batch, 100, now);
    CHECK(num_asked == 2 && kvn_numa_of(numa, dst[0], now) == 2);

    begin_batch(KVN_CALLER_HURRIES);
    add(FIRST, MIN);
    refuses = true;
    kvn_numa_learn(numa, &batch, 100, now);
    CHECK(kvn_numa_of(numa, dst[0], now) == 2);
    num_calls = 0;
    kvn_numa_learn(numa, &batch, 100, now); /* the kernel is not asked again yet */
    CHECK(num_calls == 0);
    free(numa);
}

static void the_kernel_knows_pages(void)
{
    const size_t size = (size_t)sysconf(_SC_PAGESIZE);
    char *page = aligned_alloc(size, size);
    void *pages[] = {page, (void *)size};
    int numbers[] = {-1, 0};

    *page = 1;
    if (kvn_numa_ask_kernel(2, pages, numbers) == 0) /* a sandbox may refuse it */
        CHECK(numbers[0] >= 0 && numbers[1] < 0);
    free(page);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"which_piece_is_next", which_piece_is_next},
        {"alternating_nodes_make_no_tiny_pieces", alternating_nodes_make_no_tiny_pieces},
        {"every_byte_is_claimed_once", every_byte_is_claimed_once},
        {"answers_are_kept_for_a_while", answers_are_kept_for_a_while},
        {"the_kernel_knows_pages", the_kernel_knows_pages},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
