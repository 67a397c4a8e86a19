/*
 * Common declarations of memory handles (cuda_handles.c) and address space (cuda_virtual.c). Memory exists as long
 * as it has a handle or a mapping. cuda_virtual_mutex guards all lists.
 */
#ifndef CUDA_VIRTUAL_H
#define CUDA_VIRTUAL_H

#include "cuda_sim.h"

typedef struct {
    int type; /* CUmemLocationType; 1: a device */
    int id;
} location;

typedef struct cuda_memory {
    uint64_t handle;
    int device;
    int fd;
    int handle_types;
    unsigned num_handles; /* not released yet */
    int is_imported;      /* the creating process has counted the bytes */
    unsigned num_mappings;
    uint64_t nbytes;
    struct cuda_memory *next;
} cuda_memory;

extern pthread_mutex_t cuda_virtual_mutex;

/* Like cuda_enter; fails if the device has no virtual memory. */
int cuda_virtual_enter(sim_call *call, const char *name);
/* Returns zeroed host memory, never NULL. */
void *cuda_grown(size_t nbytes);
/* Returns the memory of a handle, or NULL if the handle is unknown or released. Call with the mutex held. */
cuda_memory *cuda_physical_find(uint64_t handle);
/* Frees the memory unless it still has a handle or a mapping. Call with the mutex held. */
void cuda_physical_drop(cuda_memory *memory);

#endif
