/* Runs a scenario again and again, each time with another interleaving of its threads, until all interleavings with
 * the given number of preemptions were run. One thread runs at a time, up to a point where another may continue: a
 * system call, a lock, an access to an atomic. Code between two points is one step. So the memory order is
 * sequentially consistent: bugs of a weaker order are not found here (ThreadSanitizer looks for data races).
 *
 * A preemption is a switch away from a thread that could have continued, or a timeout when something else could have
 * happened first. Switches away from a thread that waits, or that yields, cost nothing. */
#ifndef MODEL_SCHEDULER_H
#define MODEL_SCHEDULER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MODEL_FOREVER INT64_MAX
#define MODEL_TICK_NS 40000 /* the time of each look at the clock, which ends loops that spin for some time */

typedef bool (*model_condition)(void *of);

/* ---- calls of scenarios ---- */

typedef struct model_thread model_thread;

model_thread *model_spawn(const char *name, void *(*run)(void *), void *argument);
void model_join(model_thread *thread);
/* Waits until the other threads make the condition true. The caller's looks are not steps. */
void model_await(model_condition is_so, void *of);
/* Permits or forbids preemptions from here on. A scenario begins without them. */
void model_explore(bool on);
/* Lets the first thread wait until every other one waits for something. */
void model_settle(void);
/* Records the outcome of this run, below 64. The report lists the outcomes of all runs. */
void model_note(unsigned outcome);
/* Reports the interleaving, and ends the program. */
__attribute__((format(printf, 1, 2), noreturn)) void model_violated(const char *format, ...);
#define MODEL_CHECK(truth)                                                                         \
    do {                                                                                           \
        if (!(truth))                                                                              \
            model_violated("%s: not so: %s", __func__, #truth);                                    \
    } while (0)

/* ---- primitives of system calls ---- */

/* A point where other threads may run. `what` happens next, in the function `where`. */
void model_point(const char *what, const char *where);
/* The same, until the condition is true. False: the deadline has passed first. */
bool model_wait(model_condition is_so, void *of, int64_t deadline_ns, const char *what, const char *where);
/* Other threads run here, if any can. */
void model_yield(const char *where);
int64_t model_now(void);
int model_self(void);

/* Memory of one run. What was freed must not be written any more, and holds no lock. */
void *model_malloc(size_t nbytes);
void *model_calloc(size_t count, size_t nbytes);
void *model_realloc(void *memory, size_t nbytes);
void model_free(void *memory);

/* ---- the two others ---- */

typedef struct model_scenario {
    const char *name;
    void (*run)(void);
    unsigned preemptions; /* the default */
} model_scenario;

/* Runs a list that ends with an entry without a name. Returns the exit status for main. */
int model_main(int count, char **arguments, const model_scenario *scenarios);

/* In files.c: no files exist at the start of a run, and none may be left at its end. */
void model_system_begin(void);
void model_system_end(void);

#endif
