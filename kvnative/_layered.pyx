"""Transfers that are submitted layer by layer."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvnative cimport _native
from kvnative._backend cimport Backend
from kvnative._lower cimport Descriptors
from kvnative._lower_c cimport kvn_columns, kvn_gate
from kvnative._native cimport *
from kvnative._report cimport Report, report_with
from kvnative._task cimport AnyTask, Gate

__all__ = ["LAYER_DONE", "LAYER_FAILED", "LAYER_MOVING", "LAYER_WAITING", "LayeredTask"]

# Constants of layered.h under the same names.
globals().update(
    LAYER_WAITING=_native.KVN_LAYER_WAITING, LAYER_MOVING=_native.KVN_LAYER_MOVING,
    LAYER_DONE=_native.KVN_LAYER_DONE, LAYER_FAILED=_native.KVN_LAYER_FAILED,
)


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
@cython.nonecheck(True)
cdef class LayeredTask(AnyTask):
    """A transfer whose layers, slices of the descriptor array, move once they are opened.

    The first failing layer ends the task: no further layer opens, and the report covers the whole
    array once the layers in flight have ended. Dropping the object stops nothing: layers that are
    not open wait for `cancel` or the executor's `close`. All methods are thread-safe.
    """

    @staticmethod
    cdef LayeredTask prepare(Backend backend, Descriptors descriptors, uint64_t layer_size,
                             object keep, dict siblings):
        cdef LayeredTask self = LayeredTask.__new__(LayeredTask)
        cdef kvn_columns columns = self.take(backend, descriptors, keep, siblings)
        cdef int status
        with nogil:
            status = kvn_layered_init(&self.layered, backend.handle, &columns, layer_size,
                                      &self.ending)
        if status == KVN_NO_MEMORY:
            descriptors.release()
            self.descriptors = None  # never begun
            raise MemoryError(f"no memory for {columns.count} descriptors in layers of"
                              f" {layer_size}")
        if status == KVN_PENDING:
            self.enlist()
        else:
            self.settle()
        return self

    def __dealloc__(self):
        if self.over():
            kvn_layered_release(&self.layered)

    cdef int poll_native(self) noexcept nogil:
        return kvn_layered_poll(&self.layered)

    cdef int wait_native(self, int64_t deadline_ns) noexcept nogil:
        return kvn_layered_wait(&self.layered, deadline_ns)

    cdef int abort_native(self, int why) noexcept nogil:
        return kvn_layered_abort(&self.layered, why)

    cdef uint64_t bytes_done_native(self) noexcept nogil:
        return kvn_layered_bytes_done(&self.layered)

    cdef Report make_outcome(self):
        return report_with(kvn_layered_outcome(&self.layered), self.count, self.unconfirmed())

    cdef tuple unconfirmed(self):
        """Return the merged spans of the whole array, once there is an outcome."""
        cdef kvn_span spans[KVN_MAX_SPANS]
        cdef uint64_t layer, first = 0, last = 0
        cdef uint32_t i
        cdef list merged = []
        for layer in range(self.layered.num_layers):
            for i in range(kvn_layered_spans(&self.layered, layer, spans)):
                if spans[i].first != last:
                    if first < last:
                        merged.append((first, last))
                    first = spans[i].first
                last = spans[i].last
        if first < last:
            merged.append((first, last))
        return tuple(merged)

    cdef bint will_end(self):
        return kvn_layered_is_sealed(&self.layered)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.layered.num_layers

    @property
    def sealed(self) -> bool:
        """True once no layer can be opened: all are open, or the task failed or was cancelled."""
        if self.settled() is not None:
            return True
        self.backend.check_process()
        return kvn_layered_is_sealed(&self.layered)

    def open(self, layer: int, Gate after=None) -> bool:
        """Submit a layer and return at once; a small one is done on return.

        Args:
            layer: index.
            after: event before which no byte of the layer moves.

        Returns:
            True if this call submitted the layer; False if it was open or the task has ended.
        """
        cdef uint64_t index
        cdef int status, opened = 0
        cdef kvn_gate *gate
        if not 0 <= layer < self.layered.num_layers:
            raise ValueError(f"layer = {layer!r}: expected 0 to {self.num_layers - 1}")
        if self.settled() is not None:
            return False
        self.backend.check_process()
        index = layer
        gate = self.behind(after)
        with nogil:
            status = kvn_layered_open(&self.layered, index, gate, &opened)
        if after is not None and not opened:
            self.gates.remove(after)  # the layer was not submitted
        if status != KVN_PENDING:
            self.settle()
        return opened != 0

    def states(self) -> tuple[int, ...]:
        """Return the state of each layer: LAYER_WAITING, LAYER_MOVING, LAYER_DONE or LAYER_FAILED.

        A layer that was cancelled while it moved has failed. A layer that was never opened is
        waiting, also after the task has ended.
        """
        cdef bytearray states = bytearray(self.layered.num_layers)
        cdef uint8_t *first
        self.backend.check_process()  # the mutex of the parent may be locked in a forked child
        self.done  # polls the layers in flight
        first = <uint8_t *><char *>states
        kvn_layered_states(&self.layered, first)
        return tuple(states)
