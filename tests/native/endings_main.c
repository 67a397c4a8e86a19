/* The end of a task during the call that watches it, and the call that watches it during its end. */
#include "core/completions.h"

#include "check.h"

static void (*beside)(void); /* the call of another thread, right after the next change of the state */
static size_t take(void);    /* the call of the program, as soon as a token may exist */
static size_t taken;

static unsigned set_bits(atomic_uint *state, unsigned bits)
{
    const unsigned before = atomic_fetch_or(state, bits);
    void (*const run)(void) = beside;

    beside = NULL;
    if (run) {
        run();
        taken = take();
    }
    return before;
}

#undef atomic_fetch_or_explicit
#define atomic_fetch_or_explicit(state, bits, order) set_bits(state, bits)
#include "core/completions.c"

static kvn_completions queue;
static kvn_ending ending;

static size_t take(void)
{
    uint64_t tokens[2];
    const size_t count = kvn_completions_take(&queue, tokens, 2);

    CHECK(count == 0 || tokens[0] == 7);
    return count;
}

static void watch(void) { kvn_ending_watch(&ending, &queue, 7); }
static void end(void) { kvn_ending_end_part(&ending, KVN_OK); }

/* Runs `inner` in the middle of `outer`, and expects one token. */
static void expect_one(void (*outer)(void), void (*inner)(void))
{
    CHECK(kvn_completions_init(&queue) == 0);
    kvn_ending_init(&ending, 1);
    beside = inner;
    outer();
    CHECK(!beside && taken + take() == 1);
    kvn_ending_leave(&ending);
    kvn_completions_fini(&queue);
}

static void ends_while_it_is_watched(void) { expect_one(watch, end); }
static void is_watched_while_it_ends(void) { expect_one(end, watch); }

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"ends_while_it_is_watched", ends_while_it_is_watched},
        {"is_watched_while_it_ends", is_watched_while_it_ends},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
