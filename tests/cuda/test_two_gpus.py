"""Transfers between two GPUs of one host by transport local, with and without peer access."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
from numpy.typing import NDArray

import kvplan
from kvnative._backend import ThreadPool
from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    LLMStatusCode,
    Options,
    Placement,
    Rows,
    Transfer,
)
from kvplan.device.cuda import CudaDevice
from kvplan.device.memory import DeviceMemory
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.tcp.transport import TcpTransport
from tests.ascend.simulator import Log
from tests.cuda.side import Other, Side, Whose, pattern
from tests.cuda_sim.simulator import CudaControls
from tests.device.engines import DEVICE, HOST, contents
from tests.support.refusals import refused
from tests.transport.tcp.peer import linked

BLOCKS, BLOCK = 4096, 256
KIB = 1 << 10
NBYTES = BLOCKS * BLOCK
MANY = CacheDesc(1, (BLOCKS, BLOCK), DataType.DT_UINT8, Placement.DEVICE)
SCATTERED = np.random.default_rng(3).permutation(BLOCKS)
PULL = kvplan.plan(Transfer(Rows(MANY, SCATTERED.tolist()), Rows(MANY, range(BLOCKS))), local="dst")
PUSH = kvplan.plan(Transfer(Rows(MANY, range(BLOCKS)), Rows(MANY, SCATTERED.tolist())), local="src")
WHOSE = pytest.mark.parametrize("whose", ["kvplan", "program"])
COPIES = ("cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")
ONE_LAUNCH = {COPIES[0]: 1, COPIES[1]: 1, COPIES[2]: 0, COPIES[3]: 0}
"""With one copy of the descriptors."""
SEES = pytest.mark.parametrize("sees", ["all", "its own"])


@pytest.fixture
def side(cuda_simulator: CudaControls) -> Iterator[Side]:
    """This process on GPU 0, which sees all GPUs. A test that leaks resources fails."""
    side = Side(0)
    yield side
    assert side.close() == {}


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, Other]]:
    """Processes by the GPUs that they see."""
    kept: dict[str, Other] = {}
    yield kept
    for value in kept.values():
        value.close()


def other_on_1(processes: dict[str, Other], sees: str) -> Other:
    """Return a process on GPU 1, which has number 0 there if the process sees no other GPU."""
    if sees in processes and not processes[sees].dead:
        processes[sees].run(f"side = Side({0 if sees == 'its own' else 1})")
    else:
        alone = {"CUDA_VISIBLE_DEVICES": "1"}
        processes[sees] = Other(0, **alone) if sees == "its own" else Other(1)
    return processes[sees]


@pytest.fixture
def other(
    cuda_simulator: CudaControls, processes: dict[str, Other], request: pytest.FixtureRequest
) -> Iterator[Other]:
    other = other_on_1(processes, getattr(request, "param", "its own"))
    yield other
    if other.dead:
        other.close()
    else:
        assert other.call("close") == {}


BOTH_SEEN = pytest.mark.parametrize("other", ["all", "its own"], indirect=True)


def local(side: Side, address: int) -> DeviceMemory:
    return DeviceMemory.from_addresses(side.device, MANY, [address], owner=side)


def rows(of: bytes | NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.frombuffer(of, np.uint8).reshape(BLOCKS, BLOCK)


@WHOSE
@BOTH_SEEN
class TestBetweenProcesses:
    def test_4096_blocks_are_pulled_in_one_launch(
        self, side: Side, other: Other, whose: Whose, sim_log: Log
    ) -> None:
        there = other.call("offer", whose, 1, NBYTES)
        here = side.allocate(whose, 2, NBYTES)
        with side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES)
            sim_log.restart()
            kvplan.execute(PULL, memory, local(side, here))
            assert sim_log.counts(*COPIES) == ONE_LAUNCH
            del memory
        assert np.array_equal(
            rows(side.contents(here, NBYTES)), rows(pattern(1, NBYTES))[SCATTERED]
        )

    def test_4096_blocks_are_pushed_in_one_launch(
        self, side: Side, other: Other, whose: Whose, sim_log: Log
    ) -> None:
        there = other.call("offer", whose, 1, NBYTES)
        here = side.allocate(whose, 2, NBYTES)
        with side.transport.connect(other.call("metadata")) as link:
            memory = link.memory([there], NBYTES, writable=True)
            sim_log.restart()
            kvplan.execute(PUSH, local(side, here), memory)
            assert sim_log.counts(*COPIES) == ONE_LAUNCH
            del memory
        found = rows(other.call("contents", there, NBYTES))
        assert np.array_equal(found[SCATTERED], rows(pattern(2, NBYTES)))

    def test_a_gpu_that_its_user_does_not_see_is_reachable(
        self, side: Side, other: Other, whose: Whose, sim_log: Log
    ) -> None:
        """Workers of vLLM are such processes: each has its own CUDA_VISIBLE_DEVICES."""
        there = side.offer(whose, 1, NBYTES)
        sim_log.restart()
        found = other.run(
            """
            from tests.cuda.test_two_gpus import MANY, NBYTES, PULL, kvplan, local
            here = side.allocate(whose, 2, NBYTES)
            with side.transport.connect(metadata) as link:
                kvplan.execute(PULL, link.memory([there], NBYTES), local(side, here))
            del link
            result = side.contents(here, NBYTES)
            """,
            metadata=side.metadata(),
            there=there,
            whose=whose,
        )
        assert np.array_equal(rows(found), rows(pattern(1, NBYTES))[SCATTERED])
        assert sim_log.counts("cuLaunchKernel", pid=other.pid) == {"cuLaunchKernel": 1}


class TestWithoutPeerAccess:
    @pytest.fixture(autouse=True)
    def restored(self, cuda_simulator: CudaControls) -> Iterator[None]:
        yield
        cuda_simulator.set("cuda_peers", 1)

    @WHOSE
    def test_a_gpu_without_peer_access_is_refused(
        self, side: Side, other: Other, whose: Whose, cuda_simulator: CudaControls
    ) -> None:
        there = other.call("offer", whose, 1)
        metadata = other.call("metadata")
        cuda_simulator.set("cuda_peers", 0)
        assert "no peer access between the two" in (side.transport.shortfall(metadata) or "")
        with (
            side.transport.connect(metadata) as link,
            refused(
                "LLM_FEATURE_NOT_ENABLED",
                "device 0 cannot reach the memory of device 1: there is no peer access between "
                r"the two \(nvidia-smi topo -p2p r shows where there is\): use "
                "kvplan.transport=tcp",
            ),
        ):
            link.memory([there], 100)

    @WHOSE
    @pytest.mark.parametrize("setting", ["cuda_peers", "cuda_hidden"])
    def test_a_hidden_gpu_without_peer_access_is_refused(
        self, side: Side, other: Other, whose: Whose, setting: str
    ) -> None:
        """Only the driver can detect it, when the memory is mapped."""
        there = side.offer(whose, 1)
        message, status = other.run(
            """
            from tests.cuda_sim.simulator import controls
            assert side.transport.shortfall(metadata) is None
            controls().set(setting, 0)
            try:
                with side.transport.connect(metadata) as link:
                    link.memory([there], 100)
            except Exception as error:
                result = error.args[0], error.status_code
            finally:
                controls().set(setting, 1)
            del link
            """,
            metadata=side.metadata(),
            there=there,
            setting=setting,
        )
        assert status is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        assert "to be mapped for device 0: cu" in message
        assert "CUDA_VISIBLE_DEVICES hides that GPU from this process" in message
        assert message.endswith("use kvplan.transport=tcp")

    def test_one_way_peer_access_supports_only_that_direction(
        self, side: Side, other: Other, cuda_simulator: CudaControls
    ) -> None:
        """Transfers that this side executes work, but the transport is not chosen automatically."""
        there = other.call("offer", "kvplan", 1, NBYTES)
        metadata = other.call("metadata")
        cuda_simulator.set("cuda_peers", 2)
        assert "device 1 cannot reach the memory of device 0" in (
            side.transport.shortfall(metadata) or ""
        )
        here = local(side, side.allocate("kvplan", 2, NBYTES))
        with side.transport.connect(metadata) as link:
            kvplan.execute(PULL, link.memory([there], NBYTES), here)


class TestEnginesOfOneProcess:
    """Two GPUs of one program, with threads or tensors on both."""

    @pytest.fixture
    def two(
        self, cuda_simulator: CudaControls, request: pytest.FixtureRequest
    ) -> Iterator[tuple[LlmDataDist, LlmDataDist]]:
        """Engines on GPU 0 and 1, unlinked, with transport auto or the given one."""
        with ExitStack() as held:
            made = [held.enter_context(LlmDataDist(number, LlmRole.MIX)) for number in (1, 2)]
            for device_id, item in enumerate(made):
                options = Options(
                    accelerator="cuda",
                    device_id=device_id,
                    transport=getattr(request, "param", "auto"),
                    listen_ip_info="127.0.0.1:0",
                )
                item.initialize(options)
            yield made[0], made[1]
        gc.collect()

    def link(self, two: tuple[LlmDataDist, LlmDataDist]) -> str:
        """Link the engines; return the transport that they have chosen."""
        first, second = two
        assert first.listen_address is not None
        second.link_clusters([ClusterInfo(1, first.listen_address)]).raise_for_status()
        (found,) = second.links()
        return found.transport

    def test_auto_chooses_local(self, two: tuple[LlmDataDist, LlmDataDist]) -> None:
        assert self.link(two) == "local"

    @pytest.mark.parametrize(
        ("two", "taken"), [("auto", "local+tcp"), ("local", "local")], indirect=["two"]
    )
    @pytest.mark.parametrize("peers", [0, 2])
    def test_auto_avoids_local_without_peer_access(
        self,
        two: tuple[LlmDataDist, LlmDataDist],
        taken: str,
        peers: int,
        cuda_simulator: CudaControls,
    ) -> None:
        """Auto chooses a transport that reaches the GPUs; local only reaches host memory."""
        cuda_simulator.set("cuda_peers", peers)
        try:
            assert self.link(two) == taken
            there = two[0].allocate_blocks_cache(DEVICE, BlocksCacheKey(1))
            two[0].write_cache(there, contents(1))
            here = two[1].allocate_blocks_cache(DEVICE)
            if taken == "local+tcp":
                two[1].pull_blocks(BlocksCacheKey(1), here, [0, 5], [3, 4])
                assert np.array_equal(two[1].arrays(here, copy=True)[1][3], contents(1)[1][0])
            else:
                with refused("LLM_FEATURE_NOT_ENABLED", "device 1 cannot reach .* device 0"):
                    two[1].pull_blocks(BlocksCacheKey(1), here, [0], [3])
        finally:
            cuda_simulator.set("cuda_peers", 1)

    @pytest.mark.parametrize(("transport", "taken"), [("auto", "local+tcp"), ("local", "local")])
    @pytest.mark.parametrize("links", ["cuda", "none"])
    def test_an_engine_without_a_gpu_reaches_the_gpu_of_a_peer_only_over_tcp(
        self, cuda_simulator: CudaControls, links: str, transport: str, taken: str
    ) -> None:
        """Memory of a peer's GPU is reached over tcp, whichever end makes the link."""
        with ExitStack() as held:
            engines = {}
            for number, accelerator in enumerate(("cuda", "none"), 1):
                engine = engines[accelerator] = LlmDataDist(number, LlmRole.MIX)
                held.enter_context(engine).initialize(
                    Options(
                        accelerator=accelerator,
                        transport=transport,
                        listen_ip_info="127.0.0.1:0",
                    )
                )
            listens = engines["none" if links == "cuda" else "cuda"]
            assert listens.listen_address is not None
            cluster = ClusterInfo(listens.cluster_id, listens.listen_address)
            engines[links].link_clusters([cluster]).raise_for_status()
            assert engines["none"].links()[0].transport == taken
            there = engines["cuda"].allocate_blocks_cache(DEVICE, BlocksCacheKey(1))
            engines["cuda"].write_cache(there, contents(1))
            here = engines["none"].allocate_blocks_cache(HOST)
            if taken == "local":
                with refused("LLM_FEATURE_NOT_ENABLED", "no device that could reach it"):
                    engines["none"].pull_blocks(BlocksCacheKey(1), here, [0, 5], [3, 4])
            else:
                engines["none"].pull_blocks(BlocksCacheKey(1), here, [0, 5], [3, 4])
                assert np.array_equal(engines["none"].arrays(here)[1][3], contents(1)[1][0])
                engines["none"].push_blocks(here, BlocksCacheKey(1), [4], [2])
                found = engines["cuda"].arrays(there, copy=True)
                assert np.array_equal(found[1][2], contents(1)[1][5])
        gc.collect()

    def test_memory_of_another_gpu_does_not_move_over_tcp(
        self, cuda_simulator: CudaControls
    ) -> None:
        """The buffers of the link are those of the engine's own GPU."""
        with ExitStack() as held:
            own, other = (held.enter_context(closing(CudaDevice(number))) for number in range(2))
            one, two = (held.enter_context(TcpTransport(device=own)) for _ in range(2))
            there = own.allocate(KIB)
            two.register(DeviceRange(there.address, KIB, there))
            link, other_end = linked(one, two)
            held.callback(other_end.close)
            held.callback(link.close)
            memory, pool = link.memory([there.address], KIB), ThreadPool(1)
            for device in (own, other):
                buffer = device.allocate(KIB)
                desc = CacheDesc(1, (1, KIB), DataType.DT_UINT8)
                here = DeviceMemory.from_addresses(device, desc, [buffer.address], owner=buffer)
                if device is own:
                    assert memory.backend(pool, "get", here, None) is not None
                else:
                    with refused("LLM_FEATURE_NOT_ENABLED", "the engine .* has device 0: use the"):
                        memory.backend(pool, "get", here, None)

    def test_two_slices_of_one_card_are_two_gpus(self, cuda_simulator: CudaControls) -> None:
        """With MIG, both slices have the UUID of the card, and each has one of its own."""
        cuda_simulator.set("cuda_mig", 1)
        try:
            slices = [CudaDevice(number) for number in (0, 1)]
            first, second = (device.sharing for device in slices)
            assert first is not None
            assert second is not None
            assert first.shortfall(first.uuid) is None
            assert "there is no peer access between the two" in (first.shortfall(second.uuid) or "")
            facts = [device.describe()["uuid"] for device in slices]
            assert facts[0] != facts[1]
            assert all(str(uuid).startswith("MIG-") for uuid in facts), facts
            for device in slices:
                device.close()
        finally:
            cuda_simulator.set("cuda_mig", 0)

    def test_registered_memory_is_used_in_place(
        self, two: tuple[LlmDataDist, LlmDataDist], sim_log: Log
    ) -> None:
        """CUDA opens no IPC handles in their own process; the contexts have peer access instead."""
        assert self.link(two) == "local"
        with ExitStack() as held:
            programs = [Memory(0), Memory(1)]
            for other_program in programs:
                held.callback(other_program.close)
            caches = [
                engine.register_blocks_cache(MANY, [program.address], BlocksCacheKey(number, 5))
                for number, (engine, program) in enumerate(zip(two, programs, strict=True), 1)
            ]
            sim_log.restart()
            blocks = SCATTERED.tolist()
            two[1].pull_blocks(BlocksCacheKey(1, 5), caches[1], blocks, [*range(BLOCKS)])
            assert sim_log.counts(*COPIES) == ONE_LAUNCH
            found = rows(programs[1].contents())
            assert np.array_equal(found, rows(pattern(1, NBYTES))[SCATTERED])
            two[1].push_blocks(caches[1], BlocksCacheKey(1, 5), [*range(BLOCKS)], blocks)
            assert np.array_equal(rows(programs[0].contents()), rows(pattern(1, NBYTES)))
            assert sim_log.calls("cuIpcOpenMemHandle_v2", pid=os.getpid()) == []
            programs[0].free()
            with refused("LLM_KV_CACHE_NOT_EXIST", "not all, memory of the device"):
                two[1].pull_blocks(BlocksCacheKey(1, 5), caches[1], blocks, [*range(BLOCKS)])
            for engine, cache in zip(two, caches, strict=True):
                engine.unregister_cache(cache.cache_id)


class Memory:
    """Memory of cuMemAlloc on a device, filled with a pattern."""

    def __init__(self, device_id: int) -> None:
        self._side = Side(device_id)
        self.address = self._side.allocate("program", device_id + 1, NBYTES)

    def contents(self) -> bytes:
        self._side.enter()
        return self._side.contents(self.address, NBYTES)

    def free(self) -> None:
        self._side.enter()
        self._side.free(self.address)

    def close(self) -> None:
        self._side.enter()
        self._side.end()
