/* Variables that UCX shall find in the environment for a while, as it reads some settings nowhere else.
 *
 * setenv and unsetenv would move what other threads may be reading in getenv. So the environment itself stays
 * as it is: for that while `environ` points to a copy of it that begins with ours, of which getenv takes the
 * first. A copy is never freed, since a thread may read it still. */
#ifndef KVN_UCX_ENVIRON_H
#define KVN_UCX_ENVIRON_H

#include <stdbool.h>
#include <stddef.h>

typedef struct kvn_ucx_environ {
    char **before;
    char **ours;
} kvn_ucx_environ;

/* `variables` are "NAME=value", and stay in place for good. False: no memory, and nothing was done. One thread
 * at a time in a process, while nothing sets a variable. */
bool kvn_ucx_environ_add(kvn_ucx_environ *self, const char *const *variables, size_t count);
/* Where a variable was set meanwhile nonetheless, the environment is a copy of ours by then, and stays that. */
void kvn_ucx_environ_restore(kvn_ucx_environ *self);

#endif
