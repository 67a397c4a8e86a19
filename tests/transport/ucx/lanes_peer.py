"""The tests' side of lanes_process.py: another transport of as many lanes, and links to it."""

from __future__ import annotations

import itertools
from pathlib import Path

from kvplan.transport.ucx.link import UcxLink
from kvplan.transport.ucx.transport import UcxTransport
from tests.transport.owner import Owner

TIMEOUT_MS = 20_000
_SESSIONS = itertools.count()


class LanesPeer(Owner):
    """A process with a `transport`; its end of the latest link is `link`."""

    script = Path(__file__).with_name("lanes_process.py")

    def __init__(self, lanes: int) -> None:
        super().__init__(arguments=[str(lanes)])

    def link(self, transport: UcxTransport) -> UcxLink:
        """A new link, of which this process's end is returned."""
        session = f"session {next(_SESSIONS)}".encode()
        transport.ready()
        theirs = self.metadata()
        self.send(
            f"""
            link = transport.connect(
                {transport.metadata(())!r}, timeout_ms={TIMEOUT_MS}, session={session!r})
            """
        )
        link = transport.connect(theirs, timeout_ms=TIMEOUT_MS, session=session)
        self.answer()
        return link
