"""All links of one engine: the interface that engines use."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from kvplan.control.auth import ClusterKey, Keys, user_key
from kvplan.control.connecting import warn_loopback_name, warn_unauthenticated
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import MAX_WORKERS, ControlLoop
from kvplan.control.status_socket import StatusSocket
from kvplan.links.dispatch import Listener, PeerHandler
from kvplan.links.handshake import HandshakeAcceptor, HandshakeInitiator
from kvplan.links.local_engine import LinkOptions, LocalEngine, OfferedCaches
from kvplan.links.peer_link import PeerLink
from kvplan.links.rendezvous import RegisterMemStatus, Rendezvous, exposed_point, locate_members
from kvplan.links.transitions import Transitions, Unlinker
from kvplan.links.values import ClusterInfo, LinkResults, check_clusters
from kvplan.status import LLMException, finalized, invalid, link_failed
from kvplan.system.limits import check_process
from kvplan.types import LlmRole
from kvplan.validation import as_int, check_type

if TYPE_CHECKING:
    from kvnative._host import Arena
    from kvplan.control.messages import Hello
    from kvplan.control.notifying import Inbox
    from kvplan.lease import BlockLease
    from kvplan.links.publisher import Publisher
    from kvplan.links.values import LinkStatus
    from kvplan.transport.transport import Transport

_T = TypeVar("_T")
_INT32_MAX = 2**31 - 1
_PUBLISH_S = 0.01  # collect changes for this long: each publication visits all caches
_WORKERS = 3  # per link: a handshake of each end, and a renewal
_CLOSING_S = 0.5  # to notify all peers, some of which may be stopped


class Links:
    """The links of one engine. Any thread may use them.

    In a forked child, calls that use a link raise LLMException (LLM_FAILED), and `close` does
    nothing, because links belong to the parent.

    Attributes:
        peers: Links by cluster id, including lost ones. `get` explains a missing one.
    """

    def __init__(
        self,
        cluster_id: int,
        role: Callable[[], LlmRole],
        options: LinkOptions,
        registry: OfferedCaches,
        transports: Sequence[Transport],
        missing: Mapping[str, str] = MappingProxyType({}),
        inbox: Inbox | None = None,
    ) -> None:
        key_file = options.cluster_key_file
        self._pid = os.getpid()
        workers = _WORKERS * options.max_links + MAX_WORKERS
        self._control = ControlLoop(f"kvplan-control-{cluster_id}", workers)
        self._engine = LocalEngine(
            cluster_id=cluster_id,
            instance=secrets.token_bytes(16),
            role=role,
            options=options,
            registry=registry,
            inbox=inbox,
            transports=tuple(transports),
            missing=missing,
            control=self._control,
            keys=Keys(None if key_file is None else ClusterKey.load(key_file), user_key),
        )
        self._transitions = Transitions(self._engine)
        self._initiator = HandshakeInitiator(self._engine, self._transitions)
        acceptor = HandshakeAcceptor(self._engine, self._transitions, self._linked)
        self._unlinker = Unlinker(self._engine, self._transitions)
        make_handler = partial(
            PeerHandler, self._engine, self._transitions, acceptor, self._unlinker
        )
        self._handler = make_handler(_admit_by_address)
        self._listener = Listener(self._engine, self._transitions, self._handler)
        self._rendezvous = Rendezvous(
            self._engine, self._transitions, self._initiator, self._unlinker, make_handler
        )
        self._is_publish_pending = False
        self._closed = False
        self.peers: Mapping[int, PeerLink] = self._transitions.links

    def observe(self, observer: Callable[[PeerLink], object]) -> None:
        """Call `observer`, in the control thread, with each link that was linked, lost or ended."""
        self._transitions.observer = observer

    def start(self) -> None:
        """Start the control thread, which all links need."""
        self._control.start()

    def serve_status(self, describe: Callable[[], dict[str, Any]]) -> None:
        """Serve the result of `describe` to programs of this user, such as `kvplan top`."""
        name = f"{self._engine.cluster_id}-{self.instance[:4].hex()}"
        status = StatusSocket(self._control, name, describe)
        self._control.call_soon(status.start)

    @property
    def instance(self) -> bytes:
        """16 bytes that identify this run of the engine."""
        return self._engine.instance

    @property
    def endpoint(self) -> Endpoint | None:
        """The address at which peers link with this engine, with the real port, or None."""
        return self._listener.endpoint

    def listen(self, endpoint: Endpoint) -> None:
        """Let peers link with this engine at `endpoint` instead of the current address."""
        self._run(self._listener.listen(endpoint))

    def stop_listening(self) -> None:
        """Stop accepting links, and end the links that peers have made."""
        self._run(self._listener.stop())

    def close(self) -> None:
        """End every link and notify the peers, within two seconds. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.peers = MappingProxyType({})
        self._control.stop(self._close)

    def link(self, clusters: Sequence[ClusterInfo], timeout_ms: int) -> LinkResults:
        """Link with all clusters at the same time."""
        return self._run(self._linking(clusters, timeout_ms))

    async def link_async(self, clusters: Sequence[ClusterInfo], timeout_ms: int) -> LinkResults:
        """Link with all clusters from a coroutine. Cancelling it ends the unfinished attempts."""
        self._check_usable()
        return await self._control.run_for(self._linking(clusters, timeout_ms))

    def _linking(
        self, clusters: Sequence[ClusterInfo], timeout_ms: int
    ) -> Coroutine[Any, Any, LinkResults]:
        check_clusters(clusters, ClusterInfo)
        calls = [(cluster.remote_cluster_id, cluster.endpoint()) for cluster in clusters]
        timeout_s = _seconds(timeout_ms)
        for cluster_id, _ in calls:
            if cluster_id == self._engine.cluster_id:
                raise invalid(f"remote_cluster_id={cluster_id} is this engine's own")
        return LinkResults.of(
            (
                cluster_id,
                partial(self._initiator.link, cluster_id, endpoint, self._handler, timeout_s),
            )
            for cluster_id, endpoint in calls
        )

    def unlink(
        self, clusters: Sequence[ClusterInfo | int], timeout_ms: int, *, force: bool = False
    ) -> LinkResults:
        """End the links with all clusters at the same time, each at both ends."""
        check_clusters(clusters, ClusterInfo | int)
        ids = [
            cluster.remote_cluster_id if isinstance(cluster, ClusterInfo) else cluster
            for cluster in clusters
        ]
        timeout_s = _seconds(timeout_ms)
        check_type("force", force, bool)
        return self._run(
            LinkResults.of(
                (cluster_id, partial(self._unlinker.unlink, cluster_id, timeout_s, force=force))
                for cluster_id in ids
            )
        )

    def drain(self, cluster_id: int, timeout_ms: int) -> None:
        """Wait until this engine has no operation in flight with a cluster; the link stays."""
        self._run(self._unlinker.drain(self.get(cluster_id), _seconds(timeout_ms)))

    def comm_link(
        self, comm_name: str, cluster_rank_info: Mapping[int, int], rank_table: str = ""
    ) -> int:
        """Begin to link with all members of a communicator, and return its id.

        All members make the same call. It warns if any process could link, or other hosts cannot.
        """
        engine = self._engine
        members = locate_members(engine.cluster_id, cluster_rank_info, rank_table)
        exposed = exposed_point(engine.cluster_id, members, engine.options)
        if exposed is not None:
            warn_loopback_name(exposed, stacklevel=3)  # at the caller of the engine
            if engine.keys.cluster is None:
                warn_unauthenticated(exposed, stacklevel=3)
        return self._run(self._rendezvous.link(comm_name, members))

    def comm_unlink(self, comm_id: int) -> None:
        """End this engine's links of a communicator, or stop making them."""
        self._run(self._rendezvous.unlink(comm_id))

    def comm_status(self, comm_id: int) -> RegisterMemStatus:
        """Return the status of a communicator. A lost link makes it FAILED."""
        self._check_usable()
        return self._rendezvous.status(comm_id)

    def live(self) -> int:
        """Return the number of links that are up, being made or being ended."""
        return len(self._transitions.live())

    def get(self, cluster_id: int) -> PeerLink:
        """Return the link with a cluster, even if it is lost."""
        self._check_usable()
        link = self._transitions.links.get(cluster_id)
        if link is None:
            raise self._transitions.not_linked(cluster_id)
        return link

    def status(self) -> list[LinkStatus]:
        """Return the status of all links, including lost ones, sorted by cluster id."""
        all_links = self._transitions
        links = {**all_links.accepting, **all_links.initiating, **all_links.links}
        return [links[cluster_id].status() for cluster_id in sorted(links)]

    def mapped(self) -> list[tuple[int, Arena]]:
        """Return the mapped memory of peers with their cluster ids, sorted by cluster id."""
        links = sorted(self._transitions.links.copy().items())
        return [
            (cluster_id, arena)
            for cluster_id, link in links
            for made in link.transport_links.values()
            for arena in made.mapped()
        ]

    def latest(self, lease: BlockLease) -> BlockLease:
        """Return the latest value of a lease that its owner has published to this engine."""
        link = self.peers.get(lease.cluster_id)
        return lease if link is None or not link.moved_leases else link.latest(lease)

    def publish_soon(self) -> None:
        """Publish changes of the registry to all peers soon. Later changes may join them."""
        if not self._is_publish_pending and not self._closed and os.getpid() == self._pid:
            self._is_publish_pending = True
            self._control.call_soon(self._publish_later)

    def publish_and_confirm(self, timeout_s: float) -> None:
        """Publish changes of the registry to all peers, and wait until the peers have them."""
        self._run(self._publish_and_confirm(timeout_s))

    def _run(self, task: Coroutine[Any, Any, _T]) -> _T:
        """Run `task` in the control thread and wait for it."""
        try:
            self._check_usable()
        except LLMException:
            task.close()
            raise
        return self._control.run(task)

    def _check_usable(self) -> None:
        check_process(self._pid, "the engine")
        if self._closed:
            raise finalized()

    def _publish_later(self) -> None:
        asyncio.get_running_loop().call_later(_PUBLISH_S, self._publish)

    def _publish(self) -> None:
        self._is_publish_pending = False
        for publisher in self._publishers():
            self._transitions.spawn(publisher.publish_pending())

    async def _publish_and_confirm(self, timeout_s: float) -> None:
        await asyncio.gather(
            *(publisher.publish_and_confirm(timeout_s) for publisher in self._publishers())
        )

    def _publishers(self) -> list[Publisher]:
        links = self._transitions.links.values()
        return [link.publisher for link in links if link.is_live and link.publisher is not None]

    def _linked(self, link: PeerLink) -> None:
        self._rendezvous.linked(link)

    async def _close(self) -> None:
        reason = f"cluster {self._engine.cluster_id} is finalized"
        self._transitions.refuse_new(reason)
        for cluster_id in self._transitions.live():
            self._unlinker.drop(cluster_id, reason)
        # In the next iteration the channels send the reason, before the loop closes them.
        await asyncio.sleep(0)
        await self._listener.stop()
        self._rendezvous.close()
        await self._transitions.finish(_CLOSING_S)


def _admit_by_address(hello: Hello) -> None:
    if hello.comm:
        raise link_failed(f"communicator {hello.comm!r} is not linked by address")


def _seconds(timeout_ms: int) -> float:
    milliseconds = as_int("timeout_ms", timeout_ms)
    if not 1 <= milliseconds <= _INT32_MAX:
        text = f"timeout_ms={milliseconds} is out of range [1, {_INT32_MAX}]"
        # As in the reference, a number that does not fit into 32 bits raises ValueError.
        fits = -_INT32_MAX - 1 <= milliseconds <= _INT32_MAX
        raise invalid(text) if fits else ValueError(text)
    return milliseconds / 1000
