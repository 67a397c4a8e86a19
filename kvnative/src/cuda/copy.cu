/* Copies many ranges of bytes in one launch: between and within the memory of a device, memory of another
 * one that is mapped here, and pinned host memory at the host's own addresses.
 *
 * A warp takes a piece of 4 KiB, the one that is as many further on as there are warps, and so on: work is
 * shared out by bytes, however many descriptors they are in, and any number of blocks moves all of it. Which
 * descriptor a piece belongs to is a division where all have one size, else a binary search.
 *
 * Stopping. CUDA cannot abort a stream, so the kernel takes part. Each launch has two words in pinned host
 * memory. A block, before it touches anything:  begun = 1; fence; is stop 0?
 * The host that gives the launch up:             stop = 1; fence; is begun 0?
 * Fences are sequentially consistent, of the whole system. Whichever comes second, what stands before the
 * other is visible behind it. So if the host reads begun = 0, its fence came before that of every block, now
 * or much later, and all of them read stop = 1 and touch nothing: the caller's memory is free at once, though
 * the launch may stand behind an event that never comes. If the host reads begun = 1, a block runs, and the
 * host waits for the end of the launch; warps look at stop after each 256 KiB, so that comes soon.
 * Blocks need not agree with one another: one that has begun is waited for, whatever others have read.
 * These are plain loads and stores on purpose: over PCIe read-modify-write operations of a GPU are not atomic
 * with those of the host's processors (hostNativeAtomicSupported is 0), aligned loads and stores are.
 * The words and the descriptors are read by a launch that begins late; copies.c frees them only when it has
 * seen the end of the launch.
 *
 * Made into copy.ptx by `make ptx`. With KVN_CUDA_HOST it is C++ for the host: blocks are called one by one
 * or by several threads, each with its own kvn_cuda_block; warps and lanes are loops. */
#include "cuda/copy_kernel.h"

#ifdef KVN_CUDA_HOST

/* A program that runs it on the host defines these. */
extern thread_local unsigned kvn_cuda_block, kvn_cuda_num_blocks;
/* Where the bytes at a device's address are on the host. It checks them: alignment to nbytes, too. */
extern "C" void *kvn_cuda_at(kvn_copy_word address, unsigned nbytes, bool is_store);

#define KVN_DEVICE static inline
#define KVN_KERNEL extern "C" void
#define KVN_PARAMETER const &
#define KVN_EACH_WARP(warp) for (unsigned warp = 0; warp < KVN_COPY_THREADS / KVN_COPY_WARP; warp++)
#define KVN_EACH_LANE(lane) for (unsigned lane = 0; lane < KVN_COPY_WARP; lane++)
#define KVN_UNROLL
#define KVN_KEEP_LOOP

struct kvn_vector {
    kvn_copy_word low, high;
};

KVN_DEVICE unsigned this_block() { return kvn_cuda_block; }
KVN_DEVICE unsigned num_blocks() { return kvn_cuda_num_blocks; }
KVN_DEVICE bool any_of_block(bool (*ask)(kvn_copy_control *), kvn_copy_control *control) { return ask(control); }

template <class Word> KVN_DEVICE Word load(kvn_copy_word address)
{
    return *(const Word *)kvn_cuda_at(address, sizeof(Word), false);
}

template <class Word> KVN_DEVICE void store(kvn_copy_word address, Word value)
{
    *(Word *)kvn_cuda_at(address, sizeof(Word), true) = value;
}

/* Of descriptors in device memory, which nothing writes while the kernel runs. */
template <class Entry> KVN_DEVICE Entry load_constant(const Entry *at) { return load<Entry>((kvn_copy_word)at); }

KVN_DEVICE unsigned load_system(const unsigned *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
KVN_DEVICE void store_system(unsigned *at, unsigned value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
KVN_DEVICE void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

#else

#define KVN_DEVICE static __device__ __forceinline__
#define KVN_KERNEL extern "C" __global__ void __launch_bounds__(KVN_COPY_THREADS, 4)
#define KVN_PARAMETER const
#define KVN_EACH_WARP(warp) if (const unsigned warp = threadIdx.x / KVN_COPY_WARP; true)
#define KVN_EACH_LANE(lane) if (const unsigned lane = threadIdx.x % KVN_COPY_WARP; true)
#define KVN_UNROLL _Pragma("unroll")
#define KVN_KEEP_LOOP _Pragma("unroll 1")

typedef uint4 kvn_vector;

KVN_DEVICE unsigned this_block() { return blockIdx.x; }
KVN_DEVICE unsigned num_blocks() { return gridDim.x; }

/* One thread asks, for its block. */
KVN_DEVICE bool any_of_block(bool (*ask)(kvn_copy_control *), kvn_copy_control *control)
{
    __shared__ bool answer;

    if (threadIdx.x == 0)
        answer = ask(control);
    __syncthreads();
    return answer;
}

/* What is moved is not used again here: it should not push what others use out of the caches. */
template <class Word> KVN_DEVICE Word load(kvn_copy_word address) { return __ldcs((const Word *)address); }
template <class Word> KVN_DEVICE void store(kvn_copy_word address, Word value) { __stcs((Word *)address, value); }

template <class Entry> KVN_DEVICE Entry load_constant(const Entry *at) { return __ldg(at); }

KVN_DEVICE unsigned load_system(const unsigned *at)
{
    unsigned value;

    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

KVN_DEVICE void store_system(unsigned *at, unsigned value)
{
    asm volatile("st.relaxed.sys.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}

KVN_DEVICE void fence_system() { asm volatile("fence.sc.sys;" : : : "memory"); }

#endif

/* ---- stopping ---- */

KVN_DEVICE bool begin(kvn_copy_control *control)
{
    store_system(&control->begun, 1);
    fence_system();
    return load_system(&control->stop) == 0;
}

/* ---- one piece ---- */

/* One lane's part of a piece whose two sides are aligned alike, to a Word: bytes up to the first whole Word of
 * the destination, Words, bytes after the last one. */
template <class Word>
KVN_DEVICE void copy_lane(unsigned lane, kvn_copy_word dst, kvn_copy_word src, unsigned nbytes)
{
    constexpr unsigned SIZE = sizeof(Word), FLIGHT = 4;
    const unsigned to_aligned = (unsigned)(0 - dst) % SIZE;
    const unsigned head = to_aligned < nbytes ? to_aligned : nbytes;
    const unsigned words = (nbytes - head) / SIZE, end = head + words * SIZE;
    kvn_copy_word from = src + head + lane * SIZE, to = dst + head + lane * SIZE;
    Word held[FLIGHT];

    if (lane < head)
        store(dst + lane, load<unsigned char>(src + lane));
    KVN_KEEP_LOOP
    for (unsigned at = lane; at < words; at += FLIGHT * KVN_COPY_WARP) {
        KVN_UNROLL
        for (unsigned i = 0; i < FLIGHT; i++)
            if (at + i * KVN_COPY_WARP < words)
                held[i] = load<Word>(from + i * KVN_COPY_WARP * SIZE);
        KVN_UNROLL
        for (unsigned i = 0; i < FLIGHT; i++)
            if (at + i * KVN_COPY_WARP < words)
                store(to + i * KVN_COPY_WARP * SIZE, held[i]);
        from += FLIGHT * KVN_COPY_WARP * SIZE;
        to += FLIGHT * KVN_COPY_WARP * SIZE;
    }
    if (end + lane < nbytes)
        store(dst + end + lane, load<unsigned char>(src + end + lane));
}

/* By the largest words that both sides are aligned to alike. */
KVN_DEVICE void copy_piece(kvn_copy_word dst, kvn_copy_word src, unsigned nbytes)
{
    const unsigned unlike = (unsigned)(dst ^ src);

    KVN_EACH_LANE(lane) {
        if (unlike % 16 == 0)
            copy_lane<kvn_vector>(lane, dst, src, nbytes);
        else if (unlike % 4 == 0)
            copy_lane<unsigned>(lane, dst, src, nbytes);
        else
            copy_lane<unsigned char>(lane, dst, src, nbytes);
    }
}

/* ---- all pieces ---- */

/* Number `at` of a column, which is in the parameters or in device memory. */
template <class Entry> KVN_DEVICE Entry entry(const kvn_copy_few &, const Entry *column, unsigned at)
{
    return column[at];
}

template <class Entry> KVN_DEVICE Entry entry(const kvn_copy_many &, const Entry *column, unsigned at)
{
    return load_constant(column + at);
}

/* The last descriptor that begins with this piece or one before it: empty ones have none. */
template <class Columns> KVN_DEVICE unsigned find_descriptor(const Columns &columns, unsigned piece)
{
    unsigned low = 0, high = columns.work.count;

    while (high - low > 1) {
        const unsigned middle = low + (high - low) / 2;
        if (entry(columns, columns.first_piece, middle) <= piece)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Copies one piece; its size. */
template <class Columns> KVN_DEVICE unsigned move_piece(const Columns &columns, unsigned piece)
{
    const kvn_copy_word each = columns.work.nbytes_each;
    const unsigned pieces_each = (unsigned)((each + KVN_COPY_PIECE_NBYTES - 1) / KVN_COPY_PIECE_NBYTES);
    const unsigned at = each ? piece / pieces_each : find_descriptor(columns, piece);
    const unsigned first = each ? at * pieces_each : entry(columns, columns.first_piece, at);
    const kvn_copy_word offset = (kvn_copy_word)(piece - first) * KVN_COPY_PIECE_NBYTES;
    const kvn_copy_word left = (each ? each : entry(columns, columns.nbytes, at)) - offset;
    const unsigned nbytes = left < KVN_COPY_PIECE_NBYTES ? (unsigned)left : KVN_COPY_PIECE_NBYTES;

    copy_piece(entry(columns, columns.dst, at) + offset, entry(columns, columns.src, at) + offset, nbytes);
    return nbytes;
}

template <class Columns> KVN_DEVICE void move_pieces(const Columns &columns)
{
    constexpr unsigned WARPS = KVN_COPY_THREADS / KVN_COPY_WARP;
    const unsigned stride = num_blocks() * WARPS;

    if (!any_of_block(begin, columns.work.control))
        return;
    KVN_EACH_WARP(warp) {
        unsigned moved = 0;
        /* By num_pieces - piece, so that the sum does not wrap around. */
        for (unsigned piece = this_block() * WARPS + warp; piece < columns.work.num_pieces;) {
            if (moved >= KVN_COPY_LOOK_NBYTES) {
                if (load_system(&columns.work.control->stop))
                    return;
                moved = 0;
            }
            moved += move_piece(columns, piece);
            if (columns.work.num_pieces - piece <= stride)
                break;
            piece += stride;
        }
    }
}

KVN_KERNEL kvn_copy_few_kernel(kvn_copy_few KVN_PARAMETER columns) { move_pieces(columns); }
KVN_KERNEL kvn_copy_many_kernel(kvn_copy_many KVN_PARAMETER columns) { move_pieces(columns); }
