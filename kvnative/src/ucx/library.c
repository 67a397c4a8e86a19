/* UCX's libraries change a process when they are loaded: handlers of signals for the sake of backtraces,
 * and the first instructions of mmap, munmap and brk for the sake of caches of registered memory. A library
 * of a program must not do that to it, and kvplan has no use for it: what it moves is registered by hand.
 * Only the environment can say so in time, so they are loaded with another one: ucx_environ.h. */
#include "ucx/library.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ucx/environ.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

typedef struct symbol {
    const char *name;
    size_t at; /* in kvn_ucx */
} symbol;

/* ---- what UCX says of its errors ---- */

/* UCX gives its handlers no context. Each thread has its own, so that no lock is needed. */
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

int kvn_ucx_status(kvn_ucs_status status)
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
    return kvn_fail(failure, kvn_ucx_status(status), status, "%s: %s", call,
                    library->calls.ucs_status_string(status));
}

/* ---- opening ---- */

#define SYMBOL(result, name_, parameters) {#name_, offsetof(kvn_ucx, name_)},

static const symbol of_ucp[] = {KVN_UCP_REQUIRED(SYMBOL)};
static const symbol of_ucs[] = {KVN_UCS_REQUIRED(SYMBOL)};

/* What whoever runs the program has set himself stays. Errors are kept for our own messages. */
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

/* `keeps_log`: what UCX says shall not be printed. */
static void *load(const char *path, bool *keeps_log)
{
    const char *ours[COUNT(harmless)];
    kvn_ucx_environ environment;
    size_t count = 0;
    /* Two libraries of one name do not go together: what a program has loaded before is used. */
    void *file = dlopen("libucp.so.0", RTLD_NOW | RTLD_NOLOAD);

    *keeps_log = false;
    if (file)
        return file;
    *keeps_log = getenv(harmless[LOG_LEVEL][0]) == NULL;
    for (size_t i = 0; i < COUNT(harmless); i++)
        if (!getenv(harmless[i][0]))
            ours[count++] = harmless[i][1];
    if (!kvn_ucx_environ_add(&environment, ours, count))
        return NULL;
    file = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    kvn_ucx_environ_restore(&environment);
    return file;
}

static int why_not_loaded(kvn_failure *failure)
{
    const char *why = dlerror();
    return kvn_fail(failure, KVN_UNSUPPORTED, 0, "%s", why ? why : "no memory to load UCX");
}

/* memcpy: ISO C has no conversion from void * to a pointer to a function. */
static const char *look_up(kvn_ucx *calls, void *file, const symbol *symbols, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        void *address = dlsym(file, symbols[i].name);
        if (!address)
            return symbols[i].name;
        memcpy((char *)calls + symbols[i].at, &address, sizeof address);
    }
    return NULL;
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
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "%.180s is no libucp of UCX", path);
    snprintf(out->path, sizeof out->path, "%s",
             dladdr(address, &found) && found.dli_fname ? found.dli_fname : path);
    memcpy(&version, &address, sizeof version);
    version(&out->version[0], &out->version[1], &out->version[2]);
    if (out->version[0] != KVN_UCP_API_MAJOR || out->version[1] < KVN_UCP_API_MINOR)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                        "%.160s is UCX %u.%u.%u; it must be 1.13 or a later 1.x", out->path,
                        out->version[0], out->version[1], out->version[2]);
    const char *missing = look_up(&out->calls, out->ucp, of_ucp, COUNT(of_ucp));
    if (!missing) /* libucs came with it: dlsym looks into what a library depends on too */
        missing = look_up(&out->calls, out->ucp, of_ucs, COUNT(of_ucs));
    if (missing)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "%.160s (UCX %u.%u.%u) lacks %s", out->path,
                        out->version[0], out->version[1], out->version[2], missing);
    if (keeps_log)
        out->calls.ucs_log_push_handler(on_message);
    return KVN_OK;
}
