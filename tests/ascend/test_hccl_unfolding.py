"""A3: AICPU still runs unfolded operations for a while after their stream was aborted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvnative._backend import KVN_CANCELLED, KVN_OK, KVN_PEER_GONE, KVN_TIMEOUT
from tests.ascend.hccl_ends import A3, Connection, Ends, two_ends

NBYTES = 1 << 20
SIZES = [4096] * 8
SLOW_US = 400_000


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    """Two ends whose operations take long, so that all are interrupted."""
    with two_ends(tmp_path, A3) as ends:
        yield ends
        assert [end.left() for end in ends.both] == [{}, {}]
    ends.log.rewind()
    assert ends.log.calls("goes on")  # the simulator has continued operations
    assert ends.log.calls("violation") == []


def begin_slowly(connection: Connection, direction: str, rows: Any, **options: Any) -> None:
    """Begin a transfer; return once AICPU has begun a batch that takes long."""
    connection.ends[0].set("latency_us", SLOW_US)
    connection.start(direction, rows, **options)
    while not connection.ends.log.calls("unfolds"):
        pass


@pytest.mark.parametrize("direction", ["put", "get"])
def test_no_byte_moves_once_the_deadline_is_reported(ends: Ends, direction: str) -> None:
    connection = ends.connect(NBYTES)
    target = 0 if direction == "get" else 1
    ends[1 - target].write(connection.addresses[1 - target], 0, bytes(NBYTES))
    begin_slowly(connection, direction, connection.rows(SIZES))
    assert connection.wait(timeout_ms=1).status == KVN_TIMEOUT
    seen = ends[target].read(connection.addresses[target])
    ends[0].set("latency_us", 0)
    ends[0].close(connection.name)  # immediately: HCCL would free memory that is in use
    assert ends[target].read(connection.addresses[target]) == seen
    ends[1].close(connection.name)
    for end, address in zip(ends.both, connection.addresses, strict=True):
        end.deregister(address)
        end.free(address)


@pytest.mark.parametrize("how", ["cancelled", "peer given up"])
def test_a_communicator_may_be_closed_during_a_transfer(ends: Ends, how: str) -> None:
    connection = ends.connect(NBYTES)
    begin_slowly(connection, "put", connection.rows(SIZES))
    if how == "cancelled":
        report = ends[0].cancel_task(connection.name)
        assert report["status"] == KVN_CANCELLED
    else:
        ends[0].cancel(connection.name, "the peer is gone")
        assert connection.wait().status == KVN_PEER_GONE
    ends[0].set("latency_us", 0)
    connection.close()


@pytest.mark.parametrize("direction", ["put", "get"])
def test_staging_memory_is_reused_only_after_aicpu_has_stopped(ends: Ends, direction: str) -> None:
    connection = ends.connect(NBYTES, staging={"slot_nbytes": 4096, "buffer_sets": 1})
    local = ends[0].memory("pinned", NBYTES)
    options = {"staging": connection.name, "local": "host"}
    rows = connection.rows(SIZES, local)
    begin_slowly(connection, direction, rows, **options)
    assert ends[0].cancel_task(connection.name)["status"] == KVN_CANCELLED
    ends[0].set("latency_us", 0)
    assert connection.transfer(direction, rows, **options).status == KVN_OK
    ends[0].free(local)
    connection.close()


def test_words_of_a_finished_put_with_leases_are_not_written(ends: Ends) -> None:
    """Guards are read before anything else: another connection reuses the words soon."""
    connection = ends.connect(NBYTES)
    here, there = connection.addresses
    for end, address in zip(ends.both, connection.addresses, strict=True):
        end.write(address, 0, bytes(NBYTES))
    options = {"guards": [(there, 0)], "tickets": here}
    begin_slowly(connection, "put", connection.rows(SIZES), **options)
    ends[0].set("latency_us", 0)  # of later operations, which would wait long enough by themselves
    assert ends[0].cancel_task(connection.name)["status"] == KVN_CANCELLED
    connection.close()
