/* Faults that a test requests: the function, which of its calls, and the effect. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core_log.h"

typedef struct {
    char name[64];
    int calls_left; /* up to the faulty one; 0: the row is free */
    sim_fault fault;
} row;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static row rows[64];

static int parse_fault(const char *text, sim_fault *fault) {
    static const struct {
        const char *word;
        sim_fault_kind kind;
        int has_code;
    } WORDS[] = {{"hang", SIM_FAULT_HANG, 0},
                 {"sync:", SIM_FAULT_SYNC, 1},
                 {"partial:", SIM_FAULT_PARTIAL, 1},
                 {"", SIM_FAULT_CODE, 1}};
    for (size_t i = 0; i < sizeof WORDS / sizeof *WORDS; i++) {
        size_t length = strlen(WORDS[i].word);
        if (strncmp(text, WORDS[i].word, length)) {
            continue;
        }
        const char *number = text + length;
        char *end = (char *)number;
        long code = WORDS[i].has_code ? strtol(number, &end, 10) : 0;
        if (*end || (WORDS[i].has_code && (end == number || code <= 0))) {
            return -1;
        }
        *fault = (sim_fault){WORDS[i].kind, (int)code};
        return 0;
    }
    return -1;
}

/* "name:n=fault" without blanks. */
static int parse_row(const char *text, row *made) {
    const char *colon = strchr(text, ':');
    if (!colon || colon == text || (size_t)(colon - text) >= sizeof made->name) {
        return -1;
    }
    memcpy(made->name, text, (size_t)(colon - text));
    made->name[colon - text] = '\0';
    char *end;
    long n = strtol(colon + 1, &end, 10);
    if (end == colon + 1 || n < 1 || n > 1000000000 || *end != '=') {
        return -1;
    }
    made->calls_left = (int)n;
    return parse_fault(end + 1, &made->fault);
}

int kvsim_fault_add(const char *specification) {
    row added[sizeof rows / sizeof *rows];
    size_t num_added = 0;
    char text[4096];
    if (strlen(specification) >= sizeof text) {
        return -1;
    }
    strcpy(text, specification);
    char *rest;
    for (char *part = strtok_r(text, "; \t\n", &rest); part; part = strtok_r(NULL, "; \t\n", &rest)) {
        if (num_added == sizeof added / sizeof *added || parse_row(part, &added[num_added++])) {
            return -1;
        }
    }
    pthread_mutex_lock(&mutex);
    size_t next = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows && next < num_added; i++) {
        if (!rows[i].calls_left) {
            rows[i] = added[next++];
        }
    }
    pthread_mutex_unlock(&mutex);
    if (next < num_added) {
        sim_die("more than %zu faults at a time", sizeof rows / sizeof *rows);
    }
    return 0;
}

void kvsim_faults_clear(void) {
    pthread_mutex_lock(&mutex);
    memset(rows, 0, sizeof rows);
    pthread_mutex_unlock(&mutex);
}

int kvsim_faults_left(void) {
    int left = 0;
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        left += rows[i].calls_left > 0;
    }
    pthread_mutex_unlock(&mutex);
    return left;
}

sim_fault sim_fault_take(const char *name) {
    sim_fault fault = {SIM_FAULT_NONE, 0};
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].calls_left && !strcmp(rows[i].name, name) && !--rows[i].calls_left) {
            fault = rows[i].fault;
        }
    }
    pthread_mutex_unlock(&mutex);
    return fault;
}
