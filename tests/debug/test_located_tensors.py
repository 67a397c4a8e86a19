"""Arguments of `locate` and `replay`: any form of cache, groups, foreign tensors, recordings."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    Rows,
    Transfer,
)
from kvplan.debug import locate, replay
from kvplan.debug.cells import tensors_of
from kvplan.layout import Shard
from kvplan.recording import read
from tests.debug.test_locate import DST, NHD, SRC, filled, moved
from tests.recording.operations import record, recorder
from tests.support.plans import joined
from tests.support.refusals import refused


def test_slots_and_opaque_rows() -> None:
    """Without a layout only rows can be named."""
    desc = CacheDesc(2, (3, 64), DataType.DT_FLOAT16)
    source = filled(desc, 1)
    plan = kvplan.plan(Transfer(Rows(desc, slot=2), Rows(desc, slot=1)), local="dst")
    found = moved(plan, source, [np.zeros(desc.shape, np.float16)] * 2)
    found[1][1, 32:] = source[1][0, 32:]
    first = replay(plan, source, found).first
    assert first is not None
    assert (first.heads, first.tokens, first.kv, first.row, first.src_row) == (None, None, "", 1, 2)
    assert first.holds == "what lies in slot 0 at the source, not of this request"


def test_no_block_table_of_a_slot_is_named() -> None:
    slots, blocks = (
        CacheDesc(2, shape, DataType.DT_FLOAT16, kv_tensor_format=f"{row} token dim")
        for row, shape in (("slot", (3, 4, 16)), ("block", (6, 2, 16)))
    )
    source = filled(slots, 1)
    plan = kvplan.plan(Transfer(Rows(slots, slot=2), Rows(blocks, [3, 1])), local="dst")
    found = moved(plan, source, [np.zeros(blocks.shape, np.float16)] * 2)
    found[1][1] = 0
    text = str(replay(plan, source, found))
    assert " wrote it, from slot 2 of " in text
    assert "src_blocks" not in text


def test_groups_are_compared_separately() -> None:
    latent = CacheDesc(2, (8, 4, 6), DataType.DT_FLOAT16, kv_tensor_format="block token dim")
    plan = joined(
        {
            "latent": kvplan.plan(
                Transfer(Rows(latent, [1, 2]), Rows(latent, [5, 6])), local="dst"
            ),
            "full": kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst"),
        }
    )
    source = [*filled(latent, 3), *filled(NHD, 1)]
    found = moved(plan, source, [np.zeros_like(item) for item in source])
    assert not replay(plan, source, found)
    found[2 + 1][20, 3, 1] = 7
    result = replay(plan, source, found)
    first = result.first
    assert first is not None
    assert (first.layer, first.kv, first.heads, first.tokens) == (0, "V", (1, 1), (51, 51))
    assert str(result).startswith("as expected: all 192 B that part latent: pull_blocks")


def test_caches_of_two_runs_may_differ_by_rounding() -> None:
    source = filled(NHD, 1)
    plan = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    right = moved(plan, source, [np.zeros(NHD.shape, np.float16)] * 4)
    near = [item + np.float16(1e-3) for item in right]
    near[0][7, 0, 0, 0] = right[0][7, 0, 0, 0] + 1
    assert locate(right, near, plan).differences[0].wrong_nbytes == plan.nbytes
    result = locate(right, near, plan, atol=0.01)
    assert result.first is not None
    assert (result.first.tokens, result.differences[0].wrong_nbytes) == ((0, 0), 16)


def test_a_difference_of_exactly_atol_is_accepted() -> None:
    plan = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    right = [np.ones(NHD.shape, np.float16) for _ in range(4)]
    assert not locate(right, [item + np.float16(0.5) for item in right], plan, atol=0.5)
    above = np.nextafter(np.float16(1.5), np.float16(2))
    wrong = locate(right, [np.full_like(item, above) for item in right], plan, atol=0.5)
    assert wrong.differences[0].wrong_nbytes == plan.nbytes


def test_a_copy_inside_of_a_cache_has_blocks_and_no_tokens() -> None:
    source = filled(NHD, 1)
    plan = kvplan.plan(Transfer(Rows(NHD, [1, 2]), Rows(NHD, [5, 6])))
    found = moved(plan, source, [np.zeros(NHD.shape, np.float16)] * 4)
    found[0][6] = source[0][1]
    first = replay(plan, source, found).first
    assert first is not None
    assert (first.tokens, first.row, first.holds) == (None, 6, "what is expected in block 5")


def test_copying_a_block_twice_is_not_a_mistake() -> None:
    plan = kvplan.plan(Transfer(Rows(NHD, [1, 1]), Rows(NHD, [5, 6])))
    found = moved(plan, source := filled(NHD, 1), [np.zeros(NHD.shape, np.float16)] * 4)
    found[0][6] = 0
    text = str(replay(plan, source, found))
    assert "from block 1 of src tensor 0\n" in text
    assert "more than once" not in text


def test_layers_have_their_numbers_in_the_model() -> None:
    desc = CacheDesc(
        4,
        (8, 4, 2, 6),
        DataType.DT_FLOAT16,
        kv_tensor_format="NHD",
        shard=Shard(layers=range(10, 12), heads=range(6, 8), num_layers=32, num_heads=8),
    )
    source = filled(desc, 1)
    plan = kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [5])), local="dst")
    found = moved(plan, source, [np.zeros(desc.shape, np.float16)] * 4)
    found[2][5, 3, 1] = 1
    first = replay(plan, source, found).first
    assert first is not None
    assert (first.layer, first.heads) == (11, (7, 7))


@given(
    rows=st.integers(1, 4),
    gap=st.integers(0, 40),
    form=st.sampled_from(["NHD", "HND", "block head token"]),
    data_type=st.sampled_from([DataType.DT_INT8, DataType.DT_INT4, DataType.DT_FLOAT16]),
    data=st.data(),
)
def test_each_wrong_byte_is_found_wherever_rows_begin(
    rows: int, gap: int, form: str, data_type: DataType, data: st.DataObject
) -> None:
    """The distance of rows is any number of bytes, so few begin at a multiple of the moved size."""
    shape = (rows, 2, 2, 8)[: 3 if form == "block head token" else 4]
    packed = CacheDesc(1, shape, data_type, kv_tensor_format=form)
    desc = replace(packed, row_stride=packed.tensor_nbytes // rows + gap)
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True))
    plan = kvplan.plan(Transfer(Rows(desc, chosen), Rows(desc, chosen)), local="dst")
    right = [np.zeros(desc.tensor_nbytes, np.uint8)]
    at = data.draw(st.integers(0, desc.tensor_nbytes - 1))
    wrong = [right[0].copy()]
    wrong[0][at] = 1
    (found,) = locate(right, wrong, plan).differences
    row, within = divmod(at, packed.tensor_nbytes // rows + gap)
    is_moved = row in chosen and within < packed.tensor_nbytes // rows
    assert bool(found.wrong_nbytes) is is_moved
    assert bool(found.elsewhere_nbytes) is not is_moved
    if is_moved:
        assert found.rows == (row,)


def test_tensors_that_do_not_fit_the_plan_are_refused() -> None:
    plan = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    right = filled(NHD, 1)
    with refused("LLM_PARAM_INVALID", "found has 3 tensors; the plan needs 4"):
        locate(right, right[:3], plan)
    with refused("LLM_PARAM_INVALID", r"source\[1\] has 2 bytes; the plan's tensors have 32768"):
        locate(right, right, plan, source=[right[0], np.zeros(1, np.float16), *right[2:]])
    with refused("LLM_PARAM_INVALID", "atol=-1 must be >= 0 and finite"):
        locate(right, right, plan, atol=-1)
    with pytest.raises(TypeError, match=r"expected\[0\] must be an array"):
        locate([[1.0]] * 4, right, plan)
    with pytest.raises(TypeError, match=r"expected\[0\] has dtype object: references to Python"):
        locate([right[0].astype(object)] * 4, right, plan)
    with pytest.raises(TypeError, match="found=ndarray must be a sequence of tensors"):
        locate(right, np.zeros(4), plan)
    numbers = CacheDesc(4, (32, 16, 4, 8), DataType.DT_INT8, kv_tensor_format="NHD")
    whole = [np.zeros(numbers.shape, np.int8)] * 4
    with refused("LLM_PARAM_INVALID", "atol=0.5 must be 0 for DT_INT8; other values are for"):
        locate(
            whole,
            whole,
            kvplan.plan(Transfer(Rows(numbers, SRC), Rows(numbers, DST)), local="dst"),
            atol=0.5,
        )
    slots = CacheDesc(1, (2, 64), DataType.DT_FLOAT16)
    cut = kvplan.plan(Transfer(Rows(slots, slot=0), Rows(slots, slot=0), nbytes=7), local="dst")
    whole = [np.zeros(slots.shape, np.float16)]
    with refused("LLM_PARAM_INVALID", "atol=0.5 must be 0: the plan moves, .* parts of elements"):
        locate(whole, whole, cut, atol=0.5)
    assert not locate(whole, whole, cut)


class Exported:
    """A tensor of another library, exported by DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_tensors_of_other_libraries_are_not_copied() -> None:
    source = filled(NHD, 1)
    plan = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    found = moved(plan, source, [np.zeros(NHD.shape, np.float16)] * 4)
    assert not replay(
        plan, [Exported(item) for item in source], [Exported(entry) for entry in found]
    )
    with refused("LLM_PARAM_INVALID", r"found\[0\] is not contiguous: strides"):
        locate(found, [Exported(entry.T) for entry in found], plan)


def test_a_recording_names_the_writer_of_the_wrong_block(tmp_path: Path) -> None:
    """Decode has pulled request 7, and then request 8 into one of its blocks."""
    with LlmDataDist(1, LlmRole.PROMPT) as prefill, LlmDataDist(2, LlmRole.DECODER) as decode:
        prefill.initialize({"llm.ListenIpInfo": "127.0.0.1:0"})
        decode.initialize()
        theirs = prefill.allocate_blocks_cache(NHD, BlocksCacheKey(1))
        mine = decode.allocate_blocks_cache(NHD)
        for tensor, values in zip(prefill.arrays(theirs), filled(NHD, 1), strict=True):
            tensor[:] = values
        assert prefill.listen_address is not None
        decode.link_clusters([ClusterInfo(1, prefill.listen_address)]).raise_for_status()
        key = BlocksCacheKey(1)
        plan = decode.plan(Transfer(Rows(key, SRC), Rows(mine, DST)))
        with decode.record(tmp_path / "decode.kvrec"):
            decode.pull_blocks(key, mine, SRC, DST, tag="request 7")
            decode.pull_blocks(key, mine, [25], [DST[2]], tag="request 8")
        recording = read(tmp_path / "decode.kvrec")
        source, found = prefill.arrays(theirs), decode.arrays(mine)
        result = replay(plan, source, found, recordings=[recording], cache_id=mine.cache_id)
    assert result.first is not None
    assert result.first.writes is not None
    assert [write.transfer.tag for write in result.first.writes] == ["request 7", "request 8"]
    assert str(result).splitlines()[-2:] == [
        f"  written last by #2 pull_blocks of request 8: from block 25 of cache "
        f"{theirs.cache_id} of cluster 1",
        f"  before that by #1 pull_blocks of request 7: from block 9 of cache "
        f"{theirs.cache_id} of cluster 1",
    ]
    with refused("LLM_PARAM_INVALID", "recordings need cache_id"):
        replay(plan, source, found, recordings=[recording])


PULLED = "pull_blocks: from block 9 of a cache of cluster 7"


@pytest.mark.parametrize(
    ("num_writes", "lines"),
    [
        (0, ["  no transfer that is recorded wrote it"]),
        (1, [f"  written last by #0 {PULLED}"]),
        (2, [f"  written last by #1 {PULLED}", f"  before that by #0 {PULLED}"]),
        (
            3,
            [
                f"  written last by #2 {PULLED}",
                f"  before that by #1 {PULLED}, and 1 more transfer",
            ],
        ),
    ],
)
def test_the_last_two_recorded_writes_are_named(
    tmp_path: Path, num_writes: int, lines: list[str]
) -> None:
    source = filled(NHD, 1)
    plan = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(Cache(NHD, 1), DST)), local="dst")
    with recorder(tmp_path / "decode.kvrec") as writer:
        for _ in range(num_writes):
            record(writer, plan)
    right = moved(plan, source, [np.zeros(NHD.shape, np.float16)] * 4)
    found = [item.copy() for item in right]
    found[0][DST[2]] += 1
    result = locate(right, found, plan, recordings=[read(tmp_path / "decode.kvrec")], cache_id=1)
    before = "  give source=, to know whether it was copied as planned or overwritten"
    assert str(result).splitlines()[-1 - len(lines) :] == [before, *lines]


def test_tensors_without_other_references_are_held() -> None:
    plan = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    given = [np.zeros(NHD.shape, np.float16) for _ in range(4)]
    tensors = [weakref.ref(tensor) for tensor in given]
    found = tensors_of("found", given, plan.parts, "dst")
    given.clear()
    assert all(held() is not None for held in tensors)
    del found
    assert not any(held() is not None for held in tensors)
