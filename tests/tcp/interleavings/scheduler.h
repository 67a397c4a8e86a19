/* Runs a scenario in all interleavings of its threads with at most the given number of preemptions. One thread runs at
 * a time, up to a point where another may continue: a system call, a lock, an access to an atomic. Code between two
 * points is one step. So the memory order is sequentially consistent, and bugs of a weaker order are not found
 * (ThreadSanitizer detects data races).
 *
 * A preemption is a switch away from a thread that could have continued, or a timeout if another step was possible.
 * A switch away from a thread that waits or yields is not a preemption. */
#ifndef MODEL_SCHEDULER_H
#define MODEL_SCHEDULER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MODEL_FOREVER INT64_MAX
#define MODEL_TICK_NS 40000 /* each read of the clock advances it, so loops that poll for some time end */

typedef bool (*model_condition)(void *of);

/* ---- calls of scenarios ---- */

typedef struct model_thread model_thread;

model_thread *model_spawn(const char *name, void *(*run)(void *), void *argument);
void model_join(model_thread *thread);
/* Waits until the other threads make the condition true. Evaluating the condition is not a step. */
void model_await(model_condition is_so, void *of);
/* Allows or forbids preemptions from here on. A scenario begins without preemptions. */
void model_explore(bool on);
/* Makes the first thread wait until all other threads wait. */
void model_settle(void);
/* Records an outcome of this run, below 64. The report lists the outcomes of all runs. */
void model_note(unsigned outcome);
/* Prints the message and the interleaving, and ends the program. */
__attribute__((format(printf, 1, 2), noreturn)) void model_violated(const char *format, ...);
#define MODEL_CHECK(truth)                                                                         \
    do {                                                                                           \
        if (!(truth))                                                                              \
            model_violated("%s: not so: %s", __func__, #truth);                                    \
    } while (0)

/* ---- primitives of system calls ---- */

/* A point where other threads may run. `what` is the next step, in the function `where`. */
void model_point(const char *what, const char *where);
/* A point where the thread waits for the condition. Returns false at the deadline. */
bool model_wait(model_condition is_so, void *of, int64_t deadline_ns, const char *what, const char *where);
/* A point where another thread runs if one can. */
void model_yield(const char *where);
int64_t model_now(void);
int model_self(void);

/* Memory of one run. A write to freed memory, or a lock in it, is a violation. */
void *model_malloc(size_t nbytes);
void *model_calloc(size_t count, size_t nbytes);
void *model_realloc(void *memory, size_t nbytes);
void model_free(void *memory);

/* ---- programs, and the system ---- */

typedef struct model_scenario {
    const char *name;
    void (*run)(void);
    unsigned preemptions; /* default of the most preemptions */
} model_scenario;

/* Runs the scenarios, of which the last has no name. Returns the exit status for main. */
int model_main(int count, char **arguments, const model_scenario *scenarios);

/* In files.c. A run starts without files, and a file that is open at its end is a violation. */
void model_system_begin(void);
void model_system_end(void);

#endif
