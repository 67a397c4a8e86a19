"""The successive connections of one link. Each reaches only memory registered earlier."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import finalize, ref

import msgspec

from kvnative._backend import NativeError
from kvnative._signals import Mutex
from kvplan.planning.texts import plural
from kvplan.status import LLMException, LLMStatusCode, link_failed, message_of
from kvplan.system.limits import start_thread
from kvplan.system.logs import Log
from kvplan.transport.hccl.device import MAX_LINKS
from kvplan.transport.hccl.metadata import Metadata

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvnative._hccl import Communicator
    from kvnative._hccl_memory import HcclLibrary
    from kvplan.transport.announced import Tickets
    from kvplan.transport.hccl.addresses import DeviceAddress, RankTable
    from kvplan.transport.hccl.device import HcclDevice


_LOG = Log("kvplan")

# Values of HcclResult.
_PTR, _INTERNAL, _UNAVAIL, _TIMEOUT = 2, 4, 7, 9
_TCP_CONNECT, _ROCE_CONNECT, _RUNTIME, _DRV, _NETWORK = 11, 12, 15, 16, 19

_DEFAULT_PORT: Final = 16666  # of HCCL on a device, if the rank table names none


@dataclass(eq=False)
class Connection:
    """A communicator. This end uses it as long as anything refers to this object.

    Attributes:
        generation: The number of the connection.
        communicator: The communicator of HCCL.
        newest: The number up to which regions of this process are bound to it.
        peer_newest: The number up to which regions of the peer are bound to it.
    """

    generation: int
    communicator: Communicator
    newest: int
    peer_newest: int = -1


class Connections:
    """The connections to one peer; see `Renewable`.

    A connection is closed when neither end uses it: while one end transfers over it, the other must
    keep it open.
    """

    def __init__(
        self,
        hccl: HcclDevice,
        peer: Metadata,
        table: RankTable,
        session: bytes,
        own_metadata: Callable[[], Metadata],
        *,
        is_hccs: bool,
    ) -> None:
        self.is_hccs = is_hccs
        self.request_renewal: Callable[[float | None], None] | None = None
        self.notify_unused: Callable[[int], None] = _ignore
        self._hccl = hccl
        self._peer = peer
        self._table = table
        self._session = session
        self._own_metadata = own_metadata
        # Re-entrant: dropping a connection runs its finalizer.
        self._mutex = Mutex()
        self._current: Connection | None = None
        self._communicators: dict[int, Communicator] = {}  # not closed by this object yet
        self._opened_ever: set[Communicator] = set()  # not closed by HCCL yet
        self._opened: dict[int, int] = {}  # `newest` of generations that are not prepared yet
        self._making: set[int] = set()
        self._made: dict[int, Connection] = {}
        self._abandoned: set[int] = set()
        # Generations that one end does not use any more, and the other end may use.
        self._unused_here: set[int] = set()
        self._unused_there: set[int] = set()
        self._why_closed: LLMException | None = None
        self._renews = False  # a thread renews the connection because it was disturbed

    def connect(self, timeout_ms: float) -> None:
        """Make the first connection; block until the peer does so too."""
        self.open(0)
        self.renew(0, timeout_ms=timeout_ms)
        self._use(0, self._peer.newest)

    def current(self) -> Connection:
        """Return the connection for new transfers; raise LLMException if the link has none."""
        current = self._current
        if current is None:
            raise self._closed_error()
        return current

    def open(self, generation: int) -> bytes:
        """See `Renewable`."""
        name = self._name(generation)
        try:
            communicator, newest = self._hccl.open(self._table, name, is_hccs=self.is_hccs)
        except NativeError as error:
            raise self._not_made(generation, error) from error
        try:
            metadata = msgspec.structs.replace(self._own_metadata(), newest=newest).to_bytes()
            with self._mutex:
                self._check_wanted(generation)
                self._communicators[generation] = communicator
                self._opened_ever = {each for each in self._opened_ever if each.state != "closed"}
                self._opened_ever.add(communicator)
                self._opened[generation] = newest
        except BaseException:
            self._hccl.close(communicator)
            raise
        return metadata

    def renew(self, generation: int, *, timeout_ms: float) -> None:
        """See `Renewable`."""
        with self._mutex:
            self._check_wanted(generation)
            newest = self._opened.pop(generation, None)
            if newest is None:
                raise _given_up(generation)
            communicator = self._communicators[generation]
            self._making.add(generation)
        try:
            communicator.prepare(timeout_ms)
            self._keep(generation, communicator, newest)
        except BaseException as error:
            with self._mutex:
                self._communicators.pop(generation, None)
            self._hccl.close(communicator)
            if not isinstance(error, NativeError):
                raise
            self._check_wanted(generation)  # raises if it was closed or abandoned meanwhile
            raise self._not_made(generation, error) from error
        finally:
            with self._mutex:
                self._making.discard(generation)

    def adopt(self, generation: int, metadata: bytes) -> None:
        """See `Renewable`."""
        newer = Metadata.from_bytes(metadata)
        if (newer.instance, newer.generations) != (self._peer.instance, self._peer.generations):
            raise link_failed(
                f"metadata is of instance {newer.instance}; the link is to {self._peer.instance}"
            )
        self._use(generation, newer.newest)
        self.renew_disturbed()  # the new one may bind memory that was deregistered meanwhile

    def abandon(self, generation: int) -> None:
        """See `Renewable`."""
        with self._mutex:
            made = self._made.pop(generation, None)
            if made is not None:
                self._unused_there.add(generation)  # the peer will not use it
                return
            if self._opened.pop(generation, None) is not None:
                ending = self._communicators.pop(generation, None)
            else:
                self._abandoned.add(generation)
                is_made = generation in self._making  # `renew` closes it again
                ending = self._communicators.get(generation) if is_made else None
        if ending is not None:
            self._take_down(ending)

    def unused(self, generation: int) -> None:
        """See `Renewable`."""
        with self._mutex:
            if generation not in self._communicators:
                return
            if generation not in self._unused_here:
                self._unused_there.add(generation)
                return
            self._unused_here.discard(generation)
            communicator = self._communicators.pop(generation)
        self._take_down(communicator)

    def close(self, why: LLMException) -> None:
        """Stop all transfers and close all connections, without waiting. Idempotent."""
        with self._mutex:
            if self._why_closed is None:
                self._why_closed = why
            why = self._why_closed
            dropped = self._current, dict(self._made)
            self._current = None
            self._made.clear()
            self._opened.clear()
        del dropped  # outside of the lock
        while True:  # an interrupt leaves the rest to the next call
            with self._mutex:
                if not self._communicators:
                    return
                _, communicator = self._communicators.popitem()
            communicator.cancel(message_of(why))
            self._take_down(communicator)

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._why_closed is not None

    @property
    def is_down(self) -> bool:
        """True if this is closed and the peer cannot write over any of its connections."""
        return self.closed and all(opened.state != "ready" for opened in list(self._opened_ever))

    def tickets(self, tag: int) -> Tickets | None:
        """Return the peer's writes to the process with that tag; None: they cannot be read now."""
        if self.closed:
            return frozenset() if self.is_down else None
        if (current := self._current) is None:  # no transfer can use the link yet
            return frozenset()
        address = self._peer.generations.tickets
        words = self._hccl.read_tickets(current.communicator, address)
        if words is None:
            self._renew_disturbed(current)
            return None
        return frozenset((i, word) for i, word in enumerate(words) if word and word >> 32 == tag)

    def renew_disturbed(self) -> None:
        """Renew the connection in a thread if it was disturbed."""
        if (current := self._current) is not None:
            self._renew_disturbed(current)

    def _use(self, generation: int, peer_newest: int) -> None:
        with self._mutex:
            made = self._made.pop(generation, None)
            if made is None or self._why_closed is not None:
                raise self._closed_error()
            made.peer_newest = peer_newest
            self._abandoned = {other for other in self._abandoned if other > generation}
            before, self._current = self._current, made
        del before  # outside of the lock

    def _keep(self, generation: int, communicator: Communicator, newest: int) -> None:
        """Keep a new connection until its last user drops it."""
        held = Connection(generation, communicator, newest)
        let_go = partial(_let_go, ref(self), self._hccl, generation, communicator)
        with self._mutex:
            self._check_wanted(generation)
            finalize(held, self._hccl.background.do, let_go)
            self._made[generation] = held

    def _renew_disturbed(self, connection: Connection) -> None:
        """Renew the connection in a thread if it was disturbed and is in use for new transfers."""
        with self._mutex:
            is_disturbed = self._current is connection and connection.communicator.disturbed
            if self.request_renewal is None or self._renews or not is_disturbed:
                return
            with suppress(LLMException):  # if no thread can start, the next use tries again
                start_thread(f"kvplan-hccl-renews-{connection.generation}", self._renew_now)
                self._renews = True

    def _renew_now(self) -> None:
        is_renewed = False
        try:
            if self.request_renewal is not None:
                self.request_renewal(None)
                is_renewed = True
        except LLMException as error:
            _LOG.info("event=not_renewed peer=%s reason=%s", self._peer, str(error))
        finally:
            with self._mutex:
                self._renews = False
        if is_renewed:
            self.renew_disturbed()  # the new connection may bind memory that was deregistered since

    def _take_down(self, communicator: Communicator) -> None:
        self._hccl.background.do(partial(self._hccl.close, communicator))

    def _check_wanted(self, generation: int) -> None:
        if self._why_closed is not None:
            raise self._closed_error()
        if generation in self._abandoned:
            self._abandoned.discard(generation)
            raise _given_up(generation)

    def _closed_error(self) -> LLMException:
        why = self._why_closed
        message = "the link is not connected" if why is None else message_of(why)
        status = LLMStatusCode.LLM_NOT_YET_LINK if why is None else why.status_code
        return LLMException(message, status_code=status)

    def _not_made(self, generation: int, error: NativeError) -> LLMException:
        hccl, address = self._hccl, self._own_metadata().device
        hint = _advice(
            getattr(error, "code", 0),
            hccl.library,
            hccl.device.id,
            address,
            is_hccs=self.is_hccs,
            num_open=hccl.num_open,
        )
        kind = "HCCL communicator" if self._table.hixl is None else "HIXL client"
        return link_failed(f"{kind} {self._name(generation)}: {error}{hint}")

    def _name(self, generation: int) -> str:
        instances = sorted((self._own_metadata().instance, self._peer.instance))
        identity = b"".join([*(instance.encode() for instance in instances), self._session])
        return f"kvplan-{hashlib.sha256(identity).hexdigest()[:32]}-{generation}"

    def _retire(self, generation: int) -> bool:
        """Mark the connection as unused here; return whether it can be closed now."""
        with self._mutex:
            if self._why_closed is not None:
                return True
            if peer_too := generation in self._unused_there:
                self._unused_there.discard(generation)
                self._communicators.pop(generation, None)
            else:
                self._unused_here.add(generation)
        self.notify_unused(generation)
        return peer_too


def _let_go(
    owner: ref[Connections], hccl: HcclDevice, generation: int, communicator: Communicator
) -> None:
    """Close an unused connection unless the peer uses it. The thread holds no locks."""
    connections = owner()
    if connections is None or connections._retire(generation):
        hccl.close(communicator)


def _given_up(generation: int) -> LLMException:
    return link_failed(f"generation {generation} was abandoned")


def _ignore(_generation: int) -> None: ...


def _advice(
    code: int,
    library: HcclLibrary,
    device_id: int,
    address: DeviceAddress,
    *,
    is_hccs: bool,
    num_open: int,
) -> str:
    """Return what to check after HCCL's result `code` while connecting, or ""."""
    if code in (_RUNTIME, _DRV, _NETWORK):
        return f"; {_of_memory(library, device_id)}"
    if code == _UNAVAIL:
        port = address.device_port or _DEFAULT_PORT
        return (
            f"; port {port} of device {device_id} may be in use, by another process that uses the "
            "device over HCCL, or by torch_npu in this one: give this process a device_port of its "
            "own (llm.LocalCommRes), or start it with HCCL_NPU_SOCKET_PORT_RANGE=auto"
        )
    if code == _ROCE_CONNECT and num_open:
        return (
            f"; device {device_id} has {plural(num_open, 'connection')} of this engine already, "
            f"and at most {MAX_LINKS} of all processes"
        )
    if is_hccs:
        return ""
    number, ip = address.device_id, address.device_ip
    if code in (_PTR, _INTERNAL):
        return (
            f"; is {ip} still the address of device {device_id} (physical {number})? Compare with "
            f"`hccn_tool -i {number} -ip -g`"
        )
    if code in (_TIMEOUT, _TCP_CONNECT, _ROCE_CONNECT):
        return (
            f"; device {device_id} (physical {number}) at {ip} may not reach the peer's, or TLS "
            f"is on at only one end (`hccn_tool -i {number} -tls -g`); with TLS, allow 2 s to link"
        )
    return ""


def _of_memory(library: HcclLibrary, device_id: int) -> str:
    """Return the most likely reason why HCCL could not register memory while connecting."""
    host, device = library.registered(device_id)
    hdk = library.driver or "of unknown version"
    return (
        f"{device >> 20} MiB of device {device_id} and {host >> 20} MiB of the host were to be "
        f"registered, with HDK {hdk}: drivers before 25.5 register at most 20 GiB of the host, and "
        "the device's page tables may hold less"
    )
