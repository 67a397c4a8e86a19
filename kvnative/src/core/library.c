/* Opens vendor libraries and fills the tables of their calls. */
#include "core/library.h"

#include <dlfcn.h>
#include <string.h>

void *kvn_library_open(const char *path, int flags, kvn_failure *failure)
{
    void *file = dlopen(path, flags);

    if (!file) {
        const char *why = dlerror();
        kvn_fail(failure, KVN_UNSUPPORTED, 0, "%s", why ? why : "the loader gives no reason");
    }
    return file;
}

void *kvn_library_find(void *const *files, size_t num_files, const char *name)
{
    void *address = NULL;

    for (size_t i = 0; i < num_files && !address; i++)
        if (files[i])
            address = dlsym(files[i], name);
    return address;
}

const char *kvn_library_fill(void *const *files, size_t num_files, const kvn_symbols *symbols, void *calls)
{
    const char *missing = NULL;

    for (size_t i = 0; i < symbols->count; i++) {
        const kvn_symbol *symbol = &symbols->all[i];
        void *address = kvn_library_find(files, num_files, symbol->name);
        if (!address && !symbol->is_optional && !missing)
            missing = symbol->name;
        /* memcpy: ISO C has no conversion from void * to a pointer to a function. */
        memcpy((char *)calls + symbol->at, &address, sizeof address);
    }
    return missing;
}

static void *address_of(const void *calls, const kvn_symbol *symbol)
{
    void *address;

    memcpy(&address, (const char *)calls + symbol->at, sizeof address);
    return address;
}

const kvn_symbol *kvn_library_missing(const void *calls, const kvn_symbols *symbols, const kvn_symbol *after)
{
    const kvn_symbol *end = symbols->all + symbols->count;

    for (const kvn_symbol *it = after ? after + 1 : symbols->all; it < end; it++) {
        const bool has_newer = it + 1 < end && it[1].is_newer && address_of(calls, it + 1);
        if (!it->is_newer && !has_newer && !address_of(calls, it))
            return it;
    }
    return NULL;
}

void kvn_library_path(const void *calls, const kvn_symbols *symbols, char *out, size_t room)
{
    Dl_info found;

    if (!dladdr(address_of(calls, &symbols->all[0]), &found) || !found.dli_fname)
        found.dli_fname = "";
    snprintf(out, room, "%s", found.dli_fname);
}
