/* Feeds changed frames to the native side of the transport tcp: `make fuzz`.
 *
 *   fuzz_tcp parser COUNT SEED [FILE...]     requests, to the parser and the table
 *   fuzz_tcp answers SECONDS SEED [FILE...]  connections, to the end that answers
 *   fuzz_tcp asks SECONDS SEED               answers, to the end that asks
 *
 * What comes of each is compared with arithmetic that cannot overflow, and with memory that must not have
 * been read or written. FILEs are requests to begin with, besides those that are made here. The same SEED
 * makes the same inputs. It ends with what it has tried, or by abort(). */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/report.h"
#include "core/thread.h"
#include "tcp/client.h"
#include "tcp/server.h"
#include "tcp/stage.h"

#define CHECK(truth)                                                                               \
    do {                                                                                           \
        if (!(truth)) {                                                                            \
            fprintf(stderr, "fuzz_tcp: input %" PRIu64 ": not so: %s (line %d)\n", tried, #truth,    \
                    __LINE__);                                                                     \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#define PAGE 4096u
#define MAX_FRAME (1u << 16)
#define MAX_FILES 64

typedef unsigned __int128 wide;

static uint64_t tried, state;

/* What tcp/service.c has, where there are no threads. */
unsigned kvn_tcp_thread_index(const kvn_tcp_watched *it)
{
    (void)it;
    return 0;
}

void kvn_tcp_ask_for(kvn_tcp_watched *it, uint32_t events) { it->events = events; }

static uint64_t random_word(void)
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * UINT64_C(2685821657736338717);
}

static uint64_t below(uint64_t most) { return random_word() % most; }

static bool one_in(unsigned count) { return below(count) == 0; }

/* ---- memory: what is registered, between what must not be touched ---- */

enum { OWN, READABLE, CHANGING, UNMAPPED, NUM_SLOTS };
enum { SECRET = 0xEE };

static const uint64_t SIZES[NUM_SLOTS] = {16 * PAGE, PAGE, PAGE, PAGE};
static uint8_t *places[NUM_SLOTS]; /* a page of SECRET is before each, and one behind the last */
static uint64_t generations[NUM_SLOTS] = {7, 7, 7, 7};
static bool is_registered[NUM_SLOTS];
static kvn_tcp_table table;

static void add(unsigned slot)
{
    const kvn_tcp_row row = {
        (uintptr_t)places[slot], SIZES[slot], generations[slot], slot != READABLE, false, 0,
    };
    kvn_failure failure;

    CHECK(kvn_tcp_table_add(&table, slot, &row, &failure) == KVN_OK);
    is_registered[slot] = true;
}

static void take_away(unsigned slot)
{
    CHECK(kvn_tcp_table_remove(&table, slot));
    is_registered[slot] = false;
    generations[slot]++;
    memset(places[slot], SECRET, SIZES[slot]);
}

static void change_registration(void)
{
    if (is_registered[CHANGING]) {
        take_away(CHANGING);
    } else {
        memset(places[CHANGING], 0x44, PAGE);
        add(CHANGING);
    }
}

static void make_memory(void)
{
    kvn_failure failure;
    uint8_t *at = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    CHECK(at != MAP_FAILED);
    memset(at, SECRET, 64 * PAGE);
    CHECK(kvn_tcp_table_init(&table, NUM_SLOTS + 2, NULL, &failure) == KVN_OK);
    for (unsigned i = 0; i < NUM_SLOTS; i++) {
        places[i] = at += PAGE;
        memset(at, 0x11 * (int)(i + 1), SIZES[i]);
        add(i);
        at += SIZES[i];
    }
    CHECK(mprotect(places[UNMAPPED], PAGE, PROT_NONE) == 0);
}

static bool is_all(const uint8_t *from, uint8_t byte, size_t nbytes)
{
    return from[0] == byte && memcmp(from, from + 1, nbytes - 1) == 0;
}

static void check_memory(void)
{
    for (unsigned i = 0; i < NUM_SLOTS; i++)
        CHECK(is_all(places[i] - PAGE, SECRET, PAGE));
    CHECK(is_all(places[UNMAPPED] + PAGE, SECRET, PAGE));
    CHECK(is_all(places[READABLE], 0x11 * (READABLE + 1), PAGE));
    CHECK(is_registered[CHANGING] || is_all(places[CHANGING], SECRET, PAGE));
}

/* No frame has so many in a row; what is not registered has nothing else. */
static void check_not_told(const uint8_t *bytes, size_t nbytes, uint8_t byte)
{
    size_t run = 0;

    for (size_t i = 0; i < nbytes; i++) {
        run = bytes[i] == byte ? run + 1 : 0;
        CHECK(run < 16);
    }
}

/* ---- requests ---- */

typedef struct frame {
    uint8_t bytes[MAX_FRAME];
    size_t nbytes;
} frame;

static frame files[MAX_FILES];
static size_t num_files;

static void append(frame *it, const void *bytes, size_t nbytes)
{
    if (nbytes > sizeof it->bytes - it->nbytes)
        nbytes = sizeof it->bytes - it->nbytes;
    memcpy(it->bytes + it->nbytes, bytes, nbytes);
    it->nbytes += nbytes;
}

/* One that is as it should be; most of what it names is registered. */
static void make_request(frame *out)
{
    const uint32_t num_ranges = 1 + (uint32_t)below(3);
    const uint32_t num_runs = 1 + (uint32_t)below(one_in(20) ? KVN_TCP_MAX_RUNS : 6);
    kvn_tcp_head head = {.kind = 1 + (uint8_t)below(2), .num_ranges = (uint16_t)num_ranges,
                         .num_runs = num_runs, .id = random_word()};
    kvn_tcp_range ranges[3];
    kvn_tcp_run runs[KVN_TCP_MAX_RUNS];
    static const uint8_t data[512] = {0x33};

    for (uint32_t i = 0; i < num_ranges; i++) {
        const uint32_t slot = (uint32_t)(one_in(8) ? below(NUM_SLOTS + 3) : below(NUM_SLOTS));
        ranges[i] = (kvn_tcp_range){slot, 0, slot < NUM_SLOTS ? generations[slot] : 7};
    }
    for (uint32_t i = 0; i < num_runs; i++) {
        const uint32_t range = (uint32_t)below(num_ranges);
        const uint32_t slot = ranges[range].slot < NUM_SLOTS ? ranges[range].slot : OWN;
        const uint32_t nbytes = 1 + (uint32_t)below(40), count = 1 + (uint32_t)below(4);
        const uint32_t stride = nbytes + (uint32_t)below(60);
        const uint64_t room = SIZES[slot] - (uint64_t)stride * count;
        const uint64_t at = one_in(20) ? room + below(2 * PAGE) : below(room);
        runs[i] = (kvn_tcp_run){(uintptr_t)places[slot] + at, nbytes, count, stride, range};
        head.nbytes += (uint64_t)nbytes * count;
    }
    head.range = ranges[0];
    head.run = runs[0];
    append(out, &head, sizeof head);
    append(out, ranges + 1, (num_ranges - 1) * sizeof *ranges);
    append(out, runs + 1, (num_runs - 1) * sizeof *runs);
    if (head.kind == KVN_TCP_PUSH)
        for (uint64_t left = head.nbytes; left > 0; left -= left < sizeof data ? left : sizeof data)
            append(out, data, left < sizeof data ? left : sizeof data);
}

static void change(frame *it)
{
    static const uint64_t WORDS[] = {
        0, 1, 2, 7, 63, 64, 65, 1023, 1024, 1025, INT32_MAX, UINT32_MAX, UINT32_MAX - 1,
        KVN_TCP_MAX_NBYTES, KVN_TCP_MAX_NBYTES + 1, INT64_MAX, UINT64_MAX, UINT64_MAX - 4095};

    for (uint64_t times = 1 + below(3); times > 0 && it->nbytes > 8; times--) {
        const size_t width = (size_t)1 << below(4);
        const size_t limit = one_in(4) ? it->nbytes - width + 1 : it->nbytes < 128 ? it->nbytes - width + 1 : 120;
        size_t at = below(limit);
        uint64_t word = WORDS[below(sizeof WORDS / sizeof *WORDS)];
        switch (below(6)) {
        case 0:
            it->bytes[at] ^= (uint8_t)(1u << below(8));
            break;
        case 1:
            it->bytes[at] = (uint8_t)random_word();
            break;
        case 2:
            it->nbytes = at + 1;
            break;
        case 3:
            memcpy(&word, it->bytes + at - at % width, width);
            word += below(5) - 2;
            __attribute__((fallthrough));
        default:
            memcpy(it->bytes + at - at % width, &word, width);
        }
    }
}

static void next_request(frame *out)
{
    out->nbytes = 0;
    if (num_files > 0 && one_in(4)) {
        const frame *file = &files[below(num_files)];
        append(out, file->bytes, file->nbytes);
    } else {
        make_request(out);
    }
    if (!one_in(3))
        change(out);
}

/* ---- the parser and the table ---- */

/* Whether a request that was let through is what it says, by numbers of 128 bits. */
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

/* Whether the table let through what is registered, and nothing else. */
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
    static kvn_tcp_request request; /* what is not written has what was there before */
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

/* No memory here is on a device. */
int kvn_tcp_stage_create(kvn_copier *copier, kvn_tcp_stage **out, kvn_failure *failure)
{
    (void)copier, (void)out;
    return kvn_fail(failure, KVN_UNSUPPORTED, 0, "no device");
}

/* As a thread of a service would. */
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
                    break; /* it waits for what the last frame has promised */
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
    kvn_request *const it = malloc(sizeof *it); /* freed, so that whoever uses it later is seen */
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
    /* The caller's again: nothing of it is sent, nothing comes into it. */
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

/* ---- ---- */

static void read_file(const char *name)
{
    FILE *file = fopen(name, "rb");
    frame *it = &files[num_files];

    if (!file) {
        fprintf(stderr, "%s: %s\n", name, strerror(errno));
        exit(2);
    }
    it->nbytes = fread(it->bytes, 1, sizeof it->bytes, file);
    fclose(file);
    num_files += num_files + 1 < MAX_FILES;
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
    state = strtoull(arguments[3], NULL, 10) * 2 + 1;
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
