"""An engine in a process of its own, which `kvplan ping` links with."""

from __future__ import annotations

from tests.support import peer


class Peer(peer.Peer):
    """A process with an `engine` of cluster 7 that listens at `address`."""

    module = "tests.cli.peer_process"
    flags = ("-W", "error")

    def __init__(self, **options: str) -> None:
        super().__init__()
        try:
            self.address: str = self.run(
                """
                engine = LlmDataDist(7, LlmRole.PROMPT)
                engine.initialize({"llm.ListenIpInfo": "127.0.0.1:0", **options})
                result = engine.listen_address
                """,
                options=options,
            )
        except BaseException:
            self.close()
            raise
