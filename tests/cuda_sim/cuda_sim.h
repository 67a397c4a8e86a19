/*
 * A strict simulation of libcuda.so.1. It shares a core with the simulated Ascend libraries (libkvsim_core.so,
 * tests/ascend_sim): device addresses that the host cannot read, memfds for their bytes, a thread for each stream,
 * faults, the log. The calls are declared here from NVIDIA's documents and not from include/kvnative/cuda.h, so that
 * two readings of the documents check each other.
 *
 *   python -m tests.cuda_sim.build [variant]     prints the path for KVPLAN_CUDA_LIBRARY
 *
 * Variants are versions of the driver: "12.4" has no batch copies, "12.8" has cuMemcpyBatchAsync, "13.0" (the
 * default) also has cuMemcpyBatchAsync_v2.
 *
 * Settings: KVSIM_<NAME> of the environment, or kvsim_set("<name>", value) later:
 *
 *   KVSIM_DEVICES 8             GPUs; CUDA_VISIBLE_DEVICES selects by number
 *   KVSIM_HBM_BYTES 64 GiB      memory of each GPU; processes with the same KVSIM_DIR share it
 *   KVSIM_LATENCY_US 0          of each operation on a stream
 *   KVSIM_BANDWIDTH 0           of a stream in bytes a second; 0: no limit
 *   KVSIM_SEED 1                of the order of copies in a batch, and of blocks of a kernel
 *   KVSIM_LOG                   a file, with one JSON line for each call
 *   KVSIM_DIR                   a folder for the memory usage that processes share
 *   KVSIM_FAULTS                "name:n=fault; ...", of the n-th call from now, as in kvsim_fault_add:
 *                               name:n=700          the call fails with 700 and does nothing
 *                               name:n=sync:719     the call succeeds, and its work fails with 719
 *                               name:n=partial:719  the work fails with 719 after its first half
 *                               name:n=hang         the work waits for kvsim_hangs_end()
 *   KVSIM_CUDA_CAPABILITY 90    compute capability, 9.0
 *   KVSIM_CUDA_PEERS 1          0: no GPU has peer access; 2: only to GPUs with higher numbers
 *   KVSIM_CUDA_HIDDEN 1         0: memory of GPUs that CUDA_VISIBLE_DEVICES hides cannot be mapped
 *   KVSIM_CUDA_MIG 0            1: GPUs are MIG slices, two on each card, without peer access
 *   KVSIM_CUDA_REUSE 0          1: cuMemAlloc returns the address that was freed last, if the size is the same
 *   KVSIM_CUDA_ADJACENT 0       1: cuMemAddressReserve leaves no gap between ranges, as drivers may
 *   KVSIM_CUDA_VIRTUAL 1        0: no virtual memory; 2: virtual memory that cannot be exported
 *   KVSIM_CUDA_IPC 1            0: no IPC handles, as between containers
 *   KVSIM_CUDA_HOST_REGISTER 1  0: as under confidential computing, where cuMemHostRegister is refused and kernels
 *                               cannot access memory of cuMemHostAlloc (a guess: there it migrates)
 *   KVSIM_CUDA_MPS 0            1: contexts of MPS; 2: a driver that does not know the attribute
 *   KVSIM_CUDA_CAPTURE 0        1: another thread of the program captures a stream, in global mode
 *   KVSIM_CUDA_STAGED_US 0      delay of the bytes of cuMemcpyHtoD from pageable memory, after the return
 *   KVSIM_CUDA_THREADS 2        threads that run a kernel's blocks
 *
 * Errors are those of hardware. A host that reads device memory gets SIGSEGV. Work on memory that is not mapped, was
 * freed, or has no access fails with 700, and the context is lost, as after any error of `cuda_is_sticky`. Undefined
 * behaviour is a violation, and also an error if the call can return one. Violations are counted:
 * kvsim_violations(), kvsim_last_violation(), and lines {"call":"violation"} of the log. A test should end without
 * violations.
 *
 * Memory of a GPU that is not visible to the process can be mapped: the document of cudaIpcOpenMemHandle says so, and
 * NCCL relies on this since CUDA 10.1, for both kinds of handles. Such memory has the device number -1.
 *
 * Guesses, because no document says more: a copy of unmapped bytes is accepted, and fails with 700 on its stream
 * (drivers refuse most of them with 1 at the call, and the context survives). Access to memory of another context of
 * the same device is 1 for a copy, and 700 for a kernel. The destruction of a context frees its memory, which is a
 * violation. Streams have no order with the default stream, whatever their flags.
 */
#ifndef KVSIM_CUDA_SIM_H
#define KVSIM_CUDA_SIM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "core.h"

#define CUDA SIM_API int
#define ID(handle) ((unsigned long long)(uintptr_t)(handle))
#define PAGE_2M ((uint64_t)2 << 20)

typedef unsigned long long cuda_address; /* CUdeviceptr */

enum {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    MAP_FAILED_CODE = 205,
    ALREADY_MAPPED = 208,
    PEER_UNSUPPORTED = 217,
    INVALID_PTX = 218,
    UNSUPPORTED_PTX = 222,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    PEER_ALREADY_ENABLED = 704,
    CONTEXT_IS_DESTROYED = 709,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
    UNKNOWN = 999,
};

/* ---- calls: enter, work, leave ---- */

typedef struct cuda_context {
    void *handle;
    int device; /* physical number, as everywhere in the simulator */
    int is_primary;
    int uses; /* of a primary context */
    int is_gone;
    struct cuda_context *peers[64]; /* contexts whose memory kernels may access */
    int num_peers;
    struct cuda_context *next; /* contexts are never freed, so that old handles are recognized */
} cuda_context;

/* Begins a call. Returns 3 before cuInit and in a forked child, or the code of a fault. */
int cuda_enter(sim_call *call, const char *name);
/* Like cuda_enter; also returns 201 without a context, 709 for a destroyed context, or the error of a lost context. */
int cuda_enter_context(sim_call *call, const char *name, cuda_context **context);
/* Converts a code of the core to that of the driver; returns other codes unchanged. */
int cuda_code(int code);
/* Returns 1 if a context is lost after the error. */
int cuda_is_sticky(int code);
/* Ends a call: logs the driver's code, and returns that. */
#define cuda_leave(call, code, ...) sim_leave(call, cuda_code(code), __VA_ARGS__)
#define CUDA_CHECK(code, pointer) \
    ((code) ? (code) : (pointer) ? 0 : sim_error(INVALID_VALUE, "%s is NULL", #pointer))
int cuda_is_initialized(void);
int cuda_num_devices(void);
/* Returns the physical number of a visible device, or -1. */
int cuda_physical(int ordinal);
int cuda_ordinal(int physical);
/* Returns 1 if `device` has peer access to `peer`. */
int cuda_can_reach(int device, int peer);
/* Returns 1 if the process can map memory of the device, which may be invisible. */
int cuda_is_mappable(int device);

/* ---- contexts ---- */

/* Returns NULL for an unknown or destroyed context. */
cuda_context *cuda_context_find(const void *handle);
/* Returns 1 if kernels of `context` may access memory that was allocated in `owner`. */
int cuda_context_reaches(const cuda_context *context, const void *owner);
/* Unloads the modules of the context. */
void cuda_modules_drop(const cuda_context *context);

/* ---- memory ---- */

/* sim_traits.origin */
enum {
    CUDA_ALLOCATED = 1,    /* cuMemAlloc */
    CUDA_HOST_ALLOCATED,   /* cuMemHostAlloc; traits.flags: its Flags */
    CUDA_HOST_REGISTERED,  /* cuMemHostRegister; traits.flags: its Flags */
    CUDA_MAPPED,           /* cuMemMap; owner is NULL; traits.flags: handle types for the export */
    CUDA_OPENED,           /* cuIpcOpenMemHandle */
    CUDA_MANAGED,          /* cuMemAllocManaged; host memory in the simulator */
};

enum { HOST_PORTABLE = 1, HOST_DEVICEMAP = 2, HOST_COMBINED = 4 };

typedef enum { CUDA_DEVICE_SIDE, CUDA_PINNED_SIDE, CUDA_PAGEABLE_SIDE } cuda_side;

#define MAX_PIECES 64

/* A range of addresses, in one memory or in several that are mapped side by side. */
typedef struct {
    cuda_side side;
    uint64_t address;
    uint64_t nbytes;
    int fault; /* 700 if a part has no memory or no access */
    int count;
    sim_memory *memories[MAX_PIECES]; /* holds a reference to each */
} cuda_range;

/* Finds the memory of a range, for a copy in the context. Returns 0, or the error of the call. */
int cuda_range_find(const cuda_context *context, uint64_t address, uint64_t nbytes, int writes,
                    cuda_range *range);
void cuda_range_release(cuda_range *range);
/* Returns 0 if queued work may still access the range, otherwise 700. */
int cuda_range_check(const cuda_context *context, const cuda_range *range, int writes);
/* Returns the place on the host of the byte at an offset; *nbytes: the contiguous bytes from there on. */
unsigned char *cuda_range_view(const cuda_range *range, uint64_t offset, uint64_t *nbytes);
/* Returns 1 if a kernel of the context may access the memory. */
int cuda_kernel_may(const cuda_context *context, const sim_memory *memory, int writes);
/* Returns 1 if a living process has freed memory that was opened here. */
int cuda_ipc_is_freed(uint64_t address);
/* Forgets the memory that a context has opened; the caller frees the memory. */
void cuda_ipc_drop(const cuda_context *context);
/* Finds the reservation that contains the address. Returns 0 if there is none. */
int cuda_reservation_find(uint64_t address, uint64_t *start, uint64_t *nbytes);

/* ---- copies ---- */

typedef struct {
    cuda_range target;
    cuda_range source;
    uint64_t nbytes;
} cuda_copy;

int cuda_copy_find(const cuda_context *context, cuda_copy *copy, uint64_t target, uint64_t source,
                   uint64_t nbytes);
void cuda_copy_release(cuda_copy *copy);
/* Queues the copies as one operation, which releases them. */
int cuda_copies_enqueue(const cuda_context *context, sim_stream *stream, const sim_fault *fault,
                        cuda_copy *copies, size_t count);

/* Finds a stream of the context and holds a reference. Returns 400 for other handles, 900 or 906 during a capture. */
int cuda_stream_find(const cuda_context *context, void *handle, sim_stream **stream);

/* ---- capture of streams into graphs; a forbidden call spoils the capture ---- */

/* Notes a new stream that is ordered with the default stream (is_blocking), or the end of any stream. */
void cuda_capture_note_stream(void *stream, int is_blocking);
/* Returns 1 if a thread in the mode may not make potentially unsafe calls. */
int cuda_capture_forbids(int thread_mode);
/* Returns 0 if the stream accepts work and queries, otherwise 900 or 906. */
int cuda_capture_check_stream(const cuda_context *context, void *stream);
/* Notes a record of the event, or its destruction (stream NULL). Returns 1 if the record is in a capture. */
int cuda_capture_record(void *event, void *stream);
/* Returns 0 if the host may query the event or wait for it, otherwise 907. */
int cuda_capture_check_event(void *event);
/* Returns 0 if a stream may wait for the event, otherwise 905. */
int cuda_capture_check_wait(void *stream, void *event);

/* ---- kernels: the sources of the PTX, compiled for the host (kernels.cpp) ---- */

typedef struct cuda_kernel {
    const char *name;
    int num_parameters;
    const size_t *sizes; /* of the parameters */
    void (*check)(void *const *parameters); /* checks memory at pointers in the parameters */
    void (*block)(void *const *parameters); /* runs one block on this thread */
} cuda_kernel;

/* Returns NULL for an unknown name. */
const cuda_kernel *cuda_kernel_find(const char *name);
/* Runs all blocks on several threads, in an order given by the seed. Stores take time by KVSIM_BANDWIDTH. Returns 0, or
 * the error that the context is lost with. */
int cuda_kernel_run(const cuda_kernel *kernel, const cuda_context *context, unsigned num_blocks,
                    unsigned num_threads, void *const *parameters);

#ifdef __cplusplus
}
#endif

#endif
