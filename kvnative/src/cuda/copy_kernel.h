/* The arguments of a launch of the copy kernel: for the C code that launches it, for the kernel (copy.cu), and for
 * the tests' stand-in that runs it on the host. It includes no header of the C library, since NVRTC has none. */
#ifndef KVN_CUDA_COPY_KERNEL_H
#define KVN_CUDA_COPY_KERNEL_H

/* The size of the pieces of a descriptor; its last piece may be shorter. A warp moves a piece, half of it in flight
 * at one time. With 64 registers a thread, 32 warps fit on a multiprocessor: 64 KiB in flight. */
#define KVN_COPY_PIECE_NBYTES 4096u
#define KVN_COPY_WARP 32u
#define KVN_COPY_THREADS 256u /* of a block */
/* The bytes after which a warp checks whether to stop, by a read of host memory. In a transfer within a device that
 * is about once a millisecond; a larger value would delay an abort. */
#define KVN_COPY_LOOK_NBYTES (256u << 10)
/* Maximum of descriptors in the parameters of a launch, which have at most 4 KiB before CUDA 12.1. */
#define KVN_COPY_FEW 128u

typedef unsigned long long kvn_copy_word; /* an address of the device, or a size */

/* The control words by which the host stops one launch; in pinned host memory, a cache line each. */
typedef struct kvn_copy_control {
    unsigned begun; /* written by the kernel: 1 before it touches any memory */
    unsigned stop;  /* written by the host: with 1, the launch touches no further memory */
    unsigned reserved[14];
} kvn_copy_control;

typedef struct kvn_copy_work {
    kvn_copy_control *control;
    kvn_copy_word nbytes_each; /* of each descriptor, if all are equal; 0: see `nbytes` */
    unsigned count;            /* of descriptors */
    unsigned num_pieces;       /* of all descriptors */
} kvn_copy_work;

/* The descriptors in the parameters. */
typedef struct kvn_copy_few {
    kvn_copy_work work;
    kvn_copy_word dst[KVN_COPY_FEW];
    kvn_copy_word src[KVN_COPY_FEW];
    kvn_copy_word nbytes[KVN_COPY_FEW];
    unsigned first_piece[KVN_COPY_FEW]; /* number of pieces of the descriptors before it */
} kvn_copy_few;

/* The descriptors in device memory. With nbytes_each, `nbytes` is not read: NULL. */
typedef struct kvn_copy_many {
    kvn_copy_work work;
    const kvn_copy_word *dst;
    const kvn_copy_word *src;
    const kvn_copy_word *nbytes;
    const unsigned *first_piece;
} kvn_copy_many;

#endif
