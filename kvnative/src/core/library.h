/* Opens vendor libraries at run time, and fills tables of pointers to their functions.
 *
 * No library is ever closed: its threads, and its registrations with the system, outlive its last user. */
#ifndef KVNATIVE_CORE_LIBRARY_H
#define KVNATIVE_CORE_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

#include "core/failure.h"

/* A function of a library, and the offset of its pointer in the table of calls. */
typedef struct kvn_symbol {
    const char *name;
    size_t at;
    bool is_optional; /* the pointer is NULL if the library lacks the call */
    bool is_newer;    /* it can replace the call of the symbol before, so that either is enough */
} kvn_symbol;

/* All calls of a library. */
typedef struct kvn_symbols {
    const kvn_symbol *all; /* the file of the first one is the library's path */
    size_t count;
} kvn_symbols;

#define KVN_COUNT_OF(array) (sizeof(array) / sizeof *(array))

/* Calls dlopen with these flags. NULL: `failure` has KVN_UNSUPPORTED and the loader's reason. */
void *kvn_library_open(const char *path, int flags, kvn_failure *failure);
/* Writes the address of each symbol to `calls`, from the first of `files` that has it; a file may be NULL. Returns
 * the name of the first required symbol that is missing, or NULL. */
const char *kvn_library_fill(void *const *files, size_t num_files, const kvn_symbols *symbols, void *calls);
/* The address of a symbol in the first of `files` that has it, or NULL. */
void *kvn_library_find(void *const *files, size_t num_files, const char *name);
/* Returns the first missing symbol of `calls` after `after` (NULL: of all), or NULL. A call and its newer form count as
 * one, which has the older name. */
const kvn_symbol *kvn_library_missing(const void *calls, const kvn_symbols *symbols, const kvn_symbol *after);
/* Writes the path of the file that holds the first symbol; "" if the loader does not know it. */
void kvn_library_path(const void *calls, const kvn_symbols *symbols, char *out, size_t room);

#endif
