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
from kvplan.engine.pollable_queue import PollableQueue
from kvplan.engine.registry import finalized
from kvplan.engine.runner import OperationRunner
from kvplan.engine.telemetry import logger
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.limits import start_thread
from kvplan.validation import UINT64_MAX, check_width

if TYPE_CHECKING:
    from kvplan.links import PeerLink

MAX_UNREAD: Final = 16384
"""Notifications that an engine keeps until they are read; more are refused to their senders."""

MAX_UNREAD_OF_ONE: Final = 4096
"""The same of one peer, so that others still find room."""


class Notification(NamedTuple):
    """What a peer has sent.

    Attributes:
        cluster_id: of the peer.
        data: its bytes, as they were given there.
    """

    cluster_id: int
    data: bytes


class Notifications(PollableQueue[Notification]):
    """The notifications of one engine that have arrived, oldest first.

    Those of one peer are in the order in which it sent them. At most 16384 wait to be read, 4096 of
    one peer; further ones are refused, and their senders get LLM_LINK_BUSY.
    """

    def __init__(self) -> None:
        super().__init__()
        # One for each unread notification of a peer; of a peer without any nothing is kept.
        # It needs no lock: threads that meet here may count one too few, never one too many.
        self._unread: dict[int, deque[None]] = {}
        self._direct: dict[int, tuple[socket.socket, int]] = {}  # and its peer, by descriptor
        # What peers send directly makes it readable without a thread of this process.
        self._epoll = select.epoll()
        self._epoll.register(self._fd, select.EPOLLIN)
        self._polled = self._epoll.fileno()

    def deliver(self, cluster_id: int, data: bytes, direct: socket.socket | None) -> int:
        """Put in what a peer sends by a message; see `Inbox.deliver`.

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
        """Take from now on what a peer sends directly; in the control thread.

        Raises:
            OSError: the system has no room to watch it.
        """
        self._epoll.register(direct, select.EPOLLIN)
        self._direct[direct.fileno()] = direct, cluster_id

    def detach(self, direct: socket.socket) -> None:
        """Take what lies there, and close it; idempotent, in the control thread."""
        if (fd := direct.fileno()) < 0:
            return
        with suppress(OSError):  # the peer was first
            direct.shutdown(socket.SHUT_RD)  # nothing more arrives, and the peer knows
        if (found := self._direct.get(fd)) is not None:
            self._take_from(*found, most=MAX_UNREAD_OF_ONE)
            self._forget(fd, direct)
        direct.close()

    def _receive(self) -> None:
        if os.getpid() != self._pid:  # what arrives is the parent's
            return
        for fd, _ in self._epoll.poll(0):
            if (found := self._direct.get(fd)) is not None:
                self._take_from(*found)

    def _take_from(self, direct: socket.socket, cluster_id: int, most: int | None = None) -> None:
        # No defaultdict: without a GIL two threads would make one each.
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
        """Watch a connection no more, unless another thread was first."""
        if (found := self._direct.get(fd)) is not None and found[0] is direct:
            with suppress(OSError):  # in this order: an interrupt may come between
                self._epoll.unregister(fd)
            self._direct.pop(fd, None)

    def _take(self) -> Notification:
        if not self._items:
            self._receive()
        notification = Notification._make(self._items.popleft())  # a list if it came directly
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
    """Calls functions with each notification, in a thread that runs while there are any."""

    def __init__(self, notifications: Notifications, name: str) -> None:
        self._notifications = notifications
        self._name = name
        self._functions: dict[object, Callable[[Notification], object]] = {}
        self._mutex = Mutex()
        self._thread: _CallingThread | None = None

    def add(self, function: Callable[[Notification], object]) -> Callable[[], None]:
        """Call `function` from now on; returns what ends that."""
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
        mutex: Mutex,  # of the functions, and of being stopped
        name: str,
    ) -> None:
        self._notifications = notifications
        self._functions = functions
        self._mutex = mutex
        self._stopped = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        start_thread(name, self._run)

    def stop(self) -> None:
        """Read no more; a function that is being called ends first, in its own time."""
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
                    except BaseException:  # sys.exit, too: nobody would read what comes next
                        logger.exception("on_notification: a callback has failed")
            if self._notifications.closed and not len(self._notifications):
                return

    def _next(self) -> tuple[Notification, list[Callable[[Notification], object]]] | None:
        """Take one, and who gets it; none once it was stopped: then it is another reader's."""
        with self._mutex:
            if self._stopped:
                return None
            notification = next(iter(self._notifications), None)
            return notification and (notification, list(self._functions.values()))

    def __del__(self) -> None:
        with suppress(AttributeError):  # none could be made
            os.close(self._wake)


class NotificationOperations(OperationRunner):
    """What peers are told, and what they tell."""

    def notify(
        self, cluster_id: int, data: bytes, *, timeout_ms: float | None = None, tag: str = ""
    ) -> None:
        """Send a notification; on return the peer's engine has it, for its program to read.

        It is delivered at most once. After LLM_TIMEOUT or LLM_LINK_FAILED it may have been; after
        any other error it was not.

        Args:
            cluster_id: of the peer.
            data: 1 to 4096 bytes.
            timeout_ms: milliseconds that it may take; None: SyncKvCacheWaitTime.
            tag: what logs and recordings call it, such as the id of a request.

        Raises:
            TypeError: an argument of another type.
            ValueError: cluster_id is no uint64; timeout_ms is not > 0.
            LLMException: LLM_PARAM_INVALID: no bytes, too many, a bad tag, or this engine's own
                cluster; LLM_NOT_YET_LINK; LLM_LINK_FAILED: the link is broken, or broke meanwhile;
                LLM_LINK_BUSY: the peer has too many that it has not read; LLM_TIMEOUT.
        """
        with self._notice(cluster_id, data, timeout_ms, tag) as operation:
            _linked(operation, cluster_id).notify(data, timeout_ms)

    async def notify_async(
        self, cluster_id: int, data: bytes, *, timeout_ms: float | None = None, tag: str = ""
    ) -> None:
        """As `notify`, for a program that uses asyncio, whose loop goes on meanwhile.

        What one thread sends to a peer arrives in the order of the calls, of `notify` and of this.
        Cancelled, it may have been delivered.

        Raises:
            TypeError, ValueError, LLMException: as `notify`.
        """
        with self._notice(cluster_id, data, timeout_ms, tag) as operation:
            await _linked(operation, cluster_id).notify_async(data, timeout_ms)

    def _notice(
        self, cluster_id: int, data: bytes, timeout_ms: float | None, tag: str
    ) -> Operation:
        """Return the operation that sends a notification, of checked arguments."""
        check_width("cluster_id", cluster_id, 0, UINT64_MAX)
        check_notification("data", data)
        if timeout_ms is not None and not timeout_ms > 0:
            raise ValueError(f"timeout_ms={timeout_ms} must be > 0 or None")
        return Operation(self._running(), "notify", tag=tag)

    def notifications(self) -> Notifications:
        """Return what peers have sent and nobody has read yet: one object for an engine.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
        """
        return self._running().notifications

    def on_notification(self, callback: Callable[[Notification], object]) -> Callable[[], None]:
        """Call `callback` with each notification from now on, in a thread of the engine's own.

        What it raises is logged. Callbacks read `notifications()`: what they get no one else does.

        Returns:
            A function that removes the callback.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
            TypeError: it cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"callback={callback!r} must be callable with a Notification")
        return self._running().callbacks.add(callback)


def _linked(operation: Operation, cluster_id: int) -> PeerLink:
    """Return the link that an operation notifies over, which is in use until its end."""
    engine = operation.engine
    if cluster_id == engine.cluster_id:
        raise invalid(f"cluster_id={cluster_id} is this engine's own")
    link = operation.link = engine.links.peers.get(cluster_id) or engine.links.get(cluster_id)
    link.begin(operation)
    return link
