/* What a launch of the copy kernel is given: for the C code that launches it, for the kernel (copy.cu), and
 * for the stand-in of the tests that runs it on the host. No header of the C library: NVRTC has none. */
#ifndef KVN_CUDA_COPY_KERNEL_H
#define KVN_CUDA_COPY_KERNEL_H

/* A descriptor is moved in pieces of this size, the last one maybe shorter; a warp moves a piece, half of it in
 * flight at one time. With 64 registers a thread, 32 warps fit on a multiprocessor: 64 KiB in flight. */
#define KVN_COPY_PIECE_NBYTES 4096u
#define KVN_COPY_WARP 32u
#define KVN_COPY_THREADS 256u /* of a block */
/* A warp looks whether to stop after so many bytes. Of a transfer within a device that is about every
 * millisecond, each look a read of host memory; less often would make an abort slow. */
#define KVN_COPY_LOOK_NBYTES (256u << 10)
/* As many descriptors travel in the launch itself, whose parameters are 4 KiB at most before CUDA 12.1. */
#define KVN_COPY_FEW 128u

typedef unsigned long long kvn_copy_word; /* an address of the device, or a size */

/* How the host and one launch agree on who stops; in pinned host memory, a cache line each. */
typedef struct kvn_copy_control {
    unsigned begun; /* written by the kernel: 1 before it touches anything */
    unsigned stop;  /* written by the host: 1 and nothing further is touched, or begun */
    unsigned reserved[14];
} kvn_copy_control;

typedef struct kvn_copy_work {
    kvn_copy_control *control;
    kvn_copy_word nbytes_each; /* of all descriptors, where they are alike; 0: see `nbytes` */
    unsigned count;            /* of descriptors */
    unsigned num_pieces;       /* of all of them */
} kvn_copy_work;

/* The descriptors in the parameters. */
typedef struct kvn_copy_few {
    kvn_copy_work work;
    kvn_copy_word dst[KVN_COPY_FEW];
    kvn_copy_word src[KVN_COPY_FEW];
    kvn_copy_word nbytes[KVN_COPY_FEW];
    unsigned first_piece[KVN_COPY_FEW]; /* how many pieces the descriptors before it have */
} kvn_copy_few;

/* The descriptors in device memory. What nbytes_each says alone is not read: NULL. */
typedef struct kvn_copy_many {
    kvn_copy_work work;
    const kvn_copy_word *dst;
    const kvn_copy_word *src;
    const kvn_copy_word *nbytes;
    const unsigned *first_piece;
} kvn_copy_many;

#endif
