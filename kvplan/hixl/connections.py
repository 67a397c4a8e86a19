"""Connections with remote engines by their names, made at once or in the background."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread, current_thread
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary, ref

from kvnative._signals import Mutex
from kvplan.control.endpoint import Endpoint
from kvplan.engine.datadist import LlmDataDist
from kvplan.hixl.options import cluster_id_of, peer_endpoint
from kvplan.hixl.values import AsyncConnectStatus, NotifyDesc
from kvplan.links import ClusterInfo, LinkState, PeerLink
from kvplan.links.values import cluster_here
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.limits import start_thread
from kvplan.system.logs import LimitedLog, Log

_log = Log("kvplan.hixl")
_peer_log = LimitedLog(_log)

_MAX_TEXT: Final = 1024  # bytes of a notification's name, and of its message
_HEAD: Final = struct.Struct("<cH")  # kind, bytes of the name
_MESSAGE, _USES, _LEAVES = b"N", b"U", b"L"
_ATTEMPTS: Final = 3  # to get a link that its peer does not end at the same time
_NOT_LINKED: Final = LLMStatusCode.LLM_NOT_YET_LINK


class _Connection(NamedTuple):
    """The cluster of a remote engine that this end has connected, and its link."""

    cluster_id: int
    link: ref[PeerLink]

    def is_replaced(self, datadist: LlmDataDist) -> bool:
        """Return True if the link ended and the peer has since made another for itself."""
        now = datadist._running().links.peers.get(self.cluster_id)
        return now is not None and now is not self.link()


class Connections:
    """The remote engines that one engine is connected with."""

    def __init__(self, datadist: LlmDataDist) -> None:
        self._datadist = datadist
        self._mutex = Mutex()
        self._busy: dict[str, Mutex] = {}  # by address: one call at a time for each engine
        self._connected: dict[str, _Connection] = {}  # by each name that was used
        self._peer_uses: WeakKeyDictionary[PeerLink, bool] = WeakKeyDictionary()
        self._messages: list[NotifyDesc] = []

    def cluster_of(self, remote_engine: str) -> int:
        """Return the cluster id of a connected engine. Its link may be broken all the same."""
        found = self._connected.get(remote_engine)
        if found is None:
            found = self._connected.get(str(peer_endpoint(remote_engine)))
        if found is None or found.is_replaced(self._datadist):
            raise _not_connected(remote_engine)
        return found.cluster_id

    def is_linked(self, remote_engine: str) -> bool:
        """Return True if the engine is connected and its link is up."""
        try:
            return self._link(self.cluster_of(remote_engine)).state is LinkState.LINKED
        except LLMException:
            return False

    def connect(self, remote_engine: str, timeout_ms: int) -> None:
        """Connect with an engine that listens."""
        endpoint = peer_endpoint(remote_engine)
        started = time.monotonic()
        with self._one_call(remote_engine, str(endpoint), timeout_ms):
            if self.is_linked(remote_engine):
                raise LLMException(
                    f"{remote_engine} is already connected",
                    status_code=LLMStatusCode.LLM_ALREADY_LINK,
                )
            try:
                self._connect(remote_engine, str(endpoint), started + timeout_ms / 1000)
            except LLMException as error:
                raise _connect_error(error, started, timeout_ms) from None

    def _connect(self, remote_engine: str, address: str, deadline: float) -> None:
        cluster_id = cluster_id_of(Endpoint.parse(address))
        for attempt in range(_ATTEMPTS):
            try:
                is_made = self._linked(cluster_id, address, deadline)
            except LLMException as error:
                # The peer may use another name for itself: that of all addresses of its host, say.
                if (here := cluster_here(error)) is None:
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
                # The peer may have just ended the link that it had made. Then this end makes one.
                if attempt + 1 == _ATTEMPTS or time.monotonic() >= deadline:
                    raise
        raise _not_connected(remote_engine)

    def disconnect(self, remote_engine: str, timeout_ms: int) -> None:
        """End a connection; on return this end moves no bytes over it."""
        deadline = time.monotonic() + timeout_ms / 1000
        with self._one_call(remote_engine, str(peer_endpoint(remote_engine)), timeout_ms):
            cluster_id = self.cluster_of(remote_engine)
            self.receive()  # the peer may have said that it uses the link
            try:
                link = self._link(cluster_id)
                if link.state is LinkState.LINKED and self._used_by_peer(link):
                    self._leave(remote_engine, cluster_id, _left_ms(deadline))
                else:
                    self._datadist.unlink_clusters(
                        [cluster_id], timeout_ms=_left_ms(deadline)
                    ).raise_for_status()
            except LLMException as error:
                code = error.status_code
                if code is not LLMStatusCode.LLM_LINK_BUSY:
                    self._forget(cluster_id)
                if code in (LLMStatusCode.LLM_LINK_BUSY, LLMStatusCode.LLM_UNLINK_FAILED):
                    timeout = LLMStatusCode.LLM_TIMEOUT
                    raise LLMException(error.args[0], status_code=timeout) from None
                if code not in (_NOT_LINKED, LLMStatusCode.LLM_LINK_FAILED):
                    raise
                _log.info("disconnect: %s was already gone: %s", remote_engine, error)
            else:
                self._forget(cluster_id)

    def _leave(self, remote_engine: str, cluster_id: int, timeout_ms: int) -> None:
        """Tell the peer that this end does not use the link any more."""
        try:
            self._datadist.notify(cluster_id, _LEAVES, timeout_ms=timeout_ms)
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_LINK_BUSY:
                raise
            # The peer reads no messages. The link stays until one of the engines is finalized.
            _log.info("disconnect: %s could not be notified: %s", remote_engine, error)

    def notify(self, remote_engine: str, message: NotifyDesc, timeout_ms: int) -> None:
        """Send a message; on return the remote engine has it."""
        name, text = message.name.encode(), message.notify_msg.encode()
        for argument, data in (("name", name), ("notify_msg", text)):
            if len(data) > _MAX_TEXT:
                raise invalid(f"{argument} has {len(data)} bytes; at most {_MAX_TEXT} can be sent")
        frame = _HEAD.pack(_MESSAGE, len(name)) + name + text
        self._datadist.notify(self.cluster_of(remote_engine), frame, timeout_ms=timeout_ms)

    def take_messages(self) -> list[NotifyDesc]:
        """Return the messages that have arrived since the last call."""
        with self._mutex:
            self.receive()
            taken, self._messages = self._messages, []
        return taken

    def receive(self) -> None:
        """Read the notifications of all peers."""
        with self._mutex:
            for cluster_id, data in self._datadist.notifications():
                if data in (_USES, _LEAVES):
                    try:
                        self._peer_uses[self._link(cluster_id)] = data == _USES
                    except LLMException:
                        continue  # the link is gone, and with it the peer's use of it
                elif (message := _message(data)) is not None:
                    self._messages.append(message)
                else:
                    _peer_log.warning(
                        "cluster %d has sent %d bytes that are not a notification of hixl",
                        cluster_id,
                        len(data),
                    )

    def _linked(self, cluster_id: int, address: str, deadline: float) -> bool:
        """Link with a cluster; return True if this call has made the link."""
        cluster = ClusterInfo(cluster_id, address)
        results = self._datadist.link_clusters([cluster], _left_ms(deadline))
        if results.status is LLMStatusCode.LLM_ALREADY_LINK:
            return False
        results.raise_for_status()
        return True

    def _link(self, cluster_id: int) -> PeerLink:
        return self._datadist._running().links.get(cluster_id)

    def _used_by_peer(self, link: PeerLink) -> bool:
        """Return True if the peer uses the link: if it made the link, until it says otherwise."""
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

    def _forget(self, cluster_id: int) -> None:
        with self._mutex:
            self._connected = {
                name: connection
                for name, connection in self._connected.items()
                if connection.cluster_id != cluster_id
            }

    @contextmanager
    def _one_call(self, remote_engine: str, address: str, timeout_ms: int) -> Iterator[None]:
        """Exclude other calls for the same engine; LLM_TIMEOUT if they last too long."""
        with self._mutex:
            busy = self._busy.setdefault(address, Mutex())
        if not busy.acquire(timeout=timeout_ms / 1000):
            raise LLMException(
                f"another call has been connecting or disconnecting {remote_engine} for "
                f"{timeout_ms} ms",
                status_code=LLMStatusCode.LLM_TIMEOUT,
            )
        try:
            yield
        finally:
            busy.release()


def _left_ms(deadline: float) -> int:
    return max(1, int((deadline - time.monotonic()) * 1000))


def _message(data: bytes) -> NotifyDesc | None:
    if len(data) < _HEAD.size:
        return None
    kind, length = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if kind != _MESSAGE or length > len(body):
        return None
    try:
        return NotifyDesc(body[:length].decode(), body[length:].decode())
    except UnicodeDecodeError:
        return None


def _not_connected(remote_engine: str) -> LLMException:
    return LLMException(f"{remote_engine} is not connected", status_code=_NOT_LINKED)


def _connect_error(error: LLMException, started: float, timeout_ms: int) -> LLMException:
    """Return the error of `connect`: LLM_TIMEOUT if it took all of its time, or LLM_FAILED."""
    code = error.status_code
    # Busy: the link before this one is being ended.
    if code in (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_LINK_BUSY, _NOT_LINKED):
        late = (time.monotonic() - started) * 1000 >= timeout_ms
        code = LLMStatusCode.LLM_TIMEOUT if late else LLMStatusCode.LLM_FAILED
    return LLMException(error.args[0], status_code=code)


# While waiting, while running, after success, after failure.
_CONNECT_STATES: Final = (
    AsyncConnectStatus.CONNECT_PENDING,
    AsyncConnectStatus.CONNECTING,
    AsyncConnectStatus.CONNECTED,
    AsyncConnectStatus.CONNECT_FAILED,
)
_DISCONNECT_STATES: Final = (
    AsyncConnectStatus.DISCONNECT_PENDING,
    AsyncConnectStatus.DISCONNECTING,
    AsyncConnectStatus.NOT_CONNECT,
    AsyncConnectStatus.NOT_CONNECT,
)


class _Task(NamedTuple):
    states: tuple[AsyncConnectStatus, ...]
    run: Callable[[], bool]  # returns True on success


class AsyncConnector:
    """Connects and disconnects in the background, in threads that exist while there are tasks.

    The threads do not keep the process from ending without `finalize`. At most `capacity` tasks may
    wait.
    """

    def __init__(self, threads: int, capacity: int, name: str) -> None:
        self._max_threads, self._capacity, self._name = threads, capacity, name
        self._mutex = Mutex()
        self._closed = False
        self._threads: set[Thread] = set()
        self._queues: dict[str, deque[_Task]] = {}  # by remote engine, for those with a task
        self._ready: deque[str] = deque()  # remote engines that no thread works for
        self._waiting = 0
        self._states: dict[str, AsyncConnectStatus] = {}

    def submit(self, remote_engine: str, *, connects: bool, run: Callable[[], bool]) -> None:
        """Queue a task behind those of the same remote engine."""
        with self._mutex:
            if self._closed:
                raise LLMException(
                    "the engine is finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
                )
            if self._waiting >= self._capacity:
                raise LLMException(
                    f"{self._waiting} asynchronous connects are waiting; at most {self._capacity} "
                    "may (connect_pool.task_queue_capacity)",
                    status_code=LLMStatusCode.LLM_LINK_BUSY,
                )
            queue = self._queues.get(remote_engine)
            if queue is None:
                # First: a queue without a thread would keep later tasks waiting for ever.
                if len(self._threads) < self._max_threads:
                    self._threads.add(start_thread(self._name, self._work))
                queue = self._queues[remote_engine] = deque()
                self._ready.append(remote_engine)
            task = _Task(_CONNECT_STATES if connects else _DISCONNECT_STATES, run)
            queue.append(task)
            self._waiting += 1
            self._states[remote_engine] = task.states[0]

    def states(self) -> dict[str, AsyncConnectStatus]:
        """Return the state of the last task of each remote engine."""
        with self._mutex:
            return dict(self._states)

    def stop(self) -> None:
        """Start no more tasks."""
        with self._mutex:
            self._closed = True
            for queue in self._queues.values():
                queue.clear()

    def join(self) -> None:
        """Wait for the tasks that are running."""
        with self._mutex:
            threads = tuple(self._threads)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._mutex:
                if not self._ready:
                    self._threads.discard(current_thread())
                    return
                remote_engine = self._ready.popleft()
            self._work_for(remote_engine)

    def _work_for(self, remote_engine: str) -> None:
        """Run the tasks of a remote engine until its queue is empty."""
        while True:
            with self._mutex:
                queue = self._queues[remote_engine]
                if not queue:
                    del self._queues[remote_engine]
                    return
                task = queue.popleft()
                self._waiting -= 1
                if not queue:
                    self._states[remote_engine] = task.states[1]
            has_succeeded = False
            try:
                has_succeeded = task.run()
            except Exception:  # a bug of this package must not stop other tasks
                _log.exception("connecting with %s in the background", remote_engine)
            with self._mutex:
                if not queue:  # otherwise the state is that of a later task
                    self._states[remote_engine] = task.states[2 if has_succeeded else 3]
