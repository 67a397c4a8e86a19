/* Registered memory of the fuzzer, between memory that must not be touched, and its requests. */
#include "fuzz_inputs.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "tcp/wire.h"

#define MAX_FILES 64

uint64_t tried, seed;

uint64_t random_word(void)
{
    seed ^= seed >> 12;
    seed ^= seed << 25;
    seed ^= seed >> 27;
    return seed * UINT64_C(2685821657736338717);
}

uint64_t below(uint64_t most) { return random_word() % most; }

bool one_in(unsigned count) { return below(count) == 0; }

/* ---- registered memory, between memory that must not be touched ---- */

const uint64_t SIZES[NUM_SLOTS] = {16 * PAGE, PAGE, PAGE, PAGE};
uint8_t *places[NUM_SLOTS];
uint64_t generations[NUM_SLOTS] = {7, 7, 7, 7};
bool is_registered[NUM_SLOTS];
kvn_tcp_table table;

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

void change_registration(void)
{
    if (is_registered[CHANGING]) {
        take_away(CHANGING);
    } else {
        memset(places[CHANGING], 0x44, PAGE);
        add(CHANGING);
    }
}

void make_memory(void)
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

bool is_all(const uint8_t *from, uint8_t byte, size_t nbytes)
{
    return from[0] == byte && memcmp(from, from + 1, nbytes - 1) == 0;
}

void check_memory(void)
{
    for (unsigned i = 0; i < NUM_SLOTS; i++)
        CHECK(is_all(places[i] - PAGE, SECRET, PAGE));
    CHECK(is_all(places[UNMAPPED] + PAGE, SECRET, PAGE));
    CHECK(is_all(places[READABLE], 0x11 * (READABLE + 1), PAGE));
    CHECK(is_registered[CHANGING] || is_all(places[CHANGING], SECRET, PAGE));
}

void check_not_told(const uint8_t *bytes, size_t nbytes, uint8_t byte)
{
    size_t run = 0;

    for (size_t i = 0; i < nbytes; i++) {
        run = bytes[i] == byte ? run + 1 : 0;
        CHECK(run < 16);
    }
}

/* ---- requests ---- */

static frame files[MAX_FILES];
static size_t num_files;

void append(frame *it, const void *bytes, size_t nbytes)
{
    if (nbytes > sizeof it->bytes - it->nbytes)
        nbytes = sizeof it->bytes - it->nbytes;
    memcpy(it->bytes + it->nbytes, bytes, nbytes);
    it->nbytes += nbytes;
}

/* Make a valid frame; most ranges that the frame names are registered. */
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

void change(frame *it)
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

void next_request(frame *out)
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

void read_file(const char *name)
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
