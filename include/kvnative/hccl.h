/* The parts of HCCL's one-sided interface that kvplan uses. The declarations are kvplan's own. The library is found at
 * run time, so functions are declared by their types. Sizes and offsets are those of LP64.
 *
 * Names resemble the vendor's, with the prefix kvn_. */
#ifndef KVNATIVE_HCCL_H
#define KVNATIVE_HCCL_H

#include <stddef.h>
#include <stdint.h>

#include "kvnative/acl.h"
#include "kvnative/descriptor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef void *kvn_hccl_comm;
typedef int32_t kvn_hccl_result;

enum {
    KVN_HCCL_SUCCESS = 0,
    KVN_HCCL_E_PARA = 1,
    KVN_HCCL_E_PTR = 2,
    KVN_HCCL_E_NOT_SUPPORT = 5,
    KVN_HCCL_E_TIMEOUT = 9,
    KVN_HCCL_E_OOM = 24
};

enum { KVN_HCCL_MEM_DEVICE = 0, KVN_HCCL_MEM_HOST = 1 };

/* A range of memory; later releases call it CommMem. */
typedef struct kvn_hccl_mem {
    int32_t type;
    uint32_t reserved;
    uint64_t address;
    uint64_t nbytes;
} kvn_hccl_mem;

/* An opaque description of registered memory, which the other side imports. */
typedef struct kvn_hccl_mem_desc {
    char bytes[512];
} kvn_hccl_mem_desc;

typedef struct kvn_hccl_mem_descs {
    kvn_hccl_mem_desc *array;
    uint32_t count;
    uint32_t reserved;
} kvn_hccl_mem_descs;

typedef struct kvn_hccl_prepare_config {
    int32_t topology; /* 0: full mesh */
    uint32_t reserved;
    uint64_t more[3];
} kvn_hccl_prepare_config;

/* The settings of a communicator in version 5. Every later version begins like this, and accepts shorter records by
 * their `size` and `version`. */
typedef struct kvn_hccl_config {
    uint64_t size;
    uint32_t magic;
    uint32_t version;
    uint64_t reserved;
    uint32_t buffer_mb;
    uint32_t deterministic;
    char name[128];
    char unused[128];
    uint32_t expansion;
    uint32_t traffic_class;
    uint32_t service_level;
} __attribute__((packed, aligned(4))) kvn_hccl_config;

#define KVN_HCCL_CONFIG_MAGIC UINT32_C(0xf0f0f0f0)
#define KVN_HCCL_CONFIG_VERSION 5
#define KVN_HCCL_NOT_SET UINT32_C(0xffffffff)

/* The descriptor of one operation, HcclOneSideOpDesc, is kvn_one_sided (descriptor.h). */

#ifndef __cplusplus
_Static_assert(sizeof(void *) == 8, "this ABI is that of 64-bit systems");
_Static_assert(sizeof(kvn_hccl_mem) == 24, "HcclMem is 24 bytes");
_Static_assert(offsetof(kvn_hccl_mem, address) == 8, "addr at 8");
_Static_assert(offsetof(kvn_hccl_mem, nbytes) == 16, "size at 16");
_Static_assert(sizeof(kvn_hccl_mem_desc) == 512, "HcclMemDesc is 512 bytes");
_Static_assert(sizeof(kvn_hccl_mem_descs) == 16, "HcclMemDescs is 16 bytes");
_Static_assert(offsetof(kvn_hccl_mem_descs, count) == 8, "arrayLength at 8");
_Static_assert(sizeof(kvn_hccl_prepare_config) == 32, "HcclPrepareConfig is 32 bytes");
_Static_assert(offsetof(kvn_hccl_prepare_config, more) == 8, "rsvd at 8");
_Static_assert(sizeof(kvn_hccl_config) == 300, "HcclCommConfig of version 5 is 300 bytes");
_Static_assert(offsetof(kvn_hccl_config, magic) == 8, "magic at 8");
_Static_assert(offsetof(kvn_hccl_config, version) == 12, "version at 12");
_Static_assert(offsetof(kvn_hccl_config, buffer_mb) == 24, "buffer size at 24");
_Static_assert(offsetof(kvn_hccl_config, deterministic) == 28, "deterministic at 28");
_Static_assert(offsetof(kvn_hccl_config, name) == 32, "name at 32");
_Static_assert(offsetof(kvn_hccl_config, unused) == 160, "udi at 160");
_Static_assert(offsetof(kvn_hccl_config, expansion) == 288, "opExpansionMode at 288");
_Static_assert(offsetof(kvn_hccl_config, traffic_class) == 292, "rdmaTrafficClass at 292");
_Static_assert(offsetof(kvn_hccl_config, service_level) == 296, "rdmaServiceLevel at 296");
#endif

/* ---- every release ---- */

typedef kvn_hccl_result (*kvn_hccl_init_fn)(const char *rank_table, uint32_t rank,
                                            kvn_hccl_config *config, kvn_hccl_comm *out);
typedef kvn_hccl_result (*kvn_hccl_destroy_fn)(kvn_hccl_comm comm);
/* HcclBatchPut, HcclBatchGet */
typedef kvn_hccl_result (*kvn_hccl_batch_fn)(kvn_hccl_comm comm, uint32_t remote_rank,
                                             kvn_one_sided *descriptors, uint32_t count,
                                             aclrtStream stream);
typedef kvn_hccl_result (*kvn_hccl_async_error_fn)(kvn_hccl_comm comm, kvn_hccl_result *out);
typedef const char *(*kvn_hccl_error_string_fn)(kvn_hccl_result result);

/* ---- memory that is registered once (A2, A3) ---- */

typedef kvn_hccl_result (*kvn_hccl_register_global_fn)(const kvn_hccl_mem *mem, void **handle);
typedef kvn_hccl_result (*kvn_hccl_deregister_global_fn)(void *handle);
/* HcclCommBindMem, HcclCommUnbindMem */
typedef kvn_hccl_result (*kvn_hccl_bind_fn)(kvn_hccl_comm comm, void *handle);
typedef kvn_hccl_result (*kvn_hccl_prepare_fn)(kvn_hccl_comm comm,
                                               const kvn_hccl_prepare_config *config,
                                               int timeout_s);

/* ---- memory that is registered with each communicator (950) ---- */

typedef kvn_hccl_result (*kvn_hccl_register_fn)(kvn_hccl_comm comm, uint32_t remote_rank, int type,
                                                void *address, uint64_t nbytes,
                                                kvn_hccl_mem_desc *out);
typedef kvn_hccl_result (*kvn_hccl_exchange_fn)(kvn_hccl_comm comm, uint32_t remote_rank,
                                                kvn_hccl_mem_descs *local, int timeout_s,
                                                kvn_hccl_mem_descs *remote, uint32_t *num_remote);
typedef kvn_hccl_result (*kvn_hccl_enable_fn)(kvn_hccl_comm comm, kvn_hccl_mem_desc *remote,
                                              kvn_hccl_mem *out);
/* HcclDeregisterMem, HcclDisableMemAccess */
typedef kvn_hccl_result (*kvn_hccl_forget_fn)(kvn_hccl_comm comm, kvn_hccl_mem_desc *desc);

#ifdef __cplusplus
}
#endif
#endif
