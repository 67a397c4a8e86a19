/* Runs one UCX worker: the thread that progresses it, its holders, and the tickets of its writes. */
#include "ucx/worker.h"

#include <errno.h>
#include <malloc.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/thread.h"
#include "kvnative/backend.h"

#define SPIN_NS 50000 /* after the last event: most operations end within this time */
#define RETRY_NS 1000000 /* between two passes of a waiting thread after the worker's thread has stopped */
#define SETTLE_NS 20000 /* time for a small transfer to end before a thread is woken for it */

/* ---- the submission queue ---- */

static kvn_ucx_work *take_work(kvn_ucx_worker *self)
{
    pthread_mutex_lock(&self->mutex);
    kvn_ucx_work *work = self->first_work;
    if (work)
        self->first_work = work->next;
    pthread_mutex_unlock(&self->mutex);
    return work;
}

static bool has_work(kvn_ucx_worker *self)
{
    pthread_mutex_lock(&self->mutex);
    const bool has_any = self->first_work != NULL;
    pthread_mutex_unlock(&self->mutex);
    return has_any;
}

static void queue_work(kvn_ucx_worker *self, kvn_ucx_work *work)
{
    pthread_mutex_lock(&self->mutex);
    if (self->first_work)
        self->last_work->next = work;
    else
        self->first_work = work;
    self->last_work = work;
    pthread_mutex_unlock(&self->mutex);
}

/* ---- with the progress lock ---- */

static unsigned run_work(kvn_ucx_worker *self)
{
    kvn_ucx_work *work;
    unsigned count = 0;

    for (; (work = take_work(self)) != NULL; count++)
        work->run(work->context);
    return count;
}

static unsigned step_tasks(kvn_ucx_worker *self)
{
    unsigned count = 0;

    self->has_completed = false;
    for (kvn_ucx_task *it = self->first_task, *next; it; it = next) {
        next = it->next;
        count += it->step(it->context);
    }
    return count;
}

static unsigned progress_once(kvn_ucx_worker *self)
{
    unsigned count = run_work(self);

    count += step_tasks(self);
    count += self->calls->ucp_worker_progress(self->handle);
    return count + self->has_completed; /* UCX may call back, but report no progress */
}

/* Progresses until `is_done`, the deadline, or some time without an event. */
static void progress_until(kvn_ucx_worker *self, bool (*is_done)(const void *context),
                           const void *context, int64_t deadline_ns)
{
    int64_t now = kvn_now_ns(), busy_ns = now;

    while (!is_done(context) && now < deadline_ns && now - busy_ns <= SPIN_NS) {
        const bool is_busy = progress_once(self) > 0;
        now = kvn_now_ns();
        if (is_busy)
            busy_ns = now;
        else
            sched_yield();
    }
}

static void wake_thread(kvn_ucx_worker *self)
{
    const uint64_t one = 1;
    while (write(self->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void take_wakeups(kvn_ucx_worker *self)
{
    uint64_t count;
    while (read(self->wake_fd, &count, sizeof count) < 0 && errno == EINTR)
        ;
}

static bool try_acquire(kvn_ucx_worker *self)
{
    return pthread_mutex_trylock(&self->progress_lock) == 0;
}

/* Returns true if the next event will wake the thread. */
static bool arm(kvn_ucx_worker *self)
{
    const int64_t until_ns = kvn_now_ns() + SETTLE_NS;

    do {
        if (progress_once(self) == 0 && self->calls->ucp_worker_arm(self->handle) == KVN_UCS_OK)
            return true;
    } while (kvn_now_ns() < until_ns);
    return false;
}

/* Releases the lock, and then checks for items: a thread that queued one meanwhile found the lock taken. */
static void release(kvn_ucx_worker *self)
{
    do {
        if (!arm(self))
            wake_thread(self);
        pthread_mutex_unlock(&self->progress_lock);
    } while (has_work(self) && try_acquire(self));
}

/* ---- calls of other files ---- */

void kvn_ucx_post(kvn_ucx_worker *self, kvn_ucx_work *work, void (*run)(void *context),
                  void *context)
{
    *work = (kvn_ucx_work){.run = run, .context = context};
    queue_work(self, work);
    if (try_acquire(self))
        release(self);
}

typedef struct call {
    kvn_ucx_worker *worker;
    void (*run)(void *context);
    void *context;
    atomic_bool is_done; /* set last: from then on the call may be freed */
} call;

static void run_call(void *context)
{
    call *it = context;
    kvn_ucx_worker *worker = it->worker;

    it->run(it->context);
    atomic_store(&it->is_done, true);
    kvn_ucx_notify(worker);
}

static bool is_run(const void *context)
{
    return atomic_load(&((const call *)context)->is_done);
}

void kvn_ucx_call(kvn_ucx_worker *self, void (*run)(void *context), void *context)
{
    call it = {.worker = self, .run = run, .context = context};
    kvn_ucx_work work;

    kvn_ucx_post(self, &work, run_call, &it);
    kvn_ucx_wait(self, is_run, &it, KVN_FOREVER);
}

static void help(kvn_ucx_worker *self, bool (*is_done)(const void *context), const void *context,
                 int64_t deadline_ns)
{
    if (!try_acquire(self))
        return;
    progress_until(self, is_done, context, deadline_ns);
    release(self);
}

/* Once the worker's thread has stopped, only waiting threads make progress. */
bool kvn_ucx_wait(kvn_ucx_worker *self, bool (*is_done)(const void *context), const void *context,
                  int64_t deadline_ns)
{
    bool is_over;

    if (is_done(context))
        return true;
    help(self, is_done, context, deadline_ns);
    pthread_mutex_lock(&self->mutex);
    while (!(is_over = is_done(context)) && kvn_now_ns() < deadline_ns) {
        if (self->has_thread) {
            kvn_cond_wait(&self->changed, &self->mutex, deadline_ns);
            continue;
        }
        const int64_t next_ns = kvn_now_ns() + RETRY_NS;
        kvn_cond_wait(&self->changed, &self->mutex, next_ns < deadline_ns ? next_ns : deadline_ns);
        pthread_mutex_unlock(&self->mutex);
        help(self, is_done, context, deadline_ns);
        pthread_mutex_lock(&self->mutex);
    }
    pthread_mutex_unlock(&self->mutex);
    return is_over;
}

void kvn_ucx_notify(kvn_ucx_worker *self)
{
    pthread_mutex_lock(&self->mutex);
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
}

/* ---- tasks ---- */

void kvn_ucx_add_task(kvn_ucx_worker *self, kvn_ucx_task *task, unsigned (*step)(void *context),
                      void *context)
{
    *task = (kvn_ucx_task){.step = step, .context = context, .previous = self->last_task};
    if (self->last_task)
        self->last_task->next = task;
    else
        self->first_task = task;
    self->last_task = task;
}

void kvn_ucx_remove_task(kvn_ucx_worker *self, kvn_ucx_task *task)
{
    if (task->previous)
        task->previous->next = task->next;
    else
        self->first_task = task->next;
    if (task->next)
        task->next->previous = task->previous;
    else
        self->last_task = task->previous;
}

/* ---- the thread ---- */

/* The thread does not spin, because that would keep waiting callers, which are faster, from the lock. */
static void *run_thread(void *argument)
{
    kvn_ucx_worker *self = argument;
    struct pollfd files[] = {{.fd = self->events_fd, .events = POLLIN},
                             {.fd = self->wake_fd, .events = POLLIN}};

    while (!atomic_load(&self->is_stopping)) {
        pthread_mutex_lock(&self->progress_lock);
        release(self);
        if (poll(files, 2, -1) > 0 && files[1].revents & POLLIN)
            take_wakeups(self);
    }
    return NULL;
}

static int start_thread(kvn_ucx_worker *self, kvn_failure *failure)
{
    const int error = kvn_thread_start(&self->thread, NULL, "kvn-ucx", run_thread, self);

    if (error)
        return kvn_fail(failure, error == EAGAIN ? KVN_NO_MEMORY : KVN_FAILED, error,
                        "no thread for a UCX worker: %s", strerror(error));
    self->has_thread = true;
    return KVN_OK;
}

/* The first caller stops the thread; others wait until it has ended. */
void kvn_ucx_worker_stop(kvn_ucx_worker *self)
{
    if (kvn_ucx_worker_is_forked(self))
        return;
    pthread_mutex_lock(&self->mutex);
    const bool is_first = !atomic_exchange(&self->is_stopping, true);
    while (!is_first && self->has_thread)
        pthread_cond_wait(&self->changed, &self->mutex);
    pthread_mutex_unlock(&self->mutex);
    if (!is_first)
        return;
    wake_thread(self);
    pthread_join(self->thread, NULL);
    pthread_mutex_lock(&self->mutex);
    self->has_thread = false;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
}

/* ---- making ---- */

/* Separate pages: UCX publishes whole pages, which a network card reads. */
static int make_tickets(kvn_ucx_worker *self, kvn_failure *failure)
{
    void *pages = mmap(NULL, KVN_UCX_TICKETS * sizeof *self->tickets, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (pages == MAP_FAILED)
        return kvn_fail(failure, KVN_NO_MEMORY, errno, "no memory for the tickets of a UCX worker");
    self->tickets = pages;
    return KVN_OK;
}

static int open_worker(kvn_ucx_worker *self, kvn_failure *failure)
{
    /* One thread at a time has the progress lock, but not always the same one. */
    const kvn_ucp_worker_params params = {
        .field_mask = KVN_UCP_WORKER_PARAM_THREAD_MODE | KVN_UCP_WORKER_PARAM_FLAGS,
        .thread_mode = KVN_UCS_THREAD_MODE_SERIALIZED,
        .flags = KVN_UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK,
    };
    const kvn_ucx *calls = self->calls;
    kvn_ucs_status status = calls->ucp_worker_create(self->context, &params, &self->handle);

    if (status != KVN_UCS_OK)
        return kvn_ucx_fail(self->library, "ucp_worker_create", status, failure);
    status = calls->ucp_worker_get_efd(self->handle, &self->events_fd);
    if (status != KVN_UCS_OK)
        return kvn_ucx_fail(self->library, "ucp_worker_get_efd", status, failure);
    status = calls->ucp_worker_get_address(self->handle, &self->address, &self->address_nbytes);
    if (status != KVN_UCS_OK)
        return kvn_ucx_fail(self->library, "ucp_worker_get_address", status, failure);
    self->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (self->wake_fd < 0)
        return kvn_fail(failure, KVN_FAILED, errno, "no eventfd for a UCX worker: %s",
                        strerror(errno));
    return start_thread(self, failure);
}

/* UCX allocates 13 MiB for a worker with malloc, in blocks of 4 and 2 MiB. Once such a block was freed, malloc serves
 * them from its arenas, each of which keeps twice as much: 69 MB after 300 engines. */
static void give_back(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

static void destroy(kvn_ucx_worker *self)
{
    if (self->address)
        self->calls->ucp_worker_release_address(self->handle, self->address);
    if (self->handle)
        self->calls->ucp_worker_destroy(self->handle);
    if (self->context)
        self->calls->ucp_cleanup(self->context);
    if (self->wake_fd >= 0)
        close(self->wake_fd);
    if (self->tickets)
        munmap((void *)self->tickets, KVN_UCX_TICKETS * sizeof *self->tickets);
    pthread_cond_destroy(&self->changed);
    pthread_mutex_destroy(&self->mutex);
    pthread_mutex_destroy(&self->progress_lock);
    atomic_fetch_sub(&self->library->num_workers, 1);
    free(self);
    give_back();
}

/* While a worker exists, UCX has its own thread and locks. A forked child lacks the thread, and UCX does not start
 * another one there, since it counts the parent's. */
static int count_worker(kvn_ucx_library *library, kvn_failure *failure)
{
    const pid_t self = getpid();

    if (atomic_load(&library->num_workers) && library->pid != self)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                        "UCX was in use in process %d when this one, %d, was forked from it: start such "
                        "processes with the method spawn, or fork before UCX is used, or after all that "
                        "uses it is closed", (int)library->pid, (int)self);
    library->pid = self;
    atomic_fetch_add(&library->num_workers, 1);
    return KVN_OK;
}

int kvn_ucx_worker_create(kvn_ucx_library *library, const kvn_ucx_setting *settings,
                          size_t num_settings, const char *name, kvn_ucx_worker **out,
                          kvn_failure *failure)
{
    kvn_ucx_settings all = {.library = library, .given = settings, .num_given = num_settings};
    kvn_ucx_worker *self = calloc(1, sizeof *self);
    sigset_t all_signals, before;

    if (!self)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a UCX worker");
    failure->status = KVN_OK;
    if (count_worker(library, failure) != KVN_OK) {
        free(self);
        return failure->status;
    }
    self->library = library;
    self->calls = &library->calls;
    self->pid = getpid();
    self->wake_fd = -1;
    atomic_init(&self->num_holders, 1);
    pthread_mutex_init(&self->mutex, NULL);
    pthread_mutex_init(&self->progress_lock, NULL);
    kvn_cond_init(&self->changed);
    kvn_ucx_log_clear();
    /* UCX's own thread inherits this mask: signals are for the threads of the program. */
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &before);
    if (make_tickets(self, failure) == KVN_OK &&
        kvn_ucx_settings_export(&all, failure) == KVN_OK &&
        kvn_ucx_context_open(&all, name, &self->context, self->transports, failure) == KVN_OK)
        open_worker(self, failure);
    kvn_ucx_settings_restore(&all);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failure->status != KVN_OK) {
        kvn_ucx_log_append(failure->message, sizeof failure->message);
        destroy(self);
        return failure->status;
    }
    *out = self;
    return KVN_OK;
}

void kvn_ucx_worker_hold(kvn_ucx_worker *self) { atomic_fetch_add(&self->num_holders, 1); }

void kvn_ucx_worker_release(kvn_ucx_worker *self)
{
    if (atomic_fetch_sub(&self->num_holders, 1) == 1 && !kvn_ucx_worker_is_forked(self))
        destroy(self);
}

bool kvn_ucx_worker_is_forked(const kvn_ucx_worker *self) { return self->pid != getpid(); }
