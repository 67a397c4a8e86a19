"""An engine pulls from two peers on other hosts; one of the peers is cut off on the way."""

from __future__ import annotations

from tests.across import network
from tests.across.conftest import MakeEngine
from tests.across.engine import NBYTES, PATIENT, QUICK, Engine
from tools.namespaces import Namespace

BOTH = """
from kvplan import Rows, Transfer

caches = [make_cache(holder.datadist, "allocated", None, holder.cache.cache_desc) for _ in peers]
tasks = [
    holder.datadist.submit(Transfer(Rows(CacheIndex(peer, remote)), Rows(cache)))
    for (peer, remote), (cache, _) in zip(peers, caches)
]
"""
CAME = """
came = [outcome(lambda task=task: task.wait(30_000)) for task in tasks]
right = [
    all(
        (mine[0] == theirs[0]).all() and not mine[1:].any()
        for mine, theirs in zip(arrays, pattern(seed, cache.cache_desc))
    )
    for seed, (cache, arrays) in enumerate(caches, 1)
]
result = [(item["status"], is_right) for item, is_right in zip(came, right)]
"""


def linked(three: list[Namespace], make_engine: MakeEngine, **options: int) -> list[Engine]:
    """Return two engines with filled caches, and a third one that is linked with them."""
    first, second, user = (
        make_engine(host, number, **options) for number, host in enumerate(three, 1)
    )
    first.hold(seed=1)
    second.hold(seed=2)
    user.hold(seed=None)
    user.link(first, second)
    user.run(f"peers = {[(peer.cluster_id, peer.cache_id) for peer in (first, second)]}")
    return [first, second, user]


def test_an_engine_pulls_from_two_peers(three: list[Namespace], make_engine: MakeEngine) -> None:
    _, _, user = linked(three, make_engine, **PATIENT)
    before = [network.received(item) for item in three]
    assert user.run(BOTH, CAME) == [("LLM_SUCCESS", True)] * 2
    first, second, got = (
        network.received(host) - old for host, old in zip(three, before, strict=True)
    )
    assert got > 2 * NBYTES
    assert max(first, second) < NBYTES / 4


def test_a_peer_that_is_cut_off_fails_only_its_own_transfer(
    three: list[Namespace], make_engine: MakeEngine
) -> None:
    first, second, user = linked(three, make_engine, **QUICK)
    for host in three[:2]:
        network.limit(host, "100mbit")
    user.run(BOTH)
    network.wait_for_bytes(user.host, NBYTES // 4)
    first.host.cut()
    (status, _), other = user.run(CAME)
    assert status == "LLM_LINK_FAILED"
    assert other == ("LLM_SUCCESS", True)
    assert (user.state(first), user.state(second)) == ("BROKEN", "LINKED")
    network.mend(*three)
    first.wait_for_state(user, "BROKEN")
    user.link(first)
    assert user.run(BOTH, CAME) == [("LLM_SUCCESS", True)] * 2
