"""An engine on one of the hosts: the test's side of `engine_process.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.peer import Peer, Remote
from tools.namespaces import Namespace

SHAPE = (2, 32 * 1024)
"""The shape of a tensor: two slots of 128 KiB."""

NUM_TENSORS = 64
NBYTES = NUM_TENSORS * 128 * 1024
"""The size of slot 0 of all tensors, which a transfer moves: 64 descriptors, 8 MiB."""

OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Words before a command that hide its processes from the other host.

Transport `local` sees two namespaces as one host; with hidden processes, it cannot reach the peer.
"""

LONG_MS = 30_000
PATIENT = {"heartbeat_interval_ms": 5_000, "heartbeat_timeout_ms": 60_000}
QUICK = {"heartbeat_interval_ms": 50, "heartbeat_timeout_ms": 1000}


@dataclass(frozen=True)
class Outcome:
    """The result of a transfer."""

    status: str
    text: str
    unconfirmed: list[list[int]]
    seconds: float


class Engine(Peer):
    """A process on a host. After `start` it has an engine, after `hold` a cache.

    Args:
        host: the host of the process.
        before: words that precede its command, such as `env X=y` or `unshare ...`.
    """

    module = "tests.across.engine_process"

    def __init__(self, host: Namespace, *before: str) -> None:
        self.host = host
        self.cluster_id = 0
        self.address = ""
        self.cache_id = 0
        super().__init__(prefix=host.command(*before))
        self.holder = Remote(self, "holder")

    def start(self, cluster_id: int, *, transport: str = "tcp", **options: Any) -> None:
        """Start an engine that listens."""
        given = {"listen_ip_info": f"{self.host.address}:0", "transport": transport, **options}
        self.cluster_id = cluster_id
        self.address = self.holder.begin(cluster_id, given)

    def hold(self, seed: int | None, memory: str = "allocated") -> None:
        """Make a cache that is filled with the pattern of a seed, or with zeros."""
        self.cache_id = self.holder.hold(memory, seed, NUM_TENSORS, SHAPE)

    def link(self, *peers: Engine, timeout_ms: int = 10_000) -> None:
        """Link with all peers, and check that each link succeeds."""
        clusters = ", ".join(f"ClusterInfo({peer.cluster_id}, {peer.address!r})" for peer in peers)
        self.run(f"holder.datadist.link_clusters([{clusters}], {timeout_ms}).raise_for_status()")

    def begin_move(self, direction: str, peer: Engine, timeout_ms: int = LONG_MS) -> None:
        """Begin a pull from a peer's cache or a push to it; `moved` must follow."""
        self.holder.send("move", direction, peer.cluster_id, peer.cache_id, timeout_ms)

    def moved(self) -> Outcome:
        """Return the result of the transfer that was begun."""
        return Outcome(**self.answer())

    def move(self, direction: str, peer: Engine, timeout_ms: int = LONG_MS) -> Outcome:
        """Pull from a peer's cache, or push to it."""
        self.begin_move(direction, peer, timeout_ms)
        return self.moved()

    def check(self, seed: int, outcome: Outcome | None = None) -> None:
        """Check that all confirmed bytes have the seed's pattern, and that no others changed."""
        unconfirmed = outcome.unconfirmed if outcome else []
        assert self.holder.wrong(seed, unconfirmed) == []

    def clear(self) -> None:
        self.holder.clear()

    def state(self, peer: Engine) -> str | None:
        """Return the state of the link with a peer."""
        code = f"link = link_of(holder.datadist, {peer.cluster_id})"
        found = self.run(f"{code}\nresult = link and link.state.name")
        return None if found is None else str(found)

    def wait_for_state(self, peer: Engine, state: str) -> str:
        """Wait until the link with a peer is in a state; return its error."""
        arguments = f"holder.datadist, {peer.cluster_id}, LinkState.{state}"
        return str(self.run(f"result = wait_for_state({arguments})"))

    def __str__(self) -> str:
        return f"cluster {self.cluster_id} at {self.address}"
