/* Announcements of writers at moments that only C can choose. */
#include <unistd.h>

#include "core/thread.h"
#include "host/writers.h"
#include "process/guarded.h"

#include "asleep.h"
#include "said.h"
/* ---- announcements ---- */

static uint64_t count_tickets(kvn_writers *writers)
{
    kvn_ticket left[KVN_WRITER_TICKETS];
    uint64_t next = 0;

    return kvn_writers_drain(writers, 0, &next, left);
}

/* A batch has one ticket until its end, also after a renewal, and then none: an owner would wait for the ticket. */
static void renewed_and_left(void)
{
    kvn_generations table;
    kvn_writers writers;
    kvn_writer writer;
    kvn_failure failure;
    kvn_fault fault;
    kvn_announcement announced;
    kvn_word word;

    CHECK(kvn_generations_create(1, 0, &table, &failure) == KVN_OK);
    CHECK(kvn_writers_create(1, &writers, &failure) == KVN_OK);
    CHECK(kvn_writer_open(getpid(), table.memory.fd, table.memory.inode, 1, writers.memory.fd, writers.memory.inode,
                          1, (uintptr_t)writers.gates, &writer, &failure) == KVN_OK);
    for (int is_ended = 0; is_ended < 2; is_ended++) {
        CHECK(kvn_generations_take(&table, false, 0, &word.slot, &word.generation, &failure) == KVN_OK);
        kvn_guard *guard = kvn_guard_create(&writer, &word, 1);

        CHECK(kvn_guard_enter(guard, false, 0, &announced, &fault) == KVN_OK);
        if (is_ended)
            CHECK(kvn_generations_release(&table, word.slot, word.generation, &failure) == KVN_OK);
        CHECK(kvn_guard_renew(guard, &announced, &failure) == (is_ended ? KVN_UNMAPPED : KVN_OK));
        CHECK(count_tickets(&writers) == 1);
        kvn_guard_leave(guard, &announced);
        CHECK(count_tickets(&writers) == 0);
        if (!is_ended)
            CHECK(kvn_generations_release(&table, word.slot, word.generation, &failure) == KVN_OK);
        kvn_guard_destroy(guard);
    }
    kvn_writer_close(&writer);
    kvn_writers_close(&writers);
    kvn_generations_close(&table);
}

static int submit_and_end(kvn_backend *self, const kvn_columns *batch, kvn_request **out, kvn_report *report)
{
    const int status = submit_said(self, batch, out, report);

    batch->end->call(batch->end, KVN_OK);
    return status;
}

/* While all places are taken, a batch of a caller that hurries is refused; later it is accepted. */
static void no_place_in_a_hurry(void)
{
    kvn_backend_vtable ending = plain;
    kvn_backend backend = {&ending};
    kvn_columns columns = columns_of(2);
    kvn_announcement taken[KVN_WRITER_TICKETS];
    kvn_generations table;
    kvn_writers writers;
    kvn_writer writer;
    kvn_failure failure;
    kvn_fault fault;
    kvn_word word;
    kvn_request *request;
    kvn_report report;

    ending.submit = submit_and_end;
    CHECK(kvn_generations_create(1, 0, &table, &failure) == KVN_OK);
    CHECK(kvn_generations_take(&table, false, 0, &word.slot, &word.generation, &failure) == KVN_OK);
    CHECK(kvn_writers_create(1, &writers, &failure) == KVN_OK);
    CHECK(kvn_writer_open(getpid(), table.memory.fd, table.memory.inode, 1, writers.memory.fd, writers.memory.inode,
                          1, (uintptr_t)writers.gates, &writer, &failure) == KVN_OK);
    kvn_guard *guard = kvn_guard_create(&writer, &word, 1);
    for (int i = 0; i < KVN_WRITER_TICKETS; i++)
        CHECK(kvn_guard_enter(guard, false, 0, &taken[i], &fault) == KVN_OK);
    kvn_backend *guarded = kvn_guarded_create(&backend, kvn_guard_create(&writer, &word, 1));
    columns.caller = KVN_CALLER_HURRIES;
    CHECK(guarded->vtable->submit(guarded, &columns, &request, &report) == KVN_PENDING);
    for (int i = 0; i < KVN_WRITER_TICKETS; i++)
        kvn_guard_leave(guard, &taken[i]);
    CHECK(guarded->vtable->submit(guarded, &columns, &request, &report) == KVN_OK);
    CHECK(guarded->vtable->wait(guarded, request, KVN_FOREVER) == KVN_OK);
    CHECK(count_tickets(&writers) == 0);
    guarded->vtable->release(guarded, request);
    CHECK(kvn_generations_release(&table, word.slot, word.generation, &failure) == KVN_OK);
    CHECK(guarded->vtable->submit(guarded, &columns, &request, &report) == KVN_UNMAPPED);
    guarded->vtable->destroy(guarded);
    kvn_guard_destroy(guard);
    kvn_writer_close(&writer);
    kvn_writers_close(&writers);
    kvn_generations_close(&table);
}

/* An owner waits again for a writer that was late once, and sees all tickets of many entries. */
static void late_is_forgiven(void)
{
    enum { ENTRIES = 40 };
    static kvn_writer opened[ENTRIES];
    kvn_generations table;
    kvn_writers writers;
    kvn_failure failure;
    kvn_fault fault;
    kvn_announcement announced;
    kvn_word word;

    CHECK(kvn_generations_create(1, 0, &table, &failure) == KVN_OK);
    CHECK(kvn_generations_take(&table, false, 0, &word.slot, &word.generation, &failure) == KVN_OK);
    CHECK(kvn_writers_create(ENTRIES, &writers, &failure) == KVN_OK);
    for (int entry = 0; entry < ENTRIES; entry++) {
        CHECK(kvn_writer_open(getpid(), table.memory.fd, table.memory.inode, 1, writers.memory.fd,
                              writers.memory.inode, ENTRIES, (uintptr_t)writers.gates, &opened[entry],
                              &failure) == KVN_OK);
        kvn_guard *guard = kvn_guard_create(&opened[entry], &word, 1);

        for (int by_glance = 0; by_glance < 2; by_glance++) {
            CHECK(kvn_guard_enter(guard, false, 0, &announced, &fault) == KVN_OK);
            CHECK(!kvn_writers_are_idle(&writers));
            CHECK(count_tickets(&writers) == 1);
            CHECK(atomic_load(&writers.stopped[opened[entry].entry]));
            kvn_guard_leave(guard, &announced);
            CHECK(by_glance ? kvn_writers_are_idle(&writers) || entry >= 32 : count_tickets(&writers) == 0);
            CHECK(!atomic_load(&writers.stopped[opened[entry].entry]) || (by_glance && entry >= 32));
        }
        kvn_guard_destroy(guard);
    }
    for (int entry = 0; entry < ENTRIES; entry++)
        kvn_writer_close(&opened[entry]);
    kvn_writers_close(&writers);
    kvn_generations_close(&table);
}

static void *drain_patiently(void *writers)
{
    kvn_ticket left[KVN_WRITER_TICKETS];
    uint64_t next = 0;

    other = gettid();
    return (void *)kvn_writers_drain(writers, kvn_now_ns() + INT64_C(30000000000), &next, left);
}

/* An owner waits for the tickets that it has found, and not for those that replace them meanwhile in other places. */
static void renewed_beside_a_wait(void)
{
    kvn_generations table;
    kvn_writers writers;
    kvn_writer writer;
    kvn_failure failure;
    kvn_fault fault;
    kvn_announcement announced;
    kvn_word word;
    pthread_t thread;
    void *left;

    CHECK(kvn_generations_create(1, 0, &table, &failure) == KVN_OK);
    CHECK(kvn_generations_take(&table, false, 0, &word.slot, &word.generation, &failure) == KVN_OK);
    CHECK(kvn_writers_create(1, &writers, &failure) == KVN_OK);
    CHECK(kvn_writer_open(getpid(), table.memory.fd, table.memory.inode, 1, writers.memory.fd, writers.memory.inode,
                          1, (uintptr_t)writers.gates, &writer, &failure) == KVN_OK);
    kvn_guard *guard = kvn_guard_create(&writer, &word, 1);
    CHECK(kvn_guard_enter(guard, false, 0, &announced, &fault) == KVN_OK);
    while (announced.place != 0) /* the other places follow */
        CHECK(kvn_guard_renew(guard, &announced, &failure) == KVN_OK);
    CHECK(pthread_create(&thread, NULL, drain_patiently, &writers) == 0);
    wait_until_it_sleeps();
    CHECK(kvn_guard_renew(guard, &announced, &failure) == KVN_OK);
    CHECK(announced.place > 0);
    pthread_join(thread, &left);
    CHECK(left == NULL && count_tickets(&writers) == 1);
    kvn_guard_leave(guard, &announced);
    kvn_guard_destroy(guard);
    kvn_writer_close(&writer);
    kvn_writers_close(&writers);
    kvn_generations_close(&table);
}

/* A write through a gate counts for its own ticket only, and not for a later one in the same place. */
static void passed_by_an_earlier_ticket(void)
{
    kvn_generations table;
    kvn_writers writers;
    kvn_writer writer;
    kvn_failure failure;
    kvn_fault fault;
    kvn_announcement first, later;
    kvn_word word;

    CHECK(kvn_generations_create(1, 0, &table, &failure) == KVN_OK);
    CHECK(kvn_generations_take(&table, false, 0, &word.slot, &word.generation, &failure) == KVN_OK);
    CHECK(kvn_writers_create(1, &writers, &failure) == KVN_OK);
    CHECK(kvn_writer_open(getpid(), table.memory.fd, table.memory.inode, 1, writers.memory.fd, writers.memory.inode,
                          1, (uintptr_t)writers.gates, &writer, &failure) == KVN_OK);
    kvn_guard *guard = kvn_guard_create(&writer, &word, 1);
    CHECK(kvn_guard_enter(guard, true, 0, &first, &fault) == KVN_OK);
    CHECK(!kvn_guard_has_passed(guard, &first));
    *(uint64_t *)kvn_guard_gate(guard, &first) = first.number;
    CHECK(kvn_guard_has_passed(guard, &first));
    later = first;
    do {
        kvn_guard_leave(guard, &later);
        CHECK(kvn_guard_enter(guard, true, 0, &later, &fault) == KVN_OK);
    } while (later.place != first.place);
    CHECK(!kvn_guard_has_passed(guard, &later));
    kvn_guard_leave(guard, &later);
    kvn_guard_destroy(guard);
    kvn_writer_close(&writer);
    kvn_writers_close(&writers);
    kvn_generations_close(&table);
}

/* A ticket that a former user of an entry has left is not taken for one of the next user. */
static void left_by_a_former_user(void)
{
    kvn_generations table;
    kvn_writers writers;
    kvn_writer writer;
    kvn_failure failure;
    kvn_fault fault;
    kvn_announcement announced;
    kvn_ticket left[KVN_WRITER_TICKETS];
    kvn_word word;
    uint64_t next = 0;

    CHECK(kvn_generations_create(1, 0, &table, &failure) == KVN_OK);
    CHECK(kvn_generations_take(&table, false, 0, &word.slot, &word.generation, &failure) == KVN_OK);
    CHECK(kvn_writers_create(1, &writers, &failure) == KVN_OK);
    for (int user = 0; user < 2; user++) {
        CHECK(kvn_writer_open(getpid(), table.memory.fd, table.memory.inode, 1, writers.memory.fd,
                              writers.memory.inode, 1, (uintptr_t)writers.gates, &writer, &failure) == KVN_OK);
        kvn_guard *guard = kvn_guard_create(&writer, &word, 1);
        for (int i = 0; i < KVN_WRITER_TICKETS; i++)
            CHECK(kvn_guard_enter(guard, false, 0, &announced, &fault) == KVN_OK);
        if (user == 0)
            CHECK(kvn_writers_drain(&writers, 0, &next, left) == KVN_WRITER_TICKETS);
        CHECK(count_tickets(&writers) == KVN_WRITER_TICKETS);
        for (int i = 0; i < KVN_WRITER_TICKETS; i++)
            CHECK(kvn_writers_has(&writers, &left[i]) == (user == 0));
        CHECK(count_tickets(&writers) == KVN_WRITER_TICKETS);
        kvn_guard_destroy(guard);
        kvn_writer_close(&writer); /* leaves the tickets, as a process that dies does */
    }
    kvn_writers_close(&writers);
    kvn_generations_close(&table);
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"renewed_and_left", renewed_and_left},
        {"no_place_in_a_hurry", no_place_in_a_hurry},
        {"late_is_forgiven", late_is_forgiven},
        {"renewed_beside_a_wait", renewed_beside_a_wait},
        {"passed_by_an_earlier_ticket", passed_by_an_earlier_ticket},
        {"left_by_a_former_user", left_by_a_former_user},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
