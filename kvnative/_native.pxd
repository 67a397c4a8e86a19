# Declarations of include/kvnative/*.h and of the sources behind _executor, as C has them.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvnative._lower_c cimport kvn_columns, kvn_gate

cdef extern from "kvnative/status.h" nogil:
    enum:
        KVN_OK
        KVN_PENDING
        KVN_TIMEOUT
        KVN_CANCELLED
        KVN_INVALID
        KVN_NO_MEMORY
        KVN_PEER_GONE
        KVN_DENIED
        KVN_UNMAPPED
        KVN_UNSUPPORTED
        KVN_FAILED
        KVN_DEVICE_MEMORY
        KVN_SUSPECT_REMOTE
        KVN_NO_DEVICE_MEMORY
        KVN_REVOKED

cdef extern from "kvnative/backend.h" nogil:
    enum:
        KVN_HOST_TO_DEVICE
        KVN_DEVICE_TO_HOST
        KVN_DEVICE_TO_DEVICE
        KVN_PEER_GET
        KVN_PEER_PUT
    const int64_t KVN_FOREVER
    const uint64_t KVN_NO_DESCRIPTOR
    enum:
        KVN_MAX_SPANS
    ctypedef struct kvn_span:
        uint64_t first
        uint64_t last
    ctypedef struct kvn_report:
        int32_t status
        int32_t code
        uint64_t failed
        uint64_t bytes_done
        uint32_t num_unconfirmed
        kvn_span unconfirmed[66]  # KVN_MAX_SPANS
        char message[256]
    ctypedef struct kvn_backend:
        const kvn_backend_vtable *vtable
    ctypedef struct kvn_backend_vtable:
        const char *name
        void (*destroy)(kvn_backend *self) noexcept nogil

cdef extern from "host/numa.h" nogil:
    enum:
        KVN_MAX_NODES
    ctypedef struct cpu_set_t:
        pass
    const size_t CPU_SETSIZE
    void CPU_SET(size_t processor, cpu_set_t *set)
    ctypedef struct kvn_numa_node:
        int number
        cpu_set_t processors
    int kvn_numa_ask_kernel(unsigned long count, void **pages, int *numbers)

cdef extern from "host/pool.h" nogil:
    enum:
        KVN_MAX_THREADS
    ctypedef struct kvn_pool:
        pass
    kvn_pool *kvn_pool_create(
        unsigned threads, const kvn_numa_node *nodes, unsigned num_nodes)
    unsigned kvn_pool_threads(const kvn_pool *pool)
    uint64_t kvn_pool_looks(kvn_pool *pool)
    void kvn_pool_tune(kvn_pool *pool, const kvn_tuning *tuning)
    void kvn_pool_destroy(kvn_pool *pool)

cdef extern from "host/job.h" nogil:
    enum:
        KVN_PIECE_MIN

cdef extern from "host/tuning.h" nogil:
    enum:
        KVN_BYPASS_NBYTES
        KVN_PIECE_NBYTES
    ctypedef struct kvn_tuning:
        uint64_t bypass_nbytes
        uint64_t piece_nbytes

cdef extern from "host/copy.h" nogil:
    ctypedef void (*kvn_copy)(void *dst, const void *src, size_t nbytes)
    kvn_copy kvn_copy_past_caches()

cdef extern from "host/measure.h" nogil:
    ctypedef struct kvn_candidate:
        kvn_tuning tuning
        unsigned threads
    int kvn_measure(
        const kvn_candidate *candidates, unsigned count, const kvn_columns *batch, size_t at_once,
        unsigned rounds, int64_t deadline_ns, int64_t *ns, double *share)

cdef extern from "host/host.h" nogil:
    kvn_backend *kvn_host_create(kvn_pool *pool)

cdef extern from "core/striped.h" nogil:
    enum:
        KVN_MAX_STRIPES
    kvn_backend *kvn_striped_create(kvn_backend **inner, size_t count, uint64_t min_nbytes)

cdef extern from "core/failure.h" nogil:
    ctypedef struct kvn_failure:
        int status
        int code
        const char *message

cdef extern from "core/completions.h" nogil:
    ctypedef struct kvn_completions:
        int fd
    ctypedef struct kvn_ending:
        pass
    int kvn_completions_init(kvn_completions *self)
    void kvn_completions_fini(kvn_completions *self)
    size_t kvn_completions_take(kvn_completions *self, uint64_t *tokens, size_t capacity)
    void kvn_ending_init(kvn_ending *self, uint64_t parts)
    bint kvn_ending_is_over(const kvn_ending *self)
    void kvn_ending_watch(kvn_ending *self, kvn_completions *queue, uint64_t token)
    void kvn_ending_leave(kvn_ending *self)

cdef extern from "core/executor.h" nogil:
    ctypedef struct kvn_task:
        pass
    void kvn_task_init(kvn_task *task, kvn_backend *backend, const kvn_columns *columns,
                       kvn_ending *ending)
    int kvn_task_begin(kvn_task *task)
    int kvn_task_poll(kvn_task *task)
    int kvn_task_wait(kvn_task *task, int64_t deadline_ns)
    int kvn_task_abort(kvn_task *task, int why)
    int kvn_task_block_stream(kvn_task *task, void *stream, int64_t deadline_ns, kvn_failure *why)
    bint kvn_task_is_held(kvn_task *task)
    uint64_t kvn_task_bytes_done(kvn_task *task)
    const kvn_report *kvn_task_outcome(const kvn_task *task)
    void kvn_task_release(kvn_task *task)

cdef extern from "core/layered.h" nogil:
    enum:
        KVN_LAYER_WAITING
        KVN_LAYER_MOVING
        KVN_LAYER_DONE
        KVN_LAYER_FAILED
    ctypedef struct kvn_layered:
        uint64_t num_layers
    int kvn_layered_init(kvn_layered *layered, kvn_backend *backend, const kvn_columns *columns,
                         uint64_t layer_size, kvn_ending *ending)
    int kvn_layered_open(kvn_layered *layered, uint64_t layer, kvn_gate *after, int *opened)
    int kvn_layered_poll(kvn_layered *layered)
    int kvn_layered_wait(kvn_layered *layered, int64_t deadline_ns)
    int kvn_layered_abort(kvn_layered *layered, int why)
    bint kvn_layered_is_sealed(kvn_layered *layered)
    void kvn_layered_states(kvn_layered *layered, uint8_t *states)
    uint64_t kvn_layered_bytes_done(kvn_layered *layered)
    const kvn_report *kvn_layered_outcome(const kvn_layered *layered)
    uint32_t kvn_layered_spans(const kvn_layered *layered, uint64_t layer, kvn_span *spans)
    void kvn_layered_release(kvn_layered *layered)

cdef extern from "core/thread.h" nogil:
    int64_t kvn_now_ns()
