"""The cache tables that peers publish, and their correctness."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import msgspec
import numpy as np
import pytest

import kvplan
from kvplan import (
    BlockLease,
    BlocksCacheKey,
    CacheDesc,
    CacheIndex,
    CacheKey,
    DataType,
    LLMException,
    Rows,
    Transfer,
)
from kvplan.control import messages
from kvplan.control.messages import MAX_NBYTES, ShardEntry, Table, TableEntry, encode
from kvplan.links import peer_table
from kvplan.links.local_engine import CacheEntry
from kvplan.links.peer_link import PeerLink
from kvplan.links.peer_table import PeerCache, PeerTable, find_by_address
from kvplan.links.publisher import PublishedTable, Publisher
from kvplan.status import LLMStatusCode
from kvplan.transport.transport import Offered
from tests.control.conversation import DEADLINE_S
from tests.links.end import DESC, End
from tests.links.peer import Peer
from tests.support.refusals import refused

MakeEnd = Callable[..., End]
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.fixture
def pair(make_end: MakeEnd) -> tuple[End, End]:
    one, two = make_end(1), make_end(2)
    one.link(two.cluster)
    return one, two


def test_caches_from_before_and_after_linking(end: End, peer: Peer) -> None:
    before = peer.run("result = end.registry.allocate(DESC, paged=False).cache.cache_id")
    end.link(peer.cluster)
    after = peer.run(
        "e = end.registry.allocate(DESC, paged=True, keys=[kvplan.BlocksCacheKey(2, 9)])",
        "from kvplan.engine.memory import tensor_arrays",
        "[tensor.fill(7) for tensor in tensor_arrays(DESC, e.memory)]; result = e.cache.cache_id",
    )
    link = end.links.get(2)
    assert link.cache(CacheIndex(2, before)).paged is False
    found = link.cache(BlocksCacheKey(2, 9))
    assert (found.cache_id, found.paged, found.desc) == (after, True, DESC)
    mine = [np.zeros(DESC.shape, np.float32) for _ in range(2)]
    plan = kvplan.plan(Transfer(Rows(DESC, range(4)), Rows(DESC, range(4))), local="dst")
    kvplan.execute(plan, link.memory(found, writable=False), mine)
    assert all((array == 7).all() for array in mine)


def test_a_freed_cache_is_gone_for_its_peer(end: End, peer: Peer) -> None:
    cache_id = peer.run("result = end.registry.allocate(DESC, paged=False).cache.cache_id")
    end.link(peer.cluster)
    link = end.links.get(2)
    memory = link.memory(link.cache(CacheIndex(2, cache_id)), writable=True)
    memory.check()
    peer.run(f"end.registry.deallocate({cache_id})")
    with refused(NOT_EXIST, "has deregistered"):
        memory.check()  # even if the update has not arrived yet
    peer.run("end.registry.allocate(DESC, paged=False)")
    assert link.cache(CacheIndex(2, cache_id + 1))  # asks the peer, so all updates are here
    with refused(NOT_EXIST, r"no cache with cache_id=1; it offers \[2\]"):
        link.cache(CacheIndex(2, cache_id))


def test_a_freed_cache_is_gone_by_its_key_too(pair: tuple[End, End]) -> None:
    one, two = pair
    key, link = BlocksCacheKey(2, 5), one.links.get(2)
    freed = two.registry.allocate(DESC, paged=True, keys=[key])
    assert link.cache(key).cache_id == freed.cache.cache_id
    two.registry.deallocate(freed.cache.cache_id)
    with refused(NOT_EXIST, r"no cache with model_id=5; it offers \[\]"):
        link.cache(key)


@pytest.mark.parametrize("writable", [False, True])
def test_memory_of_a_freed_cache_is_not_kept(pair: tuple[End, End], writable: bool) -> None:
    one, two = pair
    two.registry.allocate(DESC, paged=False)
    link = one.links.get(2)
    memory = ref(link.memory(link.cache(CacheIndex(2, 1)), writable=writable))
    assert memory() is not None
    two.registry.deallocate(1)
    _sync(link)
    assert memory() is None


def test_the_error_for_an_unknown_cache_lists_the_offered_ones(pair: tuple[End, End]) -> None:
    one, two = pair
    two.registry.register(DESC, _tensors(), paged=False, remote_accessible=False)
    two.registry.allocate(DESC, paged=True, keys=[BlocksCacheKey(2, 5)])
    with pytest.raises(LLMException, match=r"no cache with cache_id=1; it offers \[2\]"):
        one.links.get(2).cache(CacheIndex(2, 1))
    with pytest.raises(LLMException, match=r"no cache with model_id=4; it offers \[5\]"):
        one.links.get(2).cache(BlocksCacheKey(2, 4))


def test_the_error_for_a_peer_without_caches_says_how_to_offer_one(
    pair: tuple[End, End],
) -> None:
    one, two = pair
    two.registry.register(
        DESC, _tensors(), paged=True, keys=[BlocksCacheKey(2, 5)], remote_accessible=False
    )
    none = r"it offers \[\]: peers see only caches with remote_accessible=True"
    for key in (BlocksCacheKey(2, 5), CacheIndex(2, 1)):
        with refused(NOT_EXIST, none):
            one.links.get(2).cache(key)


def test_read_only_caches_are_not_written(pair: tuple[End, End]) -> None:
    one, two = pair
    tensors = _tensors()
    two.registry.register(DESC, tensors, paged=False, writable=False)
    link = one.links.get(2)
    cache = link.cache(CacheIndex(2, 1))
    assert not cache.writable
    link.memory(cache, writable=False).check()
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "writable=False"):
        link.memory(cache, writable=True)


def test_many_changes_at_once(pair: tuple[End, End]) -> None:
    one, two = pair
    for _ in range(300):
        two.registry.allocate(DESC, paged=False)
    for cache_id in range(1, 300):
        two.registry.deallocate(cache_id)
    link = one.links.get(2)
    _sync(link)
    assert link.cache(CacheIndex(2, 300)).cache_id == 300
    with pytest.raises(LLMException, match=r"it offers \[300\]"):
        link.cache(CacheIndex(2, 17))


class TestKeys:
    """Slots that peers find and claim by the key of a request."""

    def test_a_key_is_found_without_a_claim(self, pair: tuple[End, End]) -> None:
        one, two = pair
        two.registry.allocate(DESC, paged=False, keys=[CacheKey(2, 70), CacheKey(2, 71)])
        cache, batch_index = one.links.get(2).find(CacheKey(2, 71))
        assert (cache.cache_id, batch_index) == (1, 1)
        with refused(NOT_EXIST, "req_id=72"):
            one.links.get(2).find(CacheKey(2, 72))

    def test_a_cache_that_a_reply_names_is_that_of_the_table_if_it_is_equal(
        self, pair: tuple[End, End]
    ) -> None:
        """Otherwise its memory would be located again for each request."""
        one, two = pair
        link, key = one.links.get(2), CacheKey(2, 70)
        two.registry.allocate(DESC, paged=False, keys=[key])
        known = link.cache(CacheIndex(2, 1))
        assert link.find(key)[0] is known
        claim = link.claim(key)
        assert claim.cache is known
        claim.release(None)
        link._table.by_id[1] = replace(known, name="before")  # its change has not arrived yet
        assert link.find(key)[0] == known

    def test_a_claim_belongs_to_one_peer_until_its_release(
        self, make_end: MakeEnd, pair: tuple[End, End]
    ) -> None:
        one, two = pair
        three = make_end(3)
        three.link(two.cluster)
        key = CacheKey(2, 70)
        two.registry.allocate(DESC, paged=False, keys=[key])
        claim = one.links.get(2).claim(key)
        stranger = three.links.get(2)
        for claim_id in range(10):  # of another peer's claim, too
            stranger._request(messages.Release(claim_id, None), messages.Released)
        with refused(LLMStatusCode.LLM_REPEAT_REQUEST):
            stranger.claim(key)
        claim.release(None)
        three.links.get(2).claim(key).release(range(2))
        with refused(NOT_EXIST):
            one.links.get(2).claim(key)

    def test_claims_end_with_the_link(self, end: End, make_peer: Callable[..., Peer]) -> None:
        key = CacheKey(1, 70)
        end.registry.allocate(DESC, paged=False, keys=[key])
        peer, other = make_peer(2), make_peer(3)
        for linked in (peer, other):
            linked.link(end.cluster)
        peer.run(f"claim = end.links.get(1).claim(kvplan.{key!r})")
        peer.kill()
        end.wait_for(2, "BROKEN")
        other.run(f"claim = end.links.get(1).claim(kvplan.{key!r})")

    def test_a_freed_slot_is_still_reached_by_its_key(self, pair: tuple[End, End]) -> None:
        one, two = pair
        key = CacheKey(2, 70)
        entry = two.registry.allocate(DESC, paged=False, keys=[key])
        two.registry.deallocate(entry.cache.cache_id)
        link = one.links.get(2)
        _sync(link)
        with pytest.raises(LLMException, match="offers no cache"):
            link.cache(CacheIndex(2, entry.cache.cache_id))
        claim = link.claim(key)
        memory = link.memory(claim.cache, writable=False)
        memory.check()
        claim.release(range(2))
        with pytest.raises(LLMException, match="has deregistered"):
            memory.check()


def test_a_writable_cache_is_preferred_at_an_address() -> None:
    large, small = (CacheDesc(1, (rows, 16), DataType.DT_INT8) for rows in (8, 4))
    read_only = PeerCache(2, 1, large, False, (1000,), b"", writable=False)
    writable = PeerCache(2, 2, small, False, (1000,), b"", writable=True)
    for caches in ([read_only, writable], [writable, read_only]):
        found = find_by_address(caches, [1010])
        assert found is not None
        assert (found.cache, found.left) == (writable, [54])


class _FullChannel:
    """A stand-in for a channel whose peer does not read until there is room."""

    def __init__(self) -> None:
        self.asked, self.room = asyncio.Event(), asyncio.Event()
        self.sent: list[Table] = []

    async def notify(self, table: Table) -> None:
        self.asked.set()
        await self.room.wait()
        self.sent.append(table)


class TestPublisher:
    """Changes that reach a peer which reads slowly."""

    def test_a_change_while_one_is_sent_follows(self, make_end: MakeEnd) -> None:
        end = make_end(1, listen="")

        async def published() -> list[list[int]]:
            channel: Any = _FullChannel()
            publisher = Publisher(2, channel, end.registry, ("local",))
            end.registry.allocate(DESC, paged=False)
            first = asyncio.create_task(publisher.publish_pending())
            await channel.asked.wait()
            end.registry.allocate(DESC, paged=False)
            second = asyncio.create_task(publisher.publish_pending())
            await asyncio.sleep(0)  # until publishing has begun
            channel.room.set()
            await asyncio.gather(first, second)
            return [[entry.cache_id for entry in table.entries] for table in channel.sent]

        assert asyncio.run(published()) == [[1], [2]]

    def test_each_change_is_sent_after_any_number_of_others(self, make_end: MakeEnd) -> None:
        end = make_end(1, listen="")

        async def published() -> list[list[int]]:
            channel: Any = _FullChannel()
            channel.room.set()
            publisher = Publisher(2, channel, end.registry, ("local",))
            for _ in range(3):
                end.registry.allocate(DESC, paged=False)
                await publisher.publish_pending()
            return [[entry.cache_id for entry in table.entries] for table in channel.sent]

        assert asyncio.run(published()) == [[1], [2], [3]]

    def test_tables_that_were_not_sent_in_time_are_sent_later(self, make_end: MakeEnd) -> None:
        end = make_end(1, listen="")

        async def published() -> list[list[int]]:
            channel: Any = _FullChannel()
            publisher = Publisher(2, channel, end.registry, ("local",))
            for _ in range(200):
                end.registry.allocate(DESC, paged=False)
                await publisher.publish_and_confirm(0.0)
            channel.room.set()
            await publisher.publish()
            return [[entry.cache_id for entry in table.entries] for table in channel.sent]

        assert asyncio.run(published()) == [[number] for number in range(1, 201)]


class TestMessages:
    """Tables as messages."""

    def test_each_fits_into_a_frame_and_all_arrive(self) -> None:
        desc = CacheDesc(240, (1,), DataType.DT_INT8)
        entries = {i: _entry(i, desc, b"m" * 30_000) for i in range(1, 101)}
        published, known = PublishedTable(("local",)), PeerTable(1)
        tables = list(published.pending_updates(entries, {}))
        for table in tables:
            assert len(encode(table)) <= MAX_NBYTES
            known.apply(table)
        assert len(tables) > 1
        assert (sorted(known.by_id), known.version) == (list(range(1, 101)), published.version)
        assert list(published.pending_updates(entries, {})) == []
        replaced = {**entries, 5: _entry(5, desc, b"new")}
        del replaced[6]
        (table,) = published.pending_updates(replaced, {})
        assert sorted(known.apply(table)) == [5, 5, 6]
        assert 6 not in sorted(known.by_id)
        renewed = {i: _entry(i, desc, b"n" * 30_000) for i in range(1, 101)}
        tables = published.pending_updates(renewed, {})
        assert len(tables) > 1
        for table in tables:
            known.apply(table)
        assert sorted(known.by_id) == list(range(1, 101))

    def test_the_largest_that_can_be_made_fits_too(self, pair: tuple[End, End]) -> None:
        one, two = pair
        desc = CacheDesc(
            58_000,
            (1,),
            DataType.DT_INT8,
            kv_tensor_format="opaque " + "\N{ROMAN NUMERAL ONE}" * 249,
        )
        two.registry.allocate(desc, paged=True)
        assert one.links.get(2).cache(CacheIndex(2, 1)).desc == desc

    def test_a_peer_cannot_take_memory_without_limit(self) -> None:
        desc = CacheDesc(2, (1,), DataType.DT_INT8)
        known, metadata = PeerTable(1), b"m" * (MAX_NBYTES // 2)
        entry = PublishedTable(("local",)).describe(_entry(1, desc, metadata))
        most = peer_table.MAX_NBYTES // len(metadata)
        for i in range(1, most):
            known.apply(Table(i, i == 1, (msgspec.structs.replace(entry, cache_id=i),), ()))
        more = [msgspec.structs.replace(entry, cache_id=most + i) for i in range(2)]
        with pytest.raises(LLMException, match="bytes; at most"):
            known.apply(Table(most, False, tuple(more), ()))
        known.apply(Table(1, True, (entry,), ()))
        assert sorted(known.by_id) == [1]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"addresses": (1,)}, "cache 1 of the peer's table has 1 addresses for 2 tensors"),
            ({"shape": (2**62,)}, "cache 1 of the peer's table: "),
            ({"batch_dim_index": 3}, "cache 1 of the peer's table: batch_dim_index=3"),
            ({"data_type": DataType.DT_STRING}, "cache 1 of the peer's table: data_type"),
            ({"shard": ShardEntry((1, 1, 4), None)}, "layers=range.1, 1. must be one or more of"),
            ({"shard": ShardEntry((3, 1, 4), None)}, "layers=range.3, 1. must be one or more of"),
            ({"shard": ShardEntry((0, 5, 4), None)}, "must be one or more of \\[0, 4\\)"),
            ({"shard": ShardEntry((0, 5, 8), None, (3, 1))}, "strictly ascending"),
            ({"shard": ShardEntry((0, 0, 0), None)}, "num_layers=0 is out of range"),
            ({"shard": ShardEntry((0, 2**32 - 1, 2**32 - 1), None)}, "which do not divide"),
            ({"shard": ShardEntry(None, (0, 1, 8))}, "names no axis head"),
            ({"shard": ShardEntry(None, None, (), (3, 3))}, "tokens=range.3, 3. must be one or"),
            ({"shard": ShardEntry(None, None, (), (2, 2, 1))}, "rank=2 is out of range"),
            ({"shard": ShardEntry(None, None, (), (0, 2, 1))}, "names no axis token"),
            ({"kv_tensor_format": "block block"}, "names an axis twice"),
            ({"kv_tensor_format": "block token head"}, "names 3 axes; the shape has"),
        ],
    )
    def test_impossible_descriptions_are_refused(
        self, change: dict[str, object], message: str
    ) -> None:
        fields = dict.fromkeys(TableEntry.__struct_fields__)
        entry = PublishedTable(("local",)).describe(_entry(1, DESC, b""))
        fields = {name: getattr(entry, name) for name in fields} | change
        with pytest.raises(LLMException, match=message):
            PeerCache.of(1, TableEntry(**fields))


def test_caches_that_only_replies_name_are_not_remembered(pair: tuple[End, End]) -> None:
    """A peer may name a new cache in each reply, besides those that it has published."""
    link = pair[0].links.get(2)
    for cache_id in range(1000, 1020):
        entry = PublishedTable(("local",)).describe(_entry(cache_id, DESC, b""))
        link.side(PeerCache.of(2, entry))
    assert len(link._sides) == 0


def _entry(cache_id: int, desc: CacheDesc, metadata: bytes) -> CacheEntry:
    cache = kvplan.Cache(desc, cache_id, tuple(range(1, desc.num_tensors + 1)))
    memory = kvplan.HostMemory.from_arrays([np.zeros(1, np.uint8)])
    offered = Offered({"local": metadata}, ())
    return CacheEntry(cache, False, memory, None, True, False, offered, 0.0)


def _tensors() -> list[np.ndarray]:
    return [np.zeros(DESC.shape, np.float32) for _ in range(DESC.num_tensors)]


def _sync(link: PeerLink) -> None:
    """Request an unknown cache: because requests are ordered, all updates are here on return."""
    with pytest.raises(LLMException):
        link.cache(CacheIndex(2, 10**6))


class TestMovedLeases:
    """Leases whose owner has moved their blocks, in the published tables."""

    @staticmethod
    def lease(number: int, blocks: int = 2, moves: int = 1, cluster: int = 1) -> BlockLease:
        table = tuple(range(blocks))
        return BlockLease(cluster, bytes(16), 3, number, table, True, "x" * 64, (), None, moves)

    def test_each_message_fits_and_the_peer_has_the_latest(self) -> None:
        published, known = PublishedTable(("local",)), PeerTable(1)
        leases = {number: self.lease(number, 4000 if number < 90 else 2) for number in range(6000)}
        tables = published.pending_updates({}, leases)
        for table in tables:
            assert len(encode(table)) <= MAX_NBYTES
            known.apply(table)
        assert len(tables) > 2
        assert known.leases == leases
        assert published.pending_updates({}, leases) == []
        later = {number: leases[number] for number in range(5)} | {3: self.lease(3, 2, 2)}
        for table in published.pending_updates({}, later):
            known.apply(table)
        assert known.leases == later
        (first,) = PublishedTable(("local",)).pending_updates({}, {})
        known.apply(first)
        assert known.leases == {}
        assert known._nbytes == 0

    def test_a_peer_cannot_have_more_leases_than_a_transport(self) -> None:
        known, most = PeerTable(1), peer_table.MAX_MOVED_LEASES
        known.leases.update(dict.fromkeys(range(4, 1 + most), self.lease(1)))
        blobs = tuple(self.lease(number).to_bytes() for number in range(4))
        known.apply(Table(1, False, (), (), blobs[:3]))
        with refused(
            "LLM_PARAM_INVALID",
            f"has moved {most + 1} leases, .*at most",
        ):
            known.apply(Table(2, False, (), (), blobs[3:]))
        for wrong in (b"", b"lease", blobs[0][:-1]):
            with refused("LLM_PARAM_INVALID", "is not a lease"):
                known.apply(Table(3, False, (), (), (wrong,)))

    def test_only_a_later_value_of_the_same_lease_replaces_it(self) -> None:
        link = PeerLink(1, "", "", None, 0)  # type: ignore[arg-type]
        held = self.lease(5, moves=2)
        moved = self.lease(5, moves=3)
        link.apply(Table(1, True, (), (), (moved.to_bytes(),)))
        assert link.latest(held) == moved
        for other in (
            self.lease(5, moves=4),
            self.lease(6),
            self.lease(5, cluster=2),
            replace(held, instance=bytes(15) + b"1"),
            replace(held, cache_id=4),
        ):
            assert link.latest(other) is other


def test_each_change_reaches_the_peer_without_a_request(pair: tuple[End, End]) -> None:
    one, two = pair
    known = one.links.get(2)._table.by_id
    give_up = time.monotonic() + DEADLINE_S
    for cache_id in (1, 2, 3):
        two.registry.allocate(DESC, paged=False)
        while cache_id not in known:
            assert time.monotonic() < give_up
            time.sleep(0.001)
    two.registry.deallocate(2)
    while 2 in known:
        assert time.monotonic() < give_up
        time.sleep(0.001)
    assert sorted(known) == [1, 3]


def test_memory_is_located_once_for_each_cache_and_use(pair: tuple[End, End]) -> None:
    one, two = pair
    link = one.links.get(2)
    ids = [two.registry.allocate(DESC, paged=False).cache.cache_id for _ in range(2)]
    caches = [link.cache(CacheIndex(2, cache_id)) for cache_id in ids]
    uses = [(cache, writable) for cache in caches for writable in (False, True)]
    first, again = (
        [link.memory(cache, writable=writable) for cache, writable in uses] for _ in range(2)
    )
    assert [*map(id, first)] == [*map(id, again)]
    assert len({*map(id, first)}) == 4
    assert link.joined_memory(caches, writable=True) is link.joined_memory(caches, writable=True)
    assert link.joined_memory(caches, writable=True) is not link.joined_memory(
        caches, writable=False
    )
