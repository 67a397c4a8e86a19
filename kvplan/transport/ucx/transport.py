"""The transport `ucx`: memory of other hosts over RDMA, and of GPUs, by one-sided UCX calls."""

from __future__ import annotations

import secrets
import socket
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from kvnative._backend import KVN_TIMEOUT, NativeError
from kvnative._ucx import UcxError, UcxLibrary, UcxWorker
from kvplan.execution.task import status_code_of
from kvplan.status import LLMException, link_failed, unsupported
from kvplan.system.limits import reason_of
from kvplan.transport.metadata import tag_of
from kvplan.transport.registrations import transport_closed
from kvplan.transport.transport import Transport
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
from kvplan.transport.ucx.registrations import UcxRegistrations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvnative._ucx import UcxEndpoint
    from kvplan.transport.announced import Tickets
    from kvplan.transport.protocol import Kind, Streams
    from kvplan.transport.registrations import AnyRegistration

_AT_ONCE_MS: Final = 1.0
_READ_TIMEOUT_MS: Final = 100.0  # of reading the tickets of a peer


class UcxTransport(Transport):
    """The memory that this process offers over UCX, and its links to peers.

    The constructor loads UCX and starts a thread that progresses it. Close the transport before the
    memory is freed.

    After `deregister` no linked peer writes the memory, which may be freed. A read that a peer has
    begun continues and reports an error. The call waits for writes that peers have begun, which
    report an error too. If a peer does not stop within 1 s, the memory is kept alive until that
    peer continues, its link ends, or (without RDMA) its process ends.
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
        """Make this process reachable.

        Args:
            devices: The devices that UCX may use, such as "mlx5_0:1"; empty: UCX chooses.
            settings: Settings of UCX, a JSON object such as {"UCX_IB_GID_INDEX": "3"}; they take
                precedence over `devices`. Without UCX_TLS, which selects transports of UCX, RDMA is
                required. TCP cannot be selected.
            max_registrations: The maximum number at one time.
            label: The name that UCX's own tools show.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: UCX or RDMA is not available, with the remedy;
                LLM_PARAM_INVALID: an argument, or a setting that UCX refuses.
            TypeError: an argument of another type.
        """
        super().__init__()
        check_devices("devices", devices)
        given = read_settings("settings", settings)
        if devices:
            given.setdefault(DEVICES, devices)
        found = find()
        if TRANSPORTS not in given and (why := why_no_rdma(found.path)):
            raise unsupported(
                f"{why}: use the transport tcp; for GPUs of one host, or to try it without RDMA, "
                'kvplan.ucx_settings={"UCX_TLS": "cuda,shm"} or {"UCX_TLS": "shm"}'
            )
        self._instance = secrets.token_hex(16)
        self._host = socket.gethostname()[:64] or "localhost"
        self._version, worker = _open(found, given, label)
        self._worker: UcxWorker | None = worker  # None: closed
        # Endpoints of links and of observed peers, each with the instance of its peer.
        self._endpoints: WeakKeyDictionary[UcxEndpoint, str] = WeakKeyDictionary()
        # By instance, the endpoints to peers that may still write after the end of their link.
        self._observed: dict[str, UcxEndpoint] = {}
        try:
            self._registrations: UcxRegistrations = UcxRegistrations(
                worker, max_registrations, self._tickets_of, self._linked
            )
        except BaseException:
            worker.close()
            raise
        self.reaches: frozenset[Kind] = self._registrations.reaches

    def connect(
        self,
        metadata: bytes,
        *,
        timeout_ms: float,
        session: bytes = b"",
        streams: Streams | None = None,
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

    def _metadata(self, registrations: Sequence[AnyRegistration]) -> Metadata:
        worker = self._running()
        published = self._registrations.published(registrations)
        return Metadata(
            self._instance,
            self._host,
            self._pid,
            self._version,
            worker.transports,
            worker.address,
            *published,
        )

    def _close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._registrations.close()
            worker.close()
            self._observed.clear()
            self._registrations.close_table()

    def _check_reachable(self, metadata: bytes) -> None:
        # Does not wait for the peer: UCX knows whether both have a fabric in common.
        peer = Metadata.from_bytes(metadata)
        endpoint = self._endpoint(peer)
        try:
            endpoint.connect(_AT_ONCE_MS)
        except NativeError as error:
            if getattr(error, "status", None) != KVN_TIMEOUT:
                raise self._unreached(peer, error) from error

    def _linked(self) -> tuple[UcxEndpoint, ...]:
        with self._mutex:
            for instance, endpoint in list(self._observed.items()):
                if endpoint.failure is not None:  # the peer has died, or closed its transport
                    del self._observed[instance]
            return tuple(self._endpoints)

    def _observe(self, peer: Metadata) -> None:
        """Observe a peer whose link has ended: it may write until it learns of the end."""
        if self._closed:
            return
        try:
            endpoint = self._endpoint(peer)
            endpoint.connect(_READ_TIMEOUT_MS)
        except (LLMException, NativeError):  # the peer has died
            return
        with self._mutex:
            self._observed[peer.instance] = endpoint
            self._endpoints[endpoint] = peer.instance

    def _tickets_of(self, endpoint: UcxEndpoint) -> Tickets | None:
        """Return the writes of a peer to this process; None: they cannot be read now."""
        tag = tag_of(self._instance)
        try:
            return endpoint.writing(tag, _READ_TIMEOUT_MS)
        except UcxError as error:
            if error.status == KVN_TIMEOUT:
                return None
        # The endpoint has failed: the peer may still write only if another endpoint observes it.
        with self._mutex:
            observed = self._observed.get(self._endpoints.get(endpoint, ""))
        if observed is None or observed is endpoint:
            return frozenset()
        try:
            return observed.writing(tag, _READ_TIMEOUT_MS)
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
    """Return whether a peer can write to this process after this side of the endpoint has ended."""
    return endpoint.transport.startswith(("cma/", "knem/", "xpmem/"))


def _nothing() -> None: ...


def _open(found: Found, settings: Mapping[str, str], label: str) -> tuple[str, UcxWorker]:
    """Return the version of UCX, and a worker."""
    try:
        library = UcxLibrary.load(found.path)
    except NativeError as error:
        raise unsupported(
            f"the UCX library {found.path} ({found.source}) cannot be used: {error}"
        ) from error
    version = ".".join(map(str, library.version))
    try:
        return version, UcxWorker(library, settings=settings, name=label)
    except NativeError as error:
        raise LLMException(
            f"UCX {version} ({found.path}) cannot be used: {reason_of(error)}",
            status_code=status_code_of(getattr(error, "status", None)),
        ) from error
