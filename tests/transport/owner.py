"""A peer that offers its memory: the tests' side of `owner_process.py`."""

from __future__ import annotations

from tests.support.peer import Peer


class Owner(Peer):
    """A process whose module has a `transport`."""

    module = "tests.transport.owner_process"

    def metadata(self) -> bytes:
        return bytes(self.run("result = transport.metadata()"))
