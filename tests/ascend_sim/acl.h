/*
 * The ACL interface as the simulator reads it from the documented facts: written for itself, not from
 * the declarations of the library under test, so that two readings check each other.
 * KVSIM_CANN is the simulated version (801, 805): what is younger is not there at all.
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

/* sim_enter, and 100001 where aclInit was not called. */
int acl_enter(sim_call *call, const char *name);
/* Like acl_enter, and returns 107002 if the thread has no context; stores its device. */
int acl_enter_device(sim_call *call, const char *name, int *device);
/* 100000 with a text for a NULL pointer. */
int acl_check_pointer(const void *pointer, const char *argument);
#define ACL_CHECK(code, pointer) ((code) ? (code) : acl_check_pointer(pointer, #pointer))
/* Checks a timeout of a synchronization: -1 or positive. */
int acl_check_timeout(int32_t timeout);

/* ---- where an address is ---- */

typedef enum { ACL_DEVICE_SIDE, ACL_PINNED_SIDE, ACL_PAGEABLE_SIDE } acl_side;

typedef struct {
    acl_side side;
    sim_memory *memory; /* referenced; NULL of pageable memory */
    unsigned char *view;
    int device; /* of device memory, else -1 */
} acl_place;

/* 0; or 107000: freed or foreign device memory, or a range that leaves its memory. */
int acl_place_find(const void *address, uint64_t nbytes, acl_place *place);
void acl_place_release(acl_place *place);

/* ---- copies ---- */

/* A copy whose two ends were found; acl_copy_release releases them. */
typedef struct {
    acl_place target;
    acl_place source;
    uint64_t target_address;
    uint64_t source_address;
    uint64_t nbytes;
} acl_copy;

/* Finds both ends and checks them: 107000 as acl_place_find, or memories of two devices without peer
 * access. */
int acl_copy_find(acl_copy *copy, void *target, const void *source, uint64_t nbytes);
void acl_copy_release(acl_copy *copy);
int acl_copy_is_pageable(const acl_copy *copy);
/* HOST_TO_HOST .. DEVICE_TO_DEVICE, from where the ends are. */
int acl_copy_kind(const acl_copy *copy);
/* 107000 where the kind contradicts where the ends are. */
int acl_copy_check_kind(const acl_copy *copy, int kind);
/* Queues the copies, which it takes over, as one operation: one copy after the other. */
int acl_copies_enqueue(sim_stream *stream, const sim_fault *fault, const acl_copy *copies,
                       size_t count);
/* Makes the copies at once, as slowly as the settings say, and releases them. */
void acl_copies_now(acl_copy *copies, size_t count);

#endif
