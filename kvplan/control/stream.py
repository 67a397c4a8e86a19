"""A byte stream that feeds another one, no faster than that one takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast


class Stream(asyncio.Protocol):
    """One side of a relay; it stops reading while the `other` side cannot write.

    Attributes:
        transport: None before the stream is connected, and after it has ended.
    """

    other: Stream

    def __init__(
        self, receive: Callable[[bytes], None], ended: Callable[[Exception | None], None]
    ) -> None:
        self._ended = ended
        self._receive = receive
        self._unwanted = self._paused = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio has connected the stream."""
        self.transport = cast(asyncio.Transport, transport)
        if self._unwanted:
            self.transport.abort()
        elif self._paused:
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        self._receive(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The stream has ended, by whichever side."""
        self.transport = None
        self._ended(exc)

    def pause_writing(self) -> None:
        """What is written is not taken: stop the source."""
        self.other.pause()

    def resume_writing(self) -> None:
        """It is taken again."""
        self.other.resume()

    def pause(self) -> None:
        """Read nothing until `resume`."""
        self._paused = True
        if self.transport is not None:
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        self._paused = False
        if self.transport is not None:
            self.transport.resume_reading()

    def write(self, chunk: bytes) -> None:
        """Send, unless the stream has ended."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(chunk)

    def end(self) -> None:
        """Say that nothing more will be sent; what comes is still read."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write_eof()

    def close(self) -> None:
        """End, once what was written has left; where it was not connected yet, when it is."""
        self._unwanted = True
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """End now, or when it is connected."""
        self._unwanted = True
        if self.transport is not None:
            self.transport.abort()
