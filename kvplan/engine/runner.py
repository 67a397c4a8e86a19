"""How an operation runs: planned, executed or submitted; and what it holds until its end."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, Self, TypeAlias
from weakref import ref

from kvnative._signals import Condition
from kvplan.control.messages import MAX_NOTIFICATION_NBYTES
from kvplan.engine.registry import finalized
from kvplan.engine.telemetry import error_text, log_operation, logger, status_of
from kvplan.execution.memory import revocation
from kvplan.execution.verification import check_verifiable
from kvplan.inspection.units import plural
from kvplan.lease import BlockLease
from kvplan.planning.groups import GroupPlan
from kvplan.planning.plan import Plan
from kvplan.planning.side import Side, side
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import NO_ID, BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex
from kvplan.validation import check_type, mismatch, shown

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from kvnative._executor import Gate
    from kvnative._lower import Descriptors
    from kvplan.engine.engine import Engine
    from kvplan.engine.peer_tensors import PeerTensors
    from kvplan.engine.ranges import AddressRanges
    from kvplan.engine.routes import Verb
    from kvplan.execution import ComputeEvent, LayerTask, TensorMemory, TransferTask
    from kvplan.links import PeerClaim, PeerLink
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.groups import AnyPlan
    from kvplan.types import AnyCacheKey, KvCacheExtParam

Prepared: TypeAlias = "tuple[Plan, TensorMemory, TensorMemory, Descriptors | None]"
"""What is executed: the plan, the memory of src and of dst, and the descriptors if it has any."""
AnyPrepared: TypeAlias = "tuple[AnyPlan, TensorMemory, TensorMemory, Descriptors | None]"
"""The same, of groups too."""

MAX_TAG: Final = 128
"""Characters of the tag of a transfer."""

_OTHER_KIND = {
    f"{verb}_{kind}": f"; {verb}_{other} takes a {takes} one"
    for verb in ("pull", "push", "copy")
    for kind, other, takes in (("cache", "blocks", "paged"), ("blocks", "cache", "contiguous"))
}
"""What takes the other kind of cache than an operation does."""


class PlanEvent(NamedTuple):
    """A plan that is about to be executed.

    Attributes:
        plan: the plan; of an operation on groups a `GroupPlan`.
        operation: the call, such as "pull_cache".
        cache_id: of the cache of this process that takes part; the source, where both do.
        cluster_id: of the peer; None inside one process.
        tag: as the caller gave it.
    """

    plan: AnyPlan
    operation: str
    cache_id: int
    cluster_id: int | None
    tag: str = ""


PlanHook = Callable[[PlanEvent], object]


class Operation:
    """One operation: what it has found, and what it holds inside its `with` block.

    In flight from the beginning of that to its end; once submitted, to the outcome of its task. One
    that is only planned has no such block: it holds nothing, and is not counted.

    Args:
        name: of the public call.
        speculative: whether the caller can prepare again what `speculated`.
        notify: what the peer is sent when every byte has arrived; None: nothing.
        notify_failure: what it is sent if the operation fails before; None: nothing.
        verify: read all that has moved again, and compare; False: as the engine's options say.
        tag: what logs and recordings call it.
        after: what it comes after: work of the model on the accelerator; None: nothing.

    Attributes:
        name, tag: as given.
        after: the point of that work, taken; None: nothing.
        cache_id: of the cache of this process that takes part, the source where both do; -1: none
            was found so far.
        plan: what is executed; set when it is known.
        link: to the peer that takes part; None inside one process.
        leases: ids of the peer's leases by which it moves.
        span: of OpenTelemetry, where the engine's options ask for that.
        moves: whether it is one that moves, inside of its block.
        speculated: whether a key is taken to be the cache's that had it, as far as is known here:
            then the transfer says if that was freed, and before it moves a byte of another.
        notifies: whether its peer may be sent a notification at the end.
        verify_every: compares one descriptor of so many when they have moved; 0: none.
        follows_up: whether more is done than to record it, when its bytes have moved.
        engine: that runs it.
        submitted: whether a task ends it, with its outcome.
        started: when, by `perf_counter`.
        done: whether every byte has arrived; if not, it is to be prepared and executed.
        retried: whether that is for the second time, as what was taken for granted was wrong.
    """

    __slots__ = (
        "__weakref__",
        "_claim",
        "_memories",
        "_notify",
        "_notify_failure",
        "_recorded",
        "_speculative",
        "after",
        "cache_id",
        "done",
        "engine",
        "follows_up",
        "leases",
        "link",
        "moves",
        "name",
        "notifies",
        "plan",
        "retried",
        "span",
        "speculated",
        "started",
        "submitted",
        "tag",
        "verify_every",
    )

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        speculative: bool = False,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        verify: bool = False,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> None:
        if tag != "":
            check_tag(tag)
        self.tag = tag
        self.after: Gate | None = None if after is None else engine.gate("after", after)
        self._notify = None if notify is None else check_notification("notify", notify)
        self._notify_failure = notify_failure
        if notify_failure is not None:
            check_notification("notify_failure", notify_failure)
        self.verify_every = 1 if verify else engine.verify_every
        self.notifies = not (notify is None and notify_failure is None)
        self.follows_up = bool(self.notifies or self.verify_every)
        self._memories: tuple[TensorMemory, TensorMemory] | None = None
        self.engine = engine
        self.name = name
        self._speculative = speculative
        self.moves = self._recorded = self.submitted = False
        self.cache_id = -1
        self._claim: PeerClaim | None = None
        self.started = perf_counter()
        self.done = self.retried = self.speculated = False
        self.link: PeerLink | None = None
        self.leases: tuple[int, ...] = ()
        self.span: Span | None = None
        self.plan: AnyPlan | None = None

    def __enter__(self) -> Self:
        self.moves = True
        engine = self.engine
        engine.in_flight.add(self)
        if engine.tracer is not None and self.name != "notify":
            self.span = engine.tracer.begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.submitted:  # else its task ends it
            if error is not None and self._notify_failure is not None and not self.done:
                self._send_failure(error)
            self.end(error)

    def own(
        self, argument: str, cache: Cache, *, paged: bool | None, table: str = ""
    ) -> tuple[Side, TensorMemory]:
        """Return the cache of this process that an argument names, to plan with and to transfer.

        Args:
            paged: whether rows are blocks; None: nothing is moved, and they may be either.
            table: the argument that would name blocks of it, where the caller might have given it.

        Raises:
            TypeError: no Cache.
            LLMException: as `CacheRegistry.resolve`; LLM_PARAM_INVALID: it is contiguous where a
                paged one is needed, or the other way round.
        """
        registry = self.engine.registry
        entry = registry.resolve(cache, argument)
        if self.cache_id < 0:
            self.cache_id = entry.cache.cache_id
        found = entry.side
        if found is None:  # addresses alone do not say which kind they are
            return side(argument, entry.cache, paged=paged is not False), entry.memory
        if paged is not None and found.paged is not paged:
            self._refuse_kind(argument, found.name, paged, table)
        return found, entry.memory

    def peer(
        self,
        argument: str,
        key: AnyCacheKey | BlockLease,
        kinds: tuple[type[AnyCacheKey | BlockLease], ...],
        *,
        paged: bool | None,
        writable: bool,
        table: str = "",
    ) -> tuple[Side, int, TensorMemory]:
        """Return the cache and the slot of a peer that an argument names; by CacheKey: claimed.

        By a lease: memory of which no transfer succeeds once that has ended.

        Args:
            kinds: of key that the operation takes.
            paged, table: as for `own`.

        Raises:
            TypeError: another kind of key.
            LLMException: LLM_PARAM_INVALID: this engine's own cluster, a key of both or neither
                request and prefix, a slot of a paged cache, or a cache that is not `paged` as
                needed; LLM_NOT_YET_LINK, LLM_LINK_FAILED, LLM_KV_CACHE_NOT_EXIST,
                LLM_REPEAT_REQUEST.
        """
        if not isinstance(key, kinds):
            raise TypeError(f"{argument}={shown(key)} must be {mismatch(key, *kinds)}")
        link = self._linked(argument, key)
        slot = 0
        if isinstance(key, BlockLease):
            found = link.leased(key, writable=writable)
            self.leases = (key.lease_id,)
            theirs = link.side(found)
            if paged is not None and theirs.paged is not paged:
                self._refuse_kind(argument, str(key), paged, table)
            if not theirs.paged and (slot := key.slot(argument)) >= theirs.count:
                _refuse_slot(argument, key, theirs)
            return theirs, slot, link.memory(found, writable=writable).leased([key])
        if isinstance(key, CacheKeyByIdAndIndex):
            found, slot = link.cache(key, writable=writable), key.batch_index
        elif isinstance(key, BlocksCacheKey):
            found = link.cache(key, writable=writable, speculative=self._speculative)
            self.speculated = self._speculative
        else:
            _check_names_one(argument, key)
            if self.moves:
                self._claim = claim = link.claim(key)
                found, slot = claim.cache, claim.batch_index
            else:
                found, slot = link.find(key)
        theirs = link.side(found)
        if paged is not None and theirs.paged is not paged:
            self._refuse_kind(argument, str(key), paged, table)
        if slot >= (1 if theirs.paged else theirs.count):
            _refuse_slot(argument, key, theirs)
        return theirs, slot, link.memory(found, writable=writable)

    def peer_tensors(
        self, argument: str, given: PeerTensors, stride: int, *, paged: bool
    ) -> tuple[Side, TensorMemory]:
        """Return the memory of a peer that an argument names by addresses, to be written.

        Args:
            stride: bytes of a row, where `given` does not say it.
            paged: whether rows are blocks.

        Raises:
            LLMException: LLM_PARAM_INVALID: this engine's own cluster, addresses of several caches,
                no room for a row, or a cache that must not be written; LLM_KV_CACHE_NOT_EXIST: an
                address that lies in no cache of the peer; LLM_NOT_YET_LINK, LLM_LINK_FAILED.
        """
        link = self._linked(argument, given)
        return link.tensors(given.addresses, given.stride or stride, paged=paged)

    def disable_speculation(self) -> None:
        """Have the peer asked for what was taken for granted, when it is prepared again."""
        self._speculative = self.speculated = False
        self.retried = True

    @property
    def cluster_id(self) -> int | None:
        """Of the peer that takes part; None: none does."""
        return None if self.link is None else self.link.cluster_id

    def finish(self, error: BaseException | None) -> None:
        """End what was submitted: its bytes have arrived, or `error` says why not.

        Called again with an error when it was interrupted.

        Raises:
            LLMException: as for `verify` and `send_notification`.
        """
        failure: BaseException | None = error
        try:
            if error is not None:
                if not self.done:
                    self._send_failure(error)
            else:
                self.verify(None)
                self.done = True
                self.send_notification()
        except BaseException as raised:
            failure = raised
            if error is None and not self.done:
                self._send_failure(raised)
            raise
        finally:
            self.end(failure)

    def begin_to_move(self, src: TensorMemory, dst: TensorMemory) -> None:
        """Know what will move between these, where that is compared.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: it cannot be.
        """
        if self.verify_every:
            check_verifiable(src, dst)
            self._memories = src, dst

    def verify(self, timeout_ms: float | None) -> None:
        """Every byte has moved: read it again and compare, if that was asked for.

        Raises:
            LLMException: bytes differ, or could not be read.
        """
        if self._memories is not None and self.plan is not None:
            self.engine.transfers.verify(self.plan, *self._memories, self.verify_every, timeout_ms)

    def send_notification(self) -> None:
        """Every byte has arrived: tell the peer, if it is to be told.

        Raises:
            LLMException: it could not be delivered, and that the bytes have arrived.
        """
        if self._notify is None or self.link is None:
            return
        try:
            self.link.notify(self._notify)
        except LLMException as error:
            raise LLMException(
                f"{self.name}: every byte has arrived, and the notification could not be "
                f"delivered: {error.args[0]}",
                status_code=error.status_code,
            ) from None

    def _send_failure(self, error: BaseException) -> None:
        """Tell the peer once that it failed, without waiting: the caller has an error already."""
        data, link = self._notify_failure, self.link
        self._notify_failure = None
        if data is not None and link is not None and isinstance(error, Exception):
            link.notify_soon(data)  # of an interrupt nothing is known

    def end(self, error: BaseException | None) -> None:
        """Give back what the operation holds, and record how it went; idempotent."""
        recorded, seconds = self._recorded, perf_counter() - self.started
        engine, plan, link = self.engine, self.plan, self.link
        moved = plan if error is None else None  # every byte of it has arrived
        failure = error
        nbytes = 0
        try:
            # First: the link stays until its peer knows whether the key is consumed.
            if self._claim is not None:
                self._claim.release(moved.src_tensors if isinstance(moved, Plan) else None)
            if moved is not None:
                nbytes = moved.nbytes
        finally:
            try:
                status = LLMStatusCode.LLM_SUCCESS if error is None else status_of(error)
                if error is not None and not status.is_failure:
                    failure = None
                if not recorded:
                    if engine.recorder is not None:  # first: what is counted is recorded
                        reason = "" if error is None else error_text(error)
                        engine.recorder.transfer(self, status, seconds, nbytes, reason)
                    engine.metrics.record(self.name, status, nbytes, seconds)
                    self._recorded = True
                    if self.span is not None and engine.tracer is not None:
                        engine.tracer.end(self, self.span, status, error)
            finally:
                engine.in_flight.remove(self)
                # Last: whoever has unlinked finds the operation counted, and no longer in flight.
                if link is not None:
                    if error is not None:
                        link.forget()  # no memory of the peer is taken for granted
                    pulls = self.name.startswith(("pull", "gather"))
                    link.end(self, nbytes if pulls else 0, 0 if pulls else nbytes, failure)
        if recorded:
            return
        if logger.logger.isEnabledFor(logging.INFO if failure is None else logging.WARNING):
            log_operation(
                self.name,
                seconds,
                error,
                cluster=engine.cluster_id,
                peer=self.cluster_id,
                cache=self.cache_id,
                tag=self.tag or None,
                kind=plan and plan.kind,
                descriptors=plan and plan.num_descriptors,
                bytes=nbytes,
            )

    def _linked(
        self, argument: str, key: AnyCacheKey | PeerTensors | AddressRanges | BlockLease
    ) -> PeerLink:
        """Return the link to the peer that `key` names, begun by one that moves."""
        engine, cluster_id = self.engine, key.cluster_id
        if cluster_id == engine.cluster_id:
            raise invalid(f"{argument}={key} is of this engine's own cluster; copy inside of one")
        link = engine.links.peers.get(cluster_id) or engine.links.get(cluster_id)
        if self.moves and self.link is None:
            self.link = link  # first: what ends has not begun, at worst
            link.begin(self)
        return link

    def _refuse_kind(self, argument: str, name: str, paged: bool, table: str) -> NoReturn:
        found, needed = ("contiguous", "paged") if paged else ("paged", "contiguous")
        if table and not paged:
            raise invalid(f"{argument}={name} is a paged cache; {table} must name blocks of it")
        message = f"{argument}={name} is a {found} cache; {self.name} needs a {needed} one"
        if table:
            raise invalid(f"{message}, or no {table}: then a slot is moved")
        raise invalid(message + _OTHER_KIND.get(self.name, ""))


def check_notification(name: str, data: bytes) -> bytes:
    """Return the bytes of a notification.

    Raises:
        TypeError: no bytes.
        LLMException: LLM_PARAM_INVALID: none, or too many.
    """
    check_type(name, data, bytes)
    if not 1 <= len(data) <= MAX_NOTIFICATION_NBYTES:
        raise invalid(f"{name} has {len(data)} bytes; allowed are [1, {MAX_NOTIFICATION_NBYTES}]")
    return data


def check_tag(tag: str) -> str:
    """Return what a transfer is called.

    Raises:
        TypeError: no text.
        LLMException: LLM_PARAM_INVALID: too long, or not printable.
    """
    if len(check_type("tag", tag, str)) > MAX_TAG or not tag.isprintable():
        raise invalid(f"tag={shown(tag)} must be of at most {MAX_TAG} printable characters")
    return tag


def only_moves(
    reinterpret: bool,
    verify: bool,
    timeout_ms: float | None,
    notify: bytes | None,
    notify_failure: bytes | None,
    tag: str,
) -> bool:
    """Whether a call does nothing but move: each argument is the default, not just equal to it."""
    return (
        reinterpret is False
        and verify is False
        and timeout_ms is None
        and notify is None
        and notify_failure is None
        and type(tag) is str
        and tag == ""
    )


def _refuse_slot(argument: str, key: AnyCacheKey | BlockLease, found: Side) -> NoReturn:
    if found.paged:
        raise invalid(f"{argument}={key} names a slot, and a paged cache has none")
    raise LLMException(
        f"{argument}={key} is out of range: that cache has {plural(found.count, 'slot')}",
        status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    )


def _check_names_one(argument: str, key: CacheKey) -> None:
    if (key.req_id == NO_ID) is (key.prefix_id == NO_ID):
        raise invalid(f"{argument}={key} must name either a request (req_id) or a prefix")


class InFlight:
    """The operations of an engine in flight: from before they look at a cache to their outcome.

    No lock: an operation is put in before it asks whether the engine closes, and `close` says so
    before it looks. Weakly: an interrupt between any two steps may drop an operation, which takes
    itself out then.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self) -> None:
        self._operations: set[ref[Operation]] = set()
        self.closed = False
        self._changed = Condition()

    def __len__(self) -> int:
        return len(self._operations)

    def operations(self) -> list[Operation]:
        """Those that are in flight now."""
        return [it for held in list(self._operations) if (it := held()) is not None]

    def add(self, operation: Operation) -> None:
        """An operation begins; `remove` ends it.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED.
        """
        self._operations.add(ref(operation, self._operations.discard))
        if self.closed:
            self.remove(operation)
            raise finalized()

    def remove(self, operation: Operation) -> None:
        """It touches nothing of the engine any more. Idempotent."""
        self._operations.discard(ref(operation))
        if self.closed:
            with self._changed:
                self._changed.notify_all()

    def close(self) -> bool:
        """Take no more; returns False if that was so already."""
        with self._changed:
            if self.closed:
                return False
            self.closed = True
            return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until none is in flight; returns whether that came to be in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._operations, timeout_s)


class OperationRunner:
    """What the public operations are made with."""

    _cluster_id: int
    _engine: Engine | None
    _was_finalized: bool
    # Not the engine's, nor an operation's: a hook may hold this object, which would then never be
    # dropped.
    _hooks: dict[object, PlanHook]

    def _running(self) -> Engine:
        """The engine, if it is initialized.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child; LLM_ENGINE_FINALIZED.
        """
        engine = self._engine
        if engine is None:
            if self._was_finalized:
                raise finalized()
            raise LLMException(
                f"cluster {self._cluster_id} is not initialized; call initialize() first"
            )
        if os.getpid() != engine.pid:
            engine.check_process()
        return engine

    def _move_now(
        self,
        verb: Verb,
        there: AnyCacheKey | BlockLease,
        here: Cache,
        src_rows: Blocks,
        dst_rows: Blocks,
        ext_param: KvCacheExtParam,
    ) -> bool:
        """Move whole rows by a route, if there is one and nothing else is to be done for them."""
        engine = self._engine
        if engine is None or os.getpid() != engine.pid:  # an operation says why
            return False
        if self._hooks or engine.recorder is not None or engine.tracer is not None:
            return False
        return engine.verify_every == 0 and engine.routes.move(
            verb, there, here, src_rows, dst_rows, ext_param
        )

    @contextmanager
    def _recorded(self, operation: str, **fields: object) -> Iterator[Engine]:
        """Count and log what happens inside, if there is an engine for it."""
        engine = self._running()
        started = perf_counter()
        failure: BaseException | None = None
        try:
            yield engine
        except BaseException as error:
            failure = error
            raise
        finally:
            seconds = perf_counter() - started
            status = status_of(failure)
            engine.metrics.record(operation, status, 0, seconds)
            if engine.recorder is not None:
                reason = "" if failure is None else error_text(failure)
                engine.recorder.event(operation, status, seconds, reason, fields)
            log_operation(operation, seconds, failure, cluster=engine.cluster_id, **fields)

    def _execute(
        self, operation: Operation, prepared: AnyPrepared, timeout_ms: float | None
    ) -> None:
        """Move what was prepared: it is done then, or `operation` is to be prepared again."""
        plan, src, dst, descriptors = prepared
        operation.plan = plan
        if plan.reinterpret or self._hooks:
            self._show(operation, plan)
        if timeout_ms is None and operation.link is not None:
            timeout_ms = operation.engine.wait_ms
        if operation.retried and timeout_ms is not None:
            timeout_ms = max(0.0, timeout_ms - (perf_counter() - operation.started) * 1000)
        if operation.verify_every:
            operation.begin_to_move(src, dst)
        try:
            operation.engine.transfers.execute(plan, src, dst, timeout_ms, descriptors)
        except LLMException as error:
            missing = error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            if not (operation.speculated and missing) or revocation((src, dst)):
                raise
            operation.disable_speculation()  # the key may be another cache's by now
        else:
            if operation.verify_every:
                operation.verify(timeout_ms)
            operation.done = True
            if operation.notifies:
                operation.send_notification()

    def _submit(self, operation: Operation, prepared: AnyPrepared) -> TransferTask:
        """Begin to move what was prepared; `operation` ends with the task."""
        plan, src, dst, descriptors = prepared
        operation.plan = plan
        if plan.reinterpret or self._hooks:
            self._show(operation, plan)
        engine = operation.engine
        # A gather is reported as one, not its parts.
        report = None if operation.name.startswith("gather") else engine.completion.report()
        if operation.verify_every:
            operation.begin_to_move(src, dst)
        on_outcome = operation.finish if operation.follows_up else operation.end
        stream_of = None if engine.device is None else engine.device.stream
        task = engine.transfers.submit(
            plan, src, dst, on_outcome, descriptors, operation.after, stream_of
        )
        try:
            operation.submitted = True
            engine.completion.track(task, report, aside=operation.follows_up)
        except BaseException:  # an interrupt: nobody else could stop it
            task.cancel()
            raise
        return task

    def _layer(self, operation: Operation, prepared: Prepared) -> LayerTask:
        """As `_submit`, and each layer moves when `LayerTask.ready` is called for it."""
        plan, src, dst, descriptors = prepared
        operation.plan = plan
        if plan.reinterpret or self._hooks:
            self._show(operation, plan)
        engine = operation.engine
        report = engine.completion.report()
        if operation.verify_every:
            operation.begin_to_move(src, dst)
        on_last = partial(engine.completion.track, report=report, aside=operation.follows_up)
        on_outcome = operation.finish if operation.follows_up else operation.end
        gate_of = None if engine.device is None else engine.device.gate
        task = engine.transfers.layered(plan, src, dst, on_outcome, on_last, descriptors, gate_of)
        operation.submitted = True
        engine.completion.watch(task)
        return task

    def _show(self, operation: Operation, plan: AnyPlan) -> None:
        """Let the hooks see the plan that is about to be executed; warn if it reinterprets."""
        if plan.reinterpret and operation.engine.reinterpret:
            plans = plan.groups.values() if isinstance(plan, GroupPlan) else [plan]
            for it in plans:
                if it.reinterpret:
                    operation.engine.warn_reinterpret(operation, it)
        event = PlanEvent(
            plan, operation.name, operation.cache_id, operation.cluster_id, operation.tag
        )
        for hook in list(self._hooks.values()):
            hook(event)
