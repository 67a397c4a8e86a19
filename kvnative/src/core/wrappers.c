#include "core/wrappers.h"

#include <errno.h>
#include <stdlib.h>

#include "core/report.h"

void *kvn_wrapper_alloc(size_t nbytes, const kvn_backend_vtable *vtable, kvn_backend *inner)
{
    kvn_wrapper *self = calloc(1, nbytes);

    if (self) {
        self->base.vtable = vtable;
        self->inner = inner;
    }
    return self;
}

void kvn_wrapper_destroy(kvn_backend *self) { free(self); }

int kvn_wrapper_no_memory(kvn_report *report, uint64_t count, size_t nbytes)
{
    return kvn_report_refuse(report, count, KVN_NO_MEMORY, ENOMEM,
                             "no memory for a request (%zu bytes)", nbytes);
}
