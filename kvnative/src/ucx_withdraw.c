/* Ranges come and go. A range that goes is found no more at once; then its memory is waited for. */
#include <inttypes.h>
#include <stdio.h>

#include "clock.h"
#include "ucx_serve_state.h"

/* How long sends in flight may keep a range, and what their link gets after that to be closed. */
#define PATIENCE_NS 500000000
#define LAST_PATIENCE_NS 500000000

static int refuse_foreign(kvn_failure *failure)
{
    return kvn_fail(failure, KVN_INVALID, 0,
                    "the table of ranges belongs to another process, from which this one was forked");
}

/* ---- adding ---- */

typedef struct addition {
    kvn_ucx_errand errand; /* first */
    kvn_ucx_serve *serve;
    uint64_t slot;
    kvn_ucx_range range;
    kvn_failure *failure;
    int status;
} addition;

static void add(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    addition *it = (addition *)errand;

    (void)end;
    it->status = kvn_ucx_ranges_add(&it->serve->ranges, it->slot, &it->range, it->failure);
}

int kvn_ucx_serve_add_range(kvn_ucx_serve *self, uint64_t slot, uint64_t address, uint64_t nbytes,
                            bool writable, uint64_t generation, kvn_failure *failure)
{
    addition it = {
        .errand = {.run = add},
        .serve = self,
        .slot = slot,
        .range = {.address = address,
                  .nbytes = nbytes,
                  .generation = generation,
                  .writable = writable},
        .failure = failure,
    };

    if (kvn_ucx_end_is_forked(self->end))
        return refuse_foreign(failure);
    kvn_ucx_do_and_wait(self->end, &it.errand);
    return it.status;
}

/* ---- removing; with the turn ---- */

static void close_range(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_ucx_removal *it = (kvn_ucx_removal *)errand;
    kvn_ucx_serve *self = it->serve;

    (void)end;
    it->is_held = kvn_ucx_ranges_close(&self->ranges, it->slot);
    if (!it->is_held)
        return;
    if (self->ranges.rows[it->slot].sends == 0) {
        atomic_store(&it->drained, true);
        return;
    }
    it->next = self->removals;
    self->removals = it;
}

/* Fails the links that still show the range to UCX. */
static void close_stalled(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_ucx_removal *it = (kvn_ucx_removal *)errand;
    kvn_ucx_message *message = it->serve->messages.flying;

    (void)end;
    while (message) {
        kvn_ucx_peer *peer = message->peer;
        bool shows = false;

        for (unsigned i = 0; i < message->num_held && !peer->gone; i++)
            shows |= message->held[i] == it->slot;
        /* To fail a link ends no message within the call: the list stays as it is. */
        message = message->next;
        if (!shows)
            continue;
        kvn_ucx_add(&it->serve->stalled, 1);
        kvn_ucx_link_fail(peer->link, KVN_PEER_GONE, 0,
                          "the peer did not take what it had asked for while its memory was "
                          "deregistered here");
    }
}

/* What still shows the range is on links that have failed: it is waited for no longer. */
static void leave(kvn_ucx_serve *self, uint32_t slot)
{
    for (kvn_ucx_message *message = self->messages.flying; message; message = message->next) {
        unsigned kept = 0;

        for (unsigned i = 0; i < message->num_held; i++)
            if (message->held[i] == slot)
                kvn_ucx_ranges_let_go(&self->ranges, slot);
            else
                message->held[kept++] = message->held[i];
        message->num_held = kept;
    }
}

static void forget(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_ucx_removal *it = (kvn_ucx_removal *)errand;
    kvn_ucx_removal **at = &it->serve->removals;

    (void)end;
    leave(it->serve, (uint32_t)it->slot);
    while (*at && *at != it)
        at = &(*at)->next;
    if (*at)
        *at = it->next;
    kvn_ucx_ranges_free(&it->serve->ranges, it->slot);
}

static bool is_drained(void *context)
{
    return atomic_load(&((kvn_ucx_removal *)context)->drained);
}

static void run(kvn_ucx_removal *it, void (*errand)(kvn_ucx_end *, kvn_ucx_errand *))
{
    it->errand = (kvn_ucx_errand){.run = errand};
    kvn_ucx_do_and_wait(it->serve->end, &it->errand);
}

/* Whether all of them are, by the deadline. */
static bool are_drained(kvn_ucx_removal *its, size_t count, int64_t deadline_ns)
{
    bool all = true;

    for (size_t i = 0; i < count; i++)
        all &= kvn_ucx_attend(its[i].serve->end, is_drained, &its[i], deadline_ns);
    return all;
}

int kvn_ucx_serve_remove_range(kvn_ucx_serve *const *all, size_t count, uint64_t slot,
                               kvn_failure *failure)
{
    kvn_ucx_removal its[KVN_UCX_MAX_LANES];

    if (kvn_ucx_end_is_forked(all[0]->end))
        return refuse_foreign(failure);
    for (size_t i = 0; i < count; i++) {
        its[i] = (kvn_ucx_removal){.serve = all[i], .slot = slot};
        run(&its[i], close_range);
        if (!its[i].is_held && i == 0)
            return kvn_fail(failure, KVN_INVALID, 0, "slot %" PRIu64 " holds no range", slot);
        if (!its[i].is_held)
            atomic_store(&its[i].drained, true);
    }
    if (!are_drained(its, count, kvn_now_ns() + PATIENCE_NS)) {
        for (size_t i = 0; i < count; i++)
            if (!is_drained(&its[i]))
                run(&its[i], close_stalled);
        are_drained(its, count, kvn_now_ns() + LAST_PATIENCE_NS);
    }
    for (size_t i = 0; i < count; i++)
        if (its[i].is_held)
            run(&its[i], forget);
    return KVN_OK;
}

void kvn_ucx_peer_let_go_ranges(kvn_ucx_peer *peer, kvn_ucx_message *message)
{
    kvn_ucx_serve *self = peer->serve;

    for (unsigned i = 0; i < message->num_held; i++) {
        const uint32_t slot = message->held[i];

        kvn_ucx_ranges_let_go(&self->ranges, slot);
        if (self->ranges.rows[slot].state != KVN_UCX_RANGE_CLOSING ||
            self->ranges.rows[slot].sends > 0)
            continue;
        for (kvn_ucx_removal *it = self->removals; it; it = it->next)
            if (it->slot == slot)
                atomic_store(&it->drained, true);
        kvn_ucx_notify(self->end);
    }
    message->num_held = 0;
}
