#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "hccl_sim.h"

#define HANDLE_BASE UINT64_C(0x00c2000000000000)
#define DRAIN_US 100000 /* for the disposal of aborted work, which may follow the abort */

static comm *comms;
static uint64_t last_handle;
static unsigned initializing;

HcclResult comm_find(hccl_call *call, HcclComm handle, comm **out)
{
    *out = NULL;
    if (!handle)
        return hccl_refuse(call, HCCL_E_PTR, "comm is NULL");
    for (comm *c = comms; c; c = c->next)
        if (c->handle == (uint64_t)(uintptr_t)handle) {
            *out = c;
            return HCCL_SUCCESS;
        }
    return hccl_refuse(call, HCCL_E_PARA, "no such communicator: %p", handle);
}

HcclResult comm_find_here(hccl_call *call, HcclComm handle, comm **out)
{
    const HcclResult code = comm_find(call, handle, out);
    const int device = sim_current_device();
    if (code)
        return code;
    if (device < 0)
        return hccl_refuse(call, HCCL_E_RUNTIME, "the thread has no device");
    if (device != (*out)->device)
        return hccl_refuse(call, HCCL_E_PARA, "the thread has device %d, the communicator %d",
                           device, (*out)->device);
    return HCCL_SUCCESS;
}

static int holds(const wire_region *range, uint64_t address, uint64_t nbytes)
{
    return address >= range->address && nbytes <= range->nbytes &&
           address - range->address <= range->nbytes - nbytes;
}

local_region *comm_local(comm *c, uint64_t address, uint64_t nbytes)
{
    for (size_t i = 0; i < c->num_locals; i++)
        if (c->locals[i].uses && holds(&c->locals[i].range, address, nbytes))
            return &c->locals[i];
    return NULL;
}

remote_region *comm_remote(comm *c, uint64_t address, uint64_t nbytes)
{
    for (size_t i = 0; i < c->num_remotes; i++)
        if (c->remotes[i].enabled && holds(&c->remotes[i].range, address, nbytes))
            return &c->remotes[i];
    return NULL;
}

int comm_add_local(comm *c, const local_region *added)
{
    local_region *grown = realloc(c->locals, (c->num_locals + 1) * sizeof *grown);
    if (!grown)
        return -1;
    c->locals = grown;
    grown[c->num_locals++] = *added;
    return 0;
}

int comm_add_remote(comm *c, const remote_region *added)
{
    remote_region *grown = realloc(c->remotes, (c->num_remotes + 1) * sizeof *grown);
    if (!grown)
        return -1;
    c->remotes = grown;
    grown[c->num_remotes++] = *added;
    return 0;
}

void local_close(local_region *local)
{
    if (local->memory)
        sim_memory_release(local->memory);
    local->memory = NULL;
    local->uses = 0;
}

void remote_close(remote_region *remote)
{
    if (remote->fd >= 0)
        close(remote->fd);
    remote->fd = -1;
    remote->enabled = 0;
}

wire_region local_range(const comm *c, const region *r, const sim_memory *memory)
{
    return (wire_region){.address = r->address, .nbytes = r->nbytes, .place = r->place,
                         .type = r->type, .fd = memory->fd,
                         .fd_offset = r->address - memory->address, .pid = getpid(),
                         .rank = (int32_t)c->rank};
}

/* ---- initialization ---- */

static HcclResult check_place(hccl_call *call, const rank_table *table, uint32_t rank, int device)
{
    const sim_settings settings = sim_settings_now();
    if (rank >= TABLE_RANKS)
        return hccl_refuse(call, HCCL_E_PARA, "rank is %u; it must be 0 or 1", rank);
    if (table->ranks[rank].device_id != (uint32_t)settings.physical[device])
        return hccl_refuse(call, HCCL_E_UNAVAIL, "rank %u is device_id %u, the thread's device is %d",
                           rank, table->ranks[rank].device_id, settings.physical[device]);
    return HCCL_SUCCESS;
}

static HcclResult add_locked(hccl_call *call, comm *made)
{
    int64_t count = 0;
    for (comm *c = comms; c; c = c->next)
        count += c->device == made->device;
    if (count >= sim_settings_now().max_links)
        return hccl_refuse(call, HCCL_E_ROCE_CONNECT, "no queue pair: %lld communicators of device %d",
                           (long long)count, made->device);
    for (comm *c = comms; c; c = c->next)
        if (c->device == made->device && strcmp(c->name, made->name) == 0)
            return hccl_refuse(call, HCCL_E_PARA, "device %d has a communicator %s", made->device,
                               made->name);
    made->handle = HANDLE_BASE | ++last_handle << 8;
    made->next = comms;
    comms = made;
    sim_count(SIM_COUNT_COMMS, 1);
    return HCCL_SUCCESS;
}

static HcclResult make(hccl_call *call, const char *text, uint32_t rank, const void *config,
                       HcclComm *out, HcclCommConfig5 *checked)
{
    char error[300];
    const int device = sim_current_device();
    if (device < 0)
        return hccl_refuse(call, HCCL_E_RUNTIME, "the thread has no device");
    if (!text || !config || !out)
        return hccl_refuse(call, HCCL_E_PTR, "%s is NULL",
                           !text ? "rankTable" : !config ? "config" : "comm");
    HcclResult code = config_check(call, config, checked);
    if (!code)
        code = nic_check_environment(call);
    if (code)
        return code;
    comm *made = calloc(1, sizeof *made);
    if (!made)
        return hccl_refuse(call, HCCL_E_MEMORY, "no memory");
    made->device = device;
    made->rank = rank;
    made->product = sim_settings_now().product;
    memcpy(made->name, checked->commName, sizeof made->name);
    if (table_parse(text, made->product, &made->table, error, sizeof error))
        code = hccl_refuse(call, HCCL_E_PARA, "rank table: %s", error);
    else
        code = check_place(call, &made->table, rank, device);
    pthread_mutex_lock(&hccl_mutex);
    if (!code)
        code = add_locked(call, made);
    pthread_mutex_unlock(&hccl_mutex);
    if (code)
        free(made);
    else
        *out = (HcclComm)(uintptr_t)made->handle;
    return code;
}

/* Returns 0 while another thread initializes. The library is not thread-safe there, so the call is refused. */
static int enter_initialization(void)
{
    pthread_mutex_lock(&hccl_mutex);
    const int alone = initializing++ == 0;
    pthread_mutex_unlock(&hccl_mutex);
    hccl_wait_until(hccl_now_us() + hccl_settings_now().init_us);
    return alone;
}

static void leave_initialization(void)
{
    pthread_mutex_lock(&hccl_mutex);
    initializing--;
    pthread_mutex_unlock(&hccl_mutex);
}

HcclResult HcclCommInitClusterInfoMemConfig(const char *rankTable, uint32_t rank, void *config,
                                            HcclComm *comm_out)
{
    hccl_call call;
    HcclCommConfig5 checked = {.commName = ""};
    HcclResult code = hccl_enter(&call, "HcclCommInitClusterInfoMemConfig");
    if (!code && enter_initialization()) {
        code = make(&call, rankTable, rank, config, comm_out, &checked);
        leave_initialization();
    } else if (!code) {
        sim_note("violation", "\"what\":\"concurrent init\"");
        code = hccl_refuse(&call, HCCL_E_PARA, "concurrent init: another thread is initializing");
        leave_initialization();
    }
    return hccl_leave(&call, code, "\"name\":\"%s\",\"rank\":%u,\"buffer_mb\":%u,\"comm\":%llu",
                      code ? "" : checked.commName, rank, code ? 0 : checked.bufferSizeMB,
                      code ? 0 : (unsigned long long)(uintptr_t)*comm_out);
}

/* ---- destruction ---- */

static int is_in_use(const comm *c) { return c->busy || c->transfers; }

/* Waits a moment for aborted work. Call with hccl_mutex held. */
static void drain(const comm *c)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += DRAIN_US * 1000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (is_in_use(c) && pthread_cond_timedwait(&hccl_changed, &hccl_mutex, &until) == 0)
        ;
}

static void drop(comm *c)
{
    comm **at = &comms;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    for (size_t i = 0; i < c->num_locals; i++) {
        region *of = c->locals[i].of;
        local_close(&c->locals[i]);
        if (of && !of->global && --of->uses == 0)
            region_drop(of);
    }
    for (size_t i = 0; i < c->num_remotes; i++)
        remote_close(&c->remotes[i]);
    nic_close(c);
    peer_close(c->peer);
    free(c->locals);
    free(c->remotes);
    free(c);
    sim_count(SIM_COUNT_COMMS, -1);
}

static HcclResult destroy(hccl_call *call, HcclComm handle, char *name)
{
    comm *c;
    HcclResult code = comm_find(call, handle, &c);
    if (code)
        return code;
    strcpy(name, c->name);
    for (size_t i = 0; i < c->num_locals; i++)
        if (c->locals[i].of && c->locals[i].of->global)
            return hccl_refuse(call, HCCL_E_PARA, "memory is bound to %s", name);
    drain(c);
    if (comm_find(call, handle, &c))
        return HCCL_E_PARA; /* another thread has destroyed the communicator */
    if (hccl_now_us() < c->lingers_until) {
        sim_note("violation", "\"what\":\"destroyed while AICPU goes on\",\"name\":\"%s\"", name);
        return hccl_refuse(call, HCCL_E_INTERNAL, "AICPU still uses %s", name);
    }
    while (c->lingering) /* the thread of finish_late is about to end */
        pthread_cond_wait(&hccl_changed, &hccl_mutex);
    if (is_in_use(c)) {
        sim_note("violation", "\"what\":\"destroyed while in use\",\"name\":\"%s\"", name);
        return hccl_refuse(call, HCCL_E_INTERNAL, "%s has %u transfers under way%s", name,
                           c->transfers, c->busy ? " and a blocking call" : "");
    }
    drop(c);
    return HCCL_SUCCESS;
}

HcclResult HcclCommDestroy(HcclComm handle)
{
    hccl_call call;
    char name[128] = "";
    HcclResult code = hccl_enter(&call, "HcclCommDestroy");
    if (!code) {
        pthread_mutex_lock(&hccl_mutex);
        code = destroy(&call, handle, name);
        pthread_mutex_unlock(&hccl_mutex);
    }
    return hccl_leave(&call, code, "\"name\":\"%s\"", name);
}

HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult *asyncError)
{
    hccl_call call;
    comm *c = NULL;
    HcclResult code = hccl_enter(&call, "HcclGetCommAsyncError");
    if (!code) {
        pthread_mutex_lock(&hccl_mutex);
        code = comm_find(&call, handle, &c);
        if (!code && !asyncError)
            code = hccl_refuse(&call, HCCL_E_PTR, "asyncError is NULL");
        if (!code)
            *asyncError = c->async_error;
        pthread_mutex_unlock(&hccl_mutex);
    }
    return hccl_leave(&call, code, "\"async\":%d", code ? -1 : (int)*asyncError);
}
