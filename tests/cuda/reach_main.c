/* Checks of the memory that the copy kernel may use, with a driver that answers as a check requires. */
#include "cuda/reach.c"

#include "check.h"

enum { ADDRESS = 1 << 20, NBYTES = 1 << 12 };

static struct {
    unsigned long long access;
    CUresult of_access;
} said;

static CUresult say_range(CUdeviceptr *start, size_t *nbytes, CUdeviceptr address)
{
    (void)address;
    *start = ADDRESS;
    *nbytes = NBYTES;
    return KVN_CUDA_OK;
}

static CUresult say_access(unsigned long long *flags, const kvn_cuda_location *location, CUdeviceptr address)
{
    (void)location, (void)address;
    *flags = said.access;
    return said.of_access;
}

static CUresult know_no_pool(unsigned count, int *asked, void **values, CUdeviceptr address)
{
    (void)count, (void)asked, (void)values, (void)address;
    return KVN_CUDA_OK + 1;
}

static kvn_cuda_library library;
static kvn_cuda_device state = {.mutex = PTHREAD_MUTEX_INITIALIZER};
static kvn_device device = {.runtime = &library, .state = &state, .id = 0};

static void begin(void)
{
    library.calls.cuMemGetAddressRange_v2 = say_range;
    library.calls.cuMemGetAccess = say_access;
    library.calls.cuPointerGetAttributes = know_no_pool;
}

/* The kernel reads and writes, so the driver copies memory that this device may only read. */
static void mapped_access(void)
{
    static const struct {
        unsigned long long access;
        CUresult of_access;
        int reach;
    } rows[] = {
        {0, KVN_CUDA_OK, KVN_CUDA_UNMAPPED},
        {1, KVN_CUDA_OK, KVN_CUDA_COPIED}, /* CU_MEM_ACCESS_FLAGS_PROT_READ */
        {KVN_CUDA_ACCESS_READ_WRITE, KVN_CUDA_OK, KVN_CUDA_REACHED},
        {KVN_CUDA_ACCESS_READ_WRITE, KVN_CUDA_OK + 1, KVN_CUDA_COPIED}, /* access unknown */
    };

    begin();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        said.access = rows[i].access;
        said.of_access = rows[i].of_access;
        CHECK((int)ask_mapping(&device, ADDRESS, 0).reach == rows[i].reach);
    }
}

/* Memory of another GPU is reachable only if that GPU's context has peer access here. */
static void other_gpus(void)
{
    static int ours, peers, strangers;
    const answers of_peer = {.type = KVN_CUDA_MEMORY_HOST + 1, .number = 1, .context = (CUcontext)&peers,
                             .start = ADDRESS, .nbytes = NBYTES};
    answers of_stranger = of_peer, of_us = of_peer;
    kvn_failure failure;

    begin();
    device.context = &ours;
    of_stranger.context = (CUcontext)&strangers;
    of_us.context = (CUcontext)&ours;
    of_us.number = 0;
    CHECK(kvn_cuda_reach_add_context(&device, (CUcontext)&peers, &failure) == KVN_OK);
    CHECK(judge(&device, ADDRESS, &of_peer).reach == KVN_CUDA_REACHED);
    CHECK(judge(&device, ADDRESS, &of_peer).is_far);
    CHECK(judge(&device, ADDRESS, &of_stranger).reach == KVN_CUDA_UNMAPPED);
    CHECK(judge(&device, ADDRESS, &of_us).reach == KVN_CUDA_REACHED && !judge(&device, ADDRESS, &of_us).is_far);
    kvn_cuda_reach_remove_context(&device, (CUcontext)&peers);
    CHECK(judge(&device, ADDRESS, &of_peer).reach == KVN_CUDA_UNMAPPED);
}

/* A context is reachable as long as it has an import, in any order of ends, and for any number of imports. */
static void several_users(void)
{
    enum { CONTEXTS = 3, STEPS = 400 };
    static int contexts[CONTEXTS];
    int users[CONTEXTS] = {0};
    kvn_failure failure;

    begin();
    srand(1);
    for (int step = 0; step < STEPS; step++) {
        const int i = rand() % CONTEXTS;

        if (users[i] > 0 && rand() % 2) {
            kvn_cuda_reach_remove_context(&device, (CUcontext)&contexts[i]);
            users[i]--;
        } else {
            CHECK(kvn_cuda_reach_add_context(&device, (CUcontext)&contexts[i], &failure) == KVN_OK);
            users[i]++;
        }
        for (int at = 0; at < CONTEXTS; at++)
            CHECK(is_of_peer(&device, (CUcontext)&contexts[at]) == (users[at] > 0));
    }
}

enum { KNOWN_PIECES = 2 };

static unsigned num_asked, known_type;

/* Adjacent mappings without a context, like torch's expandable segments, and nothing behind the last one. */
static CUresult know_pieces(unsigned count, int *asked, void **values, CUdeviceptr address)
{
    if (count == 1)
        return KVN_CUDA_OK + 1; /* outside of all pools */
    num_asked++;
    CHECK(asked[0] == KVN_CUDA_POINTER_MEMORY_TYPE && asked[5] == KVN_CUDA_POINTER_RANGE_START);
    *(unsigned *)values[0] = address < ADDRESS + KNOWN_PIECES * NBYTES ? known_type : 0;
    return KVN_CUDA_OK;
}

static CUresult say_piece(CUdeviceptr *start, size_t *nbytes, CUdeviceptr address)
{
    *start = address / NBYTES * NBYTES;
    *nbytes = NBYTES;
    return KVN_CUDA_OK;
}

/* Each piece is checked, also behind one that only the driver can copy: a copy into a hole loses the
 * context. */
static void least_of_all_pieces(void)
{
    static const struct {
        unsigned long long access;
        int whole, beyond;
    } rows[] = {
        {KVN_CUDA_ACCESS_READ_WRITE, KVN_CUDA_REACHED, KVN_CUDA_UNMAPPED},
        {1, KVN_CUDA_COPIED, KVN_CUDA_UNMAPPED},
    };

    begin();
    library.calls.cuPointerGetAttributes = know_pieces;
    library.calls.cuMemGetAddressRange_v2 = say_piece;
    known_type = KVN_CUDA_MEMORY_HOST + 1;
    said.of_access = KVN_CUDA_OK;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        kvn_cuda_ranges ranges = {.device = &device};

        said.access = rows[i].access;
        CHECK((int)kvn_cuda_reach_of(&ranges, ADDRESS, KNOWN_PIECES * NBYTES) == rows[i].whole);
        CHECK((int)kvn_cuda_reach_of(&ranges, ADDRESS + 1, KNOWN_PIECES * NBYTES) == rows[i].beyond);
    }
}

/* A driver that reports no range is not queried for each byte. */
static void asked_once_without_a_range(void)
{
    kvn_cuda_ranges ranges = {.device = &device};

    begin();
    library.calls.cuPointerGetAttributes = know_pieces;
    known_type = KVN_CUDA_MEMORY_HOST;
    num_asked = 0;
    CHECK(kvn_cuda_reach_of(&ranges, ADDRESS, NBYTES) == KVN_CUDA_COPIED);
    CHECK(num_asked == 1);
}

static kvn_cuda_watch *watch_of(uint64_t first, uint64_t last, uint64_t id)
{
    kvn_cuda_watch *watch = calloc(1, sizeof *watch + sizeof *watch->parts);

    watch->num_parts = 1;
    watch->parts[0] = (kvn_cuda_range){.first = first, .last = last, .id = id};
    return watch;
}

/* A new registration of other memory ends each old one that it overlaps: at its begin, at its end, or
 * inside. */
static void registered_again(void)
{
    static const struct {
        uint64_t first, last, id;
        bool replaces;
    } rows[] = {
        {50, 150, 2, true},   /* the begin of the old one */
        {150, 250, 2, true},  /* its end */
        {120, 130, 2, true},  {100, 200, 2, true},
        {50, 250, 2, true},   /* all of it, and more on both sides */
        {100, 200, 1, false}, /* the same memory again */
        {50, 100, 2, false},  {200, 250, 2, false}, /* beside it */
    };

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        kvn_cuda_watch *old = watch_of(100, 200, 1), *new = watch_of(rows[i].first, rows[i].last, rows[i].id);

        CHECK(replace(old, new) == rows[i].replaces);
        CHECK(kvn_cuda_watch_is_replaced(old) == rows[i].replaces && old->is_over == rows[i].replaces);
        free(old);
        free(new);
    }
}

/* Each registration of freed memory is replaced when a transfer finds other memory there; neither ended ones nor others. */
static void found_by_a_transfer(void)
{
    kvn_cuda_watch *watches[] = {watch_of(100, 200, 1), watch_of(100, 200, 2), watch_of(150, 300, 1),
                                 watch_of(200, 300, 1), watch_of(50, 250, 3)};

    for (size_t i = 0; i + 1 < 5; i++)
        watches[i]->next = watches[i + 1];
    watches[4]->is_over = true;
    state.watches = watches[0];
    CHECK(is_replaced(&device, 160, 2));
    state.watches = NULL;
    for (size_t i = 0; i < 5; i++) {
        CHECK(kvn_cuda_watch_is_replaced(watches[i]) == (i == 0 || i == 2));
        free(watches[i]);
    }
}

int main(int count, char **arguments)
{
    static const check_row rows[] = {
        {"mapped_access", mapped_access},
        {"other_gpus", other_gpus},
        {"several_users", several_users},
        {"least_of_all_pieces", least_of_all_pieces},
        {"asked_once_without_a_range", asked_once_without_a_range},
        {"registered_again", registered_again},
        {"found_by_a_transfer", found_by_a_transfer},
    };

    return run_check(count, arguments, rows, sizeof rows / sizeof *rows);
}
