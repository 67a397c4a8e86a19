/* Checks of the tickets of a worker, whose numbers wrap at 2**32, and of the ends of transfers. */
#include "ucx/transfer.c"

#include "check.h"

static void after_the_last_number(void)
{
    _Atomic uint64_t tickets[2] = {0};
    kvn_ucx_worker worker = {.tickets = tickets, .num_announced = UINT32_MAX - 1};
    kvn_ucx_endpoint endpoint = {.worker = &worker, .remote = {.tag = 7}};
    const kvn_ucx_route route = {.endpoint = &endpoint};
    kvn_request *request = calloc(1, sizeof *request);
    uint32_t before = 0;

    request->route = &route;
    for (int i = 0; i < 4; i++) { /* the last number, and those after the wrap */
        put_ticket(request, (unsigned)i % 2);
        const uint64_t ticket = atomic_load(&tickets[i % 2]);
        CHECK(ticket >> 32 == 7);
        CHECK((uint32_t)ticket != 0); /* 0 is not a valid number */
        CHECK((uint32_t)ticket != before);
        CHECK(request->ticket == (unsigned)i % 2 + 1);
        before = (uint32_t)ticket;
    }
    free(request);
}

/* A transfer removes its ticket at its end, with any outcome, because an owner waits for each ticket. */
static void gone_at_the_end(void)
{
    static const struct {
        int why, failure;
    } ends[] = {{KVN_OK, KVN_OK}, {KVN_CANCELLED, KVN_OK}, {KVN_OK, KVN_UNMAPPED}};

    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        _Atomic uint64_t tickets[2] = {0};
        kvn_ucx_worker worker = {.tickets = tickets, .wake_fd = -1};
        kvn_ucx_endpoint endpoint = {.worker = &worker};
        const kvn_ucx_route route = {.endpoint = &endpoint, .direction = KVN_PEER_PUT};
        kvn_request *request = calloc(1, sizeof *request);
        kvn_report report;

        request->route = &route;
        request->report = &report;
        request->why = ends[i].why;
        request->failure.status = ends[i].failure;
        kvn_ucx_add_task(&worker, &request->task, step, request);
        put_ticket(request, 1);
        CHECK(atomic_load(&tickets[1]) != 0);
        finish(request);
        CHECK(atomic_load(&tickets[1]) == 0);
        CHECK(atomic_load(&request->finished));
        CHECK(report.status == (ends[i].why ? ends[i].why : ends[i].failure));
        free(request);
    }
}

static void *flushing; /* the operation of the current flush */

static kvn_ucs_status_ptr flush(kvn_ucp_ep_h ep, const kvn_ucp_request_param *param)
{
    CHECK(ep && !flushing);
    flushing = param->user_data;
    return &flushing; /* the check ends the flush */
}

static void free_handle(void *handle) { CHECK(handle == &flushing); }

/* The bytes of a put may arrive until a flush has ended, also if the transfer was aborted or has failed. */
static void flushed_before_the_end(void)
{
    static const struct {
        int why, failure;
    } ends[] = {{KVN_OK, KVN_OK}, {KVN_CANCELLED, KVN_OK}, {KVN_TIMEOUT, KVN_OK}, {KVN_OK, KVN_UNMAPPED}};
    const kvn_ucx calls = {.ucp_ep_flush_nbx = flush, .ucp_request_free = free_handle};

    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        _Atomic uint64_t tickets[KVN_UCX_TICKETS] = {0};
        kvn_ucx_worker worker = {.calls = &calls, .tickets = tickets, .wake_fd = -1};
        kvn_ucx_endpoint endpoint = {.worker = &worker, .handle = (kvn_ucp_ep_h)&worker};
        const kvn_ucx_route route = {.endpoint = &endpoint, .direction = KVN_PEER_PUT};
        kvn_request *request = calloc(1, sizeof *request);
        kvn_report report;

        request->route = &route;
        request->phase = KVN_UCX_MOVING;
        request->free = request->operations;
        request->operations[0].next = &request->operations[1];
        kvn_ucx_add_task(&worker, &request->task, step, request);
        put_ticket(request, 0);
        kvn_ucx_operation *put = begin(request, 0, 8);
        request->report = &report;
        request->why = ends[i].why;
        request->failure.status = ends[i].failure;
        CHECK(step(request) == 0 && !flushing); /* the put has not completed */
        complete(put, KVN_UCS_OK);
        CHECK(step(request) == 1 && flushing);
        CHECK(step(request) == 0 && !atomic_load(&request->finished) && atomic_load(&tickets[0]) != 0);
        on_complete(&flushing, KVN_UCS_OK, flushing);
        flushing = NULL;
        step(request);
        CHECK(atomic_load(&request->finished) && atomic_load(&tickets[0]) == 0);
        CHECK(report.status == (ends[i].why ? ends[i].why : ends[i].failure));
        free(request);
    }
}

/* A transfer ends after its last operation, in whichever phase it was aborted: UCX writes to the request until then. */
static void waited_for_before_the_end(void)
{
    static const kvn_ucx_phase phases[] = {KVN_UCX_CHECKING_BEFORE, KVN_UCX_MOVING, KVN_UCX_CHECKING_AFTER};

    for (size_t i = 0; i < 2 * sizeof phases / sizeof *phases; i++) {
        kvn_ucx_worker worker = {.wake_fd = -1};
        kvn_ucx_endpoint endpoint = {.worker = &worker, .handle = (kvn_ucp_ep_h)&worker};
        const kvn_ucx_route route = {.endpoint = &endpoint, .direction = KVN_PEER_GET};
        kvn_request *request = calloc(1, sizeof *request);
        kvn_report report;

        request->route = &route;
        request->report = &report;
        request->phase = phases[i / 2];
        request->free = request->operations;
        kvn_ucx_add_task(&worker, &request->task, step, request);
        kvn_ucx_operation *operation = begin(request, 0, 8);
        if (i % 2)
            request->why = KVN_CANCELLED;
        else
            request->failure.status = KVN_UNMAPPED;
        CHECK(step(request) == 0 && !atomic_load(&request->finished));
        complete(operation, KVN_UCS_OK);
        step(request);
        CHECK(atomic_load(&request->finished));
        CHECK(report.status == (i % 2 ? KVN_CANCELLED : KVN_UNMAPPED));
        free(request);
    }
}

/* Each round has a new ticket, so that an owner whose memory the transfer does not use waits only for this round. */
static void renewed_after_each_round(void)
{
    _Atomic uint64_t tickets[2] = {0};
    kvn_ucx_worker worker = {.tickets = tickets};
    kvn_ucx_endpoint endpoint = {.worker = &worker, .remote = {.tag = 7}};
    const kvn_ucx_route route = {.endpoint = &endpoint, .direction = KVN_PEER_PUT};
    kvn_request *request = calloc(1, sizeof *request);

    request->route = &route;
    request->batch.count = 3;
    put_ticket(request, 1);
    for (request->descriptor = 1; request->descriptor <= 3; request->descriptor++) {
        const uint64_t before = atomic_load(&tickets[1]);
        const bool is_last = request->descriptor == 3;

        request->phase = KVN_UCX_FLUSHING;
        advance(request);
        CHECK((request->phase == KVN_UCX_CHECKING_BEFORE) == !is_last);
        CHECK((atomic_load(&tickets[1]) == before) == is_last);
        CHECK(atomic_load(&tickets[1]) >> 32 == 7 && atomic_load(&tickets[0]) == 0);
    }
    free(request);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"flushed_before_the_end", flushed_before_the_end},
        {"waited_for_before_the_end", waited_for_before_the_end},
        {"after_the_last_number", after_the_last_number},
        {"gone_at_the_end", gone_at_the_end},
        {"renewed_after_each_round", renewed_after_each_round},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
