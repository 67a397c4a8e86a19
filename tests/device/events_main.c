/* Checks of which events are kept for others. */
#include "device/events.c"

#include "check.h"

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

int main(int count, char **arguments)
{
    static const check_row rows[] = {{"kept_by_context", kept_by_context}};

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
