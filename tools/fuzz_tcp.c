/* Feed changed frames to the native side of the transport tcp: `make fuzz`.
 *
 *   fuzz_tcp parser COUNT SEED [FILE...]     requests, to the parser and the table
 *   fuzz_tcp answers SECONDS SEED [FILE...]  connections, to the end that answers
 *   fuzz_tcp asks SECONDS SEED               answers, to the end that asks
 *
 * The outcome of each input is compared with arithmetic that cannot overflow, and with memory that must not
 * have been read or written. FILEs are further requests to begin with. The same SEED makes the same inputs.
 * The program prints how many inputs it has tried, or aborts. */
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/report.h"
#include "core/thread.h"
#include "fuzz_inputs.h"
#include "tcp/client.h"
#include "tcp/server.h"
#include "tcp/stage.h"

typedef unsigned __int128 wide;

/* Functions of tcp/service.c, without threads. */
unsigned kvn_tcp_thread_index(const kvn_tcp_watched *it)
{
    (void)it;
    return 0;
}

void kvn_tcp_ask_for(kvn_tcp_watched *it, uint32_t events) { it->events = events; }

/* ---- the parser and the table ---- */

/* Check an accepted request against its frame, with numbers of 128 bits. */
static void check_sense(kvn_tcp_request *request)
{
    const kvn_tcp_head *head = &request->head;
    wide total = 0;

    CHECK(head->num_ranges >= 1 && head->num_ranges <= KVN_TCP_MAX_RANGES);
    CHECK(head->num_runs >= 1 && head->num_runs <= KVN_TCP_MAX_RUNS);
    for (uint32_t i = 0; i < head->num_runs; i++) {
        const kvn_tcp_run *run = kvn_tcp_run_at(request, i);
        CHECK(run->range < head->num_ranges && run->nbytes > 0 && run->count > 0);
        CHECK(run->count == 1 || run->stride >= run->nbytes);
        CHECK((wide)run->address + (wide)(run->count - 1) * run->stride + run->nbytes <= (wide)1 << 64);
        total += (wide)run->nbytes * run->count;
    }
    CHECK(total == head->nbytes && total <= KVN_TCP_MAX_NBYTES);
}

/* Check that the table accepted exactly the registered ranges. */
static void check_table(kvn_tcp_request *request)
{
    uint64_t offset, good = 0;
    kvn_tcp_checked checked;
    bool is_good = true;
    const kvn_tcp_reason reason = kvn_tcp_table_check(&table, request, &checked, &offset);

    for (uint32_t i = 0; i < request->head.num_runs && is_good; i++) {
        const kvn_tcp_run *run = kvn_tcp_run_at(request, i);
        const kvn_tcp_range *range = kvn_tcp_range_at(request, run->range);
        is_good = range->slot < NUM_SLOTS && is_registered[range->slot] &&
                  range->generation == generations[range->slot] &&
                  (range->slot != READABLE || request->head.kind == KVN_TCP_PULL);
        for (uint32_t piece = 0; piece < run->count && is_good; piece++) {
            const wide at = (wide)run->address + (wide)piece * run->stride;
            const wide first = (uintptr_t)places[range->slot], last = first + SIZES[range->slot];
            is_good = at >= first && at + run->nbytes <= last;
            if (is_good)
                good += run->nbytes;
            else if (at >= first && at < last)
                good += (uint64_t)(last - at);
        }
    }
    bool is_released = false; /* a range without a run is a lease */
    for (uint32_t i = 0; i < request->head.num_ranges && is_good; i++) {
        const kvn_tcp_range *range = kvn_tcp_range_at(request, i);
        is_released |= range->slot >= NUM_SLOTS || !is_registered[range->slot] ||
                       range->generation != generations[range->slot];
    }
    CHECK(is_released == (reason == KVN_TCP_RELEASED));
    CHECK((is_good && !is_released) == (reason == KVN_TCP_MOVED));
    CHECK(offset == (is_released ? 0 : good));
}

static uint64_t fuzz_parser(uint64_t count)
{
    static kvn_tcp_request request; /* static: fields that are not written keep their old values */
    static frame it;
    uint64_t let_through = 0;

    for (tried = 0; tried < count; tried++) {
        next_request(&it);
        memcpy(&request, it.bytes, it.nbytes < sizeof request ? it.nbytes : sizeof request);
        if (one_in(16))
            change_registration();
        if (kvn_tcp_check_head(&request.head))
            continue;
        if (request.head.num_ranges > KVN_TCP_MAX_RANGES || kvn_tcp_check_request(&request))
            continue;
        check_sense(&request);
        check_table(&request);
        let_through++;
    }
    return let_through;
}

/* ---- connections ---- */

typedef struct connection {
    int mine, theirs;
    bool has_failed;
} connection;

static void open_connection(connection *it)
{
    const int room = 1 << (12 + below(8));
    int ends[2];

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    *it = (connection){ends[0], ends[1], false};
}

static void on_failed(void *context, int code, const char *why)
{
    connection *it = context;

    (void)code;
    CHECK(!it->has_failed && why[0]);
    it->has_failed = true;
}

/* Memory of a device; there is none here. */
int kvn_tcp_stage_create(kvn_copier *copier, kvn_tcp_stage **out, kvn_failure *failure)
{
    (void)copier, (void)out;
    return kvn_fail(failure, KVN_UNSUPPORTED, 0, "no device");
}

/* Handle events as a thread of a service does. */
static void drive(kvn_tcp_watched *it, uint32_t events)
{
    unsigned turns = 0;

    while (it->on_ready(it, events) == KVN_TCP_GOES_ON) {
        CHECK(++turns < 100000);
        events = 0;
    }
}

static ssize_t read_some(const connection *it, uint8_t *into, size_t nbytes)
{
    const ssize_t got = recv(it->theirs, into, nbytes, MSG_DONTWAIT);

    return got > 0 ? got : 0;
}

/* ---- the end that answers ---- */

static void attack_server(void)
{
    static kvn_tcp_server server;
    static frame it;
    static uint8_t answers[MAX_FRAME];
    connection line;

    open_connection(&line);
    memset(&server, 0, offsetof(kvn_tcp_server, request));
    server.watched.stream.fd = line.mine;
    server.table = &table;
    server.on_failed = on_failed;
    server.context = &line;
    kvn_tcp_server_init(&server);
    for (uint64_t frames = 1 + below(4); frames > 0; frames--) {
        next_request(&it);
        for (size_t sent = 0; sent < it.nbytes && !line.has_failed;) {
            const size_t part = one_in(2) ? it.nbytes - sent : 1 + below(it.nbytes - sent);
            const ssize_t taken = send(line.theirs, it.bytes + sent, part, MSG_DONTWAIT | MSG_NOSIGNAL);
            sent += taken > 0 ? (size_t)taken : 0;
            drive(&server.watched, EPOLLIN);
            check_memory();
            if (one_in(8))
                change_registration();
            if (taken <= 0 || !one_in(4)) {
                const ssize_t got = read_some(&line, answers, sizeof answers);
                check_not_told(answers, (size_t)got, SECRET);
                drive(&server.watched, EPOLLOUT);
                if (taken <= 0 && got == 0 && !line.has_failed)
                    break; /* the end waits for bytes that the last frame has announced */
            }
        }
    }
    if (one_in(2))
        for (ssize_t got; (got = read_some(&line, answers, sizeof answers)) > 0;) {
            check_not_told(answers, (size_t)got, SECRET);
            drive(&server.watched, EPOLLOUT);
        }
    close(line.theirs);
    drive(&server.watched, EPOLLIN | EPOLLRDHUP | EPOLLHUP);
    CHECK(line.has_failed);
    close(line.mine);
    check_memory();
}

/* ---- the end that asks ---- */

#define THERE UINT64_C(0x40000000)
#define LOCAL_PAGES 8

static void attack_client(uint8_t *local)
{
    static kvn_tcp_client client;
    static frame out;
    static uint8_t in[1 << 20];
    static size_t has;
    const bool is_pull = one_in(2);
    kvn_interval places_there[2] = {{THERE, THERE + 0xFFFFF, 0, 0}, {THERE + 0x100000, THERE + 0x1FFFFF, 0, 1}};
    kvn_tcp_range ranges[3] = {{0, 0, 1}, {1, 0, 1}, {2, 0, 1}}; /* the last one is a lease */
    const kvn_tcp_known known = {places_there, ranges, 2, (uint32_t)below(2), "lease 1"};
    const uint64_t count = 1 + below(64);
    uint64_t *const columns = calloc(3 * count, sizeof *columns), *const sizes = columns + 2 * count;
    uint64_t *const here = columns, *const there = columns + count;
    kvn_request *const it = malloc(sizeof *it); /* freed: a later use is detected */
    uint64_t total = 0;
    connection line;
    kvn_report report;
    bool is_changed = false;

    memset(local, SECRET, (LOCAL_PAGES + 2) * PAGE);
    for (uint64_t i = 0; i < count; i++) {
        sizes[i] = 1 + below(LOCAL_PAGES * PAGE / 64);
        here[i] = (uintptr_t)local + PAGE + total;
        there[i] = THERE + below(0x200) * PAGE + below(64);
        total += sizes[i];
        memset((void *)(uintptr_t)here[i], 0x12, sizes[i]);
    }
    kvn_intervals_sort(places_there, 2);
    open_connection(&line);
    memset(&client, 0, sizeof client);
    client.watched.stream.fd = line.mine;
    client.on_failed = on_failed;
    client.context = &line;
    kvn_tcp_client_init(&client);
    *it = (kvn_request){.client = &client, .known = &known, .batch = {.nbytes = sizes, .count = count},
                        .local = here, .remote = there,
                        .kind = is_pull ? KVN_TCP_PULL : KVN_TCP_PUSH, .total = total, .uncut = total, .report = &report};
    kvn_report_begin(it->report);
    kvn_tcp_client_begin(it, false);
    has = 0;
    for (unsigned round = 0; round < 200 && !line.has_failed && !atomic_load(&it->finished); round++) {
        kvn_tcp_head head;
        const ssize_t came = read_some(&line, in + has, sizeof in - has);
        check_not_told(in + has, (size_t)came, SECRET);
        has += (size_t)came;
        drive(&client.watched, EPOLLOUT);
        if (has < sizeof head)
            continue;
        memcpy(&head, in, sizeof head);
        const size_t of_table = sizeof head + kvn_tcp_table_nbytes(&head);
        const size_t whole = of_table + (head.kind == KVN_TCP_PUSH ? head.nbytes : 0);
        const bool is_early = has < whole && one_in(20);
        CHECK(kvn_tcp_check_head(&head) == NULL && whole <= sizeof in);
        if (has < whole && !is_early)
            continue;
        kvn_tcp_answer answer = {.id = head.id};
        if (one_in(10)) {
            answer.reason = 1 + (uint32_t)below(KVN_TCP_NUM_REASONS - 1);
            answer.offset = below(head.nbytes);
            is_changed = true;
        }
        out.nbytes = 0;
        append(&out, &answer, sizeof answer);
        if (is_pull && answer.reason == 0) {
            static const uint8_t data[2048] = {[0] = 0x44};
            for (uint64_t left = head.nbytes; left > 0; left -= left < sizeof data ? left : sizeof data)
                append(&out, data, left < sizeof data ? left : sizeof data);
            append(&out, &answer, sizeof answer);
        }
        if (is_early || one_in(3)) {
            is_changed = true;
            if (!is_early)
                change(&out);
        }
        for (size_t sent = 0; sent < out.nbytes && !line.has_failed;) {
            const size_t part = one_in(2) ? out.nbytes - sent : 1 + below(out.nbytes - sent);
            const ssize_t taken = send(line.theirs, out.bytes + sent, part, MSG_DONTWAIT | MSG_NOSIGNAL);
            sent += taken > 0 ? (size_t)taken : 0;
            drive(&client.watched, EPOLLIN);
            if (taken <= 0)
                break;
        }
        has = has < whole ? 0 : has - whole;
        memmove(in, in + whole, has);
        if (is_pull && one_in(30)) {
            kvn_tcp_client_give_up(it, KVN_CANCELLED);
            is_changed = true;
        }
    }
    CHECK(is_changed || atomic_load(&it->finished));
    CHECK(is_changed || it->report->status == KVN_OK);
    if (!atomic_load(&it->finished)) {
        close(line.theirs);
        line.theirs = -1;
        drive(&client.watched, EPOLLIN | EPOLLRDHUP | EPOLLHUP);
    }
    CHECK(atomic_load(&it->finished));
    kvn_tcp_client_let_go(it);
    /* The request belongs to the caller again: no byte of its memory is sent or written. */
    memset(local + PAGE, SECRET, LOCAL_PAGES * PAGE);
    free(columns);
    free(it);
    if (line.theirs >= 0) {
        static const uint8_t more[600] = {0};
        (void)!send(line.theirs, more, 1 + below(sizeof more), MSG_DONTWAIT | MSG_NOSIGNAL);
        drive(&client.watched, EPOLLIN | EPOLLOUT);
        for (ssize_t got; (got = read_some(&line, in, sizeof in)) > 0;) {
            check_not_told(in, (size_t)got, SECRET);
            drive(&client.watched, EPOLLIN | EPOLLOUT);
        }
        close(line.theirs);
    }
    CHECK(is_all(local, SECRET, (LOCAL_PAGES + 2) * PAGE));
    kvn_tcp_client_fail(&client, 0, "the next input");
    kvn_tcp_client_fini(&client);
    close(line.mine);
}

static uint64_t for_seconds(double seconds, void (*attack)(uint8_t *), uint8_t *local)
{
    const int64_t end = kvn_now_ns() + (int64_t)(seconds * 1e9);

    for (tried = 0; kvn_now_ns() < end; tried++)
        attack(local);
    return tried;
}

static void attack_server_too(uint8_t *local)
{
    (void)local;
    attack_server();
}

int main(int count, char **arguments)
{
    const int64_t began = kvn_now_ns();
    uint64_t let_through = 0;

    if (count < 4) {
        fprintf(stderr, "usage: fuzz_tcp parser COUNT SEED | answers SECONDS SEED | asks SECONDS SEED"
                        " [FILE...]\n");
        return 2;
    }
    seed = strtoull(arguments[3], NULL, 10) * 2 + 1;
    for (int i = 4; i < count; i++)
        read_file(arguments[i]);
    make_memory();
    if (strcmp(arguments[1], "parser") == 0) {
        let_through = fuzz_parser(strtoull(arguments[2], NULL, 10));
    } else if (strcmp(arguments[1], "answers") == 0) {
        for_seconds(atof(arguments[2]), attack_server_too, NULL);
    } else {
        uint8_t *local = malloc((LOCAL_PAGES + 2) * PAGE);
        for_seconds(atof(arguments[2]), attack_client, local);
        free(local);
    }
    check_memory();
    printf("%s: %" PRIu64 " inputs in %.1f s", arguments[1], tried, (double)(kvn_now_ns() - began) / 1e9);
    if (let_through > 0)
        printf(", %" PRIu64 " of them were let through", let_through);
    puts("");
    kvn_tcp_table_fini(&table);
    return 0;
}
