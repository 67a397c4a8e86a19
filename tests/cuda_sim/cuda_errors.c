/* Names and texts of errors, and the errors that make a context unusable. */
#include "cuda_sim.h"

CUDA cuGetErrorName(int error, const char **name);
CUDA cuGetErrorString(int error, const char **text);

static const struct {
    int code;
    const char *name;
    const char *text;
} ROWS[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {208, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int find(int error, size_t *row) {
    for (*row = 0; *row < sizeof ROWS / sizeof *ROWS; ++*row) {
        if (ROWS[*row].code == error) {
            return 0;
        }
    }
    return INVALID_VALUE;
}

/* Both calls work before cuInit, in a lost context, and in a child of fork(). */
CUDA cuGetErrorName(int error, const char **name) {
    size_t row;
    int code = name ? find(error, &row) : INVALID_VALUE;
    if (name) {
        *name = code ? NULL : ROWS[row].name;
    }
    return code;
}

CUDA cuGetErrorString(int error, const char **text) {
    size_t row;
    int code = text ? find(error, &row) : INVALID_VALUE;
    if (text) {
        *text = code ? NULL : ROWS[row].text;
    }
    return code;
}

int cuda_is_sticky(int code) {
    return code == ILLEGAL_ADDRESS || code == 702 || (code >= 714 && code <= 719);
}

int cuda_code(int code) {
    switch (code) {
    case SIM_INVALID:
    case SIM_PARAM:
        return INVALID_VALUE;
    case SIM_DEVICE_ID:
        return INVALID_DEVICE;
    case SIM_NO_CONTEXT:
        return INVALID_CONTEXT;
    case SIM_HANDLE:
    case SIM_STREAM_CONTEXT:
        return INVALID_HANDLE;
    case SIM_STREAM_ABORT:
        return CONTEXT_IS_DESTROYED;
    case SIM_NO_MEMORY:
    case SIM_NO_STREAM:
    case SIM_NO_RESOURCE:
        return OUT_OF_MEMORY;
    case SIM_FORKED:
        return NOT_INITIALIZED;
    case SIM_ALREADY_REGISTERED:
        return ALREADY_REGISTERED;
    case SIM_NOT_REGISTERED:
        return NOT_REGISTERED;
    case SIM_UNSUPPORTED:
        return NOT_SUPPORTED;
    default:
        return code < 1000 ? code : UNKNOWN;
    }
}
