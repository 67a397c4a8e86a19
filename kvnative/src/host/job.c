/* Cuts a batch into pieces, and keeps the outcomes of moved pieces. */
#include "host/job.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/report.h"
#include "core/thread.h"

void kvn_job_init(kvn_job *job, const kvn_columns *batch, kvn_move move, void *context,
                  kvn_piece_limits limits, kvn_report *report)
{
    memset(job, 0, sizeof *job);
    job->batch = *batch;
    job->move = move;
    job->context = context;
    job->limits = limits;
    job->shares = &job->whole;
    job->num_shares = 1;
    job->report = report;
    kvn_report_begin(report);
}

void kvn_job_start(kvn_job *job, uint64_t total)
{
    job->total = job->unclaimed = job->whole.unclaimed = total;
    job->num_open = job->batch.count > 0;
    job->report->status = KVN_OK;
}

/* ---- shares ---- */

void kvn_job_share(kvn_job *job, kvn_numa *numa)
{
    const uint64_t count = job->batch.count;
    const unsigned num_shares = numa->count + 1;
    const int64_t now_ns = kvn_now_ns();
    kvn_share *shares = malloc(num_shares * sizeof *shares + count);
    uint8_t *nodes;
    uint64_t run = KVN_PIECE_MIN; /* bytes since the node has changed */
    unsigned node = numa->count;

    if (!shares)
        return;
    nodes = (uint8_t *)(shares + num_shares);
    for (unsigned i = 0; i < num_shares; i++)
        shares[i] = (kvn_share){.cursor = count};
    kvn_numa_learn(numa, &job->batch, job->total / KVN_PIECE_MIN, now_ns);
    job->num_open = 0;
    for (uint64_t i = 0; i < count; i++) {
        const unsigned next =
            run < KVN_PIECE_MIN ? node : kvn_numa_of(numa, job->batch.dst[i], now_ns);
        run = next == node ? run : 0;
        node = next;
        run += job->batch.nbytes[i] < KVN_PIECE_MIN ? job->batch.nbytes[i] : KVN_PIECE_MIN;
        nodes[i] = (uint8_t)node;
        shares[node].unclaimed += job->batch.nbytes[i];
        if (shares[node].cursor == count) {
            shares[node].cursor = i;
            job->num_open++;
        }
    }
    job->shares = shares;
    job->num_shares = num_shares;
    job->nodes = nodes;
}

void kvn_job_unshare(kvn_job *job)
{
    if (job->nodes)
        free(job->shares);
}

static bool is_open(const kvn_job *job, const kvn_share *share)
{
    return share->cursor < job->batch.count;
}

static kvn_share *share_for(const kvn_job *job, unsigned node)
{
    kvn_share *own = &job->shares[node], *best = &job->shares[job->num_shares - 1]; /* of memory without a node */

    if (is_open(job, own))
        return own;
    if (is_open(job, best))
        return best;
    for (unsigned i = 0; i < job->num_shares; i++) {
        kvn_share *share = &job->shares[i];
        if (is_open(job, share) && (!is_open(job, best) || share->unclaimed > best->unclaimed))
            best = share;
    }
    return best;
}

static bool is_in(const kvn_job *job, uint64_t index, const kvn_share *share)
{
    return !job->nodes || &job->shares[job->nodes[index]] == share;
}

/* ---- pieces ---- */

/* A piece is half of a fair share of the rest: large at first, small at the end. */
static uint64_t piece_target(const kvn_job *job, unsigned threads)
{
    uint64_t target = job->unclaimed / (2 * (uint64_t)threads);

    if (target < KVN_PIECE_MIN)
        return KVN_PIECE_MIN;
    return target < job->limits.nbytes ? target : job->limits.nbytes;
}

/* Bytes to take of a descriptor that is larger than the rest of the piece: up to a page boundary of the destination, so
 * that two threads do not write one page. 0: leave the descriptor to the next piece. The first descriptor of a piece
 * has room for a page, which has at most KVN_PIECE_MIN bytes. */
static uint64_t cut(const kvn_job *job, uint64_t index, uint64_t skip, uint64_t room)
{
    uint64_t end = job->batch.dst[index] + skip + room;
    uint64_t over = end % (uint64_t)sysconf(_SC_PAGESIZE);

    return room > over ? room - over : 0;
}

static void claim(kvn_job *job, kvn_share *share, uint64_t target, kvn_piece *piece)
{
    const uint64_t *nbytes = job->batch.nbytes;
    const uint64_t count = job->batch.count;
    uint64_t index = share->cursor, skip = share->cursor_skip, taken = 0;
    uint64_t limit = count - index > job->limits.descriptors ? index + job->limits.descriptors : count;

    piece->first = index;
    piece->skip = skip;
    while (index < limit && taken < target && is_in(job, index, share)) {
        uint64_t left = nbytes[index] - skip, room = target - taken;
        if (left > room && left > KVN_PIECE_MIN) {
            uint64_t part = cut(job, index, skip, room);
            taken += part;
            skip += part;
            if (part > 0 || taken > 0)
                break;
        }
        taken += left;
        skip = 0;
        index++;
    }
    piece->last = skip > (index == piece->first ? piece->skip : 0) ? index + 1 : index;
    piece->nbytes = taken;
    piece->batch_nbytes = job->total;
    while (index < count && !is_in(job, index, share))
        index++;
    share->cursor = index;
    share->cursor_skip = skip;
    share->unclaimed -= taken;
    job->unclaimed -= taken;
    job->num_open -= index == count;
}

void kvn_job_claim(kvn_job *job, unsigned threads, unsigned node, kvn_piece *piece)
{
    claim(job, job->nodes ? share_for(job, node) : &job->whole, piece_target(job, threads), piece);
}

/* Unclaimed bytes stay unconfirmed, and so do partly claimed descriptors. */
void kvn_job_abandon(kvn_job *job)
{
    const uint64_t count = job->batch.count;
    uint64_t first = job->nodes ? 0 : job->whole.cursor;

    for (uint64_t i = 0; job->nodes && i < count; i++)
        if (i < job->shares[job->nodes[i]].cursor) {
            kvn_report_add_span(job->report, first, i);
            first = i + 1;
        }
    kvn_report_add_span(job->report, first, count);
    for (unsigned i = 0; i < job->num_shares; i++)
        job->shares[i] = (kvn_share){.cursor = count};
    job->num_open = 0;
}

void kvn_job_fail(kvn_job *job, const kvn_piece *piece, int status, kvn_fault *fault)
{
    kvn_report *report = job->report;

    if (fault->failed < piece->first || fault->failed >= piece->last)
        fault->failed = piece->first;
    kvn_report_add_span(report, fault->failed, piece->last);
    if (fault->failed < report->failed) {
        report->failed = fault->failed;
        report->status = status;
        report->code = fault->code;
        memcpy(report->message, fault->message, sizeof report->message);
    }
    kvn_job_abandon(job);
}

int kvn_job_move(kvn_job *job, const kvn_piece *piece, kvn_fault *fault)
{
    int status;

    fault->code = 0;
    fault->failed = piece->first;
    fault->bytes_done = 0;
    fault->message[0] = '\0';
    status = job->move(job->context, &job->batch, piece, fault);
    atomic_fetch_add_explicit(&job->moved, status == KVN_OK ? piece->nbytes : fault->bytes_done,
                              memory_order_relaxed);
    return status;
}

void kvn_job_finish(kvn_job *job)
{
    kvn_report *report = job->report;

    kvn_report_merge_spans(report);
    report->bytes_done = atomic_load_explicit(&job->moved, memory_order_relaxed);
    if (report->num_unconfirmed == 0)
        report->status = KVN_OK; /* no piece has failed or was left unclaimed */
    else if (report->failed == KVN_NO_DESCRIPTOR)
        kvn_report_abandoned(report, report->status, job->batch.count, job->total);
    if (job->batch.end)
        job->batch.end->call(job->batch.end, report->status);
    atomic_store_explicit(&job->finished, true, memory_order_release);
}

void kvn_job_run(kvn_job *job, uint64_t total)
{
    kvn_job_start(job, total);
    while (kvn_job_has_unclaimed(job)) {
        kvn_piece piece;
        kvn_fault fault;
        int status;

        claim(job, &job->whole, UINT64_MAX, &piece);
        status = kvn_job_move(job, &piece, &fault);
        if (status != KVN_OK)
            kvn_job_fail(job, &piece, status, &fault);
    }
    kvn_job_finish(job);
}

