"""A request in several caches of a peer, moved by one plan and one submission."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvplan import (
    BlockLease,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    DataType,
    LlmDataDist,
    Placement,
    PlanEvent,
    Rows,
    Transfer,
)
from tests.datadist.conftest import MakeEngine, link
from tests.datadist.machine import Machine, on_host_only
from tests.datadist.peer import Peer
from tests.planning.unlike import Cache as Unlike
from tests.planning.unlike import Model, expected
from tests.support.refusals import refused

pytestmark = pytest.mark.over_cuda

INVALID = "LLM_PARAM_INVALID"
DESCS = {
    "latent": CacheDesc(3, (8, 4, 24), DataType.DT_INT16, kv_tensor_format="block token dim"),
    "indexer": CacheDesc(3, (6, 8, 20), DataType.DT_UINT8, kv_tensor_format="block token dim"),
    "state": CacheDesc(1, (5, 32), DataType.DT_INT32, kv_tensor_format="block state"),
}
OFFER = """
caches = {}
for number, (name, desc) in enumerate(descs.items()):
    cache = datadist.allocate_blocks_cache(desc, BlocksCacheKey(1, number))
    caches[name] = cache
    dtype = {"DT_INT16": np.int16, "DT_UINT8": np.uint8, "DT_INT32": np.int32}[desc.data_type.name]
    datadist.write_cache(cache, [
        (np.arange(np.prod(desc.shape)) % 100 + 20 * number + layer)
        .astype(dtype).reshape(desc.shape)
        for layer in range(desc.num_tensors)
    ])
result = [cache.cache_id for cache in caches.values()]
"""
TABLES = {"latent": ([1, 5, 2], [7, 0, 3]), "indexer": ([4, 0], [5, 2]), "state": ([3], [1])}
TOKENS = {"latent": 11, "indexer": 11, "state": None}


@pytest.fixture
def keys(peer: Peer) -> dict[str, CacheIndex]:
    """Keys of the peer's caches, which hold numbers."""
    ids = peer.run(OFFER, descs=DESCS)
    return {name: CacheIndex(1, number) for name, number in zip(DESCS, ids, strict=True)}


def caches_of(user: LlmDataDist) -> dict[str, Cache]:
    return {name: user.allocate_blocks_cache(desc) for name, desc in DESCS.items()}


def groups_of(src: dict[str, Any], dst: dict[str, Any]) -> dict[str, Transfer]:
    return {
        name: Transfer(Rows(src[name], read), Rows(dst[name], written), num_tokens=TOKENS[name])
        for name, (read, written) in TABLES.items()
    }


def held(name: str) -> list[np.ndarray]:
    """Return the content of a group's cache on the side that has the request."""
    desc, number = DESCS[name], [*DESCS].index(name)
    dtype = {"DT_INT16": np.int16, "DT_UINT8": np.uint8}.get(desc.data_type.name, np.int32)
    values = np.arange(np.prod(desc.shape)) % 100 + 20 * number
    return [(values + index).astype(dtype).reshape(desc.shape) for index in range(desc.num_tensors)]


def assert_arrived(name: str, arrays: list[np.ndarray]) -> None:
    """Check that all tokens of the request arrived, and nothing else."""
    src_blocks, dst_blocks = TABLES[name]
    for source, array in zip(held(name), arrays, strict=True):
        wanted = np.zeros_like(source)
        if name == "state":
            wanted[dst_blocks] = source[src_blocks]
        else:
            size = source.shape[1]
            for token in range(11):
                block, inside = divmod(token, size)
                wanted[dst_blocks[block], inside] = source[src_blocks[block], inside]
        assert np.array_equal(array, wanted)


@pytest.mark.over_tcp
def test_one_pull_moves_all_groups(user: LlmDataDist, keys: dict[str, CacheIndex]) -> None:
    mine = caches_of(user)
    seen: list[PlanEvent] = []
    remove = user.on_plan(seen.append)
    user.run(groups_of(keys, mine))
    remove()
    for name, cache in mine.items():
        assert_arrived(name, user.arrays(cache, copy=True))
    (event,) = seen
    assert event.operation == "pull_groups"
    assert event.plan == user.plan(groups_of(keys, mine))
    of_arrays = {
        name: replace(its, dst=replace(its.dst, blocks=np.array(its.dst.blocks)))
        for name, its in groups_of(keys, mine).items()
    }
    assert event.plan == user.plan(of_arrays)
    metrics = user.metrics()["operations"]["pull_groups"]
    assert (metrics["statuses"], metrics["nbytes"]) == ({"LLM_SUCCESS": 1}, event.plan.nbytes)
    assert event.plan.nbytes == 3 * 11 * 48 + 3 * 11 * 20 + 128
    assert user.metrics()["in_flight"] == 0


@pytest.mark.over_tcp
def test_one_push_moves_all_groups(
    user: LlmDataDist, peer: Peer, keys: dict[str, CacheIndex]
) -> None:
    mine = caches_of(user)
    for name, cache in mine.items():
        user.write_cache(cache, held(name))
    peer.run(
        """
        for cache in caches.values():
            empty = [np.zeros_like(array) for array in datadist.arrays(cache, copy=True)]
            datadist.write_cache(cache, empty)
        """
    )
    task = user.submit(groups_of(mine, keys))
    asyncio.run(await_task(task))
    assert "part indexer\nlayer 0  " in task.explain()
    assert task.explain().endswith("LLM_SUCCESS")
    there = peer.run("result = {n: datadist.arrays(it, copy=True) for n, it in caches.items()}")
    for name in DESCS:
        assert_arrived(name, there[name])


async def await_task(task: Any) -> None:
    await task


def test_memory_of_engines_and_programs_moves_in_one_transfer(
    user: LlmDataDist, peer: Peer, machine: Machine
) -> None:
    """A cache of the peer is in its engine's arena, and another in the program's array."""
    on_host_only(machine, "HCCL reaches no memory of the host between devices of one host")
    state = peer.run(
        """
        arrays = [np.full((5, 32), 7, np.int32)]
        desc = CacheDesc(1, (5, 32), DataType.DT_INT32, Placement.HOST)
        own = datadist.register_blocks_cache(desc, arrays)
        arena = datadist.allocate_blocks_cache(
            CacheDesc(1, (5, 32), DataType.DT_INT32, Placement.HOST)
        )
        datadist.write_cache(arena, [np.full((5, 32), 9, np.int32)])
        result = [own.cache_id, arena.cache_id]
        """
    )
    desc = CacheDesc(1, (5, 32), DataType.DT_INT32, Placement.HOST)
    mine = [user.allocate_blocks_cache(desc) for _ in state]
    groups = {
        f"cache {i}": Transfer(Rows(CacheIndex(1, number), [1]), Rows(mine[i], [2 + i]))
        for i, number in enumerate(state)
    }
    user.run(groups)
    assert [item[0].max(axis=1).tolist() for item in map(user.arrays, mine)] == [
        [0, 0, 7, 0, 0],
        [0, 0, 0, 9, 0],
    ]
    user.run(
        {name: Transfer(group.dst, Rows(group.src.cache, [4])) for name, group in groups.items()}
    )
    peer.run("assert (arrays[0] == 7).all()")
    assert peer.run("result = int(datadist.arrays(arena)[0][4].min())") == 9


def test_a_key_finds_its_present_cache(
    user: LlmDataDist, peer: Peer, keys: dict[str, CacheIndex]
) -> None:
    """A key names, for each group, the cache that has the key now."""
    mine = caches_of(user)
    by_key = {name: BlocksCacheKey(1, number) for number, name in enumerate(DESCS)}
    user.run(groups_of(by_key, mine))
    peer.run(
        """
        datadist.deallocate_cache(caches["state"])
        cache = datadist.allocate_blocks_cache(descs["state"], BlocksCacheKey(1, 2))
        datadist.write_cache(cache, [np.full((5, 32), 77, np.int32)])
        """
    )
    user.run(groups_of(by_key, mine))
    assert (user.arrays(mine["state"], copy=True)[0][1] == 77).all()
    with refused("LLM_KV_CACHE_NOT_EXIST", "cache_id=|deregistered"):
        user.run(groups_of(keys, mine))  # by id: the freed cache
    assert user.metrics()["in_flight"] == 0


def test_an_error_names_the_group(
    user: LlmDataDist, keys: dict[str, CacheIndex], make_engine: MakeEngine
) -> None:
    mine = caches_of(user)
    good = groups_of(keys, mine)

    def with_state(src: Any = ..., dst: Any = ..., src_blocks: Any = ...) -> dict[str, Transfer]:
        read, written = TABLES["state"]
        source = Rows(
            keys["state"] if src is ... else src, read if src_blocks is ... else src_blocks
        )
        target = Rows(mine["state"] if dst is ... else dst, written)
        return {**good, "state": Transfer(source, target)}

    for status, message, groups in (
        (INVALID, "part state: src.blocks.* out of range", with_state(src_blocks=[9])),
        (INVALID, "part state: src.blocks is None; it must name", with_state(src_blocks=None)),
        (INVALID, "part state: .*data type: src is DT_INT16", with_state(src=keys["latent"])),
        ("LLM_NOT_YET_LINK", "cluster 5", with_state(src=CacheIndex(5, 1))),
        (INVALID, "'indexer' is a pull, 'state' is a push; one transfer has one direction",
         with_state(mine["state"], keys["state"])),
        (INVALID, "'indexer' is a pull, 'state' is a copy; one", with_state(mine["state"])),
        (INVALID, "both of peers", with_state(dst=keys["state"])),
        (INVALID, r"transfer\['state'\].src=.* names a slot",
         with_state(src=CacheIndex(1, keys["state"].cache_id, 1))),
        ("LLM_KV_CACHE_NOT_EXIST", "cache_id=99", with_state(src=CacheIndex(1, 99))),
        ("LLM_KV_CACHE_NOT_EXIST", "99", with_state(dst=Cache(DESCS["state"], 99))),
        (INVALID, "transfer is empty", {}),
        (INVALID, "printable", {"": good["state"]}),
    ):  # fmt: skip
        with refused(status, message):
            user.run(groups)
        with refused(status, message):
            user.submit(groups)
    with pytest.raises(TypeError, match=r"transfer\['state'\]='state' must be Transfer"):
        user.run({"state": "state"})  # type: ignore[dict-item]
    for name, cache in mine.items():
        assert not any(array.any() for array in user.arrays(cache, copy=True)), name
    assert user.metrics()["in_flight"] == 0
    assert [item.in_flight for item in user.links()] == [0]


def test_two_groups_that_write_the_same_bytes_are_refused(
    user: LlmDataDist, keys: dict[str, CacheIndex]
) -> None:
    """Groups may share tensors, as layers with and without a window do, but not blocks."""
    mine = user.allocate_blocks_cache(DESCS["latent"])
    groups = {
        "window": Transfer(Rows(keys["latent"], [1, 2]), Rows(mine, [3, 4])),
        "full": Transfer(Rows(keys["latent"], [6, 7]), Rows(mine, [0, 4])),
    }
    with refused(INVALID, "part full: .* and part window: .* write the same bytes|window.*full"):
        user.run(groups)
    assert not any(item.any() for item in user.arrays(mine, copy=True))
    groups["full"] = Transfer(Rows(keys["latent"], [6, 7]), Rows(mine, [0, 5]))
    user.run(groups)
    for source, array in zip(held("latent"), user.arrays(mine, copy=True), strict=True):
        wanted = np.zeros_like(source)
        wanted[[3, 4, 0, 5]] = source[[1, 2, 6, 7]]
        assert np.array_equal(array, wanted)


@pytest.mark.over_tcp
def test_both_registrations_of_the_same_memory_are_checked(user: LlmDataDist, peer: Peer) -> None:
    """After one of two caches over the same memory is freed, a group of it must not be read."""
    peer.run(
        """
        desc = CacheDesc(1, (5, 32), DataType.DT_INT32)
        arrays = [zeros((5, 32), np.int32)]
        twice = [
            datadist.register_blocks_cache(desc, addresses(arrays), BlocksCacheKey(1, 8 + number))
            for number in range(2)
        ]
        other = datadist.allocate_blocks_cache(desc)
        """
    )
    desc = CacheDesc(1, (5, 32), DataType.DT_INT32)
    mine = [user.allocate_blocks_cache(desc) for _ in range(2)]
    groups = {
        str(index): Transfer(Rows(CacheIndex(1, 1 + index), [1]), Rows(mine[index], [2]))
        for index in range(2)
    }
    user.run(groups)
    peer.run("datadist.unregister_cache(twice[0].cache_id)")
    with refused("LLM_KV_CACHE_NOT_EXIST", "cache_id=|deregistered"):
        user.run(groups)
    user.run({"1": groups["1"]})


def test_groups_of_host_and_device_are_two_transfers(
    make_engine: MakeEngine, machine: Machine
) -> None:
    owner, user = make_engine(1, listen=True), make_engine(2)
    link(user, owner)
    desc = CacheDesc(1, (5, 32), DataType.DT_INT32)
    there = owner.allocate_blocks_cache(desc)
    mine = [
        user.allocate_blocks_cache(CacheDesc(1, (5, 32), DataType.DT_INT32, item))
        for item in Placement
    ]
    groups = {
        str(i): Transfer(Rows(CacheIndex(1, there.cache_id), [1]), Rows(item, [2]))
        for i, item in enumerate(mine)
    }
    if machine.name in {"host", "tcp"}:  # without a device all caches are in host memory
        user.run(groups)
    else:
        with refused("LLM_FEATURE_NOT_ENABLED", "in host memory and on the device"):
            user.run(groups)


@pytest.mark.over_tcp
def test_groups_by_leases(
    user: LlmDataDist, peer: Peer, keys: dict[str, CacheIndex], machine: Machine
) -> None:
    """A single ended lease fails the whole transfer."""
    blobs = peer.run(
        """
        leases = [datadist.lease_blocks(caches[name], blocks[name], tag=name) for name in caches]
        result = [lease.to_bytes() for lease in leases]
        """,
        blocks={name: TABLES[name][0] for name in DESCS},
    )
    leases = {name: BlockLease.from_bytes(blob) for name, blob in zip(DESCS, blobs, strict=True)}
    mine = caches_of(user)
    whole = {**leases, "state": keys["state"]}  # with a lease or without
    for src in (leases, whole):
        groups = {
            name: Transfer(
                Rows(src[name]), Rows(mine[name], TABLES[name][1]), num_tokens=TOKENS[name]
            )
            for name in DESCS
            if isinstance(src[name], BlockLease)
        }
        if src is whole:
            groups["state"] = groups_of(keys, mine)["state"]
        for cache in mine.values():
            user.write_cache(
                cache, [np.zeros_like(array) for array in user.arrays(cache, copy=True)]
            )
        user.run(groups)
        for name, cache in mine.items():
            assert_arrived(name, user.arrays(cache, copy=True))
    back = {
        name: Transfer(
            Rows(mine[name], TABLES[name][1]), Rows(leases[name]), num_tokens=TOKENS[name]
        )
        for name in DESCS
    }
    user.run(back)
    other = {"latent": Transfer(back["latent"].src, Rows(leases["latent"], [6, 5, 2]))}
    with refused(INVALID, r"part latent: dst.blocks\[0\]=6 is not a block of lease 1 of latent"):
        user.run(other)
    peer.run("datadist.release(leases[1])")
    for move in (
        lambda: user.run(groups),
        lambda: user.run(back),
        lambda: user.submit(back).wait(5000),
    ):
        with refused("LLM_KV_CACHE_NOT_EXIST", "lease 2 of indexer.* was released"):
            move()


MODEL = Model(layers=3, kv=2, heads=2, dim=8, data_type=DataType.DT_FLOAT16)
AXES = ("block", "token", "head", "dim")


@pytest.mark.over_tcp
@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize(
    "layers", [(range(1, 3), range(3)), (range(3), range(1, 3))], ids=["fewer", "more"]
)
def test_groups_whose_sides_have_unlike_numbers_of_tensors(
    user: LlmDataDist, peer: Peer, direction: str, layers: tuple[range, range]
) -> None:
    """The tensors of the second group are behind those of the first, on each side."""
    there, here = (
        [Unlike(MODEL, AXES, 6, 4, each, range(2)) for each in order]
        for order in (layers, layers[::-1])
    )
    theirs, mine = ([cache.tensors(n) for n, cache in enumerate(side)] for side in (there, here))
    ids = peer.run(
        """
        caches = [datadist.allocate_blocks_cache(desc) for desc in descs]
        for cache, tensors in zip(caches, arrays):
            datadist.write_cache(cache, [tensor.view(np.float16) for tensor in tensors])
        result = [cache.cache_id for cache in caches]
        """,
        descs=[cache.desc for cache in there],
        arrays=theirs,
    )
    groups, wanted, caches = {}, [], []
    for number, cache_id in enumerate(ids):
        caches.append(user.allocate_blocks_cache(here[number].desc))
        user.write_cache(caches[-1], [tensor.view(np.float16) for tensor in mine[number]])
        rows = Rows(CacheIndex(1, cache_id), [4, 1 + number]), Rows(caches[-1], [2, 3 + number])
        sides = (there[number], here[number], theirs[number], mine[number], [4, 1 + number])
        if direction == "push":
            rows = rows[::-1]
            sides = (here[number], there[number], mine[number], theirs[number], [2, 3 + number])
        wanted.append(expected(*sides, [*rows[1].blocks], 0, 0, 7))
        groups[f"group {number}"] = Transfer(*rows, num_tokens=7)
    user.run(groups)
    if direction == "pull":
        found = [user.arrays(cache, copy=True) for cache in caches]
    else:
        found = peer.run("result = [datadist.arrays(cache, copy=True) for cache in caches]")
    for arrays, tensors in zip(found, wanted, strict=True):
        for array, tensor in zip(arrays, tensors, strict=True):
            np.testing.assert_array_equal(np.array(array).view(np.uint16), tensor)


def test_a_rank_that_one_of_several_gives_is_refused(
    user: LlmDataDist, keys: dict[str, CacheIndex]
) -> None:
    groups = groups_of(keys, caches_of(user))
    groups["indexer"] = replace(groups["indexer"], rank=0)
    for verb in (user.plan, user.run, user.submit, user.layered):
        with refused(INVALID, "indexer.*rank=0 must be None: only a gather has several sources"):
            verb(groups)
