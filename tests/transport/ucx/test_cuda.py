"""GPU memory at both ends, between two processes of one host: CI lacks the hardware for that."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

import kvplan
from kvplan import CacheDesc, DataType, Placement, Plan, Rows, Transfer
from kvplan.execution.memory import HostMemory
from kvplan.execution.transfers import execute
from kvplan.status import LLMStatusCode
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.ucx.link import UcxLink, UcxPeerMemory
from kvplan.transport.ucx.transport import UcxTransport
from tests.support import cuda
from tests.support.refusals import refused
from tests.support.ucx_library import found
from tests.transport.owner import Owner
from tests.transport.owner_process import pattern

pytestmark = pytest.mark.skipif(bool(cuda.missing_gpu()), reason=cuda.missing_gpu())

TIMEOUT_MS = 20_000
CUDA = '{"UCX_TLS": "cuda,shm"}'
NUM_BLOCKS, BLOCK = 64, 32 << 10
DESC = CacheDesc(4, (NUM_BLOCKS, BLOCK), DataType.DT_UINT8, Placement.DEVICE)
THERE, HERE = [3, 4, 5, 9, 60], [1, 2, 7, 0, 63]

Blocks = NDArray[np.uint8]


def blocks(seed: int) -> Blocks:
    """Return the blocks of a whole cache, of shape (num_tensors, NUM_BLOCKS, BLOCK)."""
    return pattern(seed, DESC.nbytes).reshape(DESC.num_tensors, NUM_BLOCKS, BLOCK)


class CudaOwner(Owner):
    """A process with one cache in GPU memory, and one in host memory."""

    module = "tests.transport.ucx.cuda_process"

    def __init__(self) -> None:
        super().__init__()
        self.run(f"""
        def new(seed):
            global memory, registration
            memory = CudaMemory({DESC.num_tensors}, {DESC.tensor_nbytes})
            memory.write(pattern(seed, memory.size))
            registration = transport.register(DeviceRange(memory.address, memory.size))
            return memory.address
        new(1)
        on_host = pattern(1, {DESC.nbytes})
        transport.register(on_host)
        """)

    def blocks(self) -> Blocks:
        held: Blocks = self.run("result = memory.read()")
        return held.view(np.uint8).reshape(blocks(1).shape)

    def link(self, transport: UcxTransport) -> UcxLink:
        return transport.connect(self.metadata(), timeout_ms=TIMEOUT_MS)


@pytest.fixture(scope="module")
def transport() -> Iterator[UcxTransport]:
    with found():
        transport = UcxTransport(settings=CUDA)
    yield transport
    transport.close()


@pytest.fixture
def owner() -> Iterator[CudaOwner]:
    with found():
        owner = CudaOwner()
    yield owner
    owner.close()


@pytest.fixture
def link(transport: UcxTransport, owner: CudaOwner) -> Iterator[UcxLink]:
    link = owner.link(transport)
    yield link
    link.close()


@pytest.fixture(params=["registered", "unknown to UCX"])
def here(transport: UcxTransport, request: pytest.FixtureRequest) -> Iterator[cuda.CudaMemory]:
    """A cache of this process."""
    memory = cuda.CudaMemory(DESC.num_tensors, DESC.tensor_nbytes)
    memory.write(blocks(2))
    whole = DeviceRange(memory.address, memory.size)
    registration = transport.register(whole) if request.param == "registered" else None
    yield memory
    if registration is not None:
        transport.deregister(registration)
    memory.free()


def remote(link: UcxLink, owner: CudaOwner) -> UcxPeerMemory:
    first = owner.run("result = memory.address")
    addresses = [first + tensor * DESC.tensor_nbytes for tensor in range(DESC.num_tensors)]
    return link.memory(addresses, DESC.tensor_nbytes, writable=True, metadata=owner.metadata())


def pull() -> Plan:
    return kvplan.plan(Transfer(Rows(DESC, THERE), Rows(DESC, HERE)), local="dst")


def push() -> Plan:
    return kvplan.plan(Transfer(Rows(DESC, HERE), Rows(DESC, THERE)), local="src")


def held(memory: cuda.CudaMemory) -> Blocks:
    return memory.read().reshape(blocks(1).shape)


def test_blocks_are_pulled(link: UcxLink, owner: CudaOwner, here: cuda.CudaMemory) -> None:
    execute(pull(), remote(link, owner), here, TIMEOUT_MS)
    expected = blocks(2)
    expected[:, HERE] = blocks(1)[:, THERE]
    np.testing.assert_array_equal(held(here), expected)


def test_blocks_are_pushed(link: UcxLink, owner: CudaOwner, here: cuda.CudaMemory) -> None:
    execute(push(), here, remote(link, owner), TIMEOUT_MS)
    expected = blocks(1)
    expected[:, THERE] = blocks(2)[:, HERE]
    np.testing.assert_array_equal(owner.blocks(), expected)


def test_freed_memory_is_not_read(link: UcxLink, owner: CudaOwner, here: cuda.CudaMemory) -> None:
    """CUDA reuses addresses, and UCX keeps a peer's memory mapped."""
    addresses = set()
    for seed in range(3, 13):
        before = remote(link, owner)
        owner.run("transport.deregister(registration); memory.free()")
        addresses.add(owner.run(f"result = new({seed})"))
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
            execute(pull(), before, here, TIMEOUT_MS)
        execute(pull(), remote(link, owner), here, TIMEOUT_MS)
        np.testing.assert_array_equal(held(here)[:, HERE], blocks(seed)[:, THERE])
    assert len(addresses) < 10


def test_a_peer_that_dies_fails_the_transfer(
    link: UcxLink, owner: CudaOwner, here: cuda.CudaMemory
) -> None:
    there = remote(link, owner)
    execute(pull(), there, here, TIMEOUT_MS)
    owner.kill()
    with refused(LLMStatusCode.LLM_LINK_FAILED):
        execute(pull(), there, here, TIMEOUT_MS)


def test_between_the_host_and_a_gpu(
    transport: UcxTransport, link: UcxLink, owner: CudaOwner, here: cuda.CudaMemory
) -> None:
    """Without RDMA, UCX has no transport between the host and a GPU."""
    array = blocks(2)
    tensors = HostMemory.from_arrays(list(array))
    for plan, sides in (
        (pull(), (remote(link, owner), tensors)),
        (
            push(),
            (tensors, remote(link, owner)),
        ),
    ):
        with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "between the host and a device"):
            execute(plan, *sides, TIMEOUT_MS)
    np.testing.assert_array_equal(array, blocks(2))
    np.testing.assert_array_equal(owner.blocks(), blocks(1))
    execute(pull(), remote(link, owner), here, TIMEOUT_MS)  # the link stays usable
    assert transport.reaches == {"host", "device"}
