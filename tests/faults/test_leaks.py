"""Resources after their use ends: descriptors, mappings, threads, registrations, memory.

They are counted in processes that do no other work. After enough rounds for everything that is kept
for good, many more rounds must not add to the counts.
"""

from __future__ import annotations

import time
from textwrap import dedent, indent

import pytest

from tests.faults.conftest import MakePeer
from tests.faults.footprint import Footprint
from tests.faults.peer import Peer
from tests.support.left import DEADLINE_S

FEW = 100
MANY = 400
GROWTH_KIB = 4096
"""Growth from caches of the last 1,024 pairs of memories, and from malloc's arenas.

A pair takes 1.5 KiB (`execution/rows.py`), and the arenas grow until they have settled. The first
400 rounds added 2.7 to 3.2 MiB.
"""

ROUNDS = {
    "link, pull, push and unlink": """
        datadist.link_clusters([owner], 10_000).raise_for_status()
        datadist.pull_cache(CacheIndex(1, 1), cache)
        datadist.push_cache(cache, CacheIndex(1, 1))
        datadist.unlink_clusters([1], 10_000).raise_for_status()
    """,
    "link, pull registered memory and force": """
        datadist.link_clusters([owner], 10_000).raise_for_status()
        datadist.pull_cache(CacheIndex(1, 2), cache)
        datadist.unlink_clusters([1], 10_000, force=True).raise_for_status()
    """,
    "push by layers": """
        datadist.link_clusters([owner], 10_000).raise_for_status()
        targets = CacheIndex(1, 2), CacheIndex(1, 1), PeerTensors(1, there)
        pairs = KvCacheExtParam(tensor_num_per_layer=2)
        pushes = [Transfer(Rows(cache), Rows(it), layers=pairs) for it in targets]
        tasks = [datadist.layered(it) for it in pushes]
        with LayerEvent(*tasks) as event:
            event.signal(len(tasks[0].layers))
        for task in tasks:
            task.wait(10_000)
        open_for_ever = datadist.layered(pushes[1])
        open_for_ever.ready(0)
        open_for_ever.cancel()
        datadist.unlink_clusters([1], 10_000).raise_for_status()
    """,
    "links that fail": """
        assert datadist.link_clusters([ClusterInfo(5, address)], 10_000).status
        assert datadist.link_clusters([ClusterInfo(5, "127.0.0.1:1")], 10_000).status
    """,
    "refused pulls": """
        for call in (
            lambda: datadist.pull_cache(CacheIndex(3, 1), cache),
            lambda: datadist.pull_cache(CacheKey(3, 1), cache),
            lambda: datadist.pull_cache(CacheIndex(3, 1), cache, 9),
        ):
            try:
                call()
            except LLMException:
                pass
            else:
                raise AssertionError
    """,
}


def measured(peer: Peer) -> Footprint:
    found: Footprint = peer.run("result = footprint()")
    return found


def assert_no_more(peer: Peer, before: Footprint) -> None:
    # Connections that have just ended may hold their descriptors for some moments.
    deadline = time.monotonic() + DEADLINE_S
    after = measured(peer)
    while after["descriptors"] > before["descriptors"] + 4 and time.monotonic() < deadline:
        after = measured(peer)
    assert after["descriptors"] <= before["descriptors"] + 4
    assert after["mappings"] <= before["mappings"] + 8  # malloc's mappings vary with the load
    # Workers start at first use: one more may come, but not one for each round.
    assert after["threads"] <= before["threads"] + 1
    assert after["registrations"] == before["registrations"]
    assert after["kib"] <= before["kib"] + GROWTH_KIB


def run_rounds(user: Peer, owner: Peer, code: str, count: int) -> None:
    round_code = f"def once():\n{indent(dedent(code), '    ')}"
    call = (
        f"owner = ClusterInfo(owner_id, address)\n{round_code}\nfor _ in range(count):\n    once()"
    )
    user.run(call, owner_id=owner.cluster_id, address=owner.address, count=count)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(item, marks=() if item == "refused pulls" else pytest.mark.slow)
        for item in ROUNDS
    ],
)
def test_rounds_between_two_processes(make_peer: MakePeer, name: str) -> None:
    user, owner = make_peer(2), make_peer(1)
    owner.make_cache("allocated")
    owner.make_cache("registered")
    user.make_cache("allocated", None)
    user.run("there = given", given=owner.run("result = cache.tensor_addrs"))
    run_rounds(user, owner, ROUNDS[name], FEW)
    before = [measured(engine) for engine in (user, owner)]
    run_rounds(user, owner, ROUNDS[name], MANY)
    for peer, was in zip((user, owner), before, strict=True):
        assert_no_more(peer, was)


CACHES = {
    "allocated": ("it, _ = make_cache(datadist, 'allocated', 1)", "datadist.deallocate_cache(it)"),
    "registered": (
        "it, _ = make_cache(datadist, 'registered', 1)",
        "datadist.unregister_cache(it.cache_id)",
    ),
}


@pytest.mark.parametrize("memory", CACHES)
@pytest.mark.slow
def test_caches_come_and_go_at_a_linked_peer(make_peer: MakePeer, memory: str) -> None:
    """The linked peer maps each cache, and unmaps it."""
    user, owner = make_peer(2), make_peer(1)
    call = "datadist.link_clusters([ClusterInfo(1, address)], 10_000).raise_for_status()"
    user.run(call, address=owner.address)
    user.make_cache("allocated", None)
    make, end = CACHES[memory]

    def rounds(count: int) -> None:
        for _ in range(count):
            cache_id = owner.run(f"{make}; del _; result = it.cache_id")
            user.run(f"datadist.pull_cache(CacheIndex(1, {cache_id}), cache)")
            owner.run(f"{end}; del it")

    rounds(20)
    before = [measured(engine) for engine in (user, owner)]
    rounds(200)
    owner.run(f"for _ in range({MANY}):\n    {make}\n    {end}\ndel it, _")
    # So that all updates have arrived.
    user.run(
        """
        try:
            datadist.pull_cache(CacheIndex(1, 10**6), cache)
        except LLMException:
            pass
        """
    )
    for peer, was in zip((user, owner), before, strict=True):
        assert_no_more(peer, was)


ENGINE = """
    with LlmDataDist(7, LlmRole.MIX) as it:
        it.initialize(Options(listen_ip_info="127.0.0.1:0"))
        it.link_clusters([owner], 10_000).raise_for_status()
        mine, arrays = make_cache(it, "allocated", None)
        it.pull_cache(CacheIndex(1, 1), mine)
"""


@pytest.mark.slow
def test_engines_come_and_go(make_peer: MakePeer) -> None:
    """The user's processes end, with all that they took from malloc."""
    user, owner = make_peer(2), make_peer(1)
    owner.make_cache("allocated")
    run_rounds(user, owner, ENGINE, 30)
    before = [measured(engine) for engine in (user, owner)]
    run_rounds(user, owner, ENGINE, 300)
    for peer, was in zip((user, owner), before, strict=True):
        assert_no_more(peer, was)


@pytest.mark.slow
def test_peers_that_die_leave_nothing(make_peer: MakePeer) -> None:
    """The engine that was linked with the dead peers releases all of their resources."""
    owner = make_peer(1)
    owner.make_cache("allocated")

    def die() -> None:
        user = make_peer(2)
        user.make_cache("allocated", None)
        user.run(
            """
            datadist.link_clusters([ClusterInfo(1, address)], 10_000).raise_for_status()
            datadist.pull_cache(CacheIndex(1, 1), cache)
            """,
            address=owner.address,
        )
        user.kill()
        owner.wait_for_state(2, "BROKEN")

    die()
    before = measured(owner)
    for _ in range(3):
        die()
    assert_no_more(owner, before)
