/* Who drives an end's UCX worker. One thread at a time has the turn; whoever has it may call UCX.
 *
 * A thread that has something to do takes the turn if it is free, and otherwise leaves an errand that the
 * holder runs within its round: nobody waits for the turn. A thread that waits for something attends: it
 * drives the worker itself, spins briefly and then sleeps on the worker's events, so that a small transfer
 * needs no other thread. Without any, the end's own thread drives: asleep unless there is something. While
 * one attends, that thread is not woken.
 *
 * All callbacks of UCX, errands and parts (ucx_end.h) run under the turn. They must not block. */
#ifndef KVN_UCX_TURN_H
#define KVN_UCX_TURN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct kvn_ucx_end kvn_ucx_end;
typedef struct kvn_ucx_errand kvn_ucx_errand;

/* Something to be done under the turn. The struct stays in place until `run` is called; `run` may free it,
 * unless it was given to kvn_ucx_do_and_wait. */
struct kvn_ucx_errand {
    void (*run)(kvn_ucx_end *end, kvn_ucx_errand *self);
    kvn_ucx_errand *next;     /* the end's */
    atomic_bool is_done;      /* the end's, for kvn_ucx_do_and_wait */
    bool is_awaited;          /* the end's */
};

/* True: this thread has the turn now, and must leave it soon. Never blocks. Not for a thread that has it. */
bool kvn_ucx_try_turn(kvn_ucx_end *end);
/* Leaves it; runs the errands that came meanwhile. Sees to it that what was posted is driven on by somebody
 * (arms the worker again if a thread sleeps on it). */
void kvn_ucx_leave_turn(kvn_ucx_end *end);
/* This thread has it: for asserts, and for code that is called with and without. */
bool kvn_ucx_has_turn(const kvn_ucx_end *end);

/* Runs the errand: at once if this thread has the turn or gets it, otherwise soon, on the thread that has
 * it. After it ran at once, progresses the worker one round. Never blocks. */
void kvn_ucx_do(kvn_ucx_end *end, kvn_ucx_errand *errand);
/* As kvn_ucx_do, but where the end's own thread sleeps it is woken to run the errand: this one has others to begin
 * meanwhile. */
void kvn_ucx_hand_over(kvn_ucx_end *end, kvn_ucx_errand *errand);
/* As kvn_ucx_do, and returns after it has run. Not to be called under the turn, unless it shall run at once. */
void kvn_ucx_do_and_wait(kvn_ucx_end *end, kvn_ucx_errand *errand);

/* Waits until `is_done(context)`; true then, false when the deadline has passed (KVN_FOREVER: never).
 * `is_done` is called often, with and without the turn, from this thread alone: it reads atomics. Whoever
 * makes it true under the turn calls kvn_ucx_notify. Not to be called under the turn. */
bool kvn_ucx_attend(kvn_ucx_end *end, bool (*is_done)(void *context), void *context,
                    int64_t deadline_ns);
/* Wakes those who attend while another thread drives: something that they may wait for has happened. Cheap
 * when nobody sleeps there. With or without the turn. */
void kvn_ucx_notify(kvn_ucx_end *end);

#endif
