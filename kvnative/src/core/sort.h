/* Sorting records by a 64-bit key, in time that is linear in their number. */
#ifndef KVNATIVE_CORE_SORT_H
#define KVNATIVE_CORE_SORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Sorts `count` records of `size` bytes by the uint64_t at `key_at`; equal keys keep their order. `spare` has room
 * for as many records. Returns the array that holds the result: `items` or `spare`.
 *
 * One pass for each byte in which keys differ, the lowest first: addresses and offsets differ in few. Inlined, so
 * that `size` is a constant. */
__attribute__((always_inline)) static inline void *kvn_sort(void *items, void *spare, size_t count, size_t size,
                                                            size_t key_at)
{
    enum { BITS = 8, NUM_DIGITS = 1 << BITS };
    uint64_t differing = 0, key, first = 0, before = 0;
    bool descends = false;

    for (size_t i = 0; i < count; i++) {
        memcpy(&key, (char *)items + i * size + key_at, sizeof key);
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
        for (size_t i = 0; i < count; i++) {
            memcpy(&key, (char *)items + i * size + key_at, sizeof key);
            places[key >> shift & (NUM_DIGITS - 1)]++;
        }
        for (size_t digit = 0; digit < NUM_DIGITS; digit++) {
            const size_t here = places[digit];
            places[digit] = next;
            next += here;
        }
        for (size_t i = 0; i < count; i++) {
            const char *item = (char *)items + i * size;
            memcpy(&key, item + key_at, sizeof key);
            memcpy((char *)sorted + places[key >> shift & (NUM_DIGITS - 1)]++ * size, item, size);
        }
        spare = items;
        items = sorted;
    }
    return items;
}

#endif
