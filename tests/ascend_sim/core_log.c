/* Common parts of every simulated call: its fault, its log line, and the text of its error. */
#include "core_log.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static uint64_t num_lines;
static int forked;

static _Thread_local char pending[512];
static _Thread_local char taken[512];

static void note_fork(void) { forked = 1; }

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, note_fork);
}

int sim_is_forked(void) { return forked; }

void sim_die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "kvsim: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    abort();
}

int sim_log_open(const char *path) {
    int fd = *path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    if (*path && fd < 0) {
        return -1;
    }
    pthread_mutex_lock(&mutex);
    int old = log_fd;
    log_fd = fd;
    pthread_mutex_unlock(&mutex);
    if (old >= 0) {
        close(old);
    }
    return 0;
}

/* Writes each line by one write(), so that lines of processes that share the file do not mix. */
static void write_line(const char *call, const int *code, const char *fields, va_list arguments) {
    char line[4096];
    if (forked) {
        return;
    }
    pthread_mutex_lock(&mutex);
    if (log_fd >= 0) {
        int used = snprintf(line, sizeof line, "{\"call\":\"%s\"", call);
        if (code) {
            used += snprintf(line + used, sizeof line - (size_t)used, ",\"code\":%d", *code);
        }
        used += snprintf(line + used, sizeof line - (size_t)used,
                         ",\"pid\":%d,\"tid\":%ld,\"seq\":%llu,\"us\":%lld", (int)getpid(),
                         syscall(SYS_gettid), (unsigned long long)num_lines++,
                         (long long)sim_now_us());
        int length = vsnprintf(line + used + 1, sizeof line - (size_t)used - 1, fields, arguments);
        if (length) {
            line[used] = ',';
            used += 1 + length;
        }
        if ((size_t)used > sizeof line - 3) {
            sim_die("the log line of %s has %d bytes", call, used);
        }
        line[used++] = '}';
        line[used++] = '\n';
        if (write(log_fd, line, (size_t)used) != used) {
            sim_die("cannot write to the log");
        }
    }
    pthread_mutex_unlock(&mutex);
}

int sim_enter(sim_call *call, const char *name) {
    call->name = name;
    call->fault = (sim_fault){SIM_FAULT_NONE, 0};
    if (forked) {
        return sim_error(SIM_FORKED, "%s: the device was opened before fork()", name);
    }
    call->fault = sim_fault_take(name);
    if (call->fault.kind != SIM_FAULT_CODE) {
        return 0;
    }
    return sim_error(call->fault.code, "%s: a fault of the test: %d", name, call->fault.code);
}

int sim_leave(const sim_call *call, int code, const char *fields, ...) {
    va_list arguments;
    va_start(arguments, fields);
    write_line(call->name, &code, fields, arguments);
    va_end(arguments);
    return code;
}

static int num_violations;
static char last_violation[512];

void sim_violation(const char *format, ...) {
    char text[sizeof last_violation];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&mutex);
    num_violations++;
    memcpy(last_violation, text, sizeof text);
    pthread_mutex_unlock(&mutex);
    sim_note("violation", "\"what\":\"%s\"", text);
}

int kvsim_violations(void) {
    pthread_mutex_lock(&mutex);
    int count = num_violations;
    pthread_mutex_unlock(&mutex);
    return count;
}

const char *kvsim_last_violation(void) {
    static _Thread_local char copy[sizeof last_violation];
    pthread_mutex_lock(&mutex);
    memcpy(copy, last_violation, sizeof copy);
    pthread_mutex_unlock(&mutex);
    return copy;
}

void sim_note(const char *what, const char *fields, ...) {
    va_list arguments;
    va_start(arguments, fields);
    write_line(what, NULL, fields, arguments);
    va_end(arguments);
}

int sim_error(int code, const char *text, ...) {
    va_list arguments;
    va_start(arguments, text);
    char line[sizeof pending / 2];
    int used = snprintf(line, sizeof line, "ES%04d: ", code % 10000);
    vsnprintf(line + used, sizeof line - (size_t)used, text, arguments);
    while (*pending && strlen(pending) + strlen(line) + 2 > sizeof pending) { /* drop the oldest line */
        const char *next = strchr(pending, '\n');
        memmove(pending, next ? next + 1 : "", next ? strlen(next) : 1);
    }
    used = (int)strlen(pending);
    snprintf(pending + used, sizeof pending - (size_t)used, "%s%s", used ? "\n" : "", line);
    va_end(arguments);
    return code;
}

const char *sim_error_take(void) {
    if (!*pending) {
        return NULL;
    }
    strcpy(taken, pending);
    *pending = '\0';
    return taken;
}
