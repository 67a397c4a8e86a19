"""An operation of an engine: its options, and the resources that it holds until its outcome."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypedDict

from kvplan.control.messages import MAX_NOTIFICATION_NBYTES
from kvplan.engine.telemetry import error_text, log_operation, logger, status_of
from kvplan.execution.verification import check_verifiable
from kvplan.planning.plan import Plan
from kvplan.status import LLMException, LLMStatusCode, invalid, within
from kvplan.validation import check_timeout, check_type, shown

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from kvnative._lower import Descriptors
    from kvnative._task import Gate
    from kvplan.engine.engine import Engine
    from kvplan.execution import ComputeEvent, TensorMemory
    from kvplan.lease import BlockLease
    from kvplan.links import PeerClaim, PeerLink

Prepared: TypeAlias = "tuple[Plan, TensorMemory, TensorMemory, Descriptors | None]"
"""A plan to execute, the memory of src and of dst, and the descriptors if they are known."""

MAX_TAG: Final = 128
"""Maximum number of characters in a transfer's tag."""


class TransferOptions(TypedDict, total=False):
    """Options of every transfer.

    Attributes:
        notify: 1 to 4096 bytes that are sent to the peers after every byte has arrived. The
            transfer succeeds when the peers' engines have them. None: nothing is sent.
        notify_failure: bytes to send instead if the transfer fails, unless the link is broken.
        verify: True to read all moved bytes again and compare. False: the option `kvplan.verify`
            of the engine decides.
        tag: name in logs and recordings, such as the id of the request: at most 128 printable
            characters.
    """

    notify: bytes | None
    notify_failure: bytes | None
    verify: bool
    tag: str


class SubmitOptions(TransferOptions, total=False):
    """Options of `submit`.

    Attributes:
        after: an event or a stream of the model's compute, see `ComputeEvent`. No byte moves before
            that work is done. None: the transfer begins at once.
    """

    after: ComputeEvent | None


class RunOptions(SubmitOptions, total=False):
    """Options of `run`.

    Attributes:
        timeout_ms: milliseconds for the whole call, including verification and notification. None:
            the option SyncKvCacheWaitTime of the engine; inside one process no limit.
    """

    timeout_ms: float | None


ALL_OPTIONS: Final = RunOptions.__annotations__.keys()
OF_SUBMIT: Final = SubmitOptions.__annotations__.keys()
OF_LAYERED: Final = TransferOptions.__annotations__.keys()

_ELSEWHERE: Final = {
    "timeout_ms": "timeout_ms is an option of run; a task takes it in wait(timeout_ms)",
    "after": "after is not an option of layered; ready(layer, event) takes one for each layer",
}
"""Errors of options that other verbs take."""


class Operation:
    """An operation with the resources that it holds inside its `with` block.

    It is in flight until the block ends or, once submitted, until its task ends. An operation that
    only plans has no block: it holds nothing and is not counted. The options come from `checked`.
    """

    by_layer = False  # True: each layer moves by itself
    is_reported = True  # True: `completions()` gets the task
    # True: a key or an address is assumed to name its last known cache. If that cache was freed,
    # the transfer fails, and is retried without the assumption.
    speculated = False
    retried = False
    moves = False  # True inside the `with` block
    submitted = False  # True: the outcome of the task ends the operation
    done = False  # True: every byte has arrived; until then `run` executes it again
    cache_id = -1  # of this process; of two, the source; -1: not found yet
    link: PeerLink | None = None  # None inside one process
    leases: tuple[BlockLease, ...] = ()  # of the peer
    span: Span | None = None
    plan: Plan | None = None  # the one that is executed
    _memories: tuple[TensorMemory, TensorMemory] | None = None  # to be verified
    claim: PeerClaim | None = None  # the end tells the peer whether the key is consumed
    _recorded = False

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        speculative: bool = False,
        timeout_ms: float | None = None,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        verify: bool = False,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> None:
        self.started = perf_counter()
        self.engine, self.name, self.tag = engine, name, tag
        # The compute that the transfer waits for.
        self.after: Gate | None = None if after is None else engine.gate("after", after)
        self.timeout_ms = timeout_ms  # from `started` to the end; None: no limit
        self._notify, self._notify_failure = notify, notify_failure
        self.notifies = not (notify is None and notify_failure is None)
        self.verify_every = 1 if verify else engine.verify_every  # every nth; 0: none
        self.follows_up = bool(self.notifies or self.verify_every)
        self._speculative = speculative

    def __enter__(self) -> Self:
        self.moves = True
        engine = self.engine
        engine.in_flight.add(self)
        if engine.tracer is not None and self.name != "notify":
            self.span = engine.tracer.begin(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self.submitted:  # otherwise the task ends the operation
            if error is not None and self._notify_failure is not None and not self.done:
                self._send_failure(error)
            self.end(error)

    def has_moved(self) -> bool:
        """Return whether a lease that the operation uses has moved to other blocks."""
        return False

    def asks_again(self, error: LLMException) -> bool:
        """Return whether a stale name may have caused an error; then `prepare` asks the peer."""
        if error.status_code is not LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            return False
        if not self.speculated and not self.has_moved():
            return False
        self._speculative = self.speculated = False
        self.retried = True
        return True

    @property
    def cluster_id(self) -> int | None:
        """Cluster of the peer; None inside one process."""
        return None if self.link is None else self.link.cluster_id

    def finish(self, error: BaseException | None) -> None:
        """Conclude a submitted operation; `error` is None if its bytes have arrived.

        Called again with an error after an interrupt.
        """
        failure: BaseException | None = error
        try:
            if error is not None:
                if not self.done:
                    self._send_failure(error)
            else:
                self.verify()
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
        """Remember both memories if the result is to be verified."""
        if self.verify_every:
            check_verifiable(src, dst)
            self._memories = src, dst

    def verify(self) -> None:
        """Read the moved bytes again and compare them, if the options ask for that."""
        if self._memories is not None and self.plan is not None:
            self.engine.transfers.verify(
                self.plan, *self._memories, self.verify_every, self.left_ms()
            )

    def left_ms(self) -> float | None:
        """Return the remaining milliseconds; None: no limit."""
        if self.timeout_ms is None:
            return None
        return max(0.0, self.timeout_ms - (perf_counter() - self.started) * 1000)

    def limited(self) -> float | None:
        """Return the remaining milliseconds of a call that waits; None: no limit and no peer."""
        if self.timeout_ms is None and self.link is not None:
            self.timeout_ms = self.engine.wait_ms
        return self.left_ms()

    def send_notification(self) -> None:
        """Send the notification of success, if any; the default limit is that of the link."""
        if self._notify is None or self.link is None:
            return
        try:
            self.link.notify(self._notify, self.left_ms())
        except LLMException as error:
            raise self.undelivered(error) from None

    def undelivered(self, error: LLMException) -> LLMException:
        """Return the error of a transfer that has arrived, but whose notification has failed."""
        what = "every byte has arrived, but the notification could not be delivered"
        return within(f"{self.name}: {what}", error)

    def _send_failure(self, error: BaseException) -> None:
        """Send the notification of failure once, without waiting for the answer."""
        data, link = self._notify_failure, self.link
        self._notify_failure = None
        if data is not None and link is not None and isinstance(error, Exception):
            link.notify_soon(data)  # not after an interrupt, whose outcome is unknown

    def end(self, error: BaseException | None) -> None:
        """Release the resources of the operation, and record its outcome; idempotent."""
        engine, link, recorded = self.engine, self.link, self._recorded
        seconds, nbytes = perf_counter() - self.started, 0
        moved = self.plan if error is None else None
        failure = error
        try:
            # Before the link is released: its peer must learn whether the key is consumed.
            if self.claim is not None:
                part = None if moved is None or len(moved.parts) > 1 else moved.part
                pulled = part.whole_src_tensors() if part else None
                # Not `status_code`, which may be a program's own and raise.
                is_late = getattr(error, "_status_code", None) is LLMStatusCode.LLM_TIMEOUT
                self.claim.release(pulled, 0.0 if is_late else self.left_ms())
            if moved is not None:
                nbytes = moved.nbytes
        finally:
            try:  # the status of a program's own error may raise
                status = status_of(error)
                if error is not None and not status.is_failure:
                    failure = None
                if not recorded:
                    if engine.recorder is not None:  # recorded before it is counted
                        reason = "" if error is None else error_text(error)
                        engine.recorder.transfer(self, status, seconds, nbytes, reason)
                    engine.metrics.record(self.name, status, nbytes, seconds)
                    self._recorded = True
                    if self.span is not None and engine.tracer is not None:
                        engine.tracer.end(self, self.span, status, error)
            finally:
                engine.in_flight.remove(self)
                # Last, so that after an unlink the operation is counted and not in flight.
                if link is not None:
                    if error is not None:
                        link.forget()  # cached memory may be stale
                    pulls = self.name.startswith(("pull", "gather"))
                    link.end(self, nbytes if pulls else 0, 0 if pulls else nbytes, failure)
        if not recorded and logger.logger.isEnabledFor(
            logging.INFO if failure is None else logging.WARNING
        ):
            log_operation(
                self.name, seconds, error, cluster=engine.cluster_id, peer=self.cluster_id,
                cache=self.cache_id, tag=self.tag or None, kind=self.plan and self.plan.kind,
                descriptors=self.plan and self.plan.num_descriptors, bytes=nbytes,
            )  # fmt: skip

    def _linked(self, argument: str, key: object, cluster_id: int) -> PeerLink:
        """Return the link to the peer that `key` names; an operation that moves holds the link."""
        engine = self.engine
        if cluster_id == engine.cluster_id:
            raise invalid(
                f"{argument}={key} is of this engine's own cluster; give the Cache instead"
            )
        link = engine.links.peers.get(cluster_id) or engine.links.get(cluster_id)
        if self.moves and self.link is None:
            self.hold(link)
        return link

    def hold(self, link: PeerLink) -> None:
        """Keep the link to the peer until the operation ends."""
        self.link = link  # first: `link.end` ignores operations that have not begun
        link.begin(self)


def notify_moved(
    engine: Engine, link: PeerLink, name: str, started: float, options: Mapping[str, Any]
) -> None:
    """Send the notification of a transfer that has moved without an operation."""
    if (left_ms := options.get("timeout_ms")) is not None:
        left_ms = max(0.0, left_ms - (perf_counter() - started) * 1000)
    try:
        link.notify(options["notify"], left_ms)
    except LLMException as error:
        operation = Operation(engine, name, tag=options.get("tag", ""))
        with suppress(LLMException), operation:  # nothing begins once the link or engine ends
            operation.hold(link)
            raise operation.undelivered(error) from None
        raise operation.undelivered(error) from None


def checked(options: Mapping[str, Any], allowed: Container[str]) -> dict[str, Any]:
    """Return the options that are not None; refuse wrong values, and those not `allowed`."""
    given = {}
    for name, value in options.items():
        if name not in allowed:
            if name not in ALL_OPTIONS:
                raise TypeError(
                    f"{name} is not an option of a transfer; options are {sorted(ALL_OPTIONS)}"
                )
            if value is not None:
                raise TypeError(_ELSEWHERE[name])
        elif value is not None or name == "tag":
            if (check := _CHECKS.get(name)) is not None:
                check(value)
            given[name] = value
    return given


def check_notification(name: str, data: bytes) -> None:
    """Refuse a notification that is not bytes, is empty, or is too long."""
    if type(data) is not bytes:
        check_type(name, data, bytes)
    if not 1 <= len(data) <= MAX_NOTIFICATION_NBYTES:
        raise invalid(f"{name} has {len(data)} bytes; allowed are [1, {MAX_NOTIFICATION_NBYTES}]")


def check_tag(tag: str) -> None:
    """Refuse a tag that is too long or not printable."""
    if type(tag) is not str:
        check_type("tag", tag, str)
    if len(tag) > MAX_TAG or not tag.isprintable():
        raise invalid(f"tag={shown(tag)} must have at most {MAX_TAG} printable characters")


_CHECKS: Final[Mapping[str, Callable[[Any], object]]] = {
    "timeout_ms": check_timeout,
    "tag": check_tag,
    "verify": lambda value: check_type("verify", value, bool),
    "notify": partial(check_notification, "notify"),
    "notify_failure": partial(check_notification, "notify_failure"),
}


def refuse_notices(options: TransferOptions) -> None:
    """Refuse notifications of a transfer that has no peer."""
    for name in ("notify", "notify_failure"):
        if options.get(name) is not None:
            raise invalid(f"{name} must be None: a copy inside this process has no peer")
