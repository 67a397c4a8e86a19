"""Arithmetic of the simulated cluster, for cases that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cluster_sim import MEASURED, Cluster, Job, Load, Simulation, most_linked, serve

BY_BLOCK = Cluster(linked=100, per_request=False)
BY_KEY = Cluster(linked=100, requests_per_s=2.0)


def test_jobs_wait_for_earlier_ones() -> None:
    """Jobs that begin at 0, 2 and 4 s wait 0, 1 and 2 s; the wait of the last is not counted."""
    jobs = [Job(0, 2), Job(1, 2), Job(2, 1), Job(2, 1, awaited=False)]
    assert serve(jobs, 10) == Load(busy=0.6, waits_s=(1, 2))
    assert serve([], 10) == Load(busy=0, waits_s=(0, 0))


@pytest.mark.parametrize(
    ("busy", "wait_s", "endurable"), [(0.5, 0.04, True), (0.5, 0.06, False), (1.01, 0, False)]
)
def test_long_waits_and_overload_cannot_be_endured(
    busy: float, wait_s: float, endurable: bool
) -> None:
    assert Load(busy, (0, wait_s)).endurable is endurable


def test_idle_links_cost_their_heartbeats() -> None:
    run = Simulation(BY_BLOCK, MEASURED, seconds=10)
    expected = BY_BLOCK.linked * MEASURED.beat_us / 1e6
    assert run.prefill().busy == pytest.approx(expected)
    assert run.decode().busy == pytest.approx(expected)
    assert run.publishes_per_s() == 0


def test_each_prompt_is_published_to_all_peers_twice() -> None:
    run = Simulation(BY_KEY, MEASURED, seconds=400)
    assert run.publishes_per_s() == pytest.approx(2 * BY_KEY.requests_per_s, rel=0.1)
    publish_us = MEASURED.publish_us + MEASURED.publish_cache_us * BY_KEY.caches
    published_us = run.publishes_per_s() * BY_KEY.linked * publish_us
    expected = (published_us + 2 * MEASURED.claimed_us + BY_KEY.linked * MEASURED.beat_us) / 1e6
    assert run.prefill().busy == pytest.approx(expected, rel=0.02)


def test_the_limit_of_peers_is_that_of_the_control_thread() -> None:
    """Transfers by block cost only heartbeats: the limit is a second of them per second."""
    most = most_linked(BY_BLOCK, MEASURED, seconds=2)
    assert most == pytest.approx(1e6 / MEASURED.beat_us, rel=0.05)
    slow = replace(MEASURED, beat_us=2 * MEASURED.beat_us)
    assert most_linked(BY_BLOCK, slow, seconds=2) == pytest.approx(most / 2, rel=0.05)


def test_a_prompt_takes_its_bytes_over_the_bandwidth() -> None:
    assert BY_KEY.transfer_s(2.0) == pytest.approx(61 * 2048 * 1152 / 2e9)
