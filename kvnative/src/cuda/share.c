/* Exports device memory to other processes, and maps the memory that they export. */
#include "cuda/share.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/memory.h"
#include "cuda/reach.h"

/* The driver's attributes of the allocation that holds an address. */
typedef struct allocation {
    unsigned kind; /* 0: unknown */
    unsigned is_managed;
    int has_legacy_handle;
    unsigned handle_types;
    unsigned long long id;
    CUdeviceptr start;
    size_t nbytes;
} allocation;

static int look_up(const kvn_device *device, uint64_t address, allocation *out, kvn_failure *failure)
{
    int attributes[] = {
        KVN_CUDA_POINTER_MEMORY_TYPE,  KVN_CUDA_POINTER_IS_MANAGED, KVN_CUDA_POINTER_IS_LEGACY_IPC,
        KVN_CUDA_POINTER_HANDLE_TYPES, KVN_CUDA_POINTER_BUFFER_ID,  KVN_CUDA_POINTER_RANGE_START,
        KVN_CUDA_POINTER_RANGE_SIZE,
    };
    void *values[] = {&out->kind, &out->is_managed, &out->has_legacy_handle, &out->handle_types,
                      &out->id,   &out->start,      &out->nbytes};

    *out = (allocation){0};
    if (KVN_CUDA_CALL(device, failure, cuPointerGetAttributes, sizeof attributes / sizeof *attributes, attributes,
                      values, address) != KVN_OK)
        return failure->status;
    if (out->nbytes == 0 && out->kind == KVN_CUDA_MEMORY_DEVICE) /* some drivers report it only here */
        kvn_cuda_of(device)->cuMemGetAddressRange_v2(&out->start, &out->nbytes, address);
    return KVN_OK;
}

static bool holds(uint64_t start, uint64_t size, uint64_t address, uint64_t nbytes)
{
    return address >= start && address - start <= size && nbytes <= size - (address - start);
}

/* ---- the owner ---- */

static int export_descriptor(const kvn_device *device, CUmemGenericAllocationHandle handle, int *out,
                             kvn_failure *failure)
{
    if (KVN_CUDA_CALL(device, failure, cuMemExportToShareableHandle, out, handle,
                      KVN_CUDA_HANDLE_FILE_DESCRIPTOR, 0) != KVN_OK)
        return failure->status;
    fcntl(*out, F_SETFD, FD_CLOEXEC); /* programs that this one executes must not keep the memory */
    return KVN_OK;
}

static int refuse_parts(uint64_t address, uint64_t nbytes, uint64_t start, uint64_t size,
                        kvn_failure *failure)
{
    return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                    "0x%" PRIx64 "+%" PRIu64 " is not inside one allocation (0x%" PRIx64 "+%" PRIu64
                    "), and peers map them one by one: register each by itself",
                    address, nbytes, start, size);
}

/* Returns true for memory of a pool (cudaMallocAsync). Old drivers do not know the attribute. */
static bool is_of_pool(const kvn_device *device, uint64_t address)
{
    int asked[] = {KVN_CUDA_POINTER_POOL};
    void *pool = NULL, *values[] = {&pool};

    return kvn_cuda_of(device)->cuPointerGetAttributes(1, asked, values, address) == KVN_CUDA_OK && pool;
}

/* Finds the piece that holds an address, and returns a failure unless peers can map it. */
static int find_piece(const kvn_device *device, uint64_t address, kvn_cuda_piece *out, kvn_failure *failure)
{
    allocation found;
    CUdeviceptr start = 0;
    size_t nbytes = 0;
    bool has_pool;

    if (look_up(device, address, &found, failure) != KVN_OK)
        return failure->status;
    if (found.kind != KVN_CUDA_MEMORY_DEVICE || found.is_managed)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "0x%" PRIx64 " is not memory that was allocated on a GPU",
                        address);
    has_pool = is_of_pool(device, address);
    if (has_pool || !(found.handle_types & KVN_CUDA_HANDLE_FILE_DESCRIPTOR))
        return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                        "0x%" PRIx64 " was allocated so that no peer can map it (%s): of torch 2.5 or later unset "
                        "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC, or set "
                        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False,backend:native",
                        address, has_pool ? "it is of a pool, as cudaMallocAsync makes it"
                                            : "its handle types lack the POSIX file descriptor");
    /* The attributes name the whole range that was reserved. */
    if (KVN_CUDA_CALL(device, failure, cuMemGetAddressRange_v2, &start, &nbytes, address) != KVN_OK)
        return failure->status;
    if (!holds(start, nbytes, address, 1))
        return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                        "the driver does not say which mapping holds 0x%" PRIx64
                        ": use kvplan.transport=tcp, or set "
                        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
                        address);
    *out = (kvn_cuda_piece){start, nbytes, found.id};
    return KVN_OK;
}

/* Lists the pieces of a range, the first of which holds `address`. */
static int export_pieces(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_cuda_exported *out,
                         kvn_failure *failure)
{
    const uint64_t last = address + nbytes - 1;
    size_t room = 0;
    kvn_cuda_piece piece;

    do {
        if (find_piece(device, out->num_pieces ? out->address + out->nbytes : address, &piece, failure) != KVN_OK)
            return failure->status;
        if (out->num_pieces == room) {
            const size_t more = room ? 2 * room : 8;
            kvn_cuda_piece *larger = realloc(out->pieces, more * sizeof *larger);
            if (!larger)
                return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory to note the pieces of an allocation");
            out->pieces = larger;
            room = more;
        }
        if (out->num_pieces == 0)
            out->address = piece.address;
        out->pieces[out->num_pieces++] = piece;
        out->nbytes = piece.address + piece.nbytes - out->address;
    } while (last - out->address >= out->nbytes);
    return KVN_OK;
}

static int export_found(const kvn_device *device, uint64_t address, uint64_t nbytes,
                        kvn_cuda_exported *out, kvn_failure *failure)
{
    kvn_cuda_allocated ours;
    allocation found;

    if (kvn_cuda_allocated_at(device, address, &ours)) {
        if (!holds(ours.address, ours.nbytes, address, nbytes))
            return refuse_parts(address, nbytes, ours.address, ours.nbytes, failure);
        out->address = ours.address;
        out->nbytes = ours.nbytes;
        return export_descriptor(device, ours.handle, &out->fd, failure);
    }
    if (look_up(device, address, &found, failure) != KVN_OK)
        return failure->status;
    if (!found.has_legacy_handle || found.is_managed)
        return export_pieces(device, address, nbytes, out, failure);
    if (!holds(found.start, found.nbytes, address, nbytes))
        return refuse_parts(address, nbytes, found.start, found.nbytes, failure);
    out->address = found.start;
    out->nbytes = found.nbytes;
    return KVN_CUDA_CALL(device, failure, cuIpcGetMemHandle, &out->handle, found.start);
}

int kvn_cuda_export(const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_cuda_exported *out,
                    kvn_failure *failure)
{
    void *previous = NULL;
    int status = kvn_device_enter(device, &previous, failure);

    *out = (kvn_cuda_exported){.fd = -1};
    if (status == KVN_OK) {
        status = export_found(device, address, nbytes, out, failure);
        kvn_device_leave(device, previous);
    }
    return status;
}

static int export_piece(const kvn_device *device, const kvn_cuda_piece *piece, int *fd, kvn_failure *failure)
{
    CUmemGenericAllocationHandle handle;
    allocation found;
    int status = look_up(device, piece->address, &found, failure);

    if (status != KVN_OK)
        return status;
    if (found.id != piece->id)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "0x%" PRIx64 "+%" PRIu64 " was unmapped or replaced since it was registered: register it again",
                        piece->address, piece->nbytes);
    if (KVN_CUDA_CALL(device, failure, cuMemRetainAllocationHandle, &handle, (void *)(uintptr_t)piece->address) !=
        KVN_OK)
        return failure->status;
    status = export_descriptor(device, handle, fd, failure);
    kvn_cuda_of(device)->cuMemRelease(handle); /* the descriptor keeps the memory */
    return status;
}

int kvn_cuda_export_piece(const kvn_device *device, const kvn_cuda_piece *piece, int *fd, kvn_failure *failure)
{
    void *previous = NULL;
    int status = kvn_device_enter(device, &previous, failure);

    *fd = -1;
    if (status == KVN_OK) {
        status = export_piece(device, piece, fd, failure);
        kvn_device_leave(device, previous);
    }
    return status;
}

/* ---- a peer ---- */

static int uuid_of(const kvn_device *device, int ordinal, CUdevice *number, kvn_cuda_uuid *out,
                   kvn_failure *failure)
{
    bool is_slice;

    if (KVN_CUDA_CALL(device, failure, cuDeviceGet, number, ordinal) != KVN_OK)
        return failure->status;
    return kvn_cuda_library_uuid(device->runtime, *number, out, &is_slice, failure);
}

static int check_access(const kvn_device *device, CUdevice from, CUdevice to, kvn_failure *failure)
{
    int can = 0;

    if (KVN_CUDA_CALL(device, failure, cuDeviceCanAccessPeer, &can, from, to) != KVN_OK || can)
        return can ? KVN_OK : failure->status;
    return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                    "device %d cannot reach the memory of device %d: there is no peer access between the two "
                    "(nvidia-smi topo -p2p r shows where there is): use kvplan.transport=tcp",
                    from, to);
}

int kvn_cuda_check_reach(const kvn_device *device, const kvn_cuda_uuid *uuid, bool both_ways, kvn_cuda_gpu *out,
                         kvn_failure *failure)
{
    CUdevice ours, theirs;
    kvn_cuda_uuid found;
    int count = 0;

    if (kvn_device_check_process(device, failure) != KVN_OK ||
        KVN_CUDA_CALL(device, failure, cuDeviceGetCount, &count) != KVN_OK ||
        uuid_of(device, device->id, &ours, &found, failure) != KVN_OK)
        return failure->status;
    *out = KVN_CUDA_SAME_GPU;
    if (memcmp(&found, uuid, sizeof found) == 0)
        return KVN_OK;
    *out = KVN_CUDA_OTHER_GPU;
    for (int i = 0; i < count; i++) {
        if (uuid_of(device, i, &theirs, &found, failure) != KVN_OK)
            return failure->status;
        if (memcmp(&found, uuid, sizeof found) != 0)
            continue;
        if (check_access(device, ours, theirs, failure) != KVN_OK)
            return failure->status;
        return both_ways ? check_access(device, theirs, ours, failure) : KVN_OK;
    }
    *out = KVN_CUDA_HIDDEN_GPU;
    return KVN_OK;
}

int kvn_cuda_import_begin(const kvn_device *device, uint64_t nbytes, kvn_cuda_imported *out, kvn_failure *failure)
{
    CUdeviceptr address = 0;
    void *previous = NULL;
    int status = kvn_device_enter(device, &previous, failure);

    if (status == KVN_OK) {
        status = KVN_CUDA_CALL(device, failure, cuMemAddressReserve, &address, nbytes, 0, 0, 0);
        kvn_device_leave(device, previous);
    }
    *out = (kvn_cuda_imported){.address = address, .nbytes = nbytes};
    return status;
}

static int import_piece(const kvn_device *device, kvn_cuda_imported *imported, int fd, uint64_t nbytes,
                        kvn_failure *failure)
{
    CUmemGenericAllocationHandle handle;
    int status;

    if (nbytes > imported->nbytes - imported->num_mapped)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "the allocation has %" PRIu64 " bytes as its owner says, and its pieces have more",
                        imported->nbytes);
    if (KVN_CUDA_CALL(device, failure, cuMemImportFromShareableHandle, &handle, (void *)(intptr_t)fd,
                      KVN_CUDA_HANDLE_FILE_DESCRIPTOR) != KVN_OK)
        return failure->status;
    status = KVN_CUDA_CALL(device, failure, cuMemMap, imported->address + imported->num_mapped, nbytes, 0, handle, 0);
    if (status == KVN_OK)
        imported->num_mapped += nbytes;
    kvn_cuda_of(device)->cuMemRelease(handle); /* the mapping keeps the memory */
    return status;
}

int kvn_cuda_import_piece(const kvn_device *device, kvn_cuda_imported *imported, int fd, uint64_t nbytes,
                          kvn_failure *failure)
{
    void *previous = NULL;
    int status = kvn_device_enter(device, &previous, failure);

    if (status == KVN_OK) {
        status = import_piece(device, imported, fd, nbytes, failure);
        kvn_device_leave(device, previous);
    }
    return status;
}

int kvn_cuda_import_end(const kvn_device *device, kvn_cuda_imported *imported, bool is_far, kvn_failure *failure)
{
    void *previous = NULL;
    int status;

    if (imported->num_mapped != imported->nbytes)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "the allocation has %" PRIu64 " bytes as its owner says, and its pieces have %" PRIu64,
                        imported->nbytes, imported->num_mapped);
    status = kvn_device_enter(device, &previous, failure);
    if (status == KVN_OK) {
        status = kvn_cuda_give_access(device, imported->address, imported->nbytes, failure);
        kvn_device_leave(device, previous);
    }
    return status == KVN_OK ? kvn_cuda_reach_add(device, imported->address, imported->nbytes, is_far, failure)
                            : status;
}

/* Lets the copy kernel use imported memory. */
static int note_import(const kvn_device *device, const kvn_cuda_imported *imported, bool is_far,
                       kvn_failure *failure)
{
    kvn_failure ignored;
    const int status = kvn_cuda_reach_add(device, imported->address, imported->nbytes, is_far, failure);

    if (status != KVN_OK)
        kvn_cuda_unmap(device, imported, &ignored);
    return status;
}

static int import_handle(const kvn_device *device, const kvn_cuda_ipc_memory *handle,
                         kvn_cuda_imported *out, kvn_failure *failure)
{
    allocation found;
    int status;
    CUdeviceptr at = 0;

    if (KVN_CUDA_CALL(device, failure, cuIpcOpenMemHandle_v2, &at, *handle, KVN_CUDA_IPC_LAZY_PEER_ACCESS) != KVN_OK)
        return failure->status;
    out->address = at;
    status = look_up(device, at, &found, failure);
    /* Check the size that the peer claims: a copy beyond the end would break this context. */
    if (status == KVN_OK && !holds(found.start, found.nbytes, at, out->nbytes))
        status = kvn_fail(failure, KVN_INVALID, 0,
                          "the allocation has %zu bytes, and not %" PRIu64 " as its owner says",
                          found.nbytes, out->nbytes);
    if (status != KVN_OK)
        kvn_cuda_of(device)->cuIpcCloseMemHandle(at);
    return status;
}

int kvn_cuda_import_handle(const kvn_device *device, const kvn_cuda_ipc_memory *handle, uint64_t nbytes,
                           bool is_far, kvn_cuda_imported *out, kvn_failure *failure)
{
    void *previous = NULL;
    int status = kvn_device_enter(device, &previous, failure);

    *out = (kvn_cuda_imported){.nbytes = nbytes, .is_legacy = true};
    if (status == KVN_OK) {
        status = import_handle(device, handle, out, failure);
        kvn_device_leave(device, previous);
    }
    return status == KVN_OK ? note_import(device, out, is_far, failure) : status;
}

/* Access is never disabled again: the program may have enabled it too, or use it now. */
static int enable_access(const kvn_device *device, CUcontext context, kvn_failure *failure)
{
    const CUresult code = kvn_cuda_of(device)->cuCtxEnablePeerAccess(context, 0);

    return code == KVN_CUDA_PEER_ACCESS_ALREADY_ENABLED
               ? KVN_OK
               : kvn_cuda_ended(device, "cuCtxEnablePeerAccess", code, failure);
}

int kvn_cuda_import_here(const kvn_device *device, const kvn_device *owner, uint64_t address, uint64_t nbytes,
                         kvn_cuda_imported *out, kvn_failure *failure)
{
    void *previous = NULL;
    int status;

    if (owner->id == device->id)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                        "the program's memory is in another context of device %d: give both engines the same "
                        "kvplan.cuda_context",
                        (int)device->id);
    status = kvn_device_enter(device, &previous, failure);
    if (status != KVN_OK)
        return status;
    status = enable_access(device, owner->context, failure);
    kvn_device_leave(device, previous);
    *out = (kvn_cuda_imported){.address = address, .nbytes = nbytes, .context = owner->context};
    return status == KVN_OK ? kvn_cuda_reach_add_context(device, owner->context, failure) : status;
}

int kvn_cuda_unmap(const kvn_device *device, const kvn_cuda_imported *imported, kvn_failure *failure)
{
    void *previous = NULL;
    int status;

    if (imported->context) {
        kvn_cuda_reach_remove_context(device, imported->context);
        return KVN_OK;
    }
    status = kvn_device_enter(device, &previous, failure);
    if (status != KVN_OK)
        return status;
    kvn_cuda_reach_remove(device, imported->address);
    if (imported->is_legacy) {
        status = KVN_CUDA_CALL(device, failure, cuIpcCloseMemHandle, imported->address);
    } else {
        if (imported->num_mapped)
            status = KVN_CUDA_CALL(device, failure, cuMemUnmap, imported->address, imported->num_mapped);
        if (status == KVN_OK)
            status = KVN_CUDA_CALL(device, failure, cuMemAddressFree, imported->address, imported->nbytes);
    }
    kvn_device_leave(device, previous);
    return status;
}
