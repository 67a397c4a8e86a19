/* Keeps the robust-futex list by which the kernel marks that this process has ended. */
#include "host/life.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/thread.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the state below */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
/* The head of the keeper's circular list. It lies in shared memory, like the words: the OOM killer takes private pages
 * from a process before that process exits, and the kernel cannot walk the list without its head. */
static struct robust_list_head *head;
static uint32_t keeper; /* its thread id; 0: none */
static unsigned held;   /* words in the list */
static pid_t owner;     /* the process that `state` belongs to */
static enum { NONE, STARTING, STARTED, IMPOSSIBLE } state = NONE;

/* The kernel walks this many entries (ROBUST_LIST_LIMIT of its futex.h), and marks no later word. */
enum { MAX_HELD = 2048 };

/* A store of a single word, because the kernel may walk the list at any time. */
static void set_next(struct robust_list *node, struct robust_list *next)
{
    __atomic_store_n(&node->next, next, __ATOMIC_RELEASE);
}

static void *keep(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "kvplan-life");
    pthread_mutex_lock(&mutex);
    head->futex_offset = offsetof(kvn_life, word) - offsetof(kvn_life, node);
    set_next(&head->list, &head->list);
    if (syscall(SYS_set_robust_list, head, sizeof *head) == 0) {
        keeper = (uint32_t)syscall(SYS_gettid);
        state = STARTED;
    } else {
        state = IMPOSSIBLE;
    }
    const int is_kept = state == STARTED;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    while (is_kept)
        pause(); /* all signals are blocked, so this lasts until the process ends */
    return NULL;
}

/* In a forked child: keeper, words and head belong to the parent. The child has not even mapped the head. */
static void forget(void)
{
    state = NONE;
    head = NULL;
    keeper = 0;
    held = 0;
}

/* Maps the head, which a forked child does not inherit, unless it is mapped. Returns false if that fails. */
static int has_head(void)
{
    const size_t nbytes = (size_t)sysconf(_SC_PAGESIZE);
    if (head)
        return 1;
    void *page = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return 0;
    if (madvise(page, nbytes, MADV_DONTFORK) != 0) {
        munmap(page, nbytes);
        return 0;
    }
    head = page;
    return 1;
}

/* Starts the keeper unless it runs. Returns false if no keeper runs. The caller holds the mutex. */
static int has_keeper(void)
{
    if (owner != getpid()) { /* a child of a fork without handlers: clone(2), _Fork(3) */
        forget();
        owner = getpid();
    }
    if (state == NONE && has_head()) {
        pthread_t thread;
        pthread_attr_t attributes;
        const long page = sysconf(_SC_PAGESIZE);
        state = STARTING;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN + 4 * (size_t)page);
        int failed = kvn_thread_start(&thread, &attributes, NULL, keep, NULL);
        if (failed == EINVAL) { /* the stack is too small for the thread-local storage of all libraries */
            pthread_attr_destroy(&attributes);
            pthread_attr_init(&attributes);
            pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
            failed = kvn_thread_start(&thread, &attributes, NULL, keep, NULL);
        }
        if (failed)
            state = NONE; /* a later call may succeed */
        pthread_attr_destroy(&attributes);
    }
    while (state == STARTING)
        pthread_cond_wait(&changed, &mutex);
    return state == STARTED;
}

static void before_fork(void) { pthread_mutex_lock(&mutex); }
static void after_in_parent(void) { pthread_mutex_unlock(&mutex); }

static void after_in_child(void)
{
    forget();
    pthread_mutex_init(&mutex, NULL);
    pthread_cond_init(&changed, NULL);
}

static void handle_forks(void) { pthread_atfork(before_fork, after_in_parent, after_in_child); }

void kvn_life_begin(kvn_life *life)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, handle_forks);
    pthread_mutex_lock(&mutex);
    if (has_keeper() && held < MAX_HELD) {
        atomic_store(&life->word, keeper); /* before the list: only words with the thread's id are marked */
        set_next(&life->node, head->list.next);
        set_next(&head->list, &life->node);
        held++;
    }
    pthread_mutex_unlock(&mutex);
}

void kvn_life_end(kvn_life *life)
{
    pthread_mutex_lock(&mutex);
    if (state == STARTED && owner == getpid())
        for (struct robust_list *at = &head->list; at->next != &head->list; at = at->next)
            if (at->next == &life->node) {
                /* First the word, because the process may be killed in between: the kernel marks only entries of the
                 * list. */
                atomic_store(&life->word, 0);
                set_next(at, life->node.next);
                held--;
                break;
            }
    pthread_mutex_unlock(&mutex);
}
