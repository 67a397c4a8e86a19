"""This engine, as its links see it: who it is, what it allows, and the caches that it offers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvplan.control.auth import Keys
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Offer
from kvplan.links.values import link_failed
from kvplan.logs import Log
from kvplan.transport.choice import WHERE_MISSING
from kvplan.types import BlocksCacheKey, Cache, CacheKey, LlmRole

if TYPE_CHECKING:
    from kvplan.execution.memory import TensorMemory
    from kvplan.links.notifying import Inbox
    from kvplan.transport.protocol import Transport

_LOG = Log("kvplan")
_T = TypeVar("_T")


class LinkOptions(Protocol):
    """The options of an engine that its links read; `kvplan.Options` documents them."""

    @property
    def sync_kv_cache_wait_time(self) -> int:
        """Milliseconds that a request to a peer may take."""

    @property
    def link_total_time(self) -> int:
        """Seconds within which all members of a communicator must have linked; 0: 60."""

    @property
    def link_retry_count(self) -> int:
        """Times that a peer given by its address is called, within the time of the call."""

    @property
    def tcp_source(self) -> str:
        """IP address of this host to connect from; empty: the system's choice."""

    @property
    def cluster_key_file(self) -> str | None:
        """Path of the key that all engines of a cluster share; None: there is none."""

    @property
    def heartbeat_interval_ms(self) -> int:
        """Milliseconds without a message after which a link sends one."""

    @property
    def heartbeat_timeout_ms(self) -> int:
        """Milliseconds without a message from a peer after which its link is broken."""

    @property
    def max_links(self) -> int:
        """Peers that may be linked at once."""

    @property
    def comm_port(self) -> int:
        """Of communicators across hosts: the port of device 0 of each."""

    @property
    def comm_dir(self) -> str | None:
        """Of communicators on one host: directory of the sockets; None: the user's own."""


class OfferedCache(Protocol):
    """A cache of this engine that peers may reach."""

    @property
    def cache(self) -> Cache:
        """Its id, description and addresses."""

    @property
    def memory(self) -> TensorMemory:
        """Its tensors."""

    @property
    def paged(self) -> bool | None:
        """Whether it is addressed by blocks."""

    @property
    def blocks_key(self) -> BlocksCacheKey | None:
        """The key of a paged cache, if it has one."""

    @property
    def metadata(self) -> Mapping[str, bytes]:
        """What a peer needs to reach it, by the name of the transport; empty: not by that one."""


class GrantedClaim(Protocol):
    """The right to pull by a key, as a peer is granted it."""

    @property
    def claim_id(self) -> int:
        """Of this engine's own count."""

    @property
    def entry(self) -> OfferedCache:
        """The cache that has the key."""

    @property
    def batch_index(self) -> int:
        """The slot that has the key."""


class OfferedCaches(Protocol):
    """The caches of this engine that peers may reach; for any thread."""

    def survey(self, look: Callable[[Mapping[int, OfferedCache]], _T]) -> _T:
        """Return what `look` makes of all that are offered, by id; it must keep no cache."""

    def find(self, key: CacheKey) -> tuple[OfferedCache, int]:
        """The cache and batch index that peers reach by `key`.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: there is none; LLM_PARAM_INVALID: a padding key.
        """

    def claim(self, key: CacheKey, holder: Hashable) -> GrantedClaim:
        """Let `holder` pull by `key`: the cache stays until the claim is released.

        Raises:
            LLMException: as `find`; LLM_REPEAT_REQUEST: another holder has claimed it;
                LLM_LINK_BUSY: this one has too many claims.
        """

    def release(
        self,
        claim_id: int,
        tensors: range | None,
        *,
        holder: Hashable,
        run: Callable[[Callable[[], None]], object],
    ) -> None:
        """End a claim of `holder`; one that is unknown is fine.

        Args:
            claim_id: of the claim.
            tensors: that were pulled, every byte confirmed; None: the pull failed.
            holder: whose claim it must be.
            run: called with what ends the caches that go with it, if there are any; that may wait
                for peers that write to them.
        """

    def release_holder(
        self, holder: Hashable, *, run: Callable[[Callable[[], None]], object]
    ) -> None:
        """End all claims of `holder`, who is gone; no pull of it counts. `run`: see `release`."""


@dataclass(frozen=True, eq=False)
class LocalEngine:
    """This engine, as its links need it.

    Attributes:
        cluster_id: of this engine.
        instance: 16 random bytes, which no other engine has, nor this one after a restart.
        role: of this engine, now.
        options: limits and deadlines.
        registry: the caches that are offered.
        inbox: takes the notifications of linked peers; None: they are refused.
        transports: in order of preference.
        missing: why other transports are not available, by name.
        control: the loop that all links run on.
        keys: what peers are authenticated with.
    """

    cluster_id: int
    instance: bytes
    role: Callable[[], LlmRole]
    options: LinkOptions
    registry: OfferedCaches
    inbox: Inbox | None
    transports: Sequence[Transport]
    missing: Mapping[str, str]
    control: ControlLoop
    keys: Keys

    def offers(self) -> tuple[Offer, ...]:
        """The transports by which a peer could reach this process."""
        return tuple(Offer(it.name, it.metadata(())) for it in self.transports)

    def choose(self, peer: int, offers: Sequence[Offer]) -> tuple[Transport, bytes]:
        """The transport to use with a peer that makes these offers, and the peer's metadata.

        The first that reaches all memory of the peer, as far as is known, else the first at all.
        """
        offered = {it.transport: it.metadata for it in offers}
        refusals = []
        partial: tuple[Transport, bytes] | None = None
        for transport in self.transports:
            name = transport.name
            if (metadata := offered.get(name)) is None:
                remedy = f" ({WHERE_MISSING[name]})" if name in WHERE_MISSING else ""
                refusals.append(f"{name}: cluster {peer} does not offer it{remedy}")
            elif (refusal := transport.refusal(metadata)) is not None:
                refusals.append(f"{name}: {refusal}")
            elif (lack := transport.shortfall(metadata)) is None:
                return transport, metadata
            elif partial is None:
                _LOG.info("peer=%d transport=%s is the last to be chosen: %s", peer, name, lack)
                partial = transport, metadata
        if partial is not None:
            return partial
        for name in offered.keys() & self.missing.keys():
            why = self.missing[name]
            refusals.append(f"{name}: cluster {self.cluster_id} does not have it: {why}")
        raise link_failed(
            f"no transport between cluster {self.cluster_id} and cluster {peer}: "
            f"{'; '.join(refusals)}"
        )

    def transport(self, name: str) -> Transport:
        """The transport that a peer has chosen."""
        for transport in self.transports:
            if transport.name == name:
                return transport
        raise link_failed(f"the peer chose {name!r}, which was not offered")
