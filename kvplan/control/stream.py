"""A byte stream that feeds another one, no faster than that one takes it.

It reads and writes its socket itself: a transport of asyncio takes three turns of the loop to
begin, and a link has two of these at each end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

_AT_ONCE: Final = 256 << 10  # bytes that are read
_HIGH, _LOW = 64 << 10, 16 << 10  # bytes that wait to be written: stop the source, and go on


class Stream:
    """One side of a relay; it stops reading while the `other` side cannot write.

    Args:
        receive: is called with what comes.
        ended: is called once, when the stream has ended by whichever side, with the error if any;
            never by a method of this class itself.
    """

    other: Stream

    def __init__(
        self, receive: Callable[[bytes], None], ended: Callable[[Exception | None], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._ended = ended
        self._socket: socket.socket | None = None
        self._waiting = bytearray()  # to be written
        self._unwanted = self._paused = self._ending = self._is_full = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection, and its end was not told yet."""
        return self._socket is not None

    def attach(self, connection: socket.socket) -> None:
        """Begin, on a non-blocking connection, which is the stream's from here on."""
        self._socket = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._unwanted:
            self._loop.call_soon(self._lose, None)
        elif not self._paused:
            self._loop.add_reader(connection, self._read)

    def pause(self) -> None:
        """Read nothing until `resume`."""
        self._paused = True
        if self._socket is not None:
            self._loop.remove_reader(self._socket)

    def resume(self) -> None:
        """Read again."""
        if self._paused and self._socket is not None and not self._unwanted:
            self._loop.add_reader(self._socket, self._read)
        self._paused = False

    def write(self, chunk: bytes) -> None:
        """Send, unless the stream has ended."""
        if self._socket is None or self._unwanted or self._ending:
            return
        if not self._waiting:
            chunk = chunk[self._send(chunk) :]
            if not chunk or self._unwanted:
                return
            self._loop.add_writer(self._socket, self._write)
        self._waiting += chunk
        if len(self._waiting) > _HIGH and not self._is_full:
            self._is_full = True
            self.other.pause()

    def end(self) -> None:
        """Say that nothing more will be sent; what comes is still read."""
        if self._socket is not None and not self._ending and not self._unwanted:
            self._ending = True
            if not self._waiting:
                self._shut()

    def close(self) -> None:
        """End, once what was written has left; where it was not connected yet, when it is."""
        if self._socket is not None and not self._unwanted:
            self._loop.remove_reader(self._socket)
            if not self._waiting:
                self._loop.call_soon(self._lose, None)
        self._unwanted = True

    def abort(self) -> None:
        """End now, or when it is connected."""
        self._fail(None)

    def _read(self) -> None:
        assert self._socket is not None
        try:
            chunk = self._socket.recv(_AT_ONCE)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)
            return
        if chunk:
            self._receive(chunk)
        else:
            self.close()

    def _write(self) -> None:
        assert self._socket is not None
        del self._waiting[: self._send(self._waiting)]
        if self._is_full and len(self._waiting) < _LOW:
            self._is_full = False
            self.other.resume()
        if self._waiting:
            return
        self._loop.remove_writer(self._socket)
        if self._unwanted:
            self._loop.call_soon(self._lose, None)
        elif self._ending:
            self._shut()

    def _send(self, chunk: bytes | bytearray) -> int:
        """How much of it has left."""
        assert self._socket is not None
        try:
            return self._socket.send(chunk)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._fail(error)
            return len(chunk)

    def _shut(self) -> None:
        assert self._socket is not None
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception | None) -> None:
        """End now; what was written and has not left is lost."""
        self._unwanted = True
        self._waiting.clear()
        if self._is_full:  # the source is to see its own end
            self._is_full = False
            self.other.resume()
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        if self._socket is not None:  # else it was told before
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
            self._ended(error)
