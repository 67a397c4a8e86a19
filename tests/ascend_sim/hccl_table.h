/* The rank table: JSON text, versions 1.0 and 1.2, of exactly two ranks. */
#ifndef KVSIM_HCCL_TABLE_H
#define KVSIM_HCCL_TABLE_H

#include <stdint.h>

#include "sim.h"

#define TABLE_RANKS 2

typedef struct {
    char server_id[65];
    char super_pod_id[65];
    char device_ip[46];
    uint32_t device_id; /* physical */
    uint32_t device_port; /* 0: not in the table */
    uint32_t super_device_id;
} table_rank;

typedef struct {
    table_rank ranks[TABLE_RANKS];
    uint32_t num_servers;
    int super_pods;
    uint64_t hash; /* of the text, which must be the same at both ranks */
} rank_table;

/* Returns 0, or -1 and an error text that names the field. */
int table_parse(const char *text, sim_product product, rank_table *out, char *error,
                size_t error_size);
uint64_t table_hash(const void *bytes, size_t nbytes);

#endif
