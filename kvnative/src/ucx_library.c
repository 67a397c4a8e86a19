/* UCX's libraries change a process when they are loaded: handlers of signals for the sake of backtraces,
 * and the first instructions of mmap, munmap and brk for the sake of caches of registered memory. A library
 * of a program must not do that to it, and kvplan has no use for it: what it moves is registered by hand.
 * Only the environment can say so in time, therefore it is changed while the libraries are loaded. */
#include "ucx_library.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "ucx_log.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

typedef struct symbol {
    const char *name;
    size_t at; /* in kvn_ucx */
} symbol;

#define SYMBOL(result, name_, parameters) {#name_, offsetof(kvn_ucx, name_)},

static const symbol of_ucp[] = {KVN_UCP_REQUIRED(SYMBOL)};
static const symbol of_ucs[] = {KVN_UCS_REQUIRED(SYMBOL)};

/* What whoever runs the program has set himself stays. Errors are kept for our own messages (ucx_log.h). */
static const char *const harmless[][2] = {
    {"UCX_LOG_LEVEL", "error"},
    {"UCX_WARN_UNUSED_ENV_VARS", "n"},
    {"UCX_HANDLE_ERRORS", "none"},
    {"UCX_DEBUG_SIGNO", ""},
    {"UCX_MEM_EVENTS", "n"},
    {"UCX_MEM_MMAP_HOOK_MODE", "none"},
    {"UCX_MEM_CUDA_HOOK_MODE", "none"},
    {"UCX_VFS_ENABLE", "n"},
};

enum { LOG_LEVEL = 0 };

/* `keeps_log`: what UCX says shall not be printed. */
static void *load(const char *path, bool *keeps_log)
{
    bool is_ours[COUNT(harmless)];
    /* Two libraries of one name do not go together: what a program has loaded before is used. */
    void *file = dlopen("libucp.so.0", RTLD_NOW | RTLD_NOLOAD);

    *keeps_log = false;
    if (file)
        return file;
    for (size_t i = 0; i < COUNT(harmless); i++) {
        is_ours[i] = getenv(harmless[i][0]) == NULL;
        if (is_ours[i])
            setenv(harmless[i][0], harmless[i][1], 1);
    }
    *keeps_log = is_ours[LOG_LEVEL];
    file = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    for (size_t i = 0; i < COUNT(harmless); i++)
        if (is_ours[i])
            unsetenv(harmless[i][0]);
    return file;
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
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "%s", dlerror());
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
        kvn_ucx_log_install(&out->calls);
    return KVN_OK;
}
