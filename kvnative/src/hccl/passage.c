#include "hccl/passage.h"

#include <inttypes.h>
#include <string.h>

#define SLICE_MS 10
/* An operation of RDMA takes less than 2 GiB. */
#define MAX_FRAGMENT (UINT64_C(1) << 30)
/* Descriptors between two looks at how far the stream is: at most twice as many are on it. A stream
 * holds a few thousand; whoever issues more blocks inside HCCL, where no abort reaches him. */
#define PACE 1024

/* ---- what to move ---- */

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t round_up(uint64_t nbytes, uint64_t alignment)
{
    return (nbytes + alignment - 1) / alignment * alignment;
}

uint32_t kvn_passage_gather(const kvn_passage *p, kvn_cursor *at, uint64_t max_nbytes,
                            uint64_t alignment, kvn_fragment *out)
{
    const kvn_columns *part = p->part;
    const uint64_t *locals = p->transfer->is_put ? part->src : part->dst;
    const uint64_t *remotes = p->transfer->is_put ? part->dst : part->src;
    const uint32_t most = kvn_communicator_max_batch(p->communicator);
    uint64_t taken = 0;
    uint32_t count = 0;
    while (at->index < part->count && count < most && taken < max_nbytes) {
        const uint64_t left = part->nbytes[at->index] - at->skip;
        const uint64_t nbytes = least(least(left, MAX_FRAGMENT), max_nbytes - taken);
        if (nbytes) /* HCCL refuses empty operations */
            out[count++] = (kvn_fragment){locals[at->index] + at->skip,
                                          remotes[at->index] + at->skip, nbytes, at->index};
        taken += round_up(nbytes, alignment);
        if (nbytes == left)
            *at = (kvn_cursor){at->index + 1, 0};
        else
            at->skip += nbytes;
    }
    return count;
}

/* ---- calls, and what they come to ---- */

/* Puts "descriptors a to b: " in front of the message. */
static void name_descriptors(kvn_passage *p, const kvn_fragment *fragments, uint32_t count)
{
    char text[sizeof p->fault->why.message];
    const uint64_t first = fragments[0].index, last = fragments[count - 1].index;
    memcpy(text, p->fault->why.message, sizeof text);
    if (first == last) {
        p->fault->failed = first;
        snprintf(p->fault->why.message, sizeof text, "descriptor %" PRIu64 ": %.200s",
                 p->part->first + first, text);
    } else {
        snprintf(p->fault->why.message, sizeof text, "descriptors %" PRIu64 " to %" PRIu64 ": %.190s",
                 p->part->first + first, p->part->first + last, text);
    }
}

int kvn_passage_issue(kvn_passage *p, kvn_one_sided *rows, const kvn_fragment *fragments,
                      uint32_t count)
{
    int status;
    if (kvn_is_halted(&p->halt))
        return KVN_CANCELLED;
    status = kvn_communicator_issue(p->communicator, p->transfer->is_put, rows, count, p->fault);
    if (status != KVN_OK)
        name_descriptors(p, fragments, count);
    return status;
}

int kvn_passage_fail(kvn_passage *p, const char *call, aclError code)
{
    return kvn_acl_fail(p->acl, call, code, &p->fault->why);
}

/* ---- waiting ---- */

int kvn_passage_synchronize(kvn_passage *p, kvn_channel_fault *fault)
{
    int status = KVN_PENDING;
    while (status == KVN_PENDING) {
        if (kvn_is_halted(&p->halt))
            return kvn_channel_synchronize(p->channel, &KVN_ALWAYS, fault);
        status = kvn_channel_poll(p->channel, SLICE_MS, fault);
    }
    return status;
}

/* Whether the stream has failed; KVN_OK while it is well, busy or not. */
static int look_at(kvn_passage *p, aclrtStream stream)
{
    const aclError code = p->acl->aclrtSynchronizeStreamWithTimeout(stream, 1);
    if (code == KVN_ACL_STREAM_TIMEOUT)
        kvn_acl_forget(p->acl);
    return code == KVN_ACL_OK || code == KVN_ACL_STREAM_TIMEOUT
               ? KVN_OK
               : kvn_passage_fail(p, "aclrtSynchronizeStreamWithTimeout", code);
}

/* A stream goes on after an operation that failed, and so its events happen all the same. Of a peer
 * that is gone every further operation would be tried, each for the seconds that HCCL tries. */
static int look_at_connection(kvn_passage *p)
{
    char text[256];
    int status;
    p->fault->why.code = kvn_communicator_async_error(p->communicator, text, sizeof text);
    if (p->fault->why.code == KVN_HCCL_SUCCESS)
        return KVN_OK;
    status = kvn_passage_synchronize(p, p->fault); /* the stream's own error says more */
    return status == KVN_OK ? KVN_FAILED : status;
}

int kvn_passage_wait(kvn_passage *p, aclrtEvent event, aclrtStream other)
{
    for (;;) {
        int status;
        const aclError code = p->acl->aclrtSynchronizeEventWithTimeout(event, SLICE_MS);
        if (code == KVN_ACL_OK)
            return look_at_connection(p);
        if (code != KVN_ACL_EVENT_TIMEOUT)
            return kvn_passage_fail(p, "aclrtSynchronizeEventWithTimeout", code);
        kvn_acl_forget(p->acl);
        if (kvn_is_halted(&p->halt))
            return KVN_CANCELLED;
        status = kvn_channel_poll(p->channel, 1, p->fault);
        if (status != KVN_OK && status != KVN_PENDING)
            return status;
        if (other && look_at(p, other) != KVN_OK)
            return kvn_acl_status(p->fault->why.code);
    }
}

/* ---- guards ---- */

int kvn_guards_read(kvn_passage *p)
{
    const kvn_transfer *transfer = p->transfer;
    const uint32_t most = kvn_communicator_max_batch(p->communicator);
    const uint64_t words = kvn_communicator_device_words(p->communicator);
    const uint64_t nbytes = transfer->num_guards * sizeof(uint64_t);
    kvn_one_sided rows[KVN_HCCL_MAX_BATCH];
    aclError code;
    for (uint32_t first = 0; first < transfer->num_guards; first += most) {
        const uint32_t left = transfer->num_guards - first, count = left < most ? left : most;
        for (uint32_t i = 0; i < count; i++)
            rows[i] = kvn_row(words + (first + i) * sizeof(uint64_t),
                              transfer->guard_addresses[first + i], sizeof(uint64_t));
        if (kvn_is_halted(&p->halt))
            return KVN_CANCELLED;
        const int status = kvn_communicator_issue(p->communicator, false, rows, count, p->fault);
        if (status != KVN_OK)
            return status;
    }
    if (nbytes == 0)
        return KVN_OK;
    code = p->acl->aclrtMemcpyAsync(kvn_communicator_host_words(p->communicator), nbytes,
                                    (void *)(uintptr_t)words, nbytes, KVN_ACL_DEVICE_TO_HOST,
                                    kvn_channel_stream(p->channel));
    return code == KVN_ACL_OK ? KVN_OK : kvn_passage_fail(p, "aclrtMemcpyAsync", code);
}

int kvn_guards_compare(kvn_passage *p)
{
    const kvn_transfer *transfer = p->transfer;
    const uint64_t *words = kvn_communicator_host_words(p->communicator);
    for (uint32_t i = 0; i < transfer->num_guards; i++)
        if (words[i] != transfer->guard_words[i]) {
            kvn_channel_fault_begin(p->fault);
            snprintf(p->fault->why.message, sizeof p->fault->why.message,
                     "the peer has deregistered the memory meanwhile (guard %" PRIu32
                     ": word at 0x%" PRIx64 " is %" PRIu64 ", expected %" PRIu64 ")",
                     i, transfer->guard_addresses[i], words[i], transfer->guard_words[i]);
            return KVN_UNMAPPED;
        }
    return KVN_OK;
}

/* ---- directly ---- */

/* HCCL would only say that something is wrong. */
static int check_local(kvn_passage *p, const kvn_fragment *fragments, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const kvn_fragment *it = &fragments[i];
        if (kvn_communicator_covers(p->communicator, it->local, it->nbytes))
            continue;
        p->is_untouched = true;
        p->fault->failed = it->index;
        snprintf(p->fault->why.message, sizeof p->fault->why.message,
                 "descriptor %" PRIu64 ": local memory [0x%" PRIx64 ", 0x%" PRIx64
                 ") is in no region that is bound to the communicator",
                 p->part->first + it->index, it->local, it->local + it->nbytes);
        return KVN_INVALID;
    }
    return KVN_OK;
}

/* Called after a batch; see PACE. */
static int keep_pace(kvn_passage *p, uint64_t *since, uint64_t *laps)
{
    aclrtEvent *events = kvn_communicator_events(p->communicator);
    const uint64_t lap = *laps;
    aclError code;
    if (*since < PACE || !events)
        return KVN_OK;
    *since = 0;
    *laps += 1;
    code = p->acl->aclrtRecordEvent(events[lap % 2], kvn_channel_stream(p->channel));
    if (code != KVN_ACL_OK)
        return kvn_passage_fail(p, "aclrtRecordEvent", code);
    return lap ? kvn_passage_wait(p, events[(lap + 1) % 2], NULL) : KVN_OK;
}

int kvn_move_direct(kvn_passage *p)
{
    kvn_fragment fragments[KVN_HCCL_MAX_BATCH];
    kvn_one_sided rows[KVN_HCCL_MAX_BATCH];
    kvn_cursor at = {0, 0};
    uint64_t since = 0, laps = 0;
    uint32_t count;
    int status;
    while ((count = kvn_passage_gather(p, &at, UINT64_MAX, 1, fragments)) > 0) {
        status = check_local(p, fragments, count);
        for (uint32_t i = 0; i < count; i++)
            rows[i] = kvn_row(fragments[i].local, fragments[i].remote, fragments[i].nbytes);
        if (status == KVN_OK)
            status = kvn_passage_issue(p, rows, fragments, count);
        since += count;
        if (status == KVN_OK && at.index < p->part->count)
            status = keep_pace(p, &since, &laps);
        if (status != KVN_OK)
            return status;
    }
    status = kvn_guards_read(p);
    return status == KVN_OK ? kvn_passage_synchronize(p, p->fault) : status;
}
