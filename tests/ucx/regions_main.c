/* Checks that nothing stays registered after UCX has refused memory. */
#include "ucx/region.c"

#include <unistd.h>

#include "check.h"

static kvn_ucs_status of_map, of_pack; /* results of the calls */
static int mapped, packed;             /* current numbers */

static kvn_ucs_status map_memory(kvn_ucp_context_h context, const kvn_ucp_mem_map_params *params, kvn_ucp_mem_h *out)
{
    (void)context;
    CHECK(params->length == 4096 || params->length == 8192);
    *out = (kvn_ucp_mem_h)&mapped;
    mapped += of_map == KVN_UCS_OK;
    return of_map;
}

static kvn_ucs_status unmap_memory(kvn_ucp_context_h context, kvn_ucp_mem_h memory)
{
    (void)context;
    CHECK(memory == (kvn_ucp_mem_h)&mapped);
    mapped--;
    return KVN_UCS_OK;
}

static kvn_ucs_status pack_key(kvn_ucp_context_h context, kvn_ucp_mem_h memory, void **key, size_t *nbytes)
{
    (void)context, (void)memory;
    *key = &packed;
    *nbytes = sizeof packed;
    packed += of_pack == KVN_UCS_OK;
    return of_pack;
}

static void release_key(void *key)
{
    CHECK(key == &packed);
    packed--;
}

static const char *text_of(kvn_ucs_status status)
{
    (void)status;
    return "refused";
}

/* A refusal in any step leaves nothing. The next, successful registration lasts until its last user ends. */
static void nothing_left(void)
{
    static const kvn_ucs_status refusals[][2] = {
        {KVN_UCS_ERR_NO_MEMORY, KVN_UCS_OK}, {KVN_UCS_OK, KVN_UCS_ERR_NO_MEMORY}, {KVN_UCS_OK, KVN_UCS_OK}};
    kvn_ucx_library library = {.calls = {.ucs_status_string = text_of}};
    const kvn_ucx calls = {.ucp_mem_map = map_memory, .ucp_mem_unmap = unmap_memory,
                           .ucp_rkey_pack = pack_key, .ucp_rkey_buffer_release = release_key};
    kvn_ucx_worker worker = {.library = &library, .calls = &calls, .pid = getpid(), .num_holders = 1};
    kvn_ucx_regions regions;
    kvn_ucx_region *used[2];
    kvn_failure failure;

    kvn_ucx_regions_init(&regions, &worker);
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const bool is_refused = refusals[i][0] != KVN_UCS_OK || refusals[i][1] != KVN_UCS_OK;

        of_map = refusals[i][0];
        of_pack = refusals[i][1];
        for (int user = 0; user < 2; user++) {
            const int status = kvn_ucx_region_use(&regions, 4096, 4096, KVN_UCS_MEMORY_HOST, &used[user], &failure);
            CHECK(status == (is_refused ? KVN_NO_MEMORY : KVN_OK));
            CHECK(mapped == !is_refused && packed == !is_refused);
        }
    }
    CHECK(used[0] == used[1]);
    kvn_ucx_region_drop(&regions, used[0]);
    CHECK(mapped == 1 && packed == 1);
    /* A longer range at the same address, or of another kind, is not the same. */
    for (int kind = KVN_UCS_MEMORY_HOST; kind <= KVN_UCS_MEMORY_CUDA; kind++) {
        CHECK(kvn_ucx_region_use(&regions, 4096, kind == KVN_UCS_MEMORY_HOST ? 8192 : 4096, kind, &used[0], &failure) ==
              KVN_OK);
        CHECK(used[0] != used[1] && mapped == 2 && packed == 2);
        kvn_ucx_region_drop(&regions, used[0]);
        CHECK(mapped == 1 && packed == 1);
    }
    kvn_ucx_region_drop(&regions, used[1]);
    CHECK(mapped == 0 && packed == 0 && !regions.first);
    kvn_ucx_regions_fini(&regions);
    CHECK(atomic_load(&worker.num_holders) == 1);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {{"nothing_left", nothing_left}};

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
