/* The two ends of a connection, and transfers between them. */
#ifndef INTERLEAVINGS_ENDS_H
#define INTERLEAVINGS_ENDS_H

#include "core/report.h"
#include "tcp/link.h"

#define PIECE 8u
#define NUM_PIECES 2u
#define STEP 12u /* distance of pieces on the other side */
#define FAR_NBYTES (STEP * NUM_PIECES)
#define NEAR_NBYTES (PIECE * NUM_PIECES)
#define MAX_TRANSFERS 2
#define WIDE 4096u
#define NARROW 40u /* smaller than a request */
#define GENERATION 7u

typedef struct transfer {
    kvn_batch_end end; /* first, because the backend passes its address back */
    unsigned num_ends;
    int end_status;
    kvn_backend *backend;
    bool is_push;
    uint8_t near[NEAR_NBYTES], far[FAR_NBYTES];
    uint64_t from[NUM_PIECES], to[NUM_PIECES], nbytes[NUM_PIECES];
    kvn_request *request;
    kvn_report report;
} transfer;

typedef struct end {
    kvn_tcp_service *service;
    kvn_tcp_link *link;
} end;

extern end ends[2];
extern unsigned num_ends;
extern bool encrypts; /* whether connections of later scenarios are encrypted */
extern transfer transfers[MAX_TRANSFERS];

/* Returns when all other threads sleep. The scenario itself calls model_explore. */
void begin(unsigned count, unsigned capacity, unsigned num_transfers, bool is_push);
void finish(unsigned num_transfers);
void submit(transfer *it, bool waits);
int wait_for(transfer *it, int64_t deadline_ns);
void release(transfer *it);
/* Waits without driving the transfer, which the thread of the service does. */
void await_outcome(transfer *it);
void *wait_without_end(void *of);
void *wait_and_release(void *of);
void *move(void *of);

#endif
