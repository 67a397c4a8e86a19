"""The state of an engine between `initialize` and `finalize`.

An engine that is never finalized is released when its owner is collected, or at exit.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, fields
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from kvnative._signals import Mutex, signals_deferred
from kvplan.control.connecting import warn_loopback_name, warn_unauthenticated
from kvplan.control.endpoint import Endpoint
from kvplan.device.choice import CudaOptions, open_accelerator
from kvplan.engine.leases import Leases
from kvplan.engine.memory import merged_ranges
from kvplan.engine.notifications import NotificationCallbacks, Notifications
from kvplan.engine.numa import check_node, numa_nodes, transfers_on
from kvplan.engine.queues import EngineTracker
from kvplan.engine.registry import CacheRegistry
from kvplan.engine.telemetry import InFlight, logger
from kvplan.execution.compute_events import no_accelerator
from kvplan.execution.verification import verify_every
from kvplan.links import Links, LinkState
from kvplan.planning.texts import plural
from kvplan.status import LLMException, invalid, not_linked
from kvplan.system.limits import check_process, start_thread
from kvplan.transport.choice import TransportOptions, make_transports
from kvplan.validation import UINT64_MAX, check_width, shown

if TYPE_CHECKING:
    from kvnative._task import Gate
    from kvplan.engine.options import Options
    from kvplan.engine.telemetry import EngineMetrics, Metrics, Tracer
    from kvplan.execution import ComputeEvent, Transfers
    from kvplan.links.local_engine import CacheEntry
    from kvplan.planning import Part
    from kvplan.recording.writer import Recorder
    from kvplan.types import LlmRole

_MAX_LISTED: Final = 100  # transfers in flight that `describe` lists, the oldest first
_MAX_WARNED_PAIRS: Final = 4096  # pairs of unlike caches whose warning is not repeated
_STOPPED_S: Final = 1.0  # time for cancelled transfers to stop


class Engine:
    """Transports, caches, links and the transfers in flight of one engine."""

    def __init__(
        self,
        cluster_id: int,
        role: LlmRole,
        options: Options,
        transfers: Transfers | None,
        metrics: Metrics,
    ) -> None:
        self.pid = os.getpid()
        # True in a forked child of the process that made the engine.
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
        # True: copy unlike caches as bytes, with a warning.
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
            from kvplan.engine.telemetry import Tracer

            self.tracer = Tracer(cluster_id)
        # Small transfers may move inline, where they can neither be traced nor verified.
        self.moves_small = self.tracer is None and not self.verify_every
        self._remapping = Mutex()
        with ExitStack() as held:
            held.callback(self._end_recording)  # first, so it runs after the links end
            held.callback(self.notifications.close)
            self.device = open_accelerator(
                options.accelerator,
                options.device_id,
                CudaOptions(
                    options.cuda_context, options.cuda_batch_calls, options.cuda_copy_blocks
                ),
            )
            if self.device is not None:
                held.callback(self.device.close)
            same = {field.name for field in fields(TransportOptions)} - {"device", "label"}
            reach = TransportOptions(
                device=self.device,
                label=f"kvplan-{cluster_id}",
                **{name: getattr(options, name) for name in same},
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
            held.callback(self.leases.stop)
            self.links.start()
            self.transport_names = [each.name for each in transports]
            if options.status_socket:
                self.links.serve_status(partial(describe, self))
            self.listen(options.listen_ip_info, stacklevel=3)  # the caller of `initialize`
            self._held = held.pop_all()

    def _end_recording(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def _announce(self) -> None:
        self.links.publish_soon()

    @property
    def listen_address(self) -> str | None:
        """The address that peers link to; None: the engine does not listen."""
        endpoint, advertise = self.links.endpoint, self.options.advertise
        if endpoint is None:
            return None
        if endpoint.path or not advertise:  # a path has no port
            return str(endpoint)
        return str(Endpoint.advertised(advertise, endpoint.port))

    def listen(self, address: str, stacklevel: int) -> None:
        """Listen only at `address` ("ip:port", port 0: any); empty: stop listening.

        Warns if other hosts may reach the address without a cluster key, or cannot reach the name.
        `stacklevel` is for the warning; 1 means the caller of this method.
        """
        here = self.links.endpoint
        if here is not None and address in (str(here), self._listen_at):
            return
        if address:
            endpoint = Endpoint.parse(address)
            warn_loopback_name(endpoint, stacklevel + 1)
            if self.options.cluster_key_file is None:
                warn_unauthenticated(endpoint, stacklevel + 1)
            self.links.listen(endpoint)
        else:
            self.links.stop_listening()
        self._listen_at = address

    def gate(self, name: str, event: ComputeEvent) -> Gate:
        """Return the gate of an event; see `Device.gate`."""
        if self.device is None:
            raise no_accelerator(name, event)
        return self.device.gate(name, event)

    def warn_reinterpret(self, operation: str, part: Part) -> None:
        """Warn that bytes are copied between unlike caches, once for each pair."""
        pair = frozenset((side.name, side.meaning) for side in (part.src, part.dst))
        if pair in self._reinterpreted:
            return
        if len(self._reinterpreted) >= _MAX_WARNED_PAIRS:
            self._reinterpreted.clear()  # most of these caches are probably gone
        self._reinterpreted.add(pair)
        logger.warning(
            "%s between caches that differ: src is %s; dst is %s. The bytes are copied as they are "
            "(kvplan.unlike_caches=refuse refuses this); later transfers of the pair do not warn",
            operation,
            part.src,
            part.dst,
        )

    def remap(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Register caches again; see `remap_registered_memory`."""
        given = _checked_ranges(ranges)
        if not any(link.state is LinkState.LINKED for link in self.links.status()):
            raise not_linked(f"cluster {self.cluster_id} is not linked to any peer")
        with self._remapping:  # a concurrent call must not be lost
            entries = [entry for entry, _ in self.registry.entries()]
            self.registry.renew(_touched(entries, given))
        self.links.publish_and_confirm(self.wait_ms / 1000)

    def drain(self) -> None:
        """Refuse further operations, and wait at most SyncKvCacheWaitTime for those in flight.

        `close` must follow, even after an interrupt.
        """
        if not self.inherited:
            self.in_flight.close()
            self.in_flight.wait(self.wait_ms / 1000)

    def close(self) -> None:
        """Stop the transfers in flight and release all resources; idempotent.

        Does nothing in a forked child, because the parent owns everything.
        """
        if self.inherited:
            return
        self.in_flight.close()
        # All steps, despite errors; `leases` last.
        with signals_deferred, closing(self.leases), self._held.pop_all() as held:
            held.callback(self.completion.close, _STOPPED_S)
            held.callback(self.in_flight.wait, _STOPPED_S)
            # Also stops the copies that a running call has yet to begin.
            held.callback(self.transfers.close, cancel=True)
            if not self.in_flight.wait(0):
                self.completion.cancel(LLMException("stopped because the engine was finalized"))


def metrics_of(cluster_id: int, metrics: Metrics, engine: Engine | None) -> EngineMetrics:
    """Return the counters of an engine; see `LlmDataDist.metrics`."""
    cache_bytes: Counter[str] = Counter()
    links: Counter[str] = Counter()
    if engine is not None:
        check_process(engine.pid, "the engine")
        links.update(link.state.name for link in engine.links.status())
        for entry, _ in engine.registry.entries():
            cache_bytes[entry.cache.cache_desc.placement.name] += entry.cache.cache_desc.nbytes
    return {
        "cluster_id": cluster_id,
        "in_flight": 0 if engine is None else len(engine.in_flight),
        "links": dict(links),
        "cache_bytes": dict(cache_bytes),
        "operations": metrics.snapshot(),
    }


def describe(engine: Engine) -> dict[str, Any]:
    """Return the state of an engine as JSON values."""
    from kvplan import __version__  # here: kvplan imports this package

    operations = metrics_of(engine.cluster_id, engine.metrics, engine)["operations"]
    return {
        "kvplan": __version__,
        "pid": os.getpid(),
        "command": [*map(str, sys.argv)],
        "cluster_id": engine.cluster_id,
        "role": engine.role.name,
        "listen_address": engine.listen_address,
        "transports": list(engine.transport_names),
        "seconds": time.monotonic(),
        "operations": {
            name: {
                "statuses": row["statuses"],
                "nbytes": row["nbytes"],
                "count": row["seconds"]["count"],
                "seconds": row["seconds"]["sum"],
                "buckets": [
                    [None if math.isinf(bound) else bound, count]
                    for bound, count in row["seconds"]["buckets"].items()
                ],
            }
            for name, row in operations.items()
        },
        "links": [
            asdict(link) | {"role": link.role and link.role.name, "state": link.state.name}
            for link in engine.links.status()
        ],
        "caches": [
            {
                "cache_id": entry.cache.cache_id,
                "nbytes": entry.cache.cache_desc.nbytes,
                "num_tensors": entry.cache.cache_desc.num_tensors,
                "placement": entry.cache.cache_desc.placement.name,
                "allocated": entry.owned,
                "deallocated": not has_id,
            }
            for entry, has_id in engine.registry.entries()
        ],
        "pages": {
            "option": engine.options.pages,
            "prefault": engine.options.prefault,
            "numa_node": engine.options.numa_node,
            "populate": engine.options.populate,
            "mapped_arenas": len(mapped := engine.links.mapped()),
            "mapped_bytes": sum(arena.nbytes for _, arena in mapped),
        },
        "leases": len(engine.leases.live()),
        "in_flight": _in_flight(engine),
    }


def _in_flight(engine: Engine) -> list[dict[str, Any]]:
    now = perf_counter()
    found = sorted(engine.in_flight.operations(), key=lambda operation: operation.started)
    rows = []
    for operation in found[:_MAX_LISTED]:
        plan = operation.plan
        rows.append(
            {
                "operation": operation.name,
                "tag": operation.tag,
                "peer": None if operation.link is None else operation.link.cluster_id,
                "cache_id": None if operation.cache_id < 0 else operation.cache_id,
                "nbytes": None if plan is None else plan.nbytes,
                "age_s": now - operation.started,
            }
        )
    return rows


_open: set[Engine] = set()
"""Open engines, held so that a forked child does not collect its parent's objects."""


def released_with(owner: object, engine: Engine) -> None:
    """Close `engine` when `owner` is collected, or the process ends."""
    _open.add(engine)
    # A weak reference, because the owner may long outlive the engine.
    weakref.finalize(owner, _release_soon, weakref.ref(engine)).atexit = False


def _release_soon(held: weakref.ref[Engine]) -> None:
    # The collector may run in a thread that holds locks, or that `close` would wait for.
    engine = held()
    if not (engine is None or engine.inherited or engine.in_flight.closed):
        with suppress(LLMException):  # out of threads: released at exit
            start_thread("kvplan-release", drain_and_release, engine)


def release(engine: Engine) -> None:
    """Close `engine` and drop the reference to it."""
    try:
        engine.close()
    finally:
        _open.discard(engine)


def drain_and_release(engine: Engine) -> None:
    """Release `engine` after its transfers in flight, or after SyncKvCacheWaitTime."""
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
    """Check the caller's ranges and return them."""
    if isinstance(ranges, str | bytes) or not isinstance(ranges, Sequence):
        raise TypeError(f"ranges={shown(ranges)} must be a sequence of (address, nbytes)")
    if not ranges:
        raise invalid("ranges is empty; at least one is needed")
    checked = []
    for position, span in enumerate(ranges):
        name = f"ranges[{position}]"
        if not isinstance(span, tuple | list) or len(span) != 2:
            raise TypeError(f"{name}={shown(span)} must be (address, nbytes)")
        address = check_width(f"{name} address", span[0], 0, UINT64_MAX)
        nbytes = check_width(f"{name} nbytes", span[1], 0, UINT64_MAX)
        if not address or not nbytes or address + nbytes > 2**64:
            raise invalid(
                f"{name}={span}: address and nbytes must be at least 1, and their sum at most 2**64"
            )
        checked.append((address, nbytes))
    return checked


def _touched(entries: Iterable[CacheEntry], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ids of the registered caches that ranges touch; refuse unregistered bytes."""
    registered = [
        (cache_entry, merged_ranges(cache_entry.memory))
        for cache_entry in entries
        if not cache_entry.owned
    ]
    touched: set[int] = set()
    for position, (address, nbytes) in enumerate(ranges):
        covered = address  # end of the bytes that are in caches
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
