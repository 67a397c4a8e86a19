/* A CUDA device for the files of this folder: its state besides kvn_device, and calls of the driver. */
#ifndef KVN_CUDA_DEVICE_H
#define KVN_CUDA_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>

#include "cuda/library.h"
#include "device/device.h"

/* The operations of a CUDA device. Its `runtime` is a kvn_cuda_library, which says whose context the device uses. */
extern const kvn_device_ops kvn_cuda_ops;

/* Memory that `allocate` has made: whole granules, mapped at one address. */
typedef struct kvn_cuda_allocated {
    CUdeviceptr address;
    uint64_t nbytes;
    CUmemGenericAllocationHandle handle;
} kvn_cuda_allocated;

#define KVN_CUDA_MAX_IDLE 8 /* streams */

/* The `state` of a CUDA device. */
typedef struct kvn_cuda_device {
    CUdevice number;                /* for calls without a context */
    kvn_cuda_allocation allocation; /* the argument of cuMemCreate */
    size_t granularity;             /* bytes; 0: memory comes from cuMemAlloc, and cannot be exported */
    bool can_export;                /* memory of `allocate` can be exported as file descriptors */
    uint64_t max_registered;        /* bytes of a registration of host memory */
    atomic_bool has_parts;          /* some host memory was registered in parts */
    bool maps_registered;           /* kernels reach registered host memory at the host's addresses */
    struct kvn_cuda_copies *copies; /* of cuda/copies.c */
    struct kvn_cuda_launcher *launcher; /* of cuda/launch.c */
    pthread_mutex_t mutex;          /* guards the fields below */
    kvn_cuda_allocated *allocated;  /* by address, ascending */
    size_t num_allocated;
    struct kvn_cuda_mapped *mapped; /* of cuda/reach.c: memory of peers */
    struct kvn_cuda_peer *peers;    /* of cuda/reach.c: contexts of other GPUs */
    struct kvn_cuda_watch *watches; /* of cuda/reach.c: memory that the program has registered */
    struct kvn_cuda_reclaimer *reclaimer; /* of cuda/reclaim.c; NULL before memory is freed */
    CUstream idle[KVN_CUDA_MAX_IDLE]; /* for `copy` and `clear` */
    size_t num_idle;
} kvn_cuda_device;

/* Returns the driver's calls. `device` is a CUDA device, here and below. */
static inline const kvn_cuda *kvn_cuda_of(const kvn_device *device)
{
    return &((const kvn_cuda_library *)device->runtime)->calls;
}

static inline kvn_cuda_device *kvn_cuda_state(const kvn_device *device) { return device->state; }

/* Converts the result of a driver call: KVN_OK, or a status with `failure` in words. */
static inline int kvn_cuda_ended(const kvn_device *device, const char *call, CUresult code,
                                 kvn_failure *failure)
{
    return code == KVN_CUDA_OK ? KVN_OK : kvn_cuda_fail(kvn_cuda_of(device), call, code, failure);
}

/* Makes a driver call by its name, and converts the result with kvn_cuda_ended. */
#define KVN_CUDA_CALL(device, failure, name, ...)                                                 \
    kvn_cuda_ended(device, #name, kvn_cuda_of(device)->name(__VA_ARGS__), failure)

#endif
