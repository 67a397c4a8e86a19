#include "ucx_log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* UCX gives its handlers no context. Each thread has its own, so that no lock is needed. */
static _Thread_local char latest[200];

static int on_message(const char *file, unsigned line, const char *function, int level,
                      const void *component, const char *format, va_list arguments)
{
    (void)file, (void)line, (void)function, (void)component;
    if (level > KVN_UCS_LOG_LEVEL_ERROR)
        return KVN_UCS_LOG_STOP;
    vsnprintf(latest, sizeof latest, format, arguments);
    return level == KVN_UCS_LOG_LEVEL_FATAL ? KVN_UCS_LOG_CONTINUE : KVN_UCS_LOG_STOP;
}

void kvn_ucx_log_install(const kvn_ucx *calls) { calls->ucs_log_push_handler(on_message); }

void kvn_ucx_log_clear(void) { latest[0] = '\0'; }

void kvn_ucx_log_append(char *message, size_t room)
{
    const size_t used = strlen(message);
    if (latest[0] && used < room)
        snprintf(message + used, room - used, ": %s", latest);
}
