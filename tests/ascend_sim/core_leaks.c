/* Counts objects that still exist, and logs the counts at exit. */
#include <stdio.h>
#include <string.h>

#include "core.h"
#include "core_log.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int counts[SIM_NUM_COUNTS];
static _Thread_local char text[512];

void sim_count(sim_counted what, int change) {
    pthread_mutex_lock(&mutex);
    counts[what] += change;
    pthread_mutex_unlock(&mutex);
}

const char *kvsim_leaks(void) {
    uint64_t device_bytes, pinned, registered;
    sim_memory_totals(&device_bytes, &pinned, &registered);
    pthread_mutex_lock(&mutex);
    snprintf(text, sizeof text,
             "{\"streams\":%d,\"events\":%d,\"contexts\":%d,\"device_bytes\":%llu,\"pinned\":%llu,"
             "\"registered\":%llu,\"regions\":%d,\"comms\":%d,\"handles\":%d,\"ranges\":%d,"
             "\"modules\":%d}",
             counts[SIM_COUNT_STREAMS], counts[SIM_COUNT_EVENTS], counts[SIM_COUNT_CONTEXTS],
             (unsigned long long)device_bytes, (unsigned long long)pinned,
             (unsigned long long)registered, counts[SIM_COUNT_REGIONS], counts[SIM_COUNT_COMMS],
             counts[SIM_COUNT_HANDLES], counts[SIM_COUNT_RANGES], counts[SIM_COUNT_MODULES]);
    pthread_mutex_unlock(&mutex);
    return text;
}

void sim_leaks_note(const char *when) {
    const char *left = kvsim_leaks() + 1; /* without the braces */
    sim_note("leaks", "\"when\":\"%s\",%.*s", when, (int)strlen(left) - 1, left);
}

/* Does nothing in a forked child, where a thread of the parent may have left a mutex locked. */
__attribute__((destructor)) static void note_at_exit(void) {
    if (!sim_is_forked()) {
        sim_leaks_note("exit");
    }
}
