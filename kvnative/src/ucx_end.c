/* An end is made, described and destroyed here; ucx_turn.c and ucx_attend.c drive it. */
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ucx_address.h"
#include "ucx_inside.h"
#include "ucx_log.h"
#include "ucx_settings.h"

/* For endpoints to be closed, all together: and before that, for peers to be told. */
#define CLOSE_NS 1000000000
#define FAREWELL_NS 200000000
static int open_context(kvn_ucx_end *end, const kvn_ucx_settings *settings, const char *name,
                        kvn_failure *failure)
{
    kvn_ucp_config *config;
    const bool is_one_sided = end->mode == KVN_UCX_ONE_SIDED;
    kvn_ucp_params params = {
        .field_mask = KVN_UCP_PARAM_FEATURES | KVN_UCP_PARAM_MT_WORKERS_SHARED |
                      (*name ? KVN_UCP_PARAM_NAME : 0),
        .features = KVN_UCP_FEATURE_AM | KVN_UCP_FEATURE_WAKEUP |
                    (is_one_sided ? KVN_UCP_FEATURE_RMA : 0),
        .mt_workers_shared = is_one_sided, /* memory is mapped without the turn */
        .name = name,
    };
    kvn_ucs_status status = end->calls->ucp_config_read(NULL, NULL, &config);

    if (status != KVN_UCS_OK)
        return kvn_ucx_fail(end->library, "ucp_config_read", status, failure);
    if (kvn_ucx_settings_apply(settings, config, failure) == KVN_OK) {
        status = end->calls->ucp_init_version(KVN_UCP_API_MAJOR, KVN_UCP_API_MINOR, &params, config,
                                              &end->context);
        if (status != KVN_UCS_OK)
            kvn_ucx_fail(end->library, "ucp_init", status, failure);
    }
    end->calls->ucp_config_release(config);
    return failure->status;
}

/* The lines of UCX's own description that end in "-- tcp/eth0". */
static void list_transports(kvn_ucx_end *end)
{
    char *text = NULL, *rest = NULL;
    size_t nbytes, used = 0;
    FILE *file = open_memstream(&text, &nbytes);

    if (!file)
        return;
    end->calls->ucp_context_print_info(end->context, file);
    fclose(file);
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        const char *found = strstr(line, " -- ");
        if (found && strstr(line, "resource") && used < sizeof end->transports)
            used += (size_t)snprintf(end->transports + used, sizeof end->transports - used, "%s%s",
                                     used ? " " : "", found + 4);
    }
    free(text);
}

/* Its files are those of the sockets, and nothing has to be asked for: uct_tcp_iface has no arming. */
static bool is_tcp_alone(const kvn_ucx_end *end)
{
    char copy[sizeof end->transports], *rest = NULL;

    memcpy(copy, end->transports, sizeof copy);
    for (char *name = strtok_r(copy, " ", &rest); name; name = strtok_r(NULL, " ", &rest))
        if (strncmp(name, "tcp/", 4) != 0)
            return false;
    return *end->transports != 0 && strlen(end->transports) < sizeof end->transports - 1; /* all of it */
}

static int open_worker(kvn_ucx_end *end, kvn_ucp_worker_h *worker, int *fd, kvn_failure *failure)
{
    /* One thread at a time has the turn, but not always the same. */
    kvn_ucp_worker_params params = {
        .field_mask = KVN_UCP_WORKER_PARAM_THREAD_MODE | KVN_UCP_WORKER_PARAM_FLAGS,
        .thread_mode = KVN_UCS_THREAD_MODE_SERIALIZED,
        .flags = KVN_UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK,
    };
    struct epoll_event watch = {.events = EPOLLIN};
    kvn_ucs_status status = end->calls->ucp_worker_create(end->context, &params, worker);

    if (status != KVN_UCS_OK)
        return kvn_ucx_fail(end->library, "ucp_worker_create", status, failure);
    status = end->calls->ucp_worker_get_efd(*worker, fd);
    if (status != KVN_UCS_OK)
        return kvn_ucx_fail(end->library, "ucp_worker_get_efd", status, failure);
    if (epoll_ctl(end->worker_fd, EPOLL_CTL_ADD, *fd, &watch) != 0)
        return kvn_fail(failure, KVN_FAILED, errno, "no file for the events of a UCX worker: %s",
                        strerror(errno));
    return KVN_OK;
}

static int open_workers(kvn_ucx_end *end, kvn_failure *failure)
{
    kvn_ucp_address *address;
    size_t nbytes;

    end->worker_fd = epoll_create1(EPOLL_CLOEXEC);
    if (end->worker_fd < 0)
        return kvn_fail(failure, KVN_FAILED, errno, "no file for the events of UCX workers: %s",
                        strerror(errno));
    if (open_worker(end, &end->sender, &end->sender_fd, failure) != KVN_OK ||
        open_worker(end, &end->receiver, &end->receiver_fd, failure) != KVN_OK)
        return failure->status;
    list_transports(end);
    end->shows_events = is_tcp_alone(end);
    kvn_ucs_status status =
        end->calls->ucp_worker_get_address(end->receiver, &address, &nbytes);
    if (status != KVN_UCS_OK)
        return kvn_ucx_fail(end->library, "ucp_worker_get_address", status, failure);
    end->address_nbytes = kvn_ucx_address_wrap(end, address, nbytes, &end->address);
    end->calls->ucp_worker_release_address(end->receiver, address);
    if (!end->address)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for the address of an end");
    return KVN_OK;
}

/* UCX takes 13 MiB for an end from malloc, by 4 and by 2, on whichever threads drive it. Once such a block
 * was freed malloc takes them from its arenas, and those keep twice as much each: 69 MB after 300 engines. */
static void give_back(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

static void dismantle(kvn_ucx_end *end)
{
    free(end->address);
    if (end->sender)
        end->calls->ucp_worker_destroy(end->sender);
    if (end->receiver)
        end->calls->ucp_worker_destroy(end->receiver);
    if (end->worker_fd >= 0)
        close(end->worker_fd);
    for (kvn_ucx_part *it = end->parts, *next; it; it = next) {
        next = it->next;
        it->destroy(it);
    }
    if (end->context)
        end->calls->ucp_cleanup(end->context);
    kvn_ucx_turn_fini(end);
    if (end->is_here)
        munmap((void *)(uintptr_t)end->is_here, sizeof *end->is_here);
    free(end);
    give_back();
}

/* Asking the system who this is takes as long as a tenth of a small transfer. */
static void mark_here(kvn_ucx_end *end)
{
    void *page = mmap(NULL, sizeof *end->is_here, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    end->pid = getpid();
    if (page == MAP_FAILED)
        return;
    if (madvise(page, sizeof *end->is_here, MADV_WIPEONFORK) != 0) {
        munmap(page, sizeof *end->is_here);
        return;
    }
    *(bool *)page = true;
    end->is_here = page;
}

int kvn_ucx_end_create(const kvn_ucx_library *library, kvn_ucx_mode mode,
                       const kvn_ucx_setting *settings, size_t num_settings, const char *name,
                       kvn_ucx_end **out, kvn_failure *failure)
{
    kvn_ucx_settings all = {
        .library = library, .mode = mode, .given = settings, .num_given = num_settings};
    kvn_ucx_end *end = calloc(1, sizeof *end);

    if (!end)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for an end of UCX");
    failure->status = KVN_OK;
    end->library = library;
    end->calls = &library->calls;
    end->mode = mode;
    mark_here(end);
    end->worker_fd = -1;
    atomic_init(&end->holders, 1);
    kvn_ucx_log_clear();
    kvn_ucx_turn_init(end);
    kvn_ucx_hello_install(end);
    if (kvn_ucx_settings_export(&all, failure) == KVN_OK &&
        open_context(end, &all, name, failure) == KVN_OK &&
        open_workers(end, failure) == KVN_OK && kvn_ucx_table_install(end, failure) == KVN_OK)
        kvn_ucx_turn_start(end, failure);
    kvn_ucx_settings_restore(&all);
    if (failure->status != KVN_OK) {
        kvn_ucx_log_append(failure->message, sizeof failure->message);
        dismantle(end);
        return failure->status;
    }
    *out = end;
    return KVN_OK;
}

static bool are_endpoints_closed(void *context)
{
    const kvn_ucx_end *end = context;
    return atomic_load(&end->num_endpoints) == 0;
}

static void fail_links(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    (void)errand;
    end->is_closed = true;
    for (size_t i = 0; i < KVN_UCX_TABLE_SIZE; i++)
        for (kvn_ucx_link *it = end->table[i]; it; it = it->next)
            kvn_ucx_link_close(it, "its engine was closed");
}

static void leave_unsaid(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    (void)errand;
    kvn_ucx_leave_unsaid(end);
}

void kvn_ucx_end_close(kvn_ucx_end *end)
{
    kvn_ucx_errand first = {.run = fail_links}, last = {.run = leave_unsaid};

    if (kvn_ucx_end_is_forked(end))
        return;
    kvn_ucx_do_and_wait(end, &first);
    if (!kvn_ucx_attend(end, are_endpoints_closed, end, kvn_now_ns() + FAREWELL_NS)) {
        kvn_ucx_do_and_wait(end, &last);
        kvn_ucx_attend(end, are_endpoints_closed, end, kvn_now_ns() + CLOSE_NS);
    }
    kvn_ucx_turn_stop(end);
}

void kvn_ucx_end_hold(kvn_ucx_end *end) { atomic_fetch_add(&end->holders, 1); }

/* No link is left, nor an endpoint, since those hold it. */
void kvn_ucx_end_release(kvn_ucx_end *end)
{
    if (atomic_fetch_sub(&end->holders, 1) == 1 && !kvn_ucx_end_is_forked(end))
        dismantle(end);
}

const kvn_ucx_library *kvn_ucx_end_library(const kvn_ucx_end *end) { return end->library; }
const kvn_ucx *kvn_ucx_end_calls(const kvn_ucx_end *end) { return end->calls; }
kvn_ucx_mode kvn_ucx_end_mode(const kvn_ucx_end *end) { return end->mode; }
kvn_ucp_context_h kvn_ucx_end_context(const kvn_ucx_end *end) { return end->context; }

bool kvn_ucx_end_is_forked(const kvn_ucx_end *end)
{
    return end->is_here ? !*end->is_here : end->pid != getpid();
}

const void *kvn_ucx_end_address(const kvn_ucx_end *end, size_t *nbytes)
{
    *nbytes = end->address_nbytes;
    return end->address;
}

void kvn_ucx_end_transports(const kvn_ucx_end *end, char *out, size_t room)
{
    snprintf(out, room, "%s", end->transports);
}

void kvn_ucx_end_add_part(kvn_ucx_end *end, kvn_ucx_part *part)
{
    part->next = end->parts;
    end->parts = part;
}
