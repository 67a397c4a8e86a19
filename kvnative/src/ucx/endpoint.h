/* An endpoint of UCX: the way to a peer's worker. It is connected once a word of the peer's generation table was
 * read, which shows that the peer is there, and that its memory is reached without its help.
 *
 * It ends by failing: UCX reports a fault, or this side closes it. It fails once; the reason stays. Then
 * `death_fd` becomes readable, its transfers end, and UCX closes it by force: after that, UCX touches no memory
 * of its transfers any more. */
#ifndef KVN_UCX_ENDPOINT_H
#define KVN_UCX_ENDPOINT_H

#include "ucx/worker.h"

/* What a peer publishes of itself; copied. */
typedef struct kvn_ucx_remote {
    const void *address; /* of its worker */
    size_t address_nbytes;
    uint64_t generations; /* address of its generation table: the word of slot 0 */
    uint64_t num_slots;
    uint64_t tickets; /* address of its KVN_UCX_TICKETS words */
    const void *generations_key; /* as packed by its UCX */
    size_t generations_key_nbytes;
    const void *tickets_key;
    size_t tickets_key_nbytes;
    uint32_t tag; /* by which it knows tickets for its memory */
} kvn_ucx_remote;

enum { KVN_UCX_OPEN = 0, KVN_UCX_CONNECTED = 1, KVN_UCX_FAILED = 2 };

struct kvn_ucx_endpoint {
    kvn_ucx_worker *worker; /* held */
    atomic_uint num_holders;
    atomic_int state;
    int death_fd;    /* readable once it has failed */
    kvn_failure why; /* written before the state, and never again */
    kvn_ucx_remote remote; /* with copies of the address and the keys */
    /* with the progress lock */
    char transport[128]; /* "rc_mlx5/mlx5_0:1"; stays as it is once connected */
    kvn_ucp_ep_h handle; /* NULL: not made yet, or closed */
    kvn_ucp_rkey_h generations_key;
    kvn_ucp_rkey_h tickets_key;
    bool is_watched; /* UCX reports the peer's death */
    bool is_closed;  /* UCX touches nothing any more */
    bool is_listed; /* the worker has it, or had */
    uint64_t word;   /* that was read to connect */
    kvn_ucx_work teardown;
    kvn_ucx_endpoint *next; /* the worker's */
};

/* The caller holds it. KVN_CANCELLED: the worker is closed. */
int kvn_ucx_endpoint_create(kvn_ucx_worker *worker, const kvn_ucx_remote *remote,
                            kvn_ucx_endpoint **out, kvn_failure *failure);
/* Returns when the peer's memory was read: KVN_OK. KVN_TIMEOUT: not yet, and it goes on (call it again);
 * otherwise the endpoint has failed. */
int kvn_ucx_endpoint_connect(kvn_ucx_endpoint *self, int64_t deadline_ns, kvn_failure *failure);
/* Reads the tickets of the peer. KVN_TIMEOUT: they have not come; otherwise the endpoint has failed, or is not
 * connected. */
int kvn_ucx_endpoint_read_tickets(kvn_ucx_endpoint *self, int64_t deadline_ns,
                                  uint64_t out[KVN_UCX_TICKETS], kvn_failure *failure);
/* The first reason stays. Any thread, with the progress lock or without; what follows comes a little later. */
void kvn_ucx_endpoint_fail(kvn_ucx_endpoint *self, int status, int code, const char *message);
/* Fails those of a worker, which takes no more, and waits for UCX to close them (a second at most). Idempotent; by
 * any thread without the progress lock. Nothing is done in a forked child. */
void kvn_ucx_endpoints_close(kvn_ucx_worker *worker);
bool kvn_ucx_endpoint_has_failed(const kvn_ucx_endpoint *self, kvn_failure *why);
void kvn_ucx_endpoint_hold(kvn_ucx_endpoint *self);
void kvn_ucx_endpoint_release(kvn_ucx_endpoint *self);

/* With the progress lock: opens a key of the peer's. */
int kvn_ucx_unpack_key(kvn_ucx_endpoint *self, const void *packed, size_t nbytes,
                       kvn_ucp_rkey_h *out, kvn_failure *failure);

#endif
