/* A CUDA device, as all of this folder knows it: what it has besides a kvn_device, and calls of the driver. */
#ifndef KVN_CUDA_DEVICE_H
#define KVN_CUDA_DEVICE_H

#include <pthread.h>

#include "cuda/library.h"
#include "device/device.h"

/* Device memory as `allocate` made it: whole granules, mapped at one address. */
typedef struct kvn_cuda_allocated {
    CUdeviceptr address;
    uint64_t nbytes;
    CUmemGenericAllocationHandle handle;
} kvn_cuda_allocated;

#define KVN_CUDA_MAX_IDLE 8 /* streams */

/* What a device is besides a kvn_device: its `state`. */
typedef struct kvn_cuda_device {
    CUdevice number;                /* as calls without a context take it */
    kvn_cuda_allocation allocation; /* what cuMemCreate is asked for */
    size_t granularity;             /* of it; 0: memory comes from cuMemAlloc, and cannot be exported */
    bool can_export;                /* memory of `allocate`, as file descriptors */
    bool maps_registered;           /* memory of cuMemHostRegister is at the host's addresses for kernels, too */
    struct kvn_cuda_copies *copies; /* of cuda/copies.c */
    struct kvn_cuda_launcher *launcher; /* of cuda/launch.c */
    pthread_mutex_t mutex;          /* guards what follows */
    kvn_cuda_allocated *allocated;  /* by address, ascending */
    size_t num_allocated;
    struct kvn_cuda_mapped *mapped; /* of cuda/reach.c: memory of peers */
    struct kvn_cuda_peer *peers;    /* of cuda/reach.c: contexts of other GPUs */
    struct kvn_cuda_watch *watches; /* of cuda/reach.c: memory that the program has registered */
    struct kvn_cuda_freed *freed;   /* of cuda/memory.c: it waits to be unmapped */
    CUstream idle[KVN_CUDA_MAX_IDLE]; /* for `copy` and `clear` */
    size_t num_idle;
} kvn_cuda_device;

/* The driver's calls. The device is a CUDA device, here and below. */
static inline const kvn_cuda *kvn_cuda_of(const kvn_device *device)
{
    return &((const kvn_cuda_library *)device->runtime)->calls;
}

static inline kvn_cuda_device *kvn_cuda_state(const kvn_device *device) { return device->state; }

/* KVN_OK, or `failure` in words: the outcome of a call of the driver. */
static inline int kvn_cuda_ended(const kvn_device *device, const char *call, CUresult code,
                                 kvn_failure *failure)
{
    return code == KVN_CUDA_OK ? KVN_OK : kvn_cuda_fail(kvn_cuda_of(device), call, code, failure);
}

/* Calls the driver by the name of a call; the outcome as kvn_cuda_ended. */
#define KVN_CUDA_CALL(device, failure, name, ...)                                                 \
    kvn_cuda_ended(device, #name, kvn_cuda_of(device)->name(__VA_ARGS__), failure)

#endif
