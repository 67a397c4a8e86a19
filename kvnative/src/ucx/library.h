/* The UCX libraries of this process: opened, their calls looked up, their errors in words. They are never
 * closed, because what they have registered with the loader and with the system outlives a context. */
#ifndef KVN_UCX_LIBRARY_H
#define KVN_UCX_LIBRARY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "core/failure.h"
#include "kvnative/ucx.h"

typedef struct kvn_ucx_library {
    kvn_ucx calls;
    atomic_uint num_workers; /* not destroyed yet, of process `pid`: ucx_worker.c */
    pid_t pid;
    void *ucp; /* of dlopen */
    unsigned version[3];
    char path[4096]; /* of the file of libucp */
} kvn_ucx_library;

/* Opens libucp at `path` (a bare name: where the loader finds it) and the libucs that it brings. It leaves
 * the process as it was: no handlers of signals, nothing printed. KVN_UNSUPPORTED, with the reason, when
 * it cannot be opened, is older than 1.13 or lacks a call. */
int kvn_ucx_library_open(const char *path, kvn_ucx_library *out, kvn_failure *failure);

/* The KVN_ status of a ucs_status_t. */
int kvn_ucx_status(kvn_ucs_status status);
/* Writes "call: UCX's text for it"; returns kvn_ucx_status(status). `code` becomes the ucs_status_t. */
int kvn_ucx_fail(const kvn_ucx_library *library, const char *call, kvn_ucs_status status,
                 kvn_failure *failure);

/* What UCX says of its errors is kept for the message of a failure, instead of being printed on the standard
 * output of a program that is not ours. Forgets what was said on this thread. */
void kvn_ucx_log_clear(void);
/* Appends ": " and what was said last on this thread since, if anything. */
void kvn_ucx_log_append(char *message, size_t room);

#endif
