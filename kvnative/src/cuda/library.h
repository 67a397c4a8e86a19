/* The CUDA driver's library of this process: opens it, looks up its calls, and puts its errors into words. It is never
 * closed, since other parts of the program use it, and its threads outlive the last user. */
#ifndef KVN_CUDA_LIBRARY_H
#define KVN_CUDA_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

#include "core/library.h"
#include "kvnative/cuda.h"

typedef struct kvn_cuda_library {
    kvn_cuda calls;   /* the first field, as kvn_device_ops demands */
    bool own_context; /* True: devices use a context of their own, not the primary one */
} kvn_cuda_library;

extern const kvn_symbols kvn_cuda_symbols;

/* Opens `file`, a path or a name for the loader's own search. `failure` names the missing call, or has the loader's
 * message. */
int kvn_cuda_library_open(const char *file, kvn_cuda_library *out, kvn_failure *failure);
/* Calls cuInit; any number of times. KVN_UNSUPPORTED without a device. */
int kvn_cuda_library_init(const kvn_cuda_library *library, kvn_failure *failure);

/* ---- properties of devices; after init, without a context ---- */

typedef struct kvn_cuda_facts {
    char name[128]; /* such as "NVIDIA H100 80GB HBM3" */
    char uuid[41];  /* "GPU-" or "MIG-", and 36 characters, as nvidia-smi prints it */
    char pci[32];   /* "0000:17:00.0" */
    int major;      /* its compute capability */
    int minor;
} kvn_cuda_facts;

/* Returns the newest CUDA that the driver knows: 12040 for 12.4. 0: unknown. */
int kvn_cuda_library_version(const kvn_cuda_library *library);
int kvn_cuda_library_devices(const void *runtime, uint32_t *count, kvn_failure *failure);
int kvn_cuda_library_facts(const kvn_cuda_library *library, int32_t device, kvn_cuda_facts *out,
                           kvn_failure *failure);
int kvn_cuda_library_attribute(const void *runtime, int32_t device, int attribute, int64_t *value,
                               kvn_failure *failure);
/* Gets the UUID of a GPU, or, with *is_slice set, of a slice of it in MIG mode: two slices share no memory. A driver
 * before 11.4 has only the UUID of the GPU. */
int kvn_cuda_library_uuid(const kvn_cuda_library *library, CUdevice device, kvn_cuda_uuid *out, bool *is_slice,
                          kvn_failure *failure);
/* Asks if a device can have peer access to the memory of another one. */
int kvn_cuda_library_reaches(const kvn_cuda_library *library, int32_t device, int32_t peer, int *can,
                             kvn_failure *failure);

/* ---- errors ---- */

/* Writes "call: code (its name): the driver's words" into `failure`. Returns the KVN_ status of the CUresult `code`. */
int kvn_cuda_fail(const kvn_cuda *cuda, const char *call, CUresult code, kvn_failure *failure);

#endif
