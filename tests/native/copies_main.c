/* Every strategy that this processor has, on every alignment and many sizes, beside a loop of bytes.
 * For processors that the tests do not run on: compiled for them, and emulated. Prints the strategies. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host/copy.h"

#define ROOM 9000

static int check(unsigned strategy, unsigned char *to, const unsigned char *from, size_t dst, size_t src,
                 size_t nbytes)
{
    memset(to, 0xA5, ROOM);
    kvn_copy_function(strategy)(to + dst, from + src, nbytes);
    kvn_copy_fence();
    for (size_t i = 0; i < ROOM; i++) {
        unsigned char expected = i >= dst && i < dst + nbytes ? from[src + i - dst] : 0xA5;
        if (to[i] != expected) {
            fprintf(stderr, "%s: byte %zu of %zu bytes from +%zu to +%zu is %d, not %d\n",
                    kvn_strategy_name(strategy), i, nbytes, src, dst, to[i], expected);
            return 1;
        }
    }
    return 0;
}

int main(void)
{
    static const size_t SHIFTS[] = {0, 1, 8, 15, 16, 33, 63, 64, 65, 127};
    enum { NUM_SHIFTS = sizeof SHIFTS / sizeof *SHIFTS };
    unsigned char *from = malloc(ROOM), *to = aligned_alloc(4096, 12288);

    for (size_t i = 0; i < ROOM; i++)
        from[i] = (unsigned char)(i * 31 + i / 256);
    for (unsigned strategy = 0; strategy < KVN_NUM_STRATEGIES; strategy++) {
        if (!kvn_copy_function(strategy))
            continue;
        for (size_t dst = 0; dst < NUM_SHIFTS; dst++)
            for (size_t src = 0; src < NUM_SHIFTS; src++)
                for (size_t nbytes = 0; nbytes < 8192; nbytes += nbytes < 300 ? 7 : nbytes / 3)
                    if (check(strategy, to, from, SHIFTS[dst], SHIFTS[src], nbytes))
                        return 1;
        puts(kvn_strategy_name(strategy));
    }
    return 0;
}
