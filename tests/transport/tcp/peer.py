"""The tests' side of `tcp_process.py`, and links to its process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from kvplan.transport.tcp.link import TcpLink
from kvplan.transport.tcp.transport import TcpTransport
from tests.transport.owner import Owner
from tests.transport.tcp.streams import Accepted, Dialled

TIMEOUT_MS = 20_000


class TcpPeer(Owner):
    """A process with a `transport`; its end of the latest link is `link`."""

    module = "tests.transport.tcp.tcp_process"

    def __init__(self, connections: int = 1) -> None:
        super().__init__(str(connections))

    def link(self, transport: TcpTransport) -> TcpLink:
        """Return this process's end of a new link, for which this process dials."""
        port = self.run("streams = Accepted(); result = streams.port")
        theirs = self.metadata()
        self.send(
            f"""
            link = transport.connect(
                {transport.metadata(())!r}, timeout_ms={TIMEOUT_MS}, streams=streams)
            streams.close()
            """
        )
        link = transport.connect(theirs, timeout_ms=TIMEOUT_MS, streams=Dialled(port))
        self.answer()
        return link


def linked(
    one: TcpTransport, two: TcpTransport, dialled: Callable[[int], Dialled] = Dialled
) -> tuple[TcpLink, TcpLink]:
    """Return both ends of a link inside this process; `one` dials."""
    with closing(Accepted()) as accepted, ThreadPoolExecutor(2) as threads:
        streams = (dialled(accepted.port), accepted)
        calls = [
            threads.submit(here.connect, there.metadata(), timeout_ms=TIMEOUT_MS, streams=stream)
            for here, there, stream in zip((one, two), (two, one), streams, strict=True)
        ]
        return calls[0].result(), calls[1].result()
