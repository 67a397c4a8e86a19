/* UCX's libraries change a process when they are loaded: signal handlers for backtraces, and the first instructions of
 * mmap, munmap and brk for caches of registered memory. A library must not do that to its program, and kvplan does not
 * need it, since it registers memory explicitly. Only the environment can prevent this in time, so UCX is loaded with a
 * modified one. */
#include "ucx/library.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/library.h"

/* ---- UCX's log of errors ---- */

/* UCX gives its handlers no context. Each thread has its own text, so that no lock is needed. */
static _Thread_local char latest[200];

static int on_message(const char *file, unsigned line, const char *function, int level,
                      const void *component, const char *format, va_list arguments)
{
    (void)file, (void)line, (void)function, (void)component;
    if (level > KVN_UCS_LOG_LEVEL_ERROR)
        return KVN_UCS_LOG_STOP;
    vsnprintf(latest, sizeof latest, format, arguments);
    return level == KVN_UCS_LOG_LEVEL_FATAL ? KVN_UCS_LOG_CONTINUE : KVN_UCS_LOG_STOP;
}

void kvn_ucx_log_clear(void) { latest[0] = '\0'; }

void kvn_ucx_log_append(char *message, size_t room)
{
    const size_t used = strlen(message);
    if (latest[0] && used < room)
        snprintf(message + used, room - used, ": %s", latest);
}

static int status_of(kvn_ucs_status status)
{
    switch (status) {
    case KVN_UCS_OK: return KVN_OK;
    case KVN_UCS_INPROGRESS: return KVN_PENDING;
    case KVN_UCS_ERR_NO_MEMORY: return KVN_NO_MEMORY;
    case KVN_UCS_ERR_INVALID_PARAM:
    case KVN_UCS_ERR_INVALID_ADDR: return KVN_INVALID;
    case KVN_UCS_ERR_CANCELED: return KVN_CANCELLED;
    case KVN_UCS_ERR_UNSUPPORTED: return KVN_UNSUPPORTED;
    case KVN_UCS_ERR_UNREACHABLE:
    case KVN_UCS_ERR_TIMED_OUT:
    case KVN_UCS_ERR_REJECTED:
    case KVN_UCS_ERR_NOT_CONNECTED:
    case KVN_UCS_ERR_CONNECTION_RESET:
    case KVN_UCS_ERR_ENDPOINT_TIMEOUT: return KVN_PEER_GONE;
    default: return KVN_FAILED;
    }
}

int kvn_ucx_fail(const kvn_ucx_library *library, const char *call, kvn_ucs_status status,
                 kvn_failure *failure)
{
    return kvn_fail(failure, status_of(status), status, "%s: %s", call,
                    library->calls.ucs_status_string(status));
}

/* ---- the environment ---- */

/* `variables` are "NAME=value", and must stay in place forever. False: no memory, and the environment is unchanged. */
static bool add_variables(kvn_ucx_environ *self, const char *const *variables, size_t count)
{
    size_t num_before = 0;

    self->before = environ;
    while (environ && environ[num_before])
        num_before++;
    self->ours = calloc(count + num_before + 1, sizeof *self->ours);
    if (!self->ours)
        return false;
    memcpy(self->ours, variables, count * sizeof *variables);
    memcpy(self->ours + count, self->before, num_before * sizeof *self->ours);
    __atomic_store_n(&environ, self->ours, __ATOMIC_SEQ_CST);
    return true;
}

/* If a variable was set meanwhile, `environ` is a copy of ours by now, and stays in use. */
static void restore_environment(kvn_ucx_environ *self)
{
    char **ours = self->ours;

    __atomic_compare_exchange_n(&environ, &ours, self->before, false, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST);
}

/* ---- opening ---- */

#define SYMBOL(result, name_, parameters) {#name_, offsetof(kvn_ucx, name_), false, false},

/* libucs comes with libucp: dlsym searches a library's dependencies too. */
static const kvn_symbol symbols[] = {KVN_UCP_REQUIRED(SYMBOL) KVN_UCS_REQUIRED(SYMBOL)};

/* Variables that are already set stay. Error texts are kept for our own messages. */
static const char *const harmless[][2] = {
    {"UCX_LOG_LEVEL", "UCX_LOG_LEVEL=error"},
    {"UCX_WARN_UNUSED_ENV_VARS", "UCX_WARN_UNUSED_ENV_VARS=n"},
    {"UCX_HANDLE_ERRORS", "UCX_HANDLE_ERRORS=none"},
    {"UCX_DEBUG_SIGNO", "UCX_DEBUG_SIGNO="},
    {"UCX_MEM_EVENTS", "UCX_MEM_EVENTS=n"},
    {"UCX_MEM_MMAP_HOOK_MODE", "UCX_MEM_MMAP_HOOK_MODE=none"},
    {"UCX_MEM_CUDA_HOOK_MODE", "UCX_MEM_CUDA_HOOK_MODE=none"},
    {"UCX_VFS_ENABLE", "UCX_VFS_ENABLE=n"},
};

enum { LOG_LEVEL = 0 };

/* `keeps_log`: UCX's log is kept and not printed. */
static void *load(const char *path, bool *keeps_log)
{
    const char *ours[KVN_COUNT_OF(harmless)];
    kvn_ucx_environ environment;
    size_t count = 0;
    /* Two libraries with one name do not work together, so use a UCX that the program has loaded. */
    void *file = dlopen("libucp.so.0", RTLD_NOW | RTLD_NOLOAD);

    *keeps_log = false;
    if (file)
        return file;
    *keeps_log = getenv(harmless[LOG_LEVEL][0]) == NULL;
    for (size_t i = 0; i < KVN_COUNT_OF(harmless); i++)
        if (!getenv(harmless[i][0]))
            ours[count++] = harmless[i][1];
    if (!add_variables(&environment, ours, count))
        return NULL;
    file = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    restore_environment(&environment);
    return file;
}

static int why_not_loaded(kvn_failure *failure)
{
    const char *why = dlerror();
    return kvn_fail(failure, KVN_UNSUPPORTED, 0, "%s", why ? why : "no memory to load UCX");
}

int kvn_ucx_library_open(const char *path, kvn_ucx_library *out, kvn_failure *failure)
{
    void (*version)(unsigned *, unsigned *, unsigned *);
    Dl_info found;
    bool keeps_log;

    memset(out, 0, sizeof *out);
    out->ucp = load(path, &keeps_log);
    if (!out->ucp)
        return why_not_loaded(failure);
    void *address = dlsym(out->ucp, "ucp_get_version");
    if (!address)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "%.180s is not a libucp of UCX", path);
    snprintf(out->path, sizeof out->path, "%s",
             dladdr(address, &found) && found.dli_fname ? found.dli_fname : path);
    memcpy(&version, &address, sizeof version);
    version(&out->version[0], &out->version[1], &out->version[2]);
    if (out->version[0] != KVN_UCP_API_MAJOR || out->version[1] < KVN_UCP_API_MINOR)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                        "%.160s is UCX %u.%u.%u; it must be 1.13 or a later 1.x", out->path,
                        out->version[0], out->version[1], out->version[2]);
    const char *missing = kvn_library_fill(&out->ucp, 1, &(kvn_symbols){symbols, KVN_COUNT_OF(symbols)}, &out->calls);
    if (missing)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "%.160s (UCX %u.%u.%u) lacks %s", out->path,
                        out->version[0], out->version[1], out->version[2], missing);
    if (keeps_log)
        out->calls.ucs_log_push_handler(on_message);
    return KVN_OK;
}

/* ---- settings ---- */

/* TLS: no TCP, since UCX listens on every interface, and any host that connects could read and write memory.
 * PROTO_EMULATION_ENABLE: if no transport reads memory itself, UCX would emulate it by messages to the owner's
 * thread, which would access any address in a message, and crash at one that is not mapped.
 * CUDA_IPC_ENABLE_GET_ZCOPY: UCX offers no gets between GPUs for which it sees no NVLink, and pulls need them. */
static const kvn_ucx_setting presets[] = {
    {"TLS", "^tcp"},
    {"PROTO_EMULATION_ENABLE", "n"},
    {"CUDA_IPC_ENABLE_GET_ZCOPY", "on"},
};

#define MAX_NAME 256

/* Returns the n-th setting: the presets, then the given ones. NULL: a preset that the environment overrides. */
static const kvn_ucx_setting *nth_setting(const kvn_ucx_settings *self, size_t n)
{
    char variable[MAX_NAME];

    if (n >= KVN_COUNT_OF(presets))
        return &self->given[n - KVN_COUNT_OF(presets)];
    snprintf(variable, sizeof variable, "UCX_%s", presets[n].name);
    return getenv(variable) ? NULL : &presets[n];
}

static int apply_settings(const kvn_ucx_settings *self, kvn_ucp_config *config,
                          kvn_failure *failure)
{
    const kvn_ucx_library *library = self->library;

    for (size_t i = 0; i < KVN_COUNT_OF(presets) + self->num_given; i++) {
        const kvn_ucx_setting *it = nth_setting(self, i);
        if (!it)
            continue;
        const kvn_ucs_status status = library->calls.ucp_config_modify(config, it->name, it->value);
        if (status != KVN_UCS_OK && i >= KVN_COUNT_OF(presets)) /* some versions lack a preset */
            return kvn_fail(failure, KVN_INVALID, status,
                            "UCX %u.%u.%u does not take the setting UCX_%.60s=%.100s: %s",
                            library->version[0], library->version[1], library->version[2], it->name,
                            it->value, library->calls.ucs_status_string(status));
    }
    return KVN_OK;
}

int kvn_ucx_settings_export(kvn_ucx_settings *self, kvn_failure *failure)
{
    const size_t count = KVN_COUNT_OF(presets) + self->num_given;
    const char **variables;
    size_t used = 0;
    bool has_memory;

    self->environment.ours = NULL;
    if (self->library->version[1] >= 15)
        return KVN_OK;
    variables = calloc(count, sizeof *variables);
    has_memory = variables != NULL;
    for (size_t i = count; has_memory && i-- > 0;) { /* backwards, because getenv finds the first one of a name */
        const kvn_ucx_setting *it = nth_setting(self, i);
        char *text;
        if (!it)
            continue;
        has_memory = asprintf(&text, "UCX_%s=%s", it->name, it->value) >= 0;
        if (has_memory)
            variables[used++] = text;
    }
    has_memory = has_memory && add_variables(&self->environment, variables, used);
    free(variables);
    return has_memory ? KVN_OK
                      : kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for settings of UCX");
}

void kvn_ucx_settings_restore(kvn_ucx_settings *self)
{
    if (self->environment.ours)
        restore_environment(&self->environment);
}

/* ---- contexts ---- */

/* Collects the resources that UCX may use: lines of its description of a context that end in "-- rc_mlx5/mlx5_0:1". */
static int list_transports(const kvn_ucx_library *library, kvn_ucp_context_h context,
                           char out[KVN_UCX_TRANSPORTS], kvn_failure *failure)
{
    char *text = NULL, *rest = NULL;
    size_t nbytes, used = 0;
    bool has_tcp = false;
    FILE *file = open_memstream(&text, &nbytes);

    if (!file)
        return kvn_fail(failure, KVN_NO_MEMORY, errno, "no memory for a list of UCX's transports");
    library->calls.ucp_context_print_info(context, file);
    fclose(file);
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        const char *found = strstr(line, " -- ");
        if (!found || !strstr(line, "resource"))
            continue;
        has_tcp |= strncmp(found + 4, "tcp/", 4) == 0;
        if (used < KVN_UCX_TRANSPORTS)
            used += (size_t)snprintf(out + used, KVN_UCX_TRANSPORTS - used, "%s%s",
                                     used ? " " : "", found + 4);
    }
    free(text);
    if (!has_tcp)
        return KVN_OK;
    return kvn_fail(failure, KVN_INVALID, KVN_UCS_ERR_INVALID_PARAM,
                    "UCX_TLS lets UCX use TCP, over which any host could read and write this "
                    "process's memory: leave tcp (and all) out of it; kvplan's own transport tcp is "
                    "for networks without RDMA");
}

int kvn_ucx_context_open(const kvn_ucx_settings *settings, const char *name, kvn_ucp_context_h *out,
                         char transports[KVN_UCX_TRANSPORTS], kvn_failure *failure)
{
    const kvn_ucx_library *library = settings->library;
    const kvn_ucx *calls = &library->calls;
    kvn_ucp_config *config;
    const kvn_ucp_params params = {
        .field_mask = KVN_UCP_PARAM_FEATURES | KVN_UCP_PARAM_MT_WORKERS_SHARED |
                      (*name ? KVN_UCP_PARAM_NAME : 0),
        .features = KVN_UCP_FEATURE_RMA | KVN_UCP_FEATURE_WAKEUP,
        .mt_workers_shared = 1, /* memory is mapped without the progress lock */
        .name = name,
    };
    kvn_ucs_status status = calls->ucp_config_read(NULL, NULL, &config);

    if (status != KVN_UCS_OK)
        return kvn_ucx_fail(library, "ucp_config_read", status, failure);
    failure->status = apply_settings(settings, config, failure);
    if (failure->status == KVN_OK) {
        status = calls->ucp_init_version(KVN_UCP_API_MAJOR, KVN_UCP_API_MINOR, &params, config, out);
        if (status != KVN_UCS_OK)
            kvn_ucx_fail(library, "ucp_init", status, failure);
    }
    calls->ucp_config_release(config);
    if (failure->status != KVN_OK)
        return failure->status;
    if (list_transports(library, *out, transports, failure) != KVN_OK) {
        calls->ucp_cleanup(*out);
        *out = NULL;
    }
    return failure->status;
}
