#include "scheduler.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#define MAX_THREADS 8
#define MAX_STEPS 20000
#define MAX_YIELDS 2000 /* in a row, without any other step */
#define STACK_NBYTES (512u << 10)
#define ARENA_NBYTES (4u << 20)
#define POISON 0xDD

struct model_thread {
    const char *name;
    void *(*run)(void *);
    void *argument;
    jmp_buf at;
    uint8_t *stack;
    bool has_started, has_ended;
    model_condition is_so; /* the thread waits for it; NULL: the thread can continue */
    void *of;
    int64_t deadline_ns;
    bool has_timed_out;
    bool has_yielded; /* and no thread has made a step since */
    const char *what, *where;
};

typedef struct choice {
    uint16_t taken, count;
} choice;

typedef struct taken_step {
    int thread;
    bool timed_out;
    const char *what, *where;
} taken_step;

/* State of the exploration. */
static const model_scenario *scenario;
static uint64_t num_runs, outcomes;
static choice choices[MAX_STEPS];
static unsigned depth, max_preemptions;
static bool replays;
static uint8_t *stacks;

/* State of the current run. */
static model_thread threads[MAX_THREADS];
static int num_threads, current;
static unsigned next_choice, preemptions, num_steps, num_yields;
static bool explores;
static int64_t now_ns;
static taken_step steps[MAX_STEPS];
static jmp_buf at_end;

/* ---- reports ---- */

static void print_choices(void)
{
    for (unsigned i = 0, first = 1; i < next_choice && i < depth; i++)
        if (choices[i].taken != 0) {
            fprintf(stderr, "%s%u:%u", first ? "" : ",", i, choices[i].taken);
            first = 0;
        }
}

static void print_steps(void)
{
    for (unsigned i = 0; i < num_steps; i++) {
        const bool begins = i == 0 || steps[i].thread != steps[i - 1].thread;
        if (begins)
            fprintf(stderr, "\n  %s:", threads[steps[i].thread].name);
        if (steps[i].what)
            fprintf(stderr, " %s%s(%s)", steps[i].timed_out ? "timeout of " : "", steps[i].what, steps[i].where);
    }
    fprintf(stderr, "\n");
}

void model_violated(const char *format, ...)
{
    va_list arguments;

    fprintf(stderr, "%s: ", scenario->name);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n  in interleaving %llu; again: %s %u ", (unsigned long long)num_runs, scenario->name,
            max_preemptions);
    print_choices();
    print_steps();
    fflush(NULL);
    _Exit(1);
}

static void on_signal(int number)
{
    model_violated("%s in thread %s", strsignal(number), threads[current].name);
}

/* ---- memory ---- */

typedef struct block {
    size_t nbytes;
    bool is_free;
    uint8_t bytes[] __attribute__((aligned(16)));
} block;

static uint8_t *arena;
static size_t arena_used;

static block *block_of(void *memory) { return (block *)((uint8_t *)memory - offsetof(block, bytes)); }

void *model_malloc(size_t nbytes)
{
    const size_t whole = (sizeof(block) + nbytes + 15) / 16 * 16;
    block *it = (block *)(arena + arena_used);

    if (arena_used + whole > ARENA_NBYTES)
        model_violated("more memory is used than a run has");
    arena_used += whole;
    it->nbytes = whole - sizeof(block);
    it->is_free = false;
    return it->bytes;
}

void *model_calloc(size_t count, size_t nbytes) { return memset(model_malloc(count * nbytes), 0, count * nbytes); }

void model_free(void *memory)
{
    if (!memory)
        return;
    block *it = block_of(memory);
    if (it->is_free)
        model_violated("memory is freed twice");
    it->is_free = true;
    memset(it->bytes, POISON, it->nbytes);
}

void *model_realloc(void *memory, size_t nbytes)
{
    void *made = model_malloc(nbytes);

    if (memory) {
        const size_t had = block_of(memory)->nbytes;
        memcpy(made, memory, had < nbytes ? had : nbytes);
        model_free(memory);
    }
    return made;
}

static void check_memory(void)
{
    for (size_t at = 0; at < arena_used;) {
        const block *it = (const block *)(arena + at);
        if (!it->is_free)
            model_violated("%zu bytes are left that were not freed", it->nbytes);
        if (it->bytes[0] != POISON || memcmp(it->bytes, it->bytes + 1, it->nbytes - 1) != 0)
            model_violated("memory is written after it was freed");
        at += sizeof *it + it->nbytes;
    }
}

/* ---- who runs next ---- */

typedef struct option {
    int thread;
    bool times_out;
} option;

static bool can_go_on(const model_thread *it)
{
    return !it->has_ended && (!it->is_so || it->is_so(it->of));
}

/* Lists the default option first. *others is the number of options that are not timeouts. */
static unsigned list_options(option *options, unsigned *others)
{
    const model_thread *self = &threads[current];
    const bool may_preempt = explores && preemptions < max_preemptions;
    const bool goes_on = can_go_on(self) && !self->has_yielded;
    unsigned count = 0;

    if (goes_on)
        options[count++] = (option){current, false};
    if (!goes_on || may_preempt)
        for (int i = 0; i < num_threads; i++)
            if (i != current && !threads[i].has_yielded && can_go_on(&threads[i]))
                options[count++] = (option){i, false};
    *others = count;
    if (count == 0 || may_preempt)
        for (int i = 0; i < num_threads; i++)
            if (threads[i].is_so && threads[i].deadline_ns != MODEL_FOREVER && !can_go_on(&threads[i]))
                options[count++] = (option){i, true};
    if (count == 0)
        for (int i = 1; i <= num_threads; i++) {
            const int next = (current + i) % num_threads;
            if (can_go_on(&threads[next]))
                options[count++] = (option){next, false};
        }
    if (!explores && count > 1)
        count = 1;
    return count;
}

static unsigned choose(unsigned count)
{
    if (count == 1)
        return 0;
    if (next_choice == depth) {
        if (depth == MAX_STEPS)
            model_violated("there are too many choices");
        choices[depth++] = (choice){0, (uint16_t)count};
    } else if (replays && choices[next_choice].count == 0) {
        choices[next_choice].count = (uint16_t)count;
    }
    if (choices[next_choice].count != count)
        model_violated("the run does not repeat itself: %u choices, and %u before", count,
                       choices[next_choice].count);
    return choices[next_choice++].taken;
}

static void stuck(void)
{
    char text[1024] = "";

    for (int i = 0; i < num_threads; i++)
        if (!threads[i].has_ended)
            snprintf(text + strlen(text), sizeof text - strlen(text), "; %s in %s of %s", threads[i].name,
                     threads[i].what, threads[i].where);
    model_violated("no thread can continue%s", text);
}

static void begin_thread(void)
{
    model_thread *self = &threads[current];

    self->run(self->argument);
    self->has_ended = true;
    if (current == 0)
        _longjmp(at_end, 1);
    model_point("end", "thread");
    abort();
}

static void start(model_thread *it)
{
    ucontext_t context;

    it->has_started = true;
    getcontext(&context);
    context.uc_stack.ss_sp = it->stack;
    context.uc_stack.ss_size = STACK_NBYTES;
    context.uc_link = NULL;
    makecontext(&context, begin_thread, 0);
    setcontext(&context);
}

static void go_to(int next)
{
    model_thread *self = &threads[current];

    if (next == current)
        return;
    current = next;
    if (_setjmp(self->at))
        return;
    if (!threads[next].has_started)
        start(&threads[next]);
    _longjmp(threads[next].at, 1);
}

static void schedule(void)
{
    option options[2 * MAX_THREADS];
    unsigned others;
    const unsigned count = list_options(options, &others);

    if (count == 0)
        stuck();
    const bool goes_on = others > 0 && options[0].thread == current; /* no switch, by default */
    const unsigned taken = choose(count);
    const option it = options[taken];
    model_thread *next = &threads[it.thread];
    if ((goes_on && it.thread != current) || (it.times_out && others > 0))
        preemptions++;
    next->has_timed_out = it.times_out;
    if (it.times_out && now_ns < next->deadline_ns)
        now_ns = next->deadline_ns;
    num_yields = next->has_yielded ? num_yields + 1 : 0;
    if (!next->has_yielded) /* otherwise the thread only checks again */
        for (int i = 0; i < num_threads; i++)
            threads[i].has_yielded = false;
    next->has_yielded = false;
    steps[num_steps++] = (taken_step){it.thread, it.times_out, next->what, next->where};
    if (num_steps == MAX_STEPS || num_yields > MAX_YIELDS)
        model_violated("it does not come to an end");
    go_to(it.thread);
}

/* ---- primitives of scenarios and system calls ---- */

bool model_wait(model_condition is_so, void *of, int64_t deadline_ns, const char *what, const char *where)
{
    model_thread *self = &threads[current];

    self->is_so = is_so;
    self->of = of;
    self->deadline_ns = deadline_ns;
    self->what = what;
    self->where = where;
    schedule();
    self->is_so = NULL;
    return !self->has_timed_out;
}

void model_point(const char *what, const char *where) { model_wait(NULL, NULL, MODEL_FOREVER, what, where); }

void model_yield(const char *where)
{
    threads[current].has_yielded = true;
    model_point("yield", where);
}

int64_t model_now(void) { return now_ns += MODEL_TICK_NS; }

int model_self(void) { return current; }

void model_await(model_condition is_so, void *of)
{
    model_wait(is_so, of, MODEL_FOREVER, "await", scenario->name);
}

void model_note(unsigned outcome) { outcomes |= UINT64_C(1) << outcome; }

void model_explore(bool on) { explores = on; }

static bool is_settled(void *of)
{
    (void)of;
    for (int i = 1; i < num_threads; i++)
        if (can_go_on(&threads[i]))
            return false;
    return true;
}

void model_settle(void) { model_await(is_settled, NULL); }

model_thread *model_spawn(const char *name, void *(*run)(void *), void *argument)
{
    model_thread *it = &threads[num_threads];

    if (num_threads == MAX_THREADS)
        model_violated("there are too many threads");
    *it = (model_thread){.name = name, .run = run, .argument = argument};
    it->what = "begin";
    it->where = "thread";
    it->stack = stacks + (size_t)num_threads++ * STACK_NBYTES;
    return it;
}

static bool has_ended(void *of) { return ((model_thread *)of)->has_ended; }

void model_join(model_thread *thread) { model_wait(has_ended, thread, MODEL_FOREVER, "join", thread->name); }

/* ---- all interleavings ---- */

static void *run_scenario(void *argument)
{
    (void)argument;
    scenario->run();
    return NULL;
}

static void run_once(void)
{
    num_threads = current = 0;
    next_choice = preemptions = num_steps = num_yields = 0;
    explores = false;
    now_ns = 1000000000;
    arena_used = 0;
    model_system_begin();
    model_spawn("main", run_scenario, NULL);
    if (!_setjmp(at_end))
        start(&threads[0]);
    for (int i = 0; i < num_threads; i++)
        if (!threads[i].has_ended)
            model_violated("thread %s is left", threads[i].name);
    model_system_end();
    check_memory();
    num_runs++;
}

/* Selects the next sequence of choices. Returns false after the last one. */
static bool go_back(void)
{
    while (depth > 0 && choices[depth - 1].taken + 1 == choices[depth - 1].count)
        depth--;
    if (depth == 0)
        return false;
    choices[depth - 1].taken++;
    return true;
}

/* Reads the options to take at some points, such as "3:1,17:2". At other points, the first option is taken. */
static void read_choices(const char *text)
{
    while (*text) {
        char *end;
        const unsigned long at = strtoul(text, &end, 10);
        const unsigned long taken = *end == ':' ? strtoul(end + 1, &end, 10) : 0;
        if (at >= MAX_STEPS || end == text)
            break;
        for (; depth <= at; depth++)
            choices[depth] = (choice){0, 0};
        choices[at].taken = (uint16_t)taken;
        text = end + (*end == ',');
    }
}

static void take_memory(void)
{
    static uint8_t own_stack[1 << 16];
    const size_t nbytes = MAX_THREADS * STACK_NBYTES + ARENA_NBYTES;

    stacks = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stacks == MAP_FAILED)
        exit(2);
    arena = stacks + MAX_THREADS * STACK_NBYTES;
    sigaltstack(&(stack_t){.ss_sp = own_stack, .ss_size = sizeof own_stack}, NULL);
    for (unsigned i = 0; i < 4; i++)
        sigaction((const int[]){SIGSEGV, SIGBUS, SIGABRT, SIGFPE}[i],
                  &(struct sigaction){.sa_handler = on_signal, .sa_flags = SA_ONSTACK}, NULL);
}

int model_main(int count, char **arguments, const model_scenario *scenarios)
{
    if (count < 2) {
        for (; scenarios->name; scenarios++)
            printf("%s %u\n", scenarios->name, scenarios->preemptions);
        return 0;
    }
    for (scenario = scenarios; scenario->name && strcmp(scenario->name, arguments[1]) != 0; scenario++)
        ;
    if (!scenario->name) {
        fprintf(stderr, "usage: %s [SCENARIO [PREEMPTIONS [CHOICES]]]\n", arguments[0]);
        return 2;
    }
    max_preemptions = count > 2 ? (unsigned)atoi(arguments[2]) : scenario->preemptions;
    take_memory();
    if (count > 3) {
        replays = true;
        read_choices(arguments[3]);
        run_once();
        print_steps();
        return 0;
    }
    do
        run_once();
    while (go_back());
    printf("%s: %llu interleavings, outcomes", scenario->name, (unsigned long long)num_runs);
    for (unsigned i = 0; i < 64; i++)
        if (outcomes >> i & 1)
            printf(" %u", i);
    printf("\n");
    return 0;
}
