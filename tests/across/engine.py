"""The tests' side of engine_process.py: an engine on one of the hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.peer import Peer, Remote
from tools.namespaces import Namespace

SHAPE = (2, 32 * 1024)
"""Of a tensor: two slots of 128 KiB."""

NUM_TENSORS = 64
NBYTES = NUM_TENSORS * 128 * 1024
"""Of slot 0 of all of them, which is what is moved: 64 descriptors, 8 MiB."""

OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Before a command: its processes are unknown to the other host, as on one of its own. `local`,
for which two namespaces are one host, then cannot reach them."""

LONG_MS = 30_000
PATIENT = {"heartbeat_interval_ms": 5_000, "heartbeat_timeout_ms": 60_000}
QUICK = {"heartbeat_interval_ms": 50, "heartbeat_timeout_ms": 500}


@dataclass(frozen=True)
class Outcome:
    """What came of a move."""

    status: str
    text: str
    unconfirmed: list[list[int]]
    seconds: float


class Engine(Peer):
    """A process on a host; after `start` it has an engine, after `hold` a cache.

    Args:
        host: where it runs.
        before: words of a command that starts it there: `env X=y`, `unshare ...`.
    """

    module = "tests.across.engine_process"

    def __init__(self, host: Namespace, *before: str) -> None:
        self.host = host
        self.cluster_id = 0
        self.address = ""
        self.cache_id = 0
        super().__init__(prefix=host.command(*before))
        self.it = Remote(self, "it")

    def start(self, cluster_id: int, *, transport: str = "tcp", **options: Any) -> None:
        """Have an engine, which listens."""
        given = {"listen_ip_info": f"{self.host.address}:0", "transport": transport, **options}
        self.cluster_id = cluster_id
        self.address = self.it.begin(cluster_id, given)

    def hold(self, seed: int | None, memory: str = "allocated") -> None:
        """Have a cache, with a pattern or, without a seed, zeros."""
        self.cache_id = self.it.hold(memory, seed, NUM_TENSORS, SHAPE)

    def link(self, *peers: Engine, timeout_ms: int = 10_000) -> None:
        """Link with all of them, which must succeed."""
        clusters = ", ".join(f"ClusterInfo({peer.cluster_id}, {peer.address!r})" for peer in peers)
        self.run(f"it.datadist.link_clusters([{clusters}], {timeout_ms}).raise_for_status()")

    def begin_move(self, direction: str, peer: Engine, timeout_ms: int = LONG_MS) -> None:
        """Pull from that peer's cache, or push into it; `moved` must follow."""
        self.it.send("move", direction, peer.cluster_id, peer.cache_id, timeout_ms)

    def moved(self) -> Outcome:
        """What came of the move that was begun."""
        return Outcome(**self.answer())

    def move(self, direction: str, peer: Engine, timeout_ms: int = LONG_MS) -> Outcome:
        """Pull from that peer's cache, or push into it."""
        self.begin_move(direction, peer, timeout_ms)
        return self.moved()

    def check(self, seed: int, outcome: Outcome | None = None) -> None:
        """What is confirmed holds the pattern of that seed, and nothing else was touched."""
        unconfirmed = outcome.unconfirmed if outcome else []
        assert self.it.wrong(seed, unconfirmed) == []

    def clear(self) -> None:
        self.it.clear()

    def state(self, peer: Engine) -> str | None:
        """Of the link with it."""
        code = f"link = link_of(it.datadist, {peer.cluster_id})"
        found = self.run(f"{code}\nresult = link and link.state.name")
        return None if found is None else str(found)

    def wait_for_state(self, peer: Engine, state: str) -> str:
        """Wait until the link with it is in that state; returns its error."""
        arguments = f"it.datadist, {peer.cluster_id}, LinkState.{state}"
        return str(self.run(f"result = wait_for_state({arguments})"))

    def __str__(self) -> str:
        return f"cluster {self.cluster_id} at {self.address}"
