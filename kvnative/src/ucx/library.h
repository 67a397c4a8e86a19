/* UCX in this process: the calls of its libraries, descriptions of errors, settings and contexts. The libraries are
 * never closed, because their registrations with the loader and the system outlive a context. */
#ifndef KVN_UCX_LIBRARY_H
#define KVN_UCX_LIBRARY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "core/failure.h"
#include "kvnative/ucx.h"

typedef struct kvn_ucx_library {
    kvn_ucx calls;
    atomic_uint num_workers; /* workers of process `pid` that were not destroyed: worker.c */
    pid_t pid;
    void *ucp; /* of dlopen */
    unsigned version[3];
    char path[4096]; /* of the file of libucp */
} kvn_ucx_library;

/* Opens libucp at `path` (the loader searches a bare name) and the libucs that it depends on, without signal handlers
 * or output. KVN_UNSUPPORTED, with the reason, if it cannot be opened, is older than 1.13 or lacks a call. */
int kvn_ucx_library_open(const char *path, kvn_ucx_library *out, kvn_failure *failure);

/* Writes "call: UCX's text", and `status` as `code`. Returns the KVN_ status. */
int kvn_ucx_fail(const kvn_ucx_library *library, const char *call, kvn_ucs_status status,
                 kvn_failure *failure);

/* Clears the log of this thread. UCX's log of errors is kept for messages of failures, instead of being printed to the
 * program's standard output. */
void kvn_ucx_log_clear(void);
/* Appends ": " and the last line that this thread has logged since, if any. */
void kvn_ucx_log_append(char *message, size_t room);

/* Variables that are in the environment temporarily, since UCX reads some settings only there.
 *
 * setenv and unsetenv would move strings that other threads may be reading in getenv. So the environment itself does
 * not change. Meanwhile `environ` points to a copy that begins with our variables, since getenv takes the first entry
 * of a name. A copy is never freed, because a thread may still read it. Only one thread of a process may do this at a
 * time, while no other sets a variable. */
typedef struct kvn_ucx_environ {
    char **before;
    char **ours; /* NULL: no variable was added */
} kvn_ucx_environ;

/* A setting of UCX without its prefix: {"TLS", "rc"}. */
typedef struct kvn_ucx_setting {
    const char *name;
    const char *value;
} kvn_ucx_setting;

/* The settings of UCX: kvplan's presets, which the environment overrides, and then the user's. */
typedef struct kvn_ucx_settings {
    const kvn_ucx_library *library;
    const kvn_ucx_setting *given;
    size_t num_given;
    kvn_ucx_environ environment; /* of kvn_ucx_settings_export */
} kvn_ucx_settings;

/* UCX before 1.15 accepts settings of transports but ignores them: it reads the environment until a worker is
 * made. For these versions, the settings are also in the environment until kvn_ucx_settings_restore. */
int kvn_ucx_settings_export(kvn_ucx_settings *self, kvn_failure *failure);
void kvn_ucx_settings_restore(kvn_ucx_settings *self);

#define KVN_UCX_TRANSPORTS 512

/* Opens a context. `name` (may be "") is for UCX's tools. `transports`, such as "rc_mlx5/mlx5_0:1 cma/memory", are
 * those that UCX may use. KVN_INVALID: a setting that UCX refuses, or that lets it use TCP. */
int kvn_ucx_context_open(const kvn_ucx_settings *settings, const char *name, kvn_ucp_context_h *out,
                         char transports[KVN_UCX_TRANSPORTS], kvn_failure *failure);

#endif
