/* Who drives when: the callers that attend, one at a time, before the end's own thread.
 *
 * Of those who attend, one drives: it holds the turn and spins, or sleeps on the worker's events. The others
 * follow: they sleep on a condition that is signalled when something happened that they may wait for, and
 * when the turn is free. The thread is told of the worker's events only while nobody attends: the first one
 * that comes takes them away from it, the last one that goes hands them back. */
#include "ucx_inside.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>

#define CLOSELY_NS 1000000

typedef struct waiter {
    bool (*is_done)(void *context);
    void *context;
    int64_t deadline_ns;
} waiter;

static bool is_over(const waiter *it) { return it->is_done(it->context); }

/* With the mutex of the roles. */
static void let_thread_watch(kvn_ucx_end *end, bool shall)
{
    if (end->is_watching == shall)
        return;
    struct epoll_event watch = {.events = shall ? EPOLLIN : 0, .data.fd = end->worker_fd};
    epoll_ctl(end->thread_set, EPOLL_CTL_MOD, end->worker_fd, &watch);
    end->is_watching = shall;
}

/* The first one that attends takes the events from the thread. */
static void arrive(kvn_ucx_end *end)
{
    pthread_mutex_lock(&end->roles);
    if (atomic_fetch_add(&end->num_attending, 1) == 0) {
        int thread = KVN_UCX_THREAD;
        let_thread_watch(end, false);
        atomic_compare_exchange_strong(&end->asleep, &thread, KVN_UCX_NOBODY);
    }
    pthread_mutex_unlock(&end->roles);
}

/* Under the turn. A call that follows another one closely sees to it that the next ones take less time; one that
 * comes alone does not pay for that. */
static void prepare_for_next(kvn_ucx_end *end)
{
    const int64_t now = kvn_now_ns();

    if (now - end->departed_ns < CLOSELY_NS)
        kvn_ucx_delay_acks(end);
    end->departed_ns = now;
}

/* The last one that goes leaves the thread asleep on a worker that is settled, or awake. */
static void depart(kvn_ucx_end *end)
{
    if (atomic_load(&end->num_attending) > 1) {
        pthread_mutex_lock(&end->roles);
        const bool is_last = atomic_fetch_sub(&end->num_attending, 1) == 1;
        pthread_mutex_unlock(&end->roles);
        kvn_ucx_notify(end); /* another one drives on */
        if (!is_last)
            return;
        atomic_fetch_add(&end->num_attending, 1);
    }
    const bool has_turn = kvn_ucx_try_turn(end);
    const bool is_settled = has_turn && kvn_ucx_settle(end);
    if (is_settled)
        prepare_for_next(end);
    pthread_mutex_lock(&end->roles);
    const bool is_last = atomic_fetch_sub(&end->num_attending, 1) == 1;
    const bool is_handed = is_last && is_settled && atomic_load(&end->is_parked);
    if (is_handed) {
        atomic_store(&end->asleep, KVN_UCX_THREAD);
        let_thread_watch(end, true);
    }
    pthread_mutex_unlock(&end->roles);
    if (is_handed)
        kvn_ucx_drop_turn(end);
    else if (has_turn)
        kvn_ucx_leave_turn(end);
    if (is_last && !is_handed)
        kvn_ucx_ring(end->thread_event);
    else if (!is_last)
        kvn_ucx_notify(end);
}

/* Sleeps on the worker's events, with the turn, which it leaves. */
static void sleep_on_worker(kvn_ucx_end *end, const waiter *it)
{
    struct pollfd files[] = {{.fd = end->worker_fd, .events = POLLIN},
                             {.fd = end->caller_event, .events = POLLIN}};
    struct timespec left, *timeout = NULL;

    atomic_store(&end->asleep, KVN_UCX_CALLER);
    kvn_ucx_drop_turn(end);
    if (it->deadline_ns != KVN_FOREVER) {
        int64_t ns = it->deadline_ns - kvn_now_ns();
        ns = ns < 0 ? 0 : ns;
        left = (struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
        timeout = &left;
    }
    /* What is told from here on rings; what was told before, while this one was not asleep, shows now. */
    if (!is_over(it))
        ppoll(files, 2, timeout, NULL);
    atomic_store(&end->asleep, KVN_UCX_NOBODY);
    if (files[1].revents & POLLIN)
        kvn_ucx_unring(end->caller_event);
}

/* While it spins. Where two ends that wait for each other share a core, one must let the other answer. */
static void relax(const kvn_ucx_end *end)
{
    if (kvn_ucx_is_due(end))
        sched_yield();
}

/* Drives with the turn until it is over or nothing has happened for a while; leaves the turn. */
static void drive(kvn_ucx_end *end, const waiter *it)
{
    int64_t now = kvn_now_ns();
    int64_t idle_since = now;

    while (!is_over(it) && now < it->deadline_ns) {
        const unsigned count = kvn_ucx_round(end);
        now = kvn_now_ns();
        if (count) {
            idle_since = now;
        } else if (now - idle_since > KVN_UCX_ATTEND_SPIN_NS && kvn_ucx_arm(end)) {
            if (atomic_load(&end->asleep) == KVN_UCX_CALLER)
                break; /* another one sleeps there: this one follows */
            sleep_on_worker(end, it);
            return;
        }
        relax(end);
    }
    kvn_ucx_leave_turn(end);
}

static void follow(kvn_ucx_end *end, const waiter *it)
{
    pthread_mutex_lock(&end->roles);
    const uint64_t seen = end->num_changes;
    pthread_mutex_unlock(&end->roles);
    atomic_fetch_add(&end->num_following, 1);
    /* From here on whoever makes it true, or leaves the turn with nobody asleep, signals. */
    if (!is_over(it)) {
        const bool is_slept_on = atomic_load(&end->asleep) == KVN_UCX_CALLER;
        if (!is_slept_on && kvn_ucx_try_turn(end)) {
            atomic_fetch_sub(&end->num_following, 1);
            drive(end, it);
            return;
        }
        pthread_mutex_lock(&end->roles);
        while (end->num_changes == seen && !is_over(it) &&
               kvn_cond_wait(&end->changed, &end->roles, it->deadline_ns))
            ;
        pthread_mutex_unlock(&end->roles);
    }
    atomic_fetch_sub(&end->num_following, 1);
}

bool kvn_ucx_attend(kvn_ucx_end *end, bool (*is_done)(void *context), void *context,
                    int64_t deadline_ns)
{
    const waiter it = {.is_done = is_done, .context = context, .deadline_ns = deadline_ns};

    if (is_over(&it))
        return true;
    arrive(end);
    bool is_done_now;
    while (!(is_done_now = is_over(&it)) && kvn_now_ns() < deadline_ns) {
        if (atomic_load(&end->asleep) != KVN_UCX_CALLER && kvn_ucx_try_turn(end))
            drive(end, &it);
        else
            follow(end, &it);
    }
    depart(end);
    return is_done_now;
}

/* With the turn: until somebody attends, or it is idle. True: the worker is armed. */
static bool drive_alone(kvn_ucx_end *end)
{
    int64_t idle_since = kvn_now_ns();

    while (!atomic_load(&end->num_attending) && !atomic_load(&end->is_stopping)) {
        const unsigned count = kvn_ucx_round(end);
        const int64_t now = kvn_now_ns();
        if (count)
            idle_since = now;
        else if (now - idle_since > KVN_UCX_THREAD_SPIN_NS && kvn_ucx_arm(end))
            return true;
        relax(end);
    }
    return false;
}

void *kvn_ucx_thread(void *argument)
{
    kvn_ucx_end *end = argument;

    while (!atomic_load(&end->is_stopping)) {
        struct epoll_event events[2];
        bool is_asleep = false;
        atomic_store(&end->is_parked, true); /* from here on whoever leaves the turn rings */
        if (!atomic_load(&end->num_attending) && kvn_ucx_try_turn(end)) {
            atomic_store(&end->is_parked, false);
            if (!drive_alone(end)) {
                kvn_ucx_leave_turn(end);
                continue;
            }
            pthread_mutex_lock(&end->roles);
            is_asleep = !atomic_load(&end->num_attending);
            atomic_store(&end->is_parked, true);
            if (is_asleep) {
                atomic_store(&end->asleep, KVN_UCX_THREAD);
                let_thread_watch(end, true);
            }
            pthread_mutex_unlock(&end->roles);
            if (is_asleep)
                kvn_ucx_drop_turn(end);
            else
                kvn_ucx_leave_turn(end);
        }
        const int count = epoll_wait(end->thread_set, events, 2, -1);
        atomic_store(&end->is_parked, false);
        int thread = KVN_UCX_THREAD;
        pthread_mutex_lock(&end->roles);
        let_thread_watch(end, false);
        atomic_compare_exchange_strong(&end->asleep, &thread, KVN_UCX_NOBODY);
        pthread_mutex_unlock(&end->roles);
        for (int i = 0; i < count; i++)
            if (events[i].data.fd == end->thread_event)
                kvn_ucx_unring(end->thread_event);
        atomic_fetch_add_explicit(&end->wakeups, 1, memory_order_relaxed);
    }
    return NULL;
}
