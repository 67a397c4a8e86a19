/* Sorting records by a 64-bit key, in time that is linear in their number. */
#ifndef KVNATIVE_CORE_SORT_H
#define KVNATIVE_CORE_SORT_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The key of a record. */
typedef uint64_t (*kvn_key_of)(const void *item, const void *context);

/* Sorts `count` records of `size` bytes by their keys; equal keys keep their order. `spare` is another array,
 * with room for as many records. Returns the array that holds the result: `items` or `spare`.
 *
 * Makes one pass for each byte in which keys differ, the lowest first: addresses and offsets differ in few. Inlined, so
 * that `size` and `key_of` are constants. */
__attribute__((always_inline)) static inline void *kvn_sort(void *items, void *spare, size_t count, size_t size,
                                                            kvn_key_of key_of, const void *context)
{
    enum { BITS = 8, NUM_DIGITS = 1 << BITS };
    uint64_t differing = 0, first = 0, before = 0;
    bool descends = false;

    assert(items != spare || count == 0);
    for (size_t i = 0; i < count; i++) {
        const uint64_t key = key_of((char *)items + i * size, context);
        first = i == 0 ? key : first;
        differing |= key ^ first;
        descends |= key < before;
        before = key;
    }
    for (unsigned shift = 0; descends && shift < 64; shift += BITS) {
        size_t places[NUM_DIGITS] = {0}, next = 0;
        void *const sorted = spare;

        if ((differing >> shift & (NUM_DIGITS - 1)) == 0)
            continue;
        for (size_t i = 0; i < count; i++)
            places[key_of((char *)items + i * size, context) >> shift & (NUM_DIGITS - 1)]++;
        for (size_t digit = 0; digit < NUM_DIGITS; digit++) {
            const size_t here = places[digit];
            places[digit] = next;
            next += here;
        }
        for (size_t i = 0; i < count; i++) {
            const char *item = (char *)items + i * size;
            const size_t digit = key_of(item, context) >> shift & (NUM_DIGITS - 1);
            memcpy((char *)sorted + places[digit]++ * size, item, size);
        }
        spare = items;
        items = sorted;
    }
    return items;
}

#endif
