/*
 * The environment of a kernel's source on the host, with KVN_CUDA_HOST defined. Blocks are called one by one,
 * each with its number; threads are loops of the source. All loads and stores of memory use kvn_cuda_at,
 * which looks the address up in the launch's context: addresses that do not exist, are not allowed or not
 * aligned end the launch with 700 or 716.
 */
#ifndef KVSIM_KERNEL_HOST_H
#define KVSIM_KERNEL_HOST_H

#define KVN_CUDA_HOST 1

thread_local unsigned kvn_cuda_block, kvn_cuda_num_blocks, kvn_cuda_num_threads;

/* The byte on the host; nbytes from there on are the same memory's. */
extern "C" void *kvn_cuda_at(unsigned long long address, unsigned nbytes, bool is_store);

#endif
