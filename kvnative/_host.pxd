from libc.stdint cimport int64_t, uint64_t


from kvnative._crossing cimport kvn_failure


cdef extern from "process/mapping.h" nogil:
    ctypedef enum kvn_maps_source:
        KVN_MAPS_AUTO
        KVN_MAPS_QUERY
        KVN_MAPS_TEXT

    int kvn_mapping_check(
        uint64_t address, uint64_t nbytes, int writable, kvn_maps_source source,
        kvn_failure *failure
    )
    int kvn_mapping_check_all(
        const uint64_t *addresses, const uint64_t *nbytes, uint64_t count, int writable,
        kvn_maps_source source, uint64_t *failed, kvn_failure *failure
    )


cdef extern from "host/arena.h" nogil:
    ctypedef enum kvn_arena_pages:
        KVN_PAGES_AUTO
        KVN_PAGES_SMALL
        KVN_PAGES_HUGETLB

    ctypedef struct kvn_arena:
        void *address
        uint64_t nbytes
        uint64_t inode
        int fd
        int writable
        kvn_arena_pages pages

    int kvn_arena_create(
        const char *name, uint64_t nbytes, int exclusive, kvn_arena_pages pages, int node,
        kvn_arena *out, kvn_failure *failure
    )
    int kvn_arena_import(
        int pid, int fd, uint64_t inode, uint64_t nbytes, int writable, kvn_arena *out,
        kvn_failure *failure
    )
    int kvn_arena_populate(const kvn_arena *arena, kvn_failure *failure)
    void kvn_arena_close(kvn_arena *arena)


cdef extern from "host/pages.h" nogil:
    ctypedef enum kvn_walk_kind:
        KVN_WALK_MAP
        KVN_WALK_COLLAPSE

    ctypedef struct kvn_walk:
        uint64_t nbytes
        uint64_t num_chunks
        uint64_t next
        uint64_t left
        bint stopped

    ctypedef struct kvn_page_use:
        uint64_t present
        bint has_mapped
        uint64_t mapped
        uint64_t huge

    int kvn_walk_begin(
        kvn_walk *walk, uint64_t nbytes, kvn_walk_kind kind, kvn_failure *failure
    )
    void kvn_walk_end(kvn_walk *walk)
    int kvn_walk_advance(
        kvn_walk *walk, char *address, int64_t budget_ns, uint64_t *advanced, kvn_failure *failure
    )
    void kvn_walk_again(kvn_walk *walk)
    int kvn_pages_look(
        uint64_t address, uint64_t nbytes, kvn_page_use *out, kvn_failure *failure
    )


cdef extern from "host/generations.h" nogil:
    ctypedef struct kvn_word:
        uint64_t slot
        uint64_t generation

    ctypedef struct kvn_generations:
        kvn_arena memory
        uint64_t num_slots

    int kvn_generations_create(
        uint64_t num_slots, uint64_t num_leases, kvn_generations *out, kvn_failure *failure
    )
    void kvn_generations_close(kvn_generations *table)
    int kvn_generations_take(
        kvn_generations *table, bint is_lease, uint64_t deadline_ns, uint64_t *slot,
        uint64_t *generation, kvn_failure *failure
    )
    int kvn_generations_renew(
        kvn_generations *table, uint64_t slot, uint64_t generation, uint64_t deadline_ns,
        kvn_failure *failure
    )
    int kvn_generations_release(
        kvn_generations *table, uint64_t slot, uint64_t generation, kvn_failure *failure
    )


cdef class GenerationTable:
    cdef kvn_generations table
    cdef int check_open(self) except -1


# Raise `failure` as ValueError, MemoryError, or the OSError of its errno.
cdef int check(int status, const kvn_failure *failure) except -1 nogil
# Return the words in `words`, 16 bytes each: slot and generation. ValueError: the last is cut.
cdef const kvn_word *words_in(bytes words, uint64_t *count) except NULL
# Return `value` as a uint64; errors call it `name`.
cdef uint64_t unsigned(str name, value) except? 0xBAD
