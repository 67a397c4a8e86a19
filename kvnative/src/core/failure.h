/* The failure of a call: status, error code and a sentence. */
#ifndef KVN_FAILURE_H
#define KVN_FAILURE_H

#include <stdarg.h>
#include <stdio.h>

#include "kvnative/status.h"

typedef struct kvn_failure {
    int status;        /* kvn_status */
    int code;          /* errno or the runtime's error; 0: neither was involved */
    char message[256]; /* names the argument, its value and the allowed range */
} kvn_failure;

/* Fills in the failure and returns its status, for use in a `return`. */
__attribute__((format(printf, 4, 5))) static inline int kvn_fail(kvn_failure *failure, int status,
                                                                 int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    failure->status = status;
    failure->code = code;
    vsnprintf(failure->message, sizeof failure->message, format, arguments);
    va_end(arguments);
    return status;
}

#endif
