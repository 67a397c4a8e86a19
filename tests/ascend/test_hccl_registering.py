"""Registrations over HCCL: their parts, and the effect of their end on transfers."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from kvnative._acl import AclLibrary
from kvnative._hccl_memory import HcclLibrary
from kvplan import LLMException, LLMStatusCode
from kvplan.transport.hccl.device import whole_pages
from kvplan.transport.hccl.regions import HeldRegion
from kvplan.transport.host_memory import host_range
from kvplan.transport.protocol import DeviceRange
from tests.ascend.hccl_side import DEADLINE_S, PULL, PUSH, Side, link_both, moved
from tests.ascend.hccl_sides import MakeSide, error_of
from tests.ascend.simulator import Controls, Log
from tests.support.refusals import refused


def test_a_transfer_with_deregistered_memory_never_succeeds(one: Side, two: Side) -> None:
    one.fill(1)
    two.fill(2)
    link, _ = link_both(one, two)
    remote = two.peer_memory(link, writable=True)
    two.transport.deregister(two.registration)
    for plan, src, dst in ((PULL, remote, one.memory), (PUSH, one.memory, remote)):
        error = error_of(kvplan.execute, plan, src, dst)
        assert error.status_code != LLMStatusCode.LLM_SUCCESS
        assert error.unconfirmed == ((0, plan.num_descriptors),)


def test_an_ended_registration_inside_a_pool_is_refused(make_side: MakeSide, one: Side) -> None:
    two = make_side(1, registers=False)
    two.transport.preregister_pool(DeviceRange(two.buffer.address, two.buffer.nbytes, two.buffer))
    part = two.register()
    link, _ = link_both(one, two)
    remote = two.peer_memory(link)
    kvplan.execute(PULL, remote, one.memory)
    two.transport.deregister(part)
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        kvplan.execute(PULL, remote, one.memory)
    # The same slot and address, but another registration.
    again = two.register()
    assert again.range.slot == part.range.slot
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        kvplan.execute(PULL, remote, one.memory)
    kvplan.execute(
        PULL, two.peer_memory(link, metadata=two.transport.metadata([again])), one.memory
    )


@pytest.mark.parametrize("first", [0, 1], ids=["behind it", "before it"])
def test_memory_in_several_registrations_is_reached(
    make_side: MakeSide, one: Side, first: int
) -> None:
    """The second part is registered directly behind the first one, or directly before it."""
    two = make_side(1, registers=False)
    page = 2 << 20
    buffer = two.device.allocate(2 * page)
    two.transport.register(DeviceRange(buffer.address + first * page, page))
    two.transport.register(DeviceRange(buffer.address, 2 * page))
    link, _ = link_both(one, two)
    link.memory([buffer.address, buffer.address + page], page)
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED) as error:
        link.memory([buffer.address + page // 2], page)
    assert "register the whole first" in str(error.value)


def test_deregistered_local_memory_is_staged(one: Side, two: Side, sim_log: Log) -> None:
    """Facts about local memory of one transfer may be outdated in the next."""
    theirs, ours = two.fill(2), one.memory
    link, _ = link_both(one, two)
    remote = two.peer_memory(link)
    for _ in range(2):
        kvplan.execute(PULL, remote, ours)  # directly into the registered memory
    one.transport.deregister(one.registration)
    before = one.fill(1)
    kvplan.execute(PULL, remote, ours)  # through the staging memory
    np.testing.assert_array_equal(one.seen, moved(theirs, before))
    one.registration = one.register()
    sim_log.restart()
    kvplan.execute(PULL, remote, ours)
    # A connection that binds the memory.
    assert sim_log.counts("HcclCommPrepare")["HcclCommPrepare"] > 0


@pytest.mark.parametrize("begins", [0, 100])
def test_memory_may_be_registered_again_before_hccl_has_deregistered_it(
    one: Side, two: Side, begins: int
) -> None:
    """The thread that deregisters in the background has no time now."""
    theirs, before = two.fill(2), one.fill(1)
    link, _ = link_both(one, two)
    remote = two.peer_memory(link)
    kvplan.execute(PULL, remote, one.memory)
    free = threading.Event()
    one.transport._background.do(free.wait)
    try:
        one.transport.deregister(one.registration)
        buffer = one.buffer
        part = DeviceRange(buffer.address + begins, buffer.nbytes - begins, buffer)
        one.registration = one.transport.register(part)
    finally:
        free.set()
    kvplan.execute(PULL, remote, one.memory)
    np.testing.assert_array_equal(one.seen, moved(theirs, before))
    assert one.transport._background.wait(DEADLINE_S)
    assert len(one.transport._hccl.regions.all()) == 1


def test_two_registrations_of_a_range_end_separately(one: Side, two: Side) -> None:
    second = two.register()
    link, _ = link_both(one, two)
    two.transport.deregister(two.registration)
    kvplan.execute(
        PULL,
        two.peer_memory(link, metadata=two.transport.metadata([second])),
        one.memory,
    )
    two.transport.deregister(second)
    two.transport.deregister(second)
    assert two.transport._hccl.regions.all() == []


def test_another_devices_memory_is_refused(one: Side, two: Side) -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID):
        one.transport.register(DeviceRange(two.buffer.address, 100))


def test_read_only_memory_is_not_written(make_side: MakeSide, one: Side) -> None:
    two = make_side(1, registers=False)
    two.transport.register(
        DeviceRange(two.buffer.address, two.buffer.nbytes, two.buffer), writable=False
    )
    link, _ = link_both(one, two)
    with refused(LLMStatusCode.LLM_PARAM_INVALID):
        two.peer_memory(link, writable=True)


def test_a_full_generation_table_refuses_registrations(make_side: MakeSide) -> None:
    side = make_side(0, max_registrations=2)
    other = side.register()
    with refused(LLMStatusCode.LLM_OUT_OF_MEMORY):
        side.register()
    side.transport.deregister(side.registration)
    again = side.register()
    for item in (other, again):
        side.transport.deregister(item)
    # The refused registration holds no region, either.
    assert side.transport._hccl.regions.all() == []


def test_memory_can_be_registered_after_a_refusal(simulator: Controls, make_side: MakeSide) -> None:
    """The refused registration is not counted, either."""
    side = make_side(0, registers=False)
    library = HcclLibrary.load(AclLibrary.load())
    before = library.registered(0)
    for _ in range(2):
        simulator.add_fault("HcclRegisterGlobalMem:1=2")
        with pytest.raises(LLMException, match="HcclRegisterGlobalMem: 2"):
            side.register()
        assert library.registered(0) == before
    registration = side.register()
    assert library.registered(0)[1] >= before[1] + side.buffer.nbytes
    side.transport.deregister(registration)


def test_another_transports_metadata_is_refused(one: Side, two: Side) -> None:
    link, _ = link_both(one, two)
    with refused(LLMStatusCode.LLM_PARAM_INVALID) as error:
        two.peer_memory(link, metadata=one.transport.metadata())
    assert "another" in str(error.value)


def test_an_address_that_is_not_registered_is_refused(one: Side, two: Side) -> None:
    link, _ = link_both(one, two)
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        link.memory([two.buffer.address - 1], 10)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("registration", "HcclRegisterGlobalMem"),
        ("pool", "HcclRegisterGlobalMem"),
        ("registration", "max_registrations"),
        ("registration", "the transport is closed"),
        ("pool", "the transport is closed"),
        ("registration", "of the other kind"),
        ("pool", "of the other kind"),
    ],
)
def test_an_error_does_not_keep_refused_host_memory_alive(
    make_side: MakeSide, simulator: Controls, what: str, why: str
) -> None:
    side, memory = make_side(0, max_registrations=1, registers=False), bytearray(4096)
    transport = side.transport
    match why:
        case "HcclRegisterGlobalMem":
            simulator.add_fault("HcclRegisterGlobalMem:1=2")
        case "max_registrations":
            side.register()
        case "the transport is closed":
            transport.close()
        case _:
            page = whole_pages(None, host_range(memory, writable=True).address, 1)
            transport._hccl.regions.cover(*page, on_device=True)
    before = transport._hccl.regions.all()
    call = transport.preregister_pool if what == "pool" else transport.register
    with pytest.raises(LLMException, match=why) as caught:
        call(memory)
    memory.extend(b"more")
    assert caught.value
    assert transport._hccl.regions.all() == before
    transport._hccl.regions.release(before if why == "of the other kind" else (), HeldRegion.close)


def test_an_ended_registration_does_not_keep_host_memory_alive(one: Side) -> None:
    memory = bytearray(4096)
    registration = one.transport.register(memory)
    one.transport.deregister(registration)
    memory.extend(b"more")
    assert registration.nbytes == 4096
