"""Memory of processes on other hosts over RDMA, and of GPUs, through UCX: gets and puts alone."""

from __future__ import annotations

import os
import secrets
import socket
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from kvnative._backend import KVN_TIMEOUT, NativeError
from kvnative._signals import Mutex
from kvnative._ucx import UcxError, UcxLibrary, UcxWorker
from kvplan.execution.task import status_code_of
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode
from kvplan.system_limits import reason_of
from kvplan.transport.announced import Writers, tag_of
from kvplan.transport.base import BaseTransport, link_failed
from kvplan.transport.lease_expiry import LeaseExpiry
from kvplan.transport.registrations import PATIENCE_S, QUARANTINE, transport_closed
from kvplan.transport.ucx.library import (
    DEVICES,
    TRANSPORTS,
    Found,
    check_devices,
    find,
    read_settings,
    why_no_rdma,
)
from kvplan.transport.ucx.link import UcxLink
from kvplan.transport.ucx.metadata import MAX_SLOTS, Metadata
from kvplan.transport.ucx.registrations import Registrations

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvnative._ucx import UcxEndpoint
    from kvplan.transport import protocol
    from kvplan.transport.announced import Tickets
    from kvplan.transport.protocol import Kind, Registrable
    from kvplan.transport.ucx.registrations import UcxRegistration


_LOG = Log("kvplan")
_AT_ONCE_MS: Final = 1.0
_LOOK_MS: Final = 100.0  # that it may take to see what a peer writes


class UcxTransport(BaseTransport):
    """What this process lets its peers reach over UCX, and its links to them.

    UCX is loaded at once, with a thread that progresses it, since it must know the memory. Close it
    before the memory goes. In a forked child it is of no use.
    """

    name = UcxLink.transport

    def __init__(
        self,
        *,
        devices: str = "",
        settings: str = "",
        max_registrations: int = MAX_SLOTS,
        label: str = "kvplan",
    ) -> None:
        """Show this process to its peers.

        Args:
            devices: that UCX may use, such as "mlx5_0:1"; empty: it chooses.
            settings: of UCX: a JSON object such as {"UCX_IB_GID_INDEX": "3"}; what it says counts.
                UCX_TLS chooses among the ways that UCX has: without it there must be RDMA, and TCP
                may not be among them.
            max_registrations: how many there can be at once.
            label: that UCX's own tools show.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: no UCX is here that can be used, or no RDMA, and
                what to do; LLM_PARAM_INVALID: an argument, or a setting that UCX does not take.
            TypeError: an argument of another type.
        """
        super().__init__()
        check_devices("devices", devices)
        given = read_settings("settings", settings)
        if devices:
            given.setdefault(DEVICES, devices)
        found = find()
        if TRANSPORTS not in given and (why := why_no_rdma(found.path)):
            raise LLMException(
                f"{why}: use the transport tcp; for GPUs of one host, or to try it without RDMA, "
                'kvplan.ucx_settings={"UCX_TLS": "cuda,shm"} or {"UCX_TLS": "shm"}',
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        self._instance = secrets.token_hex(16)
        self._host = socket.gethostname()[:64] or "localhost"
        self._version, worker = _open(found, given, label)
        self._worker: UcxWorker | None = worker  # None: closed
        self._mutex = Mutex()  # re-entrant: a finalizer may deregister
        # Of links, and of peers that are observed, each with the instance that it is to.
        self._endpoints: WeakKeyDictionary[UcxEndpoint, str] = WeakKeyDictionary()
        # To peers of which a link has ended, and which may write all the same, by instance.
        self._observed: dict[str, UcxEndpoint] = {}
        self._writers = Writers(self._tickets_of)
        try:
            self._registrations = Registrations(worker, max_registrations)
        except BaseException:
            worker.close()
            raise
        end = self._registrations.end_leases
        self._expiry = LeaseExpiry(lambda *lease: end([lease]), "kvplan-ucx-leases")

    @property
    def reaches(self) -> frozenset[Kind]:
        """Host memory, and that of a CUDA GPU where UCX reaches it."""
        return self._registrations.reaches

    def register(
        self, memory: Registrable, *, writable: bool = True, keep: object = None
    ) -> UcxRegistration:
        """See `Transport.register`; memory of a device, too, where UCX reaches it."""
        self._check_open()
        return self._registrations.add(memory, writable=writable, keep=keep)

    def deregister(self, registration: protocol.Registration) -> None:
        """End it: on return no linked peer writes it any more, and it may be freed.

        What a peer is reading goes on, and is not confirmed. A peer that is writing at this moment
        is waited for until that transfer ends, which reports an error; one that has died is not.
        One that does not get on within 1 s (it is stopped, or cut off) keeps the memory from being
        used again, until it goes on, or its link ends, or without RDMA it itself; a warning names
        it. A second time is fine, and waits for the same.
        """
        self._check_open()
        self._wait_for_writers([self._registrations.end(registration)])

    def begin_lease(self, deadline_ns: int = 0) -> tuple[int, int]:
        """See `Transport.begin_lease`; a thread ends it, as peers do not know this clock."""
        self._check_open()
        slot, generation = self._registrations.begin_lease()
        if deadline_ns:
            try:
                self._expiry.add(slot, generation, deadline_ns)
            except BaseException:  # no more threads, or an interrupt
                self.end_leases([(slot, generation)])
                raise
        return slot, generation

    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        """See `Transport.renew_lease`."""
        self._check_open()
        self._expiry.renew(slot, generation, deadline_ns)

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """See `Transport.end_leases`; the tickets of each linked peer are read: a round trip."""
        self._check_open()
        ended = list(leases)
        for it in ended:
            self._expiry.forget(*it)
        self._registrations.end_leases(ended)
        self._writers.check(self._linked())

    def metadata(self, registrations: Iterable[protocol.Registration] | None = None) -> bytes:
        """See `Transport.metadata`."""
        worker = self._running()
        shown = self._registrations.shown(registrations)
        return Metadata(
            self._instance,
            self._host,
            self._pid,
            self._version,
            worker.transports,
            worker.address,
            *shown,
        ).to_bytes()

    def connect(
        self,
        metadata: bytes,
        *,
        timeout_ms: float,
        session: bytes = b"",
        streams: protocol.Streams | None = None,
    ) -> UcxLink:
        """See `Transport.connect`; `session` and `streams` are not used."""
        self._check_open()
        peer = Metadata.from_bytes(metadata)
        endpoint = self._endpoint(peer)
        try:
            endpoint.connect(max(timeout_ms, _AT_ONCE_MS))
        except NativeError as error:
            raise self._unreached(peer, error) from error
        with self._mutex:
            self._endpoints[endpoint] = peer.instance
        on_end = partial(self._observe, peer) if is_unwatched(endpoint) else _nothing
        return UcxLink(endpoint, peer, on_end)

    def close(self) -> None:
        """Deregister everything, as `deregister`, close the links, and end the thread; idempotent.

        In a forked child nothing happens: all of it is the parent's.
        """
        if os.getpid() != self._pid:
            return
        with self._mutex:
            self._closed = True
            worker, self._worker = self._worker, None  # its files go with its last user
        if worker is not None:
            self._expiry.close()
            self._wait_for_writers(self._registrations.end_all())
            worker.close()
            self._observed.clear()
            self._registrations.close()

    def __repr__(self) -> str:
        held = f"{len(self._registrations)} registrations"
        return f"<UcxTransport of process {self._pid}: {'closed' if self._closed else held}>"

    def _check_reachable(self, metadata: bytes) -> None:
        # Without waiting for the peer: UCX knows whether they have a fabric in common.
        peer = Metadata.from_bytes(metadata)
        endpoint = self._endpoint(peer)
        try:
            endpoint.connect(_AT_ONCE_MS)
        except NativeError as error:
            if getattr(error, "status", None) != KVN_TIMEOUT:
                raise self._unreached(peer, error) from error

    def _wait_for_writers(self, ended: Sequence[UcxRegistration]) -> None:
        """Wait for the peers that write, and let go of what they cannot write to any more."""
        late = self._writers.wait(self._linked()) if any(it.writable for it in ended) else []
        for it in ended:
            if late and it.writable:
                _LOG.warning(
                    "%s is deregistered, but %d peers were writing to this process's memory and "
                    "did not end that within %g s (are they stopped, or cut off?): the memory is "
                    "not used again before they do, or their links end",
                    it.range,
                    len(late),
                    PATIENCE_S,
                )
                QUARANTINE.add(lambda: any(writer.is_writing() for writer in late), it)
            else:
                it.release()

    def _linked(self) -> tuple[UcxEndpoint, ...]:
        with self._mutex:
            for instance, it in list(self._observed.items()):
                if it.failure is not None:  # the peer has died, or closed its transport
                    del self._observed[instance]
            return tuple(self._endpoints)

    def _observe(self, peer: Metadata) -> None:
        """See what the peer writes without a link: until it knows of the end it may, and can."""
        if self._closed:
            return
        try:
            endpoint = self._endpoint(peer)
            endpoint.connect(_LOOK_MS)
        except (LLMException, NativeError):  # it has died
            return
        with self._mutex:
            self._observed[peer.instance] = endpoint
            self._endpoints[endpoint] = peer.instance

    def _tickets_of(self, endpoint: UcxEndpoint) -> Tickets | None:
        """What the peer is writing here; None: it is not known.

        Of an endpoint that has failed nothing comes any more, or another one shows it.
        """
        tag = tag_of(self._instance)
        try:
            return endpoint.writing(tag, _LOOK_MS)
        except UcxError as error:
            if error.status == KVN_TIMEOUT:
                return None
        with self._mutex:
            observed = self._observed.get(self._endpoints.get(endpoint, ""))
        if observed is None or observed is endpoint:
            return frozenset()
        try:
            return observed.writing(tag, _LOOK_MS)
        except UcxError as error:
            return None if error.status == KVN_TIMEOUT else frozenset()

    def _endpoint(self, peer: Metadata) -> UcxEndpoint:
        if peer.instance == self._instance:
            raise link_failed(f"{peer} is this transport itself")
        try:
            return self._running().endpoint(
                peer.address,
                generations_address=peer.generations.address,
                num_slots=peer.generations.nbytes // 8,
                generations_rkey=peer.generations.key,
                tickets_address=peer.tickets.address,
                tickets_rkey=peer.tickets.key,
                tag=tag_of(peer.instance),
            )
        except (NativeError, ValueError) as error:
            raise self._unreached(peer, error) from error

    def _unreached(self, peer: Metadata, error: Exception) -> LLMException:
        theirs = f"UCX {peer.version} there, with {peer.over}; {self._version} here"
        return link_failed(f"{peer} cannot be reached ({theirs}): {error}")

    def _running(self) -> UcxWorker:
        self._check_open()
        if (worker := self._worker) is None:
            raise transport_closed()
        return worker


def is_unwatched(endpoint: UcxEndpoint) -> bool:
    """Whether a peer may write to this process although this side of the endpoint has ended.

    That is so between processes of one host, where the system copies; RDMA refuses it.
    """
    return endpoint.transport.startswith(("cma/", "knem/", "xpmem/"))


def _nothing() -> None: ...


def _open(found: Found, settings: Mapping[str, str], label: str) -> tuple[str, UcxWorker]:
    """UCX's version, and a worker."""
    try:
        library = UcxLibrary.load(found.path)
    except NativeError as error:
        raise LLMException(
            f"the UCX library {found.path} ({found.source}) cannot be used: {error}",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        ) from error
    version = ".".join(map(str, library.version))
    try:
        return version, UcxWorker(library, settings=settings, name=label)
    except NativeError as error:
        raise LLMException(
            f"UCX {version} ({found.path}) cannot be used: {reason_of(error)}",
            status_code=status_code_of(getattr(error, "status", None)),
        ) from error
