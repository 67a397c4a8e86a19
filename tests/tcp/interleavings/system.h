/* Replacements of system calls: locks, conditions, threads, the clock, sockets with a few bytes of buffer, eventfd,
 * epoll, and a cipher that only counts. Each begins with a point where other threads may run. Descriptors are never
 * reused, so a call on a closed descriptor is detected, as is a call on a lock that does not exist. */
#ifndef MODEL_SYSTEM_H
#define MODEL_SYSTEM_H

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

int system_create(pthread_t *thread, void *(*run)(void *), void *argument);
int system_join(pthread_t thread);
int system_mutex_init(pthread_mutex_t *mutex);
int system_mutex_destroy(pthread_mutex_t *mutex);
int system_mutex_lock(pthread_mutex_t *mutex, const char *where);
int system_mutex_unlock(pthread_mutex_t *mutex, const char *where);
int system_cond_init(pthread_cond_t *condition);
int system_cond_destroy(pthread_cond_t *condition);
int system_cond_broadcast(pthread_cond_t *condition);
int system_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline);
int system_clock(struct timespec *now);

int system_epoll_create(void);
int system_epoll_ctl(int epoll, int what, int file, struct epoll_event *event, const char *where);
int system_epoll_wait(int epoll, struct epoll_event *events, int most, int timeout_ms, const char *where);
int system_eventfd(unsigned value);
ssize_t system_read(int file, void *to, size_t nbytes, const char *where);
ssize_t system_write(int file, const void *from, size_t nbytes, const char *where);
int system_close(int file, const char *where);
ssize_t system_sendmsg(int file, const struct msghdr *message, const char *where);
ssize_t system_recvmsg(int file, const struct msghdr *message, const char *where);
int system_shutdown(int file, const char *where);
int system_reset(int file, const char *where);
ssize_t system_vm_read(pid_t pid, const struct iovec *to, unsigned long count, const struct iovec *from,
                       unsigned long one, unsigned long flags);
ssize_t system_vm_write(pid_t pid, const struct iovec *from, unsigned long count, const struct iovec *to,
                        unsigned long one, unsigned long flags);

/* ---- for scenarios ---- */

/* Creates two connected sockets. Each takes `capacity` bytes that the other has not read. */
void system_socketpair(int files[2], unsigned capacity);
/* Declares bytes that peers move: a call that accesses them takes two steps, between which other threads may run. */
void system_watch(const void *memory, size_t nbytes);
/* Forbids calls to access the bytes from here on, and fails if a call accesses them now. */
void system_forbid(const void *memory, size_t nbytes, const char *why);

#endif
