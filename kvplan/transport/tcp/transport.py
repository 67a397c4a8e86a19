"""The transport `tcp`: memory of processes on this host and on others."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from kvnative._backend import NativeError
from kvnative._tcp import TcpService, check_encryption
from kvnative.cores import usable_cores
from kvplan.planning.texts import plural
from kvplan.status import LLMException, link_failed, unsupported
from kvplan.system.limits import reason_of
from kvplan.transport.tcp.link import TcpLink
from kvplan.transport.tcp.metadata import MAX_BUSY_POLL_US, MAX_CONNECTIONS, MAX_SLOTS, Metadata
from kvplan.transport.tcp.registrations import TcpRegistrations
from kvplan.transport.transport import Transport
from kvplan.validation import check_range, check_type, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvplan.device.device import Device
    from kvplan.transport.protocol import Kind, Streams
    from kvplan.transport.registrations import AnyRegistration

SocketOption = tuple[int, int, int | bytes]
_SO_BUSY_POLL: Final = 46  # asm-generic/socket.h; Python has no name for it
_ALLOWED: Final = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


class TcpTransport(Transport):
    """The memory that this process offers over TCP, and its links to peers.

    The transport opens no port: `connect` takes connections as `Streams`. An engine makes them
    through the port of the end that listens; docs/how-to/across-hosts.md shows a program without
    engines. Threads that serve peers start with the first link. Close the transport before the
    memory is freed.
    """

    name: ClassVar[str] = TcpLink.transport

    def __init__(
        self,
        *,
        device: Device | None = None,
        connections: int | None = None,
        encrypt: bool = False,
        congestion: str = "",
        busy_poll_us: int = 0,
        max_registrations: int = MAX_SLOTS,
        label: str = "kvplan",
    ) -> None:
        """Make this process reachable.

        Args:
            device: The device of this process, whose memory moves through host buffers. It
                outlives the transport. None: only host memory.
            connections: The number of connections that share a large transfer, 1 to 16, each with
                a thread here. A link uses the smaller number of both ends. None: 1 below 4 cores, 2
                from 4 on, 4 from 8 on, 8 from 16 on.
            encrypt: Require encryption of all data. Either end of a link can require it.
            congestion: Congestion control of the connections, such as "bbr"; empty: the system's.
            busy_poll_us: Microseconds for which a read without bytes polls the network card.
            max_registrations: The maximum number at one time, 1 to 65536.
            label: The name of its threads.

        Raises:
            LLMException: LLM_PARAM_INVALID: a number outside its range; LLM_FEATURE_NOT_ENABLED:
                a congestion control or busy polling that the kernel lacks or forbids; no
                libcrypto to encrypt with.
            TypeError: an argument of another type.
        """
        super().__init__()
        if connections is None:
            connections = connections_of(usable_cores())
        check_range("connections", connections, 1, MAX_CONNECTIONS)
        self._connections = connections
        self._encrypt = check_type("encrypt", encrypt, bool)
        if encrypt:
            _check_encryption("encrypt=True")
        self._socket_options = (*_congestion(congestion), *_busy_poll(busy_poll_us))
        self._registrations: TcpRegistrations = TcpRegistrations(max_registrations, device)
        kinds: tuple[Kind, ...] = ("host",) if device is None else ("host", "device")
        self.reaches: frozenset[Kind] = frozenset(kinds)
        self._device = device
        self._label = label
        self._instance = secrets.token_hex(16)
        self._host = socket.gethostname()[:64] or "localhost"
        self._service: TcpService | None = None  # made with the first link
        self._connecting: set[Streams] = set()

    def num_streams(self, metadata: bytes) -> int:
        """See `Transport.num_streams`: two for each connection of the link.

        Raises:
            LLMException: as `connect`.
        """
        return 2 * min(self._connections, self._peer(metadata).connections)

    @property
    def connects_at_once(self) -> bool:
        """See `Transport.connects_at_once`; the first link starts threads and copies all leases."""
        return self._service is not None

    def connect(
        self,
        metadata: bytes,
        *,
        timeout_ms: float,
        session: bytes = b"",
        streams: Streams | None = None,
    ) -> TcpLink:
        """See `Transport.connect`; `session` is not used, `streams` are only for this link.

        The end that dials sends its requests over connections of even index, the other end over
        those of odd index.

        Raises:
            LLMException: LLM_LINK_FAILED: the peer cannot be reached, `streams` is None, or data
                must be encrypted without a private secret; LLM_FEATURE_NOT_ENABLED: libcrypto is
                not installed; LLM_PARAM_INVALID: bad metadata.
        """
        deadline = time.monotonic() + timeout_ms / 1e3
        self._check_open()
        peer = self._peer(metadata)
        if streams is None:
            raise link_failed(
                f"{peer} cannot be reached over tcp: streams=None, and tcp needs connections; "
                "engines make them, other programs pass `streams` to `connect`"
            )
        is_encrypted = self._encrypt or peer.encrypt
        if is_encrypted and not streams.private:
            raise link_failed(
                f"{peer}: data must be encrypted (kvplan.encrypt), but an eavesdropper may know "
                "the secret: give both ends the same kvplan.cluster_key_file"
            )
        try:
            service = self._serving()
            with self._mutex:
                self._check_open()
                self._connecting.add(streams)
            num_streams = self.num_streams(metadata)
            files = self._open(streams, num_streams, deadline)
            ours, theirs = (files[::2], files[1::2])[:: 1 if streams.dials else -1]
            secret = streams.secret if is_encrypted else None
            native = service.link(ours, theirs, peer=str(peer), secret=secret, dials=streams.dials)
        except LLMException:
            raise
        # From the native layer, or because no thread can be started.
        except (RuntimeError, OSError, MemoryError) as error:
            raise link_failed(f"{peer} cannot be reached over tcp: {reason_of(error)}") from error
        finally:
            with self._mutex:
                self._connecting.discard(streams)
        encrypted = ", encrypted" if secret else ""
        way = f"{streams.way}, {plural(num_streams // 2, 'connection')}{encrypted}"
        return TcpLink(native, peer, way, self._device)

    def _metadata(self, registrations: Sequence[AnyRegistration]) -> Metadata:
        ranges = tuple(registration.range for registration in registrations)
        return Metadata(
            self._instance, self._host, self._pid, self._connections, self._encrypt, ranges
        )

    def _close(self) -> None:
        with self._mutex:
            connecting = tuple(self._connecting)
        for streams in connecting:
            streams.close()
        if self._service is not None:
            self._service.close()
        self._registrations.close()

    def _check_reachable(self, metadata: bytes) -> None:
        self._peer(metadata)

    def _serving(self) -> TcpService:
        """Return the native service. The first call starts its threads."""
        with self._mutex:
            self._check_open()
            if self._service is None:
                try:
                    service = TcpService(
                        threads=self._connections,
                        max_ranges=self._registrations.num_rows,
                        device=None if self._device is None else self._device.native,
                        name=self._label,
                    )
                except NativeError as error:
                    raise link_failed(
                        f"no link over tcp can be made now: {reason_of(error)}"
                    ) from error
                self._registrations.attach(service)
                self._service = service
            return self._service

    def _peer(self, metadata: bytes) -> Metadata:
        """Read the metadata of a peer, and refuse a peer that cannot be reached from here."""
        peer = Metadata.from_bytes(metadata)
        if peer.instance == self._instance:
            raise link_failed(f"{peer} is this transport itself")
        if peer.encrypt:
            _check_encryption(f"{peer} requires encryption")
        return peer

    def _open(self, streams: Streams, count: int, deadline: float) -> list[int]:
        """Return the connections of all indices, as file descriptors."""
        opened = streams.open(range(count), max(deadline - time.monotonic(), 0.001))
        try:
            for stream in opened:
                if stream.family != socket.AF_UNIX:
                    for option in self._socket_options:
                        stream.setsockopt(*option)
        except BaseException:
            for stream in opened:
                stream.close()
            raise
        return [stream.detach() for stream in opened]


def connections_of(cores: int) -> int:
    """Return the default number of connections of a link at an end with `cores` cores."""
    return next((count for least, count in ((16, 8), (8, 4), (4, 2)) if cores >= least), 1)


def _check_encryption(what: str) -> None:
    """Refuse `what` if libcrypto is not installed."""
    try:
        check_encryption()
    except NativeError as error:
        raise unsupported(f"{what}: {error}") from error


def _congestion(name: str) -> Iterator[SocketOption]:
    """Yield the option for this congestion control; refuse a name that the kernel refuses."""
    if text := check_type("congestion", name, str).encode():
        option = (socket.IPPROTO_TCP, socket.TCP_CONGESTION, text)
        if error := _refusal(option):
            raise unsupported(
                f"congestion={shown(name)} is not available: {error.strerror}; it must be one of "
                f"{', '.join(_ALLOWED.read_text().split())}, as {_ALLOWED} permits"
            ) from error
        yield option


def _busy_poll(us: int) -> Iterator[SocketOption]:
    """Yield the option that polls for `us` microseconds; refuse a time that is not permitted."""
    check_range("busy_poll_us", us, 0, MAX_BUSY_POLL_US)
    if us:
        option = (socket.SOL_SOCKET, _SO_BUSY_POLL, us)
        if error := _refusal(option):
            raise unsupported(
                f"busy_poll_us={us} is not available: {error.strerror}; some kernels require "
                "CAP_NET_ADMIN"
            ) from error
        yield option


def _refusal(option: SocketOption) -> OSError | None:
    """Return the error of a socket that this option is tried on, or None."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(*option)
    except OSError as error:
        return error
    return None
