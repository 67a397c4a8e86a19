/* Checks of the events that are kept for reuse, and of the load of a channel. */
#include "device/events.c"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "core/thread.h"
#include "device/channel.h"

static int destroyed, entered;

int kvn_device_enter(const kvn_device *device, void **previous, kvn_failure *failure)
{
    (void)device, (void)previous, (void)failure;
    entered++;
    return KVN_OK;
}

void kvn_device_leave(const kvn_device *device, void *previous)
{
    (void)device, (void)previous;
    entered--;
}

static int destroy(const kvn_device *device, void *event, kvn_failure *failure)
{
    (void)device, (void)event, (void)failure;
    destroyed++;
    return KVN_OK;
}

/* Events of the device's context and of the primary one are kept. Other contexts are the program's, with
 * their events. */
static void kept_by_context(void)
{
    static const kvn_device_ops ops = {.destroy_event = destroy};
    static int ours, primary, programs, an_event;
    kvn_device device = {.ops = &ops, .context = &ours, .primary = &primary};
    kvn_events events = {.device = &device, .mutex = PTHREAD_MUTEX_INITIALIZER};
    void *contexts[] = {&ours, &primary, &programs};

    for (int i = 0; i < 3; i++) {
        kvn_event_unit *unit = calloc(1, sizeof *unit);

        unit->context = contexts[i];
        unit->event = &an_event;
        keep_unit(&events, unit);
    }
    CHECK(events.num_units[0] == 2 && events.num_units[1] == 0);
    CHECK(destroyed == 1 && entered == 0);
}

static int set_context(const kvn_device *device, void *context, kvn_failure *failure)
{
    (void)device, (void)context, (void)failure;
    return KVN_OK;
}

static int create_stream(const kvn_device *device, kvn_stream *out, kvn_failure *failure)
{
    static int a_stream;

    (void)device, (void)failure;
    *out = (kvn_stream)&a_stream;
    return KVN_OK;
}

static int destroy_stream(const kvn_device *device, kvn_stream stream, kvn_failure *failure)
{
    (void)device, (void)stream, (void)failure;
    return KVN_OK;
}

static atomic_bool may_end;

static void hold(kvn_channel_job *job, kvn_channel *channel)
{
    (void)job, (void)channel;
    while (!atomic_load(&may_end))
        sched_yield();
}

/* Batches go to the channel with the lowest load; cancelled ones do not count any more. */
static void load_of_what_is_left(void)
{
    static const kvn_device_ops ops = {.name = "said", .runtime = "said", .set_context = set_context,
                                       .create_stream = create_stream, .destroy_stream = destroy_stream};
    kvn_device device = {.ops = &ops, .pid = getpid()};
    kvn_channel_job jobs[5] = {{.run = hold}, {.run = hold}, {.run = hold}, {.run = hold}, {.run = hold}};
    kvn_channel *channel;
    kvn_failure failure;

    CHECK(kvn_channel_create(&device, &channel, &failure) == KVN_OK);
    for (unsigned i = 0; i < 4; i++) {
        CHECK(kvn_channel_load(channel) == i);
        kvn_channel_submit(channel, &jobs[i]);
    }
    CHECK(kvn_channel_dequeue(channel, &jobs[3])); /* the last batch, and one between others */
    CHECK(kvn_channel_load(channel) == 3);
    CHECK(!kvn_channel_dequeue(channel, &jobs[3]));
    CHECK(kvn_channel_dequeue(channel, &jobs[1]));
    CHECK(kvn_channel_load(channel) == 2);
    kvn_channel_submit(channel, &jobs[4]); /* behind the remaining ones */
    CHECK(kvn_channel_load(channel) == 3);
    CHECK(kvn_channel_dequeue(channel, &jobs[4]) && kvn_channel_dequeue(channel, &jobs[2]));
    kvn_channel_submit(channel, &jobs[4]); /* to an empty queue */
    kvn_channel_submit(channel, &jobs[2]);
    atomic_store(&may_end, true);
    while (kvn_channel_load(channel) > 0)
        sched_yield();
    CHECK(!kvn_channel_dequeue(channel, &jobs[2]));
    kvn_channel_destroy(channel);
}

static atomic_int awaiting;

typedef struct awaited {
    kvn_channel *channel;
    kvn_channel_job *job;
    bool in_time;
} awaited;

static void *await_issued(void *argument)
{
    awaited *it = argument;

    atomic_store(&awaiting, (int)syscall(SYS_gettid));
    it->in_time = kvn_channel_await_issued(it->channel, it->job, kvn_now_ns() + INT64_C(20000000000));
    return NULL;
}

static void wait_until_it_sleeps(void)
{
    char path[64], state = 'R';

    while (!atomic_load(&awaiting))
        sched_yield();
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", atomic_load(&awaiting));
    while (state != 'S') {
        FILE *file = fopen(path, "r");
        CHECK(file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1);
        fclose(file);
        sched_yield();
    }
    atomic_store(&awaiting, 0);
}

/* A caller that waits until all work of a job is on the stream is woken by that, or by the job's
 * cancellation. */
static void await_wakes(void)
{
    static const kvn_device_ops ops = {.name = "said", .runtime = "said", .set_context = set_context,
                                       .create_stream = create_stream, .destroy_stream = destroy_stream};
    kvn_device device = {.ops = &ops, .pid = getpid()};
    kvn_channel_job jobs[2] = {{.run = hold}, {.run = hold}};
    kvn_channel *channel;
    kvn_failure failure;

    CHECK(kvn_channel_create(&device, &channel, &failure) == KVN_OK);
    for (int how = 0; how < 3; how++) {
        pthread_t thread;

        atomic_store(&may_end, false);
        kvn_channel_submit(channel, &jobs[0]);
        while (jobs[0].queued)
            sched_yield();
        kvn_channel_submit(channel, &jobs[1]);
        awaited it = {channel, &jobs[how == 0], false};
        CHECK(pthread_create(&thread, NULL, await_issued, &it) == 0);
        wait_until_it_sleeps();
        if (how == 0)
            CHECK(kvn_channel_dequeue(channel, &jobs[1]));
        else if (how == 1)
            kvn_channel_note_issued(channel);
        else
            atomic_store(&may_end, true);
        pthread_join(thread, NULL);
        CHECK(it.in_time);
        atomic_store(&may_end, true);
        while (kvn_channel_load(channel) > 0)
            sched_yield();
    }
    kvn_channel_destroy(channel);
}

static void *get_no_context(const kvn_device *device)
{
    (void)device;
    return NULL;
}

static atomic_int num_aborted;

static int count_abort(const kvn_device *device, kvn_stream stream, kvn_failure *failure)
{
    (void)device, (void)stream, (void)failure;
    atomic_fetch_add(&num_aborted, 1);
    return KVN_OK;
}

/* A job that records whether it was interrupted. */
typedef struct told_job {
    kvn_channel_job job;
    atomic_bool has_begun, may_end, has_ended;
    bool ended_interrupted;
} told_job;

static void run_told(kvn_channel_job *job, kvn_channel *channel)
{
    told_job *it = (told_job *)job;

    atomic_store(&it->has_begun, true);
    while (!atomic_load(&it->may_end))
        sched_yield();
    it->ended_interrupted = kvn_channel_settle(channel);
    atomic_store(&it->has_ended, true);
}

/* An interrupt affects only the job that runs. */
static void interrupt_ends_with_its_job(void)
{
    static const kvn_device_ops ops = {.name = "said", .runtime = "said", .set_context = set_context,
                                       .get_context = get_no_context, .create_stream = create_stream,
                                       .destroy_stream = destroy_stream, .abort_stream = count_abort};
    kvn_device device = {.ops = &ops, .pid = getpid()};
    told_job jobs[5] = {0};
    kvn_channel *channel;
    kvn_failure failure;

    CHECK(kvn_channel_create(&device, &channel, &failure) == KVN_OK);
    for (int i = 0; i < 5; i++) {
        const int before = atomic_load(&num_aborted);

        jobs[i].job.run = run_told;
        kvn_channel_submit(channel, &jobs[i].job);
        while (!atomic_load(&jobs[i].has_begun))
            sched_yield();
        kvn_channel_interrupt(channel, &jobs[(i + 1) % 5].job); /* a job that does not run */
        CHECK(atomic_load(&num_aborted) == before);
        if (i % 2)
            kvn_channel_interrupt(channel, &jobs[i].job);
        CHECK(atomic_load(&num_aborted) == before + i % 2);
        atomic_store(&jobs[i].may_end, true);
        while (!atomic_load(&jobs[i].has_ended) || kvn_channel_load(channel) > 0)
            sched_yield();
        CHECK(jobs[i].ended_interrupted == (i % 2 == 1));
        kvn_channel_interrupt(channel, &jobs[i].job); /* already ended */
        CHECK(atomic_load(&num_aborted) == before + i % 2);
    }
    kvn_channel_destroy(channel);
}

static atomic_bool may_make;

static int make_stream_later(const kvn_device *device, kvn_stream *out, kvn_failure *failure)
{
    while (!atomic_load(&may_make))
        sched_yield();
    return create_stream(device, out, failure);
}

static atomic_bool has_run;

static void note_run(kvn_channel_job *job, kvn_channel *channel)
{
    (void)job, (void)channel;
    atomic_store(&has_run, true);
}

/* A driver that makes a stream slowly delays only the thread of that channel. */
static void begun_without_waiting(void)
{
    static const kvn_device_ops ops = {.name = "said", .runtime = "said", .set_context = set_context,
                                       .create_stream = make_stream_later, .destroy_stream = destroy_stream};
    kvn_device device = {.ops = &ops, .pid = getpid()};
    kvn_channel_job job = {.run = note_run};
    kvn_channel *channel;
    kvn_failure failure;

    CHECK(kvn_channel_begin(&device, &channel, &failure) == KVN_OK);
    kvn_channel_submit(channel, &job);
    CHECK(!atomic_load(&has_run));
    atomic_store(&may_make, true);
    kvn_channel_destroy(channel); /* the job runs first */
    CHECK(atomic_load(&has_run));
}

/* ---- polls ---- */

static kvn_event_unit points[4];
static int answers[4], num_queries[4], num_opened;
static bool is_full;

static int query(const kvn_device *device, void *event, kvn_failure *failure)
{
    const ptrdiff_t i = (kvn_event_unit *)event - points;

    (void)device, (void)failure;
    num_queries[i]++;
    return answers[i];
}

static bool note_open(kvn_gate_waiter *waiter, int status, const kvn_failure *why)
{
    (void)waiter, (void)why;
    num_opened += status == KVN_OK;
    return true;
}

static bool open_if_room(kvn_gate_waiter *waiter, int status, const kvn_failure *why)
{
    return !is_full && note_open(waiter, status, why);
}

typedef struct looks {
    kvn_device device;
    kvn_events events;
    kvn_event gates[5];
    kvn_gate_waiter waiters[5];
} looks;

/* Five waiters: two at the first point, and one at each of the others, the last of which is on another
 * stream. */
static void begin_looks(looks *it)
{
    static const kvn_device_ops ops = {.query_event = query};
    static int one, another;

    *it = (looks){.device = {.ops = &ops}, .events = {.mutex = PTHREAD_MUTEX_INITIALIZER}};
    it->events.device = &it->device;
    kvn_cond_init(&it->events.changed);
    kvn_list_init(&it->events.waiting);
    num_opened = 0;
    for (int i = 0; i < 5; i++) {
        const int at = i > 0 ? i - 1 : 0;

        points[at] = (kvn_event_unit){.event = &points[at], .of = (kvn_stream)(at < 3 ? &one : &another), .number = at};
        answers[at] = KVN_PENDING;
        num_queries[at] = 0;
        it->gates[i] = (kvn_event){.events = &it->events, .unit = &points[at]};
        it->waiters[i] = (kvn_gate_waiter){.gate = &it->gates[i].gate, .open = note_open};
        kvn_list_push_back(&it->events.waiting, &it->waiters[i].node);
    }
}

static bool look_once(looks *it)
{
    bool any;

    pthread_mutex_lock(&it->events.mutex);
    any = look_at_all(&it->events);
    pthread_mutex_unlock(&it->events.mutex);
    return any;
}

/* Only the first of successive points on a stream is queried, once for all of its waiters. Each poll also
 * queries one of the others, so that none is missed. */
static void first_of_each_stream(void)
{
    looks it;
    int sum;

    begin_looks(&it);
    for (int turn = 0; turn < 9; turn++) {
        CHECK(!look_once(&it));
        sum = num_queries[0] + num_queries[1] + num_queries[2] + num_queries[3];
        CHECK(sum <= 3 * (turn + 1));
        CHECK(num_queries[3] == turn + 1);
    }
    CHECK(num_queries[0] >= 9 && num_queries[1] >= 2 && num_queries[2] >= 2);
    answers[2] = KVN_OK; /* on a stream with the handle of a destroyed one */
    for (int turn = 0; turn < 4; turn++)
        look_once(&it);
    CHECK(num_opened == 1);
    answers[0] = answers[1] = answers[3] = KVN_OK;
    CHECK(look_once(&it));
    CHECK(num_opened == 5 && !kvn_list_first(&it.events.waiting));
}

/* A waiter whose backend has no room delays no other waiter, and its point is not queried again. */
static void one_without_room(void)
{
    looks it;

    begin_looks(&it);
    it.waiters[0].open = open_if_room;
    is_full = true;
    answers[0] = answers[1] = answers[2] = answers[3] = KVN_OK;
    CHECK(look_once(&it));
    CHECK(num_opened == 4 && num_queries[0] == 2);
    CHECK(!look_once(&it));
    is_full = false;
    CHECK(look_once(&it));
    CHECK(num_opened == 5 && num_queries[0] == 2);
}

static int make_event(const kvn_device *device, void **out, kvn_failure *failure)
{
    static int an_event;

    (void)device, (void)failure;
    *out = &an_event;
    return KVN_OK;
}

static int record_event(const kvn_device *device, void *event, kvn_stream stream, kvn_failure *failure)
{
    (void)device, (void)event, (void)stream, (void)failure;
    return KVN_OK;
}

static int is_there(const kvn_device *device, void *event, kvn_failure *failure)
{
    (void)device, (void)event, (void)failure;
    return KVN_OK;
}

/* A reused event belongs to the stream of its new point, or to no known stream, and is behind all earlier
 * points. */
static void used_for_another_stream(void)
{
    static const kvn_device_ops ops = {.get_context = get_no_context, .set_context = set_context,
                                       .create_event = make_event, .record_event = record_event,
                                       .query_event = is_there, .destroy_event = destroy};
    static int one, another;
    const kvn_stream streams[] = {(kvn_stream)&one, (kvn_stream)&another, (kvn_stream)&one, NULL, (kvn_stream)2};
    kvn_device device = {.ops = &ops, .pid = getpid()};
    kvn_events *events = kvn_events_create(&device);
    const kvn_event_unit *before = NULL;
    kvn_event event;
    kvn_failure failure;

    for (uint64_t i = 0; i < sizeof streams / sizeof *streams; i++) {
        CHECK(kvn_event_take_stream(events, streams[i], &event, &failure) == KVN_OK);
        CHECK(!before || event.unit == before);
        CHECK(event.unit->of == (i < 3 ? streams[i] : NULL) && event.unit->number == i);
        before = event.unit;
        kvn_event_give_back(&event);
    }
    kvn_events_destroy(events);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"kept_by_context", kept_by_context},
        {"load_of_what_is_left", load_of_what_is_left},
        {"interrupt_ends_with_its_job", interrupt_ends_with_its_job},
        {"await_wakes", await_wakes},
        {"begun_without_waiting", begun_without_waiting},
        {"first_of_each_stream", first_of_each_stream},
        {"one_without_room", one_without_room},
        {"used_for_another_stream", used_for_another_stream},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
