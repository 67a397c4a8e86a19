/* Keeps the memory that launches of the copy kernel read. */
#include "cuda/launch_memory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CALL KVN_CUDA_CALL
/* Control words are allocated by the page. */
#define CONTROLS (4096 / sizeof(kvn_copy_control))
/* Columns for as many launches as one stream can have. When all are in use, launches take few descriptors each. */
#define MAX_COLUMNS 16
/* 16 launches on each of 12 streams, four in each direction. */
#define PAGES 3

_Static_assert(sizeof(kvn_copy_control) == 64, "a cache line for each launch");

/* Adds a page of control words, each as an idle launch. */
static int add_page(kvn_cuda_launches *self, const kvn_device *device, kvn_failure *failure)
{
    kvn_cuda_launch_memory **pages = realloc(self->pages, (self->num_pages + 1) * sizeof *pages);
    kvn_cuda_launch_memory *made = pages ? calloc(CONTROLS, sizeof *made) : NULL;
    kvn_copy_control *controls;
    void *page;

    if (pages)
        self->pages = pages;
    if (!made)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for launches");
    if (CALL(device, failure, cuMemHostAlloc, &page, CONTROLS * sizeof *controls,
             KVN_CUDA_HOST_PORTABLE | KVN_CUDA_HOST_MAPPED) != KVN_OK) {
        free(made);
        return failure->status;
    }
    controls = page;
    self->pages[self->num_pages++] = made;
    for (size_t i = 0; i < CONTROLS; i++) {
        made[i] = (kvn_cuda_launch_memory){.control = &controls[i], .next = self->idle};
        self->idle = &made[i];
    }
    return KVN_OK;
}

static int add_columns(const kvn_device *device, kvn_cuda_columns *out, kvn_failure *failure)
{
    const size_t nbytes = KVN_CUDA_LAUNCH_COUNT * (3 * sizeof(uint64_t) + sizeof(unsigned));
    void *host;

    if (CALL(device, failure, cuMemAlloc_v2, &out->device, nbytes) != KVN_OK)
        return failure->status;
    if (CALL(device, failure, cuMemHostAlloc, &host, nbytes, KVN_CUDA_HOST_PORTABLE) == KVN_OK) {
        out->host = host;
        return KVN_OK;
    }
    kvn_cuda_of(device)->cuMemFree_v2(out->device);
    return failure->status;
}

void kvn_cuda_launches_reserve(kvn_cuda_launches *self, const kvn_device *device)
{
    kvn_cuda_launch_memory *launch;
    kvn_failure ignored; /* launches of few descriptors need no columns, and pages are added later */

    while (self->num_pages < PAGES && add_page(self, device, &ignored) == KVN_OK)
        ;
    launch = self->idle;
    for (int i = 0; i < MAX_COLUMNS && launch; i++, launch = launch->next)
        if (add_columns(device, &launch->columns, &ignored) != KVN_OK)
            return;
}

void kvn_cuda_launches_give(kvn_cuda_launches *self, kvn_cuda_launch_memory *launches)
{
    while (launches) {
        kvn_cuda_launch_memory *next = launches->next;
        launches->next = self->idle;
        self->idle = launches;
        launches = next;
    }
}

kvn_cuda_launch_memory *kvn_cuda_launches_take(kvn_cuda_launches *self, const kvn_device *device, bool with_columns,
                                               kvn_failure *failure)
{
    kvn_cuda_launch_memory **link, *found;

    if (!self->idle && add_page(self, device, failure) != KVN_OK)
        return NULL;
    for (link = &self->idle; *link && with_columns != ((*link)->columns.host != NULL); link = &(*link)->next)
        ;
    if (!*link && with_columns) {
        kvn_fail(failure, KVN_NO_MEMORY, KVN_CUDA_OUT_OF_MEMORY, "all columns of launches are in use");
        return NULL;
    }
    if (!*link)
        link = &self->idle;
    found = *link;
    *link = found->next;
    found->next = NULL;
    memset(found->control, 0, sizeof *found->control);
    return found;
}

void kvn_cuda_launches_free(kvn_cuda_launches *self, const kvn_device *device)
{
    const kvn_cuda *cuda = kvn_cuda_of(device);

    for (kvn_cuda_launch_memory *found = self->idle; found; found = found->next) {
        if (found->columns.host) {
            cuda->cuMemFreeHost(found->columns.host);
            cuda->cuMemFree_v2(found->columns.device);
        }
    }
    for (size_t i = 0; i < self->num_pages; i++) {
        cuda->cuMemFreeHost(self->pages[i]->control);
        free(self->pages[i]);
    }
}
