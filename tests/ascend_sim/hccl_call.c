#include <ctype.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hccl_sim.h"

pthread_mutex_t hccl_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t hccl_changed = PTHREAD_COND_INITIALIZER;

typedef struct {
    const char *name;
    int64_t value, minimum;
} setting;

static pthread_mutex_t settings_mutex = PTHREAD_MUTEX_INITIALIZER;
static int settings_read;
static setting settings[] = {
    {"remote_code", 507057, 1}, {"stale_code", 507899, 0}, {"connect_timeout_ms", 120000, 1},
    {"init_us", 200, 0},        {"aicpu", 0, 0},          {"unfold_us", 100000, 0},
};
#define NUM_SETTINGS (sizeof settings / sizeof *settings)

static int set_locked(const char *name, const char *value)
{
    char *end;
    const long long parsed = strtoll(value, &end, 10);
    for (size_t i = 0; i < NUM_SETTINGS; i++)
        if (strcmp(settings[i].name, name) == 0) {
            if (end == value || *end || parsed < settings[i].minimum)
                return -1;
            settings[i].value = parsed;
            return 0;
        }
    return -1;
}

static void read_environment_locked(void)
{
    if (settings_read)
        return;
    settings_read = 1;
    for (size_t i = 0; i < NUM_SETTINGS; i++) {
        char name[64] = "KVSIM_";
        for (size_t k = 0; settings[i].name[k]; k++)
            name[6 + k] = (char)toupper((unsigned char)settings[i].name[k]);
        const char *value = getenv(name);
        if (value && set_locked(settings[i].name, value)) {
            fprintf(stderr, "%s=%s is not a value that the simulator knows\n", name, value);
            abort(); /* so that no test runs with the default instead */
        }
    }
}

hccl_settings hccl_settings_now(void)
{
    pthread_mutex_lock(&settings_mutex);
    read_environment_locked();
    const hccl_settings now = {settings[0].value, settings[1].value, settings[2].value,
                               settings[3].value, settings[4].value, settings[5].value};
    pthread_mutex_unlock(&settings_mutex);
    return now;
}

int kvsim_hccl_set(const char *name, const char *value)
{
    pthread_mutex_lock(&settings_mutex);
    read_environment_locked();
    const int failed = set_locked(name, value);
    pthread_mutex_unlock(&settings_mutex);
    return failed;
}

int64_t hccl_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

int64_t hccl_deadline(int timeout)
{
    if (timeout == -1)
        return INT64_MAX;
    return hccl_now_us() +
           (timeout ? (int64_t)timeout * 1000000 : hccl_settings_now().connect_timeout_ms * 1000);
}

void hccl_wait_until(int64_t deadline_us)
{
    for (int64_t left; (left = deadline_us - hccl_now_us()) > 0;) {
        const int64_t slice = left < 1000000 ? left : 1000000;
        const struct timespec wait = {slice / 1000000, slice % 1000000 * 1000};
        nanosleep(&wait, NULL);
    }
}

HcclResult hccl_enter(hccl_call *call, const char *name)
{
    call->reason[0] = '\0';
    const int code = sim_enter(&call->call, name);
    if (code == SIM_FORKED)
        return hccl_refuse(call, HCCL_E_DRV, "in a child of fork()");
    return (HcclResult)code;
}

HcclResult hccl_refuse(hccl_call *call, HcclResult code, const char *text, ...)
{
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(call->reason, sizeof call->reason, text, arguments);
    va_end(arguments);
    sim_error(0, "%s: %s", call->call.name, call->reason);
    for (char *at = call->reason; *at; at++)
        if (*at == '"' || *at == '\\' || (unsigned char)*at < 0x20)
            *at = '\''; /* the log is JSON */
    return code;
}

HcclResult hccl_leave(hccl_call *call, HcclResult code, const char *fields, ...)
{
    char text[700];
    va_list arguments;
    va_start(arguments, fields);
    vsnprintf(text, sizeof text, fields, arguments);
    va_end(arguments);
    if (call->reason[0])
        sim_leave(&call->call, code, "%s%s\"reason\":\"%s\"", text, *text ? "," : "", call->reason);
    else
        sim_leave(&call->call, code, "%s", text);
    return code;
}

const char *HcclGetErrorString(HcclResult code)
{
    static const char *const texts[] = {
        "no error",
        "parameter error",
        "empty pointer error",
        "memory error",
        "internal error",
        "feature not supported",
        "not found",
        "resource unavailable",
        "system call error",
        "timeout",
        "open file error",
        "tcp connect failed",
        "roce connect failed",
        "tcp transfer failed",
        "roce transfer failed",
        "runtime error",
        "driver error",
        "profiling error",
        "cce error",
        "network error",
        "try again",
        "remote error",
        "suspending communicator",
        "operation retry failed",
        "out of memory",
    };
    if ((unsigned)code < sizeof texts / sizeof *texts)
        return texts[code];
    return code == HCCL_E_IN_STATUS ? "error in status" : "unknown error";
}
