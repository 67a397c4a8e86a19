"""Connections with remote engines by name, and messages over them.

Each of two engines connects and disconnects on its own, over one common link.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from kvnative._signals import Condition, Mutex, signals_deferred
from kvplan.control.endpoint import Endpoint
from kvplan.control.messages import MAX_NOTIFICATION_NBYTES
from kvplan.engine.datadist import LlmDataDist
from kvplan.links import ClusterInfo, LinkState, PeerLink
from kvplan.links.values import LOST, cluster_here
from kvplan.status import LLMException, LLMStatusCode, busy, invalid, timed_out, without_frames
from kvplan.system.logs import LimitedLog, Log

_HEAD: Final = struct.Struct("<cQH")  # kind, number of the message, bytes of its name
_FIRST, _PIECE, _LAST, _USES, _LEAVES = b"F", b"P", b"N", b"U", b"L"
MAX_NAME_NBYTES: Final = 1024
MAX_BODY_NBYTES: Final = 1 << 20
"""Maximum bytes of a message, and of all unfinished messages of a peer."""
_MAX_UNFINISHED: Final = MAX_BODY_NBYTES // MAX_NOTIFICATION_NBYTES  # pieces may be empty
_ATTEMPTS: Final = 3  # to get a link, which the peer may be ending
_LINKED: Final = LinkState.LINKED  # faster than a lookup in the enumeration
_NOT_LINKED: Final = LLMStatusCode.LLM_NOT_YET_LINK


Where = Callable[[str], tuple[Endpoint, int]]
"""A function from the name of an engine to its endpoint and expected cluster id."""


class Message(NamedTuple):
    """A message of a peer: a name and a body, whose meaning the interface defines."""

    cluster_id: int
    name: bytes
    body: bytes


class _Connection(NamedTuple):
    """The cluster of a remote engine that this end has connected with, and its link."""

    cluster_id: int
    link: ref[PeerLink]

    def is_replaced(self, datadist: LlmDataDist) -> bool:
        """Return True if the link ended and the cluster has another one now."""
        now = datadist._running().links.peers.get(self.cluster_id)
        return now is not None and now is not self.link()


class Connections:
    """The remote engines that one engine is connected with."""

    def __init__(
        self, datadist: LlmDataDist, where: Where, log: Log, *, is_exact: bool = False
    ) -> None:
        self._datadist = datadist
        self._where = where
        self._is_exact = is_exact  # never link with another cluster than `where` names
        self._log = log
        self._peer_log = LimitedLog(log)
        self._mutex = Mutex()
        self._calls: dict[object, tuple[int, int]] = {}  # cluster id and thread of each `use`
        self._leaving: list[int] = []  # cluster id of each `disconnect` that waits for calls
        self._call_ended = Condition()  # notified for clusters in `_leaving`
        # By address of the engine that a call connects or disconnects.
        self._busy: WeakValueDictionary[str, Mutex] = WeakValueDictionary()
        self._connected: dict[str, _Connection] = {}  # by each name in use
        self._peer_uses: WeakKeyDictionary[PeerLink, bool] = WeakKeyDictionary()
        self._messages: list[Message] = []
        # Bodies of unfinished messages, by cluster id and number, longest waiting first.
        self._pieces: dict[int, dict[int, bytes]] = {}
        # Number of the last message in pieces. It begins at random, as peers may hold older pieces.
        self._sent = secrets.randbits(63)

    def cluster_of(self, remote_engine: str) -> int:
        """Return the cluster id of a connected engine, whose link may be broken."""
        found = self._connected.get(remote_engine)
        if found is None:
            found = self._connected.get(str(self._where(remote_engine)[0]))
        if found is None or found.is_replaced(self._datadist):
            raise _not_connected(remote_engine)
        return found.cluster_id

    @contextmanager
    def use(self, remote_engine: str) -> Iterator[int]:
        """Yield the cluster id of a connected engine; `disconnect` waits for the block."""
        cluster_id, call = self.cluster_of(remote_engine), object()
        try:
            self._calls[call] = cluster_id, get_ident()
            if self.cluster_of(remote_engine) != cluster_id:  # `disconnect` may not see this call
                raise _not_connected(remote_engine)
            yield cluster_id
        finally:
            self._calls.pop(call, None)
            if cluster_id in self._leaving:
                with self._call_ended:
                    self._call_ended.notify_all()

    def is_linked(self, remote_engine: str) -> bool:
        """Return True if the engine is connected and its link is up."""
        return self.linked_cluster(remote_engine) is not None

    def linked_cluster(self, remote_engine: str) -> int | None:
        """Return the cluster id of a connected engine whose link is up, otherwise None."""
        found = self._connected.get(remote_engine)
        if found is not None:  # connected by this name
            link = self._datadist._running().links.peers.get(found.cluster_id)
            if link is not None and link is found.link() and link.state is _LINKED:
                return found.cluster_id
        try:
            cluster_id = self.cluster_of(remote_engine)
            return cluster_id if self._link(cluster_id).state is _LINKED else None
        except LLMException:
            return None

    def connect(self, remote_engine: str, timeout_ms: int) -> None:
        """Connect with an engine that listens."""
        endpoint, cluster_id = self._where(remote_engine)
        started = time.monotonic()
        with self._one_call(remote_engine, str(endpoint), timeout_ms):
            if self.is_linked(remote_engine):
                raise LLMException(
                    f"{remote_engine} is already connected",
                    status_code=LLMStatusCode.LLM_ALREADY_LINK,
                )
            try:
                deadline = started + timeout_ms / 1000
                self._connect(remote_engine, str(endpoint), cluster_id, deadline)
            except LLMException as error:
                raise _connect_error(error, started, timeout_ms) from None

    def _connect(self, remote_engine: str, address: str, cluster_id: int, deadline: float) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                is_made = self._linked(cluster_id, address, deadline)
            except LLMException as error:
                # The peer's cluster id may follow from another name, such as 0.0.0.0:16000.
                if (here := cluster_here(error)) is None or self._is_exact:
                    raise
                cluster_id = here
                is_made = self._linked(cluster_id, address, deadline)
            try:
                link = self._link(cluster_id)
                self._add(remote_engine, address, link)
                if is_made and link.phase:  # this end has begun the handshake
                    return
                self._datadist.notify(cluster_id, _USES, timeout_ms=_left_ms(deadline))
                if link.state is LinkState.LINKED:
                    return
            except LLMException as error:
                if error.status_code is LLMStatusCode.LLM_ALREADY_LINK:
                    raise
                self._forget(cluster_id)
                # The peer may have just ended the link that it made. Then this end makes one.
                if attempt + 1 == _ATTEMPTS or time.monotonic() >= deadline:
                    raise
        raise _not_connected(remote_engine)

    def disconnect(
        self, remote_engine: str, timeout_ms: int, stop: Callable[[], object] | None = None
    ) -> None:
        """End a connection. The link stays if the peer still uses it.

        `stop` is called once calls of other threads with the engine have ended, and none can begin.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        with self._one_call(remote_engine, str(self._where(remote_engine)[0]), timeout_ms):
            cluster_id = self.cluster_of(remote_engine)
            self.receive()  # a message may say that the peer uses the link
            names = self._names_of(cluster_id)  # that are to stay
            try:
                self._forget(cluster_id)  # first: calls from here on do not find the engine
                self._wait_for_calls(remote_engine, cluster_id, deadline)
                if stop is not None:
                    stop()
                link = self._link(cluster_id)
                if link.state is LinkState.LINKED and self._used_by_peer(link):
                    self._leave(remote_engine, link, deadline)
                else:
                    self._unlink(cluster_id, deadline)
                names = {}
            except LLMException as error:
                code = error.status_code
                if code is not LLMStatusCode.LLM_LINK_BUSY:
                    names = {}
                if code in (LLMStatusCode.LLM_LINK_BUSY, LLMStatusCode.LLM_UNLINK_FAILED):
                    raise without_frames(error, LLMStatusCode.LLM_TIMEOUT) from None
                if code not in (_NOT_LINKED, LLMStatusCode.LLM_LINK_FAILED):
                    raise
                self._log.info("disconnect: %s was already gone: %s", remote_engine, error)
            finally:
                with signals_deferred, self._mutex:
                    self._connected |= names

    def _wait_for_calls(self, remote_engine: str, cluster_id: int, deadline: float) -> None:
        """Wait for calls of other threads with an engine; raise LLM_LINK_BUSY at the deadline."""
        here = get_ident()  # an exception that was caught may keep a call of this thread

        def have_ended() -> bool:
            calls = list(self._calls.values())
            return not any(cluster == cluster_id and thread != here for cluster, thread in calls)

        self._leaving.append(cluster_id)
        try:
            with self._call_ended:
                if not self._call_ended.wait_for(have_ended, _left_ms(deadline) / 1000):
                    raise busy(f"a call of another thread with {remote_engine} goes on")
        finally:
            self._leaving.remove(cluster_id)

    def _leave(self, remote_engine: str, link: PeerLink, deadline: float) -> None:
        """Wait for transfers of this end; then tell the peer that this end leaves the link."""
        self._datadist._running().links.drain(link.cluster_id, _left_ms(deadline))
        try:
            self._datadist.notify(link.cluster_id, _LEAVES, timeout_ms=_left_ms(deadline))
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_LINK_BUSY:
                raise
            # The peer reads no messages. The link stays until an engine is finalized.
            self._log.info("disconnect: %s could not be notified: %s", remote_engine, error)
        self.receive()
        if not self._used_by_peer(link):  # the peer left meanwhile, and cannot end the link
            self._unlink(link.cluster_id, deadline)

    def _unlink(self, cluster_id: int, deadline: float) -> None:
        results = self._datadist.unlink_clusters([cluster_id], timeout_ms=_left_ms(deadline))
        results.raise_for_status()

    def frames(self, name: bytes, body: bytes) -> list[bytes]:
        """Return the engine's notifications that carry a message; the last one completes it."""
        check_message(name, body)
        room = MAX_NOTIFICATION_NBYTES - _HEAD.size - len(name)
        if len(body) <= room:
            return [_HEAD.pack(_LAST, 0, len(name)) + name + body]
        with self._mutex:
            self._sent += 1
            number = self._sent
        cuts = range(0, len(body), room)
        return [
            _HEAD.pack(_LAST if at == cuts[-1] else _PIECE if at else _FIRST, number, len(name))
            + name
            + body[at : at + room]
            for at in cuts
        ]

    def notify(self, remote_engine: str, name: bytes, body: bytes, timeout_ms: int) -> None:
        """Send a message; on return the remote engine has it."""
        deadline = time.monotonic() + timeout_ms / 1000
        with self.use(remote_engine) as cluster_id:
            for frame in self.frames(name, body):
                self._datadist.notify(cluster_id, frame, timeout_ms=_left_ms(deadline))

    def take_messages(self) -> list[Message]:
        """Return the messages that have arrived since the last call, oldest first."""
        with self._mutex:
            self.receive()
            taken, self._messages = self._messages, []
        return taken

    def receive(self) -> None:
        """Read the unread notifications, and sort them into messages and uses of links."""
        with self._mutex:
            # First: all that a peer sent before its link ended is read below.
            lost = [cluster_id for cluster_id in self._pieces if not self._is_up(cluster_id)]
            for cluster_id, data in self._datadist.notifications():
                if data in (_USES, _LEAVES):
                    try:
                        self._peer_uses[self._link(cluster_id)] = data == _USES
                    except LLMException:
                        continue  # the link is gone, and with it the peer's use of it
                elif not self._add_frame(cluster_id, data):
                    self._peer_log.warning(
                        "cluster %d has sent %d bytes that belong to no message; at most %d bytes "
                        "of its unfinished messages are kept",
                        cluster_id, len(data), MAX_BODY_NBYTES,
                    )  # fmt: skip
            for cluster_id in lost:
                self._pieces.pop(cluster_id, None)

    def _is_up(self, cluster_id: int) -> bool:
        link = self._datadist._running().links.peers.get(cluster_id)
        return link is not None and link.state not in LOST

    def _add_frame(self, cluster_id: int, data: bytes) -> bool:
        """Add a peer's frame to its messages; return False if it belongs to none."""
        if (frame := read_frame(data)) is None:
            return False
        kind, number, name, piece = frame
        pieces = self._pieces.setdefault(cluster_id, {}) if number else {}
        begun = pieces.pop(number, None) if number and kind != _FIRST else b""
        if begun is None:  # the beginning was dropped
            return False
        body = begun + piece
        if kind == _LAST:
            self._messages.append(Message(cluster_id, name, body))
            return True
        pieces[number] = body
        # The last piece of a failed transfer never arrives: drop what has waited longest.
        while len(pieces) > _MAX_UNFINISHED or sum(map(len, pieces.values())) > MAX_BODY_NBYTES:
            del pieces[next(iter(pieces))]
        return number in pieces

    def _linked(self, cluster_id: int, address: str, deadline: float) -> bool:
        """Link with a cluster; return True if this call has made the link."""
        cluster = ClusterInfo(cluster_id, address)
        # The next attempt may succeed, and the interface logs a failure of all attempts.
        results = self._datadist._link_clusters([cluster], _left_ms(deadline), logs_failures=False)
        if results.status is LLMStatusCode.LLM_ALREADY_LINK:
            return False
        results.raise_for_status()
        return True

    def _link(self, cluster_id: int) -> PeerLink:
        return self._datadist._running().links.get(cluster_id)

    def _used_by_peer(self, link: PeerLink) -> bool:
        """Return True if the peer said that it uses the link, or made the link and said nothing."""
        return self._peer_uses.get(link, not link.phase)

    def _add(self, remote_engine: str, address: str, link: PeerLink) -> None:
        """Remember a connection by its names."""
        connection = _Connection(link.cluster_id, ref(link))
        with self._mutex:
            is_known = connection in self._connected.values()
            self._connected[remote_engine] = self._connected[address] = connection
        if is_known:
            raise LLMException(
                f"{remote_engine} is already connected by another name",
                status_code=LLMStatusCode.LLM_ALREADY_LINK,
            )

    def _names_of(self, cluster_id: int) -> dict[str, _Connection]:
        with self._mutex:
            known = self._connected.items()
            return {name: found for name, found in known if found.cluster_id == cluster_id}

    def _forget(self, cluster_id: int) -> None:
        with self._mutex:
            for name in self._names_of(cluster_id):
                del self._connected[name]

    def forget(self, remote_engine: str) -> None:
        """Forget a connection that could not be ended; its name may be another engine's now."""
        if (found := self._connected.get(remote_engine)) is not None:
            self._forget(found.cluster_id)

    @contextmanager
    def _one_call(self, remote_engine: str, address: str, timeout_ms: int) -> Iterator[None]:
        """Exclude other calls for the same engine; raise LLM_TIMEOUT if they last too long."""
        with self._mutex:
            one = self._busy.setdefault(address, Mutex())
        if not one.acquire(timeout=timeout_ms / 1000):
            raise timed_out(
                f"another call has been connecting or disconnecting {remote_engine} for "
                f"{timeout_ms} ms"
            )
        try:
            yield
        finally:
            one.release()


def _left_ms(deadline: float) -> int:
    return max(1, int((deadline - time.monotonic()) * 1000))


def check_message(name: bytes, body: bytes) -> None:
    """Raise LLM_PARAM_INVALID if a message, or its name, is too long."""
    if len(name) > MAX_NAME_NBYTES or len(body) > MAX_BODY_NBYTES:
        raise invalid(
            f"a message has {len(body)} bytes, and a name of {len(name)}; at most "
            f"{MAX_BODY_NBYTES}, and a name of {MAX_NAME_NBYTES}, can be sent"
        )


def read_frame(data: bytes) -> tuple[bytes, int, bytes, bytes] | None:
    """Return kind, number and name of the message, and a piece of its body; None: invalid."""
    if len(data) < _HEAD.size:
        return None
    kind, number, length = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if kind not in (_FIRST, _PIECE, _LAST) or length > min(len(body), MAX_NAME_NBYTES):
        return None
    if kind != _LAST and not number:
        return None
    return kind, number, body[:length], body[length:]


def _not_connected(remote_engine: str) -> LLMException:
    return LLMException(f"{remote_engine} is not connected", status_code=_NOT_LINKED)


def _connect_error(error: LLMException, started: float, timeout_ms: int) -> LLMException:
    """Return the error of `connect`; a failed link is LLM_TIMEOUT if time is up, or LLM_FAILED."""
    code = error.status_code
    # Busy: the previous link is still ending.
    if code in (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_LINK_BUSY, _NOT_LINKED):
        late = (time.monotonic() - started) * 1000 >= timeout_ms
        code = LLMStatusCode.LLM_TIMEOUT if late else LLMStatusCode.LLM_FAILED
    return without_frames(error, code)
