/*
 * Internal declarations of the HIXL simulator: servers, which send clients the places of their memory, and
 * clients, which copy. hixl_mutex guards all lists; no thread holds hixl_mutex while it sleeps or copies.
 */
#ifndef KVSIM_HIXL_SIM_H
#define KVSIM_HIXL_SIM_H

#include <pthread.h>

#include "hixl_abi.h"
#include "sim.h"

#define HIXL_MAX_MEMORIES 1024
#define HIXL_LINGER_US 100000      /* operations continue after the end of their client */
#define HIXL_UNSTOPPED_US 60000000 /* operations of a call that failed in the middle continue */

typedef struct {
    sim_call call;
    char reason[300];
} hixl_call;

/* Begins a call. Returns 0, or the code that the call must return after hixl_leave. *device is that of the thread;
 * NULL for calls that need none. */
HixlStatus hixl_enter(hixl_call *call, const char *name, int *device);
HixlStatus hixl_leave(hixl_call *call, HixlStatus code, const char *fields, ...) SIM_PRINTF(3, 4);
HixlStatus hixl_refuse(hixl_call *call, HixlStatus code, const char *text, ...) SIM_PRINTF(3, 4);
int64_t hixl_now_us(void);

extern pthread_mutex_t hixl_mutex;

/* A registration, as a server sends it. Its bytes begin at fd_offset of the server's memfd. */
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

typedef struct {
    uint64_t handle; /* 0: free */
    uint64_t address, nbytes;
    sim_memory *memory;
} registration;

/* Registers device memory; each call makes another registration. Call with hixl_mutex held. */
HixlStatus hixl_register(hixl_call *call, registration *all, int device, const CommMem *mem, void **handle);
HixlStatus hixl_unregister(hixl_call *call, registration *all, void *handle, int *index);
void hixl_unregister_all(registration *all);
/* Returns -1 unless the endpoint is on `device`; -1: on any device. */
int hixl_check_endpoint(const EndpointDesc *endpoint, int device);
int hixl_is_same_endpoint(const EndpointDesc *a, const EndpointDesc *b);

#endif
