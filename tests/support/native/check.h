/* Checks in C: a program includes a source of kvnative, and `PROGRAM NAME` runs one check. */
#ifndef KVN_TESTS_CHECK_H
#define KVN_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s is not so\n", __FILE__, __LINE__, #condition);              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

typedef struct check_row {
    const char *name;
    void (*run)(void);
} check_row;

static inline int run_check(int count, char **arguments, const check_row *rows, size_t num_rows)
{
    for (size_t i = 0; count == 2 && i < num_rows; i++)
        if (strcmp(rows[i].name, arguments[1]) == 0) {
            rows[i].run();
            return 0;
        }
    fprintf(stderr, "no such check\n");
    return 2;
}

#endif
