/* Scenarios that run in all their interleavings. The two ends of a connection belong to one link (the service's thread
 * answers, and sends requests if no thread waits), or to two links with a service each. Transfers have two pieces,
 * which are apart on one side. */
#include <inttypes.h>

#include "core/report.h"
#include "device/copy.h"
#include "tcp/link.h"

/* ---- no connection here has memory of a device ---- */

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

#define PIECE 8u
#define NUM_PIECES 2u
#define STEP 12u /* of pieces on the far side */
#define FAR_NBYTES (STEP * NUM_PIECES)
#define NEAR_NBYTES (PIECE * NUM_PIECES)
#define MAX_TRANSFERS 2
#define WIDE 4096u
#define NARROW 40u /* less than a request */
#define GENERATION 7u

typedef struct transfer {
    kvn_batch_end end; /* first: the backend gives it back */
    unsigned num_ends;
    int end_status;
    kvn_backend *backend;
    bool is_push;
    uint8_t near[NEAR_NBYTES], far[FAR_NBYTES];
    uint64_t from[NUM_PIECES], to[NUM_PIECES], nbytes[NUM_PIECES];
    kvn_request *request;
    kvn_report report;
} transfer;

typedef struct end {
    kvn_tcp_service *service;
    kvn_tcp_link *link;
} end;

static end ends[2];
static unsigned num_ends;
static bool encrypts; /* in the next run */
static transfer transfers[MAX_TRANSFERS];

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

/* All threads are quiet. The scenario chooses from where to explore. */
static void begin(unsigned count, unsigned capacity, unsigned num_transfers, bool is_push)
{
    begin_link(count, capacity);
    for (unsigned i = 0; i < num_transfers; i++)
        begin_transfer(i, is_push);
    model_settle();
}

static void finish(unsigned num_transfers)
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

static void submit(transfer *it, bool waits)
{
    it->end.call = note_end;
    const kvn_columns batch = {.dst = it->to, .src = it->from, .nbytes = it->nbytes, .count = NUM_PIECES,
                               .end = &it->end,
                               .caller = waits ? KVN_CALLER_WAITS : KVN_CALLER_RETURNS};
    MODEL_CHECK(it->backend->vtable->submit(it->backend, &batch, &it->request, &it->report) == KVN_OK);
}

static int wait_for(transfer *it, int64_t deadline_ns)
{
    return it->backend->vtable->wait(it->backend, it->request, deadline_ns);
}

/* Checks that a transfer has one outcome, which was reported once before, and that all its bytes have arrived if it
 * has succeeded. */
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

static void release(transfer *it)
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

/* Only the service's thread drives the transfer. */
static void await_outcome(transfer *it)
{
    uint64_t bytes_done;

    model_await(is_finished, it);
    it->backend->vtable->poll(it->backend, it->request, &bytes_done);
}

static void *wait_without_end(void *of)
{
    MODEL_CHECK(wait_for(of, KVN_FOREVER) != KVN_PENDING);
    return NULL;
}

static void *wait_and_release(void *of)
{
    wait_without_end(of);
    release(of);
    return NULL;
}

static void *move(void *of)
{
    submit(of, true);
    return wait_and_release(of);
}

/* ---- submit, and the service goes to sleep ---- */

static void submit_and_leave(unsigned num_links, unsigned capacity, unsigned count, bool is_push)
{
    begin(num_links, capacity, count, is_push);
    model_explore(true);
    for (unsigned i = 0; i < count; i++)
        submit(&transfers[i], false);
    for (unsigned i = 0; i < count; i++) {
        await_outcome(&transfers[i]);
        MODEL_CHECK(transfers[i].report.status == KVN_OK);
        release(&transfers[i]);
    }
    finish(count);
}

static void submit_pull(void) { submit_and_leave(1, WIDE, 1, false); }
static void submit_push(void) { submit_and_leave(1, WIDE, 1, true); }
static void submit_pull_through_narrow(void) { submit_and_leave(1, NARROW, 1, false); }
static void submit_push_through_narrow(void) { submit_and_leave(1, NARROW, 1, true); }
static void submit_to_another(void) { submit_and_leave(2, NARROW, 1, false); }
static void submit_two(void) { submit_and_leave(1, WIDE, 2, false); }

/* The service is about to sleep after an earlier transfer. */
static void submit_after_another(void)
{
    begin(1, WIDE, 2, false);
    model_explore(true);
    for (unsigned i = 0; i < 2; i++) {
        submit(&transfers[i], false);
        await_outcome(&transfers[i]);
        MODEL_CHECK(transfers[i].report.status == KVN_OK);
        release(&transfers[i]);
    }
    finish(2);
}

/* ---- waits: who drives ---- */

static void wait_while_service_drives(unsigned capacity, bool is_push, bool waits)
{
    begin(1, capacity, 1, is_push);
    model_explore(true);
    submit(&transfers[0], waits);
    MODEL_CHECK(wait_for(&transfers[0], KVN_FOREVER) == KVN_OK);
    release(&transfers[0]);
    finish(1);
}

static void wait_pull(void) { wait_while_service_drives(WIDE, false, true); }
static void wait_push_through_narrow(void) { wait_while_service_drives(NARROW, true, true); }
static void wait_late(void) { wait_while_service_drives(WIDE, false, false); }

static void two_wait(void)
{
    begin(1, WIDE, 2, false);
    for (unsigned i = 0; i < 2; i++)
        submit(&transfers[i], true);
    model_explore(true);
    model_thread *other = model_spawn("other", wait_and_release, &transfers[1]);
    wait_and_release(&transfers[0]);
    model_join(other);
    MODEL_CHECK(transfers[0].report.status == KVN_OK && transfers[1].report.status == KVN_OK);
    finish(2);
}

static void two_submit(void)
{
    begin(1, WIDE, 2, false);
    model_explore(true);
    model_thread *other = model_spawn("other", move, &transfers[1]);
    submit(&transfers[0], false);
    await_outcome(&transfers[0]);
    release(&transfers[0]);
    model_join(other);
    MODEL_CHECK(transfers[1].report.status == KVN_OK);
    finish(2);
}

/* A transfer that was awaited until a deadline ends without a waiting thread. */
static void wait_with_deadline(void)
{
    begin(1, WIDE, 1, false);
    model_explore(true);
    submit(&transfers[0], true);
    if (wait_for(&transfers[0], model_now() + 60000) == KVN_PENDING) {
        model_note(-KVN_TIMEOUT);
        await_outcome(&transfers[0]);
    }
    MODEL_CHECK(transfers[0].report.status == KVN_OK);
    release(&transfers[0]);
    finish(1);
}

static void *wait_a_little(void *of)
{
    if (wait_for(of, model_now() + 60000) == KVN_PENDING) {
        model_note(-KVN_TIMEOUT);
        await_outcome(of);
    }
    release(of);
    return NULL;
}

/* The driving thread stops waiting, and another one continues to wait. */
static void two_wait_with_deadline(void)
{
    begin(1, WIDE, 2, false);
    for (unsigned i = 0; i < 2; i++)
        submit(&transfers[i], true);
    model_explore(true);
    model_thread *other = model_spawn("other", wait_and_release, &transfers[1]);
    wait_a_little(&transfers[0]);
    model_join(other);
    finish(2);
}

/* A transfer without a waiting thread continues when the other one has ended, and needs more than one turn. */
static void wait_for_one_of_two(void)
{
    begin(1, NARROW, 2, true);
    model_explore(true);
    submit(&transfers[1], false);
    move(&transfers[0]);
    await_outcome(&transfers[1]);
    MODEL_CHECK(transfers[1].report.status == KVN_OK);
    release(&transfers[1]);
    finish(2);
}

/* ---- giving up ---- */

/* False: the connection has ended, as by a push that the peer does not take in time. */
static bool give_up(transfer *it)
{
    const int status = it->backend->vtable->abort(it->backend, it->request, KVN_CANCELLED);
    kvn_failure why;

    system_forbid(it->near, sizeof it->near, "the transfer was given up");
    MODEL_CHECK(status == KVN_CANCELLED || status == KVN_OK);
    if (kvn_tcp_link_has_failed(ends[0].link, &why)) {
        MODEL_CHECK(it->is_push && status == KVN_CANCELLED);
        return false;
    }
    if (it->is_push)
        system_forbid(it->far, sizeof it->far, "the push was given up");
    return true;
}

/* The outcome of another transfer that is submitted later on the same connection. */
static void give_up_and_go_on(unsigned capacity, bool is_push)
{
    begin(1, capacity, 2, is_push);
    model_explore(true);
    submit(&transfers[0], false);
    const bool goes_on = give_up(&transfers[0]);
    release(&transfers[0]);
    submit(&transfers[1], false);
    await_outcome(&transfers[1]);
    MODEL_CHECK(transfers[1].report.status == (goes_on ? KVN_OK : KVN_PEER_GONE));
    release(&transfers[1]);
    finish(2);
}

static void give_up_pull(void) { give_up_and_go_on(WIDE, false); }
static void give_up_pull_in_narrow(void) { give_up_and_go_on(NARROW, false); }
static void give_up_push(void) { give_up_and_go_on(WIDE, true); }

static void give_up_while_waited_for(unsigned capacity, bool is_push)
{
    begin(1, capacity, 1, is_push);
    submit(&transfers[0], true);
    model_explore(true);
    model_thread *other = model_spawn("waits", wait_without_end, &transfers[0]);
    give_up(&transfers[0]);
    model_join(other);
    release(&transfers[0]);
    finish(1);
}

static void give_up_waited_pull(void) { give_up_while_waited_for(WIDE, false); }
static void give_up_waited_push(void) { give_up_while_waited_for(WIDE, true); }

/* ---- the link is closed ---- */

static void forbid_all(const char *why)
{
    system_forbid(transfers[0].near, sizeof transfers[0].near, why);
    system_forbid(transfers[0].far, sizeof transfers[0].far, why);
}

static bool is_death_readable(int file)
{
    uint64_t word;
    return read(file, &word, sizeof word) > 0;
}

static void close_while_submitted(void)
{
    begin(1, WIDE, 1, false);
    model_explore(true);
    model_thread *other = model_spawn("moves", move, &transfers[0]);
    kvn_tcp_link_close(ends[0].link, "it ends");
    forbid_all("the link was closed");
    model_join(other);
    MODEL_CHECK(transfers[0].report.status == KVN_OK || transfers[0].report.status == KVN_PEER_GONE);
    finish(1);
}

static void close_while_waited_for(bool is_push)
{
    begin(1, NARROW, 1, is_push);
    submit(&transfers[0], true);
    model_explore(true);
    model_thread *other = model_spawn("waits", wait_without_end, &transfers[0]);
    kvn_tcp_link_close(ends[0].link, "it ends");
    forbid_all("the link was closed");
    model_join(other);
    MODEL_CHECK(transfers[0].report.status == KVN_OK || transfers[0].report.status == KVN_PEER_GONE);
    release(&transfers[0]);
    finish(1);
}

static void close_waited_pull(void) { close_while_waited_for(false); }
static void close_waited_push(void) { close_while_waited_for(true); }

/* No thread waits, so the service's thread may be at either end. */
static void close_and_free(void)
{
    begin(1, WIDE, 1, false);
    model_explore(true);
    submit(&transfers[0], false);
    kvn_tcp_link_close(ends[0].link, "it ends");
    forbid_all("the link was closed");
    await_outcome(&transfers[0]);
    release(&transfers[0]);
    kvn_tcp_link_destroy(ends[0].link);
    model_settle();
    model_explore(false);
    kvn_tcp_service_destroy(ends[0].service);
    transfers[0].backend->vtable->destroy(transfers[0].backend);
}

static void *close_link(void *of)
{
    kvn_tcp_link_close(of, "it ends");
    return NULL;
}

static void close_twice(void)
{
    begin(1, WIDE, 1, false);
    submit(&transfers[0], false);
    model_explore(true);
    model_thread *other = model_spawn("closes", close_link, ends[0].link);
    close_link(ends[0].link);
    model_join(other);
    forbid_all("the link was closed");
    await_outcome(&transfers[0]);
    release(&transfers[0]);
    finish(1);
}

/* The other end of the connection closes while this one sends a request. */
static void peer_closes(void)
{
    kvn_failure why;

    begin(2, WIDE, 1, false);
    model_explore(true);
    submit(&transfers[0], false);
    kvn_tcp_link_close(ends[1].link, "the peer ends");
    system_forbid(transfers[0].far, sizeof transfers[0].far, "the peer has closed the link");
    await_outcome(&transfers[0]);
    MODEL_CHECK(transfers[0].report.status == KVN_OK || transfers[0].report.status == KVN_PEER_GONE);
    release(&transfers[0]);
    model_settle();
    MODEL_CHECK(kvn_tcp_link_has_failed(ends[0].link, &why));
    MODEL_CHECK(is_death_readable(kvn_tcp_link_death(ends[0].link)));
    finish(1);
}

static void peer_closes_while_waited_for(void)
{
    begin(2, WIDE, 1, true);
    submit(&transfers[0], true);
    model_explore(true);
    model_thread *other = model_spawn("closes", close_link, ends[1].link);
    wait_and_release(&transfers[0]);
    model_join(other);
    model_settle();
    finish(1);
}

/* ---- the service is stopped ---- */

static void stop_service(void)
{
    begin(1, WIDE, 1, false);
    model_explore(true);
    submit(&transfers[0], false);
    kvn_tcp_service_destroy(ends[0].service);
    ends[0].service = NULL;
    forbid_all("the service was stopped");
    kvn_tcp_link_close(ends[0].link, "it ends");
    await_outcome(&transfers[0]);
    release(&transfers[0]);
    finish(1);
}

static void stop_while_closed(void)
{
    begin(1, WIDE, 0, false);
    model_explore(true);
    model_thread *other = model_spawn("closes", close_link, ends[0].link);
    kvn_tcp_service_destroy(ends[0].service);
    ends[0].service = NULL;
    model_join(other);
    finish(0);
}

/* ---- memory is deregistered ---- */

static void *remove_range(void *of)
{
    transfer *it = of;

    MODEL_CHECK(kvn_tcp_table_remove(kvn_tcp_service_table(ends[num_ends - 1].service), 0));
    system_forbid(it->far, sizeof it->far, "it was deregistered");
    return NULL;
}

static void deregister(unsigned count, unsigned capacity, bool is_push)
{
    begin(count, capacity, 1, is_push);
    submit(&transfers[0], false);
    model_explore(true);
    model_thread *other = model_spawn("deregisters", remove_range, &transfers[0]);
    model_join(other);
    await_outcome(&transfers[0]);
    MODEL_CHECK(transfers[0].report.status == KVN_OK || transfers[0].report.status == KVN_UNMAPPED);
    release(&transfers[0]);
    finish(1);
}

static void deregister_pulled(void) { deregister(1, WIDE, false); }
static void deregister_pushed(void) { deregister(1, NARROW, true); }
static void deregister_pulled_from_another(void) { deregister(2, WIDE, false); }

/* ---- the same with records, which pass through buffers ---- */

static void encrypted(void (*run)(void))
{
    encrypts = true;
    run();
    encrypts = false;
}

static void encrypted_submit_pull(void) { encrypted(submit_pull_through_narrow); }
static void encrypted_submit_push(void) { encrypted(submit_push_through_narrow); }
static void encrypted_wait_with_deadline(void) { encrypted(wait_with_deadline); }
static void encrypted_give_up_pull(void) { encrypted(give_up_pull_in_narrow); }
static void encrypted_give_up_push(void) { encrypted(give_up_push); }
static void encrypted_close(void) { encrypted(close_and_free); }
static void encrypted_deregister(void) { encrypted(deregister_pulled); }

int main(int count, char **arguments)
{
    static const model_scenario scenarios[] = {
        {"submit_pull", submit_pull, 6},
        {"submit_push", submit_push, 6},
        {"submit_pull_through_narrow", submit_pull_through_narrow, 6},
        {"submit_push_through_narrow", submit_push_through_narrow, 5},
        {"submit_to_another", submit_to_another, 2},
        {"submit_two", submit_two, 3},
        {"submit_after_another", submit_after_another, 4},
        {"wait_pull", wait_pull, 3},
        {"wait_push_through_narrow", wait_push_through_narrow, 3},
        {"wait_late", wait_late, 3},
        {"two_wait", two_wait, 2},
        {"two_submit", two_submit, 2},
        {"two_wait_with_deadline", two_wait_with_deadline, 1},
        {"wait_for_one_of_two", wait_for_one_of_two, 2},
        {"wait_with_deadline", wait_with_deadline, 3},
        {"give_up_pull", give_up_pull, 3},
        {"give_up_pull_in_narrow", give_up_pull_in_narrow, 2},
        {"give_up_push", give_up_push, 2},
        {"give_up_waited_pull", give_up_waited_pull, 2},
        {"give_up_waited_push", give_up_waited_push, 2},
        {"close_while_submitted", close_while_submitted, 2},
        {"close_waited_pull", close_waited_pull, 2},
        {"close_waited_push", close_waited_push, 2},
        {"close_and_free", close_and_free, 3},
        {"close_twice", close_twice, 2},
        {"peer_closes", peer_closes, 2},
        {"peer_closes_while_waited_for", peer_closes_while_waited_for, 1},
        {"stop_service", stop_service, 6},
        {"stop_while_closed", stop_while_closed, 4},
        {"deregister_pulled", deregister_pulled, 3},
        {"deregister_pushed", deregister_pushed, 2},
        {"deregister_pulled_from_another", deregister_pulled_from_another, 2},
        {"encrypted_submit_pull", encrypted_submit_pull, 3},
        {"encrypted_submit_push", encrypted_submit_push, 3},
        {"encrypted_wait_with_deadline", encrypted_wait_with_deadline, 2},
        {"encrypted_give_up_pull", encrypted_give_up_pull, 2},
        {"encrypted_give_up_push", encrypted_give_up_push, 2},
        {"encrypted_close", encrypted_close, 2},
        {"encrypted_deregister", encrypted_deregister, 2},
        {NULL, NULL, 0},
    };
    return model_main(count, arguments, scenarios);
}
