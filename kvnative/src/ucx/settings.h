/* What UCX is set to: our presets, unless the environment says otherwise, and then what the user says. */
#ifndef KVN_UCX_SETTINGS_H
#define KVN_UCX_SETTINGS_H

#include "ucx/environ.h"
#include "ucx/worker.h"

typedef struct kvn_ucx_settings {
    const kvn_ucx_library *library;
    const kvn_ucx_setting *given;
    size_t num_given;
    kvn_ucx_environ environment; /* of kvn_ucx_settings_export; `ours` NULL: none */
} kvn_ucx_settings;

/* Puts them into a configuration. KVN_INVALID: UCX does not take one of those given. */
int kvn_ucx_settings_apply(const kvn_ucx_settings *self, kvn_ucp_config *config,
                           kvn_failure *failure);
/* Before 1.15 UCX accepts settings of transports there and does not heed them: until a worker is made, it
 * looks into the environment. So for these versions they stand there, too, until kvn_ucx_settings_restore.
 * One thread at a time in a process. */
int kvn_ucx_settings_export(kvn_ucx_settings *self, kvn_failure *failure);
void kvn_ucx_settings_restore(kvn_ucx_settings *self);

#endif
