/* Copies: finds the memory of source and target, and moves the bytes. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "acl.h"

int acl_place_find(const void *pointer, uint64_t nbytes, acl_place *place) {
    uint64_t address = (uint64_t)(uintptr_t)pointer;
    *place = (acl_place){ACL_PAGEABLE_SIDE, sim_find(address, nbytes), (void *)(uintptr_t)pointer, -1};
    if (place->memory) {
        int on_device = place->memory->kind == SIM_MEMORY_DEVICE;
        place->side = on_device ? ACL_DEVICE_SIDE : ACL_PINNED_SIDE;
        place->view = place->memory->view + (address - place->memory->address);
        place->device = on_device ? place->memory->device : -1;
        return 0;
    }
    const char *problem = sim_overlaps_memory(address, nbytes) ? "is partly outside of its memory"
                          : sim_is_device_space(address, nbytes)
                              ? "was freed, or is not device memory"
                              : NULL;
    if (problem) {
        return sim_error(SIM_PARAM, "[%p, +%llu) %s", pointer, (unsigned long long)nbytes, problem);
    }
    return 0;
}

void acl_place_release(acl_place *place) { sim_memory_release(place->memory); }

int acl_copy_find(acl_copy *copy, void *target, const void *source, uint64_t nbytes) {
    *copy = (acl_copy){.target_address = (uint64_t)(uintptr_t)target,
                       .source_address = (uint64_t)(uintptr_t)source,
                       .nbytes = nbytes};
    int code = acl_place_find(target, nbytes, &copy->target);
    code = code ? code : acl_place_find(source, nbytes, &copy->source);
    int to = copy->target.device;
    int from = copy->source.device;
    if (!code && to >= 0 && from >= 0 && to != from && sim_peer_access(from, to, 0) != 1 &&
        sim_peer_access(to, from, 0) != 1) {
        code = sim_error(SIM_PARAM, "from device %d to %d without peer access", from, to);
    }
    if (code) {
        acl_copy_release(copy);
    }
    return code;
}

void acl_copy_release(acl_copy *copy) {
    acl_place_release(&copy->target);
    acl_place_release(&copy->source);
    copy->target.memory = copy->source.memory = NULL;
}

int acl_copy_is_pageable(const acl_copy *copy) {
    return copy->target.side == ACL_PAGEABLE_SIDE || copy->source.side == ACL_PAGEABLE_SIDE;
}

int acl_copy_kind(const acl_copy *copy) {
    int to_device = copy->target.side == ACL_DEVICE_SIDE;
    if (copy->source.side == ACL_DEVICE_SIDE) {
        return to_device ? ACL_DEVICE_TO_DEVICE : ACL_DEVICE_TO_HOST;
    }
    return to_device ? ACL_HOST_TO_DEVICE : ACL_HOST_TO_HOST;
}

int acl_copy_check_kind(const acl_copy *copy, int kind) {
    int real = acl_copy_kind(copy);
    int is_one_device = copy->target.device == copy->source.device;
    int accepted = kind == ACL_DEFAULT || kind == real ||
                   (kind == ACL_INSIDE_DEVICE && real == ACL_DEVICE_TO_DEVICE && is_one_device) ||
                   (kind == ACL_BETWEEN_DEVICES && real == ACL_DEVICE_TO_DEVICE && !is_one_device) ||
                   (kind == ACL_HOST_TO_BUFFER_TO_DEVICE && real == ACL_HOST_TO_DEVICE);
    if (!accepted) {
        return sim_error(SIM_PARAM, "kind=%d, but the addresses are of a copy of kind %d", kind, real);
    }
    return 0;
}

typedef struct {
    size_t count;
    acl_copy copies[];
} batch;

/* Returns 1 if the memory was freed after the copy was queued: on hardware, the DMA engine finds it unmapped. */
static int is_stale(const acl_place *place, uint64_t address, uint64_t nbytes) {
    if (!place->memory) {
        return 0;
    }
    sim_memory *now = sim_find(address, nbytes);
    int stale = now != place->memory;
    sim_memory_release(now);
    return stale;
}

static int run(void *argument, sim_stream *stream) {
    batch *work = argument;
    for (size_t i = 0; i < work->count; i++) {
        acl_copy *copy = &work->copies[i];
        if (is_stale(&copy->target, copy->target_address, copy->nbytes) ||
            is_stale(&copy->source, copy->source_address, copy->nbytes)) {
            return SIM_DMA;
        }
        sim_linger_check(copy->target.view, copy->nbytes, "copied to");
        if (sim_stream_copy(stream, copy->target.view, copy->source.view, copy->nbytes) ||
            (work->count > 1 && sim_stream_stopped(stream))) {
            return 0;
        }
    }
    return 0;
}

static void dispose(void *argument) {
    batch *work = argument;
    for (size_t i = 0; i < work->count; i++) {
        acl_copy_release(&work->copies[i]);
    }
    free(work);
}

int acl_copies_enqueue(sim_stream *stream, const sim_fault *fault, const acl_copy *copies,
                       size_t count) {
    batch *work = malloc(sizeof *work + count * sizeof *copies);
    uint64_t nbytes = 0;
    work->count = count;
    memcpy(work->copies, copies, count * sizeof *copies);
    for (size_t i = 0; i < count; i++) {
        nbytes += copies[i].nbytes;
    }
    return sim_stream_enqueue(stream, fault, run, dispose, work, nbytes);
}

void acl_copies_now(acl_copy *copies, size_t count) {
    sim_settings settings = sim_settings_now();
    uint64_t nbytes = 0;
    for (size_t i = 0; i < count; i++) {
        sim_linger_check(copies[i].target.view, copies[i].nbytes, "copied to");
        memmove(copies[i].target.view, copies[i].source.view, copies[i].nbytes);
        nbytes += copies[i].nbytes;
        acl_copy_release(&copies[i]);
    }
    double transfer = settings.bandwidth ? 1e6 * (double)nbytes / (double)settings.bandwidth : 0;
    int64_t us = settings.latency_us + (int64_t)transfer;
    struct timespec pause = {us / 1000000, us % 1000000 * 1000};
    if (us) {
        nanosleep(&pause, NULL);
    }
}
