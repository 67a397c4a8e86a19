"""The execution of plans: bind, lower, submit, and return a task."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Final, Self, cast
from weakref import WeakKeyDictionary, ref

import numpy as np

from kvnative._backend import KVN_CANCELLED, KVN_OK, Backend, NativeError, ThreadPool, host_backend
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._report import Report
from kvnative._signals import Mutex
from kvnative._tuning import Tuning
from kvplan.execution.binding import bind
from kvplan.execution.layer_task import LayerTask
from kvplan.execution.memory import HostMemory, Memory, TensorMemory, memory_of, using
from kvplan.execution.rows import RowRequests
from kvplan.execution.task import TransferTask, failure
from kvplan.execution.tuning import choose
from kvplan.execution.verification import SCRATCH_NBYTES, verify
from kvplan.planning.plan import Plan
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.limits import system_error
from kvplan.validation import as_int, check_mapping, check_timeout, check_type, shown

if TYPE_CHECKING:
    from kvnative._layered import LayeredTask
    from kvnative._task import Gate, Task
    from kvplan.execution.compute_events import GateOf, StreamOf

_HAS_GIL: Final = getattr(sys, "_is_gil_enabled", lambda: True)()

SMALL_NBYTES: Final = 64 << 10 if _HAS_GIL else 0
"""The largest transfer that the calling thread copies without a task: 3 us at 20 GB/s.

The copy holds the GIL, on which `close` relies. Without a GIL every transfer has a task.
"""

Nodes = tuple[tuple[int, frozenset[int]], ...]
"""NUMA nodes with the processors of each."""


class Transfers:
    """A thread pool, and the executor that submits plans to it.

    Args:
        threads: number of copying threads, 1 to 64; None: that of the tuning.
        wrap: called with each backend; returns the backend to use, such as a wrapper for faults,
            delays, limits or traces.
        tuning: the tuning of copies; None: the built-in one.
        nodes: the processors of each NUMA node to spread the threads over; each thread prefers
            copies to memory of its node. None: the system chooses where threads run.

    Attributes:
        rows: lowers requests without a plan.
        small_nbytes: the largest transfer that the calling thread copies without a task; 0: none.

    Raises:
        TypeError, ValueError: an argument of the wrong type or range.
        LLMException: LLM_OUT_OF_MEMORY: the system has too few threads.
    """

    def __init__(
        self,
        threads: int | None = None,
        wrap: Callable[[Backend], Backend] | None = None,
        tuning: Tuning | None = None,
        nodes: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        if wrap is not None and not callable(wrap):
            raise TypeError(f"wrap={shown(wrap)} must be callable, not {type(wrap).__name__}")
        tuning = None if tuning is None else check_type("tuning", tuning, Tuning)
        if nodes is not None:
            check_mapping("nodes", nodes)
            for node, processors in nodes.items():
                as_int("a key of nodes", node)
                if not isinstance(processors, Collection):
                    raise TypeError(f"nodes[{node}]={shown(processors)} must be a collection")
                for processor in processors:
                    as_int(f"nodes[{node}]", processor)
        try:
            threads = None if threads is None else as_int("threads", threads)
            self._pool = ThreadPool(threads, tuning, nodes)
        except (NativeError, MemoryError) as error:
            raise system_error("copying threads", error) from error
        self._wrap = wrap
        host = host_backend(self._pool)
        self._begin(host if wrap is None else wrap(host))

    def _begin(self, host: Backend) -> None:
        self._executor = Executor(host)
        self.rows: RowRequests = RowRequests()
        self._closed = False
        # A wrapper must see each copy.
        self.small_nbytes: int = SMALL_NBYTES if self._wrap is None else 0
        # Not a WeakSet: threads add while another iterates.
        self._shares: set[ref[Transfers]] = set()
        self._mutex = Mutex()  # guards `_wrapped`; `wrap` may submit
        self._wrapped: WeakKeyDictionary[TensorMemory, dict[Backend, Backend]] = WeakKeyDictionary()

    def share(self) -> Transfers:
        """Return transfers over the same threads, which can be closed separately.

        Closing these transfers also closes the result.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED after `close`; LLM_FAILED in a forked child.
        """
        other = Transfers.__new__(type(self))
        other._pool, other._wrap = self._pool, self._wrap
        try:
            other._begin(self._executor.backend)
        except NativeError as error:
            raise self._unusable(error) from error
        self._shares.add(ref(other, self._shares.discard))
        if self._closed:  # after adding it: `close` or this call closes it
            other.close()
            raise self._unusable(NativeError("the transfers are closed"))
        return other

    @property
    def threads(self) -> int:
        """The number of copying threads."""
        return self._pool.threads

    def submit(
        self,
        plan: Plan,
        src: Memory,
        dst: Memory,
        on_outcome: Callable[[LLMException | None], None] | None = None,
        descriptors: Descriptors | None = None,
        after: Gate | None = None,
        stream_of: StreamOf | None = None,
        timeout_ms: float | None = None,
    ) -> TransferTask:
        """Start `plan` from `src` to `dst` without waiting; small transfers are done on return.

        Args:
            src, dst: TensorMemory, a `Cache` with addresses, or a sequence of arrays.
            on_outcome: as for `TransferTask`; not called if this raises.
            descriptors: those of the plan between these memories, as made by `rows.bind`; None:
                the plan is lowered.
            after: the gate that the transfer waits for, as made by `Device.gate`; None: no gate.
            stream_of, timeout_ms: as for `TransferTask` and `TensorMemory.backend`.

        Raises:
            TypeError, ValueError: an argument of the wrong type, or `timeout_ms` is < 0 or NaN.
            LLMException: LLM_PARAM_INVALID: memory and plan do not fit; the memory's own status if
                it has become invalid; LLM_ENGINE_FINALIZED: after `close`; LLM_FAILED: in a forked
                child. Nothing was copied then.
        """
        backend, descriptors, memories = self._prepare(plan, src, dst, descriptors, timeout_ms)
        begun: list[Task] = []
        try:
            self._executor.submit(descriptors, (plan, *memories), backend, after, begun)
            return TransferTask(plan, begun[0], memories, on_outcome, stream_of)
        except NativeError as error:
            raise self._unusable(error) from error
        except BaseException:
            for task in begun:
                task.cancel()  # it would go on without a handle
            raise

    def layered(
        self,
        plan: Plan,
        src: Memory,
        dst: Memory,
        on_outcome: Callable[[LLMException | None], None] | None = None,
        on_last: Callable[[LayerTask], None] | None = None,
        descriptors: Descriptors | None = None,
        gate_of: GateOf | None = None,
    ) -> LayerTask:
        """Prepare `plan`; each layer moves when `LayerTask.ready` is called for it.

        Both memories must stay valid until the outcome. `submit` describes the other arguments.

        Args:
            on_last: as for `LayerTask`; not called if this raises.
            gate_of: as for `LayerTask`.

        Raises:
            TypeError, LLMException: see `submit`; LLM_PARAM_INVALID: also for a plan of several
                parts.
        """
        if type(plan) is not Plan:
            check_type("plan", plan, Plan)
        part = plan.part
        backend, descriptors, memories = self._prepare(plan, src, dst, descriptors)
        per_pair = len(descriptors) // len(part.src_tensors)
        layer_size = part.tensors_per_layer * per_pair or 1  # any size will do for no bytes
        begun: list[LayeredTask] = []
        try:
            keep = (plan, *memories)
            self._executor.layered(descriptors, layer_size, keep, backend, begun)
            return LayerTask(plan, begun[0], memories, on_outcome, on_last, gate_of)
        except NativeError as error:
            raise self._unusable(error) from error
        except BaseException:
            for task in begun:
                task.cancel()  # it would stay forever without a handle
            raise

    def execute(
        self,
        plan: Plan,
        src: Memory,
        dst: Memory,
        timeout_ms: float | None = None,
        descriptors: Descriptors | None = None,
    ) -> None:
        """Submit `plan` and wait, with the calling thread copying too.

        The arguments are as for `submit` and `TransferTask.wait`.

        Raises:
            TypeError, ValueError, LLMException: see `submit` and `TransferTask.wait`; LLM_FAILED:
                `close` has stopped the transfer.
        """
        started = perf_counter()
        backend, descriptors, memories = self._prepare(plan, src, dst, descriptors, timeout_ms)
        if timeout_ms and backend is not None:  # whose connection may have taken its time
            timeout_ms = _left_ms(timeout_ms, started)
        try:
            report = self._executor.run(descriptors, timeout_ms, (plan, *memories), backend)
        except NativeError as error:
            raise self._unusable(error) from error
        lost = reason = None
        if report.status == KVN_OK:
            try:
                for memory in memories:
                    if type(memory) is not HostMemory or not memory.held:
                        memory.check()
            except LLMException as error:
                lost = error.with_traceback(None)
            else:
                return
        elif report.status == KVN_CANCELLED:  # by `close`: only it has a handle
            reason = LLMException("stopped because the engine or its transfers were closed")
        raise failure(plan, report, memories, "", lost, reason)

    def verify(
        self,
        plan: Plan,
        src: TensorMemory,
        dst: TensorMemory,
        every: int = 1,
        timeout_ms: float | None = None,
    ) -> None:
        """Read the moved bytes of `plan` again, and compare both sides; neither may be on a device.

        Args:
            every: compare each nth descriptor, from a random one on.
            timeout_ms: milliseconds that the call may take.

        Raises:
            TypeError: `plan` is not a plan, or `timeout_ms` is not a number.
            ValueError: `timeout_ms` is < 0 or NaN.
            LLMException: LLM_FAILED: bytes differ; names the place; otherwise as for `execute`.
        """
        scratch = HostMemory.from_arrays([np.empty(SCRATCH_NBYTES, np.uint8)])
        # If both sides are in this process, plain copies read them.
        remote = dst if src.in_process else src
        started = perf_counter()
        backend, descriptors, memories = self._prepare(plan, src, dst, None, timeout_ms)
        if not remote.in_process:
            backend = remote.backend(self._pool, "get", scratch, _left_ms(timeout_ms, started))
            if self._wrap is not None:
                backend = self._wrapped_once(self._wrap, remote, backend)
        timeout_ms = _left_ms(timeout_ms, started)

        def read(some: Descriptors, limit_ms: float | None) -> Report:
            return self._executor.run(some, limit_ms, (plan, *memories, scratch), backend)

        try:
            with using(src, dst):
                verify(plan, descriptors, src, dst, scratch, read, every, timeout_ms)
        except NativeError as error:
            raise self._unusable(error) from error

    def _prepare(
        self,
        plan: Plan,
        src: Memory,
        dst: Memory,
        descriptors: Descriptors | None = None,
        timeout_ms: float | None = None,
    ) -> tuple[Backend | None, Descriptors, tuple[TensorMemory, TensorMemory]]:
        """Return the backend (None: plain copies), the descriptors, and both memories."""
        if type(plan) is not Plan:
            check_type("plan", plan, Plan)
        if timeout_ms is not None and not (type(timeout_ms) is float and timeout_ms >= 0):
            check_timeout(timeout_ms)
        # Not isinstance, which refuses this protocol.
        source = cast(TensorMemory, src) if hasattr(src, "addresses") else memory_of("src", src)
        target = cast(TensorMemory, dst) if hasattr(dst, "addresses") else memory_of("dst", dst)
        for given, memory in ((src, source), (dst, target)):
            # Held memory stays valid, and memory that was made here was just checked.
            if memory is given and (type(memory) is not HostMemory or not memory.held):
                memory.check()
        # Plain memory takes any backend that the other side needs.
        getter = putter = None
        try:
            if not isinstance(source, HostMemory):
                getter = source.backend(self._pool, "get", target, timeout_ms)
            if not isinstance(target, HostMemory):
                putter = target.backend(self._pool, "put", source, timeout_ms)
            if self._wrap is not None:
                getter = self._wrapped_once(self._wrap, source, getter)
                putter = self._wrapped_once(self._wrap, target, putter)
        except NativeError as error:
            raise self._unusable(error) from error
        if getter is not None and putter is not None:
            if not source.on_device:
                raise invalid(
                    "src and dst are both in other processes; one of them must be in this process"
                )
            getter = None  # of a device: the peer's backend decides
        if descriptors is None:
            one_space = source.in_process and target.in_process
            descriptors = bind(plan, source, target, one_space=one_space)
        return getter or putter, descriptors, (source, target)

    def _wrapped_once(
        self, wrap: Callable[[Backend], Backend], memory: TensorMemory, backend: Backend | None
    ) -> Backend | None:
        """Return the wrapper of a backend that `memory` needs, the same each time."""
        if backend is None:
            return None
        with self._mutex:
            wrapped = self._wrapped.setdefault(memory, {})
            if backend not in wrapped:
                wrapped[backend] = wrap(backend)
            return wrapped[backend]

    def _unusable(self, error: NativeError) -> LLMException:
        finalized = LLMStatusCode.LLM_ENGINE_FINALIZED
        code = finalized if self._closed else LLMStatusCode.LLM_FAILED
        return LLMException(str(error), status_code=code)

    def close(self, *, cancel: bool = False) -> None:
        """Wait for transfers in flight (or cancel them), and refuse new ones; idempotent.

        After this call no byte is touched, not even by `execute` in other threads. A
        `LayerTask` that still waits for a layer is cancelled in either case.
        """
        self._closed = True
        self.small_nbytes = 0
        for held in list(self._shares):
            if (share := held()) is not None:
                share.close(cancel=cancel)
        self._executor.close(cancel)

    def __repr__(self) -> str:
        return f"<Transfers of {self.threads} threads{', closed' if self._closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _left_ms(timeout_ms: float | None, started: float) -> float | None:
    """Return the milliseconds of a timeout that are left."""
    if not timeout_ms:
        return timeout_ms
    return max(0.0, timeout_ms - (perf_counter() - started) * 1000)


def default_transfers(tuning: str | None = None, nodes: Nodes = ()) -> Transfers:
    """Return the `Transfers` of this process, made at first use; a forked child has its own.

    Args:
        tuning: as for `choose`; callers with the same tuning and nodes share threads.
        nodes: as for `Transfers`, if there are several, and a thread for each. For one node,
            the caller binds its thread to the node, and new threads inherit that.

    Raises:
        LLMException: LLM_PARAM_INVALID: the tuning is invalid; see also `Transfers`.
    """
    key = os.getpid(), tuning, nodes
    if (made := _made.get(key)) is not None:
        return made
    chosen = choose(tuning).tuning
    spread = dict(nodes) if 1 < len(nodes) <= chosen.threads else None
    return _made.setdefault(key, Transfers(tuning=chosen, nodes=spread))  # the first of any threads


_made: dict[tuple[int, str | None, Nodes], Transfers] = {}


def submit(plan: Plan, src: Memory, dst: Memory) -> TransferTask:
    """Call `Transfers.submit` of this process's `default_transfers`.

    Raises:
        TypeError, LLMException: see `Transfers.submit`.
    """
    return default_transfers().submit(plan, src, dst)


def execute(plan: Plan, src: Memory, dst: Memory, timeout_ms: float | None = None) -> None:
    """Call `Transfers.execute` of this process's `default_transfers`.

    Raises:
        TypeError, ValueError, LLMException: see `Transfers.execute`.
    """
    default_transfers().execute(plan, src, dst, timeout_ms)
