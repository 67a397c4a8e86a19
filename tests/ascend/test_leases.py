"""Blocks of a device are leased to another request before, during and after a transfer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import kvplan
from kvnative._backend import KVN_OK, KVN_UNMAPPED, ThreadPool
from kvnative._executor import Executor
from kvnative._hccl import NUM_TICKETS
from kvnative._lower import Descriptors
from kvplan import (
    BlockLease,
    Cache,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LLMException,
    Rows,
    Transfer,
    Transfers,
)
from kvplan.lease import LeaseWord
from kvplan.transport.hccl.link import HcclLink, HcclPeerMemory
from kvplan.transport.hccl.metadata import MAX_SLOTS
from kvplan.transport.registrations import MAX_LEASES
from tests.ascend.hccl_side import DEADLINE_S, PULL, PUSH, TENSOR, Side, link_both
from tests.ascend.hccl_sides import MakeSide
from tests.ascend.simulator import Controls, Log
from tests.datadist.conftest import MakeEngine
from tests.datadist.peer import Peer
from tests.faults.gate import Gate
from tests.support.refusals import refused

DESC = CacheDesc(4, (8, 16), DataType.DT_INT32)
THEIRS, MINE = [2, 0], [1, 3]
RELEASED = "lease 1 of cmpl-3 was released"
NOT_EXIST = "LLM_KV_CACHE_NOT_EXIST"
LONG_MS = 30_000


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture
def gated(gate: Gate, make_engine: MakeEngine, peer: Peer) -> Iterator[LlmDataDist]:
    """An engine linked with the peer, whose transfers stop after the first descriptor."""
    with Transfers(1, gate.wrap) as transfers:
        user = make_engine(2, transfers=transfers)
        user.link_clusters([ClusterInfo(1, peer.address)], LONG_MS).raise_for_status()
        yield user
        gate.open()


@pytest.fixture
def lease(peer: Peer) -> BlockLease:
    """A lease of the blocks THEIRS, which are full of 7."""
    blob = peer.run(
        """
        cache = datadist.allocate_blocks_cache(desc)
        arrays = datadist.arrays(cache)
        [array.fill(7) for array in arrays]
        lease = datadist.lease_blocks(cache, blocks, tag="cmpl-3")
        result = lease.to_bytes()
        """,
        desc=DESC,
        blocks=THEIRS,
    )
    return BlockLease.from_bytes(blob)


def pull(user: LlmDataDist, lease: BlockLease, cache: Cache) -> None:
    user.pull_blocks(lease, cache, None, MINE, timeout_ms=LONG_MS)


@pytest.mark.parametrize("when", ["during", "after"])
def test_a_pull_fails_if_its_lease_ends(
    gated: LlmDataDist, peer: Peer, lease: BlockLease, gate: Gate, when: str
) -> None:
    cache, errors = gated.allocate_blocks_cache(DESC), []

    def call() -> None:
        try:
            pull(gated, lease, cache)
        except LLMException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    gate.wait()
    release = "datadist.release(lease); [array.fill(9) for array in arrays]"
    if when == "during":
        peer.run(release)
    gate.open()
    thread.join(30)
    if when == "after":
        assert errors == []
        peer.run(release)
        assert all((array[MINE] == 7).all() for array in gated.arrays(cache))
    else:
        assert [error.status_code.name for error in errors] == [NOT_EXIST], errors
        assert RELEASED in str(errors[0])
    with refused(NOT_EXIST, RELEASED):
        pull(gated, lease, cache)


def test_blocks_that_are_leased_again_fail_the_pull(
    user: LlmDataDist, peer: Peer, lease: BlockLease
) -> None:
    cache = user.allocate_blocks_cache(DESC)
    pull(user, lease, cache)
    again = "datadist.release(lease); lease = datadist.lease_blocks(cache, blocks, tag='cmpl-4')"
    blob = peer.run(f"{again}; result = lease.to_bytes()", blocks=THEIRS)
    with refused(NOT_EXIST, RELEASED):
        pull(user, lease, cache)
    user.submit(Transfer(Rows(BlockLease.from_bytes(blob), [0]), Rows(cache, [5]))).wait(LONG_MS)
    assert all((array[[1, 3, 5]] == 7).all() for array in user.arrays(cache))
    peer.run("datadist.deallocate_cache(cache)")
    with refused(NOT_EXIST):
        pull(user, BlockLease.from_bytes(blob), cache)


def test_forged_leases_are_refused(user: LlmDataDist, lease: BlockLease) -> None:
    cache = user.allocate_blocks_cache(DESC)
    (word,) = [word for word in lease.words if word.transport == "hccl"]
    for slot, generation in (
        (word.slot, word.generation + 1),
        (word.slot + 1, word.generation),
        (word.slot + 1, 0),
        (0, word.generation + 5),
        (2**32 - 1, word.generation),
    ):
        forged = replace(lease, words=(LeaseWord("hccl", slot, generation),))
        with refused(NOT_EXIST, RELEASED):
            pull(user, forged, cache)
    with refused("LLM_FEATURE_NOT_ENABLED", "lease cannot be checked over transport"):
        pull(user, replace(lease, words=()), cache)
    pull(user, lease, cache)  # the link still works


def test_a_full_table_of_leases_reports_its_size(make_side: MakeSide) -> None:
    transport = make_side(0, max_registrations=MAX_SLOTS - 2).transport
    held = [transport.begin_lease() for _ in range(2)]
    with refused("LLM_OUT_OF_MEMORY", "all 2 leases are taken: release a lease first"):
        transport.begin_lease()
    transport.end_leases(held)


def test_a_lease_that_has_ended_is_not_renewed(one: Side) -> None:
    later_ns = time.monotonic_ns() + 3600 * 10**9
    ended = one.transport.begin_lease(later_ns)
    one.transport.end_leases([ended])
    one.transport.begin_lease(later_ns)
    with refused("LLM_KV_CACHE_NOT_EXIST", "the lease has ended"):
        one.transport.renew_lease(*ended, later_ns)


def test_leases_have_slots_of_their_own(one: Side) -> None:
    """Leases have slots of their own, and free them once; each has another generation."""
    transport = one.transport
    first, second = transport.begin_lease(), transport.begin_lease()
    for _ in range(2):
        transport.end_leases([first])
    held = {transport.begin_lease() for _ in range(2)}
    assert len({first, second, *held}) == 4
    assert len({slot for slot, _ in {second, *held}}) == 3
    table = transport._hccl.generations
    assert table.ref.num_slots == 65536 + MAX_LEASES
    words = np.zeros(table.ref.num_slots, np.uint64)
    one.device.read(table.ref.address, words)
    live = {slot: int(words[slot]) for slot in np.flatnonzero(words).tolist() if slot >= 65536}
    assert live == dict([second, *held])


def leased(one: Side, two: Side) -> tuple[HcclPeerMemory, tuple[int, int], HcclLink]:
    """Return the second side's memory under this lease as the first one writes it, and the link."""
    link, other = link_both(one, two)
    word = two.transport.begin_lease()
    block_lease = BlockLease(1, bytes(16), 1, 1, (0,), True, "cmpl-3", (LeaseWord("hccl", *word),))
    return two.peer_memory(link, writable=True).leased([block_lease]), word, other


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_memory_with_a_lease_shares_nothing_with_the_same_memory_without(
    one: Side, two: Side, direction: str
) -> None:
    link, _ = link_both(one, two)
    word = two.transport.begin_lease()
    lease = BlockLease(1, bytes(16), 1, 1, (0,), True, "cmpl-3", (LeaseWord("hccl", *word),))
    plain = two.peer_memory(link, writable=True)

    def move(remote: HcclPeerMemory) -> None:
        if direction == "pull":
            kvplan.execute(PULL, remote, one.memory)
        else:
            kvplan.execute(PUSH, one.memory, remote)

    leased = [plain.leased([lease])]  # before the memory without a lease has moved
    move(plain)
    leased.append(plain.leased([lease]))
    for remote in leased:
        move(remote)
    two.transport.end_leases([word])
    move(plain)
    for remote in (*leased, plain.leased([lease])):
        with refused(NOT_EXIST, RELEASED):
            move(remote)


def tickets_of(side: Side) -> list[int]:
    words = bytearray(8 * NUM_TICKETS)
    side.device.read(side.transport._generations.ref.tickets, words)
    return [item for item in memoryview(words).cast("Q").tolist() if item]


@pytest.fixture
def hanging(simulator: Controls) -> Iterator[Callable[[], None]]:
    """A function that makes the next put hang, and waits until it does."""
    simulator.add_fault("HcclBatchPut:1=hang")

    def wait() -> None:
        give_up = time.monotonic() + DEADLINE_S
        while simulator.faults_left():
            assert time.monotonic() < give_up

    return wait


def test_the_end_of_a_lease_waits_for_a_push(
    one: Side, two: Side, hanging: Callable[[], None]
) -> None:
    one.fill(1)
    theirs = two.fill(2)
    remote, lease, _ = leased(one, two)
    unrelated = two.transport.begin_lease()
    two.transport.end_leases([unrelated])  # no transfer writes
    task = kvplan.submit(PUSH, one.memory, remote)
    hanging()
    (ticket,) = tickets_of(one)
    spent = []
    for _ in range(6):
        began = time.monotonic()
        with refused("LLM_TIMEOUT", "1 peer had begun to write"):
            two.transport.end_leases([lease])
        spent.append(time.monotonic() - began)
    assert min(spent[1:]) < spent[0] / 2, "a busy machine holds up some of them, and not each"
    assert tickets_of(one) == [ticket]
    task.cancel()
    two.transport.end_leases([lease])
    assert tickets_of(one) == []
    theirs[:] = two.seen
    with refused(NOT_EXIST, RELEASED):
        kvplan.execute(PUSH, one.memory, remote)
    np.testing.assert_array_equal(two.seen, theirs)
    assert tickets_of(one) == []


def test_the_end_of_a_lease_does_not_wait_for_other_pushes(
    make_side: MakeSide, one: Side, two: Side, hanging: Callable[[], None]
) -> None:
    """A peer's table also contains its writes to others."""
    three = make_side(2)
    remote, lease, _ = leased(one, two)
    link_both(one, three)
    task = kvplan.submit(PUSH, one.memory, remote)
    hanging()
    three.transport.end_leases([three.transport.begin_lease()])
    with refused("LLM_TIMEOUT", "1 peer had begun to write"):
        two.transport.end_leases([lease])
    task.cancel()


def test_the_end_of_a_lease_does_not_wait_for_an_ended_link(
    one: Side, two: Side, hanging: Callable[[], None]
) -> None:
    remote, lease, link = leased(one, two)
    task = kvplan.submit(PUSH, one.memory, remote)
    hanging()
    link.close()
    two.transport.end_leases([lease])
    task.cancel()


def test_a_large_push_is_announced_in_rounds(
    one: Side, two: Side, sim_log: Log, simulator: Controls
) -> None:
    ours = one.fill(1)
    two.fill(2)
    remote, lease, _ = leased(one, two)
    count = 1200  # of 120,000 bytes each: 64 MiB contain 559
    columns = (two.addresses[0], one.addresses[0], TENSOR)
    descriptors = Descriptors.from_columns(
        *(np.full(count, column, np.uint64) for column in columns)
    )
    with Executor(remote.backend(ThreadPool(1), "put", one.memory, None)) as executor:
        sim_log.restart()
        assert executor.run(descriptors, DEADLINE_S * 1000).status == KVN_OK
        assert sim_log.counts("HcclBatchGet") == {"HcclBatchGet": 6}  # before each, and after it
        np.testing.assert_array_equal(two.seen[0], ours[0])
        simulator.add_fault("HcclBatchPut:4=4")
        report = executor.run(descriptors, DEADLINE_S * 1000)
        assert "descriptors 559 to 814" in report.message
        assert report.unconfirmed == ((0, count),)
        assert tickets_of(one) == []
        two.transport.end_leases([lease])
        report = executor.run(descriptors, DEADLINE_S * 1000)
        assert report.status == KVN_UNMAPPED
        assert RELEASED in report.message


def test_a_connection_over_which_tickets_are_not_read_is_renewed(
    one: Side, two: Side, simulator: Controls
) -> None:
    _, lease, link = leased(one, two)
    simulator.add_fault("HcclBatchGet:1=4")
    two.transport.end_leases([lease])  # by another read
    assert simulator.faults_left() == 0
    give_up = time.monotonic() + DEADLINE_S
    while link.connection().generation == 0:
        assert time.monotonic() < give_up
