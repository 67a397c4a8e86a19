/* Opens the ACL library, asks it about devices, and puts its errors into words. */
#include "acl/library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "core/library.h"

/* ---- opening ---- */

#define REQUIRED(result, name, parameters) {#name, offsetof(kvn_acl, name), false, false},
#define OPTIONAL(result, name, parameters) {#name, offsetof(kvn_acl, name), true, false},
#define NEWER(result, name, parameters) {#name, offsetof(kvn_acl, name), true, true},

static const kvn_symbol symbols[] = {KVN_ACL_REQUIRED(REQUIRED) KVN_ACL_OPTIONAL(OPTIONAL, NEWER)};
const kvn_symbols kvn_acl_symbols = {symbols, KVN_COUNT_OF(symbols)};

int kvn_acl_library_open(const char *const *paths, size_t num_paths, kvn_acl_library *out,
                         kvn_failure *failure)
{
    const char *missing;
    kvn_failure refusal = {.message = ""};
    char reason[256] = "";
    bool opened = false;

    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < num_paths && i < KVN_ACL_MAX_FILES; i++) {
        /* RTLD_GLOBAL, as if the program were linked with it: the toolkit's libraries use symbols of each other. */
        out->files[i] = kvn_library_open(paths[i], RTLD_NOW | RTLD_GLOBAL, &refusal);
        if (!out->files[i] && !*reason)
            memcpy(reason, refusal.message, sizeof reason);
        opened |= out->files[i] != NULL;
    }
    if (!opened)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "%s", reason);
    missing = kvn_library_fill(out->files, KVN_ACL_MAX_FILES, &kvn_acl_symbols, &out->calls);
    if (missing)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                        "%s has no %s; kvplan needs the ACL runtime of CANN 8.1 or later%s%s",
                        paths[0], missing, *reason ? "; " : "", reason);
    return KVN_OK;
}

int kvn_acl_library_init(const kvn_acl_library *library, int *first, kvn_failure *failure)
{
    const int code = library->calls.aclInit(NULL);

    *first = code == KVN_ACL_OK;
    if (code == KVN_ACL_REPEATED_INIT) {
        kvn_acl_forget(&library->calls);
        return KVN_OK;
    }
    return code == KVN_ACL_OK ? KVN_OK : kvn_acl_fail(&library->calls, "aclInit", code, failure);
}

int kvn_acl_library_finalize(const kvn_acl_library *library, kvn_failure *failure)
{
    const int code = library->calls.aclFinalize();

    return code == KVN_ACL_OK ? KVN_OK : kvn_acl_fail(&library->calls, "aclFinalize", code, failure);
}

/* ---- devices ---- */

int kvn_acl_library_devices(const void *runtime, uint32_t *count, kvn_failure *failure)
{
    const kvn_acl_library *library = runtime;
    const int code = library->calls.aclrtGetDeviceCount(count);

    return code == KVN_ACL_OK
               ? KVN_OK
               : kvn_acl_fail(&library->calls, "aclrtGetDeviceCount", code, failure);
}

const char *kvn_acl_library_soc(const kvn_acl_library *library)
{
    const char *name = library->calls.aclrtGetSocName();

    if (name)
        return name;
    kvn_acl_forget(&library->calls);
    return "";
}

bool kvn_acl_library_interface(const kvn_acl_library *library, int32_t version[3])
{
    const kvn_acl *acl = &library->calls;

    if (!acl->aclrtGetVersion)
        return false;
    if (acl->aclrtGetVersion(&version[0], &version[1], &version[2]) == KVN_ACL_OK)
        return true;
    kvn_acl_forget(acl);
    return false;
}

/* Before 8.5 only the runtime below ACL has this call. ACL depends on it, so dlsym finds its symbols. */
static bool ask_runtime(const kvn_acl_library *library, int32_t logical, int32_t *physical)
{
    int32_t (*get_number)(uint32_t logical, uint32_t *physical) = NULL;
    uint32_t number = 0;

    *(void **)&get_number = kvn_library_find(library->files, KVN_ACL_MAX_FILES, "rtGetDevicePhyIdByIndex");
    if (!get_number)
        return false;
    if (get_number((uint32_t)logical, &number) != 0) {
        kvn_acl_forget(&library->calls);
        return false;
    }
    *physical = (int32_t)number;
    return true;
}

bool kvn_acl_library_physical(const kvn_acl_library *library, int32_t logical, int32_t *physical)
{
    const kvn_acl *acl = &library->calls;

    if (acl->aclrtGetPhyDevIdByLogicDevId) {
        if (acl->aclrtGetPhyDevIdByLogicDevId(logical, physical) == KVN_ACL_OK)
            return true;
        kvn_acl_forget(acl);
        return false;
    }
    return ask_runtime(library, logical, physical);
}

int kvn_acl_library_attribute(const void *runtime, int32_t device, int attribute, int64_t *value,
                              kvn_failure *failure)
{
    const kvn_acl *acl = &((const kvn_acl_library *)runtime)->calls;
    int code;

    if (!acl->aclrtGetDeviceInfo)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "the library has no aclrtGetDeviceInfo");
    code = acl->aclrtGetDeviceInfo((uint32_t)device, attribute, value);
    if (code == KVN_ACL_OK)
        return KVN_OK;
    kvn_acl_fail(acl, "aclrtGetDeviceInfo", code, failure);
    if (failure->status == KVN_INVALID) /* an attribute that only later versions have */
        failure->status = KVN_UNSUPPORTED;
    return failure->status;
}

/* ---- errors ---- */

typedef struct error_code {
    int code;
    int status;
    const char *words;
} error_code;

/* The codes that occur in practice. Any other code becomes KVN_FAILED with its number. */
static const error_code ERRORS[] = {
    {100000, KVN_INVALID, "invalid parameter"},
    {100001, KVN_INVALID, "not initialized"},
    {107000, KVN_INVALID, "invalid parameter"},
    {107001, KVN_INVALID, "no such device"},
    {107002, KVN_INVALID, "no context in this thread"},
    {107003, KVN_INVALID, "stream of another context"},
    {107008, KVN_INVALID, "not aligned"},
    {107016, KVN_INVALID, "wrong kind of memory"},
    {107017, KVN_INVALID, "no such handle"},
    {107019, KVN_TIMEOUT, "waiting timed out"},
    {107020, KVN_TIMEOUT, "the task timed out"},
    {107022, KVN_FAILED, "the device's tasks were aborted"},
    {107023, KVN_FAILED, "the stream was aborted"},
    {200000, KVN_NO_MEMORY, "no host memory"},
    {200001, KVN_UNSUPPORTED, "call not supported"},
    {207000, KVN_UNSUPPORTED, "feature not supported"},
    {207001, KVN_NO_DEVICE_MEMORY, "out of device memory"},
    {207004, KVN_UNSUPPORTED, "no device"},
    {207005, KVN_NO_DEVICE_MEMORY, "out of device resources"},
    {207006, KVN_DENIED, "no permission"},
    {207007, KVN_NO_DEVICE_MEMORY, "out of events"},
    {207008, KVN_NO_DEVICE_MEMORY, "out of streams"},
    {207012, KVN_NO_DEVICE_MEMORY, "over a limit of the device"},
    {207018, KVN_NO_DEVICE_MEMORY, "out of device memory"},
    {207020, KVN_TIMEOUT, "the driver timed out"},
    {500000, KVN_FAILED, "internal error"},
    {500001, KVN_FAILED, "internal failure"},
    {507000, KVN_FAILED, "internal error of the runtime"},
    {507002, KVN_FAILED, "the stream is full"},
    {507010, KVN_FAILED, "the device has lost its heartbeat"},
    {507013, KVN_FAILED, "DMA error"},
    {507022, KVN_FAILED, "error between processes"},
    {507046, KVN_TIMEOUT, "waiting for the stream timed out"},
    {507047, KVN_TIMEOUT, "waiting for the event timed out"},
    {507052, KVN_FAILED, "copy failed"},
    {507053, KVN_DEVICE_MEMORY, "error of device memory"},
    {507054, KVN_DEVICE_MEMORY, "uncorrectable error of HBM"},
    {507055, KVN_DEVICE_MEMORY, "device memory is suspect"},
    {507056, KVN_FAILED, "error of the link between devices"},
    {507057, KVN_SUSPECT_REMOTE, "the remote device is suspect"},
    {507899, KVN_FAILED, "internal error of the driver"},
    {507901, KVN_PEER_GONE, "a connection was closed"},
    {507904, KVN_FAILED, "communication failed in spite of retries"},
    {507910, KVN_INVALID, "host memory is registered already"},
    {507911, KVN_INVALID, "host memory is not registered"},
};

static const error_code *find_error(int code)
{
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == code)
            return &ERRORS[i];
    return NULL;
}

void kvn_acl_put_on_one_line(char *text)
{
    char *end = text;

    for (char *at = text; *at; at++) {
        if (*at == '\n' || *at == '\r' || *at == '\t')
            *at = ' ';
        if (*at != ' ')
            end = at + 1;
    }
    *end = '\0';
}

int kvn_acl_fail(const kvn_acl *acl, const char *call, int code, kvn_failure *failure)
{
    const error_code *error = find_error(code);
    const char *words = error ? error->words : "", *text = acl->aclGetRecentErrMsg();

    kvn_fail(failure, error ? error->status : KVN_FAILED, code, "%s: %d%s%s%s%s%s", call, code,
             *words ? " (" : "", words, *words ? ")" : "", text && *text ? ": " : "",
             text ? text : "");
    kvn_acl_put_on_one_line(failure->message);
    return failure->status;
}

void kvn_acl_forget(const kvn_acl *acl) { (void)acl->aclGetRecentErrMsg(); }
