/* What UCX says of its errors: kept for the message of a failure, instead of being printed on the standard
 * output of a program that is not ours. */
#ifndef KVN_UCX_LOG_H
#define KVN_UCX_LOG_H

#include <stddef.h>

#include "kvnative/ucx.h"

/* Once in a process, when UCX was loaded. */
void kvn_ucx_log_install(const kvn_ucx *calls);
/* Forgets what was said on this thread. */
void kvn_ucx_log_clear(void);
/* Appends ": " and what was said last on this thread since, if anything. */
void kvn_ucx_log_append(char *message, size_t room);

#endif
