/*
 * The inside of the HIXL simulator: servers, which tell clients where the bytes of their memory are, and
 * clients, which copy. One mutex, hixl_mutex, guards all lists; it is not held across a wait or a copy.
 */
#ifndef KVSIM_HIXL_SIM_H
#define KVSIM_HIXL_SIM_H

#include <pthread.h>

#include "hixl_abi.h"
#include "sim.h"

#define HIXL_MAX_MEMORIES 1024
#define HIXL_LINGER_US 100000 /* that operations go on after their client was destroyed */
#define HIXL_UNSTOPPED_US 60000000 /* that they go on without that */

typedef struct {
    sim_call call;
    char reason[300];
} hixl_call;

/* 0, or what the call has to return (after hixl_leave). `device`: of the thread; NULL: it needs none. */
HixlStatus hixl_enter(hixl_call *call, const char *name, int *device);
HixlStatus hixl_leave(hixl_call *call, HixlStatus code, const char *fields, ...) SIM_PRINTF(3, 4);
HixlStatus hixl_refuse(hixl_call *call, HixlStatus code, const char *text, ...) SIM_PRINTF(3, 4);
int64_t hixl_now_us(void);

extern pthread_mutex_t hixl_mutex;

/* A range as a server sends it: the bytes are those of its memfd from the offset on. */
typedef struct {
    uint64_t address, nbytes, fd_offset, slot;
    int32_t fd, unused;
} wire_memory;

typedef struct {
    uint32_t magic, status;
    int32_t pid, board_fd;
    uint64_t num_memories;
} wire_answer;

typedef struct {
    uint32_t magic, unused;
    EndpointDesc wanted;
} wire_request;

#define HIXL_MAGIC 0x6b767368u

/* A registration: of a server, or of a client. */
typedef struct {
    uint64_t handle; /* 0: free */
    uint64_t address, nbytes;
    sim_memory *memory;
} registration;

/* With hixl_mutex held. Registers device memory; the same range again is another registration. */
HixlStatus hixl_register(hixl_call *call, registration *all, int device, const CommMem *mem, void **handle);
HixlStatus hixl_unregister(hixl_call *call, registration *all, void *handle, int *index);
void hixl_unregister_all(registration *all);
/* 0, or -1 for an endpoint that is not on a device, or not on `device` (-1: any). */
int hixl_check_endpoint(const EndpointDesc *endpoint, int device);
int hixl_is_same_endpoint(const EndpointDesc *a, const EndpointDesc *b);

#endif
