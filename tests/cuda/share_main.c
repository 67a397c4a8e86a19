/* Checks that imported memory is released if its record cannot be stored. */
#include "cuda/share.c"

#include <errno.h>

#include "check.h"

static int unmapped, freed, closed;

int kvn_device_enter(const kvn_device *device, void **previous, kvn_failure *failure)
{
    (void)device, (void)previous, (void)failure;
    return KVN_OK;
}

void kvn_device_leave(const kvn_device *device, void *previous) { (void)device, (void)previous; }

int kvn_cuda_reach_add(const kvn_device *device, uint64_t address, uint64_t nbytes, bool is_far, kvn_failure *failure)
{
    (void)device, (void)address, (void)nbytes, (void)is_far;
    return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory");
}

void kvn_cuda_reach_remove(const kvn_device *device, uint64_t address) { (void)device, (void)address; }

int kvn_cuda_give_access(const kvn_device *device, CUdeviceptr address, uint64_t nbytes, kvn_failure *failure)
{
    (void)device, (void)address, (void)nbytes;
    return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory");
}

static CUresult note_unmap(CUdeviceptr address, size_t nbytes)
{
    (void)address, (void)nbytes;
    unmapped++;
    return KVN_CUDA_OK;
}

static CUresult note_free(CUdeviceptr address, size_t nbytes)
{
    (void)address, (void)nbytes;
    freed++;
    return KVN_CUDA_OK;
}

static CUresult note_close(CUdeviceptr address)
{
    (void)address;
    closed++;
    return KVN_CUDA_OK;
}

static void gone_if_not_noted(void)
{
    static kvn_cuda_library library;
    const kvn_device device = {.runtime = &library};
    const kvn_cuda_imported by_descriptor = {.address = 4096, .nbytes = 64, .num_mapped = 64},
                            by_handle = {.address = 4096, .nbytes = 64, .is_legacy = true};
    kvn_failure failure;

    library.calls.cuMemUnmap = note_unmap;
    library.calls.cuMemAddressFree = note_free;
    library.calls.cuIpcCloseMemHandle = note_close;
    CHECK(note_import(&device, &by_descriptor, false, &failure) == KVN_NO_MEMORY);
    CHECK(unmapped == 1 && freed == 1 && closed == 0);
    CHECK(note_import(&device, &by_handle, false, &failure) == KVN_NO_MEMORY);
    CHECK(unmapped == 1 && freed == 1 && closed == 1);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {{"gone_if_not_noted", gone_if_not_noted}};

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
