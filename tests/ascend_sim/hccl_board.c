/* The board: a memfd with a slot for each live registration, which has the generation of the registration, or 0. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hccl_sim.h"

#define NUM_SLOTS 16384u
#define BOARD_BYTES (NUM_SLOTS * sizeof(uint64_t))

static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Atomic uint64_t *slots;
static int memory_fd = -1;
static uint64_t last_generation; /* guarded by hccl_mutex */

static void create(void)
{
    const int fd = memfd_create("kvsim-hccl-board", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, BOARD_BYTES))
        return;
    void *mapped = mmap(NULL, BOARD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        return;
    slots = mapped;
    memory_fd = fd;
}

int board_fd(void)
{
    pthread_once(&once, create);
    return memory_fd;
}

int board_take(board_place *out)
{
    if (board_fd() < 0)
        return -1;
    for (uint32_t i = 0; i < NUM_SLOTS; i++)
        if (!atomic_load(&slots[i])) {
            *out = (board_place){i, ++last_generation};
            atomic_store(&slots[i], out->generation);
            return 0;
        }
    return -1;
}

void board_clear(const board_place *place) { atomic_store(&slots[place->slot], 0); }

int board_is_live(const board_place *place)
{
    return atomic_load(&slots[place->slot]) == place->generation;
}
