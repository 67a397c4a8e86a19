/* Included before all other headers (-include). Replaces calls by which threads interact with calls of the scheduler.
 * The macros have arguments, so they do not replace members and variables of the same name. */
#ifndef MODEL_REDIRECT_H
#define MODEL_REDIRECT_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "scheduler.h"
#include "system.h"

#undef pthread_create
#define pthread_create(thread, attributes, run, argument) system_create((thread), (run), (argument))
#undef pthread_join
#define pthread_join(thread, result) system_join(thread)
#undef pthread_setname_np
#define pthread_setname_np(thread, name) ((void)(thread), (void)(name))
#undef pthread_sigmask
#define pthread_sigmask(how, set, before) ((void)(set), (void)(before))

#define pthread_mutex_init(mutex, attributes) system_mutex_init(mutex)
#define pthread_mutex_destroy(mutex) system_mutex_destroy(mutex)
#define pthread_mutex_lock(mutex) system_mutex_lock((mutex), __func__)
#define pthread_mutex_unlock(mutex) system_mutex_unlock((mutex), __func__)
#define pthread_cond_init(condition, attributes) system_cond_init(condition)
#define pthread_cond_destroy(condition) system_cond_destroy(condition)
#define pthread_cond_broadcast(condition) system_cond_broadcast(condition)
#define pthread_cond_wait(condition, mutex) system_cond_wait((condition), (mutex), NULL)
#define pthread_cond_timedwait(condition, mutex, deadline) system_cond_wait((condition), (mutex), (deadline))
#define sched_yield() model_yield(__func__)
#define nanosleep(time, rest) model_yield(__func__)
#define clock_gettime(clock, now) system_clock(now)

/* Plain operators on an atomic are sequentially consistent. */
#undef atomic_load
#define atomic_load(object) (model_point("load", __func__), *(object))
#undef atomic_load_explicit
#define atomic_load_explicit(object, order) atomic_load(object)
#undef atomic_store
#define atomic_store(object, value) (model_point("store", __func__), (void)(*(object) = (value)))
#undef atomic_fetch_add
#define atomic_fetch_add(object, value) (model_point("add", __func__), (*(object) += (value)) - (value))
#undef atomic_fetch_add_explicit
#define atomic_fetch_add_explicit(object, value, order) atomic_fetch_add(object, value)
#undef atomic_fetch_sub
#define atomic_fetch_sub(object, value) (model_point("sub", __func__), (*(object) -= (value)) + (value))
#undef atomic_init
#define atomic_init(object, value) ((void)(*(object) = (value)))
/* kvnative does not use these calls. A new use has to fail, because the scheduler would not see the access. */
#undef atomic_store_explicit
#define atomic_store_explicit MODEL_HAS_NO_SUCH_CALL
#undef atomic_exchange
#define atomic_exchange MODEL_HAS_NO_SUCH_CALL
#undef atomic_compare_exchange_strong
#define atomic_compare_exchange_strong MODEL_HAS_NO_SUCH_CALL
#undef atomic_compare_exchange_weak
#define atomic_compare_exchange_weak MODEL_HAS_NO_SUCH_CALL
#undef atomic_thread_fence
#define atomic_thread_fence MODEL_HAS_NO_SUCH_CALL
#define pthread_cond_signal(condition) MODEL_HAS_NO_SUCH_CALL
#define pthread_mutex_trylock(mutex) MODEL_HAS_NO_SUCH_CALL
#define pthread_rwlock_rdlock(lock) MODEL_HAS_NO_SUCH_CALL

#define epoll_create1(flags) system_epoll_create()
#define epoll_ctl(epoll, what, file, event) system_epoll_ctl((epoll), (what), (file), (event), __func__)
#define epoll_wait(epoll, events, most, timeout_ms) \
    system_epoll_wait((epoll), (events), (most), (timeout_ms), __func__)
#define eventfd(value, flags) system_eventfd(value)
#undef read
#define read(file, to, nbytes) system_read((file), (to), (nbytes), __func__)
#define write(file, from, nbytes) system_write((file), (from), (nbytes), __func__)
#define close(file) system_close((file), __func__)
#define sendmsg(file, message, flags) system_sendmsg((file), (message), __func__)
#define recvmsg(file, message, flags) system_recvmsg((file), (message), __func__)
#define shutdown(file, how) system_shutdown((file), __func__)
#define connect(file, address, nbytes) system_reset((file), __func__)
/* These have no arguments, because kvnative calls them through pointers. */
#define process_vm_readv system_vm_read
#define process_vm_writev system_vm_write

#define malloc(nbytes) model_malloc(nbytes)
#define calloc(count, nbytes) model_calloc((count), (nbytes))
#define realloc(memory, nbytes) model_realloc((memory), (nbytes))
#define free(memory) model_free(memory)
#define mmap(address, nbytes, protection, flags, file, offset) model_calloc(1, nbytes)
#define munmap(memory, nbytes) model_free(memory)

#endif
