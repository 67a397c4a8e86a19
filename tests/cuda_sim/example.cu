/* A kernel for tests of the simulator: each block adds to its own bytes. */
extern "C" void kvsim_example(unsigned long long bytes, unsigned each, unsigned char added,
                              unsigned long long done)
{
    const unsigned long long first = (unsigned long long)kvn_cuda_block * each;

    for (unsigned i = 0; i < each; i++) {
        const unsigned char value = *(unsigned char *)kvn_cuda_at(bytes + first + i, 1, false);
        *(unsigned char *)kvn_cuda_at(bytes + first + i, 1, true) = (unsigned char)(value + added);
    }
    if (done)
        *(unsigned *)kvn_cuda_at(done + 4 * kvn_cuda_block, 4, true) = kvn_cuda_num_threads;
}
