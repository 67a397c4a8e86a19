/* Checks of a stream's resources after its end, with a driver that finishes work at once. */
#include "cuda/launch.c"

#include "check.h"

static unsigned num_allocated, num_destroyed;

static CUresult allocate_host(void **address, size_t nbytes, unsigned flags)
{
    (void)flags;
    num_allocated++;
    *address = calloc(1, nbytes);
    return *address ? KVN_CUDA_OK : KVN_CUDA_OUT_OF_MEMORY;
}

static CUresult free_host(void *address)
{
    free(address);
    return KVN_CUDA_OK;
}

static CUresult launch(CUfunction kernel, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                       unsigned threads_z, unsigned shared, CUstream stream, void **parameters, void **extra)
{
    (void)kernel, (void)x, (void)y, (void)z, (void)threads_x, (void)threads_y, (void)threads_z;
    (void)shared, (void)stream, (void)parameters, (void)extra;
    return KVN_CUDA_OK;
}

static CUresult query(CUstream stream)
{
    (void)stream;
    return KVN_CUDA_OK;
}

static CUresult destroy(CUstream stream)
{
    (void)stream;
    num_destroyed++;
    return KVN_CUDA_OK;
}

/* The driver reuses the handle for the next stream, which inherits nothing. No memory of launches is
 * leaked. */
static void dropped_stream(void)
{
    static const kvn_cuda_library library = {.calls = {.cuMemHostAlloc = allocate_host,
                                                       .cuMemFreeHost = free_host,
                                                       .cuLaunchKernel = launch,
                                                       .cuStreamQuery = query,
                                                       .cuStreamDestroy_v2 = destroy}};
    static kvn_cuda_device state;
    const kvn_device device = {.runtime = &library, .state = &state};
    const kvn_stream stream = &state;
    const uint64_t nowhere = 0, nbytes = 8;
    const kvn_columns batch = {.dst = &nowhere, .src = &nowhere, .nbytes = &nbytes, .count = 1};
    kvn_failure failure;

    CHECK(kvn_cuda_launcher_open(&device, &failure) == KVN_OK);
    for (unsigned i = 0; i < 200; i++) {
        CHECK(kvn_cuda_can_stop(&device, stream));
        CHECK(kvn_cuda_launch(&device, stream, 1, batch, &failure) == KVN_OK);
        CHECK(kvn_cuda_launcher_note(&device, stream, &failure) == KVN_OK);
        CHECK(!kvn_cuda_can_stop(&device, stream));
        CHECK(kvn_cuda_drop(&device, stream, &failure) == KVN_OK && num_destroyed == i + 1);
    }
    CHECK(num_allocated == 1);
    CHECK(!kvn_cuda_launcher_close(&device));
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {{"dropped_stream", dropped_stream}};

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
