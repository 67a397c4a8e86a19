/* The parts of ACL, the runtime interface of Ascend devices, that kvplan uses. The declarations are kvplan's own, so
 * that building needs no files of the vendor. The library is found and opened at run time.
 *
 * Layouts are those of CANN 8.1 to 9.x on 64-bit Linux; enumerations are passed as int. */
#ifndef KVNATIVE_ACL_H
#define KVNATIVE_ACL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int aclError;
typedef void *aclrtContext;
typedef void *aclrtStream;
typedef void *aclrtEvent;

/* aclrtMemcpyKind */
enum { KVN_ACL_HOST_TO_DEVICE = 1, KVN_ACL_DEVICE_TO_HOST = 2, KVN_ACL_DEVICE_TO_DEVICE = 3 };

/* aclrtMemMallocPolicy: in huge pages, which HCCS needs to share memory between processes. The first
 * policy, 0, uses them only for more than 1 MiB. */
enum { KVN_ACL_MALLOC_HUGE_ONLY = 1 };

/* aclrtMemLocationType; CANN before 8.5 has only the first two */
enum {
    KVN_ACL_LOCATION_HOST = 0,
    KVN_ACL_LOCATION_DEVICE = 1,
    KVN_ACL_LOCATION_UNREGISTERED = 2,
    KVN_ACL_LOCATION_MANAGED = 3,
    KVN_ACL_LOCATION_HOST_NUMA = 4
};

/* aclrtHostRegisterType, and the flag of aclrtHostRegisterV2 */
enum { KVN_ACL_HOST_REGISTER_MAPPED = 0, KVN_ACL_HOST_REGISTER_PINNED = 0x10000000 };

/* aclrtMemAttr of aclrtGetMemInfo */
enum { KVN_ACL_HBM_MEMORY = 1 };

/* flag of aclrtCreateEventExWithFlag: for the order of streams */
enum { KVN_ACL_EVENT_SYNC = 1 };

/* Error codes with special treatment. */
enum {
    KVN_ACL_OK = 0,
    KVN_ACL_REPEATED_INIT = 100002,
    KVN_ACL_PARAMETER = 107000,
    KVN_ACL_STREAM_ABORTED = 107023,
    KVN_ACL_STREAM_TIMEOUT = 507046,
    KVN_ACL_DRIVER_FAILED = 507899,
    KVN_ACL_NOT_REGISTERED = 507911
};

#define KVN_ACL_MAX_BATCH 4096 /* descriptors of one aclrtMemcpyBatch */

/* aclrtMemLocation */
typedef struct kvn_acl_location {
    uint32_t id; /* of the device; 0 for host memory; may be -1 on A3 */
    int32_t type;
} kvn_acl_location;

/* aclrtMemcpyBatchAttr: location of a run of descriptors */
typedef struct kvn_acl_batch_attribute {
    kvn_acl_location dst;
    kvn_acl_location src;
    uint8_t reserved[16]; /* 0 */
} kvn_acl_batch_attribute;

/* aclrtPtrAttributes */
typedef struct kvn_acl_pointer {
    kvn_acl_location location;
    uint32_t page_size;
    uint32_t reserved[4];
} kvn_acl_pointer;

#ifndef __cplusplus
_Static_assert(sizeof(void *) == 8 && sizeof(size_t) == 8, "64-bit Linux");
_Static_assert(sizeof(kvn_acl_location) == 8, "aclrtMemLocation is 8 bytes");
_Static_assert(offsetof(kvn_acl_location, type) == 4, "type at 4");
_Static_assert(sizeof(kvn_acl_batch_attribute) == 32, "aclrtMemcpyBatchAttr is 32 bytes");
_Static_assert(offsetof(kvn_acl_batch_attribute, src) == 8, "srcLoc at 8");
_Static_assert(offsetof(kvn_acl_batch_attribute, reserved) == 16, "rsv at 16");
_Static_assert(sizeof(kvn_acl_pointer) == 28, "aclrtPtrAttributes is 28 bytes");
_Static_assert(offsetof(kvn_acl_pointer, page_size) == 8, "pageSize at 8");
_Static_assert(offsetof(kvn_acl_pointer, reserved) == 12, "rsv at 12");
#endif

/* X(result, name, parameters): calls that every version has. */
#define KVN_ACL_REQUIRED(X)                                                                       \
    X(aclError, aclrtMemcpyAsync, /* first: its file is the library's path */                     \
      (void *dst, size_t room, const void *src, size_t nbytes, int kind, aclrtStream stream))     \
    X(aclError, aclInit, (const char *config_path))                                               \
    X(aclError, aclFinalize, (void))                                                              \
    X(const char *, aclGetRecentErrMsg, (void)) /* of this thread; returns and clears */          \
    X(const char *, aclrtGetSocName, (void))                                                      \
    X(aclError, aclrtGetDeviceCount, (uint32_t *count))                                           \
    X(aclError, aclrtSetDevice, (int32_t device))                                                 \
    X(aclError, aclrtGetCurrentContext, (aclrtContext *context))                                  \
    X(aclError, aclrtSetCurrentContext, (aclrtContext context))                                   \
    X(aclError, aclrtCreateContext, (aclrtContext *context, int32_t device))                      \
    X(aclError, aclrtDestroyContext, (aclrtContext context))                                      \
    X(aclError, aclrtCreateStream, (aclrtStream *stream))                                         \
    X(aclError, aclrtDestroyStream, (aclrtStream stream)) /* waits for its work */                \
    X(aclError, aclrtDestroyStreamForce, (aclrtStream stream))                                    \
    X(aclError, aclrtSynchronizeStreamWithTimeout, (aclrtStream stream, int32_t ms))              \
    X(aclError, aclrtStreamAbort, (aclrtStream stream))                                           \
    X(aclError, aclrtCreateEvent, (aclrtEvent *event))                                            \
    X(aclError, aclrtDestroyEvent, (aclrtEvent event))                                            \
    X(aclError, aclrtRecordEvent, (aclrtEvent event, aclrtStream stream))                         \
    X(aclError, aclrtStreamWaitEvent, (aclrtStream stream, aclrtEvent event))                     \
    X(aclError, aclrtQueryEventStatus, (aclrtEvent event, int32_t *is_recorded))                  \
    X(aclError, aclrtMallocAlign32, (void **address, size_t nbytes, int policy))                  \
    X(aclError, aclrtFree, (void *address))                                                       \
    X(aclError, aclrtMallocHost, (void **address, size_t nbytes))                                 \
    X(aclError, aclrtFreeHost, (void *address))                                                   \
    X(aclError, aclrtHostRegister, (void *address, uint64_t nbytes, int type, void **on_device))  \
    X(aclError, aclrtHostUnregister, (void *address))                                             \
    X(aclError, aclrtPointerGetAttributes, (const void *address, kvn_acl_pointer *attributes))    \
    X(aclError, aclrtGetMemInfo, (int memory, size_t *free, size_t *total))                       \
    X(aclError, aclrtMemset, (void *address, size_t room, int32_t value, size_t nbytes))          \
    X(aclError, aclrtMemcpy,                                                                      \
      (void *dst, size_t room, const void *src, size_t nbytes, int kind))

/* Calls of later versions, or that may be removed; NULL if the library lacks them. NEWER: a call of CANN 9.1 that does
 * the same as the one before. */
#define KVN_ACL_OPTIONAL(X, NEWER)                                                                \
    X(aclError, aclrtGetVersion, (int32_t *major, int32_t *minor, int32_t *patch))                \
    X(aclError, aclrtCreateEventExWithFlag, (aclrtEvent *event, uint32_t flags))                  \
    X(aclError, aclrtHostRegisterV2, (void *address, uint64_t nbytes, uint32_t flags))            \
    X(aclError, aclrtGetPhyDevIdByLogicDevId, (int32_t logical, int32_t *physical))               \
    X(aclError, aclrtGetDeviceInfo, (uint32_t device, int attribute, int64_t *value))             \
    X(aclError, aclrtMemcpyBatch,                                                                 \
      (void **dsts, size_t *rooms, void **srcs, size_t *sizes, size_t count,                      \
       kvn_acl_batch_attribute *attributes, size_t *attribute_firsts, size_t num_attributes,      \
       size_t *fail_index))                                                                       \
    NEWER(aclError, aclrtMemcpyBatchV2,                                                           \
      (void **dsts, size_t *rooms, void **srcs, size_t *sizes, size_t count,                      \
       kvn_acl_batch_attribute *attributes, size_t *attribute_firsts, size_t num_attributes))     \
    X(aclError, aclrtMemcpyBatchAsync,                                                            \
      (void **dsts, size_t *rooms, void **srcs, size_t *sizes, size_t count,                      \
       kvn_acl_batch_attribute *attributes, size_t *attribute_firsts, size_t num_attributes,      \
       size_t *fail_index, aclrtStream stream))                                                   \
    NEWER(aclError, aclrtMemcpyBatchAsyncV2,                                                      \
      (void **dsts, size_t *rooms, void **srcs, size_t *sizes, size_t count,                      \
       kvn_acl_batch_attribute *attributes, size_t *attribute_firsts, size_t num_attributes,      \
       aclrtStream stream))

/* The calls, as found in the library. */
typedef struct kvn_acl {
#define KVN_ACL_FIELD(result, name, parameters) result(*name) parameters;
    KVN_ACL_REQUIRED(KVN_ACL_FIELD)
    KVN_ACL_OPTIONAL(KVN_ACL_FIELD, KVN_ACL_FIELD)
#undef KVN_ACL_FIELD
} kvn_acl;

#ifdef __cplusplus
}
#endif
#endif
