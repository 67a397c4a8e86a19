"""The tests' side of peer_process.py: an engine in another process."""

from __future__ import annotations

from tests.support import peer
from tests.support.places import PEER_COMMAND, PEER_LISTEN


class OnItsOwn(peer.Peer):
    """A process that has no engine yet; a prefix starts it, as in a container."""

    module = "tests.datadist.peer_process"
    flags = ("-W", "error")


class Peer(OnItsOwn):
    """An engine `datadist` of cluster 1, listening at `address`, in a process of its own."""

    cluster_id = 1

    def __init__(self, machine: str = "host") -> None:
        super().__init__(machine, prefix=PEER_COMMAND)
        try:
            self.begin()
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Let it have an engine."""
        self.address: str = self.run(
            """
            datadist = LlmDataDist(1, LlmRole.PROMPT)
            datadist.initialize(options)
            result = datadist.listen_address
            """,
            options={"llm.ListenIpInfo": PEER_LISTEN},
        )

    def end(self) -> dict[str, int]:
        """End its engine, and all that was made there; returns what it has left of the device."""
        self.resume()
        return dict(self.run("result = forget()"))
