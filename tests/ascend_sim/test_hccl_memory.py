"""The simulated HCCL: registration, binding and prepare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ascend_sim.hccl_end import DEVICE, PINNED, REGISTERED, config
from tests.ascend_sim.hccl_ends import NBYTES, Ends, start, table, two_ends
from tests.support.peer import Remote

PARA, PTR, INTERNAL, TIMEOUT, RUNTIME = 1, 2, 4, 9, 15


@pytest.fixture
def end(tmp_path: Path) -> Iterator[Remote]:
    remote = start({"KVSIM_DIR": str(tmp_path)}, "8.5", 0)
    yield remote
    remote.peer.finish()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with two_ends(tmp_path) as made:
        yield made


def test_overlapping_registrations_are_refused(end: Remote) -> None:
    address = end.allocate(NBYTES)
    code, handle = end.register(address, NBYTES)
    assert code == 0
    assert end.register(address, NBYTES) == (0, handle)  # registering the same range again
    assert end.register(address, NBYTES // 2)[0] == PARA
    assert end.register(address + 4096, NBYTES)[0] == PARA
    assert end.register(address, 0)[0] == PARA
    assert end.register(0, NBYTES)[0] == PARA
    assert end.deregister(handle) == 0
    assert end.deregister(handle) == PARA
    assert end.register(address, NBYTES // 2)[0] == 0


def test_registration_belongs_to_a_device(end: Remote) -> None:
    code, handle = end.register(end.allocate(NBYTES), NBYTES)
    end.use(1)
    assert end.deregister(handle) == PARA
    end.use(0)
    assert (code, end.deregister(handle)) == (0, 0)


def test_bound_memory_cannot_be_deregistered(end: Remote) -> None:
    _, comm = end.init(table(), 0, config("c"))
    _, handle = end.register(end.allocate(NBYTES), NBYTES)
    assert end.bind(comm, 1234) == PARA
    assert end.bind(0, handle) == PTR
    assert end.unbind(comm, handle) == PARA
    assert end.bind(comm, handle) == 0
    assert end.bind(comm, handle) == PARA
    assert end.deregister(handle) == PARA
    assert end.destroy(comm) == PARA
    assert end.unbind(comm, handle) == 0
    assert end.deregister(handle) == 0
    assert end.destroy(comm) == 0


def test_a_thread_needs_the_device_of_the_communicator(end: Remote) -> None:
    _, comm = end.init(table(), 0, config("c"))
    _, handle = end.register(end.allocate(NBYTES), NBYTES)
    end.use(1)
    assert end.bind(comm, handle) == PARA
    assert end.prepare(comm, 1) == PARA


def test_prepare_checks_arguments(end: Remote) -> None:
    _, comm = end.init(table(), 0, config("c"))
    assert end.prepare(comm, -2) == PARA
    assert end.prepare(comm, 1, 1) == PARA
    assert end.prepare(0, 1) == PTR


def test_prepare_without_the_other_end_times_out(end: Remote) -> None:
    end.setting("connect_timeout_ms", "50")
    _, comm = end.init(table(), 0, config("c"))
    assert end.prepare(comm, 0) == TIMEOUT
    assert end.prepare(comm, 0) == TIMEOUT  # and prepare can be repeated


def test_prepare_succeeds_after_a_timeout(ends: Ends) -> None:
    ends.init()
    ends.bind()
    for rank in (0, 1):
        ends[rank].setting("connect_timeout_ms", "30")
        assert ends[rank].prepare(ends.comms[rank], 0) == TIMEOUT
    assert ends.prepare() == [0, 0]
    assert ends.prepare() == [0, 0]  # without any effect
    line = ends.log("HcclCommPrepare")[-1]
    assert (line["name"], line["local_regions"], line["remote_regions"]) == (ends.name, 1, 1)


def test_memory_cannot_be_bound_after_prepare(ends: Ends) -> None:
    ends.connect()
    _, handle = ends[0].register(ends[0].allocate(NBYTES), NBYTES)
    assert ends[0].bind(ends.comms[0], handle) == PARA
    assert ends[0].deregister(handle) == 0


@pytest.mark.parametrize("kind", [DEVICE, PINNED, REGISTERED])
def test_prepare_exchanges_memory_of_each_kind(ends: Ends, kind: int) -> None:
    ends.connect(kind=kind)
    lines = ends.log("HcclCommPrepare")[-2:]
    assert [(line["name"], line["local_regions"], line["remote_regions"]) for line in lines] == [
        (ends.name, 1, 1)
    ] * 2


def test_prepare_maps_whole_pages_of_the_host_once(ends: Ends) -> None:
    ends.init()
    mapped = ends[0].allocate(NBYTES, REGISTERED, None, True)
    pinned = ends[0].allocate(NBYTES, PINNED)
    for address, nbytes in ((mapped, NBYTES), (pinned, NBYTES - 64), (pinned + 64, 4096)):
        _, handle = ends[0].register(address, nbytes, PINNED)
        assert ends[0].bind(ends.comms[0], handle) == 0
        assert ends[0].prepare(ends.comms[0], 1) == RUNTIME
        assert ends[0].unbind(ends.comms[0], handle) == 0
        assert ends[0].deregister(handle) == 0


def test_prepare_checks_the_kind_of_memory(ends: Ends) -> None:
    """Earlier calls do not check the kind of memory."""
    ends.init()
    device, host = (ends[0].allocate(NBYTES, kind) for kind in (DEVICE, PINNED))
    other = ends[0].allocate(NBYTES, DEVICE, 3)
    wrong = [(device, NBYTES, PINNED), (host, NBYTES, DEVICE), (other, NBYTES, DEVICE)]
    wrong += [(device, 1 << 30, DEVICE), (12345678, 4096, PINNED)]
    for region in wrong:
        code, handle = ends[0].register(*region)
        assert (code, ends[0].bind(ends.comms[0], handle)) == (0, 0)
        assert ends[0].prepare(ends.comms[0], 1) == RUNTIME
        assert ends[0].unbind(ends.comms[0], handle) == 0
        assert ends[0].deregister(handle) == 0


def test_rank_tables_must_be_the_same(ends: Ends) -> None:
    spaced = table().replace(",", ", ")
    comms = [
        end.init(text, rank, config("c"))[1]
        for rank, (end, text) in enumerate(zip(ends.both, (table(), spaced), strict=True))
    ]
    assert ends.call_both("prepare", *((comm, 5) for comm in comms)) == [PARA, PARA]


def test_prepare_times_out_if_the_other_end_is_dead(ends: Ends) -> None:
    ends.init()
    ends[1].peer.kill()
    ends[0].setting("connect_timeout_ms", "50")
    assert ends[0].prepare(ends.comms[0], 0) == TIMEOUT


def test_both_ends_may_be_in_one_process(tmp_path: Path) -> None:
    end = start({"KVSIM_DIR": str(tmp_path)}, "8.5", 0)
    made = []
    for device in range(2):
        end.use(device)
        _, comm = end.init(table(), device, config("c"))
        address = end.allocate(NBYTES)
        _, handle = end.register(address, NBYTES)
        assert end.bind(comm, handle) == 0
        made.append((device, comm, address))
    assert end.prepare_in_threads([(device, comm) for device, comm, _ in made]) == [0, 0]
    stream = end.stream()
    end.write(made[1][2], b"from the second device")
    pieces = [(made[1][2], made[0][2], 22)]
    assert end.transfer("put", made[1][1], 0, pieces, stream) == 0
    assert end.synchronize(stream) == 0
    assert end.read(made[0][2], 22) == b"from the second device"
    end.peer.finish()


def test_remap_needs_registered_ranges_of_a_communicator(ends: Ends) -> None:
    ends.connect()
    inside = [(ends.memory[0], NBYTES)]
    assert ends[0].remap([ends.comms[0]], inside) == 0
    assert ends[0].remap([], inside) == PARA
    assert ends[0].remap([ends.comms[0]], []) == PARA
    assert ends[0].remap([ends.comms[0]], [(ends[0].allocate(4096), 4096)]) == PARA
    assert ends[0].remap([1], inside) == PARA


def test_destroyed_objects_leave_nothing_behind(ends: Ends) -> None:
    ends.connect()
    left = json.loads(ends[0].leaks())
    assert (left["regions"], left["comms"]) == (1, 1)
    for rank, end in enumerate(ends.both):
        assert end.unbind(ends.comms[rank], ends.handles[rank]) == 0
        assert end.destroy(ends.comms[rank]) == 0
        assert end.deregister(ends.handles[rank]) == 0
        assert end.free(ends.memory[rank]) == 0
        assert end.destroy_stream(ends.streams[rank]) == 0
        assert not any(json.loads(end.leaks()).values())
    assert not ends.log("violation")


def test_freeing_registered_memory_is_a_violation(ends: Ends) -> None:
    ends.connect()
    assert ends[0].free(ends.memory[0]) == 0
    ends[0].unbind(ends.comms[0], ends.handles[0])
    assert ends[0].deregister(ends.handles[0]) == 0
    assert [line["what"] for line in ends.log("violation")] == [
        "memory was freed before it was deregistered"
    ]
