"""A transfer that stands still after its first batch until the test lets it go on."""

from __future__ import annotations

import os
import select

from kvnative._backend import Backend
from tests.support.wrappers import limit_batch, trace

DEADLINE_S = 30.0  # of what happens at once, on a machine that stalls


class Gate:
    """Held shut by a pipe that is full: a trace that cannot be written holds up what it traces.

    Give `wrap` to the `Transfers` of one engine, and begin the transfer in a thread of its own.
    """

    def __init__(self) -> None:
        self._told, self._tell = os.pipe()
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
        """A batch is one descriptor; the first is reported, and then held."""
        return limit_batch(trace(trace(backend, self._tell), self._held), 1)

    def wait(self) -> None:
        """Return once the first batch was submitted: most backends have moved it then."""
        ready, _, _ = select.select([self._told], [], [], DEADLINE_S)
        assert ready, "no transfer has begun"

    def open(self) -> None:
        """Let everything pass, from now on."""
        if not self._open:
            self._open = True
            os.close(self._told)
            os.close(self._hold)

    def close(self) -> None:
        """Open it, and close the pipes; no transfer may be in flight any more."""
        self.open()
        os.close(self._tell)
        os.close(self._held)
