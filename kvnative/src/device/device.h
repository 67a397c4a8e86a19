/* An accelerator of any kind: its memory, and host memory that is pinned for it. Each thread that calls the runtime
 * needs a context. Threads of the library set it once; calls on other threads are made between enter and leave, which
 * restore the context of a framework in the same process. */
#ifndef KVN_DEVICE_DEVICE_H
#define KVN_DEVICE_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "device/ops.h"

/* Host memory known to be pinned: [first, last). */
typedef struct kvn_pinned {
    uint64_t first;
    uint64_t last;
    bool is_allocated; /* by the runtime, which has pinned it; else by kvn_device_pin */
} kvn_pinned;

/* One for each device id of a process; it must stay in place. */
struct kvn_device {
    const kvn_device_ops *ops;
    const void *runtime; /* argument of the ops, opaque here */
    void *state;         /* of the ops, from open_context to close_context */
    int32_t id;
    pid_t pid;                /* of the process that opened it; no other may use it */
    void *context;            /* for kvplan's own work */
    void *primary;            /* the context for threads without one; NULL: none */
    atomic_uint batch_copies; /* kvn_batch_copies: flags are only ever cleared */
    pthread_mutex_t mutex;    /* guards the fields below */
    char fallback[256];       /* why some batch copies are not used; "" if all are */
    kvn_pinned *pinned;       /* ascending, disjoint */
    size_t num_pinned;
};

/* The runtime must be initialized, and outlive the device. */
int kvn_device_open(const kvn_device_ops *ops, const void *runtime, int32_t id, kvn_device *out,
                    kvn_failure *failure);
/* Call it once no memory, stream or backend of the device is in use. The device is not reset, because other code of
 * the process may use it. */
void kvn_device_close(kvn_device *device);
/* Returns KVN_INVALID in a forked child of the process that opened the device. */
int kvn_device_check_process(const kvn_device *device, kvn_failure *failure);

/* Make the calls of kvn_device_ops, if it has them. */
void kvn_device_begin_calls(const kvn_device *device);
void kvn_device_end_calls(const kvn_device *device);
/* Makes the device's context current on this thread; *previous is for kvn_device_leave. */
int kvn_device_enter(const kvn_device *device, void **previous, kvn_failure *failure);
/* Makes `previous` current again: the context before kvn_device_enter. If there was none, the primary one; without a
 * primary one, none. */
void kvn_device_leave(const kvn_device *device, void *previous);
/* The same for calls on a stream of the program: in the stream's context. */
int kvn_device_enter_stream(const kvn_device *device, kvn_stream stream, void **previous, kvn_failure *failure);
void kvn_device_leave_stream(const kvn_device *device, void *previous);

/* ---- from any thread: each enters the context, makes the call of kvn_device_ops, and leaves ---- */

int kvn_device_allocate(const kvn_device *device, uint64_t nbytes, void **out,
                        kvn_failure *failure);
int kvn_device_free(const kvn_device *device, void *address, kvn_failure *failure);
int kvn_device_allocate_host(const kvn_device *device, uint64_t nbytes, void **out,
                             kvn_failure *failure);
int kvn_device_free_host(const kvn_device *device, void *address, kvn_failure *failure);
/* Whole pages of host memory that the runtime allocates and pins. Listed in `pinned` until they are freed. */
int kvn_device_allocate_pinned(kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure);
int kvn_device_free_pinned(kvn_device *device, void *address, kvn_failure *failure);
/* Pins host memory that others have allocated, so that the device copies it without the CPU. */
int kvn_device_pin(kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure);
int kvn_device_unpin(kvn_device *device, uint64_t address, kvn_failure *failure);
int kvn_device_locate(const kvn_device *device, uint64_t address, kvn_memory_place *out,
                      kvn_failure *failure);
/* These two make no call for 0 bytes. */
int kvn_device_copy(const kvn_device *device, kvn_direction direction, uint64_t dst, uint64_t src,
                    uint64_t nbytes, kvn_failure *failure);
int kvn_device_clear(const kvn_device *device, uint64_t address, uint64_t nbytes,
                     kvn_failure *failure);
int kvn_device_memory(const kvn_device *device, size_t *free_nbytes, size_t *total_nbytes,
                      kvn_failure *failure);

/* ---- for the backends that copy ---- */

/* The range of `pinned` that holds `address`; false if none does. */
bool kvn_device_pinned_at(kvn_device *device, uint64_t address, kvn_pinned *out);
/* Stops all batch copies from now on, and keeps the reason instead of an earlier one. */
void kvn_device_fall_back(kvn_device *device, const char *why);
/* Keeps the reason why slower batch copies are used from now on. */
void kvn_device_note_fallback(kvn_device *device, const char *why);
/* Copies the reason to `out`; "" if all batch copies are used. */
void kvn_device_fallback(kvn_device *device, char *out, size_t room);

#endif
