"""Linking under asyncio: with tasks, groups and deadlines, while the loop runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvplan import ClusterInfo, LlmDataDist, LLMStatusCode
from tests.datadist.conftest import MakeEngine, MakePeer
from tests.datadist.peer import Peer
from tests.support.refusals import refused

DEADLINE_S = 20
TIMEOUT_MS = 1000 * DEADLINE_S


@pytest.mark.over_tcp
def test_link_async_links_and_reports_failures(engine: LlmDataDist, peer: Peer) -> None:
    clusters = [ClusterInfo(1, peer.address), ClusterInfo(9, "127.0.0.1:1")]
    linked, failed = asyncio.run(engine.link_clusters_async(clusters, TIMEOUT_MS))
    assert linked.error is None
    assert failed.status is LLMStatusCode.LLM_LINK_FAILED
    engine.notify(1, b"linked")
    assert peer.run("result = [note.data for note in datadist.notifications()]") == [b"linked"]
    assert "link_clusters" in engine.metrics()["operations"]


def test_link_async_runs_in_tasks_and_groups(
    make_engine: MakeEngine, make_peer: MakePeer, engine: LlmDataDist
) -> None:
    third = make_engine(3)
    peer = make_peer()
    there = [ClusterInfo(1, peer.address)]

    async def run() -> None:
        result = await asyncio.create_task(engine.link_clusters_async(there, TIMEOUT_MS))
        result.raise_for_status()
        again = asyncio.ensure_future(engine.link_clusters_async(there, TIMEOUT_MS))
        done, _ = await asyncio.wait([again], timeout=DEADLINE_S)
        assert [task.result().status for task in done] == [LLMStatusCode.LLM_ALREADY_LINK]
        async with asyncio.TaskGroup() as group:
            made = group.create_task(third.link_clusters_async(there, TIMEOUT_MS))
        made.result().raise_for_status()

    asyncio.run(run())
    assert [value.cluster_id for value in (*engine.links(), *third.links())] == [1, 1]


def test_the_loop_keeps_running_and_a_cancelled_call_leaves_nothing(
    engine: LlmDataDist, peer: Peer
) -> None:
    there = [ClusterInfo(1, peer.address)]
    peer.stop()

    async def run() -> None:
        linking = asyncio.create_task(engine.link_clusters_async(there, TIMEOUT_MS))
        await asyncio.sleep(0)  # it has begun
        await asyncio.sleep(0)
        assert not linking.done()
        linking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await linking
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.link_clusters_async(there, TIMEOUT_MS), 0.05)
        peer.resume()
        (await engine.link_clusters_async(there, TIMEOUT_MS)).raise_for_status()

    asyncio.run(run())
    engine.notify(1, b"linked")


def test_invalid_calls_are_refused(
    engine: LlmDataDist, make_engine: Callable[..., LlmDataDist]
) -> None:
    with refused("LLM_PARAM_INVALID"):
        asyncio.run(engine.link_clusters_async([]))
    with refused("LLM_PARAM_INVALID", "is this engine's own"):
        asyncio.run(engine.link_clusters_async([ClusterInfo(2, "127.0.0.1:1")]))
    other = make_engine(3)
    other.finalize()
    with refused("LLM_ENGINE_FINALIZED"):
        asyncio.run(other.link_clusters_async([ClusterInfo(1, "127.0.0.1:1")]))
