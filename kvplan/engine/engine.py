"""What lives between `initialize` and `finalize`, made and released as one.

An engine that nobody finalized is released all the same: when dropped, and at exit.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from kvnative._signals import Mutex, signals_deferred
from kvplan.control.connecting import warn_unauthenticated
from kvplan.control.endpoint import Endpoint
from kvplan.device.choice import open_accelerator
from kvplan.engine.completion import EngineTracker
from kvplan.engine.leases import Leases
from kvplan.engine.memory import merged_ranges
from kvplan.engine.notifications import NotificationCallbacks, Notifications
from kvplan.engine.numa import check_node, numa_nodes, transfers_on
from kvplan.engine.operation import InFlight
from kvplan.engine.registry import CacheRegistry
from kvplan.engine.snapshot import describe
from kvplan.engine.telemetry import logger
from kvplan.execution.compute_events import no_accelerator
from kvplan.execution.verification import verify_every
from kvplan.links import Links, LinkState
from kvplan.planning.texts import plural
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.limits import start_thread
from kvplan.transport.choice import TransportOptions, make_transports
from kvplan.validation import UINT64_MAX, check_width, shown

if TYPE_CHECKING:
    from kvnative._executor import Gate
    from kvplan.engine.entry import CacheEntry
    from kvplan.engine.operation import Operation
    from kvplan.engine.options import Options
    from kvplan.engine.telemetry import Metrics
    from kvplan.engine.tracing import Tracer
    from kvplan.execution import ComputeEvent, Transfers
    from kvplan.planning import Part
    from kvplan.recording.writer import Recorder
    from kvplan.types import LlmRole

_MOST_PAIRS = 4096  # of unlike caches that are remembered as mentioned
_STOPPED_S = 1.0  # by then a transfer that was cancelled has stopped


class Engine:
    """Transports, caches, links and the transfers in flight of one engine.

    Raises:
        LLMException: what could not be had; everything else is released again.
    """

    def __init__(
        self,
        cluster_id: int,
        role: LlmRole,
        options: Options,
        transfers: Transfers | None,
        metrics: Metrics,
    ) -> None:
        self.pid = os.getpid()
        # Whether this is a forked child of the process that the engine belongs to.
        self.inherited = False
        self.cluster_id = cluster_id
        self.role = role
        self.options = options
        nodes = {} if options.numa_node is None else numa_nodes()
        if options.numa_node is not None:
            check_node("numa_node (kvplan.numa_node)", options.numa_node, nodes)
        self.transfers = (
            transfers or transfers_on(options.numa_node, nodes, options.tuning)
        ).share()
        self.metrics = metrics
        self.wait_ms: float = options.sync_kv_cache_wait_time
        # Whether caches that say different things are copied as bytes, with a warning.
        self.reinterpret = options.unlike_caches == "warn"
        self.verify_every = verify_every(options.verify)
        self._reinterpreted: set[frozenset[object]] = set()
        self.completion = EngineTracker()
        self.notifications = Notifications()
        self.callbacks = NotificationCallbacks(
            self.notifications, f"kvplan-notifications-{cluster_id}"
        )
        self._listen_at = ""
        self.in_flight = InFlight()
        self.recorder: Recorder | None = None
        self.tracer: Tracer | None = None
        if options.opentelemetry:
            from kvplan.engine.tracing import Tracer

            self.tracer = Tracer(cluster_id)
        # Whether transfers may move before anything of them can be traced or compared.
        self.moves_small = self.tracer is None and not self.verify_every
        self._remapping = Mutex()
        with ExitStack() as held:
            held.callback(self._end_recording)  # first: it is last, and has the links' end too
            held.callback(self.notifications.close)
            self.device = open_accelerator(
                options.accelerator, options.device_id, options.cuda_context
            )
            if self.device is not None:
                held.callback(self.device.close)
            reach = TransportOptions(
                permit_any_peer=options.permit_any_peer,
                device=self.device,
                local_comm_res=options.local_comm_res,
                rdma_traffic_class=options.rdma_traffic_class,
                rdma_service_level=options.rdma_service_level,
                staging_nbytes=options.staging_nbytes,
                ucx_devices=options.ucx_devices,
                ucx_settings=options.ucx_settings,
                tcp_connections=options.tcp_connections,
                tcp_encrypt=options.encrypt,
                tcp_congestion=options.tcp_congestion,
                label=f"kvplan-{cluster_id}",
                populate=options.populate,
            )
            transports, missing = make_transports(options.transport, reach)
            for transport in transports:
                held.callback(transport.close)
            self.registry = CacheRegistry(transports, options, self._announce, self.device)
            held.callback(self.registry.close)
            self.links = Links(
                cluster_id,
                lambda: self.role,
                options,
                self.registry,
                transports,
                missing,
                self.notifications,
            )
            held.callback(self.links.close)
            self.living = self.registry.living
            self.leases = Leases(cluster_id, self.links.instance, self.registry, transports)
            held.callback(self.leases.close)
            self.links.start()
            self.transport_names = [it.name for it in transports]
            if options.status_socket:
                self.links.serve_status(partial(describe, self))
            self.listen(options.listen_ip_info, stacklevel=3)  # who initializes
            self._held = held.pop_all()

    def _end_recording(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def _announce(self) -> None:
        self.links.publish_soon()

    def check_process(self) -> None:
        """Raise LLMException (LLM_FAILED) in a forked child."""
        if self.inherited:
            raise LLMException(
                f"cluster {self.cluster_id} was initialized by process {self.pid}; this is its "
                f"forked child {os.getpid()}, which needs an engine of its own"
            )

    @property
    def listen_address(self) -> str | None:
        """Where it listens, with the real port; None: nowhere."""
        endpoint = self.links.endpoint
        return None if endpoint is None else str(endpoint)

    def listen(self, address: str, stacklevel: int) -> None:
        """Listen at `address` ("ip:port", port 0: any) and nowhere else; empty: nowhere.

        Where it listens there already, nothing changes. Warns if anybody could link.

        Args:
            address: where.
            stacklevel: whom the warning is for: 1 is the caller of this method.

        Raises:
            LLMException: LLM_PARAM_INVALID: no such address; LLM_FAILED: it cannot be had. Nothing
                changes then.
        """
        here = self.listen_address
        if here is not None and address in (here, self._listen_at):
            return
        if address:
            endpoint = Endpoint.parse(address)
            if self.options.cluster_key_file is None:
                warn_unauthenticated(endpoint, stacklevel + 1)
            self.links.listen(endpoint)
        else:
            self.links.stop_listening()
        self._listen_at = address

    def gate(self, name: str, event: ComputeEvent) -> Gate:
        """See `Device.gate`.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: there is no accelerator.
        """
        if self.device is None:
            raise no_accelerator(name, event)
        return self.device.gate(name, event)

    def warn_reinterpret(self, operation: Operation, part: Part) -> None:
        """Log that bytes are copied between caches that differ; once for each pair."""
        pair = frozenset((it.name, it.meaning) for it in (part.src, part.dst))
        if pair in self._reinterpreted:
            return
        if len(self._reinterpreted) >= _MOST_PAIRS:
            self._reinterpreted.clear()  # of caches that have gone, most likely
        self._reinterpreted.add(pair)
        logger.warning(
            "%s between caches that differ: src is %s; dst is %s. The bytes are copied as they are "
            "(kvplan.unlike_caches=refuse would refuse it); this pair is not mentioned again",
            operation.name,
            part.src,
            part.dst,
        )

    def remap(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `remap_registered_memory`."""
        given = _checked_ranges(ranges)
        if not any(it.state is LinkState.LINKED for it in self.links.status()):
            raise LLMException(
                f"cluster {self.cluster_id} has no link that stands",
                status_code=LLMStatusCode.LLM_NOT_YET_LINK,
            )
        with self._remapping:  # of two at once the second must not be lost
            entries = [it for it, _ in self.registry.entries()]
            self.registry.renew(_touched(entries, given))
        self.links.publish_and_confirm(self.wait_ms / 1000)

    def drain(self) -> None:
        """Take no more calls, and wait for the transfers in flight as long as a pull may take.

        An interrupt ends the wait; `close` must follow.
        """
        if not self.inherited:
            self.in_flight.close()
            self.in_flight.wait(self.wait_ms / 1000)

    def close(self) -> None:
        """Stop the transfers in flight, and release all.

        Idempotent. In a forked child nothing happens: all of it is the parent's.
        """
        if self.inherited:
            return
        self.in_flight.close()
        with signals_deferred, self._held.pop_all() as held:  # whatever goes wrong: all of it
            held.callback(self.completion.close, _STOPPED_S)
            held.callback(self.in_flight.wait, _STOPPED_S)
            # Also what a call that is under way still has to begin.
            held.callback(self.transfers.close, cancel=True)
            if not self.in_flight.wait(0):
                self.completion.cancel(LLMException("stopped, as the engine was finalized"))


_open: set[Engine] = set()
"""Held here, so that a forked child never collects what is its parent's."""


def released_with(owner: object, engine: Engine) -> None:
    """Close `engine` when `owner` is collected, or the process ends."""
    _open.add(engine)
    # Not the engine itself: its owner may live on for long after it was closed.
    weakref.finalize(owner, _release_soon, weakref.ref(engine)).atexit = False


def _release_soon(held: weakref.ref[Engine]) -> None:
    # The collector runs in any thread, also in one that `close` would wait for, and holding locks.
    engine = held()
    if not (engine is None or engine.inherited or engine.in_flight.closed):
        with suppress(LLMException):  # no more threads: then at exit
            start_thread("kvplan-release", drain_and_release, engine)


def release(engine: Engine) -> None:
    """Close `engine`, and do not hold it any more."""
    try:
        engine.close()
    finally:
        _open.discard(engine)


def drain_and_release(engine: Engine) -> None:
    """`release` it once its transfers in flight have ended, or had their time."""
    try:
        engine.drain()
    finally:
        release(engine)


def _leave_to_parent() -> None:
    for engine in _open:
        engine.inherited = True


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _release_all() -> None:
    for engine in list(_open):
        drain_and_release(engine)


def _checked_ranges(ranges: object) -> list[tuple[int, int]]:
    """The (address, nbytes) of a caller.

    Raises:
        TypeError: no sequence of pairs of int.
        ValueError: a number outside uint64.
        LLMException: LLM_PARAM_INVALID: none at all, address 0, no bytes, or an end past 2**64.
    """
    if isinstance(ranges, str | bytes) or not isinstance(ranges, Sequence):
        raise TypeError(f"ranges={shown(ranges)} must be a sequence of (address, nbytes)")
    if not ranges:
        raise invalid("ranges is empty; at least one is needed")
    checked = []
    for position, it in enumerate(ranges):
        name = f"ranges[{position}]"
        if not isinstance(it, tuple | list) or len(it) != 2:
            raise TypeError(f"{name}={shown(it)} must be (address, nbytes)")
        address = check_width(f"{name} address", it[0], 0, UINT64_MAX)
        nbytes = check_width(f"{name} nbytes", it[1], 0, UINT64_MAX)
        if not address or not nbytes or address + nbytes > 2**64:
            raise invalid(
                f"{name}={it} must be of an address and nbytes of at least 1, and end by 2**64"
            )
        checked.append((address, nbytes))
    return checked


def _touched(entries: Iterable[CacheEntry], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The ids of the registered caches that the ranges touch.

    Raises:
        LLMException: LLM_PARAM_INVALID: a byte of a range is in none.
    """
    registered = [(it, merged_ranges(it.memory)) for it in entries if not it.owned]
    touched: set[int] = set()
    for position, (address, nbytes) in enumerate(ranges):
        covered = address  # every byte from the address to here is in a cache
        pieces = sorted(
            (start, size, entry.cache.cache_id)
            for entry, parts in registered
            for start, size in parts
            if start < address + nbytes and address < start + size
        )
        for start, size, cache_id in pieces:
            touched.add(cache_id)
            if start <= covered:
                covered = max(covered, start + size)
        if covered < address + nbytes:
            raise invalid(
                f"ranges[{position}]=({address:#x}, {nbytes}): the byte at {covered:#x} is in none "
                f"of the {plural(len(registered), 'registered cache')}"
            )
    return sorted(touched)
