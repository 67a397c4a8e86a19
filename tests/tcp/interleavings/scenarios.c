/* Scenarios that run in all their interleavings. The two ends of a connection belong to one link (the service's thread
 * answers, and sends requests if no thread waits), or to two links with one service each. Transfers have two pieces,
 * which are not adjacent on one side. */
#include "ends.h"

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

/* The driving thread stops waiting, and another thread continues to wait. */
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

/* A transfer without a waiting thread continues after the other one has ended, in more than one step. */
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

/* ---- aborts ---- */

/* Returns false if the connection has ended, for example because the peer does not take a push in time. */
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

/* Checks the outcome of a later transfer on the same connection. */
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

/* No thread waits, so the service's thread may serve either end. */
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

/* ---- encrypted connections, whose records pass through buffers ---- */

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
