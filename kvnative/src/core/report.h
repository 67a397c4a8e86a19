/* Functions by which backends, wrappers and the executor fill in a kvn_report. */
#ifndef KVNATIVE_CORE_REPORT_H
#define KVNATIVE_CORE_REPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "kvnative/backend.h"

/* True for the statuses of an aborted batch, which has not failed. */
static inline bool kvn_is_given_up(int status)
{
    return status == KVN_TIMEOUT || status == KVN_CANCELLED || status == KVN_REVOKED;
}

/* Resets a report to KVN_PENDING, which is not an outcome, without failure and spans. */
void kvn_report_begin(kvn_report *report);
/* Refuses a batch of `count` descriptors, of which no byte was moved. Returns `status`. */
int kvn_report_refuse(kvn_report *report, uint64_t count, int status, int code, const char *format,
                      ...) __attribute__((format(printf, 5, 6)));
/* Empty spans are ignored. Call kvn_report_merge_spans once all are added. */
void kvn_report_add_span(kvn_report *report, uint64_t first, uint64_t last);
void kvn_report_merge_spans(kvn_report *report);
uint64_t kvn_report_unconfirmed(const kvn_report *report);
/* Writes status and message of a batch that was aborted for `why`, from the spans and bytes of the report. */
void kvn_report_abandoned(kvn_report *report, int why, uint64_t count, uint64_t total);
/* The same for spans that are kept elsewhere, with `unconfirmed` of `count` descriptors. */
void kvn_report_given_up(kvn_report *report, int why, uint64_t unconfirmed, uint64_t count,
                         uint64_t total);

#endif
