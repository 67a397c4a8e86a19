#include "system.h"

#include <errno.h>
#include <stdint.h>

#include "scheduler.h"

/* ---- locks ---- */

typedef struct lock {
    uint64_t magic;
    int owner; /* number of the thread plus 1; 0: unlocked */
} lock;

typedef struct condition {
    uint64_t magic;
    uint64_t broadcasts;
    int waiters;
} condition;

#define LOCK UINT64_C(0x6c6f636b6c6f636b)
#define CONDITION UINT64_C(0x636f6e64636f6e64)

_Static_assert(sizeof(lock) <= sizeof(pthread_mutex_t), "it lies where the other would");
_Static_assert(sizeof(condition) <= sizeof(pthread_cond_t), "it lies where the other would");

static lock *lock_of(pthread_mutex_t *mutex, const char *where)
{
    lock *it = (lock *)mutex;
    if (it->magic != LOCK)
        model_violated("%s uses a mutex that is not there", where);
    return it;
}

static condition *condition_of(pthread_cond_t *of, const char *where)
{
    condition *it = (condition *)of;
    if (it->magic != CONDITION)
        model_violated("%s uses a condition that is not there", where);
    return it;
}

int system_mutex_init(pthread_mutex_t *mutex)
{
    *(lock *)mutex = (lock){LOCK, 0};
    return 0;
}

int system_mutex_destroy(pthread_mutex_t *mutex)
{
    lock *it = lock_of(mutex, __func__);
    if (it->owner)
        model_violated("a mutex is destroyed that is held");
    it->magic = 0;
    return 0;
}

static bool is_unlocked(void *of) { return ((lock *)of)->owner == 0; }

int system_mutex_lock(pthread_mutex_t *mutex, const char *where)
{
    lock *it = lock_of(mutex, where);

    model_wait(is_unlocked, it, MODEL_FOREVER, "lock", where);
    lock_of(mutex, where)->owner = model_self() + 1;
    return 0;
}

int system_mutex_unlock(pthread_mutex_t *mutex, const char *where)
{
    lock *it = lock_of(mutex, where);

    if (it->owner != model_self() + 1)
        model_violated("%s unlocks a mutex that it does not hold", where);
    it->owner = 0;
    return 0;
}

int system_cond_init(pthread_cond_t *of)
{
    *(condition *)of = (condition){CONDITION, 0, 0};
    return 0;
}

int system_cond_destroy(pthread_cond_t *of)
{
    condition *it = condition_of(of, __func__);
    if (it->waiters)
        model_violated("a condition is destroyed that is waited for");
    it->magic = 0;
    return 0;
}

int system_cond_broadcast(pthread_cond_t *of)
{
    model_point("broadcast", __func__);
    condition_of(of, __func__)->broadcasts++;
    return 0;
}

typedef struct wait {
    condition *of;
    uint64_t broadcasts;
} wait;

static bool was_broadcast(void *of)
{
    const wait *it = of;
    return it->of->broadcasts != it->broadcasts;
}

int system_cond_wait(pthread_cond_t *of, pthread_mutex_t *mutex, const struct timespec *deadline)
{
    condition *it = condition_of(of, __func__);
    wait until = {it, it->broadcasts};
    const int64_t ns = deadline ? deadline->tv_sec * 1000000000 + deadline->tv_nsec : MODEL_FOREVER;

    it->waiters++;
    system_mutex_unlock(mutex, __func__);
    const bool is_so = model_wait(was_broadcast, &until, ns, "condition", __func__);
    system_mutex_lock(mutex, __func__);
    condition_of(of, __func__)->waiters--;
    return is_so ? 0 : ETIMEDOUT;
}

/* ---- threads and time ---- */

int system_create(pthread_t *thread, void *(*run)(void *), void *argument)
{
    *thread = (pthread_t)(uintptr_t)model_spawn("service", run, argument);
    return 0;
}

int system_join(pthread_t thread)
{
    model_join((model_thread *)(uintptr_t)thread);
    return 0;
}

int system_clock(struct timespec *now)
{
    const int64_t ns = model_now();

    now->tv_sec = ns / 1000000000;
    now->tv_nsec = ns % 1000000000;
    return 0;
}
