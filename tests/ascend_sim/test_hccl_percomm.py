"""The simulated HCCL: memory registered for one communicator, the only kind on Ascend 950."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ascend_sim.hccl_end import DEVICE, PINNED, REGISTERED
from tests.ascend_sim.hccl_ends import NBYTES, Ends, two_ends

PARA, PTR, INTERNAL, NOT_SUPPORT, NOT_FOUND, TIMEOUT, RUNTIME = 1, 2, 4, 5, 6, 9, 15
STALE = 507899


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with two_ends(tmp_path, SOC="Ascend950PR_9599") as made:
        yield made


def register(ends: Ends, rank: int, nbytes: int = NBYTES) -> bytes:
    ends.memory[rank] = ends[rank].allocate(nbytes)
    code, desc = ends[rank].register_for(ends.comms[rank], 1 - rank, ends.memory[rank], nbytes)
    assert code == 0
    return bytes(desc)


def connect(ends: Ends) -> list[bytes]:
    """Connect both ranks; return their descriptors, each enabled at the other end."""
    ends.init()
    descs = [register(ends, rank) for rank in (0, 1)]
    asked = [(ends.comms[rank], 1 - rank, [descs[rank]]) for rank in (0, 1)]
    assert ends.call_both("exchange", *asked) == [(0, [descs[1]]), (0, [descs[0]])]
    for rank in (0, 1):
        found = ends[rank].enable(ends.comms[rank], descs[1 - rank])
        assert found == (0, ends.memory[1 - rank], NBYTES)
    ends.streams = [end.stream() for end in ends.both]
    return descs


def transfer(ends: Ends, direction: str, count: int = 1) -> int:
    pieces = [(ends.memory[0] + i, ends.memory[1] + i, 1) for i in range(count)]
    code: int = ends[0].transfer(direction, ends.comms[0], 1, pieces, ends.streams[0])
    return code


def test_bytes_are_put_and_got(ends: Ends) -> None:
    connect(ends)
    ends[0].write(ends.memory[0], b"hello")
    assert transfer(ends, "put", 5) == 0
    assert ends[0].synchronize(ends.streams[0]) == 0
    assert ends[1].read(ends.memory[1], 5) == b"hello"


def test_the_size_of_a_batch_is_limited(ends: Ends) -> None:
    connect(ends)
    assert [transfer(ends, "get", 64), transfer(ends, "get", 65)] == [0, PARA]


def test_global_registration_is_refused(ends: Ends) -> None:
    ends.init()
    assert ends[0].register(ends[0].allocate(NBYTES), NBYTES)[0] == NOT_SUPPORT
    assert ends[0].deregister(1) == NOT_SUPPORT
    assert ends[0].bind(ends.comms[0], 1) == NOT_SUPPORT
    assert ends[0].unbind(ends.comms[0], 1) == NOT_SUPPORT
    assert ends[0].prepare(ends.comms[0], 1) == NOT_SUPPORT
    assert ends[0].remap([ends.comms[0]], [(4096, 4096)]) == NOT_SUPPORT


def test_registrations_are_counted(ends: Ends) -> None:
    ends.init()
    comm = ends.comms[0]
    address = ends[0].allocate(NBYTES)
    code, desc = ends[0].register_for(comm, 1, address, NBYTES)
    assert code == 0
    assert ends[0].register_for(comm, 1, address, NBYTES) == (0, desc)  # a second reference
    assert ends[0].register_for(comm, 1, address, NBYTES // 2)[0] == INTERNAL
    assert ends[0].register_for(comm, 0, address, NBYTES)[0] == PARA  # its own rank
    assert ends[0].register_for(comm, 1, address, 0)[0] == PARA
    assert ends[0].register_for(comm, 1, 0, NBYTES)[0] == PTR
    assert ends[0].register_for(comm, 1, 12345678, 4096)[0] == RUNTIME
    host = ends[0].allocate(NBYTES, PINNED)
    assert ends[0].register_for(comm, 1, host, NBYTES, PINNED)[0] == NOT_SUPPORT
    assert [ends[0].deregister_for(comm, desc) for _ in range(3)] == [0, 0, NOT_FOUND]
    assert json.loads(ends[0].leaks())["regions"] == 0


def test_exchange_without_the_other_end_times_out(ends: Ends) -> None:
    ends.init()
    ends[0].setting("connect_timeout_ms", "30")
    assert ends[0].exchange(ends.comms[0], 1, [], 8, 0) == (TIMEOUT, [])
    assert ends[0].exchange(ends.comms[0], 1, [b"\0" * 512])[0] == INTERNAL
    assert ends[0].exchange(ends.comms[0], 1, [], 8, -2)[0] == PARA


def test_exchange_needs_room_for_all_descriptors(ends: Ends) -> None:
    ends.init()
    descs = [register(ends, 1) for _ in range(2)]
    asked = [(ends.comms[0], 1, [], 1), (ends.comms[1], 0, descs, 1)]
    assert [code for code, _ in ends.call_both("exchange", *asked)] == [PARA, 0]


def test_exchange_may_be_repeated(ends: Ends) -> None:
    connect(ends)
    desc = register(ends, 1)
    asked = [(ends.comms[0], 1, []), (ends.comms[1], 0, [desc])]
    assert ends.call_both("exchange", *asked) == [(0, [desc]), (0, [])]
    assert transfer(ends, "put") == INTERNAL
    assert ends[0].enable(ends.comms[0], desc)[0] == 0
    assert transfer(ends, "put") == 0


def test_access_is_enabled_and_disabled(ends: Ends) -> None:
    descs = connect(ends)
    comm = ends.comms[0]
    assert ends[0].enable(comm, descs[0])[0] == INTERNAL  # its own descriptor
    assert ends[0].enable(comm, descs[1])[0] == 0  # a second reference
    assert ends[0].disable(comm, descs[1]) == 0
    assert transfer(ends, "put") == 0
    assert ends[0].disable(comm, descs[1]) == 0
    assert ends[0].disable(comm, descs[1]) == INTERNAL
    assert transfer(ends, "put") == INTERNAL


def test_enable_needs_a_connection(ends: Ends) -> None:
    ends.init()
    assert ends[0].enable(ends.comms[0], register(ends, 1))[0] == INTERNAL


def test_memory_deregistered_at_the_other_end_is_refused(ends: Ends) -> None:
    descs = connect(ends)
    assert ends[1].deregister_for(ends.comms[1], descs[1]) == 0
    assert transfer(ends, "put") == 0
    assert ends[0].synchronize(ends.streams[0]) == STALE


def test_destroying_a_communicator_deregisters_its_memory(ends: Ends) -> None:
    connect(ends)
    assert ends[0].destroy(ends.comms[0]) == 0
    left = json.loads(ends[0].leaks())
    assert (left["regions"], left["comms"]) == (0, 0)


@pytest.mark.parametrize("kind", [DEVICE, PINNED, REGISTERED])
def test_other_products_have_these_calls_too(tmp_path: Path, kind: int) -> None:
    with two_ends(tmp_path) as ends:
        ends.init()
        address = ends[0].allocate(NBYTES, kind)
        assert ends[0].register_for(ends.comms[0], 1, address, NBYTES, kind)[0] == 0
