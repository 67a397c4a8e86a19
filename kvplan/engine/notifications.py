"""Notifications: a few bytes from one engine to another, read by the receiving program."""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from kvnative._packets import take_packets
from kvnative._signals import Mutex, signals_deferred
from kvplan.control.notifying import WINDOW
from kvplan.engine.operation import Operation, check_notification
from kvplan.engine.queues import PollableQueue
from kvplan.engine.registry import finalized
from kvplan.engine.runner import OperationRunner
from kvplan.engine.telemetry import logger
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.limits import start_thread
from kvplan.validation import UINT64_MAX, check_width

if TYPE_CHECKING:
    from kvplan.links import PeerLink

MAX_UNREAD: Final = 16384
"""Unread notifications that an engine keeps; senders of further ones are refused."""

MAX_UNREAD_OF_ONE: Final = 4096
"""Unread notifications of one peer, which leaves room for other peers."""


class Notification(NamedTuple):
    """A notification that a peer has sent.

    Attributes:
        cluster_id: of the peer.
        data: the bytes that the peer gave.
    """

    cluster_id: int
    data: bytes


class Notifications(PollableQueue[Notification]):
    """The notifications of one engine that have arrived, oldest first.

    Notifications of one peer keep their order. At most 16384 wait to be read, 4096 of one peer.
    Senders of further ones get LLM_LINK_BUSY.
    """

    def __init__(self) -> None:
        super().__init__()
        # Counts unread notifications by peer, without zeros. Without a lock, threads that meet
        # here may count one too few, never one too many.
        self._unread: dict[int, deque[None]] = {}
        self._direct: dict[int, tuple[socket.socket, int]] = {}  # socket and peer, by descriptor
        # Direct messages of peers make the epoll readable without a thread of this process.
        self._epoll = select.epoll()
        self._epoll.register(self._fd, select.EPOLLIN)
        self._polled = self._epoll.fileno()

    def deliver(self, cluster_id: int, data: bytes, direct: socket.socket | None) -> int:
        """Add the notification of a control message; see `Inbox.deliver`.

        Raises:
            LLMException: LLM_LINK_BUSY: too many wait to be read; LLM_ENGINE_FINALIZED.
        """
        if self.closed:
            raise finalized()
        if direct is not None:
            self._take_from(direct, cluster_id)
        unread = self._unread.get(cluster_id) or self._unread.setdefault(cluster_id, deque())
        room = min(MAX_UNREAD_OF_ONE - len(unread), MAX_UNREAD - len(self._items))
        if room <= 0:
            self._forget_read(cluster_id, unread)
            full = len(unread) >= MAX_UNREAD_OF_ONE
            raise LLMException(
                f"{len(unread) if full else len(self._items)} notifications wait to be read, "
                f"{len(unread)} of them from cluster {cluster_id}; at most "
                f"{MAX_UNREAD_OF_ONE if full else MAX_UNREAD} can",
                status_code=LLMStatusCode.LLM_LINK_BUSY,
            )
        unread.append(None)
        self.put(Notification(cluster_id, data))
        return min(WINDOW, room - 1)

    def attach(self, cluster_id: int, direct: socket.socket) -> None:
        """Begin to receive from a peer's direct connection. Runs in the control thread.

        Raises:
            OSError: the system has no room to watch it.
        """
        self._epoll.register(direct, select.EPOLLIN)
        self._direct[direct.fileno()] = direct, cluster_id

    def detach(self, direct: socket.socket) -> None:
        """Receive the rest and close the connection. Idempotent, in the control thread."""
        if (fd := direct.fileno()) < 0:
            return
        with suppress(OSError):  # the peer has closed
            direct.shutdown(socket.SHUT_RD)  # the peer learns that nothing is received
        if (found := self._direct.get(fd)) is not None:
            self._take_from(*found, most=MAX_UNREAD_OF_ONE)
            self._forget(fd, direct)
        direct.close()

    def _receive(self) -> None:
        if os.getpid() != self._pid:  # the parent receives
            return
        for fd, _ in self._epoll.poll(0):
            if (found := self._direct.get(fd)) is not None:
                self._take_from(*found)

    def _take_from(self, direct: socket.socket, cluster_id: int, most: int | None = None) -> None:
        # Not a defaultdict: without a GIL two threads would each make a deque.
        unread = self._unread.get(cluster_id) or self._unread.setdefault(cluster_id, deque())
        if most is None:
            most = min(MAX_UNREAD_OF_ONE - len(unread), MAX_UNREAD - len(self._items))
        fd = direct.fileno()
        if not take_packets(direct, most, cluster_id, self._items, unread, self._fd):
            self._forget(fd, direct)
        if not unread:
            self._forget_read(cluster_id, unread)

    def _forget_read(self, cluster_id: int, unread: deque[None]) -> None:
        if not unread and self._unread.get(cluster_id) is unread:
            self._unread.pop(cluster_id, None)

    def _forget(self, fd: int, direct: socket.socket) -> None:
        """Stop watching a connection, unless another thread already did."""
        if (found := self._direct.get(fd)) is not None and found[0] is direct:
            with suppress(OSError):  # in this order: an interrupt may come between
                self._epoll.unregister(fd)
            self._direct.pop(fd, None)

    def _take(self) -> Notification:
        if not self._items:
            self._receive()
        notification = Notification._make(self._items.popleft())  # a list from a direct connection
        if (unread := self._unread.get(notification.cluster_id)) is not None:
            with suppress(IndexError):
                unread.pop()
            if not unread:
                self._forget_read(notification.cluster_id, unread)
        return notification

    def __del__(self) -> None:
        super().__del__()
        with suppress(AttributeError):
            self._epoll.close()
            for direct, _ in self._direct.values():
                direct.close()


class NotificationCallbacks:
    """Calls functions with each notification, in a thread that runs while functions exist."""

    def __init__(self, notifications: Notifications, name: str) -> None:
        self._notifications = notifications
        self._name = name
        self._functions: dict[object, Callable[[Notification], object]] = {}
        self._mutex = Mutex()
        self._thread: _CallingThread | None = None

    def add(self, function: Callable[[Notification], object]) -> Callable[[], None]:
        """Call `function` with each notification from now on; return a function that removes it."""
        token = object()
        with signals_deferred, self._mutex:
            self._functions[token] = function
            if self._thread is None:
                self._thread = _CallingThread(
                    self._notifications, self._functions, self._mutex, self._name
                )

        def remove() -> None:
            with signals_deferred, self._mutex:
                self._functions.pop(token, None)
                if not self._functions and self._thread is not None:
                    self._thread.stop()
                    self._thread = None

        return remove


class _CallingThread:
    """Reads notifications, and calls all functions with each, until it is stopped."""

    def __init__(
        self,
        notifications: Notifications,
        functions: dict[object, Callable[[Notification], object]],
        mutex: Mutex,  # guards the functions and `_stopped`
        name: str,
    ) -> None:
        self._notifications = notifications
        self._functions = functions
        self._mutex = mutex
        self._stopped = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        start_thread(name, self._run)

    def stop(self) -> None:
        """Stop reading; a function that is running ends by itself."""
        self._stopped = True
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._notifications.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._stopped:
            poll.poll()
            while (found := self._next()) is not None:
                notification, functions = found
                for function in functions:
                    try:
                        function(notification)
                    except BaseException:  # also sys.exit, as later notifications must be read
                        logger.exception("on_notification: a callback has failed")
            if self._notifications.closed and not len(self._notifications):
                return

    def _next(self) -> tuple[Notification, list[Callable[[Notification], object]]] | None:
        """Return the next notification and its functions; None: empty, or stopped."""
        with self._mutex:
            if self._stopped:
                return None
            notification = next(iter(self._notifications), None)
            return notification and (notification, list(self._functions.values()))

    def __del__(self) -> None:
        with suppress(AttributeError):  # the event could not be created
            os.close(self._wake)


class NotificationOperations(OperationRunner):
    """Notifications to peers, and from them."""

    def notify(
        self, cluster_id: int, data: bytes, *, timeout_ms: float | None = None, tag: str = ""
    ) -> None:
        """Send a notification; after the return the peer's program can read it.

        Delivered at most once. After LLM_TIMEOUT or LLM_LINK_FAILED the peer may have it; after any
        other error it does not.

        Args:
            cluster_id: of the peer.
            data: 1 to 4096 bytes.
            timeout_ms: milliseconds, > 0; None: SyncKvCacheWaitTime.
            tag: name in logs and recordings, such as the id of a request.

        Raises:
            TypeError: an argument of another type.
            ValueError: cluster_id is not a uint64; timeout_ms is not > 0.
            LLMException: LLM_PARAM_INVALID: no bytes, too many, a bad tag, or this engine's own
                cluster; LLM_NOT_YET_LINK; LLM_LINK_FAILED: the link is broken, or broke meanwhile;
                LLM_LINK_BUSY: too many wait to be read at the peer; LLM_TIMEOUT.
        """
        with self._notice(cluster_id, data, timeout_ms, tag) as operation:
            _linked(operation, cluster_id).notify(data, timeout_ms)

    async def notify_async(
        self, cluster_id: int, data: bytes, *, timeout_ms: float | None = None, tag: str = ""
    ) -> None:
        """Do as `notify`, without blocking the asyncio loop.

        Notifications of one thread to a peer, by `notify` and this, arrive in the order of the
        calls. After a cancellation the notification may have been delivered.

        Raises:
            TypeError, ValueError, LLMException: as `notify`.
        """
        with self._notice(cluster_id, data, timeout_ms, tag) as operation:
            await _linked(operation, cluster_id).notify_async(data, timeout_ms)

    def _notice(
        self, cluster_id: int, data: bytes, timeout_ms: float | None, tag: str
    ) -> Operation:
        """Check the arguments and return the operation that sends a notification."""
        check_width("cluster_id", cluster_id, 0, UINT64_MAX)
        check_notification("data", data)
        if timeout_ms is not None and not timeout_ms > 0:
            raise ValueError(f"timeout_ms={timeout_ms} must be > 0 or None")
        return Operation(self._running(), "notify", tag=tag)

    def notifications(self) -> Notifications:
        """Return the queue of unread notifications: one object for each engine.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
        """
        return self._running().notifications

    def on_notification(self, callback: Callable[[Notification], object]) -> Callable[[], None]:
        """Call `callback` with each notification from now on, in a thread of the engine.

        Exceptions of the callback are logged. Callbacks read `notifications()`, so no other reader
        gets these notifications.

        Returns:
            A function that removes the callback.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
            TypeError: callback is not callable.
        """
        if not callable(callback):
            raise TypeError(f"callback={callback!r} must be callable with a Notification")
        return self._running().callbacks.add(callback)


def _linked(operation: Operation, cluster_id: int) -> PeerLink:
    """Return the link of a notification, and keep it until the operation ends."""
    engine = operation.engine
    if cluster_id == engine.cluster_id:
        raise invalid(f"cluster_id={cluster_id} is this engine's own")
    link = operation.link = engine.links.peers.get(cluster_id) or engine.links.get(cluster_id)
    link.begin(operation)
    return link
