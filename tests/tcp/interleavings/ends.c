/* Begins and finishes scenarios, and checks the outcomes of transfers. */
#include "ends.h"

#include "device/copy.h"

/* ---- device memory, which no scenario uses ---- */

int kvn_channel_begin(kvn_device *device, kvn_channel **out, kvn_failure *failure)
{
    (void)device, (void)out;
    return kvn_fail(failure, KVN_UNSUPPORTED, 0, "no device");
}

void kvn_channel_destroy(kvn_channel *channel) { (void)channel; }

kvn_backend *kvn_device_copy_create(kvn_device *device, kvn_channel **channels, unsigned num_channels,
                                    kvn_direction direction)
{
    (void)device, (void)channels, (void)num_channels, (void)direction;
    return NULL;
}

end ends[2];
unsigned num_ends;
bool encrypts;
transfer transfers[MAX_TRANSFERS];

/* ---- begin and end of a scenario ---- */

static void begin_transfer(unsigned index, bool is_push)
{
    transfer *it = &transfers[index];
    const kvn_tcp_known known = {calloc(1, sizeof(kvn_interval)), calloc(1, sizeof(kvn_tcp_range)), 1};
    const kvn_tcp_row row = {(uintptr_t)it->far, sizeof it->far, GENERATION, true, false, 0};
    kvn_failure failure;

    memset(it, 0, sizeof *it);
    it->is_push = is_push;
    for (unsigned i = 0; i < NUM_PIECES; i++) {
        uint8_t *near = it->near + i * PIECE, *far = it->far + i * STEP;
        memset(is_push ? near : far, (int)(16 * (index + 1) + i), PIECE);
        it->from[i] = (uintptr_t)(is_push ? near : far);
        it->to[i] = (uintptr_t)(is_push ? far : near);
        it->nbytes[i] = PIECE;
    }
    kvn_tcp_table *table = kvn_tcp_service_table(ends[num_ends - 1].service);
    MODEL_CHECK(kvn_tcp_table_add(table, index, &row, &failure) == KVN_OK);
    known.places[0] = (kvn_interval){(uintptr_t)it->far, (uintptr_t)it->far + sizeof it->far - 1, 0, 0};
    kvn_intervals_sort(known.places, 1);
    known.ranges[0] = (kvn_tcp_range){index, 0, GENERATION};
    it->backend = kvn_tcp_backend_create(kvn_tcp_link_client(ends[0].link, 0),
                                         is_push ? KVN_PEER_PUT : KVN_PEER_GET, NULL, &known);
    system_watch(it->near, sizeof it->near);
    system_watch(it->far, sizeof it->far);
}

static void begin_link(unsigned count, unsigned capacity)
{
    static const uint8_t secret[KVN_TCP_SECRET_NBYTES];
    int asking[2], back[2];
    kvn_failure failure;

    num_ends = count;
    memset(ends, 0, sizeof ends);
    system_socketpair(asking, capacity);
    if (count == 2)
        system_socketpair(back, capacity);
    for (unsigned i = 0; i < count; i++) {
        end *it = &ends[i];
        const int *client = i == 0 ? &asking[0] : &back[0];
        const int *server = i == count - 1 ? &asking[1] : &back[1];
        MODEL_CHECK(kvn_tcp_service_create(1, MAX_TRANSFERS, NULL, "model", &it->service, &failure) == KVN_OK);
        MODEL_CHECK(kvn_tcp_link_create(it->service, client, server, 1, encrypts ? secret : NULL, i == 0,
                                        &it->link, &failure) == KVN_OK);
    }
}

void begin(unsigned count, unsigned capacity, unsigned num_transfers, bool is_push)
{
    begin_link(count, capacity);
    for (unsigned i = 0; i < num_transfers; i++)
        begin_transfer(i, is_push);
    model_settle();
}

void finish(unsigned num_transfers)
{
    model_explore(false);
    for (unsigned i = 0; i < num_ends; i++)
        kvn_tcp_link_close(ends[i].link, "it ends");
    for (unsigned i = 0; i < num_ends; i++)
        if (ends[i].service)
            kvn_tcp_service_destroy(ends[i].service);
    for (unsigned i = 0; i < num_ends; i++)
        kvn_tcp_link_destroy(ends[i].link);
    for (unsigned i = 0; i < num_transfers; i++)
        transfers[i].backend->vtable->destroy(transfers[i].backend);
}

/* ---- transfers ---- */

static void note_end(kvn_batch_end *end, int status)
{
    transfer *it = (transfer *)end;

    it->num_ends++;
    it->end_status = status;
}

void submit(transfer *it, bool waits)
{
    it->end.call = note_end;
    const kvn_columns batch = {.dst = it->to, .src = it->from, .nbytes = it->nbytes, .count = NUM_PIECES,
                               .end = &it->end,
                               .caller = waits ? KVN_CALLER_WAITS : KVN_CALLER_RETURNS};
    MODEL_CHECK(it->backend->vtable->submit(it->backend, &batch, &it->request, &it->report) == KVN_OK);
}

int wait_for(transfer *it, int64_t deadline_ns)
{
    return it->backend->vtable->wait(it->backend, it->request, deadline_ns);
}

/* Checks that the outcome of a transfer was reported once before, and that all bytes have arrived after success. */
static void check_outcome(transfer *it)
{
    uint64_t bytes_done;

    MODEL_CHECK(it->report.status != KVN_PENDING);
    MODEL_CHECK(it->num_ends == 1 && it->end_status == it->report.status);
    model_note((unsigned)-it->report.status);
    MODEL_CHECK(it->backend->vtable->poll(it->backend, it->request, &bytes_done) == it->report.status);
    MODEL_CHECK(bytes_done == it->report.bytes_done);
    if (it->report.status != KVN_OK)
        return;
    MODEL_CHECK(it->report.bytes_done == NEAR_NBYTES);
    for (unsigned i = 0; i < NUM_PIECES; i++)
        MODEL_CHECK(memcmp(it->near + i * PIECE, it->far + i * STEP, PIECE) == 0);
}

void release(transfer *it)
{
    check_outcome(it);
    it->backend->vtable->release(it->backend, it->request);
    it->request = NULL;
}

static bool is_finished(void *of)
{
    const transfer *it = of;
    return *(const volatile bool *)&it->request->finished;
}

void await_outcome(transfer *it)
{
    uint64_t bytes_done;

    model_await(is_finished, it);
    it->backend->vtable->poll(it->backend, it->request, &bytes_done);
}

void *wait_without_end(void *of)
{
    MODEL_CHECK(wait_for(of, KVN_FOREVER) != KVN_PENDING);
    return NULL;
}

void *wait_and_release(void *of)
{
    wait_without_end(of);
    release(of);
    return NULL;
}

void *move(void *of)
{
    submit(of, true);
    return wait_and_release(of);
}
