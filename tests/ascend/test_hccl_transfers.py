"""Puts and gets between two processes: bytes and calls, on each generation of products."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvnative._backend import KVN_INVALID, KVN_OK, KVN_UNMAPPED
from tests.ascend.hccl_ends import A2, A3, A950, Connection, Ends, ends_on, reversed_pieces

SIZES = [4096, 1, 511, 65536, 64, 3, 20000, 128]
NBYTES = 1 << 20


ends = ends_on(A2, A3, A950)


@pytest.fixture
def connection(ends: Ends) -> Iterator[Connection]:
    connection = ends.connect(NBYTES)
    yield connection
    connection.close()


def contents(seed: int, nbytes: int = NBYTES) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def test_the_product_has_its_generation(ends: Ends) -> None:
    facts = ends[0].facts()
    assert facts["generation"] == ("per_comm" if ends.product is A950 else "global")
    assert facts["path"].endswith("libhcomm.so")
    assert facts["missing"] == ()


def test_puts_write_to_the_peer(connection: Connection) -> None:
    ends, total, content = connection.ends, sum(SIZES), contents(1)
    ends[0].write(connection.addresses[0], 0, content)
    report = connection.transfer("put", connection.rows(SIZES))
    assert (report.status, report.bytes_done, report.unconfirmed) == (KVN_OK, total, ())
    arrived = ends[1].read(connection.addresses[1])
    assert arrived[:total] == reversed_pieces(content[:total], SIZES)
    assert set(arrived[total:]) == {0xA5}


def test_gets_read_from_the_peer(connection: Connection) -> None:
    ends, total, content = connection.ends, sum(SIZES), contents(2)
    ends[1].write(connection.addresses[1], 0, content)
    assert connection.transfer("get", connection.rows(SIZES)).status == KVN_OK
    arrived = ends[0].read(connection.addresses[0])
    assert arrived[:total] == reversed_pieces(content[:total], SIZES[::-1])
    assert set(arrived[total:]) == {0xA5}


@pytest.mark.parametrize("count", [1, 64, 65, 256, 257, 1000, 3904])
def test_a_transfer_of_several_batches_synchronizes_once(
    connection: Connection, count: int
) -> None:
    """3904 descriptors are 61 layers x 64 scattered blocks."""
    ends, most = connection.ends, connection.ends.product.max_batch
    assert connection.transfer("put", connection.rows([256] * count)).status == KVN_OK
    batches = ends.log.calls("HcclBatchPut")
    assert len(batches) == -(-count // most)
    assert [batch.fields["descriptors"] for batch in batches] == [
        min(most, count - first) for first in range(0, count, most)
    ]
    assert successful_synchronizations(ends) == 1


def successful_synchronizations(ends: Ends) -> int:
    """Return the waits that found the stream empty, except those of 1 ms for a late event.

    The stream may be empty by then. The test counts them to show that not every batch is awaited.
    """
    calls = ends.log.calls("aclrtSynchronizeStreamWithTimeout")
    return sum(call.code == 0 and call.fields["timeout"] != 1 for call in calls)


def test_guards_cost_one_get(connection: Connection) -> None:
    ends, (_, remote) = connection.ends, connection.addresses
    ends[1].write(remote, NBYTES - 16, (7).to_bytes(8, "little") + (9).to_bytes(8, "little"))
    guards = [(remote + NBYTES - 8, 9), (remote + NBYTES - 16, 7)]
    report = connection.transfer("put", connection.rows([4096] * 100), guards=guards)
    assert report.status == KVN_OK
    assert ends.log.counts("HcclBatchGet") == {"HcclBatchGet": 1}
    assert successful_synchronizations(ends) == 1


@pytest.mark.parametrize("direction", ["get", "put"])
def test_a_changed_generation_fails_the_transfer(connection: Connection, direction: str) -> None:
    ends, (_, remote) = connection.ends, connection.addresses
    ends[1].write(remote, NBYTES - 8, (8).to_bytes(8, "little"))
    rows = connection.rows([4096] * 3)
    report = connection.transfer(direction, rows, guards=[(remote + NBYTES - 8, 7)])
    assert (report.status, report.failed, report.unconfirmed) == (KVN_UNMAPPED, None, ((0, 3),))
    assert report.message == (
        "the peer has deregistered the memory meanwhile "
        f"(guard 0: word at {remote + NBYTES - 8:#x} is 8, expected 7)"
    )
    assert not ends[0].ask(connection.name, "disturbed")
    assert connection.transfer(direction, rows, guards=[(remote + NBYTES - 8, 8)]).status == KVN_OK


def test_more_guards_than_a_batch_are_read(connection: Connection) -> None:
    ends, (_, remote) = connection.ends, connection.addresses
    count = 600
    ends[1].write(remote, 65536, b"".join(i.to_bytes(8, "little") for i in range(count)))
    guards = [(remote + 65536 + 8 * i, i) for i in range(count)]
    assert connection.transfer("get", connection.rows([64]), guards=guards).status == KVN_OK
    guards[-1] = guards[-1][0], 5
    report = connection.transfer("get", connection.rows([64]), guards=guards)
    assert (report.status, report.message[:57]) == (
        KVN_UNMAPPED,
        "the peer has deregistered the memory meanwhile (guard 599",
    )


@pytest.mark.parametrize("ended", range(3))
def test_the_ended_one_of_several_leases_is_named(connection: Connection, ended: int) -> None:
    """The first guard belongs to a registration, and the others to leases."""
    ends, (_, remote) = connection.ends, connection.addresses
    ends[1].write(remote, 65536, bytes(32))
    guards = [(remote + 65536 + 8 * i, i == ended + 1) for i in range(4)]
    leases = ["lease 1", "lease 2", "lease 3"]
    report = connection.transfer("get", connection.rows([64]), guards=guards, leases=leases)
    assert report.status == KVN_UNMAPPED
    assert report.message == (f"{leases[ended]} was released or moved by the peer, or has expired")


def test_an_empty_transfer_succeeds(connection: Connection) -> None:
    assert connection.transfer("put", []).status == KVN_OK
    assert not connection.ends.log.calls("HcclBatchPut")


def test_local_memory_that_is_not_bound_is_refused_by_name(connection: Connection) -> None:
    ends, (local, _) = connection.ends, connection.addresses
    rows = connection.rows([4096] * 4)
    rows[2] = local + NBYTES - 4095, *rows[2][1:]
    report = connection.transfer("put", rows)
    assert (report.status, report.failed) == (KVN_INVALID, 2)
    first, last = local + NBYTES - 4095, local + NBYTES + 1
    assert report.message == (
        f"descriptor 2: local memory [{first:#x}, {last:#x}) is in no region that is bound to the "
        "communicator"
    )
    assert not ends.log.calls("HcclBatchPut")
    assert not ends[0].ask(connection.name, "disturbed")


def test_two_communicators_move_at_the_same_time(ends: Ends) -> None:
    first, second = ends.connect(NBYTES), ends.connect(NBYTES)
    contents_of = [contents(3), contents(4)]
    for item, content in zip((first, second), contents_of, strict=True):
        ends[0].write(item.addresses[0], 0, content)
        item.start("put", item.rows([NBYTES // 256] * 256))
    for item, content in zip((first, second), contents_of, strict=True):
        assert item.wait().status == KVN_OK
        expected = reversed_pieces(content, [NBYTES // 256] * 256)
        assert ends[1].read(item.addresses[1]) == expected
        item.close()


def test_both_ends_transfer_at_the_same_time(connection: Connection) -> None:
    ends, half, content = connection.ends, NBYTES // 2, contents(5)
    for end, address in zip(ends.both, connection.addresses, strict=True):
        end.write(address, 0, content[:half])
    here, there = connection.addresses
    rows = [[(here, there + half, half)], [(there, here + half, half)]]
    for end, its in zip(ends.both, rows, strict=True):
        end.send("transfer", connection.name, "put", its)
    assert [end.result()["status"] for end in ends.both] == [KVN_OK, KVN_OK]
    for end, address in zip(ends.both, connection.addresses, strict=True):
        assert end.read(address) == content[:half] * 2
