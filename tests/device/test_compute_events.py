"""Transfers, and layers of a push, that wait for events of a model's compute."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheIndex,
    LlmDataDist,
    LLMException,
    LlmRole,
    Options,
    Rows,
    Transfer,
)
from tests.ascend.simulator import Controls
from tests.device.compute import Compute, compute_on, handle_of
from tests.device.engines import DEVICE, HOST, NUM_TENSORS, engine_on
from tests.device.pair import A_WHILE, FOREVER, Pair, row, still_pending
from tests.support.refusals import refused

ROW_NBYTES = DEVICE.stride
FAILING_WAIT = {"ascend": ("aclrtStreamWaitEvent", 507899), "cuda": ("cuStreamWaitEvent", 999)}


class TestInside:
    """Copies inside one process."""

    def test_copies_wait_for_the_work_that_computes_their_source(
        self, datadist: LlmDataDist, compute: Compute
    ) -> None:
        cache = datadist.allocate_blocks_cache(DEVICE)
        host = datadist.allocate_blocks_cache(HOST)
        datadist.write_cache(cache, [np.zeros(DEVICE.shape, np.uint16)] * NUM_TENSORS)
        compute.hold()
        for tensor, address in enumerate(cache.tensor_addrs):
            compute.fill(address, ROW_NBYTES, tensor + 1)
        event = compute.event()
        tasks = [
            datadist.submit(Transfer(Rows(cache, [0, 0]), Rows(cache, [5, 6])), after=event),
            datadist.submit(Transfer(Rows(cache, [0]), Rows(host, [3])), tag="out", after=compute),
        ]
        compute.destroy(handle_of(event))
        assert all(still_pending(task) for task in tasks)
        compute.release()
        for task in tasks:
            task.wait(FOREVER)
        for tensor, (copied, swapped) in enumerate(
            zip(datadist.arrays(cache, copy=True), datadist.arrays(host), strict=True)
        ):
            assert (copied[[0, 5, 6]] == row(tensor + 1)).all()
            assert (swapped[3] == row(tensor + 1)).all()
            assert not copied[[1, 2, 3, 4, 7]].any()

    @pytest.mark.parametrize("is_handle", [False, True], ids=["object", "handle"])
    def test_a_copy_inside_host_memory_waits_for_an_event(
        self, is_handle: bool, datadist: LlmDataDist, compute: Compute
    ) -> None:
        cache = datadist.allocate_blocks_cache(HOST)
        compute.hold()
        event = compute.event()
        after = handle_of(event) if is_handle else event
        task = datadist.submit(Transfer(Rows(cache, [0]), Rows(cache, [5])), after=after)
        assert still_pending(task)
        for array in datadist.arrays(cache):
            array[0] = 4
        compute.release()
        task.wait(FOREVER)
        assert all((array[5] == 4).all() for array in datadist.arrays(cache))

    @pytest.mark.parametrize("of", [DEVICE, HOST], ids=["device", "host"])
    def test_a_copy_behind_an_event_that_never_comes_times_out(
        self, datadist: LlmDataDist, compute: Compute, of: Any
    ) -> None:
        cache = datadist.allocate_blocks_cache(of)
        before = datadist.arrays(cache, copy=True)
        compute.hold()
        task = datadist.submit(Transfer(Rows(cache, [0]), Rows(cache, [5])), after=compute.event())
        with refused("LLM_TIMEOUT", r"0 of \d+ bytes were moved") as caught:
            task.wait(A_WHILE)
        assert caught.value.unconfirmed == ((0, NUM_TENSORS),)
        compute.release()
        compute.wait()
        after = datadist.arrays(cache, copy=True)
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        datadist.submit(Transfer(Rows(cache, [0]), Rows(cache, [5])), after=compute).wait(FOREVER)

    @pytest.mark.parametrize("of", [DEVICE, HOST], ids=["device", "host"])
    def test_finalize_ends_a_copy_that_waits_for_an_event(
        self, simulator: Controls, of: Any
    ) -> None:
        with engine_on(simulator, sync_kv_cache_wait_time=30) as datadist:
            compute = compute_on(simulator)
            cache = datadist.allocate_blocks_cache(of)
            compute.hold()
            task = datadist.submit(
                Transfer(Rows(cache, [0]), Rows(cache, [5])), after=compute.event()
            )
            # The end waits in another thread: CUDA frees memory only after all work of the context.
            finalizing = threading.Thread(target=datadist.finalize)
            finalizing.start()
            with pytest.raises(LLMException, match=r"cancel|finalize"):
                task.wait(FOREVER)
            compute.release()
            finalizing.join()
            compute.settle()
            compute.close()  # the last user of the context
            del task, finalizing

    def test_memory_of_a_freed_cache_stays_reserved_until_its_transfer_ends(
        self, simulator: Controls, datadist: LlmDataDist, compute: Compute
    ) -> None:
        """No other cache gets the memory before the transfer has ended."""
        cache = datadist.allocate_blocks_cache(DEVICE)
        compute.hold()
        for address in cache.tensor_addrs:
            compute.fill(address, ROW_NBYTES, 7)
        task = datadist.submit(Transfer(Rows(cache, [0]), Rows(cache, [5])), after=compute.event())
        datadist.deallocate_cache(cache)
        other = datadist.allocate_blocks_cache(DEVICE)
        datadist.write_cache(other, [np.zeros(DEVICE.shape, np.uint16)] * NUM_TENSORS)
        assert still_pending(task)
        compute.release()
        task.wait(FOREVER)
        assert not any(array.any() for array in datadist.arrays(other, copy=True))


class TestBetween:
    """Transfers between two engines."""

    def test_a_push_waits_for_the_stream_that_computes_its_source(self, linked: Pair) -> None:
        compute = linked.compute
        compute.hold()
        for address in linked.mine.tensor_addrs:
            compute.fill(address, ROW_NBYTES, 3)
        task = linked.prefill.submit(
            Transfer(Rows(linked.mine, [0]), Rows(BlocksCacheKey(4), [6])), after=compute
        )
        assert still_pending(task)
        compute.release()
        task.wait(FOREVER)
        assert all((item[6] == row(3)).all() and not item[:6].any() for item in linked.arrived())

    def test_each_layer_waits_for_its_own_event(self, linked: Pair) -> None:
        compute = linked.compute
        task = linked.prefill.layered(
            Transfer(Rows(linked.mine, [0]), Rows(BlocksCacheKey(4), [6]))
        )
        for layer in task.layers:
            compute.hold()
            compute.fill(linked.mine.tensor_addrs[layer], ROW_NBYTES, layer + 1)
            task.ready(layer, compute.event() if layer % 2 else compute)
        for layer in task.layers:
            assert still_pending(task)
            assert task.progress().moving == tuple(range(layer, NUM_TENSORS))
            assert not any(item[6].any() for item in linked.arrived()[layer:])
            compute.release()
            while layer not in task.progress().done:
                task.wait_done(1)
            assert (linked.arrived()[layer][6] == row(layer + 1)).all()
        task.wait(FOREVER)

    def test_a_push_by_layers_behind_an_event_that_never_comes_times_out(
        self, linked: Pair
    ) -> None:
        compute = linked.compute
        task = linked.prefill.layered(
            Transfer(Rows(linked.mine, [0]), Rows(BlocksCacheKey(4), [6]))
        )
        compute.hold()
        for layer in task.layers:
            compute.fill(linked.mine.tensor_addrs[layer], ROW_NBYTES, layer + 1)
            task.ready(layer, compute.event())
        with refused("LLM_TIMEOUT"):
            task.wait(A_WHILE)
        compute.release()
        compute.wait()
        assert not any(item.any() for item in linked.arrived())
        linked.prefill.push_blocks(linked.mine, BlocksCacheKey(4), [0], [6])
        assert (linked.arrived()[2][6] == row(3)).all()

    def test_other_pushes_do_not_wait_for_a_held_one(self, linked: Pair) -> None:
        linked.compute.hold()
        held = linked.prefill.submit(
            Transfer(Rows(linked.mine, [0]), Rows(BlocksCacheKey(4), [6])), after=linked.compute
        )
        for _ in range(3):
            linked.prefill.push_blocks(linked.mine, BlocksCacheKey(4), [1], [5])
        assert still_pending(held)
        held.cancel()


class Raising:
    """An object that raises when one of its attributes is read."""

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute

    def __getattr__(self, name: str) -> Any:
        if name == self.attribute:
            raise RuntimeError("it lies")
        raise AttributeError(name)


class TestRefused:
    @pytest.mark.parametrize(
        ("event", "message"),
        [
            ("an event", "after='an event' must be an event or a stream.* not str"),
            (True, "after=True must be an event or a stream.* not bool"),
            (1.5, "not float"),
        ],
    )
    def test_values_that_are_not_events_are_refused(
        self, datadist: LlmDataDist, event: Any, message: str
    ) -> None:
        cache = datadist.allocate_blocks_cache(DEVICE)
        with pytest.raises(TypeError, match=message):
            datadist.submit(Transfer(Rows(cache, [0]), Rows(cache, [5])), after=event)

    def test_events_with_a_wrong_attribute_or_handle_are_refused(
        self, simulator: Controls, datadist: LlmDataDist
    ) -> None:
        prefix, other = ("npu", "cuda") if simulator.accelerator == "ascend" else ("cuda", "npu")
        cache = datadist.allocate_blocks_cache(DEVICE)
        for event, message in (
            (SimpleNamespace(**{f"{other}_event": 16}), f"another accelerator: it has {other}_ev"),
            (SimpleNamespace(**{f"{other}_stream": 16}), "another accelerator"),
            (SimpleNamespace(**{f"{prefix}_event": 0}), "was never recorded"),
            (SimpleNamespace(**{f"{prefix}_event": "x"}), r"event of SimpleNamespace must be an"),
            (SimpleNamespace(**{f"{prefix}_event": True}), r"after=True: .* must be an int in \[0"),
            (SimpleNamespace(**{f"{prefix}_stream": True}), "after=True: .* must be an int"),
            (SimpleNamespace(**{f"{prefix}_event": np.zeros(2)}), r"event of SimpleNamespace must"),
            (SimpleNamespace(**{f"{prefix}_stream": -1}), r"must be an int in \[0, 2\*\*64\)"),
            (Raising(f"{prefix}_event"), f"{prefix}_event cannot be read: RuntimeError: it lies"),
            (Raising(f"{other}_stream"), f"{other}_stream cannot be read: RuntimeError: it lies"),
            (0, r"after=0: the handle of an event must be an int in \[1, 2\*\*64\)"),
            (1 << 64, "the handle of an event must be an int in"),
        ):
            with refused("LLM_PARAM_INVALID", message):
                datadist.submit(Transfer(Rows(cache, [0]), Rows(cache, [5])), after=event)  # type: ignore[arg-type]
        datadist.copy_blocks(cache, {0: [5]})

    @pytest.mark.parametrize("simulator", ["cuda"], indirect=True)
    @pytest.mark.parametrize(
        ("named", "message"),
        [
            (lambda: (1, 0), "speaks version 1; kvplan reads version 0"),
            (lambda: (0, -1), r"must be an int in \[0, 2\*\*64\)"),
            (lambda: 0, r"__cuda_stream__\(\) cannot be read: TypeError"),
            (lambda: (0,), r"__cuda_stream__\(\) cannot be read: ValueError"),
            (3, r"__cuda_stream__\(\) cannot be read: TypeError"),
        ],
    )
    def test_malformed_cuda_stream_protocols_are_refused(
        self, datadist: LlmDataDist, named: Any, message: str
    ) -> None:
        cache = datadist.allocate_blocks_cache(DEVICE)
        with refused("LLM_PARAM_INVALID", f"after=.*{message}"):
            datadist.submit(
                Transfer(Rows(cache, [0]), Rows(cache, [5])),
                after=SimpleNamespace(__cuda_stream__=named),
            )

    @pytest.mark.parametrize("simulator", ["ascend"], indirect=True)  # CUDA may crash
    def test_events_that_the_device_does_not_know_are_refused(
        self, simulator: Controls, datadist: LlmDataDist, compute: Compute
    ) -> None:
        cache = datadist.allocate_blocks_cache(DEVICE)
        event = compute.event()
        compute.destroy(handle_of(event))
        elsewhere = compute_on(simulator, 4)
        for given, code in (
            (event, 107017),
            (handle_of(event), 107017),
            (elsewhere, 107003),
        ):
            with refused("LLM_PARAM_INVALID", f"after=.* on device 3: .* {code}"):
                datadist.submit(Transfer(Rows(cache, [0]), Rows(cache, [5])), after=given)
        elsewhere.close()

    def test_a_device_that_fails_is_not_the_fault_of_the_event(
        self, simulator: Controls, datadist: LlmDataDist, compute: Compute
    ) -> None:
        cache = datadist.allocate_blocks_cache(DEVICE)
        call, code = FAILING_WAIT[simulator.accelerator]
        simulator.add_fault(f"{call}:1={code}")
        with refused("LLM_FAILED", f"after=.* on device 3: {call}: {code}"):
            datadist.submit(Transfer(Rows(cache, [0]), Rows(cache, [5])), after=compute.event())

    def test_a_refused_event_leaves_its_layer_waiting(self, linked: Pair) -> None:
        task = linked.prefill.layered(
            Transfer(Rows(linked.mine, [0]), Rows(BlocksCacheKey(4), [6]))
        )
        with pytest.raises(TypeError, match="event='now' must be an event or a stream"):
            task.ready(0, "now")  # type: ignore[arg-type]
        assert task.progress().waiting == tuple(task.layers)
        task.cancel()

    def test_events_are_refused_without_an_accelerator(self) -> None:
        with LlmDataDist(2, LlmRole.MIX) as datadist:
            datadist.initialize(Options(accelerator="none"))
            cache: Cache = datadist.allocate_blocks_cache(HOST)
            with refused("LLM_FEATURE_NOT_ENABLED", r"after=16: .* no accelerator.*accelerator"):
                datadist.submit(Transfer(Rows(cache, [0]), Rows(cache, [5])), after=16)
            with refused("LLM_FEATURE_NOT_ENABLED", r"after=16: .* no accelerator.*accelerator"):
                datadist.submit(Transfer([Rows(CacheIndex(4, 1), [0])], Rows(cache, [5])), after=16)
