/* Not there yet. */
#include "cuda_sim.h"
void cuda_modules_drop(const cuda_context *context) { (void)context; }
int cuda_reservation_find(uint64_t address, uint64_t *start, uint64_t *nbytes) {
    (void)address, (void)start, (void)nbytes;
    return 0;
}
#define STUB(name) CUDA name(void); CUDA name(void) { return NOT_SUPPORTED; }
STUB(cuModuleLoadDataEx)
STUB(cuModuleUnload)
STUB(cuModuleGetFunction)
STUB(cuLaunchKernel)
STUB(cuMemGetAllocationGranularity)
STUB(cuMemCreate)
STUB(cuMemRelease)
STUB(cuMemAddressReserve)
STUB(cuMemAddressFree)
STUB(cuMemMap)
STUB(cuMemUnmap)
STUB(cuMemSetAccess)
STUB(cuMemExportToShareableHandle)
STUB(cuMemImportFromShareableHandle)
STUB(cuIpcGetMemHandle)
STUB(cuIpcOpenMemHandle_v2)
STUB(cuIpcCloseMemHandle)
