/* The backend of the gathered protocol: pulls from, or pushes to, the ranges of the peer of a link, many
 * descriptors in a message. A batch of any size is one request, which advances by itself; requests of a
 * link take turns. */
#ifndef KVN_UCX_GATHERED_H
#define KVN_UCX_GATHERED_H

#include "kvnative/backend.h"
#include "ucx_link.h"
#include "ucx_serve.h"

/* The peer's ranges that it may use, in columns of `count`; they are copied. */
typedef struct kvn_gathered_ranges {
    const uint64_t *slots;
    const uint64_t *generations;
    const uint64_t *addresses;
    const uint64_t *nbytes;
    uint64_t count;
} kvn_gathered_ranges;

/* `direction`: KVN_PEER_GET or KVN_PEER_PUT. `hands_over`: who submits leaves it to the end's own thread to
 * begin, as it has more to submit elsewhere: a push begins with some MiB. Holds the link. NULL with errno:
 * EINVAL for the direction or the ranges, ENOMEM. A descriptor outside the ranges is refused by submit:
 * KVN_UNMAPPED. One that the peer has deregistered, or does not let be written, ends the request with
 * KVN_UNMAPPED; so does one whose memory is not mapped any more, at either end.
 *
 * A request that ends before it is through waits for its sends in flight, which show the caller's memory to
 * UCX: at most half a second, then its link is failed, and half a second more. Should UCX not have given
 * them up by then, it may read that memory, but nothing else, until the connection ends. */
kvn_backend *kvn_gathered_create(kvn_ucx_serve *serve, kvn_ucx_link *link, kvn_direction direction,
                                 const kvn_gathered_ranges *ranges, bool hands_over);

#endif
