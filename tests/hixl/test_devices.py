"""Engines on simulated devices: the chosen device, and transfers between kinds of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from kvnative._acl import AclLibrary
from kvplan import hixl
from kvplan.hixl import TransferOpDesc
from tests.hixl.conftest import MakeEngine
from tests.hixl.peer import Peer
from tests.hixl.places import MIB, Place, free_name, pattern, registered

LONG_MS = 30_000
# One place, because the two ends are on two devices.
pytestmark = pytest.mark.usefixtures("simulator")


@pytest.fixture
def place(simulator: object) -> Place:
    return Place("ascend", 2)


@pytest.fixture
def set_device() -> Iterator[int]:
    """A function that sets the device, as a program does before it initializes an engine."""
    library = ctypes.CDLL(AclLibrary.load().path)
    library.aclInit(None)
    assert library.aclrtSetDevice(5) == 0
    yield 5
    assert library.aclrtResetDevice(5) == 0


def test_an_engine_uses_the_device_of_its_thread(set_device: int) -> None:
    engine = hixl.Hixl()
    assert engine.initialize("127.0.0.1") == hixl.SUCCESS
    device = engine.datadist.device
    assert device is not None
    assert device.id == set_device
    assert engine.finalize() is None
    assert engine.initialize("127.0.0.1", {"llm.DeviceId": "3"}) == hixl.SUCCESS
    device = engine.datadist.device
    assert device is not None
    assert device.id == 3
    engine.finalize()


def test_host_memory_moves_to_and_from_devices(engine: hixl.Hixl, peer: Peer, place: Place) -> None:
    """Memory of the peer's device is read into host memory here, and written from it."""
    array = Place("host", 2).zeros()[0]
    status, handle = engine.register_mem(
        hixl.MemDesc(array.ctypes.data, array.nbytes), hixl.MEM_HOST
    )
    assert status == hixl.SUCCESS
    peer.fill(1)
    assert engine.connect(peer.name, LONG_MS) == hixl.SUCCESS
    moved = [TransferOpDesc(array.ctypes.data, peer.address, MIB)]
    assert engine.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
    np.testing.assert_array_equal(array, pattern(seed=1))
    array[:] = pattern(seed=2)
    assert engine.transfer_sync(peer.name, hixl.WRITE, moved, LONG_MS) == hixl.SUCCESS
    assert peer.bytes() == pattern(seed=2).tobytes()
    both = registered(engine, place)
    mixed = [*moved, TransferOpDesc(both.address, peer.address, 10)]
    assert engine.transfer_sync(peer.name, hixl.READ, mixed, LONG_MS) == hixl.UNSUPPORTED
    assert engine.deregister_mem(handle) == hixl.SUCCESS


def test_memory_registered_later_is_moved(engine: hixl.Hixl, peer: Peer, place: Place) -> None:
    """Memory may be registered at both ends while they are connected."""
    assert engine.connect(peer.name, LONG_MS) == hixl.SUCCESS
    mine = registered(engine, place)
    address = peer.run(
        """
        assert engine.deregister_mem(memory.handle) == hixl.SUCCESS
        memory = registered(engine, place)
        result = memory.address
        """
    )
    peer.fill(3)
    moved = [TransferOpDesc(mine.address, address, MIB)]
    assert engine.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
    np.testing.assert_array_equal(mine.array, pattern(seed=3))


def test_memory_of_the_wrong_type_is_refused(engine: hixl.Hixl, place: Place) -> None:
    host, device = Place("host", 2).zeros()[0], place.zeros()[1]
    wrong = [(host.ctypes.data, hixl.MEM_DEVICE), (device, hixl.MEM_HOST)]
    for address, kind in wrong:
        status, handle = engine.register_mem(hixl.MemDesc(address, 4096), kind)
        assert (status, handle) == (hixl.PARAM_INVALID, 0)


def test_two_engines_on_one_device_are_not_connected(make_engine: MakeEngine) -> None:
    name = free_name()
    make_engine(name, **{"kvplan.transport": "hccl"})
    other = make_engine(**{"kvplan.transport": "hccl"})
    assert other.connect(name, LONG_MS) == hixl.FAILED
