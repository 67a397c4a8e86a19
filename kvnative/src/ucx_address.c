#include "ucx_address.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* UCX is not told how long an address is: what a wrong one makes it read is ours, too. */
#define PADDING 4096
#define MAX_NBYTES (64u << 10)

/* Little-endian. */
typedef struct envelope {
    char magic[4];
    uint8_t mode;
    uint8_t has_loopback;
    uint8_t version[2]; /* of UCX */
    uint64_t sum;       /* of everything else */
} envelope;

_Static_assert(sizeof(envelope) == 16, "no gaps");

static const char magic[4] = {'k', 'v', 'u', '1'};

/* FNV-1a, 64 bits. */
static uint64_t add(uint64_t sum, const void *bytes, size_t nbytes)
{
    for (size_t i = 0; i < nbytes; i++)
        sum = (sum ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3;
    return sum;
}

static uint64_t sum_of(const envelope *it, const void *worker, size_t nbytes)
{
    return htole64(add(add(0xcbf29ce484222325, it, offsetof(envelope, sum)), worker, nbytes));
}

static envelope of_end(const kvn_ucx_end *end)
{
    const kvn_ucx_library *library = kvn_ucx_end_library(end);
    char transports[512];
    envelope it = {
        .mode = (uint8_t)kvn_ucx_end_mode(end),
        .version = {(uint8_t)library->version[0], (uint8_t)library->version[1]},
    };

    memcpy(it.magic, magic, sizeof magic);
    kvn_ucx_end_transports(end, transports, sizeof transports);
    it.has_loopback = strstr(transports, "tcp/lo") != NULL;
    return it;
}

size_t kvn_ucx_address_wrap(const kvn_ucx_end *end, const void *worker, size_t nbytes, void **out)
{
    envelope it = of_end(end);

    it.sum = sum_of(&it, worker, nbytes);
    *out = malloc(sizeof it + nbytes);
    if (!*out)
        return 0;
    memcpy(*out, &it, sizeof it);
    memcpy((char *)*out + sizeof it, worker, nbytes);
    return sizeof it + nbytes;
}

static const char *mode_name(unsigned mode)
{
    return mode == KVN_UCX_ONE_SIDED ? "one_sided" : "gathered";
}

int kvn_ucx_address_unwrap(const kvn_ucx_end *end, const void *address, size_t nbytes, void **out,
                           kvn_failure *failure)
{
    const envelope ours = of_end(end);
    const char *worker = (const char *)address + sizeof ours;
    const size_t worker_nbytes = nbytes - sizeof ours;
    envelope it;

    if (nbytes <= sizeof it || nbytes > MAX_NBYTES)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "the peer's address has %zu bytes; it must have %zu to %u", nbytes,
                        sizeof it + 1, MAX_NBYTES);
    memcpy(&it, address, sizeof it);
    if (memcmp(it.magic, magic, sizeof magic) != 0 || it.sum != sum_of(&it, worker, worker_nbytes))
        return kvn_fail(failure, KVN_INVALID, 0,
                        "the peer's address (%zu bytes) is damaged, or not that of an end of UCX",
                        nbytes);
    if (it.mode != ours.mode)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                        "the peer's UCX is in the mode %s and this one in %s; both must have the same",
                        mode_name(it.mode), mode_name(ours.mode));
    if (memcmp(it.version, ours.version, sizeof it.version) != 0 && it.has_loopback &&
        ours.has_loopback)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                        "the peer has UCX %u.%u and this end %u.%u, which do not understand each other"
                        " over the interface lo; use another one (UCX_NET_DEVICES), or the same version",
                        it.version[0], it.version[1], ours.version[0], ours.version[1]);
    *out = calloc(1, worker_nbytes + PADDING);
    if (!*out)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for the peer's address");
    memcpy(*out, worker, worker_nbytes);
    return KVN_OK;
}
