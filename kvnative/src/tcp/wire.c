/* Checks the heads and tables of requests. */
#include "tcp/wire.h"

const char *kvn_tcp_check_head(const kvn_tcp_head *head)
{
    if (head->kind != KVN_TCP_PULL && head->kind != KVN_TCP_PUSH)
        return "a request of an unknown kind";
    if (head->reserved != 0)
        return "a request with a reserved byte set";
    if (head->num_ranges < 1 || head->num_ranges > KVN_TCP_MAX_RANGES)
        return "a request with too many ranges, or none";
    if (head->num_runs < 1 || head->num_runs > KVN_TCP_MAX_RUNS)
        return "a request with too many runs, or none";
    if (head->nbytes < 1 || head->nbytes > KVN_TCP_MAX_NBYTES)
        return "a request for too many bytes, or none";
    return NULL;
}

/* Bytes from the start to the end of a run; 0: the run is malformed. */
static uint64_t extent(const kvn_tcp_run *run)
{
    if (run->nbytes < 1 || run->count < 1 || (run->count > 1 && run->stride < run->nbytes))
        return 0;
    return (uint64_t)(run->count - 1) * run->stride + run->nbytes; /* below 2**64 */
}

const char *kvn_tcp_check_request(kvn_tcp_request *request)
{
    const kvn_tcp_head *head = &request->head;
    uint64_t total = 0;

    for (uint32_t i = 0; i < head->num_ranges; i++)
        if (kvn_tcp_range_at(request, i)->reserved != 0)
            return "a range with reserved bytes set";
    for (uint32_t i = 0; i < head->num_runs; i++) {
        const kvn_tcp_run *run = kvn_tcp_run_at(request, i);
        const uint64_t nbytes = extent(run);
        if (nbytes == 0 || run->range >= head->num_ranges)
            return "a run that is empty, overlaps itself or has no range";
        if (run->address + (nbytes - 1) < run->address)
            return "a run beyond the end of all addresses";
        total += (uint64_t)run->nbytes * run->count;
        if (total > head->nbytes) /* it cannot overflow: the sum before is small, a term below 2**64 - 2**32 */
            return "a request whose runs have more bytes than it says";
    }
    return total == head->nbytes ? NULL : "a request whose runs have fewer bytes than it says";
}
