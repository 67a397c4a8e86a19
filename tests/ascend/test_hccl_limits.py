"""Limits of HCCL's registrations, which are checked before any call, by the driver's version."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvnative._acl import AclLibrary
from kvnative._backend import KVN_OK
from kvnative._hccl_memory import HcclLibrary
from kvplan import LLMException, LLMStatusCode
from kvplan.transport.hccl.device import MAX_SLOTS, GenerationTable
from tests.ascend.hccl_end import NORESERVE
from tests.ascend.hccl_ends import A2, Ends, two_ends
from tests.ascend.hccl_side import link_both, on_a_host_of_its_own
from tests.ascend.hccl_sides import MakeSide
from tests.ascend.simulator import Controls
from tests.support.peer import RemoteError
from tests.support.refusals import refused

GIB = 1 << 30
NUM_CONNECTIONS = 300  # HCCL registers 256 ranges of a process


def driver(folder: Path, version: str) -> Path:
    """Make a folder like that of the installed driver."""
    (folder / "version.info").write_text(f"Version={version}\nascendhal_version=7.35.23\n")
    return folder


def error_of_region(ends: Ends, address: int) -> str:
    with pytest.raises(RemoteError) as failure:
        ends[0].region(address)
    return str(failure.value.message)


def take_back(ends: Ends, *addresses: int) -> None:
    for address in addresses:
        ends[0].deregister(address)
        ends[0].free(address)


@pytest.mark.parametrize(("version", "is_old"), [("25.2.0", True), ("25.5.0", False)])
def test_the_limit_of_host_memory_depends_on_the_driver(
    tmp_path: Path, version: str, is_old: bool
) -> None:
    hdk = "".join(part.zfill(2) for part in version.split(".")[:2])
    variables = {"KVSIM_HDK": hdk, "KVPLAN_ASCEND_DRIVER": driver(tmp_path, version)}
    with two_ends(tmp_path, A2, **variables) as ends:
        name = ends.open()
        addresses = [ends[0].reserve("pinned", 10 * GIB) for _ in range(3)]
        for address in addresses[:2]:
            ends[0].region(address)
        if is_old:
            message = error_of_region(ends, addresses[2])
            assert f"{30 * GIB} bytes of host memory" in message
            assert "20 GiB" in message
            assert "HDK 25.2.0" in message
            ends[0].free(addresses.pop())
        else:
            ends[0].region(addresses[2])
        ends[0].bind(name, *addresses)
        ends.at_once("prepare", name)
        for end in ends.both:
            end.close(name)
        take_back(ends, *addresses)


def test_device_memory_is_limited(tmp_path: Path) -> None:
    variables = {"KVPLAN_ASCEND_DRIVER": tmp_path / "none"}
    with two_ends(tmp_path, A2, **variables) as ends:
        name = ends.open()
        addresses = [ends[0].reserve("device", 25 * GIB) for _ in range(2)]
        ends[0].region(addresses[0])
        message = error_of_region(ends, addresses[1])  # the connection has some, too
        assert "bytes of device memory" in message
        assert "50 GiB" in message
        assert "HDK of unknown version" in message
        ends[0].free(addresses.pop())
        ends[0].bind(name, *addresses)
        ends.at_once("prepare", name)
        for end in ends.both:
            end.close(name)
        take_back(ends, *addresses)


def test_more_connections_than_ranges_are_possible(tmp_path: Path) -> None:
    """Connections share ranges for the words of their guards, and each has its own words."""
    with two_ends(tmp_path, A2) as ends:
        addresses = ends.memory(mmap.PAGESIZE)
        for end, address in zip(ends.both, addresses, strict=True):
            end.write(address, 0, bytes(mmap.PAGESIZE))
        names = [ends.open() for _ in range(NUM_CONNECTIONS)]
        last = names[-1]
        for end, address in zip(ends.both, addresses, strict=True):
            end.bind(last, address)
        ends.at_once("prepare", last)
        row = (addresses[0], addresses[1], mmap.PAGESIZE)
        outcome = ends[0].transfer(last, "put", [row], guards=[(addresses[1], 0)])
        assert outcome["status"] == KVN_OK
        assert [end.left()["regions"] for end in ends.both] == [1 + -(-NUM_CONNECTIONS // 64)] * 2
        for end in ends.both:
            for name in names:
                end.close(name)
        for end, address in zip(ends.both, addresses, strict=True):
            # The page of words was freed with its last connection.
            assert end.left()["regions"] == 1
            end.deregister(address)
            end.free(address)
            assert end.left() == {}


def test_each_of_several_devices_has_its_own_registrations(
    simulator: Controls, make_side: MakeSide
) -> None:
    sides = [make_side(number) for number in range(2)]
    library = HcclLibrary.load(AclLibrary.load())
    before = [library.registered(number) for number in range(2)]
    memories = [np.zeros((1 + pages) * mmap.PAGESIZE, np.uint8) for pages in (1, 4)]
    for i, pages in enumerate((1, 4)):
        address = -(-memories[i].ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        sides[i].transport.register((address, pages * mmap.PAGESIZE))
        host, device = before[i]
        before[i] = host + pages * mmap.PAGESIZE, device
        assert [library.registered(number) for number in range(2)] == before


@pytest.mark.parametrize("setting", ["hdk", "page_table_bytes"])
def test_a_link_that_lacks_memory_reports_the_registered_amount(
    simulator: Controls, make_side: MakeSide, setting: str
) -> None:
    """The driver's version is unknown here, and HCCL's own text mentions no totals."""
    one, two = (
        make_side(number, local_comm_res=on_a_host_of_its_own(number)) for number in range(2)
    )
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    owner = np.frombuffer(mmap.mmap(-1, 21 * GIB, flags=flags), np.uint8)
    one.transport.register((owner.ctypes.data, owner.nbytes))
    simulator.set(setting, {"hdk": 2502, "page_table_bytes": 4 * GIB}[setting])
    try:
        with refused(LLMStatusCode.LLM_LINK_FAILED) as error:
            link_both(one, two, timeout_ms=1000)  # the other end waits as long
    finally:
        simulator.set(setting, {"hdk": 2505, "page_table_bytes": 1 << 40}[setting])
    assert f"{21 << 10} MiB of the host were to be registered, with HDK of unknown" in str(
        error.value
    )


class Memory:
    """A device with memory for one table, whose writes may fail."""

    def __init__(self) -> None:
        self.fails = False

    def allocate(self, nbytes: int) -> Any:
        return SimpleNamespace(address=4096)

    def write(self, address: int, content: bytes) -> None:
        if self.fails:
            raise LLMException("the device does not answer")


@pytest.mark.parametrize(("is_lease", "num_slots"), [(False, 1), (True, MAX_SLOTS - 1)])
def test_a_slot_that_the_device_does_not_publish_stays_free(is_lease: bool, num_slots: int) -> None:
    """The table has one slot of the kind."""
    device: Any = Memory()
    table = GenerationTable(device, num_slots)
    device.fails = True
    for _ in range(2):
        with pytest.raises(LLMException, match="does not answer"):
            table.take(is_lease)
    device.fails = False
    table.take(is_lease)
