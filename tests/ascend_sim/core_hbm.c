/*
 * The used memory of each device: by this process, or with KVSIM_DIR by all processes that share the folder. Memory
 * of a dead process counts as free.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include "core.h"
#include "core_log.h"

#define NUM_SLOTS 512

typedef struct {
    int32_t pid;
    int32_t device;
    uint64_t nbytes;
} slot;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static slot own_slots[NUM_SLOTS]; /* without KVSIM_DIR */

/* Returns the locked table of KVSIM_DIR, or -1 without one: the variable is empty, or the folder was removed. */
static int open_table(slot *slots) {
    char path[256];
    sim_settings settings = sim_settings_now();
    if (!*settings.directory) {
        return -1;
    }
    snprintf(path, sizeof path, "%s/hbm", settings.directory);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 && errno == ENOENT) {
        return -1;
    }
    if (fd < 0 || flock(fd, LOCK_EX) || pread(fd, slots, NUM_SLOTS * sizeof *slots, 0) < 0) {
        sim_die("%s cannot be used", path);
    }
    return fd;
}

static slot *own_slot(slot *slots, int device, uint64_t *total) {
    slot *own = NULL;
    slot *unused = NULL;
    int32_t pid = (int32_t)getpid();
    *total = 0;
    for (slot *row = slots; row < slots + NUM_SLOTS; row++) {
        if (row->pid && kill(row->pid, 0) && errno == ESRCH) {
            *row = (slot){0, 0, 0};
        }
        if (!row->pid) {
            unused = unused ? unused : row;
        } else if (row->device == device) {
            own = row->pid == pid ? row : own;
            *total += row->nbytes;
        }
    }
    if (!own && !unused) {
        sim_die("more than %d processes and devices share KVSIM_DIR", NUM_SLOTS);
    }
    if (!own) {
        own = unused;
        *own = (slot){pid, device, 0};
    }
    return own;
}

int sim_hbm_change(int device, int64_t change, uint64_t limit, uint64_t *used) {
    slot shared[NUM_SLOTS] = {{0, 0, 0}};
    pthread_mutex_lock(&mutex);
    device = sim_settings_now().physical[device];
    int fd = open_table(shared);
    slot *slots = fd < 0 ? own_slots : shared;
    uint64_t total;
    slot *own = own_slot(slots, device, &total);
    int refused = change > 0 && total + (uint64_t)change > limit;
    if (!refused && change < 0 && own->nbytes < (uint64_t)-change) {
        change = -(int64_t)own->nbytes; /* KVSIM_DIR has changed since the memory was counted */
    }
    if (!refused) {
        own->nbytes += (uint64_t)change;
        total += (uint64_t)change;
    }
    if (fd >= 0) {
        if (pwrite(fd, shared, sizeof shared, 0) != (ssize_t)sizeof shared) {
            sim_die("the table of HBM cannot be written");
        }
        close(fd);
    }
    pthread_mutex_unlock(&mutex);
    if (used) {
        *used = total;
    }
    return refused;
}

uint64_t sim_memory_used(int device) {
    uint64_t used;
    sim_hbm_change(device, 0, 0, &used);
    return used;
}
