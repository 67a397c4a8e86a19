/* A backend that a check controls. */
#ifndef KVN_TESTS_SAID_H
#define KVN_TESTS_SAID_H

#include <stdbool.h>
#include <stdint.h>

#include "core/gate.h"
#include "core/report.h"
#include "kvnative/backend.h"

#include "check.h"

static struct {
    int submitted, left, polled;
    bool refuses; /* refuses a batch after a gate, for lack of room */
    bool is_full; /* a caller that hurries gets no place */
    kvn_gate_waiter *waiter; /* of the last task that entered a gate */
    void (*on_enter)(void);
    void (*on_abort)(void);
} said = {.polled = KVN_PENDING};

static int submit_said(kvn_backend *self, const kvn_columns *batch, kvn_request **out, kvn_report *report)
{
    (void)self;
    *out = NULL;
    if ((batch->after && said.refuses) || (batch->caller == KVN_CALLER_HURRIES && said.is_full))
        return KVN_PENDING;
    said.submitted++;
    *out = (kvn_request *)report; /* requests differ only in their reports */
    return KVN_OK;
}

static int outcome(kvn_request *request)
{
    kvn_report *report = (kvn_report *)request;

    if (said.polled == KVN_OK)
        kvn_report_begin(report);
    else if (said.polled != KVN_PENDING)
        kvn_report_refuse(report, 1, said.polled, 0, "said");
    return report->status = said.polled;
}

static int poll_said(kvn_backend *self, kvn_request *request, uint64_t *bytes_done)
{
    (void)self;
    *bytes_done = 0;
    return outcome(request);
}

static int wait_done(kvn_backend *self, kvn_request *request, int64_t deadline_ns)
{
    (void)self, (void)deadline_ns;
    said.polled = KVN_OK;
    return outcome(request);
}

static int abort_said(kvn_backend *self, kvn_request *request, int why)
{
    (void)self;
    if (said.on_abort)
        said.on_abort();
    said.polled = why;
    return outcome(request);
}

static void release_nothing(kvn_backend *self, kvn_request *request) { (void)self, (void)request; }

static const kvn_backend_vtable plain = {
    .name = "said", .submit = submit_said, .poll = poll_said, .wait = wait_done, .abort = abort_said,
    .release = release_nothing,
};

static uint64_t zeros[4], ones[4] = {1, 1, 1, 1};

static kvn_columns columns_of(size_t count)
{
    return (kvn_columns){.dst = zeros, .src = zeros, .nbytes = ones, .count = count};
}

#endif
