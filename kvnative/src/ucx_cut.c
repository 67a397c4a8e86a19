#include "ucx_cut.h"

#include <stdlib.h>
#include <string.h>

/* ---- the peer's ranges ---- */

typedef struct entry {
    uint64_t address;
    uint64_t nbytes;
    kvn_wire_range range;
} entry;

/* Of those that begin together the larger comes last, and is found first. */
static int compare(const void *left, const void *right)
{
    const entry *a = left, *b = right;

    if (a->address != b->address)
        return a->address < b->address ? -1 : 1;
    return (a->nbytes > b->nbytes) - (a->nbytes < b->nbytes);
}

static bool read_entry(entry *out, uint64_t slot, uint64_t generation, uint64_t address,
                       uint64_t nbytes)
{
    uint64_t last;

    *out = (entry){address, nbytes, {.generation = generation, .slot = (uint32_t)slot}};
    return slot <= UINT32_MAX && nbytes > 0 &&
           !__builtin_add_overflow(address, nbytes - 1, &last);
}

int kvn_ucx_remote_init(kvn_ucx_remote *self, const uint64_t *slots, const uint64_t *generations,
                        const uint64_t *addresses, const uint64_t *nbytes, uint64_t count)
{
    const size_t room = count > 0 ? count : 1;
    entry *entries;
    bool valid = true;

    memset(self, 0, sizeof *self);
    if (count >= UINT32_MAX)
        return KVN_INVALID;
    entries = malloc(room * sizeof *entries);
    self->addresses = malloc(room * sizeof *self->addresses);
    self->nbytes = malloc(room * sizeof *self->nbytes);
    self->ranges = malloc(room * sizeof *self->ranges);
    self->marks = calloc(room, sizeof *self->marks);
    if (!entries || !self->addresses || !self->nbytes || !self->ranges || !self->marks) {
        free(entries);
        kvn_ucx_remote_fini(self);
        return KVN_NO_MEMORY;
    }
    for (uint64_t i = 0; i < count && valid; i++)
        valid = read_entry(&entries[i], slots[i], generations[i], addresses[i], nbytes[i]);
    if (valid) {
        qsort(entries, count, sizeof *entries, compare);
        self->count = (uint32_t)count;
        for (uint32_t i = 0; i < self->count; i++) {
            self->addresses[i] = entries[i].address;
            self->nbytes[i] = entries[i].nbytes;
            self->ranges[i] = entries[i].range;
        }
    } else {
        kvn_ucx_remote_fini(self);
    }
    free(entries);
    return valid ? KVN_OK : KVN_INVALID;
}

void kvn_ucx_remote_fini(kvn_ucx_remote *self)
{
    free(self->addresses);
    free(self->nbytes);
    free(self->ranges);
    free(self->marks);
    memset(self, 0, sizeof *self);
}

static bool holds(const kvn_ucx_remote *self, uint32_t index, uint64_t address, uint64_t nbytes)
{
    const uint64_t skip = address - self->addresses[index];

    return address >= self->addresses[index] && skip <= self->nbytes[index] &&
           nbytes <= self->nbytes[index] - skip;
}

uint32_t kvn_ucx_remote_find(const kvn_ucx_remote *self, uint32_t near, uint64_t address,
                             uint64_t nbytes)
{
    uint32_t low = 0, high = self->count;

    if (near < self->count && holds(self, near, address, nbytes))
        return near;
    while (low < high) { /* the first that begins behind the address */
        const uint32_t middle = low + (high - low) / 2;
        if (self->addresses[middle] <= address)
            low = middle + 1;
        else
            high = middle;
    }
    while (low > 0) /* mostly the first; ranges may overlap */
        if (holds(self, --low, address, nbytes))
            return low;
    return self->count;
}

/* ---- cutting ---- */

/* The range's place in the table, where it is put if it is not there. False: the table is full. */
static bool place(kvn_ucx_remote *remote, uint32_t index, uint32_t most, kvn_wire_range *ranges,
                  uint32_t *num_ranges, uint32_t *out)
{
    uint64_t *mark = &remote->marks[index];

    if (*mark >> 32 != remote->epoch) {
        if (*num_ranges == most)
            return false;
        *mark = remote->epoch << 32 | *num_ranges;
        ranges[(*num_ranges)++] = remote->ranges[index];
    }
    *out = (uint32_t)*mark;
    return true;
}

/* Begins a table: no mark is of it yet. */
static void begin_table(kvn_ucx_remote *remote)
{
    if (++remote->epoch <= UINT32_MAX)
        return;
    memset(remote->marks, 0, remote->count * sizeof *remote->marks);
    remote->epoch = 1;
}

bool kvn_ucx_cut(kvn_ucx_remote *remote, const kvn_ucx_batch *batch, kvn_ucx_cursor *at,
                 const kvn_ucx_limits *limits, kvn_wire_piece *pieces, kvn_wire_range *ranges,
                 kvn_ucx_section *out)
{
    *out = (kvn_ucx_section){.from = *at};
    begin_table(remote);
    while (at->index < batch->count && out->num_pieces < limits->pieces) {
        const uint64_t address = batch->remote[at->index] + at->skip;
        const uint64_t left = batch->nbytes[at->index] - at->skip;
        const uint64_t room = limits->nbytes - out->nbytes, taken = left < room ? left : room;
        kvn_wire_piece piece = {.address = address, .nbytes = (uint32_t)taken};

        if (left > 0) {
            if (room == 0)
                break;
            remote->last = kvn_ucx_remote_find(remote, remote->last, address, left);
            if (remote->last == remote->count)
                return out->num_pieces > 0; /* the next section tells */
            if (!place(remote, remote->last, limits->ranges, ranges, &out->num_ranges,
                       &piece.range))
                break;
        }
        pieces[out->num_pieces++] = piece;
        out->nbytes += taken;
        out->last_end = at->skip + taken;
        if (taken < left) {
            at->skip += taken;
            break;
        }
        at->index++;
        at->skip = 0;
    }
    return true;
}

/* ---- scattering ---- */

bool kvn_ucx_scatter(const kvn_ucx_batch *batch, const kvn_ucx_section *section, uint32_t piece,
                     uint32_t skip, const uint8_t *from, size_t nbytes, kvn_copy copy)
{
    uint64_t at;

    if (piece >= section->num_pieces)
        return false;
    at = kvn_ucx_piece_begin(section, piece) + skip;
    if (at > kvn_ucx_piece_end(batch, section, piece))
        return false;
    while (nbytes > 0) {
        const uint64_t left = kvn_ucx_piece_end(batch, section, piece) - at;
        const uint64_t taken = left < nbytes ? left : nbytes;

        copy((void *)(uintptr_t)(batch->local[section->from.index + piece] + at), from, taken);
        from += taken;
        nbytes -= taken;
        if (nbytes == 0)
            return true;
        if (++piece == section->num_pieces)
            return false;
        at = kvn_ucx_piece_begin(section, piece);
    }
    return true;
}
