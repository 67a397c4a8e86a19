/* The parts of HIXL's client/server interface (cs/hixl_cs.h, CANN 9.1) that kvplan uses. The declarations are kvplan's
 * own. The library is found at run time, so functions are declared by their types. Sizes and offsets are those of LP64.
 *
 * CANN 9.0 has calls of the same names with other records. It lacks HixlCSClientBatchPutSync, by which kvplan tells
 * them apart. */
#ifndef KVNATIVE_HIXL_H
#define KVNATIVE_HIXL_H

#include <stddef.h>
#include <stdint.h>

#include "kvnative/hccl.h"

#ifdef __cplusplus
extern "C" {
#endif

/* HixlStatus. Calls also return codes of ACL. */
typedef kvn_hccl_result kvn_hixl_status;

enum {
    KVN_HIXL_PARAM_INVALID = 103900,
    KVN_HIXL_TIMEOUT = 103901,
    KVN_HIXL_UNSUPPORTED = 103905,
    KVN_HIXL_RESOURCE_EXHAUSTED = 203900,
    KVN_HIXL_FAILED = 503900
};

/* HixlCompleteStatus */
enum { KVN_HIXL_WAITING = 0, KVN_HIXL_COMPLETED = 1 };

/* EndpointDesc: a network port of a device. */
typedef struct kvn_hixl_endpoint {
    int32_t protocol;
    int32_t address_type;
    uint8_t address[36];
    int32_t place; /* 0: device */
    uint32_t physical_id;
    uint32_t super_device_id;
    uint32_t server_index;
    uint32_t super_pod_index;
    uint8_t unused[44];
    uint8_t reserved[52];
} kvn_hixl_endpoint;

typedef struct kvn_hixl_server_desc {
    const kvn_hixl_endpoint *endpoints;
    const char *ip;
    uint32_t port;
    uint32_t num_endpoints;
    uint8_t reserved[104];
} kvn_hixl_server_desc;

typedef struct kvn_hixl_client_desc {
    const kvn_hixl_endpoint *local;
    const kvn_hixl_endpoint *remote;
    const char *ip;
    uint32_t port;
    uint8_t traffic_class;
    uint8_t service_level;
    uint8_t reserved[98];
} kvn_hixl_client_desc;

/* HixlServerConfig, HixlClientConfig */
typedef struct kvn_hixl_config {
    const char *resources; /* JSON; NULL: defaults */
    uint8_t reserved[120];
} kvn_hixl_config;

/* HixlOneSideOpDesc */
typedef struct kvn_hixl_operation {
    uint64_t remote;
    uint64_t local;
    uint64_t nbytes;
} kvn_hixl_operation;

#ifndef __cplusplus
_Static_assert(sizeof(kvn_hixl_endpoint) == 160, "EndpointDesc is 160 bytes");
_Static_assert(offsetof(kvn_hixl_endpoint, address_type) == 4, "commAddr at 4");
_Static_assert(offsetof(kvn_hixl_endpoint, address) == 8, "its bytes at 8");
_Static_assert(offsetof(kvn_hixl_endpoint, place) == 44, "loc at 44");
_Static_assert(offsetof(kvn_hixl_endpoint, physical_id) == 48, "devPhyId at 48");
_Static_assert(sizeof(kvn_hixl_server_desc) == 128, "HixlServerDesc is 128 bytes");
_Static_assert(offsetof(kvn_hixl_server_desc, ip) == 8, "server_ip at 8");
_Static_assert(offsetof(kvn_hixl_server_desc, port) == 16, "server_port at 16");
_Static_assert(offsetof(kvn_hixl_server_desc, num_endpoints) == 20, "endpoint_list_num at 20");
_Static_assert(sizeof(kvn_hixl_client_desc) == 128, "HixlClientDesc is 128 bytes");
_Static_assert(offsetof(kvn_hixl_client_desc, ip) == 16, "server_ip at 16");
_Static_assert(offsetof(kvn_hixl_client_desc, port) == 24, "server_port at 24");
_Static_assert(offsetof(kvn_hixl_client_desc, traffic_class) == 28, "tc at 28");
_Static_assert(sizeof(kvn_hixl_config) == 128, "HixlServerConfig is 128 bytes");
_Static_assert(sizeof(kvn_hixl_operation) == 24, "HixlOneSideOpDesc is 24 bytes");
#endif

/* ---- the server: one for each device, with all memory that peers may reach ---- */

typedef kvn_hixl_status (*kvn_hixl_server_create_fn)(const kvn_hixl_server_desc *desc,
                                                     const kvn_hixl_config *config, void **out);
typedef kvn_hixl_status (*kvn_hixl_listen_fn)(void *server, uint32_t backlog);
/* HixlCSServerDestroy, HixlCSClientDestroy; not concurrent with another call for the same handle */
typedef kvn_hixl_status (*kvn_hixl_destroy_fn)(void *handle);

/* ---- a client: one for each connection, with all memory of this side that it uses ---- */

typedef kvn_hixl_status (*kvn_hixl_client_create_fn)(const kvn_hixl_client_desc *desc,
                                                     const kvn_hixl_config *config, void **out);
/* Call it when the memory of both sides is registered. */
typedef kvn_hixl_status (*kvn_hixl_connect_fn)(void *client, uint32_t timeout_ms);
/* HixlCSClientBatchPutAsync, HixlCSClientBatchGetAsync */
typedef kvn_hixl_status (*kvn_hixl_batch_fn)(void *client, uint32_t count, const kvn_hixl_operation *operations,
                                             void **batch);
/* Frees the batch if it has ended. */
typedef kvn_hixl_status (*kvn_hixl_query_fn)(void *client, void *batch, int32_t *out);

/* ---- of both: HixlCS{Server,Client}{RegMem,UnregMem} ---- */

typedef kvn_hixl_status (*kvn_hixl_register_fn)(void *handle, const char *tag, const kvn_hccl_mem *memory,
                                                void **out);
typedef kvn_hixl_status (*kvn_hixl_unregister_fn)(void *handle, void *memory);

#ifdef __cplusplus
}
#endif
#endif
