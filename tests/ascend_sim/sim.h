/*
 * The core that the simulated vendor libraries of one process share (libkvsim_core.so): memory,
 * devices, contexts, streams, faults and the log. Tests call the kvsim_* functions through ctypes.
 *
 * Mutexes guard all data that threads share, because these libraries are built without ThreadSanitizer.
 * ThreadSanitizer of a program intercepts the mutexes, and so knows the order; it does not see atomics.
 */
#ifndef KVSIM_SIM_H
#define KVSIM_SIM_H

#include <stddef.h>
#include <stdint.h>

#define SIM_API __attribute__((visibility("default")))
#define SIM_PRINTF(text, first) __attribute__((__format__(__printf__, text, first)))

/* ---- settings: KVSIM_<NAME> of the environment, or kvsim_set("<name>", value) later ---- */

typedef enum { SIM_A2, SIM_A3, SIM_950 } sim_product;

typedef struct {
    char soc[32];              /* KVSIM_SOC: Ascend910B1, Ascend910_9391, Ascend950PR, ... */
    sim_product product;       /* given by soc */
    int num_devices;           /* KVSIM_DEVICES, 8; fewer if ASCEND_RT_VISIBLE_DEVICES is set */
    int physical[64];          /* number of each visible device on the server */
    uint64_t hbm_bytes;        /* KVSIM_HBM_BYTES of each device, 64 GiB */
    int64_t latency_us;        /* KVSIM_LATENCY_US of each operation, 0 */
    uint64_t bandwidth;        /* KVSIM_BANDWIDTH of a stream in bytes a second, 0: no limit */
    uint64_t seed;             /* KVSIM_SEED of the order inside a batch, 1 */
    int64_t retry_us;          /* KVSIM_RETRY_US until a dead peer is an error over RDMA, 200,000 */
    int64_t notify_us;         /* KVSIM_NOTIFY_US the same over HCCS, 1,836 s: the timeout of HCCL */
    int64_t server_id;         /* KVSIM_SERVER_ID of aclrtGetDeviceInfo, 0 */
    int64_t super_pod_id;      /* KVSIM_SUPER_POD_ID of aclrtGetDeviceInfo, 0; negative: no super pod */
    int64_t hdk;               /* KVSIM_HDK, version of the driver, 2505 (25.5) */
    uint64_t page_bytes;       /* KVSIM_PAGE_BYTES of the host's pages, 4096 */
    uint64_t page_table_bytes; /* KVSIM_PAGE_TABLE_BYTES of host memory that page tables can map, 1 TiB */
    char device_ips[400];      /* KVSIM_DEVICE_IPS of the devices, by physical number, with commas; "": any */
    int64_t tls;               /* KVSIM_TLS, a bit for each device whose RDMA connections are encrypted, 0 */
    int64_t max_links;         /* KVSIM_MAX_LINKS, communicators of a device in a process, 512 */
    int64_t issue_blocks;      /* KVSIM_ISSUE_BLOCKS, 0; while 1, calls for HCCL batches block, as for a full stream */
    int64_t cuda_capability;   /* KVSIM_CUDA_*: tests/cuda_sim/cuda_sim.h */
    int64_t cuda_peers;
    int64_t cuda_hidden;
    int64_t cuda_mig;
    int64_t cuda_reuse;
    int64_t cuda_adjacent;
    int64_t cuda_virtual;
    int64_t cuda_ipc;
    int64_t cuda_host_register;
    int64_t cuda_mps;
    int64_t cuda_staged_us;
    int64_t cuda_capture;
    int64_t cuda_threads;
    char directory[200];       /* KVSIM_DIR, the folder that processes share; "": none */
} sim_settings;

/* Returns a copy, because settings can change while the program runs. */
SIM_API sim_settings sim_settings_now(void);
/* Returns -1 for an unknown name or an invalid value. */
SIM_API int kvsim_set(const char *name, const char *value);

/* ---- every simulated call: enter, work, leave ---- */

typedef enum {
    SIM_FAULT_NONE,
    SIM_FAULT_CODE,    /* the call does nothing and returns the code */
    SIM_FAULT_SYNC,    /* the call succeeds and does nothing; the next synchronization returns the code */
    SIM_FAULT_HANG,    /* the operation waits on its stream for an abort or kvsim_hangs_end */
    SIM_FAULT_PARTIAL, /* half of the work is done; then the work, or a synchronous call, fails with the code */
} sim_fault_kind;

typedef struct {
    sim_fault_kind kind;
    int code;
} sim_fault;

typedef struct {
    const char *name;
    sim_fault fault;
} sim_call;

/* Begins a call, and takes its fault. Returns 0, or the code that the call must return at once: of a fault
 * "name:n=code", or SIM_FORKED in a forked child, where hardware does not work, either. */
#define SIM_FORKED 507899
SIM_API int sim_enter(sim_call *call, const char *name);
SIM_API int sim_is_forked(void);
/* Writes the log line {"call":name,"code":code,"pid":,"tid":,"seq":,"us":, FIELDS} and returns the code.
 * fields: a format of JSON members without braces, such as "\"bytes\":%zu"; it may print nothing. */
SIM_API int sim_leave(const sim_call *call, int code, const char *fields, ...) SIM_PRINTF(3, 4);
/* Writes a log line that is not of a call. */
SIM_API void sim_note(const char *what, const char *fields, ...) SIM_PRINTF(2, 3);
/* Counts a misuse that hardware may not report, and writes a log line {"call":"violation","what":text}. */
SIM_API void sim_violation(const char *text, ...) SIM_PRINTF(1, 2);
SIM_API int kvsim_violations(void);
/* The text of the latest violation, or "". Valid until the thread's next call. */
SIM_API const char *kvsim_last_violation(void);
/* Adds a line to the thread's error text, for aclGetRecentErrMsg. Returns the code. */
SIM_API int sim_error(int code, const char *text, ...) SIM_PRINTF(2, 3);
/* Returns and clears the thread's error text; NULL if empty. Valid until the thread's next sim_error_take. */
SIM_API const char *sim_error_take(void);

/* Adds faults of the n-th call from now (1: the next): "name:n=code; name:n=sync:code; name:n=hang;
 * name:n=partial:code". Returns -1, and adds none, if the text is malformed. */
SIM_API int kvsim_fault_add(const char *specification);
SIM_API void kvsim_faults_clear(void);
/* Returns the number of faults that have not happened yet. */
SIM_API int kvsim_faults_left(void);
/* Ends all hangs of queued operations, which then do their work. */
SIM_API void kvsim_hangs_end(void);

/* ---- memory ---- */

typedef enum {
    SIM_MEMORY_DEVICE,     /* at a reserved address: an access by the host is a SIGSEGV */
    SIM_MEMORY_PINNED,     /* aclrtMallocHost: address == view */
    SIM_MEMORY_REGISTERED, /* aclrtHostRegister: the program's own memory, fd == -1 */
} sim_memory_kind;

/* Data that a front end attaches; the core does not use it. */
typedef struct {
    void *owner;
    int origin;
    unsigned flags;
    uint64_t readable; /* a bit for each device that may read */
    uint64_t writable;
} sim_traits;

typedef struct {
    sim_memory_kind kind;
    int device;          /* the owner; of host memory, the current device at its creation */
    uint64_t address;    /* for the program */
    uint64_t nbytes;
    uint64_t counted;    /* bytes of the device, with padding */
    uint64_t page;       /* page size; a shared or registered range may exceed nbytes up to the end of the last page */
    unsigned char *view; /* of the bytes, for the simulator and tests */
    int fd;              /* memfd of the bytes, from offset 0; peers open /proc/<pid>/fd/<fd> */
    int mapped;          /* REGISTERED: into the device's address space, at most once */
    sim_traits traits;   /* read them by sim_memory_traits */
    uint64_t serial;     /* unique in the process: identifies an allocation whose address is reused */
    unsigned references; /* private to the core, like keep_view */
    int keep_view;
} sim_memory;

/* Returns a reference to the memory that contains the range, or NULL. Its view stays valid until
 * sim_memory_release, even if the program frees the memory. */
SIM_API sim_memory *sim_find(uint64_t address, uint64_t nbytes);
/* Like sim_find, but the range may extend to the end of the memory's last page. */
SIM_API sim_memory *sim_find_pages(uint64_t address, uint64_t nbytes);
SIM_API void sim_memory_release(sim_memory *memory);
/* Returns 1 if any byte of the range lies in reserved space: device memory, living or freed. */
SIM_API int sim_is_device_space(uint64_t address, uint64_t nbytes);
/* Returns 1 if any byte of the range belongs to living memory of any kind. */
SIM_API int sim_overlaps_memory(uint64_t address, uint64_t nbytes);
/* The calls below return ACL codes. */
SIM_API int sim_memory_allocate(sim_memory_kind kind, int device, uint64_t nbytes, uint64_t *address);
/* `huge`: uses huge pages even for small memory; device memory from half a huge page on always does. `padding`: bytes
 * that the runtime adds. */
SIM_API int sim_memory_allocate_in(sim_memory_kind kind, int device, uint64_t nbytes, int huge,
                                   uint64_t padding, uint64_t *address);
SIM_API int sim_memory_free(sim_memory_kind kind, uint64_t address);
/* Adds device memory at an address of sim_space_take. Its bytes are those of the file from `offset` on; the creator of
 * the file counts them. Duplicates the descriptor. */
SIM_API int sim_memory_attach(int device, uint64_t address, uint64_t nbytes, int fd, uint64_t offset);
SIM_API void sim_memory_describe(uint64_t address, sim_traits traits);
SIM_API sim_traits sim_memory_traits(const sim_memory *memory);
/* Returns the address of one memory of the owner, and its kind; 0 if the owner has no memory. */
SIM_API uint64_t sim_memory_owned(const void *owner, sim_memory_kind *kind);
/* Returns 1 if queued work, or another holder besides the registry, has a reference to the memory. */
SIM_API int sim_memory_is_used(uint64_t address);
/* A number that changes when memory is freed or described: then results of an earlier sim_find may be stale. Another
 * thread may change it at any time. */
SIM_API uint64_t sim_memory_epoch(void);
/* `mapped`: maps whole pages into the device's address space, each at most once; otherwise only records the range. */
SIM_API int sim_memory_register(int device, uint64_t address, uint64_t nbytes, int mapped);
/* Maps host memory for HCCL, once for ranges inside of an earlier one. Like the driver, refuses memory that
 * aclrtHostRegister has mapped. */
SIM_API int sim_host_map(int device, uint64_t address, uint64_t nbytes);
SIM_API void sim_host_unmap(int device, uint64_t address, uint64_t nbytes);
/* Frees all memory of a device, for its reset. */
SIM_API void sim_memory_free_device(int device);
/* Returns the bytes allocated on the device by this process, or by all processes that share KVSIM_DIR. */
SIM_API uint64_t sim_memory_used(int device);
/* Returns a readable and writable view of a device address or pinned address; NULL for others. */
SIM_API void *kvsim_host_view(uint64_t address);

/* Records memory that aborted work still uses until a time. A use or free before that time is a violation. The key is
 * the view, because the same bytes have several addresses. A later call for the same bytes replaces the time. */
SIM_API void sim_linger(const void *view, uint64_t nbytes, int64_t until_us);
SIM_API void sim_linger_check(const void *view, uint64_t nbytes, const char *what);
SIM_API int kvsim_lingering(void); /* the number of ranges whose time has not come */

/* ---- devices and contexts: each thread has a current context ---- */

/* The device of the thread's current context, or -1. */
SIM_API int sim_current_device(void);

/* ---- streams: each has a thread, which runs operations in order ---- */

typedef struct sim_stream sim_stream;

/* Runs on the stream's thread. Returns 0, or the code for the next synchronization. Long work calls
 * sim_stream_stopped between its pieces. */
typedef int (*sim_work)(void *argument, sim_stream *stream);

/* Finds a stream and holds a reference; NULL: the default stream of the current context. Returns 107002 without a
 * current context, 107017 for an unknown stream, 107003 for a stream of another context. */
SIM_API int sim_stream_find(void *handle, sim_stream **stream);
SIM_API void sim_stream_release(sim_stream *stream);
SIM_API int sim_stream_device(const sim_stream *stream);
/* Returns the handle of the stream's context, or NULL for an unknown stream. */
SIM_API void *sim_stream_context(const void *handle);
/* Queues work that takes latency + nbytes / bandwidth. Calls dispose(argument) exactly once: after the work, or
 * instead of dropped work, or at once if the call returns an error. `fault` is that of the call, or NULL. SYNC
 * replaces the work by its code; HANG waits before the work; PARTIAL returns its code after the work, which the
 * caller has halved. */
SIM_API int sim_stream_enqueue(sim_stream *stream, const sim_fault *fault, sim_work work,
                               void (*dispose)(void *), void *argument, uint64_t nbytes);
/* Returns 1 if an abort or a failure should end the work. Call on the stream's thread. */
SIM_API int sim_stream_stopped(sim_stream *stream);
/* Waits; -1: without limit. Returns 1 if an abort or a failure ended the wait. Call on the stream's thread. */
SIM_API int sim_stream_pause(sim_stream *stream, int64_t microseconds);
/* Returns the time that latency and bandwidth give to work on `nbytes`; 0 for no bytes. */
SIM_API int64_t sim_duration_us(uint64_t nbytes);
/* Copies in pieces. Returns 1 if an abort or a failure ended the copy. Call on the stream's thread. */
SIM_API int sim_stream_copy(sim_stream *stream, void *target, const void *source, uint64_t nbytes);
/* Waits for all queued work; timeout_ms -1: without limit. Returns 507046 after the timeout, 107023 after an abort, or
 * the first error of the work since the last wait. */
SIM_API int sim_stream_wait(sim_stream *stream, int timeout_ms);

/* ---- leaks: objects that a program must release before it ends ---- */

typedef enum {
    SIM_COUNT_STREAMS,
    SIM_COUNT_EVENTS,
    SIM_COUNT_CONTEXTS,
    SIM_COUNT_REGIONS, /* HCCL */
    SIM_COUNT_COMMS,   /* HCCL */
    SIM_COUNT_HANDLES, /* CUDA: memory from cuMemCreate or imported */
    SIM_COUNT_RANGES,  /* CUDA: reserved address ranges */
    SIM_COUNT_MODULES, /* CUDA */
    SIM_NUM_COUNTS,
} sim_counted;

SIM_API void sim_count(sim_counted what, int change);
/* Returns JSON: {"streams":,"events":,"contexts":,"device_bytes":,"pinned":,"registered":,"regions":,"comms":,
 * "handles":,"ranges":,"modules":}. Valid until the thread's next call. aclFinalize and the end of the process
 * log the same members in a line {"call":"leaks", ...}. */
SIM_API const char *kvsim_leaks(void);
SIM_API void sim_leaks_note(const char *when);

#endif
