/* The copy kernel as C++ for the host, with a check of each access: the functions that tests call. */
#include <cstring>

#include "cuda/copy.cu"

thread_local unsigned kvn_cuda_block, kvn_cuda_num_blocks;

namespace
{
/* Memory of one side: device address `first` is `bytes`, and `marked` says which bytes may be accessed. */
struct side {
    kvn_copy_word first, nbytes;
    unsigned char *bytes;
    const unsigned char *marked;
};
struct side sides[2]; /* loads, stores */
/* The columns of descriptors, at host addresses. */
struct column {
    kvn_copy_word first, nbytes;
} columns[4];
kvn_copy_word wrong;  /* the first access that was refused, or 0 */
kvn_copy_word moved, stop_at;
kvn_copy_control *control;
unsigned char scratch[16];
} // namespace

extern "C" void *kvn_cuda_at(kvn_copy_word address, unsigned nbytes, bool is_store)
{
    const side &it = sides[is_store];
    bool fits = address % nbytes == 0 && address >= it.first && address - it.first + nbytes <= it.nbytes;

    for (const column &column : columns)
        if (!is_store && address % nbytes == 0 && address - column.first < column.nbytes)
            return (void *)address;
    for (unsigned i = 0; fits && i < nbytes; i++)
        fits = it.marked[address - it.first + i];
    if (!fits) {
        wrong = wrong ? wrong : address;
        return scratch;
    }
    moved += is_store ? nbytes : 0;
    if (is_store && moved >= stop_at)
        __atomic_store_n(&control->stop, 1, __ATOMIC_SEQ_CST);
    return it.bytes + (address - it.first);
}

extern "C" void kvn_host_side(int is_store, kvn_copy_word first, kvn_copy_word nbytes, unsigned char *bytes,
                              const unsigned char *marked)
{
    sides[is_store] = {first, nbytes, bytes, marked};
}

/* Launches blocks one after another. The stop word is set once `stop` bytes are stored. Returns the number
 * of stored bytes; *refused is the first address of a forbidden access. */
extern "C" kvn_copy_word kvn_host_launch(const kvn_copy_few *few, const kvn_copy_many *many, unsigned blocks,
                                         kvn_copy_word stop, kvn_copy_word *refused)
{
    const kvn_copy_word count = many ? many->work.count : 0;
    const kvn_copy_word unlike = many && !many->work.nbytes_each ? count : 0;

    wrong = moved = 0;
    columns[0] = {many ? (kvn_copy_word)many->dst : 0, 8 * count};
    columns[1] = {many ? (kvn_copy_word)many->src : 0, 8 * count};
    columns[2] = {many ? (kvn_copy_word)many->nbytes : 0, 8 * unlike};
    columns[3] = {many ? (kvn_copy_word)many->first_piece : 0, 4 * unlike};
    stop_at = stop;
    control = few ? few->work.control : many->work.control;
    kvn_cuda_num_blocks = blocks;
    for (kvn_cuda_block = 0; kvn_cuda_block < blocks; kvn_cuda_block++) {
        if (few)
            kvn_copy_few_kernel(*few);
        else
            kvn_copy_many_kernel(*many);
    }
    *refused = wrong;
    return moved;
}
