/* HCCL's or HIXL's part of a communicator: the handle, the bound regions, and the regions of the peer. It has no locks,
 * because communicator.c admits one thread at a time. */
#ifndef KVN_HCCL_CONNECTION_H
#define KVN_HCCL_CONNECTION_H

#include "device/channel.h"
#include "hccl/client.h"
#include "hccl/region.h"

typedef struct kvn_communicator_options {
    const char *rank_table; /* JSON; not used by HIXL, like the ranks */
    uint32_t rank;
    uint32_t remote_rank;
    const char *name;       /* the same at both ends; 1 to 127 bytes */
    uint32_t traffic_class; /* KVN_HCCL_NOT_SET: HCCL's default */
    uint32_t service_level;
    uint32_t max_batch; /* descriptors of one HcclBatchPut or Get */
    const kvn_hixl_peer *peer; /* for HIXL */
} kvn_communicator_options;

/* A region of this side, with its description for the peer if the communicator registers it, or HIXL's handle. */
typedef struct kvn_bound {
    kvn_region *region;
    kvn_hccl_mem_desc desc;
    void *handle;
} kvn_bound;

typedef struct kvn_connection {
    kvn_hccl *hccl;
    const kvn_device *device;
    kvn_hccl_comm comm; /* NULL: none */
    kvn_client client;  /* if the library is HIXL's; its handle takes the place of `comm` */
    uint32_t remote_rank;
    char name[128];
    kvn_bound *bound; /* room for KVN_HCCL_MAX_REGIONS */
    size_t num_bound;
    size_t last_hit; /* the region that held the latest address looked up */
    /* The enabled regions of the peer, if kvplan exchanges them. */
    kvn_hccl_mem_desc *remote;
    uint32_t num_remote;
} kvn_connection;

int kvn_connection_init(kvn_connection *self, kvn_hccl *hccl, const kvn_device *device,
                        uint32_t remote_rank, const char *name, kvn_failure *failure);
void kvn_connection_free(kvn_connection *self);
/* Initializes the communicator, one thread at a time. */
int kvn_connection_open(kvn_connection *self, const kvn_communicator_options *options,
                        kvn_failure *failure);
int kvn_connection_bind(kvn_connection *self, kvn_region *region, kvn_failure *failure);
int kvn_connection_unbind(kvn_connection *self, kvn_region *region, kvn_failure *failure);
int kvn_connection_prepare(kvn_connection *self, int timeout_s, kvn_failure *failure);
/* Unbinds the regions and destroys the handle. `failure` gets the first failure, unless it has one already. */
void kvn_connection_close(kvn_connection *self, kvn_failure *failure);
kvn_hccl_result kvn_connection_async_error(kvn_connection *self, char *text, size_t room);
/* Call it on a thread with the context set. */
int kvn_connection_issue(kvn_connection *self, bool is_put, kvn_one_sided *descriptors,
                         uint32_t count, kvn_stream stream, kvn_failure *failure);
/* Stops batches of HIXL that are in flight, or failed in part; the connection cannot be used any more then. Like
 * `issue`. */
void kvn_connection_abort(kvn_connection *self);
bool kvn_connection_covers(kvn_connection *self, uint64_t address, uint64_t nbytes);

/* Keeps the first failure of several steps that are all tried. */
static inline void kvn_keep_first(kvn_failure *first, const kvn_failure *later)
{
    if (first->status == KVN_OK)
        *first = *later;
}

#endif
