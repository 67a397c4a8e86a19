/*
 * A strict stand-in for libcuda.so.1, over the core that it shares with the simulated Ascend libraries
 * (libkvsim_core.so, tests/ascend_sim): reserved addresses that the host cannot read, memfds behind them,
 * streams that are threads, faults, the log. The calls are declared here as NVIDIA's documents state them, not
 * from include/kvnative/cuda.h: two readings of the facts check each other.
 *
 *   python -m tests.cuda_sim.build [variant]     prints the path for KVPLAN_CUDA_LIBRARY
 *
 * Variants are versions of the driver: "12.4" has no batch copies, "12.8" has cuMemcpyBatchAsync, "13.0" (the
 * default) has that and _v2.
 *
 * Settings: KVSIM_<NAME> of the environment, or kvsim_set("<name>", value) later:
 *
 *   KVSIM_DEVICES 8             GPUs; CUDA_VISIBLE_DEVICES picks some of them, by number
 *   KVSIM_HBM_BYTES 64 GiB      memory of each; processes with one KVSIM_DIR share it
 *   KVSIM_LATENCY_US 0          of each operation on a stream
 *   KVSIM_BANDWIDTH 0           of a stream in bytes a second; 0: no limit
 *   KVSIM_SEED 1                of the order inside a batch, and of the blocks of a kernel
 *   KVSIM_LOG, KVSIM_DIR        file of one JSON line a call; folder of what processes share
 *   KVSIM_FAULTS                "name:n=fault; ...", as kvsim_fault_add takes it: the n-th call from now
 *                               name:n=700          fails with 700 and does nothing
 *                               name:n=sync:719     succeeds, and its work fails with 719
 *                               name:n=partial:719  the same, once half of the work is done
 *                               name:n=hang         its work never ends; kvsim_hangs_end() lets it go on
 *   KVSIM_CUDA_CAPABILITY 90    compute capability, 9.0
 *   KVSIM_CUDA_PEERS 1          0: no GPU reaches another; 2: one reaches those with higher numbers alone
 *   KVSIM_CUDA_HIDDEN 1         0: memory of GPUs that CUDA_VISIBLE_DEVICES hides cannot be mapped
 *   KVSIM_CUDA_REUSE 0          1: cuMemAlloc gives the address of what was freed last, if that was as large
 *   KVSIM_CUDA_ADJACENT 0       1: cuMemAddressReserve leaves no gap between ranges, as drivers may
 *   KVSIM_CUDA_VIRTUAL 1        0: no virtual memory; 2: with it, but nothing of it can be exported
 *   KVSIM_CUDA_IPC 1            0: no IPC handles, as in containers of their own
 *   KVSIM_CUDA_HOST_REGISTER 1  0: as under confidential computing, where cuMemHostRegister is refused and kernels do
 *                               not reach what cuMemHostAlloc has returned (a guess: there it migrates)
 *   KVSIM_CUDA_MPS 0            1: contexts are those of MPS; 2: a driver that does not know the attribute
 *   KVSIM_CUDA_CAPTURE 0        1: another thread of the program captures a stream, in global mode
 *   KVSIM_CUDA_STAGED_US 0      that the end of cuMemcpyHtoD from pageable memory lags behind its return
 *   KVSIM_CUDA_THREADS 2        on which a kernel's blocks run
 *
 * What hardware punishes is punished: the host that reads device memory dies of SIGSEGV; a byte that is not
 * mapped, or freed, or has no access set, is error 700 of the work, and the context is lost from then on, as it
 * is after any code of the fault table that says so (`cuda_is_sticky`). What the documents call undefined, or
 * hardware leaves to luck, is refused where the call can return an error, and counted: kvsim_violations(),
 * kvsim_last_violation(), and lines {"call":"violation"} of the log. A test should end with none.
 *
 * Memory of a GPU that this process does not see can be mapped: the document of cudaIpcOpenMemHandle says so, and
 * NCCL relies on it since CUDA 10.1, for both kinds of handles. Such memory has the device number -1 here.
 *
 * Guesses, where no document says it: a copy over bytes that are not mapped is accepted and fails as 700 on
 * its stream (drivers refuse most of them with 1 at the call, and go on); memory of another context of the same
 * device is refused with 1 in a copy, and is 700 in a kernel; what a context still holds when it is destroyed
 * is given back, and a violation. Streams have no order with the default stream, whatever their flags.
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
    int device; /* its physical number, as all numbers inside */
    int is_primary;
    int uses; /* of a primary one */
    int is_gone;
    struct cuda_context *peers[64]; /* whose memory its kernels reach */
    int num_peers;
    struct cuda_context *next; /* rows stay: old handles are known to be old */
} cuda_context;

/* 0; 3 before cuInit, and in a child of fork(); or the code of a fault. */
int cuda_enter(sim_call *call, const char *name);
/* Like cuda_enter; returns 201 if the thread has no context, 709 if that is destroyed, or its stored
 * error. */
int cuda_enter_context(sim_call *call, const char *name, cuda_context **context);
/* The driver's code for one of the core's, which it returns; others stay. */
int cuda_code(int code);
/* Returns 1 if a context is lost after such an error. */
int cuda_is_sticky(int code);
/* Logs the call and returns its code, as the driver numbers it. */
#define cuda_leave(call, code, ...) sim_leave(call, cuda_code(code), __VA_ARGS__)
#define CUDA_CHECK(code, pointer) \
    ((code) ? (code) : (pointer) ? 0 : sim_error(INVALID_VALUE, "%s is NULL", #pointer))
int cuda_is_initialized(void);
int cuda_num_devices(void);
/* Returns the device of a number that the program knows, or -1. */
int cuda_physical(int ordinal);
int cuda_ordinal(int physical);
/* Returns 1 if the first device reaches memory of the other. */
int cuda_can_reach(int device, int peer);
/* Returns 1 if memory of a device can be mapped in this process, for one of its own. */
int cuda_is_mappable(int device);

/* ---- contexts ---- */

/* NULL where the handle never named one, or it is gone. */
cuda_context *cuda_context_find(const void *handle);
/* Returns 1 if kernels of the first context reach memory that was allocated in the second. */
int cuda_context_reaches(const cuda_context *context, const void *owner);
/* Unloads what was loaded in it. */
void cuda_modules_drop(const cuda_context *context);

/* ---- memory ---- */

/* traits.origin of a memory */
enum {
    CUDA_ALLOCATED = 1,    /* cuMemAlloc */
    CUDA_HOST_ALLOCATED,   /* cuMemHostAlloc; traits.flags as given there, and the next */
    CUDA_HOST_REGISTERED,
    CUDA_MAPPED,           /* cuMemMap: owner NULL; traits.flags: how it may be exported */
    CUDA_OPENED,           /* cuIpcOpenMemHandle */
    CUDA_MANAGED,          /* cuMemAllocManaged: the host reads it where it is */
};

enum { HOST_PORTABLE = 1, HOST_DEVICEMAP = 2, HOST_COMBINED = 4 };

typedef enum { CUDA_DEVICE_SIDE, CUDA_PINNED_SIDE, CUDA_PAGEABLE_SIDE } cuda_side;

#define MAX_PIECES 64

/* Bytes that follow each other in the address space; of one memory, or of several mapped side by side. */
typedef struct {
    cuda_side side;
    uint64_t address;
    uint64_t nbytes;
    int fault; /* 700 where some of it is not there */
    int count;
    sim_memory *memories[MAX_PIECES]; /* referenced */
} cuda_range;

/* Finds the memory of a range, for a copy in that context. 0, or what the call returns at once. */
int cuda_range_find(const cuda_context *context, uint64_t address, uint64_t nbytes, int writes,
                    cuda_range *range);
void cuda_range_release(cuda_range *range);
/* Returns 0 if work may still access the range, otherwise 700. */
int cuda_range_check(const cuda_context *context, const cuda_range *range, int writes);
/* Returns the address of the byte at an offset, and the number of adjacent bytes behind it. */
unsigned char *cuda_range_view(const cuda_range *range, uint64_t offset, uint64_t *nbytes);
/* Checks whether a kernel in that context may access memory. */
int cuda_kernel_may(const cuda_context *context, const sim_memory *memory, int writes);
/* Returns 1 if another process has freed memory that was opened here, and still lives. */
int cuda_ipc_is_freed(uint64_t address);
/* Forgets what a context has opened; its memory is freed by the caller. */
void cuda_ipc_drop(const cuda_context *context);
/* The reserved range around an address, or 0. */
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
/* Queues copies, which it takes over, as one operation. */
int cuda_copies_enqueue(const cuda_context *context, sim_stream *stream, const sim_fault *fault,
                        cuda_copy *copies, size_t count);

/* The stream of a handle, in that context: 400 where it is none, or of another; 900, 906 where it is captured. */
int cuda_stream_find(const cuda_context *context, void *handle, sim_stream **stream);

/* ---- streams that are captured into graphs; what is forbidden spoils the capture ---- */

/* A stream is made that is ordered with the default one, or any stream destroyed. */
void cuda_capture_note_stream(void *stream, int is_blocking);
/* Returns 1 if a thread in that mode may not make potentially unsafe calls. */
int cuda_capture_forbids(int thread_mode);
/* Returns 0 if the stream accepts work and queries, otherwise 900 or 906. */
int cuda_capture_check_stream(const cuda_context *context, void *stream);
/* An event is recorded, or destroyed (stream NULL). Whether it is one of a graph now. */
int cuda_capture_record(void *event, void *stream);
/* Returns 0 if the host may query the event or wait for it, otherwise 907. */
int cuda_capture_check_event(void *event);
/* Returns 0 if a stream may wait for the event, otherwise 905. */
int cuda_capture_check_wait(void *stream, void *event);

/* ---- kernels: what NVRTC made PTX of, compiled for the host (kernels.cpp) ---- */

typedef struct cuda_kernel {
    const char *name;
    int num_parameters;
    const size_t *sizes; /* of the parameters */
    void (*check)(void *const *parameters); /* what it reaches by pointers in them */
    void (*block)(void *const *parameters); /* runs one block, on this thread */
} cuda_kernel;

/* NULL where there is none. */
const cuda_kernel *cuda_kernel_find(const char *name);
/* Runs all blocks, in an order that the seed says, on several threads; what they store takes its time by
 * KVSIM_BANDWIDTH. 0, or the code of the context. */
int cuda_kernel_run(const cuda_kernel *kernel, const cuda_context *context, unsigned num_blocks,
                    unsigned num_threads, void *const *parameters);

#ifdef __cplusplus
}
#endif

#endif
