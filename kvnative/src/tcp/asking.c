/* Sends the requests of a client, and the bytes of its pushes. */
#include "tcp/asking.h"

#include <errno.h>
#include <string.h>

#include "core/thread.h"

#define REQUEST_NBYTES (1u << 20) /* smaller requests give other transfers their turn sooner */

_Static_assert((uint64_t)KVN_TCP_WINDOW * REQUEST_NBYTES >= KVN_TCP_MOST_FLIGHT, "the window has room for a flight");

static const uint8_t ZEROS[4096];

/* ---- cutting transfers into requests ---- */

/* Returns the index of a range in the request, which is added if needed; KVN_TCP_MAX_RANGES: no room. */
static uint32_t range_in(kvn_tcp_request *request, const kvn_tcp_range *range)
{
    uint32_t count = request->head.num_ranges;

    for (uint32_t i = count; i > 0; i--) {
        const kvn_tcp_range *known = kvn_tcp_range_at(request, i - 1);
        if (known->slot == range->slot && known->generation == range->generation)
            return i - 1;
    }
    if (count == KVN_TCP_MAX_RANGES)
        return count;
    /* The runs follow the ranges. They are collected elsewhere first, so they are not in the way. */
    request->head.num_ranges++;
    *kvn_tcp_range_at(request, count) = *range;
    return count;
}

/* Returns true if the run now has the piece, which continues it or follows at its stride. */
static bool extend(kvn_tcp_run *run, uint64_t address, uint64_t nbytes, uint32_t range)
{
    if (run->range != range)
        return false;
    if (run->count == 1 && address == run->address + run->nbytes && run->nbytes + nbytes <= UINT32_MAX) {
        run->nbytes += (uint32_t)nbytes;
        return true;
    }
    if (run->nbytes != nbytes || address < run->address)
        return false;
    const uint64_t step = address - run->address;
    if (run->count == 1 ? step < nbytes || step > UINT32_MAX
                        : step != (uint64_t)run->count * run->stride)
        return false;
    if (run->count == 1)
        run->stride = (uint32_t)step;
    run->count++;
    return true;
}

/* Cuts the next request of a transfer. Returns false if the transfer has ended because no range holds the next
 * piece. */
static bool cut(kvn_tcp_client *self, kvn_request *it, kvn_tcp_asked *asked)
{
    kvn_tcp_run runs[KVN_TCP_MAX_RUNS];
    kvn_tcp_request *out = &self->out;
    uint32_t num_runs = 0;
    size_t hint = 0;
    kvn_cursor at = it->cut;
    uint64_t nbytes = 0;

    out->head.num_ranges = 0;
    for (uint32_t i = 0; i < it->known->num_leases; i++)
        range_in(out, &it->known->ranges[it->known->count + i]);
    while (nbytes < REQUEST_NBYTES && nbytes < it->uncut) {
        const uint64_t address = it->remote[at.index] + at.skip;
        uint64_t part = it->batch.nbytes[at.index] - at.skip;
        part = part < REQUEST_NBYTES - nbytes ? part : REQUEST_NBYTES - nbytes;
        if (part == 0) {
            at = (kvn_cursor){at.index + 1, 0};
            continue;
        }
        hint = kvn_intervals_find(it->known->places, it->known->count, address, part, hint);
        if (hint == KVN_NO_INTERVAL) {
            if (nbytes > 0) /* the pieces before it are moved first */
                break;
            kvn_tcp_transfer_refuse(it, KVN_TCP_OUTSIDE, &at, 0);
            return false;
        }
        const uint32_t range = range_in(out, &it->known->ranges[it->known->places[hint].index]);
        if (range == KVN_TCP_MAX_RANGES)
            break;
        if (num_runs == 0 || !extend(&runs[num_runs - 1], address, part, range)) {
            if (num_runs == KVN_TCP_MAX_RUNS)
                break;
            runs[num_runs++] = (kvn_tcp_run){address, (uint32_t)part, 1, 0, range};
        }
        nbytes += part;
        at.skip += part;
        if (at.skip == it->batch.nbytes[at.index])
            at = (kvn_cursor){at.index + 1, 0};
    }
    out->head.kind = (uint8_t)it->kind;
    out->head.num_runs = num_runs;
    out->head.nbytes = nbytes;
    out->head.id = self->next_id++;
    out->head.run = runs[0];
    memcpy(kvn_tcp_run_at(out, 1), runs + 1, (num_runs - 1) * sizeof *runs);
    *asked = (kvn_tcp_asked){.transfer = it,
                             .from = it->cut,
                             .to = at,
                             .nbytes = nbytes,
                             .id = out->head.id,
                             .kind = it->kind,
                             .has_leases = it->known->num_leases > 0};
    it->cut = at;
    it->uncut -= nbytes;
    return true;
}

/* Puts the next request into the window; transfers take turns. False: there is none, or no room. */
static bool ask_next(kvn_tcp_client *self)
{
    kvn_request *it = self->transfers;

    if (!it || self->num_asked == KVN_TCP_WINDOW || !kvn_tcp_flight_has_room(&self->flight))
        return false;
    while (it->uncut == 0) {
        it = it->next;
        if (it == self->transfers)
            return false;
    }
    self->transfers = it->next;
    kvn_tcp_asked *asked = &self->window[(self->first + self->num_asked) % KVN_TCP_WINDOW];
    if (!cut(self, it, asked))
        return true;
    self->num_asked++;
    asked->departure = kvn_tcp_flight_depart(&self->flight, asked->nbytes, kvn_now_ns());
    it->in_flight++;
    self->out_nbytes = (uint32_t)(sizeof self->out.head + kvn_tcp_table_nbytes(&self->out.head));
    self->out_sent = 0;
    self->out_left = it->kind == KVN_TCP_PUSH ? asked->nbytes : 0;
    self->out_at = asked->from;
    return true;
}

/* Returns the request that is being sent. */
static kvn_tcp_asked *newest(kvn_tcp_client *self)
{
    return &self->window[(self->first + self->num_asked - 1) % KVN_TCP_WINDOW];
}

/* Continues sending, up to the first byte of local memory that is not mapped. Returns > 0 if bytes were sent, 0 if the
 * socket is full, or -errno. */
static ssize_t send_out(kvn_tcp_client *self)
{
    uint64_t limit = self->out_left < KVN_TCP_CALL_NBYTES ? self->out_left : KVN_TCP_CALL_NBYTES;
    ssize_t sent;

    for (;;) {
        kvn_request *it = self->out_left > 0 ? newest(self)->transfer : NULL;
        kvn_tcp_parts parts;
        kvn_tcp_parts_begin(&parts);
        kvn_tcp_parts_add(&parts, (uint8_t *)&self->out + self->out_sent,
                          self->out_nbytes - self->out_sent);
        if (it && !newest(self)->sends_zeros)
            kvn_tcp_transfer_add_local(it, self->out_at, limit, &parts);
        else if (self->out_left > 0) /* the request announced this many bytes */
            for (uint64_t left = limit; left > 0 && parts.count < KVN_TCP_MAX_PARTS;) {
                const uint64_t some = left < sizeof ZEROS ? left : sizeof ZEROS;
                kvn_tcp_parts_add(&parts, ZEROS, some);
                left -= some;
            }
        sent = kvn_tcp_send(&self->watched.stream, &parts);
        if ((sent != -EFAULT && sent != -EREMOTEIO) || !it || newest(self)->sends_zeros)
            return sent;
        if (limit == 1 || sent == -EREMOTEIO) {
            newest(self)->sends_zeros = true;
            kvn_tcp_transfer_end_local(it, self->out_at.index, sent == -EREMOTEIO);
            limit = self->out_left < KVN_TCP_CALL_NBYTES ? self->out_left : KVN_TCP_CALL_NBYTES;
        } else {
            limit /= 2;
        }
    }
}

bool kvn_tcp_is_sent(const kvn_tcp_client *self)
{
    return self->out_sent == self->out_nbytes && self->out_left == 0;
}

bool kvn_tcp_send_some(kvn_tcp_client *self, uint64_t *moved)
{
    bool has_sent = false;

    self->out_is_blocked = false;
    while (!self->has_failed && *moved < KVN_TCP_TURN_NBYTES) {
        if (kvn_tcp_is_sent(self) && !ask_next(self))
            break;
        if (kvn_tcp_is_sent(self))
            continue; /* that transfer has ended */
        const ssize_t sent = send_out(self);
        if (sent < 0)
            kvn_tcp_transfers_fail(self, (int)-sent, kvn_tcp_explain((int)-sent));
        self->out_is_blocked = sent == 0;
        if (sent <= 0)
            break;
        const uint64_t head = self->out_nbytes - self->out_sent;
        const uint64_t of_head = (uint64_t)sent < head ? (uint64_t)sent : head;
        self->out_sent += (uint32_t)of_head;
        if ((uint64_t)sent > of_head) {
            const kvn_request *it = newest(self)->transfer;
            self->out_left -= (uint64_t)sent - of_head;
            if (it)
                kvn_cursor_advance(&self->out_at, &it->batch, (uint64_t)sent - of_head);
        }
        *moved += (uint64_t)sent;
        has_sent = true;
    }
    return has_sent;
}
