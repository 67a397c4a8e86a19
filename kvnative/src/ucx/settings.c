#include "ucx/settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* TCP is not for UCX: it listens on every interface, and whoever connects reads and writes memory.
 * Where no transport reads memory itself, UCX would have the owner's thread do it by messages, at any address
 * that they name, and die of one that is not mapped: not for us.
 * Between GPUs that it sees no NVLink of, UCX leaves gets out, and pulls would have no way at all. */
static const kvn_ucx_setting presets[] = {
    {"TLS", "^tcp"},
    {"PROTO_EMULATION_ENABLE", "n"},
    {"CUDA_IPC_ENABLE_GET_ZCOPY", "on"},
};

#define MAX_NAME 256

static const char *variable(const kvn_ucx_setting *setting, char out[MAX_NAME])
{
    snprintf(out, MAX_NAME, "UCX_%s", setting->name);
    return out;
}

static bool is_used(const kvn_ucx_setting *preset)
{
    char name[MAX_NAME];
    return !getenv(variable(preset, name));
}

int kvn_ucx_settings_apply(const kvn_ucx_settings *self, kvn_ucp_config *config,
                           kvn_failure *failure)
{
    const kvn_ucx_library *library = self->library;

    for (size_t i = 0; i < COUNT(presets); i++)
        if (is_used(&presets[i])) /* a version may not know it */
            library->calls.ucp_config_modify(config, presets[i].name, presets[i].value);
    for (size_t i = 0; i < self->num_given; i++) {
        const kvn_ucx_setting *it = &self->given[i];
        const kvn_ucs_status status = library->calls.ucp_config_modify(config, it->name, it->value);
        if (status != KVN_UCS_OK)
            return kvn_fail(failure, KVN_INVALID, status,
                            "UCX %u.%u.%u does not take the setting UCX_%.60s=%.100s: %s",
                            library->version[0], library->version[1], library->version[2], it->name,
                            it->value, library->calls.ucs_status_string(status));
    }
    return KVN_OK;
}

/* The n-th of all: the presets, then those given. NULL: it is not to be set. */
static const kvn_ucx_setting *nth(const kvn_ucx_settings *self, size_t n)
{
    if (n >= COUNT(presets))
        return &self->given[n - COUNT(presets)];
    return is_used(&presets[n]) ? &presets[n] : NULL;
}

int kvn_ucx_settings_export(kvn_ucx_settings *self, kvn_failure *failure)
{
    const size_t count = COUNT(presets) + self->num_given;
    const char **variables;
    size_t used = 0;
    bool has_memory;

    self->environment.ours = NULL;
    if (self->library->version[1] >= 15)
        return KVN_OK;
    variables = calloc(count, sizeof *variables);
    has_memory = variables != NULL;
    for (size_t i = count; has_memory && i-- > 0;) { /* backwards: the first of a name is found */
        const kvn_ucx_setting *it = nth(self, i);
        char *text;
        if (!it)
            continue;
        has_memory = asprintf(&text, "UCX_%s=%s", it->name, it->value) >= 0;
        if (has_memory)
            variables[used++] = text;
    }
    has_memory = has_memory && kvn_ucx_environ_add(&self->environment, variables, used);
    free(variables);
    return has_memory ? KVN_OK
                      : kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for settings of UCX");
}

void kvn_ucx_settings_restore(kvn_ucx_settings *self)
{
    if (self->environment.ours)
        kvn_ucx_environ_restore(&self->environment);
}
