/* Checks of the table of registered ranges, of the connections that a service watches, and of abandoned transfers. */
#include "tcp/table.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "core/report.h"
#include "tcp/client.h"
#include "tcp/link.h"
#include "tcp/server.h"
#include "tcp/service.h"

#define SECOND INT64_C(1000000000)

static kvn_tcp_table table;

/* A pull of one range, which also names other rows as leases. */
static kvn_tcp_request request_of(const uint32_t *slots, uint16_t num_slots)
{
    kvn_tcp_request request = {.head = {.kind = KVN_TCP_PULL, .num_ranges = num_slots, .num_runs = 1,
                                        .nbytes = 8, .run = {.address = 4096, .nbytes = 8, .count = 1}}};

    for (uint16_t i = 0; i < num_slots; i++)
        *kvn_tcp_range_at(&request, i) = (kvn_tcp_range){.slot = slots[i], .generation = 1};
    return request;
}

static void add_row(uint64_t slot, int64_t deadline_ns)
{
    const kvn_tcp_row row = {.address = 4096, .nbytes = 64, .generation = 1, .deadline_ns = deadline_ns};
    kvn_failure failure;

    CHECK(kvn_tcp_table_add(&table, slot, &row, &failure) == KVN_OK);
}

static kvn_tcp_checked checked_of(const uint32_t *slots, uint16_t num_slots)
{
    kvn_tcp_request request = request_of(slots, num_slots);
    kvn_tcp_checked checked;
    uint64_t offset;

    CHECK(kvn_tcp_table_check(&table, &request, &checked, &offset) == KVN_TCP_MOVED);
    return checked;
}

static void begin_table(void)
{
    kvn_failure failure;

    CHECK(kvn_tcp_table_init(&table, 8, NULL, &failure) == KVN_OK);
}

/* The earliest of several deadlines counts, at any position. */
static void earliest_deadline(void)
{
    static const uint32_t orders[][4] = {{0, 1, 2, 3}, {0, 3, 2, 1}, {0, 2, 1, 3}};
    const int64_t late_ns = kvn_now_ns() + 1000 * SECOND;

    begin_table();
    add_row(0, 0);
    for (uint64_t slot = 1; slot < 4; slot++)
        add_row(slot, late_ns + (int64_t)slot);
    for (int i = 0; i < 3; i++)
        CHECK(checked_of(orders[i], 4).deadline_ns == late_ns + 1);
    CHECK(checked_of(orders[0], 1).deadline_ns == 0);
    kvn_tcp_table_fini(&table);
}

/* A running request checks again after the deadline of a row has changed. */
static void renewed_under_way(void)
{
    static const uint32_t slots[] = {0, 1};
    kvn_tcp_checked checked;

    begin_table();
    add_row(0, 0);
    add_row(1, kvn_now_ns() + 1000 * SECOND);
    for (int less = 0; less < 2; less++) {
        checked = checked_of(slots, 2);
        CHECK(kvn_tcp_table_is_same(&table, &checked));
        CHECK(kvn_tcp_table_renew(&table, 1, kvn_now_ns() + (less ? 500 : 2000) * SECOND));
        CHECK(!kvn_tcp_table_is_same(&table, &checked));
    }
    kvn_tcp_table_fini(&table);
}

static kvn_tcp_progress never(kvn_tcp_watched *self, uint32_t events)
{
    (void)self, (void)events;
    return KVN_TCP_SLEEPS;
}

/* Two connections that use the same place after each other have different keys, so that a late event of the first
 * cannot be mistaken for one of the second. */
static void key_of_reused_place(void)
{
    kvn_tcp_service *service;
    kvn_failure failure;
    uint64_t keys[4];
    int ends[2];

    CHECK(kvn_tcp_service_create(1, 1, NULL, "checked", &service, &failure) == KVN_OK);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    for (int i = 0; i < 4; i++) {
        kvn_tcp_watched watched = {.stream = {.fd = ends[0]}, .on_ready = never};

        CHECK(kvn_tcp_service_watch(service, 0, &watched, 0, &failure) == KVN_OK);
        keys[i] = watched.key;
        kvn_tcp_service_forget(&watched);
        for (int before = 0; before < i; before++)
            CHECK(keys[before] != keys[i]);
        CHECK((uint32_t)keys[i] == (uint32_t)keys[0]); /* the place is reused */
    }
    kvn_tcp_service_destroy(service);
}

/* An abandoned push waits for bytes on the wire. The push succeeds if these complete it, and the peer takes them. */
static void given_up_when_all_was_taken(void)
{
    for (uint64_t taken = 0; taken < 3; taken++) {
        kvn_tcp_client client = {.num_asked = 0};
        uint64_t nbytes[] = {8, 8};
        kvn_report report;
        kvn_request it = {.client = &client, .kind = KVN_TCP_PUSH, .batch = {.nbytes = nbytes, .count = 2},
                          .confirmed = {taken, 0}, .report = &report};

        kvn_report_begin(&report);
        kvn_cond_init(&it.changed);
        kvn_tcp_transfer_put_in(&client, &it);
        kvn_tcp_transfer_end(&it, KVN_CANCELLED, 0, KVN_NO_DESCRIPTOR);
        CHECK(atomic_load(&it.finished));
        CHECK(report.status == (taken == 2 ? KVN_OK : KVN_CANCELLED));
        CHECK(report.num_unconfirmed == (taken < 2));
        CHECK(taken == 2 || report.unconfirmed[0].first == taken);
    }
}

/* ---- refusals ---- */

static bool is_refused(uint64_t slot, uint64_t address, uint64_t nbytes, const char *word)
{
    const kvn_tcp_row row = {.address = address, .nbytes = nbytes, .generation = 9};
    kvn_failure failure;

    return kvn_tcp_table_add(&table, slot, &row, &failure) == KVN_INVALID && strstr(failure.message, word);
}

/* A refused range leaves the existing one unchanged. */
static void refused_rows(void)
{
    static const uint32_t slots[] = {2};

    begin_table();
    add_row(2, 0);
    CHECK(is_refused(2, 8192, 64, "has a range already"));
    CHECK(is_refused(8, 4096, 64, "must be below 8"));
    CHECK(is_refused(UINT64_MAX, 4096, 64, "must be below 8"));
    CHECK(is_refused(3, 4096, 0, "is empty"));
    CHECK(is_refused(3, UINT64_MAX - 62, 64, "ends past"));
    checked_of(slots, 1);
    CHECK(kvn_tcp_table_remove(&table, 2) && !kvn_tcp_table_remove(&table, 2));
    CHECK(!kvn_tcp_table_remove(&table, 3) && !kvn_tcp_table_renew(&table, 2, 1));
    add_row(2, 0);
    kvn_tcp_table_fini(&table);
}

/* ---- bytes that a server does not write ---- */

static void count_failure(void *context, int code, const char *why)
{
    (void)code, (void)why;
    ++*(int *)context;
}

/* The server does not write a completely received push after its peer has gone, whichever event shows that. */
static void push_of_gone_peer(void)
{
    static const uint32_t seen[] = {0, EPOLLRDHUP, EPOLLHUP, EPOLLERR, EPOLLRDHUP | EPOLLHUP};
    static kvn_tcp_server server;
    static uint64_t memory;
    kvn_tcp_service *service;
    kvn_failure failure;
    const kvn_tcp_row row = {.address = (uintptr_t)&memory, .nbytes = 8, .generation = 1, .writable = true};

    CHECK(kvn_tcp_service_create(1, 1, NULL, "checked", &service, &failure) == KVN_OK);
    CHECK(kvn_tcp_table_add(kvn_tcp_service_table(service), 0, &row, &failure) == KVN_OK);
    for (int i = 0; i < 5; i++) {
        const kvn_tcp_head head = {.kind = KVN_TCP_PUSH, .num_ranges = 1, .num_runs = 1, .nbytes = 8,
                                   .range = {.slot = 0, .generation = 1},
                                   .run = {.address = (uintptr_t)&memory, .nbytes = 8, .count = 1}};
        const uint64_t bytes = 7;
        int ends[2], failures = 0;

        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
        server = (kvn_tcp_server){.watched.stream.fd = ends[0], .table = kvn_tcp_service_table(service),
                                  .on_failed = count_failure, .context = &failures};
        kvn_tcp_server_init(&server);
        CHECK(kvn_tcp_service_watch(service, 0, &server.watched, 0, &failure) == KVN_OK);
        memory = 0;
        CHECK(send(ends[1], &head, sizeof head, 0) == sizeof head);
        CHECK(send(ends[1], &bytes, sizeof bytes, 0) == sizeof bytes);
        server.watched.on_ready(&server.watched, EPOLLIN | seen[i]);
        CHECK(memory == (seen[i] ? 0 : bytes));
        CHECK(failures == (seen[i] != 0));
        server.watched.on_ready(&server.watched, EPOLLIN);
        CHECK(failures == (seen[i] != 0));
        kvn_tcp_service_forget(&server.watched);
        close(ends[0]);
        close(ends[1]);
    }
    kvn_tcp_service_destroy(service);
}

/* ---- releases on errors ---- */

static int count_files(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int found = 0;

    CHECK(folder);
    while (readdir(folder))
        found++;
    closedir(folder);
    return found;
}

/* A descriptor that cannot be watched takes no place: it is closed, of a file, or watched already. */
static void unwatched(void)
{
    kvn_tcp_service *service;
    kvn_failure failure;
    const int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC), files[] = {-1, 4000, file};
    int ends[2];

    CHECK(kvn_tcp_service_create(1, 1, NULL, "checked", &service, &failure) == KVN_OK);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    for (int i = 0; i < 3; i++) {
        kvn_tcp_watched refused = {.stream = {.fd = files[i]}, .on_ready = never};
        kvn_tcp_watched watched = {.stream = {.fd = ends[0]}, .on_ready = never};

        CHECK(kvn_tcp_service_watch(service, 0, &refused, 0, &failure) == KVN_FAILED && !refused.thread);
        kvn_tcp_service_forget(&refused);
        CHECK(kvn_tcp_service_watch(service, 0, &watched, 0, &failure) == KVN_OK);
        CHECK((uint32_t)watched.key == 0);
        kvn_tcp_service_forget(&watched);
    }
    kvn_tcp_service_destroy(service);
}

/* A service whose n-th thread cannot start leaves no open descriptor. The check runs as a user without other processes,
 * because RLIMIT_NPROC counts all of a user. */
static void no_threads(void)
{
    const uid_t user = 100000 + (uid_t)getpid();
    kvn_tcp_service *service;
    kvn_failure failure;
    struct rlimit limit;
    int refused = 0;

    CHECK(getrlimit(RLIMIT_NPROC, &limit) == 0);
    if (getuid() == 0)
        CHECK(setresuid(user, user, user) == 0);
    for (rlim_t threads = 1; threads < 6; threads++) {
        const int before = count_files();

        CHECK(setrlimit(RLIMIT_NPROC, &(struct rlimit){threads, limit.rlim_max}) == 0);
        if (kvn_tcp_service_create(3, 1, NULL, "checked", &service, &failure) == KVN_OK) {
            kvn_tcp_service_destroy(service);
        } else {
            CHECK(!service && strstr(failure.message, "cannot start"));
            refused++;
        }
        CHECK(count_files() == before);
    }
    CHECK(refused > 0);
}

/* A link that cannot get a descriptor closes all of its sockets. */
static void no_link(void)
{
    kvn_tcp_service *service;
    kvn_tcp_link *link;
    kvn_failure failure;
    struct rlimit limit;
    int clients[4], servers[4];

    CHECK(kvn_tcp_service_create(1, 1, NULL, "checked", &service, &failure) == KVN_OK);
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    for (unsigned count = 1; count <= 2; count++) {
        const int before = count_files();

        for (unsigned i = 0; i < count; i++) {
            CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, &clients[2 * i]) == 0);
            CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, &servers[2 * i]) == 0);
        }
        CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){3, limit.rlim_max}) == 0);
        CHECK(kvn_tcp_link_create(service, clients, servers, 2 * count, NULL, true, &link, &failure) != KVN_OK);
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
        CHECK(!link && strstr(failure.message, "cannot make a link"));
        CHECK(count_files() == before);
    }
    kvn_tcp_service_destroy(service);
}

static bool is_mapped(void *address)
{
    return msync(address, 1, MS_ASYNC) == 0;
}

/* A service ends after its creator and its last link have, in either order. */
static void last_user(void)
{
    for (int link_ends_first = 0; link_ends_first < 2; link_ends_first++) {
        kvn_tcp_service *service;
        kvn_tcp_link *links[2];
        kvn_failure failure;
        int ends[2];

        CHECK(kvn_tcp_service_create(1, 1 << 16, NULL, "checked", &service, &failure) == KVN_OK);
        void *rows = kvn_tcp_service_table(service)->rows;
        for (int i = 0; i < 2; i++) {
            CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
            CHECK(kvn_tcp_link_create(service, &ends[0], &ends[1], 1, NULL, true, &links[i], &failure) == KVN_OK);
        }
        if (!link_ends_first)
            kvn_tcp_service_destroy(service);
        for (int i = 0; i < 2; i++) {
            CHECK(is_mapped(rows));
            kvn_tcp_link_close(links[i], "checked");
            kvn_tcp_link_destroy(links[i]);
        }
        CHECK(is_mapped(rows) == link_ends_first);
        if (link_ends_first)
            kvn_tcp_service_destroy(service);
        CHECK(!is_mapped(rows));
    }
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"earliest_deadline", earliest_deadline},
        {"renewed_under_way", renewed_under_way},
        {"key_of_reused_place", key_of_reused_place},
        {"given_up_when_all_was_taken", given_up_when_all_was_taken},
        {"refused_rows", refused_rows},
        {"push_of_gone_peer", push_of_gone_peer},
        {"unwatched", unwatched},
        {"no_threads", no_threads},
        {"no_link", no_link},
        {"last_user", last_user},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
