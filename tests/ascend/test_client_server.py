"""HIXL's client/server mode between two processes, on the simulated library of CANN 9.1."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvnative._backend import KVN_OK
from tests.ascend.hccl_side import BLOCK, BLOCKS, TENSORS, moved
from tests.ascend.simulator import ELSEWHERE, Log
from tests.support.compiled import compiled
from tests.support.peer import Peer, Remote, RemoteError

SHAPE = TENSORS, BLOCKS, BLOCK


class SidePeer(Peer):
    """The process of a `HixlSide`."""

    module = "tests.ascend.hixl_side"


def started(folder: Path, *kind: str) -> Remote:
    """Start a process on devices of the 950."""
    environment = os.environ | {
        "KVSIM_DIR": str(folder),
        "KVSIM_LOG": str(folder / "log"),
        "KVSIM_SOC": "Ascend950PR_9599",
    }
    environment.pop(ELSEWHERE, None)
    return Remote(SidePeer(*kind, environment=environment), "side")


class Pair:
    """Two processes with a 950 each."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.log = Log(folder / "log")
        self.both = [started(folder, kind, str(device)) for device in range(2)]
        self.one, self.two = self.both

    def link(self) -> list[str]:
        metadata = [side.metadata() for side in self.both]
        for side, theirs in zip(self.both, metadata[::-1], strict=True):
            side.send("connect", theirs)
        return [side.result() for side in self.both]

    def move(self, direction: str) -> None:
        self.one.move(direction, *self.two.addresses())

    def close(self) -> list[dict[str, int]]:
        return [side.close() for side in self.both]

    def finish(self) -> None:
        for side in self.both:
            side.peer.finish()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Two processes with a transport each."""
    pair = Pair(tmp_path, "side")
    yield pair
    pair.finish()
    assert pair.log.calls("violation") == []


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Pair]:
    """Two linked engines with a cache each: 10 at the first, 20 at the second."""
    pair = Pair(tmp_path, "engine")
    try:
        addresses = [side.start() for side in pair.both]
        for value, side in zip((10, 20), pair.both, strict=True):
            side.allocate(value)
        pair.one.link(1, addresses[1])
        yield pair
    finally:
        pair.finish()
    assert pair.log.calls("violation") == []


def content(side: Remote) -> np.ndarray:
    return np.frombuffer(side.bytes(), np.uint8).reshape(SHAPE)


def filled(side: Remote, seed: int) -> np.ndarray:
    return np.frombuffer(side.fill(seed), np.uint8).reshape(SHAPE)


def test_bytes_move_in_both_directions_and_through_staging(pair: Pair) -> None:
    ours, theirs = filled(pair.one, 1), filled(pair.two, 2)
    assert pair.link() == ["one-sided over ub_ctp, by HIXL"] * 2
    assert pair.one.facts() == {
        "path": pair.one.facts()["path"],
        "generation": "client_server",
        "reaches": ["device"],
    }
    pair.move("pull")
    assert (content(pair.one) == moved(theirs, ours)).all()
    ours = content(pair.one)
    pair.move("push")
    assert (content(pair.two) == moved(ours, theirs)).all()
    theirs = content(pair.two)
    pair.move("pull to the host")
    assert (content(pair.one) == moved(theirs, np.zeros_like(theirs))).all()
    assert not pair.log.calls("HcclCommInitClusterInfoMemConfig")
    assert pair.close() == [{}, {}]


@pytest.mark.parametrize("count", [1, 128, 129, 5000])
def test_a_transfer_is_cut_into_batches(pair: Pair, count: int) -> None:
    """HIXL queues at most 4,096 batches; kvplan has only a few in flight."""
    filled(pair.one, 1)
    theirs = np.frombuffer(pair.two.fill(2), np.uint8)
    pair.link()
    assert pair.one.get_many(pair.two.addresses()[0][0], count) == KVN_OK
    arrived = np.frombuffer(pair.one.bytes(), np.uint8)
    rows = theirs[: 64 * count].reshape(count, 64)[::-1].reshape(-1)
    assert (arrived[: 64 * count] == rows).all()
    sizes = [call.fields["descriptors"] for call in pair.log.calls("HixlCSClientBatchGetAsync")]
    assert sizes == [min(128, count - first) for first in range(0, count, 128)]


def test_memory_stays_registered_until_no_client_is_left(pair: Pair) -> None:
    pair.link()
    pair.move("pull")
    addresses = pair.two.addresses()
    pair.two.deregister()
    with pytest.raises(RemoteError, match="the peer has deregistered the memory meanwhile"):
        pair.one.move("pull", *addresses)
    assert not pair.log.calls("HixlCSServerUnregMem")
    with pytest.raises(RemoteError, match="HIXL keeps it until no connection from before"):
        pair.two.register()
    assert pair.close() == [{}, {}]
    assert pair.log.calls("HixlCSServerUnregMem")


@pytest.mark.parametrize(
    "fault",
    [
        "HixlCSClientBatchGetAsync:1=503900",
        "HixlCSClientBatchGetAsync:1=103901",
        "HixlCSClientQueryCompleteStatus:1=103900",
    ],
)
def test_a_failed_batch_fails_the_transfer(pair: Pair, fault: str) -> None:
    pair.link()
    pair.one.fault(fault)
    with pytest.raises(RemoteError, match="HIXL's client is given up"):
        pair.move("pull")
    assert pair.close() == [{}, {}]


@pytest.mark.parametrize("direction", ["pull", "pull to the host"])
def test_work_of_a_failed_call_has_ended_with_the_transfer(pair: Pair, direction: str) -> None:
    """HIXL runs the first kernels of a batch even if it cannot launch all of them."""
    pair.link()
    pair.one.fault("HixlCSClientBatchGetAsync:1=partial:503900")
    with pytest.raises(RemoteError, match="503900"):
        pair.move(direction)
    assert len(pair.log.calls("HixlCSClientDestroy")) == 1
    assert pair.one.lingers() == 0
    assert pair.close() == [{}, {}]


def test_a_batch_waits_for_a_channel_of_the_device(pair: Pair) -> None:
    ours, theirs = filled(pair.one, 1), filled(pair.two, 2)
    pair.link()
    for call in range(1, 4):
        pair.one.fault(f"HixlCSClientBatchGetAsync:{call}=203900")
    pair.move("pull")
    assert (content(pair.one) == moved(theirs, ours)).all()
    assert pair.close() == [{}, {}]


def test_a_second_transport_of_the_device_is_refused(pair: Pair) -> None:
    with pytest.raises(RemoteError, match=r"one engine at a time uses HIXL.*FEATURE_NOT_ENABLED"):
        pair.one.open_another()
    pair.link()
    pair.move("pull")
    assert pair.close() == [{}, {}]


def test_registrations_of_a_failed_transport_do_not_end_those_of_the_next(
    pair: Pair,
) -> None:
    """Handles are addresses, so one of the second server may equal one of the first."""
    pair.one.open_after_a_failure()
    assert [call for call in pair.log.calls("HixlCSServerUnregMem") if call.code] == []
    pair.link()
    pair.move("pull")
    assert pair.close() == [{}, {}]


def test_a_failed_copy_does_not_end_the_link(pair: Pair) -> None:
    """The next chunk is in flight when the copy from a slot of the previous one fails."""
    pair.one.open(staging_nbytes=1 << 16)
    pair.link()
    pair.one.fault("aclrtMemcpyBatch:2=507899")
    with pytest.raises(RemoteError, match=r"B2B: aclrtMemcpyBatch: 507899 .*\(LLM_FAILED\)"):
        pair.move("pull to the host")
    assert pair.close() == [{}, {}]


def test_engines_pull_and_push_from_both_ends(engines: Pair) -> None:
    one, two = engines.both
    assert one.pull(1, 1, 1) == "LLM_SUCCESS"
    assert one.values(1) == [20]
    two.fill(1, 30)
    assert two.push(0, 1, 1) == "LLM_SUCCESS"
    assert one.values(1) == [30]
    assert engines.close() == [{}, {}]


def test_a_push_with_a_lease_is_announced_and_ends_with_it(engines: Pair) -> None:
    one, two = engines.both
    lease = two.lease(1)
    assert one.push_leased(lease, 1) == "LLM_SUCCESS"
    assert two.pull(0, 1, 1) == "LLM_SUCCESS"
    assert two.values(1) == [10]
    two.release()
    assert one.push_leased(lease, 1) == "LLM_KV_CACHE_NOT_EXIST"
    assert engines.close() == [{}, {}]


def test_new_and_freed_caches_renew_the_connection(engines: Pair) -> None:
    one, two = engines.both
    two.allocate(21)
    assert one.pull(1, 2, 1) == "LLM_SUCCESS"
    assert one.values(1) == [21]
    two.deallocate(2)
    assert one.pull(1, 2, 1) == "LLM_KV_CACHE_NOT_EXIST"
    two.allocate(22)
    assert one.pull(1, 3, 1) == "LLM_SUCCESS"
    assert one.values(1) == [22]
    assert engines.close() == [{}, {}]


def test_a_server_frees_memory_of_old_connections(engines: Pair) -> None:
    one, two = engines.both
    two.allocate(21)
    assert one.pull(1, 2, 1) == "LLM_SUCCESS"
    before = len(engines.log.calls("HixlCSServerUnregMem"))
    two.deallocate(2)
    deadline = time.monotonic() + 20
    while len(engines.log.calls("HixlCSServerUnregMem")) == before:
        assert time.monotonic() < deadline
    assert one.pull(1, 1, 1) == "LLM_SUCCESS"
    assert engines.close() == [{}, {}]


def test_memory_that_is_deregistered_during_a_renewal_is_freed(tmp_path: Path) -> None:
    """The renewed connection binds the memory, and one more renewal releases it."""
    log = Log(tmp_path / "log")
    side = started(tmp_path, "both")
    try:
        side.deregister_during_a_renewal()
        deadline = time.monotonic() + 20
        while len(log.calls("HixlCSServerUnregMem")) < 2:
            assert time.monotonic() < deadline
        side.close()
    finally:
        side.peer.finish()
    assert log.calls("violation") == []


def test_a_batch_that_never_ends_times_out(engines: Pair) -> None:
    one = engines.one
    one.fault("HixlCSClientBatchGetAsync:1=hang")
    timeout_ms = 50
    # A slow machine may not have got there.
    while not engines.log.calls("HixlCSClientBatchGetAsync"):
        timeout_ms *= 2
        assert one.pull(1, 1, 1, timeout_ms=timeout_ms) == "LLM_TIMEOUT"
    assert one.values(1) == [10]
    (given_up,) = (
        call for call in engines.log.calls("HixlCSClientDestroy") if call.fields["batches"]
    )
    assert given_up.fields["batches"] == 1
    assert one.pull(1, 1, 1) == "LLM_SUCCESS"
    assert one.values(1) == [20]
    assert engines.close() == [{}, {}]


def test_a_failed_batch_costs_only_the_connection(engines: Pair) -> None:
    one = engines.one
    one.fault("HixlCSClientBatchGetAsync:1=503900")
    assert one.pull(1, 1, 1) == "LLM_FAILED"
    assert one.pull(1, 1, 1) == "LLM_SUCCESS"
    assert engines.close() == [{}, {}]


def test_a_killed_peer_ends_the_transfer(engines: Pair) -> None:
    """HIXL reports nothing: the end of the control connection stops the transfer."""
    engines.two.peer.kill()
    assert engines.one.pull(1, 1, 1) == "LLM_LINK_FAILED"
    assert engines.one.close() == {}


def test_a_server_that_two_threads_close_is_destroyed_once(tmp_path: Path) -> None:
    compiled(tmp_path, "tests/ascend/shared_main.c")("closed_by_two")
