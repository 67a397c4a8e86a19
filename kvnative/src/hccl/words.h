/* Device memory into which guards are read. HCCL registers few ranges, and shares whole huge pages, so all connections
 * of a device share these pages. */
#ifndef KVN_HCCL_WORDS_H
#define KVN_HCCL_WORDS_H

#include "hccl/region.h"

/* Words that a transfer's guards may have (see transfer.h). */
#define KVN_MAX_GUARDS 4096

typedef struct kvn_words_page kvn_words_page;

/* The KVN_MAX_GUARDS words of a connection. */
typedef struct kvn_words {
    kvn_words_page *page; /* NULL: none */
    unsigned seat;
} kvn_words;

/* Allocates and registers another page if all are full. `device` outlives the words. */
int kvn_words_take(kvn_hccl *hccl, const kvn_device *device, kvn_words *out, kvn_failure *failure);
/* Gives the words back, once nothing reads into them and their connection has unbound `kvn_words_region`. A page is
 * freed with its last words. Idempotent; also effective after a failure. */
int kvn_words_release(kvn_words *words, kvn_failure *failure);
/* The region to bind, which also has the words of other connections. */
kvn_region *kvn_words_region(const kvn_words *words);
uint64_t kvn_words_address(const kvn_words *words);

#endif
