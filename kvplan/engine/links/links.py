"""All links of one engine, as its user has them."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from kvplan.control.cluster_key import ClusterKey, Keys
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import MAX_WORKERS, ControlLoop
from kvplan.control.server import warn_of_strangers
from kvplan.control.user_key import user_key
from kvplan.engine.links.answering import Answerer
from kvplan.engine.links.calling import Caller
from kvplan.engine.links.clusters import ClusterInfo, check_clusters
from kvplan.engine.links.listener import Listener
from kvplan.engine.links.local_end import LocalEnd, link_failed
from kvplan.engine.links.peer_handler import PeerHandler
from kvplan.engine.links.peer_link import PeerLink
from kvplan.engine.links.rank_table import locate_members
from kvplan.engine.links.rendezvous import RegisterMemStatus, Rendezvous
from kvplan.engine.links.rendezvous_address import exposed_point
from kvplan.engine.links.results import LinkResults
from kvplan.engine.links.telling import tell_later, tell_surely
from kvplan.engine.links.transitions import Transitions
from kvplan.engine.links.unlinking import Unlinker
from kvplan.engine.options import Options
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import LlmRole
from kvplan.validation import check_type, check_width

if TYPE_CHECKING:
    from kvplan.control.messages import Hello
    from kvplan.engine.links.state import LinkStatus
    from kvplan.engine.registry import CacheRegistry
    from kvplan.transport.protocol import Transport

_T = TypeVar("_T")
_INT32_MAX = 2**31 - 1
_NEWS_S = 0.01  # each time costs as much as there are caches; who is in need of news asks
_WORKERS = 3  # a link may wait for: one handshake of each end, one renewal
_CLOSING_S = 0.5  # for telling all peers; some may be stopped


class Links:
    """The links of one engine; may be used from several threads.

    In a forked child every call raises LLMException (LLM_FAILED), and `close` does nothing: all of
    it is the parent's.

    Attributes:
        peers: the link with each cluster, in whatever state; `get` says why there is none.

    Args:
        cluster_id: of this engine.
        role: of this engine, when asked.
        options: limits and deadlines.
        registry: the caches that are offered.
        transports: in order of preference.
        missing: why other transports are not there, by name.

    Raises:
        LLMException: the cluster key file cannot be used.
    """

    def __init__(
        self,
        cluster_id: int,
        role: Callable[[], LlmRole],
        options: Options,
        registry: CacheRegistry,
        transports: Sequence[Transport],
        missing: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        key_file = options.cluster_key_file
        self._pid = os.getpid()
        workers = _WORKERS * options.max_links + MAX_WORKERS
        self._control = ControlLoop(f"kvplan-control-{cluster_id}", workers)
        self._end = LocalEnd(
            cluster_id=cluster_id,
            instance=secrets.token_bytes(16),
            role=role,
            options=options,
            registry=registry,
            transports=tuple(transports),
            missing=missing,
            control=self._control,
            keys=Keys(None if key_file is None else ClusterKey.load(key_file), user_key),
        )
        self._steps = Transitions(self._end)
        self._caller = Caller(self._end, self._steps)
        self._answerer = Answerer(self._end, self._steps, self._linked)
        self._unlinker = Unlinker(self._end, self._steps)
        make_handler = partial(PeerHandler, self._end, self._steps, self._answerer, self._unlinker)
        self._handler = make_handler(_admit_by_address)
        self._listener = Listener(self._end, self._steps, self._handler)
        self._rendezvous = Rendezvous(
            self._end, self._steps, self._caller, self._unlinker, make_handler
        )
        self._is_news_due = False
        self._closed = False
        self.peers: Mapping[int, PeerLink] = self._steps.links

    def start(self) -> None:
        """Start the control thread; links can be made from here on."""
        self._control.start()

    @property
    def endpoint(self) -> Endpoint | None:
        """Where peers link with this engine, with the real port; None: nowhere."""
        return self._listener.endpoint

    def listen(self, endpoint: Endpoint) -> None:
        """Let peers link with this engine at `endpoint`, and nowhere else.

        Raises:
            LLMException: LLM_FAILED: the address cannot be had; nothing has changed then.
        """
        self._run(self._listener.listen(endpoint))

    def stop_listening(self) -> None:
        """Let nobody link from here on; links that peers have begun are ended."""
        self._run(self._listener.stop())

    def close(self) -> None:
        """End every link and tell the peers; takes two seconds at most, and works a second time."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.peers = MappingProxyType({})
        self._control.stop(self._close)

    def link(self, clusters: Sequence[ClusterInfo], timeout_ms: int) -> LinkResults:
        """Link with each cluster, all at once.

        Raises:
            TypeError, ValueError: an argument of another type or width.
            LLMException: LLM_PARAM_INVALID: no cluster, this engine's own, an address that cannot
                be, or timeout_ms < 1. What becomes of a cluster is in its result.
        """
        check_clusters(clusters, ClusterInfo)
        calls = [(it.remote_cluster_id, it.endpoint()) for it in clusters]
        timeout_s = _seconds(timeout_ms)
        for cluster_id, _ in calls:
            if cluster_id == self._end.cluster_id:
                raise invalid(f"remote_cluster_id={cluster_id} is this engine's own")
        return self._run(
            LinkResults.of(
                (cluster_id, self._caller.link(cluster_id, endpoint, self._handler, timeout_s))
                for cluster_id, endpoint in calls
            )
        )

    def unlink(
        self, clusters: Sequence[ClusterInfo | int], timeout_ms: int, *, force: bool = False
    ) -> LinkResults:
        """End the link with each cluster, at both ends, all at once.

        Args:
            clusters: as linked, or only their ids.
            timeout_ms: milliseconds that transfers in flight and the peers may take.
            force: end it here at once, whatever is in flight and whether or not the peer answers.

        Raises:
            TypeError, ValueError: an argument of another type or width.
            LLMException: LLM_PARAM_INVALID: no cluster, or timeout_ms < 1. What becomes of a
                cluster is in its result.
        """
        check_clusters(clusters, ClusterInfo | int)
        ids = [it.remote_cluster_id if isinstance(it, ClusterInfo) else it for it in clusters]
        timeout_s = _seconds(timeout_ms)
        check_type("force", force, bool)
        return self._run(
            LinkResults.of((it, self._unlinker.unlink(it, timeout_s, force=force)) for it in ids)
        )

    def comm_link(
        self, comm_name: str, cluster_rank_info: Mapping[int, int], rank_table: str = ""
    ) -> int:
        """Begin to link with all members of a communicator, which do the same; returns its id.

        Warns if strangers could link.

        Args:
            comm_name: 1 to 127 characters, the same at all members.
            cluster_rank_info: the rank of each member by cluster id, 2 to 4, with this engine's
                own; ranks must not decrease.
            rank_table: JSON that says where each rank runs; empty: on this host.

        Raises:
            TypeError, ValueError: an argument of another type or width.
            LLMException: LLM_PARAM_INVALID. What becomes of the links is `comm_status`.
        """
        end = self._end
        members = locate_members(end.cluster_id, cluster_rank_info, rank_table)
        exposed = exposed_point(end.cluster_id, members, end.options)
        if exposed is not None and end.keys.cluster is None:
            warn_of_strangers(exposed, stacklevel=3)  # who calls the engine
        return self._run(self._rendezvous.link(comm_name, members))

    def comm_unlink(self, comm_id: int) -> None:
        """End the links of a communicator, at all members, or stop making them.

        Raises:
            TypeError, ValueError: comm_id is no uint64.
            LLMException: LLM_NOT_YET_LINK: there is none of this id; LLM_LINK_BUSY: transfers are
                in flight, and it stays.
        """
        self._run(self._rendezvous.unlink(comm_id))

    def comm_status(self, comm_id: int) -> RegisterMemStatus:
        """How far a communicator is; FAILED also where a link has broken since.

        Raises:
            TypeError, ValueError: comm_id is no uint64.
            LLMException: LLM_NOT_YET_LINK: there is none of this id.
        """
        self._check_usable()
        return self._rendezvous.status(comm_id)

    def live(self) -> int:
        """How many links stand, are being made, or are being ended."""
        return len(self._steps.live())

    def get(self, cluster_id: int) -> PeerLink:
        """The link with a cluster, in whatever state.

        Raises:
            LLMException: LLM_NOT_YET_LINK: there is none, and why the last try failed.
        """
        self._check_usable()
        link = self._steps.links.get(cluster_id)
        if link is None:
            raise self._steps.not_linked(cluster_id)
        return link

    def status(self) -> list[LinkStatus]:
        """All links as they are now, by cluster id; a broken one stays until linked anew."""
        steps = self._steps
        links = {**steps.answering, **steps.calling, **steps.links}
        return [links[cluster_id].status() for cluster_id in sorted(links)]

    def tables_changed(self) -> None:
        """Tell all peers soon of what has changed in the registry; many changes at once as one."""
        if not self._is_news_due and not self._closed and os.getpid() == self._pid:
            self._is_news_due = True
            self._control.call_soon(self._tell_all_soon)

    def tell_all(self, timeout_s: float) -> None:
        """Tell all peers what has changed in the registry; on return they know.

        Args:
            timeout_s: seconds that a peer may take; one that takes longer hears of it later.
        """
        self._run(self._tell_all_surely(timeout_s))

    def _run(self, task: Coroutine[Any, Any, _T]) -> _T:
        """Run `task` in the control thread and wait for it."""
        try:
            self._check_usable()
        except LLMException:
            task.close()
            raise
        return self._control.run(task)

    def _check_usable(self) -> None:
        if (pid := os.getpid()) != self._pid:
            raise LLMException(
                f"the engine belongs to process {self._pid}; this is its forked child {pid}"
            )
        if self._closed:
            raise LLMException(
                "the engine is finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
            )

    def _tell_all_soon(self) -> None:
        asyncio.get_running_loop().call_later(_NEWS_S, self._tell_all)

    def _tell_all(self) -> None:
        self._is_news_due = False
        for link in self._steps.links.values():
            if link.is_live:
                self._steps.spawn(tell_later(link, self._end.registry))

    async def _tell_all_surely(self, timeout_s: float) -> None:
        links = [it for it in self._steps.links.values() if it.is_live]
        await asyncio.gather(*(tell_surely(it, self._end.registry, timeout_s) for it in links))

    def _linked(self, link: PeerLink) -> None:
        self._rendezvous.linked(link)

    async def _close(self) -> None:
        reason = f"cluster {self._end.cluster_id} is finalized"
        self._steps.refuse_new(reason)
        for cluster_id in self._steps.live():
            self._unlinker.drop(cluster_id, reason)
        await self._listener.stop()
        self._rendezvous.close()
        await self._steps.finish(_CLOSING_S)


def _admit_by_address(hello: Hello) -> None:
    if hello.comm:
        raise link_failed(f"communicator {hello.comm!r} is not linked by address")


def _seconds(timeout_ms: int) -> float:
    if check_width("timeout_ms", timeout_ms, -(2**31), _INT32_MAX) < 1:
        raise invalid(f"timeout_ms={timeout_ms} is out of range [1, {_INT32_MAX}]")
    return timeout_ms / 1000
