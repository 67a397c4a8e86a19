"""The choice of one of several: links of a cluster, handshakes, tensors, memories; and limits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest

from kvplan import BlockLease, CacheIndex, LLMException, LLMStatusCode
from kvplan.control.auth import Keys
from kvplan.control.channel import Channel
from kvplan.control.connecting import Server
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Body, Chosen, Confirm, Hello, Offer, Welcome
from kvplan.links import ClusterInfo, LinkState
from kvplan.links.handshake import HandshakeAcceptor, _Accepted
from kvplan.links.local_engine import LocalEngine
from kvplan.links.peer_link import PeerLink
from kvplan.links.peer_table import PeerCache
from kvplan.links.transitions import Transitions
from kvplan.types import LlmRole
from tests.links.end import DESC, End
from tests.support.refusals import refused

MakeEnd = Callable[..., End]
INSTANCE, OTHER = bytes(16), bytes(15) + b"x"


@pytest.fixture
def pair(make_end: MakeEnd) -> tuple[End, End]:
    """Two linked ends, each with room for one link."""
    one, two = make_end(1, max_links=1), make_end(2, max_links=1)
    one.link(two.cluster)
    return one, two


@pytest.mark.parametrize("kinds", [*product((False, True), repeat=3)])
def test_the_link_that_counts_is_shown(end: End, kinds: tuple[bool, bool, bool]) -> None:
    """A link that is or was up precedes one that this end begins, and then one of the peer."""
    transitions = end.links._transitions
    of_kind = (transitions.links, transitions.initiating, transitions.accepting)
    names = ("links", "initiating", "accepting")
    for has, links, name in zip(kinds, of_kind, names, strict=True):
        if has:
            links[5] = cast(Any, SimpleNamespace(status=lambda name=name: name))
    shown = end.links.status()
    for links in of_kind:
        links.pop(5, None)
    assert shown == [name for has, name in zip(kinds, names, strict=True) if has][:1]


@pytest.mark.parametrize(
    "names", [(), ("initiating",), ("accepting",), ("initiating", "accepting")]
)
def test_a_link_that_either_end_is_making_is_not_unlinked(end: End, names: tuple[str, ...]) -> None:
    transitions = end.links._transitions
    for name in names:
        getattr(transitions, name)[5] = cast(Any, object())
    (result,) = end.links.unlink([5], 1000)
    for name in names:
        del getattr(transitions, name)[5]
    assert result.status.name == ("LLM_PROCESSING_LINK" if names else "LLM_NOT_YET_LINK")


def test_a_link_that_is_up_may_be_made_again_at_the_limit(pair: tuple[End, End]) -> None:
    transitions = pair[0].links._transitions
    transitions.check_capacity(2)
    with refused("LLM_CLUSTER_NUM_EXCEED_LIMIT", "cluster 1 has 1 link; max_links=1"):
        transitions.check_capacity(3)


def test_calls_that_waited_for_an_idle_link_leave_nothing(pair: tuple[End, End]) -> None:
    one, _ = pair
    link = one.links.get(2)
    link.begin(link)
    for _ in range(2):
        assert one.links.unlink([2], 20).status is LLMStatusCode.LLM_LINK_BUSY
        assert one.links._unlinker._waiting == {}
        assert link.state is LinkState.LINKED
    link.end(link, 0, 0)
    one.links.unlink([2], 5000).raise_for_status()
    assert one.links._unlinker._waiting == {}


class Liar:
    """A server that answers as another cluster."""

    async def on_request(self, channel: Channel, body: Body) -> Body:
        return Welcome(9, INSTANCE, LlmRole.MIX, bytes(16), (), ())

    def on_notice(self, channel: Channel, body: Body) -> None: ...

    def on_lost(self, channel: Channel, reason: str) -> None: ...


def test_an_answer_in_the_name_of_another_cluster_makes_no_link(make_end: MakeEnd) -> None:
    end, loop = make_end(1, keyless=True), ControlLoop("test-liar")
    loop.start()
    try:
        at = Endpoint.parse("127.0.0.1:0")
        server = loop.run(Server.listen(loop, at, Liar(), Keys()))
        cluster = ClusterInfo(2, str(server.endpoint))
        end.check_link_fails(cluster, LLMStatusCode.LLM_LINK_FAILED, "cluster 9 answered")
        assert end.state(2) is None
    finally:
        loop.stop()


def acceptor(own_id: int, **links: Any) -> tuple[HandshakeAcceptor, list[Any]]:
    """Return an acceptor of cluster `own_id` that knows these links, and a list of ended ones."""
    failed: list[Any] = []
    known = {"accepting": {}, "initiating": {}, **links}
    transitions = SimpleNamespace(**known, failed=lambda link, error: failed.append(link))
    engine = SimpleNamespace(cluster_id=own_id, options=SimpleNamespace(max_links=4))
    made = HandshakeAcceptor(
        cast(LocalEngine, engine), cast(Transitions, transitions), lambda link: None
    )
    return made, failed


def hello(cluster_id: int, instance: bytes = INSTANCE) -> Hello:
    return Hello(cluster_id, 1, instance, LlmRole.MIX, "", {}, 1000)


@pytest.mark.parametrize(
    ("instance", "death", "ends"),
    [(INSTANCE, "", True), (OTHER, "", False), (OTHER, "it is dead", True)],
)
def test_an_earlier_handshake_ends_unless_its_process_lives(
    instance: bytes, death: str, ends: bool
) -> None:
    """A handshake ends if the same process or a dead one began it, but not that of a living one."""
    before = SimpleNamespace(instance=instance, death=lambda: death)
    made, failed = acceptor(1, accepting={5: before})
    made._end_unconfirmed(hello(6))
    assert failed == []
    if ends:
        made._end_unconfirmed(hello(5))
        assert failed == [before]
    else:
        with refused("LLM_PROCESSING_LINK", "another process of cluster 5 is linking"):
            made._end_unconfirmed(hello(5))
        assert failed == []


@pytest.mark.parametrize("state", [LinkState.LINKED, LinkState.UNLINKED])
@pytest.mark.parametrize("own_id", [1, 9])
def test_the_handshake_of_the_lower_id_continues(own_id: int, state: LinkState) -> None:
    async def meet() -> bool:
        """Return whether the peer's handshake of cluster 5 waits for this end's."""
        own = SimpleNamespace(settled=asyncio.Event(), state=state)
        made, _ = acceptor(own_id, initiating={5: own})
        waiting = asyncio.create_task(made._yield_to_own_handshake(hello(5), 30.0))
        for _ in range(3):
            await asyncio.sleep(0)
        waits = not waiting.done()
        own.settled.set()
        if waits and state is LinkState.LINKED:
            with refused("LLM_ALREADY_LINK", f"cluster {own_id} has just linked from its end"):
                await waiting
        else:
            await waiting
        return waits

    assert asyncio.run(meet()) is (own_id < 5)


def test_a_handshake_waits_for_the_other_as_long_as_its_own_end_does() -> None:
    async def meet() -> None:
        own = SimpleNamespace(settled=asyncio.Event(), state=LinkState.LINKING)
        made, _ = acceptor(1, initiating={5: own})
        waiting = asyncio.create_task(made._yield_to_own_handshake(hello(5), 0.05))
        await asyncio.wait((waiting,), timeout=30)
        assert waiting.done()
        with refused("LLM_LINK_FAILED", "the handshake of cluster 1 has not ended in time"):
            await waiting

    asyncio.run(meet())


def test_transports_are_chosen_once() -> None:
    link = PeerLink(5, "", "", cast(ControlLoop, None), 1000)
    begun: list[bytes] = []

    def connect(link: PeerLink, _: object, challenge: bytes, timeout_s: float) -> None:
        begun.append(challenge)
        link.connecting = cast(Any, object())

    made, failed = acceptor(1, accepting={5: link}, connect=connect)
    made._accepted[link] = _Accepted(INSTANCE, (), 1.0, None)
    for name in ("local", "tcp"):
        made.chosen(link, Chosen(INSTANCE, (name,), ()))
    assert (begun, link.transports, failed) == ([INSTANCE], ("local",), [])


def test_a_handshake_that_ends_while_it_connects_replaces_no_link() -> None:
    link = PeerLink(5, "", "", cast(ControlLoop, None), 1000)
    link.connecting = cast(Any, object())
    linked: list[object] = []

    async def connected(_: object) -> None:
        link.change_state(LinkState.UNLINKED, "unlinked by force")

    made, _ = acceptor(
        1,
        accepting={5: link},
        links={},
        connected=connected,
        check_capacity=id,
        linked=linked.append,
    )
    made._accepted[link] = _Accepted(INSTANCE, (), 1.0, None)
    channel = cast(Channel, SimpleNamespace(bound=link))
    with refused("LLM_LINK_FAILED", "unlinked by force"):
        asyncio.run(made.confirm(channel, Confirm(INSTANCE)))
    assert linked == []


@pytest.mark.parametrize("count", [0, 1])
def test_the_handshake_of_the_peer_is_waited_for_until_the_deadline(
    make_end: MakeEnd, count: int
) -> None:
    """The failure of an earlier attempt explains more than the wait."""
    end = make_end(1, listen="", link_retry_count=2)
    theirs = cast(Any, SimpleNamespace(settled=asyncio.Event()))
    accepting, links = end.links._transitions.accepting, end.links

    async def link(there: Endpoint, timeout_s: float) -> None:
        if not count:
            accepting[5] = theirs
        linking = asyncio.create_task(links._initiator.link(5, there, links._handler, timeout_s))
        await asyncio.sleep(0)  # until the attempt, if any, has begun
        accepting[5] = theirs
        try:
            await linking
        finally:
            del accepting[5]

    def failure(timeout_s: float) -> str:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # refuses connections
            there = Endpoint.parse(f"127.0.0.1:{closed.getsockname()[1]}")
            with pytest.raises(LLMException) as error:
                links._control.run(link(there, timeout_s))
        assert error.value.status_code is LLMStatusCode.LLM_LINK_FAILED
        return str(error.value)

    if count:  # on a stalled machine the first attempt takes longer
        assert any("connect: Connection refused" in failure(limit_s) for limit_s in (0.3, 3.0))
    else:
        assert failure(0.3).startswith("cluster 5: its own handshake has not ended within 300 ms")


class Located:
    """Memory of a peer."""


class Memories:
    """A transport link that records the requested memory."""

    way = ""

    def __init__(self, detects_freed: str = "before", unreached: bytes | None = None) -> None:
        self.detects_freed = detects_freed
        self.asked: list[tuple[int, bool, bool]] = []
        self._unreached = unreached  # the metadata of memory that this transport does not reach

    def unreached(self, metadata: bytes) -> str | None:
        return "too far" if metadata == self._unreached else None

    def memory(self, addresses: Any, *_: Any, writable: bool, metadata: Any, **more: Any) -> object:
        self.asked.append((len(addresses), writable, more.get("any_holder", False)))
        return Located()


def test_memories_that_differ_in_one_property_are_different(pair: tuple[End, End]) -> None:
    one, two = pair
    link = one.links.get(2)
    ids = [two.registry.allocate(DESC, paged=False).cache.cache_id for _ in range(3)]
    link.sync()
    a, b, c = [link.cache(CacheIndex(2, cache_id)) for cache_id in ids]
    memories, real = Memories(), link.transport_links
    link.transport_links = cast(Any, dict.fromkeys(real, memories))
    try:
        made = {}
        for caches, writable, any_holder in product(
            ((a, b), (b, a), (a, c), (a, b, c)), (False, True), (False, True)
        ):
            memory = link.joined_memory(caches, writable=writable, any_holder=any_holder)
            assert link.joined_memory(caches, writable=writable, any_holder=any_holder) is memory
            made[tuple(cache.cache_id for cache in caches), writable, any_holder] = memory
            assert memories.asked[-1] == (2 * len(caches), writable, any_holder)
        assert len({id(memory) for memory in made.values()}) == len(memories.asked) == 16
    finally:
        link.transport_links = real


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_first_transport_that_reaches_all_caches_is_used(
    pair: tuple[End, End], place: int
) -> None:
    one, two = pair
    link = one.links.get(2)
    known = link.cache(CacheIndex(2, two.registry.allocate(DESC, paged=False).cache.cache_id))
    near = [replace(known, offers=(Offer("a", b"near"),)) for _ in range(3)]
    mixed = [replace(known, offers=(Offer("a", b"near"), Offer("b", b"near"))) for _ in range(3)]
    mixed[place] = replace(known, offers=(Offer("a", b"far"), Offer("b", b"far")))
    one_way, other_way = Memories(unreached=b"far"), Memories()
    real = link.transport_links
    try:
        for ways in ({"a": one_way, "b": other_way}, {"a": one_way}):
            link.transport_links = cast(Any, ways)
            for caches in (near, mixed):
                link.joined_memory(caches, writable=True)
                link.forget()
    finally:
        link.transport_links = real
    # Without another way, the only one is taken: its error says what it does not reach.
    assert (len(one_way.asked), len(other_way.asked)) == (3, 1)


@pytest.mark.parametrize(
    ("kinds", "asks", "needs"),
    [
        ((), True, True),
        (("check",), False, False),
        (("before",), False, True),
        (("after",), True, True),
        (("check", "before"), False, True),
        (("check", "after"), True, True),
    ],
)
def test_the_peer_is_asked_if_only_it_knows_what_was_freed(
    pair: tuple[End, End], kinds: tuple[str, ...], asks: bool, needs: bool
) -> None:
    link = pair[0].links.get(2)
    real = link.transport_links
    link.transport_links = cast(Any, {kind: Memories(kind) for kind in kinds})
    try:
        assert (link.asks_before_writes, link.needs_peer) == (asks, needs)
        if asks or "before" in kinds:
            assert link._may_be_freed(cast(PeerCache, None))
            assert link._may_be_freed(cast(PeerCache, None), speculative=True) is asks
    finally:
        link.transport_links = real


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_cache_that_no_transport_reaches_is_named(pair: tuple[End, End], place: int) -> None:
    one, two = pair
    link = one.links.get(2)
    ids = [two.registry.allocate(DESC, paged=False).cache.cache_id for _ in range(3)]
    link.sync()
    caches = [link.cache(CacheIndex(2, cache_id)) for cache_id in ids]
    caches[place] = replace(caches[place], offers=())
    with refused("LLM_FEATURE_NOT_ENABLED", f"^cache {ids[place]} of cluster 2 is in .* memory"):
        link.joined_memory(caches, writable=True)


def test_only_memory_of_published_caches_is_kept(pair: tuple[End, End]) -> None:
    """A request may still have an object from before a change of the peer's table."""
    one, two = pair
    link = one.links.get(2)
    ids = [two.registry.allocate(DESC, paged=False).cache.cache_id for _ in range(2)]
    link.sync()
    a, b = [link.cache(CacheIndex(2, cache_id)) for cache_id in ids]
    earlier = copy(a)

    def is_kept(*caches: PeerCache) -> bool:
        made = link.joined_memory(caches, writable=True)
        return link.joined_memory(caches, writable=True) is made

    fakes, real = cast(Any, dict.fromkeys(link.transport_links, Memories())), link.transport_links
    link.transport_links = fakes
    try:
        assert is_kept(a)
        assert is_kept(a, b)
        assert not is_kept(earlier)
        assert not is_kept(earlier, b)
        assert not is_kept(b, earlier)
        assert is_kept(a, b)
    finally:
        link.transport_links = real
    one.links.unlink([2], 5000).raise_for_status()
    link.transport_links = fakes
    assert not is_kept(a)
    assert not is_kept(a, b)


def test_a_link_keeps_64_memories_of_several_caches(pair: tuple[End, End]) -> None:
    one, two = pair
    link = one.links.get(2)
    cache = link.cache(CacheIndex(2, two.registry.allocate(DESC, paged=False).cache.cache_id))
    link.transport_links, real = cast(Any, {"local": Memories()}), link.transport_links
    try:
        made: list[ref[Any]] = []
        most = 0
        for count in range(2, 102):
            made.append(ref(link.joined_memory([cache] * count, writable=True)))
            most = max(most, sum(memory() is not None for memory in made))
        assert most == 64
    finally:
        link.transport_links = real


def test_a_lease_of_an_earlier_process_is_refused(pair: tuple[End, End]) -> None:
    one, two = pair
    link = one.links.get(2)
    cache_id = two.registry.allocate(DESC, paged=True).cache.cache_id
    own = BlockLease(2, link.instance, cache_id, 1, (1,), True, "", ())
    old = BlockLease(2, OTHER, cache_id, 1, (1,), True, "", ())
    for writable in (False, True):
        assert link.leased(own, writable=writable).cache_id == cache_id
        with refused("LLM_KV_CACHE_NOT_EXIST", "cluster 2 was restarted since"):
            link.leased(old, writable=writable)


@pytest.mark.parametrize("skipped", [*product((0, 64, 192), repeat=2)])
def test_rows_at_addresses_fit_into_each_tensor(
    pair: tuple[End, End], skipped: tuple[int, int]
) -> None:
    """The tensor with the fewest bytes after its address decides."""
    one, two = pair
    link = one.links.get(2)
    addresses = two.registry.allocate(DESC, paged=True).cache.tensor_addrs
    link.sync()
    at = [address + bytes_ for address, bytes_ in zip(addresses, skipped, strict=True)]
    side, _ = link.tensors(at, 64, paged=True)
    assert side.count == min((256 - bytes_) // 64 for bytes_ in skipped)
