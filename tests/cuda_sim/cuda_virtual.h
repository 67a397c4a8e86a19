/*
 * Declarations that handles of memory (cuda_handles.c) and address space (cuda_virtual.c) share. Memory
 * exists as long as it has a handle or a mapping, and one mutex guards all lists.
 */
#ifndef CUDA_VIRTUAL_H
#define CUDA_VIRTUAL_H

#include "cuda_sim.h"

typedef struct {
    int type; /* CUmemLocationType: 1 a device */
    int id;
} location;

typedef struct cuda_memory {
    uint64_t handle;
    int device;
    int fd;
    int handle_types;
    unsigned num_handles; /* that were not released */
    int is_imported; /* who made it has counted it */
    unsigned num_mappings;
    uint64_t nbytes;
    struct cuda_memory *next;
} cuda_memory;

extern pthread_mutex_t cuda_virtual_mutex;

/* Like cuda_enter; fails if the device has no virtual memory. */
int cuda_virtual_enter(sim_call *call, const char *name);
/* Zeroed memory of the host; never NULL. */
void *cuda_grown(size_t nbytes);
/* With the mutex: the memory of a handle that was not released, or NULL. */
cuda_memory *cuda_physical_find(uint64_t handle);
/* With the mutex: the memory goes with its last handle or mapping. */
void cuda_physical_drop(cuda_memory *memory);

#endif
