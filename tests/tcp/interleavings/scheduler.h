/* Runs a scenario again and again, each time with another interleaving of its threads, until all with at most
 * so many preemptions were run. One thread runs at a time, up to a point where another may go on: a call of
 * the system, a lock, an access to an atomic. What is between two points is one step. So the order of memory is
 * sequentially consistent: what depends on a weaker one is not found here (ThreadSanitizer looks for data races).
 *
 * A preemption is a switch away from a thread that could have gone on, or a timeout where something else could
 * have happened before. Switches away from a thread that waits, or that gives its turn away, cost nothing. */
#ifndef MODEL_SCHEDULER_H
#define MODEL_SCHEDULER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MODEL_FOREVER INT64_MAX
#define MODEL_TICK_NS 40000 /* that each look at the clock takes: ends loops that spin for some time */

typedef bool (*model_condition)(void *of);

/* ---- what a scenario calls ---- */

typedef struct model_thread model_thread;

model_thread *model_spawn(const char *name, void *(*run)(void *), void *argument);
void model_join(model_thread *thread);
/* Until it is so, by what the other threads do: the caller looks without a step of its own. */
void model_await(model_condition is_so, void *of);
/* Whether there are preemptions from here on. A scenario begins without. */
void model_explore(bool on);
/* Of the first thread: until each other waits for something. */
void model_settle(void);
/* What came of it this time, below 64: the report lists what came of it ever. */
void model_note(unsigned outcome);
/* The interleaving is reported, and all ends. */
__attribute__((format(printf, 1, 2), noreturn)) void model_violated(const char *format, ...);
#define MODEL_CHECK(truth)                                                                         \
    do {                                                                                           \
        if (!(truth))                                                                              \
            model_violated("%s: not so: %s", __func__, #truth);                                    \
    } while (0)

/* ---- what the calls of the system are made of ---- */

/* Others may run here. `what` happens next, in the function `where`. */
void model_point(const char *what, const char *where);
/* The same, until it is so. False: the deadline has passed first. */
bool model_wait(model_condition is_so, void *of, int64_t deadline_ns, const char *what, const char *where);
/* Others run here, if any can. */
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
    unsigned preemptions; /* unless told otherwise */
} model_scenario;

/* A list that ends with no name. Returns what main is to return. */
int model_main(int count, char **arguments, const model_scenario *scenarios);

/* Of files.c: there are no files at the start of a run, and there are to be none at its end. */
void model_system_begin(void);
void model_system_end(void);

#endif
