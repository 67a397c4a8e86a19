"""A gate that holds a transfer after its first batch until the test opens it."""

from __future__ import annotations

import os
import select

from kvnative._backend import Backend
from tests.support.wrappers import limit_batch, trace

DEADLINE_S = 30.0  # for events that are immediate unless the machine stalls


class Gate:
    """A gate that is shut by a full pipe: a backend waits until it can write its trace.

    Give `wrap` to the `Transfers` of one engine, and begin the transfer in a thread of its own.
    """

    def __init__(self) -> None:
        self._reported, self._report = os.pipe()
        self._hold, self._held = os.pipe()
        os.set_blocking(self._held, False)
        for size in (4096, 1):
            try:
                while True:
                    os.write(self._held, bytes(size))
            except BlockingIOError:
                pass
        os.set_blocking(self._held, True)
        self._open = False

    def wrap(self, backend: Backend) -> Backend:
        """Return a backend with batches of one descriptor that reports and then holds the first."""
        return limit_batch(trace(trace(backend, self._report), self._held), 1)

    def wait(self) -> None:
        """Return when the first batch was submitted; most backends have moved it by then."""
        ready, _, _ = select.select([self._reported], [], [], DEADLINE_S)
        assert ready, "no transfer has begun"

    def open(self) -> None:
        """Let all batches pass from now on."""
        if not self._open:
            self._open = True
            os.close(self._reported)
            os.close(self._hold)

    def close(self) -> None:
        """Open the gate, and close the pipes; no transfer may be in flight any more."""
        self.open()
        os.close(self._report)
        os.close(self._held)
