/* A HIXL client: this side's end of a connection, which reads and writes what the server of a peer offers. HIXL runs
 * its batches on streams of its own, so their ends are queried. It has no locks, because communicator.c admits one
 * thread at a time. */
#ifndef KVN_HCCL_CLIENT_H
#define KVN_HCCL_CLIENT_H

#include "hccl/library.h"

#define KVN_CLIENT_MAX_BATCHES 32 /* KVN_MAX_GUARDS are read at once */
#define KVN_CLIENT_MAX_OPERATIONS 128 /* of a batch: one kernel, so that a batch is launched or not */

/* The peer of a connection. */
typedef struct kvn_hixl_peer {
    kvn_hixl_endpoint local;
    kvn_hixl_endpoint remote;
    const char *ip; /* of the peer's server */
    uint32_t port;
} kvn_hixl_peer;

typedef struct kvn_client {
    const kvn_hccl *hccl;
    void *handle; /* NULL before the creation, and after the client was given up */
    void *batches[KVN_CLIENT_MAX_BATCHES]; /* in flight, in the order of their calls */
    uint32_t num_batches;
    bool is_failed; /* a call for a batch has failed, which may be running in part: destroy the client */
} kvn_client;

/* Call all of these on a thread with the context set. Those that return a result describe no failure. */

kvn_hixl_status kvn_client_create(kvn_client *self, const kvn_hccl *hccl, const kvn_hixl_peer *peer,
                                  uint32_t traffic_class, uint32_t service_level);
/* Issues a batch; poll before there are too many. KVN_PENDING: clients use all channels of the device, try again. */
int kvn_client_issue(kvn_client *self, bool is_put, const kvn_one_sided *descriptors, uint32_t count,
                     kvn_failure *failure);
/* KVN_PENDING while a batch is in flight. After another failure destroy the client. */
int kvn_client_poll(kvn_client *self, kvn_failure *failure);
/* Stops the batches in flight, which HIXL cannot do otherwise, and ends the client. Idempotent. */
kvn_hixl_status kvn_client_destroy(kvn_client *self);

#endif
