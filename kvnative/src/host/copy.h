/* The two ways to copy host memory: plainly, and past the caches (docs/internals/adr/0002-copy-strategies.md). */
#ifndef KVNATIVE_HOST_COPY_H
#define KVNATIVE_HOST_COPY_H

#include <stdbool.h>
#include <stddef.h>

/* Copies between ranges that do not overlap; any size, any alignment. */
typedef void (*kvn_copy)(void *dst, const void *src, size_t nbytes);

/* memcpy in a separate file, which ThreadSanitizer does not check: the bytes belong to the program. */
void kvn_copy_plain(void *dst, const void *src, size_t nbytes);
/* Writes past the caches. NULL if the processor or the system lacks it. */
kvn_copy kvn_copy_past_caches(void);
/* Non-temporal stores become visible to other threads in order only after this. */
void kvn_copy_fence(void);

#endif
