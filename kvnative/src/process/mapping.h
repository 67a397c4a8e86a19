/* Is an address range mapped? Asked of the kernel, never by touching the memory. */
#ifndef KVN_MAPPING_H
#define KVN_MAPPING_H

#include <stdint.h>

#include "core/failure.h"

typedef enum kvn_maps_source {
    KVN_MAPS_AUTO,  /* the query where the kernel has it, else the text */
    KVN_MAPS_QUERY, /* PROCMAP_QUERY, Linux 6.11 and later */
    KVN_MAPS_TEXT   /* the lines of /proc/self/maps */
} kvn_maps_source;

/* KVN_OK when every byte of [address, address + nbytes) of this process is mapped and readable,
 * and writable if asked, and the first and last byte of each mapping can be had (a file mapping
 * past its file's end cannot). KVN_INVALID: an empty range or one past the address space.
 * KVN_UNMAPPED: `failure` names the range and its first hole. Takes no lock and no memory. */
int kvn_mapping_check(uint64_t address, uint64_t nbytes, int writable, kvn_maps_source source,
                      kvn_failure *failure);
/* The same of `count` ranges; *failed is the index of the first that is not so. To ask the kernel about
 * a range costs a tenth of what it takes to begin asking. */
int kvn_mapping_check_all(const uint64_t *addresses, const uint64_t *nbytes, uint64_t count,
                          int writable, kvn_maps_source source, uint64_t *failed,
                          kvn_failure *failure);

#endif
