"""The tests' side of peer_process.py: an engine in another process."""

from __future__ import annotations

from tests.support import peer
from tests.support.places import PEER_COMMAND, PEER_LISTEN


class OnItsOwn(peer.Peer):
    """A process without an engine. A prefix may start it, for example in a container."""

    module = "tests.datadist.peer_process"
    flags = ("-W", "error")


class Peer(OnItsOwn):
    """An engine `datadist` of cluster 1 in another process, which listens at `address`."""

    cluster_id = 1

    def __init__(self, machine: str = "host") -> None:
        super().__init__(machine, prefix=PEER_COMMAND)
        try:
            self.begin()
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Start the engine."""
        self.address: str = self.run(
            """
            datadist = LlmDataDist(1, LlmRole.PROMPT)
            datadist.initialize(options)
            result = datadist.listen_address
            """,
            options={"llm.ListenIpInfo": PEER_LISTEN},
        )

    def end(self) -> dict[str, int]:
        """End the engine and drop all objects of a test; return what is left on the device."""
        self.resume()
        return dict(self.run("result = forget()"))
