"""Memory of processes on other hosts, and of this one, over UCX."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from kvnative._backend import NativeError
from kvplan.execution.outcome import status_code_of
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.arenas import new_arena
from kvplan.transport.identity import link_failed
from kvplan.transport.ucx.end import LazyEnds, transport_closed
from kvplan.transport.ucx.library import find
from kvplan.transport.ucx.link import UcxLink
from kvplan.transport.ucx.metadata import MAX_SLOTS, Metadata
from kvplan.transport.ucx.modes import DEFAULT_LANES, check_lanes, check_mode, choose_mode
from kvplan.transport.ucx.registrations import Registration, Registrations, Shown
from kvplan.transport.ucx.settings import check_devices, read_settings, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvnative._host import Arena
    from kvnative._ucx import UcxNativeLink
    from kvplan.transport import protocol
    from kvplan.transport.protocol import Kind, Registrable
    from kvplan.transport.ucx.end import Natives
    from kvplan.transport.ucx.mapped import MappedRegistrations
    from kvplan.transport.ucx.mapped import Registration as MappedRegistration
    from kvplan.transport.ucx.modes import Mode

_TOKEN_NBYTES: Final = 16
_MODE_OPTION: Final = "kvplan.ucx_mode"
_LOOPBACK: Final = "tcp/lo"


class UcxTransport:
    """What this process lets its peers reach over UCX, and its links to them.

    The library is loaded when the first link is made, and with it a thread for each lane begins
    that serves the peers; in the mode one_sided at once, since memory must be known to it. Close it
    before the memory goes. In a forked child it is of no use.

    Attributes:
        mode: how bytes move; a peer must have the same.
        lanes: the connections to each peer, of which both ends use as many as the one with fewer.
    """

    name = "ucx"

    def __init__(
        self,
        *,
        mode: str = "auto",
        devices: str = "",
        settings: str = "",
        lanes: int = DEFAULT_LANES,
        max_registrations: int = MAX_SLOTS,
        label: str = "kvplan",
    ) -> None:
        """Show this process to its peers.

        Args:
            mode: "gathered", "one_sided"; "auto": one_sided where there is RDMA.
            devices: that UCX may use, such as "eth0,mlx5_0:1"; empty: it chooses.
            settings: of UCX: a JSON object such as {"UCX_TLS": "tcp"}; what it says counts.
            lanes: 1 to 16: how many connections, each with a thread, move what is large at once. Of
                no use in the mode one_sided, which has one.
            max_registrations: how many there can be at once.
            label: that UCX's own tools show.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: no UCX is here, and what to install;
                LLM_PARAM_INVALID.
        """
        check_mode("mode", mode)
        check_devices("devices", devices)
        given = read_settings("settings", settings)
        check_lanes("lanes", lanes)
        found = find()
        self.mode = choose_mode(mode, found.path)
        self.lanes = lanes if self.mode == "gathered" else 1
        self._registrations = _registrations_of(self.mode, max_registrations)
        self._pid = os.getpid()
        self._instance = secrets.token_hex(16)
        self._host = socket.gethostname()[:64] or "localhost"
        self._ends = LazyEnds(
            found,
            self.lanes,
            self.mode,
            settings_of(self.mode, devices, given),
            max_registrations,
            label,
            self._registrations.attach,
        )
        self._mutex = threading.RLock()
        self._connecting: set[UcxNativeLink] = set()
        self._closed = False
        if self.mode == "one_sided":
            self._ends.open()

    @property
    def reaches(self) -> frozenset[Kind]:
        """Host memory; in the mode one_sided that of a CUDA GPU too, where UCX reaches it."""
        return self._registrations.reaches

    def allocate(self, nbytes: int) -> Arena:
        """New zeroed memory of the host.

        Raises:
            LLMException: LLM_PARAM_INVALID: a size that cannot be; LLM_OUT_OF_MEMORY; LLM_FAILED.
        """
        self._check_process()
        return new_arena(nbytes)

    def expect(self, memory: Registrable, keep: object = None) -> None:
        """Do nothing: parts are registered when they are, whatever links there are."""

    def register(
        self, memory: Registrable, *, writable: bool = True
    ) -> Registration | MappedRegistration:
        """Let peers reach `memory`, and write to it unless `writable` is False.

        Args:
            memory: anything with a contiguous buffer, which is held until deregistered; or
                (address, nbytes), which the caller holds.
            writable: whether peers may write to it.

        Raises:
            LLMException: LLM_PARAM_INVALID: not mapped, not readable, not writable as asked, or not
                contiguous; LLM_OUT_OF_MEMORY: `max_registrations` are registered already;
                LLM_FEATURE_NOT_ENABLED: memory of a device.
            TypeError: none of these.
        """
        self._check_process()
        return self._registrations.add(memory, writable=writable)

    def deregister(self, registration: protocol.Registration) -> None:
        """End it: from here on no peer reports a success for it. It may be freed afterwards.

        Gathered, what is being sent from it is waited for; a peer that takes longer than half a
        second to receive that is cut off. One-sided, what a peer is reading goes on, and is not
        confirmed. A second time is fine, and waits for the same.
        """
        self._check_process()
        self._registrations.remove(registration)

    def metadata(self, registrations: Iterable[protocol.Registration] | None = None) -> bytes:
        """What a peer needs to reach this process: its address and `registrations` (None: all).

        Where too few file descriptors are left for a link the address is left out.

        Raises:
            LLMException: LLM_PARAM_INVALID: one of them is not registered here, or no longer.
            TypeError: one of them is no `Registration`.
        """
        self._check_process()
        shown = self._registrations.shown(registrations)
        return self._metadata(shown, is_reached=self._ends.no_room() is None).to_bytes()

    def ready(self) -> None:
        """Load UCX, unless that was done: from then on metadata has its address.

        It is asked for before each link, so that a peer hears of what is missing.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: the library cannot be used, and why; what UCX
                says to its settings; LLM_LINK_FAILED: too few file descriptors are left now.
        """
        self._check_process()
        self._ends.open()
        if (error := self._ends.no_room()) is not None:
            raise error

    def refusal(self, metadata: bytes) -> str | None:
        """Why the process of `metadata` cannot be reached from here; None: it may be."""
        self._check_process()
        try:
            return self._refusal(Metadata.from_bytes(metadata))
        except LLMException as error:
            return str(error.args[0])

    def connect(self, metadata: bytes, *, timeout_ms: float, session: bytes = b"") -> UcxLink:
        """Link to the process of `metadata`, which must do so too, in any order.

        At least one of both must have the other's address: have made `ready` before it made its
        metadata.

        Args:
            metadata: the peer's.
            timeout_ms: milliseconds to wait for the peer.
            session: the same at both ends, and no other attempt's.

        Raises:
            LLMException: LLM_LINK_FAILED: it cannot be reached, or has not come in time;
                or too few file descriptors are left now; LLM_PARAM_INVALID: bad metadata;
                LLM_FEATURE_NOT_ENABLED: as `ready`.
        """
        self._check_process()
        peer = Metadata.from_bytes(metadata)
        give_up = time.monotonic() + timeout_ms / 1e3
        natives: list[UcxNativeLink] = []
        with self._ends.use() as ends:
            if reason := self._refusal(peer):  # by now this end's version is known too
                raise link_failed(reason)
            lanes = ends[: peer.lanes]
            try:
                with self._ends.making(len(lanes), give_up):
                    self._begin(lanes, peer, _token_of(session), natives)
                    for native in natives:
                        native.connect(max((give_up - time.monotonic()) * 1e3, 1.0))
                return UcxLink(natives, peer, self._registrations.regions)
            except BaseException as error:
                for native in natives:
                    native.close("it was never connected")
                if isinstance(error, NativeError):
                    raise self._unconnected(peer, error, timeout_ms) from error
                if isinstance(error, OSError):  # no descriptor is left
                    raise link_failed(f"{peer} cannot be reached: {error.strerror}") from error
                raise
            finally:
                with self._mutex:
                    self._connecting.difference_update(natives)

    def close(self) -> None:
        """Close the links, deregister everything, and end the thread; idempotent.

        In a forked child nothing happens: all of it is the parent's.
        """
        if os.getpid() != self._pid:
            return
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            connecting = tuple(self._connecting)
        for native in connecting:  # their callers are waited for; the end closes the others
            native.close("the transport is closed")
        self._ends.close()
        self._registrations.close()

    def __enter__(self) -> UcxTransport:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._registrations)} registrations"
        return f"<UcxTransport of process {self._pid}, {self.mode}: {state}>"

    def _begin(
        self, ends: Natives, peer: Metadata, token: bytes, begun: list[UcxNativeLink]
    ) -> None:
        """Make a native link for each lane, all before the first is connected; adds to `begun`."""
        addresses = peer.addresses or (None,) * len(ends)
        for end, address in zip(ends, addresses, strict=False):
            try:
                native = end.link(token, address)
            except (NativeError, ValueError) as error:
                raise link_failed(f"{peer} cannot be reached: {error}") from error
            begun.append(native)
            with self._mutex:
                self._check_process()
                self._connecting.add(native)

    def _metadata(self, shown: Shown, *, is_reached: bool = True) -> Metadata:
        natives = self._ends.natives
        return Metadata(
            self._instance,
            self._host,
            self._pid,
            self.mode,
            self._ends.version,
            natives[0].transports if natives else "",
            self.lanes,
            tuple(it.address for it in natives) if is_reached else (),
            *shown,
        )

    def _refusal(self, peer: Metadata) -> str | None:
        if (failure := self._ends.failure) is not None:
            return str(failure.args[0])
        if peer.instance == self._instance:
            return f"{peer} is this transport itself"
        if peer.mode != self.mode:
            return (
                f"{peer} uses UCX {peer.mode}, this process {self.mode}; give both engines the "
                f"same {_MODE_OPTION}"
            )
        return _versions_refusal(self._metadata(Shown(())), peer)

    def _unconnected(self, peer: Metadata, error: NativeError, timeout_ms: float) -> LLMException:
        ours, theirs = self._ends.version, peer.version
        versions = f" (UCX {theirs} there, {ours} here)" if theirs and theirs != ours else ""
        code = status_code_of(getattr(error, "status", None))
        if code is LLMStatusCode.LLM_TIMEOUT:
            over = self._metadata(Shown(())).over
            return link_failed(
                f"{peer}{versions} has not answered over {over} within {timeout_ms:g} ms: is one "
                "of these on a network with it (kvplan.ucx_devices chooses), and no firewall "
                "between?"
            )
        return link_failed(
            f"{peer}{versions} cannot be reached: {error}; interfaces and routes that came after "
            "UCX was loaded are not seen: then start the process anew"
        )

    def _check_process(self) -> None:
        if self._closed:
            raise transport_closed()
        if os.getpid() != self._pid:
            raise LLMException(
                f"the transport belongs to process {self._pid}; this is its forked child "
                f"{os.getpid()}, which needs one of its own"
            )


def _registrations_of(mode: Mode, num_slots: int) -> Registrations | MappedRegistrations:
    if mode == "gathered":
        return Registrations(num_slots)
    from kvplan.transport.ucx.mapped import MappedRegistrations  # most engines never need them

    return MappedRegistrations(num_slots)


def _versions_refusal(ours: Metadata, theirs: Metadata) -> str | None:
    """Over the loopback UCX 1.22 brings an older one to abort; over other interfaces all agree."""
    if not (ours.version and theirs.version) or _LOOPBACK not in f"{ours.over} {theirs.over}":
        return None
    if ours.version.split(".")[:2] == theirs.version.split(".")[:2]:
        return None
    return (
        f"UCX is {theirs.version} in {theirs} and {ours.version} here, which do not work together "
        f"over the loopback ({_LOOPBACK}): use one version, or name another device in "
        "kvplan.ucx_devices of both engines"
    )


def _token_of(session: bytes) -> bytes:
    """What both ends' links are told apart by; nobody else can know it."""
    return hashlib.sha256(b"kvplan ucx" + session).digest()[:_TOKEN_NBYTES]
