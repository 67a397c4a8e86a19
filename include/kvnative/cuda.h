/* The parts of CUDA's driver API that kvplan uses. The declarations are kvplan's own, so that building needs no files
 * of the vendor. The library (libcuda.so.1, of the driver) is found and opened at run time.
 *
 * Layouts are those of CUDA 11.2 to 13 on 64-bit Linux; enumerations are passed as int. Calls have the library's
 * exported names, with the suffix of the version that has these parameters. */
#ifndef KVNATIVE_CUDA_H
#define KVNATIVE_CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef void *CUcontext;
typedef void *CUmodule;
typedef void *CUfunction;
typedef void *CUstream;
typedef void *CUevent;
typedef uint64_t CUmemGenericAllocationHandle;

/* Results with special treatment. */
enum {
    KVN_CUDA_OK = 0,
    KVN_CUDA_INVALID_VALUE = 1,
    KVN_CUDA_OUT_OF_MEMORY = 2,
    KVN_CUDA_NOT_INITIALIZED = 3,
    KVN_CUDA_DEINITIALIZED = 4,
    KVN_CUDA_STUB_LIBRARY = 34,
    KVN_CUDA_DEVICE_UNAVAILABLE = 46,
    KVN_CUDA_NO_DEVICE = 100,
    KVN_CUDA_INVALID_DEVICE = 101,
    KVN_CUDA_INVALID_CONTEXT = 201,
    KVN_CUDA_NO_BINARY_FOR_GPU = 209,
    KVN_CUDA_ECC_UNCORRECTABLE = 214,
    KVN_CUDA_PEER_ACCESS_UNSUPPORTED = 217,
    KVN_CUDA_INVALID_PTX = 218,
    KVN_CUDA_JIT_COMPILER_NOT_FOUND = 221,
    KVN_CUDA_UNSUPPORTED_PTX_VERSION = 222,
    KVN_CUDA_JIT_COMPILATION_DISABLED = 223,
    KVN_CUDA_INVALID_HANDLE = 400,
    KVN_CUDA_NOT_READY = 600,
    KVN_CUDA_ILLEGAL_ADDRESS = 700,
    KVN_CUDA_LAUNCH_OUT_OF_RESOURCES = 701,
    KVN_CUDA_LAUNCH_TIMEOUT = 702,
    KVN_CUDA_PEER_ACCESS_ALREADY_ENABLED = 704,
    KVN_CUDA_CONTEXT_IS_DESTROYED = 709,
    KVN_CUDA_HOST_MEMORY_ALREADY_REGISTERED = 712,
    KVN_CUDA_HOST_MEMORY_NOT_REGISTERED = 713,
    KVN_CUDA_LAUNCH_FAILED = 719,
    KVN_CUDA_NOT_PERMITTED = 800,
    KVN_CUDA_NOT_SUPPORTED = 801,
    KVN_CUDA_SYSTEM_NOT_READY = 802,
    KVN_CUDA_SYSTEM_DRIVER_MISMATCH = 803,
    KVN_CUDA_COMPAT_NOT_SUPPORTED = 804, /* on this device */
    KVN_CUDA_CAPTURE_UNSUPPORTED = 900, /* a stream is being captured into a graph: the first of nine codes */
    KVN_CUDA_CAPTURE_IMPLICIT = 906,   /* the default stream is ordered with a captured stream */
    KVN_CUDA_CAPTURED_EVENT = 907,
    KVN_CUDA_CAPTURE_WRONG_THREAD = 908 /* the last of them */
};

/* CUdevice_attribute */
enum {
    KVN_CUDA_NUM_MULTIPROCESSORS = 16,
    KVN_CUDA_CAPABILITY_MAJOR = 75,
    KVN_CUDA_CAPABILITY_MINOR = 76,
    KVN_CUDA_HOST_POINTER_OF_REGISTERED = 91, /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    KVN_CUDA_HOST_REGISTER = 99,              /* HOST_REGISTER_SUPPORTED */
    KVN_CUDA_VIRTUAL_MEMORY = 102,
    KVN_CUDA_FILE_DESCRIPTORS = 103, /* HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
    KVN_CUDA_GPU_DIRECT_RDMA = 110   /* GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
};

/* CUpointer_attribute, and the size that each writes */
enum {
    KVN_CUDA_POINTER_CONTEXT = 1,        /* CUcontext; NULL: none, as for mapped memory */
    KVN_CUDA_POINTER_MEMORY_TYPE = 2,    /* unsigned */
    KVN_CUDA_POINTER_ON_DEVICE = 3,      /* CUdeviceptr: address for kernels of the current context */
    KVN_CUDA_POINTER_BUFFER_ID = 7,      /* unsigned long long: unique to the allocation, never reused */
    KVN_CUDA_POINTER_IS_MANAGED = 8,     /* unsigned */
    KVN_CUDA_POINTER_DEVICE = 9,         /* int */
    KVN_CUDA_POINTER_IS_LEGACY_IPC = 10, /* int: cuIpcGetMemHandle takes it */
    KVN_CUDA_POINTER_RANGE_START = 11,   /* CUdeviceptr; for mapped memory the whole reservation */
    KVN_CUDA_POINTER_RANGE_SIZE = 12,    /* size_t */
    KVN_CUDA_POINTER_HANDLE_TYPES = 14,  /* unsigned: kinds of handles that mapped memory may be exported as */
    KVN_CUDA_POINTER_POOL = 17           /* CUmemoryPool; NULL: none */
};

/* CUmemorytype */
enum { KVN_CUDA_MEMORY_HOST = 1, KVN_CUDA_MEMORY_DEVICE = 2 };

/* Flags of cuMemHostAlloc and cuMemHostRegister: the same for all contexts; also mapped for the device, at the host's
 * address. */
enum { KVN_CUDA_HOST_PORTABLE = 1, KVN_CUDA_HOST_MAPPED = 2 };

enum {
    KVN_CUDA_CAPTURE_RELAXED = 2,         /* CUstreamCaptureMode */
    KVN_CUDA_STREAM_NON_BLOCKING = 1,     /* cuStreamCreate: no order with the default stream */
    KVN_CUDA_EVENT_DISABLE_TIMING = 2,    /* cuEventCreate */
    KVN_CUDA_IPC_LAZY_PEER_ACCESS = 1,    /* cuIpcOpenMemHandle */
    KVN_CUDA_SRC_ACCESS_STREAM = 1,       /* CUmemcpySrcAccessOrder: in the order of the stream */
    KVN_CUDA_ALLOCATION_PINNED = 1,       /* CUmemAllocationType */
    KVN_CUDA_HANDLE_FILE_DESCRIPTOR = 1,  /* CUmemAllocationHandleType */
    KVN_CUDA_LOCATION_DEVICE = 1,         /* CUmemLocationType */
    KVN_CUDA_ACCESS_READ_WRITE = 3,       /* CUmemAccess_flags */
    KVN_CUDA_GRANULARITY_MINIMUM = 0      /* CUmemAllocationGranularity_flags */
};

typedef struct kvn_cuda_location { /* CUmemLocation */
    int32_t type;
    int32_t id;
} kvn_cuda_location;

typedef struct kvn_cuda_allocation { /* CUmemAllocationProp */
    int32_t type;
    int32_t handle_types;
    kvn_cuda_location location;
    void *windows;
    uint8_t compression;
    uint8_t gpu_direct_rdma; /* 1: network cards must be able to reach it */
    uint16_t usage;
    uint8_t reserved[4];
} kvn_cuda_allocation;

typedef struct kvn_cuda_access { /* CUmemAccessDesc */
    kvn_cuda_location location;
    int32_t flags;
} kvn_cuda_access;

typedef struct kvn_cuda_ipc_memory { /* CUipcMemHandle; passed by value */
    char bytes[64];
} kvn_cuda_ipc_memory;

typedef struct kvn_cuda_uuid { /* CUuuid */
    uint8_t bytes[16];
} kvn_cuda_uuid;

typedef struct kvn_cuda_copy_attributes { /* CUmemcpyAttributes */
    int32_t src_access_order;
    kvn_cuda_location src;
    kvn_cuda_location dst;
    uint32_t flags;
} kvn_cuda_copy_attributes;

#ifndef __cplusplus
_Static_assert(sizeof(void *) == 8 && sizeof(size_t) == 8, "64-bit Linux");
_Static_assert(sizeof(kvn_cuda_allocation) == 32, "CUmemAllocationProp is 32 bytes");
_Static_assert(offsetof(kvn_cuda_allocation, windows) == 16, "win32HandleMetaData at 16");
_Static_assert(sizeof(kvn_cuda_access) == 12, "CUmemAccessDesc is 12 bytes");
_Static_assert(sizeof(kvn_cuda_copy_attributes) == 24, "CUmemcpyAttributes is 24 bytes");
#endif

/* X(name, parameters); each returns CUresult. Calls that every driver since 11.2 has. */
#define KVN_CUDA_REQUIRED(X)                                                                      \
    X(cuInit, (unsigned flags))                                                                   \
    X(cuDriverGetVersion, (int *version)) /* 12040 for 12.4 */                                    \
    X(cuGetErrorName, (CUresult error, const char **name))                                        \
    X(cuGetErrorString, (CUresult error, const char **text))                                      \
    X(cuDeviceGetCount, (int *count))                                                             \
    X(cuDeviceGet, (CUdevice *device, int ordinal))                                               \
    X(cuDeviceGetName, (char *name, int room, CUdevice device))                                   \
    X(cuDeviceGetUuid, (kvn_cuda_uuid *uuid, CUdevice device))                                    \
    X(cuDeviceGetPCIBusId, (char *text, int room, CUdevice device))                               \
    X(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))                         \
    X(cuDeviceCanAccessPeer, (int *can, CUdevice device, CUdevice peer))                          \
    X(cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device))                            \
    X(cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                            \
    X(cuCtxCreate_v2, (CUcontext *context, unsigned flags, CUdevice device))                      \
    X(cuCtxDestroy_v2, (CUcontext context))                                                       \
    X(cuCtxGetCurrent, (CUcontext *context))                                                      \
    X(cuCtxSetCurrent, (CUcontext context))                                                       \
    X(cuCtxSynchronize, (void))                                                                   \
    X(cuThreadExchangeStreamCaptureMode, (int *mode))                                             \
    X(cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags))                                    \
    X(cuMemGetInfo_v2, (size_t *free_nbytes, size_t *total_nbytes))                               \
    X(cuMemAlloc_v2, (CUdeviceptr *address, size_t nbytes))                                       \
    X(cuMemFree_v2, (CUdeviceptr address))                                                        \
    X(cuMemHostAlloc, (void **address, size_t nbytes, unsigned flags))                            \
    X(cuMemFreeHost, (void *address))                                                             \
    X(cuMemHostRegister_v2, (void *address, size_t nbytes, unsigned flags))                       \
    X(cuMemHostUnregister, (void *address))                                                       \
    X(cuPointerGetAttributes, (unsigned count, int *attributes, void **values, CUdeviceptr at))   \
    X(cuMemGetAddressRange_v2, (CUdeviceptr *start, size_t *nbytes, CUdeviceptr address))         \
    X(cuMemcpyHtoD_v2, (CUdeviceptr dst, const void *src, size_t nbytes))                         \
    X(cuMemcpyDtoH_v2, (void *dst, CUdeviceptr src, size_t nbytes))                               \
    X(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream stream))          \
    X(cuMemsetD8Async, (CUdeviceptr dst, unsigned char value, size_t nbytes, CUstream stream))    \
    X(cuStreamCreate, (CUstream *stream, unsigned flags))                                         \
    X(cuStreamDestroy_v2, (CUstream stream)) /* returns at once; the work goes on */              \
    X(cuStreamQuery, (CUstream stream))                                                           \
    X(cuStreamSynchronize, (CUstream stream))                                                     \
    X(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                        \
    X(cuStreamIsCapturing, (CUstream stream, int *status)) /* 0: it is not */                     \
    X(cuStreamGetCtx, (CUstream stream, CUcontext *context))                                      \
    X(cuEventCreate, (CUevent *event, unsigned flags))                                            \
    X(cuEventDestroy_v2, (CUevent event))                                                         \
    X(cuEventRecord, (CUevent event, CUstream stream))                                            \
    X(cuEventQuery, (CUevent event))                                                              \
    X(cuEventSynchronize, (CUevent event))                                                        \
    X(cuModuleLoadDataEx,                                                                         \
      (CUmodule *module, const void *image, unsigned count, int *options, void **values))         \
    X(cuModuleUnload, (CUmodule module))                                                          \
    X(cuModuleGetFunction, (CUfunction *function, CUmodule module, const char *name))             \
    X(cuLaunchKernel,                                                                             \
      (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,  \
       unsigned block_y, unsigned block_z, unsigned shared_nbytes, CUstream stream,               \
       void **parameters, void **extra))                                                          \
    X(cuMemGetAllocationGranularity,                                                              \
      (size_t *nbytes, const kvn_cuda_allocation *allocation, int which))                         \
    X(cuMemCreate, (CUmemGenericAllocationHandle *handle, size_t nbytes,                          \
                    const kvn_cuda_allocation *allocation, unsigned long long flags))             \
    X(cuMemRelease, (CUmemGenericAllocationHandle handle))                                        \
    X(cuMemAddressReserve, (CUdeviceptr *address, size_t nbytes, size_t alignment,                \
                            CUdeviceptr wanted, unsigned long long flags))                        \
    X(cuMemAddressFree, (CUdeviceptr address, size_t nbytes))                                     \
    X(cuMemMap, (CUdeviceptr address, size_t nbytes, size_t offset,                               \
                 CUmemGenericAllocationHandle handle, unsigned long long flags))                  \
    X(cuMemUnmap, (CUdeviceptr address, size_t nbytes))                                           \
    X(cuMemSetAccess,                                                                             \
      (CUdeviceptr address, size_t nbytes, const kvn_cuda_access *access, size_t count))          \
    X(cuMemGetAccess,                                                                             \
      (unsigned long long *flags, const kvn_cuda_location *location, CUdeviceptr address))        \
    X(cuMemRetainAllocationHandle,                                                                \
      (CUmemGenericAllocationHandle *handle, void *mapped)) /* release it */                      \
    X(cuMemExportToShareableHandle, (void *out, CUmemGenericAllocationHandle handle, int type,    \
                                     unsigned long long flags)) /* a descriptor: int *out */      \
    X(cuMemImportFromShareableHandle,                                                             \
      (CUmemGenericAllocationHandle *handle, void *descriptor, int type))                         \
    X(cuIpcGetMemHandle, (kvn_cuda_ipc_memory *handle, CUdeviceptr address))                      \
    X(cuIpcOpenMemHandle_v2, (CUdeviceptr *address, kvn_cuda_ipc_memory handle, unsigned flags))  \
    X(cuIpcCloseMemHandle, (CUdeviceptr address))

/* Calls of later versions, or that were removed; NULL if the library lacks them. */
#define KVN_CUDA_OPTIONAL(X)                                                                      \
    X(cuDeviceGetUuid_v2, (kvn_cuda_uuid *uuid, CUdevice device)) /* 11.4 */                      \
    X(cuFuncLoad, (CUfunction function)) /* 12.4 */                                               \
    X(cuMemcpyBatchAsync, /* 12.8 */                                                              \
      (CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,                         \
       kvn_cuda_copy_attributes *attributes, size_t *attribute_firsts, size_t num_attributes,     \
       size_t *fail_index, CUstream stream))                                                      \
    X(cuMemcpyBatchAsync_v2, /* 13.0 */                                                           \
      (const CUdeviceptr *dsts, const CUdeviceptr *srcs, const size_t *sizes, size_t count,       \
       kvn_cuda_copy_attributes *attributes, size_t *attribute_firsts, size_t num_attributes,     \
       CUstream stream))

/* The calls, as found in the library. */
typedef struct kvn_cuda {
#define KVN_CUDA_FIELD(name, parameters) CUresult(*name) parameters;
    KVN_CUDA_REQUIRED(KVN_CUDA_FIELD)
    KVN_CUDA_OPTIONAL(KVN_CUDA_FIELD)
#undef KVN_CUDA_FIELD
} kvn_cuda;

#ifdef __cplusplus
}
#endif
#endif
