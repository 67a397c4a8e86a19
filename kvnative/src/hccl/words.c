/* Shares pages of device memory among connections for the words of their guards. */
#include "hccl/words.h"

#include <errno.h>
#include <stdlib.h>

#include "device/device.h"

/* The unit that HCCS can share: a huge page. */
#define PAGE_NBYTES (UINT64_C(2) << 20)
#define SEAT_NBYTES (KVN_MAX_GUARDS * sizeof(uint64_t))
#define ALL_TAKEN UINT64_MAX

_Static_assert(PAGE_NBYTES / SEAT_NBYTES == 64, "a bit for each seat");

struct kvn_words_page {
    kvn_region region;
    void *memory;
    uint64_t taken; /* seats, by bit */
    kvn_words_page *next;
};

/* ---- under hccl->words_mutex ---- */

static int drop_page(kvn_words_page *page, kvn_failure *failure)
{
    const kvn_device *device = page->region.device;
    kvn_failure later;
    int status = kvn_region_close(&page->region, failure);

    if (kvn_device_free(device, page->memory, &later) != KVN_OK && status == KVN_OK) {
        *failure = later;
        status = later.status;
    }
    free(page);
    return status;
}

static kvn_words_page *make_page(kvn_hccl *hccl, const kvn_device *device, kvn_failure *failure)
{
    kvn_words_page *page = calloc(1, sizeof *page);
    kvn_failure ignored;

    if (!page) {
        kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a connection's words");
        return NULL;
    }
    if (kvn_device_allocate(device, PAGE_NBYTES, &page->memory, failure) != KVN_OK) {
        free(page);
        return NULL;
    }
    if (kvn_region_open(hccl, device, (uintptr_t)page->memory, PAGE_NBYTES, true, &page->region, failure) !=
        KVN_OK) {
        kvn_device_free(device, page->memory, &ignored);
        free(page);
        return NULL;
    }
    page->next = hccl->words;
    hccl->words = page;
    return page;
}

static kvn_words_page *find_page(const kvn_hccl *hccl, const kvn_device *device)
{
    kvn_words_page *page = hccl->words;

    while (page && (page->region.device != device || page->taken == ALL_TAKEN))
        page = page->next;
    return page;
}

static void take_out(kvn_hccl *hccl, const kvn_words_page *page)
{
    kvn_words_page **at = &hccl->words;

    while (*at != page)
        at = &(*at)->next;
    *at = page->next;
}

/* ---- the calls ---- */

int kvn_words_take(kvn_hccl *hccl, const kvn_device *device, kvn_words *out, kvn_failure *failure)
{
    kvn_words_page *page;

    *out = (kvn_words){.page = NULL};
    pthread_mutex_lock(&hccl->words_mutex);
    page = find_page(hccl, device);
    if (!page)
        page = make_page(hccl, device, failure);
    if (page) {
        *out = (kvn_words){page, (unsigned)__builtin_ctzll(~page->taken)};
        page->taken |= UINT64_C(1) << out->seat;
    }
    pthread_mutex_unlock(&hccl->words_mutex);
    return page ? KVN_OK : failure->status;
}

int kvn_words_release(kvn_words *words, kvn_failure *failure)
{
    kvn_words_page *page = words->page;
    kvn_hccl *hccl;
    int status = KVN_OK;

    if (!page)
        return KVN_OK;
    hccl = page->region.hccl;
    pthread_mutex_lock(&hccl->words_mutex);
    page->taken &= ~(UINT64_C(1) << words->seat);
    if (!page->taken) {
        take_out(hccl, page);
        status = drop_page(page, failure);
    }
    pthread_mutex_unlock(&hccl->words_mutex);
    words->page = NULL;
    return status;
}

kvn_region *kvn_words_region(const kvn_words *words) { return &words->page->region; }

uint64_t kvn_words_address(const kvn_words *words)
{
    return words->page->region.address + words->seat * SEAT_NBYTES;
}
