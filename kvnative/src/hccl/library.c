#include "hccl/library.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

typedef struct symbol {
    const char *name;
    size_t at; /* in kvn_hccl_calls */
} symbol;

#define SYMBOL(name_, field) {name_, offsetof(kvn_hccl_calls, field)}

static const symbol required[] = {
    SYMBOL("HcclCommInitClusterInfoMemConfig", init),
    SYMBOL("HcclCommDestroy", destroy),
    SYMBOL("HcclBatchPut", put),
    SYMBOL("HcclBatchGet", get),
};

/* The two ways to register memory come first: each is there as a whole or of no use. */
enum { GLOBAL_FIRST = 0, GLOBAL_LAST = 5, PER_COMM_FIRST = 5, PER_COMM_LAST = 10 };

static const symbol optional[] = {
    SYMBOL("HcclRegisterGlobalMem", register_global),
    SYMBOL("HcclDeregisterGlobalMem", deregister_global),
    SYMBOL("HcclCommBindMem", bind),
    SYMBOL("HcclCommUnbindMem", unbind),
    SYMBOL("HcclCommPrepare", prepare),
    SYMBOL("HcclRegisterMem", register_memory),
    SYMBOL("HcclDeregisterMem", deregister_memory),
    SYMBOL("HcclExchangeMemDesc", exchange),
    SYMBOL("HcclEnableMemAccess", enable),
    SYMBOL("HcclDisableMemAccess", disable),
    SYMBOL("HcclGetCommAsyncError", async_error),
    SYMBOL("HcclGetErrorString", error_string),
};

/* memcpy: ISO C has no conversion from void * to a pointer to a function. */
static bool look_up(kvn_hccl *hccl, const symbol *symbol)
{
    void *address = dlsym(hccl->file, symbol->name);
    memcpy((char *)&hccl->calls + symbol->at, &address, sizeof address);
    return address != NULL;
}

static bool has(const kvn_hccl *hccl, const symbol *symbol)
{
    void *address;
    memcpy(&address, (const char *)&hccl->calls + symbol->at, sizeof address);
    return address != NULL;
}

static const char *first_missing(const kvn_hccl *hccl, size_t first, size_t last)
{
    for (size_t i = first; i < last; i++)
        if (!has(hccl, &optional[i]))
            return optional[i].name;
    return NULL;
}

/* Other products do so where a variable of HCCL's asks for it. */
static bool unfolds(const char *soc_name)
{
    const char *mode = getenv("HCCL_OP_EXPANSION_MODE");
    return (soc_name && strncmp(soc_name, "Ascend910_93", strlen("Ascend910_93")) == 0) ||
           (mode && strcmp(mode, "AI_CPU") == 0);
}

/* Products of the 950 generation refuse memory that is registered once, though their library has
 * the calls. */
static int choose_generation(kvn_hccl *hccl, const char *soc_name, kvn_failure *failure)
{
    const char *no_global = first_missing(hccl, GLOBAL_FIRST, GLOBAL_LAST);
    const char *no_per_comm = first_missing(hccl, PER_COMM_FIRST, PER_COMM_LAST);
    const bool is_950 = soc_name && strncmp(soc_name, "Ascend950", strlen("Ascend950")) == 0;
    if (no_per_comm && (is_950 || no_global))
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "it lacks %s%s%s", no_per_comm,
                        is_950 ? ", and " : " and ", is_950 ? soc_name : no_global);
    hccl->is_per_comm = is_950 || no_global;
    return KVN_OK;
}

int kvn_hccl_open(const char *path, const kvn_acl *acl, const char *soc_name, kvn_hccl *out,
                  kvn_failure *failure)
{
    memset(out, 0, sizeof *out);
    out->acl = acl;
    /* Global, because the libraries that it opens itself expect to find its symbols. */
    out->file = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!out->file)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "%s", dlerror());
    for (size_t i = 0; i < COUNT(required); i++)
        if (!look_up(out, &required[i])) {
            /* libhccl.so of newer releases: HCCL's one-sided part has moved to libhcomm.so. It stays
             * open all the same, because vendors' libraries seldom survive being closed. */
            return kvn_fail(failure, KVN_UNSUPPORTED, 0, "it lacks %s", required[i].name);
        }
    for (size_t i = 0; i < COUNT(optional); i++)
        look_up(out, &optional[i]);
    if (choose_generation(out, soc_name, failure) != KVN_OK)
        return failure->status;
    out->unfold_ms = unfolds(soc_name) ? KVN_HCCL_UNFOLD_MS : 0;
    pthread_mutex_init(&out->init, NULL);
    pthread_mutex_init(&out->registry, NULL);
    pthread_mutex_init(&out->words_mutex, NULL);
    return KVN_OK;
}

void kvn_hccl_set_driver(kvn_hccl *hccl, const char *version, uint64_t most_host, uint64_t most_device)
{
    snprintf(hccl->driver, sizeof hccl->driver, "%s", version);
    hccl->most[0] = most_host;
    hccl->most[1] = most_device;
}

void kvn_hccl_path(const kvn_hccl *hccl, char *out, size_t room)
{
    Dl_info found;
    void *address;
    memcpy(&address, &hccl->calls.init, sizeof address);
    snprintf(out, room, "%s",
             dladdr(address, &found) && found.dli_fname ? found.dli_fname : "");
}

const char *kvn_hccl_missing(const kvn_hccl *hccl, size_t n)
{
    for (size_t i = 0; i < COUNT(optional); i++)
        if (!has(hccl, &optional[i]) && n-- == 0)
            return optional[i].name;
    return NULL;
}

int kvn_hccl_status(kvn_hccl_result result)
{
    switch (result) {
    case KVN_HCCL_SUCCESS: return KVN_OK;
    case KVN_HCCL_E_PARA: return KVN_INVALID;
    case KVN_HCCL_E_NOT_SUPPORT: return KVN_UNSUPPORTED;
    case KVN_HCCL_E_TIMEOUT: return KVN_TIMEOUT;
    case KVN_HCCL_E_OOM: return KVN_NO_DEVICE_MEMORY;
    default: return KVN_FAILED;
    }
}

/* "TIMEOUT" for 9; "" for codes that kvplan knows nothing of. */
static const char *words_of(kvn_hccl_result result)
{
    static const char *const words[] = {
        "success",      "PARA",      "PTR",          "MEMORY",        "INTERNAL",
        "NOT_SUPPORT",  "NOT_FOUND", "UNAVAIL",      "SYSCALL",       "TIMEOUT",
        "OPEN_FILE",    "TCP_CONNECT", "ROCE_CONNECT", "TCP_TRANSFER", "ROCE_TRANSFER",
        "RUNTIME",      "DRV",       "PROFILING",    "CCE",           "NETWORK",
        "AGAIN",        "REMOTE",    "SUSPENDING",   "OPRETRY_FAIL",  "OOM",
    };
    return result >= 0 && (size_t)result < COUNT(words) ? words[result]
           : result == 1041                             ? "IN_STATUS"
                                                        : "";
}

int kvn_hccl_explain(const kvn_hccl *hccl, const char *call, kvn_hccl_result result, char *message,
                     size_t room)
{
    const char *text = hccl->calls.error_string ? hccl->calls.error_string(result) : NULL;
    const char *recent = hccl->acl->aclGetRecentErrMsg();
    const char *words = words_of(result);
    snprintf(message, room, "%s: %d%s%s%s%s%s%s%s", call, result, *words ? " (" : "", words,
             *words ? ")" : "", text && *text ? ": " : "", text && *text ? text : "",
             recent && *recent ? ": " : "", recent && *recent ? recent : "");
    kvn_acl_put_on_one_line(message);
    return kvn_hccl_status(result);
}

int kvn_hccl_fail(const kvn_hccl *hccl, const char *call, kvn_hccl_result result,
                  kvn_failure *failure)
{
    failure->code = result;
    failure->status = kvn_hccl_explain(hccl, call, result, failure->message,
                                       sizeof failure->message);
    return failure->status;
}
