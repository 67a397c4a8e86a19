"""Native execution against the NumPy reference: identical bytes for every plan."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import (
    Cache,
    CacheDesc,
    Coalesce,
    DataType,
    HostMemory,
    KvCacheExtParam,
    LLMException,
    LLMStatusCode,
    Rows,
    Transfer,
    Transfers,
)
from kvplan.planning import reference
from tests.support.refusals import refused
from tests.support.wrappers import delay, fail_at, limit_bandwidth

DESC = CacheDesc(4, (12, 3, 64), DataType.DT_UINT8)


def filled(desc: CacheDesc, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (desc.tensor_nbytes,)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(desc.num_tensors)]


@st.composite
def transfers(draw: st.DrawFn) -> tuple[kvplan.Plan, CacheDesc, CacheDesc]:
    """Draw a plan of any kind, perhaps cut to layers, and the descriptions of its caches."""
    layers, per_layer = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rows, row = draw(st.integers(1, 20)), draw(st.integers(1, 5000))
    desc = CacheDesc(layers * per_layer, (rows, row), DataType.DT_UINT8)
    first = draw(st.integers(0, layers - 1))
    cut = range(first, draw(st.integers(first + 1, layers)))
    options = {
        "layers": KvCacheExtParam(cut, cut, per_layer),
        "coalesce": draw(st.sampled_from(Coalesce)),
    }
    order = draw(st.permutations(range(rows)))
    count = draw(st.integers(1, rows))
    match draw(st.sampled_from(["C2C", "C2B", "B2B"])):
        case "C2C":
            slot = st.integers(0, rows - 1)
            src, dst = Rows(desc, slot=draw(slot)), Rows(desc, slot=draw(slot))
            return kvplan.plan(Transfer(src, dst, **options), local="dst"), desc, desc
        case "C2B":
            slots = CacheDesc(desc.num_tensors, (2, count * row - row // 2), DataType.DT_UINT8)
            transfer = Transfer(Rows(slots, slot=1), Rows(desc, order[:count]), **options)
            return kvplan.plan(transfer, local="src"), slots, desc
        case _:
            src = draw(st.lists(st.integers(0, rows - 1), min_size=count, max_size=count))
            transfer = Transfer(Rows(desc, src), Rows(desc, order[:count]), **options)
            return kvplan.plan(transfer, local="dst"), desc, desc


@given(transfers())
def test_execution_leaves_the_bytes_of_the_reference(case):
    plan, src_desc, dst_desc = case
    src, expected, actual = filled(src_desc, 1), filled(dst_desc, 2), filled(dst_desc, 2)
    reference.execute(plan, src, expected)
    kvplan.execute(plan, src, actual)
    for tensor in range(dst_desc.num_tensors):
        np.testing.assert_array_equal(actual[tensor], expected[tensor])


def test_submit_returns_a_task_that_succeeds():
    src, dst = filled(DESC, 1), filled(DESC, 2)
    task = kvplan.submit(
        kvplan.plan(Transfer(Rows(DESC, [0, 1]), Rows(DESC, [5, 3])), local="dst"), src, dst
    )
    task.wait(timeout_ms=10_000)
    assert task.done
    assert task.explain().endswith("LLM_SUCCESS")
    np.testing.assert_array_equal(dst[3].reshape(12, -1)[[5, 3]], src[3].reshape(12, -1)[[0, 1]])


def test_a_failure_names_the_origin_and_the_unconfirmed_bytes():
    plan = kvplan.plan(Transfer(Rows(DESC, [0, 4, 8]), Rows(DESC, [6, 3, 0])), local="dst")
    with Transfers(wrap=lambda backend: fail_at(backend, 7)) as transfers:
        task = transfers.submit(plan, filled(DESC, 1), filled(DESC, 2))
        with pytest.raises(LLMException) as caught:
            task.wait()
    error = caught.value
    assert error.status_code is LLMStatusCode.LLM_FAILED
    assert str(error.origin) == "layer 1>1 tensor 2>2 block 4>3"
    assert error.unconfirmed == ((7, 12),)
    assert "descriptor 7 (layer 1>1 tensor 2>2 block 4>3)" in str(error)
    assert task.explain().splitlines()[:2] == [
        "layer 0  6/6 desc  1.1 KiB",
        "layer 1  1/6 desc  1.1 KiB",
    ]


def test_a_deadline_that_passes_is_a_timeout_and_stops_the_transfer():
    desc = CacheDesc(2, (64, 1 << 14), DataType.DT_UINT8)
    src, dst = filled(desc, 1), [np.zeros(desc.tensor_nbytes, np.uint8) for _ in range(2)]
    plan = kvplan.plan(
        Transfer(Rows(desc, range(64)), Rows(desc, range(64)), coalesce=Coalesce.NONE), local="dst"
    )
    with Transfers(wrap=lambda backend: limit_bandwidth(backend, 1 << 20)) as transfers:
        with refused(LLMStatusCode.LLM_TIMEOUT) as caught:
            transfers.execute(plan, src, dst, timeout_ms=20)
        assert str(caught.value).count("confirmed") == 1  # not repeated
        assert caught.value.unconfirmed
        before = [array.copy() for array in dst]
    for array, earlier in zip(dst, before, strict=True):
        np.testing.assert_array_equal(array, earlier)


def test_a_cancelled_task_never_reports_success():
    with Transfers(wrap=lambda backend: delay(backend, 60_000)) as transfers:
        task = transfers.submit(
            kvplan.plan(Transfer(Rows(DESC, [0]), Rows(DESC, [1])), local="dst"),
            filled(DESC, 1),
            filled(DESC, 2),
        )
        assert not task.done
        task.cancel()
        with pytest.raises(LLMException, match="cancel"):
            task.wait()


def test_memory_outlives_a_dropped_handle():
    class Owned(np.ndarray):
        """An ndarray that can be weakly referenced, and records when it is freed."""

    src = [array.view(Owned) for array in filled(DESC, 1)]
    dst = filled(DESC, 2)
    gone = weakref.ref(src[0])
    transfers = Transfers(wrap=lambda backend: delay(backend, 60_000))
    transfers.submit(kvplan.plan(Transfer(Rows(DESC, [0]), Rows(DESC, [1])), local="dst"), src, dst)
    del src
    gc.collect()
    assert gone() is not None
    transfers.close(cancel=True)
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (filled(DESC, 1)[:3], filled(DESC, 2), "src has 3 tensors; the plan needs 4"),
        (filled(DESC, 1), [a[:-1] for a in filled(DESC, 2)], "dst tensor 0 has 2303 bytes"),
        ([np.ones((48, 96), np.uint8)[:, ::2]] * 4, filled(DESC, 2), "C-contiguous"),
        (Cache(DESC, 1, (4096,) * 4), filled(DESC, 2), "not mapped"),
    ],
)
def test_memory_that_does_not_fit_is_refused(src, dst, message):
    with refused(LLMStatusCode.LLM_PARAM_INVALID, message):
        kvplan.execute(
            kvplan.plan(Transfer(Rows(DESC, [0]), Rows(DESC, [1])), local="dst"), src, dst
        )


def test_a_read_only_destination_is_refused():
    dst = filled(DESC, 2)
    dst[2].flags.writeable = False
    with pytest.raises(LLMException, match="dst is read-only"):
        kvplan.execute(
            kvplan.plan(Transfer(Rows(DESC, [0]), Rows(DESC, [1])), local="dst"),
            filled(DESC, 1),
            dst,
        )


@pytest.mark.parametrize("memory", ["abc", 7, None, [1, 2, 3, 4]])
def test_a_value_that_is_not_memory_is_a_type_error(memory):
    with pytest.raises(TypeError):
        kvplan.execute(
            kvplan.plan(Transfer(Rows(DESC, [0]), Rows(DESC, [1])), local="dst"),
            memory,
            filled(DESC, 2),
        )


class TestOverlap:
    """Shared memory of two caches, which a plan cannot see."""

    plan = kvplan.plan(Transfer(Rows(DESC, [0, 1]), Rows(DESC, [1, 2])), local="dst")

    def test_reading_what_is_written_is_refused(self):
        arrays = filled(DESC, 1)
        with pytest.raises(LLMException, match=r"block 0>1 writes bytes that .* block 1>2 reads"):
            kvplan.execute(
                kvplan.plan(
                    Transfer(Rows(DESC, [0, 1]), Rows(DESC, [1, 2]), coalesce=Coalesce.NONE),
                    local="dst",
                ),
                arrays,
                arrays,
            )

    def test_one_tensor_twice_as_destination_is_refused(self):
        dst = filled(DESC, 2)
        with pytest.raises(LLMException, match="dst tensors overlap in memory"):
            kvplan.execute(self.plan, filled(DESC, 1), [dst[0], dst[1], dst[0], dst[3]])

    def test_one_tensor_twice_as_source_is_accepted(self):
        src, dst = filled(DESC, 1), filled(DESC, 2)
        kvplan.execute(self.plan, [src[0]] * 4, dst)
        np.testing.assert_array_equal(dst[3].reshape(12, -1)[1], src[0].reshape(12, -1)[0])

    def test_disjoint_blocks_of_one_cache_are_accepted(self):
        arrays = filled(DESC, 1)
        before = [array.copy() for array in arrays]
        kvplan.execute(
            kvplan.plan(Transfer(Rows(DESC, [0, 0]), Rows(DESC, [1, 2]))), arrays, arrays
        )
        np.testing.assert_array_equal(arrays[1].reshape(12, -1)[2], before[1].reshape(12, -1)[0])

    def test_a_slot_onto_itself_changes_nothing(self):
        arrays = filled(DESC, 1)
        before = [array.copy() for array in arrays]
        kvplan.execute(kvplan.plan(Transfer(Rows(DESC), Rows(DESC))), arrays, arrays)
        for array, earlier in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, earlier)


def test_memory_made_once_serves_many_plans():
    sources, targets = filled(DESC, 1), filled(DESC, 2)
    src, dst = HostMemory.from_arrays(sources), HostMemory.from_arrays(targets)
    for block in range(12):
        kvplan.execute(
            kvplan.plan(Transfer(Rows(DESC, [block]), Rows(DESC, [11 - block])), local="dst"),
            src,
            dst,
        )
    for source, target in zip(sources, targets, strict=True):
        np.testing.assert_array_equal(target.reshape(12, -1), source.reshape(12, -1)[::-1])


def test_any_buffer_is_memory():
    raw = [bytes(range(256)) * 9 for _ in range(4)]
    dst = [bytearray(DESC.tensor_nbytes) for _ in range(4)]
    kvplan.execute(kvplan.plan(Transfer(Rows(DESC), Rows(DESC, slot=3))), raw, dst)
    assert dst[0][3 * 192 : 4 * 192] == raw[0][:192]
