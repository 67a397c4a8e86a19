/* Put and get: the call checks the batch, and the stream's thread copies. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "hccl_sim.h"

#define PIECE_BYTES (UINT64_C(1) << 20)
#define ACL_CODES 100000 /* fault codes from here on are of ACL, and returned by a synchronization */

typedef struct {
    unsigned char *local;
    uint64_t remote, nbytes;
    board_place place; /* of the local region */
    remote_region at;
} piece;

typedef struct {
    comm *comm;
    int is_put, is_over;
    int unfolds;       /* the AICPU runs the batch: an abort does not end it after its start */
    int is_cut;        /* an abort came before the end */
    uint32_t num_done; /* pieces copied before the abort */
    int64_t until_us;  /* after an abort: the end of the time that the AICPU may take */
    hccl_settings settings;
    int64_t retry_us;
    uint32_t num_pieces;
    uint64_t nbytes;
    piece pieces[];
} batch;

typedef struct {
    const char *name;
    HcclComm comm;
    uint32_t remote_rank;
    const HcclOneSideOpDesc *descs;
    uint32_t num_descs;
    aclrtStream stream;
    int is_put;
} request;

/* ---- on the stream ---- */

static int remote_is_gone(batch *b, sim_stream *stream)
{
    if (sim_stream_pause(stream, b->retry_us))
        return 0; /* the stream was aborted */
    pthread_mutex_lock(&hccl_mutex);
    b->comm->async_error = HCCL_E_REMOTE;
    pthread_mutex_unlock(&hccl_mutex);
    sim_note("remote gone", "\"name\":\"%s\"", b->comm->name);
    return (int)b->settings.remote_code;
}

static int is_stale(const batch *b, const piece *p)
{
    return b->settings.stale_code &&
           (!board_is_live(&p->place) || !peer_region_is_live(b->comm->peer, &p->at.range));
}

static int copy_piece(batch *b, const piece *p, sim_stream *stream)
{
    if (!peer_is_alive(b->comm->peer))
        return remote_is_gone(b, stream);
    if (is_stale(b, p))
        return (int)b->settings.stale_code;
    for (uint64_t done = 0; done < p->nbytes && !sim_stream_stopped(stream); done += PIECE_BYTES) {
        const uint64_t left = p->nbytes - done;
        if (peer_copy(&p->at, p->remote + done, p->local + done,
                      left < PIECE_BYTES ? left : PIECE_BYTES, b->is_put)) {
            if (errno == ESRCH)
                return remote_is_gone(b, stream);
            return (int)(b->settings.stale_code ? b->settings.stale_code : b->settings.remote_code);
        }
    }
    return is_stale(b, p) ? (int)b->settings.stale_code : 0;
}

static void end(batch *b)
{
    pthread_mutex_lock(&hccl_mutex);
    if (!b->is_over) {
        b->is_over = 1;
        b->comm->transfers--;
        pthread_cond_broadcast(&hccl_changed);
    }
    pthread_mutex_unlock(&hccl_mutex);
}

static int run(void *argument, sim_stream *stream)
{
    batch *b = argument;
    int code = 0;
    if (b->unfolds && sim_duration_us(b->nbytes))
        sim_note("unfolds", "\"name\":\"%s\"", b->comm->name); /* takes time, so a test can abort it */
    if (b->unfolds && sim_stream_pause(stream, sim_duration_us(b->nbytes))) {
        b->is_cut = 1;
        return 0;
    }
    for (uint32_t i = 0; i < b->num_pieces && !code && !b->is_cut; i++) {
        code = copy_piece(b, &b->pieces[i], stream);
        b->num_done++;
        b->is_cut = sim_stream_stopped(stream) && b->num_done < b->num_pieces;
    }
    if (b->is_cut && b->unfolds)
        return 0;
    if (code)
        sim_note("transfer failed", "\"name\":\"%s\",\"code\":%d", b->comm->name, code);
    end(b); /* before a synchronization returns, as the program may then destroy b->comm */
    return code;
}

/* Copies the remaining pieces of an aborted batch, late in the time that the AICPU may take, and none after that time:
 * this thread may be late on a loaded machine. */
static void *finish_late(void *argument)
{
    batch *b = argument;
    hccl_wait_until(b->until_us - b->settings.unfold_us / 4);
    for (uint32_t i = b->num_done; i < b->num_pieces && hccl_now_us() < b->until_us; i++) {
        const piece *p = &b->pieces[i];
        if (peer_is_alive(b->comm->peer))
            peer_copy(&p->at, p->remote, p->local, p->nbytes, b->is_put);
    }
    pthread_mutex_lock(&hccl_mutex);
    b->comm->lingering--;
    pthread_cond_broadcast(&hccl_changed);
    pthread_mutex_unlock(&hccl_mutex);
    free(b);
    return NULL;
}

static void linger(batch *b)
{
    pthread_t thread;
    b->until_us = hccl_now_us() + b->settings.unfold_us;
    for (uint32_t i = b->num_done; i < b->num_pieces; i++)
        sim_linger(b->pieces[i].local, b->pieces[i].nbytes, b->until_us);
    pthread_mutex_lock(&hccl_mutex);
    b->comm->lingering++;
    b->comm->lingers_until = b->until_us;
    pthread_mutex_unlock(&hccl_mutex);
    sim_note("goes on", "\"name\":\"%s\"", b->comm->name);
    end(b);
    if (pthread_create(&thread, NULL, finish_late, b) == 0)
        pthread_detach(thread);
}

static void dispose(void *argument)
{
    batch *b = argument;
    if (b->is_cut && b->unfolds) {
        linger(b);
        return;
    }
    end(b);
    free(b);
}

/* ---- checks ---- */

static uint64_t unit_of(int32_t type)
{
    static const unsigned char sizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16, 0, 1, 1, 1, 1};
    return type < 0 || (size_t)type >= sizeof sizes ? 0 : sizes[type];
}

static HcclResult check_desc(hccl_call *call, comm *c, const HcclOneSideOpDesc *desc, uint32_t i,
                             piece *out)
{
    const hccl_settings settings = hccl_settings_now();
    const HcclResult outside = settings.aicpu ? HCCL_E_PARA : HCCL_E_INTERNAL;
    const uint64_t unit = unit_of(desc->dataType);
    const uint64_t local = (uint64_t)(uintptr_t)desc->localAddr;
    const uint64_t remote = (uint64_t)(uintptr_t)desc->remoteAddr;
    if (!unit || !desc->count || desc->count > UINT64_MAX / unit || !local || !remote)
        return hccl_refuse(call, HCCL_E_PARA,
                           "descriptor %u has count %llu of type %d from %#llx to %#llx", i,
                           (unsigned long long)desc->count, desc->dataType,
                           (unsigned long long)local, (unsigned long long)remote);
    const uint64_t nbytes = desc->count * unit;
    const local_region *mine = comm_local(c, local, nbytes);
    const remote_region *theirs = comm_remote(c, remote, nbytes);
    if (!theirs)
        return hccl_refuse(call, outside, "descriptor %u: remote [%#llx, +%llu) is in no region of "
                                          "the other end", i, (unsigned long long)remote,
                           (unsigned long long)nbytes);
    sim_memory *memory = mine ? sim_find(local, nbytes) : NULL;
    const int is_kept = memory && memory->serial == mine->memory->serial;
    if (memory)
        sim_memory_release(memory);
    if (!is_kept || (settings.stale_code && !board_is_live(&mine->range.place)))
        return hccl_refuse(call, outside, "descriptor %u: local [%#llx, +%llu) is %s", i,
                           (unsigned long long)local, (unsigned long long)nbytes,
                           mine ? "freed or deregistered since" : "in no region of the communicator");
    sim_linger_check(mine->memory->view + (local - mine->memory->address), nbytes, "transferred");
    *out = (piece){.local = mine->memory->view + (local - mine->memory->address), .remote = remote,
                   .nbytes = nbytes, .place = mine->range.place, .at = *theirs};
    return HCCL_SUCCESS;
}

static HcclResult check_call(hccl_call *call, const request *r, comm **out)
{
    const uint32_t most = sim_settings_now().product == SIM_950 ? 64 : 256;
    const HcclResult code = comm_find(call, r->comm, out);
    if (code)
        return code;
    if (!r->descs || !r->stream)
        return hccl_refuse(call, HCCL_E_PTR, "%s is NULL", r->descs ? "stream" : "descs");
    if (r->num_descs > most)
        return hccl_refuse(call, HCCL_E_PARA, "%u descriptors; there can be %u", r->num_descs, most);
    if (r->remote_rank >= TABLE_RANKS || r->remote_rank == (*out)->rank)
        return hccl_refuse(call, HCCL_E_PARA, "remoteRank is %u; it must be %u", r->remote_rank,
                           1 - (*out)->rank);
    if (!(*out)->peer || (*out)->busy)
        return hccl_refuse(call, HCCL_E_NOT_FOUND, "%s is not connected", (*out)->name);
    return HCCL_SUCCESS;
}

static HcclResult find_stream(hccl_call *call, const request *r, const comm *c, sim_stream **out)
{
    const int code = sim_stream_find(r->stream, out);
    if (code)
        return hccl_refuse(call, HCCL_E_RUNTIME, "the stream cannot be used: %d", code);
    if (sim_stream_device(*out) == c->device)
        return HCCL_SUCCESS;
    const int device = sim_stream_device(*out);
    sim_stream_release(*out);
    *out = NULL;
    return hccl_refuse(call, HCCL_E_PARA, "the stream is of device %d, the communicator of %d",
                       device, c->device);
}

/* Checks the descriptors up to the first refused one. The earlier ones are issued nevertheless, except with aicpu. */
static HcclResult gather(hccl_call *call, const request *r, comm *c, batch *b)
{
    HcclResult code = HCCL_SUCCESS;
    while (b->num_pieces < r->num_descs && !code) {
        const uint32_t i = b->num_pieces;
        code = check_desc(call, c, &r->descs[i], i, &b->pieces[i]);
        if (!code) {
            b->num_pieces++;
            b->nbytes += b->pieces[i].nbytes;
        }
    }
    if (code && b->settings.aicpu)
        b->num_pieces = 0;
    return code;
}

/* Applies a fault "partial": halves the batch, and refuses the call unless the code is of ACL. */
static HcclResult cut(hccl_call *call, batch *b, sim_fault *fault)
{
    *fault = call->call.fault;
    if (fault->kind != SIM_FAULT_PARTIAL)
        return HCCL_SUCCESS;
    b->num_pieces /= 2;
    b->nbytes = 0;
    for (uint32_t i = 0; i < b->num_pieces; i++)
        b->nbytes += b->pieces[i].nbytes;
    if (fault->code >= ACL_CODES)
        return HCCL_SUCCESS;
    fault->kind = SIM_FAULT_NONE;
    return hccl_refuse(call, (HcclResult)fault->code, "a fault after half of the batch");
}

static HcclResult issue(hccl_call *call, const request *r, char *name, batch **out,
                        sim_stream **stream, sim_fault *fault)
{
    comm *c = NULL;
    HcclResult code = check_call(call, r, &c);
    if (c)
        strcpy(name, c->name);
    if (code || !r->num_descs || (code = find_stream(call, r, c, stream)))
        return code;
    batch *b = calloc(1, sizeof *b + r->num_descs * sizeof *b->pieces);
    if (!b)
        return hccl_refuse(call, HCCL_E_MEMORY, "no memory");
    *b = (batch){.comm = c, .is_put = r->is_put, .settings = hccl_settings_now(),
                 .retry_us = nic_is_hccs(c) ? sim_settings_now().notify_us
                                            : sim_settings_now().retry_us};
    b->unfolds = c->product == SIM_A3 || b->settings.aicpu;
    code = gather(call, r, c, b);
    if (!code)
        code = cut(call, b, fault);
    if (code && !b->num_pieces) {
        free(b);
        return code;
    }
    c->transfers++;
    *out = b;
    return code;
}

/* Blocks as for a full stream, while the setting says so. */
static void block(const request *r)
{
    if (!sim_settings_now().issue_blocks)
        return;
    sim_note("blocks", "\"what\":\"%s\"", r->name);
    while (sim_settings_now().issue_blocks)
        hccl_wait_until(hccl_now_us() + 1000);
}

static HcclResult transfer(hccl_call *call, const request *r, uint64_t *nbytes, char *name)
{
    batch *b = NULL;
    sim_stream *stream = NULL;
    sim_fault fault = {SIM_FAULT_NONE, 0};
    block(r);
    pthread_mutex_lock(&hccl_mutex);
    HcclResult code = issue(call, r, name, &b, &stream, &fault);
    pthread_mutex_unlock(&hccl_mutex);
    if (b) {
        *nbytes = b->nbytes;
        const uint64_t waited = b->unfolds ? 0 : *nbytes; /* on the AICPU, `run` waits itself */
        const int refused = sim_stream_enqueue(stream, &fault, run, dispose, b, waited);
        if (refused && !code)
            code = hccl_refuse(call, HCCL_E_RUNTIME, "the stream refuses: %d", refused);
    }
    if (stream)
        sim_stream_release(stream);
    return code;
}

static HcclResult batch_call(const request *r)
{
    hccl_call call;
    uint64_t nbytes = 0;
    char name[128] = "";
    HcclResult code = hccl_enter(&call, r->name);
    if (!code)
        code = transfer(&call, r, &nbytes, name);
    return hccl_leave(&call, code,
                      "\"name\":\"%s\",\"remote_rank\":%u,\"descriptors\":%u,\"bytes\":%llu,"
                      "\"stream\":%llu",
                      name, r->remote_rank, r->num_descs, (unsigned long long)nbytes,
                      (unsigned long long)(uintptr_t)r->stream);
}

HcclResult HcclBatchPut(HcclComm handle, uint32_t remoteRank, HcclOneSideOpDesc *descs,
                        uint32_t numDescs, aclrtStream stream)
{
    const request r = {"HcclBatchPut", handle, remoteRank, descs, numDescs, stream, 1};
    return batch_call(&r);
}

HcclResult HcclBatchGet(HcclComm handle, uint32_t remoteRank, HcclOneSideOpDesc *descs,
                        uint32_t numDescs, aclrtStream stream)
{
    const request r = {"HcclBatchGet", handle, remoteRank, descs, numDescs, stream, 0};
    return batch_call(&r);
}
