/* Checks of which events are kept for others, and of what a channel has to do. */
#include "device/events.c"

#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "check.h"
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

/* Of the device's context and the primary one; any other is the program's, and its events go with it. */
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

/* Batches go to the channel that has least to do: what was taken back is not counted any more. */
static void load_of_what_is_left(void)
{
    static const kvn_device_ops ops = {.name = "said", .runtime = "said", .set_context = set_context,
                                       .create_stream = create_stream, .destroy_stream = destroy_stream};
    kvn_device device = {.ops = &ops, .pid = getpid()};
    kvn_channel_job jobs[4] = {{.run = hold}, {.run = hold}, {.run = hold}, {.run = hold}};
    kvn_channel *channel;
    kvn_failure failure;

    CHECK(kvn_channel_create(&device, &channel, &failure) == KVN_OK);
    for (unsigned i = 0; i < 4; i++) {
        CHECK(kvn_channel_load(channel) == i);
        kvn_channel_submit(channel, &jobs[i]);
    }
    CHECK(kvn_channel_dequeue(channel, &jobs[3])); /* the last, and one between others */
    CHECK(kvn_channel_load(channel) == 3);
    CHECK(!kvn_channel_dequeue(channel, &jobs[3]));
    CHECK(kvn_channel_dequeue(channel, &jobs[1]));
    CHECK(kvn_channel_load(channel) == 2);
    atomic_store(&may_end, true);
    while (kvn_channel_load(channel) > 0)
        sched_yield();
    CHECK(!kvn_channel_dequeue(channel, &jobs[2]));
    kvn_channel_destroy(channel);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"kept_by_context", kept_by_context},
        {"load_of_what_is_left", load_of_what_is_left},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
