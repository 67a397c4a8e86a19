/* What UCX is set to for an end: what its mode asks for, unless the environment says otherwise, and then what
 * the user says. */
#ifndef KVN_UCX_SETTINGS_H
#define KVN_UCX_SETTINGS_H

#include "ucx_end.h"

typedef struct kvn_ucx_settings {
    const kvn_ucx_library *library;
    kvn_ucx_mode mode;
    const kvn_ucx_setting *given;
    size_t num_given;
    char **saved; /* what the environment had before kvn_ucx_settings_export; NULL: nothing */
} kvn_ucx_settings;

/* Puts them into a configuration. KVN_INVALID: UCX does not take one of those given. */
int kvn_ucx_settings_apply(const kvn_ucx_settings *self, kvn_ucp_config *config,
                           kvn_failure *failure);
/* Before 1.15 UCX accepts settings of transports there and does not heed them: until a worker is made, it
 * looks into the environment. So for these versions they are put there, too, and taken back afterwards.
 * One thread at a time in a process. */
int kvn_ucx_settings_export(kvn_ucx_settings *self, kvn_failure *failure);
void kvn_ucx_settings_restore(kvn_ucx_settings *self);

#endif
