/* Checks of the table of registered ranges, of what a service watches, and of transfers that are given up. */
#include "tcp/table.h"

#include <sys/socket.h>

#include "check.h"
#include "tcp/client.h"
#include "tcp/service.h"

#define SECOND INT64_C(1000000000)

static kvn_tcp_table table;

/* A pull of one range, that names other rows besides, as leases. */
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

/* Of several deadlines the earliest counts, wherever it stands among them. */
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

/* What is under way looks again once one of its rows has less time, or more. */
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

/* No two connections that a thread watches in turn have the same key: an event that was fetched before the first
 * was forgotten must not be taken for the second's. */
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
        CHECK((uint32_t)keys[i] == (uint32_t)keys[0]); /* else nothing was seen */
    }
    kvn_tcp_service_destroy(service);
}

/* A push that is given up waits for what is on the wire: if that was all of it, and it was taken, it is done. */
static void given_up_when_all_was_taken(void)
{
    for (uint64_t taken = 0; taken < 3; taken++) {
        kvn_tcp_client client = {.num_asked = 0};
        uint64_t nbytes[] = {8, 8};
        kvn_request it = {.client = &client, .kind = KVN_TCP_PUSH, .batch = {.nbytes = nbytes, .count = 2},
                          .confirmed = {taken, 0}, .end = {.status = KVN_PENDING}};

        kvn_cond_init(&it.changed);
        kvn_tcp_transfer_put_in(&client, &it);
        kvn_tcp_transfer_end(&it, KVN_CANCELLED, 0, KVN_NO_DESCRIPTOR);
        CHECK(atomic_load(&it.finished));
        CHECK(it.report.status == (taken == 2 ? KVN_OK : KVN_CANCELLED));
        CHECK(it.report.num_unconfirmed == (taken < 2));
        CHECK(taken == 2 || it.report.unconfirmed[0].first == taken);
    }
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"earliest_deadline", earliest_deadline},
        {"renewed_under_way", renewed_under_way},
        {"key_of_reused_place", key_of_reused_place},
        {"given_up_when_all_was_taken", given_up_when_all_was_taken},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
