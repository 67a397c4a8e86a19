"""The engine below an interface by address: registered memory, and requests in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, Unpack

from kvnative._backend import NativeError
from kvnative._signals import Mutex, signals_deferred
from kvplan.addressed.connections import Connections, Where
from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.operation import TransferOptions
from kvplan.engine.options import Options
from kvplan.engine.ranges import AddressRanges
from kvplan.execution import Transfers, TransferTask
from kvplan.status import LLMException, LLMStatusCode, busy, invalid
from kvplan.system.logs import Log
from kvplan.types import CacheDesc, DataType, LlmRole, Placement
from kvplan.validation import UINT64_MAX

REFUSALS: Final = (LLMException, ValueError, OverflowError, NativeError, OSError, MemoryError)
"""Exceptions of the engine, which an interface reports as statuses and logs."""

MAX_REQUESTS: Final = 1 << 16  # open ones
MAX_REGION_NAME: Final = 64  # characters that are kept
_SPIN_S: Final = 20e-6  # a caller that asks again sooner is spinning
_PAUSE_MS: Final = 0.1


@dataclass(eq=False, slots=True)
class Request:
    """A submitted transfer: its task, ranges and peer, and the caller's own data."""

    task: TransferTask
    ranges: AddressRanges
    remote_engine: str
    operation: str
    data: Any = None
    _asked: float = field(default=0.0, init=False)  # by the monotonic clock, in seconds

    def has_ended(self) -> bool:
        """Return True if the transfer has an outcome, and its notification was sent.

        A caller that asks without a pause waits a little: otherwise it takes a core, and the GIL,
        from the threads that copy.
        """
        task = self.task
        if not task.settled and monotonic() - self._asked < _SPIN_S:
            task.wait_done(_PAUSE_MS)
        self._asked = monotonic()
        return task.settled

    def error(self, log: Log, number: int) -> LLMException | None:
        """Return and log the error of a request that has ended; None after a success."""
        try:
            self.task.wait()
        except LLMException as error:
            log.warning(
                "request %d, %s of %s: %s", number, self.operation, self.remote_engine, error
            )
            return error
        return None


class Requests:
    """The open requests of one engine, by number. Any thread may call the methods."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._last = 0
        self._requests: dict[int, Request] = {}  # in the order in which they were submitted

    def check_room(self, num_others: int = 0) -> None:
        """Raise LLM_LINK_BUSY if too many requests are open, and others that the caller counts."""
        if len(self._requests) + num_others >= MAX_REQUESTS:
            raise busy(
                f"{MAX_REQUESTS} requests are open; ask for the status of some, which ends them"
            )

    def add(self, request: Request) -> int:
        """Add a submitted request, and return its number."""
        with self._mutex:
            self._last += 1
            self._requests[self._last] = request
            return self._last

    def get(self, number: int) -> Request:
        """Return an open request."""
        request = self._requests.get(number)
        if request is None:
            raise invalid(f"request {number} is unknown, or its end was already returned")
        return request

    def take(self, number: int) -> Request | None:
        """Return a request that has ended, and forget it; None: it is in flight."""
        if not self.get(number).has_ended():
            return None
        with self._mutex:
            request = self.get(number)
            del self._requests[number]
        return request

    def drop(self, number: int) -> None:
        """Cancel and forget a request, if it is open."""
        request = self._requests.pop(number, None)
        if request is not None:
            request.task.cancel()

    def numbers(self) -> list[int]:
        """Return the numbers of the open requests, oldest first."""
        return list(self._requests)

    def stop_peer(self, cluster_id: int, reason: str) -> None:
        """Stop the requests with a peer, under all of its names."""
        with self._mutex:
            requests = list(self._requests.values())
        for request in requests:
            if request.ranges.cluster_id == cluster_id:
                request.task.cancel(LLMException(reason))


class AddressedEngine:
    """An engine with memory by addresses and peers by names."""

    def __init__(
        self,
        cluster_id: int,
        options: Options,
        where: Where,
        log: Log,
        transfers: Transfers | None = None,  # None: those of this process
        *,
        is_exact: bool = False,
    ) -> None:
        self.datadist = LlmDataDist(cluster_id, LlmRole.MIX, transfers=transfers)
        self.datadist.initialize(options)
        self.connections = Connections(self.datadist, where, log, is_exact=is_exact)
        self.requests = Requests()

    def connect(self, remote_engine: str, timeout_ms: int) -> int:
        """Connect with a remote engine unless it is connected, and return its cluster id."""
        cluster_id = self.connections.linked_cluster(remote_engine)
        if cluster_id is not None:
            return cluster_id
        try:
            self.connections.connect(remote_engine, timeout_ms)
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_ALREADY_LINK:  # by another thread
                raise
        return self.connections.cluster_of(remote_engine)

    def begin(
        self, ranges: AddressRanges, nbytes: int, keep: Callable[[TransferTask], object],
        **options: Unpack[TransferOptions],
    ) -> bool:  # fmt: skip
        """Begin a transfer, and pass its task to `keep`; return False if it was small and is done.

        Only small transfers that cannot wait for the peer are done at once.
        """
        datadist = self.datadist
        engine = datadist._running()
        link = engine.links.peers.get(ranges.cluster_id)
        if link is not None and not link.needs_peer and nbytes <= engine.transfers.small_nbytes:
            datadist.run(ranges, **options)
            return False
        with signals_deferred:  # until the task is kept
            keep(datadist.submit(ranges, **options))
        return True

    def submit(
        self, ranges: AddressRanges, remote_engine: str, operation: str, data: Any = None
    ) -> int:
        """Begin a transfer, and return the number of its request."""
        number = 0
        try:
            with signals_deferred:  # until the task has a number
                task = self.datadist.submit(ranges)
                number = self.requests.add(Request(task, ranges, remote_engine, operation, data))
        except BaseException:  # an interrupt: no caller gets the number
            self.requests.drop(number)
            raise
        return number

    def first_address(self, cluster_id: int) -> int:
        """Return the address of the first memory that a peer has registered; 0: none."""
        link = self.datadist._running().links.get(cluster_id)
        extents = link.address_index(writable=False, ask=True).extents
        return min(((each.cache.cache_id, each.address) for each in extents), default=(0, 0))[1]

    def register(
        self, address: int, nbytes: int, place: Placement, *, remote_accessible: bool = True,
        name: str = "",
    ) -> int:  # fmt: skip
        """Let transfers use memory until it is deregistered, and return its handle.

        Plans, recordings and messages at both ends show the printable characters of the name.
        """
        if address == 0 or nbytes == 0 or address + nbytes > UINT64_MAX + 1:
            raise invalid(
                f"addr={address:#x}, len={nbytes}: memory must have at least 1 byte, begin above 0 "
                "and end by 2**64"
            )
        desc = CacheDesc(1, (1, nbytes), DataType.DT_UINT8, place)  # a cache of one tensor of bytes
        shown = "".join(filter(str.isprintable, name))[:MAX_REGION_NAME]
        return self.datadist._register(
            desc, [address], (), False, remote_accessible, shown
        ).cache_id

    def deregister(self, handle: int) -> None:
        """Withdraw memory. Transfers that use it stop and fail; on return none uses it."""
        self.datadist.unregister_cache(handle)
