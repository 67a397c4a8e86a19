/* striped: several backends to the same memory, used at once. A large batch is split into stripes of about the same
 * size, `min_nbytes` or more, at most one for each backend; a small batch goes to the first backend. The outcome waits
 * for all stripes, also after a failure, and confirms a descriptor only if its stripe does. If one stripe is refused,
 * bytes of others may have moved. The inner backends are not owned; the batch fails if one answers KVN_PENDING to
 * `submit`. */
#ifndef KVNATIVE_CORE_STRIPED_H
#define KVNATIVE_CORE_STRIPED_H

#include "kvnative/backend.h"

#define KVN_MAX_STRIPES 16

/* NULL with errno set: EINVAL (no backends, or more than KVN_MAX_STRIPES; min_nbytes < 1), ENOMEM. */
kvn_backend *kvn_striped_create(kvn_backend *const *inner, size_t count, uint64_t min_nbytes);

#endif
