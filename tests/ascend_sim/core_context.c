/* Contexts: each thread has a current one. The primary context of a device counts its users. */
#include <stdlib.h>

#include "core.h"
#include "core_log.h"
#include "core_stream.h"

struct sim_context {
    void *handle;
    int device;
    int uses; /* calls of aclrtSetDevice less aclrtResetDevice; 0 unless primary */
    sim_stream *default_stream;
    sim_context_failure *failure;
    sim_context *next;
};

static sim_context *contexts;
static sim_context *primaries[64];
static unsigned char peer_access[64][64];
static _Thread_local void *current; /* a handle, as the context may have been destroyed */

static int check_device(int device) {
    int num_devices = sim_settings_now().num_devices;
    if (device < 0 || device >= num_devices) {
        return sim_error(SIM_DEVICE_ID, "device %d: there are %d", device, num_devices);
    }
    return 0;
}

sim_context *sim_context_find(const void *handle) {
    sim_context *context = contexts;
    while (context && context->handle != handle) {
        context = context->next;
    }
    return context;
}

static sim_context *make(int device) {
    sim_context *context = calloc(1, sizeof *context);
    sim_context_failure *failure = calloc(1, sizeof *failure);
    if (!context || !failure) {
        sim_die("no host memory");
    }
    *context = (sim_context){
        .handle = sim_handle_new(), .device = device, .failure = failure, .next = contexts};
    contexts = context;
    return context;
}

/* Call with the lock held; releases it while the context's streams end. */
static void destroy(sim_context *context, int force) {
    sim_context **link = &contexts;
    while (*link != context) {
        link = &(*link)->next;
    }
    *link = context->next;
    sim_unlock();
    sim_streams_destroy(context, force);
    free(context->failure);
    free(context);
    sim_lock();
}

sim_context *sim_context_current(void) { return current ? sim_context_find(current) : NULL; }
sim_context_failure *sim_context_failure_of(const sim_context *context) { return context->failure; }
int sim_context_device(const sim_context *context) { return context->device; }
void *sim_context_handle(const sim_context *context) { return context->handle; }
sim_stream **sim_context_default_stream(sim_context *context) { return &context->default_stream; }

int sim_current_device(void) {
    sim_lock();
    sim_context *context = sim_context_current();
    int device = context ? context->device : -1;
    sim_unlock();
    return device;
}

int sim_device_set(int device) {
    int code = check_device(device);
    if (code) {
        return code;
    }
    sim_lock();
    if (!primaries[device]) {
        primaries[device] = make(device);
    }
    primaries[device]->uses++;
    current = primaries[device]->handle;
    sim_unlock();
    return 0;
}

int sim_device_reset(int device, int force) {
    int code = check_device(device);
    if (code) {
        return code;
    }
    sim_lock();
    sim_context *primary = primaries[device];
    if (primary && (force || !--primary->uses)) {
        primaries[device] = NULL;
        destroy(primary, force);
        sim_memory_free_device(device);
    } else if (!primary && !force) {
        code = sim_error(SIM_DEVICE_ID, "device %d is not set, or was reset as often", device);
    }
    sim_unlock();
    return code;
}

int sim_context_create(int device, void **handle) {
    int code = check_device(device);
    if (code) {
        return code;
    }
    sim_lock();
    current = *handle = make(device)->handle;
    sim_unlock();
    sim_count(SIM_COUNT_CONTEXTS, 1);
    return 0;
}

int sim_context_destroy(void *handle, int force) {
    sim_lock();
    sim_context *context = sim_context_find(handle);
    if (!context || primaries[context->device] == context) {
        sim_unlock();
        return sim_error(SIM_PARAM, "%p is not a context of aclrtCreateContext", handle);
    }
    destroy(context, force);
    sim_unlock();
    sim_count(SIM_COUNT_CONTEXTS, -1);
    return 0;
}

int sim_context_set(void *handle) {
    sim_lock();
    int code = !handle || sim_context_find(handle) ? 0 : sim_error(SIM_PARAM, "%p is not a context", handle);
    if (!code) {
        current = handle;
    }
    sim_unlock();
    return code;
}

void sim_context_stop_on_failure(void *handle) {
    sim_lock();
    sim_context_find(handle)->failure->stops = 1;
    sim_unlock();
}

int sim_context_failed(void *handle) {
    sim_lock();
    sim_context *context = sim_context_find(handle);
    int code = context ? context->failure->code : 0;
    sim_unlock();
    return code;
}

void sim_context_fail(void *handle, int code) {
    sim_lock();
    sim_context *context = sim_context_find(handle);
    if (context) {
        sim_context_stop(context, code);
    }
    sim_unlock();
}

int sim_context_get(void **handle) {
    sim_lock();
    sim_context *context = sim_context_current();
    *handle = context ? context->handle : NULL;
    sim_unlock();
    return context ? 0 : sim_error(SIM_NO_CONTEXT, "the thread has no context");
}

int sim_context_wait(int timeout_ms) {
    sim_lock();
    sim_context *context = sim_context_current();
    sim_unlock();
    if (!context) {
        return sim_error(SIM_NO_CONTEXT, "the thread has no context");
    }
    return sim_streams_wait(context, timeout_ms);
}

int sim_peer_access(int device, int peer, int change) {
    int code = check_device(device);
    code = code ? code : check_device(peer);
    if (code) {
        return -code;
    }
    sim_lock();
    if (change) {
        peer_access[device][peer] = change > 0;
    }
    int allowed = device == peer || peer_access[device][peer];
    sim_unlock();
    return allowed;
}
