/* A HIXL server: what this side offers on a device to the clients of all peers. It listens for TCP connections, which
 * HIXL does not authenticate, and clients learn there how to reach the memory. */
#ifndef KVN_HCCL_SERVER_H
#define KVN_HCCL_SERVER_H

#include "device/device.h"
#include "hccl/library.h"

typedef struct kvn_hixl_server {
    kvn_hccl *hccl;
    const kvn_device *device;
    void *handle; /* NULL: not open */
    uint64_t number; /* no other server of the library has it, unlike the handle, which is an address */
    struct kvn_hixl_server *next;
} kvn_hixl_server;

/* Listens at ip:port. A process has one server for each device; `out` must stay in place until closed. */
int kvn_hixl_server_open(kvn_hccl *hccl, const kvn_device *device, const kvn_hixl_endpoint *endpoints,
                         uint32_t num_endpoints, const char *ip, uint32_t port, kvn_hixl_server *out,
                         kvn_failure *failure);
/* Call it after all regions of the device. Idempotent; the server is closed afterwards even if HIXL refuses. */
int kvn_hixl_server_close(kvn_hixl_server *server, kvn_failure *failure);
/* Returns the open server of a device, or NULL. Call it with the registry's mutex, and hold it while you use the server,
 * which another thread may close. */
const kvn_hixl_server *kvn_hixl_server_of(const kvn_hccl *hccl, int32_t device_id);

#endif
