/* Input of both ends that fuzz_tcp.c attacks: registered memory, and changed requests. */
#ifndef FUZZ_INPUTS_H
#define FUZZ_INPUTS_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "tcp/table.h"

#define CHECK(truth)                                                                               \
    do {                                                                                           \
        if (!(truth)) {                                                                            \
            fprintf(stderr, "fuzz_tcp: input %" PRIu64 ": not so: %s (%s:%d)\n", tried, #truth,     \
                    __FILE__, __LINE__);                                                           \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#define PAGE 4096u
#define MAX_FRAME (1u << 16)

typedef struct frame {
    uint8_t bytes[MAX_FRAME];
    size_t nbytes;
} frame;

enum { OWN, READABLE, CHANGING, UNMAPPED, NUM_SLOTS };
enum { SECRET = 0xEE };

extern uint64_t tried; /* inputs */
extern uint64_t seed;  /* not 0 */

extern const uint64_t SIZES[NUM_SLOTS];
extern uint8_t *places[NUM_SLOTS]; /* a page of SECRET is before each, and one after the last */
extern uint64_t generations[NUM_SLOTS];
extern bool is_registered[NUM_SLOTS];
extern kvn_tcp_table table;

uint64_t random_word(void);
uint64_t below(uint64_t most);
bool one_in(unsigned count);

void make_memory(void);
void change_registration(void);
void check_memory(void);
bool is_all(const uint8_t *from, uint8_t byte, size_t nbytes);
/* Check that an answer has fewer than 16 of `byte`, which fills unregistered memory, in a row. */
void check_not_told(const uint8_t *bytes, size_t nbytes, uint8_t byte);

/* Add the request in a file to those that are changed. */
void read_file(const char *name);
void next_request(frame *out);
void change(frame *it);
void append(frame *it, const void *bytes, size_t nbytes);

#endif
