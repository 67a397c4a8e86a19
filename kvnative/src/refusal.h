/* Why a call on memory or on another process was refused: status, errno and a sentence. */
#ifndef KVN_REFUSAL_H
#define KVN_REFUSAL_H

#include <stdarg.h>
#include <stdio.h>

#include "kvnative/status.h"

typedef struct kvn_refusal {
    int status;        /* kvn_status */
    int code;          /* errno, or 0 where the system had no part in it */
    char message[256]; /* names the argument, its value and what is allowed */
} kvn_refusal;

/* Fills the refusal and returns its status, so that a refusal is one `return`. */
__attribute__((format(printf, 4, 5))) static inline int kvn_refuse(kvn_refusal *refusal, int status,
                                                                   int code, const char *format,
                                                                   ...)
{
    va_list arguments;
    va_start(arguments, format);
    refusal->status = status;
    refusal->code = code;
    vsnprintf(refusal->message, sizeof refusal->message, format, arguments);
    va_end(arguments);
    return status;
}

#endif
