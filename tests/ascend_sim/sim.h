/*
 * The core that the simulated vendor libraries of one process share (libkvsim_core.so): memory,
 * devices and contexts, streams, faults and the log. The ACL and the HCCL simulator are written on
 * this header; tests reach the kvsim_* functions through ctypes.
 *
 * What threads share is guarded by mutexes and not by atomics alone, so that ThreadSanitizer of a
 * program that uses these libraries, which are built without it, sees what happens before what.
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
    sim_product product;       /* follows from soc */
    int num_devices;           /* KVSIM_DEVICES, 8; less where ASCEND_RT_VISIBLE_DEVICES says so */
    int physical[64];          /* of each device: its number on the server */
    uint64_t hbm_bytes;        /* KVSIM_HBM_BYTES of each device, 64 GiB */
    int64_t latency_us;        /* KVSIM_LATENCY_US of each operation, 0 */
    uint64_t bandwidth;        /* KVSIM_BANDWIDTH of a stream in bytes a second, 0: no limit */
    uint64_t seed;             /* KVSIM_SEED of the order inside a batch, 1 */
    int64_t retry_us;          /* KVSIM_RETRY_US until a dead peer is an error over RDMA, 200,000 */
    int64_t notify_us;         /* KVSIM_NOTIFY_US the same over HCCS: 1,836 s, as long as HCCL waits */
    int64_t server_id;         /* KVSIM_SERVER_ID: aclrtGetDeviceInfo, 0 */
    int64_t super_pod_id;      /* KVSIM_SUPER_POD_ID: aclrtGetDeviceInfo, 0 */
    int64_t hdk;               /* KVSIM_HDK, the driver: 2505 for 25.5 */
    uint64_t page_bytes;       /* KVSIM_PAGE_BYTES of the host's pages, 4096 */
    uint64_t page_table_bytes; /* KVSIM_PAGE_TABLE_BYTES of host memory that page tables hold, 1 TiB */
    char device_ips[400];      /* KVSIM_DEVICE_IPS of the devices, by physical number, commas between; any */
    int64_t tls;               /* KVSIM_TLS: a bit for each device whose connections are encrypted, 0 */
    int64_t max_links;         /* KVSIM_MAX_LINKS of a device in a process: queue pairs, 512 */
    int64_t issue_blocks;      /* KVSIM_ISSUE_BLOCKS: 1: HCCL's batches block until it is 0, as when streams are full */
    int64_t cuda_capability;   /* KVSIM_CUDA_CAPABILITY and the next: tests/cuda_sim/cuda_sim.h */
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
    char directory[200];       /* KVSIM_DIR for what processes share; "" where not given */
} sim_settings;

/* A copy: the settings can change while the program runs. */
SIM_API sim_settings sim_settings_now(void);
/* 0, or -1 for an unknown name or a value that does not parse. */
SIM_API int kvsim_set(const char *name, const char *value);

/* ---- every simulated call: enter, work, leave ---- */

typedef enum {
    SIM_FAULT_NONE,
    SIM_FAULT_CODE,    /* the call does nothing and returns the code */
    SIM_FAULT_SYNC,    /* the call succeeds, does nothing, and the code shows at synchronization */
    SIM_FAULT_HANG,    /* the operation on the stream never ends; an abort ends it, or kvsim_hangs_end */
    SIM_FAULT_PARTIAL, /* half of the work is done, then the code, shown as a real one would be */
} sim_fault_kind;

typedef struct {
    sim_fault_kind kind;
    int code;
} sim_fault;

typedef struct {
    const char *name;
    sim_fault fault;
} sim_call;

/* Looks up the call's fault. 0, or the code that the call has to return at once: that of a fault
 * "name:n=code", or SIM_FORKED in a child of fork(), where nothing works, as on hardware. */
#define SIM_FORKED 507899
SIM_API int sim_enter(sim_call *call, const char *name);
SIM_API int sim_is_forked(void);
/* Writes the log line {"call":name,"code":code,"pid":,"tid":,"seq":, FIELDS} and returns the code.
 * fields: JSON members without braces, e.g. "\"bytes\":%zu", or what prints nothing for none. */
SIM_API int sim_leave(const sim_call *call, int code, const char *fields, ...) SIM_PRINTF(3, 4);
/* A log line that is not a call. */
SIM_API void sim_note(const char *what, const char *fields, ...) SIM_PRINTF(2, 3);
/* Misuse that hardware does not report, or not there: a log line {"call":"violation","what":text}, counted. */
SIM_API void sim_violation(const char *text, ...) SIM_PRINTF(1, 2);
SIM_API int kvsim_violations(void);
/* The latest one; "" where there is none. Readable until this thread's next call. */
SIM_API const char *kvsim_last_violation(void);
/* Adds a line to the text that aclGetRecentErrMsg gives to this thread; returns the code. */
SIM_API int sim_error(int code, const char *text, ...) SIM_PRINTF(2, 3);
/* The text of this thread, which is then forgotten; NULL where there is none. It stays readable
 * until the thread's next sim_error_take. */
SIM_API const char *sim_error_take(void);

/* "name:n=code; name:n=sync:code; name:n=hang; name:n=partial:code": the n-th call from now (1 is
 * the next). 0, or -1 for text that is not of this form (then nothing was added). */
SIM_API int kvsim_fault_add(const char *specification);
SIM_API void kvsim_faults_clear(void);
/* Returns the number of faults that have not happened yet. */
SIM_API int kvsim_faults_left(void);
/* Lets all operations that hang go on: they are done then. */
SIM_API void kvsim_hangs_end(void);

/* ---- memory ---- */

typedef enum {
    SIM_MEMORY_DEVICE,     /* address is in reserved space: reading it there is a SIGSEGV */
    SIM_MEMORY_PINNED,     /* aclrtMallocHost: address == view */
    SIM_MEMORY_REGISTERED, /* aclrtHostRegister: the program's own memory, fd == -1 */
} sim_memory_kind;

/* Data that a front end attaches; the core does not use it. */
typedef struct {
    void *owner;
    int origin;
    unsigned flags;
    uint64_t readable; /* a bit for each device */
    uint64_t writable;
} sim_traits;

typedef struct {
    sim_memory_kind kind;
    int device;          /* that owns it; of host memory: current when it was made */
    uint64_t address;    /* as the program knows it */
    uint64_t nbytes;
    uint64_t counted;    /* bytes of the device that it takes */
    uint64_t page;       /* size of its pages; what is shared or registered may fill the last one */
    unsigned char *view; /* where the bytes can be read and written */
    int fd;              /* memfd of the bytes, from offset 0: /proc/<pid>/fd/<fd> for peers */
    int mapped;          /* REGISTERED: for the device (MAPPED), which the driver does once */
    sim_traits traits;   /* by sim_memory_traits */
    uint64_t serial;     /* never twice in a process: tells an allocation from a later one */
    unsigned references; /* of the core's own, like the next */
    int keep_view;
} sim_memory;

/* The memory that holds the whole range, with a reference: its view stays readable until
 * sim_memory_release, even when the program frees it meanwhile. NULL where there is none. */
SIM_API sim_memory *sim_find(uint64_t address, uint64_t nbytes);
/* The same, where the range may go on to the end of the memory's last page. */
SIM_API sim_memory *sim_find_pages(uint64_t address, uint64_t nbytes);
SIM_API void sim_memory_release(sim_memory *memory);
/* Returns 1 if any byte of the range lies in reserved space: device memory, living or freed. */
SIM_API int sim_is_device_space(uint64_t address, uint64_t nbytes);
/* Returns 1 if any byte of the range belongs to living memory of any kind. */
SIM_API int sim_overlaps_memory(uint64_t address, uint64_t nbytes);
/* Allocation and registration, with ACL codes. */
SIM_API int sim_memory_allocate(sim_memory_kind kind, int device, uint64_t nbytes, uint64_t *address);
/* `huge`: in huge pages however small, as of device memory more than half of one is anyway. `padding`: bytes
 * that the runtime adds. */
SIM_API int sim_memory_allocate_in(sim_memory_kind kind, int device, uint64_t nbytes, int huge,
                                   uint64_t padding, uint64_t *address);
SIM_API int sim_memory_free(sim_memory_kind kind, uint64_t address);
/* Device memory, at reserved address space of sim_space_take, whose bytes are those of an open file from its
 * offset on; counted by who made the file. The descriptor is duplicated. 0, or SIM_NO_MEMORY. */
SIM_API int sim_memory_attach(int device, uint64_t address, uint64_t nbytes, int fd, uint64_t offset);
SIM_API void sim_memory_describe(uint64_t address, sim_traits traits);
SIM_API sim_traits sim_memory_traits(const sim_memory *memory);
/* Returns the begin of some memory of the owner, and its kind; 0 if the owner has no memory. */
SIM_API uint64_t sim_memory_owned(const void *owner, sim_memory_kind *kind);
/* Returns 1 if anything but the registry, such as queued work, refers to the memory at this address. */
SIM_API int sim_memory_is_used(uint64_t address);
/* Changes whenever memory is freed or described: what was found before may be gone, or refused. Only a hint
 * for who looks again under the lock. */
SIM_API uint64_t sim_memory_epoch(void);
/* mapped: into the device's address space; whole pages, and no byte of it twice. Else only noted. */
SIM_API int sim_memory_register(int device, uint64_t address, uint64_t nbytes, int mapped);
/* Maps host memory as HCCL does when it registers it, unless HCCL has mapped all of it already. The driver
 * refuses that for memory that aclrtHostRegister has mapped. */
SIM_API int sim_host_map(int device, uint64_t address, uint64_t nbytes);
SIM_API void sim_host_unmap(int device, uint64_t address, uint64_t nbytes);
/* Gives back what a device holds (its reset). */
SIM_API void sim_memory_free_device(int device);
/* Bytes allocated on the device, by this process, or by all where KVSIM_DIR is given. */
SIM_API uint64_t sim_memory_used(int device);
/* Returns a readable and writable view of a device or pinned address; NULL for any other. */
SIM_API void *kvsim_host_view(uint64_t address);

/* Memory that work uses until a time although its stream was aborted. A use or free before that time is a
 * violation. The key is the `view`, because the same bytes have several addresses; a later call for the
 * same bytes replaces the time. */
SIM_API void sim_linger(const void *view, uint64_t nbytes, int64_t until_us);
SIM_API void sim_linger_check(const void *view, uint64_t nbytes, const char *what);
SIM_API int kvsim_lingering(void); /* the number of such ranges */

/* ---- devices and contexts: one context is current in a thread ---- */

/* The device of the thread's current context; -1 where the thread has none. */
SIM_API int sim_current_device(void);

/* ---- streams: a thread each, first in, first out ---- */

typedef struct sim_stream sim_stream;

/* Runs on the stream's thread. Returns 0, or the code that a synchronization shows. Long work asks
 * sim_stream_stopped between its pieces. */
typedef int (*sim_work)(void *argument, sim_stream *stream);

/* The stream of a handle (NULL: the default stream of the current context), with a reference.
 * 0; 107002 no context is current; 107017 no such stream; 107003 the stream of another context. */
SIM_API int sim_stream_find(void *handle, sim_stream **stream);
SIM_API void sim_stream_release(sim_stream *stream);
SIM_API int sim_stream_device(const sim_stream *stream);
/* Returns the stream of a handle in any context, or NULL. */
SIM_API void *sim_stream_context(const void *handle);
/* Queues work that takes latency + nbytes / bandwidth. dispose(argument) is called exactly once: after
 * the work, or instead of it where it is dropped (also where this returns an error: then at once).
 * fault: of the call, NULL for none. SYNC drops the work and its code shows at synchronization; HANG
 * never ends; PARTIAL runs the work, which the caller has cut in half, and then shows its code. */
SIM_API int sim_stream_enqueue(sim_stream *stream, const sim_fault *fault, sim_work work,
                               void (*dispose)(void *), void *argument, uint64_t nbytes);
/* On the stream's thread: whether the work should end, because of an abort. */
SIM_API int sim_stream_stopped(sim_stream *stream);
/* On the stream's thread: waits, -1 for ever. Whether an abort ended it early. */
SIM_API int sim_stream_pause(sim_stream *stream, int64_t microseconds);
/* Returns the duration of work on a number of bytes, by the settings. */
SIM_API int64_t sim_duration_us(uint64_t nbytes);
/* On the stream's thread: copies in pieces. Whether an abort ended it early. */
SIM_API int sim_stream_copy(sim_stream *stream, void *target, const void *source, uint64_t nbytes);
/* Waits for all that was queued. timeout_ms -1: for ever. 0, 507046 when the time is over, 107023
 * when the stream was aborted meanwhile, or the first error of the work since the last wait. */
SIM_API int sim_stream_wait(sim_stream *stream, int timeout_ms);

/* ---- what must not be left at the end ---- */

typedef enum {
    SIM_COUNT_STREAMS,
    SIM_COUNT_EVENTS,
    SIM_COUNT_CONTEXTS,
    SIM_COUNT_REGIONS, /* HCCL */
    SIM_COUNT_COMMS,   /* HCCL */
    SIM_COUNT_HANDLES, /* CUDA: of memory that cuMemCreate made, or that was imported */
    SIM_COUNT_RANGES,  /* CUDA: reserved addresses */
    SIM_COUNT_MODULES, /* CUDA */
    SIM_NUM_COUNTS,
} sim_counted;

SIM_API void sim_count(sim_counted what, int change);
/* JSON: {"streams":,"events":,"contexts":,"device_bytes":,"pinned":,"registered":,"regions":,
 * "comms":,"handles":,"ranges":,"modules":}; readable until this thread's next call. Logged as {"call":"leaks", ...} by aclFinalize
 * and when the process ends. */
SIM_API const char *kvsim_leaks(void);
SIM_API void sim_leaks_note(const char *when);

#endif
