/* A UCX that shows the transports of an endpoint in only one way: ucp_ep_query with MINOR 14, ucp_ep_print_info with
 * MINOR 13. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "kvnative/ucx.h"

#define REAL(name) (*(__typeof__(&name))dlsym(RTLD_NEXT, #name))

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release)
{
    *major = 1;
    *minor = MINOR;
    *release = 0;
}

#if MINOR < 14
/* Stores nothing, because 1.13 does not know the field. */
kvn_ucs_status ucp_ep_query(kvn_ucp_ep_h ep, void *attributes)
{
    (void)ep, (void)attributes;
    return KVN_UCS_OK;
}
#else
void ucp_ep_print_info(kvn_ucp_ep_h ep, FILE *stream)
{
    (void)ep;
    fputs("lane[0]: 2:text/that changes\n", stream);
}
#endif
