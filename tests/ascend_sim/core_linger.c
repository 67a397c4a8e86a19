/* Memory that work uses after its abort: the AICPU completes batches that it has begun. */
#include "core.h"
#include "core_log.h"

#define NUM_ROWS 1024

typedef struct {
    const unsigned char *view;
    uint64_t nbytes;
    int64_t until_us;
} row;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static row rows[NUM_ROWS]; /* a ring: the oldest rows have expired */
static unsigned next_row;

void sim_linger(const void *view, uint64_t nbytes, int64_t until_us) {
    pthread_mutex_lock(&mutex);
    row *it = rows;
    while (it < rows + NUM_ROWS && (it->view != view || it->nbytes != nbytes)) {
        it++;
    }
    if (it == rows + NUM_ROWS) {
        it = &rows[next_row++ % NUM_ROWS];
    }
    *it = (row){view, nbytes, until_us};
    pthread_mutex_unlock(&mutex);
}

void sim_linger_check(const void *view, uint64_t nbytes, const char *what) {
    const unsigned char *start = view;
    int64_t now = sim_now_us();
    int found = 0;
    pthread_mutex_lock(&mutex);
    for (row *it = rows; it < rows + NUM_ROWS && !found; it++) {
        found = now < it->until_us && start < it->view + it->nbytes && it->view < start + nbytes;
    }
    pthread_mutex_unlock(&mutex);
    if (found) {
        sim_violation("%s, while aborted work still uses the memory", what);
    }
}

int kvsim_lingering(void) {
    const int64_t now = sim_now_us();
    int count = 0;
    pthread_mutex_lock(&mutex);
    for (const row *it = rows; it < rows + NUM_ROWS; it++) {
        count += now < it->until_us;
    }
    pthread_mutex_unlock(&mutex);
    return count;
}
