/* Waits until another thread of the check sleeps. The thread stores its id in `other`. */
#ifndef KVN_TESTS_ASLEEP_H
#define KVN_TESTS_ASLEEP_H

#include <sched.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "check.h"

static _Atomic pid_t other;

static void wait_until_it_sleeps(void)
{
    char path[64], state = 'R';

    while (!other)
        sched_yield();
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)other);
    while (state != 'S') {
        FILE *file = fopen(path, "r");
        CHECK(file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1);
        fclose(file);
        sched_yield();
    }
}

#endif
