/* striped: several ways to one place, used at once. A large batch is cut into stripes of about the same size, one
 * for each of several backends, as many of them as get `min_nbytes`; what is smaller goes to the first alone.
 * Whatever one of them does not confirm is not confirmed. An outcome waits for all stripes, also when one has
 * failed. A batch of which a stripe is refused may have moved bytes of the others. It does not own what it
 * stripes over. */
#ifndef KVNATIVE_CORE_STRIPED_H
#define KVNATIVE_CORE_STRIPED_H

#include "kvnative/backend.h"

#define KVN_MAX_STRIPES 16

/* NULL with errno set: EINVAL (no backends, or more than KVN_MAX_STRIPES; min_nbytes < 1), ENOMEM. */
kvn_backend *kvn_striped_create(kvn_backend *const *inner, size_t count, uint64_t min_nbytes);

#endif
