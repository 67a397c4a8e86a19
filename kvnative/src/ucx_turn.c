/* The turn and the inbox. Whoever fails to get the turn has left its errand first, and whoever leaves the
 * turn looks into the inbox afterwards: so one of the two sees the other, and no errand stays behind. Who
 * hands one over leaves it before it finds the thread asleep, and rings; the thread looks into the inbox after
 * it has woken and before it sleeps. All of that rests on sequentially consistent atomics. */
#include "ucx_inside.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* As often it is tried to settle before whoever sleeps is woken to see for himself. */
#define SETTLE_ATTEMPTS 4
/* Rounds, while something happens in them, after which the sender is asked whatever there is. */
#define MOST_UNASKED 32

static uintptr_t self(void) { return (uintptr_t)pthread_self(); }

bool kvn_ucx_has_turn(const kvn_ucx_end *end) { return atomic_load(&end->holder) == self(); }

bool kvn_ucx_try_turn(kvn_ucx_end *end)
{
    uintptr_t nobody = 0;
    return atomic_compare_exchange_strong(&end->holder, &nobody, self());
}

static unsigned run_errands(kvn_ucx_end *end)
{
    kvn_ucx_errand *latest = atomic_load(&end->inbox) ? atomic_exchange(&end->inbox, NULL) : NULL;
    kvn_ucx_errand *first = NULL;
    unsigned count = 0;

    while (latest) { /* the first one that came is the last one in the stack */
        kvn_ucx_errand *next = latest->next;
        latest->next = first;
        first = latest;
        latest = next;
    }
    if (first) {
        end->is_still = false;
        end->is_sending = true; /* a connection that was closed is taken down in its progress */
    }
    for (; first; count++) {
        kvn_ucx_errand *it = first;
        const bool is_awaited = it->is_awaited;
        first = it->next;
        it->run(end, it); /* may free it if nobody waits */
        if (is_awaited) {
            atomic_store(&it->is_done, true);
            kvn_ucx_notify(end);
        }
    }
    return count;
}

/* The sender as well, while something of it is under way, and now and then: to ask it takes a system call, which
 * is a tenth of the time that a small pull waits for its answer. What UCX has told us is sent may wait in its own
 * buffer, and only the sender hears of a peer that has died. */
static bool asks_sender(kvn_ucx_end *end, unsigned count)
{
    end->num_idle = count ? 0 : end->num_idle + 1;
    const bool is_asked = ++end->num_unasked >= MOST_UNASKED || kvn_ucx_is_due(end) ||
                          end->is_sending || end->num_sending || !end->shows_events;
    if (is_asked)
        end->num_unasked = 0;
    return is_asked;
}

unsigned kvn_ucx_round(kvn_ucx_end *end)
{
    unsigned count = run_errands(end), progressed;
    bool has_more = false;

    for (kvn_ucx_part *it = end->parts; it; it = it->next) {
        if (it->serve)
            count += it->serve(it);
        has_more |= it->has_more;
    }
    progressed = end->calls->ucp_worker_progress(end->receiver);
    if (asks_sender(end, count + progressed)) {
        const unsigned sent = end->calls->ucp_worker_progress(end->sender);
        end->is_sending = sent > 0;
        progressed += sent;
    }
    end->is_still = progressed == 0 && !has_more;
    atomic_fetch_add_explicit(&end->rounds, 1, memory_order_relaxed);
    return count + progressed;
}

bool kvn_ucx_arm(kvn_ucx_end *end)
{
    /* The last look: idle rounds ask the sender now and then, and arming forgets why it had called. */
    if (end->calls->ucp_worker_progress(end->sender) != 0)
        return false;
    kvn_ucx_delay_acks(end);
    return atomic_load(&end->inbox) == NULL &&
           end->calls->ucp_worker_arm(end->receiver) == KVN_UCS_OK &&
           end->calls->ucp_worker_arm(end->sender) == KVN_UCS_OK;
}

void kvn_ucx_ring(int event)
{
    uint64_t one = 1;
    while (write(event, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

void kvn_ucx_unring(int event)
{
    uint64_t count;
    while (read(event, &count, sizeof count) < 0 && errno == EINTR)
        ;
}

bool kvn_ucx_settle(kvn_ucx_end *end)
{
    for (int i = 0; i < SETTLE_ATTEMPTS; i++) {
        if (!end->is_still || atomic_load(&end->inbox))
            kvn_ucx_round(end);
        if (end->is_still && (end->shows_events || kvn_ucx_arm(end)))
            return true;
        end->is_still = false;
    }
    return false;
}

/* What was done may have used up the event that a sleeper waits for, or have left something to do. */
static void settle_for(kvn_ucx_end *end, int asleep)
{
    if (!kvn_ucx_settle(end))
        kvn_ucx_ring(asleep == KVN_UCX_THREAD ? end->thread_event : end->caller_event);
}

/* Somebody who can drive on is told that the turn is free, unless one sleeps on the worker. */
static void pass_on(kvn_ucx_end *end)
{
    if (atomic_load(&end->asleep) != KVN_UCX_NOBODY)
        return;
    if (atomic_load(&end->num_following))
        kvn_ucx_notify(end);
    else if (!atomic_load(&end->num_attending) && atomic_load(&end->is_parked))
        kvn_ucx_ring(end->thread_event);
}

void kvn_ucx_drop_turn(kvn_ucx_end *end)
{
    for (;;) {
        atomic_store(&end->holder, 0);
        if (!atomic_load(&end->inbox) || !kvn_ucx_try_turn(end))
            break;
        const int asleep = atomic_load(&end->asleep);
        if (asleep != KVN_UCX_NOBODY)
            settle_for(end, asleep);
        else
            run_errands(end);
    }
    pass_on(end);
}

void kvn_ucx_leave_turn(kvn_ucx_end *end)
{
    const int asleep = atomic_load(&end->asleep);

    if (asleep != KVN_UCX_NOBODY)
        settle_for(end, asleep);
    kvn_ucx_drop_turn(end);
}

static void leave_errand(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    errand->next = atomic_load(&end->inbox);
    while (!atomic_compare_exchange_weak(&end->inbox, &errand->next, errand))
        ;
}

static void run_inbox(kvn_ucx_end *end)
{
    /* Who has the turn looks into the inbox before it leaves. */
    if (!kvn_ucx_has_turn(end) && kvn_ucx_try_turn(end)) {
        kvn_ucx_round(end);
        kvn_ucx_leave_turn(end);
    }
}

void kvn_ucx_do_later(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    leave_errand(end, errand);
    run_inbox(end);
}

void kvn_ucx_hand_over(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    errand->is_awaited = false;
    leave_errand(end, errand);
    /* If it is awake by now it looks into the inbox before it sleeps. */
    if (atomic_load(&end->asleep) == KVN_UCX_THREAD)
        kvn_ucx_ring(end->thread_event);
    else
        run_inbox(end);
}

void kvn_ucx_do(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    errand->is_awaited = false;
    if (kvn_ucx_has_turn(end))
        errand->run(end, errand);
    else
        kvn_ucx_do_later(end, errand);
}

static bool is_run(void *context)
{
    const kvn_ucx_errand *errand = context;
    return atomic_load(&errand->is_done);
}

void kvn_ucx_do_and_wait(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    if (kvn_ucx_has_turn(end)) {
        errand->is_awaited = false;
        errand->run(end, errand);
        return;
    }
    atomic_init(&errand->is_done, false);
    errand->is_awaited = true;
    kvn_ucx_do_later(end, errand);
    kvn_ucx_attend(end, is_run, errand, KVN_FOREVER);
}

void kvn_ucx_notify(kvn_ucx_end *end)
{
    if (atomic_load(&end->num_following)) {
        pthread_mutex_lock(&end->roles);
        end->num_changes++;
        pthread_cond_broadcast(&end->changed);
        pthread_mutex_unlock(&end->roles);
    }
    if (atomic_load(&end->asleep) == KVN_UCX_CALLER)
        kvn_ucx_ring(end->caller_event);
}

void kvn_ucx_turn_init(kvn_ucx_end *end)
{
    pthread_mutex_init(&end->roles, NULL);
    kvn_cond_init(&end->changed);
    end->thread_event = end->caller_event = end->thread_set = -1;
}

int kvn_ucx_turn_start(kvn_ucx_end *end, kvn_failure *failure)
{
    struct epoll_event wake = {.events = EPOLLIN};
    struct epoll_event watch = {.events = 0, .data.fd = end->worker_fd};

    end->thread_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    end->caller_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    end->thread_set = epoll_create1(EPOLL_CLOEXEC);
    wake.data.fd = end->thread_event;
    if (end->thread_event < 0 || end->caller_event < 0 || end->thread_set < 0 ||
        epoll_ctl(end->thread_set, EPOLL_CTL_ADD, end->thread_event, &wake) != 0 ||
        epoll_ctl(end->thread_set, EPOLL_CTL_ADD, end->worker_fd, &watch) != 0)
        return kvn_fail(failure, KVN_FAILED, errno, "no file for the events of a UCX worker: %s",
                        strerror(errno));
    const int error = pthread_create(&end->thread, NULL, kvn_ucx_thread, end);
    if (error)
        return kvn_fail(failure, error == EAGAIN ? KVN_NO_MEMORY : KVN_FAILED, error,
                        "no thread for a UCX worker: %s", strerror(error));
    end->has_thread = true;
    return KVN_OK;
}

void kvn_ucx_turn_stop(kvn_ucx_end *end)
{
    if (!end->has_thread)
        return;
    atomic_store(&end->is_stopping, true);
    kvn_ucx_ring(end->thread_event);
    pthread_join(end->thread, NULL);
    end->has_thread = false;
    /* Who finds it asleep from here on would wake nobody; who did before has left an errand. */
    int thread = KVN_UCX_THREAD;
    atomic_compare_exchange_strong(&end->asleep, &thread, KVN_UCX_NOBODY);
    run_inbox(end);
}

void kvn_ucx_turn_fini(kvn_ucx_end *end)
{
    const int files[] = {end->thread_event, end->caller_event, end->thread_set};

    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (files[i] >= 0)
            close(files[i]);
    pthread_cond_destroy(&end->changed);
    pthread_mutex_destroy(&end->roles);
}
