/*
 * The ACL interface, declared here from the vendor's documents and not from the declarations of the
 * library under test, so that two readings of the documents check each other. KVSIM_CANN is the
 * simulated version (801, 805, 900, 901); calls of later versions do not exist.
 */
#ifndef KVSIM_ACL_H
#define KVSIM_ACL_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "core.h"

#define ACL SIM_API int

typedef struct {
    uint32_t id;
    int32_t type;
} acl_location;

enum { ACL_AT_HOST = 0, ACL_AT_DEVICE = 1, ACL_AT_UNREGISTERED = 2 };

typedef struct {
    acl_location target;
    acl_location source;
    uint8_t reserved[16];
} acl_batch_attribute;

typedef struct {
    acl_location location;
    uint32_t page_size;
    uint32_t reserved[4];
} acl_pointer_attributes;

static_assert(sizeof(acl_location) == 8, "");
static_assert(sizeof(acl_batch_attribute) == 32, "");
static_assert(offsetof(acl_batch_attribute, source) == 8, "");
static_assert(sizeof(acl_pointer_attributes) == 28, "");

enum {
    ACL_HOST_TO_HOST,
    ACL_HOST_TO_DEVICE,
    ACL_DEVICE_TO_HOST,
    ACL_DEVICE_TO_DEVICE,
    ACL_DEFAULT,
    ACL_HOST_TO_BUFFER_TO_DEVICE,
    ACL_INSIDE_DEVICE,
    ACL_BETWEEN_DEVICES,
    ACL_NUM_KINDS,
};

/* Calls sim_enter; returns 100001 before aclInit. */
int acl_enter(sim_call *call, const char *name);
/* Like acl_enter; also stores the device of the thread's context, or returns 107002 without a context. */
int acl_enter_device(sim_call *call, const char *name, int *device);
/* Returns 100000, and records an error text, for a NULL pointer. */
int acl_check_pointer(const void *pointer, const char *argument);
#define ACL_CHECK(code, pointer) ((code) ? (code) : acl_check_pointer(pointer, #pointer))
/* Returns an error unless the timeout of a synchronization is -1 or positive. */
int acl_check_timeout(int32_t timeout);

/* ---- places: the memory at an address ---- */

typedef enum { ACL_DEVICE_SIDE, ACL_PINNED_SIDE, ACL_PAGEABLE_SIDE } acl_side;

typedef struct {
    acl_side side;
    sim_memory *memory; /* holds a reference; NULL for pageable memory */
    unsigned char *view;
    int device; /* -1 for host memory */
} acl_place;

/* Returns 107000 for a device address without memory, or a range that exceeds its memory. */
int acl_place_find(const void *address, uint64_t nbytes, acl_place *place);
void acl_place_release(acl_place *place);

/* ---- copies ---- */

/* A copy whose source and target were found; it holds references to both. */
typedef struct {
    acl_place target;
    acl_place source;
    uint64_t target_address;
    uint64_t source_address;
    uint64_t nbytes;
} acl_copy;

/* Finds source and target. Returns 107000 if acl_place_find fails, or if the two devices have no peer
 * access. */
int acl_copy_find(acl_copy *copy, void *target, const void *source, uint64_t nbytes);
void acl_copy_release(acl_copy *copy);
int acl_copy_is_pageable(const acl_copy *copy);
/* Returns the actual kind: ACL_HOST_TO_HOST, ..., ACL_DEVICE_TO_DEVICE. */
int acl_copy_kind(const acl_copy *copy);
/* Returns 107000 if `kind` contradicts the actual kind. */
int acl_copy_check_kind(const acl_copy *copy, int kind);
/* Queues the copies as one operation, in this order; the operation releases them. */
int acl_copies_enqueue(sim_stream *stream, const sim_fault *fault, const acl_copy *copies,
                       size_t count);
/* Copies on this thread, for the duration given by latency and bandwidth, and releases the copies. */
void acl_copies_now(acl_copy *copies, size_t count);

#endif
