/* Descriptions: the content of an HcclMemDesc. */
#ifndef KVSIM_HCCL_DESCRIBE_H
#define KVSIM_HCCL_DESCRIBE_H

#include "hccl_sim.h"

typedef struct {
    uint32_t local_rank, remote_rank;
    uint64_t magic;
    wire_region range;
} described;

_Static_assert(sizeof(described) <= sizeof(HcclMemDesc), "a descriptor holds what is described");

void describe(const comm *c, const wire_region *range, HcclMemDesc *out);
/* Reads a description; refuses one that is not of memory of the rank `owner`. */
HcclResult read_desc(hccl_call *call, const HcclMemDesc *desc, uint32_t owner, described *out);

#endif
