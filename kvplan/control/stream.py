"""A byte stream that feeds another one, no faster than the other can write.

It reads and writes its socket itself: a transport of asyncio needs three iterations of the loop to
begin, and a link has two of these at each end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

_READ_NBYTES: Final = 256 << 10  # at a time
_HIGH, _LOW = 64 << 10, 16 << 10  # bytes to be written at which the source is paused, and resumed


class Stream:
    """One side of a relay; it stops reading while the `other` side cannot write."""

    other: Stream

    def __init__(
        self, receive: Callable[[bytes], None], ended: Callable[[Exception | None], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._ended = ended
        self._socket: socket.socket | None = None
        self._unsent = bytearray()  # to be written
        self._is_closing = self._is_paused = self._is_write_ended = self._is_full = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection, whose end was not reported yet."""
        return self._socket is not None

    def attach(self, connection: socket.socket) -> None:
        """Begin, on a non-blocking connection, which the stream owns from here on."""
        self._socket = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._is_closing:
            self._loop.call_soon(self._lose, None)
        elif not self._is_paused:
            self._loop.add_reader(connection, self._read)

    def pause(self) -> None:
        """Read nothing until `resume`."""
        self._is_paused = True
        if self._socket is not None:
            self._loop.remove_reader(self._socket)

    def resume(self) -> None:
        """Read again."""
        if self._is_paused and self._socket is not None and not self._is_closing:
            self._loop.add_reader(self._socket, self._read)
        self._is_paused = False

    def write(self, chunk: bytes) -> None:
        """Send, unless the stream has ended."""
        if self._socket is None or self._is_closing or self._is_write_ended:
            return
        if not self._unsent:
            chunk = chunk[self._send(chunk) :]
            if not chunk or self._is_closing:
                return
            self._loop.add_writer(self._socket, self._write)
        self._unsent += chunk
        if len(self._unsent) > _HIGH and not self._is_full:
            self._is_full = True
            self.other.pause()

    def end(self) -> None:
        """Send nothing more; what arrives is still read."""
        if self._socket is not None and not self._is_write_ended and not self._is_closing:
            self._is_write_ended = True
            if not self._unsent:
                self._shut()

    def close(self) -> None:
        """End, once all that was written was sent; or, if not connected yet, when it is."""
        if self._socket is not None and not self._is_closing:
            self._loop.remove_reader(self._socket)
            if not self._unsent:
                self._loop.call_soon(self._lose, None)
        self._is_closing = True

    def abort(self) -> None:
        """End now, or when it is connected."""
        self._fail(None)

    def _read(self) -> None:
        assert self._socket is not None
        try:
            chunk = self._socket.recv(_READ_NBYTES)
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
        del self._unsent[: self._send(self._unsent)]
        if self._is_full and len(self._unsent) < _LOW:
            self._is_full = False
            self.other.resume()
        if self._unsent:
            return
        self._loop.remove_writer(self._socket)
        if self._is_closing:
            self._loop.call_soon(self._lose, None)
        elif self._is_write_ended:
            self._shut()

    def _send(self, chunk: bytes | bytearray) -> int:
        """Returns how many bytes were sent."""
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
        """End now; what was written and not sent is lost."""
        self._is_closing = True
        self._unsent.clear()
        if self._is_full:  # the source must read its own end
            self._is_full = False
            self.other.resume()
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        if self._socket is not None:  # else it was reported before
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
            self._ended(error)
