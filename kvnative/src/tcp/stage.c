/* Copies between a device and the slots of a connection, while its socket is busy. */
#include "tcp/stage.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PIECE_NBYTES (512u << 10) /* of device memory; a request, and so a call, moves two of them */
#define OWN_NBYTES (32u << 10)    /* of host memory around it: a request's head and table, or answers */
#define FRONT 16u                 /* alignment of device bytes, so that a kernel can copy words */
#define SLOT_NBYTES (PIECE_NBYTES + OWN_NBYTES + FRONT)
#define SMALL_NBYTES (64u << 10) /* a single part up to this size is copied at once: waking a thread takes as long */

/* Bytes in transit. The first `nbytes` are a piece: items in order, with those on the device side by side. */
typedef struct slot {
    uint8_t *bytes;
    uint32_t at, end;
    uint64_t nbytes;
    size_t count, first, last; /* items on the device: [first, last) */
    uint64_t offsets[KVN_TCP_MAX_PARTS]; /* relative to `at` */
    uint64_t host[KVN_TCP_MAX_PARTS], memory[KVN_TCP_MAX_PARTS], sizes[KVN_TCP_MAX_PARTS];
} slot;

typedef struct stage {
    kvn_tcp_stage base;
    kvn_copier *copier;
    uint8_t *pinned;
    slot out[2], in[2];
    unsigned first_out, first_in; /* the slot whose bytes come first */
    kvn_staged_copy copy;         /* in flight */
    kvn_failure failure;          /* the latest one */
} stage;

/* ---- pieces of parts ---- */

/* A position: byte `skip` of a part. */
typedef struct place {
    unsigned index;
    uint64_t skip;
} place;

static bool has_bytes(const slot *it) { return it->at < it->end; }

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static bool is_on_device(const kvn_tcp_parts *parts, unsigned index)
{
    return index >= parts->first && index < parts->last;
}

/* Places the next piece: its first device byte is aligned, or it begins with the bytes that the slot has. */
static void align(slot *it, const kvn_tcp_parts *parts, place from)
{
    uint64_t own = 0;

    if (it->end - it->at > 0) {
        memmove(it->bytes, it->bytes + it->at, it->end - it->at);
        it->end -= it->at;
        it->at = 0;
        return;
    }
    for (; from.index < parts->first; from = (place){from.index + 1, 0})
        own += parts->items[from.index].iov_len - from.skip;
    it->at = it->end = (uint32_t)(-own % FRONT);
}

/* Assigns the next bytes of the parts, at most `limit`, to the slot. */
static void lay_out(slot *it, const kvn_tcp_parts *parts, place *from, uint64_t limit)
{
    uint64_t own = OWN_NBYTES, device = PIECE_NBYTES;

    it->nbytes = 0;
    it->count = it->first = it->last = 0;
    while (from->index < parts->count && it->nbytes < limit) {
        const struct iovec *part = &parts->items[from->index];
        const bool is_device = is_on_device(parts, from->index);
        uint64_t *room = is_device ? &device : &own;
        const uint64_t some = least(least(part->iov_len - from->skip, limit - it->nbytes), *room);
        if (some == 0)
            return;
        if (is_device && it->first == it->last)
            it->first = it->count;
        it->offsets[it->count] = it->nbytes;
        it->host[it->count] = (uintptr_t)(it->bytes + it->at + it->nbytes);
        it->memory[it->count] = (uintptr_t)part->iov_base + from->skip;
        it->sizes[it->count++] = some;
        if (is_device)
            it->last = it->count;
        *room -= some;
        it->nbytes += some;
        from->skip += some;
        if (from->skip == part->iov_len)
            *from = (place){from->index + 1, 0};
    }
}

/* ---- copies ---- */

static void copy_own(const slot *it, bool is_send)
{
    for (size_t i = 0; i < it->count; i++) {
        void *host = (void *)(uintptr_t)it->host[i], *memory = (void *)(uintptr_t)it->memory[i];
        if (i < it->first || i >= it->last)
            memcpy(is_send ? host : memory, is_send ? memory : host, it->sizes[i]);
    }
}

/* Begins to copy the piece of a slot. Call `finish` afterwards in any case: it reports failures. */
static void start(stage *self, const slot *it, bool is_send)
{
    const kvn_direction direction = is_send ? KVN_DEVICE_TO_HOST : KVN_HOST_TO_DEVICE;
    const uint64_t *host = it->host + it->first, *memory = it->memory + it->first;
    const kvn_columns columns = {.dst = is_send ? host : memory,
                                 .src = is_send ? memory : host,
                                 .nbytes = it->sizes + it->first,
                                 .count = it->last - it->first};
    const bool is_small = columns.count == 1 && *columns.nbytes <= SMALL_NBYTES;
    kvn_report *report = &self->copy.report;

    copy_own(it, is_send);
    kvn_copier_start(self->copier, direction, is_small ? &(kvn_columns){.count = 0} : &columns, &self->copy);
    if (is_small)
        report->status = kvn_device_copy(self->copier->device, direction, *columns.dst, *columns.src, *columns.nbytes,
                                         &self->failure);
    if (is_small && report->status != KVN_OK) {
        report->failed = 0;
        report->code = self->failure.code;
        memcpy(report->message, self->failure.message, sizeof report->message);
    }
}

/* Waits for the copy. Failures do not name the descriptor, whose number counts within the piece. */
static int finish(stage *self) { return kvn_staged_copy_wait(&self->copy, KVN_FOREVER, &self->failure); }

/* Returns the bytes before the failed item of a piece; before the middle one if the failed one is unknown. */
static uint64_t sound(const stage *self, const slot *it)
{
    const size_t count = it->last - it->first, failed = (size_t)self->copy.report.failed;

    return it->offsets[it->first + (failed < count ? failed : count / 2)];
}

/* Copies now, and after a failure again with fewer bytes. Returns the number of bytes, or -EREMOTEIO: the first part
 * fails. */
static ssize_t copy_now(stage *self, slot *it, const kvn_tcp_parts *parts, place *from, uint64_t limit,
                        bool is_send)
{
    while (limit > 0) {
        place at = *from;
        lay_out(it, parts, &at, limit);
        start(self, it, is_send);
        if (finish(self) == KVN_OK) {
            *from = at;
            return (ssize_t)it->nbytes;
        }
        limit = sound(self, it);
    }
    return -EREMOTEIO;
}

/* ---- sending ---- */

static bool has_unsent(const kvn_tcp_stage *base)
{
    const stage *self = (const stage *)base;

    return has_bytes(&self->out[0]) || has_bytes(&self->out[1]);
}

/* Returns 1 if the socket has taken all of the slot, 0 if the socket is full, or -errno. */
static ssize_t flush(kvn_tcp_stream *stream, slot *it)
{
    while (has_bytes(it)) {
        kvn_tcp_parts rest;
        kvn_tcp_parts_begin(&rest);
        kvn_tcp_parts_add(&rest, it->bytes + it->at, it->end - it->at);
        const ssize_t sent = kvn_tcp_send_host(stream, &rest);
        if (sent <= 0)
            return sent;
        it->at += (uint32_t)sent;
    }
    return 1;
}

/* If the socket has not taken all of a slot, the result is one byte less, as in send_sealed of stream.c. The caller
 * passes that byte again: it is ignored then, and the rest of the slot is sent. */
static ssize_t send_staged(kvn_tcp_stream *stream, kvn_tcp_parts *parts)
{
    stage *self = (stage *)stream->stage;
    slot *it = &self->out[self->first_out], *next = &self->out[!self->first_out];
    place at = {0, 0}, ahead;
    ssize_t flushed;
    bool has_next;

    if (has_unsent(&self->base)) {
        flushed = flush(stream, it);
        return flushed == 1 ? flush(stream, next) : flushed;
    }
    align(it, parts, at);
    ssize_t total = copy_now(self, it, parts, &at, UINT64_MAX, true);
    if (total < 0)
        return total;
    it->end = it->at + (uint32_t)it->nbytes;
    do {
        ahead = at;
        has_next = at.index < parts->count;
        if (has_next) {
            align(next, parts, ahead);
            lay_out(next, parts, &ahead, UINT64_MAX);
            start(self, next, true);
        }
        flushed = flush(stream, it);
        has_next = has_next && finish(self) == KVN_OK; /* a failure is reported by the next call */
        if (has_next) {
            next->end = next->at + (uint32_t)next->nbytes;
            total += (ssize_t)next->nbytes;
            at = ahead;
        }
        if (flushed == 1) {
            self->first_out = !self->first_out;
            it = &self->out[self->first_out];
            next = &self->out[!self->first_out];
        }
    } while (flushed == 1 && has_next);
    return flushed < 0 ? flushed : total - (flushed == 0);
}

/* ---- receiving ---- */

/* Returns 1 if the slot has all of its piece, else the last result of kvn_tcp_receive_host. */
static ssize_t fill(kvn_tcp_stream *stream, slot *it)
{
    while (it->end - it->at < it->nbytes) {
        kvn_tcp_parts rest;
        kvn_tcp_parts_begin(&rest);
        kvn_tcp_parts_add(&rest, it->bytes + it->end, it->nbytes - (it->end - it->at));
        const ssize_t got = kvn_tcp_receive_host(stream, &rest);
        if (got <= 0)
            return got;
        it->end += (uint32_t)got;
    }
    return 1;
}

/* Returns the bytes of a piece before the first on the device. */
static uint64_t own_before(const slot *it) { return it->first == it->last ? it->nbytes : it->offsets[it->first]; }

/* Delivers received bytes of the first slot, at most `limit`. */
static ssize_t hand_on(stage *self, kvn_tcp_parts *parts, uint64_t limit)
{
    slot *it = &self->in[self->first_in];
    place at = {0, 0};
    ssize_t some;

    limit = least(limit, it->end - it->at);
    if (parts->device)
        some = copy_now(self, it, parts, &at, limit, false);
    else /* the caller's memory, which may not be mapped */
        some = kvn_tcp_copy_host(parts, it->bytes + it->at, limit);
    it->at += some > 0 ? (uint32_t)some : 0;
    if (!has_bytes(it))
        self->first_in = !self->first_in;
    return some;
}

static ssize_t receive_staged(kvn_tcp_stream *stream, kvn_tcp_parts *parts)
{
    stage *self = (stage *)stream->stage;
    slot *it = &self->in[self->first_in], *copied = NULL;
    place at = {0, 0};
    ssize_t total = 0, got;

    if (!parts->device || has_bytes(&self->in[!self->first_in]))
        return hand_on(self, parts, UINT64_MAX);
    for (;;) {
        align(it, parts, at);
        lay_out(it, parts, &at, UINT64_MAX);
        if (it->end - it->at > it->nbytes && it->nbytes > 0) /* its rest comes before the other slot */
            return hand_on(self, parts, UINT64_MAX);
        got = it->nbytes > 0 ? fill(stream, it) : 0;
        if (copied && finish(self) != KVN_OK) {
            self->first_in = !self->first_in;
            return total > 0 ? total : hand_on(self, parts, UINT64_MAX);
        }
        if (copied) {
            total += (ssize_t)copied->nbytes;
            copied->at += (uint32_t)copied->nbytes;
        }
        if (got != 1)
            break;
        start(self, it, false);
        copied = it;
        self->first_in = !self->first_in;
        it = &self->in[self->first_in];
    }
    /* An answer may come without the expected bytes, so it is delivered before they arrive. */
    if (total == 0 && has_bytes(it) && own_before(it) > 0)
        return hand_on(self, parts, own_before(it));
    return total > 0 ? total : got;
}

/* ---- the stage ---- */

static bool has_received(const kvn_tcp_stage *base)
{
    const stage *self = (const stage *)base;

    return has_bytes(&self->in[0]) || has_bytes(&self->in[1]);
}

static const kvn_failure *latest_failure(const kvn_tcp_stage *base) { return &((const stage *)base)->failure; }

static void destroy(kvn_tcp_stage *base)
{
    stage *self = (stage *)base;
    kvn_failure ignored;

    kvn_device_free_pinned(self->copier->device, self->pinned, &ignored);
    free(self);
}

static const kvn_tcp_stage_calls calls = {.send = send_staged,
                                          .receive = receive_staged,
                                          .has_unsent = has_unsent,
                                          .has_received = has_received,
                                          .failure = latest_failure,
                                          .destroy = destroy};

int kvn_tcp_stage_create(kvn_copier *copier, kvn_tcp_stage **out, kvn_failure *failure)
{
    stage *self = calloc(1, sizeof *self);
    void *pinned = NULL;

    if (!self)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for the slots of a connection");
    if (kvn_device_allocate_pinned(copier->device, 4 * SLOT_NBYTES, &pinned, failure) != KVN_OK) {
        free(self);
        return failure->status;
    }
    self->base.calls = &calls;
    self->copier = copier;
    self->pinned = pinned;
    for (unsigned i = 0; i < 2; i++) {
        self->out[i].bytes = self->pinned + 2 * i * SLOT_NBYTES;
        self->in[i].bytes = self->out[i].bytes + SLOT_NBYTES;
    }
    *out = &self->base;
    return KVN_OK;
}
