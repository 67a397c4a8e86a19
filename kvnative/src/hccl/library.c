/* Opens the HCCL or the HIXL library, chooses how memory is registered with it, and describes its errors. */
#include "hccl/library.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "core/library.h"

#define REQUIRED(name, field) {name, offsetof(kvn_hccl_calls, field), false, false}
#define OPTIONAL(name, field) {name, offsetof(kvn_hccl_calls, field), true, false}

/* Each of the two ways to register memory needs all of its calls. */
enum { GLOBAL = 4, NUM_GLOBAL = 5, PER_COMM = 9, NUM_PER_COMM = 5 };

static const kvn_symbol symbols[] = {
    REQUIRED("HcclCommInitClusterInfoMemConfig", init),
    REQUIRED("HcclCommDestroy", destroy),
    REQUIRED("HcclBatchPut", put),
    REQUIRED("HcclBatchGet", get),
    [GLOBAL] = OPTIONAL("HcclRegisterGlobalMem", register_global),
    OPTIONAL("HcclDeregisterGlobalMem", deregister_global),
    OPTIONAL("HcclCommBindMem", bind),
    OPTIONAL("HcclCommUnbindMem", unbind),
    OPTIONAL("HcclCommPrepare", prepare),
    [PER_COMM] = OPTIONAL("HcclRegisterMem", register_memory),
    OPTIONAL("HcclDeregisterMem", deregister_memory),
    OPTIONAL("HcclExchangeMemDesc", exchange),
    OPTIONAL("HcclEnableMemAccess", enable),
    OPTIONAL("HcclDisableMemAccess", disable),
    OPTIONAL("HcclGetCommAsyncError", async_error),
    OPTIONAL("HcclGetErrorString", error_string),
};

const kvn_symbols kvn_hccl_symbols = {symbols, KVN_COUNT_OF(symbols)};

#define HIXL(name, field) {"HixlCS" name, offsetof(kvn_hixl_calls, field), false, false}

static const kvn_symbol hixl_symbols[] = {
    HIXL("ServerCreate", server_create),
    HIXL("ServerListen", server_listen),
    HIXL("ServerRegMem", server_register),
    HIXL("ServerUnregMem", server_unregister),
    HIXL("ServerDestroy", server_destroy),
    HIXL("ClientCreate", client_create),
    HIXL("ClientRegMem", client_register),
    HIXL("ClientUnregMem", client_unregister),
    HIXL("ClientConnect", connect),
    HIXL("ClientBatchPutAsync", put),
    HIXL("ClientBatchGetAsync", get),
    HIXL("ClientQueryCompleteStatus", query),
    HIXL("ClientDestroy", client_destroy),
    HIXL("ClientBatchPutSync", newest),
};

const kvn_symbols kvn_hixl_symbols = {hixl_symbols, KVN_COUNT_OF(hixl_symbols)};

/* A3 unfolds operations on its AICPU; other products do if HCCL's variable asks for it. */
static bool unfolds(const char *soc_name)
{
    const char *mode = getenv("HCCL_OP_EXPANSION_MODE");
    return (soc_name && strncmp(soc_name, "Ascend910_93", strlen("Ascend910_93")) == 0) ||
           (mode && strcmp(mode, "AI_CPU") == 0);
}

/* The library of the 950 generation has calls that register memory once, but its products refuse such memory. */
static int choose_generation(kvn_hccl *hccl, const char *soc_name, kvn_failure *failure)
{
    const kvn_symbols global = {symbols + GLOBAL, NUM_GLOBAL}, per_comm = {symbols + PER_COMM, NUM_PER_COMM};
    const kvn_symbol *no_global = kvn_library_missing(&hccl->calls, &global, NULL);
    const kvn_symbol *no_per_comm = kvn_library_missing(&hccl->calls, &per_comm, NULL);
    const bool is_950 = soc_name && strncmp(soc_name, "Ascend950", strlen("Ascend950")) == 0;
    if (no_per_comm && (is_950 || no_global))
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "it lacks %s%s%s", no_per_comm->name,
                        is_950 ? ", and " : " and ", is_950 ? soc_name : no_global->name);
    hccl->is_per_comm = is_950 || no_global;
    return KVN_OK;
}

static int open_file(const char *path, const kvn_acl *acl, const kvn_symbols *wanted, size_t at, kvn_hccl *out,
                     kvn_failure *failure)
{
    /* Global, because the libraries that HCCL itself opens expect to find its symbols. */
    void *file = kvn_library_open(path, RTLD_NOW | RTLD_GLOBAL, failure);
    const char *missing;

    memset(out, 0, sizeof *out);
    out->acl = acl;
    if (!file)
        return failure->status;
    missing = kvn_library_fill(&file, 1, wanted, (char *)out + at);
    if (missing)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "it lacks %s", missing);
    pthread_mutex_init(&out->init, NULL);
    pthread_mutex_init(&out->registry, NULL);
    pthread_mutex_init(&out->words_mutex, NULL);
    return KVN_OK;
}

int kvn_hccl_open(const char *path, const kvn_acl *acl, const char *soc_name, kvn_hccl *out,
                  kvn_failure *failure)
{
    /* libhccl.so of newer releases lacks HCCL's one-sided part, which is in libhcomm.so. */
    if (open_file(path, acl, &kvn_hccl_symbols, offsetof(kvn_hccl, calls), out, failure) != KVN_OK ||
        choose_generation(out, soc_name, failure) != KVN_OK)
        return failure->status;
    out->unfold_ms = unfolds(soc_name) ? KVN_HCCL_UNFOLD_MS : 0;
    return KVN_OK;
}

int kvn_hixl_open(const char *path, const kvn_acl *acl, kvn_hccl *out, kvn_failure *failure)
{
    if (open_file(path, acl, &kvn_hixl_symbols, offsetof(kvn_hccl, hixl), out, failure) != KVN_OK)
        return failure->status;
    out->is_client_server = true;
    out->unfold_ms = KVN_HCCL_UNFOLD_MS; /* HIXL's operations are kernels of the AICPU on every product */
    return KVN_OK;
}

void kvn_hccl_set_driver(kvn_hccl *hccl, const char *version, uint64_t most_host, uint64_t most_device)
{
    snprintf(hccl->driver, sizeof hccl->driver, "%s", version);
    hccl->most[0] = most_host;
    hccl->most[1] = most_device;
}

int kvn_hccl_status(kvn_hccl_result result)
{
    switch (result) {
    case KVN_HCCL_SUCCESS: return KVN_OK;
    case KVN_HIXL_PARAM_INVALID:
    case KVN_HCCL_E_PARA: return KVN_INVALID;
    case KVN_HIXL_UNSUPPORTED:
    case KVN_HCCL_E_NOT_SUPPORT: return KVN_UNSUPPORTED;
    case KVN_HIXL_TIMEOUT:
    case KVN_HCCL_E_TIMEOUT: return KVN_TIMEOUT;
    case KVN_HCCL_E_OOM: return KVN_NO_DEVICE_MEMORY;
    default: return KVN_FAILED;
    }
}

/* The name of a code, such as "TIMEOUT" for 9; "" for unknown codes. */
static const char *words_of(kvn_hccl_result result)
{
    static const char *const words[] = {
        "success",      "PARA",      "PTR",          "MEMORY",        "INTERNAL",
        "NOT_SUPPORT",  "NOT_FOUND", "UNAVAIL",      "SYSCALL",       "TIMEOUT",
        "OPEN_FILE",    "TCP_CONNECT", "ROCE_CONNECT", "TCP_TRANSFER", "ROCE_TRANSFER",
        "RUNTIME",      "DRV",       "PROFILING",    "CCE",           "NETWORK",
        "AGAIN",        "REMOTE",    "SUSPENDING",   "OPRETRY_FAIL",  "OOM",
    };
    if (result >= 0 && (size_t)result < KVN_COUNT_OF(words))
        return words[result];
    switch (result) {
    case 1041: return "IN_STATUS";
    case KVN_HIXL_PARAM_INVALID: return "PARAM_INVALID";
    case KVN_HIXL_TIMEOUT: return "TIMEOUT";
    case KVN_HIXL_UNSUPPORTED: return "UNSUPPORTED";
    case KVN_HIXL_RESOURCE_EXHAUSTED: return "RESOURCE_EXHAUSTED";
    case KVN_HIXL_FAILED: return "FAILED";
    default: return "";
    }
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
