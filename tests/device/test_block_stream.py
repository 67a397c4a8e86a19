"""Streams that wait for a transfer, on devices that support it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    GatherTask,
    LlmDataDist,
    LLMException,
    LlmRole,
    Options,
    Placement,
    Rows,
    Shard,
    Transfer,
    TransferTask,
)
from tests.ascend.device import OnDeviceOverTcp
from tests.ascend.simulator import Controls
from tests.cuda.device import OnCudaOverTcp
from tests.cuda_sim.simulator import CudaControls
from tests.device.compute import CudaCompute, compute_on
from tests.device.engines import DEVICE, HOST, contents, engine_on
from tests.device.pair import FOREVER, Pair, row
from tests.device.test_compute_events import ROW_NBYTES
from tests.support.refusals import refused

only_cuda = pytest.mark.parametrize("simulator", ["cuda"], indirect=True)
between_gpus = pytest.mark.parametrize(("simulator", "linked"), [("cuda", "tcp")], indirect=True)


class TestOffloading:
    """Blocks that return from the host just before the model reads them."""

    @only_cuda
    @pytest.mark.parametrize("waits", ["wait", "await"])
    def test_the_model_reads_the_blocks_that_were_swapped_in(
        self, simulator: CudaControls, datadist: LlmDataDist, compute: CudaCompute, waits: str
    ) -> None:
        gpu = datadist.allocate_blocks_cache(DEVICE)
        host = datadist.allocate_blocks_cache(HOST)
        given = contents(1, HOST)
        datadist.write_cache(host, given)
        simulator.add_fault("cuLaunchKernel:1=hang")
        task = datadist.submit(Transfer(Rows(host, [3, 6]), Rows(gpu, [0, 5])))
        task.block_stream(compute)
        copies = [compute.read(address, 6 * ROW_NBYTES) for address in gpu.tensor_addrs]
        assert not task.wait_done(20)
        assert not compute.is_done
        simulator.end_hangs()
        for at, expected in zip(copies, given, strict=True):
            rows = np.frombuffer(compute.seen(at, 6 * ROW_NBYTES), np.uint16).reshape(6, -1)
            assert (rows[[0, 5]] == expected[[3, 6]]).all()
        if waits == "wait":
            task.wait(FOREVER)
        else:
            asyncio.run(awaited(task))
        task.block_stream(compute)  # the task is done, so there is nothing to wait for

    @only_cuda
    def test_the_model_overwrites_blocks_only_after_they_were_swapped_out(
        self, simulator: CudaControls, datadist: LlmDataDist, compute: CudaCompute
    ) -> None:
        """The copy runs between the model's earlier and later work, and no host thread waits."""
        gpu = datadist.allocate_blocks_cache(DEVICE)
        host = datadist.allocate_blocks_cache(HOST)
        for address in gpu.tensor_addrs:
            compute.fill(address, ROW_NBYTES, 3)
        compute.wait()
        task = datadist.submit(Transfer(Rows(gpu, [0]), Rows(host, [7])))
        task.block_stream(compute)
        for address in gpu.tensor_addrs:
            compute.fill(address, ROW_NBYTES, 4)
        compute.wait()
        assert all((array[7] == row(3)).all() for array in datadist.arrays(host))
        assert all((array[0] == row(4)).all() for array in datadist.arrays(gpu, copy=True))
        task.wait(FOREVER)

    @only_cuda
    @pytest.mark.parametrize("ends", ["timeout", "cancel"])
    def test_the_model_continues_after_an_abandoned_transfer(
        self, simulator: CudaControls, datadist: LlmDataDist, compute: CudaCompute, ends: str
    ) -> None:
        gpu = datadist.allocate_blocks_cache(DEVICE)
        host = datadist.allocate_blocks_cache(HOST)
        simulator.add_fault("cuLaunchKernel:1=hang")
        task = datadist.submit(Transfer(Rows(host, [3]), Rows(gpu, [0])))
        task.block_stream(compute)
        if ends == "cancel":
            task.cancel()
        with refused("LLM_CANCELLED" if ends == "cancel" else "LLM_TIMEOUT"):
            task.wait(20)
        simulator.end_hangs()
        compute.wait()

    @only_cuda
    def test_the_model_continues_after_the_engine_ends(self, simulator: CudaControls) -> None:
        with engine_on(simulator, sync_kv_cache_wait_time=30) as datadist:
            compute = compute_on(simulator)
            gpu = datadist.allocate_blocks_cache(DEVICE)
            host = datadist.allocate_blocks_cache(HOST)
            simulator.add_fault("cuLaunchKernel:1=hang")
            task = datadist.submit(Transfer(Rows(host, [3]), Rows(gpu, [0])))
            task.block_stream(compute)
            # It frees memory after all work of the context.
            finalizing = threading.Thread(target=datadist.finalize)
            finalizing.start()
            with pytest.raises(LLMException, match=r"cancel|finalize"):
                task.wait(FOREVER)
            simulator.end_hangs()
            finalizing.join()
            compute.wait()
            task.block_stream(compute)
            compute.settle()
            compute.close()
            del task, finalizing

    @only_cuda
    def test_a_captured_stream_is_refused(
        self, datadist: LlmDataDist, compute: CudaCompute, simulator: CudaControls
    ) -> None:
        gpu = datadist.allocate_blocks_cache(DEVICE)
        simulator.add_fault("cuLaunchKernel:1=hang")
        task = datadist.submit(Transfer(Rows(gpu, [0]), Rows(gpu, [5])))
        with compute.capture():
            with refused("LLM_PARAM_INVALID", "stream=.* is captured into a CUDA graph"):
                task.block_stream(compute)
            with refused("LLM_PARAM_INVALID", "after=.* is captured into a CUDA graph"):
                datadist.submit(Transfer(Rows(gpu, [0]), Rows(gpu, [5])), after=compute)
        simulator.end_hangs()
        task.wait(FOREVER)

    def test_a_copy_inside_host_memory_is_refused(
        self, datadist: LlmDataDist, compute: Any
    ) -> None:
        task = datadist.submit(
            Transfer(
                Rows(datadist.allocate_blocks_cache(HOST), [0]),
                Rows(datadist.allocate_blocks_cache(HOST), [5]),
            )
        )
        with refused("LLM_FEATURE_NOT_ENABLED", "not moved by work on a device's streams"):
            task.block_stream(compute)
        task.wait(FOREVER)

    @pytest.mark.parametrize("simulator", ["ascend"], indirect=True)
    def test_no_ascend_stream_waits_for_a_transfer(
        self, datadist: LlmDataDist, compute: Any
    ) -> None:
        """If a stream of the Ascend runtime is aborted, streams that wait for it never continue."""
        gpu = datadist.allocate_blocks_cache(DEVICE)
        compute.hold()
        task = datadist.submit(Transfer(Rows(gpu, [0]), Rows(gpu, [5])), after=compute)
        with refused("LLM_FEATURE_NOT_ENABLED", "no stream of the Ascend runtime can wait"):
            task.block_stream(compute)
        compute.release()
        task.wait(FOREVER)

    def test_events_and_streams_of_another_accelerator_are_refused(
        self, simulator: Controls, datadist: LlmDataDist, compute: Any
    ) -> None:
        task = datadist.submit(
            Transfer(
                Rows(datadist.allocate_blocks_cache(DEVICE), [0]),
                Rows(datadist.allocate_blocks_cache(DEVICE), [5]),
            )
        )
        with pytest.raises(TypeError, match=r"stream=.* must be a stream of the model's compute"):
            task.block_stream(compute.event())
        other = "cuda" if simulator.accelerator == "ascend" else "npu"
        with refused("LLM_PARAM_INVALID", f"stream=.*another accelerator: it has {other}_event"):
            task.block_stream(SimpleNamespace(**{f"{other}_stream": 16}))
        task.wait(FOREVER)


async def awaited(task: TransferTask) -> None:
    await task


class TestBetween:
    """Transfers between two engines of one process."""

    @between_gpus
    def test_a_stream_waits_for_a_pull_from_the_gpu_of_a_peer(
        self, simulator: CudaControls, linked: Pair
    ) -> None:
        given = contents(5)
        prefill, decode = linked.prefill, linked.decode
        source = prefill.allocate_blocks_cache(DEVICE, BlocksCacheKey(3))
        prefill.write_cache(source, given)
        simulator.add_fault("cuLaunchKernel:1=hang")
        compute = compute_on(simulator, 4)
        task = decode.submit(Transfer(Rows(BlocksCacheKey(3), [2, 1]), Rows(linked.theirs, [0, 4])))
        task.block_stream(compute)
        copies = [compute.read(address, 5 * ROW_NBYTES) for address in linked.theirs.tensor_addrs]
        assert not compute.is_done
        simulator.end_hangs()
        for at, expected in zip(copies, given, strict=True):
            rows = np.frombuffer(compute.seen(at, 5 * ROW_NBYTES), np.uint16).reshape(5, -1)
            assert (rows[[0, 4]] == expected[[2, 1]]).all()
        task.wait(FOREVER)
        compute.close()

    @between_gpus
    def test_a_stream_waits_for_a_gather_from_several_caches(
        self, simulator: CudaControls, linked: Pair
    ) -> None:
        of = "block token head dim"
        layers, heads = range(1), (range(1), range(1, 2), range(2))
        one, other, both = (
            CacheDesc(2, (4, 2, len(head), 8), DataType.DT_UINT16, Placement.DEVICE,
                      kv_tensor_format=of, shard=Shard(layers, head, 1, 2))
            for head in heads
        )  # fmt: skip
        for index, desc in enumerate((one, other)):
            key = BlocksCacheKey(3, index)
            cache = linked.prefill.allocate_blocks_cache(desc, key)
            linked.prefill.write_cache(
                cache, [np.full(desc.shape, index + 1, np.uint16) for _ in range(2)]
            )
        target = linked.decode.allocate_blocks_cache(both)
        simulator.add_fault("cuLaunchKernel:1=hang", "cuLaunchKernel:2=hang")
        compute = compute_on(simulator, 4)
        keys = [BlocksCacheKey(3, index) for index in range(2)]
        task: GatherTask = linked.decode.submit(
            Transfer(
                [Rows(cache, blocks) for cache, blocks in zip(keys, [[3], [1]], strict=True)],
                Rows(target, [0]),
            )
        )
        task.block_stream(compute)
        nbytes = both.stride
        copies = [compute.read(address, nbytes) for address in target.tensor_addrs]
        assert not compute.is_done
        simulator.end_hangs()
        for address in copies:
            tokens = np.frombuffer(compute.seen(address, nbytes), np.uint16).reshape(2, 2, 8)
            assert (tokens[:, 0] == 1).all()
            assert (tokens[:, 1] == 2).all()
        task.wait(FOREVER)
        compute.close()

    @between_gpus
    def test_the_model_overwrites_rows_only_after_they_were_pushed(
        self, simulator: CudaControls, linked: Pair
    ) -> None:
        """A push sends notices to the owner of the rows that it writes."""
        for address in linked.mine.tensor_addrs:
            linked.compute.fill(address, ROW_NBYTES, 3)
        linked.compute.wait()
        simulator.add_fault("cuLaunchKernel:1=hang")
        task = linked.prefill.submit(Transfer(Rows(linked.mine, [0]), Rows(BlocksCacheKey(4), [6])))
        task.block_stream(linked.compute)
        for address in linked.mine.tensor_addrs:
            linked.compute.fill(address, ROW_NBYTES, 4)
        assert not linked.compute.is_done
        simulator.end_hangs()
        linked.compute.wait()
        task.wait(FOREVER)
        assert all((array[6] == row(3)).all() for array in linked.arrived())

    def test_a_transfer_over_tcp_is_refused(self, simulator: Controls) -> None:
        engine = OnCudaOverTcp if simulator.accelerator == "cuda" else OnDeviceOverTcp
        pair = Pair(simulator, engine)
        task = pair.prefill.submit(Transfer(Rows(pair.mine, [0]), Rows(BlocksCacheKey(4), [6])))
        with refused("LLM_FEATURE_NOT_ENABLED", "not moved by work on a device's streams"):
            task.block_stream(pair.compute)
        task.wait(FOREVER)
        pair.close()

    def test_a_push_by_layers_is_refused(self, linked: Pair) -> None:
        task = linked.prefill.layered(
            Transfer(Rows(linked.mine, [0]), Rows(BlocksCacheKey(4), [6]))
        )
        for layer in task.layers:
            task.ready(layer)
        with refused("LLM_FEATURE_NOT_ENABLED", "layers that move when they are ready"):
            task.block_stream(linked.compute)
        task.wait(FOREVER)


def test_streams_are_refused_without_an_accelerator() -> None:
    with LlmDataDist(2, LlmRole.MIX) as datadist:
        datadist.initialize(Options(accelerator="none"))
        task = datadist.submit(
            Transfer(
                Rows(datadist.allocate_blocks_cache(HOST), [0]),
                Rows(datadist.allocate_blocks_cache(HOST), [5]),
            )
        )
        with refused("LLM_FEATURE_NOT_ENABLED", r"stream=.*no accelerator.*kvplan.accelerator"):
            task.block_stream(SimpleNamespace(cuda_stream=16))
        task.wait(FOREVER)
