/* Finds the transport of an endpoint among its lanes, in the way that the version of UCX offers. */
#include "ucx/lanes.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/library.h"

/* Returns true for a transport, such as "rc_mlx5/mlx5_0:1", that reads and writes memory itself. */
static bool is_direct(const char *transport)
{
    static const char *const direct[] = {"rc_", "dc_", "srd", "gga_", "cma/", "knem/", "xpmem/"};

    for (size_t i = 0; i < KVN_COUNT_OF(direct); i++)
        if (strncmp(transport, direct[i], strlen(direct[i])) == 0)
            return true;
    return false;
}

/* Takes the first direct transport of the lanes. UCX has at most 64 lanes. */
static int query_transport(const kvn_ucx_library *library, kvn_ucp_ep_h endpoint, char *out, bool *is_found,
                           kvn_failure *failure)
{
    kvn_ucp_transport_entry entries[64];
    kvn_ucp_ep_attr attributes = {
        .field_mask = KVN_UCP_EP_ATTR_TRANSPORTS,
        .transports = {entries, KVN_COUNT_OF(entries), sizeof *entries},
    };
    const kvn_ucs_status status = library->calls.ucp_ep_query(endpoint, &attributes);

    if (status != KVN_UCS_OK)
        return kvn_ucx_fail(library, "ucp_ep_query", status, failure);
    for (unsigned i = 0; i < attributes.transports.num_entries && !*is_found; i++) {
        snprintf(out, KVN_UCX_TRANSPORT_ROOM, "%s/%s", entries[i].transport_name, entries[i].device_name);
        *is_found = is_direct(out);
    }
    return KVN_OK;
}

/* UCX 1.13 answers no such query: finds the transport in a description, "lane[0]:  2:cma/memory.0 md[1] ...". */
static int read_transport(const kvn_ucx_library *library, kvn_ucp_ep_h endpoint, char *out, bool *is_found,
                          kvn_failure *failure)
{
    char *text = NULL;
    size_t nbytes;
    FILE *file = open_memstream(&text, &nbytes);

    if (!file)
        return kvn_fail(failure, KVN_NO_MEMORY, errno, "no memory to look at an endpoint");
    library->calls.ucp_ep_print_info(endpoint, file);
    fclose(file);
    for (const char *at = text; !*is_found && (at = strstr(at, "lane[")) && (at = strchr(at, ':')) &&
                                (at = strchr(at + 1, ':'));) {
        at++;
        snprintf(out, KVN_UCX_TRANSPORT_ROOM, "%.*s", (int)strcspn(at, " .\n"), at);
        *is_found = is_direct(out);
    }
    free(text);
    return KVN_OK;
}

int kvn_ucx_find_transport(const kvn_ucx_library *library, kvn_ucp_ep_h endpoint, char out[KVN_UCX_TRANSPORT_ROOM],
                           kvn_failure *failure)
{
    const bool has_query = library->version[1] >= 14;
    bool is_found = false;
    const int status = (has_query ? query_transport : read_transport)(library, endpoint, out, &is_found, failure);

    if (status != KVN_OK || is_found)
        return status;
    out[0] = '\0';
    return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                    "UCX reads and writes a peer's memory over RDMA, or shared memory between "
                    "processes of one host, and found neither on the way to the peer: use the "
                    "transport tcp");
}
