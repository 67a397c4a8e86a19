"""Layers move when they are ready: in any order, from any thread, and with one outcome."""

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvnative._host import Pin
from kvplan import (
    CacheDesc,
    Coalesce,
    DataType,
    HostMemory,
    KvCacheExtParam,
    LLMException,
    LLMStatusCode,
    Plan,
    Rows,
    Transfer,
    Transfers,
)
from kvplan.execution import LayerProgress, LayerTask
from kvplan.planning import reference
from tests.native.test_executor_concurrency import at_once
from tests.planning.transfers import transfers as any_transfer
from tests.support.refusals import refused
from tests.support.wrappers import delay, fail_at, limit_batch

DESC = CacheDesc(10, (8, 100), DataType.DT_UINT8)
PLAN = kvplan.plan(
    Transfer(
        Rows(DESC, [0, 1, 5]),
        Rows(DESC, [5, 3, 0]),
        layers=KvCacheExtParam(range(1, 5), range(4), 2),
        coalesce=Coalesce.NONE,
    ),
    local="src",
)
PER_LAYER = 6  # descriptors


def filled(seed: int, desc: CacheDesc = DESC) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (desc.tensor_nbytes,)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(desc.num_tensors)]


def expected(plan: Plan, src: list[np.ndarray], layers: set[int]) -> list[np.ndarray]:
    """Return `filled(2)` after the reference has moved these source layers."""
    dst = filled(2)
    for layer in layers:
        reference.execute(plan.for_layers(range(layer, layer + 1)), src, dst)
    return dst


def assert_equal(actual: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def transfers():
    with Transfers(2) as made:
        yield made


class InParts(HostMemory):
    """Memory of which some tensors may be lost."""

    lost = range(0)

    def check(self, tensors=None):
        if set(tensors or ()) & set(self.lost):
            raise LLMException("gone", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)


@pytest.mark.parametrize(("side", "lost"), [("src", range(6, 8)), ("dst", range(4, 6))])
def test_lost_tensors_end_the_task_with_the_layer_that_needs_them(transfers, side, lost):
    """Layer 3, which goes to layer 2, needs the lost tensors; other layers must not fail."""
    sides = {"src": InParts.from_arrays(filled(1)), "dst": InParts.from_arrays(filled(2))}
    task = transfers.layered(PLAN, **sides)
    sides[side].lost = lost
    for layer in (1, 2, 4):
        task.ready(layer)
    assert not task.done
    task.ready(3)
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "gone"):
        task.wait()


def test_a_layer_moves_when_it_is_ready_and_not_before(transfers):
    src, dst = filled(1), filled(2)
    task = transfers.layered(PLAN, src, dst)
    assert task.layers == range(1, 5)
    for moved in ({3}, {3, 1}, {3, 1, 4}):
        before = set(task.progress().done)
        (layer,) = moved - before
        for tensor in (2 * layer, 2 * layer + 1):
            src[tensor][:] = layer  # the final values, just before `ready`
        task.ready(layer)
        assert_equal(dst, expected(PLAN, src, moved))
        waiting = tuple(item for item in task.layers if item not in moved)
        assert task.progress() == LayerProgress(waiting, (), tuple(sorted(moved)), ())
        assert not task.done
    task.ready(2)
    assert task.done
    task.wait()
    assert_equal(dst, expected(PLAN, src, {1, 2, 3, 4}))


def test_ready_is_idempotent(transfers):
    src, dst = filled(1), filled(2)
    task = transfers.layered(PLAN, src, dst)
    task.ready(2)
    src[4][:] = 0
    task.ready(2)
    assert_equal(dst, expected(PLAN, filled(1), {2}))
    task.cancel()
    task.ready(1)
    task.ready(2)
    assert_equal(dst, expected(PLAN, filled(1), {2}))


@pytest.mark.parametrize("layer", [0, 5, -1, 2**70])
def test_a_layer_outside_of_the_plan_is_refused(transfers, layer):
    task = transfers.layered(PLAN, filled(1), filled(2))
    for _ in range(2):
        with refused(LLMStatusCode.LLM_PARAM_INVALID, rf"layer={layer} .* \[1, 5\)"):
            task.ready(layer)
        task.cancel()
    wrongs = [True, 1.0, "1", None, np.array([1])]
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # older versions accept it as an index
        wrongs.append(np.bool_(True))
    for wrong in wrongs:
        with pytest.raises(TypeError, match=r"layer=.* must be int"):
            task.ready(wrong)


def test_a_layer_may_be_an_integer_of_numpy(transfers):
    dst = filled(2)
    task = transfers.layered(PLAN, filled(1), dst)
    task.ready(np.int64(2))
    assert_equal(dst, expected(PLAN, filled(1), {2}))
    with pytest.raises(LLMException, match="layer=5 is not one"):
        task.ready(np.uint8(5))
    task.cancel()


def test_the_reason_of_a_cancellation_is_reported(transfers):
    reason = LLMException("no more paper", status_code=LLMStatusCode.LLM_PARAM_INVALID)
    task = transfers.layered(PLAN, filled(1), filled(2))
    task.ready(1)
    task.cancel(reason)
    task.cancel(LLMException("the second"))
    with refused(LLMStatusCode.LLM_PARAM_INVALID) as caught:
        task.wait()
    assert str(caught.value) == (
        "push_blocks B2B: no more paper; layers 2-4 were never ready; 18 of 24 descriptors are not "
        "confirmed (LLM_PARAM_INVALID)"
    )
    assert caught.value.unconfirmed == ((6, 24),)


def test_the_reason_of_a_late_cancellation_is_not_reported(transfers):
    task = transfers.layered(PLAN, filled(1), filled(2))
    for layer in task.layers:
        task.ready(layer)
    task.cancel(LLMException("no more paper"))
    task.wait()


def test_a_short_last_layer_moves(transfers):
    desc = CacheDesc(7, (4, 64), DataType.DT_UINT8)
    plan = kvplan.plan(
        Transfer(Rows(desc), Rows(desc), layers=KvCacheExtParam(None, None, 3), reinterpret=True),
        local="src",
    )
    src, dst, whole = filled(1, desc), filled(2, desc), filled(2, desc)
    task = transfers.layered(plan, src, dst)
    assert task.layers == range(3)
    for layer in (2, 0, 1):
        task.ready(layer)
    task.wait()
    reference.execute(plan, src, whole)
    assert_equal(dst, whole)
    assert task.explain().splitlines() == [
        "layer 0  3/3 desc  192 B",
        "layer 1  3/3 desc  192 B",
        "layer 2  1/1 desc  64 B",
        "LLM_SUCCESS",
    ]


SHARED = Transfers(2, wrap=lambda backend: limit_batch(backend, 3))


@given(
    any_transfer(), st.randoms(use_true_random=False), st.integers(1, 3), st.sampled_from(Coalesce)
)
def test_layers_leave_the_bytes_of_the_reference(example, order, threads, coalesce):
    """The layers of any plan become ready in random order, by up to three threads."""
    plan = example.plan(coalesce)
    src, dst = example.memory()
    whole = [tensor.copy() for tensor in dst]
    reference.execute(plan, whole if example.within else src, whole)
    outcomes = []
    layers = order.sample(plan.part.src_layers, len(plan.part.src_layers))
    task = SHARED.layered(plan, src, dst, on_outcome=outcomes.append)

    def make_ready(number):
        for layer in layers[number::threads]:
            task.ready(layer)

    if threads == 1:
        make_ready(0)
    else:
        at_once(make_ready, threads)
    task.wait()
    assert outcomes == [None]
    assert_equal(dst, whole)


def test_a_failure_names_the_origin_and_ends_the_task():
    with Transfers(wrap=lambda backend: fail_at(backend, 2 * PER_LAYER + 1)) as transfers:
        src, dst = filled(1), filled(2)
        task = transfers.layered(PLAN, src, dst)
        for layer in (1, 3, 4, 2):
            task.ready(layer)
        with pytest.raises(LLMException) as caught:
            task.wait()
    error = caught.value
    assert error.status_code is LLMStatusCode.LLM_FAILED
    assert str(error.origin) == "layer 3>2 tensor 6>4 block 1>3"
    assert error.unconfirmed == ((6, 12), (13, 24))
    assert "descriptor 13 (layer 3>2 tensor 6>4 block 1>3)" in str(error)
    assert "never ready" not in str(error)
    assert task.progress() == LayerProgress((2, 4), (), (1,), (3,))
    assert task.explain().splitlines()[:4] == [
        "layer 1  6/6 desc  600 B",
        "layer 2  0/6 desc  600 B",
        "layer 3  1/6 desc  600 B",
        "layer 4  0/6 desc  600 B",
    ]


def test_a_deadline_names_the_layers_that_were_never_ready(transfers):
    task = transfers.layered(PLAN, filled(1), filled(2))
    task.ready(2)
    with refused(LLMStatusCode.LLM_TIMEOUT) as caught:
        task.wait(timeout_ms=1)
    assert caught.value.unconfirmed == ((0, 6), (12, 24))
    assert str(caught.value) == (
        "push_blocks B2B: the deadline passed: 600 of 2400 bytes were moved, 18 of 24 descriptors "
        "are not confirmed; layers 1, 3-4 were never ready (LLM_TIMEOUT)"
    )


def test_a_deadline_may_leave_the_task_running(transfers):
    task = transfers.layered(PLAN, filled(1), filled(2))
    for layer in (1, 2, 3):
        task.ready(layer)
    for _ in range(2):
        with refused(LLMStatusCode.LLM_TIMEOUT) as caught:
            task.wait(timeout_ms=1, stop=False)
        assert str(caught.value) == (
            "push_blocks B2B: 1 ms passed when 1800 of 2400 bytes were moved; layer 4 was never "
            "ready; the transfer goes on (LLM_TIMEOUT)"
        )
        assert caught.value.unconfirmed == ((0, 24),)
    task.ready(4)
    task.wait(timeout_ms=1e6, stop=False)


def test_every_task_may_survive_a_deadline():
    with Transfers(wrap=lambda backend: delay(backend, 30)) as transfers:
        task = transfers.submit(PLAN, filled(1), filled(2))
        with refused(LLMStatusCode.LLM_TIMEOUT, "the transfer goes on"):
            task.wait(timeout_ms=0, stop=False)
        task.wait(timeout_ms=1e6, stop=False)


def test_a_task_is_explained_while_it_moves():
    with Transfers(wrap=lambda backend: fail_at(delay(backend, 1e9), 0)) as transfers:
        task = transfers.layered(PLAN, filled(1), filled(2))
        task.ready(4)
        task.ready(3)
        task.ready(1)
        assert task.explain() == (f"{PLAN!r} in flight\nwaiting  2\nmoving   3-4\nfailed   1")
        task.cancel()


def test_closing_cancels_tasks_that_wait_for_a_layer():
    transfers = Transfers(1)
    half, whole = (transfers.layered(PLAN, filled(1), filled(2)) for _ in range(2))
    half.ready(1)
    for layer in whole.layers:
        whole.ready(layer)
    transfers.close()
    whole.wait()
    with pytest.raises(LLMException, match="layers 2-4 were never ready"):
        half.wait()
    with refused(LLMStatusCode.LLM_ENGINE_FINALIZED, "closed"):
        transfers.layered(PLAN, filled(1), filled(2))


def test_memory_that_is_lost_between_two_layers_fails_the_task(transfers):
    class Watched(HostMemory):
        lost = False

        def check(self, tensors=None):
            if self.lost:
                raise LLMException("gone", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)

    src = Watched.from_arrays(filled(1))
    task = transfers.layered(PLAN, src, filled(2))
    task.ready(1)
    src.lost = True
    for layer in task.layers:
        task.ready(layer)
    with pytest.raises(LLMException, match="gone; no descriptor is confirmed") as caught:
        task.wait()
    assert caught.value.unconfirmed == ((0, 24),)
    with pytest.raises(LLMException, match="gone"):
        transfers.layered(PLAN, src, filled(2))


def test_each_tensor_of_a_layer_is_checked_when_it_is_ready(transfers):
    class Watched(HostMemory):
        checked: list[range]

        def check(self, tensors=None):
            if tensors is not None:
                self.checked.append(tensors)

    src, dst = Watched.from_arrays(filled(1)), Watched.from_arrays(filled(2))
    src.checked, dst.checked = [], []
    task = transfers.layered(PLAN, src, dst)
    for layer in (3, 1, 2, 4):
        task.ready(layer)
    task.wait()
    assert src.checked == [range(6, 8), range(2, 4), range(4, 6), range(8, 10)]
    assert dst.checked == [range(4, 6), range(2), range(2, 4), range(6, 8)]


def test_addresses_without_an_owner_are_checked_when_their_layer_is_ready(transfers):
    """Memory that is unmapped between two layers is an error that names the tensor, not a crash."""
    called_for = []
    with mmap.mmap(-1, 10 * mmap.PAGESIZE) as mapped:
        first = Pin(mapped).address
        addresses = [first + i * mmap.PAGESIZE for i in range(10)]
        src = HostMemory.from_addresses(DESC, addresses)
        assert not src.held
        dst = filled(2)
        task = transfers.layered(PLAN, src, dst, on_last=called_for.append)
        task.ready(1)
        task.ready(4)
    for layer in (3, 2):
        task.ready(layer)
    assert called_for == [task]
    with refused(LLMStatusCode.LLM_PARAM_INVALID) as caught:
        task.wait()
    assert caught.value.unconfirmed == ((0, 24),)
    assert f"tensor 6: address {addresses[6]:#x}" in str(caught.value)
    assert "not mapped; no descriptor is confirmed" in str(caught.value)
    assert task.progress() == LayerProgress((2, 3), (), (1, 4), ())


def test_a_layer_task_is_a_transfer_task(transfers):
    task = transfers.layered(PLAN, filled(1), filled(2))
    assert isinstance(task, LayerTask)
    assert repr(task) == f"<LayerTask in flight: {PLAN!r}>"
    task.cancel()
    assert repr(task) == f"<LayerTask done: {PLAN!r}>"
