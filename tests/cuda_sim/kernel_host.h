/*
 * What a kernel's source finds where it is compiled for the host, with KVN_CUDA_HOST defined: blocks are called
 * one by one, each with its number; threads are loops of its own. All of its loads and stores of memory go
 * through kvn_cuda_at, which looks the address up in the launch's context: what is not there, or not allowed
 * there, or not aligned, ends the launch with 700 or 716.
 */
#ifndef KVSIM_KERNEL_HOST_H
#define KVSIM_KERNEL_HOST_H

#define KVN_CUDA_HOST 1

thread_local unsigned kvn_cuda_block, kvn_cuda_num_blocks, kvn_cuda_num_threads;

/* The byte on the host; nbytes from there on are the same memory's. */
extern "C" void *kvn_cuda_at(unsigned long long address, unsigned nbytes, bool is_store);

#endif
