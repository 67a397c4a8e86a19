/* Keeps the ring of a client's transfers, and ends transfers. */
#include "tcp/transfer.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "core/report.h"

static const char *const REASONS[KVN_TCP_NUM_REASONS] = {
    [KVN_TCP_MOVED] = "for no reason",
    [KVN_TCP_DEREGISTERED] = "has deregistered it",
    [KVN_TCP_OUTSIDE] = "has not registered all of it",
    [KVN_TCP_READ_ONLY] = "has registered it with writable=False",
    [KVN_TCP_UNMAPPED] = "has it registered, but not mapped",
    [KVN_TCP_DEVICE] = "has it on a device, which did not copy it",
};

static void take_out(kvn_request *it)
{
    kvn_tcp_client *self = it->client;

    if (it->next == it) {
        self->transfers = NULL;
    } else {
        it->previous->next = it->next;
        it->next->previous = it->previous;
        if (self->transfers == it)
            self->transfers = it->next;
    }
    it->next = it->previous = NULL;
}

void kvn_tcp_transfer_put_in(kvn_tcp_client *self, kvn_request *it)
{
    if (!self->transfers) {
        it->next = it->previous = it;
        self->transfers = it;
        return;
    }
    it->next = self->transfers; /* last, after all others */
    it->previous = self->transfers->previous;
    it->previous->next = it->next->previous = it;
}

void kvn_tcp_transfer_finish(kvn_request *it)
{
    kvn_tcp_client *self = it->client;
    kvn_report *report = it->report;

    for (uint32_t i = 0; i < self->num_asked; i++) {
        kvn_tcp_asked *asked = &self->window[(self->first + i) % KVN_TCP_WINDOW];
        if (asked->transfer == it)
            asked->transfer = NULL;
    }
    report->bytes_done = atomic_load_explicit(&it->moved, memory_order_relaxed);
    if (kvn_is_given_up(report->status) && it->confirmed.index == it->batch.count)
        report->status = KVN_OK; /* all bytes were on the wire at the abort */
    if (report->status != KVN_OK)
        kvn_report_add_span(report, it->confirmed.index, it->batch.count);
    if (kvn_is_given_up(report->status))
        kvn_report_abandoned(report, report->status, it->batch.count, it->total);
    take_out(it);
    if (it->batch.end)
        it->batch.end->call(it->batch.end, report->status);
    atomic_store(&it->finished, true);
    pthread_cond_broadcast(&it->changed);
}

void kvn_tcp_transfer_end(kvn_request *it, int status, int code, uint64_t failed)
{
    if (it->report->status != KVN_PENDING)
        return;
    it->report->status = status;
    it->report->code = code;
    it->report->failed = failed;
    it->uncut = 0;
    if (it->kind == KVN_TCP_PULL || it->in_flight == 0)
        kvn_tcp_transfer_finish(it);
}

void kvn_tcp_transfer_refuse(kvn_request *it, kvn_tcp_reason reason, const kvn_cursor *from,
                        uint64_t offset)
{
    uint64_t index = from->index;

    if (it->report->status != KVN_PENDING)
        return;
    for (offset += from->skip; index + 1 < it->batch.count && offset >= it->batch.nbytes[index]; index++)
        offset -= it->batch.nbytes[index];
    if (reason == KVN_TCP_RELEASED)
        snprintf(it->report->message, sizeof it->report->message,
                 "descriptor %" PRIu64 ": %s was released or moved by the peer, or has expired", it->batch.first + index,
                 it->known->leases);
    else
        snprintf(it->report->message, sizeof it->report->message,
                 "descriptor %" PRIu64 ": %" PRIu64 " bytes at 0x%" PRIx64 " of the peer, which %s",
                     it->batch.first + index, it->batch.nbytes[index], it->remote[index], REASONS[reason]);
    kvn_tcp_transfer_end(it, reason == KVN_TCP_DEVICE ? KVN_FAILED : KVN_UNMAPPED, 0, index);
}

void kvn_tcp_transfer_end_local(kvn_request *it, uint64_t index, bool is_device)
{
    const kvn_failure *why = is_device ? kvn_tcp_device_failure(&it->client->watched.stream) : NULL;

    if (it->report->status != KVN_PENDING)
        return;
    if (why)
        snprintf(it->report->message, sizeof it->report->message, "descriptor %" PRIu64 ": %.200s", it->batch.first + index,
                 why->message);
    else
        snprintf(it->report->message, sizeof it->report->message,
                 "descriptor %" PRIu64 ": local memory: %" PRIu64 " bytes at 0x%" PRIx64 " are not mapped%s",
                 it->batch.first + index, it->batch.nbytes[index], it->local[index],
                 it->kind == KVN_TCP_PULL ? ", or not writable" : "");
    kvn_tcp_transfer_end(it, why ? why->status : KVN_UNMAPPED, why ? why->code : EFAULT, index);
}

void kvn_tcp_transfers_fail(kvn_tcp_client *self, int code, const char *why)
{
    if (self->has_failed)
        return;
    self->has_failed = true;
    self->on_failed(self->context, code, why);
    while (self->transfers) {
        kvn_request *it = self->transfers;
        if (it->report->status == KVN_PENDING) {
            it->report->status = KVN_PEER_GONE;
            it->report->code = code;
            snprintf(it->report->message, sizeof it->report->message, "%s", why);
        }
        kvn_tcp_transfer_finish(it);
    }
    self->num_asked = 0;
    self->out_nbytes = self->out_sent = 0;
    self->out_left = 0;
}

void kvn_tcp_transfer_add_local(const kvn_request *it, kvn_cursor at, uint64_t limit, kvn_tcp_parts *parts)
{
    while (limit > 0 && parts->count < KVN_TCP_MAX_PARTS - 1) {
        uint64_t nbytes = it->batch.nbytes[at.index] - at.skip;
        nbytes = nbytes < limit ? nbytes : limit;
        kvn_tcp_parts_add_of(parts, it->device, it->local[at.index] + at.skip, nbytes);
        limit -= nbytes;
        at = (kvn_cursor){at.index + 1, 0};
    }
}
