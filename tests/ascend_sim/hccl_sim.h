/*
 * Internal declarations of the HCCL simulator: regions, communicators, the connection between two ranks.
 * hccl_mutex guards all lists and counters here. No thread holds hccl_mutex while it sleeps, copies, or
 * waits for a socket. The regions of a communicator change only while it has no transfer.
 */
#ifndef KVSIM_HCCL_SIM_H
#define KVSIM_HCCL_SIM_H

#include <pthread.h>

#include "hccl_abi.h"
#include "hccl_table.h"
#include "sim.h"

/* ---- settings of the HCCL part: KVSIM_<NAME>, or kvsim_hccl_set("<name>", value) later ---- */

typedef struct {
    int64_t remote_code;        /* synchronization returns it after the peer has gone, 507057 */
    int64_t stale_code;         /* ... after the memory was deregistered, 507899; 0: not noticed */
    int64_t connect_timeout_ms; /* meaning of the timeout 0, 120,000 */
    int64_t init_us;            /* duration of an initialization, 200 */
    int64_t aicpu;              /* 1: checks a whole batch before any of its copies, 0 */
    int64_t unfold_us;          /* begun batches continue for it after an abort, on A3 or with aicpu, 100,000 */
} hccl_settings;

hccl_settings hccl_settings_now(void);
SIM_API int kvsim_hccl_set(const char *name, const char *value);

/* ---- every call ---- */

typedef struct {
    sim_call call;
    char reason[400]; /* of a refusal, for the log */
} hccl_call;

/* Begins a call. Returns 0, or the code that the call must return after hccl_leave. */
HcclResult hccl_enter(hccl_call *call, const char *name);
HcclResult hccl_leave(hccl_call *call, HcclResult code, const char *fields, ...) SIM_PRINTF(3, 4);
/* Records the reason, also for aclGetRecentErrMsg, and returns the code. */
HcclResult hccl_refuse(hccl_call *call, HcclResult code, const char *text, ...) SIM_PRINTF(3, 4);
/* Sleeps until the deadline. */
void hccl_wait_until(int64_t deadline_us);
int64_t hccl_now_us(void);
/* Converts a timeout in seconds: 0 is the default, and -1 never ends (INT64_MAX). */
int64_t hccl_deadline(int timeout);

/* ---- the board: the live registrations of this process, in memory that peers read ---- */

typedef struct {
    uint32_t slot;
    uint64_t generation;
} board_place;

/* Returns -1 if no slot is free or the board has no memory. */
int board_take(board_place *out);
void board_clear(const board_place *place);
int board_is_live(const board_place *place);
int board_fd(void);

/* ---- regions ---- */

/* A region, as one rank sends it to the other, and as both store it. */
typedef struct {
    uint64_t address, nbytes;
    board_place place;
    int32_t type; /* HCCL_MEM_DEVICE, HCCL_MEM_HOST */
    int32_t fd;   /* memfd of the owner; -1: access by process_vm_readv and _writev */
    uint64_t fd_offset; /* offset of the address in the memfd */
    int32_t pid;
    int32_t rank;
} wire_region;

typedef struct region {
    struct region *next;
    uint64_t handle;
    int global; /* from HcclRegisterGlobalMem; else from HcclRegisterMem */
    int device;
    uint64_t address, nbytes;
    int32_t type;
    board_place place;
    int mapped;    /* host memory: from the first prepare until the deregistration */
    unsigned uses; /* bound communicators, or those that have registered the range */
} region;

typedef struct {
    region *of;         /* NULL after it was unbound or deregistered */
    wire_region range;
    sim_memory *memory; /* of the range; held from the prepare or registration until the communicator ends */
    unsigned uses;      /* transfers may use the region unless 0; counts registrations by HcclRegisterMem */
} local_region;

typedef struct {
    wire_region range;
    int fd;           /* own descriptor of the memfd; -1: process_vm_* */
    unsigned enabled; /* calls of HcclEnableMemAccess less HcclDisableMemAccess; 1 after prepare */
} remote_region;

/* Returns the same region for the same range and type. Call with hccl_mutex held. */
HcclResult region_add(hccl_call *call, int global, int device, const HcclMem *memory, region **out);
region *region_of_handle(void *handle, int device);
void region_drop(region *r);
/* Returns a reference to the memory of the range; refuses memory of another type or device. */
HcclResult region_resolve(hccl_call *call, int device, const region *r, sim_memory **memory);
/* Refuses ranges that no product registers, by their size, type or address. */
HcclResult region_check(hccl_call *call, const HcclMem *memory);

/* ---- communicators ---- */

typedef struct peer peer; /* the other rank of a connected communicator */
typedef struct nic nic;   /* the listening network port of a device */

typedef struct comm {
    struct comm *next;
    uint64_t handle;
    char name[128];
    int device;
    uint32_t rank;
    sim_product product;
    rank_table table;
    local_region *locals;
    size_t num_locals;
    remote_region *remotes;
    size_t num_remotes;
    peer *peer;
    nic *nic; /* with RDMA, after the prepare */
    int prepared;
    int busy;              /* a blocking call uses the communicator */
    unsigned transfers;    /* queued batches that have not ended */
    unsigned lingering;    /* aborted batches that still copy */
    int64_t lingers_until; /* the time at which the last of them ends */
    HcclResult async_error;
} comm;

extern pthread_mutex_t hccl_mutex;
extern pthread_cond_t hccl_changed;

/* Refuses NULL with HCCL_E_PTR, an unknown handle with HCCL_E_PARA. Call with hccl_mutex held. */
HcclResult comm_find(hccl_call *call, HcclComm handle, comm **out);
/* Like comm_find; also refuses a thread whose device is not that of the communicator. */
HcclResult comm_find_here(hccl_call *call, HcclComm handle, comm **out);
local_region *comm_local(comm *c, uint64_t address, uint64_t nbytes);
remote_region *comm_remote(comm *c, uint64_t address, uint64_t nbytes);
int comm_add_local(comm *c, const local_region *added);
int comm_add_remote(comm *c, const remote_region *added);
void local_close(local_region *local);
void remote_close(remote_region *remote);
/* The region as the other rank needs it. */
wire_region local_range(const comm *c, const region *r, const sim_memory *memory);

HcclResult config_check(hccl_call *call, const void *record, HcclCommConfig5 *out);

/* ---- the other rank ---- */

/* The call that connects; both ranks must make the same one. */
typedef enum { MEET_PREPARE = 1, MEET_EXCHANGE = 2 } meet_kind;
/* Connects to the other rank and exchanges regions with it. The caller frees *regions. Reads only constant fields of
 * c, and so needs no mutex. */
HcclResult peer_meet(hccl_call *call, const comm *c, meet_kind kind, const wire_region *mine,
                     uint32_t num_mine, int64_t deadline_us, peer **out, wire_region **regions,
                     uint32_t *num_regions);
/* Exchanges blocks, whose lengths may differ. The caller frees *theirs. */
HcclResult peer_swap(hccl_call *call, peer *p, const void *mine, uint32_t nbytes,
                     int64_t deadline_us, void **theirs, uint32_t *num_theirs);
int peer_pid(const peer *p);
int peer_is_alive(const peer *p);
int peer_region_is_live(const peer *p, const wire_region *range);
/* Opens the memfd of the range; *fd is -1 if it has none. Returns 0, or -1. */
int peer_open(const peer *p, const wire_region *range, int *fd);
/* Returns 0, or -1 with errno. */
int peer_copy(const remote_region *from_or_to, uint64_t address, void *local, uint64_t nbytes,
              int is_put);
void peer_close(peer *p);

/* Returns 1 if the two devices share memory over HCCS, and 0 if they use RDMA. */
int nic_is_hccs(const comm *c);
/* With RDMA, listens at the network port of the device; refuses an address that the device does not have, and a port
 * that another process uses. Call with hccl_mutex held. */
HcclResult nic_open(hccl_call *call, comm *c);
void nic_close(comm *c);
/* Refuses environment variables that HCCL refuses at an initialization. */
HcclResult nic_check_environment(hccl_call *call);

/* Returns a socket to the other rank of the communicator, or -1. */
int wire_meet(const char *name, uint32_t rank, const char *directory, int64_t deadline_us);
/* Return 0, or -1 with errno: EPIPE after the other rank has gone, ETIMEDOUT at the deadline. */
int wire_send(int fd, const void *bytes, size_t nbytes, int64_t deadline_us);
int wire_receive(int fd, void *bytes, size_t nbytes, int64_t deadline_us);

#endif
