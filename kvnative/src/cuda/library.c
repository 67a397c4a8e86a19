/* Opens the CUDA driver's library, asks it about devices, and puts its errors into words. */
#include "cuda/library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "core/library.h"

/* ---- opening ---- */

#define REQUIRED(name, parameters) {#name, offsetof(kvn_cuda, name), false, false},
#define OPTIONAL(name, parameters) {#name, offsetof(kvn_cuda, name), true, false},

static const kvn_symbol symbols[] = {KVN_CUDA_REQUIRED(REQUIRED) KVN_CUDA_OPTIONAL(OPTIONAL)};
const kvn_symbols kvn_cuda_symbols = {symbols, KVN_COUNT_OF(symbols)};

int kvn_cuda_library_open(const char *path, kvn_cuda_library *out, kvn_failure *failure)
{
    const char *missing;
    void *file = kvn_library_open(path, RTLD_NOW | RTLD_LOCAL, failure);

    memset(out, 0, sizeof *out);
    if (!file)
        return failure->status;
    missing = kvn_library_fill(&file, 1, &kvn_cuda_symbols, &out->calls);
    if (missing)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                        "%s has no %s; kvplan needs the driver of CUDA 11.2 or later", path, missing);
    return KVN_OK;
}

static int ended(const kvn_cuda_library *library, const char *call, CUresult code, kvn_failure *failure)
{
    return code == KVN_CUDA_OK ? KVN_OK : kvn_cuda_fail(&library->calls, call, code, failure);
}

#define CALL(library, failure, name, ...)                                                         \
    ended(library, #name, (library)->calls.name(__VA_ARGS__), failure)

int kvn_cuda_library_init(const kvn_cuda_library *library, kvn_failure *failure)
{
    return CALL(library, failure, cuInit, 0);
}

/* ---- devices ---- */

int kvn_cuda_library_version(const kvn_cuda_library *library)
{
    int version = 0;

    return library->calls.cuDriverGetVersion(&version) == KVN_CUDA_OK ? version : 0;
}

int kvn_cuda_library_devices(const void *runtime, uint32_t *count, kvn_failure *failure)
{
    const kvn_cuda_library *library = runtime;
    int found = 0;
    const int status = CALL(library, failure, cuDeviceGetCount, &found);

    *count = (uint32_t)found;
    return status;
}

int kvn_cuda_library_uuid(const kvn_cuda_library *library, CUdevice device, kvn_cuda_uuid *out, bool *is_slice,
                          kvn_failure *failure)
{
    kvn_cuda_uuid of_gpu;

    *is_slice = false;
    if (CALL(library, failure, cuDeviceGetUuid, &of_gpu, device) != KVN_OK)
        return failure->status;
    *out = of_gpu;
    if (!library->calls.cuDeviceGetUuid_v2)
        return KVN_OK;
    if (CALL(library, failure, cuDeviceGetUuid_v2, out, device) != KVN_OK)
        return failure->status;
    *is_slice = memcmp(out, &of_gpu, sizeof of_gpu) != 0;
    return KVN_OK;
}

static void write_uuid(const kvn_cuda_uuid *uuid, bool is_slice, char out[41])
{
    char *at = out + sprintf(out, "%s", is_slice ? "MIG" : "GPU");

    for (size_t i = 0; i < sizeof uuid->bytes; i++)
        at += sprintf(at, i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                      uuid->bytes[i]);
}

int kvn_cuda_library_facts(const kvn_cuda_library *library, int32_t ordinal, kvn_cuda_facts *out,
                           kvn_failure *failure)
{
    kvn_cuda_uuid uuid;
    CUdevice device;
    bool is_slice;

    memset(out, 0, sizeof *out);
    if (CALL(library, failure, cuDeviceGet, &device, ordinal) != KVN_OK ||
        CALL(library, failure, cuDeviceGetName, out->name, (int)sizeof out->name, device) != KVN_OK ||
        kvn_cuda_library_uuid(library, device, &uuid, &is_slice, failure) != KVN_OK ||
        CALL(library, failure, cuDeviceGetPCIBusId, out->pci, (int)sizeof out->pci, device) != KVN_OK ||
        CALL(library, failure, cuDeviceGetAttribute, &out->major, KVN_CUDA_CAPABILITY_MAJOR, device) !=
            KVN_OK ||
        CALL(library, failure, cuDeviceGetAttribute, &out->minor, KVN_CUDA_CAPABILITY_MINOR, device) !=
            KVN_OK)
        return failure->status;
    write_uuid(&uuid, is_slice, out->uuid);
    return KVN_OK;
}

int kvn_cuda_library_attribute(const void *runtime, int32_t ordinal, int attribute, int64_t *value,
                               kvn_failure *failure)
{
    const kvn_cuda_library *library = runtime;
    CUdevice device;
    int found = 0;

    if (CALL(library, failure, cuDeviceGet, &device, ordinal) != KVN_OK)
        return failure->status;
    if (CALL(library, failure, cuDeviceGetAttribute, &found, attribute, device) == KVN_OK) {
        *value = found;
        return KVN_OK;
    }
    if (failure->code == KVN_CUDA_INVALID_VALUE) /* only later drivers have the attribute */
        failure->status = KVN_UNSUPPORTED;
    return failure->status;
}

int kvn_cuda_library_reaches(const kvn_cuda_library *library, int32_t ordinal, int32_t peer, int *can,
                             kvn_failure *failure)
{
    CUdevice from, to;

    if (CALL(library, failure, cuDeviceGet, &from, ordinal) != KVN_OK ||
        CALL(library, failure, cuDeviceGet, &to, peer) != KVN_OK)
        return failure->status;
    return CALL(library, failure, cuDeviceCanAccessPeer, can, from, to);
}

/* ---- errors ---- */

/* Results with a status of their own; all others are KVN_FAILED. The driver has a text for each. */
static int status_of(CUresult code)
{
    switch (code) {
    case KVN_CUDA_INVALID_VALUE:
    case KVN_CUDA_NOT_INITIALIZED:
    case KVN_CUDA_DEINITIALIZED:
    case KVN_CUDA_INVALID_DEVICE:
    case KVN_CUDA_INVALID_CONTEXT:
    case KVN_CUDA_INVALID_HANDLE:
    case KVN_CUDA_CONTEXT_IS_DESTROYED:
    case KVN_CUDA_HOST_MEMORY_ALREADY_REGISTERED:
    case KVN_CUDA_HOST_MEMORY_NOT_REGISTERED: return KVN_INVALID;
    case KVN_CUDA_OUT_OF_MEMORY:
    case KVN_CUDA_LAUNCH_OUT_OF_RESOURCES: return KVN_NO_DEVICE_MEMORY;
    case KVN_CUDA_STUB_LIBRARY:
    case KVN_CUDA_NO_DEVICE:
    case KVN_CUDA_NO_BINARY_FOR_GPU:
    case KVN_CUDA_PEER_ACCESS_UNSUPPORTED:
    case KVN_CUDA_INVALID_PTX:
    case KVN_CUDA_JIT_COMPILER_NOT_FOUND:
    case KVN_CUDA_UNSUPPORTED_PTX_VERSION:
    case KVN_CUDA_JIT_COMPILATION_DISABLED:
    case KVN_CUDA_NOT_SUPPORTED:
    case KVN_CUDA_SYSTEM_NOT_READY:
    case KVN_CUDA_SYSTEM_DRIVER_MISMATCH:
    case KVN_CUDA_COMPAT_NOT_SUPPORTED: return KVN_UNSUPPORTED;
    case KVN_CUDA_DEVICE_UNAVAILABLE: /* another process uses the device exclusively */
    case KVN_CUDA_NOT_PERMITTED: return KVN_DENIED;
    case KVN_CUDA_ECC_UNCORRECTABLE: return KVN_DEVICE_MEMORY;
    case KVN_CUDA_LAUNCH_TIMEOUT: return KVN_TIMEOUT;
    default: return KVN_FAILED;
    }
}

int kvn_cuda_fail(const kvn_cuda *cuda, const char *call, CUresult code, kvn_failure *failure)
{
    const char *name = NULL, *words = NULL;

    if (cuda->cuGetErrorName(code, &name) != KVN_CUDA_OK || !name)
        name = "a code that this driver has no name for";
    if (cuda->cuGetErrorString(code, &words) != KVN_CUDA_OK)
        words = NULL;
    return kvn_fail(failure, status_of(code), code, "%s: %d (%s)%s%s", call, code, name,
                    words ? ": " : "", words ? words : "");
}
