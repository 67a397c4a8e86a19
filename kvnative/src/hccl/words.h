/* Device memory that guards' words are read into. HCCL registers few ranges and shares whole huge pages: so the
 * connections of a device have their words in pages that they share, and not in one each. */
#ifndef KVN_HCCL_WORDS_H
#define KVN_HCCL_WORDS_H

#include "hccl/region.h"

/* Words that a transfer's guards may have (see transfer.h). */
#define KVN_MAX_GUARDS 4096

typedef struct kvn_words_page kvn_words_page;

/* One connection's: KVN_MAX_GUARDS words. */
typedef struct kvn_words {
    kvn_words_page *page; /* NULL: none are taken */
    unsigned seat;
} kvn_words;

/* Allocates and registers another page if all are full. `device` outlives the words. */
int kvn_words_take(kvn_hccl *hccl, const kvn_device *device, kvn_words *out, kvn_failure *failure);
/* Nothing reads into them any more, and their connection is not bound to `kvn_words_region` any more. A page goes
 * with its last words. Idempotent; whatever fails, they are given back. */
int kvn_words_release(kvn_words *words, kvn_failure *failure);
/* To bind: it has the words of other connections too. */
kvn_region *kvn_words_region(const kvn_words *words);
uint64_t kvn_words_address(const kvn_words *words);

#endif
