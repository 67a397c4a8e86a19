/*
 * The environment of a kernel's source on the host, with KVN_CUDA_HOST defined. The kernel is called once for each
 * block, with the block's number; its threads are loops in the source. All loads and stores use kvn_cuda_at, which
 * finds the address in the launch's context. An address without memory or access ends the launch with 700, a
 * misaligned address with 716.
 */
#ifndef KVSIM_KERNEL_HOST_H
#define KVSIM_KERNEL_HOST_H

#define KVN_CUDA_HOST 1

thread_local unsigned kvn_cuda_block, kvn_cuda_num_blocks, kvn_cuda_num_threads;

/* Returns the place on the host of `nbytes` at a device address. */
extern "C" void *kvn_cuda_at(unsigned long long address, unsigned nbytes, bool is_store);

#endif
