/* Embeds the PTX of the copy kernel (copy.cu, made by `make ptx`) and has the driver load it. */
#include "cuda/kernel.h"

#include <string.h>

#define CALL KVN_CUDA_CALL
#define LOG_NBYTES 4096 /* for messages of the driver's compiler */

/* CUjit_option */
enum { JIT_ERROR_LOG = 5, JIT_ERROR_LOG_NBYTES = 6 };

/* The assembler searches the folders of -I, as the preprocessor does. */
__asm__(".pushsection .rodata\n"
        ".hidden kvn_copy_ptx\n"
        ".global kvn_copy_ptx\n"
        "kvn_copy_ptx:\n"
        ".incbin \"cuda/copy.ptx\"\n"
        ".byte 0\n"
        ".popsection\n");
__attribute__((visibility("hidden"))) extern const char kvn_copy_ptx[];

/* Returns true if a later call may succeed: the failure is temporary, or it is that of an earlier launch. */
static bool is_transient(const kvn_failure *failure)
{
    return failure->code == KVN_CUDA_OUT_OF_MEMORY ||
           (failure->code >= KVN_CUDA_ILLEGAL_ADDRESS && failure->code <= KVN_CUDA_LAUNCH_FAILED) ||
           (failure->code >= KVN_CUDA_CAPTURE_UNSUPPORTED && failure->code <= KVN_CUDA_CAPTURE_WRONG_THREAD);
}

/* With lazy loading, the default since 12.2, the first launch of a kernel may load it, and then waits for all work
 * of the context. Load the kernel now instead. */
static int get_function(const kvn_cuda_kernel *self, const kvn_device *device, const char *name, CUfunction *out,
                        kvn_failure *failure)
{
    if (CALL(device, failure, cuModuleGetFunction, out, self->module, name) != KVN_OK)
        return failure->status;
    return kvn_cuda_of(device)->cuFuncLoad ? CALL(device, failure, cuFuncLoad, *out) : KVN_OK;
}

/* Launches read their control words in pinned host memory, and columns are copied from there. Under confidential
 * computing the driver migrates and encrypts that memory, and refuses cuMemHostRegister. */
static bool reads_host(const kvn_device *device)
{
    int value = 1; /* also if the driver does not know the attribute */

    kvn_cuda_of(device)->cuDeviceGetAttribute(&value, KVN_CUDA_HOST_REGISTER, kvn_cuda_state(device)->number);
    return value != 0;
}

/* The driver compiles for its GPU, and keeps the result in its own cache on disk. */
static int load(kvn_cuda_kernel *self, const kvn_device *device, kvn_failure *failure)
{
    char log[LOG_NBYTES] = "";
    int options[] = {JIT_ERROR_LOG, JIT_ERROR_LOG_NBYTES};
    void *values[] = {log, (void *)(uintptr_t)sizeof log};
    kvn_failure refusal;

    if (!reads_host(device))
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "kernels do not reach host memory on this GPU (confidential "
                        "computing), so it does not take the copy kernel");
    if ((self->module ||
         CALL(device, failure, cuModuleLoadDataEx, &self->module, kvn_copy_ptx, 2, options, values) == KVN_OK) &&
        get_function(self, device, "kvn_copy_few_kernel", &self->few, failure) == KVN_OK &&
        get_function(self, device, "kvn_copy_many_kernel", &self->many, failure) == KVN_OK)
        return KVN_OK;
    refusal = *failure;
    if (is_transient(&refusal))
        return refusal.status; /* a loaded module stays for the next call */
    kvn_cuda_kernel_unload(self, device);
    log[strcspn(log, "\n")] = '\0';
    return kvn_fail(failure, KVN_UNSUPPORTED, refusal.code, "the driver does not take the copy kernel: %.130s%s%.60s",
                    refusal.message, *log ? "; " : "", log);
}

int kvn_cuda_kernel_load(kvn_cuda_kernel *self, const kvn_device *device, kvn_failure *failure)
{
    if (!self->is_final) {
        self->outcome.status = load(self, device, &self->outcome);
        self->is_final = self->outcome.status == KVN_OK || self->outcome.status == KVN_UNSUPPORTED;
    }
    *failure = self->outcome;
    return failure->status;
}

void kvn_cuda_kernel_unload(kvn_cuda_kernel *self, const kvn_device *device)
{
    if (self->module)
        kvn_cuda_of(device)->cuModuleUnload(self->module);
    self->module = NULL;
}
