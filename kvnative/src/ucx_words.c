/* UCX's errors as ours. */
#include "ucx_library.h"

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
