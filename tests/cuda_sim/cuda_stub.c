/* Not there yet. */
#include "cuda_sim.h"
void cuda_modules_drop(const cuda_context *context) { (void)context; }
#define STUB(name) CUDA name(void); CUDA name(void) { return NOT_SUPPORTED; }
STUB(cuModuleLoadDataEx)
STUB(cuModuleUnload)
STUB(cuModuleGetFunction)
STUB(cuLaunchKernel)
