"""Published tables and the peer's copy of them, compared with what was offered."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvplan import (
    BlockLease,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    HostMemory,
    Interleaved,
    Placement,
    Shard,
)
from kvplan.control.messages import MAX_NBYTES, Offer, Table, encode
from kvplan.links import peer_table
from kvplan.links.local_engine import CacheEntry
from kvplan.links.peer_table import MAX_CACHES, PeerCache, PeerTable, find_by_address, no_cache_at
from kvplan.links.publisher import MAX_PUBLISHED_NBYTES, PublishedTable, published_nbytes
from kvplan.transport.transport import Offered
from tests.support.refusals import refused

MEMORY = HostMemory.from_arrays([np.zeros(1, np.uint8)])
DESCS = [
    CacheDesc(2, (4, 6), DataType.DT_INT8),
    CacheDesc(3, (4, 8), DataType.DT_FLOAT16, row_stride=32),
    CacheDesc(1, (4, 2, 3), DataType.DT_INT8, Placement.DEVICE, 0, 1),
    CacheDesc(4, (4, 8), DataType.DT_INT8, kv_tensor_format="opaque x"),
    CacheDesc(
        2,
        (4, 2, 2, 4),
        DataType.DT_INT8,
        kv_tensor_format="NHD",
        shard=Shard(range(2, 4), range(4, 6), 8, 8, Interleaved(1, 2, 4)),
    ),
    CacheDesc(
        2,
        (4, 2, 2, 4),
        DataType.DT_INT8,
        kv_tensor_format="NHD",
        shard=Shard([1, 6], None, 9, None, range(5, 9)),
    ),
    CacheDesc(
        1,
        (4, 2, 2, 4),
        DataType.DT_INT8,
        kv_tensor_format="NHD",
        shard=Shard(None, range(2), None, 4),
    ),
]
TRANSPORTS = ("local", "tcp")


class Owner:
    """The caches and moved leases of an engine, which change at random."""

    def __init__(self, random: Random, metadata_nbytes: int) -> None:
        self.random, self.metadata_nbytes = random, metadata_nbytes
        self.caches: dict[int, CacheEntry] = {}
        self.leases: dict[int, BlockLease] = {}
        self.newest: dict[int, CacheEntry] = {}  # the last cache with each key
        self.number = 0

    def change(self) -> None:
        for _ in range(self.random.choice((0, 1, 1, 5))):
            self.random.choice((self.offer, self.offer, self.free, self.replace))()
        for _ in range(self.random.choice((0, 1, 3))):
            self.random.choice((self.move, self.move, self.end))()

    def offer(self) -> None:
        self.number += 1
        self.put(self.number)

    def put(self, cache_id: int) -> None:
        random, desc = self.random, self.random.choice(DESCS)
        first = random.randrange(1, 10_000)
        addresses = tuple(random.sample(range(first, first + 999), desc.num_tensors))
        metadata = {
            name: random.randbytes(random.choice((0, 1, self.metadata_nbytes)))
            for name in (*TRANSPORTS, "ucx")
        }
        model_id = random.choice((None, None, 0, 1, 2))
        self.caches.pop(cache_id, None)
        self.caches[cache_id] = CacheEntry(
            Cache(desc, cache_id, addresses),
            random.random() < 0.5,
            SimpleNamespace(writable=random.random() < 0.5),  # type: ignore[arg-type]
            None if model_id is None else BlocksCacheKey(9, model_id),
            True,
            False,
            Offered(metadata, ()),
            0.0,
            random.choice(("", "kv", "states")),
        )
        if model_id is not None:
            self.newest[model_id] = self.caches[cache_id]

    def free(self) -> None:
        if self.caches:
            del self.caches[self.random.choice([*self.caches])]

    def replace(self) -> None:
        if self.caches:
            self.put(self.random.choice([*self.caches]))

    def move(self) -> None:
        number = self.random.randrange(12)
        held = self.leases.get(number)
        moves = 1 if held is None else held.moves + 1
        blocks = tuple(range(self.random.choice((1, 2, 300))))
        self.leases[number] = BlockLease(9, bytes(16), 3, number, blocks, True, "", (), None, moves)

    def end(self) -> None:
        if self.leases:
            del self.leases[self.random.choice([*self.leases])]


def is_copy(found: PeerCache, entry: CacheEntry) -> bool:
    """Return True if the peer knows of a cache what its owner has offered."""
    metadata = entry.offered.metadata
    offers = tuple(Offer(name, metadata[name]) for name in TRANSPORTS if metadata[name])
    assert [found.metadata(name) for name in TRANSPORTS] == [metadata[name] for name in TRANSPORTS]
    assert found.metadata("ucx") == b""
    return (found.cluster_id, found.desc, found.addresses, found.offers, found.name) == (
        9,
        entry.cache.cache_desc,
        entry.cache.tensor_addrs,
        offers,
        entry.name,
    ) and (found.paged, found.writable, found.first, found.last, found.side.name) == (
        entry.paged,
        entry.memory.writable,
        min(found.addresses),
        max(found.addresses) + found.desc.tensor_nbytes - 1,
        f"cache {entry.cache.cache_id} of cluster 9",
    )


def check_filled(owner: Owner, tables: list[Table]) -> None:
    """Check that the next cache does not fit into a message."""
    entries = [[owner.caches[entry.cache_id] for entry in table.entries] for table in tables]
    sizes = [[published_nbytes(entry, TRANSPORTS) for entry in each] for each in entries if each]
    room = MAX_PUBLISHED_NBYTES - 9 * sum(len(table.removed) for table in tables)
    for full, following in pairwise(sizes):
        assert sum(full) <= MAX_PUBLISHED_NBYTES
        assert sum(full) + following[0] > room


@pytest.mark.parametrize("metadata_nbytes", [40, MAX_NBYTES // 5])
def test_a_peer_knows_what_is_offered_after_each_publication(metadata_nbytes: int) -> None:
    """A publication may take several messages, and two caches may have the same key."""
    num_messages: list[int] = []
    for seed in range(6):
        owner = Owner(Random(seed), metadata_nbytes)
        published, known = PublishedTable(TRANSPORTS), PeerTable(9)
        for step in range(40 if metadata_nbytes < 1000 else 8):
            before = dict(known.by_id)
            for _ in range(30 if step == 0 and metadata_nbytes > 1000 else 0):
                owner.offer()
            owner.change()
            tables = published.pending_updates(owner.caches, owner.leases)
            changed: list[int] = []
            check_filled(owner, tables)
            for table in tables:
                assert len(encode(table)) <= MAX_NBYTES
                changed += known.apply(table)
                assert known.version == table.version
            num_messages.append(len(tables))
            new = {i for i, cache in known.by_id.items() if before.get(i) is not cache}
            assert {*changed} == new | (before.keys() - known.by_id.keys())
            assert known.by_id.keys() == owner.caches.keys()
            assert all(is_copy(known.by_id[i], entry) for i, entry in owner.caches.items())
            assert known.leases == owner.leases
            assert (known.version, len(known)) == (published.version, len(owner.caches))
            assert known.caches() == (*known.by_id.values(),)
            for key, cache in known.by_model.items():
                assert cache is known.by_id[cache.cache_id]
                assert cache.model_id == key
            for key, newest in owner.newest.items():
                if owner.caches.get(newest.cache.cache_id) is newest:
                    assert known.by_model[key] is known.by_id[newest.cache.cache_id]
            held = sum(
                sum(len(offer.metadata) for offer in cache.offers) + 9 * len(cache.addresses)
                for cache in known.by_id.values()
            )
            assert known._nbytes == held + sum(lease.nbytes for lease in known.leases.values())
            for writable in (False, True):
                index = known.address_index(writable=writable)
                assert known.address_index(writable=writable) is index
                extents = [(at, size, cache.cache_id, i) for at, size, cache, i in index.extents]
                assert extents == sorted(
                    (address, entry.cache.cache_desc.tensor_nbytes, cache_id, tensor)
                    for cache_id, entry in owner.caches.items()
                    if entry.memory.writable or not writable
                    for tensor, address in enumerate(entry.cache.tensor_addrs)
                )
            assert published.pending_updates(owner.caches, owner.leases) == []
        for table in PublishedTable(TRANSPORTS).pending_updates({}, {}):
            known.apply(table)  # the first one of a new link
        left = known.by_id, known.by_model, known.leases, known._nbytes
        assert left == ({}, {}, {}, 0)
    assert max(num_messages) > 2


def test_caches_are_found_by_address_as_a_search_of_each_tensor_finds_them() -> None:
    random = Random(9)
    num_found = num_apart = 0
    for _ in range(400):
        caches = [
            PeerCache(
                9,
                cache_id,
                CacheDesc(num_tensors, (1, random.choice((8, 24))), DataType.DT_INT8),
                False,
                tuple(random.choices(range(100, 160), k=num_tensors)),
                (),
                writable=random.random() < 0.5,
            )
            for cache_id, num_tensors in enumerate(random.choices((1, 2, 3), k=3), 1)
        ]
        addresses = random.choices(range(98, 180), k=random.choice((1, 1, 2, 3)))

        def left(cache: PeerCache, address: int) -> int:
            ends = (
                start + cache.desc.tensor_nbytes for start in cache.addresses if start <= address
            )
            return max(0, *(end - address for end in ends), 0)

        rooms = [(cache, [left(cache, address) for address in addresses]) for cache in caches]
        best = max(
            ((cache.writable, min(room)) for cache, room in rooms if all(room)), default=None
        )
        found = find_by_address(caches, addresses)
        if best is not None:
            assert found is not None
            assert (found.cache, found.left) in rooms
            assert (found.cache.writable, min(found.left)) == best
            num_found += 1
            continue
        assert found is None
        holders = [
            next((cache.cache_id for cache in caches if left(cache, address)), 0)
            for address in addresses
        ]
        text = str(no_cache_at(caches, "a peer", addresses))
        if 0 in holders:
            place = holders.index(0)
            assert f"addresses[{place}]={addresses[place]:#x} lies in no cache that a peer" in text
            continue
        other = next(i for i, holder in enumerate(holders) if holder != holders[0])
        assert f"addresses[0]={addresses[0]:#x} lies in cache {holders[0]} of a peer" in text
        assert f"addresses[{other}]={addresses[other]:#x} in cache {holders[other]};" in text
        num_apart += 1
    assert num_found > 50
    assert num_apart > 10


def test_a_cache_or_lease_that_is_announced_again_replaces_the_first() -> None:
    """A peer need not remove it before."""
    owner, known = Owner(Random(9), 40), PeerTable(9)
    for number in range(1, 20):
        owner.put(1)
        owner.move()
        (first, *more) = PublishedTable(TRANSPORTS).pending_updates(owner.caches, owner.leases)
        for table in (first, *more):
            known.apply(msgspec.structs.replace(table, first=False, version=number))
    (cache,) = known.by_id.values()
    key = owner.caches[1].blocks_key
    assert is_copy(cache, owner.caches[1])
    assert known.by_model == ({} if key is None else {key.model_id: cache})
    assert known.leases == owner.leases
    assert known._nbytes == cache.nbytes + sum(lease.nbytes for lease in known.leases.values())
    assert (known.version, PeerTable(9).version) == (19, 0)


@pytest.mark.parametrize("kind", ["caches", "bytes"])
def test_a_peer_may_offer_as_much_as_is_allowed_and_no_more(kind: str) -> None:
    owner, known = Owner(Random(9), 40), PeerTable(9)
    for cache_id in (1, 2):
        owner.put(cache_id)
    (table,) = PublishedTable(TRANSPORTS).pending_updates(owner.caches, {})
    first = PeerCache.of(9, table.entries[0])
    if kind == "caches":
        known.by_id.update(dict.fromkeys(range(3, 2 + MAX_CACHES), first))
    else:
        known._nbytes = peer_table.MAX_NBYTES - first.nbytes
    known.apply(Table(1, False, table.entries[:1], ()))
    with refused("LLM_PARAM_INVALID", "at most 65536 caches, 131072 leases and 268435456 bytes"):
        known.apply(Table(2, False, table.entries[1:], ()))


def test_texts_of_characters_of_four_bytes_fit_into_frames() -> None:
    wide = "\N{MATHEMATICAL BOLD CAPITAL A}"
    desc = CacheDesc(1, (1,), DataType.DT_INT8, kv_tensor_format="opaque " + 249 * wide)
    offered = Offered({"local": b"m"}, ())
    entries = {
        i: CacheEntry(
            Cache(desc, i, (1,)), False, MEMORY, None, True, False, offered, 0.0, 256 * wide
        )
        for i in range(1, 601)
    }
    tables = PublishedTable(("local",)).pending_updates(entries, {})
    assert max(len(encode(table)) for table in tables) <= MAX_NBYTES
    assert sum(len(table.entries) for table in tables) == 600
