/* Fills in and merges reports of batches. */
#include "core/report.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void kvn_report_begin(kvn_report *report)
{
    memset(report, 0, offsetof(kvn_report, unconfirmed));
    report->status = KVN_PENDING;
    report->failed = KVN_NO_DESCRIPTOR;
    report->message[0] = '\0';
}

int kvn_report_refuse(kvn_report *report, uint64_t count, int status, int code, const char *format,
                      ...)
{
    va_list arguments;

    kvn_report_begin(report);
    report->status = status;
    report->code = code;
    kvn_report_add_span(report, 0, count);
    va_start(arguments, format);
    vsnprintf(report->message, sizeof report->message, format, arguments);
    va_end(arguments);
    return status;
}

/* A full report loses precision, but no descriptor: the last span grows. */
void kvn_report_add_span(kvn_report *report, uint64_t first, uint64_t last)
{
    if (first >= last)
        return;
    if (report->num_unconfirmed == KVN_MAX_SPANS) {
        kvn_span *end = &report->unconfirmed[KVN_MAX_SPANS - 1];
        end->first = first < end->first ? first : end->first;
        end->last = last > end->last ? last : end->last;
        return;
    }
    report->unconfirmed[report->num_unconfirmed++] = (kvn_span){first, last};
}

static void sort_spans(kvn_span *spans, uint32_t count)
{
    for (uint32_t i = 1; i < count; i++) {
        kvn_span moving = spans[i];
        uint32_t at = i;
        for (; at > 0 && spans[at - 1].first > moving.first; at--)
            spans[at] = spans[at - 1];
        spans[at] = moving;
    }
}

void kvn_report_merge_spans(kvn_report *report)
{
    kvn_span *spans = report->unconfirmed;
    uint32_t kept = 0;

    sort_spans(spans, report->num_unconfirmed);
    for (uint32_t i = 0; i < report->num_unconfirmed; i++) {
        if (kept > 0 && spans[i].first <= spans[kept - 1].last) {
            if (spans[i].last > spans[kept - 1].last)
                spans[kept - 1].last = spans[i].last;
        } else {
            spans[kept++] = spans[i];
        }
    }
    report->num_unconfirmed = kept;
}

uint64_t kvn_report_unconfirmed(const kvn_report *report)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < report->num_unconfirmed; i++)
        sum += report->unconfirmed[i].last - report->unconfirmed[i].first;
    return sum;
}

void kvn_report_given_up(kvn_report *report, int why, uint64_t unconfirmed, uint64_t count,
                         uint64_t total)
{
    const char *words = why == KVN_TIMEOUT   ? "the deadline passed"
                        : why == KVN_REVOKED ? "its memory was revoked"
                                             : "cancelled";

    report->status = why;
    snprintf(report->message, sizeof report->message,
             "%s: %" PRIu64 " of %" PRIu64 " bytes were moved, %" PRIu64 " of %" PRIu64
             " descriptors are not confirmed",
             words, report->bytes_done, total, unconfirmed, count);
}

void kvn_report_abandoned(kvn_report *report, int why, uint64_t count, uint64_t total)
{
    kvn_report_given_up(report, why, kvn_report_unconfirmed(report), count, total);
}
