/* Checks of mapped memory, which ask the kernel and never touch the memory. */
#ifndef KVN_MAPPING_H
#define KVN_MAPPING_H

#include <stdint.h>

#include "core/failure.h"

typedef enum kvn_maps_source {
    KVN_MAPS_AUTO,  /* the query if the kernel has it, else the text */
    KVN_MAPS_QUERY, /* PROCMAP_QUERY, Linux 6.11 and later */
    KVN_MAPS_TEXT   /* the lines of /proc/self/maps */
} kvn_maps_source;

/* KVN_OK: every byte of [address, address + nbytes) of this process is mapped and readable, and writable if
 * `writable` is set. The first and the last byte of each mapping must exist: bytes beyond the end of a file do not.
 * KVN_INVALID: the range is empty or exceeds the address space. KVN_UNMAPPED: `failure` names the range and its first
 * hole. KVN_UNSUPPORTED: the source cannot be read. The query takes no lock and allocates nothing. */
int kvn_mapping_check(uint64_t address, uint64_t nbytes, int writable, kvn_maps_source source,
                      kvn_failure *failure);
/* Checks `count` ranges; *failed is the index of the first bad one. Each further range takes a tenth of the first
 * one's time. */
int kvn_mapping_check_all(const uint64_t *addresses, const uint64_t *nbytes, uint64_t count,
                          int writable, kvn_maps_source source, uint64_t *failed,
                          kvn_failure *failure);

#endif
