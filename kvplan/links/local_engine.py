"""This engine, as its links see it: options, offered caches, and the choice of transports."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvplan.control.auth import Keys
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import MAX_TEXT, Offer, PassedOver, Trial
from kvplan.planning.side import Side, side
from kvplan.status import LLMException, link_failed, message_of
from kvplan.transport.choice import TRANSPORTS
from kvplan.types import BlocksCacheKey, Cache, CacheKey, LlmRole

if TYPE_CHECKING:
    from kvplan.control.notifying import Inbox
    from kvplan.device.memory import DeviceMemory
    from kvplan.execution.memory import HostMemory
    from kvplan.lease import BlockLease
    from kvplan.transport.transport import Offered, Transport

_T = TypeVar("_T")


class LinkOptions(Protocol):
    """The engine options that links read. `kvplan.Options` documents them."""

    @property
    def sync_kv_cache_wait_time(self) -> int:
        """Timeout of a request to a peer, in ms."""

    @property
    def link_total_time(self) -> int:
        """Deadline for linking all members of a communicator, in s; 0 means 60."""

    @property
    def link_retry_count(self) -> int:
        """Attempts to link a peer by its address, within the timeout of the call."""

    @property
    def tcp_source(self) -> str:
        """Local IP address of outgoing connections; empty: the system chooses."""

    @property
    def cluster_key_file(self) -> str | None:
        """Path of the cluster key, or None."""

    @property
    def heartbeat_interval_ms(self) -> int:
        """Idle time after which a link sends a heartbeat, in ms."""

    @property
    def heartbeat_timeout_ms(self) -> int:
        """Silence of a peer after which its link is broken, in ms."""

    @property
    def max_links(self) -> int:
        """Maximum number of linked peers."""

    @property
    def comm_port(self) -> int:
        """Port of device 0 on each host, for communicators across hosts."""

    @property
    def comm_dir(self) -> str | None:
        """Directory of the sockets of communicators on one host; None: the user's own."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class CacheEntry:
    """A cache of this engine.

    Attributes:
        cache: Id, description and addresses.
        paged: True if the rows are blocks; None for ad-hoc memory, which may be either.
        memory: The tensors.
        blocks_key: The key of a paged cache, if the cache has one.
        remote_accessible: True if peers may reach the cache.
        owned: True if the engine allocated the memory, False if the user registered it.
        offered: The registrations with the transports, and what peers need to reach the cache.
        created: Seconds since the epoch.
        name: The caller's name for the memory, shown in plans at both ends; may be empty.
        side: The cache as a side of a plan; None if `paged` is None.
    """

    cache: Cache
    paged: bool | None
    memory: HostMemory | DeviceMemory
    blocks_key: BlocksCacheKey | None
    remote_accessible: bool
    owned: bool
    offered: Offered = field(repr=False)
    created: float
    name: str = ""
    side: Side | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        known = None if self.paged is None else side("cache", self.cache, paged=self.paged)
        object.__setattr__(self, "side", known)


@dataclass(frozen=True, slots=True)
class Claim:
    """The right of a peer to pull by a key, until `OfferedCaches.release`."""

    claim_id: int
    entry: CacheEntry
    batch_index: int


class OfferedCaches(Protocol):
    """The caches of this engine that peers may reach. Any thread may use them."""

    @property
    def moved_leases(self) -> Mapping[int, BlockLease]:
        """Live leases, by id, whose blocks this engine has moved."""

    def survey(self, look: Callable[[Mapping[int, CacheEntry]], _T]) -> _T:
        """Return `look(offered caches by id)`. `look` must not keep entries, which hold memory."""

    def find(self, key: CacheKey) -> tuple[CacheEntry, int]:
        """Return the cache and the batch index that peers reach by `key`.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST if no cache has the key; LLM_PARAM_INVALID for a
                padding key.
        """

    def claim(self, key: CacheKey, holder: Hashable) -> Claim:
        """Let `holder` pull by `key`. The cache stays until the claim is released.

        Raises:
            LLMException: As `find`; LLM_REPEAT_REQUEST if another holder has claimed a key that
                pulls consume; LLM_LINK_BUSY if this holder has too many claims.
        """

    def release(
        self,
        claim_id: int,
        tensors: range | None,
        *,
        holder: Hashable,
        run: Callable[[Callable[[], None]], object],
    ) -> None:
        """End a claim of `holder`. An unknown claim is ignored.

        Args:
            claim_id: Id of the claim.
            tensors: The tensors whose bytes were all pulled and confirmed; None if the pull failed.
            holder: The holder of the claim.
            run: Called with the function that ends the caches of the claim, if any. That function
                may wait for peers that write to them.
        """

    def release_holder(
        self, holder: Hashable, *, run: Callable[[Callable[[], None]], object]
    ) -> None:
        """End all claims of a lost `holder` as failed pulls. `release` documents `run`."""


@dataclass(frozen=True, eq=False)
class LocalEngine:
    """This engine, as its links see it.

    Attributes:
        cluster_id: Cluster id of this engine.
        instance: 16 random bytes that identify this run of this engine.
        role: Returns the current role of this engine.
        options: Limits and deadlines.
        registry: The offered caches.
        inbox: Receiver of notifications from linked peers; None: they are refused.
        transports: Available transports in order of preference.
        missing: Reasons why other transports are not available, by name.
        control: The loop of all links.
        keys: The keys that authenticate peers.
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
        """Return the transports of this process, and the reasons why others are missing."""
        here = [Offer(transport.name, transport.metadata(())) for transport in self.transports]
        missing = [Offer(name, b"", why[:MAX_TEXT]) for name, why in self.missing.items()]
        return _in_order(_by_name((*missing, *here)))

    def trials(self, offers: Iterable[Offer]) -> tuple[Trial, ...]:
        """Try each of a peer's transports that this engine also has."""
        offered = {offer.transport: offer.metadata for offer in offers if offer.metadata}
        kinds = frozenset[str]().union(*(transport.reaches for transport in self.transports))
        return tuple(
            _tried(transport, offered[transport.name], kinds)
            for transport in self.transports
            if transport.name in offered
        )

    def choose(
        self, peer: int, offers: Iterable[Offer], ours: Iterable[Trial], theirs: Iterable[Trial]
    ) -> tuple[tuple[str, ...], tuple[PassedOver, ...]]:
        """Choose the transports of a link, and return them with the reasons against others.

        A link uses all transports that work from both ends, in order of preference, up to the first
        that reaches all memory.

        Args:
            peer: Cluster id of the peer.
            offers: The peer's transports.
            ours: The results of `trials` for these transports.
            theirs: The peer's results for the transports of this engine.
        """
        ends = (
            (self.cluster_id, _by_name(self.offers()), _by_name(ours)),
            (peer, _by_name(offers), _by_name(theirs)),
        )
        taken: list[str] = []
        passed_over: list[PassedOver] = []
        for name in _in_order({name: name for _, offered, _ in ends for name in offered}):
            missing = [_missing(cluster, offered.get(name)) for cluster, offered, _ in ends]
            tried = [(cluster, trials[name]) for cluster, _, trials in ends if name in trials]
            why = [*filter(None, missing)]
            why = why or [
                f"cluster {end}: {trial.refusal}" for end, trial in tried if trial.refusal
            ]
            if not why:
                taken.append(name)
                why = [
                    f"cluster {end}: {trial.shortfall}" for end, trial in tried if trial.shortfall
                ]
            if not why:
                break
            passed_over.append(PassedOver(name, "; ".join(why)[:MAX_TEXT], not any(missing)))
        if not taken:
            raise link_failed(
                f"no transport between cluster {self.cluster_id} and cluster {peer}: "
                f"{'; '.join(map(str, passed_over))}"
            )
        return tuple(taken), tuple(passed_over)

    def transport(self, name: str) -> Transport:
        """Return the transport with the name that one of the ends chose."""
        for transport in self.transports:
            if transport.name == name:
                return transport
        raise link_failed(f"the peer chose {name!r}, which was not offered")


_Named = TypeVar("_Named", Offer, Trial)


def _by_name(each: Iterable[_Named]) -> dict[str, _Named]:
    return {named.transport: named for named in each}


def _in_order(by_transport: Mapping[str, _T]) -> tuple[_T, ...]:
    """Return the values in order of preference, those of unknown transports last."""
    known = [name for name in TRANSPORTS if name in by_transport]
    return tuple(by_transport[name] for name in dict.fromkeys((*known, *by_transport)))


def _tried(transport: Transport, metadata: bytes, kinds: frozenset[str]) -> Trial:
    lacks = [f"it does not reach {kind} memory" for kind in sorted(kinds - transport.reaches)]
    if (refusal := transport.refusal(metadata)) is None:
        try:
            lacks += filter(None, [transport.shortfall(metadata)])
        except LLMException as error:  # the peer has exited since
            refusal = message_of(error)
    if refusal is not None:
        return Trial(transport.name, refusal[:MAX_TEXT])
    return Trial(transport.name, "", "; ".join(lacks)[:MAX_TEXT])


def _missing(cluster: int, offer: Offer | None) -> str:
    """Return why a cluster does not offer a transport; empty if it does."""
    if offer is not None and offer.metadata:
        return ""
    why = "" if offer is None else offer.missing
    return f"cluster {cluster} does not have it" + (f": {why}" if why else "")
