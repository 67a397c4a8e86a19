/* Checks of the result of a request whose shards end in any order and way, and of refused requests. */
#include "device/stream_backend.c"
#include "device/stream_request.c"

#include <stdio.h>

#include "check.h"

enum { SHARDS = 3, EACH = 4 };

/* The ways in which a shard ends. */
typedef enum ending { ARRIVED, GIVEN_UP, FAILED_AT, FAILED_SOMEWHERE, NUM_ENDINGS } ending;

/* The confirmed part of a shard that does not arrive whole, and its failed descriptor: these differ by
 * shard. */
static const uint64_t CONFIRMED[SHARDS] = {1, 0, 2}, AT_FAULT[SHARDS] = {2, 1, 3};

static uint64_t nbytes[SHARDS * EACH];

static void settle(kvn_request *request, int shard, ending how)
{
    kvn_channel_fault fault;
    const int status = how == ARRIVED ? KVN_OK : how == GIVEN_UP ? KVN_CANCELLED : KVN_UNMAPPED;

    kvn_channel_fault_begin(&fault);
    fault.confirmed = how == ARRIVED ? 0 : CONFIRMED[shard];
    if (how == FAILED_AT)
        fault.failed = AT_FAULT[shard];
    if (how >= FAILED_AT)
        kvn_fail(&fault.why, status, 100 + shard, "shard %d", shard);
    kvn_stream_shard_settle(&request->shards[shard], status, &fault);
}

static void check_report(const kvn_report *report, const ending *how, const int *order)
{
    uint64_t moved = 0, failed = KVN_NO_DESCRIPTOR;
    int failing = -1;
    bool any = false, confirmed[SHARDS * EACH];

    for (int i = 0; i < SHARDS; i++) {
        any |= how[i] != ARRIVED;
        for (uint64_t at = 0; at < EACH; at++) {
            confirmed[i * EACH + at] = how[i] == ARRIVED || at < CONFIRMED[i];
            moved += confirmed[i * EACH + at] ? nbytes[i * EACH + at] : 0;
        }
    }
    for (int i = 0; i < SHARDS; i++) /* the lowest known failed descriptor */
        if (how[i] == FAILED_AT && failing < 0)
            failing = i;
    if (failing >= 0)
        failed = (uint64_t)failing * EACH + AT_FAULT[failing];
    for (int n = 0; n < SHARDS && failing < 0; n++) /* otherwise the first */
        if (how[order[n]] == FAILED_SOMEWHERE)
            failing = order[n];
    CHECK(report->status == (failing >= 0 ? KVN_UNMAPPED : any ? KVN_TIMEOUT : KVN_OK));
    CHECK(report->failed == failed && report->bytes_done == moved);
    CHECK(report->code == (failing >= 0 ? 100 + failing : 0));
    CHECK(failing < 0 || report->message[6] == '0' + failing);
    for (uint64_t at = 0; at < SHARDS * EACH; at++) {
        bool is_listed = false;
        for (uint32_t i = 0; i < report->num_unconfirmed; i++)
            is_listed |= report->unconfirmed[i].first <= at && at < report->unconfirmed[i].last;
        CHECK(is_listed == !confirmed[at]);
    }
}

static void end_in_order(const ending *how, const int *order)
{
    const kvn_columns batch = {.dst = nbytes, .src = nbytes, .nbytes = nbytes, .count = SHARDS * EACH};
    kvn_report report;
    kvn_request *request = kvn_stream_request_create(NULL, &batch, 1, SHARDS, &report);
    uint64_t bytes_done;

    request->why = KVN_TIMEOUT; /* the outcome of a stopped shard if nothing has failed */
    request->num_shards = request->open = SHARDS;
    for (int i = 0; i < SHARDS; i++)
        request->shards[i] = (kvn_stream_shard){
            .request = request,
            .columns = {.nbytes = nbytes + i * EACH, .count = EACH},
            .offset = (uint64_t)i * EACH,
        };
    for (int n = 0; n < SHARDS; n++) {
        CHECK(kvn_stream_request_poll(NULL, request, &bytes_done) == KVN_PENDING);
        settle(request, order[n], how[order[n]]);
    }
    kvn_stream_request_poll(NULL, request, &bytes_done);
    check_report(&report, how, order);
    kvn_stream_request_release(NULL, request);
}

/* Each way of each shard, in each order. */
static void endings_in_any_order(void)
{
    static const int ORDERS[][SHARDS] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};

    for (uint64_t at = 0; at < SHARDS * EACH; at++)
        nbytes[at] = UINT64_C(1) << at;
    for (int ways = 0; ways < NUM_ENDINGS * NUM_ENDINGS * NUM_ENDINGS; ways++) {
        const ending how[SHARDS] = {ways % NUM_ENDINGS, ways / NUM_ENDINGS % NUM_ENDINGS,
                                    ways / NUM_ENDINGS / NUM_ENDINGS};
        for (size_t i = 0; i < sizeof ORDERS / sizeof *ORDERS; i++)
            end_in_order(how, ORDERS[i]);
    }
}

/* A shard that its channel has dequeued but not begun finds the request cancelled. */
static void none_begins_after_a_failure(void)
{
    const kvn_columns batch = {.dst = nbytes, .src = nbytes, .nbytes = nbytes, .count = 1};
    kvn_report report;
    kvn_request *request = kvn_stream_request_create(NULL, &batch, 1, 1, &report);

    CHECK(!kvn_stream_request_is_given_up(request));
    kvn_stream_request_fail_others(request); /* no shard is in a queue any more */
    CHECK(kvn_stream_request_is_given_up(request));
    kvn_stream_request_release(NULL, request);
}

static kvn_device device;
static kvn_channel_job *submitted;
static bool has_thread;

kvn_device *kvn_channel_device(const kvn_channel *channel)
{
    (void)channel;
    return &device;
}

int kvn_channel_begin(kvn_device *of, kvn_channel **out, kvn_failure *failure)
{
    if (!has_thread)
        return kvn_fail(failure, KVN_NO_MEMORY, EAGAIN, "no thread");
    *out = (kvn_channel *)of;
    return KVN_OK;
}

void kvn_channel_submit(kvn_channel *channel, kvn_channel_job *job)
{
    CHECK(channel == (kvn_channel *)&device);
    submitted = job;
}

/* A refused request behind an event releases its stream: this is repeated one time more than there are
 * streams. */
static void refused_behind_an_event(void)
{
    static const uint64_t too_large[] = {UINT64_MAX, 1};
    kvn_channel *channels[] = {(kvn_channel *)&device};
    kvn_gate gate = {NULL};
    kvn_stream_backend backend;
    kvn_request *request;
    kvn_report report;
    kvn_channel_fault fault;
    kvn_columns batch = {.dst = nbytes, .src = nbytes, .nbytes = nbytes, .count = 1, .after = &gate};

    CHECK(kvn_stream_backend_init(&backend, "said", NULL, channels, 1, NULL) == 0);
    for (int i = 0; i <= KVN_ORDERED_CHANNELS; i++)
        CHECK(submit(&backend.base, &batch, &request, &report) == KVN_NO_MEMORY);
    has_thread = true;
    batch.nbytes = too_large;
    batch.count = 2;
    for (int i = 0; i <= KVN_ORDERED_CHANNELS; i++)
        CHECK(submit(&backend.base, &batch, &request, &report) == KVN_INVALID);
    batch.nbytes = nbytes;
    kvn_channel_fault_begin(&fault);
    for (int i = 0; i <= KVN_ORDERED_CHANNELS; i++) {
        CHECK(submit(&backend.base, &batch, &request, &report) == KVN_OK);
        kvn_stream_shard_settle((kvn_stream_shard *)submitted, KVN_OK, &fault);
        kvn_stream_request_release(&backend.base, request);
    }
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"endings_in_any_order", endings_in_any_order},
        {"none_begins_after_a_failure", none_begins_after_a_failure},
        {"refused_behind_an_event", refused_behind_an_event},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
