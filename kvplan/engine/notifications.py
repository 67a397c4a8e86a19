"""Notifications: a few bytes from one engine to another, read by the receiving program."""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from kvnative._packets import take_packets
from kvnative._signals import Mutex, signals_deferred
from kvplan.control.notifying import WINDOW
from kvplan.engine.queues import PollableQueue
from kvplan.engine.telemetry import logger
from kvplan.status import busy, finalized
from kvplan.system.limits import start_thread

MAX_UNREAD: Final = 16384
"""Unread notifications that an engine keeps; senders of further ones are refused."""

MAX_UNREAD_OF_ONE: Final = 4096
"""Unread notifications that an engine keeps of one peer, so that other peers have room."""


class Notification(NamedTuple):
    """A notification that a peer has sent.

    Attributes:
        cluster_id: id of the peer.
        data: bytes from the peer.
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
        # Unread notifications by peer, counted by length. Without a lock, threads that race may
        # count one too few, never one too many.
        self._unread: dict[int, deque[None]] = {}
        self._direct: dict[int, tuple[socket.socket, int]] = {}  # socket and peer, by descriptor
        # Direct messages of peers make the epoll readable without a thread of this process.
        self._epoll = select.epoll()
        self._epoll.register(self._fd, select.EPOLLIN)
        self._polled = self._epoll.fileno()

    def deliver(self, cluster_id: int, data: bytes, direct: socket.socket | None) -> int:
        """See `Inbox.deliver`.

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
            raise busy(
                f"{len(unread) if full else len(self._items)} notifications wait to be read, "
                f"{len(unread)} of them from cluster {cluster_id}; at most "
                f"{MAX_UNREAD_OF_ONE if full else MAX_UNREAD} can"
            )
        unread.append(None)
        self.put(Notification(cluster_id, data))
        return min(WINDOW, room - 1)

    def attach(self, cluster_id: int, direct: socket.socket) -> None:
        """See `Inbox.attach`."""
        self._epoll.register(direct, select.EPOLLIN)
        self._direct[direct.fileno()] = direct, cluster_id

    def detach(self, direct: socket.socket) -> None:
        """See `Inbox.detach`."""
        if (fd := direct.fileno()) < 0:
            return
        with suppress(OSError):  # the peer has closed
            direct.shutdown(socket.SHUT_RD)  # the peer learns that nothing more is received
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
            with suppress(OSError):  # in this order: an interrupt may come in between
                self._epoll.unregister(fd)
            self._direct.pop(fd, None)

    def _take(self) -> Notification:
        if not self._items:
            self._receive()
        notification = Notification._make(self._items.popleft())  # direct connections deliver lists
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
    """Functions that a thread calls with each notification; the thread runs while any exist."""

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
            if self._thread is None:  # first: starting a thread may fail
                self._thread = _CallingThread(
                    self._notifications, self._functions, self._mutex, self._name
                )
            self._functions[token] = function

        def remove() -> None:
            with signals_deferred, self._mutex:
                self._functions.pop(token, None)
                if not self._functions and self._thread is not None:
                    self._thread.stop()
                    self._thread = None

        return remove


class _CallingThread:
    """A thread that reads notifications and calls all functions with each, until stopped."""

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
        """Stop reading; a function that is running is not interrupted."""
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
                    except BaseException:  # even sys.exit: later notifications must be read
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
