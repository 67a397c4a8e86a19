/* An endpoint of UCX: a connection to the worker of a peer. It is connected after a read of the peer's generation
 * table, which proves that the peer exists and that its memory can be reached.
 *
 * An endpoint ends by failing, once: UCX reports a fault, or this side closes it. Then `death_fd` becomes readable, its
 * transfers end, and UCX closes it by force, after which UCX touches no memory of its transfers. */
#ifndef KVN_UCX_ENDPOINT_H
#define KVN_UCX_ENDPOINT_H

#include "ucx/lanes.h"
#include "ucx/worker.h"

/* The published addresses and keys of a peer; copied. */
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
    uint32_t tag; /* marks tickets for memory of the peer */
} kvn_ucx_remote;

/* Keys of the peer's memory that were unpacked on an endpoint, which destroys them when it ends. */
typedef struct kvn_ucx_keys {
    kvn_ucp_rkey_h *items;
    uint64_t count;
    struct kvn_ucx_keys *next; /* the endpoint's */
} kvn_ucx_keys;

enum { KVN_UCX_OPEN = 0, KVN_UCX_CONNECTED = 1, KVN_UCX_FAILED = 2 };

struct kvn_ucx_endpoint {
    kvn_ucx_worker *worker; /* held */
    atomic_uint num_holders;
    atomic_int state;
    int death_fd;    /* readable once it has failed */
    kvn_failure why; /* written before the state, and never again */
    kvn_ucx_remote remote; /* with copies of the address and the keys */
    /* guarded by the progress lock */
    char transport[KVN_UCX_TRANSPORT_ROOM]; /* constant once connected */
    kvn_ucp_ep_h handle; /* NULL: not made yet, or closed */
    kvn_ucp_rkey_h generations_key;
    kvn_ucp_rkey_h tickets_key;
    kvn_ucx_keys *keys;      /* of backends */
    unsigned num_operations; /* that UCX has not ended yet */
    bool is_watched; /* UCX reports the peer's death */
    bool is_closed;  /* UCX touches no memory; also true before it has opened the endpoint */
    bool is_listed; /* it is in the worker's list, or was */
    uint64_t word;   /* read from the peer to connect */
    kvn_ucx_work teardown;
    kvn_ucx_task ending; /* runs once it has failed */
    kvn_ucx_endpoint *next; /* the worker's */
};

/* The caller holds the new endpoint. KVN_CANCELLED: the worker is closed. */
int kvn_ucx_endpoint_create(kvn_ucx_worker *worker, const kvn_ucx_remote *remote,
                            kvn_ucx_endpoint **out, kvn_failure *failure);
/* KVN_OK if memory of the peer was read. KVN_TIMEOUT: not yet; call it again to wait longer. Otherwise the endpoint has
 * failed. */
int kvn_ucx_endpoint_connect(kvn_ucx_endpoint *self, int64_t deadline_ns, kvn_failure *failure);
/* Fails the endpoint; the first reason stays. With or without the progress lock. The effects follow asynchronously. */
void kvn_ucx_endpoint_fail(kvn_ucx_endpoint *self, int status, int code, const char *message);
/* Fails all endpoints of a worker, which then refuses new ones, and waits at most a second until they have ended.
 * Idempotent; without the progress lock. No effect in a forked child. */
void kvn_ucx_endpoints_close(kvn_ucx_worker *worker);
bool kvn_ucx_endpoint_has_failed(const kvn_ucx_endpoint *self, kvn_failure *why);
void kvn_ucx_endpoint_hold(kvn_ucx_endpoint *self);
void kvn_ucx_endpoint_release(kvn_ucx_endpoint *self);

/* With the progress lock: the endpoint destroys `keys`, which may grow, unless kvn_ucx_keys_drop comes first. */
void kvn_ucx_keys_hold(kvn_ucx_endpoint *self, kvn_ucx_keys *keys);
/* With the progress lock, once no operation uses the keys. */
void kvn_ucx_keys_drop(kvn_ucx_endpoint *self, kvn_ucx_keys *keys);
/* Reads words of the peer, and calls `done(NULL or a request, status, argument)`, maybe before it returns. Call it with
 * the progress lock. */
void kvn_ucx_read_words(kvn_ucx_endpoint *self, uint64_t *out, size_t nbytes, uint64_t remote, kvn_ucp_rkey_h key,
                        kvn_ucp_send_nbx_callback done, void *argument);
/* Frees the request, which has ended. `done` calls this first. */
void kvn_ucx_note_read(kvn_ucx_endpoint *self, void *request);
/* Opens a key of the peer. Call it with the progress lock. */
int kvn_ucx_unpack_key(kvn_ucx_endpoint *self, const void *packed, size_t nbytes,
                       kvn_ucp_rkey_h *out, kvn_failure *failure);

#endif
