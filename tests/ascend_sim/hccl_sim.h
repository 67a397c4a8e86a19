/*
 * The inside of the HCCL simulator: regions, communicators, the connection between the two ends.
 * One mutex, hccl_mutex, guards every list and counter here; it is never held across a wait, a socket
 * or a copy. What a transfer uses (regions of both ends) changes only while none is under way.
 */
#ifndef KVSIM_HCCL_SIM_H
#define KVSIM_HCCL_SIM_H

#include <pthread.h>

#include "hccl_abi.h"
#include "hccl_table.h"
#include "sim.h"

/* ---- settings of the HCCL part: KVSIM_<NAME>, or kvsim_hccl_set("<name>", value) later ---- */

typedef struct {
    int64_t remote_code;        /* shown at synchronization when the peer is gone, 507057 */
    int64_t stale_code;         /* ... when it has deregistered the memory, 507899; 0: not noticed */
    int64_t connect_timeout_ms; /* of a timeout of 0, 120,000 */
    int64_t init_us;            /* how long an initialization takes, 200 */
    int64_t aicpu;              /* 1: as on A3, a batch is checked as a whole before any of it starts, 0 */
    int64_t unfold_us;          /* what goes on after an abort on A3, or with aicpu: 100,000 */
} hccl_settings;

hccl_settings hccl_settings_now(void);
SIM_API int kvsim_hccl_set(const char *name, const char *value);

/* ---- every call ---- */

typedef struct {
    sim_call call;
    char reason[400]; /* of a refusal; also the text of aclGetRecentErrMsg */
} hccl_call;

/* 0, or what the call has to return (after hccl_leave). */
HcclResult hccl_enter(hccl_call *call, const char *name);
HcclResult hccl_leave(hccl_call *call, HcclResult code, const char *fields, ...) SIM_PRINTF(3, 4);
/* Keeps the reason; returns the code. */
HcclResult hccl_refuse(hccl_call *call, HcclResult code, const char *text, ...) SIM_PRINTF(3, 4);
/* Waits until the deadline; for faults that hang a blocking call. */
void hccl_wait_until(int64_t deadline_us);
int64_t hccl_now_us(void);
/* Converts a timeout in seconds: 0 is the default, and -1 never ends (INT64_MAX). */
int64_t hccl_deadline(int timeout);

/* ---- the board: which registrations of this process live; peers read it ---- */

typedef struct {
    uint32_t slot;
    uint64_t generation;
} board_place;

/* Returns -1 without a free slot or memory. */
int board_take(board_place *out);
void board_clear(const board_place *place);
int board_is_live(const board_place *place);
int board_fd(void);

/* ---- regions ---- */

/* A region as one end sends it to the other, and as both store it. */
typedef struct {
    uint64_t address, nbytes;
    board_place place;
    int32_t type; /* HCCL_MEM_DEVICE, HCCL_MEM_HOST */
    int32_t fd;   /* of the owner's memfd; -1: only through process_vm_readv and _writev */
    uint64_t fd_offset; /* of the address in it */
    int32_t pid;
    int32_t rank;
} wire_region;

typedef struct region {
    struct region *next;
    uint64_t handle;
    int global; /* or of HcclRegisterMem */
    int device;
    uint64_t address, nbytes;
    int32_t type;
    board_place place;
    int mapped;    /* memory of the host, by the first prepare until it is deregistered */
    unsigned uses; /* communicators that it is bound to, or registrations of the same range */
} region;

typedef struct {
    region *of;         /* global: NULL after it was unbound */
    wire_region range;
    sim_memory *memory; /* NULL until prepared; kept as long as the communicator */
    unsigned uses;      /* how often transfers may use it: 0 or 1, more with HcclRegisterMem */
} local_region;

typedef struct {
    wire_region range;
    int fd;           /* here, -1: process_vm */
    unsigned enabled; /* how often */
} remote_region;

/* With hccl_mutex held. The same range and type again is the same region. */
HcclResult region_add(hccl_call *call, int global, int device, const HcclMem *memory, region **out);
region *region_of_handle(void *handle, int device);
void region_drop(region *r);
/* Memory of the right kind at the whole range, with a reference. */
HcclResult region_resolve(hccl_call *call, int device, const region *r, sim_memory **memory);
/* With hccl_mutex held: what registrations of the range a product refuses by itself. */
HcclResult region_check(hccl_call *call, const HcclMem *memory);

/* ---- communicators ---- */

typedef struct peer peer; /* the other end, once connected */
typedef struct nic nic;   /* the network port of a device, which a process listens at */

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
    nic *nic; /* of RDMA, once it is prepared */
    int prepared;
    int busy;              /* a blocking call is under way */
    unsigned transfers;    /* queued and not over */
    unsigned lingering;    /* aborted, and not over */
    int64_t lingers_until; /* of the last abort */
    HcclResult async_error;
} comm;

extern pthread_mutex_t hccl_mutex;
extern pthread_cond_t hccl_changed;

/* With hccl_mutex held. NULL is refused with PTR, anything unknown with PARA. */
HcclResult comm_find(hccl_call *call, HcclComm handle, comm **out);
/* Also checks that the thread's device is that of the communicator. */
HcclResult comm_find_here(hccl_call *call, HcclComm handle, comm **out);
local_region *comm_local(comm *c, uint64_t address, uint64_t nbytes);
remote_region *comm_remote(comm *c, uint64_t address, uint64_t nbytes);
int comm_add_local(comm *c, const local_region *added);
int comm_add_remote(comm *c, const remote_region *added);
void local_close(local_region *local);
void remote_close(remote_region *remote);
/* The data for the other end. */
wire_region local_range(const comm *c, const region *r, const sim_memory *memory);

HcclResult config_check(hccl_call *call, const void *record, HcclCommConfig5 *out);

/* ---- the other end ---- */

/* Meets the other rank and tells it the regions; theirs are in *regions (to be freed). All of c that
 * it reads is constant. kind: what both ends have to be doing. */
typedef enum { MEET_PREPARE = 1, MEET_EXCHANGE = 2 } meet_kind;
HcclResult peer_meet(hccl_call *call, const comm *c, meet_kind kind, const wire_region *mine,
                     uint32_t num_mine, int64_t deadline_us, peer **out, wire_region **regions,
                     uint32_t *num_regions);
/* Sends and receives a block of each end's own length; *theirs is to be freed. */
HcclResult peer_swap(hccl_call *call, peer *p, const void *mine, uint32_t nbytes,
                     int64_t deadline_us, void **theirs, uint32_t *num_theirs);
int peer_pid(const peer *p);
int peer_is_alive(const peer *p);
int peer_region_is_live(const peer *p, const wire_region *range);
/* Opens what the range lies in: 0 and *fd (-1: process_vm), or -1. */
int peer_open(const peer *p, const wire_region *range, int *fd);
/* Copies one piece; returns -1 with errno. */
int peer_copy(const remote_region *from_or_to, uint64_t address, void *local, uint64_t nbytes,
              int is_put);
void peer_close(peer *p);

/* hccl_nic.c. With RDMA between the two, what the network port of this end's device refuses. */
int nic_is_hccs(const comm *c);
HcclResult nic_open(hccl_call *call, comm *c);
void nic_close(comm *c);
/* At the beginning of an initialization: variables of the environment that exclude each other. */
HcclResult nic_check_environment(hccl_call *call);

/* hccl_wire.c: sockets with a deadline. */
int wire_meet(const char *name, uint32_t rank, const char *directory, int64_t deadline_us);
/* 0, -1 the other end has gone (errno EPIPE), or ETIMEDOUT */
int wire_send(int fd, const void *bytes, size_t nbytes, int64_t deadline_us);
int wire_receive(int fd, void *bytes, size_t nbytes, int64_t deadline_us);

#endif
