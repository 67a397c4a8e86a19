"""A producer's worker in a process of its own."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from kvplan.serving import Source
from tests.support import peer


class Peer(peer.Peer):
    """A process whose snippets can use its `worker`."""

    module = "tests.serving.peer_process"

    def __init__(self, cluster_id: int, **options: Any) -> None:
        super().__init__()
        try:
            self.begin(cluster_id, **options)
        except BaseException:
            self.close()
            raise

    def begin(self, cluster_id: int, **options: Any) -> None:
        """Make a worker in the process."""
        code = "worker = Worker(cluster_id, **options); result = worker.source"
        self.source: Source = self.run(code, cluster_id=cluster_id, options=options)

    @cached_property
    def worker(self) -> peer.Remote:
        return peer.Remote(self, "worker")
