#include "ucx_settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

typedef struct preset {
    kvn_ucx_mode mode;
    kvn_ucx_setting setting;
} preset;

/* Measured over TCP: a message is one segment of 256 KiB that is gathered by the system call, which is four
 * times as fast as UCX's own sizes. Where no transport reads memory itself, UCX would have the owner's thread
 * do it by messages, at any address that they name, and die of one that is not mapped: not for us.
 * Between GPUs that it sees no NVLink of, UCX leaves gets out, and pulls would have no way at all.
 * UCX's first choice for its own memory is huge pages out of malloc's heap, advised to be so and never taken
 * back: engines that came and went left that heap cut into ever more mappings, 160 after 240. */
static const preset presets[] = {
    {KVN_UCX_GATHERED, {"TLS", "tcp"}},
    {KVN_UCX_GATHERED, {"TCP_TX_SEG_SIZE", "256K"}},
    {KVN_UCX_GATHERED, {"TCP_RX_SEG_SIZE", "256K"}},
    {KVN_UCX_GATHERED, {"TCP_MAX_IOV", "32"}},
    {KVN_UCX_GATHERED, {"TCP_MAX_NUM_EPS", "inf"}},
    {KVN_UCX_GATHERED, {"TCP_CONN_NB", "y"}}, /* nobody who drives may block */
    {KVN_UCX_GATHERED, {"ZCOPY_THRESH", "0"}},
    {KVN_UCX_GATHERED, {"RESOLVE_REMOTE_EP_ID", "n"}},
    {KVN_UCX_GATHERED, {"ALLOC_PRIO", "mmap"}},
    {KVN_UCX_ONE_SIDED, {"TLS", "^tcp"}},
    {KVN_UCX_ONE_SIDED, {"PROTO_EMULATION_ENABLE", "n"}},
    {KVN_UCX_ONE_SIDED, {"CUDA_IPC_ENABLE_GET_ZCOPY", "on"}},
};

#define MAX_NAME 256

static const char *variable(const kvn_ucx_setting *setting, char out[MAX_NAME])
{
    snprintf(out, MAX_NAME, "UCX_%s", setting->name);
    return out;
}

static bool is_preset(const kvn_ucx_settings *self, const preset *it)
{
    char name[MAX_NAME];
    return it->mode == self->mode && !getenv(variable(&it->setting, name));
}

int kvn_ucx_settings_apply(const kvn_ucx_settings *self, kvn_ucp_config *config,
                           kvn_failure *failure)
{
    const kvn_ucx_library *library = self->library;

    for (size_t i = 0; i < COUNT(presets); i++)
        if (is_preset(self, &presets[i])) /* a version may not know it */
            library->calls.ucp_config_modify(config, presets[i].setting.name,
                                             presets[i].setting.value);
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

/* The n-th of all: the mode's own, then those given. NULL: it is not to be set. */
static const kvn_ucx_setting *nth(const kvn_ucx_settings *self, size_t n)
{
    if (n >= COUNT(presets))
        return &self->given[n - COUNT(presets)];
    return is_preset(self, &presets[n]) ? &presets[n].setting : NULL;
}

int kvn_ucx_settings_export(kvn_ucx_settings *self, kvn_failure *failure)
{
    const size_t count = COUNT(presets) + self->num_given;

    self->saved = NULL;
    if (self->library->version[1] >= 15)
        return KVN_OK;
    /* Twice as many: name and former value of each, NULL at the end. */
    self->saved = calloc(2 * count + 1, sizeof *self->saved);
    char **next = self->saved;
    for (size_t i = 0; self->saved && i < count; i++) {
        char name[MAX_NAME];
        const kvn_ucx_setting *it = nth(self, i);
        if (!it)
            continue;
        const char *before = getenv(variable(it, name));
        next[0] = strdup(name);
        next[1] = before ? strdup(before) : NULL;
        if (!next[0] || (before && !next[1]) || setenv(name, it->value, 1) != 0) {
            free(next[0]);
            free(next[1]);
            next[0] = NULL;
            kvn_ucx_settings_restore(self);
            break;
        }
        next += 2;
    }
    return self->saved ? KVN_OK
                       : kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for settings of UCX");
}

void kvn_ucx_settings_restore(kvn_ucx_settings *self)
{
    size_t count = 0;

    if (!self->saved)
        return;
    while (self->saved[2 * count])
        count++;
    while (count--) { /* backwards: the first value of a name that came twice is the right one */
        char *name = self->saved[2 * count], *before = self->saved[2 * count + 1];
        if (before)
            setenv(name, before, 1);
        else
            unsetenv(name);
        free(name);
        free(before);
    }
    free(self->saved);
    self->saved = NULL;
}
