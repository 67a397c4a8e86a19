"""One operation of an engine: what it holds from its beginning to its outcome."""

from __future__ import annotations

import logging
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeAlias, TypedDict
from weakref import ref

from kvnative._signals import Condition
from kvplan.control.messages import MAX_NOTIFICATION_NBYTES
from kvplan.engine.registry import finalized
from kvplan.engine.telemetry import error_text, log_operation, logger, status_of
from kvplan.execution.verification import check_verifiable
from kvplan.planning.plan import Plan
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from kvnative._executor import Gate
    from kvnative._lower import Descriptors
    from kvplan.engine.engine import Engine
    from kvplan.engine.ranges import AddressRanges
    from kvplan.execution import ComputeEvent, TensorMemory
    from kvplan.lease import BlockLease
    from kvplan.links import PeerClaim, PeerLink
    from kvplan.planning.transfer import PeerTensors
    from kvplan.recording.writer import Ended
    from kvplan.types import AnyCacheKey

Prepared: TypeAlias = "tuple[Plan, TensorMemory, TensorMemory, Descriptors | None]"
"""What is executed: the plan, the memory of src and of dst, and descriptors if they are made."""

MAX_TAG: Final = 128
"""Characters of the tag of a transfer."""


class TransferOptions(TypedDict, total=False):
    """What every transfer takes besides the `Transfer`.

    Attributes:
        notify: sent to the peers when every byte has arrived, 1 to 4096 bytes: the transfer
            succeeds when their engines have it. None: nothing is sent.
        notify_failure: sent instead if the transfer fails and the link stands.
        verify: read everything that has moved again and compare. Default: as the options of the
            engine say (`kvplan.verify`).
        tag: what logs and recordings call the transfer, such as the id of the request: at most 128
            printable characters.
    """

    notify: bytes | None
    notify_failure: bytes | None
    verify: bool
    tag: str


class SubmitOptions(TransferOptions, total=False):
    """What `submit` takes besides the `Transfer`.

    Attributes:
        after: an event or a stream of the model's compute, see `ComputeEvent`: no byte moves before
            that work is done. None: nothing to come after.
    """

    after: ComputeEvent | None


class RunOptions(SubmitOptions, total=False):
    """What `run` takes besides the `Transfer`.

    Attributes:
        timeout_ms: milliseconds that the transfer may take. None: SyncKvCacheWaitTime of the
            engine's options; for ever inside one process.
    """

    timeout_ms: float | None


class Operation:
    """One operation: what it has found, and what it holds inside its `with` block.

    In flight from the beginning of that to its end; once submitted, to the outcome of its task. One
    that is only planned has no such block: it holds nothing, and is not counted.

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
        is_part: whether it is one of several that end as one.
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
        "is_part",
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
        self.done = self.retried = self.speculated = self.is_part = False
        self.link: PeerLink | None = None
        self.leases: tuple[int, ...] = ()
        self.span: Span | None = None
        self.plan: Plan | None = None

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
        """Know what will move between these, where that is compared."""
        if self.verify_every:
            check_verifiable(src, dst)
            self._memories = src, dst

    def verify(self, timeout_ms: float | None) -> None:
        """Every byte has moved: read it again and compare, if that was asked for."""
        if self._memories is not None and self.plan is not None:
            self.engine.transfers.verify(self.plan, *self._memories, self.verify_every, timeout_ms)

    def send_notification(self) -> None:
        """Every byte has arrived: tell the peer, if it is to be told."""
        if self._notify is None or self.link is None:
            return
        try:
            self.link.notify(self._notify)
        except LLMException as error:
            raise self.undelivered(error) from None

    def undelivered(self, error: LLMException) -> LLMException:
        """Return the outcome where every byte has arrived and the peer could not be notified."""
        return LLMException(
            f"{self.name}: every byte has arrived, and the notification could not be delivered: "
            f"{error.args[0]}",
            status_code=error.status_code,
        )

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
                self._claim.release(
                    None if moved is None or len(moved.parts) > 1 else moved.part.src_tensors
                )
            if moved is not None:
                nbytes = moved.nbytes
        finally:
            try:
                status = LLMStatusCode.LLM_SUCCESS if error is None else status_of(error)
                if error is not None and not status.is_failure:
                    failure = None
                if not recorded:
                    conclude(engine, self.name, self, status, nbytes, seconds, error)
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
            self.hold(link)
        return link

    def hold(self, link: PeerLink) -> None:
        """Keep the link to the peer until the operation ends."""
        self.link = link  # first: what ends has not begun, at worst
        link.begin(self)


def conclude(
    engine: Engine,
    name: str,
    ended: Ended | None,
    status: LLMStatusCode,
    nbytes: int,
    seconds: float,
    error: BaseException | None = None,
) -> None:
    """Record and count a transfer that has its outcome; `ended` is None if nothing records."""
    if ended is not None and engine.recorder is not None:  # first: what is counted is recorded
        reason = "" if error is None else error_text(error)
        engine.recorder.transfer(ended, status, seconds, nbytes, reason)
    engine.metrics.record(name, status, nbytes, seconds)


def check_notification(name: str, data: bytes) -> bytes:
    """Return the bytes of a notification."""
    check_type(name, data, bytes)
    if not 1 <= len(data) <= MAX_NOTIFICATION_NBYTES:
        raise invalid(f"{name} has {len(data)} bytes; allowed are [1, {MAX_NOTIFICATION_NBYTES}]")
    return data


def check_tag(tag: str) -> str:
    """Return what a transfer is called."""
    if len(check_type("tag", tag, str)) > MAX_TAG or not tag.isprintable():
        raise invalid(f"tag={shown(tag)} must be of at most {MAX_TAG} printable characters")
    return tag


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
        """An operation begins; `remove` ends it."""
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
