"""The simulated HCCL: injected faults, and the death of one end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ascend_sim.hccl_end import DEVICE, REGISTERED
from tests.ascend_sim.hccl_ends import Ends, two_ends

INTERNAL, TIMEOUT, REMOTE, OOM = 4, 9, 21, 24
SYNC_TIMEOUT, REMOTE_GONE = 507046, 507057


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with two_ends(tmp_path, RETRY_US="1000") as made:
        yield made


def put(ends: Ends, count: int = 1) -> int:
    pieces = [(ends.memory[0] + i, ends.memory[1] + i, 1) for i in range(count)]
    code: int = ends[0].transfer("put", ends.comms[0], 1, pieces, ends.streams[0])
    return code


def synchronize(ends: Ends, timeout_ms: int = 5000) -> int:
    code: int = ends[0].synchronize(ends.streams[0], timeout_ms)
    return code


def arrived(ends: Ends, count: int) -> int:
    """Return the number of bytes of a put of `count` that have arrived."""
    fresh = b"\xa5"
    return count - ends[1].read(ends.memory[1], count).count(fresh)


def connect(ends: Ends) -> None:
    ends.connect()
    ends[0].write(ends.memory[0], b"x" * 256)


def test_any_call_may_return_a_code(ends: Ends) -> None:
    ends[0].fault("HcclCommInitClusterInfoMemConfig:1=24")
    assert ends[0].init(None, 0, None) == (OOM, 0)
    ends.init()
    ends[0].fault("HcclRegisterGlobalMem:1=24; HcclCommBindMem:2=24; HcclCommPrepare:1=24")
    assert ends[0].register(4096, 4096) == (OOM, 0)
    ends.bind()
    assert ends[0].bind(ends.comms[0], 0) == OOM
    assert ends[0].prepare(ends.comms[0]) == OOM
    assert ends.prepare() == [0, 0]
    ends[0].fault("HcclCommDestroy:1=4;HcclGetCommAsyncError:1=4")
    assert ends[0].destroy(ends.comms[0]) == INTERNAL
    assert ends[0].async_error(ends.comms[0])[0] == INTERNAL


def test_prepare_may_hang(ends: Ends) -> None:
    ends.init()
    ends[0].setting("connect_timeout_ms", "20")
    ends[0].fault("HcclCommPrepare:1=hang")
    assert ends[0].prepare(ends.comms[0], 0) == TIMEOUT


def test_a_transfer_may_be_refused(ends: Ends) -> None:
    connect(ends)
    ends[0].fault("HcclBatchPut:2=4")
    assert [put(ends, 8), put(ends, 8)] == [0, INTERNAL]
    assert synchronize(ends) == 0


def test_a_transfer_may_fail_at_synchronization(ends: Ends) -> None:
    connect(ends)
    ends[0].fault("HcclBatchPut:1=sync:507010")
    assert put(ends, 8) == 0
    assert synchronize(ends) == 507010
    assert arrived(ends, 8) == 0
    assert put(ends, 8) == 0
    assert synchronize(ends) == 0
    assert arrived(ends, 8) == 8


@pytest.mark.parametrize(("code", "shown"), [(INTERNAL, (INTERNAL, 0)), (507013, (0, 507013))])
def test_half_of_a_transfer_may_arrive(ends: Ends, code: int, shown: tuple[int, int]) -> None:
    connect(ends)
    ends[0].fault(f"HcclBatchPut:1=partial:{code}")
    assert (put(ends, 8), synchronize(ends)) == shown
    assert arrived(ends, 8) == 4


def test_a_transfer_may_hang_until_it_is_aborted(ends: Ends) -> None:
    connect(ends)
    ends[0].fault("HcclBatchPut:1=hang")
    assert put(ends, 8) == 0
    assert synchronize(ends, 10) == SYNC_TIMEOUT
    assert ends[0].unbind(ends.comms[0], ends.handles[0]) == 0
    assert ends[0].destroy(ends.comms[0]) == INTERNAL
    assert [line["what"] for line in ends.log("violation")] == ["destroyed while in use"]
    assert ends[0].abort(ends.streams[0]) == 0
    assert ends[0].destroy(ends.comms[0]) == 0
    assert arrived(ends, 8) == 0


def test_an_aborted_batch_copies_nothing_after_its_time(ends: Ends) -> None:
    connect(ends)
    for name, value in (("aicpu", "1"), ("unfold_us", "0"), ("latency_us", "60000000")):
        assert ends[0].setting(name, value) == 0
    assert put(ends, 8) == 0
    while not ends.log("unfolds"):
        pass
    assert ends[0].abort(ends.streams[0]) == 0
    assert ends[0].unbind(ends.comms[0], ends.handles[0]) == 0
    assert ends[0].destroy(ends.comms[0]) == 0
    assert ends.log("goes on")
    assert arrived(ends, 8) == 0


def test_a_transfer_to_a_destroyed_communicator_fails(ends: Ends) -> None:
    connect(ends)
    assert ends[1].unbind(ends.comms[1], ends.handles[1]) == 0
    assert ends[1].destroy(ends.comms[1]) == 0
    assert put(ends) == 0
    assert synchronize(ends) == REMOTE_GONE
    assert ends[0].async_error(ends.comms[0]) == (0, REMOTE)


@pytest.mark.parametrize("kind", [DEVICE, REGISTERED])
def test_a_transfer_to_a_killed_end_fails(ends: Ends, kind: int) -> None:
    ends.connect(kind=kind)
    ends[1].peer.kill()
    assert ends[0].async_error(ends.comms[0]) == (0, 0)
    assert put(ends) == 0
    assert synchronize(ends) == REMOTE_GONE
    assert ends[0].async_error(ends.comms[0]) == (0, REMOTE)
    assert ends[0].unbind(ends.comms[0], ends.handles[0]) == 0
    assert ends[0].destroy(ends.comms[0]) == 0


def test_the_code_for_a_dead_end_is_a_setting(ends: Ends) -> None:
    connect(ends)
    ends[0].setting("remote_code", "507899")
    ends[1].peer.kill()
    assert put(ends) == 0
    assert synchronize(ends) == 507899


def test_a_transfer_whose_other_end_is_killed_fails(ends: Ends) -> None:
    """The stream is slow, so the second batch begins after the end was killed."""
    connect(ends)
    ends[0].setting("latency_us", "100000")
    asked = (ends.comms[0], 1, [(ends.memory[0], ends.memory[1], 1)], ends.streams[0])
    assert ends[0].transfer_and_kill(ends[1].peer.pid, *asked) == [0, 0]
    assert synchronize(ends) == REMOTE_GONE


def test_a_transfer_to_a_dead_end_may_hang_until_it_is_aborted(ends: Ends) -> None:
    connect(ends)
    ends[0].setting("retry_us", "60000000")
    ends[1].peer.kill()
    assert put(ends) == 0
    assert synchronize(ends, 10) == SYNC_TIMEOUT
    assert ends[0].abort(ends.streams[0]) == 0
    assert ends[0].unbind(ends.comms[0], ends.handles[0]) == 0
    assert ends[0].destroy(ends.comms[0]) == 0
